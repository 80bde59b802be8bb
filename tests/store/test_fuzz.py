"""Bytes of strangers, as many as a coverage-guided fuzzer tries in a few seconds."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(not importlib.util.find_spec("atheris"), reason="atheris has no wheel for this Python or machine")
def test_the_fuzzer_finds_nothing(tmp_path: Path) -> None:
    program = Path(__file__).with_name("fuzz_parsers.py")
    words = ["-runs=4000", "-seed=1", "-max_len=4096", "-rss_limit_mb=1024", f"-artifact_prefix={tmp_path}/"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    said = subprocess.run(
        [sys.executable, program, tmp_path, *words], capture_output=True, text=True, timeout=500, env=environment
    )
    assert said.returncode == 0, said.stderr
    assert "Done 4000 runs" in said.stderr
