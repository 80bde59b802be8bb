"""`doctor --for`: what is said of Slurm, of containers and of where the store lies.

What `scontrol` prints, in `scontrol/`, is that of slurm-wlm 22.05.8: with Slurm's own values but JobRequeue=0, and with
those of our recipe and job_container/tmpfs.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from command_line import Cli, run

from jupyter_gpuckpt.linux.file_systems import mounted_from
from jupyter_gpuckpt.machine import engine_checks, place_checks
from jupyter_gpuckpt.machine.checks import Check
from jupyter_gpuckpt.machine.slurm_checks import config_checks, fields, partition_checks
from jupyter_gpuckpt.store.reach import locks_reach

_SCONTROL = Path(__file__).with_name("scontrol")


def of_slurm(name: str) -> dict[str, Check]:
    config = fields((_SCONTROL / f"config-{name}.txt").read_text())
    partitions = (_SCONTROL / f"partitions-{name}.txt").read_text()
    return {check.name: check for check in [*config_checks(config), *partition_checks(partitions)]}


def test_slurm_s_own_values_are_judged() -> None:
    checks = of_slurm("plain")
    assert {name: check.ok for name, check in checks.items()} == {
        "proctrack": False,
        "job_container": True,
        "KillWait": False,
        "requeue": False,
        "GraceTime": True,  # nothing is preempted
    }
    assert checks["KillWait"].found == "30 s"
    assert "recipe slurm.conf" in checks["proctrack"].mend


def test_the_recipe_s_lines_are_good() -> None:
    checks = of_slurm("recipe")
    assert [name for name, check in checks.items() if not check.ok] == []
    assert {"preemption", "signal before"} <= {*checks}


def test_a_partition_whose_jobs_have_no_grace_time_is_named() -> None:
    shown = (_SCONTROL / "partitions-recipe.txt").read_text().replace("GraceTime=120", "GraceTime=0")
    (check,) = partition_checks(shown)
    assert not check.ok
    assert "preemptible" in check.found
    assert "urgent" not in check.found


@pytest.mark.parametrize(
    ("kind", "options", "reach"),
    [
        ("ext4", "rw", True),
        ("overlay", "rw,lowerdir=/l", True),
        ("nfs4", "rw,vers=4.2,local_lock=none", True),
        ("nfs", "rw,vers=3,local_lock=none", True),
        ("nfs", "rw,vers=3,nolock,local_lock=all", False),
        ("nfs", "rw,vers=3,local_lock=flock", False),
        ("lustre", "rw,flock,user_xattr", True),
        ("lustre", "rw,localflock", False),
        ("ceph", "rw", True),
        ("fuse.glusterfs", "rw", True),
        ("fuse.sshfs", "rw", False),
        ("virtiofs", "rw", False),
    ],
)
def test_it_is_known_on_which_file_systems_locks_reach_other_machines(
    tmp_path: Path, kind: str, options: str, reach: bool
) -> None:
    assert locks_reach(tmp_path, mounts(tmp_path, kind, options)) is reach


def mounts(folder: Path, kind: str, options: str = "rw", root: str = "/") -> Path:
    """Write a list of mounts by which `folder` is on such a file system."""
    device = folder.stat().st_dev
    file = folder / "mountinfo"
    file.write_text(
        "22 1 0:999 / /proc rw - proc proc rw\n"
        f"30 1 {os.major(device)}:{os.minor(device)} {root} {folder} rw,relatime shared:1 - {kind} source {options}\n"
    )
    return file


def test_a_store_in_the_container_or_in_an_empty_dir_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUCKPT_STORE", str(tmp_path / "store"))
    empty = "/var/lib/kubelet/pods/8f/volumes/kubernetes.io~empty-dir/work"
    assert mounted_from(tmp_path, mounts(tmp_path, "ext4", root=empty)) == empty
    for kind, root, kept in (("overlay", "/", False), ("ext4", empty, False), ("ext4", "/data", True)):
        assert place_checks.volume_check(mounts(tmp_path, kind, root=root)).ok is kept


def test_a_shell_that_does_not_pass_the_stop_signal_on_is_told(tmp_path: Path) -> None:
    for words, ok in ((b"sh\0-c\0jupyter lab\0", False), (b"/usr/bin/tini\0--\0jupyter\0", True)):
        (tmp_path / "cmdline").write_bytes(words)
        assert engine_checks.first_process_check(tmp_path).ok is ok


def test_a_server_of_a_hub_is_told_by_which_spawner_it_was_started() -> None:
    server = {"JUPYTERHUB_SERVICE_PREFIX": "/user/alice/", "JUPYTERHUB_USER": "alice"}
    for started_by, told in (
        ({}, "spawner's time"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "store's volume"),
        ({"SLURM_JOB_ID": "7"}, "scontrol"),
    ):
        names = [check.name for check in engine_checks.hub_checks({**server, **started_by})]
        assert told in names
        assert len(names) == len({*names})
    assert engine_checks.hub_checks(server)[0].ok
    assert not engine_checks.hub_checks({})[0].ok


def test_it_is_said_where_this_is_not_the_engine_s_place() -> None:
    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    assert engine_checks.kubernetes_checks(pod)[0].ok
    assert not engine_checks.kubernetes_checks({})[0].ok
    assert engine_checks.container_checks({"container": "podman"})[0].ok
    assert engine_checks.container_checks(pod)[0].ok


def test_what_cannot_be_asked_or_understood_is_one_check_among_the_others(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.write_text(
        "#!/bin/sh\necho 'scontrol: error: first' >&2\necho 'scontrol: fatal: the reason' >&2\nexit 1\n"
    )
    scontrol.chmod(0o755)
    (tmp_path / "others" / "gpuckpt").mkdir(parents=True)
    (tmp_path / "others" / "gpuckpt").chmod(0o777)
    variables = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "JUPYTER_RUNTIME_DIR": str(tmp_path / "others"),
        "GPUCKPT_HIBERNATE_ON": "whenever",
    }
    found: dict[str, dict[str, Any]] = {}
    for engine in ("slurm", "container"):
        done = cli("doctor", "--quick", "--json", "--for", engine, **variables)
        found |= {one["name"]: one for one in done.json["checks"]}
    assert found["scontrol"]["found"] == "scontrol: fatal: the reason"
    assert "slurm.conf" in found["scontrol"]["mend"]
    assert found["run folder"]["required"]
    assert "mode is 0777" in found["run folder"]["found"]
    assert "whenever" in found["stop"]["found"]
    assert not any(found[name]["ok"] for name in ("scontrol", "run folder", "stop"))


@pytest.mark.parametrize("engine", ["slurm", "jupyterhub", "container", "kubernetes"])
def test_the_doctor_says_what_an_engine_does(cli: Cli, engine: str, folders: None) -> None:
    plain = {one["name"] for one in cli("doctor", "--quick", "--json").json["checks"]}
    done = cli("doctor", "--quick", "--json", "--for", engine, GPUCKPT_HIBERNATE_ON="stop")
    found = {one["name"]: one for one in done.json["checks"] if one["name"] not in plain}
    assert "run folder" in found
    if engine != "slurm":
        assert found["stop"]["ok"]
    assert all(one["mend"] for one in found.values() if not one["ok"])


@pytest.fixture
def cli() -> Cli:
    return run
