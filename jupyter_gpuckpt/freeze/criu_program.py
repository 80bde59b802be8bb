"""Find the CRIU program to use, and say why each one that was looked at is not fit."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from jupyter_gpuckpt import installed
from jupyter_gpuckpt.errors import Unavailable
from jupyter_gpuckpt.linux.root_only import SYSTEM_PATH, below, changeable_in

from .criu_errors import first_line

__all__ = [
    "CriuProgram",
    "check",
    "files_of",
    "find_criu",
    "minimum_version",
    "program_in_prefix",
    "refuse_open_sockets",
    "version_text",
]

Origin = Literal["environment", "prefix", "system"]

_SYSTEM_FOLDERS = ("/usr/sbin", "/sbin", "/usr/local/sbin")
_LOADERS = {"x86_64": "ld-linux-x86-64.so.2", "aarch64": "ld-linux-aarch64.so.1"}
_LIBRARY_FOLDERS = ("usr/lib", "lib", "usr/lib64", "lib64")
_PROGRAM_FOLDERS = ("usr/sbin", "sbin", "usr/bin", "usr/local/sbin")
_VERSION_TIMEOUT = 10.0
_CHECK_TIMEOUT = 60.0
_PRIVATE_SOCKETS = "Sockets: private"
"""What our library says in a program that heeds it (`criu_sockets.c`)."""
_NEW_CONNECTIONS = "Connections: made anew"
"""What it says, too, where it puts new connections in the place of saved ones (`criu_connections.c`)."""
_TREES_FILTERS = "Filters: of the tree alone"
"""And where filters of system calls that are criu's own as well do not count as the processes' (`criu_filters.c`)."""
_MARKS = (_PRIVATE_SOCKETS, _NEW_CONNECTIONS, _TREES_FILTERS)

_WITH_OWN_PROC = ("unshare", "--mount", "--pid", "--fork", "--mount-proc", "--")
"""How a program is started with a /proc of its own, as criu has it in a sleeper: a container's is not to be written."""

_OPTIONS = (
    # A default configuration file (/etc/criu/default.conf, ~/.criu/default.conf) could change
    # what a dump holds, so it is never read.
    "--no-default-config",
    # No plugins: a CUDA plugin of the system's CRIU would move GPU memory on its own, between our
    # own steps. The folder has to exist; criu takes only files that end in .so, and here are none.
    "--libdir",
    str(Path(__file__).absolute().parent),
)


def minimum_version() -> tuple[int, int, int]:
    """Return the oldest CRIU that works on this kernel.

    Older ones than 4.1 fail on the vDSO of recent kernels. Since Linux 6.16 a kernel answers for SO_PASSCRED on few
    kinds of sockets, and CRIU before 4.2 fails on all others; ``criu check`` does not notice.
    """
    match = re.match(r"(\d+)\.(\d+)", platform.release())
    recent = match is not None and (int(match[1]), int(match[2])) >= (6, 16)
    return (4, 2, 0) if recent else (4, 1, 0)


@dataclass(frozen=True)
class CriuProgram:
    """A CRIU that is new enough.

    Attributes
    ----------
    argv : how to start it; append the command and its options. Configuration files and
        plugins are already switched off.
    version : as it reports itself.
    path : the program's file.
    origin : "environment" (named by ``GPUCKPT_CRIU``), "prefix" (put there by
        ``jupyter gpuckpt setup``) or "system".
    private_sockets : whether no other user can reach the sockets by which its processes find each other, as
        those who look for a program find out.
    new_connections : whether TCP connections inside the tree can be made anew in a restore, likewise.
    works_filtered : whether it saves and restores also where it is under a filter of system calls itself, likewise.
    """

    argv: tuple[str, ...]
    version: tuple[int, int, int]
    path: str
    origin: Origin
    private_sockets: bool = True
    new_connections: bool = True
    works_filtered: bool = True

    def environment(self) -> dict[str, str]:
        """Return the environment to start it with: nothing of the caller's passes through.

        ``CRIU_CONFIG_FILE`` and ``LD_*`` could change what criu does. The path is for the
        programs that criu itself starts (``ip``, ``tar``, action scripts). ``LD_PRELOAD`` is our
        library of `criu_sockets.c`.
        """
        return _environment()


class _UnfitError(Exception):
    """Why one candidate cannot be used."""


def find_criu() -> CriuProgram:
    """Return the CRIU to use: ``GPUCKPT_CRIU``, else the private prefix's, else the system's.

    A program named by ``GPUCKPT_CRIU`` is used or refused, never passed over in silence.

    Raises
    ------
    Unavailable
        None fits. `data["tried"]` maps every place that was looked at to why it was refused.
    """
    tried: dict[str, str] = {}
    named = installed.named_criu()
    if named:
        try:
            return _judge(_start_of(named), named, "environment")
        except _UnfitError as unfit:
            tried[named] = str(unfit)
        raise _unavailable(tried, "Correct GPUCKPT_CRIU, or unset it.")
    prefix = installed.criu_prefix()
    try:
        return program_in_prefix(prefix)
    except Unavailable as unfit:
        tried[str(prefix)] = unfit.why
    for path in _system_candidates():
        try:
            return _judge((path,), path, "system")
        except _UnfitError as unfit:
            tried[path] = str(unfit)
    if len(tried) == 1:
        tried["PATH and " + ", ".join(_SYSTEM_FOLDERS)] = "no program named criu"
    raise _unavailable(tried, "Run `gpuckpt setup` to install one for this project alone.")


def program_in_prefix(prefix: Path) -> CriuProgram:
    """Return the CRIU of a folder that distribution packages were unpacked into.

    It is started through the loader in that folder, so that it needs no library of the
    system's. Both layouts are known: everything under ``usr`` and split over ``lib`` and ``sbin``.

    Raises
    ------
    Unavailable
        There is none, or it is too old or does not start; `why` says which.
    """
    try:
        return _judge_prefix(prefix.absolute())
    except _UnfitError as unfit:
        why = str(unfit)
    except OSError as error:
        why = error.strerror or str(error)
    raise Unavailable(f"The folder {prefix} contains no usable CRIU.", why, "Run `gpuckpt setup`.")


def check(program: CriuProgram) -> None:
    """Let CRIU judge this kernel and these rights (``criu check``).

    Raises
    ------
    Unavailable
        It does not look good; `why` quotes criu's first error line.
    """
    then = "Run `gpuckpt doctor` to see what is missing on this machine."
    what = f"CRIU {version_text(program.version)} cannot work on this machine."
    try:
        done = _run((*_WITH_OWN_PROC, *program.argv, "check"), _CHECK_TIMEOUT)
    except subprocess.TimeoutExpired:
        raise Unavailable(what, f"`criu check` did not end within {_CHECK_TIMEOUT:.0f} s.", then) from None
    except OSError as error:
        raise Unavailable(what, f"{program.path} does not start: {error.strerror}.", then) from None
    if done.returncode != 0:
        said = first_line(done.stderr + done.stdout) or f"exit status {done.returncode}"
        raise Unavailable(what, f"`criu check` says: {said}", then)


def refuse_open_sockets(program: CriuProgram) -> None:
    """Refuse a CRIU whose sockets other users of the machine can reach.

    Raises
    ------
    Unavailable
        They could keep its dumps and restores from succeeding, and take the place of a process that is saved.
    """
    if program.private_sockets:
        return
    built = installed.CRIU_SOCKETS_LIBRARY.exists()
    raise Unavailable(
        "Other users of this machine could disturb saves and restores, and take part in them.",
        f"{program.path} ignores the library that keeps other users away from its sockets (LD_PRELOAD)."
        if built
        else "The library that keeps other users away from CRIU's sockets was not built.",
        "Use a CRIU that is linked dynamically, as `gpuckpt setup` installs it."
        if built
        else "Install a C compiler (`apt-get install gcc`) and reinstall this package.",
    )


def version_text(version: tuple[int, int, int]) -> str:
    """Return a version as people write it: ``4.2.1``, ``4.2``."""
    return ".".join(map(str, version if version[2] else version[:2]))


def _environment() -> dict[str, str]:
    return {
        "PATH": SYSTEM_PATH,
        "LC_ALL": "C",
        **({"LD_PRELOAD": str(installed.CRIU_SOCKETS_LIBRARY)} if installed.CRIU_SOCKETS_LIBRARY.exists() else {}),
    }


def _unavailable(tried: dict[str, str], then: str) -> Unavailable:
    return Unavailable(
        f"No CRIU of version {version_text(minimum_version())} or newer was found.",
        "; ".join(f"{place}: {why}" for place, why in tried.items()) + ".",
        then,
        tried=tried,
    )


def _system_candidates() -> list[str]:
    folders = [*os.get_exec_path(), *_SYSTEM_FOLDERS]
    # /sbin is a link to /usr/sbin nearly everywhere: the same file is judged once.
    found: dict[str, str] = {}
    for folder in folders:
        path = os.path.join(folder, "criu")  # noqa: PTH118
        # `Path.is_file` would raise on a folder that may not be looked into.
        if os.path.isabs(folder) and os.path.isfile(path):  # noqa: PTH113, PTH117
            found.setdefault(os.path.realpath(path), path)
    return list(found.values())


def _judge_prefix(prefix: Path) -> CriuProgram:
    if not prefix.is_dir():
        raise _UnfitError("not installed")
    program = _first_file(prefix / folder / "criu" for folder in _PROGRAM_FOLDERS)
    if program is None:
        raise _UnfitError("no program named criu in it")
    machine = platform.machine()
    if machine not in _LOADERS:
        raise _UnfitError(f"CRIU packages for {machine} are not supported")
    loader = _loader_in(prefix)
    if not loader:
        raise _UnfitError(f"no {_LOADERS[machine]} in it: it was made for another kind of machine")
    return _judge((*loader, str(program)), str(program), "prefix")


def _start_of(named: str) -> tuple[str, ...]:
    """Return how to start a program that was named: one that lies in such a folder has its libraries there, too."""
    program = Path(named).resolve()
    for folder in _PROGRAM_FOLDERS:
        parts = Path(folder).parts
        if program.parent.parts[-len(parts) :] == parts:
            prefix = program.parents[len(parts)]
            return (*(() if prefix == Path("/") else _loader_in(prefix)), named)
    return (named,)


def _loader_in(prefix: Path) -> tuple[str, ...]:
    """Return the loader of a folder of packages, as the beginning of a command line; nothing where it has none."""
    machine = platform.machine()
    # Multiarch folders (lib/x86_64-linux-gnu) before plain ones: lib64 holds the loader as a
    # link, which in the split layout is absolute and points into the system.
    folders = [prefix / f / f"{machine}-linux-gnu" for f in _LIBRARY_FOLDERS[:2]]
    folders += [prefix / f for f in _LIBRARY_FOLDERS]
    folders = [folder for folder in folders if folder.is_dir()]
    loader = _first_file(folder / _LOADERS[machine] for folder in folders if machine in _LOADERS)
    return (str(loader), "--library-path", ":".join(map(str, folders))) if loader is not None else ()


def _first_file(candidates: Iterable[Path]) -> Path | None:
    return next((path for path in candidates if path.is_file()), None)


# What a program said of itself (its version, and what our library says in it), by its command line
# and the file's identity, so that a program that was replaced meanwhile is asked again.
_known: dict[tuple[tuple[str, ...], int, int], tuple[tuple[int, int, int], Collection[str]]] = {}


def files_of(argv: Sequence[str], path: str) -> Iterator[Path]:
    """Yield a criu's file, and those of the loader and the libraries that its command line names."""
    for named in _named_by(argv, path):
        yield named
        yield from below(named)


def _named_by(argv: Sequence[str], path: str) -> Iterator[Path]:
    yield Path(path)
    yield from (named for word in argv for named in map(Path, word.split(":")) if named.is_absolute())


def _judge(start: tuple[str, ...], path: str, origin: Origin) -> CriuProgram:
    argv = (*start, *_OPTIONS)
    try:
        state = Path(path).stat()
    except OSError as error:
        raise _UnfitError(error.strerror or str(error)) from None
    if os.geteuid() == 0:
        _refuse_changeable(start, path)
    key = (argv, state.st_mtime_ns, state.st_ino)
    if key not in _known:
        _known[key] = _ask(argv)
    version, said = _known[key]
    if version < minimum_version():
        raise _UnfitError(f"version {version_text(version)} is older than {version_text(minimum_version())}")
    return CriuProgram(argv, version, path, origin, *(mark in said for mark in _MARKS))


def _refuse_changeable(start: Sequence[str], path: str) -> None:
    """Refuse what others could change: root's environment, by which it was found, may be theirs (`sudo -E`)."""
    if (part := changeable_in(_named_by(start, path))) is not None:
        raise _UnfitError(f"{part} can be changed by users other than root")


def _ask(argv: tuple[str, ...]) -> tuple[tuple[int, int, int], Collection[str]]:
    try:
        done = _run((*argv, "--version"), _VERSION_TIMEOUT, {"GPUCKPT_TELL_SOCKETS": "1"})
    except subprocess.TimeoutExpired:
        raise _UnfitError(f"did not report its version within {_VERSION_TIMEOUT:.0f} s") from None
    except OSError as error:
        raise _UnfitError(f"does not start ({error.strerror})") from None
    match = re.search(r"^Version: (\d+)\.(\d+)(?:\.(\d+))?", done.stdout, re.MULTILINE)
    if done.returncode != 0 or match is None:
        said = first_line(done.stderr + done.stdout) or f"exit status {done.returncode}"
        raise _UnfitError(f"does not report its version ({said})")
    return (int(match[1]), int(match[2]), int(match[3] or 0)), done.stdout.splitlines()


def _run(
    argv: tuple[str, ...], timeout: float, environment: Mapping[str, str] = MappingProxyType({})
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv,
        env={**_environment(), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=timeout,
        check=False,
    )
