"""A kernel goes to sleep by itself when nobody uses it, and only then."""

from __future__ import annotations

import time

import pytest
from keeper_faults import Asked, Requested, is_asleep, status
from notebooks import Notebook, StartKernel, wait_until

from jupyter_gpuckpt.setting import parse_duration

pytestmark = pytest.mark.criu

AFTER = 1.0  # seconds


@pytest.fixture(autouse=True)
def _without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUCKPT_SLEEP_WITHOUT_GPU", "on")


def falls_asleep(notebook: Notebook) -> None:
    wait_until(lambda: is_asleep(notebook))


def stays_awake(notebook: Notebook) -> None:
    """Look for twice as long as an idle kernel needs to fall asleep."""
    deadline = time.monotonic() + 2.5 * AFTER
    while time.monotonic() < deadline:
        assert not is_asleep(notebook)
        time.sleep(0.1)


def set_after(notebook: Notebook, after: float | None) -> None:
    Requested(notebook, "autosleep", {"after": after}).outcome()


def test_an_idle_kernel_sleeps_and_sleeps_again_after_a_cell(notebook: Notebook) -> None:
    notebook.run(f"%gpuckpt autosleep {AFTER:g}s")
    for _ in range(2):
        falls_asleep(notebook)
        slept = status(notebook)
        # Not before it had been idle for so long.
        assert slept["asleep_since"] > slept["last_active"]
        assert notebook.value("1 + 1").endswith("2")
    assert "does not go to sleep" in notebook.run("%gpuckpt autosleep off").text
    stays_awake(notebook)


def test_it_stays_awake_while_a_cell_runs_a_thread_works_or_it_is_kept_awake(notebook: Notebook) -> None:
    set_after(notebook, AFTER)
    cell = Asked(notebook, "import time; time.sleep(600)")
    wait_until(lambda: status(notebook)["busy"])
    stays_awake(notebook)
    notebook.manager.interrupt_kernel()
    assert cell.answer()["ename"] == "KeyboardInterrupt"
    # A thread between cells, which waits as much as it works.
    notebook.run("""
import threading
stop = threading.Event()
def work():
    while not stop.wait(0.01):
        sum(range(1_000_000))
threading.Thread(target=work).start()
""")
    stays_awake(notebook)
    notebook.run("%gpuckpt awake on\nstop.set()")
    stays_awake(notebook)
    notebook.run("%gpuckpt awake off")
    falls_asleep(notebook)


def test_all_kernels_are_told_by_the_environment_and_without_gpu_state_they_stay_awake(
    start: StartKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUCKPT_SLEEP_AFTER", f"{AFTER:g}s")
    notebook = start()
    assert status(notebook)["sleep_after"] == AFTER
    falls_asleep(notebook)
    notebook.close()
    monkeypatch.delenv("GPUCKPT_SLEEP_WITHOUT_GPU")
    stays_awake(start())


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("45s", 45), ("30m", 1800), ("1.5h", 5400), ("2 H", 7200), ("off", None), ("0", None)],
)
def test_times_are_written_as_people_write_them(text: str, seconds: float | None) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "-5m", "5 years", "1e99", "nan", "5m5"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="off"):
        parse_duration(text)
