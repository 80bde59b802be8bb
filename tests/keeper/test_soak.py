"""The short form of ``make soak``: nothing grows with saves and restores of a kernel and a job."""

from __future__ import annotations

from pathlib import Path

import pytest
from keeper_faults import assert_no_litter, assert_nothing_left
from soak import Soak, slope_of, soak


@pytest.mark.slow
def test_nothing_grows_in_a_few_rounds(tmp_path: Path) -> None:
    found = soak(tmp_path, rounds=4, per_round=2, note=lambda _: None)
    # In so few rounds the memory of a process is not at rest yet: what is counted is held to, sizes only roughly.
    assert [fault for fault in found.faults() if "bytes a cycle" not in fault] == []
    for name, size in found.sizes[-1].items():
        assert size < 1.3 * found.sizes[0][name] + 10_000_000, f"{name}: {[sizes[name] for sizes in found.sizes]}"
    assert_no_litter()
    for folder in (tmp_path / "runtime" / "gpuckpt").glob("[!.]*"):
        assert folder.name == "job-soaked"  # it has ended, and is kept until it is forgotten
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
    assert_nothing_left(tmp_path)


def test_what_grows_is_found() -> None:
    still = {"keeper": 50_000_000, "kernel": 60_000_000}
    found = Soak(per_round=10)
    for number in range(12):
        found.counts.append({"descriptors": 14 if number < 11 else 15})
        # It grows by 500 bytes a cycle, and jumps about by more than that.
        found.sizes.append({**still, "keeper": still["keeper"] + number * 5000 + (number % 3) * 90_000})
    assert found.faults() == ["descriptors: 14 in round 3, 15 in round 11"]
    for number, size in enumerate(found.sizes):
        size["kernel"] += number * 1_000_000
    assert any(fault.startswith("kernel grows by 100,000 bytes a cycle") for fault in found.faults())


@pytest.mark.parametrize("rounds", [10, 300, 1000])
def test_a_slope_is_the_same_however_long_it_lasts(rounds: int) -> None:
    assert slope_of([7.0 * number for number in range(rounds)]) == pytest.approx(7)
