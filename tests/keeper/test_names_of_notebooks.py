"""Names belong to notebooks: two can have the same, and none is put back to another's snapshot unless one says so."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from copies import Copy
from notebooks import Notebook, StartKernel

from jupyter_gpuckpt import settings
from jupyter_gpuckpt.store import Store

pytestmark = pytest.mark.criu

Open = Callable[[str], Notebook]


@pytest.fixture
def open_(start: StartKernel) -> Open:
    """Start the kernel of a notebook, as Jupyter Server does; without a path as nbclient and consoles do."""

    def open_(path: str = "") -> Notebook:
        notebook = start(env={**os.environ, **({"JPY_SESSION_NAME": path} if path else {})})
        notebook.run(f"x = {path!r}")
        return notebook

    return open_


def _names(notebook: Notebook) -> list[str]:
    """Return the first words of the lines of `%gpuckpt list`."""
    return [line.split()[0] for line in notebook.run("%gpuckpt list").text.splitlines()[1:]]


def test_two_notebooks_have_the_same_name_each_and_neither_is_put_back_to_the_others_unasked(open_: Open) -> None:
    a, b = open_("/home/me/a.ipynb"), open_("/home/me/b.ipynb")
    a.run("%gpuckpt save before_finetune")
    # Without one of its own, nothing is restored: the names are listed, and how to say that one of them is meant.
    refused = b.fails("%gpuckpt restore")
    assert "this notebook has no snapshot" in refused.evalue
    assert "a.ipynb:before_finetune" in refused.text
    assert "%gpuckpt restore --from a.ipynb:before_finetune" in refused.text
    # A name that only another one has is found, and nothing more.
    refused = b.fails("%gpuckpt restore before_finetune")
    assert refused.ename == "NotOwn"
    assert "This notebook has no snapshot of that name; others have: a.ipynb:before_finetune." in refused.text
    assert "%gpuckpt restore --from a.ipynb:before_finetune" in refused.text
    assert b.value("x") == "/home/me/b.ipynb"
    assert _names(b) == ["before_finetune"]

    # The other one can have that name all the same; from then on each is called by its notebook, too.
    assert b.run("r = %gpuckpt save before_finetune\nprint(r.name)").text.splitlines()[-1] == "before_finetune"
    assert sorted(_names(a)) == ["a.ipynb:before_finetune", "b.ipynb:before_finetune"]
    assert "exists already" in b.fails("%gpuckpt save before_finetune").text
    for notebook in (a, b):
        notebook.run("x += ' later'")
        notebook.run("%gpuckpt restore before_finetune")
    assert (a.value("x"), b.value("x")) == ("/home/me/a.ipynb", "/home/me/b.ipynb")

    # A third one is told of both.
    refused = open_("/home/me/c.ipynb").fails("%gpuckpt restore before_finetune")
    assert "a.ipynb:before_finetune" in refused.text
    assert "b.ipynb:before_finetune" in refused.text
    assert "`%gpuckpt restore --from " in refused.text

    # Saying whose it is is enough; what that brought is none of this notebook's own.
    b.run("%gpuckpt restore --from a.ipynb:before_finetune")
    assert b.value("x") == "/home/me/a.ipynb"
    b.run("%gpuckpt restore before_finetune")
    assert b.value("x") == "/home/me/b.ipynb"
    b.run("%gpuckpt restore")
    assert b.value("x") == "/home/me/b.ipynb"

    # Whatever else takes a name takes it of this notebook first, and of the other one where that is said.
    b.run("%gpuckpt save before_finetune --replace -m again")
    assert "again" in b.run("%gpuckpt show before_finetune").text
    assert "again" not in b.run("%gpuckpt show a.ipynb:before_finetune").text
    b.run("%gpuckpt mv before_finetune mine")
    assert sorted(_names(a)) == ["before_finetune", "mine"]
    b.run("%gpuckpt mv mine before_finetune")
    b.run("%gpuckpt rm before_finetune")
    assert _names(b) == ["before_finetune"]
    assert "/home/me/a.ipynb" in a.run("%gpuckpt show before_finetune").text


def test_kernels_without_a_notebook_have_names_of_their_own_together(open_: Open) -> None:
    first, notebook = open_(), open_("/home/me/deep/a.ipynb")
    notebook.run("%gpuckpt save here")
    first.run("%gpuckpt save here")
    assert sorted(_names(first)) == ["a.ipynb:here", "here"]
    second = open_()
    second.run("x = 2")
    assert "this kernel has no snapshot" in second.fails("%gpuckpt restore").text
    assert second.value("x") == "2"
    # A script that runs again is put back to what it saved when it ran before.
    second.run("%gpuckpt restore here")
    assert second.value("repr(x)") == "''"
    # That is its own from then on.
    second.run("x = 3")
    second.run("%gpuckpt restore")
    assert second.value("repr(x)") == "''"
    second.run("%gpuckpt restore --from deep/a.ipynb:here")
    assert second.value("x") == "/home/me/deep/a.ipynb"


def test_what_a_kernel_came_from_is_its_own_also_in_a_notebook_that_has_another_name(open_: Open) -> None:
    open_("/home/me/old name.ipynb").run("%gpuckpt save base")
    renamed = open_("/home/me/new.ipynb")
    assert "%gpuckpt restore --from 'old name.ipynb:base'" in renamed.fails("%gpuckpt restore base").text
    renamed.run("%gpuckpt restore --from 'old name.ipynb:base'")
    for restore in ("%gpuckpt restore", "%gpuckpt restore base"):
        renamed.run("x = 'later'")
        renamed.run(restore)
        assert renamed.value("x") == "/home/me/old name.ipynb"
    renamed.run("%gpuckpt save base")
    listed = renamed.run("%gpuckpt list").text
    assert "new.ipynb:base" in listed
    assert "old name.ipynb:base" in listed


def test_a_copy_of_a_kernel_has_what_that_kernel_has_saved(open_: Open) -> None:
    original = open_("/home/me/a.ipynb")
    original.run("%gpuckpt save base")
    original.run("f = %gpuckpt fork")
    with contextlib.closing(Copy(json.loads(original.value("__import__('json').dumps(f.kernels)"))[0])) as copy:
        for restore in ("%gpuckpt restore", "%gpuckpt restore base"):
            copy.run("x = 'later'")
            copy.run(restore)
            assert copy.value("x") == "/home/me/a.ipynb"
        # What the copy saves is its own: it is in no notebook.
        copy.run("%gpuckpt save base")
        assert sorted(_names(original)) == ["a.ipynb:base", "base"]


def test_two_notebooks_that_save_under_a_new_name_at_the_same_time_both_have_it(open_: Open) -> None:
    notebooks = [open_("/home/me/a.ipynb"), open_("/home/me/b.ipynb")]
    for notebook in notebooks:
        notebook.client.execute("%gpuckpt save together")
    assert [notebook.reply()["content"]["status"] for notebook in notebooks] == ["ok", "ok"]
    assert sorted(_names(notebooks[0])) == ["a.ipynb:together", "b.ipynb:together"]


def test_what_was_saved_before_names_belonged_to_notebooks_is_found(open_: Open) -> None:
    old = open_("/home/me/a.ipynb")
    old.run("%gpuckpt save plain")
    # As every store of an earlier version has it: the name alone.
    assert [path.name for path in Path(settings.store_dir(), "snapshots").iterdir()] == ["plain.json"]
    old.close()
    again = open_("/home/me/a.ipynb")
    again.run("x = 'later'")
    again.run("%gpuckpt restore plain")
    assert again.value("x") == "/home/me/a.ipynb"
    assert Store(settings.store_dir()).get("plain").kernel["notebook"] == "/home/me/a.ipynb"
