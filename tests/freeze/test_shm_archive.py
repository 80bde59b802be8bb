"""What lies in /dev/shm: packed while a kernel stands still, and unpacked by tar and several threads."""

from __future__ import annotations

import hashlib
import os
import socket
import stat
import subprocess
from pathlib import Path

import pytest

from jupyter_gpuckpt import installed
from jupyter_gpuckpt.freeze import criu, shm_archive

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="owners, devices and a tmpfs take root")

MIB = 1 << 20
_LONG = "y" * 180
_TAR = ("tar", "-c", "--sparse", "-b", "256", "--exclude=./gpuckpt", "--one-file-system")


def write(path: Path, *parts: tuple[int, bytes], size: int | None = None) -> None:
    """Write parts of a file, with holes between them."""
    with path.open("wb") as file:
        for offset, data in parts:
            file.seek(offset)
            file.write(data)
        file.truncate(size)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder in memory with one of all that can lie in /dev/shm."""
    top = Path("/dev/shm", f"gpuckpt-{tmp_path.name}")
    top.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=1777", "none", top], check=True)
    try:
        (top / "gpuckpt").mkdir()
        (top / "gpuckpt" / "not packed").touch()
        write(top / "large", (0, os.urandom(9 * MIB + 77)))
        write(top / "holes", *((i * 3 * MIB, os.urandom(MIB + 5000)) for i in range(6)), size=1 << 41)
        write(top / "in many parts", *((i * 100_000, b"x" * 10) for i in range(60)))
        write(top / "a hole", size=MIB)
        write(top / "empty")
        write(top / "end", (5 * MIB, os.urandom(6 * MIB)))
        (top / "end").chmod(0o400)
        os.utime(top / "end", (1e9, 1e9))
        inner = top / "folder" / "inner"
        inner.mkdir(parents=True)
        write(inner / _LONG, (0, os.urandom(5 * MIB)))
        os.link(inner / _LONG, inner / f"link-{_LONG}")
        for length in (96, 97, 98, 99, 100):
            (top / ("z" * length)).write_text("names as long as there is room for")
        Path(os.fsdecode(bytes(top) + b"/\xff\nodd")).write_bytes(b"odd")
        (top / "symlink").symlink_to("nowhere")
        (top / "long symlink").symlink_to("x" * 300)
        os.mkfifo(top / "fifo", 0o640)
        os.link(top / "fifo", top / "another fifo")
        os.chown(top / "fifo", 3_000_000, 5)
        os.mknod(top / "null", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        (top / "set-user-id").touch()
        (top / "set-user-id").chmod(0o4755)
        os.utime(top / "empty", (-3e8, -3e8))
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(top / "socket"))
        os.chown(inner, 1234, 4567)
        os.utime(inner, (1e9, 1e9))
        yield top
    finally:
        subprocess.run(["umount", top], check=True)
        top.rmdir()


def about(top: Path) -> dict[str, tuple[object, ...]]:
    """Return all that counts of what lies in a folder, by its path."""
    found = {}
    first: dict[int, str] = {}
    for path in sorted(top.rglob("*")):
        one, name = path.lstat(), str(path.relative_to(top))
        if name.startswith("gpuckpt") or stat.S_ISSOCK(one.st_mode):
            continue
        content: object = None
        if stat.S_ISREG(one.st_mode):
            raw = path.read_bytes() if one.st_size < 1 << 30 else b"".join(parts_of(path))
            content = (one.st_size, one.st_blocks, hashlib.sha256(raw).hexdigest())
        elif path.is_symlink():
            content = path.readlink()
        link = first.setdefault(one.st_ino, name) if not stat.S_ISDIR(one.st_mode) else name
        rest = (one.st_mode, one.st_uid, one.st_gid, int(one.st_mtime), one.st_rdev)
        found[name] = (link, *rest, content)
    return found


def parts_of(path: Path) -> list[bytes]:
    with path.open("rb") as file:
        return [os.pread(file.fileno(), 2 * MIB, i * 3 * MIB) for i in range(6)]


def pack(archive: Path, folder: Path, **variables: str) -> None:
    words = [installed.SHM_PACKER, archive, folder, "gpuckpt"]
    subprocess.run(words, check=True, timeout=60, env={**os.environ, **variables})


def unpack(archive: Path, into: Path) -> int:
    """Unpack as a restore does; return how many files tar was spared."""
    into.mkdir()
    large = shm_archive.large_files(archive)
    small = b"".join(shm_archive.without(archive, large))
    subprocess.run(["tar", "-x", "-p", "-C", into, "-f", "-"], input=small, check=True, timeout=60)
    shm_archive.fill(archive, large, into)
    return len(large)


@pytest.mark.parametrize("processors", [2, 8])
@pytest.mark.parametrize("by", ["packer", "tar", "tar of posix"])
def test_all_comes_back_whoever_packed_it(
    folder: Path, tmp_path: Path, by: str, processors: int, many: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tar did it in earlier versions; and of its other formats it unpacks all itself.

    Both ends are told of so many processors: the packer by a library.
    """
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(processors)))
    archive, into = tmp_path / "shm.tar", folder / "gpuckpt" / "copy"
    if by == "packer":
        pack(archive, folder, **({"LD_PRELOAD": str(many)} if processors == 8 else {}))
        assert tar_lists(archive) == tar_lists(pack_by_tar(tmp_path / "other.tar", folder))
    else:
        (folder / "another fifo").unlink()  # tar makes two of these
        pack_by_tar(archive, folder, *(("--format=posix",) if by == "tar of posix" else ()))
    assert unpack(archive, into) == (0 if by == "tar of posix" else 4)
    assert about(into) == about(folder)


def pack_by_tar(archive: Path, folder: Path, *options: str) -> Path:
    subprocess.run([*_TAR, *options, "-f", archive, "-C", folder, "."], check=True, timeout=60)
    return archive


def tar_lists(archive: Path) -> list[str]:
    """Return what tar says of an archive, but for what depends on the order of names."""
    said = subprocess.run(["tar", "-tvf", archive, "--numeric-owner"], check=True, capture_output=True, text=True)
    lines = [line.rstrip("/") for line in said.stdout.splitlines()]
    return sorted(line for line in lines if _LONG not in line and "fifo" not in line)


def test_several_processes_copy_what_is_worth_it(folder: Path, tmp_path: Path, many: Path) -> None:
    """One for each 8 MiB, and for each processor, eight at most; the packer itself is one of them."""
    forks, variables = tmp_path / "forks", {"LD_PRELOAD": str(many), "NOTED_FORKS": str(tmp_path / "forks")}
    pack(tmp_path / "shm.tar", folder, **variables)
    assert forks.stat().st_size == 3  # 26 MiB
    write(folder / "more", (0, os.urandom(60 * MIB)))
    forks.unlink()
    pack(tmp_path / "shm.tar", folder, **variables)
    assert forks.stat().st_size == 7


def test_it_goes_into_memory_that_is_ready_and_over_what_is_left_of_another_try(folder: Path, tmp_path: Path) -> None:
    archive = tmp_path / "shm.tar"
    pack(archive, folder)
    was = archive.read_bytes()
    for there in (bytes(40 * MIB), b"x" * MIB):
        archive.write_bytes(there)
        pack(archive, folder)
        assert archive.stat().st_size == len(was)
        unpack(archive, folder / "gpuckpt" / f"copy-{len(there)}")
        assert about(folder / "gpuckpt" / f"copy-{len(there)}") == about(folder)


def test_where_there_is_no_room_it_says_so(folder: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8M", "none", small], check=True)
    try:
        words = [installed.SHM_PACKER, small / "shm.tar", folder, "gpuckpt"]
        assert subprocess.run(words, check=False, capture_output=True, timeout=60).returncode == 1
        archive = tmp_path / "shm.tar"
        pack(archive, folder)
        large = [one for one in shm_archive.large_files(archive) if one.path == b"./large"]
        write(small / "large", size=9 * MIB + 77)
        with pytest.raises(OSError, match=r".+"):
            shm_archive.fill(archive, large, small)
    finally:
        subprocess.run(["umount", small], check=True)


@pytest.mark.parametrize("bad", ["link", "folder", "size"])
def test_nothing_is_filled_but_what_tar_has_made(folder: Path, tmp_path: Path, bad: str) -> None:
    archive, into, other = tmp_path / "shm.tar", tmp_path / "into", tmp_path / "other"
    pack(archive, folder)
    into.mkdir()
    other.mkdir()
    (large,) = (one for one in shm_archive.large_files(archive) if one.path.startswith(b"./folder/"))
    name = os.fsdecode(large.path).rpartition("/")[2]  # one of two
    write(other / name, size=5 * MIB)
    (into / "folder").mkdir()
    if bad == "folder":
        (into / "folder" / "inner").symlink_to(other)
    else:
        (into / "folder" / "inner").mkdir()
        if bad == "link":
            (into / "folder" / "inner" / name).symlink_to(other / name)
        else:
            write(into / "folder" / "inner" / name, size=MIB)
    with pytest.raises(OSError, match=r".+"):
        shm_archive.fill(archive, [large], into)
    assert (other / name).read_bytes() == bytes(5 * MIB)


def test_a_damaged_archive_is_none_that_is_known(folder: Path, tmp_path: Path) -> None:
    archive = tmp_path / "shm.tar"
    pack(archive, folder)
    whole, last = archive.read_bytes(), shm_archive.large_files(archive)[-1]
    for raw in (b"", b"\1" * 512, whole[:1000], whole[:512] + os.urandom(5000), whole[: last.end - 1]):
        archive.write_bytes(raw)
        assert shm_archive.large_files(archive) == []
        assert sum(shm_archive.pieces(archive)) == len(raw)
        assert b"".join(shm_archive.without(archive, [])) == raw


def test_the_content_of_a_large_file_is_one_piece_wherever_it_is(folder: Path, tmp_path: Path) -> None:
    archive = tmp_path / "shm.tar"
    pack(archive, folder)
    before = shm_archive.pieces(archive)
    assert sum(before) == archive.stat().st_size
    sizes = [9 * MIB + 77, 6 * (MIB + 8192), 6 * MIB, 5 * MIB]
    assert sorted(size for size in before if size > 2 * MIB) == sorted(sizes)
    for number in range(50):
        (folder / f"another-{number}").write_bytes(b"x" * 9999)
    pack(archive, folder)
    assert sorted(size for size in shm_archive.pieces(archive) if size > 2 * MIB) == sorted(sizes)


def test_without_the_packer_tar_does_it(tmp_path: Path) -> None:
    """As where there was no C compiler."""
    script = tmp_path / "at_post_dump.sh"
    script.write_bytes(criu.AT_POST_DUMP.read_bytes())
    script.chmod(0o700)
    (tmp_path / "kernel.log").write_text("log")
    (tmp_path / "made").mkdir()
    said = {"CRTOOLS_SCRIPT_ACTION": "post-dump", "GPUCKPT_SNAPSHOT": f"{tmp_path}/made", "PATH": os.environ["PATH"]}
    run = 'mount -t tmpfs none /dev/shm; mkdir /dev/shm/gpuckpt /dev/shm/mine; touch /dev/shm/mine/file; exec "$0"'
    environment = {**said, "GPUCKPT_LOG": f"{tmp_path}/kernel.log"}
    packer = tmp_path / installed.SHM_PACKER.name
    # tar, the packer, that without the script, and tar where that fails: it follows no link
    for action, fails in ((script, False), (script, False), (packer, False), (packer, True)):
        if fails:
            (tmp_path / "made" / "shm.tar").symlink_to(tmp_path / "elsewhere")
        subprocess.run(["unshare", "--mount", "sh", "-c", run, action], check=True, env=environment, timeout=60)
        listed = subprocess.run(
            ["tar", "-tf", tmp_path / "made" / "shm.tar"], check=True, capture_output=True, text=True
        )
        assert [line.strip("./") for line in listed.stdout.split()] == ["", "mine", "mine/file"]
        assert (tmp_path / "made" / "kernel.log").read_text() == "log"
        assert (tmp_path / "elsewhere").exists() == fails
        for made in (tmp_path / "made").iterdir():
            made.unlink()
        packer.write_bytes(installed.SHM_PACKER.read_bytes())
        packer.chmod(0o700)
