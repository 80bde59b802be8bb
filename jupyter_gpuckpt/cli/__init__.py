"""``jupyter gpuckpt``: what notebooks do with ``%gpuckpt``, from a terminal or a script."""

from __future__ import annotations

from .command import main

__all__ = ["main"]
