"""`jupyter gpuckpt push`, `pull`, `remote`, `export`, `import`, `trust`, `sign`, `recipient`, and `gc` of a remote."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import uuid
from pathlib import Path
from typing import Any

import pexpect
import pytest
from command_line import PROGRAM, Cli, Ran
from notebooks import StartKernel
from remote_servers import KEY, S3, SECRET

from jupyter_gpuckpt import settings
from jupyter_gpuckpt.store import Store
from jupyter_gpuckpt.store.signatures import split

ABOUT: dict[str, Any] = {"machine": {"criu": "4.2"}, "cuda": {}, "process": {"processes": [1], "frozen_seconds": 0.1}}


@pytest.fixture
def store(folders: None) -> Store:
    store = Store(settings.store_dir())
    with store.writer("it") as writer:
        (writer.directory / "pages").write_bytes(os.urandom(200_000))
        writer.commit(message="about it", parent=None, kernel={"notebook": "", "kernel_id": "k"}, **ABOUT)
    return store


@pytest.fixture
def bob(cli: Cli, tmp_path: Path) -> Cli:
    """The command of somebody else, who trusts nobody yet."""
    own = {"GPUCKPT_STORE": str(tmp_path / "bob" / "store"), "GPUCKPT_KEYS": str(tmp_path / "bob" / "keys")}

    def run(*words: str, **environment: str) -> Ran:
        return cli(*words, **own, **environment)

    return run


def test_a_snapshot_goes_to_somebody_else_by_s3(cli: Cli, bob: Cli, store: Store, s3: S3) -> None:
    url = s3.make_bucket(f"bucket-{uuid.uuid4().hex[:8]}") + "/team"
    how = s3.environment
    sent = cli("push", "it", url, "--json", **how).json
    assert (sent["name"], sent["sent"], sent["found"], sent["url"]) == ("it", 200_000, 0, url)
    strange = bob("pull", url, **how)
    assert strange.status == 1
    assert "is neither yours nor one that you trust" in strange.err
    (command,) = re.findall(r"`jupyter gpuckpt (trust [0-9a-f]{64})`", strange.err)
    assert command == f"trust {cli('trust', '--own').out.strip()}"
    assert bob(*command.split(), "--comment", "Ann").status == 0
    fetched = bob("pull", url, "--json", **how).json
    assert (fetched["name"], fetched["fetched"], fetched["found"]) == ("it", 200_000, 0)
    assert bob("show", "it", "--json").json["id"] == store.get("it").id


def test_a_remote_is_listed_and_kept_in_order(cli: Cli, bob: Cli, store: Store, tmp_path: Path) -> None:
    remote = str(tmp_path / "remote")
    assert cli("push", "it", remote).out.startswith("Pushed it")
    assert "0 B; 200 kB were already there" in cli("push", "it", remote).out
    assert [one["name"] for one in cli("remote", remote, "--json").json["snapshots"]] == ["it"]
    assert "UnknownKey" in bob("remote", remote).out
    assert cli("remote", remote, "--remove", "it").status == 0
    assert cli("pull", remote, "it", "--json").status == 3
    assert cli("gc", remote, "--json").json["waiting"] > 0
    assert cli("gc", remote, "--grace", "0", "--json").json["freed"] > 200_000


def test_keys_of_a_remote_are_nowhere_shown(cli: Cli, store: Store, s3: S3, tmp_path: Path) -> None:
    url = s3.make_bucket(f"bucket-{uuid.uuid4().hex[:8]}")
    words = [
        ["push", "it", url],
        ["push", "it", url + "-none"],
        ["pull", "http://annabel:password%21@127.0.0.1:9/x?X-Amz-Signature=abcdef", "it", "--json"],
        ["pull", "sftp://annabel:password%21@127.0.0.1:9/x", "it"],
    ]
    ran = [
        subprocess.run(
            [PROGRAM, "--debug", *one], capture_output=True, text=True, timeout=60, env={**os.environ, **s3.environment}
        )
        for one in words
    ]
    assert [one.returncode for one in ran] == [0, 1, 1, 1]
    assert '"kind": "RemoteError"' in ran[2].stdout
    said = "".join(one.stdout + one.stderr for one in ran)
    assert "Traceback" in said
    files = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    for secret in (KEY, SECRET, "annabel", "password", "abcdef"):
        assert secret not in said
        assert secret.encode() not in files


def test_a_snapshot_goes_to_somebody_else_in_a_file(cli: Cli, bob: Cli, store: Store, tmp_path: Path) -> None:
    file = tmp_path / "it.gpuckpt"
    assert cli("export", "it", str(file)).status == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert "--replace" in cli("export", "it", str(file)).err
    assert cli("export", "it", str(file), "--replace", "--json").json["bytes"] == file.stat().st_size
    assert bob("import", str(file), "--json").json["error"]["kind"] == "UnknownKey"
    (tmp_path / "key.txt").write_text(cli("trust", "--own").out)
    bob("trust", str(tmp_path / "key.txt"))
    assert bob("import", str(file)).out.startswith("Imported it")
    assert bob("import", str(file)).out.startswith("it is here already")
    file.write_bytes(file.read_bytes()[:-1])
    bob("rm", "it")
    assert bob("import", str(file), "--json").json["error"]["kind"] == "Damaged"
    assert bob("import", str(tmp_path / "none")).status == 1


def test_a_snapshot_goes_through_a_pipe(cli: Cli, store: Store) -> None:
    whole = subprocess.run([PROGRAM, "export", "it", "-"], capture_output=True, check=True, timeout=60).stdout
    assert cli("rm", "it").status == 0
    taken = subprocess.run([PROGRAM, "import", "-"], input=whole, capture_output=True, check=True, timeout=60)
    assert b"Imported it" in taken.stdout
    assert cli("check", "--read-data").status == 0
    assert cli("export", "it", "-", "--json").status == 2


def test_what_is_sent_is_encrypted_for_somebody(cli: Cli, bob: Cli, store: Store, tmp_path: Path) -> None:
    remote = str(tmp_path / "remote")
    recipient = bob("recipient").out.strip()
    assert recipient.startswith("age1")
    assert cli("push", "it", remote, "--encrypt-to", recipient).status == 0
    bob("trust", cli("trust", "--own").out.strip())
    assert bob("pull", remote).out.startswith("Pulled it")
    eve = {"GPUCKPT_KEYS": str(tmp_path / "eve"), "GPUCKPT_STORE": str(tmp_path / "eve-store")}
    assert cli("pull", remote, "--json", **eve).json["error"]["kind"] == "Sealed"


def test_whether_it_is_encrypted_is_said_and_a_change_of_that_is_refused(
    cli: Cli, bob: Cli, store: Store, tmp_path: Path
) -> None:
    remote, plain, own = tmp_path / "remote", str(tmp_path / "plain"), cli("recipient").out.strip()
    assert f"to {plain}, not encrypted: " in cli("push", "it", plain).out
    assert "It is not encrypted" in cli("remote", plain).out
    assert "not encrypted" in cli("export", "it", str(tmp_path / "file")).out
    sent = cli("push", "it", str(remote), "--encrypt-to", own, "--json").json
    assert (sent["encrypted"], sent["recipients"]) == (True, [own])
    told = cli("remote", str(remote)).out
    assert f"encrypted for {own}, by the key {sent['key']}; that was signed by {sent['signed']}" in told
    (remote / "format.json").write_text('{"features":[],"format":2}')
    refused = cli("push", "it", str(remote))
    assert refused.status == 1
    (command,) = re.findall(r"`jupyter gpuckpt (remote \S+ --accept none)`", refused.err)
    assert cli(*command.split()).status == 0
    assert "not encrypted" in cli("push", "it", str(remote), "--replace").out
    assert cli("remote", plain, "--accept", sent["key"], "--json").json["error"]["kind"] == "RemoteChanged"
    assert cli("remote", plain, "--accept", "odd").status == 1


def test_a_passphrase_is_asked_for_on_the_terminal_or_read_from_a_file(
    cli: Cli, bob: Cli, store: Store, tmp_path: Path
) -> None:
    remote = str(tmp_path / "remote")
    asked = pexpect.spawn(PROGRAM, ["push", "it", remote, "--passphrase"], timeout=60, encoding="utf-8")
    asked.expect("Passphrase: ")
    asked.sendline("open sesame")
    asked.expect("Pushed it")
    asked.expect(pexpect.EOF)
    assert "sesame" not in (asked.before or "")
    asked.close()
    assert asked.exitstatus == 0
    bob("trust", cli("trust", "--own").out.strip())
    (tmp_path / "passphrase").write_text("open sesame\n")
    assert bob("pull", remote, "--json").json["error"]["kind"] == "Sealed"
    assert bob("pull", remote, "--passphrase-file", str(tmp_path / "passphrase")).status == 0


def test_keys_are_listed_and_revoked(cli: Cli, bob: Cli, store: Store, tmp_path: Path) -> None:
    own = cli("trust", "--own", "--json").json["key"]
    assert bob("trust", own, "--comment", "Ann", "--json").json == {"key": own, "revoked": False}
    (known,) = bob("trust", "--list", "--json").json["keys"]
    assert (known["key"], known["comment"], known["revoked"]) == (own, "Ann", False)
    cli("push", "it", str(tmp_path / "remote"))
    assert bob("pull", str(tmp_path / "remote")).status == 0
    assert bob("trust", "--revoke", own).status == 0
    assert bob("mv", "it", "that", "--json").json["error"]["kind"] == "RevokedKey"
    assert "revoked" in bob("trust", "--list").out
    assert bob("trust", "abc").status == 1
    assert bob("trust").status == 2


def test_a_file_that_is_not_there_is_named(cli: Cli, tmp_path: Path) -> None:
    told = cli("import", str(tmp_path / "nothing"))
    assert (told.status, told.out) == (1, "")
    assert told.err.startswith(f"{tmp_path}/nothing is not there.")


def test_an_old_snapshot_is_signed(cli: Cli, store: Store) -> None:
    path = store.root / "snapshots" / "it.json"
    path.write_bytes(split(path.read_bytes())[0])
    assert "jupyter gpuckpt sign it" in cli("mv", "it", "that").err
    ran = cli("sign", "it", "none")
    assert (ran.status, ran.out) == (3, "Signed it.\n")
    assert cli("mv", "it", "that").status == 0


@pytest.mark.criu
def test_a_kernel_comes_back_in_a_store_that_has_fetched_it(
    start: StartKernel, cli: Cli, bob: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = start()
    first.run("x = [1, 'two', {3}]")
    first.run("%gpuckpt save here")
    remote, file = str(tmp_path / "remote"), str(tmp_path / "here.gpuckpt")
    assert cli("push", "here", remote).status == 0
    assert cli("export", "here", file).status == 0
    own = cli("trust", "--own").out.strip()
    assert bob("pull", remote, "--json").json["error"]["kind"] == "UnknownKey"
    bob("trust", own)
    monkeypatch.setenv("GPUCKPT_STORE", str(tmp_path / "bob" / "store"))
    monkeypatch.setenv("GPUCKPT_KEYS", str(tmp_path / "bob" / "keys"))
    second = start()
    for bring in (("pull", remote), ("import", file)):
        assert bob(*bring).status == 0
        second.run("x = None")
        second.run("%gpuckpt restore here")
        assert second.value("x") == "[1, 'two', {3}]"
        second.run("%gpuckpt rm here")
    bob("pull", remote)
    bob("trust", "--revoke", own)
    second.run("x = 5")
    assert second.fails("%gpuckpt restore here").ename == "RevokedKey"
    assert second.value("x") == "5"


def test_an_odd_snapshot_of_somebody_who_is_trusted_keeps_no_other_from_being_listed(cli: Cli, store: Store) -> None:
    odd: list[dict[str, Any]] = [
        *({"kernel": {member: value}} for member in ("notebook", "kernel_id", "job") for value in ([], {}, 5, None)),
        *({"kernel": {"execution_count": value}} for value in ([], "x", True)),
        *({"process": {"frozen_seconds": value}} for value in ([], "x", {})),
        *(
            {"cuda": {"processes": value}}
            for value in (5, [5], [{"used": 5}], [{"used": {"a": "x"}}], [{"used": {"a": 1.5}}])
        ),
    ]
    for number, members in enumerate(odd):
        with store.writer(f"odd{number}") as writer:
            writer.commit(
                message="", parent=None, **{"kernel": {}, "machine": {}, "cuda": {}, "process": {}, **members}
            )
    listed = cli("list", "--json").json["snapshots"]
    assert len(listed) == len(odd) + 1
    for one in listed:
        assert [type(one[member]) for member in ("notebook", "kernel_id", "job")] == [str] * 3
        assert type(one["gpu_memory"]) is int
    assert "about it" in cli("list").out
    assert cli("check").status == 0
