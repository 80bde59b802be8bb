"""Ray on one machine, started by a cell."""

from __future__ import annotations

from pathlib import Path

from notebooks import Notebook

CLUSTER = """
import os, time
import numpy, ray
ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100_000_000, log_to_driver=False)
@ray.remote
class Counter:
    def __init__(self):
        self.count = 0
    def more(self):
        self.count += 1
        return self.count
@ray.remote
def once_open(gate, n):
    while not os.path.exists(gate):
        time.sleep(0.05)
    return n + 1
counter = Counter.remote()
ray.get(counter.more.remote())
stored = ray.put(numpy.arange(1_000_000))
"""


def test_actors_objects_and_tasks_in_flight_are_there(notebook: Notebook, tmp_path: Path) -> None:
    gate = tmp_path / "open"
    notebook.run(CLUSTER, timeout=180)
    notebook.run(f"tasks = [once_open.options(num_cpus=0.5).remote({str(gate)!r}, n) for n in range(2)]")
    notebook.run("%gpuckpt save here", timeout=120)
    for _ in range(2):
        assert "TCP" not in notebook.run("%gpuckpt restore here", timeout=120).text
        assert notebook.value("ray.wait(tasks, timeout=0.5)[0]") == "[]"
        gate.touch()
        assert notebook.value("ray.get(tasks, timeout=60)") == "[1, 2]"
        gate.unlink()
        assert notebook.value("ray.get(counter.more.remote(), timeout=60), ray.get(stored).sum()") == "2 499999500000"
        assert notebook.value("ray.get(once_open.remote('/', 41), timeout=60)") == "42"
    notebook.run("ray.shutdown()")
