"""Install CRIU for this project alone, from the distribution's own packages, into one folder.

Debian 12 and Ubuntu 24.04 ship a CRIU that is too old for today's kernels, or none, while their
newer releases have one that works, on a C library that the old release lacks. So the newer
release's packages, libraries included, are unpacked (not installed) into a folder, and CRIU is
started through the loader in it. They come from the mirror that apt is set up for, signed by the
keys that it is set up with; nothing of the system changes.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from jupyter_gpuckpt.errors import Unavailable
from jupyter_gpuckpt.freeze.criu_program import (
    CriuProgram,
    check,
    minimum_version,
    program_in_prefix,
    version_text,
)
from jupyter_gpuckpt.linux.root_only import SYSTEM_PATH, changeable, environment

from .apt_sources import AptSource, configured_sources
from .capabilities import may_run_criu
from .distribution import Distribution, this_distribution
from .private_apt import AptFailed, PrivateApt, run

__all__ = ["install_criu"]

_NOT_INSTALLED = "CRIU was not installed; nothing was changed."
_UNPACK_TIMEOUT = 120.0

# The releases that are looked into, in this order, and the components that CRIU and its
# libraries are in. Debian: 4.1 is in trixie. Ubuntu: in the universe of its releases since 25.04,
# of which the first with long-term support comes first; `devel` is the name of the newest.
_RELEASES = {
    "debian": (("trixie", "forky", "sid"), "main"),
    "ubuntu": (("resolute", "devel"), "main universe"),
}
# Sources may name a release by what it is now instead of by its code name.
_ALIASES = frozenset({"oldstable", "stable", "testing", "unstable", "sid", "devel"})


def install_criu(prefix: Path, progress: Callable[[str], None]) -> CriuProgram:
    """Make sure that the folder `prefix` holds a CRIU that works, and return it.

    What is there already and fits is left alone. A new one is built beside it, tried, and
    renamed into place, so that `prefix` never holds half of one. Two at once wait for each other.

    Parameters
    ----------
    prefix : the folder to make; see `settings.criu_prefix`.
    progress : told one line for each step.

    Raises
    ------
    Unavailable
        It cannot be installed here; `why` names every release that was tried, `then` says what
        a user can do instead.
    """
    prefix = prefix.absolute()
    if os.geteuid() == 0 and (part := changeable(prefix, {})) is not None:
        raise Unavailable(
            _NOT_INSTALLED,
            f"{part} can be changed by users other than root, who would then run programs from it.",
            "Set GPUCKPT_CRIU_PREFIX to a folder where only root can write, here and where the Jupyter server starts.",
        )
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        with _alone(prefix):
            try:
                program = program_in_prefix(prefix)
            except Unavailable:
                return _install(prefix, progress)
            progress(f"CRIU {version_text(program.version)} is already installed: {prefix}")
            return program
    except OSError as error:
        raise Unavailable(
            _NOT_INSTALLED,
            f"{error.filename or prefix}: {error.strerror or error}.",
            "Free space there or set GPUCKPT_CRIU_PREFIX to a folder that you can write to.",
        ) from None


@contextmanager
def _alone(prefix: Path) -> Iterator[None]:
    """Hold the lock of a prefix. The lock's file stays: removing it would let two through."""
    descriptor = os.open(prefix.parent / f".{prefix.name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _install(prefix: Path, progress: Callable[[str], None]) -> CriuProgram:
    system = this_distribution()
    family = next((name for name in system.ids if name in _RELEASES), None)
    if family is None or not _is_there("apt-get") or not _is_there("dpkg-deb"):
        raise Unavailable(
            _NOT_INSTALLED,
            f"It cannot be installed automatically on {system.name}: that needs apt and dpkg.",
            system.how_to_install_criu(),
        )
    releases, components = _RELEASES[family]
    sources = _own_archive(system, frozenset(releases))
    tried: dict[str, str] = {}
    if not sources:
        tried["apt's sources"] = f"none is {system.name}'s own archive"
    for release in releases:
        for source in sources:
            try:
                return _install_from(source.stanza(release, components), release, prefix, progress)
            except (AptFailed, Unavailable) as failure:
                why = failure.why if isinstance(failure, Unavailable) else str(failure)
                tried[f"{release} at {source.uris}"] = why.rstrip(".")
                progress(f"{release}: {why}")
    raise Unavailable(
        _NOT_INSTALLED,
        "; ".join(f"{place}: {why}" for place, why in tried.items()) + ".",
        "Correct apt's sources or the network, or install CRIU 4.1 or newer so that `criu` is in "
        "PATH, or name it in GPUCKPT_CRIU.",
        tried=tried,
    )


def _is_there(program: str) -> bool:
    return shutil.which(program, path=SYSTEM_PATH) is not None


def _own_archive(system: Distribution, releases: frozenset[str]) -> list[AptSource]:
    """Return the sources that carry the distribution itself, not an addition to it.

    Security updates and backports are suites of their own (``NAME-security``); other vendors'
    archives mostly have no component ``main`` or no release's name. One that has both is tried
    too: it is trusted by this apt already, and is passed over when it has no CRIU.
    """
    try:
        configured = configured_sources()
    except (OSError, subprocess.SubprocessError, ValueError):
        return []
    own = system.codenames | releases | _ALIASES
    found = [s for s in configured if own.intersection(s.suites) and "main" in s.components]
    return list(dict.fromkeys(found))


def _install_from(stanza: str, release: str, prefix: Path, progress: Callable[[str], None]) -> CriuProgram:
    with PrivateApt(stanza) as apt:
        progress(f"{release}: fetching the lists of packages")
        apt.update()
        offered = apt.version("criu")
        if not _new_enough(offered):
            raise AptFailed(f"its criu is {offered}" if offered else "it has no criu")
        progress(f"{release}: downloading criu {offered} and its libraries")
        packages = apt.download("criu")
        _remove_leftovers(prefix)
        folder = Path(tempfile.mkdtemp(prefix=f".{prefix.name}-", dir=prefix.parent))
        try:
            folder.chmod(0o755)
            progress(f"{release}: unpacking {len(packages)} packages")
            for package in packages:
                argv = ["dpkg-deb", "--extract", str(package), str(folder)]
                run(argv, environment(), _UNPACK_TIMEOUT)
            program = program_in_prefix(folder)
            if may_run_criu():
                check(program)
            else:
                progress("without root's rights: CRIU was not tried here")
            _put_in_place(folder, prefix)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    progress(f"CRIU {version_text(program.version)} is installed: {prefix}")
    return program_in_prefix(prefix)


def _new_enough(debian_version: str) -> bool:
    # [epoch:]upstream[-revision], deb-version(7)
    match = re.match(r"(?:\d+:)?(\d+)\.(\d+)", debian_version)
    return match is not None and (int(match[1]), int(match[2])) >= minimum_version()[:2]


def _remove_leftovers(prefix: Path) -> None:
    """Remove what an interrupted installation left behind; the lock is held, so none is at work."""
    for leftover in prefix.parent.glob(f".{prefix.name}-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _put_in_place(folder: Path, prefix: Path) -> None:
    if os.path.lexists(prefix):
        # A rename cannot replace a folder that is not empty. What was there was unfit.
        unfit = Path(tempfile.mkdtemp(prefix=f".{prefix.name}-", dir=prefix.parent))
        prefix.rename(unfit / "unfit")
        folder.rename(prefix)
        shutil.rmtree(unfit, ignore_errors=True)
    else:
        folder.rename(prefix)
