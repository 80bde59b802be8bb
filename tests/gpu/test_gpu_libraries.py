"""Libraries that are common on GPUs: their programs go on after a restore as they did after the save."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest
from libraries import LIBRARIES
from notebooks import Notebook

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(300)]


def two_steps(notebook: Notebook) -> str:
    """Go on, and return what came of it: apart from what the libraries print."""
    notebook.run("went = step(), step()", timeout=200)
    return notebook.look("went")


@pytest.mark.parametrize("name", LIBRARIES)
def test_its_program_goes_on_after_a_restore_as_it_did_after_the_save(
    notebook: Notebook, name: str, tmp_path: Path
) -> None:
    library = LIBRARIES[name]
    missing = [package for package in library.packages if importlib.util.find_spec(package) is None]
    if missing := [*missing, *(tool for tool in library.tools if shutil.which(tool) is None)]:
        pytest.skip(f"{' and '.join(missing)} not installed here")
    notebook.run(f"%cd -q {tmp_path}")
    notebook.run(library.source, timeout=200)
    notebook.run("%gpuckpt save here", timeout=120)
    straight_on = two_steps(notebook)
    assert notebook.look("len(set(went))") == "2", "a step changes nothing that can be seen"
    for _ in range(2):
        notebook.run("%gpuckpt restore here", timeout=120)
        assert two_steps(notebook) == straight_on
