"""What can be chosen, each with the variable that sets it and what it is for; and where everything else lives.

A setting is called to learn what holds: ``settings.hook_timeout()``. It is read from the environment, which the Jupyter
server, its keepers, their kernels and the command line all have. What the Jupyter server's configuration says
(``c.Gpuckpt.hook_timeout``) wins over its environment: the server sets the variable for all that it starts
(`server/app.py`). The table in docs/configuration.md is made of this (`docs/settings_table.py`).
"""

from __future__ import annotations

import contextlib
import functools
import os
from pathlib import Path

from jupyter_core.paths import jupyter_runtime_dir

from . import installed
from .errors import Refused
from .installed import in_data_folder
from .linux.file_systems import filesystem, is_network, nearest
from .linux.private_folders import why_not_private
from .linux.special_files import holds_special_files
from .setting import (
    Setting,
    When,
    is_not_off,
    is_on,
    parse_count,
    parse_duration,
    parse_paths,
    parse_seconds,
    parse_size,
    parse_when,
)

NAMESPACE_RUN_DIR = "/dev/shm/gpuckpt"  # noqa: S108 - inside the sleeper's own tmpfs
"""Where a kernel finds its run folder (FIFOs and log). The same path in every sleeper."""

NAMESPACE_STAGING_DIR = "/dev/shm/gpuckpt-staging/images"  # noqa: S108 - likewise
NAMESPACE_REST_DIR = "/dev/shm/gpuckpt-staging/rest"  # noqa: S108 - likewise
"""Where a small kernel's images lie in memory before they are stored and while they are restored, in a tmpfs of huge
pages. The same path in every sleeper."""

NAMESPACE_VRAM_DIR = "/dev/shm/gpuckpt-vram"  # noqa: S108 - likewise
"""Where the VRAM of a checkpointed process lies, in a tmpfs of huge pages. The same path in every sleeper."""

RUN_ID = "run.id"
"""The file in the run folder that tells it from all others: a restored kernel sees by it that it is another's."""

ENVIRONMENT = "environment"
"""The file in the run folder with what the program would be started with now, as /proc/PID/environ has it."""

GATE = "gpu-away"
"""The file in the run folder that stands there while the driver has the kernel's GPU state."""

CUT_OFF = "clients-cut-off"
"""The file in the run folder that says how many clients, by channel, have to connect again: the kernel was to leave
them, and stays."""

NAMESPACE_SOCKETS_DIR = "/dev/shm/multiprocessing"  # noqa: S108 - likewise
"""Where Python's multiprocessing binds its sockets in a kernel with an agent. The same path in every sleeper."""

ENV_RUN_DIR = "GPUCKPT_RUN_DIR"
"""Set in a kernel that a keeper holds: the run folder as the kernel sees it."""

ENV_ENVIRONMENT = "GPUCKPT_ENVIRONMENT"
"""Set in a kernel or job that a keeper holds: the path of `ENVIRONMENT`."""

ENV_UNAVAILABLE = "GPUCKPT_UNAVAILABLE"
"""Set in a kernel that was started plain: the reason, as `GpuckptError.as_dict` in JSON."""

WAKING = "waking"
"""The stage in which a kernel that sleeps gets its GPU memory back: its keeper enters it, and the kernel's cell, which
says so already, does not show it."""

MOST_COPIES = 64
"""How many copies one fork makes at most."""

AGENT_PROTOCOL = 1
"""The number of how keeper and agent talk: raised when an agent of before, in a snapshot, would be misunderstood."""

OLDEST_AGENT_PROTOCOL = 1
"""The oldest that this version's keepers talk to."""

# -- where things lie


store_dir = Setting(
    "GPUCKPT_STORE",
    Path,
    lambda: in_data_folder("store"),
    what="the folder of the snapshots",
    without="`gpuckpt/store` in Jupyter's data folder (`jupyter --data-dir`)",
)
store_quota: Setting[int | None] = Setting(
    "GPUCKPT_STORE_QUOTA",
    parse_size,
    lambda: None,
    what="the maximum size of the store (`500M`, `20G`): a save that would exceed it fails, and changes nothing",
    without="only limited by the disk",
)
keep_last: Setting[int | None] = Setting(
    "GPUCKPT_KEEP_LAST",
    parse_count,
    lambda: None,
    what="how many snapshots of a notebook to keep: after a save, older ones are removed unless they are pinned",
    without="all",
)
keep_under: Setting[int | None] = Setting(
    "GPUCKPT_KEEP_UNDER",
    parse_size,
    lambda: None,
    what=(
        "the size to which a save reduces the store (`20G`), by removing the oldest unpinned snapshots of the "
        "saved notebook"
    ),
    without="no limit",
)
keep_unsaved: Setting[float | None] = Setting(
    "GPUCKPT_KEEP_UNSAVED",
    parse_duration,
    lambda: 2.0,
    what="how long a restore may take to save first what the kernel has done that is in no snapshot, or `off`",
    without="`2s`",
    more="time-travel.md#a-restore-keeps-what-was-not-saved",
)
keys_dir = Setting(
    "GPUCKPT_KEYS",
    Path,
    lambda: in_data_folder("keys"),
    what="the folder of your keys: the one that signs your snapshots, and those that you trust",
    without="`gpuckpt/keys` in Jupyter's data folder",
    more="moving.md#whose-snapshots-are-used",
)
identities: Setting[list[Path]] = Setting(
    "GPUCKPT_IDENTITY",
    parse_paths,
    list,
    what="files with secret age or SSH keys for decryption, separated by colons",
    without="those in `GPUCKPT_KEYS`",
)
passphrase = Setting(
    "GPUCKPT_PASSPHRASE",
    str,
    str,
    what="the passphrase for decryption, and for encryption with `--passphrase`",
    without="it is asked for",
    configurable="",
)
remote: Setting[str] = Setting(
    "GPUCKPT_REMOTE",
    str,
    str,
    what="the address to which snapshots of kernels and jobs are sent that are hibernated at a stop, and where a start "
    "looks for what the store lacks of them",
    without="they stay in the store",
    more="moving.md#at-every-stop-and-start",
)
files_limit = Setting(
    "GPUCKPT_FILES_LIMIT",
    parse_size,
    lambda: 20 * 10**9,
    what="how many bytes of files a snapshot may include (`save --with-files`)",
    without="`20G`",
)
named_criu, criu_prefix, broker_socket = installed.named_criu, installed.criu_prefix, installed.broker_socket
logs_dir = Setting(
    "GPUCKPT_LOGS",
    Path,
    lambda: in_data_folder("logs"),
    what=(
        "the folder for the logs of CRIU's last 20 failures and the counts of operations; not used if others "
        "can write to it"
    ),
    without="`gpuckpt/logs` in Jupyter's data folder",
)


def kernels_dir() -> Path:
    """Return the folder that holds one folder a kernel: ``gpuckpt`` in Jupyter's runtime folder.

    Where that is in a home that machines share, or cannot hold sockets and FIFOs, it is ``/var/tmp/gpuckpt-UID``.

    Raises
    ------
    Refused : somebody else could have put there what stands in it, which says what is run.
    """
    is_asked_for = "JUPYTER_RUNTIME_DIR" in os.environ
    folder = _for_kernels(jupyter_runtime_dir(), os.geteuid(), is_asked_for=is_asked_for)
    if why := why_not_private(folder):
        raise Refused(
            "The folder of the running kernels is not used.",
            f"{why}; its contents would be run in your name.",
            f"If it is yours and you trust what is in it, make it yours alone (`chmod 700 {folder}`); otherwise set "
            "JUPYTER_RUNTIME_DIR to a folder of your own, here and before starting the Jupyter server.",
            folder=str(folder),
        )
    return folder


def connection_file(kernel_id: str) -> Path:
    """Return where the connection file of a kernel is looked for: in Jupyter's runtime folder."""
    return Path(jupyter_runtime_dir(), f"kernel-{kernel_id}.json")


def shared_dir() -> Path:
    """Return the folder of what a user's keepers share: their locks on GPUs, and what CRIU has found out.

    Raises
    ------
    Refused : as `kernels_dir`, in which it is.
    """
    return kernels_dir() / ".shared"


@functools.cache
def _for_kernels(runtime: str, uid: int, *, is_asked_for: bool) -> Path:
    """Return a folder that this machine has to itself, unless JUPYTER_RUNTIME_DIR asks for another.

    It is the same for all of a user's servers, jobs and shells: so not one in TMPDIR, which may be a job's, nor in
    XDG_RUNTIME_DIR, which jobs lack, and which is gone when its user logs out.
    """
    is_fit = True
    with contextlib.suppress(OSError):
        is_fit = is_asked_for or not is_network(filesystem(nearest(Path(runtime)))[0])
    elsewhere = Path("/var/tmp")  # noqa: S108 - what is in it is looked at whose it is
    if (is_fit and holds_special_files(Path(runtime))) or not os.access(elsewhere, os.W_OK):
        return Path(runtime, "gpuckpt")
    return elsewhere / f"gpuckpt-{uid}"


# -- kernels

parking = Setting(
    "GPUCKPT_PARKING",
    is_not_off,
    lambda: True,
    what="`off`: do not allocate GPU memory so that it can be parked; set it in the kernel's or job's environment",
    without="on, if the library was built",
    more="internals/parking.md",
)
managed = Setting(
    "GPUCKPT_MANAGED",
    is_on,
    lambda: False,
    what="`on`: a kernel or job with managed memory can be saved; set it in its environment",
    without="off: such saves are refused",
    more="internals/parking.md#managed-memory",
)
nccl = Setting(
    "GPUCKPT_NCCL",
    is_on,
    lambda: True,
    what="`off`: no library stands in front of NCCL, and processes that it connects are not saved; set it in the "
    "environment of the kernel or job",
    without="on: they can be saved",
    more="internals/nccl.md",
)
cells_asleep = Setting(
    "GPUCKPT_CELLS_ASLEEP",
    is_on,
    lambda: False,
    what="`on`: a sleeping kernel runs cells without waking until they use the GPU; set it in the kernel's environment",
    without="every cell wakes it",
    more="sleep.md",
)
io_uring = Setting(
    "GPUCKPT_IO_URING",
    is_on,
    lambda: False,
    what="`on`: new kernels and jobs may use io_uring and Multipath TCP, which CRIU cannot save",
    without="as root, they find none; with the broker, they may",
    more="troubleshooting.md#a-save-does-not-work",
)
share_grace = Setting(
    "GPUCKPT_SHARE_GRACE",
    parse_seconds,
    lambda: 2.0,
    what="how long a kernel keeps its GPU memory after its last use when others need it, in seconds",
    without="2",
)
share_timeout = Setting(
    "GPUCKPT_SHARE_TIMEOUT",
    parse_seconds,
    lambda: 30.0,
    what="how long a kernel that needs GPU memory waits for kernels in use to become idle, in seconds",
    without="30",
)
end_after = Setting(
    "GPUCKPT_END_AFTER",
    str,
    str,
    what=(
        "how long a kernel survives the program that started it, if nobody else is connected to it or holds "
        "it: `45s`, `30m`, `2h` or `off`"
    ),
    without="`off` for the kernels of a Jupyter server, which outlive it; `1m` for those of all other clients "
    "(papermill, nbclient, a console)",
    more="how-it-works.md#when-something-dies",
    configurable="GpuckptProvisioner",
)
encryption = Setting(
    "GPUCKPT_ENCRYPTION",
    str,
    str,
    what=(
        "`auto`: encrypt the channels of new kernels if client and kernel support it (jupyter_client 8.10, "
        "ipykernel 7.3); or `off`. `KernelManager.transport_encryption` applies, too"
    ),
    without="`auto`, but `off` for root",
    more="security.md#ports",
    configurable="GpuckptProvisioner",
)
sleep_after = Setting(
    "GPUCKPT_SLEEP_AFTER",
    str,
    str,
    what="how long a kernel must be idle before it is put to sleep: `45s`, `30m`, `2h` or `off`",
    without="`off`",
    more="sleep.md#by-itself",
    configurable="GpuckptProvisioner",
)
auto: Setting[When | None] = Setting(
    "GPUCKPT_AUTO",
    parse_when,
    lambda: None,
    what="`on`: kernels are saved by themselves after each cell; `5s`: after those that ran for this long; "
    "`every 10m`: every ten minutes in which they did something, also in the middle of a cell",
    without="`off`",
    more="time-travel.md",
)
sleep_without_gpu = Setting(
    "GPUCKPT_SLEEP_WITHOUT_GPU",
    is_on,
    lambda: False,
    what="`on`: also put idle kernels without GPU memory to sleep, so that they can be hibernated",
    without="they stay awake, since they have nothing to free",
)
sleep_limit: Setting[int | None] = Setting(
    "GPUCKPT_SLEEP_LIMIT",
    parse_size,
    lambda: None,
    what="the maximum host memory of all sleeping kernels (`64G`): beyond it, those asleep longest are hibernated",
    without="no limit",
)
hibernate_after: Setting[float | None] = Setting(
    "GPUCKPT_HIBERNATE_AFTER",
    lambda text: parse_seconds(text) or None,
    lambda: None,
    what="how many seconds a kernel must have been asleep before it is hibernated",
    without="never",
    more="hibernate.md#by-itself",
)


def _occasions(text: str) -> frozenset[str]:
    words = frozenset(word.strip() for word in text.split(",") if word.strip())
    if odd := words.difference(("cull", "stop")):
        raise ValueError(f"{', '.join(sorted(odd))}: the values are cull and stop")
    return words


hibernate_on: Setting[frozenset[str]] = Setting(
    "GPUCKPT_HIBERNATE_ON",
    _occasions,
    frozenset,
    what="when a Jupyter server hibernates kernels instead of ending them: `cull` (idle ones, by Jupyter's culler), "
    "`stop` (all, when the server stops), or `cull,stop`",
    without="never",
    more="hibernate.md#instead-of-being-killed",
)
hibernate_deadline: Setting[float | None] = Setting(
    "GPUCKPT_HIBERNATE_DEADLINE",
    lambda text: parse_seconds(text) or None,
    lambda: None,
    what="how long hibernation may delay a server's stop, in seconds",
    without="as long as it takes",
)


def _resume_how(text: str) -> str:
    word = text.strip().lower()
    if word not in ("ask", "auto"):
        raise ValueError(f"{text!r} is neither ask nor auto")
    return word


resume: Setting[str] = Setting(
    "GPUCKPT_RESUME",
    _resume_how,
    lambda: "ask",
    what="whether a notebook that is opened starts with its hibernated kernel (`auto`), or JupyterLab asks (`ask`); "
    "with `auto`, a server that starts also takes over kernels that outlived another one",
    without="`ask`",
    more="hibernate.md#opened-again",
)

SKIP, CHECK, COPY = "skip", "check", "copy"


def _unchanged_how(text: str) -> str:
    word = text.strip().lower()
    if word not in (SKIP, CHECK, COPY):
        raise ValueError(f"{text!r} is none of {SKIP}, {CHECK} and {COPY}")
    return word


unchanged: Setting[str] = Setting(
    "GPUCKPT_UNCHANGED",
    _unchanged_how,
    lambda: SKIP,
    what="what a save does with host memory that has not changed since the one before: `skip` it, `check` its hash, or "
    "`copy` it",
    without="`skip`",
    more="internals/criu.md#what-has-not-changed",
)

memory_writers: Setting[int | None] = Setting(
    "GPUCKPT_MEMORY_WRITERS",
    parse_count,
    lambda: None,
    what="how many processes write host memory in a restore; 1: the keeper alone",
    without="one for each processor but three (16 at most), where there are 8 or more and much is to be written",
    more="internals/criu.md#straight-into-the-process",
)

# -- how long to wait

save_patience = Setting(
    "GPUCKPT_SAVE_WAIT",
    parse_seconds,
    lambda: 0.5,
    what="how long a saving cell waits for the disk before it ends, in seconds; set it in the kernel's environment",
    without="0.5",
)
hook_timeout = Setting(
    "GPUCKPT_HOOK_TIMEOUT",
    parse_seconds,
    lambda: 30.0,
    what="how long the hooks of a kernel may take, in seconds",
    without="30",
)
lock_timeout = Setting(
    "GPUCKPT_LOCK_TIMEOUT",
    parse_seconds,
    lambda: 10.0,
    what="how long a save waits for work on the GPU to pause, in seconds",
    without="10",
)
driver_timeout = Setting(
    "GPUCKPT_DRIVER_TIMEOUT",
    parse_seconds,
    lambda: 300.0,
    what="how long one call of the CUDA driver may take, in seconds",
    without="300",
)
_criu_timeout: Setting[float | None] = Setting(
    "GPUCKPT_CRIU_TIMEOUT",
    parse_seconds,
    lambda: None,
    what="how long one run of CRIU may take, in seconds",
    without="60, plus 50 for each GB that it moves",
)

_SLOW_DISK = 20e6
"""Bytes a second below which nobody has a disk to save kernels on."""


def criu_timeout(size: int) -> float:
    """Return how long one criu run that moves `size` bytes may take, in seconds."""
    chosen = _criu_timeout()
    return 60 + size / _SLOW_DISK if chosen is None else chosen


ALL: tuple[Setting[object], ...] = tuple(one for one in list(globals().values()) if isinstance(one, Setting))
"""All of them, in the order in which they are described."""
