"""What removes old temporary files of a machine leaves those of running kernels alone."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from notebooks import Notebook

pytestmark = pytest.mark.criu


@pytest.mark.skipif(shutil.which("systemd-tmpfiles") is None, reason="systemd is not here")
def test_systemd_tmpfiles_leaves_what_a_running_kernel_is_reached_by(notebook: Notebook, tmp_path: Path) -> None:
    """A kernel may run for longer than a system keeps what lies in /tmp, where homes are shared."""
    runtime = Path(os.environ["JUPYTER_RUNTIME_DIR"])
    old = tmp_path / "old"
    old.touch()
    notebook.run("x = 41")
    before = sorted(runtime.rglob("*"))
    others = [path for path in tmp_path.iterdir() if path not in (runtime, old)]  # such as IPython's history
    spared = "".join(f"x {path}\n" for path in others)
    (tmp_path / "tmpfiles.conf").write_text(f"d {tmp_path} - - - 0\n{spared}")
    subprocess.run(["systemd-tmpfiles", "--clean", tmp_path / "tmpfiles.conf"], check=True)
    assert not old.exists()
    assert sorted(runtime.rglob("*")) == before
    assert "Saved first" in notebook.run("%gpuckpt save first --wait").text
    notebook.run("x = 42")
    notebook.run("%gpuckpt restore first")
    assert notebook.value("x") == "41"
