"""Whole kernels on a real GPU: what was on it is there again, bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_memory import DIGEST, TRAINING, leaving_free, used_by_gpu
from notebooks import Notebook, StartKernel, wait_until

from jupyter_gpuckpt import settings
from jupyter_gpuckpt.errors import DriverError
from jupyter_gpuckpt.freeze.cuda import CudaWorker
from jupyter_gpuckpt.store import Store

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300), pytest.mark.shared_kernel]


def gpu_processes() -> dict[int, int]:
    """Return the bytes of GPU memory by pid, as the driver's own tool tells it."""
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    lines = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
    pairs = [line.split(",") for line in lines if "," in line]
    return {int(pid): int(used) << 20 for pid, used in pairs if used.strip().isdigit()}


def test_a_training_goes_on_from_the_snapshot_as_if_nothing_had_been(notebook: Notebook) -> None:
    notebook.run("import torch\n" + DIGEST + TRAINING, timeout=120)
    before = notebook.value("everything()")
    assert "of it GPU memory" in notebook.run("%gpuckpt save trained", timeout=120).text
    assert notebook.value("everything()") == before, "the save itself changed something"
    straight_on = notebook.value("train(20), everything()")
    notebook.run("with torch.no_grad():\n    for p in model.parameters(): p.fill_(float('nan'))\ndel optimizer")
    notebook.run("%gpuckpt restore trained", timeout=120)
    assert notebook.value("everything()") == before
    assert notebook.value("train(20), everything()") == straight_on


@pytest.mark.shared_kernel(False)
def test_vram_passes_criu_by_and_its_memory_is_given_back(notebook: Notebook) -> None:
    notebook.run("import torch\n" + DIGEST + "x = torch.randint(0, 2**62, (2**27,), device='cuda'); d = digest(x)")
    notebook.run("torch.cuda.synchronize(); torch.cuda.empty_cache()")
    notebook.run("%gpuckpt save here", timeout=120)
    store = Store(settings.store_dir())
    contents = store.contents(store.get("here"))
    sizes = {path: contents.size_of(path) for path in contents.files}
    vram = {path: size for path, size in sizes.items() if path.startswith("vram/")}
    assert vram
    assert 1 << 30 <= sum(vram.values()) < 2 << 30
    assert max(size for path, size in sizes.items() if path not in vram) < 1 << 30
    folder = settings.NAMESPACE_VRAM_DIR
    for _ in range(2):
        assert notebook.value("digest(x) == d") == "True"
        assert notebook.value(f"__import__('os').listdir({folder!r})") == "[]"
        wait_until(lambda: int(notebook.value(f"__import__('shutil').disk_usage({folder!r}).used")) == 0)
        notebook.run("x.zero_()")
        notebook.run("%gpuckpt restore here", timeout=120)


@pytest.mark.shared_kernel(False)
def test_memory_that_is_written_while_it_is_copied_is_of_the_instant_of_the_save(notebook: Notebook) -> None:
    """Pinned and plain memory, written over and over by a thread and by the GPU: all is as it was at one moment."""
    notebook.run("""
        import threading, torch
        plain, pinned = torch.zeros(1 << 24, dtype=torch.int64), torch.zeros(1 << 24, dtype=torch.int64).pin_memory()
        on_gpu, n, torn, over = torch.zeros(1 << 24, dtype=torch.int64, device="cuda"), 0, 0, False
        def write():
            global n, torn
            while not over:
                n += 1
                plain.fill_(n); on_gpu.fill_(n); pinned.copy_(on_gpu)
                torn += not all(bool((each == n).all()) for each in (plain, pinned, on_gpu))
        writing = threading.Thread(target=write); writing.start()
    """)
    wait_until(lambda: int(notebook.value("n")) > 1)
    for _ in range(2):
        notebook.run("%gpuckpt save here --replace", timeout=120)
        saved = int(notebook.value("n"))
        notebook.run("%gpuckpt restore here", timeout=120)
        wait_until(lambda saved=saved: int(notebook.value("n")) > saved)
        assert notebook.value("torn") == "0"
    notebook.run("over = True; writing.join()")


def test_graphs_pinned_memory_streams_events_and_nvml_handles_come_back(notebook: Notebook) -> None:
    notebook.run(
        "import torch\n"
        + DIGEST
        + """
from cuda.bindings import nvml
nvml.init_v2(); handle = nvml.device_get_handle_by_index_v2(0); name = nvml.device_get_name(handle)
counter = torch.zeros(8, device="cuda"); graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph): counter.add_(1)
pinned = torch.arange(1_000_000, dtype=torch.float32).pin_memory()
stream, event = torch.cuda.Stream(), torch.cuda.Event(); event.record(stream)
for _ in range(3): graph.replay()
on_gpu = pinned.cuda(non_blocking=True); address = on_gpu.data_ptr(); d = digest(on_gpu, pinned)
""",
        timeout=120,
    )
    notebook.run("%gpuckpt save here", timeout=120)
    notebook.run("graph.replay(); pinned.zero_(); on_gpu.zero_()")
    notebook.run("%gpuckpt restore here", timeout=120)
    assert notebook.value("digest(on_gpu, pinned) == d, on_gpu.data_ptr() == address, pinned.is_pinned()") == (
        "True True True"
    )
    assert notebook.value("graph.replay() or counter[0].item()") == "4.0"
    assert notebook.value("nvml.device_get_name(handle) == name, event.query()") == "True True"
    notebook.run("with torch.cuda.stream(stream): again = pinned.to('cuda', non_blocking=True)\nstream.synchronize()")
    assert notebook.value("digest(again, pinned) == d") == "True"


@pytest.mark.shared_kernel(False)
@pytest.mark.parametrize("workers", ["ended", "ended while they start", "saved with it"])
def test_a_compiled_function_runs_on_without_compiling_again(notebook: Notebook, workers: str) -> None:
    """torch keeps worker processes for its next compilation: forked from one that has seen the GPUs."""
    notebook.run(
        """
import torch, torch._dynamo, torch._inductor.async_compile
f = torch.compile(lambda x: torch.nn.functional.gelu(x) * 2 + x.sum())
x = torch.randn(1024, 1024, device="cuda"); y = f(x); compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
""",
        timeout=240,
    )
    if workers != "ended while they start":
        notebook.run("torch._inductor.async_compile.AsyncCompile.wait_pool_ready()", timeout=120)
    if workers == "saved with it":
        notebook.run("import jupyter_gpuckpt.kernel.builtin_hooks as h; h._end_compile_workers = lambda: None")
    notebook.run("%gpuckpt save here", timeout=120)
    assert notebook.value("len(torch._inductor.async_compile._pool_set)") == (
        "1" if workers == "saved with it" else "0"
    )
    notebook.run("del f")
    notebook.run("%gpuckpt restore here", timeout=120)
    assert notebook.value("torch.equal(f(x), y)") == "True"
    assert notebook.value("torch._dynamo.utils.counters['stats']['unique_graphs'] == compiled") == "True"
    notebook.run("g = torch.compile(lambda x: torch.sin(x) + x.mean()); z = g(x)", timeout=240)
    assert notebook.value("torch.allclose(z, torch.sin(x) + x.mean())") == "True"


@pytest.mark.shared_kernel(False)
def test_jax_arrays_and_compiled_functions_come_back(notebook: Notebook) -> None:
    notebook.run(
        """
import os; os.environ.update(XLA_PYTHON_CLIENT_PREALLOCATE="false", XLA_PYTHON_CLIENT_MEM_FRACTION="0.05")
import jax, jax.numpy as jnp, numpy as np
key = jax.random.key(0); step = jax.jit(lambda a: a @ a.T / 100 + 1)
a = step(jax.random.normal(key, (512, 512))); saved = np.asarray(a).tobytes()
""",
        timeout=240,
    )
    notebook.run("%gpuckpt save here", timeout=120)
    following = notebook.value("float(step(a).sum())")
    notebook.run("del a")
    notebook.run("%gpuckpt restore here", timeout=120)
    assert notebook.value("np.asarray(a).tobytes() == saved, jax.default_backend()") == "True gpu"
    assert notebook.value("float(step(a).sum())") == following


def test_cupy_arrays_and_random_streams_come_back(notebook: Notebook) -> None:
    notebook.run(
        "import cupy; cupy.random.seed(1); a = cupy.random.rand(1000, 1000); total = float(a.sum())", timeout=120
    )
    notebook.run("%gpuckpt save here", timeout=120)
    following = notebook.value("float(cupy.random.rand(10).sum())")
    notebook.run("a[:] = 0")
    notebook.run("%gpuckpt restore here", timeout=120)
    assert notebook.value("float(a.sum()) == total") == "True"
    assert notebook.value("float(cupy.random.rand(10).sum())") == following


@pytest.mark.shared_kernel(False)
@pytest.mark.parametrize("pin_memory", [False, True])
def test_data_loader_workers_go_on_in_mid_epoch(notebook: Notebook, pin_memory: bool) -> None:
    notebook.run(
        f"""
import torch
torch.zeros(1, device="cuda")
data = torch.utils.data.TensorDataset(torch.arange(4000).float())
loader = torch.utils.data.DataLoader(data, batch_size=100, num_workers=3, persistent_workers=True,
                                     pin_memory={pin_memory}, shuffle=False)
batches = iter(loader); seen = [next(batches)[0].cuda().sum().item() for _ in range(5)]
""",
        timeout=120,
    )
    notebook.run("%gpuckpt save here", timeout=120)
    rest = "[b[0].cuda().sum().item() for b in batches]"
    straight_on = notebook.value(rest)
    notebook.run("del batches, loader")
    notebook.run("%gpuckpt restore here", timeout=120)
    assert notebook.value(rest) == straight_on
    assert notebook.value("len([0 for b in loader])") == "40"


@pytest.mark.shared_kernel(False)
def test_a_child_with_gpu_state_of_its_own_comes_back(notebook: Notebook, tmp_path: Path) -> None:
    Path(tmp_path, "child_with_gpu.py").write_text(
        "import torch\n"
        "def work(asked, answers):\n"
        "    x = torch.arange(2**26, device='cuda')\n"
        "    answers.put(int(x.sum()))\n"
        "    while (n := asked.get()) is not None:\n"
        "        x += n\n"
        "        answers.put(int(x.sum()))\n"
    )
    notebook.run(
        f"""
import sys; sys.path.insert(0, {str(tmp_path)!r})
import torch, multiprocessing, child_with_gpu
context = multiprocessing.get_context("spawn"); asked, answers = context.Queue(), context.Queue()
child = context.Process(target=child_with_gpu.work, args=(asked, answers)); child.start()
x = torch.ones(2**26, device="cuda"); first = answers.get()
add = lambda n: asked.put(n) or answers.get()
""",
        timeout=120,
    )
    notebook.run("%gpuckpt save here", timeout=120)
    assert notebook.value("add(1) - first == 2**26") == "True"
    notebook.run("x.zero_(); asked.put(None); child.join()")
    notebook.run("%gpuckpt restore here", timeout=120)
    assert notebook.value("int(x.sum()) == 2**26, add(3) - first == 3 * 2**26") == "True True"
    notebook.run("asked.put(None); child.join()")


@pytest.mark.shared_kernel(False)
def test_managed_memory_is_refused_and_the_kernel_unharmed(notebook: Notebook) -> None:
    notebook.run(
        "import cupy; cupy.cuda.set_allocator(cupy.cuda.malloc_managed); a = cupy.arange(1000000); s = int(a.sum())",
        timeout=120,
    )
    answer = notebook.fails("%gpuckpt save here", timeout=120)
    assert answer.ename == "SaveFailed"
    assert "GPUCKPT_MANAGED=on" in answer.text
    assert notebook.value("int(a.sum()) == s, int((a + 1).sum()) == s + a.size") == "True True"
    assert "No snapshots yet" in notebook.run("%gpuckpt list").text


@pytest.mark.shared_kernel(False)
def test_a_kernel_that_torch_profiler_has_recorded_is_told_so_and_runs_on(notebook: Notebook) -> None:
    notebook.run(
        "import torch; from torch.profiler import ProfilerActivity, profile\n"
        "with profile(activities=[ProfilerActivity.CUDA]): x = torch.ones(1000, device='cuda') + 1\n"
        "torch.cuda.synchronize()",
        timeout=120,
    )
    assert "torch.profiler" in notebook.fails("%gpuckpt save here", timeout=120).text
    assert notebook.value("int(x.sum())") == "2000"


def test_work_on_the_gpu_that_does_not_pause_is_told_and_goes_on(
    start: StartKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUCKPT_LOCK_TIMEOUT", "1")
    notebook = start()
    notebook.run("import torch; x = torch.zeros(1, device='cuda')", timeout=120)
    answer = notebook.fails("torch.cuda._sleep(20_000_000_000)\n%gpuckpt save here", timeout=120)
    assert answer.ename == "SaveFailed"
    assert "did not pause" in answer.text
    assert notebook.value("(x + 1).item()") == "1.0"


def test_two_copies_beside_each_other_and_nothing_left_on_the_gpu(start: StartKernel) -> None:
    idle = sum(used_by_gpu())
    first = start()
    first.run("import torch\n" + DIGEST + "x = torch.randn(2**28, device='cuda'); d = digest(x)", timeout=120)
    first.run("%gpuckpt save shared", timeout=120)
    second = start()
    second.run("%gpuckpt restore shared", timeout=120)
    assert second.value("digest(x) == d") == "True"
    first.run("x.zero_()")
    assert second.value("digest(x) == d") == "True"
    assert sum(used_by_gpu()) > idle + 2 * 2**30
    for notebook in (first, second):
        notebook.close()
    wait_until(lambda: sum(used_by_gpu()) <= idle + 2**27, 30, "GPU memory is still held")


@pytest.mark.shared_kernel(False)
def test_the_list_of_kernels_tells_their_gpu_memory(notebook: Notebook) -> None:
    notebook.run("import torch; x = torch.ones(2**28, device='cuda'); torch.cuda.synchronize()", timeout=120)  # 1 GiB
    command = [sys.executable, "-c", "from jupyter_gpuckpt.cli import main; main()", "kernels", "--json"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    (kernel,) = json.loads(said)["kernels"]
    assert kernel["kernel_id"] == notebook.manager.provisioner.kernel_id
    assert 1 << 30 < kernel["gpu_memory"] < 3 << 30


def test_many_saves_and_restores_leave_nothing_on_the_gpu(notebook: Notebook) -> None:
    notebook.run("import torch\n" + DIGEST + "x = torch.randn(2**26, device='cuda'); d = digest(x)", timeout=120)
    notebook.run("%gpuckpt save step", timeout=120)
    held = sum(used_by_gpu())
    for _ in range(8):
        notebook.run("%gpuckpt restore step", timeout=120)
        notebook.run("%gpuckpt save step --replace", timeout=120)
        assert notebook.value("digest(x) == d") == "True"
    assert sum(used_by_gpu()) <= held + 2**26


def _state(worker: CudaWorker, pid: int) -> str:
    try:
        return worker.state(pid)
    except DriverError:  # held still for a moment, while its memory is parked
        return ""


@pytest.mark.parametrize("moment", ["locked", "checkpointed"])
def test_a_keeper_killed_while_the_gpu_state_is_away_is_replaced_and_mends_it(notebook: Notebook, moment: str) -> None:
    """Fault 18: the next keeper finds the CUDA state and brings it back."""
    notebook.run("import torch\n" + DIGEST + "x = torch.randn(2**28, device='cuda'); d = digest(x)", timeout=120)
    with notebook.keeper as keeper:
        status = keeper.request("status")
    with CudaWorker() as worker:
        worker.gpus()  # started, so that what follows is not late
        request = notebook.client.execute("%gpuckpt save here")
        reached = ("checkpointed",) if moment == "checkpointed" else ("locked", "checkpointed")
        wait_until(lambda: _state(worker, status["pid"]) in reached, 60)
        notebook.kill_keeper()
    reply = notebook.reply(120)
    assert reply["parent_header"]["msg_id"] == request
    assert reply["content"]["status"] == "error"
    assert notebook.value("digest(x) == d") == "True"
    notebook.run("%gpuckpt save after", timeout=120)
    notebook.run("x.zero_()")
    notebook.run("%gpuckpt restore after", timeout=120)
    assert notebook.value("digest(x) == d") == "True"


def test_a_snapshot_that_finds_no_room_on_the_gpu_is_refused_beforehand(start: StartKernel) -> None:
    """Fault 20."""
    notebook = start()
    notebook.run("import torch; x = torch.ones(2**30, device='cuda')", timeout=120)  # 4 GiB
    notebook.run("%gpuckpt save big", timeout=120)
    notebook.run("del x; torch.cuda.empty_cache(); y = 'still here'")
    with leaving_free(2 * 2**30):
        answer = notebook.fails("%gpuckpt restore big", timeout=120)
        assert answer.ename == "Refused"
        assert "free" in answer.text
        assert notebook.value("y") == "still here"
    notebook.run("%gpuckpt restore big", timeout=120)
    assert notebook.value("int(x.sum().item())") == str(2**30)


_SHARES = """
def hold(queue, done):
    tensors = []
    while (given := queue.get()) is not None:
        if given == "add":
            for tensor in tensors:
                tensor += 1
        else:
            tensors.append(given)
        done.put([float(tensor.sum()) for tensor in tensors])
"""


@pytest.mark.shared_kernel(False)
def test_tensors_that_a_child_has_open_are_shared_after_a_save_and_a_restore(
    notebook: Notebook, tmp_path: Path
) -> None:
    Path(tmp_path, "child_of_mine.py").write_text(_SHARES)
    notebook.run(
        f"""
import sys; sys.path.insert(0, {str(tmp_path)!r})
import torch, torch.multiprocessing as mp, child_of_mine
context = mp.get_context("spawn"); queue, done = context.Queue(), context.Queue()
child = context.Process(target=child_of_mine.hold, args=(queue, done)); child.start()
small, large = torch.ones(1000, device="cuda"), torch.ones(2**28, device="cuda")
def ask(what):
    queue.put(what)
    return done.get(timeout=60)
ask(small), ask(large)
""",
        timeout=180,
    )
    added = "[2000.0, 536870912.0] 2000.0 536870912.0"
    notebook.run("%gpuckpt save here", timeout=120)
    assert notebook.value("ask('add'), small.sum().item(), large.double().sum().item()") == added
    for _ in range(2):
        notebook.run("%gpuckpt restore here", timeout=120)
        assert notebook.value("small.sum().item(), large.double().sum().item()") == "1000.0 268435456.0"
        assert notebook.value("ask('add'), small.sum().item(), large.double().sum().item()") == added
        assert notebook.value("ask(torch.ones(10, device='cuda'))[-1]") == "10.0"
    notebook.run("queue.put(None); child.join(20)")


@pytest.mark.shared_kernel(False)
def test_memory_shared_by_the_driver_is_refused_beforehand(
    monkeypatch: pytest.MonkeyPatch, start: StartKernel, tmp_path: Path
) -> None:
    monkeypatch.setenv("GPUCKPT_PARKING", "off")
    notebook = start()
    Path(tmp_path, "child_of_mine.py").write_text(_SHARES)
    notebook.run(
        f"""
import sys; sys.path.insert(0, {str(tmp_path)!r})
import torch, torch.multiprocessing as mp, child_of_mine
context = mp.get_context("spawn"); queue, done = context.Queue(), context.Queue()
child = context.Process(target=child_of_mine.hold, args=(queue, done)); child.start()
x = torch.ones(1000, device="cuda"); queue.put(x); total = done.get()
""",
        timeout=180,
    )
    answer = notebook.fails("%gpuckpt save here", timeout=120)
    assert "shares GPU memory" in answer.text
    assert notebook.value("total, x.sum().item()") == "[1000.0] 1000.0"
    notebook.run("queue.put(None); child.join(20); child.kill()")
