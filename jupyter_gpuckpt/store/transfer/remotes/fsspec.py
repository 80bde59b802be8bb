"""A remote that fsspec reaches: object stores and web servers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ....errors import Refused, RemoteError
from .attempts import Attempts, package_missing
from .remote import PACKAGES, Address, Remote

__all__ = ["FsspecRemote"]

_READ_ONLY = ("http", "https")


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
        self._attempts = Attempts(address, _is_final)
        self._fs, self._root = self._connect() if fs is None else (fs, fs._strip_protocol(address.full))
        self._web = address.scheme in _READ_ONLY
        if self._web:
            self._root = address.full.partition("?")[0].partition("#")[0]

    def _connect(self) -> tuple[Any, str]:
        scheme = self._address.scheme
        try:
            import fsspec
        except ImportError:
            raise self._package_missing("fsspec") from None
        # No instance or listing from before: others write there, too.
        how = {"skip_instance_cache": True, "use_listings_cache": False}
        try:
            fs, root = fsspec.core.url_to_fs(self._address.full, **how)
        except ImportError:
            raise self._package_missing(PACKAGES[scheme]) from None
        except Exception as e:  # noqa: BLE001 - each library has its own
            raise self._attempts.failed("it cannot be reached", e) from None
        return fs, str(root)

    def _package_missing(self, package: str) -> Refused:
        names = dict.fromkeys(("fsspec", package, PACKAGES[self._address.scheme]))
        return package_missing(self._address, package, *names)

    def read(self, path: str, start: int, size: int) -> bytes:
        if self._web:
            return self._attempts.make(lambda: self._read_web(path, start, size), f"{path} cannot be read")
        return self._attempts.make(
            lambda: bytes(self._fs.cat_file(self._at(path), start=start, end=start + size)), f"{path} cannot be read"
        )

    def _read_web(self, path: str, start: int, size: int) -> bytes:
        # By hand: fsspec would take in whatever a server sends, however long it is, and leaves its refusals open.
        from fsspec.asyn import sync

        return bytes(sync(self._fs.loop, self._get, self._at(path), start, size))

    async def _get(self, url: str, start: int, size: int) -> bytes:
        session = await self._fs.set_session()
        headers = {"Range": f"bytes={start}-{start + size - 1}", "Accept-Encoding": "identity"}
        async with session.get(self._fs.encode_url(url), headers=headers) as response:
            if response.status == 416:  # nothing is there from this byte on
                return b""
            if response.status == 404:
                raise FileNotFoundError(url)
            response.raise_for_status()
            to_skip = 0 if response.status == 206 else start
            found = bytearray()
            while len(found) < size and (
                more := await response.content.read(min(1 << 20, size - len(found) + to_skip))
            ):
                found += more[to_skip:]
                to_skip = max(0, to_skip - len(more))
            return bytes(found)

    def write(self, path: str, content: bytes) -> None:
        self._refuse_web()
        self._write(lambda: self._fs.pipe_file(self._at(path), content), path)

    def create(self, path: str, content: bytes) -> bool:
        self._refuse_web()
        try:
            self._write(lambda: self._put_new(path, content), path)
        except FileExistsError:
            # Perhaps by an attempt of ours of which the answer was lost.
            return self.read(path, 0, len(content) + 1) == content
        return True

    def _put_new(self, path: str, content: bytes) -> None:
        try:
            # Object stores have a write that fails where something is; for others, fsspec looks first.
            self._fs.pipe_file(self._at(path), content, mode="create")
        except Exception as e:
            if not _knows_no_create(e):
                raise
            if self._fs.exists(self._at(path)):
                raise FileExistsError(path) from None
            self._fs.pipe_file(self._at(path), content)

    def list(self, folder: str) -> dict[str, int]:
        if self._web:
            raise RemoteError(
                f"{self.shown} cannot be listed.",
                "a web server does not say what it holds",
                "Give the name of the snapshot, too.",
                remote=self.shown,
            )
        try:
            entries = self._attempts.make(
                lambda: self._fs.ls(self._at(folder), detail=True), f"{folder} cannot be listed"
            )
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
            self._attempts.make(lambda: self._fs.rm_file(self._at(path)), f"{path} cannot be deleted")

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
            self._attempts.make(put, what)
        except FileNotFoundError as e:  # there is no such bucket, or none that one may see
            raise self._attempts.failed(what, e) from None


def _knows_no_create(error: Exception) -> bool:
    """Tell whether a store, or its library, does not know the write that fails where something is."""
    return isinstance(error, (NotImplementedError, TypeError)) or "NotImplemented" in f"{error}{error.__cause__}"


def _is_final(error: Exception) -> bool:
    """Tell whether a web server's answer would be the same again."""
    status = getattr(error, "status", None)
    return isinstance(status, int) and 400 <= status < 500 and status not in (408, 429)
