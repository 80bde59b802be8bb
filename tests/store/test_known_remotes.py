"""Whoever keeps a remote cannot have what is sent there encrypted for himself, or not at all."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path

import pyrage
import pytest
from quick_passphrase import passphrases_are_quick
from store_helpers import everything, save
from transfer_helpers import LARGE, at, person

from jupyter_gpuckpt.errors import NoSuchSnapshot, Refused, RemoteChanged, Sealed, StoreError, Unconfirmed
from jupyter_gpuckpt.store import Store
from jupyter_gpuckpt.store.transfer.known_remotes import FORGET, KnownRemotes
from jupyter_gpuckpt.store.transfer.pull import pull
from jupyter_gpuckpt.store.transfer.push import push
from jupyter_gpuckpt.store.transfer.remote_listing import listed
from jupyter_gpuckpt.store.transfer.remote_store import Encryption
from jupyter_gpuckpt.store.transfer.sealing import own_recipient

PLAIN = '{"features":[],"format":2}'


@pytest.fixture
def ann(tmp_path: Path) -> Store:
    ann = person(tmp_path, "ann")
    save(ann, "plan", files=LARGE)
    return ann


@pytest.fixture
def bob(tmp_path: Path, ann: Store) -> Store:
    bob = person(tmp_path, "bob")
    bob.trust.add(ann.trust.own())
    save(bob, "bobs", files=LARGE)
    return bob


@pytest.fixture
def readers(ann: Store, bob: Store) -> list[str]:
    return [own_recipient(ann.trust.folder), own_recipient(bob.trust.folder)]


@pytest.fixture
def remote(ann: Store, readers: list[str], tmp_path: Path) -> Path:
    """A remote that Ann has made, for her and Bob."""
    push(ann, "plan", at(tmp_path / "remote", ann, recipients=readers))
    return tmp_path / "remote"


def planted(remote: Path, readers: list[str], said: str = "") -> str:
    """Put in the mark of the remote's keeper, which says that it is for the same people; return its key."""
    evil = pyrage.x25519.Identity.generate()
    text = "".join(f"# recipient: {one}\n" for one in readers) + said + f"{evil}\n"
    sealed = pyrage.encrypt(text.encode(), [pyrage.x25519.Recipient.from_str(one) for one in readers])
    write_mark(remote, sealed, str(evil.to_public()))
    return str(evil.to_public())


def write_mark(remote: Path, sealed: bytes, key: str) -> None:
    mark = {"features": ["age"], "format": 2, "key": base64.b64encode(sealed).decode(), "recipient": key}
    remote.mkdir(exist_ok=True)
    (remote / "format.json").write_text(json.dumps(mark))


def unsigned(remote: Path, store: Store) -> None:
    """Make a mark one of before there were signatures, and what is known of it what was known then."""
    mark = json.loads((remote / "format.json").read_text())
    bobs = pyrage.x25519.Identity.from_str((store.trust.folder / "identity.txt").read_text().strip())
    lines = pyrage.decrypt(base64.b64decode(mark["key"]), [bobs]).decode().splitlines(keepends=True)
    text = "".join(line for line in lines if not line.startswith(("# signed", "# address")))
    readers = [line.split()[-1] for line in lines if line.startswith("# recipient")]
    recipients = [pyrage.x25519.Recipient.from_str(one) for one in readers]
    write_mark(remote, pyrage.encrypt(text.encode(), recipients), mark["recipient"])
    (store.trust.folder / "remotes.json").unlink(missing_ok=True)
    for kept in (store.trust.folder / "remotes").glob("*.txt"):
        kept.write_text(text)


def test_a_key_that_was_exchanged_is_noticed_and_nothing_is_sent(ann: Store, remote: Path, readers: list[str]) -> None:
    save(ann, "more", files={"a": b"secret" * 999})
    evil = planted(remote, readers)
    before = everything(remote)
    for how in ({}, {"recipients": readers}, {"recipients": readers[1:]}):
        with pytest.raises(RemoteChanged, match=f"--accept {evil}"):
            push(ann, "more", at(remote, ann, **how))
    with pytest.raises(RemoteChanged):
        pull(ann, at(remote, ann, create=False), "plan")
    assert everything(remote) == before


def test_a_remote_that_was_encrypted_does_not_become_readable(ann: Store, remote: Path, readers: list[str]) -> None:
    save(ann, "more")
    (remote / "format.json").write_text(PLAIN)
    before = everything(remote)
    for how in ({}, {"recipients": readers}):
        with pytest.raises(RemoteChanged, match="--accept none"):
            push(ann, "more", at(remote, ann, **how))
    with pytest.raises(RemoteChanged):
        listed(at(remote, ann, create=False), ann.trust)
    assert everything(remote) == before
    shutil.rmtree(remote)  # nor by what is there being taken away
    with pytest.raises(RemoteChanged, match="--accept none"):
        push(ann, "more", at(remote, ann))
    assert not remote.exists()


def test_who_only_fetched_so_far_knows_as_well_how_it_was(bob: Store, remote: Path, readers: list[str]) -> None:
    pull(bob, at(remote, bob, create=False), "plan")
    (remote / "format.json").write_text(PLAIN)
    with pytest.raises(RemoteChanged):
        push(bob, "bobs", at(remote, bob))


def test_what_was_fetched_by_a_key_is_no_reason_to_send_by_it(bob: Store, tmp_path: Path, readers: list[str]) -> None:
    evil = planted(tmp_path / "remote", readers)
    assert listed(at(tmp_path / "remote", bob, create=False), bob.trust) == []
    with pytest.raises(Unconfirmed, match=evil):
        push(bob, "bobs", at(tmp_path / "remote", bob))
    assert list((tmp_path / "remote").iterdir()) == [tmp_path / "remote" / "format.json"]


def test_one_who_sends_for_the_first_time_believes_only_whom_he_trusts(
    ann: Store, bob: Store, remote: Path, readers: list[str]
) -> None:
    bob.trust.revoke(ann.trust.own())
    with pytest.raises(Unconfirmed, match="you revoked"):
        push(bob, "bobs", at(remote, bob))
    bob.trust.add(ann.trust.own())
    push(bob, "bobs", at(remote, bob))
    said = at(remote, bob).encryption
    assert (said.recipients, said.signed) == (readers, ann.trust.own())


@pytest.mark.parametrize("named", [False, True])
def test_a_mark_of_a_stranger_s_or_of_nobody_s_is_not_sent_to(
    ann: Store, bob: Store, remote: Path, readers: list[str], tmp_path: Path, named: bool
) -> None:
    how = {"recipients": readers} if named else {}
    eve = person(tmp_path, "eve")
    push_from_eve = at(tmp_path / "eves", eve, recipients=readers)
    assert push_from_eve.encryption.signed == eve.trust.own()
    shutil.copy(tmp_path / "eves" / "format.json", remote / "format.json")
    with pytest.raises(Unconfirmed, match="which you do not trust"):
        push(bob, "bobs", at(remote, bob, **how))
    KnownRemotes(bob.trust.folder).accept(str(remote), FORGET)
    ours = at(tmp_path / "other", ann, recipients=readers).seal.text  # type: ignore[attr-defined]
    signature = "".join(line for line in ours.splitlines(keepends=True) if line.startswith(("# address", "# signed")))
    for said in ("", signature, "# signed: 1 2\n", f"# address: \n# signed: {'0' * 64} {'0' * 128}\n"):
        planted(remote, readers, said)
        with pytest.raises(Unconfirmed, match="is not signed"):
            push(bob, "bobs", at(remote, bob, **how))
        KnownRemotes(bob.trust.folder).accept(str(remote), FORGET)


def test_the_mark_of_another_remote_is_not_taken_for_this_one_s(
    ann: Store, bob: Store, remote: Path, readers: list[str], tmp_path: Path
) -> None:
    eve = own_recipient(person(tmp_path, "eve").trust.folder)
    push(ann, "plan", at(tmp_path / "with-eve", ann, recipients=[*readers, eve]))
    shutil.copy(tmp_path / "with-eve" / "format.json", remote / "format.json")
    with pytest.raises(Unconfirmed, match=f"was made for {tmp_path}/with-eve"):
        push(bob, "bobs", at(remote, bob))


def test_more_readers_than_were_named_are_told_before_anything_is_sent(
    ann: Store, bob: Store, remote: Path, readers: list[str]
) -> None:
    with pytest.raises(Unconfirmed, match="for other people, too") as caught:
        push(bob, "bobs", at(remote, bob, recipients=readers[1:]))
    assert all(f"--encrypt-to {one}" in caught.value.then for one in readers)
    push(bob, "bobs", at(remote, bob, recipients=readers))
    push(bob, "bobs", at(remote, bob, recipients=readers[1:]))


def test_a_remote_of_before_goes_on_to_serve_who_has_used_it(
    ann: Store, bob: Store, remote: Path, readers: list[str]
) -> None:
    unsigned(remote, ann)
    save(ann, "more")
    push(ann, "more", at(remote, ann))
    assert at(remote, ann).encryption.signed is None
    assert [one.name for one in listed(at(remote, bob, create=False), bob.trust)] == ["more", "plan"]
    with pytest.raises(Unconfirmed, match="is not signed") as caught:
        push(bob, "bobs", at(remote, bob))
    KnownRemotes(bob.trust.folder).accept(str(remote), caught.value.data["key"])
    push(bob, "bobs", at(remote, bob))
    # From now on no other is believed, here or where another remote of before is looked for.
    planted(remote, readers)
    with pytest.raises(RemoteChanged):
        push(ann, "more", at(remote, ann))


def test_a_key_of_before_serves_for_one_remote_only(
    ann: Store, remote: Path, readers: list[str], tmp_path: Path
) -> None:
    unsigned(remote, ann)
    push(ann, "plan", at(remote, ann))
    shutil.copytree(remote, tmp_path / "other")
    with pytest.raises(Unconfirmed):
        push(ann, "plan", at(tmp_path / "other", ann))


def test_a_passphrase_confirms_a_remote_and_no_key_stands_in_for_it(
    ann: Store, bob: Store, tmp_path: Path, readers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    passphrases_are_quick(monkeypatch)
    said = {"passphrase": lambda: "open sesame", "with_passphrase": True}
    remote = tmp_path / "remote"
    push(ann, "plan", at(remote, ann, **said))
    bob.trust.revoke(ann.trust.own())
    push(bob, "bobs", at(remote, bob, **said))
    planted(tmp_path / "other", readers)
    with pytest.raises(Sealed, match="and not with a passphrase"):
        push(bob, "bobs", at(tmp_path / "other", bob, **said))


def test_what_is_known_is_changed_by_word_only(ann: Store, remote: Path, readers: list[str]) -> None:
    known = KnownRemotes(ann.trust.folder)
    evil = planted(remote, readers)
    for odd in ("", "age1", "AGE-SECRET-KEY-1", "none of these"):
        with pytest.raises(Refused):
            known.accept(str(remote), odd)
    known.accept(str(remote), evil)
    save(ann, "more")
    push(ann, "more", at(remote, ann))
    shutil.rmtree(remote)
    known.accept(str(remote), FORGET)
    with pytest.raises(NoSuchSnapshot):
        at(remote, ann, create=False)
    push(ann, "more", at(remote, ann))
    assert at(remote, ann).encryption == Encryption(encrypted=False, key=None, recipients=[], signed=None)


@pytest.mark.parametrize("odd", ['{"remotes": 1}', '{"remotes": {"x": 1}, "earlier": []}', "[]", "{"])
def test_a_damaged_record_is_no_reason_to_send(ann: Store, remote: Path, odd: str) -> None:
    (ann.trust.folder / "remotes.json").write_text(odd)
    with pytest.raises(StoreError, match="is damaged"):
        at(remote, ann)
