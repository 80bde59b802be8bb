"""Which programs and libraries are used, and where the broker listens: what root has to know of the settings."""

from __future__ import annotations

from pathlib import Path

from jupyter_core.paths import jupyter_data_dir

from .setting import Setting

__all__ = [
    "CRIU_SOCKETS_LIBRARY",
    "NCCL_LIBRARY",
    "PARKING_LIBRARY",
    "SHM_PACKER",
    "broker_socket",
    "criu_prefix",
    "in_data_folder",
    "named_criu",
]

PARKING_LIBRARY = Path(__file__).parent / "kernel" / "libgpuckpt-parking.so"
"""What is built of `kernel/driver/`; missing where there was no C compiler."""

NCCL_LIBRARY = Path(__file__).parent / "kernel" / "libgpuckpt-nccl.so"
"""What is built of `kernel/nccl/`, likewise."""

CRIU_SOCKETS_LIBRARY = Path(__file__).parent / "freeze" / "libgpuckpt-criu-sockets.so.1"
"""What is built of `freeze/criu_sockets.c`, likewise. criu, which is given its folder for plugins, would take one of
its own from any name that ends in ``.so``."""

SHM_PACKER = Path(__file__).parent / "freeze" / "gpuckpt-shm-packer"
"""What is built of `freeze/shm_packer.c`, likewise; then tar does its work."""


def in_data_folder(name: str) -> Path:
    """Return where something lies in Jupyter's data folder."""
    return Path(jupyter_data_dir(), "gpuckpt", name)


named_criu = Setting(
    "GPUCKPT_CRIU",
    str,
    str,
    what="the CRIU program to use; if it is not usable, no other is tried",
    without="the first that works: the private one, then those in `PATH`; root uses none that other users can change",
)
criu_prefix = Setting(
    "GPUCKPT_CRIU_PREFIX",
    Path,
    lambda: in_data_folder("criu"),
    what="where `jupyter gpuckpt setup` puts CRIU",
    without="`gpuckpt/criu` in Jupyter's data folder",
)
broker_socket = Setting(
    "GPUCKPT_BROKER",
    Path,
    lambda: Path("/run/gpuckpt/broker.sock"),
    what="the socket at which the broker listens and users without root find it",
    without="`/run/gpuckpt/broker.sock`",
    more="security.md",
)
