"""A remote on another machine that is reached by SSH: its files by SFTP, by paramiko.

Not by way of fsspec: that connects to whoever answers, without a look at the keys of known hosts, and its connection is
not for many threads.
"""

from __future__ import annotations

import io
import queue
import stat
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock, Timer
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urlsplit

from ....errors import RemoteError
from . import attempts
from .attempts import Attempts, package_missing
from .remote import DRAFT, Address, Remote

if TYPE_CHECKING:
    import paramiko

    from .sftp_channel import LimitedSftp

__all__ = ["SftpRemote"]

_T = TypeVar("_T")

_LISTING = 128 << 20
"""How long a list of files can be, in bytes: of some hundred thousand."""

_CONFIG = Path("~/.ssh/config")
_KNOWN_HOSTS = Path("/etc/ssh/ssh_known_hosts")
"""Known to all users; those of the user are found by paramiko."""


class SftpRemote(Remote):
    """A folder of another machine. It is connected to at the first request."""

    def __init__(self, address: Address) -> None:
        """Take the address: ``sftp://[user[:password]@]host[:port]/folder``; ``/~/`` begins in the home folder there.

        Raises
        ------
        Refused : paramiko is missing.
        """
        try:
            import paramiko  # noqa: F401
        except ImportError:
            raise package_missing(address, "paramiko", "paramiko") from None
        self.shown = address.shown
        self._address = address
        path = unquote(urlsplit(address.full).path).rstrip("/")
        self._root = path.removeprefix("/~/") if path != "/~" else "."
        self._attempts = Attempts(address, _is_final)
        self._lock = Lock()
        self._client: paramiko.SSHClient | None = None
        self._idle: queue.SimpleQueue[LimitedSftp] = queue.SimpleQueue()

    def read(self, path: str, start: int, size: int) -> bytes:
        def ask(sftp: LimitedSftp) -> bytes:
            with sftp.open(self._at(path), "rb") as file:
                there = min(size, (file.stat().st_size or 0) - start)
                found = b"".join(file.readv([(start, there)])) if there > 0 else b""
                if len(found) < there:
                    raise ConnectionResetError(f"{len(found):,} of {there:,} bytes came")
                return found

        return self._ask(ask, f"{path} cannot be read", size)

    def write(self, path: str, content: bytes) -> None:
        self._write(path, content, lambda sftp, draft: sftp.posix_rename(draft, self._at(path)))

    def create(self, path: str, content: bytes) -> bool:
        def put_in_place(sftp: LimitedSftp, draft: str) -> None:
            try:
                sftp.stat(self._at(path))  # a server may not know the rename that fails where something is
            except FileNotFoundError:
                try:
                    sftp.rename(draft, self._at(path))
                    return
                except OSError:
                    sftp.stat(self._at(path))  # raises where it failed for another reason
            raise FileExistsError(path)

        try:
            self._write(path, content, put_in_place)
        except FileExistsError:
            # Perhaps by an attempt of ours of which the answer was lost.
            return self.read(path, 0, len(content) + 1) == content
        return True

    def list(self, folder: str) -> dict[str, int]:
        try:
            found = self._ask(lambda sftp: sftp.listdir_attr(self._at(folder)), f"{folder} cannot be listed", _LISTING)
        except FileNotFoundError:
            return {}
        return {one.filename: one.st_size or 0 for one in found if stat.S_ISREG(one.st_mode or 0)}

    def delete(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self._ask(lambda sftp: sftp.remove(self._at(path)), f"{path} cannot be deleted", 0)

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}"

    def _write(self, path: str, content: bytes, put_in_place: Callable[[LimitedSftp, str], None]) -> None:
        """Write a file under another name, whole, and have it put in its place."""
        folder = self._at(path).rpartition("/")[0]
        draft = f"{folder}/{uuid.uuid4().hex}{DRAFT}"

        def ask(sftp: LimitedSftp) -> None:
            try:
                try:
                    _put(sftp, draft, content)
                except FileNotFoundError:
                    _make_folders(sftp, folder)
                    _put(sftp, draft, content)
                put_in_place(sftp, draft)
            except BaseException:
                with suppress(Exception):
                    sftp.remove(draft)
                raise

        what = f"{path} cannot be written"
        try:
            self._ask(ask, what, len(content))
        except FileNotFoundError as e:
            raise self._attempts.failed(what, e) from None

    def _ask(self, ask: Callable[[LimitedSftp], _T], what: str, size: int) -> _T:
        """Return what `ask` returns, by which `size` bytes travel."""

        def once() -> _T:
            with self._connection() as sftp, sftp.limited(size):
                return ask(sftp)

        return self._attempts.make(once, what)

    @contextmanager
    def _connection(self) -> Iterator[LimitedSftp]:
        """Give a channel that nobody else uses meanwhile; where it breaks, all others are given up as well."""
        client = self._connect()
        try:
            sftp = self._idle.get_nowait()
        except queue.Empty:
            sftp = _channel(client)
        try:
            yield sftp
        except (FileNotFoundError, FileExistsError, PermissionError):
            self._idle.put(sftp)
            raise
        except BaseException:
            sftp.close()
            self._forget(client)
            raise
        self._idle.put(sftp)

    def _connect(self) -> paramiko.SSHClient:
        with self._lock:
            if self._client is not None and not _lives(self._client):  # it may have broken while nobody asked
                self._give_up(self._client)
            if self._client is None:
                self._client = _connected(self._address)
                weakref.finalize(self, self._client.close)  # else its thread would keep it for good
            return self._client

    def _forget(self, client: paramiko.SSHClient) -> None:
        with self._lock:
            if self._client is client and not _lives(client):
                self._give_up(client)

    def _give_up(self, client: paramiko.SSHClient) -> None:
        client.close()
        self._client, self._idle = None, queue.SimpleQueue()


def _lives(client: paramiko.SSHClient) -> bool:
    transport = client.get_transport()
    return transport is not None and transport.is_active()


def _channel(client: paramiko.SSHClient) -> LimitedSftp:
    """Open a channel; the library waits for some of the answers without end."""
    from .sftp_channel import LimitedSftp

    giving_up = Timer(attempts.PATIENCE, client.close)
    giving_up.start()
    try:
        transport = client.get_transport()
        assert transport is not None  # it is connected
        found: LimitedSftp = LimitedSftp.from_transport(transport)
        return found
    finally:
        giving_up.cancel()


def _connected(address: Address) -> paramiko.SSHClient:
    """Connect as `ssh` would, by the user's keys, agent, known hosts, and what the configuration says of the host."""
    import paramiko

    parts = urlsplit(address.full)
    name = parts.hostname or ""
    said: Any = {}
    if _CONFIG.expanduser().exists():
        said = paramiko.SSHConfig.from_path(str(_CONFIG.expanduser())).lookup(name)
    for option in ("proxyjump", "proxycommand"):
        if said.get(option, "none") != "none":
            raise RemoteError(
                f"The remote {address.shown} could not be used: it is reached through another machine.",
                f"{_CONFIG} has {option} for {name}, which is not supported here",
                f"Mount it (`sshfs`) and give the folder, or: `gpuckpt export NAME - | ssh {name} 'cat > FILE'`.",
                remote=address.shown,
            )
    client = paramiko.SSHClient()
    client.load_system_host_keys()
    if _KNOWN_HOSTS.exists():
        client.load_system_host_keys(str(_KNOWN_HOSTS))
    client.set_missing_host_key_policy(paramiko.RejectPolicy())
    try:
        client.connect(
            said.get("hostname", name),
            port=parts.port or int(said.get("port", 22)),
            username=unquote(parts.username) if parts.username else said.get("user"),
            password=unquote(parts.password) if parts.password else None,
            key_filename=said.get("identityfile"),
            timeout=attempts.PATIENCE,
            banner_timeout=attempts.PATIENCE,
            auth_timeout=attempts.PATIENCE,
            channel_timeout=attempts.PATIENCE,
        )
    except BaseException:
        client.close()
        raise
    return client


def _put(sftp: LimitedSftp, path: str, content: bytes) -> None:
    sftp.putfo(io.BytesIO(content), path, len(content))  # it looks afterwards whether all of it arrived


def _make_folders(sftp: LimitedSftp, folder: str) -> None:
    above = folder.rpartition("/")[0]
    if above:
        try:
            sftp.stat(above)
        except FileNotFoundError:
            _make_folders(sftp, above)
    try:
        sftp.mkdir(folder, 0o700)
    except OSError:
        sftp.stat(folder)  # another thread was first; or it raises why it failed


def _is_final(error: Exception) -> bool:
    """Tell whether the machine would answer the same again.

    What paramiko raises as its plain `SSHException` may be a connection that was dropped: among what it does not tell
    apart from that (a machine that is not known, no key at all) nothing is harmed by two more attempts.
    """
    import paramiko

    if type(error) is paramiko.SSHException or isinstance(error, paramiko.ssh_exception.ChannelException):
        return False
    return isinstance(error, paramiko.SSHException)
