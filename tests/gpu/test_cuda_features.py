"""What CUDA offers and few libraries use: programs of the toolkit's own compiler go on after a restore as before it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from notebooks import Notebook

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(300)]

SOURCES = Path(__file__).parent / "features"
MANAGED = SOURCES / "managed_variable.cu"
FEATURES = [path.stem for path in sorted(SOURCES.glob("*.cu")) if path != MANAGED]

LOAD = """
import ctypes
feature = ctypes.CDLL({library!r})
feature.step.restype, feature.why.restype = ctypes.c_uint64, ctypes.c_char_p
def step():
    came = feature.step()
    if feature.why():
        raise RuntimeError(feature.why().decode())
    return came
assert feature.begin() == 0, feature.why()
step()
"""


def compiled(source: Path, folder: Path) -> Path:
    """Compile a program of the GPU as a library."""
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc, of the CUDA toolkit, is not installed here")
    library = folder / f"{source.stem}.so"
    options = ["-O1", "-std=c++17", "-arch=native", "-rdc=true", "-shared", "-Xcompiler=-fPIC"]
    done = subprocess.run(
        ["nvcc", *options, "-o", str(library), str(source), "-lcudadevrt", "-lcuda"],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return library


@pytest.mark.parametrize("name", FEATURES)
def test_a_program_that_uses_it_goes_on_as_if_nothing_had_been(notebook: Notebook, name: str, tmp_path: Path) -> None:
    library = compiled(SOURCES / f"{name}.cu", tmp_path)
    notebook.run(LOAD.format(library=str(library)), timeout=100)
    notebook.run("%gpuckpt save here", timeout=120)
    notebook.run("went = [step() for _ in range(4)]", timeout=100)
    straight_on = notebook.look("went")
    assert notebook.look("len(set(went))") == "4", "a step changes nothing that can be seen"
    for _ in range(2):
        notebook.run("%gpuckpt restore here", timeout=120)
        notebook.run("went = [step() for _ in range(4)]", timeout=100)
        assert notebook.look("went") == straight_on


def test_managed_variables_are_refused_in_words_and_the_kernel_goes_on(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run(LOAD.format(library=str(compiled(MANAGED, tmp_path))), timeout=100)
    refused = notebook.run("%gpuckpt save here", timeout=120, allow_error=True)
    assert refused.status == "error"
    assert "managed (unified) memory" in refused.text
    assert notebook.look("step() != step()") == "True"
