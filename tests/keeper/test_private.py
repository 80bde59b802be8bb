"""Rows 31, 32, 34 and 36, and who may talk to a keeper."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from keeper_faults import Requested, assert_works, keeper_pid, kill_keeper, names, store
from notebooks import Notebook, StartKernel, wait_until

from jupyter_gpuckpt import settings
from jupyter_gpuckpt.client import operation_counts
from jupyter_gpuckpt.client.preemption import write_report
from jupyter_gpuckpt.client.record import KernelFolder
from jupyter_gpuckpt.errors import Refused
from jupyter_gpuckpt.keeper import criu_logs
from jupyter_gpuckpt.linux import proof
from jupyter_gpuckpt.linux.unix_sockets import peer_pid, short_path

_NOBODY = 65534

_SPY = """
import os, sys
os.setgroups([]); os.setgid({nobody}); os.setuid({nobody})
base, stop = sys.argv[1:]
print("looking", flush=True)
seen = set()
while not os.path.exists(stop):
    for where, folders, files in os.walk(base):
        for name in files:
            path = os.path.join(where, name)
            try:
                fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            except OSError:
                continue
            os.close(fd)
            seen.add(path)
print("\\n".join(sorted(seen)))
"""


def test_configuration_and_environment_of_others_do_not_reach_criu(
    start: StartKernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUCKPT_CRIU_PREFIX", str(settings.criu_prefix()))  # it lies in the home that is left
    home, hostile = tmp_path / "home", tmp_path / "hostile"
    (home / ".criu").mkdir(parents=True)
    hostile.mkdir()
    trace = hostile / "was-here"
    (hostile / "script").write_text(f"#!/bin/sh\ntouch {trace}\n")
    for name in ("sh", "tar", "cp", "ip", "iptables-restore"):
        (hostile / name).write_text(f"#!/bin/sh\ntouch {trace}\nexit 1\n")
    for program in hostile.iterdir():
        program.chmod(0o755)
    options = f"action-script {hostile}/script\nlog-file {hostile}/was-here\nghost-limit 1\n"
    (home / ".criu" / "default.conf").write_text(options)
    (hostile / "criu.conf").write_text(options)
    environment = {
        **os.environ,
        "HOME": str(home),
        "CRIU_CONFIG_FILE": str(hostile / "criu.conf"),
        "CRIU_LIBS_DIR": str(hostile),
        "LD_LIBRARY_PATH": str(hostile),
        "PATH": f"{hostile}:{os.environ['PATH']}",
    }
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("CRIU_CONFIG_FILE", str(hostile / "criu.conf"))
    monkeypatch.setenv("CRIU_LIBS_DIR", str(hostile))
    notebook = start(env=environment)
    notebook.run("x = 1")
    notebook.run("import os; os.environ['LD_PRELOAD'] = '/nonexistent.so'")
    assert_works(notebook)
    assert notebook.value("x") == "1"
    assert not trace.exists()


@pytest.fixture
def open_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that everybody can look into, with the store and the runtime folder in it."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(folder / "runtime"))
    monkeypatch.setenv("GPUCKPT_STORE", str(folder / "store"))
    before = os.umask(0)
    yield folder
    os.umask(before)
    shutil.rmtree(folder)


def test_another_user_never_reads_a_byte_even_with_umask_000(
    open_folder: Path, start: StartKernel, tmp_path: Path
) -> None:
    bait, stop = open_folder / "bait", open_folder / "stop"
    bait.touch(0o644)
    with subprocess.Popen(
        ["/usr/bin/env", "python3", "-c", _SPY.format(nobody=_NOBODY), str(open_folder), str(stop)],
        cwd="/",
        stdout=subprocess.PIPE,
        text=True,
    ) as spy:
        assert spy.stdout is not None
        try:
            assert spy.stdout.readline() == "looking\n"
            notebook = start()
            notebook.run("secret = 'x' * 1000")
            for _ in range(3):
                notebook.run("%gpuckpt save here --replace")
                notebook.run("%gpuckpt restore here")
            notebook.close()
        finally:
            stop.touch()
        seen = set(spy.stdout.read().split())
    assert seen - {str(stop)} == {str(bait)}


def test_all_that_is_kept_is_for_its_owner_alone(open_folder: Path, notebook: Notebook) -> None:
    for doing in ("save", "restore"):
        notebook.run(f"%gpuckpt {doing} here")
        wait_until(lambda: not (notebook.folder / "restore").exists())
        for top in (store(), notebook.folder):
            for path in (top, *top.rglob("*")):
                with contextlib.suppress(FileNotFoundError):  # the keeper replaces its own, and sweeps
                    assert path.lstat().st_mode & 0o077 == 0, path


def test_a_hostile_name_is_refused_in_words_from_outside(notebook: Notebook) -> None:
    hostile = ["../x", "a/b", ".", "..", "", "nul\0", "ｆｕｌｌ", "x" * 10_000, "-rf", "new\nline", "com\u2024mon"]
    for name, op in itertools.product(hostile, ("save", "restore", "show", "rm")):
        if op == "restore" and not name:
            continue  # the latest
        error = Requested(notebook, op, {"name": name}).outcome()
        assert type(error).__name__ == "BadName", (op, name)
        assert len(str(error)) < 1000
    assert not names()


def test_no_secret_is_in_logs_listings_errors_or_manifests(start: StartKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "geheim-" + os.urandom(8).hex()
    monkeypatch.setenv("MY_API_TOKEN", secret)
    notebook = start()
    key = notebook.client.session.key.decode()
    shown = [notebook.run("%gpuckpt save here").text]
    shown += [notebook.fails(f"%gpuckpt {line}").text for line in ("save here", "restore none", "save ../x")]
    shown.append(notebook.run("%gpuckpt restore here").text)
    shown += [notebook.run(f"%gpuckpt {line}").text for line in ("list", "show here", "status")]
    with notebook.keeper as keeper:
        shown += [json.dumps(keeper.request(op, {"name": "here"})) for op in ("status", "list", "show")]
    files = [*notebook.folder.glob("*.log"), *(store() / "snapshots").iterdir(), notebook.folder / "state.json"]
    shown += [path.read_text("utf-8", "replace") for path in files]
    shown.append(Path(f"/proc/{keeper_pid(notebook)}/cmdline").read_text())
    for text in shown:
        assert secret not in text
        assert key not in text


def test_another_user_cannot_talk_to_a_keeper(open_folder: Path, notebook: Notebook) -> None:
    """The folder's mode stops them; if that were open, the keeper hangs up on them."""
    path = notebook.folder / "keeper.sock"
    attempt = """
import os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
s = socket.socket(socket.AF_UNIX); s.settimeout(60)
try:
    s.connect(sys.argv[1])
    s.sendall(b'{"id": 1, "op": "status"}\\n')
    print("heard", len(s.recv(100)))
except PermissionError:
    print("denied")
except OSError:
    print("heard 0")
"""

    def as_nobody() -> str:
        argv = ["/usr/bin/env", "python3", "-c", attempt, str(path)]
        return subprocess.run(argv, cwd="/", capture_output=True, text=True, check=True, timeout=60).stdout.strip()

    assert as_nobody() == "denied"
    for folder in (path.parent, path.parent.parent, path.parent.parent.parent):
        folder.chmod(0o755)
    path.chmod(0o777)
    assert as_nobody() == "heard 0"
    path.chmod(0o600)
    path.parent.chmod(0o700)
    assert notebook.value("1 + 1") == "2"


_NONSENSE = [
    b"\n",
    b"not JSON\n",
    b"[1, 2]\n",
    b'"text"\n',
    b"\xff\xfe\n",
    b"[" * 100_000 + b"\n",
    b'{"id": 1, "op": "save", "args": [1]}\n',
    b'{"id": {}, "op": "save", "args": {"name": {"a": 1}}}\n',
    b'{"op": "signal", "args": {"signum": "x"}}\n',
    b'{"op": "no such thing"}\n',
    b"endless " * (9 << 20),
    b'{"id": 1',
]


def test_nonsense_at_its_doors_does_not_end_a_keeper(notebook: Notebook, tmp_path: Path) -> None:
    # The number of the request is none that the agent comes to: its own would get that answer.
    before = keeper_pid(notebook)
    for said in _NONSENSE:
        with socket.socket(socket.AF_UNIX) as s:
            s.settimeout(60)
            with short_path(notebook.folder / "keeper.sock") as path:
                s.connect(path)
            s.sendall(proof.first_line(peer_pid(s)))
            with contextlib.suppress(OSError):  # it may hang up in the middle
                s.sendall(said)
                s.shutdown(socket.SHUT_WR)
                s.recv(100)
        (tmp_path / "said").write_bytes(said[: 1 << 20])
        notebook.run(f"""
import os
fifo = os.open('/dev/shm/gpuckpt/from-kernel', os.O_WRONLY)
data = open({str(tmp_path / "said")!r}, 'rb').read()
while data:
    data = data[os.write(fifo, data):]
os.write(fifo, b'\\n' + b'{{"reply": [], "hello": 1, "request": null}}\\n')
os.write(fifo, b'{{"request": 10000, "op": 3, "args": 4}}\\n')
os.close(fifo)""")
        assert notebook.run("%gpuckpt list").status == "ok", said[:100]
        assert keeper_pid(notebook) == before, said[:100]
        assert notebook.manager.is_alive()


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A folder of somebody else's, in which there are a link to a file of this user's, and one to a folder."""
    planted, own = tmp_path / "planted", tmp_path / "own"
    for folder in (planted, own, own / "kernel"):
        folder.mkdir()
    (own / "kernel" / "launch.json").write_text("{}")
    (own / "diary").write_text("dear diary")
    (planted / "operations.json").symlink_to(own / "diary")
    (planted / "gpuckpt").symlink_to(own)
    for path in (planted, *planted.iterdir()):
        os.chown(path, _NOBODY, _NOBODY, follow_symlinks=False)
    planted.chmod(0o777)
    return planted


def test_kernels_are_only_looked_for_where_nobody_else_can_put_any(
    planted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch says what is run. That `jupyter gpuckpt kernels` does not run another's is attack 29."""
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(planted))
    with pytest.raises(Refused, match=f"uid {_NOBODY}"):  # by way of somebody else's link
        list(KernelFolder.all())
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "mine"))
    kernels = tmp_path / "mine" / "gpuckpt"
    for name in ("mine", "theirs"):
        (kernels / name).mkdir(parents=True, mode=0o700)
        (kernels / name / "launch.json").write_text("{}")
    os.chown(kernels / "theirs", _NOBODY, _NOBODY)  # from a time when the folder was open to others
    assert [folder.path.name for folder in KernelFolder.all()] == ["mine"]
    kernels.chmod(0o770)
    with pytest.raises(Refused, match=r"others can write in .* mode is 0770"):
        list(KernelFolder.all())


def test_nothing_is_written_by_way_of_a_folder_of_somebody_else_s(
    planted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUCKPT_LOGS", str(planted))
    operation_counts.note("save", "done", 1.0)
    assert (tmp_path / "own" / "diary").read_text() == "dear diary"
    assert criu_logs.keep(tmp_path / "own" / "diary") is None
    with pytest.raises(OSError, match=f"uid {_NOBODY}"):
        write_report([], None)
    assert sorted(path.name for path in planted.iterdir()) == ["gpuckpt", "operations.json"]


def test_a_process_of_root_s_with_fewer_rights_is_not_served(notebook: Notebook) -> None:
    """As in a container, or a service, that gave them up: what a keeper and a sleeper of root's do is not bounded."""
    attempt = """
import pathlib, socket, sys
from jupyter_gpuckpt.errors import Refused
from jupyter_gpuckpt.client.protocol import KeeperClient
try:
    with KeeperClient(pathlib.Path("keeper.sock")) as keeper:
        print(keeper.request("status")["state"])
except Refused:
    print("refused")
for path, line in zip(sys.argv[1::2], sys.argv[2::2]):
    with socket.socket(socket.AF_UNIX) as s:
        s.settimeout(60)
        s.connect(path)
        s.sendall(line.encode() + b"\\n")
        try:
            print(s.recv(100))
        except ConnectionError:
            print(b"")
"""
    status, spawn = {"id": 1, "op": "status"}, {"tag": 1, "spawn": {"adopt": 1}}
    (sleeper,) = notebook.folder.glob("run-*.sock")
    asked = ["keeper.sock", json.dumps(status), sleeper.name, json.dumps(spawn)]
    python = [sys.executable, "-c", attempt, *asked]
    fewer = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", "--"]
    for wrapper, told in ((fewer, "refused"), ([], "running")):
        done = subprocess.run([*wrapper, *python], cwd=notebook.folder, capture_output=True, text=True, check=True)
        assert done.stdout.split() == [told, "b''", "b''"], done  # nor is anybody who says nothing first


def test_a_sleeper_of_before_is_taken_over_and_its_kernel_saved_and_restored(
    start: StartKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks its clients for no proof, as their keepers know of none; the next one does."""
    monkeypatch.setattr(proof, "WANTED", "not-known-then")
    notebook = start()
    notebook.run("x = 1")
    (before,) = KernelFolder(notebook.folder).sleepers()
    assert proof.first_line(before) == b""
    kill_keeper(notebook)
    assert notebook.manager.is_alive()  # it gets a new one
    assert_works(notebook)
    assert notebook.value("x") == "1"
    (now,) = KernelFolder(notebook.folder).sleepers()
    assert now != before
    assert proof.first_line(now) != b""
