"""What criu is asked to do, and what it says when it fails."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from . import criu_program

DUMP_LOG, RESTORE_LOG = "dump.log", "restore.log"

Left = Literal["running", "stopped"]
"""How a tree is left after its dump or restore: it runs, or stands still until it is continued (SIGCONT) or killed."""

_COMMON = (
    "--tcp-close",  # a live kernel's connections stay up; the restored one's are closed, and clients connect again
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


def restore_arguments(images: Path, log: Path, left: Left) -> Sequence[str]:
    """Return criu's arguments to restore a tree and leave it, as asked, to process 1."""
    stopped = ("--leave-stopped",) if left == "stopped" else ()
    return ("restore", "-D", str(images), "-o", str(log), "-d", *stopped, *_COMMON)


UNPRIVILEGED = "--unprivileged"
"""Lets criu work without root, with CAP_CHECKPOINT_RESTORE alone."""

AT_POST_DUMP = Path(__file__).parent / "at_post_dump.sh"
"""What criu runs at every stage of a dump, with GPUCKPT_SNAPSHOT, a folder, and GPUCKPT_LOG, the kernel's log."""

_STAMP = re.compile(r"^\([\d.]+\)\s*(\d+: )?")
_OWN = re.compile(r"^(\([\d.]+\)\s*(\d+: )?)?(Error|Warn) |^\s*$")

_ADVICE = (
    # what criu says, what a person can do; the first that matches is given
    ("Can't get 1:16 opt", "This CRIU is too old for this Linux: run `gpuckpt setup`, and try again."),
    ("No space left", "Free disk space, or save to a folder on another disk: `gpuckpt save @ NAME --to FOLDER`."),
    (
        "half of stream unix",
        "Close the connection to the other program (a database, a display, an ipc socket) and try again.",
    ),
    (
        "handle_device_vma",
        "A process of the kernel maps a device that cannot be saved; end that process and try again.",
    ),
    ("bad size", "Put the file back as it was when the kernel was saved."),
    ("Address already in use", "Another program listens at a port of the snapshot; end it and try again."),
    (
        "Can't lookup mount",
        "Close files on file systems that were mounted or unmounted after the kernel's start, and try again.",
    ),
    (
        "Unable to connect a transport socket",
        "A process that has changed its root folder (chroot) cannot be saved; end it and try again.",
    ),
    ("inotify", "Stop the file watcher in the kernel and try again."),
    ("io_uring", "Stop what uses io_uring in the kernel (criu cannot save it) and try again."),
    (
        "suspending seccomp",
        "End what has a filter of system calls (a browser, a sandbox) in the kernel and try again.",
    ),
    ("Permission denied", "Run `gpuckpt doctor`: it checks the rights that are needed."),
)


def first_error(log: Path) -> str:
    """Return the first error in a log of criu's, without its time stamp; empty when there is none."""
    try:
        text = log.read_text("utf-8", "replace")
    except OSError:
        return ""
    line = criu_program.first_error(text)
    if "exited, status=" in line:
        # A program that criu ran failed: its own words stand before.
        before = text[: text.index(line)].splitlines()
        line = next((said for said in before if not _OWN.match(said)), line)
        return line.strip()
    return _STAMP.sub("", line) if "Error (" in line else ""


def advice(error: str) -> str:
    """Return what a person can do about an error line of criu."""
    for said, then in _ADVICE:
        if said in error:
            return then
    return "Run `gpuckpt doctor`; if it finds nothing, look into criu's log above that line."
