"""What kernel/hooks.py promises of the functions that run before a save and when the kernel runs again."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from notebooks import Notebook, StartKernel, wait_until

NOTES = """
    import jupyter_gpuckpt
    notes = []
    @jupyter_gpuckpt.before_save
    def first():
        notes.append("before: first")
    @jupyter_gpuckpt.before_save
    def second():
        notes.append("before: second")
    @jupyter_gpuckpt.after_restore
    def plain():
        notes.append("after: plain")
    @jupyter_gpuckpt.after_restore
    def told(resumed):
        error = type(resumed.error).__name__ if resumed.error else None
        notes.append(f"after: restored={resumed.restored} error={error}")
"""
BEFORE = ["before: second", "before: first"]


def notes(notebook: Notebook) -> str:
    return notebook.run("print(notes); notes.clear()").text


@pytest.fixture
def noting(notebook: Notebook) -> Notebook:
    """A kernel whose functions write down when they are called."""
    notebook.run(NOTES)
    return notebook


def test_functions_run_before_in_reverse_and_after_in_order(noting: Notebook) -> None:
    noting.run("%gpuckpt save here")
    assert notes(noting) == str([*BEFORE, "after: plain", "after: restored=False error=None"])
    noting.run("%gpuckpt restore here")
    assert notes(noting) == str([*BEFORE, "after: plain", "after: restored=True error=None"])


def test_the_functions_after_have_run_when_the_cell_goes_on(noting: Notebook) -> None:
    went_on = noting.run("r = %gpuckpt save here\nprint(r.restored, notes[-1])")
    assert "False after: restored=False error=None" in went_on.text
    came_back = noting.run("%gpuckpt restore here")
    assert "True after: restored=True error=None" in came_back.text


def test_an_exception_before_stops_the_save_and_the_kernel_goes_on(noting: Notebook) -> None:
    noting.run("""
        @jupyter_gpuckpt.before_save
        def unwilling():
            raise ValueError("not now")
    """)
    failed = noting.fails("%gpuckpt save here")
    assert failed.ename == "SaveFailed"
    assert "The before_save function unwilling raised ValueError: not now" in failed.text
    assert "Next: " in failed.text
    # The latest registered runs first: the others were not called, and those after are told why.
    assert notes(noting) == str(["after: plain", "after: restored=False error=SaveFailed"])
    assert "No snapshots yet" in noting.run("%gpuckpt list").text


def test_the_functions_after_also_run_when_criu_fails(noting: Notebook, tmp_path: Path) -> None:
    # A socket of this process, outside the kernel: criu refuses to cut the connection.
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        noting.run(f"import socket; s = socket.socket(socket.AF_UNIX); s.connect({str(tmp_path / 's')!r})")
        with listener.accept()[0]:
            assert noting.fails("%gpuckpt save here").ename == "SaveFailed"
        assert notes(noting) == str([*BEFORE, "after: plain", "after: restored=False error=SaveFailed"])


def test_an_exception_after_is_shown_and_keeps_no_other_from_running(noting: Notebook) -> None:
    noting.run("""
        def clumsy():
            raise KeyError("lost")
        jupyter_gpuckpt.after_restore(clumsy)
        jupyter_gpuckpt.after_restore(lambda: notes.append("after: the last"))
    """)
    warning = "The after_restore function clumsy raised KeyError: 'lost'"
    saved = noting.run("%gpuckpt save here")
    assert "Saved here: " in saved.text
    assert warning in saved.text
    assert "after: the last" in notes(noting)
    restored = noting.run("%gpuckpt restore here")
    assert "Restored here, " in restored.text
    assert warning in restored.text
    assert "after: the last" in notes(noting)


@pytest.fixture
def hanging(start: StartKernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Notebook:
    """A kernel with a function that does not end after a restore, until there is a file "go"; it may take 3 s."""
    monkeypatch.setenv("GPUCKPT_HOOK_TIMEOUT", "3")
    notebook = start()
    notebook.run(f"""
        import jupyter_gpuckpt, pathlib, time
        go, ended = pathlib.Path({str(tmp_path / "go")!r}), []
        @jupyter_gpuckpt.after_restore
        def connect(resumed):
            while resumed.restored and not go.exists(): time.sleep(0.01)
            ended.append(resumed.restored)
    """)
    return notebook


def test_a_function_that_hangs_after_a_restore_keeps_no_answer_back(hanging: Notebook, tmp_path: Path) -> None:
    hanging.run("%gpuckpt save here")
    restored = hanging.run("%gpuckpt restore here", timeout=60)
    assert "Restored here, " in restored.text
    assert "The after_restore function connect has not ended after 3 s" in restored.text
    assert hanging.value("ended") == "[]"
    assert "Its hooks did not finish within 3 s" in hanging.fails("%gpuckpt save again").text
    (tmp_path / "go").touch()
    wait_until(lambda: "True" in hanging.look("ended"))
    hanging.run("%gpuckpt save again")


def test_a_function_that_hangs_after_a_hibernation_keeps_no_cell_back(hanging: Notebook) -> None:
    with hanging.keeper as keeper:
        keeper.request("hibernate", {})
    assert hanging.run("print(ended)", timeout=60).text == "[]"


def test_what_a_function_put_away_is_taken_out_again(notebook: Notebook, tmp_path: Path) -> None:
    """The use of it all: a connection that cannot be saved is closed before and opened after."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        notebook.run(f"""
            import jupyter_gpuckpt, socket
            @jupyter_gpuckpt.after_restore
            def connect():
                global s
                s = socket.socket(socket.AF_UNIX)
                s.connect({str(tmp_path / "s")!r})
            @jupyter_gpuckpt.before_save
            def disconnect():
                s.close()
            connect()
        """)
        assert "Saved here: " in notebook.run("%gpuckpt save here").text
        assert notebook.value("s.getpeername()") == str(tmp_path / "s")
        notebook.run("s.close()")
        notebook.run("%gpuckpt restore here")
        assert notebook.value("s.getpeername()") == str(tmp_path / "s")


def test_the_generation_is_another_after_every_restore_and_in_every_copy(start: StartKernel) -> None:
    first, copy = start(), start()
    generation = "__import__('jupyter_gpuckpt').generation_id()"
    seen = [first.value(generation), copy.value(generation)]
    first.run("%gpuckpt save here")
    assert first.value(generation) == seen[0]
    for notebook in (first, first, copy):
        notebook.run("%gpuckpt restore here")
        seen.append(notebook.value(generation))
    assert len(set(seen)) == len(seen)
    assert all(len(g) == 32 and int(g, 16) >= 0 for g in seen)


def test_functions_run_while_a_cell_runs(noting: Notebook) -> None:
    """They run in the agent's thread: a save from outside need not wait for the cell."""
    looping = noting.client.execute("""
        import time
        print("looping", flush=True)
        while "go on" not in notes:
            time.sleep(0.005)
    """)
    noting.until_printed("looping")
    with noting.keeper as keeper:
        keeper.request("save", {"name": "here"}, timeout=60)
    noting.manager.interrupt_kernel()
    assert noting.reply()["parent_header"]["msg_id"] == looping
    assert notes(noting) == str([*BEFORE, "after: plain", "after: restored=False error=None"])
