"""`jupyter gpuckpt sleep`, `wake` and `awake`: a real kernel, from outside."""

from __future__ import annotations

from command_line import Cli
from notebooks import Notebook


def test_a_kernel_sleeps_and_wakes_from_outside(cli: Cli, notebook: Notebook) -> None:
    kernel_id = notebook.manager.provisioner.kernel_id
    notebook.run("x = 1")
    slept = cli("sleep", kernel_id)
    assert (slept.status, slept.err) == (0, "")
    assert slept.out.startswith("Asleep in ")
    assert cli("sleep", kernel_id, "--json").json["already"] is True
    (listed,) = cli("kernels", "--json").json["kernels"]
    assert (listed["state"], listed["pinned"]) == ("sleeping", False)
    assert listed["gpu"] == {"held": 0, "freed": 0, "host_memory": 0}
    assert cli("wake", kernel_id, "--json").json["already"] is False
    assert "Already awake" in cli("wake", kernel_id).out
    assert notebook.run("print(x)").shown == ["1\n"]
    assert cli("awake", kernel_id, "on").out == "It stays awake.\n"
    assert cli("kernels", "--json").json["kernels"][0]["pinned"] is True
    assert cli("awake", kernel_id, "off", "--json").json == {"pinned": False}
    assert cli("awake", kernel_id, "perhaps").status == 2
    assert cli("sleep", "nobody").status == 3
    assert cli("autosleep", kernel_id, "15m").out == "It goes to sleep when idle for 15 min.\n"
    assert cli("kernels", "--json").json["kernels"][0]["sleep_after"] == 900
    assert cli("autosleep", kernel_id, "off", "--json").json == {"sleep_after": None}
    refused = cli("autosleep", kernel_id, "soon")
    assert (refused.status, "'soon' is neither a time" in refused.err) == (2, True)
