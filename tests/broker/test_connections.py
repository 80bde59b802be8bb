"""TCP connections between a kernel's own processes come back for users without root, too, and give nobody more rights.

Root's own tests of them are run by a user, whose keepers have the broker do all that takes root.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from people import Person

pytestmark = pytest.mark.criu

TESTS = Path(__file__).parents[1]
# Dask's folder in /tmp is one user's at a time, and root's tests of it may run as well.
RUN = """
import os, subprocess, sys
def pytest(scratch, *words):
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    environment = {**os.environ, "DASK_TEMPORARY_DIRECTORY": scratch}
    done = subprocess.run(argv, capture_output=True, text=True, env=environment)
    return [done.returncode, done.stdout[-20000:] + done.stderr[-2000:]]
"""


def passes(person: Person, file: str, which: str) -> int:
    """Run some tests as this user; return how many passed."""
    words = [str(person.home / "dask"), str(TESTS / file), "-k", which, f"--basetemp={person.home / 'tests'}"]
    status, said = person.does(RUN, f"pytest(*{words!r})")
    assert status == 0, said
    return int(said.splitlines()[-1].split()[0])


@pytest.mark.parametrize(
    ("file", "tests"),
    [
        ("keeper/test_connections_inside.py", ["to_the_outside"]),
        ("keeper/test_connections_inside.py", ["goes_on_talking and ffff", "copies_have", "hibernated", "second_job"]),
        (
            "keeper/test_connections_inside.py",
            ["halves", "however_much", "options", "two_listening", "before_it_ended"],
        ),
        ("keeper/test_dask.py", ["futures_in_flight"]),
        ("keeper/test_taken.py", ["locked_since", "stays_hibernated", "terminal", "refused_what"]),
        ("kernel/test_what_survives.py", ["not_waited_for", "no_files", "on_their_way", "was_removed"]),
        ("kernel/test_refusals.py", ["left_behind"]),
    ],
)
def test_what_holds_for_roots_kernels_and_jobs_holds_for_a_users(
    person: Callable[..., Person], file: str, tests: list[str]
) -> None:
    which = " or ".join(f"({one})" for one in tests)
    assert passes(person("alice"), file, which) == len(tests)


LISTENS = "import socket, time; s = socket.create_server(('127.0.0.1', 0))\nwhile True: time.sleep(0.1)"
HOSTILE = """
import os, pathlib, socket, threading
import small_trees
from jupyter_gpuckpt.freeze import images
def name_a_connection(folder):
    source = folder / "files.img"
    (id_,) = (e.id for e in images._entries(source.read_bytes(), "file") if e.HasField("isk"))
    same = dict(port=int, abstract_name=bytes, socket_path=pathlib.Path, deleted=str, found=lambda _: None)
    images.rewrite_files(source, source, connected={id_: images.NewEnd(1, 9, 0)}, **same)
def answered_by(what):
    def edit(folder):
        name_a_connection(folder)
        waiting = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        os.chdir(small_trees.HOME / "trees" / "second" / "run")
        waiting.bind("connections")
        waiting.listen()
        def answer():
            asking, _ = waiting.accept()
            asked.append(asking.recv(100))
            if what is not None:
                socket.send_fds(asking, [b"."], [what])
            asking.close()
            waiting.close()
        threading.Thread(target=answer).start()
    return edit
asked = []
"""


@pytest.mark.parametrize(
    ("edit", "said", "asks"),
    [
        ("name_a_connection", "Can't bind inet socket", False),
        ("answered_by(None)", "Can't bind inet socket", True),
        ("answered_by(os.open('/etc/passwd', os.O_RDONLY))", "Socket operation on non-socket", True),
    ],
)
def test_images_that_name_connections_which_nobody_made_are_not_restored(
    person: Callable[..., Person], edit: str, said: str, asks: bool
) -> None:
    alice = person("alice")
    alice.does(HOSTILE, "1")
    folder = alice.does(f"small_trees.run(small_trees.dumped(program={LISTENS!r}, sockets=1))")
    found = alice.does(f"small_trees.run(small_trees.restored({folder!r}, {edit}))")
    assert found["status"] != 0
    assert said in found["log"]
    assert alice.does("asked") == (["b'\\x01\\x00\\x00\\x00'"] if asks else [])


def test_who_answers_has_given_his_own_process_what_he_had(person: Callable[..., Person]) -> None:
    alice = person("alice")
    alice.does(HOSTILE, "1")
    folder = alice.does(f"small_trees.run(small_trees.dumped(program={LISTENS!r}, sockets=1))")
    alice.does("here, there = socket.create_server(('127.0.0.1', 0)), socket.socket()")
    alice.does("there.connect(here.getsockname())")
    found = alice.does(f"small_trees.run(small_trees.restored({folder!r}, answered_by(there.fileno())))")
    assert found["status"] == 0, found["log"]
    (rights,) = found["rights"]
    assert rights["Uid"] == " ".join([str(alice.uid)] * 4)
    assert {rights[name] for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {"0" * 16}
