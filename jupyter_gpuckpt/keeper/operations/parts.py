"""The parts of a snapshot, and what operations leave in a kernel's folder while they are under way."""

from __future__ import annotations

CRIU_IMAGES, VRAM, SHARED_MEMORY, KERNEL_LOG = "criu", "vram", "shm.tar", "kernel.log"
"""The parts of a snapshot: the folders of criu's images and of what was in VRAM, what lies in /dev/shm, and the
kernel's standard output."""

WORKING_COPY = "restore"
"""In the kernel's folder, while a restore is under way: the snapshot's files, where they do not fit in memory."""

CAPTURE = "fork"
"""While a fork is under way: what was taken of the kernel and does not lie in memory."""
