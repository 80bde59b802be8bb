"""Sending snapshots to remotes and fetching them: only what is missing travels, and nothing that lies is taken."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import pytest
from remote_servers import S3, Sftp, web_server
from store_helpers import FILES, everything, litter, read_back, save
from transfer_helpers import LARGE, Counting, at, counted, flipped, person, secrets_of

from jupyter_gpuckpt.errors import (
    Busy,
    Damaged,
    GpuckptError,
    Incompatible,
    NameTaken,
    NoSuchSnapshot,
    Pinned,
    Refused,
    RemoteError,
    Replayed,
    RevokedKey,
    StoreError,
    UnknownKey,
    Unsigned,
    WrongName,
    WrongSignature,
)
from jupyter_gpuckpt.store import Store
from jupyter_gpuckpt.store.sessions import Session
from jupyter_gpuckpt.store.signatures import split
from jupyter_gpuckpt.store.transfer import pull as pulling
from jupyter_gpuckpt.store.transfer import push as pushing
from jupyter_gpuckpt.store.transfer.pull import pull
from jupyter_gpuckpt.store.transfer.push import push
from jupyter_gpuckpt.store.transfer.remote_collect import collect_remote
from jupyter_gpuckpt.store.transfer.remote_listing import listed
from jupyter_gpuckpt.store.transfer.remote_store import RemoteStore
from jupyter_gpuckpt.store.transfer.remotes.fsspec import FsspecRemote
from jupyter_gpuckpt.store.transfer.remotes.remote import Address, remote_at
from jupyter_gpuckpt.store.trust import Trust


@pytest.fixture
def ann(tmp_path: Path) -> Store:
    return person(tmp_path, "ann")


@pytest.fixture
def bob(tmp_path: Path, ann: Store) -> Store:
    """Somebody who trusts Ann."""
    bob = person(tmp_path, "bob")
    bob.trust.add(ann.trust.own(), "Ann")
    return bob


@pytest.fixture
def small_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pushing, "_PACK", 100_000)


@pytest.fixture
def bucket(s3: S3, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of a bucket of the test's own."""
    for variable, value in s3.environment.items():
        monkeypatch.setenv(variable, value)
    return s3.make_bucket(f"bucket-{uuid.uuid4().hex[:8]}")


@pytest.fixture
def sftp_folder(sftp: Sftp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of a folder on another machine, as this one is to whoever comes by SSH."""
    monkeypatch.setenv("HOME", str(sftp.home))
    return sftp.address(tmp_path / "remote")


@pytest.fixture(params=["folder", "s3", "sftp"])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Store], RemoteStore]:
    """Return how one comes to the same remote: a folder, S3, and a folder of another machine."""
    if request.param == "s3":
        address = f"{request.getfixturevalue('bucket')}/deep/folder"
    elif request.param == "sftp":
        address = f"{request.getfixturevalue('sftp_folder')}/deep/folder"
    else:
        address = str(tmp_path / "remote")
    return lambda store: at(address, store)


# -- what travels


def test_a_snapshot_comes_to_somebody_else_byte_for_byte(
    ann: Store, bob: Store, remote: Callable[[Store], RemoteStore], small_packs: None
) -> None:
    saved = save(ann, "it", "two\nlines", LARGE)
    seen: list[tuple[str, int, int]] = []
    sent = push(ann, "it", remote(ann), progress=lambda *a: seen.append(a))
    assert sent.found == 0
    assert seen[-1] == ("send", sent.sent, sent.sent)
    fetched = pull(bob, remote(bob), progress=lambda *a: seen.append(a))
    assert seen[-1] == ("fetch", fetched.fetched, fetched.fetched)
    assert fetched.fetched == sent.sent
    assert fetched.manifest == saved == bob.get("it")
    assert read_back(bob, "it") == LARGE
    assert litter(bob) == []
    assert bob.check(read_data=True).faults == []
    assert [one.name for one in listed(remote(bob), bob.trust)] == ["it"]


def test_only_what_is_missing_travels(ann: Store, bob: Store, bucket: str) -> None:
    save(ann, "first", files=LARGE)
    push(ann, "first", at(bucket, ann))
    save(ann, "second", files={**LARGE, "new": os.urandom(40_000)})
    there, count = counted(bucket, ann)
    sent = push(ann, "second", there)
    assert 40_000 <= sent.sent < 41_000
    assert count.written_bytes < 60_000
    assert pull(bob, at(bucket, bob), "first").fetched > 300_000
    here, count = counted(bucket, bob)
    assert 40_000 <= pull(bob, here, "second").fetched < 41_000
    assert count.read_bytes < 60_000
    # Once more of either: nothing but looking.
    there, count = counted(bucket, ann)
    assert push(ann, "second", there).sent == 0
    assert pull(bob, at(bucket, bob), "second").fetched == 0
    assert [what for what, path in count.requests if path.startswith("packs/")] == []


def test_a_web_server_is_enough_to_fetch_from(ann: Store, bob: Store, tmp_path: Path, small_packs: None) -> None:
    save(ann, "it", files=LARGE)
    push(ann, "it", at(tmp_path / "remote", ann))
    with web_server(tmp_path / "remote", tmp_path / "log") as address:
        here = at(address + "/?signature=of-the-link", bob, create=False)
        with pytest.raises(RemoteError, match="cannot be listed") as caught:
            pull(bob, here)
        assert "name" in caught.value.then
        pull(bob, here, "it")
        with pytest.raises(NoSuchSnapshot):
            pull(bob, here, "that")
        with pytest.raises(Refused, match="only be read"):
            push(ann, "it", at(address + "/other", ann))
    assert read_back(bob, "it") == LARGE


class Ranges(SimpleHTTPRequestHandler):
    """A web server that knows ranges, and one file of which has no end."""

    sent = 0

    def do_GET(self) -> None:
        if "endless" in self.path:
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                while True:
                    self.wfile.write(bytes(2**20))
            return
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            self.send_error(404)
            return
        first, last = (int(x) for x in self.headers["Range"].removeprefix("bytes=").split("-"))
        content = path.read_bytes()[first : last + 1]
        self.send_response(206 if content else 416)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
        type(self).sent += len(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def ranges(tmp_path: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Ranges, directory=str(tmp_path / "remote"))) as web:
        web.daemon_threads = True
        thread = threading.Thread(target=web.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{web.server_port}"
        web.shutdown()
        thread.join()


def test_of_a_pack_on_a_web_server_only_what_is_needed_travels(
    ann: Store, bob: Store, tmp_path: Path, ranges: str
) -> None:
    files = {f"pages-{i}.img": os.urandom(150_000) for i in range(6)}
    save(ann, "it", files=files)
    push(ann, "it", at(tmp_path / "remote", ann))
    save(bob, "own", files={path: files[path] for path in list(files)[1:5]})
    Ranges.sent = 0
    assert pull(bob, at(ranges, bob, create=False), "it").fetched == 300_000
    assert 300_000 < Ranges.sent < 310_000
    assert read_back(bob, "it") == files


def test_a_web_server_that_never_ends_is_not_listened_to_forever(
    ann: Store, bob: Store, tmp_path: Path, ranges: str
) -> None:
    save(ann, "it")
    push(ann, "it", at(tmp_path / "remote", ann))
    with pytest.raises(RemoteError, match="has more than"):
        pull(bob, at(ranges, bob, create=False), "endless")


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), Path.mkdir])
def test_what_is_no_file_in_a_folder_is_not_read(
    ann: Store, bob: Store, tmp_path: Path, make: Callable[[Path], None]
) -> None:
    save(ann, "it")
    push(ann, "it", at(tmp_path / "remote", ann))
    path = tmp_path / "remote" / "snapshots" / "it.json"
    path.unlink()
    make(path)
    with pytest.raises(RemoteError):
        pull(bob, at(tmp_path / "remote", bob), "it")


def test_a_name_is_needed_where_several_are(ann: Store, bob: Store, tmp_path: Path) -> None:
    for name in ("a", "b"):
        save(ann, name, files={})
        push(ann, name, at(tmp_path / "remote", ann))
    with pytest.raises(Refused, match="a, b"):
        pull(bob, at(tmp_path / "remote", bob))
    assert pull(bob, at(tmp_path / "remote", bob), "b").manifest.name == "b"
    with pytest.raises(NoSuchSnapshot):
        at(tmp_path / "nothing", bob, create=False)


def test_what_a_broken_off_pull_has_left_is_looked_at_before_it_is_used(
    ann: Store, bob: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulling, "_RUN", 1)
    files = {f"pages-{i}.img": os.urandom(50_000) for i in range(8)}
    save(ann, "it", files=files)
    push(ann, "it", at(tmp_path / "remote", ann))
    here, count = counted(tmp_path / "remote", bob)
    reads = itertools.count(1)

    def fail(what: str, path: str) -> None:
        if path.startswith("packs/") and next(reads) > 5:
            raise RemoteError("the network is gone")

    count.before = fail
    with pytest.raises(RemoteError):
        pull(bob, here, "it")
    assert bob.list() == []
    for pack in (bob.root / "packs").iterdir():
        pack.write_bytes(flipped(pack.read_bytes(), 30_000))
    fetched = pull(bob, at(tmp_path / "remote", bob), "it")
    assert 50_000 <= fetched.fetched < 400_000
    assert read_back(bob, "it") == files
    bob.collect()
    assert litter(bob) == []
    assert bob.check(read_data=True).faults == []


MOVED = """
import os, resource, sys
sys.path[:0] = sys.argv[1].split(":")
from pathlib import Path
from store_helpers import save
from transfer_helpers import at, person
from jupyter_gpuckpt.store.transfer import pull as pulling, push as pushing
pushing._PACK = pulling._RUN = 2**20
folder = Path(sys.argv[2])
ann, bob = person(folder, "ann"), person(folder, "bob")
bob.trust.add(ann.trust.own())
peaks = []
for number, size in enumerate((20, 200)):
    if os.fork() == 0:
        files = {f"pages-{i}.img": os.urandom(2**20) for i in range(size)}
        save(ann, f"s{number}", files=files)
        os._exit(0)
    os.wait()
    pushing.push(ann, f"s{number}", at(folder / "remote", ann))
    pulling.pull(bob, at(folder / "remote", bob), f"s{number}")
    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
print((peaks[1] - peaks[0]) * 1024)
"""


def test_the_memory_that_a_transfer_takes_does_not_depend_on_the_snapshot_s_size(tmp_path: Path) -> None:
    path = ":".join(p for p in sys.path if p)
    said = subprocess.run([sys.executable, "-c", MOVED, path, tmp_path], capture_output=True, text=True, timeout=500)
    assert said.returncode == 0, said.stderr
    assert int(said.stdout) < 40 * 2**20


# -- names that are taken


def test_another_snapshot_of_that_name_is_not_overwritten(
    ann: Store, bob: Store, remote: Callable[[Store], RemoteStore]
) -> None:
    save(ann, "it", "Ann's")
    save(bob, "it", "Bob's")
    push(ann, "it", remote(ann))
    with pytest.raises(NameTaken, match="--replace"):
        push(bob, "it", remote(bob))
    with pytest.raises(NameTaken, match="--replace"):
        pull(bob, remote(bob), "it")
    bob.pin("it", True)
    with pytest.raises(Pinned):
        pull(bob, remote(bob), "it", replace=True)
    bob.pin("it", False)
    assert pull(bob, remote(bob), "it", replace=True).manifest.message == "Ann's"
    save(ann, "it", "newer", replace=True)
    push(ann, "it", remote(ann), replace=True)
    assert pull(bob, remote(bob), "it", replace=True).manifest.message == "newer"
    assert litter(bob) == []


def test_two_who_send_the_same_name_at_once_do_not_both_succeed(
    ann: Store, bob: Store, remote: Callable[[Store], RemoteStore]
) -> None:
    save(ann, "it", "Ann's")
    save(bob, "it", "Bob's", {"a": os.urandom(9999)})
    ready = threading.Barrier(2)
    outcomes: list[str] = []

    def send(store: Store) -> None:
        there = remote(store)

        def wait(what: str, path: str) -> None:
            if what == "create":
                ready.wait(30)

        there.remote = Counting(there.remote, wait)
        try:
            push(store, "it", there)
            outcomes.append(store.get("it").message)
        except NameTaken:
            outcomes.append("taken")
        except RemoteError as e:  # an S3 that gave both of them the name (moto does, now and then): it is read back
            outcomes.append("taken" if "reads back differently" in e.why else str(e))

    remote(ann)  # the mark is there
    threads = [threading.Thread(target=send, args=[store]) for store in (ann, bob)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = [outcome for outcome in outcomes if outcome != "taken"]
    ann.remove("it")
    ann.trust.add(bob.trust.own())
    assert pull(ann, remote(ann), "it").manifest.message == winner


def test_several_who_send_different_snapshots_at_once_do_not_disturb_each_other(
    ann: Store, bob: Store, bucket: str
) -> None:
    for number in range(4):
        save((ann, bob)[number % 2], f"s{number}", files={**LARGE, "own": os.urandom(5000 + number)})
    errors: list[BaseException] = []

    def send(number: int) -> None:
        store = (ann, bob)[number % 2]
        try:
            push(store, f"s{number}", at(bucket, store))
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=send, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    for number in (0, 2):
        pull(bob, at(bucket, bob), f"s{number}")
        assert len(read_back(bob, f"s{number}")["own"]) == 5000 + number


def test_what_is_here_under_another_name_is_not_brought_in_twice(ann: Store, bob: Store, tmp_path: Path) -> None:
    save(ann, "it")
    push(ann, "it", at(tmp_path / "remote", ann))
    pull(bob, at(tmp_path / "remote", bob))
    bob.rename("it", "mine")
    before = everything(bob.root)
    with pytest.raises(NameTaken, match="already in the store, as mine"):
        pull(bob, at(tmp_path / "remote", bob))
    assert everything(bob.root) == before
    session = Session(bob.root / "locks", "pull", of=ann.get("it").id)
    bob.remove("mine")
    with pytest.raises(Busy):
        pull(bob, at(tmp_path / "remote", bob))
    session.close()
    pull(bob, at(tmp_path / "remote", bob))
    assert read_back(bob, "it") == FILES


def test_a_snapshot_that_has_no_room_is_refused_and_leaves_nothing(ann: Store, bob: Store, tmp_path: Path) -> None:
    save(ann, "it", files=LARGE)
    push(ann, "it", at(tmp_path / "remote", ann))
    with pytest.raises(StoreError, match="could not be stored"):
        pull(bob, at(tmp_path / "remote", bob), quota=100_000)
    assert bob.list() == []
    bob.collect()
    assert litter(bob) == []


# -- who made it


def forge(remote: Path, change: Callable[[bytes], bytes], name: str = "it") -> None:
    path = remote / "snapshots" / f"{name}.json"
    path.write_bytes(change(path.read_bytes()))


def refused(bob: Store, remote: Path, kind: type[GpuckptError], name: str = "it") -> GpuckptError:
    """Check that a pull is refused and leaves the store as it was."""
    before = everything(bob.root) if bob.root.exists() else None
    with pytest.raises(kind) as caught:
        pull(bob, at(remote, bob), name)
    assert caught.type is kind
    assert (everything(bob.root) if bob.root.exists() else None) == before
    assert caught.value.why
    assert caught.value.then
    return caught.value


def test_a_remote_that_lies_about_who_made_it_is_found_out(ann: Store, bob: Store, tmp_path: Path) -> None:
    remote = tmp_path / "remote"
    save(ann, "it")
    push(ann, "it", at(remote, ann))
    good = (remote / "snapshots" / "it.json").read_bytes()
    stranger = Trust(tmp_path / "stranger")
    forge(remote, lambda raw: split(raw)[0])
    refused(bob, remote, Unsigned)
    forge(remote, lambda raw: stranger.sign(split(raw)[0]))
    assert stranger.own() in refused(bob, remote, UnknownKey).then
    bob.trust.revoke(stranger.own())
    refused(bob, remote, RevokedKey)
    forge(remote, lambda _: good.replace(b'"message":""', b'"message":"x"'))
    refused(bob, remote, WrongSignature)
    (remote / "snapshots" / "that.json").write_bytes(good)
    refused(bob, remote, WrongName, "that")
    forge(remote, lambda _: b"[" * 1_000_000)
    refused(bob, remote, Unsigned)
    forge(remote, lambda _: b"x" * (17 * 2**20))
    refused(bob, remote, RemoteError)
    forge(remote, lambda _: good)
    pull(bob, at(remote, bob), "it")


def test_an_older_snapshot_is_refused_where_a_newer_one_was_seen(ann: Store, bob: Store, tmp_path: Path) -> None:
    remote = tmp_path / "remote"
    save(ann, "it", "older")
    push(ann, "it", at(remote, ann))
    older = everything(remote)
    save(ann, "it", "newer", replace=True)
    push(ann, "it", at(remote, ann), replace=True)
    pull(bob, at(remote, bob))
    bob.remove("it")
    forge(remote, lambda _: older["snapshots/it.json"][1])
    assert "--older" in refused(bob, remote, Replayed).then
    # Whoever made it knows as well what was sent last.
    ann.remove("it")
    refused(ann, remote, Replayed)
    assert pull(bob, at(remote, bob), "it", older=True).manifest.message == "older"
    assert read_back(bob, "it") == FILES


def test_a_snapshot_that_is_not_trusted_is_not_sent(ann: Store, bob: Store, tmp_path: Path) -> None:
    save(ann, "it")
    path = ann.root / "snapshots" / "it.json"
    path.write_bytes(Trust(tmp_path / "stranger").sign(split(path.read_bytes())[0]))
    with pytest.raises(UnknownKey):
        push(ann, "it", at(tmp_path / "remote", ann))
    assert listed(at(tmp_path / "remote", ann), ann.trust) == []


# -- what is damaged


def the_only(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


DAMAGES: dict[str, Callable[[Path], None]] = {
    "flipped": lambda path: path.write_bytes(flipped(path.read_bytes(), -9)),
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "emptied": lambda path: path.write_bytes(b""),
    "longer": lambda path: os.truncate(path, 2**33),
    "gone": lambda path: path.unlink(),
}


@pytest.mark.parametrize("folder", ["packs", "index", "contents", "format.json"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_at_a_remote_is_named_and_nothing_of_it_is_used(
    ann: Store, bob: Store, tmp_path: Path, folder: str, damage: str
) -> None:
    remote = tmp_path / "remote"
    save(ann, "it")
    push(ann, "it", at(remote, ann))
    path = remote / folder if folder == "format.json" else the_only(remote / folder)
    good = path.read_bytes()
    DAMAGES[damage](path)
    if (folder, damage) == ("packs", "longer"):
        pull(bob, at(remote, bob))  # what stands behind the chunks does not matter
        return
    with pytest.raises((Damaged, RemoteError, NoSuchSnapshot, Incompatible)) as caught:
        pull(bob, at(remote, bob, create=False))
    assert path.name in str(caught.value)
    assert bob.list() == []
    path.write_bytes(good)
    pull(bob, at(remote, bob))
    assert read_back(bob, "it") == FILES


def test_an_index_that_points_elsewhere_is_found_out(ann: Store, bob: Store, tmp_path: Path) -> None:
    remote = tmp_path / "remote"
    manifest = save(ann, "it")
    there = at(remote, ann)
    push(ann, "it", there)
    good = there.part(manifest.id, 10**6).index()
    keys = sorted(good)
    for lie in (
        {key: where._replace(offset=2**60) for key, where in good.items()},
        {key: good[keys[i - 1]] for i, key in enumerate(keys)},
        {key: where._replace(pack="0" * 32 + "-000001") for key, where in good.items()},
        {},
    ):
        there.write_part(manifest.id, lie)
        with pytest.raises(Damaged):
            pull(bob, at(remote, bob))
        assert bob.list() == []
    bob.collect()
    assert litter(bob) == []


def test_what_a_remote_has_lost_is_sent_again(ann: Store, bob: Store, tmp_path: Path) -> None:
    remote = tmp_path / "remote"
    save(ann, "it")
    push(ann, "it", at(remote, ann))
    the_only(remote / "packs").unlink()
    assert push(ann, "it", at(remote, ann)).sent > 0
    pull(bob, at(remote, bob))
    assert read_back(bob, "it") == FILES


def test_a_newer_remote_is_refused_and_left_untouched(ann: Store, tmp_path: Path) -> None:
    remote = tmp_path / "remote"
    save(ann, "it")
    push(ann, "it", at(remote, ann))
    for mark in ('{"features":[],"format":3}', '{"features":["age","teleport"],"format":2}'):
        (remote / "format.json").write_text(mark)
        before = everything(remote)
        with pytest.raises(Incompatible):
            push(ann, "it", at(remote, ann))
        assert everything(remote) == before


# -- what is needless


def test_what_a_remote_does_not_need_is_deleted_when_no_push_can_rely_on_it(
    ann: Store, bob: Store, remote: Callable[[Store], RemoteStore]
) -> None:
    save(ann, "it", files={"a": os.urandom(9999)})
    save(ann, "that", files={"b": os.urandom(9999)})
    there = remote(ann)
    for name in ("it", "that"):
        push(ann, name, there)
    there.remove_manifest("it")
    waits = collect_remote(there)
    assert (waits.freed, waits.obstacle) == (0, "")
    assert waits.waiting > 0
    would = collect_remote(there, 0, dry_run=True)
    assert would.freed > 9999
    assert len(there.packs()) == 2
    assert collect_remote(there, 0).freed == would.freed
    assert len(there.packs()) == 1
    pull(bob, remote(bob))
    assert collect_remote(there, 0).freed == 0
    assert push(ann, "it", there).sent == 9999


def test_a_pack_is_deleted_two_days_after_it_became_needless(
    ann: Store, bob: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = tmp_path / "remote"
    save(ann, "it", files=LARGE)
    there = at(remote, ann)
    push(ann, "it", there)
    there.remove_manifest("it")
    (remote / "packs" / "of-a-write-that-was-killed.tmp").write_bytes(b"x" * 1000)
    now = time.time()

    def collect(days: float) -> tuple[int, int, int]:
        monkeypatch.setattr("jupyter_gpuckpt.store.transfer.remote_collect.time.time", lambda: now + days * 24 * 3600)
        done = collect_remote(there)
        return done.freed, len(there.parts()), len(list((remote / "packs").iterdir()))

    assert collect(0) == (0, 1, 2)
    assert collect(0.9) == (0, 1, 2)
    assert collect(1.1)[1:] == (0, 1)
    # Whoever came to rely on it while the index named it has a day more: a snapshot that needs it saves it.
    save(bob, "that", files=LARGE)
    assert push(bob, "that", there).sent > 0
    assert collect(1.9)[1:] == (1, 2)
    freed, *left = collect(2.2)
    assert freed > 300_000
    assert left == [1, 1]
    assert not (remote / "condemned.json").exists()
    bob.remove("that")
    pull(bob, at(remote, bob), "that")
    assert read_back(bob, "that") == LARGE


def test_a_store_that_knows_no_exclusive_write_serves_as_well(ann: Store, bob: Store, tmp_path: Path) -> None:
    class Old(type(fsspec.filesystem("file"))):  # type: ignore[misc]
        def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **how: object) -> None:
            if mode == "create":
                raise OSError("NotImplemented: A header you provided implies functionality that is not implemented")
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_bytes(value)

    def there(store: Store) -> RemoteStore:
        address = Address("gs://bucket/folder")
        address.full = str(tmp_path / "remote")
        return RemoteStore(FsspecRemote(address, Old()), secrets_of(store), create=True)

    save(ann, "it")
    save(bob, "it")
    push(ann, "it", there(ann))
    with pytest.raises(NameTaken):
        push(bob, "it", there(bob))
    assert pull(bob, there(bob), "it", replace=True).manifest == ann.get("it")


def test_nothing_is_deleted_where_it_is_unknown_what_is_needed(ann: Store, tmp_path: Path) -> None:
    save(ann, "it")
    there = at(tmp_path / "remote", ann)
    push(ann, "it", there)
    (tmp_path / "remote" / "snapshots" / "odd.json").write_bytes(b"{}")
    before = everything(tmp_path / "remote" / "packs")
    assert "odd" in collect_remote(there, 0).obstacle
    assert everything(tmp_path / "remote" / "packs") == before


# -- addresses


def test_what_is_secret_in_an_address_is_nowhere_shown(ann: Store) -> None:
    address = "http://annabel:top%20secret@127.0.0.1:9/folder?token=abcdef"
    with pytest.raises(RemoteError) as caught:
        at(address, ann, create=False)
    said = str(caught.value) + str(caught.value.as_dict())
    assert "http://127.0.0.1:9/folder" in said
    for secret in ("annabel", "top", "secret", "abcdef"):
        assert secret not in said
    assert caught.value.__suppress_context__
    assert Address(address).hide(f"cannot open {address}, top secret") == "cannot open http://127.0.0.1:9/folder, ***"


@pytest.mark.parametrize(
    "address",
    ["", "ftp://host/x", "zip://a::s3://b", "simplecache::s3://b/c", "s3://b::c", "http://[::1", "memory://x"],
)
def test_odd_addresses_are_refused(address: str) -> None:
    with pytest.raises(Refused):
        remote_at(address)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Refused, match="pip install fsspec gcsfs"):
        remote_at("gs://bucket/folder")
    monkeypatch.setitem(__import__("sys").modules, "fsspec", None)
    with pytest.raises(Refused, match="pip install fsspec s3fs"):
        remote_at("s3://bucket/folder")
    monkeypatch.setitem(__import__("sys").modules, "paramiko", None)
    with pytest.raises(Refused, match="pip install paramiko"):
        remote_at("sftp://host/folder")
