"""Pods of deploy/kubernetes, by `podman kube play`: stopped, killed, and started again; and containers of the image."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from counting import COUNTING
from notebooks import wait_until
from podman import FETCHED, IMAGE, ROOT, MachinesBroker, Podman

pytestmark = pytest.mark.timeout(900)

_MANIFESTS = ROOT / "deploy" / "kubernetes"
_CLIENT = (Path(__file__).parent / "notebook_client.py").read_text()
_GRACE = 120
_TRAIN = """
import os, time
secret = os.urandom(8).hex()
for step in range(1000000):
    print(step, secret, flush=True)
    time.sleep(0.05)
"""


def _template(file: str) -> dict[str, Any]:
    """Return the pod of a manifest."""
    documents = yaml.safe_load_all((_MANIFESTS / file).read_text())
    found: dict[str, Any] = next(one["spec"]["template"] for one in documents if "template" in one["spec"])
    return found


def _pod(file: str, name: str, home: Path, **folders: Path) -> dict[str, Any]:
    """Return a manifest's pod with what a cluster would have put in: the image, and folders for its volumes."""
    template = copy.deepcopy(_template(file))
    spec = template["spec"]
    # Of a seccomp profile, podman 4.3 knows the annotation that Kubernetes had before the field.
    profile = f"localhost/{spec['securityContext']['seccompProfile']['localhostProfile']}"
    annotations = {"seccomp.security.alpha.kubernetes.io/pod": profile}
    (container,) = spec["containers"]
    assert container["image"] == "gpuckpt"
    container |= {"image": IMAGE, "imagePullPolicy": "Never"}
    # These pods have no network: nothing but what is in them asks the server.
    for word in ("ports", "startupProbe", "readinessProbe", "livenessProbe"):
        container.pop(word, None)
    places = {"home": home, **folders}
    assert {one["name"] for one in container["volumeMounts"]} == set(places)
    spec["volumes"] = [{"name": n, "hostPath": {"path": str(p), "type": "Directory"}} for n, p in places.items()]
    metadata = {"name": name, "labels": template["metadata"]["labels"], "annotations": annotations}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _run(podman: Podman, cell: str) -> str:
    return podman.python("lab-lab", _CLIENT, "token", "train.ipynb", cell).strip()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A fresh volume, which is root's."""
    folder = tmp_path / "home"
    folder.mkdir()
    return folder


@pytest.fixture
def lab(podman: Podman, home: Path, tmp_path: Path) -> dict[str, Any]:
    """The notebook's pod, not started yet."""
    (tmp_path / "token").mkdir()
    (tmp_path / "token" / "token").write_text("token")
    return _pod("notebook/statefulset.yaml", "lab", home, token=tmp_path / "token")


def test_a_notebooks_kernel_is_hibernated_when_its_pod_is_stopped_and_resumed_in_the_next(
    podman: Podman, lab: dict[str, Any], tmp_path: Path
) -> None:
    podman.play(lab, tmp_path / "pod.json")
    secret, _ = _run(podman, COUNTING).split()
    before = int(_run(podman, "print(counted[0])"))
    status = podman.python("lab-lab", "print(open('/proc/self/status').read())")
    assert "CapEff:\t0000000000000000" in status
    assert "NoNewPrivs:\t1" in status
    assert "Seccomp:\t2" in status
    podman.stop("lab", _GRACE)
    podman.play(lab, tmp_path / "pod.json")
    came, counted = _run(podman, "print(secret, counted[0])").split()
    assert came == secret
    assert int(counted) > before
    assert "resumed from" in _run(podman, "%gpuckpt status")


def test_a_job_goes_on_in_the_next_pod_without_a_step_lost_or_done_twice(
    podman: Podman, home: Path, tmp_path: Path
) -> None:
    (home / "train.py").write_text(_TRAIN)
    job = _pod("job/job.yaml", "train", home)
    steps = []

    def said() -> list[str]:
        return [line for line in podman.does("logs", "train-train", check=False).splitlines() if len(line.split()) == 2]

    for _ in range(2):
        podman.play(job, tmp_path / "pod.json")
        wait_until(lambda: len([line for line in said() if line[0].isdigit()]) > 20, what="the job writes nothing")
        podman.does("pod", "stop", "-t", str(_GRACE), "train")
        steps += [line.split() for line in said() if line[0].isdigit()]
        podman.does("pod", "rm", "-f", "train")
    assert len({secret for _, secret in steps}) == 1
    assert [int(step) for step, _ in steps] == list(range(len(steps)))


def test_a_pod_that_is_killed_loses_what_was_not_saved_and_no_more(
    podman: Podman, lab: dict[str, Any], tmp_path: Path
) -> None:
    podman.play(lab, tmp_path / "pod.json")
    secret, _ = _run(podman, COUNTING).split()
    _run(podman, "%gpuckpt save --wait kept")
    podman.does("pod", "kill", "lab")
    podman.does("pod", "rm", "-f", "lab")
    podman.play(lab, tmp_path / "pod.json")
    assert "NameError" in _run(podman, "print(secret)")
    _run(podman, "%gpuckpt restore kept")
    assert _run(podman, "print(secret)") == secret


def test_a_container_that_is_stopped_and_started_again_has_its_job_back(podman: Podman, home: Path) -> None:
    (home / "train.py").write_text(_TRAIN)
    security = _template("notebook/statefulset.yaml")["spec"]["containers"][0]["securityContext"]["capabilities"]
    options = ["--cap-drop", "all", "--cap-add", ",".join(security["add"]), "--security-opt", "no-new-privileges"]
    options += ["--security-opt", f"seccomp={podman.profile}", "--network", "none", "-v", f"{home}:/home/jovyan"]
    job = ["jupyter", "gpuckpt", "run", "train", "--", "python", "-u", "train.py"]
    podman.does("run", "-d", "--name", "box", *options, IMAGE, *job)
    _assert_it_goes_on_whenever_it_is_started(podman)


def _assert_it_goes_on_whenever_it_is_started(podman: Podman) -> None:
    def steps() -> list[list[str]]:
        lines = [line.split() for line in podman.does("logs", "box").splitlines()]
        return [line for line in lines if len(line) == 2 and line[0].isdigit()]

    wait_until(lambda: len(steps()) > 20)
    for _ in range(3):
        podman.does("stop", "-t", str(_GRACE), "box")
        before = len(steps())
        podman.does("start", "box")
        wait_until(lambda before=before: len(steps()) > before + 20)  # type: ignore[misc]
    taken = steps()
    assert [int(step) for step, _ in taken] == list(range(len(taken)))
    assert len({secret for _, secret in taken}) == 1


def test_a_container_without_any_right_has_its_job_back_by_the_machines_broker(
    podman: Podman, home: Path, machines_broker: MachinesBroker
) -> None:
    (home / "train.py").write_text(_TRAIN)
    shutil.chown(home, 1000, 1000)
    options = ["--cap-drop", "all", "--security-opt", "no-new-privileges", "-w", "/home/jovyan", "--network", "none"]
    options += ["--security-opt", f"seccomp={podman.profile}", "-v", f"{home}:/home/jovyan", *machines_broker.options]
    doctor = podman.does("run", "--rm", *options, IMAGE, "jupyter", "gpuckpt", "doctor", check=False)
    assert doctor.strip().endswith("Kernels can be saved and restored here.")
    job = ["jupyter", "gpuckpt", "run", "train", "--", "python", "-u", "train.py"]
    podman.does("run", "-d", "--name", "box", *options, IMAGE, *job)
    _assert_it_goes_on_whenever_it_is_started(podman)


def test_podmans_own_profile_is_told_to_forbid_what_criu_needs(podman: Podman) -> None:
    rights = ["--cap-drop", "all", "--cap-add", "SYS_ADMIN,SYS_PTRACE,SYS_CHROOT,SETPCAP,NET_ADMIN,SYS_TIME"]
    doctor = ["-e", "GPUCKPT_AS_ROOT=1", IMAGE, "jupyter", "gpuckpt", "doctor"]
    found = podman.does("run", "--rm", "--network", "none", *rights, *doctor, check=False)
    assert "CRIU needs: vmsplice." in " ".join(found.split())
    profile = ["--security-opt", f"seccomp={podman.profile}"]
    found = podman.does("run", "--rm", "--network", "none", *rights, *profile, *doctor, check=False)
    assert found.strip().endswith("Kernels can be saved and restored here.")


def test_the_profile_allows_no_more_than_podmans_and_what_criu_needs(podman: Podman) -> None:
    known = (FETCHED / "usr", Path("/usr"))
    usual = next(path for folder in known if (path := folder / "share/containers/seccomp.json").exists())
    theirs, ours = _allowed(json.loads(usual.read_text())), _allowed(json.loads(podman.profile.read_text()))
    # What is newer than that list of podman's, and reads or changes only what is the process's own.
    newer = {"cachestat", "fchmodat2", "futex_requeue", "futex_wait", "futex_waitv", "futex_wake", "map_shadow_stack"}
    newer |= {"listmount", "mseal", "statmount"}
    assert ours - theirs - newer == {"vmsplice"}


def _allowed(profile: dict[str, Any]) -> set[str]:
    """Return the calls that a profile allows to who has the capabilities that CRIU needs."""
    had = {"CAP_SYS_ADMIN", "CAP_SYS_PTRACE", "CAP_SYS_CHROOT", "CAP_SYS_TIME", "CAP_NET_ADMIN", "CAP_SETPCAP"}
    allowed = set()
    for rule in profile["syscalls"]:
        if rule["action"] == "SCMP_ACT_ALLOW" and set(rule.get("includes", {}).get("caps", [])) <= had:
            allowed |= set(rule["names"])
    return allowed
