"""Forks of kernels with processes below them: pools of every kind work on in the copy, and are its own."""

from __future__ import annotations

from copies import forking
from notebooks import Notebook

_POOLS = """
%%writefile {folder}/work_of_children.py
import os
from multiprocessing import shared_memory

def add(name, number):
    block = shared_memory.SharedMemory(name)
    block.buf[0] += number
    block.close()
    return os.getpid()

def whoami(_):
    return os.getpid()
"""

_START = """
import multiprocessing, os, subprocess, sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import shared_memory
import joblib
sys.path.insert(0, {folder!r}); os.environ["PYTHONPATH"] = {folder!r}
from work_of_children import add, whoami

block = shared_memory.SharedMemory(create=True, size=16)
pools = {{how: multiprocessing.get_context(how).Pool(1) for how in ("fork", "spawn", "forkserver")}}
executor = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
loky = joblib.Parallel(n_jobs=2)
cat = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)

def everybody():
    "Have every worker add one to the block; return the workers, and what the block says."
    workers = [pool.apply(add, (block.name, 1)) for pool in pools.values()]
    workers.append(executor.submit(add, block.name, 1).result())
    cat.stdin.write("hello\\n"); assert cat.stdout.readline() == "hello\\n"
    return workers, block.buf[0]

def loky_works():
    return all(pid != os.getpid() for pid in loky(joblib.delayed(whoami)(n) for n in range(8)))

first = everybody(), loky_works()
"""


def test_pools_of_every_kind_work_on_in_a_copy_and_in_the_original(notebook: Notebook, tmp_path: object) -> None:
    notebook.run(_POOLS.format(folder=tmp_path).strip())
    notebook.run(_START.format(folder=str(tmp_path)), timeout=100)
    workers = notebook.value("first[0][0]")
    with forking() as fork:
        (copy,) = fork(notebook)
        for kernel in (copy, notebook, copy):
            kernel.run("workers, count = everybody()")
            assert kernel.value("workers") == workers, "these are the same workers, not new ones"
            assert kernel.value("loky_works()") == "True"
        assert [kernel.value("count") for kernel in (notebook, copy)] == ["8", "12"], "each has its own shared memory"
        # And new ones can be started.
        born = "with multiprocessing.get_context('forkserver').Pool(1) as pool: print(pool.apply(whoami, (0,)) > 0)"
        assert [kernel.run(born).text for kernel in (notebook, copy)] == ["True", "True"]
