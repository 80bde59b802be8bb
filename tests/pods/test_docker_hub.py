"""A real JupyterHub whose servers are containers without rights: DockerSpawner, by podman's API, which is Docker's."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from counting import COUNTING
from hub import Hub
from podman import MachinesBroker, Podman

import jupyter_gpuckpt

pytestmark = pytest.mark.timeout(1500)

_RECIPES = Path(jupyter_gpuckpt.__file__).parent / "recipes"
_IMAGE = "localhost/gpuckpt-hub"
_HERE = """
import os
from dockerspawner import DockerSpawner
os.environ["DOCKER_HOST"] = "unix://{api}"
class Here(DockerSpawner):
    # In the machine's own network, which is all that these tests have.
    async def get_ip_and_port(self):
        return "127.0.0.1", self.port
c.JupyterHub.spawner_class = Here
c.DockerSpawner.image, c.DockerSpawner.network_name, c.DockerSpawner.port = "{image}", "host", {port}
c.DockerSpawner.pull_policy, c.DockerSpawner.use_internal_ip = "never", True
c.Spawner.cmd = ["jupyterhub-singleuser"]
"""


@dataclass
class _Place:
    folder: Path
    entering: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)


@pytest.fixture
def hub(podman: Podman, tmp_path: Path) -> Iterator[Hub]:
    """A hub whose servers are containers, as our recipes have it."""
    podman.build(_IMAGE, extras="jupyterhub")
    broker, api = MachinesBroker(podman, _IMAGE), tmp_path / "api.sock"
    recipe = (_RECIPES / "jupyterhub_docker.py").read_text()
    for ours, here in {
        'grp.getgrnam("gpuckpt").gr_gid': str(broker.group),
        '"/run/gpuckpt":': f'"{broker.folder}":',
        # What Docker wants the content of, podman's API wants the path of.
        "{Path('/etc/jupyterhub/seccomp.json').read_text()}": str(podman.profile),
    }.items():
        assert ours in recipe
        recipe = recipe.replace(ours, here)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with podman.serves(api):
        own = _HERE.format(api=api, image=_IMAGE, port=port)
        recipes = (_RECIPES / "jupyterhub_config.py").read_text() + recipe
        hub = Hub(_Place(tmp_path), recipe=recipes, config=own)
        yield hub
        hub.close()
    podman.remove_all()
    podman.does("volume", "rm", "--all", "--force")
    broker.close()


def test_a_server_in_a_container_without_rights_has_its_kernels_back_in_the_next(hub: Hub, podman: Podman) -> None:
    alice = hub.start("alice")
    secret, _ = alice.run(COUNTING).split()
    assert "CapBnd:\t0000000000000000" in alice.run("print(open('/proc/1/status').read())")
    counted = int(alice.run("print(counted[0])"))
    for _ in range(2):
        hub.stop("alice")
        assert "jupyter-alice" not in podman.does("ps", "--all", "--format", "{{.Names}}")
        alice = hub.start("alice")
        came, now = alice.run("print(secret, counted[0])").split()
        assert came == secret
        assert int(now) > counted
        assert "resumed from" in alice.run("%gpuckpt status")
