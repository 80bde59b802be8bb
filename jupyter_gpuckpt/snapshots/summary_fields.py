"""What a keeper tells, as its clients, listings and its own record have it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Summary"]


@dataclass(frozen=True)
class Summary:
    """What listings and results say of a snapshot."""

    name: str
    """Its key in the store."""
    label: str
    """What to call it where several are listed: its name, with as much of its notebook's as tells it apart."""
    id: str
    message: str
    created: str
    size: int
    stored: int
    """Bytes that were added to the store for it."""
    parent: str | None
    """The id of the snapshot that the kernel last came from."""
    notebook: str
    kernel_id: str
    job: str
    execution_count: int | None
    gpu_memory: int
    frozen_seconds: float | None
