"""What criu is asked to do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

DUMP_LOG, RESTORE_LOG = "dump.log", "restore.log"

Left = Literal["running", "stopped"]
"""How a tree is left after its dump or restore: it runs, or stands still until it is continued (SIGCONT) or killed."""

DUMPS_CONNECTIONS, RESTORES_CONNECTIONS = (
    {"GPUCKPT_DUMP_CONNECTIONS": "inside"},
    {"GPUCKPT_RESTORE_CONNECTIONS": "inside"},
)
"""What criu's environment has for our library in it (`criu_connections.c`), where `connections` are asked for."""

_COMMON = (
    "--ext-unix-sk",
    "--file-locks",
    "--link-remap",
    "--manage-cgroups=ignore",
    "-v2",
)


def dump_arguments(
    pid: int, images: str, action_script: Path, timeout: float, left: Left, *, connections: bool = False
) -> Sequence[str]:
    """Return criu's arguments to dump the tree of `pid` (as its namespace knows it) and leave it `left`.

    `timeout` (seconds) is how long criu may try to stop the processes of the tree. With `connections`, those that are
    inside the tree are saved.
    """
    return (
        "dump",
        "-t",
        str(pid),
        "-D",
        images,
        "-o",
        DUMP_LOG,
        f"--leave-{left}",
        "--action-script",
        str(action_script),
        "--timeout",
        str(max(1, int(timeout))),
        # Unlinked shared memory (NCCL, DataLoader workers) is copied into the images; criu's default stops at 1 MiB.
        "--ghost-limit",
        "64G",
        # A client that is connecting in that instant, and that nobody has accepted yet, would be an error.
        "--skip-in-flight",
        *_tcp(connections),
        *_COMMON,
    )


def restore_arguments(images: Path, log: Path, left: Left, *, connections: bool = False) -> Sequence[str]:
    """Return criu's arguments to restore a tree and leave it, as asked, to process 1.

    `connections` tells whether there are any in its images that come back.
    """
    stopped = ("--leave-stopped",) if left == "stopped" else ()
    return ("restore", "-D", str(images), "-o", str(log), "-d", *stopped, *_tcp(connections), *_COMMON)


def _tcp(connections: bool) -> Sequence[str]:
    # In either case a live kernel's connections stay up. criu would lock them by rules of the machine's firewall.
    return ("--tcp-established", "--network-lock", "skip") if connections else ("--tcp-close",)


UNPRIVILEGED = "--unprivileged"
"""Lets criu work without root, with CAP_CHECKPOINT_RESTORE alone."""

AT_POST_DUMP = Path(__file__).parent / "at_post_dump.sh"
"""What criu runs at every stage of a dump, with GPUCKPT_SNAPSHOT, a folder, and GPUCKPT_LOG, the kernel's log."""
