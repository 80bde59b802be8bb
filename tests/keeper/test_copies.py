"""What is what in a copy: a test for each row of the table in docs/copies.md, on one kernel and two copies of it."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from copies import forking
from jupyter_client import KernelManager
from notebooks import SPEC, Notebook, open_channels, wait_for_ready

_SETUP = """
import multiprocessing, multiprocessing.shared_memory, os, random, secrets, socket, ssl, tempfile, threading, time, uuid
import jupyter_gpuckpt, numpy as np
from IPython import get_ipython
from pathlib import Path

ssl.RAND_bytes(8)  # a generator that has not been used yet would seed itself

def serve(listener, word):
    while True:
        with listener.accept()[0] as connection:
            connection.sendall(word())

def listening(family, address):
    listener = socket.socket(family)
    listener.bind(address)
    listener.listen()
    threading.Thread(target=serve, args=(listener, lambda: who.encode()), daemon=True).start()
    return listener

def ask(family, address):
    with socket.socket(family) as s:
        s.settimeout(60)
        s.connect(address)
        return s.recv(100).decode()

who = "original"
os.chdir({folder!r})
os.environ["OF_MINE"] = "kept"
server = listening(socket.AF_INET, ("127.0.0.1", 0))
six = listening(socket.AF_INET6, ("::1", 0)) if {six} else None
datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); datagrams.bind(("127.0.0.1", 0))
abstract = listening(socket.AF_UNIX, "\\0gpuckpt-test-" + uuid.uuid4().hex)
at_path = listening(socket.AF_UNIX, {folder!r} + "/socket")
relative = listening(socket.AF_UNIX, "relative")
connection = socket.create_connection(("127.0.0.1", {port}))
log = open({folder!r} + "/log", "w")
mapped = np.memmap({folder!r} + "/mapped", "uint8", "w+", shape=16)
reading = open({folder!r} + "/mapped", "rb")
temporary = tempfile.TemporaryDirectory()
named = tempfile.NamedTemporaryFile()
block = multiprocessing.shared_memory.SharedMemory("of-mine", create=True, size=5 << 20)
block.buf[8 : 5 << 20] = b"x" * ((5 << 20) - 8)
generator, twister = np.random.default_rng(), np.random.RandomState()
own = random.Random()
clock = time.monotonic()
draw = lambda: [random.random(), np.random.rand(), generator.random(), twister.rand(), own.random()]
forkserver = multiprocessing.get_context("forkserver")
pool = forkserver.Pool(1)
pool.apply(os.getpid)
"""


def _has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as s:
        s.bind(("::1", 0))
        return True
    return False


_HAS_IPV6 = _has_ipv6()


@dataclass
class Kernels:
    """A kernel, two copies of it, and what the fork said; `reseeded` is a copy whose random streams were reseeded."""

    original: Notebook
    copies: Sequence[Any]
    reseeded: Any
    warnings: list[str]
    folder: Path
    peer: socket.socket

    def all(self, expression: str) -> list[str]:
        """Return what the original and the two copies say."""
        return [kernel.value(expression) for kernel in (self.original, *self.copies)]


def _accepted(listener: socket.socket, port: str) -> socket.socket:
    """Return the connection from that port: a kernel of another test may have had this one, and have clients still."""
    while True:
        connection, (_, theirs) = listener.accept()
        if str(theirs) == port:
            return connection
        connection.close()


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernels]:
    folder = tmp_path_factory.mktemp("copies")
    with contextlib.ExitStack() as stack:
        environment = stack.enter_context(pytest.MonkeyPatch.context())
        for variable, name in (
            ("JUPYTER_RUNTIME_DIR", "runtime"),
            ("GPUCKPT_STORE", "store"),
            ("GPUCKPT_LOGS", "logs"),
            ("IPYTHONDIR", "ipython"),
        ):
            environment.setenv(variable, str(folder / name))
        manager = KernelManager(kernel_name=SPEC)
        manager.start_kernel()
        client = manager.client()
        open_channels(client)
        original = Notebook(manager, client)
        stack.callback(original.close)
        wait_for_ready(client)
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        original.run(_SETUP.format(folder=str(folder), port=listener.getsockname()[1], six=_HAS_IPV6))
        peer = stack.enter_context(_accepted(listener, original.value("connection.getsockname()[1]")))
        fork = stack.enter_context(forking())
        copies = fork(original, count=2)
        warnings = fork.warnings  # type: ignore[attr-defined]
        (reseeded,) = fork(original, reseed=True)
        for name, copy in zip(("first", "second"), copies, strict=True):
            copy.run(f"who = {name!r}")
        environment.undo()  # the tests have folders of their own
        yield Kernels(original, copies, reseeded, warnings, folder, peer)
        for variable, name in (("JUPYTER_RUNTIME_DIR", "runtime"), ("IPYTHONDIR", "ipython")):
            environment.setenv(variable, str(folder / name))


WHO = ["original", "first", "second"]


def differ(answers: Sequence[str]) -> bool:
    return len(set(answers)) == len(answers)


def test_the_kernels_own_ports_and_key_are_others(kernels: Kernels) -> None:
    files = [json.loads(Path(path).read_text()) for path in kernels.all("get_ipython().kernel.parent.connection_file")]
    ports = [value for file in files for name, value in file.items() if name.endswith("_port")]
    assert len(set(ports)) == 15
    assert differ([file["key"] for file in files])
    assert kernels.all("get_ipython().kernel.session.key.decode()") == [file["key"] for file in files]
    for copy in kernels.copies:
        assert Path(copy.told["connection_file"]).stat().st_mode & 0o777 == 0o600
    assert differ(kernels.all("get_ipython().kernel.session.session")), "their messages have ids of their own"


def test_a_server_of_the_users_own_gets_a_free_port_and_the_user_is_told_which(kernels: Kernels) -> None:
    for mine in ("server", "datagrams", *(["six"] if _HAS_IPV6 else [])):
        ports = [int(port) for port in kernels.all(f"{mine}.getsockname()[1]")]
        assert differ(list(map(str, ports)))
        assert [copy.told["ports"][str(ports[0])] for copy in kernels.copies] == ports[1:]
    assert kernels.all("ask(socket.AF_INET, server.getsockname())") == WHO
    for copy in kernels.copies:
        with socket.create_connection(("127.0.0.1", int(copy.value("server.getsockname()[1]"))), timeout=60) as s:
            assert s.recv(100).decode() == copy.value("who")


def test_an_abstract_socket_gets_another_name(kernels: Kernels) -> None:
    assert differ(kernels.all("abstract.getsockname()"))
    assert kernels.all("ask(socket.AF_UNIX, abstract.getsockname())") == WHO


def test_a_socket_at_a_path_gets_another_path_and_the_user_is_told(kernels: Kernels) -> None:
    path = str(kernels.folder / "socket")
    paths = kernels.all("at_path.getsockname()")
    assert paths == [path, *(f"{path}.{copy.told['id'][:8]}" for copy in kernels.copies)]
    assert [kernels.original.value(f"ask(socket.AF_UNIX, {path!r})") for path in paths] == WHO
    assert any(path in warning and ".ID" in warning for warning in kernels.warnings)
    path = str(kernels.folder / "relative")
    paths = [path, *(f"{path}.{copy.told['id'][:8]}" for copy in kernels.copies)]
    assert kernels.all("relative.getsockname()") == ["relative", *paths[1:]]
    assert [kernels.original.value(f"ask(socket.AF_UNIX, {path!r})") for path in paths] == WHO
    assert any(path in warning and ".ID" in warning for warning in kernels.warnings)


def test_the_run_folder_and_shared_memory_are_each_kernels_own(kernels: Kernels) -> None:
    for kernel, name in zip((kernels.original, *kernels.copies), WHO, strict=True):
        kernel.run(f"Path('/dev/shm/gpuckpt', {name!r}).touch(); block.buf[:5] = {name[:5]!r}.encode()")
    files = "[name for name in ('original', 'first', 'second') if Path('/dev/shm/gpuckpt', name).exists()]"
    assert kernels.all(files) == [str([name]) for name in WHO]
    assert kernels.all("Path('/dev/shm/of-mine').read_bytes()[:5].decode()") == [name[:5] for name in WHO]
    assert kernels.all("Path('/dev/shm/of-mine').read_bytes().count(b'x')") == [str((5 << 20) - 8)] * len(WHO)


def test_each_has_a_history_session_of_its_own(kernels: Kernels) -> None:
    assert differ(kernels.all("get_ipython().history_manager.session_number"))


def test_temporary_files_are_left_to_the_original(kernels: Kernels) -> None:
    assert differ(kernels.all("next(tempfile._get_candidate_names())"))
    folder, file = kernels.original.value("temporary.name"), kernels.original.value("named.name")
    for copy in kernels.copies:
        copy.run("temporary.cleanup(); named.close(); del temporary, named")
        assert Path(folder).is_dir()
        assert Path(file).is_file()
    kernels.original.run("temporary.cleanup(); named.close()")
    assert not Path(folder).exists()
    assert not Path(file).exists()


def test_files_that_all_have_open_for_writing_are_named(kernels: Kernels) -> None:
    written = [warning for warning in kernels.warnings if "open for writing" in warning]
    for path in (kernels.folder / "log", kernels.folder / "mapped", Path(kernels.original.value("named.name"))):
        assert sum(f" have {path} open " in warning for warning in written) == 1
    assert len(written) == 3, written


@pytest.mark.parametrize(
    "secret",
    [
        "os.urandom(8).hex()",
        "uuid.uuid4()",
        "secrets.token_hex(8)",
        "ssl.RAND_bytes(8).hex()",
        "random.SystemRandom().random()",
        "np.random.default_rng().random()",
        "jupyter_gpuckpt.generation_id()",
    ],
)
def test_secrets_differ_at_once(kernels: Kernels, secret: str) -> None:
    assert differ([*kernels.all(secret), kernels.reseeded.value(secret)])


def test_no_copy_is_connected_to_the_original(kernels: Kernels) -> None:
    """The debugger's own connection to the shell channel is to the copy's."""
    file = json.loads(Path(kernels.original.manager.connection_file).read_text())
    theirs = {value for name, value in file.items() if name.endswith("_port")}
    for copy in kernels.copies:
        connections = psutil.Process(copy.told["pid"]).net_connections("tcp")
        assert not theirs & {one.raddr.port for one in connections if one.raddr}


def test_random_streams_stay_equal_unless_they_are_reseeded(kernels: Kernels) -> None:
    original, first, second = kernels.all("draw()")
    assert original == first == second
    reseeded = kernels.reseeded.value("draw()")
    assert not set(json.loads(reseeded)) & set(json.loads(original))


def test_the_monotonic_clock_goes_on(kernels: Kernels) -> None:
    assert kernels.all("0 <= time.monotonic() - clock < 600 and 0 <= time.perf_counter()") == ["True"] * 3


def test_the_working_folder_and_the_environment_are_as_they_were(kernels: Kernels) -> None:
    assert kernels.all("os.getcwd(), os.environ['OF_MINE']") == [f"{kernels.folder} kept"] * 3


def test_a_connection_stays_with_the_original_and_fails_at_once_in_a_copy(kernels: Kernels) -> None:
    for copy in kernels.copies:
        answer = copy.run("connection.settimeout(60); connection.sendall(b'lost')", allow_error=True)
        assert answer.ename in ("BrokenPipeError", "ConnectionResetError", "OSError")
    kernels.original.run("connection.sendall(b'hello')")
    kernels.peer.settimeout(60)
    assert kernels.peer.recv(100) == b"hello"


def test_what_a_child_prints_comes_out_where_it_belongs(kernels: Kernels) -> None:
    child = "pid = os.fork()\nif not pid: print(f'child of {who}', flush=True); os._exit(0)\n_ = os.waitpid(pid, 0)"
    for kernel, name in zip((kernels.original, *kernels.copies), WHO, strict=True):
        kernel.client.execute(child)
        while (message := kernel.client.get_iopub_msg(timeout=60))["msg_type"] != "stream":
            pass
        assert message["content"]["text"].strip() == f"child of {name}"
        kernel.run("pass")  # all that belongs to the cell has come


def test_a_pool_works_on_and_its_server_is_each_kernels_own(kernels: Kernels) -> None:
    for kernel, name in zip((kernels.original, *kernels.copies), WHO, strict=True):
        kernel.run(
            f"pool.apply(os.mknod, ('/dev/shm/worker-{name}',))\n"
            f"child = forkserver.Process(target=os.mknod, args=('/dev/shm/born-{name}',))\n"
            "child.start(); child.join(); assert child.exitcode == 0"
        )
    made = "sorted(name for name in os.listdir('/dev/shm') if name.startswith(('born-', 'worker-')))"
    assert kernels.all(made) == [str([f"born-{name}", f"worker-{name}"]) for name in WHO]
