"""Names are bytes: those of threads, programs and files need not be text, and nothing that is done depends on that."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import run
from copies import Fork, forking
from notebooks import Notebook

_CUT = "Загрузка данных".encode()[:15]
"""A thread's name as Python 3.14 gives it, cut at the 15 bytes that Linux has for it: in the middle of a letter."""
_LINES = b"a\x0bPPid:\t1\x1c\r\nb"
"""A name with all that ends lines elsewhere, and with what a line of /proc begins with."""

_HEADLESS = f"""
import subprocess, sys
odd = r'''
import ctypes, os, threading
libc = ctypes.CDLL(None)
def wait():
    libc.prctl(15, {_CUT!r}, 0, 0, 0)
    os.write(1, b"!")
    threading.Event().wait()
for _ in range(10):
    threading.Thread(target=wait).start()
libc.pthread_exit(None)
'''
children = [subprocess.Popen([sys.executable, "-c", odd], stdout=subprocess.PIPE) for _ in range(5)]
for child in children:
    assert child.stdout.read(10) == b"!" * 10
"""
"""Programs of which only threads with such names are left: whoever looks whether they have ended reads these."""

_CHILD = """
import subprocess, sys
odd = r'''
import ctypes, os, time
ctypes.CDLL(None).prctl(15, {name!r}, 0, 0, 0)
os.write(1, b"!")
time.sleep(10_000)
'''
child = subprocess.Popen([sys.executable, "-c", odd], stdout=subprocess.PIPE)
assert child.stdout.read(1) == b"!"
"""


@pytest.fixture
def fork() -> Iterator[Fork]:
    with forking() as fork:
        yield fork


def test_a_kernel_with_threads_of_such_names_is_given_up_for_a_restored_one(notebook: Notebook) -> None:
    notebook.run("x = 1")
    notebook.run("%gpuckpt save here")
    notebook.run("x = 2")
    notebook.run(_HEADLESS)
    notebook.run("%gpuckpt restore here")
    assert notebook.value("x") == "1"


@pytest.mark.parametrize("name", [_CUT, _LINES])
def test_a_kernel_with_a_program_of_such_a_name_is_saved_restored_forked_and_listed(
    notebook: Notebook, fork: Fork, name: bytes
) -> None:
    notebook.run("x = 1")
    notebook.run(_CHILD.format(name=name))
    notebook.run("%gpuckpt save here")
    notebook.run("x = 2")
    notebook.run("%gpuckpt restore here")
    assert notebook.value("x, child.poll()") == "1 None"
    (copy,) = fork(notebook)
    assert copy.value("x, child.poll()") == "1 None"
    assert {kernel["state"] for kernel in run("kernels", "--json").json["kernels"]} == {"running"}


def test_a_message_shows_such_a_name_as_well_as_it_can(notebook: Notebook) -> None:
    use = "libc = ctypes.CDLL(None); part = libc.shmget(0, 4096, 0o1600); libc.shmat(part, None, 0); "
    use += "libc.shmctl(part, 0, None)"  # it goes with the process
    notebook.run(_CHILD.format(name=_CUT).replace("os.write", f"{use}; os.write"))
    answer = notebook.fails("%gpuckpt save never")
    assert "(Загрузк\N{REPLACEMENT CHARACTER}) uses System V shared memory" in answer.text


def test_a_file_of_such_a_name_is_opened_again_and_named_where_it_has_changed(
    notebook: Notebook, tmp_path: Path
) -> None:
    path = os.fsencode(tmp_path) + b"/caf\xe9 \x0b\x1c.txt"
    notebook.run(f"open({path!r}, 'w').write('as it was'); file = open({path!r})")
    notebook.run("%gpuckpt save here")
    notebook.run("assert file.read() == 'as it was'")
    notebook.run("%gpuckpt restore here")
    assert notebook.value("file.read()") == "as it was"
    with open(path, "w") as file:
        file.write("something else")
    answer = notebook.fails("%gpuckpt restore here")
    assert "txt: had 9 bytes, here 14" in answer.text
    refused = run("restore", notebook.manager.provisioner.kernel_id, "here")
    assert "txt: had 9 bytes, here 14" in refused.err
