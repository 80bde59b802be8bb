"""The hooks that docs/configuration.md has for connections to other programs, as they stand there."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from job_programs import free_port
from notebooks import Notebook, StartKernel
from remote_servers import S3

PAGE = Path(__file__).parents[2] / "docs/configuration.md"


def hooks(package: str) -> str:
    (found,) = [code for code in re.findall("```python\n(.*?)```", PAGE.read_text(), re.S) if package in code]
    return str(found)


def saved_and_restored(notebook: Notebook, count: str) -> None:
    """Use it in the kernel that is saved, and in what is restored from that twice."""
    notebook.run("%gpuckpt save here")
    for _ in range(2):
        assert notebook.value(count) == "1"
        notebook.run("%gpuckpt restore here")
    assert notebook.value(count) == "1"


@pytest.fixture
def database(tmp_path: Path) -> Iterator[str]:
    """A PostgreSQL of nobody's, and where it is."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder == tmp_path or folder.name.startswith("pytest"):
            folder.chmod(0o755)
    data, port = tmp_path / "data", free_port("tcp")
    data.mkdir()
    as_nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    programs = max(Path("/usr/lib/postgresql").glob("*/bin"))
    subprocess.run(["chown", "65534:65534", data], check=True)
    subprocess.run([*as_nobody, programs / "initdb", "-D", data, "-A", "trust"], check=True, capture_output=True)
    words = [programs / "postgres", "-D", data, "-p", str(port), "-k", "", "-h", "127.0.0.1"]
    with subprocess.Popen([*as_nobody, *words], stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            assert any("ready to accept connections" in line for line in server.stderr)
            yield f"postgresql://nobody@127.0.0.1:{port}/postgres"
        finally:
            server.send_signal(signal.SIGINT)  # without waiting for its clients


def test_a_database(start: StartKernel, database: str) -> None:
    notebook = start(env={**os.environ, "DATABASE_URL": database})
    notebook.run(hooks("psycopg"))
    notebook.run("db.execute('create table words (word text)'); db.execute('insert into words values (1)')")
    saved_and_restored(notebook, "db.execute('select count(*) from words').fetchone()[0]")


def test_a_dask_cluster(start: StartKernel, tmp_path: Path) -> None:
    code = """if True:
        import time
        from distributed import LocalCluster
        if __name__ == "__main__":
            cluster = LocalCluster(n_workers=1, dashboard_address=None)
            print(cluster.scheduler_address, flush=True)
            time.sleep(600)
    """
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as cluster:
        try:
            assert cluster.stdout is not None
            notebook = start(env={**os.environ, "DASK_SCHEDULER": cluster.stdout.readline().strip()})
            notebook.run(hooks("distributed"))
            notebook.run("client.publish_dataset(one=client.scatter(1))")
            saved_and_restored(notebook, "client.get_dataset('one').result()")
        finally:
            cluster.terminate()


def test_an_object_store(start: StartKernel, s3: S3) -> None:
    bucket = s3.make_bucket("hooks")
    notebook = start(env={**os.environ, **s3.environment})
    notebook.run(hooks("s3fs"))
    notebook.run(f"s3.pipe('{bucket}/one', b'1')")
    saved_and_restored(notebook, f"s3.cat('{bucket}/one').decode()")
