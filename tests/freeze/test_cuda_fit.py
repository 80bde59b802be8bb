"""Which snapshots fit which machine: decided from what is told of both, so told here in the test.

No test here checks the driver; `tests/gpu` does.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from notebooks import wait_until

from jupyter_gpuckpt.errors import DriverError, GpuFailed, KernelWaits, NoRoomYet, Refused, SaveFailed
from jupyter_gpuckpt.freeze import cuda
from jupyter_gpuckpt.freeze.cuda import CudaWorker, Gpu, State, Usage
from jupyter_gpuckpt.linux import memory
from jupyter_gpuckpt.linux.processes import name

GIB = 1 << 30


def gpu(index: int, uuid: str, name: str = "H200", free: int = 100, mig: bool = False) -> Gpu:
    return Gpu(index, uuid, name, 140 * GIB, free * GIB, mig, "580.1")


class Machine(CudaWorker):
    """A worker that is told what the machine is; it makes no call."""

    def __init__(self, *gpus: Gpu, version: int = 13000, usage: tuple[Usage, ...] = ()) -> None:
        super().__init__()
        self._told = list(gpus), version, list(usage)

    def gpus(self) -> list[Gpu]:
        return self._told[0]

    def version(self) -> int:
        return self._told[1]

    def usage(self) -> list[Usage]:
        return self._told[2]


def saved(*uuids: str, used: int = 10, **other: Any) -> dict[str, Any]:
    return {
        "driver": "580.1",
        "cuda": 13000,
        "gpus": [{"uuid": uuid, "name": "H200", "total": 140 * GIB} for uuid in uuids],
        "processes": [{"pid": 7, "used": dict.fromkeys(uuids, used * GIB)}],
        **other,
    }


def test_same_gpus_need_no_map() -> None:
    assert cuda.fits(Machine(gpu(0, "B"), gpu(1, "A")), saved("A", "B")) is None


def test_one_other_gpu_needs_no_map() -> None:
    assert cuda.fits(Machine(gpu(0, "B")), saved("A")) is None
    assert cuda.fits(Machine(gpu(0, "B"), gpu(1, "C")), saved("A")) is None


def test_other_gpus_are_all_mapped() -> None:
    here = Machine(gpu(0, "C"), gpu(1, "D"))
    assert cuda.fits(here, saved("A", "B")) == {"A": "C", "B": "D"}


def test_snapshot_without_cuda_fits_anywhere() -> None:
    manifest = {"driver": None, "cuda": None, "gpus": [], "processes": []}
    assert cuda.fits(Machine(), manifest) is None


@pytest.mark.parametrize(
    ("here", "manifest", "named"),
    [
        (Machine(), saved("A"), ["1 x H200", "none"]),
        (Machine(gpu(0, "C")), saved("A", "B"), ["number of GPUs", "2", "1"]),
        (Machine(*(gpu(i, f"X{i}") for i in range(3))), saved("A", "B"), ["2", "3"]),
        (Machine(gpu(0, "B", name="A100")), saved("A"), ["H200", "A100"]),
        (Machine(gpu(0, "A")), saved("A", driver="570.9"), ["570.9", "580.1"]),
        (Machine(gpu(0, "A", mig=True)), saved("A"), ["MIG"]),
        (Machine(gpu(0, "A"), version=12040), saved("A"), ["12.4", "12.8"]),
        (Machine(gpu(0, "A", free=9)), saved("A"), ["9.0 GiB", "10.0 GiB"]),
        # All at once:
        (
            Machine(gpu(0, "B", name="A100", free=9)),
            saved("A", driver="570.9"),
            ["3 problems", "570.9", "580.1", "H200", "A100", "9.0 GiB", "10.0 GiB"],
        ),
        (Machine(gpu(0, "C", name="A100")), saved("A", "B"), ["number of GPUs", "2", "1", "H200", "A100"]),
    ],
)
def test_what_differs_is_refused_by_both_values(here: Machine, manifest: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(Refused) as caught:
        cuda.fits(here, manifest)
    for value in named:
        assert value in caught.value.why


def test_memory_of_those_that_leave_counts_as_free() -> None:
    usage = (Usage("A", 5, 3 * GIB, False), Usage("A", 6, 50 * GIB, False))
    here = Machine(gpu(0, "A", free=8), usage=usage)
    assert cuda.fits(here, saved("A"), leaving=[5]) is None
    with pytest.raises(Refused):
        cuda.fits(here, saved("A"))


TWO = Machine(gpu(0, "A"), gpu(1, "B"))


def on(uuid: str, *uuids: str, used: int = 10) -> dict[str, Any]:
    """Return what is said of a process that holds memory of one GPU on a machine with these."""
    return saved(*uuids, processes=[{"pid": 7, "used": {uuid: used * GIB}}])


def test_a_gpu_that_is_named_is_used_and_the_map_names_all() -> None:
    assert cuda.fits(TWO, on("A", "A", "B"), gpus=[1]) == {"A": "B", "B": "A"}
    assert cuda.fits(TWO, on("A", "A", "B"), gpus=[0]) is None
    assert cuda.fits(TWO, on("B", "A", "B"), gpus=[0]) == {"A": "B", "B": "A"}
    assert cuda.fits(TWO, saved("A", "B"), gpus=[1, 0]) == {"A": "B", "B": "A"}
    assert cuda.fits(TWO, on("A", "A"), gpus=[1]) == {"A": "B"}
    three = Machine(gpu(0, "A"), gpu(1, "B"), gpu(2, "C"))
    assert cuda.fits(three, on("A", "A", "B", "C"), gpus=[2]) == {"A": "C", "B": "B", "C": "A"}
    assert cuda.fits(three, saved("A", "B", "C"), gpus=[1, 2, 0]) == {"A": "B", "B": "C", "C": "A"}


def test_where_the_own_gpu_is_too_full_another_one_is_used() -> None:
    full = Machine(gpu(0, "A", free=9), gpu(1, "B"))
    assert cuda.fits(full, on("A", "A", "B")) == {"A": "B", "B": "A"}
    assert cuda.fits(full, on("A", "A")) == {"A": "B"}
    with pytest.raises(Refused, match=r"GPU 0 .* has 9\.0 GiB free"):
        cuda.fits(full, on("A", "A", "B"), gpus=[0])
    other_model = Machine(gpu(0, "A", free=9), gpu(1, "B", name="A100"))
    with pytest.raises(Refused, match=r"has 9\.0 GiB free"):
        cuda.fits(other_model, on("A", "A"))


@pytest.mark.parametrize("visible", ["0", "GPU-A", "0,-1,1", "", "-1", "1x"])
def test_a_gpu_that_others_were_given_is_not_taken_without_being_named(
    monkeypatch: pytest.MonkeyPatch, visible: str
) -> None:
    full = Machine(gpu(0, "GPU-A", free=9), gpu(1, "GPU-B"))
    manifest = on("GPU-A", "GPU-A", "GPU-B")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(Refused, match=r"GPU 0 .* has 9\.0 GiB free"):
        cuda.fits(full, manifest)
    assert cuda.fits(full, manifest, gpus=[1]) == {"GPU-A": "GPU-B", "GPU-B": "GPU-A"}
    for both in ("0,1", "1", "GPU-B,0"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", both)
        assert cuda.fits(full, manifest) == {"GPU-A": "GPU-B", "GPU-B": "GPU-A"}


def test_what_was_on_a_gpu_that_is_not_given_any_more_goes_to_the_one_that_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert cuda.fits(TWO, on("A", "A", "B")) == {"A": "B", "B": "A"}
    assert cuda.fits(TWO, on("B", "A", "B")) is None
    assert cuda.fits(TWO, on("X", "X")) == {"X": "B"}  # of another machine
    assert cuda.fits(TWO, on("A", "A", "B"), gpus=[0]) is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,1")
    four = Machine(*(gpu(n, uuid) for n, uuid in enumerate("ABCD")))
    both = on("A", "A", "B", "C", "D")
    both["processes"][0]["used"]["B"] = 5 * GIB
    assert cuda.fits(four, both) in ({"A": "C", "B": "B", "C": "A", "D": "D"}, {"A": "B", "B": "C", "C": "A", "D": "D"})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with pytest.raises(Refused, match=r"GPU 1 .* has 9\.0 GiB free"):
        cuda.fits(Machine(gpu(0, "A"), gpu(1, "B", free=9)), on("A", "A", "B"))
    with pytest.raises(Refused, match="number of GPUs"):
        cuda.fits(four, both)


def test_numbers_that_may_mean_other_gpus_keep_nothing_from_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    mixed = Machine(gpu(0, "GPU-A", name="A100"), gpu(1, "GPU-B"))
    manifest = on("GPU-B", "GPU-B")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # for CUDA the fastest one, wherever it is
    assert cuda.fits(mixed, manifest) is None
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    with pytest.raises(Refused, match="GPU model"):
        cuda.fits(mixed, manifest)
    assert cuda.fits(mixed, manifest, environment={"CUDA_VISIBLE_DEVICES": "GPU-B"}) is None
    with pytest.raises(Refused, match="GPU model"):
        cuda.fits(mixed, manifest, environment={"CUDA_VISIBLE_DEVICES": "GPU-A"})


def test_every_copy_needs_room() -> None:
    assert cuda.fits(TWO, on("A", "A", "B"), copies=10) is None
    with pytest.raises(Refused, match=r"100\.0 GiB free, and 110\.0 GiB are needed"):
        cuda.fits(TWO, on("A", "A", "B"), copies=11)


@pytest.mark.parametrize(
    ("gpus", "says"),
    [([2], "there is no GPU 2"), ([0, 1], "it uses 1 GPUs, and 2 were named"), ([1, 1], "it uses 1 GPUs")],
)
def test_gpus_that_cannot_be_used_are_refused(gpus: list[int], says: str) -> None:
    with pytest.raises(Refused, match=says):
        cuda.fits(TWO, on("A", "A", "B"), gpus=gpus)


def test_a_gpu_of_another_model_is_refused() -> None:
    with pytest.raises(Refused, match="GPU model"):
        cuda.fits(Machine(gpu(0, "A"), gpu(1, "B", name="A100")), on("A", "A"), gpus=[1])


def test_what_was_moved_is_told_by_the_numbers_of_the_gpus() -> None:
    assert cuda.moves(TWO, on("A", "A", "B"), {"A": "B", "B": "A"}) == ["What was on GPU 0 (A) is now on GPU 1 (B)."]


class Answering(Machine):
    """A driver that says of every process that it has no CUDA state, or is awake, and locks none."""

    def __init__(self, state: State, error: str = "CUDA_ERROR_NOT_SUPPORTED") -> None:
        super().__init__()
        self._state, self._error = state, error

    def state(self, pid: int) -> State:
        return self._state

    def lock(self, pid: int, timeout_s: float) -> None:
        what = "The CUDA driver's lock failed."
        raise DriverError(what, self._error, call="lock", pid=pid, name=self._error)


def test_a_process_with_devices_and_without_cuda_is_called_by_its_program() -> None:
    device = Path(f"/dev/nvidia.gpuckpt-{os.getpid()}")
    with device.open("wb") as opened:
        device.unlink()
        with subprocess.Popen(["sleep", "100"], stdout=opened) as process:
            try:
                wait_until(lambda: name(process.pid) == "sleep")
                with pytest.raises(Refused, match=rf"process {process.pid} \(sleep\) has GPU devices open"):
                    cuda.freezable(Answering("none"), [process.pid])
            finally:
                process.kill()


def test_a_process_that_cannot_be_locked_any_more_has_had_a_profiler() -> None:
    with pytest.raises(SaveFailed) as caught:
        cuda.freeze(Answering("running"), [os.getpid()])
    assert "torch.profiler" in caught.value.why
    assert "restart the kernel" in caught.value.then


def test_a_process_for_which_the_gpu_has_failed_is_to_be_restored_from_before() -> None:
    with pytest.raises(GpuFailed) as caught:
        cuda.freeze(Answering("running", "CUDA_ERROR_ILLEGAL_ADDRESS"), [os.getpid()])
    assert "the GPU has failed" in caught.value.why
    assert "gpuckpt restore" in caught.value.then


def test_what_a_checkpointed_process_has_mapped_of_the_driver_is_told_by_the_library_that_it_is_for(
    tmp_path: Path,
) -> None:
    library, device = tmp_path / "libnvidia-opencl.so.580.1", Path(f"/dev/nvidia.gpuckpt-{os.getpid()}")
    for file in (library, device):
        file.write_bytes(bytes(4096))
    try:
        with library.open("rb") as core, mmap.mmap(core.fileno(), 0, access=mmap.ACCESS_READ):
            cuda.refuse_other_use([os.getpid()])
            with (
                device.open("rb") as opened,
                mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ),
                called("orted"),
                pytest.raises(Refused, match="uses the GPU by OpenCL, and only what CUDA has") as refused,
            ):
                cuda.refuse_other_use([os.getpid()])
    finally:
        device.unlink()
    assert "%env HWLOC_COMPONENTS=-opencl" in refused.value.then


@contextlib.contextmanager
def called(program: str) -> Iterator[None]:
    """Have this process be called otherwise."""
    comm = Path("/proc/self/comm")
    before = comm.read_text()
    comm.write_text(program)
    try:
        yield
    finally:
        comm.write_text(before)


class FullMachine(Machine):
    """One whose processes are checkpointed, and whose GPU others have meanwhile."""

    def __init__(self) -> None:
        super().__init__(gpu(0, "A", free=1))

    def state(self, pid: int) -> State:
        return "checkpointed"

    def restore(self, pid: int, gpu_map: Mapping[str, str] | None = None) -> None:
        raise AssertionError("a restore that finds too little loses the process")


def test_what_has_no_room_to_come_back_is_not_lost_but_waits() -> None:
    pid = os.getpid()
    with pytest.raises(NoRoomYet, match="GiB are free"):
        cuda.thaw(FullMachine(), [pid], held={"A": 10 * GIB}, patience=0)
    with pytest.raises(KernelWaits) as waits:
        cuda.mend(FullMachine(), [pid], [{"pid": pid, "used": {"A": 10 * GIB}}], patience=0)
    assert "nvidia-smi" in waits.value.then


class InUse(Machine):
    """A machine on which every process uses CUDA."""

    def state(self, pid: int) -> State:
        return "running"


def test_gpu_memory_for_which_the_host_has_no_room_is_refused_with_both_figures() -> None:
    """The room is this machine's, as it is; what is held on the GPU is told."""
    pid, room = os.getpid(), memory.room(os.getpid()).bytes

    def preflight(held: int) -> None:
        cuda.preflight(InUse(gpu(0, "A"), usage=(Usage("A", pid, held, False),)), [pid])

    preflight(room - 2 * GIB)
    with pytest.raises(Refused, match=r"of host memory, and .* are left") as caught:
        preflight(room + GIB)
    data = caught.value.data
    assert data["needed"] > room + GIB, "a checkpoint takes more than the bare GPU memory"
    assert abs(data["available"] - room) < GIB


def test_what_gpus_could_not_access_again_is_refused_or_told() -> None:
    pid = os.getpid()

    def together(peers: dict[str, int] | None, gpus: str = "AB", held: int = GIB // 4) -> str:
        usage = tuple(Usage(uuid, pid, held, False) for uuid in gpus)
        machine = InUse(*(gpu(number, uuid) for number, uuid in enumerate("AB")), usage=usage)
        found = cuda.preflight(machine, [pid], {} if peers is None else {pid: peers})
        return found[pid].why if found else ""

    small, large = 448 << 20, 512 << 20
    assert together(None, "B") == "", "one GPU has none to have access to"
    assert "2 GPUs" in together(None)
    assert together({}) == ""
    assert together({"total": GIB // 2, "largest": small}) == ""
    with pytest.raises(Refused, match="would not work"):
        together({"total": GIB // 2, "largest": large})
    with pytest.raises(Refused, match="would not work"):
        together({"total": GIB, "largest": small}, held=3 * GIB)
