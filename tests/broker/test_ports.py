"""What another user gets of a kernel's ports, at every moment: nothing; the numbers are those of docs/security.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from people import Person

pytestmark = pytest.mark.criu

# In every way that lets two sockets be at a port, and at any address that leads to it.
ATTACK = """
import itertools, socket, threading
got, rounds, wanted, kept = [], 0, [], []
ways = [
    (family, address, options)
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET, ""), (socket.AF_INET6, "::"))
    for options in ((), (socket.SO_REUSEADDR,), (socket.SO_REUSEPORT,), (socket.SO_REUSEADDR, socket.SO_REUSEPORT))
]
def take(port):
    for family, address, options in ways:
        one = socket.socket(family)
        try:
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            for option in options:
                one.setsockopt(socket.SOL_SOCKET, option, 1)
            one.bind((address, port))
            got.append(("bound", port, options))
            kept.append(one)
            one.listen()
            got.append(("listens", port, options))
        except OSError:
            if one not in kept:
                one.close()
def attack():
    global rounds
    while wanted:
        for port in wanted:
            take(port)
        rounds += 1
def begin(ports):
    wanted[:] = ports
    threading.Thread(target=attack, daemon=True).start()
def seen():
    return [got, rounds]
"""

# The kernel's Python, which comes to its channels when the file is there.
_WAITS = """
import os, sys, time
if "ipykernel_launcher" in sys.orig_argv:
    while not os.path.exists({go!r}): time.sleep(0.01)
"""

_STARTS = """
import os
from jupyter_client import KernelManager
from notebooks import Notebook, open_channels, wait_for_ready
def connected():
    client = manager.client()
    open_channels(client)
    wait_for_ready(client)
    return Notebook(manager, client)
manager = KernelManager(kernel_name="python3-gpuckpt")
"""


@pytest.fixture
def mallory(person: Callable[..., Person]) -> Iterator[Person]:
    """Bob, who wants to listen where Alice's clients look for her kernel."""
    bob = person("bob")
    bob.does(ATTACK)
    yield bob
    bob.does("wanted.clear()")


def assert_got_nothing(mallory: Person) -> None:
    """Once he has tried everything since."""
    before = mallory.does("seen()")[1]
    while (seen := mallory.does("seen()"))[1] < before + 2:
        pass
    assert seen[0] == []


def test_another_user_listens_at_a_kernel_s_ports(person: Callable[..., Person], mallory: Person) -> None:
    alice = person("alice")
    go = alice.home / "go"
    (alice.home / "sitecustomize.py").write_text(_WAITS.format(go=str(go)))
    alice.does(_STARTS, f"manager.start_kernel(env={{**os.environ, 'PYTHONPATH': {str(alice.home)!r}}})")
    mallory.does(f"begin({alice.does('manager.ports')})")
    assert_got_nothing(mallory)  # while it starts
    go.touch()
    alice.does("notebook = connected()")
    alice.runs("x = 1")
    alice.runs("%gpuckpt save here")
    for how in ("", " --in-place"):
        alice.runs("x = 2")
        alice.runs(f"%gpuckpt restore here{how}")
        assert alice.runs("print(x)") == "1"
    alice.does("with notebook.keeper as keeper: keeper.request('hibernate')")
    assert_got_nothing(mallory)
    assert alice.runs("print(x)") == "1"
    alice.runs("%gpuckpt fork")
    alice.does("manager.shutdown_kernel(now=True, restart=True)")
    assert_got_nothing(mallory)  # before it starts again
    alice.does("manager.start_kernel()", "notebook.wait_for_ready()")
    assert "here" in alice.runs("%gpuckpt list")
    assert_got_nothing(mallory)


# A server that is gone when its kernel is up.
_SERVER = """
import os
from notebooks import wait_for_ready
from jupyter_client import KernelManager
manager = KernelManager(kernel_name="python3-gpuckpt")
manager.start_kernel()
client = manager.client()
client.start_channels()
wait_for_ready(client)
print(manager.kernel_id, *manager.ports, flush=True)
os._exit(0)
"""

_IS_LEFT = """
import os, subprocess, sys
from notebooks import wait_until
from jupyter_gpuckpt.client import keepers
environment = {**os.environ, "GPUCKPT_END_AFTER": "off", "PYTHONPATH": os.pathsep.join(sys.path)}
def left():
    global kernel, folder
    done = subprocess.run([sys.executable, "-c", server], env=environment, capture_output=True, text=True, check=True)
    kernel, *ports = done.stdout.split()
    folder = keepers.find(kernel)
    wait_until(lambda: not asked("status")["attended"])
    return [int(port) for port in ports]
def asked(what, **args):
    with keepers.connect(folder) as keeper:
        return keeper.request(what, args)
def kill_keeper():
    os.kill(folder.state().keeper[0], 9)
    wait_until(lambda: not folder.has_keeper())
"""


def test_also_when_who_chose_them_is_gone(person: Callable[..., Person], mallory: Person) -> None:
    """A kernel that outlives its server and its keeper, and is taken over by the next ones."""
    alice = person("alice")
    alice.does(_STARTS, _IS_LEFT, f"server = {_SERVER!r}", "None")
    mallory.does(f"begin({alice.does('left()')})")
    alice.does("asked('save', name='left')['name']")
    alice.does("asked('restore', name='left', in_place=True)['name']")
    alice.does("kill_keeper()")
    alice.does("asked('restore', name='left', in_place=True)['name']")
    alice.does("manager.start_kernel(kernel_id=kernel, gpuckpt_adopt=True)", "notebook = connected()")
    assert alice.runs("print('served')") == "served"
    alice.does("manager.shutdown_kernel(now=True, restart=True)")
    assert_got_nothing(mallory)
    alice.does("manager.start_kernel()", "notebook.wait_for_ready()")
    assert_got_nothing(mallory)


# Whoever connects may subscribe; what is printed and every cell come to all who have. By ZMTP 3, and by 1.0 (RFC 13),
# which knows no encryption.
EAVESDROP = """
import select, socket, time, zmq
def subscribe(port):
    global heard, raw
    heard = zmq.Context.instance().socket(zmq.SUB)
    heard.subscribe(b"")
    heard.connect(f"tcp://127.0.0.1:{port}")
    raw = socket.create_connection(("127.0.0.1", port))
    raw.sendall(bytes([1, 0, 2, 0, 1]))
def hears(word, seconds):
    until, everything, said, is_open = time.monotonic() + seconds, b"", b"", True
    while not (word in everything and word in said) and time.monotonic() < until:
        if heard.poll(50):
            everything += b"".join(heard.recv_multipart())
        if is_open and select.select([raw], [], [], 0.05)[0]:
            try:
                more = raw.recv(65536)
            except ConnectionError:
                more = b""
            is_open = bool(more)
            said += more
    return [word in everything, word in said]
"""


def test_another_user_listens_to_what_a_kernel_prints(person: Callable[..., Person]) -> None:
    alice, mallory = person("alice"), person("bob")
    mallory.does(EAVESDROP)
    alice.starts_kernel()
    mallory.does(f"subscribe({alice.does('manager.iopub_port')})")
    alice.runs("print('geheim')")
    alice.runs("%gpuckpt save encrypted")
    alice.runs("%gpuckpt restore encrypted")
    assert alice.runs("print('geheim')") == "geheim"
    assert mallory.does("hears(b'geheim', 2)") == [False, False]
    # Not that he could not: one that is not encrypted he hears.
    alice.does("notebook.close()", "import os", "os.environ['GPUCKPT_ENCRYPTION'] = 'off'")
    alice.starts_kernel()
    mallory.does(f"subscribe({alice.does('manager.iopub_port')})")
    alice.does("client.execute('import time\\nwhile True: print(\"geheim\", flush=True); time.sleep(0.05)')")
    assert mallory.does("hears(b'geheim', 600)") == [True, True]
