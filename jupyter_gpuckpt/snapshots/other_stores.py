"""Another store than a kernel's own, for one request: a folder on a disk that has room."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import Refused
from ..store import Store

__all__ = ["of_store", "store_in", "store_of"]


def of_store(folder: str | None, request: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return a request as one about the store in `folder`; where none is given, as it is.

    What is under `names` in it goes with the folder. A keeper of an older version, which knows of no folder, must not
    take it for a snapshot of the kernel's own store: it finds there what can be the name of none.
    """
    if not folder:
        return dict(request)
    of_none = {name: f"{folder}:{request[name]}" for name in names}
    return {**request, **of_none, "store": {"folder": folder, **{name: request[name] for name in names}}}


def store_of(args: Mapping[str, Any]) -> tuple[Store | None, dict[str, Any]]:
    """Return the store that a request is about, None for the kernel's own, and the request without it.

    Raises
    ------
    Refused : the folder is no absolute path.
    """
    own = {name: value for name, value in args.items() if name != "store"}
    if "store" not in args:
        return None, own
    asked = dict(args["store"])
    return store_in(str(asked.pop("folder"))), {**own, **asked}


def store_in(folder: str) -> Store:
    """Return the store in a folder.

    Raises
    ------
    Refused : it is no absolute path.
    """
    if not Path(folder).is_absolute() or "\0" in folder:
        raise Refused(
            f"The folder {folder!r} was not looked into.",
            "It is not an absolute path, and the keeper runs in another folder.",
            "Give an absolute path, such as /mnt/disk/gpuckpt.",
        )
    return Store(Path(folder))
