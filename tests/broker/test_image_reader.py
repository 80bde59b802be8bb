"""The process that reads a user's images: what it may do, what it takes, and that fuzzing it finds nothing."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from core_images import CORE
from people import UIDS, Machine, Person

from jupyter_gpuckpt.broker import image_reader

MAGIC = bytes.fromhex("1943565447380555")
COPY = """
import json, os, resource, sys
from jupyter_gpuckpt.broker import images
from jupyter_gpuckpt.broker.peer import Peer
from jupyter_gpuckpt.errors import Refused
folder, out, uid = sys.argv[1:]
why = ""
try:
    images.copy(os.open(folder, os.O_RDONLY), out, Peer(int(uid), int(uid), (), {}, {}, None))
except Refused as e:
    why = e.why
(own,) = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")]
print(json.dumps([why, int(own) >> 10, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10]))
"""


def core(body: bytes) -> bytes:
    return MAGIC + struct.pack("<I", len(body)) + body


def groups(count: int) -> bytes:
    """Return the body of a core image with so many groups."""
    message = CORE()
    message.thread_core.creds.groups.extend([1] * count)
    return bytes(message.SerializeToString())


@pytest.mark.parametrize(
    ("name", "image", "why"),
    [
        ("files.img", bytes(100 << 20), ""),
        ("core-1.img", core(bytes(50 << 20)), "more than 4 MiB"),
        ("core-1.img", core(groups(2_000_000)), "more than 2000 fields"),
        ("core-1.img", core(b"\x98\x06\x00" * 1_000_000), "more than 2000 fields"),
        ("core-1.img", core(b"\x2a\x02\x52\x00" * 100), "twice"),
    ],
    ids=["much to copy", "a large core", "many groups", "many fields", "many threads"],
)
def test_whatever_images_hold_they_take_little_of_root_s_memory(
    machine: Machine, tmp_path: Path, name: str, image: bytes, why: str
) -> None:
    folder, out = machine.folder / "alice" / "images", tmp_path / "out"
    folder.mkdir(exist_ok=True)
    out.mkdir()
    (folder / name).write_bytes(image)
    (folder / name).chmod(0o644)
    try:
        done = subprocess.run(
            [sys.executable, "-c", COPY, folder, out, str(UIDS["alice"])], capture_output=True, text=True, check=True
        )
    finally:
        (folder / name).unlink()
    said, writer, reader = json.loads(done.stdout)
    assert why in said
    assert bool(said) == bool(why)
    assert max(writer, reader) < 64, "MiB"
    if not why:
        assert (out / name).read_bytes() == image


HOLD = """
import os, socket, sys
from jupyter_gpuckpt.broker import image_reader
from jupyter_gpuckpt.broker.descriptors import turn_away
from jupyter_gpuckpt.broker.peer import Peer
uid = int(sys.argv[2])
here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
pid = os.fork()
if pid == 0:
    turn_away()  # as all do that a deputy forks
    image_reader.read(os.open(sys.argv[1], os.O_RDONLY), Peer(uid, uid, (), {}, {}, None), there.fileno())
assert here.recv(100) == image_reader.FILE + b"files.img"  # it has given up its rights by then
print(pid, flush=True)
input()
"""


@pytest.fixture(scope="module")
def reading(machine: Machine) -> Iterator[int]:
    """A process that reads images of Alice's, and is held in it, since nobody takes what it sends."""
    folder = machine.folder / "alice" / "many-images"
    folder.mkdir(exist_ok=True)
    (folder / "files.img").write_bytes(bytes(8 << 20))
    (folder / "files.img").chmod(0o644)
    words = [sys.executable, "-c", HOLD, folder, str(UIDS["alice"])]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        yield int(parent.stdout.readline())
        parent.stdin.write(b"end\n")
        parent.stdin.flush()


def test_it_has_no_right_that_its_user_lacks_and_no_file_but_the_folder(reading: int, machine: Machine) -> None:
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{reading}/status").read_text().splitlines() if ":" in line
    )
    assert status["Uid"].split() == status["Gid"].split() == [str(UIDS["alice"])] * 4
    assert status["Groups"].split() == []
    assert {status[f"Cap{kind}"].strip() for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {"0" * 16}
    assert (status["NoNewPrivs"].strip(), status["Seccomp"].strip()) == ("1", "2")
    held = {str(path.readlink()).partition(":")[0] for path in Path(f"/proc/{reading}/fd").iterdir()}
    assert held <= {
        "/dev/null",
        "socket",
        str(machine.folder / "alice" / "many-images"),
        str(machine.folder / "alice" / "many-images" / "files.img"),
    }
    assert _most_memory(reading) == str(image_reader.MEMORY)


def _most_memory(pid: int) -> str:
    limits = Path(f"/proc/{pid}/limits").read_text()
    return next(line.split()[3] for line in limits.splitlines() if line.startswith("Max data size"))


def test_its_user_can_neither_look_into_it_nor_make_it_say_anything(reading: int, alice: Person) -> None:
    """What it says of images is believed: whoever could trace it could have any images restored."""
    tried = f"""
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def tried(what):
    try:
        return what() is None
    except PermissionError:
        return "denied"
def attach():
    if libc.ptrace(16, {reading}, None, None) != 0:
        raise OSError(ctypes.get_errno(), "")
found = [tried(attach)]
found += [tried(lambda: open(f"/proc/{reading}/{{name}}", "rb+")) for name in ("mem", "fd/1", "environ")]
"""
    assert alice.does(tried, "found") == ["denied"] * 4


LOADED = """
import sys
before = set(sys.modules)
import jupyter_gpuckpt.broker.__main__, jupyter_gpuckpt.broker.service
print(*sorted({name.partition(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names))
"""


def test_root_loads_no_library_beside_python_s_own_but_two_that_name_folders() -> None:
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["jupyter_core", "jupyter_gpuckpt", "platformdirs"]


FORBIDDEN = {
    "open to write": "os.open('/dev/null', os.O_WRONLY)",
    "make a file": "os.open('x', os.O_RDONLY | os.O_CREAT)",
    "a socket": "socket.socket()",
    "another process": "os.fork()",
    "another program": "os.execv('/bin/true', ['true'])",
    "signal": "os.kill(os.getppid(), 0)",
    "memory for a program": "mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_EXEC)",
    "mount": "ctypes.CDLL(None).umount2(b'/proc', 0)",
}


def test_a_deputy_has_a_limit_of_memory_and_what_it_starts_has_its_user_s(alice: Person, machine: Machine) -> None:
    broker = machine._broker.pid
    children = map(int, Path(f"/proc/{broker}/task/{broker}/children").read_text().split())
    (deputy, *_) = [pid for pid in children if Path(f"/proc/{pid}").stat().st_uid == 0]
    assert _most_memory(deputy) == str(64 << 20)
    program = "import resource; print(resource.getrlimit(resource.RLIMIT_DATA))"
    assert alice.runs(program) == str(alice.does("import resource", "str(resource.getrlimit(resource.RLIMIT_DATA))"))


@pytest.mark.parametrize("what", FORBIDDEN.values(), ids=FORBIDDEN)
def test_what_it_does_not_need_is_death_to_it(what: str) -> None:
    program = f"""
import ctypes, mmap, os, socket
libc = ctypes.CDLL(None)
libc.prctl(38, 1, 0, 0, 0)
from jupyter_gpuckpt.broker import image_reader, seccomp
seccomp.keep_reading(image_reader._FLAGS)
os.close(os.open("/dev/null", image_reader._FLAGS))
print(len(bytearray(30_000_000)), flush=True)
{what}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGSYS, b"30000000\n"), done.stderr


@pytest.mark.skipif(not importlib.util.find_spec("atheris"), reason="atheris has no wheel for this Python or machine")
def test_the_fuzzer_finds_nothing(tmp_path: Path) -> None:
    program = Path(__file__).with_name("fuzz_broker.py")
    (tmp_path / "folder").mkdir()
    words = ["-runs=5000", "-seed=1", "-max_len=4096", "-rss_limit_mb=1024", f"-artifact_prefix={tmp_path}/"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    said = subprocess.run(
        [sys.executable, program, tmp_path / "folder", *words],
        capture_output=True,
        text=True,
        timeout=500,
        env=environment,
        check=False,
    )
    assert said.returncode == 0, said.stderr
    assert "Done 5000 runs" in said.stderr
