"""What Prometheus is told at the server's own ``/metrics``."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from jupyter_servers import Server
from notebooks import wait_until
from prometheus_client.parser import text_string_to_metric_families

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(server: Server) -> Samples:
    """Return our samples by name and labels."""
    text = server.request("GET", "metrics").text
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("gpuckpt_")
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples.get((name, frozenset(labels.items())), 0)


def scraped(server: Server, holds: Callable[[Samples], bool]) -> Samples:
    """Scrape until it holds: a scrape waits for kernels no longer than the server can be held up."""
    found: Samples = {}

    def look() -> bool:
        nonlocal found
        found = scrape(server)
        return holds(found)

    wait_until(look)
    return found


@pytest.mark.criu
def test_kernels_and_operations_are_counted(server: Server) -> None:
    with server.notebook() as (kernel_id, _):
        scraped(server, lambda found: value(found, "gpuckpt_kernels", state="running") == 1)
        server.save(kernel_id, "counted")
        failed = server.finish(server.ask("POST", f"kernels/{kernel_id}/save", {"name": "counted"}, 202))
        assert failed["state"] == "failed"
        server.finish(server.ask("POST", f"kernels/{kernel_id}/restore", {"name": "counted"}, 202))
        scraped(server, lambda found: value(found, "gpuckpt_operations_total", kind="restore", result="done") == 1)
        found = scrape(server)
        assert value(found, "gpuckpt_operations_total", kind="save", result="done") == 1
        assert value(found, "gpuckpt_operations_total", kind="save", result="failed") == 1
        assert value(found, "gpuckpt_operations_total", kind="save", result="cancelled") == 0
    # What was counted outlives the kernel that did it.
    found = scraped(server, lambda found: value(found, "gpuckpt_kernels", state="running") == 0)
    assert value(found, "gpuckpt_operations_total", kind="save", result="done") == 1


def test_labels_name_neither_kernels_nor_notebooks(server: Server) -> None:
    found = scraped(server, lambda found: any(name == "gpuckpt_kernels" for name, _ in found))
    assert {label for _, labels in found for label, _ in labels} <= {"state", "kind", "result", "le"}
    gpu_memory = {f"gpuckpt_gpu_memory_{what}_bytes" for what in ("held", "freed", "in_host")}
    assert {name for name, _ in found} >= {"gpuckpt_kernels", *gpu_memory}


def test_metrics_are_told_only_to_whoever_may_ask(server: Server) -> None:
    assert server.request("GET", "metrics", headers={"Authorization": "token wrong"}).status_code == 403
