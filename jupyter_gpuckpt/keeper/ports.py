"""Which ports and socket names a restored kernel gets."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from ..errors import Refused
from ..freeze.images import BoundSocket
from ..linux import processes, socket_ports
from ..linux.reserved_ports import Reserved, bound
from ..snapshots.saved import SavedKernel

DRIVERS = b"cuda-uvmfd-"
"""How the abstract socket is called that the GPU driver makes in each process (driver 580.159). Any other name that
begins so will do."""
CHANNELS = ("shell_port", "iopub_port", "stdin_port", "control_port", "hb_port")


def of_connection_file(path: str) -> dict[str, int]:
    """Return the ports of the five channels, as a connection file names them; none where there is no such file."""
    if not path:
        return {}
    content: dict[str, Any] = json.loads(Path(path).read_text())
    return {channel: int(content[channel]) for channel in CHANNELS}


def endpoint(connection_file: str) -> dict[str, str]:
    """Return how clients reach a kernel beside its ports: ``transport``, ``ip``, and ``curve``, which tells its keys.

    The keys themselves (CurveZMQ) must not get into a snapshot's manifest; ``curve`` is empty without encryption.
    """
    if not connection_file:
        return {}
    content: dict[str, Any] = json.loads(Path(connection_file).read_text())
    key = str(content.get("curve_publickey") or "")
    return {
        "transport": str(content.get("transport") or "tcp"),
        "ip": str(content.get("ip") or ""),
        "curve": hashlib.sha256(key.encode()).hexdigest()[:16] if key else "",
    }


def endpoint_differs(kernel: SavedKernel, connection_file: str) -> bool:
    """Tell whether a saved kernel was reached otherwise than that of a connection file is."""
    here = endpoint(connection_file)
    # Those that were saved before that was noted were hardly ever encrypted.
    return bool(here) and {**here, "transport": "tcp", "curve": "", **kernel.endpoint} != here


def peers(
    connection_file: str, kernel: int | None = None, *, away: Counter[int] | None = None, of: Collection[int] = ()
) -> dict[str, int]:
    """Return how many clients are connected to the channels on which a cell is answered, and asks.

    ipykernel is a client of itself. Where the process of the `kernel` is given, its own connections do not count.
    Clients that were sent `away` (how many, by port) count as well where they are not back yet, as far as that can be
    told. Those of the processes `of` are back at once; where it cannot be seen whether they are, they are.
    """
    ports, ends = of_connection_file(connection_file), socket_ports.established()
    held = processes.sockets(() if kernel is None else (kernel,))
    own = {(one.there, one.here) for one in ends if one.inode in held}
    counted = Counter(one.port for one in ends if (one.here, one.there) not in own)
    # After the others were counted: one that came back in between would count twice, and be waited for in vain.
    if away and (back := reached_by(of)) is not None:
        counted += away - back
    asking = ("shell_port", "iopub_port", "stdin_port")
    return {channel: counted[ports[channel]] for channel in asking if channel in ports}


def reached_by(pids: Collection[int]) -> Counter[int] | None:
    """Return how many connections these processes have to each port of this machine; None where it cannot be seen.

    It cannot of a process of another pid namespace, or one that this one may not inspect.
    """
    ends, own = socket_ports.established(), [processes.sockets((pid,)) for pid in pids]
    if not all(own):
        return None
    ports, inodes = {(one.here, one.there): one.port for one in ends}, set[int]().union(*own)
    return Counter(ports[one.there, one.here] for one in ends if one.inode in inodes and (one.there, one.here) in ports)


def have_two_listeners(connection_file: str) -> bool:
    """Tell whether two listen at the ports of all channels."""
    listening = Counter(port for port, _ in socket_ports.port_holders("tcp"))
    return all(listening[port] > 1 for port in of_connection_file(connection_file).values())


class Choice:
    """Gives every saved port the one it gets here: a channel's own, the same, or a free one if that is taken.

    Those that are `shared` are free, too; those that are chosen here are `reserved`. With `aside`, the channels get
    free ones, where no client looks for them.
    """

    def __init__(
        self,
        saved: Mapping[str, int],
        connection_file: str,
        reserved: Reserved,
        shared: Collection[int],
        *,
        aside: bool,
    ) -> None:
        self._reserved, self._shared = reserved, shared
        here = of_connection_file(connection_file)
        self._taken = set(here.values())
        self.table: dict[int, int] = {}
        """The new port by the saved one, for those that were asked for so far."""
        for channel in CHANNELS:
            self.table[saved[channel]] = port = self._free() if aside else here[channel]
            self._taken.add(port)

    def __call__(self, port: int) -> int:
        if port not in self.table:
            if port in self._taken:
                chosen = self._free()
            elif port in self._shared:
                chosen = port
            else:
                chosen = self._reserved.same_or_free(port)
            self._taken.add(chosen)
            self.table[port] = chosen
        return self.table[port]

    def _free(self) -> int:
        while (port := self._reserved.free()) in self._taken:
            pass
        return port


def _is_free(port: int) -> bool:
    try:
        bound(port).close()
    except OSError:
        return False
    return True


@dataclass
class Places:
    """What a restored kernel's sockets are bound to here, by what they were bound to when it was saved."""

    port: Callable[[int], int]
    table: Mapping[int, int]
    """The ports that `port` has given so far."""
    abstract_name: Callable[[bytes], bytes]
    socket_path: Callable[[Path], Path]

    @classmethod
    def of_restore(
        cls,
        saved: Mapping[str, int],
        connection_file: str,
        reserved: Reserved,
        shared: Collection[int] = (),
        *,
        aside: bool = False,
    ) -> Places:
        """The channels' ports are the connection file's, and whatever else is free, or `shared`, stays as it was.

        With `aside`, the channels' are free ones: the kernel goes to those of the connection file when it has its keys.
        What is chosen here is `reserved`, which is to be closed when the kernel listens.
        """
        choice = Choice(saved, connection_file, reserved, shared, aside=aside)
        return cls(choice, choice.table, free_abstract_name, lambda path: path)

    @classmethod
    def of_job(cls, table: Mapping[int, int]) -> Places:
        """All ports but those in the table stay as they were."""
        return cls(lambda port: table.get(port, port), table, free_abstract_name, lambda path: path)

    @classmethod
    def of_copy(cls, table: Mapping[int, int], paths: Mapping[str, str]) -> Places:
        """Ports and paths are given; abstract names are never the same."""
        names: dict[bytes, bytes] = {}
        return cls(
            table.__getitem__,
            table,
            lambda name: names.setdefault(name, _fresh_abstract_name(name)),
            lambda path: Path(paths.get(str(path), path)),
        )


def of_a_copy(bound: Collection[int], saved: Mapping[str, int], reserved: Reserved) -> dict[int, int]:
    """Return the port of a copy for each that the saved tree has bound: other ones for the five channels."""
    channels = {saved[channel]: reserved.free() for channel in CHANNELS}
    return channels | {port: reserved.same_or_free(port) for port in bound if port not in channels}


def elsewhere(bound: Collection[BoundSocket], leaving: Collection[int], *, may_differ: bool) -> dict[int, int]:
    """Return another port for each that somebody has, where `may_differ` says that others will do.

    `leaving` are the processes that end before the sockets come back.

    Raises
    ------
    Refused : somebody has one, and it has to be the same; connected UDP sockets get another in any case.
    """
    ours = processes.sockets(leaving)
    kinds = {socket.kind for socket in bound}
    held = {
        (kind, port): inode for kind in kinds for port, inode in socket_ports.port_holders(kind) if inode not in ours
    }
    taken = [socket for socket in bound if (socket.kind, socket.port) in held]
    wanted = [socket for socket in taken if not socket.is_connected]
    if wanted and not may_differ:
        named = [f"{s.kind.upper()} port {s.port}, which {_holder(held[s.kind, s.port])} has" for s in wanted]
        raise Refused(
            "The snapshot was not restored; nothing was touched.",
            f"It needs {'; and '.join(named)}.",
            "End that program, or add --other-ports to use other ports for those that are taken.",
            ports=[s.port for s in wanted],
        )
    reserved = Reserved()
    try:
        return {socket.port: reserved.free() for socket in taken}
    finally:
        reserved.close()


def lingering(bound: Collection[BoundSocket], table: Mapping[int, int]) -> list[int]:
    """Return the TCP ports of these sockets (their new ones, as `elsewhere` gave them) that nobody can have just now.

    Linux keeps the port of a server that closed a connection itself for a minute (TIME_WAIT), unless that server had
    asked it not to (SO_REUSEADDR). Looking gives it free, where this process has the right to (CAP_NET_ADMIN).
    """
    kept = socket_ports.ports_of_ended_connections()
    wanted = (table.get(socket.port, socket.port) for socket in bound if socket.kind == "tcp")
    return [port for port in wanted if port in kept and not _is_free(port)]


def _holder(inode: int) -> str:
    pid = processes.holder_of(inode)
    return f"process {pid} ({processes.name(pid)})" if pid else "a process that is not visible from here"


def taken_names(names: Collection[bytes]) -> set[bytes]:
    """Return those of the abstract names (without their leading NUL) that somebody's Unix socket has."""
    return {name for name in names if free_abstract_name(name) != name}


def taken_paths(paths: Collection[Path]) -> set[Path]:
    """Return those of the paths that somebody's Unix socket is bound to."""
    names = [name for _, name in processes.unix_sockets()]
    return {path for path in paths if any(is_at(name, path) for name in names)}


def is_at(name: str, path: Path) -> bool:
    """Tell whether a Unix socket of that name (proc(5), net/unix) is at a path; a relative name says no folder."""
    if name.startswith(("/", "@")):
        return name == str(path)
    return PurePath(name).name == path.name and path.is_socket()


def _fresh_abstract_name(name: bytes) -> bytes:
    return (DRIVERS if name.startswith(DRIVERS) else b"gpuckpt-") + secrets.token_hex(8).encode()


def free_abstract_name(name: bytes) -> bytes:
    """Return the abstract socket name itself, or a fresh one if somebody has it (proc(5), net/unix)."""
    shown = "@" + os.fsdecode(name.rstrip(b"\0").replace(b"\0", b"@"))
    if any(other.rstrip("@") == shown.rstrip("@") for _, other in processes.unix_sockets()):
        return _fresh_abstract_name(name)
    return name
