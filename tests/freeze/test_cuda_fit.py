"""Which snapshots fit which machine: decided from what is told of both, so told here in the test.

No test here checks the driver; `tests/gpu` does.
"""

from __future__ import annotations

from typing import Any

import pytest

from jupyter_gpuckpt.errors import Refused
from jupyter_gpuckpt.freeze import cuda
from jupyter_gpuckpt.freeze.cuda import CudaWorker, Gpu, Usage

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
            ["3 things", "570.9", "580.1", "H200", "A100", "9.0 GiB", "10.0 GiB"],
        ),
        (Machine(gpu(0, "C", name="A100")), saved("A", "B"), ["number of GPUs", "2", "1", "H200", "A100"]),
    ],
)
def test_row_21_what_differs_is_refused_by_both_values(
    here: Machine, manifest: dict[str, Any], named: list[str]
) -> None:
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
