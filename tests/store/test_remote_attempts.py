"""What fails once is asked for again, and what would fail again is not."""

from __future__ import annotations

import pytest

from jupyter_gpuckpt.errors import RemoteError
from jupyter_gpuckpt.store.transfer.remotes.attempts import Attempts
from jupyter_gpuckpt.store.transfer.remotes.remote import Address


class Asked:
    """A request that fails with these errors, one after another, and then succeeds."""

    def __init__(self, *errors: Exception) -> None:
        self.errors, self.times = list(errors), 0

    def __call__(self) -> str:
        self.times += 1
        if self.errors:
            raise self.errors.pop(0)
        return "here"


def make(asked: Asked) -> str:
    return Attempts(Address("s3://bucket"), lambda error: "for good" in str(error)).make(asked, "it was not read")


def test_what_fails_once_is_asked_for_again() -> None:
    asked = Asked(ConnectionResetError("gone"))
    assert make(asked) == "here"
    assert asked.times == 2


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (PermissionError("not yours"), RemoteError),
        (NotImplementedError("no such thing"), RemoteError),
        (OSError("for good"), RemoteError),
        (FileNotFoundError("nothing"), FileNotFoundError),
        (FileExistsError("taken"), FileExistsError),
    ],
)
def test_what_would_fail_again_is_not(error: Exception, raised: type[Exception]) -> None:
    asked = Asked(error)
    with pytest.raises(raised):
        make(asked)
    assert asked.times == 1


def test_what_fails_each_time_is_told_after_three_attempts() -> None:
    asked = Asked(*[ConnectionResetError(f"gone {n}") for n in range(9)])
    with pytest.raises(RemoteError, match="gone 2"):
        make(asked)
    assert asked.times == 3
