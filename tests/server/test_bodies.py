"""The REST API's own description, and its events, have what the operations' descriptions have."""

from __future__ import annotations

import runpy
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_access import SPEC

from jupyter_gpuckpt.operations.description import Offered, arguments_of
from jupyter_gpuckpt.operations.requests import Fork, Long, Move, Restore, Save, operations
from jupyter_gpuckpt.server import bodies

API: dict[str, Any] = yaml.safe_load(SPEC.read_text())
TRANSFERS = {"push", "pull"}


def _schema(kind: type[Long]) -> dict[str, Any]:
    asked = API["paths"][f"/kernels/{{kernel_id}}/{kind.op}"]["post"]["requestBody"]["content"]["application/json"]
    schema: dict[str, Any] = asked["schema"]
    return schema


@pytest.mark.parametrize("kind", operations(), ids=lambda kind: kind.op)
def test_an_operation_takes_what_its_description_has(kind: type[Long]) -> None:
    schema = _schema(kind)
    assert set(schema.get("properties", ())) == set(bodies.members(kind))
    needed = {
        said.member[0] if said.member else field.name
        for field, said in arguments_of(kind, Offered.REST)
        if said.required
    }
    assert set(schema.get("required", [])) == needed
    assert schema["additionalProperties"] is False


def test_the_extension_has_the_same_types() -> None:
    made = runpy.run_path(str(Path(__file__).parents[2] / "labextension" / "request_types.py"))
    assert made["FILE"].read_text() == made["text"](), "run `python labextension/request_types.py`"


def test_the_kinds_of_operations_are_those_that_are_described() -> None:
    kinds = {kind.op for kind in operations()} | TRANSFERS
    event = yaml.safe_load((files("jupyter_gpuckpt.server") / "event_schemas" / "operation.yaml").read_text())
    assert set(event["properties"]["kind"]["enum"]) == kinds
    assert set(API["components"]["schemas"]["Operation"]["properties"]["kind"]["enum"]) == kinds


@pytest.mark.parametrize(
    ("kind", "body", "why"),
    [
        (Save, {}, "It has no 'name'."),
        (Restore, {"name": "a", "from": "b:c"}, "It has both 'name' and 'from'."),
        (Fork, {"snapshot": "a", "name": "b"}, "It has both 'snapshot' and 'name'."),
        (Fork, {"count": 65}, "Its 'count' is not from 1 to 64."),
        (Move, {}, "It has no 'gpu'."),
    ],
)
def test_what_does_not_go_together_is_named(kind: type[Long], body: dict[str, Any], why: str) -> None:
    whole = {name: body.get(name, None if type_ is int else type_()) for name, type_ in bodies.members(kind).items()}
    with pytest.raises(bodies.Unfit) as caught:
        bodies.request(kind, whole)
    assert str(caught.value) == why


def test_a_number_that_is_left_out_has_its_usual_value_and_gpu_0_is_one() -> None:
    left_out = {"snapshot": "", "name": "", "count": None, "reseed": False, "gpu": None}
    assert bodies.request(Fork, left_out)["count"] == 1
    assert bodies.request(Fork, left_out)["gpus"] == []
    assert bodies.request(Move, {"gpu": 0}) == {"gpus": [0]}
