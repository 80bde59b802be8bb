"""Run apt over lists and caches of its own, so that nothing of the system's apt changes.

Sources, keys and proxies are those that the user's apt uses, and signatures are checked as apt
always does. The package database is empty, so a download brings every library that a program
needs, whatever this system has.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType

from jupyter_gpuckpt.linux.root_only import environment, temporary_folder

__all__ = ["AptFailed", "PrivateApt"]

_UPDATE_TIMEOUT = 300.0
_DOWNLOAD_TIMEOUT = 900.0
_QUERY_TIMEOUT = 60.0

# `#clear` undoes what /etc/apt says: hooks that would touch the system, a default release that
# is not among the sources here.
_CONFIGURATION = """\
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
#clear DPkg::Post-Invoke;
#clear APT::Default-Release;
APT::Update::Error-Mode "any";
APT::Install-Recommends "false";
Acquire::http::Timeout "30";
Acquire::https::Timeout "30";
Dir::State "{folder}/state";
Dir::State::lists "{folder}/state/lists";
Dir::State::status "{folder}/state/status";
Dir::Cache "{folder}/cache";
Dir::Cache::archives "{folder}/cache/archives";
Dir::Etc::sourcelist "/dev/null";
Dir::Etc::sourceparts "{folder}/sources";
Dir::Etc::preferences "/dev/null";
Dir::Etc::preferencesparts "{folder}/preferences";
"""


class AptFailed(Exception):
    """A run of apt or dpkg failed; the text is its own first error."""


class PrivateApt:
    """An apt with one source, in a temporary folder that is gone on exit.

    Parameters
    ----------
    source : the stanza of the only source.
    """

    def __init__(self, source: str) -> None:
        self._source = source

    def __enter__(self) -> PrivateApt:
        self._temporary = tempfile.TemporaryDirectory(prefix="gpuckpt-apt-", dir=temporary_folder())
        folder = self._folder = Path(self._temporary.name)
        # apt downloads as a user of its own, who has to get in.
        folder.chmod(0o755)
        for part in ("state/lists/partial", "cache/archives/partial", "sources", "preferences"):
            (folder / part).mkdir(parents=True)
        (folder / "state/status").touch()
        (folder / "sources/only.sources").write_text(self._source)
        (folder / "apt.conf").write_text(_CONFIGURATION.format(folder=folder))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._temporary.cleanup()

    def update(self) -> None:
        """Fetch the package lists and check their signature.

        Raises
        ------
        AptFailed
        """
        self._run("apt-get", "update", "-q", timeout=_UPDATE_TIMEOUT)

    def version(self, package: str) -> str:
        """Return the version of `package` that would be installed; empty where there is none."""
        said = self._run("apt-cache", "policy", package, timeout=_QUERY_TIMEOUT)
        match = re.search(r"^\s*Candidate: (\S+)", said, re.MULTILINE)
        return "" if match is None or match[1] == "(none)" else match[1]

    def download(self, package: str) -> list[Path]:
        """Download `package` and all that it depends on, checked; return the files.

        They are there until the `with` block ends.

        Raises
        ------
        AptFailed
        """
        self._run(
            *("apt-get", "install", "-q", "-y", "--download-only", package),
            timeout=_DOWNLOAD_TIMEOUT,
        )
        return sorted((self._folder / "cache/archives").glob("*.deb"))

    def _run(self, program: str, *arguments: str, timeout: float) -> str:
        argv = [program, "-c", str(self._folder / "apt.conf"), *arguments]
        return run(argv, environment(DEBIAN_FRONTEND="noninteractive"), timeout)


def run(argv: list[str], env: dict[str, str], timeout: float) -> str:
    """Run a program of apt's or dpkg's and return what it printed.

    Raises
    ------
    AptFailed
    """
    try:
        done = subprocess.run(
            argv,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise AptFailed(f"{argv[0]} did not end within {timeout:.0f} s") from None
    except OSError as error:
        raise AptFailed(f"{argv[0]} does not start ({error.strerror})") from None
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith(("E: ", "dpkg"))]
        raise AptFailed((errors or lines or [f"{argv[0]}: exit status {done.returncode}"])[0])
    return done.stdout
