# JupyterHub with DockerSpawner: servers in containers without any right; append it after jupyterhub_config.py's recipe
#
# Where the containers run, the machine's broker saves and restores their kernels:
#     jupyter gpuckpt broker install --containers
#     jupyter gpuckpt recipe seccomp.json > /etc/jupyterhub/seccomp.json
# The image has jupyter_gpuckpt, JupyterHub, and a user with the number 1000 whose home is /home/jovyan.
import grp
from pathlib import Path

c = get_config()

c.JupyterHub.spawner_class = "dockerspawner.DockerSpawner"
# From the stop to the end of a container: more than GPUCKPT_HIBERNATE_DEADLINE. Docker's own is 10 s: kernels are lost.
c.DockerSpawner.extra_create_kwargs = {"user": "1000:1000", "working_dir": "/home/jovyan", "stop_timeout": 120}
c.DockerSpawner.client_kwargs = {"timeout": 180}
c.DockerSpawner.remove = True
# Home and store outlive the container. The kernels' own folder must not: the image's is in /tmp.
c.DockerSpawner.volumes = {
    "jupyter-{username}": "/home/jovyan",
    "/run/gpuckpt": {"bind": "/run/gpuckpt", "mode": "ro"},
}
c.DockerSpawner.extra_host_config = {
    "cap_drop": ["ALL"],
    "group_add": [str(grp.getgrnam("gpuckpt").gr_gid)],
    "security_opt": ["no-new-privileges", f"seccomp={Path('/etc/jupyterhub/seccomp.json').read_text()}"],
}
