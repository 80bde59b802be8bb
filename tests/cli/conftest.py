"""Running the installed command, and a kernel whose server has crashed."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from command_line import Cli, Orphan, run
from notebooks import wait_until

from jupyter_gpuckpt.client import keepers
from jupyter_gpuckpt.errors import GpuckptError

_SERVER = """
import os, time
from jupyter_client.multikernelmanager import MultiKernelManager
from jupyter_core.paths import jupyter_runtime_dir
os.makedirs(jupyter_runtime_dir())
kernels = MultiKernelManager(default_kernel_name="python3-gpuckpt", connection_dir=jupyter_runtime_dir())
environment = {**os.environ, "JPY_SESSION_NAME": "/home/me/deep/train.ipynb"}
manager = kernels.get_kernel(kernels.start_kernel(env=environment))
client = manager.client()
client.start_channels()
client.wait_for_ready(60)
print(manager.provisioner.kernel_id, manager.connection_file, flush=True)
time.sleep(600)
"""


@pytest.fixture
def cli() -> Cli:
    """Run `jupyter gpuckpt` with these words."""
    return run


@pytest.fixture
def orphan(folders: None) -> Iterator[Orphan]:
    """Start a kernel by a server that is then killed."""
    server = subprocess.Popen([sys.executable, "-c", _SERVER], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    with server.stdout:
        kernel_id, connection_file = server.stdout.readline().split()
    server.send_signal(signal.SIGKILL)
    server.wait()
    with keepers.connect(keepers.find(kernel_id)) as keeper:
        wait_until(lambda: not keeper.request("status")["attended"])  # it has noticed
    yield Orphan(kernel_id, connection_file)
    with contextlib.suppress(GpuckptError), keepers.connect(keepers.find(kernel_id)) as keeper:
        keeper.request("close")
