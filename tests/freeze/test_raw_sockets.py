"""What criu is answered about raw sockets, without the system having to look for a module of its own for them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jupyter_gpuckpt import installed

_OF_ITS_OWN = ["unshare", *(["--user", "--map-root-user"] if os.geteuid() != 0 else []), "--net"]
pytestmark = pytest.mark.skipif(
    subprocess.run([*_OF_ITS_OWN, "true"], capture_output=True, check=False).returncode != 0,
    reason="no network of its own can be made here",
)

# It opens the sockets that it is told of, and asks for all raw ones, as criu does (sock_diag(7)).
_ASKS = """
import os, socket, struct, sys
INET = {"4": socket.AF_INET, "6": socket.AF_INET6}
kept = []
for one in sys.argv[2:]:
    if one == "listening":
        kept.append(socket.create_server(("127.0.0.1", 0)))
    else:
        kept.append(socket.socket(INET[one], socket.SOCK_RAW, socket.IPPROTO_ICMP))
request = struct.pack("=BBBBI48x", INET[sys.argv[1]], socket.IPPROTO_RAW, 0, 0, 0xFFFFFFFF)
request += bytes(16)  # criu's is larger than what is asked here
with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 4) as asking:  # NETLINK_SOCK_DIAG
    asking.settimeout(30)
    asking.sendmsg([struct.pack("=IHHII", 16 + len(request), 20, 0x301, 7, 0) + request], [], 0, (0, 0))
    while True:
        size, kind, _, sequence, _, number = struct.unpack_from("=IHHIIi", asking.recv(65536))
        assert sequence == 7
        print({2: "error", 3: "end", 20: "socket"}[kind], number if kind != 20 else "")
        if kind != 20:
            break
"""


def answered(*arguments: str, library: str | Path = installed.CRIU_SOCKETS_LIBRARY) -> list[str]:
    """Return what the system answers in a network where only these sockets are."""
    asking = [*_OF_ITS_OWN, "env", f"LD_PRELOAD={library}", sys.executable, "-c", _ASKS, *arguments]
    done = subprocess.run(asking, capture_output=True, text=True, timeout=60, check=True)
    return [line.strip() for line in done.stdout.splitlines()]


@pytest.mark.parametrize("family", ["4", "6"])
def test_where_there_is_none_that_is_the_answer_at_once(family: str) -> None:
    assert answered(family) == ["end 0"]
    assert answered(family, "listening") == ["end 0"]  # no sockets of other kinds


@pytest.mark.parametrize("family", ["4", "6"])
def test_where_there_is_one_the_system_is_asked_for_it(family: str) -> None:
    """It may say that it has no module for that (-2, ENOENT); criu saves no such socket then."""
    plain = answered(family, family, library="")
    assert plain in (["end -2"], ["socket", "end 0"])
    assert answered(family, family) == plain


def test_one_of_the_other_family_is_no_reason() -> None:
    assert answered("4", "6") == ["end 0"]
    assert answered("6", "4") == ["end 0"]
