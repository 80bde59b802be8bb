"""`doctor --for slurm` on a node of a real Slurm, as a user who has the broker."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from slurm_cluster import NODES, Cluster

_COMMAND = [str(Path(sys.executable).with_name("jupyter-gpuckpt")), "doctor", "--json", "--for", "slurm"]


def test_the_recipe_s_cluster_is_good_and_says_which_slurm_answers(cluster: Cluster) -> None:
    told = json.loads(cluster.hosts[NODES[0]].does(*_COMMAND, user="alice", check=False).partition("\n}\n")[0] + "\n}")
    checks = {one["name"]: one for one in told["checks"]}
    assert told["works"], checks
    assert "Slurm 2" in checks["scontrol"]["found"]
    wanted = ("proctrack", "job_container", "KillWait", "requeue", "preemption", "signal before", "GraceTime")
    assert [name for name in wanted if not checks[name]["ok"]] == []
    assert checks["KillWait"]["found"] == "120 s"
