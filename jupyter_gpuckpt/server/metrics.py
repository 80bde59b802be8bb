"""Metrics of the kernels for Prometheus, in Jupyter Server's own ``/metrics``. Nothing is asked without a scrape.

Labels are bounded: they name states, kinds and results, and neither kernels nor notebooks.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from ..client import operation_counts
from ..operations.results import ListedKernel

__all__ = ["KernelMetrics", "register"]

STATES = ("running", "sleeping", "waking", "falling asleep", "hibernating", "hibernated", "busy")
"""What kernels are told to be: ``busy`` stands for the other operations."""
_HELD_UP = 0.04
"""For how long a scrape holds the server's event loop at most, in seconds."""
_KNOWN_FOR = 300.0
"""For how long what is known of the kernels is told where they do not answer in time, in seconds."""

Look = Callable[[], tuple[list[ListedKernel], int]]
"""Returns the kernels as listings tell of them, and how many are hibernated that nobody holds any more."""


class KernelMetrics(Collector):
    """Collects what there is to tell when somebody asks."""

    def __init__(self, look: Look) -> None:
        self._look = look
        self._looking = threading.Lock()
        self._known: tuple[float, list[ListedKernel], int] | None = None

    def describe(self) -> Iterator[Any]:
        """Name the metrics (called when they are registered), without looking at anything."""
        return self._families([], 0, operation_counts.OperationCounts())

    def collect(self) -> Iterator[Any]:
        """Return the metrics (called in the event loop for each scrape).

        The kernels are asked by a thread. One that does not answer in time does not hold up the server: the next
        scrape has what it said.
        """
        looked = threading.Event()
        threading.Thread(target=self._update, args=(looked,), name="gpuckpt-metrics", daemon=True).start()
        looked.wait(_HELD_UP)
        known = self._known
        kernels, hibernated = known[1:] if known and time.monotonic() - known[0] < _KNOWN_FOR else (None, 0)
        return self._families(kernels, hibernated, operation_counts.read())

    def _update(self, looked: threading.Event) -> None:
        if self._looking.acquire(blocking=False):
            try:
                began = time.monotonic()
                self._known = (began, *self._look())
            finally:
                self._looking.release()
                looked.set()

    @staticmethod
    def _families(
        kernels: list[ListedKernel] | None, hibernated: int, counted: operation_counts.OperationCounts
    ) -> Iterator[Any]:
        if kernels is not None:
            yield from _of_kernels(kernels, hibernated)
        operations = CounterMetricFamily(
            "gpuckpt_operations", "Operations on kernels, by kind and how they ended", labels=["kind", "result"]
        )
        for kind, results in sorted(counted.operations.items()):
            for result, count in results.items():
                operations.add_metric([kind, result], count)
        yield operations
        waking = HistogramMetricFamily("gpuckpt_wake_seconds", "How long it took kernels to wake")
        buckets, total = [], 0
        for bound, count in zip([*map(str, operation_counts.WAKE_BOUNDS), "+Inf"], counted.wakes, strict=True):
            total += count
            buckets.append((bound, float(total)))
        waking.add_metric([], buckets, counted.wake_seconds)
        yield waking


def _of_kernels(kernels: list[ListedKernel], hibernated: int) -> Iterator[Any]:
    states = Counter(kernel.state if kernel.state in STATES else "busy" for kernel in kernels)
    states["hibernated"] += hibernated
    by_state = GaugeMetricFamily("gpuckpt_kernels", "Kernels that can be saved, by state", labels=["state"])
    for state in STATES:
        by_state.add_metric([state.replace(" ", "_")], states[state])
    yield by_state
    yield GaugeMetricFamily(
        "gpuckpt_gpu_memory_held_bytes",
        "GPU memory that kernels hold, as far as the driver reports it",
        value=sum(kernel.gpu_memory or 0 for kernel in kernels),
    )
    yield GaugeMetricFamily(
        "gpuckpt_gpu_memory_freed_bytes",
        "GPU memory freed by sleeping kernels",
        value=sum(kernel.gpu.freed for kernel in kernels),
    )
    yield GaugeMetricFamily(
        "gpuckpt_gpu_memory_in_host_bytes",
        "Host memory that sleeping kernels use for their GPU state",
        value=sum(kernel.gpu.host_memory for kernel in kernels),
    )


def register(look: Look) -> None:
    """Have Jupyter Server tell the metrics; where a server of this process does already, nothing is changed."""
    with contextlib.suppress(ValueError):
        REGISTRY.register(KernelMetrics(look))
