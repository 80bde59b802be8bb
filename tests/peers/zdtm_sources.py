"""criu's sources, which have zdtm's programs in them: from the distribution's own archive, by its own apt."""

from __future__ import annotations

import os
import subprocess
import tarfile
from pathlib import Path

from jupyter_gpuckpt.machine.apt_sources import configured_sources
from jupyter_gpuckpt.machine.private_apt import AptFailed, PrivateApt

__all__ = ["fetch"]

_RELEASES = ("sid", "devel")
"""The newest of Debian and of Ubuntu, as their archives call them."""
_LIMIT = 600.0


class _SourceApt(PrivateApt):
    """The same, of source packages."""

    def download_source(self, package: str, folder: Path) -> None:
        """Download the sources of `package` into `folder`, checked.

        Raises
        ------
        AptFailed
        """
        before = Path.cwd()
        os.chdir(folder)  # where apt puts them
        try:
            self._run("apt-get", "source", "-q", "--download-only", package, timeout=_LIMIT)
        finally:
            os.chdir(before)


def fetch(folder: Path) -> Path:
    """Return the folder with criu's sources; they are downloaded once.

    Raises
    ------
    RuntimeError : they cannot be had; it says what can be done instead.
    """
    unpacked = folder / "criu"
    tried = []
    if not unpacked.exists():
        try:
            sources = [source for source in configured_sources() if "main" in source.components]
        except (OSError, subprocess.SubprocessError) as error:
            sources, tried = [], [str(error)]
        for stanza in (source.stanza(release, "main") for source in sources for release in _RELEASES):
            stanza = stanza.replace("Types: deb\n", "Types: deb-src\n").replace("Targets: Packages", "Targets: Sources")
            try:
                apt = _SourceApt(stanza)
                with apt:
                    apt.update()
                    apt.download_source("criu", folder)
                break
            except AptFailed as failure:
                tried.append(str(failure))
        archives = sorted(folder.glob("criu_*.orig.tar.*"))
        if not archives:
            raise RuntimeError(
                f"criu's sources could not be downloaded ({'; '.join(tried) or 'apt has no source that fits'}). "
                "Name a folder that has them: make test-peers ZDTM=/path/to/criu"
            )
        with tarfile.open(archives[-1]) as archive:
            archive.extractall(folder / "criu.new", filter="data")
        (top,) = (folder / "criu.new").iterdir()
        top.rename(unpacked)
        (folder / "criu.new").rmdir()
    return unpacked
