"""What a kernel of ours inherits from those that start it: nothing that a plain one would not have."""

from __future__ import annotations

import os
import signal

from notebooks import Notebook, StartKernel

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
