"""What cannot be saved or restored is refused, or fails, in words, and the kernel goes on as if nothing had been."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from notebooks import Answer, Notebook, StartKernel, wait_until


def processes_of(notebook: Notebook) -> set[int]:
    """Every process that this kernel's keeper has started, and itself."""
    with notebook.keeper as keeper:
        pid = keeper.request("status")["keeper_pid"]
    keeper_process = psutil.Process(pid)
    return {pid, *(child.pid for child in keeper_process.children(recursive=True))}


def tree_of(notebook: Notebook) -> set[int]:
    """The kernel and its children."""
    with notebook.keeper as keeper:
        return set(keeper.request("status")["pids"])


def in_the_store() -> set[str]:
    root = Path(os.environ["GPUCKPT_STORE"])
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()} - {"format.json"}


@pytest.fixture
def unharmed(notebook: Notebook) -> Callable[[str], Answer]:
    """Run a line that must fail in words, and see that it left the kernel, its processes and the store alone."""

    def fails(line: str) -> Answer:
        notebook.run("alive = 41")
        processes, kernel, stored = processes_of(notebook), tree_of(notebook), in_the_store()
        answer = notebook.fails(line)
        assert answer.ename in ("Refused", "SaveFailed"), answer.text
        assert "Traceback" not in answer.text
        what, why, then = answer.shown[-1].splitlines()
        assert what
        assert why.startswith("Why: ")
        assert then.startswith("Next: ")
        assert notebook.value("alive + 1") == "42"
        wait_until(lambda: processes_of(notebook) <= processes, what="processes are left")
        assert kernel <= processes_of(notebook)
        assert in_the_store() == stored
        return answer

    return fails


@pytest.fixture
def cannot_save(unharmed: Callable[[str], Answer]) -> Callable[[], Answer]:
    return lambda: unharmed("%gpuckpt save here")


def saves_and_restores(notebook: Notebook) -> None:
    """The other side of it: once the obstacle is gone, the same kernel is saved and restored."""
    notebook.run("%gpuckpt save after --replace")
    notebook.run("alive = 0")
    notebook.run("%gpuckpt restore after")
    assert notebook.value("alive") == "41"


# -- what cannot be saved


def test_a_unix_connection_to_another_program(
    notebook: Notebook, cannot_save: Callable[[], Answer], tmp_path: Path
) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        notebook.run(f"import socket; s = socket.socket(socket.AF_UNIX); s.connect({str(tmp_path / 's')!r})")
        mine, _ = listener.accept()
        with mine:
            answer = cannot_save()
            assert "half of stream unix connection" in answer.text
            assert "Close the connection to the other program" in answer.text
            # The connection is alive as well.
            notebook.run("s.sendall(b'still there')")
            assert mine.recv(100) == b"still there"
            notebook.run("s.close()")
            saves_and_restores(notebook)


def test_a_process_that_is_being_traced(notebook: Notebook, cannot_save: Callable[[], Answer]) -> None:
    notebook.run("import subprocess; child = subprocess.Popen(['sleep', '1000'])")
    with notebook.keeper as keeper:
        pids = keeper.request("status")["pids"]
    child = next(pid for pid in pids if psutil.Process(pid).name() == "sleep")
    with traced(child):
        answer = cannot_save()
        assert answer.ename == "Refused"
        assert f"Process {child} of the kernel is being traced by process {os.getpid()}" in answer.text
    saves_and_restores(notebook)
    assert notebook.value("child.poll()") == "None"


def test_what_criu_would_only_refuse_in_the_middle_of_a_save_is_named_before(
    notebook: Notebook, cannot_save: Callable[[], Answer]
) -> None:
    """A child that the kernel itself traces, as by strace; an open userfaultfd; no room for files of criu's."""
    notebook.run("""
        import ctypes, os, subprocess
        alive, libc, child = 41, ctypes.CDLL(None), subprocess.Popen(["sleep", "1000"])
        seized = libc.ptrace(0x4206, child.pid, None, None)  # PTRACE_SEIZE
    """)
    assert notebook.value("seized") == "0"
    assert "is being traced by process" in cannot_save().text
    notebook.run("child.kill(); child.wait(); faults = libc.syscall(323, os.O_CLOEXEC | 1)  # userfaultfd")
    if notebook.value("faults") != "-1":  # in a container it may be forbidden
        assert "has a userfaultfd open, which CRIU cannot save" in cannot_save().text
        notebook.run("os.close(faults)")
    notebook.run("child = subprocess.Popen(['sh', '-c', 'ulimit -n 4; echo; exec sleep 1000'], stdout=-1)")
    notebook.run("child.stdout.readline()")
    answer = cannot_save()
    assert answer.ename == "Refused"
    assert "has no room for files that CRIU opens in it (it may open 4)" in answer.text
    notebook.run("child.kill(); child.wait()")
    saves_and_restores(notebook)


def test_processes_and_threads_of_which_criu_would_only_save_a_part_are_named_before(
    notebook: Notebook, cannot_save: Callable[[], Answer]
) -> None:
    """Threads with a folder or files of their own, as in Samba; no first thread; a program in memory, as runc's."""
    notebook.run("""
        import ctypes, os, subprocess, sys, threading, time
        libc = ctypes.CDLL(None)
        def apart(what, ready, done):
            if libc.unshare(what) == 0: ready.set()
            done.wait()
        def thread_with(what):
            ready, done = threading.Event(), threading.Event()
            thread = threading.Thread(target=apart, args=(what, ready, done)); thread.start(); ready.wait()
            return lambda: (done.set(), thread.join())
        end = thread_with(0x200)  # CLONE_FS
    """)
    assert "has a thread with a working folder of its own, which CRIU cannot save" in cannot_save().text
    notebook.run("end(); end = thread_with(0x400)  # CLONE_FILES")
    assert "has a thread with open files of its own, which CRIU cannot save" in cannot_save().text
    notebook.run("""
        end()
        program = "import ctypes, threading, time; threading.Thread(target=time.sleep, args=[1000]).start()"
        child = subprocess.Popen([sys.executable, "-c", program + "; ctypes.CDLL(None).syscall(60, 0)"])  # exit
        while open(f"/proc/{child.pid}/stat").read().rpartition(")")[2].split()[0] != "Z": time.sleep(0.01)
    """)
    assert "goes on without its first thread, which CRIU cannot save" in cannot_save().text
    notebook.run("""
        child.kill(); child.wait()
        memory = os.memfd_create("program"); os.write(memory, open("/bin/sleep", "rb").read())
        child = subprocess.Popen(["sleep", "1000"], executable=f"/proc/self/fd/{memory}", pass_fds=[memory])
    """)
    assert "runs a program that lies in memory alone (memfd_create), which CRIU cannot save" in cannot_save().text
    notebook.run("child.kill(); child.wait(); os.close(memory)")
    saves_and_restores(notebook)


class traced:  # noqa: N801 - used as a function
    """Trace a process from this one, as a debugger does; it keeps running."""

    _PTRACE_DETACH, _PTRACE_SEIZE, _PTRACE_INTERRUPT = 17, 0x4206, 0x4207

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._ptrace = ctypes.CDLL(None, use_errno=True).ptrace
        self._ptrace.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]

    def _call(self, request: int) -> None:
        assert self._ptrace(request, self._pid, None, None) == 0, os.strerror(ctypes.get_errno())

    def __enter__(self) -> None:
        self._call(self._PTRACE_SEIZE)

    def __exit__(self, *_: object) -> None:
        self._call(self._PTRACE_INTERRUPT)
        os.waitpid(self._pid, 0x40000000)  # __WALL
        self._call(self._PTRACE_DETACH)


def test_an_inotify_watch_is_saved(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run(f"""
        import ctypes, os
        libc = ctypes.CDLL(None)
        watch = libc.inotify_init1(os.O_NONBLOCK)
        assert libc.inotify_add_watch(watch, {str(tmp_path).encode()!r}, 0x100) > 0  # IN_CREATE
        alive = 41
    """)
    saves_and_restores(notebook)
    (tmp_path / "new").touch()
    assert notebook.value("b'new' in os.read(watch, 4096)") == "True"


_RING = """
#include <unistd.h>
const char *gpuckpt_test_name = "io_uring";
int gpuckpt_test_ring(void) { static char parameters[120]; return (int)syscall(425, 4, parameters); }
"""


@pytest.fixture
def with_io_uring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUCKPT_IO_URING", "on")


@pytest.mark.usefixtures("with_io_uring")
def test_io_uring(notebook: Notebook, cannot_save: Callable[[], Answer], tmp_path: Path) -> None:
    library = tmp_path / "libring.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", library], input=_RING, text=True, check=True)
    notebook.run(f"import ctypes, os; ring = ctypes.CDLL({str(library)!r}).gpuckpt_test_ring()")
    if notebook.value("ring") == "-1":
        pytest.skip("this machine forbids io_uring")
    answer = cannot_save()
    assert f"io_uring (opened by {library})" in answer.text
    assert ("GPUCKPT_IO_URING=on" in answer.text) == (os.geteuid() == 0)
    notebook.run("os.close(ring)")
    saves_and_restores(notebook)


def test_a_process_that_has_changed_its_root_folder(
    notebook: Notebook, tmp_path: Path, cannot_save: Callable[[], Answer]
) -> None:
    notebook.run(f"import os, signal; ready, tell = os.pipe(); empty = {str(tmp_path)!r}")
    notebook.run("child = os.fork() or (os.chroot(empty), os.write(tell, b'!'), signal.pause(), os._exit(0))")
    notebook.run("os.read(ready, 1)")
    assert "chroot" in cannot_save().text
    notebook.run("os.kill(child, signal.SIGKILL); os.waitpid(child, 0)")
    notebook.run("%gpuckpt save here")


def test_system_v_shared_memory_is_named_before_anything_is_frozen(
    notebook: Notebook, cannot_save: Callable[[], Answer]
) -> None:
    notebook.run("""
        import ctypes
        libc = ctypes.CDLL(None); libc.shmat.restype = ctypes.c_void_p
        segment = libc.shmget(0, 4096, 0o1600); address = libc.shmat(segment, None, 0)
        libc.shmctl(segment, 0, None)  # it goes with the last process that has it
        alive = 41
    """)
    answer = cannot_save()
    assert answer.ename == "Refused"
    assert "uses System V shared memory" in answer.text
    notebook.run("libc.shmdt(ctypes.c_void_p(address))")
    saves_and_restores(notebook)


def test_a_child_in_a_namespace_of_its_own_is_named_before_anything_is_frozen(
    notebook: Notebook, cannot_save: Callable[[], Answer]
) -> None:
    """As sandboxes and containers have them; with one of the network alone, it could be saved, and not restored."""
    notebook.run("""
        import subprocess
        child = subprocess.Popen(["unshare", "--net", "sh", "-c", "echo there; exec sleep 1000"], stdout=-1)
        child.stdout.readline(); alive = 41
    """)
    answer = cannot_save()
    assert answer.ename == "Refused"
    assert "is in a namespace of its own (net)" in answer.text
    notebook.run("child.kill(); child.wait()")
    saves_and_restores(notebook)


def test_messages_that_wait_in_sockets_and_cannot_be_saved(
    notebook: Notebook, cannot_save: Callable[[], Answer]
) -> None:
    """Those of netlink, and those that have their sender's credentials: once they are read, the kernel is saved."""
    notebook.run("""
        import socket, struct
        netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)
        netlink.send(struct.pack("=LHHLLBBHiLL", 32, 18, 0x301, 1, 0, 0, 0, 0, 0, 0, 0))  # RTM_GETLINK
    """)
    assert "Have the kernel read what waits in its netlink socket" in cannot_save().text
    notebook.run("netlink.recv(65536); netlink.close()")
    notebook.run("here, there = socket.socketpair(); there.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)")
    notebook.run("here.send(b'from me')")
    assert "Have the kernel read what waits in its Unix sockets with SO_PASSCRED" in cannot_save().text
    assert notebook.value("there.recvmsg(100, 100)[0]") == "b'from me'"
    saves_and_restores(notebook)


def test_a_socket_of_multipath_tcp_is_named_before_anything_is_frozen(
    start: StartKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels of root find none, and programs do without; where it was let be, the save is refused."""
    listening = "import socket; s = socket.socket(proto=262); s.listen()"
    assert "Protocol not supported" in start().fails(listening).text
    monkeypatch.setenv("GPUCKPT_IO_URING", "on")
    notebook = start()
    notebook.run(listening)
    answer = notebook.fails("%gpuckpt save here")
    assert answer.ename == "Refused"
    assert "has a socket of Multipath TCP" in answer.text
    assert "GODEBUG=multipathtcp=0" in answer.text


def test_a_child_at_a_terminal_of_its_own_is_saved(notebook: Notebook) -> None:
    """As pexpect, `script` and jupyter's terminals do it: a pty, with both of its ends in the kernel's tree."""
    notebook.run("""
        import os, pty
        pid, terminal = pty.fork()
        if pid == 0:
            os.execvp("sh", ["sh", "-c", "stty -echo; read a; echo got $a; read b; echo got $b; sleep 1000"])
        alive = 41
        os.write(terminal, b"one\\n")
        def until(text, said=b""):
            while text not in said:
                said += os.read(terminal, 1000)
            return True
        until(b"got one")
    """)
    saves_and_restores(notebook)
    assert notebook.run("os.write(terminal, b'two\\n'); print(until(b'got two'))").text == "True"


def test_daemons_stay_in_the_kernels_tree_and_are_saved(notebook: Notebook, tmp_path: Path) -> None:
    """Forked twice, with a session of their own and no parent left; also ones that a restored kernel makes."""
    notebook.run("""
        import os, time, warnings
        warnings.simplefilter("ignore")  # of Python 3.12 and newer: a kernel has threads, and forks all the same
        alive = 41
        def daemon(path):
            if (child := os.fork()) == 0:
                os.setsid()
                if os.fork() == 0:
                    while True:
                        with open(path, "a") as f:
                            f.write(f"{os.getpid()} {os.getsid(0)}\\n")
                        time.sleep(0.01)
                os._exit(0)
            os.waitpid(child, 0)
            return child
    """)
    for beats in (tmp_path / "first", tmp_path / "second"):
        leader = notebook.value(f"daemon({str(beats)!r})")
        pid, session = wait_until(lambda beats=beats: beats.exists() and beats.read_text().splitlines())[0].split()
        assert session == leader
        saves_and_restores(notebook)
        # Its session has no leader any more, which criu cannot restore: it leads one of its own from now on.
        wait_until(lambda beats=beats, pid=pid: beats.read_text().endswith(f"{pid} {pid}\n"))
    for beats in (tmp_path / "first", tmp_path / "second"):
        before = beats.stat().st_size
        wait_until(lambda beats=beats, before=before: beats.stat().st_size > before, what=f"{beats} did not come back")


def test_what_others_of_a_session_left_behind_stays_the_kernels_child_and_is_saved_again(notebook: Notebook) -> None:
    """Of a session whose leader goes on, as of `(program &)` in a terminal, and of one whose leader is a zombie."""
    notebook.run("""
        import os, psutil, subprocess, time, warnings
        warnings.simplefilter("ignore")  # as above
        alive, kernel = 41, os.getpid()
        shell = subprocess.Popen(["sh", "-c", "(sleep 1000 &); exec cat"], start_new_session=True, stdin=-1)
        if os.fork() == 0:
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    os.execv("/bin/sleep", ["sleep", "1000"])
                while os.getppid() != kernel: time.sleep(0.01)
            os._exit(0)
        def left():
            processes = psutil.Process().children()
            return sorted((one.name(), one.status() == "zombie", os.getsid(one.pid)) for one in processes)
    """)
    wait_until(lambda: notebook.value("[name for name, *_ in left()]").count("'sleep'") == 2)
    wait_until(lambda: notebook.value("[ended for _, ended, _ in left()].count(True)") == "2")
    before = notebook.value("left()")
    for _ in range(2):
        saves_and_restores(notebook)
        assert notebook.value("left()") == before


def test_a_process_that_is_no_child_of_the_kernel_is_named(
    notebook: Notebook, cannot_save: Callable[[], Answer]
) -> None:
    """Nothing but clone(2) with CLONE_PARENT makes one; a restore would leave it behind."""
    notebook.run("""
        import ctypes, os, signal
        stray = ctypes.PyDLL(None).syscall(56, 0x8000 | signal.SIGCHLD, 0, 0, 0, 0)
        if stray == 0:
            os.execv("/bin/sleep", ["sleep", "1000"])
        while open(f"/proc/{stray}/comm").read() != "sleep\\n":
            pass
    """)
    answer = cannot_save()
    assert answer.ename == "Refused"
    assert "(sleep)" in answer.text
    notebook.run("os.kill(stray, signal.SIGKILL)")
    saves_and_restores(notebook)


# -- what cannot be restored


@pytest.fixture
def saved_with_a_file(notebook: Notebook, tmp_path: Path) -> Path:
    path = tmp_path / "data.txt"
    path.write_text("0123456789")
    notebook.run(f"f = open({str(path)!r}, 'rb', buffering=0); f.read(3)")
    notebook.run("%gpuckpt save here")
    notebook.run("f.close()")
    return path


def deleted(path: Path) -> None:
    path.unlink()


def shrunk(path: Path) -> None:
    path.write_text("012")


def grown(path: Path) -> None:
    path.write_text("another beginning, and more")


def replaced(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (deleted, "had 10 bytes, is gone"),
        (shrunk, "had 10 bytes, here 3"),
        (grown, "had 10 bytes, here 27"),
        (replaced, "was a file, here a folder"),
    ],
)
def test_an_open_file_that_changed_is_named_and_the_running_kernel_is_not_touched(
    notebook: Notebook,
    saved_with_a_file: Path,
    unharmed: Callable[[str], Answer],
    changed: Callable[[Path], None],
    said: str,
) -> None:
    changed(saved_with_a_file)
    answer = unharmed("%gpuckpt restore here")
    assert answer.ename == "Refused"
    assert f"{saved_with_a_file}: {said}" in answer.text
    # The snapshot was not touched either: with the file as it was, it is restored.
    if saved_with_a_file.is_dir():
        saved_with_a_file.rmdir()
    saved_with_a_file.write_text("0123456789")
    notebook.run("%gpuckpt restore here")
    assert notebook.value("f.read()") == "b'3456789'"


def test_a_file_that_was_replaced_by_one_of_the_same_size_is_the_new_one(
    notebook: Notebook, saved_with_a_file: Path
) -> None:
    """What criu and this project compare is the size: an editor's way of saving (write, rename) is no obstacle."""
    fresh = saved_with_a_file.with_suffix(".new")
    fresh.write_text("abcdefghij")
    fresh.rename(saved_with_a_file)
    notebook.run("%gpuckpt restore here")
    assert notebook.value("f.read()") == "b'defghij'"


def test_a_file_that_others_append_to_is_no_obstacle(notebook: Notebook, saved_with_a_file: Path) -> None:
    with saved_with_a_file.open("a") as f:
        f.write(" and more")
    notebook.run("%gpuckpt restore here")
    assert notebook.value("f.read()") == "b'3456789 and more'"


def test_a_file_whose_mode_changed_is_no_obstacle(notebook: Notebook, saved_with_a_file: Path) -> None:
    saved_with_a_file.chmod(0o600)
    notebook.run("%gpuckpt restore here")
    assert notebook.value("f.read()") == "b'3456789'"
    assert saved_with_a_file.stat().st_mode & 0o777 == 0o600


def test_a_library_that_was_built_anew_is_refused(
    notebook: Notebook, unharmed: Callable[[str], Answer], tmp_path: Path
) -> None:
    """What is mapped of it and unchanged is not saved, but mapped again: another build would be a mixture."""
    maps = Path("/proc/self/maps").read_text().split()
    content = Path(next(word for word in maps if word.rpartition("/")[2].startswith("libm.so"))).read_bytes()
    note = content.index(b"\x03\x00\x00\x00GNU\x00") + 8  # NT_GNU_BUILD_ID, see elf(5)
    own = tmp_path / "library.so"
    own.write_bytes(content)
    notebook.run(f"import ctypes; library = ctypes.CDLL({str(own)!r}); library.cos.restype = ctypes.c_double")
    notebook.run("%gpuckpt save here")
    own.unlink()
    own.write_bytes(content[:note] + bytes(20) + content[note + 20 :])
    answer = unharmed("%gpuckpt restore here")
    assert answer.ename == "Refused"
    assert f"{own}: a different build of the same size" in answer.text
    own.write_bytes(content)
    notebook.run("%gpuckpt restore here")
    assert notebook.value("library.cos(ctypes.c_double(0.0))") == "1.0"


def test_a_snapshot_whose_working_folder_is_gone(
    notebook: Notebook, unharmed: Callable[[str], Answer], tmp_path: Path
) -> None:
    notebook.run(f"import os; os.mkdir({str(tmp_path / 'work')!r}); os.chdir({str(tmp_path / 'work')!r})")
    notebook.run("%gpuckpt save here")
    notebook.run("os.chdir('/')")
    (tmp_path / "work").rmdir()
    answer = unharmed("%gpuckpt restore here")
    assert str(tmp_path / "work") in answer.text
    (tmp_path / "work").mkdir()
    notebook.run("%gpuckpt restore here")
    assert notebook.value("os.getcwd()") == str(tmp_path / "work")


_TORCH_THAT_WAITS_FOR_ITS_GPU = """
import sys, threading, types
is_done = threading.Event()
cuda = types.SimpleNamespace(is_initialized=lambda: True, empty_cache=is_done.wait)
sys.modules["torch"] = types.SimpleNamespace(cuda=cuda)
"""


def test_a_gpu_that_has_much_to_do_is_not_waited_for_for_long(
    start: StartKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch can give no memory back before its GPU is done."""
    monkeypatch.setenv("GPUCKPT_LOCK_TIMEOUT", "0.2")
    notebook = start()
    notebook.run(_TORCH_THAT_WAITS_FOR_ITS_GPU)
    failed = notebook.fails("%gpuckpt save here", timeout=20)  # hooks have 30 s
    assert "Work on the GPU did not pause" in failed.text
    notebook.run("is_done.set()")
    notebook.run("%gpuckpt save here")
