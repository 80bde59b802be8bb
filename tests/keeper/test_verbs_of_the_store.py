"""``%gpuckpt diff``, ``log``, ``mv``, ``pin`` and ``tag``: the store's verbs in a notebook, on snapshots of kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
from keeper_faults import names, store
from notebooks import Notebook

from jupyter_gpuckpt.keeper.comparison import compare
from jupyter_gpuckpt.store import Store

STATE = """
import numpy, os
from types import SimpleNamespace
class Odd:
    def __len__(self): raise SystemExit
    __getattr__ = __sizeof__ = __len__
untouched = numpy.arange(2_000_000)
in_place = numpy.zeros(2_000_000)
grows, bound, gone, password = [1], 'one', 1, 'hunter2-secret'
odd = Odd()
"""
CHANGE = """
in_place += 1
grows.append(2); bound = 'two'; del gone; fresh = numpy.ones((3, 4))
f = open(fresh_file)
"""


@pytest.fixture
def compared(notebook: Notebook, tmp_path: Path) -> Notebook:
    """A kernel with two snapshots, `a` and `b`, that differ."""
    path = tmp_path / "fresh.txt"
    path.touch()
    notebook.run(STATE + f"fresh_file = {str(path)!r}")
    notebook.run("%gpuckpt save a")
    notebook.run(CHANGE)
    notebook.run("%gpuckpt save b")
    return notebook


def test_what_changed_is_told_by_variable_memory_and_file(compared: Notebook, tmp_path: Path) -> None:
    found = compare(Store(store()), "a", "b")
    changes = {one["name"]: one["how"] for one in found["variables"]}
    assert changes == {
        "in_place": "other contents",
        "grows": "another shape",
        "bound": "another object",
        "gone": "gone",
        "fresh": "new",
        "f": "new",
    }
    assert next(one["new"] for one in found["variables"] if one["name"] == "fresh") == {
        "type": "numpy.ndarray",
        "size": 96,
        "shape": [3, 4],
        "dtype": "float64",
    }
    anonymous = next(row for row in found["memory"] if row["area"] == "anonymous memory")
    assert 16_000_000 <= anonymous["changed"] <= anonymous["new"]
    assert {"path": str(tmp_path / "fresh.txt"), "how": "used now"} in found["used_files"]
    said = compared.run("%gpuckpt diff a b").text
    for word in ("in_place", "other contents", "numpy.ndarray (3, 4) float64", "anonymous memory", "fresh.txt"):
        assert word in said
    # What is written down of variables says nothing of what they hold.
    _, contents, read = Store(store()).read_files("b", ["variables.json"])
    assert b"password" in read["variables.json"]
    assert b"hunter2" not in read["variables.json"]
    assert contents.size_of("variables.json") < 10_000
    # Two snapshots of kernels that never were one: where an object lies says nothing.
    compared.manager.restart_kernel()
    compared.wait_for_ready()
    compared.run(STATE)
    compared.run("%gpuckpt save stranger")
    assert {v["how"] for v in compare(Store(store()), "a", "stranger")["variables"]} == {"gone"}


def test_the_store_is_kept_in_order_from_a_notebook(notebook: Notebook) -> None:
    notebook.run("%gpuckpt save first -m beginning")
    notebook.run("%gpuckpt save second")
    notebook.run("%gpuckpt restore first")
    notebook.run("%gpuckpt save other")
    drawn = [line.split("  ")[0] for line in notebook.run("%gpuckpt log").text.splitlines()]
    assert drawn == ["* first", "|\\ * second", "* other"]
    assert "beginning" in notebook.run("%gpuckpt log").text
    assert notebook.run("%gpuckpt mv other branch").text == "other is now branch."
    assert names() == {"first", "second", "branch"}
    assert notebook.run("%gpuckpt pin branch").text == "Pinned branch."
    assert notebook.run("%gpuckpt tag branch good best --remove good").text == "branch: best"
    assert "pinned best" in notebook.run("%gpuckpt list").text
    assert notebook.fails("%gpuckpt rm branch").ename == "Pinned"
    assert notebook.run("%gpuckpt unpin branch").text == "Unpinned branch."
    notebook.run("%gpuckpt rm branch")
    assert notebook.fails("%gpuckpt mv gone away").ename == "NoSuchSnapshot"


def test_the_panel_says_what_it_needs(notebook: Notebook) -> None:
    notebook.run("import sys; sys.modules['anywidget'] = None")
    answer = notebook.fails("%gpuckpt panel")
    assert answer.ename == "Unavailable"
    assert "Run `pip install anywidget`" in answer.text
