"""Dataclasses that are quick to define are like those of the standard library."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from dataclasses import field
from typing import Any, ClassVar

import pytest

from jupyter_gpuckpt import quick_dataclass


@quick_dataclass.dataclass(frozen=True, kw_only=True)
class Quick:
    kind: ClassVar[str] = "a"
    name: str
    secret: str = field(default="s", repr=False)
    sizes: list[int] = field(default_factory=list)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plain:
    kind: ClassVar[str] = "a"
    name: str
    secret: str = field(default="s", repr=False)
    sizes: list[int] = field(default_factory=list)


@pytest.fixture(params=[Quick, Plain])
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(params=[quick_dataclass.dataclass, dataclasses.dataclass])
def dataclass(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_what_is_left_out_has_its_default_and_each_its_own_list(kind: Any) -> None:
    one, other = kind(name="n"), kind(name="n")
    assert (one.name, one.secret, one.sizes, one.kind) == ("n", "s", [], "a")
    assert one.sizes is not other.sizes
    assert vars(kind(name="n", sizes=[1])) == {"name": "n", "secret": "s", "sizes": [1]}


@pytest.mark.parametrize("wrong", [{}, {"name": "n", "sise": 1}])
def test_what_is_missing_and_what_is_unknown_is_refused(kind: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        kind(**wrong)
    with pytest.raises(TypeError):
        kind("n")


def test_they_compare_by_class_and_fields_and_show_what_may_be_shown(kind: Any) -> None:
    assert kind(name="n") == kind(name="n") != kind(name="m")
    assert kind(name="n") != {"name": "n", "secret": "s", "sizes": []}
    assert repr(kind(name="n")) == f"{kind.__name__}(name='n', sizes=[])"


def test_a_frozen_one_is_set_once(kind: Any) -> None:
    one = kind(name="n")
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.name = "m"
    with pytest.raises(dataclasses.FrozenInstanceError):
        del one.name
    assert one.name == "n"


def test_they_are_copied_replaced_and_taken_apart(kind: Any) -> None:
    one = kind(name="n", sizes=[1])
    assert dataclasses.replace(one, name="m") == kind(name="m", sizes=[1])
    assert dataclasses.asdict(one) == {"name": "n", "secret": "s", "sizes": [1]}
    assert copy.deepcopy(one) == pickle.loads(pickle.dumps(one)) == one


def test_places_subclasses_hashes_and_what_follows_the_start(dataclass: Callable[..., Any]) -> None:
    @dataclass(frozen=True)
    class Base:
        a: int
        b: int = 2

        def __post_init__(self) -> None:
            if self.a < 0:
                raise ValueError(self.a)

    @dataclass(frozen=True)
    class Inner(Base):
        b: int = 3
        c: int = 4

        def __repr__(self) -> str:
            return "its own"

    assert (Inner(1).b, Inner(1, 5).b, Inner(1, c=5).c) == (3, 5, 5)
    assert len({Base(1), Base(1), Base(2)}) == 2
    assert repr(Inner(1)) == "its own"
    assert Inner.__match_args__ == ("a", "b", "c")
    with pytest.raises(ValueError, match="-1"):
        Inner(-1)
    for wrong in (lambda: Base(1, 2, 3), lambda: Base(1, a=1), lambda: Base(b=1)):
        with pytest.raises(TypeError):
            wrong()

    @dataclass
    class Changed:
        a: int

    one = Changed(1)
    one.a = 2
    assert one == Changed(2)
    with pytest.raises(TypeError):
        hash(one)
