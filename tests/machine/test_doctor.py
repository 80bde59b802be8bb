"""What `jupyter gpuckpt doctor` and `setup` tell, on this machine and on ones that lack something."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jupyter_gpuckpt.errors import StoreError
from jupyter_gpuckpt.machine.checks import Check, works
from jupyter_gpuckpt.machine.confinement_checks import confinement_checks
from jupyter_gpuckpt.machine.doctor import examine
from jupyter_gpuckpt.machine.gpu_checks import gpu_checks
from jupyter_gpuckpt.machine.store_checks import store_checks
from jupyter_gpuckpt.store import Store

pytestmark = pytest.mark.criu

NAMES = [
    *("system", "rights", "seccomp filter", "namespaces", "process ids", "shared memory", "ptrace scope", "memory"),
    *("criu", "kernel features", "criu's sockets", "trial"),
    "NVIDIA driver",
    *("store", "disk space", "filesystem"),
    *("jupyter_client", "ipykernel", "provisioner", "kernelspec"),
]


def run(*arguments: str, under: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [*under, sys.executable, "-c", "import sys; from jupyter_gpuckpt.cli import main; sys.exit(main())"]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=120)


# The capability to read is left, because the interpreter may lie in root's own folder.
_READING = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
NOBODY = ("setpriv", "--reuid=65534", "--clear-groups", *_READING)


_WITHOUT_RESOURCE = ("setpriv", "--bounding-set=-sys_resource", "--inh-caps=-sys_resource")


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def assert_each_failure_has_a_mend(checks: list[dict[str, Any]]) -> None:
    for check in checks:
        assert check["found"]
        assert check["ok"] or check["mend"], check
        assert not (check["ok"] and check["mend"]), check


@pytest.mark.usefixtures("with_criu")
def test_this_machine_works() -> None:
    checks = examine(deep=True)
    assert [check for check in checks if check.required and not check.ok] == []
    assert works(checks)
    assert [name for name in NAMES if name not in by_name(checks)] == []
    assert "trial" not in by_name(examine())


@pytest.mark.usefixtures("with_criu")
def test_as_text() -> None:
    done = run("doctor")
    assert done.returncode == 0, done.stdout
    lines = done.stdout.splitlines()
    assert lines[-1] == "Kernels can be saved and restored here."
    assert all(any(line[6:].startswith(name) for line in lines) for name in NAMES)
    # Aligned: what was found begins in one column.
    found = lines[0].index("Linux")
    assert {line[found - 1] for line in lines[: lines.index("")] if line} == {" "}


@pytest.mark.usefixtures("with_criu")
def test_as_json() -> None:
    done = run("doctor", "--json")
    document = json.loads(done.stdout)
    assert done.returncode == 0
    assert set(document) == {"works", "checks"}
    assert document["works"] is True
    fields = {field.name: field.type for field in dataclasses.fields(Check)}
    for check in document["checks"]:
        assert {name: type(value).__name__ for name, value in check.items()} == fields
    assert_each_failure_has_a_mend(document["checks"])
    quick = json.loads(run("doctor", "--json", "--quick").stdout)
    assert "trial" not in [check["name"] for check in quick["checks"]]


@pytest.mark.usefixtures("without_criu")
def test_without_criu_it_fails_and_says_what_to_do() -> None:
    checks = examine(deep=True)
    assert not works(checks)
    amiss = {check.name for check in checks if check.required and not check.ok}
    assert amiss == {"criu", "kernel features", "trial"}
    assert_each_failure_has_a_mend([dataclasses.asdict(check) for check in checks])
    done = run("doctor")
    assert done.returncode == 4
    assert "GPUCKPT_CRIU" in done.stdout
    assert done.stdout.splitlines()[-1].endswith(": criu, kernel features, trial.")


@pytest.mark.usefixtures("with_criu")
def test_root_without_rights_fails_and_every_failure_has_a_mend() -> None:
    done = run("doctor", "--json", under=("setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin"))
    assert done.returncode == 4
    document = json.loads(done.stdout)
    assert document["works"] is False
    amiss = {check["name"] for check in document["checks"] if check["required"] and not check["ok"]}
    assert amiss >= {"rights", "namespaces", "process ids", "trial"}
    assert_each_failure_has_a_mend(document["checks"])


@pytest.mark.parametrize("has", [False, True])
def test_root_without_rights_over_other_users_processes_is_told_and_saves_all_the_same(has: bool) -> None:
    effective = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("CapEff:"))
    if has and not int(effective.split()[1], 16) >> 24 & 1:
        pytest.skip("this root has no CAP_SYS_RESOURCE")
    found = json.loads(run("doctor", "--json", under=() if has else _WITHOUT_RESOURCE).stdout)["checks"]
    (check,) = (check for check in found if check["name"] == "other users' processes")
    assert (check["ok"], check["required"]) == (has, False)
    assert ("CAP_SYS_RESOURCE" in check["found"]) != has
    assert_each_failure_has_a_mend(found)
    assert {check["name"]: check["ok"] for check in found}["rights"]


def test_another_user_is_told_the_one_thing_that_is_missing() -> None:
    done = run("doctor", "--json", under=NOBODY)
    assert done.returncode == 4, done.stderr
    checks = json.loads(done.stdout)["checks"]
    amiss = {check["name"] for check in checks if check["required"] and not check["ok"]}
    # All else takes root or the broker, which has a CRIU of its own: nothing that this user could do about it helps.
    assert amiss - {"store"} == {"rights"}  # the store of this test is root's
    assert_each_failure_has_a_mend(checks)


def test_folders_that_may_not_be_looked_into_are_told(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o700)
    tmp_path.chmod(0o755)
    script = """
import json, os
from jupyter_gpuckpt.machine.criu_checks import criu_checks
from jupyter_gpuckpt.machine.store_checks import store_checks
os.setgroups([]); os.setgid(65534); os.setuid(65534)
print(json.dumps({check.name: [check.ok, check.found] for check in criu_checks(False) + store_checks()}))
"""
    closed = str(tmp_path / "closed" / "folder")
    places = {"GPUCKPT_CRIU": "", "GPUCKPT_CRIU_PREFIX": closed, "GPUCKPT_STORE": closed, "PATH": closed}
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | places, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["store"][0] is False
    assert "Permission denied" in told["store"][1]
    if not told["criu"][0]:
        assert f"{closed}: Permission denied" in told["criu"][1]


def test_a_store_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GPUCKPT_STORE", str(tmp_path / "file" / "store"))
    store = by_name(store_checks())["store"]
    assert not store.ok
    assert str(tmp_path / "file") in store.found
    assert "GPUCKPT_STORE" in store.mend


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_store_that_others_can_write_in(mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUCKPT_STORE", str(tmp_path))
    with Store(tmp_path).writer("first"):
        assert by_name(store_checks())["store"].ok
    tmp_path.chmod(mode)
    with pytest.raises(StoreError) as refused, Store(tmp_path).writer("second"):
        pass
    store = by_name(store_checks())["store"]
    assert not store.ok
    assert store.found == f"Other users can write to the store. {refused.value.why}"
    assert store.mend == refused.value.then


def test_a_store_that_is_not_there_yet_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUCKPT_STORE", str(tmp_path / "a" / "store"))
    checks = by_name(store_checks())
    assert checks["store"].ok
    assert "will be created" in checks["store"].found
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="needs a tmpfs")
def test_a_store_in_memory_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUCKPT_STORE", "/dev/shm/store")
    checks = by_name(store_checks())
    assert checks["filesystem"].found == "tmpfs"
    assert not checks["filesystem"].ok
    assert not checks["filesystem"].required


def describe_driver(folder: Path, version: str, *models: str) -> Path:
    """Lay out what an NVIDIA driver says of itself, as it was seen on a machine with an H200."""
    folder.mkdir()
    (folder / "version").write_text(
        f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {version}  Release Build  (dvs-builder@host)\n"
        "GCC version:  gcc version 13.3.0 (Ubuntu 13.3.0-6ubuntu2~24.04)\n"
    )
    for number, model in enumerate(models):
        gpu = folder / "gpus" / f"0000:0{number}:00.0"
        gpu.mkdir(parents=True)
        (gpu / "information").write_text(f"Model: \t\t {model}\nIRQ:   \t\t 44\nGPU UUID: \t GPU-{number}\n")
    return folder


def test_a_machine_without_a_gpu_is_a_good_one(tmp_path: Path) -> None:
    (driver,) = gpu_checks(tmp_path)
    assert driver.ok
    assert driver.found == "none; CPU kernels only"


def test_a_driver_that_is_new_enough(tmp_path: Path) -> None:
    checks = by_name(gpu_checks(describe_driver(tmp_path / "nvidia", "580.159.03", "NVIDIA H200", "NVIDIA H200")))
    assert checks["NVIDIA driver"].ok
    assert checks["NVIDIA driver"].found == "580.159.03"
    assert checks["GPUs"].found == "NVIDIA H200, NVIDIA H200"
    assert "CUDA_VISIBLE_DEVICES" in checks["GPUs"].means
    assert checks["CUDA for Python"].ok
    assert works(checks.values())


@pytest.mark.parametrize("version", ["535.129.03", "560.35", "unheard-of"])
def test_a_driver_that_is_too_old(tmp_path: Path, version: str) -> None:
    checks = gpu_checks(describe_driver(tmp_path / "nvidia", version, "NVIDIA H200"))
    driver = by_name(checks)["NVIDIA driver"]
    assert not driver.ok
    assert version in driver.found
    assert "570" in driver.mend
    assert not works(checks)


@pytest.mark.parametrize(
    ("scope", "with_root", "ok"),
    [(0, False, True), (1, False, True), (2, False, False), (2, True, True), (3, True, False)],
)
def test_what_yama_allows_differs_with_and_without_root(tmp_path: Path, scope: int, with_root: bool, ok: bool) -> None:
    path = tmp_path / "ptrace_scope"
    path.write_text(f"{scope}\n")
    (check,) = confinement_checks(with_root, path, tmp_path / "none")
    assert (check.found, check.ok, check.required) == (str(scope), ok, True)
    assert ok or f"to {2 if with_root else 1} or less" in check.mend


def test_a_policy_of_selinux_that_is_enforced_is_noted(tmp_path: Path) -> None:
    path = tmp_path / "enforce"
    for value, found in (("1", "enforcing"), ("0", "permissive")):
        path.write_text(value)
        _, check = confinement_checks(True, tmp_path / "none", path)
        assert (check.name, check.found, check.ok, check.required) == ("SELinux", found, value == "0", False)


def test_a_note_alone_does_not_fail_the_machine() -> None:
    assert works([Check("a", True, True, "x", "", ""), Check("b", False, False, "x", "", "mend")])
    assert not works([Check("a", False, True, "x", "", "mend")])


def test_setup_installs_once_and_tells_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefix: Path) -> None:
    monkeypatch.delenv("GPUCKPT_CRIU", raising=False)
    monkeypatch.setenv("GPUCKPT_CRIU_PREFIX", str(prefix))
    text = run("setup")
    assert text.returncode == 0, text.stderr
    assert str(prefix) in text.stdout
    assert "Kernels can be saved and restored here.\nNext: Start `jupyter lab --allow-root`" in text.stdout
    document = json.loads(run("setup", "--json").stdout)
    assert document["ok"] is True
    assert document["criu"]["origin"] == "prefix"
    found_out = {"private_sockets", "new_connections", "works_filtered"}
    assert set(document["criu"]) == {"argv", "version", "path", "origin"} | found_out
    assert document["unavailable"] is None


@pytest.mark.usefixtures("with_criu")
def test_setup_does_not_tell_another_user_that_all_is_ready() -> None:
    text = run("setup", under=NOBODY)
    assert text.returncode == 0, text.stderr
    assert "is ready" not in text.stdout
    assert "user 65534, and CRIU needs root" in text.stdout
    assert "Next: Start the Jupyter server as root" in text.stdout
    document = json.loads(run("setup", "--json", under=NOBODY).stdout)
    assert document["unavailable"]["kind"] == "Unavailable"


@pytest.mark.usefixtures("with_criu")
def test_setup_says_what_else_is_lacking_and_nothing_of_what_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("GPUCKPT_STORE", str(tmp_path / "file" / "store"))
    text = run("setup")
    assert text.returncode == 0, text.stderr
    assert "FAIL  store" in text.stdout
    assert "Next: " in text.stdout
    assert text.stdout.endswith("Kernels cannot be saved here yet: store.\n")
    assert "ok    " not in text.stdout


@pytest.mark.usefixtures("without_criu")
def test_setup_does_not_install_what_would_not_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUCKPT_CRIU_PREFIX", str(tmp_path / "criu"))
    text = run("setup")
    assert text.returncode == 4
    assert "Next: Correct GPUCKPT_CRIU" in text.stderr
    document = json.loads(run("setup", "--json").stdout)
    assert document["error"]["kind"] == "Unavailable"
    assert list(tmp_path.iterdir()) == []
