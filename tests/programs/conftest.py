"""Says with which versions the programs were tried."""

from __future__ import annotations

import os
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

PACKAGES = ("accelerate", "grpcio", "ipyparallel", "mpi4py", "psycopg", "pyspark", "ray", "redis", "torch")
PROGRAMS = ("redis-server --version", "postgres --version", "mpirun --version", "java -version")


def pytest_report_header() -> list[str]:
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            found.append(f"{name} is not installed: its tests fail")
    path = os.pathsep.join([os.environ["PATH"], *map(str, Path("/usr/lib/postgresql").glob("*/bin"))])
    for command in PROGRAMS:
        program, option = command.split()
        if (at := shutil.which(program, path=path)) is None:
            found.append(f"{program} is not installed: its tests fail")
            continue
        said = subprocess.run([at, option], capture_output=True, text=True)
        found.append((said.stdout or said.stderr).splitlines()[0])
    return ["programs: " + "; ".join(found)]
