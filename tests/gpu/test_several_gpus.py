"""Kernels that see several GPUs, and use one or two: all of it is parked, comes back, and copies between GPUs go on."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from gpu_memory import DIGEST, GIB, leaving_free, used_by_gpu
from job_programs import Job, program, run
from keeper_faults import Asked
from notebooks import Notebook, StartKernel, wait_until
from test_gpu_sleep import ask, is_asleep, says

from jupyter_gpuckpt import settings
from jupyter_gpuckpt.store import Store

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240), pytest.mark.shared_kernel]


_ONE = "import torch\n{digest}x = torch.randint(0, 2**62, (2**27,), device='cuda:{gpu}'); d = digest(x)\n"

# Copies of all of it, and kernels on one GPU that read what is on the other.
PEERS = """
import torch
{digest}
torch.manual_seed(0)
x = torch.randint(0, 2**40, ({size},), device='cuda:0'); y = x.to('cuda:1')
small = [torch.full((1000,), n, device=f'cuda:{{n}}') for n in (0, 1)]
def everything(): return digest(x, y, *small)
d = everything()
def check(): return everything() == d
def step():
    strided = x.view(1024, -1)[::2, ::3].to('cuda:1').sum().item()
    back = y.to('cuda:0')
    return strided, bool((back == x).all()), small[0].to('cuda:1').add(small[1]).sum().item()
"""
PARALLEL = """
import os; os.environ['PYTORCH_CUDA_ALLOC_CONF'] = '{segments}'
import torch
{digest}
torch.manual_seed(0); torch.use_deterministic_algorithms(True); os.environ['CUBLAS_WORKSPACE_CONFIG'] = ':4096:8'
layers = [torch.nn.Linear(4096, 4096) for _ in range(4)]
model = torch.nn.DataParallel(torch.nn.Sequential(*layers).cuda(), device_ids=[0, 1])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
batch = torch.randn(64, 4096, device='cuda'); other = torch.randn(2**27, device='cuda:1')
def everything():
    moments = [v for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)]
    return digest(*model.parameters(), *moments, other)
def step():
    loss = ((model(batch) - batch) ** 2).mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    return loss.item()
step(); step()
d = everything()
def check(): return everything() == d
"""
JOB = """
import sys, time
print("first", step(), step(), flush=True)
d = everything()
while not os.path.exists(sys.argv[1]): time.sleep(0.01)
print("then", check(), step(), step(), flush=True)
"""
JAX = """
import os; os.environ.update(XLA_PYTHON_CLIENT_PREALLOCATE="false", XLA_PYTHON_CLIENT_MEM_FRACTION="0.08")
import jax, jax.numpy as jnp, numpy as np
mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("gpu",))
shards = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("gpu"))
a = jax.device_put(jax.random.normal(jax.random.key(0), (2**13, 2**14)), shards)
f = jax.jit(lambda a: (a / 2 + a.sum() / a.size).sum())
first = float(f(a)); saved = np.asarray(a).tobytes()
def check(): return np.asarray(a).tobytes() == saved
def step(): return float(f(a)), float(jax.device_put(a[:100], jax.devices()[1]).sum())
"""
# What both GPUs send each other, NCCL's way, and what they have after it.
NCCL = """
import torch
{digest}
torch.manual_seed(0)
parts = [torch.randn(2**26, device=f'cuda:{{gpu}}') for gpu in (0, 1)]
small = [torch.randn(1000, device=f'cuda:{{gpu}}') for gpu in (0, 1)]
def reduced(tensors):
    tensors = [each.clone() for each in tensors]
    torch.cuda.nccl.all_reduce(tensors)
    for gpu in (0, 1): torch.cuda.synchronize(gpu)
    return digest(*tensors)
def step(): return reduced(parts), reduced(small)
first = step(); d = digest(*parts, *small)
def check(): return digest(*parts, *small) == d
"""
ACCESS = """
import ctypes, sys
from jupyter_gpuckpt.kernel import devices
class Place(ctypes.Structure): _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]
def access():
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch: torch.cuda.empty_cache()
    if cupy: cupy.get_default_memory_pool().free_all_blocks()
    cuda, flags, found = ctypes.CDLL("libcuda.so.1"), ctypes.c_ulonglong(), []
    for address, size in sorted(devices.allocations().items()):
        asked = [cuda.cuMemGetAccess(ctypes.byref(flags), ctypes.byref(Place(1, gpu)), ctypes.c_uint64(address))
                 or flags.value for gpu in (0, 1)]
        found.append((hex(address), size >> 10, *asked))
    return found
"""
"""What is mapped for the GPUs, but for what a save has given back, and what each may do with it."""
CUPY = """
import cupy
with cupy.cuda.Device(0): a = cupy.random.RandomState(1).randint(0, 1 << 30, 2**27, dtype=cupy.int64)
with cupy.cuda.Device(1): b = cupy.asarray(a); c = cupy.arange(2**27)
saved = [cupy.asnumpy(each).tobytes() for each in (a, b, c)]
def check(): return [cupy.asnumpy(each).tobytes() for each in (a, b, c)] == saved
def step():
    with cupy.cuda.Device(0): return int((cupy.asarray(c) + a).sum()), int((cupy.asarray(b) == a).all())
"""
PROGRAMS = {
    "peers": PEERS.format(digest=DIGEST, size=2**27 + 2**20),
    "parallel": PARALLEL.format(digest=DIGEST, segments=""),
    "segments": PARALLEL.format(digest=DIGEST, segments="expandable_segments:True"),
    "jax": JAX,
    "cupy": CUPY,
}


@pytest.fixture(autouse=True)
def two_gpus() -> None:
    if len(used_by_gpu()) != 2:
        pytest.skip(f"needs exactly two GPUs, and this machine has {len(used_by_gpu())}")


def parked(name: str) -> list[int]:
    """Return the bytes of a snapshot that were parked, by the number of the GPU."""
    found = Store(settings.store_dir()).get(name).cuda.get("parked") or []
    return [sum(sizes) for sizes in zip(*([size for _, size in one["places"]] for one in found), strict=True)]


def snapshots() -> set[str]:
    """Return the ids of all that there are."""
    return {one.id for one in Store(settings.store_dir()).list()}


def told(job: Job) -> list[str]:
    """Return what a job printed itself: libraries may warn beside it."""
    return [line for line in job.lines() if line.startswith(("first ", "then "))]


@pytest.mark.shared_kernel(False)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_on_two_gpus_goes_on_also_with_the_gpus_swapped(notebook: Notebook, name: str) -> None:
    notebook.run(PROGRAMS[name] + ACCESS, timeout=120)
    before = notebook.value("access()")
    notebook.run("%gpuckpt save here", timeout=60)
    assert min(parked("here")) >= GIB // 4
    assert notebook.value("access()") == before
    assert notebook.value("check()") == "True"
    straight_on = notebook.value("step(), step()")
    for where in ("", " --gpu 1,0", " --gpu 0,1"):
        notebook.run("%gpuckpt restore here" + where, timeout=60)
        if not where:
            assert notebook.value("access()") == before
        assert notebook.value("check()") == "True"
        assert notebook.value("step(), step()") == straight_on


@pytest.mark.shared_kernel(False)
@pytest.mark.parametrize("setting", ["", "NCCL_P2P_DIRECT_DISABLE=1", "NCCL_CUMEM_ENABLE=0"])
def test_nccl_in_one_process_works_on_whichever_way_it_takes(notebook: Notebook, setting: str) -> None:
    """By the other GPU's own memory, by buffers of NCCL's, and by memory that only `cudaMalloc` makes."""
    notebook.run((f"%env {setting}\n" if setting else "") + NCCL.format(digest=DIGEST) + ACCESS, timeout=120)
    before, access = notebook.value("step()"), notebook.value("access()")
    notebook.run("%gpuckpt save here", timeout=60)
    assert min(parked("here")) >= GIB // 4
    assert notebook.value("access()") == access
    assert notebook.value("check(), step()") == f"True {before}"
    notebook.run("[each.zero_() for each in parts]")
    notebook.run("%gpuckpt restore here", timeout=60)
    assert notebook.value("check(), step()") == f"True {before}"


@pytest.mark.parametrize("size", [2**20, 2**24, 2**28], ids=["8M", "128M", "2G"])
def test_two_gpus_with_access_to_each_other_come_back(notebook: Notebook, size: int) -> None:
    """However little they have, all is parked: the access is taken away and given back with it."""
    notebook.run(PEERS.format(digest=DIGEST, size=size), timeout=120)
    before = notebook.value("step()")
    notebook.run("%gpuckpt save here", timeout=120)
    assert min(parked("here")) >= 8 * size
    assert notebook.value("check(), step()") == f"True {before}"
    notebook.run("x.zero_(); y.zero_()")
    notebook.run("%gpuckpt restore here --gpu 1,0", timeout=120)
    assert notebook.value("check(), step()") == f"True {before}"


def test_large_allocations_of_the_driver_on_gpus_with_access_to_each_other_are_refused_beforehand(
    start: StartKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUCKPT_PARKING", "off")
    notebook = start()
    notebook.run(PROGRAMS["peers"], timeout=120)
    before = notebook.value("step()")
    assert "expandable_segments" in notebook.fails("%gpuckpt save here", timeout=120).text
    assert notebook.value("check(), step()") == f"True {before}"


@pytest.mark.parametrize("name", ["peers", "parallel"])
def test_a_job_on_two_gpus_goes_on_also_with_the_gpus_swapped(tmp_path: Path, name: str) -> None:
    gate = tmp_path / "gate"
    job = Job("two")
    job.start(sys.executable, program(tmp_path, "import os\n" + PROGRAMS[name] + JOB), str(gate))
    wait_until(lambda: told(job), 120, "the job has not taken its first steps")
    job.save("half")
    assert min(parked("half")) >= GIB // 4
    gate.touch()
    assert job.wait_for_end() == 0
    whole = told(job)
    assert whole[1].startswith("then True ")
    for where in ([], ["--gpu", "1,0"]):
        job.restore("half", *where)
        assert job.wait_for_end() == 0
        assert told(job) == whole


@pytest.mark.shared_kernel(False)
@pytest.mark.parametrize("gpu", [0, 1])
def test_a_program_on_one_of_two_gpus_is_parked_and_moves(notebook: Notebook, gpu: int) -> None:
    notebook.run(_ONE.format(digest=DIGEST, gpu=gpu), timeout=120)
    notebook.run("%gpuckpt save here", timeout=120)
    assert [size >= GIB for size in parked("here")] == [gpu == 0, gpu == 1]
    for where in ("", f" --gpu {1 - gpu}", " --lazy"):
        notebook.run("x.zero_()")
        notebook.run("%gpuckpt restore here" + where, timeout=120)
        assert notebook.value("digest(x) == d") == "True"
    # What is allocated from now on is on the other one, too.
    notebook.run(f"y = x.to('cuda:{1 - gpu}')")
    notebook.run("%gpuckpt save both", timeout=120)
    assert min(parked("both")) >= GIB
    assert notebook.value("bool((y.cpu() == x.cpu()).all()) and digest(x) == d") == "True"


def test_it_is_saved_in_the_middle_of_a_cell_that_copies_from_one_to_the_other(
    notebook: Notebook, tmp_path: Path
) -> None:
    begun, gate = tmp_path / "begun", tmp_path / "gate"
    notebook.run(PROGRAMS["peers"] + "from pathlib import Path; n, wrong, expected = 0, 0, step()", timeout=120)
    loop = f"while not Path({str(gate)!r}).exists(): n += 1; wrong += step() != expected; Path({str(begun)!r}).touch()"
    asked = Asked(notebook, loop)
    wait_until(begun.exists)
    ask(notebook, "save", name="middle")
    assert min(parked("middle")) > GIB
    gate.touch()
    assert asked.answer()["status"] == "ok"
    assert notebook.value("check(), wrong") == "True 0"
    notebook.run("x.zero_(); y.zero_(); n = -10**9")
    notebook.run("%gpuckpt restore middle", timeout=120)  # which has the rest of that loop run
    assert notebook.look("n > 0 and check() and not wrong") == "True"


IN_A_THREAD = """
import threading, time
expected, steps, wrong = step(), 0, []
def copy():
    global steps
    while not wrong:
        try:
            if (said := step()) != expected: wrong.append(said)
        except Exception as e: wrong.append(repr(e))
        steps += 1
def is_copying():
    before = steps
    while steps < before + 20 and not wrong: time.sleep(0.01)
    return not wrong
threading.Thread(target=copy, daemon=True).start()
"""


def test_a_thread_that_copies_from_one_to_the_other_goes_on_while_the_kernel_is_saved_after_cells(
    notebook: Notebook,
) -> None:
    notebook.run(PROGRAMS["peers"] + IN_A_THREAD, timeout=120)
    notebook.run("%gpuckpt auto on")
    wait_until(snapshots, 60, "it is not saved at once")
    for n in range(4):
        before = snapshots()
        notebook.run(f"n = {n}")
        wait_until(lambda before=before: snapshots() - before, 60, "it is not saved after the cell")
        assert notebook.look("is_copying()") == "True"
    ask(notebook, "save", name="outside")
    assert notebook.look("is_copying(), wrong") == "(True, [])"
    notebook.run("%gpuckpt undo", timeout=120)
    assert notebook.look("n, is_copying()") == "(2, True)"
    ask(notebook, "sleep")  # from which the thread wakes it
    assert says(notebook, "is_copying(), check()") == "True True"


def test_it_sleeps_and_its_gpus_are_swapped_in_its_life(notebook: Notebook) -> None:
    notebook.run(PROGRAMS["peers"], timeout=120)
    before = notebook.value("step()")
    ask(notebook, "sleep")
    assert is_asleep(notebook)
    assert says(notebook, "check(), step()") == f"True {before}"
    notebook.run("%gpuckpt move --gpu 1,0", timeout=120)
    assert notebook.value("check(), step()") == f"True {before}"


def test_without_room_for_a_helper_the_driver_copies_and_access_comes_back(notebook: Notebook) -> None:
    notebook.run(PROGRAMS["peers"], timeout=120)
    before = notebook.value("step()")
    notebook.run("torch.cuda.empty_cache()")  # a save gives back what torch keeps for later, and there would be room
    with leaving_free(GIB // 4):
        notebook.run("%gpuckpt save here", timeout=120)
        assert not parked("here")
        assert notebook.value("check()") == "True"
    assert notebook.value("check(), step()") == f"True {before}"
    for where in ("", " --gpu 1,0"):
        notebook.run("%gpuckpt restore here" + where, timeout=120)
        assert notebook.value("check(), step()") == f"True {before}"


def test_a_thread_copies_on_between_gpus_whose_memory_cannot_be_parked(notebook: Notebook) -> None:
    """They are kept apart while the driver copies, and while they are swapped."""
    notebook.run(PROGRAMS["peers"] + IN_A_THREAD + "torch.cuda.empty_cache()", timeout=120)
    with leaving_free(GIB // 4):
        for n in range(3):
            ask(notebook, "save", name=f"here-{n}")
            assert not parked(f"here-{n}")
            assert notebook.look("is_copying(), wrong") == "(True, [])"
    notebook.run("%gpuckpt move --gpu 1,0", timeout=120)
    assert notebook.look("is_copying(), wrong") == "(True, [])"
    for where in ("", " --gpu 1,0"):
        notebook.run("%gpuckpt restore here-2" + where, timeout=120)
        assert notebook.look("is_copying(), wrong, d == digest(x, y, *small)") == "(True, [], True)"


def test_a_job_whose_memory_cannot_be_parked_goes_on(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    job = Job("two")
    job.start(sys.executable, program(tmp_path, "import os\n" + PROGRAMS["peers"] + JOB), str(gate))
    wait_until(lambda: told(job), 120, "the job has not taken its first steps")
    with leaving_free(GIB // 8):
        job.save("half")
    assert not parked("half")
    gate.touch()
    assert job.wait_for_end() == 0
    whole = told(job)
    assert whole[1].startswith("then True ")
    job.restore("half", "--gpu", "1,0")
    assert job.wait_for_end() == 0
    assert told(job) == whole


# One GPU waits for what only a call to the other one brings, as a collective does that was launched on the first alone.
_WAITS_FOR_A_CALL = """
import ctypes, threading, time
cuda = ctypes.CDLL('libcuda.so.1')
flag, stream = torch.zeros(1, dtype=torch.int32, device='cuda:0'), torch.cuda.Stream(0)
torch.cuda.synchronize(0); torch.cuda.synchronize(1)
waits = cuda.cuStreamWaitValue32_v2(ctypes.c_void_p(stream.cuda_stream), ctypes.c_uint64(flag.data_ptr()), 1, 1)
"""


def test_a_gpu_that_waits_for_what_only_a_call_brings_is_not_waited_for_for_long(
    start: StartKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUCKPT_LOCK_TIMEOUT", "2")
    notebook = start()
    notebook.run(PROGRAMS["peers"], timeout=120)
    before = notebook.value("step()")
    notebook.run(_WAITS_FOR_A_CALL)
    assert notebook.value("waits, stream.query()") == "0 False"
    began = time.monotonic()
    assert "did not pause" in notebook.fails("%gpuckpt save here", timeout=120).text
    assert time.monotonic() - began < 15
    notebook.run("flag.fill_(1); stream.synchronize()")
    assert notebook.value("check(), step()") == f"True {before}"
    notebook.run("%gpuckpt save here", timeout=120)
    assert min(parked("here")) >= GIB


def test_a_job_whose_gpu_waits_for_a_call_is_not_saved_and_goes_on(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    job = Job("two")
    waits = _WAITS_FOR_A_CALL + "print('first', waits, stream.query(), flush=True)\n"
    goes_on = "import os, sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.01)\n"
    ends = "flag.fill_(1); stream.synchronize(); print('then', check(), step() == step(), flush=True)"
    source = "import os\n" + PROGRAMS["peers"] + waits + goes_on + ends
    job.start(sys.executable, program(tmp_path, source), str(gate), GPUCKPT_LOCK_TIMEOUT="2")
    wait_until(lambda: told(job), 120, "the job has not taken its first steps")
    began = time.monotonic()
    failed = run("save", "two", "half")
    assert (failed.status, "did not pause" in failed.err) == (1, True), failed.err
    assert time.monotonic() - began < 20
    gate.touch()
    assert job.wait_for_end() == 0
    assert told(job) == ["first 0 False", "then True True"]
