"""What a kernel of ours inherits from those that start it: nothing that a plain one would not have."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from jupyter_client import KernelManager
from notebooks import PATIENCE, SPEC, Notebook, StartKernel

# 32 and 33 are the C library's own.
_SIGNALS = (
    "[hex(int(line.split()[1], 16) & ~(3 << 31)) for line in open('/proc/self/status') "
    "if line.startswith(('SigIgn', 'SigBlk'))]"
)


def test_no_signals_are_ignored_but_those_that_python_ignores(notebook: Notebook) -> None:
    ignored = sum(1 << (number - 1) for number in (signal.SIGPIPE, signal.SIGXFSZ))
    assert notebook.value(_SIGNALS) == f"['0x0', '{ignored:#x}']"


def test_a_kernel_that_was_started_by_someone_who_ignores_signals(start: StartKernel) -> None:
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        notebook = start()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert (
        int(notebook.value("open('/proc/self/status').read().split('SigIgn:')[1].split()[0]"), 16)
        & (1 << (signal.SIGUSR1 - 1))
        == 0
    )


def test_a_client_that_connects_draws_nothing_from_the_users_random_stream(notebook: Notebook) -> None:
    """As a page that is loaded anew, in a restored kernel, too: IPython picks a tip for each by `random`."""
    notebook.run("import random; random.seed(1)")
    state = notebook.look("random.getstate()")
    notebook.wait_for_ready()
    assert notebook.look("random.getstate()") == state
    with notebook.keeper as keeper:
        keeper.request("save", {"name": "here"})
    notebook.run("random.seed(2)")
    notebook.run("%gpuckpt restore here --discard")
    notebook.wait_for_ready()
    assert notebook.look("random.getstate()") == state


def test_a_child_can_be_terminated(notebook: Notebook) -> None:
    notebook.run("import subprocess; child = subprocess.Popen(['sleep', '1000']); child.terminate()")
    assert notebook.value("child.wait(60)") == str(-signal.SIGTERM)


def test_the_same_limits_and_groups(start: StartKernel, notebook: Notebook) -> None:
    same = "open('/proc/self/limits').read(), os.getgroups(), os.getuid(), os.nice(0), sorted(os.sched_getaffinity(0))"
    plain = start("python3")
    for kernel in (notebook, plain):
        kernel.run("import os")
    assert notebook.value(same) == plain.value(same)
    assert os.getuid() == int(notebook.value("os.getuid()"))


_NESTED = f"""
import os
from jupyter_client import KernelManager
manager = KernelManager(kernel_name={SPEC!r})
manager.start_kernel(env={{**os.environ, "IPYTHONDIR": os.environ["IPYTHONDIR"] + "-nested"}})
client = manager.client()
client.start_channels()
client.wait_for_ready({PATIENCE})
client.execute_interactive("%gpuckpt save inner", allow_stdin=False)
client.stop_channels()
"""


def test_a_plain_kernel_that_a_cell_starts_does_not_hear_what_is_meant_for_this_one(notebook: Notebook) -> None:
    nested = notebook.run(_NESTED, timeout=2 * PATIENCE).text
    assert "started in another one cannot be saved" in nested
    assert "Saved outer" in notebook.run("%gpuckpt save outer").text
    notebook.run("manager.shutdown_kernel(now=True)")


def test_a_child_is_no_kernel_of_the_keepers(notebook: Notebook) -> None:
    ask = "from jupyter_gpuckpt.kernel.agent import is_held; print(is_held())"
    child = f"__import__('subprocess').run([__import__('sys').executable, '-c', {ask!r}], capture_output=True)"
    assert notebook.value(f"{child}.stdout.decode().strip()") == "False"


@pytest.mark.skipif(not hasattr(KernelManager, "resolve_path"), reason="nobody asks so with this jupyter_client")
def test_a_file_beside_the_notebook_is_found(start: StartKernel, tmp_path: Path) -> None:
    """Jupyter Server asks so for a path that an output names."""
    (tmp_path / "hello.py").touch()
    ours, plain = (start(spec, cwd=str(tmp_path)).manager for spec in (SPEC, "python3"))
    assert ours.resolve_path("hello.py") == plain.resolve_path("hello.py") == str(tmp_path / "hello.py")
    assert ours.resolve_path("bye.py") is None


def test_a_kernel_that_a_notebook_starts_is_not_of_that_notebook(
    start: StartKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JPY_SESSION_NAME", "outer.ipynb")  # as in a kernel of a notebook
    for env, named in (({}, ""), ({"JPY_SESSION_NAME": "inner.ipynb"}, "inner.ipynb")):
        with start(env={**os.environ, **env}).keeper as keeper:
            assert keeper.request("status")["notebook"] == named
