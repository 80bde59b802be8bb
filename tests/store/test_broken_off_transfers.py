"""A push or a pull that is killed at any of its requests, and done again."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from store_helpers import python

PROGRAM = Path(__file__).with_name("transfer_kills.py")


def cases(work: str, folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    process = python(PROGRAM, work, folder, stderr=subprocess.PIPE)
    output, errors = process.communicate(timeout=500)
    assert process.returncode == 0, errors
    clean, *rest = map(json.loads, output.splitlines())
    assert clean["after"]["whole"]
    assert len(rest) == len(clean["done"]["requests"]) > 10
    return clean["done"], rest


@pytest.mark.parametrize("work", ["push", "pull"])
def test_a_transfer_that_is_killed_is_gone_on_with(work: str, tmp_path: Path) -> None:
    clean, found = cases(work, tmp_path)
    arrived = []
    for case in found:
        assert case["done"] is None, "it was killed"
        assert case["after"]["whole"], case
        if work == "push":
            # It is there from the request on that makes the manifest.
            made = [what for what, _ in clean["requests"][: case["at"]]].count("create") > 1
            assert case["visible"] is made, case
            assert case["after"]["index"] >= 1
        else:
            assert case["visible"] == [], case
            assert (case["after"]["litter"], case["after"]["faults"]) == ([], 0), case
        arrived.append(clean["bytes"] - case["again"]["bytes"])
    # What has arrived is not sent or fetched again: at each later step it is no less, and all of it at the end.
    assert arrived == sorted(arrived)
    assert arrived[0] == 0
    assert len(set(arrived)) > 4
    if work == "push":
        assert arrived[-1] == clean["bytes"]


def test_pulls_saves_and_collections_at_the_same_time_do_no_harm_to_each_other(tmp_path: Path) -> None:
    process = python(PROGRAM.with_name("pulls_together.py"), tmp_path, 3, stderr=subprocess.PIPE)
    output, errors = process.communicate(timeout=500)
    assert process.returncode == 0, errors
    assert json.loads(output) == {"failed": 0, "faults": [], "litter": [], "whole": True}, errors
