"""A kernel whose folder was removed while it runs: it cannot be saved any more, and that is said."""

from __future__ import annotations

from pathlib import Path

from ..client.kernel_start import FROM_KERNEL, TO_KERNEL
from ..client.record import LAUNCH
from ..errors import Refused
from ..linux.lock_files import KEEPER_LOCK

__all__ = ["refuse_without_folder"]


def refuse_without_folder(kernel_dir: Path, run_dir: Path | None = None) -> None:
    """Refuse what needs the kernel's folder, or also its run folder, where that or what is in it was removed.

    Raises
    ------
    Refused : it was.
    """
    needed = [kernel_dir / LAUNCH, kernel_dir / KEEPER_LOCK]
    if run_dir is not None:
        needed += [run_dir / name for name in (KEEPER_LOCK, TO_KERNEL, FROM_KERNEL)]
    if all(path.exists() for path in needed):
        return
    raise Refused(
        "The {kernel} can no longer be saved or restored; it keeps running.",
        f"Files were removed from its folder, {kernel_dir}, as programs do that remove old temporary files.",
        "Write what you need to a file, and {restart}. Set JUPYTER_RUNTIME_DIR, where Jupyter is started, to a folder "
        "that nothing cleans.",
    )
