"""Root without one of the capabilities that a restore takes, as in a container: the one that is missing is named."""

from __future__ import annotations

import subprocess
import sys

import pytest
from command_line import COMMAND
from job_programs import Job
from notebooks import PATIENCE

pytestmark = pytest.mark.criu

# Nor is there /dev/net/tun, which criu looks for and does without.
_WITHOUT = 'mount -t tmpfs none /dev/net 2> /dev/null; exec setpriv --bounding-set "-$0" --inh-caps "-$0" "$@"'


@pytest.mark.parametrize("capability", ["net_admin", "sys_admin"])
def test_the_capability_that_a_restore_lacks_is_named(capability: str) -> None:
    job = Job("saved")
    job.start(sys.executable, "-c", "import time; print('ready', flush=True); time.sleep(1000)")
    job.wait_for(1)
    job.save("s")
    job.kill()
    command = ["unshare", "--mount", "sh", "-c", _WITHOUT, capability, *COMMAND, "restore", "saved", "s"]
    failed = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert failed.returncode != 0
    assert f"CAP_{capability.upper()}" in failed.stderr
    assert "tun" not in failed.stderr
    assert "Traceback" not in failed.stderr
    # Nothing of the attempt stays in the way.
    job.restore("s")
    job.kill()
