"""``%gpuckpt diff``, ``log``, ``mv``, ``note``, ``pin`` and ``tag``: in a notebook, on snapshots of kernels."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from command_line import run
from keeper_faults import names, store
from notebooks import Notebook

from jupyter_gpuckpt.operations.results import FileChange, Variable
from jupyter_gpuckpt.snapshots.comparison import compare
from jupyter_gpuckpt.store import Store

STATE = """
import mmap, numpy, os
from types import SimpleNamespace
class Odd:
    def __len__(self): raise SystemExit
    __getattr__ = __sizeof__ = __len__
untouched = numpy.arange(2_000_000)
in_place = numpy.zeros(2_000_000)
few = numpy.zeros(10)
shared = numpy.frombuffer(mmap.mmap(-1, 4096), numpy.int8)
retyped = numpy.zeros(5)
grows, bound, gone, password = [1], 'one', 1, 'hunter2-secret'
twice = 1.25
order = ['first', 'second']
odd = Odd()
still_too = {'name': 'x', 'layers': [2, 1]}
class Net:
    def __init__(self): self.layers = [{'weights': numpy.zeros(100), 'bias': 0.5} for _ in range(300)]
net, still, config, rng = Net(), Net(), {'lr': [0.1], 'layers': 3}, numpy.random.default_rng(0)
"""
CHANGE = """
in_place += 1; few[9] = 1; shared[0] = 1
net.layers[200]['weights'][50] = 1; config['lr'][0] = 0.01; rng.random(); order.reverse()
at = id(twice)
for n in range(1000):
    twice = n + 0.5
    if id(twice) == at: break
del n, at
retyped = numpy.zeros((5, 1), 'int8')
grows.append(2); bound = 'two'; del gone; fresh = numpy.ones((3, 4))
f = open(fresh_file)
import xml.parsers.expat
_mapped = mmap.mmap(os.open(_library, os.O_RDONLY), 4096, prot=mmap.PROT_READ)
"""


@pytest.fixture
def compared(notebook: Notebook, tmp_path: Path) -> Notebook:
    """A kernel with two snapshots, `a` and `b`, that differ."""
    path = tmp_path / "fresh.txt"
    path.touch()
    without_build_id = tmp_path / "libodd-1a2b.so.3"
    without_build_id.write_bytes(bytes(4096))
    notebook.run(STATE + f"fresh_file, _library = {str(path)!r}, {str(without_build_id)!r}")
    notebook.run("%gpuckpt save a")
    notebook.run(CHANGE)
    notebook.run("%gpuckpt save b")
    return notebook


def test_what_changed_is_told_by_variable_memory_and_file(compared: Notebook, tmp_path: Path) -> None:
    found = compare(Store(store()), "a", "b")
    # What changed first, then what is new, then what is gone; the largest first.
    assert [(one.name, one.how) for one in found.variables] == [
        ("in_place", "contents changed"),
        ("net", "contents changed"),
        ("config", "contents changed"),
        ("grows", "length changed"),
        ("few", "contents changed"),
        ("order", "contents changed"),
        ("bound", "reassigned"),
        ("retyped", "shape and dtype changed"),
        ("twice", "contents changed"),
        ("fresh", "new"),
        ("f", "new"),
        ("xml", "new"),
        ("gone", "deleted"),
    ]
    # Nothing is said to be the same that was not compared: what shares its memory with others, or is not looked into.
    assert found.not_compared == ["rng", "shared"]
    assert found.unchanged is not None
    assert found.unchanged >= len(["untouched", "password", "numpy", "odd", "still", "still_too", "Net"])
    assert next(one.new for one in found.variables if one.name == "fresh") == Variable(
        type="numpy.ndarray", size=96, shape=[3, 4], dtype="float64"
    )
    anonymous = next(row for row in found.memory if row.area == "anonymous memory")
    assert 16_000_000 <= anonymous.changed <= (anonymous.new or 0)
    # Libraries are neither memory nor files that anybody wants to know of.
    assert found.used_files == [FileChange(path=str(tmp_path / "fresh.txt"), how="in use")]
    assert not [row for row in found.memory if ".so" in (row.area or "")]
    said = compared.run("%gpuckpt diff a b").text.splitlines()
    assert said[0].startswith("Variables: 9 changed, 3 new, 1 deleted, ")
    assert said[1] == "May have changed: rng, shared (only types and sizes are known)."
    assert said[2].startswith("b differs from a by ")
    assert [line.split()[0] for line in said[5:8]] == ["in_place", "net", "config"]
    assert "Net with 300 arrays, 240 kB" in said[6]
    assert "ndarray (3, 4) float64" in next(line for line in said if line.startswith("fresh "))
    assert said[-1].split() == [str(tmp_path / "fresh.txt"), "in", "use"]
    # What is written down of variables says nothing of what they hold.
    _, contents, read = Store(store()).read_files("b", ["variables.json"])
    assert b"password" in read["variables.json"]
    assert b"hunter2" not in read["variables.json"]
    assert contents.size_of("variables.json") < 50_000
    # Two snapshots of kernels that never were one: where an object lies says nothing.
    compared.manager.restart_kernel()
    compared.wait_for_ready()
    compared.run(STATE)
    compared.run("%gpuckpt save stranger")
    other = compare(Store(store()), "a", "stranger")
    assert [(v.name, v.how) for v in other.variables] == [("fresh_file", "deleted")]
    assert (other.same_origin, other.unchanged) == (False, 0)
    assert {"untouched", "bound"} <= set(other.not_compared)


def test_the_store_is_kept_in_order_from_a_notebook(notebook: Notebook) -> None:
    notebook.run("%gpuckpt save first -m beginning")
    notebook.run("%gpuckpt save second")
    notebook.run("%gpuckpt restore first")
    notebook.run("%gpuckpt save other")
    drawn = [line.split("  ")[0] for line in notebook.run("%gpuckpt log").text.splitlines()]
    assert drawn == ["* other (here)", "| * second", "|/", "* first"]
    listed = [line.split()[0] for line in notebook.run("%gpuckpt list").text.splitlines() if " here" in line]
    assert listed == ["other"]
    assert "* other (here: kernel " in run("log").out
    assert "beginning" in notebook.run("%gpuckpt log").text
    assert notebook.run("%gpuckpt mv other branch").text == "other is now branch."
    assert names() == {"first", "second", "branch"}
    assert notebook.run("%gpuckpt pin branch").text == "Pinned branch."
    assert notebook.run('%gpuckpt note branch "the best" so far').text == "branch: the best so far"
    assert "the best so far" in notebook.run("%gpuckpt list").text
    assert notebook.run('%gpuckpt note branch ""').text == "branch: no note"
    assert notebook.run("%gpuckpt tag branch good best --remove good").text == "branch: best"
    assert "pinned best" in notebook.run("%gpuckpt list").text
    assert notebook.fails("%gpuckpt rm branch").ename == "Pinned"
    assert notebook.run("%gpuckpt unpin branch").text == "Unpinned branch."
    notebook.run("%gpuckpt rm branch")
    assert "Would remove first: " in notebook.run("%gpuckpt keep --last 1 --dry-run").text
    assert names() == {"first", "second"}
    assert "Removed first: " in notebook.run("%gpuckpt keep --last 1").text
    assert names() == {"second"}
    assert notebook.run("%gpuckpt keep --under 1T").text == "Nothing has to be removed."
    assert notebook.fails("%gpuckpt mv gone away").ename == "NoSuchSnapshot"


def test_the_panel_says_what_it_needs(notebook: Notebook) -> None:
    notebook.run("import sys; sys.modules['anywidget'] = None")
    answer = notebook.fails("%gpuckpt panel")
    assert answer.ename == "Unavailable"
    assert "Run `pip install anywidget`" in answer.text


def test_a_note_steers_nothing_that_it_is_shown_in(notebook: Notebook) -> None:
    """Such as the terminal of `jupyter console`; nor does it look like another snapshot's line."""
    note = "\x1b]0;title\x07\x1b[2Jnote\n* faked (here)\u202eeman"
    save = f"save evil -m {shlex.quote(note)}"
    notebook.run(f"get_ipython().run_line_magic('gpuckpt', {save!r})")
    assert Store(store()).get("evil").message == note
    for verb in ("list", "log", "show evil", "restore evil"):
        answer = notebook.run(f"%gpuckpt {verb}")
        assert "faked" in answer.text, verb
        for shown in (*answer.shown, *answer.html):
            assert [sign for sign in shown if not sign.isprintable() and sign != "\n"] == [], verb
        assert not any(line.startswith("* faked") for line in answer.text.splitlines()), verb
