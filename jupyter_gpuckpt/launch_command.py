"""Whether a kernelspec's command starts an ipykernel that can import our kernel class."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from . import __version__

__all__ = ["with_agent"]

_OPTION = "--IPKernelApp.kernel_class="
_KERNEL_CLASS = f"{_OPTION}jupyter_gpuckpt.kernel.ipython.GpuckptKernel"
_MODULES = ("ipykernel_launcher", "ipykernel")
_OPTIONS = frozenset("EIsS")
_VARIABLES = ("PYTHONHOME", "PYTHONPATH", "PYTHONNOUSERSITE", "PYTHONUSERBASE")
"""These, and Python's options before them, say where it looks for packages."""
# Python begins to look in the working folder; ipykernel's launcher does not.
_ASK = (
    "import sys; sys.path = list(filter(None, sys.path)); import jupyter_gpuckpt as our; "
    "from importlib.metadata import version; print(our.__version__, version('ipykernel'))"
)
_TO_ANSWER = 10.0  # seconds


def with_agent(cmd: Sequence[str], env: Mapping[str, str], cwd: str) -> tuple[list[str], str]:
    """Return the command, with our kernel class where it starts an ipykernel that can import it, and its version.

    Without it the version is empty. `env` and `cwd` are what the command is started with. Another interpreter than this
    one is asked, which takes some 30 ms.
    """
    at = _module_at(cmd)
    # Somebody else's kernel class is not replaced.
    if at is None or cmd[at] not in _MODULES or any(word.startswith(_OPTION) for word in cmd):
        return list(cmd), ""
    python = shutil.which(Path(cwd, cmd[0]) if os.sep in cmd[0] else cmd[0], path=env.get("PATH"))
    options = [*cmd[1 : at - 1], cmd[at - 1].removesuffix("m")]
    if python is None:
        return list(cmd), ""
    found = version("ipykernel") if _is_this_one(python, options, env) else _ipykernel([python, *options], env, cwd)
    return ([*cmd, _KERNEL_CLASS] if found else list(cmd)), found


def _module_at(cmd: Sequence[str]) -> int | None:
    """Return where in a command the module stands that Python is told to run (``-m``); None where there is none."""
    at = 1
    while at < len(cmd) and cmd[at][:1] == "-":
        if _is_of_letters(cmd[at]) and cmd[at].endswith("m"):
            return at + 1 if at + 1 < len(cmd) else None
        at += 2 if cmd[at] in ("-X", "-W") else 1  # their value may be a word of its own
    return None


def _is_of_letters(word: str) -> bool:
    """Tell whether a word is made of options without values (``-I``, ``-uB``); ``-m`` may be the last."""
    return word[:1] == "-" and word[1:2] not in ("X", "W", "c", "-")


def _is_this_one(python: str, options: Sequence[str], env: Mapping[str, str]) -> bool:
    """Tell whether an interpreter finds the packages that this one finds."""
    looks_elsewhere = any(_is_of_letters(word) and _OPTIONS & set(word) for word in options)
    looks_elsewhere |= any(env.get(name) != os.environ.get(name) for name in _VARIABLES)
    return not looks_elsewhere and _environment(python) == _environment(sys.executable)


def _ipykernel(asking: Sequence[str], env: Mapping[str, str], cwd: str) -> str:
    """Ask an interpreter, given with its options, for its ipykernel's version; empty unless it has our package."""
    asking = [*asking[:-1], asking[-1] + "c", _ASK]
    try:
        asked = subprocess.run(asking, env=env, cwd=cwd, timeout=_TO_ANSWER, capture_output=True, text=True, check=True)
    except (OSError, ValueError, subprocess.SubprocessError):
        return ""
    ours, _, found = asked.stdout.strip().partition(" ")
    return found if ours == __version__ else ""


def _environment(python: str) -> Path:
    """Return what tells an interpreter's environment from every other: its folder, or the base interpreter itself.

    Python finds a virtual environment by the path that it is started by, whatever that is a link to (site: `pyvenv.cfg`
    beside it, or one folder above). Conda's environments have an interpreter of their own, maybe as a hard link.
    """
    folder = Path(python).absolute().parent
    for prefix in (folder, folder.parent):
        if (prefix / "pyvenv.cfg").is_file():
            return prefix.resolve()
    return Path(python).resolve()
