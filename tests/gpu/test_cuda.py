"""The driver's side of a save, on one real GPU and a plain torch process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cells import Cells
from notebooks import wait_until
from on_gpu import SUM

from jupyter_gpuckpt.errors import DriverError, KernelWaits, NoRoomYet, Refused, SaveFailed
from jupyter_gpuckpt.freeze import cuda, cuda_preflight
from jupyter_gpuckpt.freeze.cuda import CudaWorker
from jupyter_gpuckpt.linux.processes import stopped

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]
Start = Callable[..., Cells]

SMALL = "from on_gpu import Numbers; x = Numbers()"
LOOK = "answer = x.sum()"
MANAGED = """
import ctypes
from cuda.bindings import driver
from on_gpu import Numbers
x = Numbers()
error, managed = driver.cuMemAllocManaged(1 << 20, 1)
assert not int(error)
ctypes.memset(int(managed), 7, 1 << 20)
"""
NVML = "import ctypes; nvml = ctypes.CDLL('libnvidia-ml.so.1'); answer = nvml.nvmlInit_v2()"


def devices_of(pid: int) -> list[str]:
    links = [str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()]
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [text for text in links + maps if "/dev/nvidia" in text]


def test_state_comes_back_bit_for_bit(worker: CudaWorker, cells: Start) -> None:
    process = cells("""
        import hashlib, torch
        torch.manual_seed(1)
        model = torch.nn.Linear(512, 512, device='cuda')
        optimizer = torch.optim.AdamW(model.parameters())
        data = torch.randn(64, 512, device='cuda')
        pinned = torch.arange(1000).pin_memory()
        counter = torch.zeros(1, device='cuda')
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            counter.add_(1)
        def train():
            optimizer.zero_grad(); model(data).square().mean().backward(); optimizer.step()
        train()
        def digest():
            parts = [*model.parameters(), *(s['exp_avg'] for s in optimizer.state.values()),
                     data, counter, pinned, torch.cuda.get_rng_state()]
            everything = b''.join(p.detach().cpu().numpy().tobytes() for p in parts)
            return hashlib.sha256(everything).hexdigest()
        """)
    before = process.run("answer = digest()")
    held = cuda.needs(cuda.describe(worker, [process.pid]))

    cuda.freeze(worker, [process.pid])
    assert worker.state(process.pid) == "checkpointed"
    assert devices_of(process.pid) == []
    assert process.pid not in [usage.pid for usage in worker.usage()]
    cuda.thaw(worker, [process.pid], held=held)

    assert worker.state(process.pid) == "running"
    assert process.run("answer = digest()") == before
    go_on = "train(); graph.replay(); answer = counter.item(), torch.isfinite(data).all().item()"
    assert process.run(go_on) == [1.0, True]


def test_ten_freezes_in_a_row(worker: CudaWorker, cells: Start) -> None:
    process = cells(SMALL)
    for _ in range(10):
        cuda.freeze(worker, [process.pid])
        cuda.thaw(worker, [process.pid])
    assert process.run(LOOK) == SUM


def test_two_processes_are_frozen_together(worker: CudaWorker, cells: Start) -> None:
    processes = [cells(SMALL), cells(SMALL)]
    pids = [process.pid for process in processes]
    cuda.freeze(worker, pids)
    assert [worker.state(pid) for pid in pids] == ["checkpointed"] * 2
    cuda.thaw(worker, pids)
    assert [process.run(LOOK) for process in processes] == [SUM, SUM]


def test_managed_memory_is_refused_and_the_process_runs_on(worker: CudaWorker, cells: Start) -> None:
    process = cells(MANAGED)
    with pytest.raises(SaveFailed, match="managed") as caught:
        cuda.freeze(worker, [process.pid])
    assert caught.value.data["number"] == 801
    assert worker.state(process.pid) == "running"
    look = "answer = ctypes.string_at(int(managed) + 99, 1)[0], x.sum()"
    assert process.run(look) == [7, SUM]


def test_one_process_that_cannot_undoes_the_others(worker: CudaWorker, cells: Start) -> None:
    plain, managed = cells(SMALL), cells(MANAGED)
    with pytest.raises(SaveFailed):
        cuda.freeze(worker, [plain.pid, managed.pid])
    assert [worker.state(one.pid) for one in (plain, managed)] == ["running", "running"]
    assert [one.run(LOOK) for one in (plain, managed)] == [SUM, SUM]


def test_lock_times_out_while_a_long_gpu_kernel_runs(
    worker: CudaWorker, cells: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUCKPT_LOCK_TIMEOUT", "1")
    process = cells("import torch; x = torch.arange(2**20, device='cuda')")
    process.run("torch.cuda._sleep(int(1.9e9 * 6))")
    began = time.monotonic()
    with pytest.raises(SaveFailed, match="did not pause") as caught:
        cuda.freeze(worker, [process.pid])
    assert time.monotonic() - began < 4
    assert caught.value.data["name"] == "CUDA_ERROR_NOT_READY"
    assert worker.state(process.pid) == "running"
    assert process.run("answer = x.sum().item()") == SUM


def test_hung_worker_is_killed_and_the_next_one_works(
    worker: CudaWorker, cells: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = cells(SMALL)
    assert worker.state(process.pid) == "running"
    first = worker.pid
    assert first
    os.kill(first, signal.SIGSTOP)
    monkeypatch.setenv("GPUCKPT_DRIVER_TIMEOUT", "2")
    with pytest.raises(DriverError) as caught:
        worker.state(process.pid)
    assert caught.value.data["name"] == "TIMEOUT"
    monkeypatch.delenv("GPUCKPT_DRIVER_TIMEOUT")
    cuda.freeze(worker, [process.pid])
    cuda.thaw(worker, [process.pid])
    assert worker.pid != first
    assert process.run(LOOK) == SUM


@pytest.mark.parametrize("step", ["checkpoint", "restore"])
def test_worker_killed_in_the_middle_of_a_step(worker: CudaWorker, cells: Start, step: str) -> None:
    process = cells("import torch; x = torch.arange(2**30, dtype=torch.int32, device='cuda')")
    total = process.run("answer = x.sum(dtype=torch.int64).item()")
    worker.lock(process.pid, 5)
    if step == "restore":
        worker.checkpoint(process.pid)
    assert worker.pid
    threading.Timer(0.2, os.kill, (worker.pid, signal.SIGKILL)).start()
    with pytest.raises(DriverError) as caught:
        getattr(worker, step)(process.pid)
    assert caught.value.data["name"] == "WORKER_DIED"

    with CudaWorker() as new:
        found = cuda.mend(new, [process.pid])
        assert new.state(process.pid) == "running"
    assert found[process.pid] in ("locked", "checkpointed")
    assert process.run("answer = x.sum(dtype=torch.int64).item()") == total


def test_stopped_process_is_refused_before_anything(worker: CudaWorker, cells: Start) -> None:
    process = cells(SMALL)
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(Refused, match="stopped"):
        cuda.freezable(worker, [process.pid])
    with pytest.raises(Refused, match="stopped"):
        cuda.preflight(worker, [process.pid])
    with pytest.raises(DriverError, match="stopped"):
        worker.lock(process.pid, 1)
    os.kill(process.pid, signal.SIGCONT)
    assert process.run(LOOK) == SUM


def test_process_stopped_while_frozen_is_mended(worker: CudaWorker, cells: Start) -> None:
    process = cells(SMALL)
    cuda.freeze(worker, [process.pid])
    os.kill(process.pid, signal.SIGSTOP)
    wait_until(lambda: stopped([process.pid]))
    assert cuda.mend(worker, [process.pid]) == {process.pid: "checkpointed"}
    assert process.run(LOOK) == SUM


def test_process_that_ends_while_frozen_is_no_failure(worker: CudaWorker, cells: Start) -> None:
    one, other = cells(SMALL), cells(SMALL)
    cuda.freeze(worker, [one.pid, other.pid])
    one.close()
    found = cuda.mend(worker, [one.pid, other.pid])
    assert found == {one.pid: "gone", other.pid: "checkpointed"}
    assert other.run(LOOK) == SUM


def test_room_on_the_gpu_is_waited_for(worker: CudaWorker, cells: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    process = cells("import torch; x = torch.arange(2**30, dtype=torch.int32, device='cuda')")
    total = process.run("answer = x.sum(dtype=torch.int64).item()")
    manifest = cuda.describe(worker, [process.pid])
    cuda.freeze(worker, [process.pid])
    hog = cells("""
        import torch
        size = torch.cuda.mem_get_info()[0] - (2 << 30)
        y = torch.empty(size, dtype=torch.uint8, device='cuda')
        """)
    with pytest.raises(Refused, match=r"GiB free, and .* needed"):
        cuda.fits(worker, manifest)
    assert cuda.fits(worker, manifest, leaving=[hog.pid]) is None
    monkeypatch.setenv("GPUCKPT_DRIVER_TIMEOUT", "2")
    with pytest.raises(NoRoomYet):
        cuda.thaw(worker, [process.pid], held=cuda.needs(manifest))
    with pytest.raises(KernelWaits):
        cuda.mend(worker, [process.pid], manifest["processes"])

    monkeypatch.delenv("GPUCKPT_DRIVER_TIMEOUT")
    threading.Timer(1, os.killpg, (hog.pid, signal.SIGKILL)).start()
    cuda.thaw(worker, [process.pid], held=cuda.needs(manifest))
    assert process.run("answer = x.sum(dtype=torch.int64).item()") == total


def test_only_processes_with_cuda_state_are_frozen(worker: CudaWorker, cells: Start) -> None:
    plain, library = cells(), cells("import ctypes; ctypes.CDLL('libcuda.so.1')")
    small, nvml = cells(SMALL), cells(NVML)
    pids = [one.pid for one in (plain, library, small, nvml)]
    assert cuda.cuda_pids(pids) == [library.pid, small.pid, nvml.pid]
    assert cuda.freezable(worker, pids) == [small.pid, nvml.pid]
    cuda.preflight(worker, [small.pid, nvml.pid])
    cuda.freeze(worker, [small.pid, nvml.pid])
    assert devices_of(nvml.pid) == []
    cuda.thaw(worker, [small.pid, nvml.pid])
    count = "n = ctypes.c_uint(); answer = nvml.nvmlDeviceGetCount_v2(ctypes.byref(n)), n.value"
    assert nvml.run(count) == [0, len(worker.gpus())]


def test_describe_and_fits_on_the_same_machine(worker: CudaWorker, cells: Start) -> None:
    process = cells("import torch; x = torch.zeros(1 << 30, dtype=torch.uint8, device='cuda')")
    manifest = cuda.describe(worker, [process.pid])
    assert next(iter(cuda.needs(manifest).values())) > 1 << 30
    assert manifest["gpus"][0]["uuid"].startswith("GPU-")
    assert cuda.fits(worker, manifest) is None
    with pytest.raises(Refused, match=r"driver.*1\.2.*here"):
        cuda.fits(worker, {**manifest, "driver": "1.2"})


def test_too_little_host_memory_is_refused(worker: CudaWorker, cells: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    process = cells(SMALL)
    monkeypatch.setattr(cuda_preflight, "_HOST_MARGIN", 1 << 50)
    with pytest.raises(Refused, match="host memory"):
        cuda.preflight(worker, [process.pid])
    assert worker.state(process.pid) == "running"


FORKING = """
from jupyter_gpuckpt.kernel import devices
from on_gpu import Numbers
import os, sys, time
if drop:
    devices.drop_in_children()
x = Numbers()
child = os.fork()
if not child:
    time.sleep(100)
    os._exit(0)
answer = child
"""


def test_forked_child_holds_no_device_and_the_parent_can_be_frozen(worker: CudaWorker, cells: Start) -> None:
    parent = cells("drop = True")
    child = parent.run(FORKING)
    time.sleep(0.5)
    assert devices_of(child) == []
    assert devices_of(parent.pid)
    assert cuda.freezable(worker, [parent.pid, child]) == [parent.pid]
    cuda.freeze(worker, [parent.pid])
    cuda.thaw(worker, [parent.pid])
    assert parent.run(LOOK) == SUM


def test_child_that_kept_its_devices_is_made_to_drop_them(worker: CudaWorker, cells: Start) -> None:
    parent = cells("drop = False")
    child = parent.run(FORKING)
    assert devices_of(child)
    assert cuda.freezable(worker, [parent.pid, child]) == [parent.pid]
    assert devices_of(child) == []
    cuda.freeze(worker, [parent.pid])
    cuda.thaw(worker, [parent.pid])
    assert parent.run(LOOK) == SUM


def test_forked_child_exits_normally() -> None:
    script = """
import os, sys
from jupyter_gpuckpt.kernel import devices
from on_gpu import Numbers
devices.drop_in_children()
x = Numbers()
child = os.fork()
if not child:
    sys.exit(5)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), x.sum())
"""
    here = Path(__file__)
    path = os.pathsep.join([str(here.parents[2]), str(here.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == ["5", str(SUM)], done.stderr


def test_data_loader_in_mid_epoch_goes_on(worker: CudaWorker, cells: Start) -> None:
    process = cells("""
        from jupyter_gpuckpt.kernel import devices
        devices.drop_in_children()
        import torch
        from torch.utils.data import DataLoader, TensorDataset
        ones = torch.ones(4, device='cuda')
        loader = DataLoader(TensorDataset(torch.arange(1000.)), batch_size=10, num_workers=2,
                            persistent_workers=True, pin_memory=True)
        batches = iter(loader)
        total = next(batches)[0].cuda().sum()
        """)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    tree = [process.pid, *map(int, children)]
    assert len(tree) == 3
    pids = cuda.freezable(worker, tree)
    assert pids == [process.pid]
    cuda.freeze(worker, pids)
    cuda.thaw(worker, pids)
    rest = "answer = (total + sum(batch[0].cuda().sum() for batch in batches)).item()"
    assert process.run(rest) == 499500.0


def test_process_that_imported_gpu_memory_is_lost_and_takes_no_other_with_it(worker: CudaWorker, cells: Start) -> None:
    """A limit of the driver (580.159), told in docs/internals/cuda.md: nothing shows it before."""
    exporter, importer = cells(SMALL), cells(SMALL)
    handle = exporter.run("""
        import ctypes
        cuda, handle = x.cuda, ctypes.create_string_buffer(64)
        assert cuda.cuIpcGetMemHandle(handle, ctypes.c_ulonglong(x.data_ptr())) == 0
        answer = handle.raw.hex()
        """)
    importer.run(f"""
        import ctypes
        class Handle(ctypes.Structure):
            _fields_ = [('bytes', ctypes.c_char * 64)]
        cuda, there = x.cuda, ctypes.c_ulonglong()
        assert cuda.cuCtxSynchronize() == 0
        handle = Handle.from_buffer_copy(bytes.fromhex({handle!r}))
        cuda.cuIpcOpenMemHandle_v2.argtypes = [ctypes.c_void_p, Handle, ctypes.c_uint]
        assert cuda.cuIpcOpenMemHandle_v2(ctypes.byref(there), handle, 1) == 0
        """)
    pids = [exporter.pid, importer.pid]
    cuda.freeze(worker, pids)
    with pytest.raises(DriverError) as caught:
        cuda.thaw(worker, pids)
    assert caught.value.data["lost"] == [importer.pid]
    assert worker.state(exporter.pid) == "running"
    assert exporter.run(LOOK) == SUM
