"""The REST API, asked by a program, with real kernels."""

from __future__ import annotations

import json
import random
import socket
import uuid
from pathlib import Path
from typing import Any

import pytest
import websocket
from jupyter_servers import TOKEN, Server
from notebooks import wait_until

from jupyter_gpuckpt.server.events import OPERATION, SNAPSHOTS
from jupyter_gpuckpt.store import Store
from jupyter_gpuckpt.store.trust import Trust

needs_criu = pytest.mark.criu

_FEATURES = ["fork", "push", "pull", "export", "import", "sleep", "hibernate", "undo"]


@needs_criu
def test_a_kernel_is_saved_and_restored(server: Server) -> None:
    with server.notebook() as (kernel_id, notebook):
        notebook.run("x = 1")
        asked = {"name": "one", "message": "x is 1"}
        operation = server.ask("POST", f"kernels/{kernel_id}/save", asked, 202)
        assert (operation["kind"], operation["state"], operation["name"]) == ("save", "running", "one")
        saved = server.finish(operation)
        assert (saved["state"], saved["result"]["message"]) == ("done", "x is 1")
        notebook.run("x = 2")
        restored = server.finish(server.ask("POST", f"kernels/{kernel_id}/restore", {"name": "one"}, 202))
        assert restored["state"] == "done"
        assert notebook.value("x") == "1"
        (kernel,) = server.ask("GET", "kernels")["kernels"]
        assert (kernel["kernel_id"], kernel["parent"]["name"]) == (kernel_id, "one")
        assert kernel["notebook"] == str(server.root / "train.ipynb")
        (listed,) = (one for one in server.ask("GET", "snapshots")["snapshots"] if not one.get("automatic"))
        assert (listed["name"], listed["notebook"]) == ("one", kernel["notebook"])
        assert server.ask("GET", "snapshots/one")["process"]["pid"] > 0


@needs_criu
def test_a_kernel_is_saved_to_another_folder_and_restored_from_there(server: Server, tmp_path: Path) -> None:
    folder = str(tmp_path / "elsewhere")
    with server.notebook() as (kernel_id, notebook):
        notebook.run("x = 1")
        saved = server.finish(server.ask("POST", f"kernels/{kernel_id}/save", {"name": "aside", "store": folder}, 202))
        assert (saved["state"], saved["result"]["store"]) == ("done", folder)
        assert "aside" not in [one["name"] for one in server.ask("GET", "snapshots")["snapshots"]]
        assert [one.name for one in Store(Path(folder)).list()] == ["aside"]
        (there,) = server.ask("GET", f"snapshots?store={folder}")["snapshots"]
        assert (there["name"], there["notebook"]) == ("aside", str(server.root / "train.ipynb"))
        assert server.ask("PATCH", f"snapshots/aside?store={folder}", {"message": "far"})["message"] == "far"
        assert server.ask("GET", f"snapshots/aside?store={folder}")["message"] == "far"
        assert server.ask("GET", f"snapshots/aside/diff/aside?store={folder}")["variables"] is not None
        server.ask("GET", "snapshots?store=relative", status=409)
        notebook.run("x = 2")
        asked = {"name": "aside", "store": folder}
        refused = server.finish(server.ask("POST", f"kernels/{kernel_id}/restore", {**asked, "gpu": 99}, 202))
        assert "GPU" in refused["error"]["why"]
        restored = server.finish(server.ask("POST", f"kernels/{kernel_id}/restore", asked, 202))
        assert (restored["state"], restored["name"]) == ("done", "aside")
        assert notebook.value("x") == "1"
        assert server.ask("DELETE", f"snapshots/aside?store={folder}")["freed"] > 0
        refused = server.finish(server.ask("POST", f"kernels/{kernel_id}/save", {**asked, "store": "relative"}, 202))
        assert refused["error"]["kind"] == "Refused"


@needs_criu
def test_a_restore_without_a_name_takes_the_latest(server: Server) -> None:
    with server.notebook() as (kernel_id, notebook):
        for number in (1, 2):
            notebook.run(f"y = {number}")
            server.save(kernel_id, f"y{number}")
        notebook.run("y = 3")
        lazily = server.finish(server.ask("POST", f"kernels/{kernel_id}/restore", {"lazy": True}, 202))
        assert (lazily["name"], lazily["result"]["lazy"]) == ("y2", False)
        server.ask("POST", f"kernels/{kernel_id}/restore", {"lazy": "yes"}, 400)
        assert notebook.value("y") == "2"


@needs_criu
def test_a_snapshot_is_removed(server: Server) -> None:
    with server.notebook() as (kernel_id, _):
        server.save(kernel_id, "gone")
    assert server.ask("DELETE", "snapshots/gone")["freed"] >= 0
    assert server.ask("GET", "snapshots/gone", status=404)["error"]["kind"] == "NoSuchSnapshot"
    assert "gone" not in [s["name"] for s in server.ask("GET", "snapshots")["snapshots"]]


@needs_criu
def test_a_snapshot_is_renamed_and_pinned(server: Server) -> None:
    with server.notebook() as (kernel_id, _):
        server.save(kernel_id, "old")
    assert server.ask("POST", "snapshots/old/rename", {"name": "new"})["name"] == "new"
    assert server.ask("POST", "snapshots/old/rename", {"name": "newer"}, 404)["error"]["kind"] == "NoSuchSnapshot"
    assert server.ask("POST", "snapshots/new/pin", {"pinned": True})["pinned"] is True
    assert next(s for s in server.ask("GET", "snapshots")["snapshots"] if s["name"] == "new")["pinned"] is True
    assert server.ask("DELETE", "snapshots/new", status=409)["error"]["kind"] == "Pinned"
    assert server.ask("POST", "snapshots/new/pin", {"pinned": False})["pinned"] is False
    server.ask("DELETE", "snapshots/new")


def _keep(server: Server, *names: str) -> Store:
    """Put snapshots into the server's store that have bytes in common, and return the store."""
    store = Store(server.store, Trust(server.folder / "keys"))
    for name in names:
        with store.writer(name) as writer:
            (writer.directory / "pages").write_bytes(random.Random(1).randbytes(200_000))
            writer.commit(message="", parent=None, kernel={"notebook": "a.ipynb"}, machine={}, cuda={}, process={})
    return store


def test_a_note_and_tags_are_changed(server: Server) -> None:
    store = _keep(server, "noted")
    store.tag("noted", ["hibernated", "old"])
    changed = server.ask("PATCH", "snapshots/noted", {"message": "the best", "tags": ["best", "hibernated"]})
    assert (changed["message"], changed["tags"], changed["pinned"]) == ("the best", ["best", "hibernated"], False)
    for only in ({"message": "another"}, {"tags": ["v2"]}):
        server.ask("PATCH", "snapshots/noted", only)
    (listed,) = [s for s in server.ask("GET", "snapshots")["snapshots"] if s["name"] == "noted"]
    assert (listed["message"], listed["tags"]) == ("another", ["v2"])
    assert store.trusted("noted").message == "another"
    # All or nothing.
    assert server.ask("PATCH", "snapshots/noted", {"message": "x", "tags": ["/"]}, 400)["error"]["kind"] == "BadName"
    assert server.ask("PATCH", "snapshots/noted", {"tags": [1]}, 400)["error"]["kind"] == "BadRequest"
    assert server.ask("PATCH", "snapshots/none", {"message": "x"}, 404)["error"]["kind"] == "NoSuchSnapshot"
    assert server.ask("GET", "snapshots/noted")["message"] == "another"
    store.remove("noted")


def test_several_are_removed_at_once_and_pinned_ones_are_left(server: Server) -> None:
    store = _keep(server, "first", "second", "kept")
    before = server.ask("GET", "snapshots")["store"]
    assert (before["folder"], before["used"], before["quota"]) == (str(server.store), store.used(), None)
    assert before["free"] > 0
    store.pin("kept", True)
    alone = server.ask("POST", "removal", {"names": ["first"], "dry_run": True})
    wanted = ["first", "second", "kept", "none"]
    would = server.ask("POST", "removal", {"names": wanted, "dry_run": True})
    assert would["would_remove"] == ["first", "second"]
    assert [(e["kind"], e["data"]["name"]) for e in would["errors"]] == [("Pinned", "kept"), ("NoSuchSnapshot", "none")]
    assert {"first", "second", "kept"} <= {m.name for m in store.list()}
    store.pin("kept", False)
    done = server.ask("POST", "removal", {"names": ["first", "second", "kept", "none"]})
    assert (done["removed"], [e["kind"] for e in done["errors"]]) == (["first", "second", "kept"], ["NoSuchSnapshot"])
    # What they had in common is freed with the last of them alone.
    assert done["freed"] > 3 * alone["freed"]
    assert not {"first", "second", "kept"} & {m.name for m in store.list()}
    assert store.used() < before["used"]


@needs_criu
def test_snapshots_are_compared_and_their_origins_told(server: Server) -> None:
    with server.notebook() as (kernel_id, notebook):
        server.save(kernel_id, "before")
        notebook.run("import os; grown = os.urandom(20_000_000)")
        server.save(kernel_id, "after")
    told = server.ask("GET", "snapshots/before/diff/after")
    assert (told["old"], told["new"]) == ("before", "after")
    assert told["changed"] == sum(file["changed"] for file in told["files"]) > 20_000_000
    assert ("grown", "new") in [(one["name"], one["how"]) for one in told["variables"]]
    assert [s["name"] for s in server.ask("GET", "snapshots/after/log")["snapshots"]] == ["after", "before"]
    assert server.ask("GET", "snapshots/before/diff/none", status=404)["error"]["kind"] == "NoSuchSnapshot"


@needs_criu
def test_the_kernel_tells_what_it_has_executed_and_a_restore_takes_that_back(server: Server) -> None:
    with server.notebook() as (kernel_id, notebook):
        notebook.run("1")
        assert server.ask("GET", f"kernels/{kernel_id}/executed") == {"restored": "", "cells": {}, "others": [1]}
        server.save(kernel_id, "first")
        notebook.run("2")
        notebook.client.execute("unseen = 1", silent=True)
        assert server.ask("GET", f"kernels/{kernel_id}/executed")["others"] == [1, 2]
        assert (
            server.finish(server.ask("POST", f"kernels/{kernel_id}/restore", {"name": "first"}, 202))["error"] is None
        )
        told = server.ask("GET", f"kernels/{kernel_id}/executed")
        assert told == {"restored": "first", "cells": {}, "others": [1]}


@needs_criu
def test_a_failure_has_its_logs_without_secrets(server: Server, tmp_path: Path) -> None:
    secret = "hunter2-in-the-kernel"
    with socket.socket(socket.AF_UNIX) as listener, server.notebook() as (kernel_id, notebook):
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        notebook.run(f"import os, socket; os.environ['SECRET'] = {secret!r}; os.write(2, {secret!r}.encode())")
        notebook.run(f"s = socket.socket(socket.AF_UNIX); s.connect({str(tmp_path / 's')!r})")
        peer, _ = listener.accept()
        with peer:
            failed = server.finish(server.ask("POST", f"kernels/{kernel_id}/save", {"name": "never"}, 202))
        logs = {log["name"]: log["text"] for log in server.ask("GET", f"operations/{failed['id']}/log")["logs"]}
        assert failed["error"]["data"]["criu_error"] in logs["criu"]
        whole = server.ask("GET", f"kernels/{kernel_id}/log")["logs"]
        key = notebook.client.session.key.decode()
        for hidden in (secret, key, TOKEN):
            assert hidden not in json.dumps([logs, whole])


@needs_criu
def test_the_log_of_an_operation_that_lost_its_kernel_is_kept(server: Server) -> None:
    with server.notebook() as (kernel_id, notebook):
        notebook.run("import jupyter_gpuckpt, os, signal")
        notebook.run("said = b'Oh\\n2026-01-01 00:00:00,000 INFO like a line of the keeper, but my-secret\\n'")
        notebook.run("jupyter_gpuckpt.before_save(lambda: os.write(2, said) and os.kill(os.getpid(), signal.SIGKILL))")
        failed = server.finish(server.ask("POST", f"kernels/{kernel_id}/save", {"name": "never"}, 202))
    assert failed["state"] == "failed"
    (log,) = server.ask("GET", f"operations/{failed['id']}/log")["logs"]
    assert "the kernel ended with status -9" in log["text"]
    assert "the kernel's last words:" in log["text"]
    assert "my-secret" not in log["text"]


def test_what_this_version_can_do_is_told(server: Server) -> None:
    assert server.ask("GET", "kernels")["features"] == _FEATURES


@needs_criu
def test_a_taken_name_is_the_operation_s_error(server: Server) -> None:
    with server.notebook() as (kernel_id, _):
        server.save(kernel_id, "taken")
        failed = server.finish(server.ask("POST", f"kernels/{kernel_id}/save", {"name": "taken"}, 202))
        assert (failed["state"], failed["error"]["kind"]) == ("failed", "NameTaken")
        assert failed["error"]["then"]
        again = {"name": "taken", "replace": True}
        assert server.finish(server.ask("POST", f"kernels/{kernel_id}/save", again, 202))["state"] == "done"


@needs_criu
def test_an_operation_is_cancelled(server: Server) -> None:
    with server.notebook() as (kernel_id, notebook):
        notebook.run("import jupyter_gpuckpt, time\njupyter_gpuckpt.before_save(lambda: time.sleep(60))")
        operation = server.ask("POST", f"kernels/{kernel_id}/save", {"name": "never"}, 202)
        path = f"operations/{operation['id']}"
        wait_until(lambda: server.ask("GET", path)["stage"] == "preparing the kernel")
        assert server.ask("DELETE", path)["cancelling"] is True
        ended = server.finish(operation)
        assert (ended["state"], ended["error"]["kind"]) == ("cancelled", "Cancelled")
        assert server.ask("DELETE", path)["state"] == "cancelled"
        server.ask("GET", "snapshots/never", status=404)


_HELD_AFTER_RESTORE = """
import jupyter_gpuckpt, os, time
@jupyter_gpuckpt.after_restore
def held(resumed):
    while resumed.restored and not os.path.exists({go!r}):
        open({reached!r}, "w").close()
        time.sleep(0.01)
"""


@needs_criu
def test_a_cancelled_operation_is_the_one_that_was_named(server: Server, tmp_path: Path) -> None:
    reached, go = tmp_path / "reached", tmp_path / "go"
    with server.notebook() as (kernel_id, notebook):
        notebook.run(_HELD_AFTER_RESTORE.format(reached=str(reached), go=str(go)))
        server.save(kernel_id, "held")
        restore = server.ask("POST", f"kernels/{kernel_id}/restore", {"name": "held"}, 202)
        path = f"operations/{restore['id']}"
        wait_until(reached.exists)
        save = server.ask("POST", f"kernels/{kernel_id}/save", {"name": "of-somebody-else"}, 202)

        def queued() -> list[str]:
            (kernel,) = server.ask("GET", "kernels")["kernels"]
            return list(kernel["queued"])

        try:
            wait_until(lambda: queued() == ["save"], what="the save never waited")
            server.ask("DELETE", path)
        finally:
            go.touch()
        assert server.finish(restore)["state"] == "done", "it was too late to cancel it"
        assert server.finish(save)["state"] == "done"


@needs_criu
def test_events_tell_each_step(server: Server) -> None:
    address = server.url.replace("http", "ws", 1) + "api/events/subscribe"
    stream = websocket.create_connection(address, header=[f"Authorization: token {TOKEN}"], timeout=60)
    try:
        with server.notebook() as (kernel_id, _):
            operation = server.ask("POST", f"kernels/{kernel_id}/save", {"name": "told"}, 202)
            events = []
            while not events or events[-1]["schema_id"] != SNAPSHOTS:
                event = json.loads(stream.recv())
                if event["schema_id"] in (OPERATION, SNAPSHOTS):
                    events.append(event)
    finally:
        stream.close()
    steps = [event for event in events if event["schema_id"] == OPERATION]
    assert {step["id"] for step in steps} == {operation["id"]}
    stages = list(dict.fromkeys(step["stage"] for step in steps))
    assert stages[:1] == ["starting"]
    assert {"checking", "preparing the kernel", "freezing", "writing"} <= set(stages)
    assert [step["state"] for step in steps][-1] == "done"
    assert (events[-1]["change"], events[-1]["name"]) == ("saved", "told")


def test_a_kernel_that_is_not_there(server: Server) -> None:
    for what in ("save", "restore"):
        error = server.ask("POST", f"kernels/{uuid.uuid4()}/{what}", {"name": "x"}, 404)["error"]
        assert error["kind"] == "NoSuchKernel"
        assert error["then"]


@pytest.mark.parametrize("name", ["..%2Fsecret", "a%00b", "%D0%B0bc", "x" * 10_000, ".hidden", "%20"])
def test_odd_names_are_refused(server: Server, name: str) -> None:
    for method in ("GET", "DELETE"):
        assert server.ask(method, f"snapshots/{name}", status=400)["error"]["kind"] == "BadName"


@pytest.mark.parametrize("body", ["", "[]", "{", '"x"', "1", '{"name": 5}', '{"name": "x", "more": 1}', "[" * 10_000])
def test_odd_bodies_are_refused(server: Server, body: str) -> None:
    response = server.request("POST", f"api/gpuckpt/kernels/{uuid.uuid4()}/save", data=body)
    assert response.status_code == 400
    assert response.json()["error"]["then"]


def test_an_operation_that_is_not_there(server: Server) -> None:
    for method in ("GET", "DELETE"):
        assert server.ask(method, f"operations/{uuid.uuid4().hex}", status=404)["error"]["kind"] == "NoSuchOperation"


def test_the_doctor_is_asked(server: Server) -> None:
    judged = server.ask("GET", "doctor")
    assert {"name", "ok", "required", "found", "means", "mend"} == set(judged["checks"][0])


def test_without_criu_the_server_says_so(bare_server: Server) -> None:
    with bare_server.notebook() as (kernel_id, notebook):
        assert notebook.value("1 + 1") == "2"
        found = bare_server.ask("GET", "kernels")
        assert found["unavailable"]["kind"] == "Unavailable"
        assert [plain["kernel_id"] for plain in found["plain"]] == [kernel_id]
        assert found["kernels"] == []
        assert bare_server.ask("POST", f"kernels/{kernel_id}/save", {"name": "x"}, 503)["error"]["then"]
    assert bare_server.ask("GET", "doctor")["works"] is False
    nothing = bare_server.ask("GET", "snapshots")
    assert (nothing["snapshots"], nothing["faults"], nothing["store"]["used"]) == ([], [], 0)
    assert nothing["store"]["free"] > 0, "of the disk that it will be on"


def test_a_store_that_cannot_be_used_is_an_error_with_a_reason(bare_server: Server) -> None:
    bare_server.store.write_text("")
    try:
        error = bare_server.ask("GET", "snapshots", status=500)["error"]
        assert (error["kind"], bool(error["why"]), bool(error["then"])) == ("StoreError", True, True)
    finally:
        Path(bare_server.store).unlink()


@needs_criu
def test_names_belong_to_notebooks(server: Server) -> None:
    with server.notebook("one/a.ipynb") as (first, a), server.notebook("two/a.ipynb") as (second, b):
        a.run("x = 'a'")
        b.run("x = 'b'")

        def restore(kernel_id: str, body: dict[str, str]) -> dict[str, Any]:
            return server.finish(server.ask("POST", f"kernels/{kernel_id}/restore", body, 202))

        server.save(first, "shared")
        for body, kind in (({}, "NoSuchSnapshot"), ({"name": "shared"}, "NotOwn")):
            refused = restore(second, body)
            assert refused["error"]["kind"] == kind
            assert refused["error"]["data"]["from"] == "a.ipynb:shared"
        assert b.value("x") == "b"
        saved = server.save(second, "shared")
        assert saved["label"] == "shared"
        told = {s["label"]: s["name"] for s in server.ask("GET", "snapshots")["snapshots"]}
        assert told["two/a.ipynb:shared"] == saved["name"]
        assert server.ask("GET", f"snapshots/{saved['name']}")["notebook"].endswith("two/a.ipynb")
        # Each has its own by that name, and any by what the list calls it; or by its notebook, if that is said.
        assert restore(second, {"name": "shared"})["result"]["id"] == saved["id"]
        for name in (told["one/a.ipynb:shared"], "one/a.ipynb:shared"):
            assert restore(second, {"from": name})["state"] == "done"
            assert b.value("x") == "a"
        assert server.ask("POST", f"kernels/{second}/restore", {"name": "shared", "from": "shared"}, 400)
        assert server.ask("GET", "snapshots/one%2Fa.ipynb:shared")["name"] == told["one/a.ipynb:shared"]
        ambiguous = server.ask("POST", f"kernels/{second}/restore", {"from": "a.ipynb:shared"}, 409)
        assert sorted(ambiguous["error"]["data"]["names"]) == ["one/a.ipynb:shared", "two/a.ipynb:shared"]
        renamed = server.ask("POST", f"snapshots/{saved['name']}/rename", {"name": "mine"})
        assert (renamed["name"], renamed["label"]) == ("mine", "mine")
        assert server.ask("DELETE", "snapshots/one%2Fa.ipynb:shared")["name"] == told["one/a.ipynb:shared"]
        server.ask("DELETE", "snapshots/mine")
