"""What `make` takes to be out of date, and which tests it runs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_TESTS = _ROOT / "tests"
_APART = {"hub", "kubernetes", "pods", "programs", "shared_store", "slurm"}
"""The folders whose tests have a target of their own."""


def _would(*words: str) -> str:
    alone = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    words = ("make", "--dry-run", *words)
    return subprocess.run(words, cwd=_ROOT, env=alone, check=True, stdout=subprocess.PIPE, text=True).stdout


def _files(command: str) -> list[Path]:
    """Return the files with tests that pytest collects where it is given these words."""
    words = shlex.split(command)[3:]
    left_out = [_ROOT / word.removeprefix("--ignore=") for word in words if word.startswith("--ignore=")]
    given = [_ROOT / word for word in words if not word.startswith("--")] or [_TESTS]
    found = [path for one in given for path in ([one] if one.is_file() else sorted(one.rglob("test_*.py")))]
    return [path for path in found if not any(path.is_relative_to(folder) for folder in left_out)]


def test_setup_builds_a_library_again_when_a_source_of_it_has_changed() -> None:
    sources = {path.parent: path for path in (_ROOT / "jupyter_gpuckpt").rglob("*.c")}
    assert len(sources) > 2
    for source in sources.values():
        assert "pip install" in _would(f"--what-if={source.relative_to(_ROOT)}", ".venv/ready"), source


def test_each_test_runs_in_one_part() -> None:
    parts = re.findall(r"^PARTS := ((?:.*\\\n)*.*)", (_ROOT / "Makefile").read_text(), re.MULTILINE)[0]
    commands = re.findall(r"^\S+ -m pytest .*", _would(*parts.replace("\\", "").split()), re.MULTILINE)
    ran = [path for command in commands for path in _files(command)]
    wanted = {path for path in _TESTS.rglob("test_*.py") if path.relative_to(_TESTS).parts[0] not in _APART}
    if Path("/dev/nvidiactl").exists():
        wanted = {path for path in wanted if path.parent.name != "gpu"}
    assert len(ran) == len(set(ran))
    assert set(ran) == wanted
