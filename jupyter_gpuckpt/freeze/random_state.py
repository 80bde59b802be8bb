"""Random numbers that the C library keeps inside a process: two copies of it must not give out the same ones."""

from __future__ import annotations

import fcntl
import logging
import os

log = logging.getLogger("gpuckpt.criu")

_RNDRESEEDCRNG = 0x5207  # linux/random.h


def spoil() -> None:
    """Have every process of the machine throw away the random numbers that it has in stock.

    From glibc 2.41 on Linux 6.11, `getrandom` takes numbers from a stock inside the process. It has the number of the
    kernel's last reseeding, and is not used after the next one (getrandom(2), vDSO): so the kernel reseeds itself
    between a dump and a restore of it. CRIU 4.2.1 did not bring the stock back (measured with glibc 2.43); with this,
    nothing depends on that.
    """
    try:
        fd = os.open("/dev/random", os.O_WRONLY)
        try:
            fcntl.ioctl(fd, _RNDRESEEDCRNG)
        finally:
            os.close(fd)
    except OSError as e:
        log.warning("the kernel's random numbers were not reseeded: %s", e)
