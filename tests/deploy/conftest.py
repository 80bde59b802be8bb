"""What renders the chart, built once."""

from __future__ import annotations

import pytest
from helm_chart import Chart, what_is_missing


@pytest.fixture(scope="session")
def _renderer(tmp_path_factory: pytest.TempPathFactory) -> Chart:
    return Chart(tmp_path_factory.mktemp("chart"))


@pytest.fixture
def chart(_renderer: Chart) -> Chart:
    """The chart, which can be rendered; skip where it cannot."""
    if missing := what_is_missing():
        pytest.skip(missing)
    return _renderer


@pytest.fixture
def chart_with_notes(_renderer: Chart) -> Chart:
    """The same, of what shows its notes, too."""
    if missing := what_is_missing(notes=True):
        pytest.skip(missing)
    return _renderer
