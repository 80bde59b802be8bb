"""Machines that share a store, for the tests of a file at a time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shared_store.machines import Cluster


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    cluster = Cluster(*getattr(request, "param", ()))
    try:
        yield cluster
    finally:
        cluster.close()
