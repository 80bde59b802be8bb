"""The Littlest JupyterHub's own code, with our plugin: users that it makes have kernels that outlive their servers.

Its installer fetches an installer of Miniforge from the net, and is not run; what it calls of plugins is. It is in no
package index: `make test-hub LITTLEST_JUPYTERHUB=FOLDER` has its source installed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from booted import BootedMachine
from hub import RECIPE, Hub
from networks import in_network_of
from notebooks import wait_until
from traitlets.config import Config

from jupyter_gpuckpt import settings
from jupyter_gpuckpt.machine import littlest_jupyterhub

pytest.importorskip("tljh", reason="The Littlest JupyterHub is not installed")

_BEGIN = "import os, pwd; secret = os.urandom(4).hex(); print(secret, pwd.getpwuid(os.getuid()).pw_name)"
_INSTALL = """
import json
from tljh import installer, utils
installer.ensure_usergroups()
plugins = utils.get_plugin_manager()
print(json.dumps(plugins.hook.tljh_extra_user_pip_packages()))
plugins.hook.tljh_post_install()
"""
_RECIPE = """
import os
os.environ["TLJH_INSTALL_PREFIX"] = {prefix!r}
import tljh
load_subconfig(os.path.join(os.path.dirname(tljh.__file__), "jupyterhub_config.py"))
c = get_config()
"""
_CONFIG = """
c.JupyterHub.proxy_class = "configurable-http-proxy"
c.JupyterHub.spawner_class = "tljh.user_creating_spawner.UserCreatingSpawner"
c.JupyterHub.cleanup_servers = True
"""


@dataclass
class _Place:
    folder: Path
    entering: list[str]
    environment: dict[str, str]


@pytest.fixture
def booted() -> Iterator[BootedMachine]:
    machine = BootedMachine.boot_or_skip()
    yield machine
    machine.close()


def test_the_plugin_has_what_our_recipe_has() -> None:
    ours, theirs = Config(), Config()
    littlest_jupyterhub.tljh_custom_jupyterhub_config(ours)
    exec(compile(RECIPE.read_text(), str(RECIPE), "exec"), {"get_config": lambda: theirs})
    for of in ("Spawner", "SystemdSpawner"):
        assert _plain(ours[of]) == _plain(theirs[of])


def _plain(config: Config) -> dict[str, Any]:
    return {name: value.to_dict() for name, value in config.items()}


def test_a_new_user_s_kernel_outlives_its_server(booted: BootedMachine) -> None:
    prefix = booted.folder / "tljh"
    (prefix / "config").mkdir(parents=True)
    (prefix / "state").mkdir()
    (prefix / "user").symlink_to(sys.prefix)
    (booted.folder / "home").mkdir()
    assert booted.as_root("useradd", "--defaults", f"--base-dir={booted.folder / 'home'}").returncode == 0
    criu = {"GPUCKPT_CRIU_PREFIX": str(settings.criu_prefix())}
    variables = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "TLJH_INSTALL_PREFIX": str(prefix), **criu}
    done = booted.as_root(sys.executable, "-c", _INSTALL, environment=variables)
    assert (done.returncode, done.stderr) == (0, "")
    ((package,),) = json.loads(done.stdout)
    assert package.startswith(("jupyter_gpuckpt==", "jupyter_gpuckpt @ "))
    place = _Place(booted.folder, booted.entering, criu)
    with in_network_of(booted.first):
        hub = Hub(place, recipe=_RECIPE.format(prefix=str(prefix)), config=_CONFIG)
        try:
            alice = hub.start("alice")
            said = alice.run(_BEGIN)
            assert said.endswith(" jupyter-alice")
            hub.stop("alice")
            wait_until(lambda: not _processes_of_alice(booted), what="processes are left")
            alice = hub.start("alice")
            assert alice.run("print(secret, pwd.getpwuid(os.getuid()).pw_name)") == said
            assert "resumed from" in alice.run("%gpuckpt status")
        finally:
            hub.close()


def _processes_of_alice(booted: BootedMachine) -> str:
    return booted.as_root("ps", "-u", "jupyter-alice", "-o", "args=").stdout
