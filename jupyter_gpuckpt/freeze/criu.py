"""What criu is asked to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

DUMP_LOG, RESTORE_LOG = "dump.log", "restore.log"

Left = Literal["running", "stopped"]
"""How a tree is left after its dump or restore: it runs, or stands still until it is continued (SIGCONT) or killed."""

_COMMON = (
    # A live kernel's connections stay up; those that are restored come back closed, or are made anew.
    "--tcp-close",
    "--ext-unix-sk",
    "--file-locks",
    "--link-remap",
    "--manage-cgroups=ignore",
    "-v2",
)


def dump_arguments(pid: int, images: str, action_script: Path, timeout: float, left: Left) -> Sequence[str]:
    """Return criu's arguments to dump the tree of `pid` (as its namespace knows it) and leave it `left`.

    `timeout` (seconds) is how long criu may try to stop the processes of the tree.
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
        *_COMMON,
    )


def dump_environment(images: str) -> Mapping[str, str]:
    """Return what tells the library in criu to write down what lies unread in connections (`criu_connections.c`)."""
    return {"GPUCKPT_DUMP_UNREAD": images}


NOT_ACCEPTED = "tcp-not-accepted"
"""A file in the folder of the images, by whose being there the library is asked to have criu give up where a connection
inside the tree is not accepted yet; it has a content then."""


def restore_arguments(images: Path, log: Path, left: Left) -> Sequence[str]:
    """Return criu's arguments to restore a tree and leave it, as asked, to process 1."""
    stopped = ("--leave-stopped",) if left == "stopped" else ()
    return ("restore", "-D", str(images), "-o", str(log), "-d", *stopped, *_COMMON)


UNPRIVILEGED = "--unprivileged"
"""Lets criu work without root, with CAP_CHECKPOINT_RESTORE alone."""

AT_POST_DUMP = Path(__file__).parent / "at_post_dump.sh"
"""What criu runs at every stage of a dump, with GPUCKPT_SNAPSHOT, a folder, and GPUCKPT_LOG, the kernel's log.

Among the programs of this machine `installed.SHM_PACKER` does the same in less time; a container may have another C
library.
"""
