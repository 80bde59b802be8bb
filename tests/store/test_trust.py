"""Whose snapshots are used: those that oneself made, and those of people who are trusted (fault 35)."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from notebooks import PATIENCE, wait_until
from store_helpers import FILES, everything, litter, read_back, save

from jupyter_gpuckpt.errors import (
    Damaged,
    GpuckptError,
    NoSuchSnapshot,
    Refused,
    Replayed,
    RevokedKey,
    StoreError,
    UnknownKey,
    Unsigned,
    Untrusted,
    WrongName,
    WrongSignature,
)
from jupyter_gpuckpt.snapshots.naming import Owner, choose_key, follow
from jupyter_gpuckpt.store import Store, name_of
from jupyter_gpuckpt.store.manifest import Manifest
from jupyter_gpuckpt.store.signatures import split
from jupyter_gpuckpt.store.trust import Trust, parse_key


@pytest.fixture
def other(tmp_path: Path) -> Store:
    """The same folder as `store` has, used by somebody with another key."""
    return Store(tmp_path / "store", Trust(tmp_path / "keys of another"))


def manifest_of(store: Store, name: str = "it") -> Path:
    return store.root / "snapshots" / f"{name}.json"


def refused(store: Store, kind: type[GpuckptError], name: str = "it") -> GpuckptError:
    """Check that a snapshot is refused with this error wherever it would be used, and return the error."""
    before = everything(store.root)
    uses: list[Callable[[], object]] = [lambda: read_back(store, name), lambda: store.rename(name, "other")]
    for use in uses:
        with pytest.raises(kind) as caught:
            use()
        assert caught.type is kind
    assert everything(store.root) == before
    assert caught.value.why
    assert caught.value.then
    return caught.value


def test_one_s_own_snapshots_are_trusted(store: Store) -> None:
    save(store, "it")
    raw = manifest_of(store).read_bytes()
    signature = split(raw)[1]
    assert signature is not None
    assert signature.key == store.trust.own()
    assert read_back(store, "it") == FILES


def test_the_key_is_its_owner_s_alone_and_is_made_once(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        made = pool.map(_own, [tmp_path / "new" / "keys"] * 8)
    assert len(set(made)) == 1
    (key,) = (tmp_path / "new" / "keys").iterdir()
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert stat.S_IMODE(key.parent.stat().st_mode) == 0o700
    key.chmod(0o640)
    with pytest.raises(StoreError, match="other users can read or write it"):
        _own(key.parent)
    key.chmod(0o600)
    key.parent.chmod(0o770)
    with pytest.raises(StoreError, match="other users can write"):
        _own(key.parent)


def _own(folder: Path) -> str:
    return Trust(folder).own()


def test_somebody_else_s_snapshot_is_refused_until_their_key_is_trusted(store: Store, other: Store) -> None:
    save(other, "it")
    error = refused(store, UnknownKey)
    key = other.trust.own()
    assert key in error.why
    assert f"`gpuckpt trust {key}`" in error.then
    store.trust.add(key, "a colleague")
    assert read_back(store, "it") == FILES
    store.trust.revoke(key)
    assert "revoked" in refused(store, RevokedKey).why
    assert store.trust.known()[key].comment == "a colleague"
    store.trust.add(key)
    assert read_back(store, "it") == FILES


def test_a_snapshot_without_a_signature_is_refused_until_it_is_signed(store: Store) -> None:
    save(store, "it")
    path = manifest_of(store)
    path.write_bytes(split(path.read_bytes())[0])
    assert "`gpuckpt sign it`" in refused(store, Unsigned).then
    store.sign("it")
    assert read_back(store, "it") == FILES
    with pytest.raises(Refused, match="signed already") as caught:
        store.sign("it")
    assert (caught.value.why, caught.value.then) == ("by you", "")


def test_changed_bytes_do_not_have_the_signature(store: Store) -> None:
    save(store, "it", message="honest")
    sealed, _ = split(manifest_of(store).read_bytes())
    save(store, "it", message="changed", replace=True)
    manifest = store.get("it")
    line = b"".join(manifest_of(store).read_bytes().partition(b"\n")[2:])
    assert manifest.message == "changed"
    manifest_of(store).write_bytes(sealed + line)
    refused(store, WrongSignature)


def test_a_stranger_who_claims_a_trusted_key_is_found_out(store: Store, other: Store, tmp_path: Path) -> None:
    save(other, "it")
    raw = manifest_of(store).read_bytes()
    claimed = raw.replace(other.trust.own().encode(), store.trust.own().encode())
    manifest_of(store).write_bytes(claimed)
    refused(store, Damaged)  # the line has a check of its own


def test_a_snapshot_under_another_name_is_refused_and_one_that_was_renamed_is_not(store: Store) -> None:
    save(store, "it")
    manifest_of(store, "that").write_bytes(manifest_of(store).read_bytes())
    assert issubclass(WrongName, Untrusted)
    refused(store, WrongName, "that")
    manifest_of(store, "that").unlink()
    store.rename("it", "that")
    assert read_back(store, "that") == FILES


def test_an_older_snapshot_of_somebody_else_is_refused_where_a_newer_one_was_accepted(
    store: Store, other: Store
) -> None:
    store.trust.add(other.trust.own())
    save(other, "it", message="older")
    older = manifest_of(store).read_bytes()
    save(other, "it", message="newer", replace=True)
    newer = manifest_of(store).read_bytes()
    store.trust.note_newest(newer, Manifest.from_json(newer, "it"))
    read_back(store, "it")
    manifest_of(store).write_bytes(older)
    assert "--older" in refused(store, Replayed).then
    store.trust.note_newest(older, Manifest.from_json(older, "it"))  # a user asked for it
    assert store.trusted("it").message == "older"


def test_a_renamed_snapshot_of_somebody_else_counts_as_one_s_own(store: Store, other: Store) -> None:
    store.trust.add(other.trust.own())
    save(other, "it")
    store.rename("it", "mine")
    store.trust.revoke(other.trust.own())
    assert read_back(store, "mine") == FILES


def test_a_note_is_changed_by_whoever_signed_it_and_by_nobody_else(store: Store, other: Store) -> None:
    was = save(store, "it", message="typo")
    noted = store.note("it", "a note")
    assert noted == store.trusted("it") == dataclasses.replace(was, message="a note")
    assert read_back(store, "it") == FILES
    save(other, "theirs")
    store.trust.add(other.trust.own())
    before = everything(store.root)
    with pytest.raises(Refused, match="signed by somebody else"):
        store.note("theirs", "mine")
    assert everything(store.root) == before
    with pytest.raises(NoSuchSnapshot):
        store.note("nothing", "x")


def test_snapshots_follow_their_notebook_but_those_that_somebody_else_signed(store: Store, other: Store) -> None:
    """And whoever has the path next can have the same names."""
    notebooks = {"one": "/home/me/a.ipynb", "one~00000000": "/home/me/deep/a.ipynb", "two": "/home/me/deeper/a.ipynb"}
    for name, notebook in notebooks.items():
        save(store, name)
        store.move(name, {"notebook": notebook})
    save(other, "theirs")
    other.move("theirs", {"notebook": "/home/me/deep/a.ipynb"})
    store.trust.add(other.trust.own())

    def whose() -> dict[str, str]:
        return {manifest.name: manifest.kernel["notebook"] for manifest in store.list()}

    assert follow(store, "/home/me/deep", "/home/me/b") == ["one~00000000"]
    assert follow(store, "/home/me/a.ipynb", "/home/me/c.ipynb") == ["one"]
    assert whose() == {
        "one": "/home/me/c.ipynb",
        "one~00000000": "/home/me/b/a.ipynb",
        "two": "/home/me/deeper/a.ipynb",
        "theirs": "/home/me/deep/a.ipynb",
    }
    assert read_back(store, "one") == FILES
    another = Owner("its id", "/home/me/a.ipynb", "", "", None, "/home/me/a.ipynb")
    own, _ = choose_key(store, "one", another, replace=False)
    save(store, own)
    store.move(own, {"notebook": "/home/me/a.ipynb"})
    assert follow(store, "/home/me/a.ipynb", "/home/me/d.ipynb") == [own]
    key, replaces = choose_key(store, "one", another, replace=False)
    assert (name_of(key), key in whose(), replaces) == ("one", False, False)


@pytest.mark.parametrize("change", ["note", "move", "rename"])
def test_a_change_never_brings_back_or_takes_what_somebody_replaces_or_removes_meanwhile(
    store: Store, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """It stands in the middle of the change until the others wait for it, or are done where nothing holds them up."""
    save(store, "it")
    left: list[set[str]] = []

    def replace_and_remove() -> None:
        save(store, "it", replace=True)
        left.append({manifest.name for manifest in store.list()})
        store.remove("it")

    others = threading.Thread(target=replace_and_remove, daemon=True)
    sign, mark = store.trust.sign, (store.root / "format.json").stat().st_ino

    def is_waited_for() -> bool:
        return any(" -> " in line and f":{mark} " in line for line in Path("/proc/locks").read_text().splitlines())

    def sign_while_others_come(sealed: bytes) -> bytes:
        if threading.current_thread() is threading.main_thread():
            others.start()
            wait_until(lambda: is_waited_for() or not others.is_alive())
        return sign(sealed)

    monkeypatch.setattr(store.trust, "sign", sign_while_others_come)
    made = {
        "note": lambda: store.note("it", "a note"),
        "move": lambda: store.move("it", {"notebook": "/home/me/a.ipynb"}),
        "rename": lambda: store.rename("it", "other"),
    }
    made[change]()
    others.join(PATIENCE)
    assert not others.is_alive()
    renamed = {"other"} if change == "rename" else set()
    assert left == [{"it"} | renamed]
    assert {manifest.name for manifest in store.list()} == renamed


def test_one_s_own_key_can_be_revoked_and_a_new_one_is_made(store: Store) -> None:
    save(store, "it")
    lost = store.trust.own()
    Trust(store.trust.folder).revoke(lost)  # as another process does
    refused(store, RevokedKey)
    assert store.trust.own() != lost
    save(store, "new")
    assert read_back(store, "new") == FILES


def test_what_says_whom_to_trust_is_not_guessed_where_it_is_damaged(store: Store, other: Store) -> None:
    store.trust.add(other.trust.own())
    save(other, "it")
    path = store.trust.folder / "trusted.json"
    path.write_text("{")
    with pytest.raises(StoreError, match="damaged"):
        read_back(store, "it")
    path.write_text(json.dumps({"x": {}}))
    with pytest.raises(StoreError, match="damaged"):
        read_back(store, "it")


def test_a_key_is_read_from_what_its_owner_prints(store: Store) -> None:
    key = store.trust.own()
    assert parse_key(f"your key is:\n  {key}\n") == key
    for odd in ("", "abc", key.upper(), f"{key} {'0' * 64}"):
        with pytest.raises(Refused):
            parse_key(odd)


def test_a_kernel_does_not_pay_for_signatures() -> None:
    code = "import sys, jupyter_gpuckpt, jupyter_gpuckpt.store; print([m for m in sys.modules if 'cryptography' in m])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_a_save_that_could_not_be_signed_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store = Store(tmp_path / "store", Trust(tmp_path / "file" / "keys"))
    with pytest.raises(StoreError, match="GPUCKPT_KEYS"):
        store.writer("it")
    assert store.list() == []
    assert litter(store) == []
