"""A Dask cluster on one machine is part of the kernel that started it, and comes back with it."""

from __future__ import annotations

from pathlib import Path

from notebooks import Notebook

CLUSTER = """
import os, time
import dask.bag
from distributed import Client, LocalCluster
cluster = LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None)
client = Client(cluster)
persisted = dask.bag.from_sequence(range(1000), npartitions=4).map(lambda n: n * n).persist()
def once_open(gate, n):
    while not os.path.exists(gate):
        time.sleep(0.05)
    return n + 1
"""


def test_futures_in_flight_and_a_persisted_collection_are_there_after_a_restore(
    notebook: Notebook, tmp_path: Path
) -> None:
    gate = tmp_path / "open"
    notebook.run(CLUSTER)
    notebook.run(f"futures = client.map(lambda n: once_open({str(gate)!r}, n), range(4)); workers = client.nthreads()")
    assert notebook.value("len(client.who_has(persisted))") == "4"
    notebook.run("%gpuckpt save here")
    for _ in range(2):
        assert "TCP" not in notebook.run("%gpuckpt restore here").text
        assert notebook.value("{future.status for future in futures}") == "{'pending'}"
        gate.touch()
        assert notebook.value("client.gather(futures), client.nthreads() == workers") == "[1, 2, 3, 4] True"
        assert notebook.value("len(client.who_has(persisted)), persisted.sum().compute()") == "4 332833500"
        gate.unlink()


def test_joblib_goes_on_by_a_cluster_also_when_its_workers_have_ended_and_removed_their_locks(
    notebook: Notebook, tmp_path: Path
) -> None:
    gate = tmp_path / "open"
    notebook.run(CLUSTER)
    notebook.run(f"""
        import threading, joblib
        def work():
            with joblib.parallel_config("dask"):
                answers.append(joblib.Parallel()(joblib.delayed(once_open)({str(gate)!r}, n) for n in range(6)))
        answers, worker = [], threading.Thread(target=work)
        worker.start()
    """)
    notebook.run("while not any(client.processing().values()): time.sleep(0.01)")
    notebook.run("%gpuckpt save here")
    for _ in range(2):
        notebook.manager.restart_kernel(now=False)  # Dask ends its workers, and they delete what was theirs
        notebook.wait_for_ready()
        assert "TCP" not in notebook.run("%gpuckpt restore here").text
        assert notebook.value("worker.is_alive(), answers") == "True []"
        gate.touch()
        assert notebook.value("worker.join(150), answers") == "None [[1, 2, 3, 4, 5, 6]]"
        gate.unlink()


def test_a_cluster_of_threads_and_its_dashboard_go_on(notebook: Notebook, tmp_path: Path) -> None:
    gate = tmp_path / "open"
    notebook.run(CLUSTER.replace("processes=True, dashboard_address=None", 'processes=False, dashboard_address=":0"'))
    notebook.run(f"""
        import urllib.request
        futures = client.map(lambda n: once_open({str(gate)!r}, n), range(4))
        dashboard = "http://127.0.0.1:%d/health" % cluster.scheduler.services["dashboard"].port
    """)
    notebook.run("%gpuckpt save here")
    for _ in range(2):
        assert "TCP" not in notebook.run("%gpuckpt restore here").text
        assert notebook.value("urllib.request.urlopen(dashboard).read()") == "b'ok'"
        gate.touch()
        assert notebook.value("client.gather(futures), persisted.sum().compute()") == "[1, 2, 3, 4] 332833500"
        gate.unlink()
