"""What deploy/kubernetes has, by Kubernetes' own schemas, and what it promises of rights and time."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import jinja2
import kubernetes_validate
import pytest
import yaml

from jupyter_gpuckpt.broker.rights import NEEDED

_DEPLOY = Path(__file__).parents[2] / "deploy"
_FOLDER = _DEPLOY / "kubernetes"
_VERSIONS = ("1.30", "1.34")
_NOT_RESOURCES = {"kustomization.yaml", "values.yaml", "values-without-rights.yaml"}
_WELL_USED = {"CAP_KILL", "CAP_SYS_RESOURCE"}  # the broker works without them
_SEPARATE = {"CHOWN"}  # gpuckpt-start's, for a fresh volume


def _resources() -> dict[str, dict[str, Any]]:
    files = [path for path in sorted(_FOLDER.glob("*/*.yaml")) if path.name not in _NOT_RESOURCES]
    found = [(path, one) for path in files for one in yaml.safe_load_all(path.read_text())]
    return {f"{path.parent.name}/{one['kind']}": one for path, one in found}


_RESOURCES = _resources()


_PODS = {name: one["spec"]["template"]["spec"] for name, one in _RESOURCES.items() if "template" in one["spec"]}


@pytest.mark.parametrize("version", _VERSIONS)
@pytest.mark.parametrize("name", _RESOURCES)
def test_each_resource_is_what_kubernetes_schema_says(name: str, version: str) -> None:
    kubernetes_validate.validate(_RESOURCES[name], version, strict=True)


@pytest.mark.parametrize("folder", sorted({path.parent.name for path in _FOLDER.glob("*/kustomization.yaml")}))
def test_a_kustomization_has_all_of_its_folder(folder: str) -> None:
    told = yaml.safe_load((_FOLDER / folder / "kustomization.yaml").read_text())
    there = {path.name for path in (_FOLDER / folder).glob("*.yaml")} - _NOT_RESOURCES
    others = {one for one in told["resources"] if one.startswith("../")}
    assert set(told["resources"]) - others == there
    assert [image["name"] for image in told.get("images", [])] == ([] if others else ["gpuckpt"])


@pytest.mark.parametrize("name", _PODS)
def test_a_pod_has_the_rights_that_the_broker_needs_and_no_others(name: str) -> None:
    pod = _PODS[name]
    assert not pod["automountServiceAccountToken"]
    (container,) = pod["containers"]
    if name.startswith("broker/"):
        return  # of the machine's own rights
    context = container["securityContext"]
    assert not context["allowPrivilegeEscalation"]
    assert "privileged" not in context
    assert context["capabilities"]["drop"] == ["ALL"]
    assert container["resources"]["requests"]
    assert container["resources"]["limits"]["memory"]
    if name.startswith("seccomp/"):
        assert "add" not in context["capabilities"]
        return
    assert pod["securityContext"]["seccompProfile"] == {"type": "Localhost", "localhostProfile": "gpuckpt.json"}
    assert set(context["capabilities"]["add"]) == _of_the_broker()


@pytest.mark.parametrize("name", ["seccomp/DaemonSet", "broker/DaemonSet"])
def test_what_nodes_need_comes_to_those_that_are_closed_to_pods_without_gpus(name: str) -> None:
    """By the usual taint, whatever its value and effect."""
    assert _PODS[name]["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists"}]


def test_a_pod_without_rights_fits_pod_securitys_strictest_level() -> None:
    """https://kubernetes.io/docs/concepts/security/pod-security-standards, restricted."""
    pod = copy.deepcopy(_PODS["notebook/StatefulSet"])
    told = yaml.safe_load((_FOLDER / "notebook-without-rights" / "kustomization.yaml").read_text())
    for step in (one for patch in told["patches"] for one in yaml.safe_load(patch["patch"])):
        *way, last = step["path"].removeprefix("/spec/template/spec/").split("/")
        place: Any = pod
        for word in way:
            place = place[int(word)] if isinstance(place, list) else place[word]
        if last == "-":
            place.append(step["value"])
        else:
            place[last] = step["value"]
    _assert_restricted(pod)


@pytest.mark.parametrize("more", [{}, {"kernel_gpus": 1, "kernel_memory_limit": "8Gi"}])
def test_a_gateways_kernel_fits_it_too_and_reaches_the_broker(more: dict[str, Any]) -> None:
    whole = _pod_of_a_gateway(**more)
    for version in _VERSIONS:
        kubernetes_validate.validate(whole, version, strict=True)
    pod = whole["spec"]
    _assert_restricted(pod)
    assert pod["securityContext"]["supplementalGroups"] == [2042]
    (deadline,) = (
        word for word in pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"] if "deadline" in word
    )
    assert float(deadline.removeprefix("--deadline=")) < pod["terminationGracePeriodSeconds"]
    limits = {"memory": "8Gi", "nvidia.com/gpu": "1"} if more else {"memory": "16Gi"}
    assert pod["containers"][0]["resources"]["limits"] == limits
    claim = _RESOURCES["notebook-without-rights/PersistentVolumeClaim"]["metadata"]["name"]
    assert pod["volumes"][0] == {"name": "broker", "persistentVolumeClaim": {"claimName": claim}}


def test_who_asks_a_gateway_cannot_say_more_of_the_pod_than_values() -> None:
    told = '1"\n  hostPID: true\n#'
    for name in ("kernel_username", "kernel_cpus", "kernel_memory", "kernel_memory_limit", "kernel_gpus"):
        pod = _pod_of_a_gateway(**{name: told})["spec"]
        assert "hostPID" not in pod, name
        assert json.dumps(told)[1:-1] in json.dumps(pod), name


def _pod_of_a_gateway(**more: Any) -> dict[str, Any]:
    template = (_FOLDER / "gateway" / "kernel-pod.yaml.j2").read_text()
    told = {"kernel_pod_name": "alice-1", "kernel_namespace": "default", "kernel_id": "1", "kernel_image": "kernel"}
    told |= {"kernel_service_account_name": "default", "kernel_username": "alice", **more}
    text = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(template)
    pod: dict[str, Any] = yaml.safe_load(text.render(told, kernel_uid=1000, kernel_gid=100))
    return pod


def _assert_restricted(pod: dict[str, Any]) -> None:
    (container,) = pod["containers"]
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["seccompProfile"]["type"] == "Localhost"
    assert not {"hostPID", "hostNetwork", "hostIPC"} & set(pod)
    kinds = {kind for volume in pod["volumes"] for kind in volume if kind != "name"}
    assert kinds <= {
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "persistentVolumeClaim",
        "projected",
        "secret",
    }


def _of_the_broker() -> set[str]:
    return {name.removeprefix("CAP_") for name in set(NEEDED) - _WELL_USED} | _SEPARATE


def test_kernels_are_hibernated_before_the_kubelet_kills() -> None:
    pod = _RESOURCES["notebook/StatefulSet"]["spec"]["template"]["spec"]
    environment = {one["name"]: one["value"] for one in pod["containers"][0]["env"]}
    assert environment["GPUCKPT_HIBERNATE_ON"] == "stop"
    assert float(environment["GPUCKPT_HIBERNATE_DEADLINE"]) < pod["terminationGracePeriodSeconds"]


def test_the_hubs_servers_get_the_same_rights_and_time() -> None:
    values = yaml.safe_load((_FOLDER / "jupyterhub" / "values.yaml").read_text())

    class Config:
        KubeSpawner = type("KubeSpawner", (), {})()

    exec(values["hub"]["extraConfig"]["gpuckpt"], {"c": Config})
    spawner, user = Config.KubeSpawner, values["singleuser"]
    context = spawner.container_security_context
    assert set(context["capabilities"]["add"]) == _of_the_broker()
    assert context["capabilities"]["drop"] == ["ALL"]
    assert spawner.delete_grace_period == user["extraPodConfig"]["terminationGracePeriodSeconds"]
    assert float(user["extraEnv"]["GPUCKPT_HIBERNATE_DEADLINE"]) < spawner.delete_grace_period
    pod = {"containers": [{"name": "notebook", "securityContext": context}], **user["extraPodConfig"]}
    whole = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "user"}, "spec": pod}
    for version in _VERSIONS:
        kubernetes_validate.validate(whole, version, strict=True)


def test_the_hubs_servers_without_rights_are_as_the_notebook_without_rights() -> None:
    values = yaml.safe_load((_FOLDER / "jupyterhub" / "values-without-rights.yaml").read_text())
    told = yaml.safe_load((_FOLDER / "notebook-without-rights" / "kustomization.yaml").read_text())["patches"][0]
    steps = {step["path"].rpartition("/template/spec/")[2]: step["value"] for step in yaml.safe_load(told["patch"])}
    spawner = type("KubeSpawner", (), {})()
    exec(values["hub"]["extraConfig"]["gpuckpt"], {"c": type("Config", (), {"KubeSpawner": spawner})})
    user = values["singleuser"]
    assert user["extraPodConfig"]["securityContext"] == steps["securityContext"]
    assert spawner.container_security_context == steps["containers/0/securityContext"]
    assert spawner.working_dir == steps["containers/0/workingDir"]
    assert user["storage"]["extraVolumes"] == [steps["volumes/-"]]
    assert user["storage"]["extraVolumeMounts"] == [steps["containers/0/volumeMounts/-"]]
    assert (user["uid"], user["fsGid"]) == (1000, 1000)
