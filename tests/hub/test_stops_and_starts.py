"""JupyterHub stops, culls and starts users' servers, and their notebooks have their kernels again."""

from __future__ import annotations

import os
import signal
import time

from hub import PATIENCE, Hub, left_of, processes_of
from notebooks import wait_until
from people import UIDS, Machine

_BEGIN = "import os; secret = os.urandom(4).hex(); print('secret', secret, os.getuid())"


def test_a_server_that_is_stopped_and_started_goes_on(machine: Machine, hub: Hub) -> None:
    before = left_of(machine)
    alice, bob, carol = (hub.start(user) for user in UIDS)
    said = {}
    for user, server in {"alice": alice, "bob": bob, "carol": carol}.items():
        said[user] = server.run(_BEGIN)
        assert said[user].endswith(str(UIDS[user]))
    assert "Saved first" in alice.run("%gpuckpt save first --wait")
    assert "jupyter gpuckpt broker install" in carol.run("%gpuckpt save first --wait")
    for user in UIDS:
        hub.stop(user)
    # Nothing is left of them but their files: what carol had is gone with her plain kernel, as anywhere.
    wait_until(lambda: left_of(machine) == before)
    for user in ("alice", "bob"):
        server = hub.start(user)
        assert f"secret {server.run('print(secret)')} {UIDS[user]}" == said[user]
        status = server.run("%gpuckpt status")
        assert "resumed from" in status
        assert ("first" in status) == (user == "alice")
        assert len(server.ask("GET", "snapshots")["snapshots"]) == (user == "alice")
    assert "NameError" in hub.start("carol").run("print(secret)")


def test_a_server_that_is_culled_is_started_again_by_whoever_opens_the_notebook(machine: Machine) -> None:
    hub = Hub(machine, timeout=20)
    try:
        before = left_of(machine)
        alice = hub.start("alice")
        said = alice.run(_BEGIN)
        hub.wait_until_stopped("alice")
        wait_until(lambda: left_of(machine) == before)
        assert "Culling server alice" in hub.log.read_text()
        assert hub.start("alice").run("print('secret', secret, os.getuid())") == said
    finally:
        hub.close()


def test_every_process_of_a_server_is_told_to_end_as_by_systemd(machine: Machine, hub: Hub) -> None:
    alice = hub.start("alice")
    said = alice.run(_BEGIN)
    alice.run("import subprocess; child = subprocess.Popen(['sleep', '1000'])")
    for pid in processes_of(machine, "alice"):
        os.kill(pid, signal.SIGTERM)
    wait_until(lambda: not processes_of(machine, "alice"))
    hub.stop("alice")
    alice = hub.start("alice")
    assert alice.run("print('secret', secret, os.getuid())") == said
    assert alice.run("print(child.poll())") == "None"


def test_kernels_are_hibernated_when_the_hub_itself_stops(machine: Machine, hub: Hub) -> None:
    before = left_of(machine)
    said = hub.start("alice").run(_BEGIN)
    hub.process.terminate()
    assert hub.process.wait(PATIENCE) == 0
    wait_until(lambda: left_of(machine) == before)
    again = Hub(machine)
    try:
        assert again.start("alice").run("print('secret', secret, os.getuid())") == said
    finally:
        again.close()


def test_a_kernel_of_a_server_that_was_killed_belongs_to_the_next(machine: Machine, hub: Hub) -> None:
    alice = hub.start("alice")
    said, kernel = alice.run(_BEGIN), alice.opened()
    (server,) = {pid for pid, command in processes_of(machine, "alice").items() if "jupyterhub-singleuser" in command}
    os.kill(server, signal.SIGKILL)
    wait_until(lambda: server not in processes_of(machine, "alice"))
    hub.stop("alice")
    alice = hub.start("alice")
    assert alice.opened() == kernel
    assert alice.run("print('secret', secret, os.getuid())") == said


def test_a_notebook_of_a_gigabyte_that_is_opened_after_its_server_was_culled_answers_soon(hub: Hub) -> None:
    alice = hub.start("alice")
    alice.run("import os; much = os.urandom(1_000_000_000); print(len(much))")
    hub.stop("alice")
    alice = hub.start("alice")
    began = time.monotonic()
    assert alice.run("print(len(much))") == "1000000000"
    took = time.monotonic() - began
    print(f"a notebook of 1 GB: {took:.1f} s from opening it to the answer of its next cell")
    assert took < PATIENCE
