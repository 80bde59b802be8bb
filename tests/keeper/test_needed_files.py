"""The list of files that a snapshot needs comes from elsewhere: what is odd in it is seen before a restore begins."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jupyter_gpuckpt.snapshots.needs import NeededFile, from_json, to_json

_FILES = [
    NeededFile("/a", 0o100644, 3, writable=True, hash="00", mtime=5, database="sqlite", in_transaction=True, kept=True),
    NeededFile("/b", 0o040755, mapped=False),
]


def test_it_is_read_as_it_was_written() -> None:
    assert from_json(to_json(_FILES)) == _FILES


@pytest.mark.parametrize(
    "odd",
    [
        {"path": "a"},
        {"path": 3},
        {"size": "3"},
        {"mtime": 0.5},
        {"writable": 1},
        {"mode": True},
        {"kept": None},
        {"invented": "later"},
    ],
    ids=str,
)
def test_what_is_odd_in_it_is_refused(odd: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"and not|is not valid|not known here"):
        from_json(json.dumps({"files": [{"path": "/a", "mode": 0o100644, **odd}]}).encode())
