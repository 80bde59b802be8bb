"""What containers take from root, and what is said of it: capabilities, system calls, the machine's user namespace."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import COMMAND
from filtered import UNDER_A_FILTER, under_a_filter
from notebooks import PATIENCE

from jupyter_gpuckpt.machine import capabilities

pytestmark = [pytest.mark.criu, pytest.mark.usefixtures("with_criu")]

_JUDGE = """
import json
from jupyter_gpuckpt.machine.capability import why_unavailable
unavailable = why_unavailable()
print(json.dumps(unavailable and unavailable.as_dict()))
"""
_KERNEL = f"""
import sys
from jupyter_client import KernelManager
manager = KernelManager(kernel_name="python3-gpuckpt")
manager.start_kernel()
client = manager.client()
client.start_channels()
client.wait_for_ready({PATIENCE})
def run(code):
    def show(message):
        content = message["content"]
        print(content.get("text") or content.get("evalue") or "")
    client.execute_interactive(code, timeout={PATIENCE}, output_hook=show)
try:
    for cell in sys.argv[1:]:
        run(cell)
finally:
    client.stop_channels()
    manager.shutdown_kernel(now=True)
"""
_FILTERS = "def filters(): return [line for line in open('/proc/self/status') if line.startswith('Seccomp')]"
_A_CHILD_WITH_A_FILTER = f"""
import subprocess, sys
code = {UNDER_A_FILTER + "import time; print(1, flush=True); time.sleep(1e6)"!r}
child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
child.stdout.readline()
"""
_CALLS = {"kcmp": 312, "vmsplice": 278, "ptrace": 101, "setns": 308, "unshare": 272, "chroot": 161}  # x86-64
_x86_64 = pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of calls are another machine's")


def _judged(*under: str) -> dict[str, str] | None:
    command = [*under, sys.executable, "-c", _JUDGE]
    said = subprocess.run(command, stdout=subprocess.PIPE, timeout=60, check=True).stdout
    judgement: dict[str, str] | None = json.loads(said)
    return judgement


def _doctor(*under: str, quick: bool = True) -> dict[str, dict[str, Any]]:
    command = [*under, *COMMAND, "doctor", "--json", *(["--quick"] if quick else [])]
    said = subprocess.run(command, stdout=subprocess.PIPE, timeout=180, check=False).stdout
    return {check["name"]: check for check in json.loads(said)["checks"]}


def _without(capability: str) -> tuple[str, ...]:
    name = f"-{capability.lower()}"
    return ("setpriv", f"--bounding-set={name}", f"--inh-caps={name}")


@pytest.mark.parametrize("capability", capabilities.NEEDED)
def test_each_capability_that_is_missing_is_named_with_what_it_is_for_and_what_to_type(capability: str) -> None:
    judged = _judged(*_without(capability))
    assert judged is not None
    assert f"CAP_{capability}" in judged["why"]
    assert f"--cap-add {capability}`" in judged["then"]
    check = _doctor(*_without(capability))["rights"]
    assert not check["ok"]
    assert f"CAP_{capability}: {capabilities.NEEDED[capability]}" in check["means"]
    assert f"--cap-add {capability}`" in check["mend"]


@_x86_64
@pytest.mark.parametrize("call", _CALLS)
def test_each_system_call_that_a_filter_forbids_is_named(call: str) -> None:
    judged = _judged(*under_a_filter(_CALLS[call]))
    assert judged is not None
    assert f"CRIU needs: {call}." in judged["why"]
    check = _doctor(*under_a_filter(_CALLS[call]))["seccomp filter"]
    assert not check["ok"]
    assert f"CRIU needs: {call}." in check["found"]
    assert "jupyter gpuckpt recipe seccomp.json" in check["mend"]


def test_under_a_filter_that_allows_these_calls_all_is_well() -> None:
    assert _judged(*under_a_filter()) is None
    checks = _doctor(*under_a_filter(), quick=False)
    assert checks["seccomp filter"]["found"] == "one that allows what CRIU needs"
    assert checks["trial"]["ok"], checks["trial"]


def _cells(*cells: str, under: tuple[str, ...] = ()) -> str:
    """Run cells in a kernel; return what they printed, and their errors."""
    command = [*under, sys.executable, "-c", _KERNEL, *cells]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=4 * PATIENCE, check=True).stdout


@pytest.fixture
def _own_history(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))


@pytest.mark.usefixtures("_own_history")
def test_under_a_filter_a_kernel_comes_back_under_it_and_a_filter_of_a_program_of_its_own_is_not_lost() -> None:
    there = ("x, before = 42, filters()", "%gpuckpt save first", "x = 0", "%gpuckpt restore first")
    came = "print('after', x, filters() == before)"
    cells = (_FILTERS, *there, came, _A_CHILD_WITH_A_FILTER, "%gpuckpt save second", "%gpuckpt restore second")
    said = _cells(*cells, under=(*under_a_filter(),))
    assert "after 42 True" in said
    assert "End the processes with a seccomp filter" in said
    assert "There is no snapshot named second" in said


@pytest.mark.usefixtures("_own_history")
def test_a_kernel_that_was_saved_outside_of_a_container_can_be_saved_again_in_one() -> None:
    """Root's kernels have a filter against io_uring, which the container's takes the place of."""
    _cells("x = 42", "%gpuckpt save --wait outside")
    inside = ("%gpuckpt restore outside", "x += 1", "%gpuckpt save --wait again", "x = 0", "%gpuckpt restore again")
    assert "after 43" in _cells(*inside, "print('after', x)", under=(*under_a_filter(),))
    # The first snapshot is as it was.
    came = "print('after', x, [line for line in open('/proc/self/status') if line.startswith('Seccomp:')])"
    assert "after 42 ['Seccomp:\\t2\\n']" in _cells("%gpuckpt restore outside", came)


def test_a_user_of_a_container_in_which_no_broker_can_run_is_told_what_it_lacks() -> None:
    user = ("setpriv", "--reuid=65534", "--clear-groups", "--bounding-set=-sys_admin", "--inh-caps=+dac_read_search")
    check = _doctor(*user, "--ambient-caps=+dac_read_search")["rights"]
    assert "lacks CAP_SYS_ADMIN" in check["found"]
    assert "--cap-add SYS_ADMIN`" in check["mend"]


def test_root_of_another_user_namespace_is_told_so() -> None:
    check = _doctor("unshare", "--user", "--map-root-user")["user namespace"]
    assert not check["ok"]
    assert "hostUsers: false" in check["mend"]
