"""The parts of a snapshot, and what operations leave in a kernel's folder while they are under way."""

from __future__ import annotations

from ...freeze import shm_archive

__all__ = ["CAPTURE", "CRIU_IMAGES", "SHARED_MEMORY", "VRAM", "WORKING_COPY"]

CRIU_IMAGES, VRAM, SHARED_MEMORY = "criu", "vram", shm_archive.ARCHIVE
"""The parts of a snapshot, beside the kernel's standard output: the folders of criu's images and of what was in VRAM,
and what lies in /dev/shm."""

WORKING_COPY = "restore"
"""In the kernel's folder, while a restore is under way: the snapshot's files, where they do not fit in memory."""

CAPTURE = "fork"
"""While a fork is under way: what was taken of the kernel and does not lie in memory."""
