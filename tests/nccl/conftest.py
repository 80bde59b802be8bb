"""The made-up NCCL, and other small libraries that tests make."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

_HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def compiled() -> Callable[..., Path]:
    """Make a library of C source, with more words for the compiler."""

    def compile_it(source: Path, library: Path, *more: str) -> Path:
        words = ["cc", "-O2", "-Wall", "-Wextra", "-fPIC", "-shared", f"-Wl,-soname,{library.name}"]
        subprocess.run([*words, "-o", library, source, *more], check=True)
        return library

    return compile_it


@pytest.fixture(scope="session")
def made_up_nccl(tmp_path_factory: pytest.TempPathFactory, compiled: Callable[..., Path]) -> Path:
    """The library of `made_up_nccl.c`."""
    return compiled(_HERE / "made_up_nccl.c", tmp_path_factory.mktemp("nccl") / "libnccl.so.2")
