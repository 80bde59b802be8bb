"""Asking a remote: what fails is tried again, and what fails for good is told without what is secret.

Nobody is waited for without end: a remote that is silent for `PATIENCE` has failed once, and one that answers, but so
slowly that a request takes longer than `time_limit`, has failed for good.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from ....errors import Refused, RemoteError
from .remote import Address

__all__ = ["PATIENCE", "Attempts", "TooSlowError", "package_missing", "time_limit"]

_T = TypeVar("_T")

_PAUSES = (0.5, 2.0)
"""Seconds before a request that failed is made again; the libraries repeat some as well."""

PATIENCE = 60.0
"""Seconds without any answer after which a connection counts as broken."""

_SLOWEST = 8000
"""Bytes a second below which nobody waits for the rest of an answer."""


class TooSlowError(OSError):
    """A request has taken longer than its size allows."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"the answer was not whole after {seconds:.0f} s")


_LASTING = (PermissionError, NotImplementedError, TooSlowError)
"""Failures that another attempt does not mend."""


def time_limit(size: int) -> float:
    """Return how long a request for so many bytes may take, in seconds."""
    return PATIENCE + size / _SLOWEST


class Attempts:
    """How the requests to one remote are made."""

    def __init__(self, address: Address, is_final: Callable[[Exception], bool]) -> None:
        """Make requests to what is at `address`; `is_final` tells of a failure whether it would be the same again."""
        self._address = address
        self._is_final = is_final

    def make(self, ask: Callable[[], _T], what: str) -> _T:
        """Return what `ask` returns; `what` is said to have failed where it does.

        Raises
        ------
        FileNotFoundError, FileExistsError, RemoteError : by `ask`.
        RemoteError : it failed with anything else.
        """
        for pause in (*_PAUSES, None):
            try:
                return ask()
            except (FileNotFoundError, FileExistsError, RemoteError):
                raise
            except Exception as e:  # noqa: BLE001 - each library has its own
                if pause is None or isinstance(e, _LASTING) or self._is_final(e):
                    raise self.failed(what, e) from None
                time.sleep(pause)
        raise AssertionError  # the loop ends above

    def failed(self, what: str, error: Exception) -> RemoteError:
        """Return the error to raise for one of a library; nothing of what it says is kept that is secret."""
        shown = self._address.shown
        said = self._address.hide(str(error)) or "no reason was given"
        return RemoteError(
            f"The remote {shown} could not be used: {what}.",
            f"{type(error).__name__}: {said[:2000]}",
            "Check the address, the network, and your user name and key there. What has been transferred is not "
            "transferred again.",
            remote=shown,
        )


def package_missing(address: Address, package: str, *all_of: str) -> Refused:
    """Return the error for a package that is not there, of `all_of` those that such an address needs."""
    return Refused(
        f"{address.shown} cannot be reached yet.",
        f"{address.scheme}:// addresses need the package {package}",
        f"pip install {' '.join(all_of)}",
        packages=list(all_of),
    )
