"""A machine with a broker and its people, shared by the tests of a module."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
from people import Machine, Person


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    machine = Machine.or_skip()
    yield machine
    machine.close()


@pytest.fixture(scope="module")
def alice(machine: Machine) -> Person:
    """Alice, with a kernel."""
    alice = machine.person("alice")
    alice.starts_kernel()
    return alice


@pytest.fixture(scope="module")
def bob(machine: Machine) -> Person:
    """Bob, who may use the broker too."""
    return machine.person("bob")


@pytest.fixture
def person(machine: Machine) -> Iterator[Callable[..., Person]]:
    """Make more people, for one test."""
    made: list[Person] = []

    def make(name: str, **kwargs: object) -> Person:
        made.append(machine.person(name, **kwargs))
        return made[-1]

    yield make
    for one in made:
        with contextlib.suppress(BrokenPipeError):  # those that could not begin
            one.close()
