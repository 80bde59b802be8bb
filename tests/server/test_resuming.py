"""A notebook that is opened again starts with the kernel that it had (GPUCKPT_RESUME=auto)."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import requests
from jupyter_servers import SPEC, Server, running
from keeper_faults import processes_of
from notebooks import PATIENCE, wait_until

pytestmark = pytest.mark.criu

_HUB = {"GPUCKPT_RESUME": "auto", "GPUCKPT_HIBERNATE_ON": "stop"}


def _opened(server: Server, path: str = "a.ipynb") -> str:
    """Open a notebook's session; return its kernel's id."""
    wanted = {"path": path, "name": Path(path).name, "type": "notebook", "kernel": {"name": SPEC}}
    answer = server.request("POST", "api/sessions", json=wanted)
    assert answer.status_code == 201, answer.text
    session: dict[str, Any] = answer.json()
    return str(session["kernel"]["id"])


def _stop(server: Server, number: signal.Signals = signal.SIGTERM) -> None:
    server.process.send_signal(number)
    assert server.process.wait(PATIENCE) == 0 or number == signal.SIGKILL


def _hibernated(server: Server) -> list[str]:
    return [one["name"] for one in server.ask("GET", "hibernated")["hibernated"]]


def _saved_by_themselves(server: Server) -> set[str]:
    return {one["id"] for one in server.ask("GET", "snapshots")["snapshots"] if one["automatic"]}


def test_a_notebook_starts_with_the_kernel_that_was_hibernated(tmp_path: Path) -> None:
    with running(tmp_path, **_HUB) as server:
        with server.connected(_opened(server)) as notebook:
            notebook.run("import os; x, much = 41, os.urandom(50_000_000)")
        _stop(server)
    with running(tmp_path, **_HUB) as server:
        (name,) = _hibernated(server)
        with server.connected(_opened(server, "b.ipynb")) as notebook:
            assert "NameError" in notebook.fails("x").text  # another notebook
        with server.connected(kernel := _opened(server)) as notebook:
            assert notebook.value("x + 1") == "42"
            status = notebook.run("%gpuckpt status").text
            assert "resumed from" in status
            assert f"{name}, saved " in status
            assert f" on {platform.node()}; resumed " in status
            # The snapshot was the kernel, which goes on from there.
            assert _hibernated(server) == []
            assert "Saved" in notebook.run("%gpuckpt save later").text
            server.request("POST", f"api/kernels/{kernel}/restart").raise_for_status()
        with server.connected(kernel) as notebook:
            assert "NameError" in notebook.fails("x").text
            assert "resumed from" not in notebook.run("%gpuckpt status").text
        _stop(server)
    with running(tmp_path, **_HUB) as server, server.connected(_opened(server)) as notebook:
        assert "NameError" in notebook.fails("x").text  # what was hibernated last
        assert "resumed from" in notebook.run("%gpuckpt status").text


def test_a_resumed_kernel_has_what_was_chosen_for_it_and_the_new_server_s_settings_for_the_rest(tmp_path: Path) -> None:
    with running(tmp_path, **_HUB, GPUCKPT_AUTO="10s") as server:
        with server.connected(_opened(server)) as notebook:
            notebook.run("%gpuckpt autosleep 2h")
        with server.connected(_opened(server, "b.ipynb")) as notebook:
            notebook.run("%gpuckpt auto on --keep 7")
        _stop(server)
    with running(tmp_path, **_HUB, GPUCKPT_AUTO="5s", GPUCKPT_SLEEP_AFTER="3h") as server:
        kernels = [_opened(server), _opened(server, "b.ipynb")]
        states = {one["kernel_id"]: one for one in server.ask("GET", "kernels")["kernels"]}
        first, second = (states[kernel] for kernel in kernels)
        assert first["resumed"]
        assert second["resumed"]
        assert (first["auto"]["after"], first["sleep_after"]) == (5, 7200)
        assert (second["auto"]["after"], second["auto"]["keep"], second["sleep_after"]) == (0, 7, 10800)
        _stop(server)


def test_what_was_chosen_is_heeded_from_the_moment_that_a_kernel_is_resumed_in_another_one_s_place(
    tmp_path: Path,
) -> None:
    how = {"GPUCKPT_HIBERNATE_ON": "stop", "GPUCKPT_SLEEP_WITHOUT_GPU": "on"}
    with running(tmp_path, **how) as server:
        with server.connected(_opened(server)) as notebook:
            notebook.run("%gpuckpt auto on --every 2s\n%gpuckpt autosleep 1s")
        _stop(server)
    with running(tmp_path, **how) as server:
        kernel = _opened(server)
        (name,) = _hibernated(server)
        server.finish(server.ask("POST", f"hibernated/{name}/resume", {"kernel_id": kernel}, 202))
        with server.connected(kernel) as notebook:
            before = _saved_by_themselves(server)  # the first server may have been there for long enough
            notebook.client.execute("import time\nwhile True: time.sleep(0.1)")
            wait_until(lambda: _saved_by_themselves(server) - before)
            server.request("POST", f"api/kernels/{kernel}/interrupt").raise_for_status()
        wait_until(lambda: server.ask("GET", "kernels")["kernels"][0]["state"] == "sleeping")


def test_what_a_resumed_kernel_had_done_that_was_in_no_other_snapshot_is_kept_by_a_restore(tmp_path: Path) -> None:
    """That it came from is removed when it is back."""
    with running(tmp_path, **_HUB) as server:
        for path in ("a.ipynb", "b.ipynb"):
            with server.connected(_opened(server, path)) as notebook:
                notebook.run("x = 1")
                notebook.run("%gpuckpt save base")
                notebook.run("x = 2")
                if path == "b.ipynb":
                    notebook.run("%gpuckpt save later")
        _stop(server)
    with running(tmp_path, **_HUB) as server:
        with server.connected(_opened(server, "a.ipynb")) as notebook:
            assert "What it was before is kept as" in notebook.run("%gpuckpt restore base").text
            assert notebook.value("x") == "1"
            notebook.run("%gpuckpt redo")
            assert notebook.value("x") == "2"
        with server.connected(_opened(server, "b.ipynb")) as notebook:
            assert "What it was before is kept as" not in notebook.run("%gpuckpt restore base").text
        _stop(server)


def test_a_kernel_that_was_resumed_is_hibernated_again_though_the_server_hibernates_no_others(tmp_path: Path) -> None:
    """The snapshot that it came from is gone: it is to end with no server that only resumes kernels."""
    with running(tmp_path, **_HUB) as server:
        with server.connected(_opened(server)) as notebook:
            notebook.run("x = 41")
        _stop(server)
    for _ in range(2):
        with running(tmp_path, GPUCKPT_RESUME="auto") as server:
            with server.connected(_opened(server)) as notebook:
                notebook.run("x += 1")
            with server.connected(_opened(server, "b.ipynb")) as notebook:
                assert "NameError" in notebook.fails("x").text
                notebook.run("x = 1")
            _stop(server)
            assert "What became of the kernels" in server.log.read_text()
    with running(tmp_path, GPUCKPT_RESUME="auto") as server, server.connected(_opened(server)) as notebook:
        assert notebook.value("x") == "43"


def test_a_kernel_that_was_resumed_is_hibernated_where_others_are_culled(tmp_path: Path) -> None:
    with running(tmp_path, **_HUB) as server:
        with server.connected(_opened(server)) as notebook:
            notebook.run("x = 41")
        _stop(server)
    idle = "c.MappingKernelManager.cull_idle_timeout = c.MappingKernelManager.cull_interval = 1"
    with running(tmp_path, idle, GPUCKPT_RESUME="auto") as server:
        _opened(server)
        wait_until(lambda: server.request("GET", "api/kernels").json() == [])
        _opened(server, "b.ipynb")
        wait_until(lambda: server.request("GET", "api/kernels").json() == [])
        assert len(_hibernated(server)) == 1
        with server.connected(_opened(server)) as notebook:
            assert notebook.value("x") == "41"


def test_a_cell_that_ran_goes_on_when_the_notebook_is_opened(tmp_path: Path) -> None:
    steps = tmp_path / "steps"
    with running(tmp_path, **_HUB) as server:
        with server.connected(_opened(server)) as notebook:
            step = f"    open({str(steps)!r}, 'a').write(f'{{i}}\\n'); time.sleep(0.1)"
            notebook.client.execute(f"import time\nfor i in range(10**6):\n{step}")
            wait_until(lambda: steps.exists() and len(steps.read_text().splitlines()) > 3)
        _stop(server)
    done = len(steps.read_text().splitlines())
    with running(tmp_path, **_HUB) as server:
        _opened(server)
        wait_until(lambda: len(steps.read_text().splitlines()) > done + 3)
        assert [int(line) for line in steps.read_text().split()] == list(range(len(steps.read_text().split())))


def test_what_cannot_be_resumed_is_kept_and_a_fresh_kernel_starts(tmp_path: Path) -> None:
    with running(tmp_path, **_HUB) as server:
        with server.connected(_opened(server)) as notebook:
            notebook.run("x = 41")
        _stop(server)
    largest = max((tmp_path / "store" / "packs").rglob("*"), key=lambda path: path.stat().st_size)
    away = largest.rename(tmp_path / "away")
    with running(tmp_path, **_HUB) as server:
        (name,) = _hibernated(server)
        with server.connected(kernel := _opened(server)) as notebook:
            assert "NameError" in notebook.fails("x").text
            assert f"The hibernated kernel of {tmp_path / 'work' / 'a.ipynb'} was not resumed" in server.log.read_text()
            assert _hibernated(server) == [name]
        away.rename(largest)
        done = server.finish(server.ask("POST", f"hibernated/{name}/resume", {"kernel_id": kernel}, 202))
        assert done["state"] == "done", done["error"]
        with server.connected(kernel) as notebook:
            assert notebook.value("x + 1") == "42"


def test_what_is_damaged_is_kept_and_a_fresh_kernel_starts(tmp_path: Path) -> None:
    with running(tmp_path, **_HUB) as server:
        with server.connected(_opened(server)) as notebook:
            notebook.run("import hashlib, os; x = bytearray(os.urandom(100 << 20)); d = hashlib.blake2b(x).hexdigest()")
        _stop(server)
    pack = max((tmp_path / "store" / "packs").rglob("*"), key=lambda path: path.stat().st_size)
    _flip(pack)
    with running(tmp_path, **_HUB) as server:
        (name,) = _hibernated(server)
        with server.connected(kernel := _opened(server)) as notebook:
            assert "NameError" in notebook.fails("x").text
            assert f"The hibernated kernel of {tmp_path / 'work' / 'a.ipynb'} was not resumed" in server.log.read_text()
            assert "is damaged" in server.log.read_text()
            assert _hibernated(server) == [name]
        _flip(pack)
        done = server.finish(server.ask("POST", f"hibernated/{name}/resume", {"kernel_id": kernel}, 202))
        assert done["state"] == "done", done["error"]
        with server.connected(kernel) as notebook:
            assert notebook.value("hashlib.blake2b(x).hexdigest() == d") == "True"


def _flip(pack: Path) -> None:
    """Change a bit in the middle of a pack, or put it right."""
    with pack.open("r+b") as file:
        file.seek(pack.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def test_a_kernel_that_outlived_its_server_is_held_by_the_next(tmp_path: Path) -> None:
    with running(tmp_path, **_HUB) as server:
        with server.connected(kernel := _opened(server)) as notebook:
            notebook.run("x = 41")
        _stop(server, signal.SIGKILL)
    with running(tmp_path, **_HUB) as server:
        assert _opened(server) == kernel
        with server.connected(kernel) as notebook:
            assert notebook.value("x + 1") == "42"
        (session,) = server.request("GET", "api/sessions").json()
        assert (session["path"], session["kernel"]["id"]) == ("a.ipynb", kernel)
        _stop(server)
    with running(tmp_path, **_HUB) as server, server.connected(_opened(server)) as notebook:
        assert notebook.value("x + 1") == "42"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "stopped"])
def test_a_server_that_ends_while_it_resumes_a_kernel_loses_nothing(tmp_path: Path, number: signal.Signals) -> None:
    with running(tmp_path, **_HUB) as server:
        with server.connected(_opened(server)) as notebook:
            notebook.run("import os; x, much = 41, os.urandom(150_000_000)")
        _stop(server)
    with running(tmp_path, **_HUB) as server:
        opening = threading.Thread(target=_opened_perhaps, args=(server,))
        opening.start()
        wait_until(lambda: list((tmp_path / "runtime" / "gpuckpt").glob("*/run-*")))
        _stop(server, number)
        opening.join()
        wait_until(lambda: not processes_of(tmp_path))
        assert not list((tmp_path / "runtime" / "gpuckpt").glob("[!.]*"))
    with running(tmp_path, **_HUB) as server:
        assert len(_hibernated(server)) == 1
        with server.connected(_opened(server)) as notebook:
            assert notebook.value("x + 1") == "42"


def _opened_perhaps(server: Server) -> None:
    with contextlib.suppress(requests.RequestException, AssertionError):
        _opened(server)


def test_on_a_machine_that_shares_no_more_than_the_remote_a_notebook_starts_with_it_too(tmp_path: Path) -> None:
    remote = tmp_path / "remote"

    def machine(name: str) -> dict[str, str]:
        return {**_HUB, "GPUCKPT_REMOTE": str(remote), "GPUCKPT_STORE": str(tmp_path / name)}

    with running(tmp_path, **machine("first")) as server:
        with server.connected(_opened(server)) as notebook:
            notebook.run("x = 41")
        _stop(server)
    assert len(list((remote / "snapshots").iterdir())) == 1
    with running(tmp_path, **machine("second")) as server:
        with server.connected(_opened(server)) as notebook:
            assert notebook.value("x") == "41"
            # It runs here now: no other machine is to begin with what it was.
            wait_until(lambda: not list((remote / "snapshots").iterdir()), what="the remote still has it")
            notebook.run("x += 1")
        _stop(server)
    with running(tmp_path, **machine("third")) as server, server.connected(_opened(server)) as notebook:
        assert notebook.value("x") == "42"


def test_a_server_starts_and_stops_where_its_remote_cannot_be_reached(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    environment = {**_HUB, "GPUCKPT_REMOTE": str(tmp_path / "file" / "remote")}
    with running(tmp_path, **environment) as server:
        with server.connected(_opened(server)) as notebook:
            notebook.run("x = 41")
        _stop(server)
    said = (tmp_path / "server.log").read_text()
    assert "hibernated kernels could not be fetched" in said
    assert "only in the store of this machine" in said
    with running(tmp_path, **_HUB) as server, server.connected(_opened(server)) as notebook:
        assert notebook.value("x") == "41"
