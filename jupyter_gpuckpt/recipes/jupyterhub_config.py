# JupyterHub: kernels are hibernated when a server stops or is culled, and are back when their notebook is opened
#
# Append it to your jupyterhub_config.py. It needs, where the hub runs:
#     pip install jupyterhub-idle-culler
# and, where the servers run, jupyter_gpuckpt. Users without root need the broker there:
#     jupyter gpuckpt broker install
#     usermod -aG gpuckpt alice
import sys

c = get_config()

c.Spawner.environment.update(
    {
        # When a server stops, its kernels are hibernated; so are those that Jupyter's own culler finds idle.
        "GPUCKPT_HIBERNATE_ON": "cull,stop",
        # A notebook that is opened starts with the kernel that it had. With "ask", JupyterLab asks.
        "GPUCKPT_RESUME": "auto",
        # How many seconds all kernels of a server may take together: less than its spawner allows (below).
        "GPUCKPT_HIBERNATE_DEADLINE": "110",
        # How large the snapshots of a user may become. What does not fit is not saved.
        "GPUCKPT_STORE_QUOTA": "100G",
    }
)

# How many seconds a server has to stop before it is killed. Spawners that you do not use ignore their line.
c.LocalProcessSpawner.interrupt_timeout = 120
c.KubeSpawner.delete_grace_period = 120  # with the default, 1, kernels are lost
c.DockerSpawner.extra_create_kwargs.update({"stop_timeout": 120})  # with Docker's own, 10, kernels are lost
c.SystemdSpawner.unit_extra_properties.update({"KillMode": "mixed", "TimeoutStopSec": "120"})

# Servers that nobody has used for an hour are stopped. Leave this out if you have a culler already.
c.JupyterHub.services.append(
    {"name": "idle-culler", "command": [sys.executable, "-m", "jupyterhub_idle_culler", "--timeout=3600"]}
)
c.JupyterHub.load_roles.append(
    {
        "name": "idle-culler",
        "services": ["idle-culler"],
        "scopes": ["list:users", "read:users:activity", "read:servers", "delete:servers"],
    }
)
