"""Which ports sockets have: as the system tells it when it is asked, and as /proc/net has it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections import Counter

from filtered import under_a_filter
from notebooks import wait_until

from jupyter_gpuckpt.linux.socket_ports import established, port_holders, ports_of_ended_connections

_SOCKET = 41  # the number of socket(2)


def connections() -> Counter[int]:
    return Counter(one.port for one in established())


def inode(of: socket.socket) -> int:
    return os.fstat(of.fileno()).st_ino


def test_sockets_are_found_with_their_ports() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.create_server(("::1", 0), family=socket.AF_INET6) as listening_too,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as of_udp,
        socket.socket() as bound,
    ):
        of_udp.bind(("127.0.0.1", 0))
        bound.bind(("127.0.0.1", 0))
        found = set(port_holders("tcp"))
        assert {(one.getsockname()[1], inode(one)) for one in (listening, listening_too)} <= found
        assert bound.getsockname()[1] not in {port for port, _ in found}
        assert (of_udp.getsockname()[1], inode(of_udp)) in set(port_holders("udp"))
        port = listening.getsockname()[1]
        clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
        served = [listening.accept()[0] for _ in clients]
        assert connections()[port] == 3
        assert port not in ports_of_ended_connections()
        for one in (*served, *clients):  # who closes first has the port kept
            one.close()
    wait_until(lambda: port in ports_of_ended_connections())
    assert connections()[port] == 0


def test_where_the_system_cannot_be_asked_the_same_is_read_from_proc() -> None:
    program = (
        "import json; from jupyter_gpuckpt.linux import socket_ports as ports;"
        "print(json.dumps([list(ports.port_holders('tcp')), [one.port for one in ports.established()],"
        " list(ports.ports_of_ended_connections())]))"
    )
    with socket.create_server(("127.0.0.1", 0)) as listening:
        here = listening.getsockname()[1]
        with socket.create_connection(("127.0.0.1", here)), listening.accept()[0]:
            words = [*under_a_filter(_SOCKET), sys.executable, "-c", program]
            said = subprocess.run(words, stdout=subprocess.PIPE, check=True).stdout
            holders, connected, _ = json.loads(said)
            assert [here, inode(listening)] in holders
            assert connected.count(here) == connections()[here] == 1
