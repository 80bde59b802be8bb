"""What leaves the machine encrypted: only those for whom it is can read it, and it tells little to who keeps it."""

from __future__ import annotations

import io
import os
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pyrage
import pytest
from quick_passphrase import passphrases_are_quick
from store_helpers import everything, litter, read_back, save
from transfer_helpers import LARGE, at, flipped, person, secrets_of

from jupyter_gpuckpt.errors import Damaged, GpuckptError, NameTaken, Refused, Sealed, StoreError, WrongName
from jupyter_gpuckpt.store import Store
from jupyter_gpuckpt.store.transfer import push as pushing
from jupyter_gpuckpt.store.transfer.container import export_snapshot, import_snapshot
from jupyter_gpuckpt.store.transfer.pull import pull
from jupyter_gpuckpt.store.transfer.push import push
from jupyter_gpuckpt.store.transfer.remote_collect import collect_remote
from jupyter_gpuckpt.store.transfer.remote_listing import listed
from jupyter_gpuckpt.store.transfer.sealing import own_recipient


@pytest.fixture
def ann(tmp_path: Path) -> Store:
    ann = person(tmp_path, "ann")
    save(ann, "secret_plan", "a secret message", LARGE)
    return ann


@pytest.fixture
def bob(tmp_path: Path, ann: Store) -> Store:
    bob = person(tmp_path, "bob")
    bob.trust.add(ann.trust.own())
    return bob


def forget_keys(store: Store) -> None:
    """Forget the keys of remotes that were opened before, as another machine of the same person would not have them."""
    for path in (store.trust.folder / "remotes").glob("*"):
        path.unlink()


def test_only_for_whom_it_is_encrypted_can_fetch_it(ann: Store, bob: Store, tmp_path: Path) -> None:
    remote = tmp_path / "remote"
    recipients = [own_recipient(bob.trust.folder)]
    sent = push(ann, "secret_plan", at(remote, ann, recipients=recipients))
    assert pull(bob, at(remote, bob)).fetched == sent.sent
    assert read_back(bob, "secret_plan") == LARGE
    eve = person(tmp_path, "eve")
    own_recipient(eve.trust.folder)
    with pytest.raises(Sealed, match="no key on this machine fits opens it") as caught:
        at(remote, eve)
    assert "recipient" in caught.value.then
    # Who sent it goes on without anything being said; on another machine that needs a key.
    save(ann, "more", files={**LARGE, "more": os.urandom(2000)})
    assert push(ann, "more", at(remote, ann)).sent == 2000
    forget_keys(ann)
    with pytest.raises(Sealed):
        push(ann, "more", at(remote, ann))
    assert [one.name for one in listed(at(remote, bob), bob.trust)] == ["more", "secret_plan"]


def test_what_lies_at_the_remote_tells_neither_names_nor_contents(
    ann: Store, bob: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pushing, "_PACK", 100_000)
    remote = tmp_path / "remote"
    push(ann, "secret_plan", at(remote, ann, recipients=[own_recipient(bob.trust.folder)]))
    contents = ann.contents(ann.get("secret_plan"))
    hashes = {c.hash for c in contents.chunks()}
    assert hashes
    told = b"".join(path.encode() + content for path, (_, content) in everything(remote).items())
    for word in (b"secret_plan", b"a secret message", b"pages-1.img", b"a line of a log", ann.trust.own().encode()):
        assert word not in told
    for key in hashes:
        assert key not in told
        assert key.hex().encode() not in told
    for path in remote.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0


def test_each_file_is_one_that_age_opens(ann: Store, bob: Store, tmp_path: Path) -> None:
    # With no more than what docs/store.md says: the key in the mark, then everything by it.
    import base64
    import json

    remote = tmp_path / "remote"
    push(ann, "secret_plan", at(remote, ann, recipients=[own_recipient(bob.trust.folder)]))
    bobs = pyrage.x25519.Identity.from_str((bob.trust.folder / "identity.txt").read_text().strip())
    mark = json.loads((remote / "format.json").read_text())
    assert mark["features"] == ["age"]
    *_, line = pyrage.decrypt(base64.b64decode(mark["key"]), [bobs]).decode().splitlines()
    key = pyrage.x25519.Identity.from_str(line)
    assert str(key.to_public()) == mark["recipient"]
    for folder in ("snapshots", "contents", "index", "packs"):
        for path in (remote / folder).iterdir():
            assert pyrage.decrypt(path.read_bytes(), [key])


def test_a_passphrase_opens_what_it_closed_and_no_other_does(
    ann: Store, bob: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passphrases_are_quick(monkeypatch)
    remote = tmp_path / "remote"
    push(ann, "secret_plan", at(remote, ann, passphrase=lambda: "open sesame", with_passphrase=True))
    for how in ({}, {"passphrase": lambda: "open barley"}):
        with pytest.raises(Sealed):
            at(remote, bob, **how)
    with pytest.raises(Refused, match="no passphrase"):
        at(remote, bob, passphrase=lambda: "")
    pull(bob, at(remote, bob, passphrase=lambda: "open sesame"))
    assert read_back(bob, "secret_plan") == LARGE
    assert pull(bob, at(remote, bob)).fetched == 0, "it is not asked for again"
    assert b"open sesame" not in b"".join(content for _, content in everything(tmp_path).values())


def test_keys_of_ssh_and_files_of_keys_serve_as_well(ann: Store, bob: Store, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

    key = Ed25519PrivateKey.generate()
    secret = tmp_path / "id_ed25519"
    secret.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    other = pyrage.x25519.Identity.generate()
    (tmp_path / "team.txt").write_text(f"# the team\n{other.to_public()}\n{public} bob@host\n")
    remote = tmp_path / "remote"
    push(ann, "secret_plan", at(remote, ann, recipients=[str(tmp_path / "team.txt")]))
    pull(bob, at(remote, bob, identities=[secret]))
    assert read_back(bob, "secret_plan") == LARGE
    # What was not said at its first use is not possible later, and what was is no matter.
    push(ann, "secret_plan", at(remote, ann, recipients=[public]))
    with pytest.raises(Sealed, match="encrypted for others"):
        at(remote, ann, recipients=[str(pyrage.x25519.Identity.generate().to_public())])


def test_a_remote_that_is_not_encrypted_does_not_become_so(ann: Store, bob: Store, tmp_path: Path) -> None:
    push(ann, "secret_plan", at(tmp_path / "remote", ann))
    with pytest.raises(Sealed, match="not encrypted"):
        at(tmp_path / "remote", ann, recipients=[own_recipient(bob.trust.folder)])


@pytest.mark.parametrize("key", ["age1xyz", "ssh-ed25519 AAAA", "no such file"])
def test_odd_keys_are_refused_and_nothing_is_made(ann: Store, tmp_path: Path, key: str) -> None:
    with pytest.raises(Refused):
        at(tmp_path / "remote", ann, recipients=[key])
    assert not (tmp_path / "remote").exists()


def test_damage_and_files_that_change_places_are_found_out(ann: Store, bob: Store, tmp_path: Path) -> None:
    remote = tmp_path / "remote"
    save(ann, "other", files={"a": b"x" * 5000})
    there = at(remote, ann, recipients=[own_recipient(bob.trust.folder)])
    for name in ("secret_plan", "other"):
        push(ann, name, there)
    changes: dict[str, Callable[[Path, Path], object]] = {
        "swapped": lambda one, two: one.rename(two),
        "flipped": lambda one, _: one.write_bytes(flipped(one.read_bytes(), -1)),
        "cut": lambda one, _: os.truncate(one, one.stat().st_size - 1),
        "no age": lambda one, _: one.write_bytes(b"plain"),
    }
    for folder in ("snapshots", "contents", "index", "packs"):
        for change in changes.values():
            one, two = sorted((remote / folder).iterdir())
            kept = {path: path.read_bytes() for path in (one, two)}
            change(one, two)
            caught: list[GpuckptError] = []
            for name in ("secret_plan", "other"):
                try:
                    pull(bob, at(remote, bob), name)
                    bob.remove(name)
                except GpuckptError as e:
                    caught.append(e)
            assert caught, (folder, change)
            assert all(isinstance(e, Damaged | WrongName | StoreError) for e in caught)
            assert bob.list() == []
            for path, content in kept.items():
                path.write_bytes(content)
    assert collect_remote(there, 0).obstacle == ""
    for name in ("secret_plan", "other"):
        pull(bob, at(remote, bob), name)
    assert litter(bob) == []
    with pytest.raises(NameTaken):
        save(bob, "other")


def test_an_exported_file_is_encrypted_as_well(ann: Store, bob: Store, tmp_path: Path) -> None:
    out = io.BytesIO()
    export_snapshot(ann, "secret_plan", out, secrets_of(ann, recipients=[own_recipient(bob.trust.folder)]))
    content = out.getvalue()
    assert b"secret_plan" not in content
    assert b"a line of a log" not in content
    eve = person(tmp_path, "eve")
    eve.trust.add(ann.trust.own())
    with pytest.raises(Sealed):
        import_snapshot(eve, io.BytesIO(content), "it", secrets_of(eve))
    for i in range(0, len(content), len(content) // 40):
        with pytest.raises(Damaged):
            import_snapshot(bob, io.BytesIO(flipped(content, i)), "it", secrets_of(bob))
    import_snapshot(bob, io.BytesIO(content), "it", secrets_of(bob))
    assert read_back(bob, "secret_plan") == LARGE
    assert not (ann.trust.folder / "remotes").exists()


def test_nothing_is_loaded_for_encryption_before_it_is_used() -> None:
    code = "import sys, jupyter_gpuckpt.cli.transfer; print([m for m in sys.modules if m in ('pyrage', 'fsspec')])"
    assert subprocess.check_output([__import__("sys").executable, "-c", code], text=True).strip() == "[]"
