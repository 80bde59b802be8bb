"""ipyparallel: a controller and engines that a cell started."""

from __future__ import annotations

from pathlib import Path

from notebooks import Notebook

CLUSTER = """
import ipyparallel
cluster = ipyparallel.Cluster(n=2)
client = cluster.start_and_connect_sync()
engines = client[:]
engines["square"] = lambda n: n * n
engines.execute("import os; mine = os.getpid()", block=True)
pids = engines["mine"]
def once_open(gate, n):
    import os, time
    while not os.path.exists(gate):
        time.sleep(0.05)
    return square(n)
"""


def test_engines_keep_their_variables_and_end_what_they_were_doing(notebook: Notebook, tmp_path: Path) -> None:
    gate = tmp_path / "open"
    notebook.run(CLUSTER)
    notebook.run(f"answers = engines.map_async(once_open, [{str(gate)!r}] * 4, range(4))")
    notebook.run("%gpuckpt save here")
    for _ in range(2):
        assert "TCP" not in notebook.run("%gpuckpt restore here").text
        assert notebook.value("answers.ready()") == "False"
        gate.touch()
        assert notebook.value("answers.get(60)") == "[0, 1, 4, 9]"
        gate.unlink()
        assert notebook.value("engines['mine'] == pids, engines.apply_sync(lambda n: square(n), 12)") == (
            "True [144, 144]"
        )
    notebook.run("cluster.stop_cluster_sync()")
