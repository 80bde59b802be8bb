"""A remote that fsspec reaches: object stores and web servers."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any

from ....errors import Refused, RemoteError
from . import attempts
from .attempts import Attempts, TooSlowError, package_missing, time_limit
from .remote import PACKAGES, Address, Remote

__all__ = ["FsspecRemote"]

_READ_ONLY = ("http", "https")

_S3 = ("s3", "s3a")

_STEP = 1 << 20
"""How much of an answer is asked for at once, in bytes."""

_LISTING = 4 << 20
"""How long a list of files counts for its time limit, in bytes."""

_MOST_LEADS = 5
"""How often a web server may lead on to another of its addresses."""


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
            read = partial(self._run, self._get, size)
        elif self._address.scheme in _S3:
            read = partial(self._run, self._get_object, size)
        else:
            read = partial(self._call, "cat_file", size)
        ask = partial(read, self._at(path), start=start, end=start + size)
        return self._attempts.make(lambda: bytes(ask()), f"{path} cannot be read")

    def _run(self, do: Callable[..., Coroutine[Any, Any, Any]], size: int, *words: Any, **how: Any) -> Any:
        """Run what moves `size` bytes on the loop of the library. Raises `TooSlowError`, and whatever that raises."""
        from fsspec.asyn import sync
        from fsspec.exceptions import FSTimeoutError

        seconds = time_limit(size)
        try:
            return sync(self._fs.loop, do, *words, timeout=seconds, **how)
        except FSTimeoutError:
            raise TooSlowError(seconds) from None

    def _call(self, name: str, size: int, *words: Any, **how: Any) -> Any:
        """Do by the library what moves `size` bytes. Raises as `_run`."""
        if self._fs.async_impl:
            return self._run(getattr(self._fs, f"_{name}"), size, *words, **how)
        return getattr(self._fs, name)(*words, **how)

    # By hand, since the library would take in whatever a server sends, however long it is.

    async def _get(self, url: str, *, start: int, end: int) -> bytes:
        import aiohttp
        from yarl import URL

        session = await self._fs.set_session()
        headers = {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
        silent = aiohttp.ClientTimeout(sock_connect=attempts.PATIENCE, sock_read=attempts.PATIENCE)
        there = self._fs.encode_url(url)
        for _ in range(_MOST_LEADS):
            async with session.get(there, headers=headers, timeout=silent, allow_redirects=False) as response:
                if response.status in (301, 302, 303, 307, 308):
                    there = self._led_to(response.url, URL(response.headers.get("Location", "")))
                    continue
                if response.status == 416:  # nothing is there from this byte on
                    return b""
                if response.status == 404:
                    raise FileNotFoundError(url)
                response.raise_for_status()
                if response.headers.get("Content-Encoding", "identity") != "identity":
                    raise self._odd("it sent compressed data, which was not requested")
                skip = 0 if response.status == 206 else start
                return await _first(response.content, skip, end - start)
        raise self._odd(f"it redirects more than {_MOST_LEADS} times")

    def _led_to(self, here: Any, there: Any) -> Any:
        """Return the address that a web server leads to, if it is one of its own.

        It could be one of this machine, or of a network that the server's keeper cannot reach.
        """
        led = here.join(there)
        is_secure_now = here.scheme == "http" and (here.port, led.port) == (80, 443)
        if led.host == here.host and (led.origin() == here.origin() or (is_secure_now and led.scheme == "https")):
            return led
        raise self._odd(f"it redirects to {led.scheme}://{led.authority.rpartition('@')[2]}, another address")

    def _odd(self, why: str) -> RemoteError:
        return RemoteError(
            f"The answer of {self.shown} cannot be used.",
            why,
            "Check the address; if you trust the address it redirects to, use that one.",
            remote=self.shown,
        )

    async def _get_object(self, path: str, *, start: int, end: int) -> bytes:
        bucket, key, _ = self._fs.split_path(path)
        asked = {"Bucket": bucket, "Key": key, "Range": f"bytes={start}-{end - 1}"}
        answer = await self._fs._call_s3("get_object", **asked)
        skip = 0 if answer["ResponseMetadata"]["HTTPStatusCode"] == 206 else start
        async with answer["Body"] as body:
            return await _first(body, skip, end - start)

    def write(self, path: str, content: bytes) -> None:
        self._refuse_web()
        self._write(lambda: self._call("pipe_file", len(content), self._at(path), content), path)

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
            self._call("pipe_file", len(content), self._at(path), content, mode="create")
        except Exception as e:
            if not _knows_no_create(e):
                raise
            if self._call("exists", 0, self._at(path)):
                raise FileExistsError(path) from None
            self._call("pipe_file", len(content), self._at(path), content)

    def list(self, folder: str) -> dict[str, int]:
        if self._web:
            raise RemoteError(
                f"{self.shown} cannot be listed.",
                "a web server does not list its files",
                "Give the snapshot's name, too.",
                remote=self.shown,
            )
        try:
            entries = self._attempts.make(
                lambda: self._call("ls", _LISTING, self._at(folder), detail=True), f"{folder} cannot be listed"
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
            self._attempts.make(lambda: self._call("rm_file", 0, self._at(path)), f"{path} cannot be deleted")

    def _at(self, path: str) -> str:
        query = f"?{self._address.query}" if self._web and self._address.query else ""
        return f"{self._root.rstrip('/')}/{path}{query}"

    def _refuse_web(self) -> None:
        if self._web:
            raise Refused(
                f"Nothing can be written to {self.shown}.",
                "addresses that begin with http:// or https:// can only be read",
                "Use the address that its owner writes to, such as s3://bucket/folder.",
            )

    def _write(self, put: Callable[[], None], path: str) -> None:
        what = f"{path} cannot be written"
        try:
            self._attempts.make(put, what)
        except FileNotFoundError as e:  # there is no such bucket, or none that one may see
            raise self._attempts.failed(what, e) from None


async def _first(stream: Any, skip: int, size: int) -> bytes:
    """Return at most `size` bytes of a stream, after so many that are passed over."""
    found = bytearray()
    while len(found) < size and (more := await stream.read(min(_STEP, skip + size - len(found)))):
        found += more[skip:]
        skip = max(0, skip - len(more))
    return bytes(found)


def _knows_no_create(error: Exception) -> bool:
    """Tell whether a store, or its library, does not know the write that fails where something is."""
    return isinstance(error, (NotImplementedError, TypeError)) or "NotImplemented" in f"{error}{error.__cause__}"


def _is_final(error: Exception) -> bool:
    """Tell whether a web server's answer would be the same again."""
    status = getattr(error, "status", None)
    return isinstance(status, int) and 400 <= status < 500 and status not in (408, 429)
