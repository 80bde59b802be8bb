"""A remote that fsspec reaches: object stores, web servers, and folders of other machines."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from ..errors import Refused, RemoteError
from .remote import DRAFT, PACKAGES, Address, Remote

__all__ = ["FsspecRemote"]

_T = TypeVar("_T")

_WITH_FOLDERS = ("sftp", "ssh")
"""Schemes of file systems, where folders have to be made, and a file that is being written can be seen."""

_READ_ONLY = ("http", "https")
_PAUSES = (0.5, 2.0)
"""Seconds before a request that failed is made again; the libraries below repeat some as well."""

_LASTING = (FileNotFoundError, FileExistsError, PermissionError, NotImplementedError)
"""Failures that another attempt does not mend."""


class FsspecRemote(Remote):
    """What lies below an address, by way of fsspec."""

    def __init__(self, address: Address, fs: Any = None) -> None:
        """Use `fs` of fsspec, or else the one that the address asks for.

        Raises
        ------
        Refused : a package is missing.
        """
        self._address = address
        self.shown = address.shown
        self._fs: Any
        self._root: str
        self._fs, self._root = self._connect() if fs is None else (fs, fs._strip_protocol(address.full))
        self._web = address.scheme in _READ_ONLY
        self._folders = address.scheme in _WITH_FOLDERS
        if self._web:
            self._root = address.full.partition("?")[0].partition("#")[0]

    def _connect(self) -> tuple[Any, str]:
        scheme = self._address.scheme
        try:
            import fsspec
        except ImportError:
            raise self._package_missing("fsspec") from None
        # No instance or listing from before: others write there, too.
        how: dict[str, Any] = {"skip_instance_cache": True}
        if scheme not in _WITH_FOLDERS:
            how["use_listings_cache"] = False
        try:
            fs, root = fsspec.core.url_to_fs(self._address.full, **how)
        except ImportError:
            raise self._package_missing(PACKAGES[scheme]) from None
        except Exception as e:  # noqa: BLE001 - each library has its own
            raise self._failed("reached", e) from None
        return fs, str(root)

    def _package_missing(self, package: str) -> Refused:
        names = " ".join(dict.fromkeys(("fsspec", package, PACKAGES[self._address.scheme])))
        return Refused(
            f"{self.shown} cannot be reached yet.",
            f"addresses that begin with {self._address.scheme}:// need the package {package}",
            f"pip install {names}",
            packages=names.split(),
        )

    def read(self, path: str, start: int, size: int) -> bytes:
        if self._web:
            return self._try(lambda: self._read_web(path, start, size), f"{path} cannot be read")
        return self._try(
            lambda: bytes(self._fs.cat_file(self._at(path), start=start, end=start + size)), f"{path} cannot be read"
        )

    def _read_web(self, path: str, start: int, size: int) -> bytes:
        # By hand: fsspec would take in whatever a server sends, however long it is.
        headers = {"Range": f"bytes={start}-{start + size - 1}", "Accept-Encoding": "identity"}
        try:
            file = self._fs.open(self._at(path), "rb", block_size=0, size=1, headers=headers)
        except Exception as e:
            if getattr(e, "status", None) == 416:  # nothing is there from this byte on
                return b""
            raise
        try:
            to_skip = 0 if file.r.status == 206 else start
            found = bytearray()
            while len(found) < size and (more := file.read(min(1 << 20, size - len(found) + to_skip))):
                found += more[to_skip:]
                to_skip = max(0, to_skip - len(more))
            return bytes(found)
        finally:
            file.close()

    def write(self, path: str, content: bytes) -> None:
        self._refuse_web()
        self._write(lambda: self._put(path, content), path)

    def _put(self, path: str, content: bytes) -> None:
        if not self._folders:
            self._fs.pipe_file(self._at(path), content)
            return
        folder, _, _ = self._at(path).rpartition("/")
        self._fs.makedirs(folder, exist_ok=True)
        draft = f"{folder}/{uuid.uuid4().hex}{DRAFT}"
        try:
            self._fs.pipe_file(draft, content)
            self._fs.mv(draft, self._at(path))
        except BaseException:
            with suppress(Exception):
                self._fs.rm_file(draft)
            raise

    def create(self, path: str, content: bytes) -> bool:
        self._refuse_web()
        try:
            self._write(lambda: self._put_new(path, content), path)
        except FileExistsError:
            # Perhaps by an attempt of ours of which the answer was lost.
            return self.read(path, 0, len(content) + 1) == content
        return True

    def _put_new(self, path: str, content: bytes) -> None:
        if self._folders:
            self._look_and_put(path, content)
            return
        try:
            # Object stores have a write that fails where something is; for others, fsspec looks first.
            self._fs.pipe_file(self._at(path), content, mode="create")
        except Exception as e:
            if not _knows_no_create(e):
                raise
            self._look_and_put(path, content)

    def _look_and_put(self, path: str, content: bytes) -> None:
        if self._fs.exists(self._at(path)):
            raise FileExistsError(path)
        self._put(path, content)

    def list(self, folder: str) -> dict[str, int]:
        if self._web:
            raise RemoteError(
                f"{self.shown} cannot be listed.",
                "a web server does not say what it holds",
                "Give the name of the snapshot, too.",
                remote=self.shown,
            )
        try:
            entries = self._try(lambda: self._fs.ls(self._at(folder), detail=True), f"{folder} cannot be listed")
        except FileNotFoundError:
            return {}
        found = {}
        for entry in entries:
            name = str(entry["name"]).rstrip("/").rpartition("/")[2]
            if entry.get("type") == "file" and name:
                found[name] = int(entry["size"])
        return found

    def delete(self, path: str) -> None:
        self._refuse_web()
        with suppress(FileNotFoundError):
            self._try(lambda: self._fs.rm_file(self._at(path)), f"{path} cannot be deleted")

    def _at(self, path: str) -> str:
        query = f"?{self._address.query}" if self._web and self._address.query else ""
        return f"{self._root.rstrip('/')}/{path}{query}"

    def _refuse_web(self) -> None:
        if self._web:
            raise Refused(
                f"Nothing can be written to {self.shown}.",
                "addresses that begin with http:// or https:// can only be read",
                "Give the address by which its keeper writes there, such as s3://bucket/folder.",
            )

    def _write(self, put: Callable[[], None], path: str) -> None:
        what = f"{path} cannot be written"
        try:
            self._try(put, what)
        except FileNotFoundError as e:  # there is no such bucket, or none that one may see
            raise self._failed(what, e) from None

    def _try(self, ask: Callable[[], _T], what: str) -> _T:
        for pause in (*_PAUSES, None):
            try:
                return ask()
            except (FileNotFoundError, FileExistsError):
                raise
            except Exception as e:  # noqa: BLE001 - each library has its own
                if pause is None or isinstance(e, _LASTING) or _is_final(e):
                    raise self._failed(what, e) from None
                time.sleep(pause)
        raise AssertionError  # the loop ends above

    def _failed(self, what: str, error: Exception) -> RemoteError:
        """Return the error to raise for one of a library; nothing of what it says is kept that is secret."""
        said = self._address.hide(str(error)) or "no reason was given"
        return RemoteError(
            f"The remote {self.shown} could not be used: {what}.",
            f"{type(error).__name__}: {said[:2000]}",
            "Check the address, the network, and the name and key that you use there. What has arrived is not sent or "
            "fetched again.",
            remote=self.shown,
        )


def _knows_no_create(error: Exception) -> bool:
    """Tell whether a store, or its library, does not know the write that fails where something is."""
    return isinstance(error, (NotImplementedError, TypeError)) or "NotImplemented" in f"{error}{error.__cause__}"


def _is_final(error: Exception) -> bool:
    """Tell whether a web server's answer would be the same again."""
    status = getattr(error, "status", None)
    return isinstance(status, int) and 400 <= status < 500 and status not in (408, 429)
