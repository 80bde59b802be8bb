"""A kernel whose folder is removed while it runs computes on, and says at a save what happened."""

from __future__ import annotations

import shutil

import pytest
from notebooks import StartKernel

pytestmark = pytest.mark.criu


def test_a_save_tells_that_the_kernel_s_folder_was_removed_and_nothing_hangs(
    start: StartKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUCKPT_HOOK_TIMEOUT", "600")  # for so long a cell would wait to hear who it is
    notebook = start()
    notebook.run("x = 41")
    folder = notebook.folder
    (folder / "keeper.lock").unlink()  # as one that removes old files, but no sockets or FIFOs
    refused = notebook.fails("%gpuckpt save first")
    assert (refused.ename, str(folder) in refused.text) == ("Refused", True)
    shutil.rmtree(folder)
    assert notebook.value("x") == "41"
    refused = notebook.fails("%gpuckpt save first")
    assert refused.ename == "Refused"
    assert "can no longer be saved" in refused.text
    assert f"removed from its folder, {folder}" in refused.text
    assert "restart the kernel" in refused.text
    assert "running" in notebook.run("%gpuckpt status").text
    # What is advised helps.
    notebook.manager.restart_kernel(now=True)
    notebook.wait_for_ready()
    assert "Saved first" in notebook.run("%gpuckpt save first").text
