"""Where things live and how long to wait: every path and time limit of the project, in one place.

Each can be set by an environment variable, named beside it.
"""

from __future__ import annotations

import os
from pathlib import Path

from jupyter_core.paths import jupyter_data_dir, jupyter_runtime_dir

from .errors import Refused
from .private_folders import why_not_private

NAMESPACE_RUN_DIR = "/dev/shm/gpuckpt"  # noqa: S108 - inside the sleeper's own tmpfs
"""Where a kernel finds its run folder (FIFOs and log). The same path in every sleeper."""

NAMESPACE_STAGING_DIR = "/dev/shm/gpuckpt-staging/images"  # noqa: S108 - likewise
"""Where a small kernel's images lie in memory before they are stored and while they are restored, in a tmpfs of huge
pages. The same path in every sleeper."""

NAMESPACE_VRAM_DIR = "/dev/shm/gpuckpt-vram"  # noqa: S108 - likewise
"""Where the VRAM of a checkpointed process lies, in a tmpfs of huge pages. The same path in every sleeper."""

PARKING_FIFOS = ("to-parking", "from-parking")
"""In the run folder: how the keeper and a kernel that parks its GPU memory talk. No Python runs in the kernel then."""

RUN_ID = "run.id"
"""The file in the run folder that tells it from all others: a restored kernel sees by it that it is another's."""

GATE = "gpu-away"
"""The file in the run folder that stands there while the driver has the kernel's GPU state."""
PARKING_LIBRARY = Path(__file__).parent / "kernel" / "libgpuckpt-parking.so"
"""What is built of `kernel/parking.c`; missing where there was no C compiler."""

CRIU_SOCKETS_LIBRARY = Path(__file__).parent / "freeze" / "libgpuckpt-criu-sockets.so.1"
"""What is built of `freeze/criu_sockets.c`, likewise. criu, which is given its folder for plugins, would take one of
its own from any name that ends in ``.so``."""

NAMESPACE_SOCKETS_DIR = "/dev/shm/multiprocessing"  # noqa: S108 - likewise
"""Where Python's multiprocessing binds its sockets in a kernel with an agent. The same path in every sleeper."""

ENV_RUN_DIR = "GPUCKPT_RUN_DIR"
"""Set in a kernel that a keeper holds: the run folder as the kernel sees it."""

ENV_UNAVAILABLE = "GPUCKPT_UNAVAILABLE"
"""Set in a kernel that was started plain: the reason, as `GpuckptError.as_dict` in JSON."""

MOST_COPIES = 64
"""How many copies one fork makes at most."""

AGENT_PROTOCOL = 1
"""The number of how keeper and agent talk: raised when an agent of before, in a snapshot, would be misunderstood."""

OLDEST_AGENT_PROTOCOL = 1
"""The oldest that this version's keepers talk to."""


def store_dir() -> Path:
    """Return the folder of the store: ``GPUCKPT_STORE``, or ``gpuckpt/store`` in Jupyter's data."""
    return Path(os.environ.get("GPUCKPT_STORE") or Path(jupyter_data_dir(), "gpuckpt", "store"))


def keys_dir() -> Path:
    """Return where the person's keys are: ``GPUCKPT_KEYS``, or ``gpuckpt/keys`` in Jupyter's data."""
    return Path(os.environ.get("GPUCKPT_KEYS") or Path(jupyter_data_dir(), "gpuckpt", "keys"))


def passphrase() -> str:
    """Return what encrypted remotes and files are opened with (``GPUCKPT_PASSPHRASE``); empty where nothing is said."""
    return os.environ.get("GPUCKPT_PASSPHRASE", "")


def identities() -> list[Path]:
    """Return the files with secret keys for what is encrypted (``GPUCKPT_IDENTITY``, several with colons between)."""
    return [Path(path) for path in os.environ.get("GPUCKPT_IDENTITY", "").split(os.pathsep) if path]


def criu_prefix() -> Path:
    """Return where `jupyter gpuckpt setup` puts CRIU: ``GPUCKPT_CRIU_PREFIX``, or Jupyter's data."""
    return Path(os.environ.get("GPUCKPT_CRIU_PREFIX") or Path(jupyter_data_dir(), "gpuckpt", "criu"))


def named_criu() -> str:
    """Return the criu program to use instead of looking for one: ``GPUCKPT_CRIU``; empty when none is named."""
    return os.environ.get("GPUCKPT_CRIU", "")


def logs_dir() -> Path:
    """Return where the logs of CRIU's failures are kept: ``GPUCKPT_LOGS``, or ``gpuckpt/logs`` in Jupyter's data."""
    return Path(os.environ.get("GPUCKPT_LOGS") or Path(jupyter_data_dir(), "gpuckpt", "logs"))


def broker_socket() -> Path:
    """Return where the broker listens: ``GPUCKPT_BROKER``, or ``/run/gpuckpt/broker.sock``."""
    return Path(os.environ.get("GPUCKPT_BROKER") or "/run/gpuckpt/broker.sock")


def kernels_dir() -> Path:
    """Return the folder that holds one folder a kernel: ``gpuckpt`` in Jupyter's runtime folder.

    Raises
    ------
    Refused : somebody else could have put there what stands in it, which says what is run.
    """
    folder = Path(jupyter_runtime_dir(), "gpuckpt")
    if why := why_not_private(folder):
        raise Refused(
            "The folder of the running kernels is not used.",
            f"{why}; what stands in it would be run in your name.",
            f"If it is yours and you trust what is in it, make it yours alone (`chmod 700 {folder}`); otherwise set "
            "JUPYTER_RUNTIME_DIR to a folder of your own, here and where the Jupyter server starts.",
            folder=str(folder),
        )
    return folder


def connection_file(kernel_id: str) -> Path:
    """Return where the connection file of a kernel is looked for: in Jupyter's runtime folder."""
    return Path(jupyter_runtime_dir(), f"kernel-{kernel_id}.json")


def _seconds(variable: str, default: float) -> float:
    return float(os.environ.get(variable) or default)


def hook_timeout() -> float:
    """Return how long the hooks of a kernel may take (``GPUCKPT_HOOK_TIMEOUT``), in seconds."""
    return _seconds("GPUCKPT_HOOK_TIMEOUT", 30)


def lock_timeout() -> float:
    """Return how long a save waits for GPU work to pause (``GPUCKPT_LOCK_TIMEOUT``), in seconds."""
    return _seconds("GPUCKPT_LOCK_TIMEOUT", 10)


def driver_timeout() -> float:
    """Return how long one driver call may take (``GPUCKPT_DRIVER_TIMEOUT``), in seconds."""
    return _seconds("GPUCKPT_DRIVER_TIMEOUT", 300)


_SLOW_DISK = 20e6
"""Bytes a second below which nobody has a disk to save kernels on."""


def criu_timeout(size: int) -> float:
    """Return how long one criu run that moves `size` bytes may take (``GPUCKPT_CRIU_TIMEOUT``), in seconds: unless set,
    a minute and what a slow disk takes."""
    return _seconds("GPUCKPT_CRIU_TIMEOUT", 60 + size / _SLOW_DISK)


def gpu_locks_dir() -> Path:
    """Return the folder with a lock for each GPU, which kernels take turns by: in Jupyter's runtime folder."""
    return Path(jupyter_runtime_dir(), "gpuckpt-gpus")


def share_timeout() -> float:
    """Return how long one who needs GPU memory waits for kernels in use to be idle (``GPUCKPT_SHARE_TIMEOUT``), in
    seconds."""
    return _seconds("GPUCKPT_SHARE_TIMEOUT", 30)


def share_grace() -> float:
    """Return for how long a kernel keeps its GPU memory after it was last used (``GPUCKPT_SHARE_GRACE``), in seconds:
    others who need it have it then."""
    return _seconds("GPUCKPT_SHARE_GRACE", 2)


def cells_asleep() -> bool:
    """Return whether a kernel that sleeps executes cells without waking: if ``GPUCKPT_CELLS_ASLEEP`` is ``on``.

    One that touches the GPU waits until the kernel has been woken for it.
    """
    return os.environ.get("GPUCKPT_CELLS_ASLEEP", "").lower() in ("on", "1", "yes", "true")


_OCCASIONS = ("cull", "stop")


def hibernate_on() -> frozenset[str]:
    """Return when a Jupyter server hibernates kernels instead of ending them (``GPUCKPT_HIBERNATE_ON``).

    ``cull`` (idle ones, by Jupyter's culler), ``stop`` (all, when the server stops), or both with a comma between;
    nothing unless set.

    Raises
    ------
    Refused : it names something else.
    """
    words = frozenset(word.strip() for word in os.environ.get("GPUCKPT_HIBERNATE_ON", "").split(",") if word.strip())
    if odd := words.difference(_OCCASIONS):
        raise _wrong("GPUCKPT_HIBERNATE_ON", f"{', '.join(sorted(odd))}: there are {' and '.join(_OCCASIONS)}")
    return words


def hibernate_deadline() -> float | None:
    """Return how long a server that stops may take for it (``GPUCKPT_HIBERNATE_DEADLINE``), in seconds; None: as long
    as it takes."""
    return _seconds("GPUCKPT_HIBERNATE_DEADLINE", 0) or None


def hibernate_after() -> float | None:
    """Return how long a kernel sleeps before it is hibernated (``GPUCKPT_HIBERNATE_AFTER``), in seconds; None: for
    good."""
    return _seconds("GPUCKPT_HIBERNATE_AFTER", 0) or None


def sleep_limit() -> int | None:
    """Return how many bytes of host memory all sleeping kernels may have together (``GPUCKPT_SLEEP_LIMIT``); None where
    there is no limit.

    Raises
    ------
    Refused : it is no size.
    """
    return _size("GPUCKPT_SLEEP_LIMIT")


def parking() -> bool:
    """Return whether a kernel's GPU memory is made so that it can be parked: unless ``GPUCKPT_PARKING`` is ``off``."""
    return os.environ.get("GPUCKPT_PARKING", "").lower() not in ("off", "0", "no", "false")


def save_patience() -> float:
    """Return how long a cell that saves waits for the disk before it goes on (``GPUCKPT_SAVE_WAIT``), in seconds."""
    return _seconds("GPUCKPT_SAVE_WAIT", 0.5)


_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def parse_size(text: str) -> int:
    """Return the bytes that a text such as ``500M`` or ``1.5T`` means.

    Raises
    ------
    ValueError : it is no size.
    """
    digits = text.strip().upper().removesuffix("B")
    unit = digits[-1:] if digits[-1:] in "KMGT" else ""
    try:
        number = float(digits.removesuffix(unit))
    except ValueError:
        number = -1
    if not 0 <= number < 10**9:
        raise ValueError(f"{text!r} is not a size such as 500M, 20G or 1.5T")
    return int(number * _UNITS[unit])


_SPANS = {"": 1.0, "S": 1.0, "M": 60.0, "MIN": 60.0, "H": 3600.0, "D": 86400.0}


def parse_duration(text: str) -> float | None:
    """Return the seconds that a text such as ``90``, ``30m`` or ``1.5h`` means; None for ``off``, and for 0.

    Raises
    ------
    ValueError : it is no duration.
    """
    plain = text.strip().upper()
    if plain == "OFF":
        return None
    unit = plain.lstrip("0123456789.").strip()
    try:
        number = float(plain.removesuffix(unit))
        seconds = number * _SPANS[unit]
    except (ValueError, KeyError):
        seconds = -1.0
    if not 0 <= seconds < 10**9:
        raise ValueError(f"{text!r} is neither a time such as 45s, 30m or 2h, nor off")
    return seconds or None


def sleep_without_gpu() -> bool:
    """Return whether kernels that have nothing on a GPU go to sleep by themselves, too (``GPUCKPT_SLEEP_WITHOUT_GPU``).

    There is nothing to free, but what sleeps may be hibernated.
    """
    return os.environ.get("GPUCKPT_SLEEP_WITHOUT_GPU", "").lower() in ("on", "1", "yes", "true")


def store_quota() -> int | None:
    """Return how many bytes the store may take (``GPUCKPT_STORE_QUOTA``); None where there is no limit.

    Raises
    ------
    Refused : it is no size.
    """
    return _size("GPUCKPT_STORE_QUOTA")


def files_limit() -> int:
    """Return how many bytes of files a snapshot may keep with it (``GPUCKPT_FILES_LIMIT``): 20 GB unless set.

    Raises
    ------
    Refused : it is no size.
    """
    limit = _size("GPUCKPT_FILES_LIMIT")
    return 20 * 10**9 if limit is None else limit


def keep_under() -> int | None:
    """Return how many bytes the store may have after a save (``GPUCKPT_KEEP_UNDER``); None where there is no limit.

    Raises
    ------
    Refused : it is no size.
    """
    return _size("GPUCKPT_KEEP_UNDER")


def keep_last() -> int | None:
    """Return how many snapshots of a notebook are kept (``GPUCKPT_KEEP_LAST``), 1 at least; None where all are.

    Raises
    ------
    Refused : it is no number.
    """
    text = os.environ.get("GPUCKPT_KEEP_LAST")
    if not text:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise _wrong("GPUCKPT_KEEP_LAST", f"{text!r} is not a number of snapshots")
    return int(text)


def _size(variable: str) -> int | None:
    text = os.environ.get(variable)
    if not text:
        return None
    try:
        return parse_size(text)
    except ValueError as e:
        raise _wrong(variable, str(e)) from None


def _wrong(variable: str, why: str) -> Refused:
    return Refused(
        f"The setting {variable} cannot be understood.", why, "Correct it where the Jupyter server is started."
    )
