"""Users without root save and restore their kernels by the broker, and come back with the rights that they had."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import yama
from filtered import UNDER_A_FILTER, under_a_filter
from notebooks import wait_until
from people import GID, GROUP, UIDS, Machine, Person
from rings import CALLS

from jupyter_gpuckpt import installed
from jupyter_gpuckpt.linux import processes

pytestmark = pytest.mark.criu

RIGHTS = """
import resource
wanted = ("Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapAmb", "NoNewPrivs", "Seccomp")
status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
limits = [resource.getrlimit(n) for n in range(16)]
print([(name, status[name].split()) for name in wanted], limits, open("/proc/self/cgroup").read())
"""


def test_a_kernel_is_saved_and_restored_with_the_same_rights(alice: Person) -> None:
    alice.runs("import subprocess; x = 41; child = subprocess.Popen(['sleep', '1000'])")
    before = alice.runs(RIGHTS)
    assert f"('Uid', ['{alice.uid}', '{alice.uid}', '{alice.uid}', '{alice.uid}'])" in before
    assert f"('Groups', ['{GID}'])" in before
    assert "('CapEff', ['0000000000000000'])" in before
    assert "('NoNewPrivs', ['1'])" in before
    assert "Saved first" in alice.runs("%gpuckpt save first")
    alice.runs("x = 1; child.kill(); child.wait()")
    alice.runs("%gpuckpt restore first")
    assert alice.runs("print(x, child.poll())") == "41 None"
    assert alice.runs(RIGHTS) == before
    assert "Saved second" in alice.runs("%gpuckpt save second")
    alice.runs("%gpuckpt restore second")
    assert alice.runs("print(x, child.poll())") == "41 None"


def test_large_files_in_shared_memory_come_back_whatever_their_mode_and_without_a_name(alice: Person) -> None:
    """Root copies none of them."""
    alice.runs("""
import hashlib, os
data = os.urandom(20 << 20)
file = open("/dev/shm/read-only", "wb"); file.write(data); file.close()
os.chmod("/dev/shm/read-only", 0o400)
nameless = open("/dev/shm/nameless", "w+b"); nameless.write(data); nameless.flush(); os.unlink("/dev/shm/nameless")
def seen():
    named = open("/dev/shm/read-only", "rb").read() == data
    about, fd = os.stat("/dev/shm/read-only"), nameless.fileno()
    return named, os.pread(fd, 30 << 20, 0) == data, oct(about.st_mode), about.st_uid
""")
    was = alice.runs("print(seen())")
    assert was == f"(True, True, '0o100400', {alice.uid})"
    assert "Saved large" in alice.runs("%gpuckpt save large")
    alice.runs("os.unlink('/dev/shm/read-only'); nameless.truncate(0)")
    alice.runs("%gpuckpt restore large")
    assert alice.runs("print(seen())") == was


def test_a_file_that_was_only_read_is_made_again_in_the_users_own_folder(alice: Person) -> None:
    alice.runs("import os; os.makedirs(os.path.expanduser('~/own')); os.chdir(os.path.expanduser('~/own'))")
    alice.runs("open('read', 'w').write('text'); read = open('read')")
    # Its Python is root's, and large, and goes nowhere.
    alice.runs("from jupyter_gpuckpt.kernel import environment; environment.describe = dict")
    assert "Saved own" in alice.runs("%gpuckpt save own --with-files")
    path = alice.runs("os.unlink('read'); read.close(); print(os.path.abspath('read'))").strip()
    assert f"were created again: {path}." in alice.runs("%gpuckpt restore own")
    assert alice.runs("print(read.read(), open('new', 'w').write('new'))") == "text 3"
    assert (Path(path).stat().st_uid, Path(path).read_text()) == (alice.uid, "text")


def test_a_library_that_root_replaces_under_a_kernel_comes_back_with_it(alice: Person, machine: Machine) -> None:
    folder = machine.folder / "libraries"
    folder.mkdir(mode=0o755, exist_ok=True)
    library, newer = folder / "lib.so", folder / "newer"
    for path in (library, newer):
        shutil.copy(installed.PARKING_LIBRARY, path)
    alice.runs(f"import ctypes; library = ctypes.CDLL({str(library)!r}); x = 1")
    newer.replace(library)
    alice.runs("%gpuckpt save replaced")
    for _ in range(2):
        alice.runs("x = 2")
        alice.runs("%gpuckpt restore replaced")
        in_use = "[line.split()[5] for line in open('/proc/self/maps') if 'lib.so' in line and '(deleted)' in line]"
        assert "lib.so" in alice.runs(f"print(x, {in_use})")
        alice.runs("%gpuckpt save replaced --replace")
    assert sorted(path.name for path in folder.iterdir()) == ["lib.so"]


def test_a_kernel_is_forked_and_outlives_its_keeper(alice: Person) -> None:
    alice.runs("y = 7")
    assert "Forked" in alice.runs("%gpuckpt fork")
    alice.does("notebook.kill_keeper()")
    # Until the kernel has heard of its new keeper it refuses what it is asked; answering that one shows that it has.
    alice.does("with notebook.keeper as keeper: keeper.request('executed')")
    assert "Saved after" in alice.runs("%gpuckpt save after")
    alice.runs("y = 8")
    alice.runs("%gpuckpt restore after")
    assert alice.runs("print(y)") == "7"


def test_a_save_that_hangs_in_criu_is_cancelled(alice: Person) -> None:
    alice.runs("import os; x = 41; ballast = os.urandom(300_000_000)")
    kernel = int(alice.does("from keeper_faults import Requested, status", "status(notebook)['pid']"))
    alice.does("asked = Requested(notebook, 'save', {'name': 'never'})")
    while not (criu := processes.tracer(kernel)):
        pass
    os.kill(criu, signal.SIGSTOP)
    alice.does("keeper = notebook.keeper")
    assert alice.does("keeper.request('cancel', {'kind': 'save'})")
    assert alice.does("type(asked.outcome()).__name__") == "Cancelled"
    assert alice.runs("print(x)") == "41"
    assert "Saved mended" in alice.runs("%gpuckpt save mended")


KEEPERS_WAIT = """
import os, sys, time
while sys.orig_argv[1:3] == ["-m", "jupyter_gpuckpt.keeper"] and not os.path.exists("{let_go}"):
    time.sleep(0.01)
"""
START = """
import threading
from pathlib import Path
from notebooks import wait_until
from jupyter_gpuckpt.client import keepers
from jupyter_gpuckpt.client.record import Launch
home, mark, started = str(Path.home()), Path.home() / "mark", []
argv = ["/bin/sh", "-c", 'echo "$$" > "$MARK"; sleep 1000']
launch = Launch("small", argv, {"MARK": str(mark), "PATH": "/bin:/usr/bin"}, home, 0o022, f"{home}/none.json", False)
starting = threading.Thread(target=lambda: started.append(keepers.start_keeper(launch)))
starting.start()
wait_until(lambda: mark.exists() and mark.read_text().strip(), what="the kernel waits for its keeper")
"""
HOLD = """
(Path.home() / "go").touch()
starting.join()
process, folder = started[0]
with keepers.connect(folder) as keeper:
    held = keeper.request("status")["keeper_pid"] == process.pid and folder.state().kernel_pid == int(mark.read_text())
    keeper.request("close")
process.wait()
"""


def test_a_kernel_runs_before_its_keeper_has_begun(person: Callable[..., Person], machine: Machine) -> None:
    first, let_go = machine.folder / "first", machine.folder / "bob" / "go"
    first.mkdir(mode=0o755)
    (first / "sitecustomize.py").write_text(KEEPERS_WAIT.format(let_go=let_go))
    bob = person("bob")
    bob.does(f"import os; os.environ['PYTHONPATH'] = {str(first)!r} + ':' + os.environ.get('PYTHONPATH', '')")
    bob.does(START)
    assert bob.does("started") == [], "the start ends when the kernel is held"
    bob.does(HOLD)
    assert bob.does("held")
    assert bob.does("list(Path(os.environ['JUPYTER_RUNTIME_DIR'], 'gpuckpt').glob('[!.]*'))") == []


SHELL = """
import subprocess
from command_line import COMMAND
def shell(*words):
    done = subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=100)
    return done.stdout + done.stderr
"""


def test_a_kernel_is_hibernated_and_wakes_at_the_next_cell(alice: Person) -> None:
    alice.runs("z = 9")
    said = alice.does(SHELL, "shell('hibernate', notebook.manager.provisioner.kernel_id)")
    assert "Hibernated" in said
    assert alice.runs("print(z)") == "9"


def test_a_job_is_saved_and_restored(alice: Person) -> None:
    program = "import time\nwhile True: time.sleep(0.05)"
    assert "Started" in alice.does(SHELL, f"shell('exec', 'work', '--', '/usr/bin/env', 'python3', '-c', {program!r})")
    assert "Saved worked" in alice.does("shell('save', 'work', 'worked')")
    assert "Restored worked" in alice.does("shell('restore', 'work', 'worked')")
    assert "running" in alice.does("shell('ps')")
    assert "Stopped" in alice.does("shell('stop', 'work')")


def test_a_kernel_has_its_users_limits_and_groups(person: Callable[..., Person], machine: Machine) -> None:
    bob = person("bob", wrapper=["prlimit", "--nofile=700:900", "--core=0:0"], groups=[61_990])
    bob.starts_kernel()
    limits = "import os, resource; print(resource.getrlimit(resource.RLIMIT_NOFILE), sorted(os.getgroups()))"
    # ipykernel raises its own soft limit.
    assert bob.runs(limits) in (f"(700, 900) [{GID}, 61990]", f"(900, 900) [{GID}, 61990]")
    # Alice has one of that name, too.
    bob.runs("x = 'bob'")
    bob.runs("%gpuckpt save first")
    bob.runs("%gpuckpt restore first")
    assert bob.runs("print(x)") == "bob"
    assert bob.runs(limits) in (f"(700, 900) [{GID}, 61990]", f"(900, 900) [{GID}, 61990]")


def test_a_kernel_counts_to_the_control_group_of_its_user(person: Callable[..., Person], machine: Machine) -> None:
    name = f"gpuckpt-test-{os.getpid()}"
    tops = [path for path in (Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup")) if (path / "cgroup.procs").exists()]
    group = tops[0] / name if tops else None
    try:
        if group is None:
            raise FileNotFoundError("no control groups")
        group.mkdir()
    except OSError as e:
        pytest.skip(f"no control group can be made here: {e}")
    try:
        joining = f'echo 0 > {group}/cgroup.procs && exec "$@"'
        bob = machine.person("bob", before=["sh", "-c", joining, "sh"])
        bob.starts_kernel()
        bob.runs("x = 1")
        assert f"/{name}" in bob.runs("print(open('/proc/self/cgroup').read())")
        bob.runs("%gpuckpt save counted")
        bob.runs("%gpuckpt restore counted")
        assert f"/{name}" in bob.runs("print(open('/proc/self/cgroup').read())")
        bob.close()
    finally:
        _remove(group)


def _remove(group: Path) -> None:
    wait_until(lambda: not (group / "cgroup.procs").read_text())
    group.rmdir()


def test_a_broker_that_is_started_anew_knows_the_kernels_of_the_one_before(alice: Person, machine: Machine) -> None:
    machine.restart()
    assert "Saved anew" in alice.runs("%gpuckpt save anew")
    alice.does("notebook.kill_keeper()")
    assert "Saved by another" in alice.runs("%gpuckpt save by-another").replace("-", " ")


def test_a_save_that_is_under_way_when_the_broker_is_stopped_is_finished(alice: Person, machine: Machine) -> None:
    alice.runs("import os; x = 43; ballast = os.urandom(100_000_000)")
    kernel = int(alice.does("from keeper_faults import Requested, status", "status(notebook)['pid']"))
    alice.does("asked = Requested(notebook, 'save', {'name': 'meanwhile'})")
    while not (criu := processes.tracer(kernel)):
        pass
    os.kill(criu, signal.SIGSTOP)
    machine.stop()
    assert not machine.has_stopped(1), "its deputy has criu run"
    os.kill(criu, signal.SIGCONT)
    machine.start_again()
    assert alice.does("asked.outcome()")["name"] == "meanwhile"
    alice.runs("x = 0")
    alice.runs("%gpuckpt restore meanwhile")
    assert alice.runs("print(x)") == "43"


def test_a_save_waits_for_the_broker_that_comes_next(alice: Person, machine: Machine) -> None:
    machine.stop()
    assert machine.has_stopped(10)
    alice.does("from keeper_faults import Requested", "asked = Requested(notebook, 'save', {'name': 'waited'})")
    alice.does("asked.join(1)")
    assert alice.does("asked.is_alive()"), "there is no broker"
    machine.start_again()
    assert alice.does("asked.outcome()")["name"] == "waited"


def test_doctor_tells_a_user_of_the_broker(alice: Person) -> None:
    document = json.loads(
        alice.does(
            "import subprocess",
            "subprocess.run(['jupyter', 'gpuckpt', 'doctor', '--json'], capture_output=True, text=True).stdout",
        )
    )
    rights = next(check for check in document["checks"] if check["name"] == "rights")
    assert document["works"], document
    assert str(UIDS["alice"]) in rights["found"]
    assert "CRIU" in rights["found"]


def test_who_is_not_in_the_group_gets_a_plain_kernel_and_is_told_why(person: Callable[..., Person]) -> None:
    carol = person("carol")
    carol.starts_kernel()
    assert carol.runs("print(6 * 7)") == "42"
    said = carol.fails("%gpuckpt save here")
    assert "Permission denied" in said
    assert "broker" in said
    assert "group" in said


def test_the_broker_needs_no_more_than_seven_capabilities() -> None:
    needed = ("sys_admin", "sys_chroot", "sys_ptrace", "setuid", "setgid", "setpcap", "checkpoint_restore")
    few = Machine.or_skip(wrapper=["setpriv", "--bounding-set=-all," + ",".join(f"+{name}" for name in needed)])
    try:
        alice = few.person("alice")
        alice.starts_kernel()
        alice.runs("x = 41")
        alice.runs("%gpuckpt save here")
        alice.runs("x = 1")
        alice.runs("%gpuckpt restore here")
        assert alice.runs("print(x)") == "41"
        alice.does("notebook.kill_keeper()")
        assert "Saved more" in alice.runs("%gpuckpt save more")
    finally:
        few.close()


@pytest.mark.parametrize("missing", ["sys_admin", "setpcap", "checkpoint_restore"])
def test_a_broker_that_lacks_a_capability_does_not_start_and_names_it(missing: str) -> None:
    lacking = Machine(wrapper=["setpriv", f"--bounding-set=-{missing}"])
    try:
        assert f"lacks CAP_{missing.upper()}" in lacking.why_not
        assert f"--cap-add {missing.upper()}" in lacking.why_not
    finally:
        lacking.close()


@pytest.mark.parametrize("scope", [1, 2])
def test_where_yama_restricts_tracing_users_are_served_or_told_that_they_are_not(scope: int) -> None:
    """At 1 criu is given CAP_SYS_PTRACE to dump; from 2 on what it dumps could not be restored without it."""
    restricted = Machine.or_skip(furnishing=yama.saying(scope))
    try:
        alice = restricted.person("alice")
        alice.starts_kernel()
        alice.runs("x = 41")
        document = json.loads(alice.does(SHELL, "shell('doctor', '--json')"))
        found = {check["name"]: check for check in document["checks"]}
        assert document["works"] is (scope == 1)
        assert (found["ptrace scope"]["found"], found["ptrace scope"]["ok"]) == (str(scope), scope == 1)
        if scope == 2:
            assert "kernel.yama.ptrace_scope is 2" in alice.fails("%gpuckpt save here")
            return
        assert "Saved here" in alice.runs("%gpuckpt save here")
        alice.runs("x = 1")
        alice.runs("%gpuckpt restore here")
        assert alice.runs("print(x)") == "41"
    finally:
        restricted.close()


def test_under_a_filter_that_the_broker_and_its_users_have_in_common_kernels_are_saved_and_restored() -> None:
    """As in a container with its usual profile. No process traces another that has more filters than it."""
    filtered = Machine.or_skip(wrapper=under_a_filter())
    try:
        alice = filtered.person("alice", wrapper=under_a_filter())
        alice.starts_kernel()
        alice.runs("x = 42")
        assert "Saved" in alice.runs("%gpuckpt save first")
        alice.runs("x = 0")
        alice.runs("%gpuckpt restore first")
        assert alice.runs("print(x)") == "42"
    finally:
        filtered.close()


def test_under_a_filter_that_forbids_what_criu_needs_the_broker_users_are_told_what_that_is() -> None:
    filtered = Machine.or_skip(wrapper=under_a_filter(278))
    try:
        alice = filtered.person("alice", wrapper=under_a_filter(278))
        found = alice.does("from jupyter_gpuckpt.machine.capability import why_unavailable", "str(why_unavailable())")
        assert "CRIU needs: vmsplice." in found
    finally:
        filtered.close()


def test_a_process_with_a_filter_of_system_calls_is_named_as_what_keeps_a_kernel_from_being_saved(
    alice: Person,
) -> None:
    alice.runs(
        f"import subprocess, sys; code = {UNDER_A_FILTER!r} + 'import time; print(1, flush=True); time.sleep(1e6)'"
    )
    alice.runs(
        "child = subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE); child.stdout.readline()"
    )
    assert "seccomp filter" in alice.fails("%gpuckpt save filtered")
    alice.runs("child.kill(); child.wait(); child.stdout.close()")
    assert "Saved" in alice.runs("%gpuckpt save filtered")


def test_a_kernel_may_use_io_uring_for_a_filter_would_keep_it_from_being_saved(alice: Person) -> None:
    alice.runs(CALLS)
    outside = alice.does(CALLS, "calls()")
    assert alice.runs("print(calls())") == str(outside)
    if outside[0] != 0:
        pytest.skip("this machine forbids io_uring")
    alice.runs("ring = ctypes.CDLL(None).syscall(425, 8, ctypes.create_string_buffer(120))")
    refused = alice.fails("%gpuckpt save ring")
    assert "uses io_uring" in refused
    assert "Stop the code that uses it" in refused
    alice.runs("os.close(ring)")
    assert "Saved" in alice.runs("%gpuckpt save ring")


def test_a_broker_takes_the_socket_that_systemd_hands_over() -> None:
    activated = Machine.or_skip(activated=True)
    try:
        found = activated.person("alice").does(
            "from jupyter_gpuckpt.machine.capability import why_unavailable", "str(why_unavailable())"
        )
        assert found == "None"
    finally:
        activated.close()


def test_a_second_broker_does_not_take_the_place_of_the_first(machine: Machine, alice: Person) -> None:
    done = machine.second_broker(GROUP)
    assert done.returncode == 1
    assert "Another broker listens" in done.stderr
    assert machine.second_broker("no-such-group").returncode == 1
    alice.runs("%gpuckpt list")
