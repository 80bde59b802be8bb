"""The store held against a plain model, under random operations and crashes (faults 1, 9, 10)."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from store_helpers import python
from system_calls import SUPPORTED

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="the fault layer is for Linux on x86-64")

CASES = Path(__file__).with_name("model_cases.py")


def test_random_operations_and_crashes_leave_what_the_model_says() -> None:
    process = python(CASES, 12, stderr=subprocess.STDOUT)
    output, _ = process.communicate(timeout=500)
    assert process.returncode == 0, output
