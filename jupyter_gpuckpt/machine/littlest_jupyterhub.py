"""A plugin of The Littlest JupyterHub: its users' kernels are hibernated when their servers stop, and resumed.

Its installer finds it by the entry point group ``tljh`` (``--plugin jupyter_gpuckpt``), its hub each time it starts. It
alone imports this, and has `pluggy`.
"""

from __future__ import annotations

import contextlib
import grp
import json
import logging
import os
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import pluggy

from ..linux.root_only import SYSTEM_PATH

__all__ = ["tljh_custom_jupyterhub_config", "tljh_extra_user_pip_packages", "tljh_new_user_create", "tljh_post_install"]

log = logging.getLogger("tljh")

_PACKAGE = "jupyter_gpuckpt"
_GROUP = "gpuckpt"
"""The broker's group, as `broker install` makes it."""
_USERS = "jupyterhub-users"
"""The group of all users of such a hub."""

_hook = pluggy.HookimplMarker("tljh")


@_hook
def tljh_extra_user_pip_packages() -> list[str]:
    """Return what the environment needs in which the servers run: this package, as the hub's has it."""
    found = metadata.distribution(_PACKAGE)
    source = json.loads(
        found.read_text("direct_url.json") or "{}"
    )  # PEP 610: what it was installed from, but for an index
    if "url" not in source:
        return [f"{_PACKAGE}=={found.version}"]
    vcs = source.get("vcs_info")
    return [f"{_PACKAGE} @ " + (f"{vcs['vcs']}+{source['url']}@{vcs['commit_id']}" if vcs else source["url"])]


@_hook
def tljh_custom_jupyterhub_config(c: Any) -> None:
    """Have servers hibernate their kernels, and give them the time for it; as the recipe of JupyterHub's has it."""
    c.Spawner.environment.update(
        {
            "GPUCKPT_HIBERNATE_ON": "cull,stop",
            "GPUCKPT_RESUME": "auto",
            "GPUCKPT_HIBERNATE_DEADLINE": "110",
            "GPUCKPT_STORE_QUOTA": "100G",
        }
    )
    c.SystemdSpawner.unit_extra_properties.update({"KillMode": "mixed", "TimeoutStopSec": "120"})


@_hook
def tljh_post_install() -> None:
    """Install the broker, and have it serve the users that there are already."""
    from tljh.config import USER_ENV_PREFIX

    if _run(str(Path(USER_ENV_PREFIX, "bin", "jupyter")), "gpuckpt", "broker", "install"):
        with contextlib.suppress(KeyError):  # there are none
            for user in grp.getgrnam(_USERS).gr_mem:
                tljh_new_user_create(user)


@_hook
def tljh_new_user_create(username: str) -> None:
    """Have the broker serve a new user."""
    _run("usermod", "--append", "--groups", _GROUP, username)


def _run(*words: str) -> bool:
    """Run a command; where it fails that is told, and the hub goes on without it: kernels are plain ones then."""
    try:
        environment = {**os.environ, "PATH": SYSTEM_PATH}
        done = subprocess.run(words, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        why = "" if done.returncode == 0 else done.stderr.strip() or f"status {done.returncode}"
    except OSError as e:
        why = str(e)
    if why:
        log.error("jupyter_gpuckpt: kernels cannot be saved: `%s` failed: %s", " ".join(words), why)
    return not why
