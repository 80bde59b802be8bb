"""The chart makes what deploy/kubernetes has, is valid whatever is switched on, and refuses what cannot work."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from helm_chart import CHART, Chart, Refused

from jupyter_gpuckpt.store.own_key import OwnKey

_ROOT = CHART.parents[2]
_BASE = _ROOT / "deploy" / "kubernetes"
_FOLDERS = ("notebook", "seccomp", "job")
_FOR_PODS_WITHOUT_RIGHTS = ("broker", "notebook-without-rights")
_PAGE = _ROOT / "docs" / "kubernetes.md"
_VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
_SCHEMA = json.loads((CHART / "values.schema.json").read_text())
_REMOTE = {"url": "s3://bucket/ann", "existingSecret": "s3", "keysSecret": "keys"}
_OFF: dict[str, Any] = {"notebook": {"enabled": False}, "seccomp": {"enabled": False}}
_COMBINATIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "gpu": {
        "gpus": 2,
        "nodeSelector": {"gpu": "h100"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}, {"key": "spot", "operator": "Exists"}],
    },
    "remote": {"remote": {"url": "s3://bucket/ann", "existingSecret": "s3"}, "notebook": {"startupSeconds": 600}},
    "remote and job without storage": {"remote": _REMOTE, "storage": {"enabled": False}, "job": {"enabled": True}},
    "existing claim": {"storage": {"existingClaim": "mine"}},
    "class and size": {"storage": {"className": "fast", "size": "1Ti"}},
    "job": {"job": {"enabled": True}},
    "job alone": _OFF
    | {"job": {"enabled": True, "every": "", "command": ["sh", "-c", "echo: {{ no }} # \"$HOME\" '*'"]}},
    "job with a claim": _OFF | {"job": {"enabled": True}, "storage": {"existingClaim": "mine"}},
    "seccomp alone": {"notebook": {"enabled": False}},
    "everything": {
        "image": {"tag": "sha256:" + "0" * 64, "pullSecrets": ["registry"]},
        "job": {"enabled": True},
        "gpus": 1,
        "remote": _REMOTE,
        "serviceAccountName": "lab",
        "extraEnv": [{"name": "GPUCKPT_SLEEP_AFTER", "value": "30m"}],
    },
    "nothing": _OFF,
}
_WITHOUT_RIGHTS = {"withRights": False, "broker": {"enabled": True}, "job": {"enabled": True}}


_MADE_OF_VALUES = {
    "limits: {memory: 16Gi}",
    'matchLabels: {access-lab: "true"}',
    "matchLabels: {app: lab}",
    'requests: {cpu: "1", memory: 4Gi}',
    '- {name: GPUCKPT_HIBERNATE_DEADLINE, value: "100"}',
    "- {name: GPUCKPT_HIBERNATE_ON, value: stop}",
    "- {name: GPUCKPT_RESUME, value: auto}",
    "args: [jupyter, gpuckpt, run, train, --every, 15m, --, python, -u, train.py]",
    "image: gpuckpt",
    "labels: {app: lab}",
    "labels: {app: train}",
    "name: lab",
    "name: train",
    "persistentVolumeClaim: {claimName: train}",
    "resources: {requests: {storage: 100Gi}}",
    "secret: {secretName: lab, items: [{key: token, path: token}]}",
    "selector: {app: lab}",
    "serviceName: lab",
    "startupProbe: {httpGet: {path: /api, port: http}, periodSeconds: 2, failureThreshold: 60}",
    "terminationGracePeriodSeconds: 120",
    "volumeName: gpuckpt-broker",
}
"""Lines of deploy/kubernetes that stand otherwise in the templates."""


def _leaves(values: dict[str, Any], schema: dict[str, Any], before: str = "") -> Iterator[str]:
    """Yield the paths of all values that people set: a map that is Kubernetes' own is one."""
    for name, one in values.items():
        told = schema["properties"].get(name, {})
        yield from _leaves(one, told, f"{before}{name}.") if "properties" in told else [before + name]


_PATHS = sorted(_leaves(_VALUES, _SCHEMA))


def _base() -> dict[str, dict[str, Any]]:
    """Return what deploy/kubernetes has, by kind, as kubectl reads the kustomizations."""
    found = {}
    for folder in _FOLDERS:
        told: dict[str, Any] = {}
        if (file := _BASE / folder / "kustomization.yaml").exists():
            told = yaml.safe_load(file.read_text())
        labels = {name: value for one in told.get("labels", []) for name, value in one["pairs"].items()}
        for path in sorted((_BASE / folder).glob("*.yaml")):
            for one in yaml.safe_load_all(path.read_text()):
                if one["kind"] == "Kustomization":
                    continue
                one["metadata"]["labels"] = labels
                for container in one["spec"].get("template", {}).get("spec", {}).get("containers", []):
                    assert container["image"] == "gpuckpt"
                    container["image"] = "registry.example.com/gpuckpt:1"
                found[one["kind"]] = one
    return found


def _by_kind(resources: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    found = {one["kind"]: one for one in resources}
    assert len(found) == len(resources)
    return found


@pytest.fixture
def own_folder() -> Iterator[Path]:
    """A folder that other users can reach, which pytest's own is not."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def _pod(resource: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = resource["spec"]["template"]["spec"]
    return found


def _environment(resource: dict[str, Any]) -> dict[str, Any]:
    (container,) = _pod(resource)["containers"]
    return {one["name"]: one["value"] for one in container.get("env", [])}


# What can be read of it everywhere.


def test_the_schema_has_each_value_and_no_other_and_the_defaults_fit_it() -> None:
    jsonschema.Draft7Validator.check_schema(_SCHEMA)
    jsonschema.validate(_VALUES, _SCHEMA)

    def same(values: dict[str, Any], schema: dict[str, Any]) -> None:
        assert schema["additionalProperties"] is False
        assert set(values) == set(schema["properties"]) - {"global"}
        for name, one in schema["properties"].items():
            if "properties" in one:
                same(values[name], one)

    same(_VALUES, _SCHEMA)


@pytest.mark.parametrize(
    "values",
    [
        {"storge": {"enabled": True}},
        {"image": {"tag": 1.1}},
        {"gpus": -1},
        {"gracePeriod": "2m"},
        {"notebook": {"resume": "never"}},
        {"notebook": {"hibernateOn": ""}},
        {"job": {"command": "python train.py"}},
        {"job": {"name": "Train"}},
        {"job": {"every": "often"}},
        {"storage": {"size": "100 GB"}},
        {"nodeSelector": {"gpu": True}},
        {"extraEnv": {"A": "b"}},
    ],
    ids=str,
)
def test_the_schema_refuses_what_is_none_of_these_values(values: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(values, _SCHEMA)


def test_the_templates_use_each_value_and_no_other() -> None:
    text = "".join(path.read_text() for path in sorted((CHART / "templates").iterdir()))
    used = set(re.findall(r"\.Values\.([\w.]+)", text))
    assert used == {
        path.replace("resources.requests", "resources").replace("resources.limits", "resources") for path in _PATHS
    }


def _lines(files: Iterable[Path]) -> set[str]:
    text = "\n".join(file.read_text() for file in files)
    lines = (re.sub(r"(^|\s+)#.*", "", line).strip() for line in text.splitlines())
    return {line for line in lines if line}


def test_each_line_of_the_manifests_is_in_the_templates_or_made_of_values() -> None:
    """So nobody changes one of the two alone, where nothing renders the chart."""
    folders = (*_FOLDERS, *_FOR_PODS_WITHOUT_RIGHTS)
    files = [path for folder in folders for path in (_BASE / folder).glob("*.yaml") if path.stem != "kustomization"]
    assert _lines(files) - _lines((CHART / "templates").iterdir()) == _MADE_OF_VALUES


def test_the_page_tells_each_value() -> None:
    section = _PAGE.read_text().partition("\n## With Helm\n")[2].partition("\n## ")[0]
    first_column = "".join(re.findall(r"^\| ([^|]*) \|", section, re.MULTILINE))
    assert set(re.findall(r"`([\w.]+)`", first_column)) == set(_PATHS)


def test_there_is_no_secret_among_the_values() -> None:
    secret = [path for path in _PATHS if re.search("secret|token|password|key", path, re.IGNORECASE)]
    assert secret == ["image.pullSecrets", "notebook.existingSecret", "remote.existingSecret", "remote.keysSecret"]
    assert not any(
        [_VALUES["image"]["pullSecrets"], _VALUES["notebook"]["existingSecret"], *_VALUES["remote"].values()]
    )
    templates = "".join(path.read_text() for path in CHART.glob("templates/*"))
    assert "kind: StatefulSet" in templates
    assert "kind: Secret" not in templates


# What is rendered.


def test_with_its_own_values_it_makes_what_the_kustomizations_and_the_job_have(chart: Chart) -> None:
    made, base = _by_kind(chart.renders({"job": {"enabled": True}})), _base()
    assert set(made) == set(base)
    for kind, one in made.items():
        labels, there = one["metadata"].pop("labels"), base[kind]["metadata"].pop("labels")
        assert there.items() <= labels.items()
        assert labels["app.kubernetes.io/managed-by"] == "Helm"
        annotations = one["metadata"].pop("annotations", {})
        assert annotations == ({"helm.sh/resource-policy": "keep"} if kind == "PersistentVolumeClaim" else {})
        assert one == base[kind]
    assert set(base) - set(_by_kind(chart.renders())) == {"Job", "PersistentVolumeClaim"}


@pytest.mark.parametrize("name", _COMBINATIONS)
def test_whatever_is_switched_on_fits_kubernetes_schemas_and_has_the_same_rights(chart: Chart, name: str) -> None:
    base = _base()
    for one in chart.renders(_COMBINATIONS[name]):
        for version in ("1.30", "1.34"):
            kubernetes_validate.validate(one, version, strict=True)
        if "template" not in one["spec"]:
            continue
        pod, told = _pod(one), _pod(base[one["kind"]])
        assert not pod["automountServiceAccountToken"]
        assert pod.get("securityContext") == told.get("securityContext")
        (container,) = pod["containers"]
        assert container["securityContext"] == told["containers"][0]["securityContext"]
        containers = [container, *pod.get("initContainers", [])]
        mounted = {mount["name"] for each in containers for mount in each["volumeMounts"]}
        claimed = {claim["metadata"]["name"] for claim in one["spec"].get("volumeClaimTemplates", [])}
        assert mounted == claimed | {volume["name"] for volume in pod["volumes"]}
        assert len(pod["volumes"]) + len(claimed) == len(mounted)
        for each in pod.get("initContainers", []):
            assert each["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert each["securityContext"]["runAsUser"] == 1000


def test_without_rights_it_makes_what_those_kustomizations_have(chart: Chart) -> None:
    made = {(one["kind"], one["metadata"]["name"]): one for one in chart.renders(_WITHOUT_RIGHTS)}
    for one in made.values():
        for version in ("1.30", "1.34"):
            kubernetes_validate.validate(one, version, strict=True)
    broker = made["DaemonSet", "gpuckpt-broker"]
    (told,) = yaml.safe_load_all((_BASE / "broker" / "daemonset.yaml").read_text())
    _pod(told)["containers"][0]["image"] = "registry.example.com/gpuckpt:1"
    assert broker["spec"] == told["spec"]
    patches = yaml.safe_load((_BASE / "notebook-without-rights" / "kustomization.yaml").read_text())["patches"]
    steps = {
        step["path"].rpartition("/template/spec/")[2]: step["value"] for step in yaml.safe_load(patches[0]["patch"])
    }
    name = "default-lab-broker"
    claim = steps["volumes/-"]["persistentVolumeClaim"]
    claim["claimName"] = name
    for pod in (_pod(made["StatefulSet", "lab"]), _pod(made["Job", "train"])):
        (container,) = pod["containers"]
        assert pod["securityContext"] == steps["securityContext"]
        assert container["securityContext"] == steps["containers/0/securityContext"]
        assert container["workingDir"] == steps["containers/0/workingDir"]
        assert steps["containers/0/volumeMounts/-"] in container["volumeMounts"]
        assert steps["volumes/-"] in pod["volumes"]
    volume, claimed = yaml.safe_load_all((_BASE / "notebook-without-rights" / "broker-socket.yaml").read_text())
    assert made["PersistentVolume", name]["spec"] == volume["spec"]
    assert made["PersistentVolumeClaim", name]["spec"] == {**claimed["spec"], "volumeName": name}
    # Nothing of it is made where no pod is.
    assert [one["kind"] for one in chart.renders(_OFF | {"withRights": False})] == []


def test_each_part_is_switched_on_and_off_by_itself(chart: Chart) -> None:
    parts = {"notebook": {"StatefulSet", "Service", "NetworkPolicy"}, "seccomp": {"DaemonSet"}}
    parts["job"] = {"Job", "PersistentVolumeClaim"}
    nothing = _OFF | {"job": {"enabled": False}}
    assert chart.renders(nothing) == []
    for name, kinds in parts.items():
        assert set(_by_kind(chart.renders(nothing | {name: {"enabled": True}}))) == kinds
    assert "NetworkPolicy" not in _by_kind(chart.renders({"networkPolicy": {"enabled": False}}))


def test_the_releases_name_is_that_of_its_notebook_and_two_of_them_meet_nowhere(chart: Chart) -> None:
    one, other = (chart.renders(_OFF | {"notebook": {"enabled": True}}, release=name) for name in ("ann", "bob"))
    assert {each["metadata"]["name"] for each in one} == {"ann"}
    assert json.loads(json.dumps(one).replace("ann", "bob")) == other
    made = _by_kind(one)
    labels = made["StatefulSet"]["spec"]["template"]["metadata"]["labels"]
    assert labels == {"app": "ann"} == made["Service"]["spec"]["selector"]
    assert labels == made["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"]
    ((peer,),) = (rule["from"] for rule in made["NetworkPolicy"]["spec"]["ingress"])
    assert peer == {"podSelector": {"matchLabels": {"access-ann": "true"}}}


def test_gpus_and_where_pods_run(chart: Chart) -> None:
    values = _COMBINATIONS["gpu"]
    made = _by_kind(chart.renders(values | {"job": {"enabled": True}}))
    for kind in ("StatefulSet", "Job", "DaemonSet"):
        assert _pod(made[kind])["nodeSelector"] == values["nodeSelector"]
        assert _pod(made[kind])["tolerations"] == values["tolerations"]
    for kind in ("StatefulSet", "Job"):
        assert _pod(made[kind])["containers"][0]["resources"] == {
            "requests": {"cpu": "1", "memory": "4Gi"},
            "limits": {"memory": "16Gi", "nvidia.com/gpu": 2},
        }
    assert "nvidia.com/gpu" not in _pod(made["DaemonSet"])["containers"][0]["resources"]["limits"]
    gpu, spot = values["tolerations"]
    made = _by_kind(chart.renders({"tolerations": [spot]}))
    assert [_pod(made[kind])["tolerations"] for kind in ("StatefulSet", "DaemonSet")] == [[spot], [gpu, spot]]


def test_the_image_is_everywhere_the_same_and_may_be_a_digest(chart: Chart) -> None:
    digest = "sha256:" + "0" * 64
    values = {"image": {"repository": "here:5000/x", "tag": digest, "pullSecrets": ["registry"]}, "remote": _REMOTE}
    for one in _by_kind(chart.renders(values | {"job": {"enabled": True}})).values():
        if "template" in one["spec"]:
            pod = _pod(one)
            images = {each["image"] for each in pod["containers"] + pod.get("initContainers", [])}
            assert images == {f"here:5000/x@{digest}"}
            assert pod["imagePullSecrets"] == [{"name": "registry"}]


def test_the_store_is_in_a_volume_that_outlives_the_release_or_in_a_claim_that_is_there(chart: Chart) -> None:
    made = _by_kind(chart.renders(_COMBINATIONS["class and size"] | {"job": {"enabled": True}}))
    (claim,) = made["StatefulSet"]["spec"]["volumeClaimTemplates"]
    assert claim["spec"] == made["PersistentVolumeClaim"]["spec"]
    assert claim["spec"]["storageClassName"] == "fast"
    assert claim["spec"]["resources"] == {"requests": {"storage": "1Ti"}}
    made = _by_kind(chart.renders(_COMBINATIONS["existing claim"] | {"job": {"enabled": True}}))
    assert "PersistentVolumeClaim" not in made
    assert "volumeClaimTemplates" not in made["StatefulSet"]["spec"]
    for kind in ("StatefulSet", "Job"):
        assert _pod(made[kind])["volumes"][0] == {"name": "home", "persistentVolumeClaim": {"claimName": "mine"}}


def test_a_remote_comes_with_its_secret_as_variables_and_with_the_signing_key(chart: Chart) -> None:
    values = _COMBINATIONS["remote and job without storage"]
    assert chart.renders(values | {"storage": {"enabled": False, "existingClaim": "mine"}}) == chart.renders(values)
    made = _by_kind(chart.renders(values))
    assert "PersistentVolumeClaim" not in made
    for kind in ("StatefulSet", "Job"):
        environment, pod = _environment(made[kind]), _pod(made[kind])
        (container,), volumes = pod["containers"], {one["name"]: one for one in pod["volumes"]}
        assert environment["GPUCKPT_REMOTE"] == "s3://bucket/ann"
        assert container["envFrom"] == [{"secretRef": {"name": "s3"}}]
        assert volumes["home"] == {"name": "home", "emptyDir": {}}
        assert volumes["keys-secret"]["secret"]["secretName"] == "keys"
        assert {"name": "keys", "mountPath": str(Path(environment["GPUCKPT_KEYS"]).parent)} in container["volumeMounts"]
        assert "keys-secret" not in {mount["name"] for mount in container["volumeMounts"]}


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user takes root")
def test_the_signing_key_of_the_secret_is_one_that_its_user_can_sign_with(chart: Chart, own_folder: Path) -> None:
    made = _by_kind(chart.renders(_COMBINATIONS["remote and job without storage"]))
    (init,) = _pod(made["StatefulSet"])["initContainers"]
    told = Path(_environment(made["StatefulSet"])["GPUCKPT_KEYS"])
    ours = OwnKey(own_folder / "ours").public()
    # As the kubelet mounts an emptyDir and a Secret.
    keys, secret = own_folder / "keys", own_folder / "secret"
    keys.mkdir()
    keys.chmod(0o777)
    (secret / "..2026").mkdir(parents=True)
    (secret / "..data").symlink_to("..2026")
    shutil.copy(own_folder / "ours" / "signing.key", secret / "..2026")
    (secret / "..2026" / "signing.key").chmod(0o644)
    (secret / "signing.key").symlink_to("..data/signing.key")
    user, group = (str(init["securityContext"][name]) for name in ("runAsUser", "runAsGroup"))
    become = ["setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups", "--inh-caps=-all"]
    command = [word.replace("/keys/", f"{keys}/").replace("/secret/", f"{secret}/") for word in init["command"]]
    for _ in range(2):  # a pod's init containers may be run again
        subprocess.run([*become, *command], check=True)
    own = keys / told.name
    found = {path.name: (path.stat().st_uid, path.stat().st_mode & 0o777) for path in (own, *own.iterdir())}
    assert found == {own.name: (1000, 0o700), "signing.key": (1000, 0o600)}
    os.setegid(int(group))
    os.seteuid(int(user))
    try:
        assert OwnKey(own).public() == ours
    finally:
        os.seteuid(0)
        os.setegid(0)


def test_the_notebooks_settings_and_others(chart: Chart) -> None:
    more = [{"name": "GPUCKPT_SLEEP_AFTER", "value": "30m"}]
    notebook = {"existingSecret": "mine", "hibernateOn": "stop,cull", "resume": "ask", "startupSeconds": 600}
    values = {"notebook": notebook, "extraEnv": more, "gracePeriod": 600, "hibernationDeadline": 500}
    made = _by_kind(chart.renders(values | {"serviceAccountName": "lab", "job": {"enabled": True}}))
    environment, pod = _environment(made["StatefulSet"]), _pod(made["StatefulSet"])
    assert environment["GPUCKPT_HIBERNATE_ON"] == "stop,cull"
    assert environment["GPUCKPT_HIBERNATE_DEADLINE"] == "500"
    assert environment["GPUCKPT_RESUME"] == "ask"
    assert [volume["secret"]["secretName"] for volume in pod["volumes"]] == ["mine"]
    probe = pod["containers"][0]["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 600
    for kind in ("StatefulSet", "Job"):
        assert _pod(made[kind])["terminationGracePeriodSeconds"] == 600
        assert _pod(made[kind])["serviceAccountName"] == "lab"
        assert _environment(made[kind])["GPUCKPT_SLEEP_AFTER"] == "30m"


def test_the_jobs_command_is_passed_on_as_it_is(chart: Chart) -> None:
    command = _COMBINATIONS["job alone"]["job"]["command"]
    (container,) = _pod(_by_kind(chart.renders(_COMBINATIONS["job alone"]))["Job"])["containers"]
    assert container["args"] == ["jupyter", "gpuckpt", "run", "train", "--", *command]


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"hibernationDeadline": 120}, "set gracePeriod to 140 or more, or hibernationDeadline to less than 120"),
        ({"gracePeriod": 30}, "hibernationDeadline (100 s) has to be shorter than gracePeriod (30 s)"),
        ({"job": {"enabled": True, "name": "lab"}}, "set job.name to another name"),
        ({"storage": {"enabled": False}}, "Set remote.url, or storage.enabled=true"),
        ({"storage": {"enabled": False}, "remote": {"url": "s3://bucket/ann"}}, "Set remote.keysSecret"),
        ({"remote": {"url": "sftp://ann:secret@host/x"}}, "as GPUCKPT_REMOTE, and leave remote.url empty"),
        ({"remote": {"url": "https://host/x?signature=0"}}, "as GPUCKPT_REMOTE, and leave remote.url empty"),
        ({"extraEnv": [{"name": "GPUCKPT_HIBERNATE_DEADLINE", "value": "500"}]}, "set hibernationDeadline in place of"),
        (
            {"extraEnv": [{"name": "GPUCKPT_REMOTE", "value": "s3://b/x"}]},
            "set remote.url (or remote.existingSecret) in",
        ),
        ({"extraEnv": [{"name": "JUPYTER_TOKEN", "value": "secret"}]}, "set notebook.existingSecret in place of"),
        ({"gpus": "1"}, "gpus"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_with_what_to_do(chart: Chart, values: dict[str, Any], why: str) -> None:
    with pytest.raises(Refused, match=re.escape(why)) as refused:
        chart.renders(values)
    assert "secret" not in str(refused.value).replace("remote.existingSecret", "")


def test_a_job_alone_has_no_deadline_but_the_grace_period(chart: Chart) -> None:
    (job,) = (one for one in chart.renders(_COMBINATIONS["job alone"] | {"gracePeriod": 30}) if one["kind"] == "Job")
    assert _pod(job)["terminationGracePeriodSeconds"] == 30


def test_a_user_in_the_remotes_address_is_no_secret(chart: Chart) -> None:
    made = _by_kind(chart.renders({"remote": {"url": "sftp://ann@host:22/x"}}))
    assert _environment(made["StatefulSet"])["GPUCKPT_REMOTE"] == "sftp://ann@host:22/x"


def test_the_pages_commands_make_what_they_say(chart: Chart) -> None:
    section = _PAGE.read_text().partition("\n## With Helm\n")[2].partition("\n## ")[0]
    blocks = "".join(re.findall(r"^```sh\n(.*?)^```", section, re.MULTILINE | re.DOTALL))
    lines = [shlex.split(line, comments=True) for line in blocks.replace("\\\n", "").splitlines()]
    commands = [line[1:] for line in lines if line[:1] == ["helm"]]
    assert [command[0] for command in commands] == ["install", "upgrade"]
    for command in commands:
        _, release, folder, *words = command
        assert _ROOT / folder == CHART
        words = [word for word in words if word != "--reuse-values"]
        made = _by_kind(chart.renders(None, *words, release=release))
        for one in made.values():
            kubernetes_validate.validate(one, "1.34", strict=True)
        assert made["StatefulSet"]["metadata"]["name"] == "lab"
    assert _pod(made["StatefulSet"])["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 1


@pytest.mark.parametrize("name", _COMBINATIONS)
def test_the_notes_say_what_is_to_be_done_next(chart_with_notes: Chart, name: str) -> None:
    values = _COMBINATIONS[name]
    text = chart_with_notes.notes(values)
    made = _by_kind(chart_with_notes.renders(values))
    assert ("kubectl create secret generic lab -n default" in text) == ("StatefulSet" in made)
    assert ("kubectl delete job train" in text) == ("Job" in made)
    has_volume = "volumeClaimTemplates" in str(made) or "PersistentVolumeClaim" in made
    assert ("The release's volumes" in text) == has_volume
    assert ("CreateContainerError" in text) == ("DaemonSet" not in made and len(made) > 0)
    assert "deploy/kubernetes/jupyterhub/values.yaml" in text
    assert all(len(line) <= 125 for line in text.splitlines())


@pytest.mark.skipif(shutil.which("helm") is None, reason="helm is not on the PATH")
def test_helm_finds_nothing_wrong() -> None:
    done = subprocess.run(["helm", "lint", "--strict", str(CHART)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
