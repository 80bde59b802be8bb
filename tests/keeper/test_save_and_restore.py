"""Save and restore, as a user in a notebook does it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from keeper_faults import Asked, Criu, Requested, status
from notebooks import PATIENCE, Notebook, StartKernel, wait_until

pytestmark = pytest.mark.shared_kernel

_POLL = 7  # the number of poll(2) on x86-64


def test_what_was_changed_after_a_save_is_undone_by_a_restore(notebook: Notebook) -> None:
    notebook.run("x = [1, 2, 3]")
    saved = notebook.run("%gpuckpt save first -m 'three numbers'")
    assert saved.shown[-1].startswith("Saved first: ")
    notebook.run("x.clear(); y = 1")
    restored = notebook.run("%gpuckpt restore first")
    assert "Restored first (three numbers), saved " in restored.text
    assert notebook.value("x, 'y' in globals()") == "[1, 2, 3] False"


def test_a_save_returns_twice_and_tells_which_time_it_is(notebook: Notebook) -> None:
    went_on = notebook.run("r = %gpuckpt save twice\nprint('restored:', r.restored, r.name)")
    assert "restored: False twice" in went_on.text
    # What follows the save in its cell writes into the cell that asks for the restore.
    came_back = notebook.run("%gpuckpt restore twice")
    assert "restored: True twice" in came_back.text
    assert notebook.value("r.restored") == "True"


def test_the_latest_snapshot_of_the_notebook_is_restored_when_no_name_is_given(start: StartKernel) -> None:
    mine, other = start(), start()
    mine.run("x = 'mine'")
    mine.run("%gpuckpt save mine")
    other.run("x = 'other'")
    other.run("%gpuckpt save other")
    mine.run("x = None")
    mine.run("%gpuckpt restore")
    assert mine.value("x") == "mine"


def test_a_restore_after_the_kernel_was_restarted(notebook: Notebook) -> None:
    notebook.run("x = 7")
    notebook.run("%gpuckpt save before")
    notebook.manager.restart_kernel(now=True)
    notebook.wait_for_ready()
    assert notebook.value("'x' in globals()") == "False"
    notebook.run("%gpuckpt restore before")
    assert notebook.value("x") == "7"


def test_a_restore_in_another_kernel_with_another_key_and_other_ports(start: StartKernel) -> None:
    first = start()
    first.run("x = 'from the first'")
    first.run("%gpuckpt save shared")
    first.run("x = 'the first went on'")
    second = start()
    second.run("%gpuckpt restore shared")
    assert second.value("x") == "from the first"
    assert first.value("x") == "the first went on"
    # The copy answers under its own key and connection file, not under those it was saved with.
    assert second.value("get_ipython().kernel.parent.abs_connection_file") == second.manager.connection_file
    assert second.run("%connect_info").text.count(str(second.manager.shell_port)) == 1
    second.client.shell_channel.send(second.client.session.msg("connect_request"))
    ports = second.client.get_shell_msg(timeout=60)["content"]
    assert ports["shell_port"] == second.manager.shell_port


def test_saves_and_restores_in_a_row(notebook: Notebook) -> None:
    notebook.run("n = 0")
    for i in range(4):
        notebook.run("n += 1")
        notebook.run(f"%gpuckpt save step{i}")
        notebook.run("n = -1")
        notebook.run("%gpuckpt restore")
        assert notebook.value("n") == str(i + 1)
    notebook.run("%gpuckpt restore step1")
    assert notebook.value("n") == "2"


@pytest.mark.shared_kernel(False)
def test_a_restored_kernel_is_interrupted_restarted_and_shut_down_like_any_other(notebook: Notebook) -> None:
    notebook.run("%gpuckpt save here")
    notebook.run("%gpuckpt restore here")
    notebook.client.execute("import time; print('in it', flush=True)\nwhile True: time.sleep(0.01)")
    notebook.until_printed("in it")
    notebook.manager.interrupt_kernel()
    assert notebook.reply()["content"]["ename"] == "KeyboardInterrupt"
    notebook.manager.restart_kernel()
    notebook.wait_for_ready()
    assert notebook.value("1 + 1") == "2"
    notebook.manager.shutdown_kernel()
    assert not notebook.folder.exists()


def test_no_cell_runs_in_a_restored_kernel_before_its_hooks(notebook: Notebook, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    notebook.run(
        "import jupyter_gpuckpt, pathlib, time; ready = []\n"
        "@jupyter_gpuckpt.after_restore\n"
        "def make_ready(how):\n"
        "    if how.restored:\n"
        f"        pathlib.Path({str(begun)!r}).touch(); time.sleep(1); ready.append(1)"
    )
    Requested(notebook, "save", {"name": "unready"}).outcome()  # between two cells
    restored = Requested(notebook, "restore", {"name": "unready"})
    wait_until(begun.exists)
    assert notebook.value("ready") == "[1]"
    restored.outcome()


def test_the_cells_behind_a_restore_are_executed_by_the_restored_kernel(notebook: Notebook) -> None:
    """As with "Run All", which sends every cell at once."""
    notebook.run("x = 1")
    notebook.run("%gpuckpt save here")
    notebook.run("x = 2")
    requests = [notebook.client.execute(code) for code in ("%gpuckpt restore here", "x += 10", "print('x is', x)")]
    replies = [notebook.client.get_shell_msg(timeout=60) for _ in requests]
    assert [reply["parent_header"]["msg_id"] for reply in replies] == requests
    assert [reply["content"]["status"] for reply in replies] == ["ok", "ok", "ok"]
    assert notebook.value("x") == "11"


def test_the_cells_that_waited_behind_the_save_are_not_executed_again(notebook: Notebook, tmp_path: Path) -> None:
    """With a save and a restore in one "Run All", too: each cell is executed once, and it ends."""
    ran = tmp_path / "ran"
    ran.touch()
    note = f"ran = open({str(ran)!r}, 'a')\nran.write({{!r}})\nran.close()"
    cells = ("x = 1", "%gpuckpt save here", note.format("a"), "x += 1", "%gpuckpt restore here", note.format("b"))
    requests = [notebook.client.execute(code) for code in (*cells, "x += 10")]
    replies = [notebook.reply() for _ in requests]
    assert [reply["parent_header"]["msg_id"] for reply in replies] == requests
    assert {reply["content"]["status"] for reply in replies} == {"ok"}
    assert notebook.value("x") == "11"
    assert ran.read_text() == "ab"
    again = notebook.run("%gpuckpt restore here")
    assert "5 cells that waited behind the save were not executed again." in again.text
    assert notebook.value("x") == "1"
    assert ran.read_text() == "ab"


@pytest.mark.shared_kernel(False)
def test_what_comes_while_the_kernel_is_frozen_is_not_executed_again(
    criu: Criu, notebook: Notebook, tmp_path: Path
) -> None:
    """Also where no thread of it can read that: a call into C keeps Python's lock."""
    go, end = tmp_path / "go", tmp_path / "end"
    os.mkfifo(end)
    cell = Asked(
        notebook,
        f"""
import ctypes, os, struct, time
n, wait, libc = 0, struct.pack('ihh', os.open({str(end)!r}, os.O_RDWR), 1, 0), ctypes.PyDLL(None)
print('begun', flush=True)
while not os.path.exists({str(go)!r}): time.sleep(0.01)
libc.poll(ctypes.create_string_buffer(wait), 1, -1)
""",
    )
    notebook.until_printed("begun")
    before = notebook.client.execute("n += 1")
    criu.at("dump", "post-dump", f'echo > "{end}"')
    with criu.held_at("dump", "start") as reached:
        save = Requested(notebook, "save", {"name": "here"})
        reached()
        go.touch()
        pid = status(notebook)["pid"]
        wait_until(lambda: Path(f"/proc/{pid}/syscall").read_text().split()[0] == str(_POLL))
        during = notebook.client.execute("n += 1")
    with end.open("r+b", buffering=0):  # what was written there is there for the restored one, too
        assert not isinstance(save.outcome(), Exception)
        assert cell.answer()["status"] == "ok"
        assert [notebook.reply()["parent_header"]["msg_id"] for _ in range(2)] == [before, during]
        assert notebook.value("n") == "2"
        assert "2 cells" in notebook.run("%gpuckpt restore here").text
        assert notebook.value("n") == "0"


def test_the_cells_that_waited_behind_one_that_is_saved_in_its_middle_are_not_executed_again(
    notebook: Notebook, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    code = (
        f"import os, time; n = 0; print('begun', flush=True)\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)"
    )
    cell = Asked(notebook, code)
    notebook.until_printed("begun")
    waiting = [notebook.client.execute("n += 1") for _ in range(2)]
    with notebook.keeper as keeper:
        keeper.request("save", {"name": "here"}, timeout=PATIENCE)
    go.touch()
    assert cell.answer()["status"] == "ok"
    assert [notebook.reply()["parent_header"]["msg_id"] for _ in range(2)] == waiting
    assert notebook.value("n") == "2"
    assert "2 cells" in notebook.run("%gpuckpt restore here").text
    assert notebook.value("n") == "0"


@pytest.mark.shared_kernel(False)
def test_a_cell_that_ran_before_the_kernel_was_frozen_is_not_said_to_have_waited(
    criu: Criu, notebook: Notebook
) -> None:
    with criu.held_at("dump", "start") as reached:
        save = Requested(notebook, "save", {"name": "here"})
        reached()
        notebook.run("n = 1")
    assert not isinstance(save.outcome(), Exception)
    notebook.run("n = 2")
    restored = notebook.run("%gpuckpt restore here").text
    assert "Restored here" in restored
    assert "waited" not in restored
    assert notebook.value("n") == "1"


def test_a_cell_that_keeps_python_s_lock_is_answered_when_the_kernel_is_restored(
    notebook: Notebook, tmp_path: Path
) -> None:
    """Nothing of the kernel can say by then which cell it is."""
    notebook.run("x = 1")
    with notebook.keeper as keeper:
        keeper.request("save", {"name": "here"})
    go = tmp_path / "go"
    cell = Asked(
        notebook,
        f"""
import ctypes, os, time
print('begun', flush=True)
while not os.path.exists({str(go)!r}): time.sleep(0.01)
ctypes.PyDLL(None).poll(None, 0, -1)
""",
    )
    notebook.until_printed("begun")
    go.touch()
    pid = status(notebook)["pid"]
    wait_until(lambda: Path(f"/proc/{pid}/syscall").read_text().split()[0] == str(_POLL))
    assert not isinstance(Requested(notebook, "restore", {"name": "here", "discard": True}).outcome(), Exception)
    assert cell.answer()["ename"] == "RestoreFailed"
    assert notebook.value("x") == "1"


def test_the_cells_behind_a_refused_restore_are_executed_all_the_same(notebook: Notebook) -> None:
    refused = """
        try:
            get_ipython().run_line_magic("gpuckpt", "restore nothing")
        except Exception:
            x = []
    """
    requests = [notebook.client.execute(code) for code in (refused, "x.append(1)", "x.append(2)")]
    replies = [notebook.client.get_shell_msg(timeout=60) for _ in requests]
    assert [reply["parent_header"]["msg_id"] for reply in replies] == requests
    assert notebook.value("x") == "[1, 2]"


def test_the_execution_count_is_the_saved_one(notebook: Notebook) -> None:
    notebook.run("pass")
    saved_at = notebook.run("%gpuckpt save here").count
    for _ in range(5):
        notebook.run("pass")
    assert notebook.run("%gpuckpt restore here").count == saved_at
    assert notebook.run("pass").count == saved_at + 1


def test_a_taken_name_is_refused_unless_it_is_to_be_replaced(notebook: Notebook) -> None:
    notebook.run("x = 1")
    notebook.run("%gpuckpt save taken")
    notebook.run("x = 2")
    refused = notebook.fails("%gpuckpt save taken")
    assert refused.ename == "NameTaken"
    assert "--replace" in refused.text
    notebook.run("%gpuckpt save taken --replace")
    notebook.run("x = 3")
    notebook.run("%gpuckpt restore taken")
    assert notebook.value("x") == "2"


def test_wrong_names_and_wrong_words_are_answered_in_words(notebook: Notebook) -> None:
    for line, ename in (
        ("save ../x", "BadName"),
        ("save " + "x" * 101, "BadName"),
        ("save naïve", "BadName"),
        ("restore nothing", "NoSuchSnapshot"),
        ("restore", "NoSuchSnapshot"),
        ("show nothing", "NoSuchSnapshot"),
        ("rm nothing", "NoSuchSnapshot"),
        ("frobnicate", "Usage"),
        ("save", "Usage"),
        ("save x --rep", "Usage"),
        ("save --help x", "Usage"),
        ("save 'open", "Usage"),
    ):
        answer = notebook.fails(f"%gpuckpt {line}")
        assert answer.ename == ename, line
        assert "Traceback" not in answer.text
        assert "Next: " in answer.text
    assert notebook.value("'alive'") == "alive"


def test_list_show_rm_status_and_help(notebook: Notebook) -> None:
    assert "No snapshots yet" in notebook.run("%gpuckpt list").text
    notebook.run("%gpuckpt save one -m 'a message'")
    listing = notebook.run("%gpuckpt list")
    assert "one" in listing.text
    assert "a message" in listing.text
    assert "<table>" in listing.html[-1]
    assert "a message" in notebook.run("%gpuckpt show one").text
    assert "based on" in notebook.run("%gpuckpt status").text
    for asking in ("%gpuckpt", "%gpuckpt help", "%gpuckpt --help", "%gpuckpt save -h"):
        assert "save NAME" in notebook.run(asking).text
    notebook.run("%gpuckpt save two")
    removed = notebook.fails("%gpuckpt rm none one neither two")
    assert "Removed one" in removed.text
    assert "Removed two" in removed.text
    assert "no snapshot named none" in removed.text
    assert "no snapshot named neither" in removed.text
    assert "No snapshots yet" in notebook.run("%gpuckpt list").text


@pytest.mark.shared_kernel(False)
def test_subcommands_and_names_are_completed(notebook: Notebook) -> None:
    notebook.run("%gpuckpt save before_finetune")
    for jedi in (True, False):
        notebook.run(f"%config IPCompleter.use_jedi = {jedi}")
        for line, expected in (
            ("%gpuckpt res", "restore"),
            ("%gpuckpt restore bef", "before_finetune"),
            ("%gpuckpt restore --la", "--lazy"),
            ("x = 1\nr = %gpuckpt sa", "save"),
            ("r = %gpuckpt save x --wi", "--with-files"),
        ):
            reply = notebook.client.complete(line, reply=True, timeout=60)["content"]
            assert reply["matches"] == [expected], (jedi, line)
            assert line[: reply["cursor_start"]] + expected == line.rpartition(" ")[0] + " " + expected


def test_messages_are_shown_as_text_not_as_html(notebook: Notebook) -> None:
    notebook.run("%gpuckpt save x -m '<script>alert(1)</script>'")
    assert "<script>" not in "".join(notebook.run("%gpuckpt list").html)


def test_two_kernels_save_at_once(start: StartKernel) -> None:
    notebooks = [start(), start()]
    for i, notebook in enumerate(notebooks):
        notebook.run(f"x = bytearray(50_000_000); me = {i}")
    requests = [n.client.execute(f"%gpuckpt save kernel{i}") for i, n in enumerate(notebooks)]
    for notebook, request in zip(notebooks, requests, strict=True):
        reply = notebook.reply()
        assert reply["parent_header"]["msg_id"] == request
        assert reply["content"]["status"] == "ok"
    for i, notebook in enumerate(notebooks):
        notebook.run(f"%gpuckpt restore kernel{i}")
        assert notebook.value("me") == str(i)


@pytest.mark.shared_kernel(False)
def test_the_cell_that_saved_goes_on_showing_that_it_did(notebook: Notebook) -> None:
    notebook.run("from jupyter_gpuckpt.kernel import magics; magics._PROGRESS_AFTER = 0")

    def shown(line: str) -> list[tuple[str, str]]:
        """Run a cell as a program that executes notebooks; return what its displays showed, with the ids of these."""
        asked = notebook.client.execute(line, allow_stdin=False)
        found: list[tuple[str, str]] = []
        while True:
            message = notebook.client.get_iopub_msg(timeout=60)
            content = message["content"]
            if "data" in content:
                found.append((content["transient"].get("display_id", ""), content["data"]["text/plain"]))
            if content.get("execution_state") == "idle" and message["parent_header"].get("msg_id") == asked:
                notebook.client.get_shell_msg(timeout=60)
                return found

    saving, said = shown("saved = %gpuckpt save it")[-1]
    assert said.startswith("Saved it: ")
    of_the_restore = shown("%gpuckpt restore it")
    assert saving not in [display for display, _ in of_the_restore]
    assert [text for _, text in of_the_restore if "ack at" in text] == []
    assert of_the_restore[-1][1].startswith("Restored it, saved ")
    assert "Back at it" in notebook.value("saved")


@pytest.mark.shared_kernel(False)
def test_a_restore_tells_what_it_gives_up_that_is_in_no_snapshot(notebook: Notebook, tmp_path: Path) -> None:
    assert status(notebook)["unsaved"] is None, "nothing was done yet"
    notebook.run("x = 1")
    assert status(notebook)["unsaved"]["cells"] == 1
    notebook.run("%gpuckpt save here")
    assert status(notebook)["unsaved"] is None
    notebook.run("x = 2")
    notebook.run("x = 3")
    assert "Discarded, and in no snapshot: 2 cells in the last " in notebook.run("%gpuckpt restore here --discard").text
    assert status(notebook)["unsaved"] is None
    assert "in no snapshot" not in notebook.run("%gpuckpt restore here --discard").text
    number = notebook.run("x = 4").count
    go = tmp_path / "go"
    notebook.client.execute(f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)")
    running = wait_until(lambda: (status(notebook)["unsaved"] or {}).get("cell"))
    assert running == {"number": number + 1, "begins": "import os, time"}
    notebook.kill_keeper()
    assert status(notebook)["unsaved"]["cells"] == 2, "the keeper after this one knows, too"
    given_up = Requested(notebook, "restore", {"name": "here", "discard": True}).outcome()["given_up"]
    assert (given_up["cells"], given_up["cell"]) == (2, running)
    assert notebook.value("x") == "1"


def test_what_a_kernel_computes_to_start_or_to_be_restored_is_no_work(
    start: StartKernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose profile imports much is not kept first, where a snapshot is restored in it."""
    startup = tmp_path / "profile_default" / "startup"
    startup.mkdir(parents=True)
    (startup / "much.py").write_text("import time\nwhile time.process_time() < 2: pass\nimported = True")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    notebook = start()
    wait_until(lambda: status(notebook)["unsaved"] is None, timeout=20)
    assert status(notebook)["computed"] < 1
    assert notebook.value("imported") == "True"
    notebook.run("import jupyter_gpuckpt")
    notebook.run("def compute(_):\n    end = time.process_time() + 2\n    while time.process_time() < end: pass")
    notebook.run("jupyter_gpuckpt.after_restore(compute)")
    notebook.run("%gpuckpt save here")
    notebook.run("%gpuckpt restore here")
    assert status(notebook)["unsaved"] is None
    assert status(notebook)["computed"] < 1


def test_a_snapshot_of_the_end_of_a_cell_is_of_after_that_cell(notebook: Notebook) -> None:
    def run(code: str, cell: str) -> None:
        content = {"code": code, "silent": False}
        request = notebook.client.session.msg("execute_request", content, metadata={"cellId": cell})
        notebook.client.shell_channel.send(request)
        while (reply := notebook.reply())["parent_header"]["msg_id"] != request["header"]["msg_id"]:
            pass
        assert reply["content"]["status"] == "ok", reply

    run("x = 1", "first")
    run("%gpuckpt save between", "a line of ours")
    run("x = 2\n%gpuckpt save end", "second")
    run("%gpuckpt save middle\nx = 3", "third")
    with notebook.keeper as keeper:
        found = keeper.request("list")["snapshots"]
    assert {one["name"]: one["cell"] for one in found} == {"between": "first", "end": "second", "middle": ""}


_TRAINING = """
done = []
for epoch in range(3):
    done.append(epoch)
    try:
        get_ipython().run_line_magic("gpuckpt", f"save epoch-{epoch} --replace")
    except Exception:
        done.append("an exception of the training's")
after = True
"""


def test_a_snapshot_from_inside_a_loop_is_looked_at_without_running_the_loop_on(
    notebook: Notebook,
) -> None:
    notebook.run(_TRAINING)
    restored = Asked(notebook, "%gpuckpt restore epoch-1 --stop-here")
    behind = Asked(notebook, "seen = (done, 'after' in globals())")
    assert restored.answer()["status"] == "ok"
    assert behind.answer()["status"] == "ok"
    assert notebook.value("seen") == "([0, 1], False)"
    restored = notebook.run("%gpuckpt restore epoch-0 --stop-here")
    assert "Stopped here: the rest of the saved cell is not run." in restored.text
    assert restored.ename == ""
    assert notebook.fails("1 / 0").ename == "ZeroDivisionError", "errors are shown as ever"
    notebook.run("%gpuckpt restore epoch-1")
    assert notebook.value("done, after") == "[0, 1, 2] True", "without it the loop goes on"


def test_a_cell_that_was_saved_from_outside_stops_without_an_error(notebook: Notebook, tmp_path: Path) -> None:
    go = tmp_path / "go"
    notebook.run("import asyncio, os, time")
    for waits in ("time.sleep(0.01)", "await asyncio.sleep(0.01)"):
        cell = f"x = 1; print('in it', flush=True)\nwhile not os.path.exists({str(go)!r}): {waits}\nx = 2"
        notebook.client.execute(cell)
        notebook.until_printed("in it")
        Requested(notebook, "save", {"name": "outside", "replace": True}).outcome()
        go.touch()
        assert notebook.value("x") == "2"
        go.unlink()
        restored = Asked(notebook, "%gpuckpt restore outside --stop-here")
        behind = Asked(notebook, "seen = x")
        assert restored.answer()["status"] == "ok"
        assert behind.answer()["status"] == "ok"
        assert notebook.value("seen") == "1"
        stopped = notebook.run("%gpuckpt restore outside --stop-here")
        assert "Stopped here: the rest of the saved cell is not run." in stopped.text
        assert stopped.ename == ""
    notebook.client.execute("print('in it', flush=True)\nwhile True: pass")
    notebook.until_printed("in it")
    notebook.manager.interrupt_kernel()
    assert notebook.reply()["content"]["ename"] == "KeyboardInterrupt", "a person's interrupt is shown as ever"


_HELD_SAVE = """
import os, time, jupyter_gpuckpt
@jupyter_gpuckpt.before_save
def held():
    while not os.path.exists({go!r}):
        open({reached!r}, "w").close()
        time.sleep(0.01)
"""


def test_what_another_kernel_is_just_saving_is_named_and_waited_for(start: StartKernel, tmp_path: Path) -> None:
    one, other = start(env={**os.environ, "JPY_SESSION_NAME": ""}), start(env={**os.environ, "JPY_SESSION_NAME": ""})
    reached, go = tmp_path / "reached", tmp_path / "go"
    one.run(_HELD_SAVE.format(go=str(go), reached=str(reached)))
    one.run("x = 1")
    save = Asked(one, "%gpuckpt save there")
    wait_until(reached.exists)
    shown = other.fails("%gpuckpt show there")
    assert "The snapshot there is still being saved." in shown.text
    assert "has been saving it since" in shown.text
    assert "Did you mean" not in shown.text
    restore = Asked(other, "%gpuckpt restore there")
    with other.keeper as keeper:
        wait_until(lambda: keeper.request("status")["stage"].startswith("waiting until there is saved"))
    go.touch()
    assert save.answer()["status"] == "ok"
    assert restore.answer()["status"] == "ok"
    assert other.value("x") == "1"


def test_a_percentage_is_never_followed_by_a_bare_word(slow_disk: Path, start: StartKernel) -> None:
    """Where nothing moves the keeper gives a sign of life now and then, which says what was said last."""
    notebook = start()
    notebook.run("import os; ballast = os.urandom(20_000_000)")
    slow_disk.touch()
    cell = Asked(notebook, "%gpuckpt save slowly --wait")
    said: list[str] = []
    while not any("100 %" in line for line in said[:-2]):  # as many lines as it takes, and two after that one
        text = notebook.client.get_iopub_msg(timeout=PATIENCE)["content"].get("data", {}).get("text/plain", "")
        if "riting" in text:
            said.append(text)
    slow_disk.unlink()
    assert cell.answer()["status"] == "ok"
    assert all("100 %" in line for line in said[-2:]), said
