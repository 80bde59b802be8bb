"""What CRIU has found out about the system is kept for the next run of it, in memory or not, and nothing in /run."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from notebooks import StartKernel

from jupyter_gpuckpt import settings
from jupyter_gpuckpt.freeze.criu_features import asked_for
from jupyter_gpuckpt.freeze.criu_program import CriuProgram, find_criu

pytestmark = [pytest.mark.criu, pytest.mark.skipif(os.geteuid() != 0, reason="criu keeps it only where it is root")]

_KEPT = "Loaded kdat cache"


@pytest.fixture
def criu() -> CriuProgram:
    return find_criu()


def looked(criu: CriuProgram, environment: Mapping[str, str]) -> str:
    """Have criu look at the system, and return what it says."""
    done = subprocess.run(
        [*criu.argv, "check", "-v4"],
        env={**criu.environment(), **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_the_second_criu_does_not_look_again(criu: CriuProgram, tmp_path: Path) -> None:
    before = set(Path("/run").glob("criu.kdat*"))
    environment = asked_for(criu, tmp_path / "shared")
    assert _KEPT not in looked(criu, environment)
    assert _KEPT in looked(criu, asked_for(criu, tmp_path / "shared"))
    (kept,) = (tmp_path / "shared").iterdir()
    assert kept.stat().st_mode & 0o777 == 0o600
    assert set(Path("/run").glob("criu.kdat*")) == before


def test_a_kernel_s_saves_and_restores_do_not_look_again(start: StartKernel) -> None:
    notebook = start()
    notebook.run("%gpuckpt save here")
    (kept,) = settings.shared_dir().glob("criu-*")
    before = kept.stat()
    assert before.st_size > 0
    notebook.run("%gpuckpt save there")
    notebook.run("%gpuckpt restore here --discard")
    after = kept.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns), "criu has written it anew"
    assert list(settings.shared_dir().glob("criu-*")) == [kept]


def test_what_is_no_answer_of_criu_s_is_not_taken(criu: CriuProgram, tmp_path: Path) -> None:
    environment = asked_for(criu, tmp_path)
    kept = Path(environment["GPUCKPT_FEATURES"])
    elsewhere = tmp_path / "elsewhere"
    looked(criu, environment)
    answers = kept.read_bytes()
    for wrong in (b"", answers[:100], bytes(len(answers))):
        kept.write_bytes(wrong)
        assert _KEPT not in looked(criu, environment)
        assert _KEPT in looked(criu, environment)
    shutil.move(kept, elsewhere)
    kept.symlink_to(elsewhere)
    assert _KEPT not in looked(criu, environment)


def test_another_criu_looks_for_itself(criu: CriuProgram, tmp_path: Path) -> None:
    copy = tmp_path / "criu"
    shutil.copy(criu.path, copy)
    other = CriuProgram((*criu.argv[:-4], str(copy)), criu.version, str(copy), "environment")
    assert asked_for(criu, tmp_path) == asked_for(criu, tmp_path)
    assert asked_for(criu, tmp_path) != asked_for(other, tmp_path)


def test_a_folder_of_somebody_else_s_is_not_used(criu: CriuProgram, tmp_path: Path) -> None:
    os.chown(tmp_path, 65534, 65534)
    assert asked_for(criu, tmp_path) == {}
