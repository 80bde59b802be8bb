"""What `make` takes to be out of date."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

_ROOT = Path(__file__).parents[2]


def test_setup_builds_a_library_again_when_a_source_of_it_has_changed() -> None:
    sources = {path.parent: path for path in (_ROOT / "jupyter_gpuckpt").rglob("*.c")}
    assert len(sources) > 2
    alone = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    for source in sources.values():
        words = ["make", "--dry-run", f"--what-if={source.relative_to(_ROOT)}", ".venv/ready"]
        would = subprocess.run(words, cwd=_ROOT, env=alone, check=True, stdout=subprocess.PIPE, text=True).stdout
        assert "pip install" in would, source
