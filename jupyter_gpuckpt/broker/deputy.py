"""One connection to the broker: it starts one sleeper for one user, and dumps and restores in that one alone.

criu runs as the user, with one capability (CAP_CHECKPOINT_RESTORE), in the sleeper's namespaces: which files it may
open, whom it may trace and what it may restore is judged by the system as it is for the user.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import errno
import fcntl
import functools
import hmac
import logging
import os
import resource
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from ..errors import GpuckptError, KernelLost, Refused, Unavailable
from ..freeze import criu, random_state
from ..freeze.criu_program import CriuProgram
from ..linux import processes, proof, seccomp, spawning, yama
from ..linux.readiness import readable
from ..linux.spawning import NAMESPACE_RUN_DIR
from . import cgroups, containers, images, lent_criu, mounts
from .descriptors import turn_away
from .peer import Peer, has_only
from .protocol import (
    MESSAGE_LIMIT,
    PROOF,
    Check,
    Criu,
    CriuFound,
    Done,
    Dump,
    Failed,
    Hold,
    NextPid,
    Proof,
    Prove,
    Reply,
    Request,
    Restore,
    Start,
    Started,
    StartInContainer,
    message,
    request_in,
)
from .register import Register
from .reports import Began, Broke, Ended, Led, Refusal, Slept, report, reports, reports_of
from .rights import CAP_CHECKPOINT_RESTORE, CAP_SYS_PTRACE, act_as, become, counting_to

__all__ = ["Deputy"]

log = logging.getLogger("gpuckpt.broker")

_LONGEST = 7 * 86400.0  # seconds that criu may be given
_DESCRIPTORS = 4  # that a request may bring
_BURST, _SECOND = 10, 1.0  # requests that are answered in so many seconds
_LISTENER, _IMAGES, _SNAPSHOT, _PROOF, _LENT = 100, 101, 102, 103, 104
"""The descriptors of a sleeper's socket, of criu's folders, of what a sleeper's clients are to say, and the first of
what criu is run from in a container: numbers that a deputy does not use otherwise."""
_START_TIMEOUT, _CHECK_TIMEOUT = 20.0, 60.0  # seconds
_TURN, _END, _LOOK = 5.0, 2.0, 0.01  # seconds: for what else is done in a sleeper; for a child to end; between looks
_MEMORY = 64 << 20
"""Bytes of memory of its own that a deputy, and what it begins as root, may have: some 10 MiB are Python's."""
_KERNEL_LOG, _CRIU_OUTPUT = "kernel.log", "criu.out"
"""In the run folder."""

_libc = ctypes.CDLL(None, use_errno=True)


class Deputy:
    """Answers the requests of one connection until it ends, or until SIGTERM: then what is under way is finished."""

    def __init__(
        self, connection: socket.socket, program: CriuProgram, register: Register, with_containers: bool = False
    ) -> None:
        self._connection, self._program, self._register = connection, program, register
        self._with_containers = with_containers
        self._environment = program.environment()  # found where it is, not where criu will run
        self._pid, self._pidfd = 0, -1
        self._namespaces: list[int] = []

    def serve(self) -> None:
        """Answer until the other side hangs up, or says what is no request."""
        peer: Peer | Failed
        recent: collections.deque[float] = collections.deque(maxlen=_BURST)
        # Of the soft limit alone: the hard one is what users' processes can still be given.
        resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, resource.getrlimit(resource.RLIMIT_DATA)[1]))
        try:
            own = [self._register.folder, *_folders_of(self._program)]
            peer = Peer.at(self._connection, own, self._container_of if self._with_containers else None)
        except GpuckptError as e:
            log.warning("a process was refused: %s", e.why)
            peer = Failed(e.as_dict())
        while True:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            packet, descriptors, flags, _ = socket.recv_fds(self._connection, MESSAGE_LIMIT, _DESCRIPTORS)
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            for descriptor in descriptors:
                os.set_inheritable(descriptor, False)
            # Each leaves a line in the log, which is everybody's.
            if len(recent) == _BURST:
                time.sleep(max(0.0, recent[0] + _SECOND - time.monotonic()))
            recent.append(time.monotonic())
            try:
                if not packet or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                    return
                if isinstance(peer, Failed):
                    self._say(peer)
                    return
                self._say(self._answer(peer, packet, descriptors))
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)

    def _container_of(self, pid: int) -> containers.Container:
        found = containers.of(pid, self._register.pids())
        if found.filter and not (self._program.works_filtered and seccomp.are_counted()):
            raise Refused(
                "The broker does not serve this process.",
                f"Process {pid} runs in a container with a seccomp filter, and CRIU cannot save such processes here.",
                "Start the container with `--security-opt seccomp=unconfined`.",
            )
        return found

    def _say(self, reply: Reply) -> None:
        self._connection.send(message(reply), socket.MSG_NOSIGNAL)

    def _answer(self, peer: Peer, packet: bytes, descriptors: Sequence[int]) -> Done | Failed:
        verb = ""  # what else was said is nobody's business
        try:
            request = request_in(packet)
            verb = request.do
            value = self._do(peer, request, descriptors)
        except (GpuckptError, ValueError, RecursionError) as e:
            error = e if isinstance(e, GpuckptError) else _nonsense()
            log.warning("user %d was refused %a: %a", peer.uid, verb, error.why)
            return Failed(error.as_dict())
        except OSError as e:
            log.exception("%a failed for user %d", verb, peer.uid)
            why = f"{e.strerror or e}"
            return Failed(GpuckptError("The broker could not do it.", why, "Look at its log.").as_dict())
        log.info("user %d: %s: %s", peer.uid, verb, value)
        return Done(value)

    def _do(self, peer: Peer, request: Request, descriptors: Sequence[int]) -> CriuFound | int | None:
        if len(descriptors) != request.descriptors:
            raise _nonsense()
        match request:
            case Criu():
                _refuse_where_users_may_not_trace()
                self._refuse_under_seccomp()
                return CriuFound(self._program.version, self._program.path, self._program.new_connections)
            case Start() | StartInContainer():
                if isinstance(request, StartInContainer) != (peer.container is not None):
                    raise _nonsense()
                return self._start(peer, *descriptors)
            case Hold():
                return self._hold(peer, request.pid)
            case NextPid():
                return self._next_pid(peer, request.after)
            case Dump():
                return self._dump(peer, request, *descriptors)
            case Check():
                return self._check_images(peer, *descriptors)
            case Restore():
                return self._restore(peer, request, *descriptors)

    def _refuse_under_seccomp(self) -> None:
        """Refuse to serve where every kernel would have a filter of which criu does not know that it is not theirs."""
        if seccomp.is_filtered() and not (self._program.works_filtered and seccomp.are_counted()):
            raise Unavailable(
                "Kernels and jobs cannot be saved on this machine.",
                "The broker and everything it starts runs under a seccomp filter, as in a container. CRIU cannot save "
                "such processes here.",
                "Start the container with `--security-opt seccomp=unconfined`, or the broker outside of it.",
            )

    # -- the sleeper

    def _demand_proof(self, peer: Peer) -> None:
        """Have the client read something that only an unconfined process of that user can.

        Of Landlock a process shows nothing to others; but one that is confined by it may look into no process that is
        not (landlock(7)). A sleeper is not: it would be the way out.

        Raises
        ------
        Refused : it could not.
        """
        secret = os.urandom(16).hex()
        stay, leave = os.pipe()
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(leave)
            _in_child(lambda: _have_looked_into(peer, stay, secret, write), write)
        os.close(stay)
        os.close(write)
        try:
            pid = 0
            for told in reports(read, _START_TIMEOUT):  # until that process has become the other program
                match told:
                    case Led():
                        pid = told.leader
                    case Refusal():
                        raise GpuckptError.from_dict(told.error)
                    case Broke():
                        raise OSError(0, told.failed)
            self._say(Prove(_as_seen_by(peer, pid)))
            in_time = readable(self._connection, seconds=_START_TIMEOUT)
            said = self._connection.recv(MESSAGE_LIMIT) if in_time else b""
        finally:
            os.close(leave)  # they end, as long as their user lets them
            _reap(child)
        if not hmac.compare_digest(said, message(Proof(secret))):
            raise Refused(
                "The broker does not serve this process.",
                "It may not look into other processes of its own user: it is confined by Landlock.",
                "Start the kernel from outside the sandbox.",
            )

    def _start(self, peer: Peer, run_dir: int, listener: int, programs: int = -1) -> int:
        if self._pidfd >= 0:
            raise _nonsense()
        _refuse_strange_folder(peer, run_dir)
        if not stat.S_ISSOCK(os.fstat(listener).st_mode):
            raise _nonsense()
        self._demand_proof(peer)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            _in_child(lambda: _make_namespaces(peer, run_dir, listener, programs, write), write)
        os.close(write)
        pid, failure = 0, ""
        for told in list(reports_of(child, read, _START_TIMEOUT)):
            match told:
                case Slept():
                    pid = told.sleeper
                case Refusal():
                    raise GpuckptError.from_dict(told.error)
                case Broke():
                    failure = failure or told.failed
        if failure := failure or ("" if pid else "it ended immediately"):
            raise Refused(
                "No sleeper could be started.",
                failure,
                "The broker's administrator finds more in its log.",
            )
        self._register.add(pid, peer.uid, peer.container is not None)
        self._take(peer, pid)
        return _as_seen_by(peer, pid)

    def _hold(self, peer: Peer, pid: int) -> bool:
        if self._pidfd >= 0:
            raise _nonsense()
        self._demand_proof(peer)
        self._take(peer, pid if peer.container is None else peer.container.outer(pid, self._register.pids()))
        return True

    def _take(self, peer: Peer, pid: int) -> None:
        """Hold a sleeper and its namespaces, if it is one that the broker has started for this user.

        A sleeper is its user's own process, which may have been made to enter namespaces of its own making: what root
        did there would be done to files of the user's choice. The broker's belong to its own user namespace, as only
        root's do (ioctl_nsfs(2)); once they are held here, they stay the same.

        Raises
        ------
        KernelLost : it is none.
        Refused : it was started for a client in another mount namespace.
        """
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):

            def hold(descriptor: int) -> int:
                held.callback(os.close, descriptor)
                return descriptor

            process = hold(os.pidfd_open(pid))
            # Looked up while the process is held: its pid cannot be another's meanwhile.
            known = self._register.has(pid, peer.uid, peer.container is not None)
            known = known and (peer.container is None or peer.container.has(pid))
            namespaces = [hold(os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY)) for name in ("pid", "mnt")]
            if known and all(map(mounts.is_of_own_user_namespace, namespaces)):
                own_mounts = ("/proc", "/dev/shm", self._images_at(peer))  # noqa: S108 - a sleeper's
                mounts.refuse_other(peer.pid, peer.mount_namespace, pid, namespaces[1], own_mounts)
                self._pid, self._pidfd, self._namespaces = pid, process, namespaces
                held.pop_all()
                return
        raise KernelLost("The kernel is gone.", "No sleeper of this pid was started by the broker for this user.")

    def _next_pid(self, peer: Peer, after: int) -> bool:
        path = "/proc/sys/kernel/ns_last_pid"
        with contextlib.ExitStack() as opened, self._alone():
            # Whose next pid it is, is decided by who writes, not by where the file was found. In a container it is the
            # broker's, since the sleeper's can be read-only, as the broker's is where that one is in a container.
            held = opened.enter_context(open(path, "w")) if peer.container is not None else None

            def work() -> None:
                with held or open(path, "w") as file:
                    file.write(str(after))

            return self._inside(peer, work, _START_TIMEOUT) == 0

    # -- criu

    def _dump(self, peer: Peer, asked: Dump, folder: int, snapshot: int) -> int | None:
        for descriptor in (folder, snapshot):
            _refuse_strange_folder(peer, descriptor)
        capabilities = [CAP_CHECKPOINT_RESTORE]
        if yama.ptrace_scope() >= yama.ANCESTORS:
            capabilities.append(CAP_SYS_PTRACE)
        seconds = min(asked.seconds, _LONGEST)
        images_at = f"/proc/self/fd/{_IMAGES}"
        arguments = criu.dump_arguments(asked.pid, images_at, criu.AT_POST_DUMP, seconds, asked.left)

        with self._lent(peer) as lent, self._alone():

            def work() -> None:
                held = {_IMAGES: folder, _SNAPSHOT: snapshot, **lent}
                _place(held)
                become(peer, capabilities, held)
                self._become_criu(peer, arguments, criu.dump_environment(images_at))

            self._refuse_strange_processes(peer, asked.pid)
            return self._inside(peer, work, seconds)

    def _restore(self, peer: Peer, asked: Restore, folder: int) -> int | None:
        _refuse_strange_folder(peer, folder)
        at = self._images_at(peer)
        # By the descriptor: below /proc, where images are in containers, a profile of AppArmor's may forbid to write.
        user = Path(f"/proc/self/fd/{_IMAGES}")
        arguments = [*criu.restore_arguments(Path(at), user / criu.RESTORE_LOG, asked.left), "--work-dir", str(user)]

        random_state.spoil()

        with self._lent(peer) as lent, self._alone():

            def work() -> None:
                images.lay_out(folder, at, peer)
                held = {_IMAGES: folder, **lent}
                _place(held)
                become(peer, [CAP_CHECKPOINT_RESTORE], held)
                self._become_criu(peer, arguments, {})

            return self._inside(peer, work, min(asked.seconds, _LONGEST), lambda: images.take_away(at))

    def _check_images(self, peer: Peer, folder: int) -> bool:
        _refuse_strange_folder(peer, folder)
        at = self._images_at(peer)
        lay_out = functools.partial(images.lay_out, folder, at, peer)
        with self._alone():
            return self._inside(peer, lay_out, _CHECK_TIMEOUT, lambda: images.take_away(at)) == 0

    def _images_at(self, peer: Peer) -> str:
        return self._register.images_at if peer.container is None else containers.IMAGES_AT

    @contextlib.contextmanager
    def _lent(self, peer: Peer) -> Iterator[dict[int, int]]:
        """Open what criu is run from in a client's container, by the numbers that it is to have there."""
        lent = lent_criu.lend(self._program) if peer.container is not None else {}
        try:
            yield dict(enumerate(lent.values(), _LENT))
        finally:
            for descriptor in lent.values():
                os.close(descriptor)

    def _become_criu(self, peer: Peer, arguments: Sequence[str], more: Mapping[str, str]) -> NoReturn:
        run_dir = NAMESPACE_RUN_DIR
        out = os.open(f"{run_dir}/{_CRIU_OUTPUT}", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        for descriptor in (1, 2):
            os.dup2(out, descriptor)
        environment = {
            **self._environment,
            **more,
            # criu, which this process is about to be, keeps it open; its script inherits nothing.
            "GPUCKPT_SNAPSHOT": f"/proc/{os.getpid()}/fd/{_SNAPSHOT}",
            "GPUCKPT_LOG": f"{run_dir}/{_KERNEL_LOG}",
        }
        argv = [*self._program.argv, *arguments, criu.UNPRIVILEGED]
        if peer.container is not None:
            at = {folder: _LENT + n for n, folder in enumerate(lent_criu.folders(self._program))}
            argv = lent_criu.moved(argv, at)
            environment = dict(zip(environment, lent_criu.moved([*environment.values()], at), strict=True))
        os.execve(argv[0], argv, environment)

    def _refuse_strange_processes(self, peer: Peer, top: int) -> None:
        """Refuse to dump what is not the user's alone: root's, set-user-id, or with capabilities.

        Nor is anything dumped but what is below the sleeper, whose pid in its namespace is `top`: beside it, criu and
        others of the broker's may be there.
        """
        below = processes.descendants(self._pid)
        if top not in processes.pids_beside(self._pid, below):
            raise Refused(
                "The save was refused; nothing was touched.",
                f"Process {top} does not run in this kernel or job.",
                "Save again; if that is refused as well, restart it.",
            )
        for pid in below:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                dead = processes.start_time(pid) is None  # a restored one has what criu had when it made it
                if not dead and not has_only(pid, peer.uid, peer.gid):
                    raise Refused(
                        "The save was refused; nothing was touched.",
                        f"Process {pid} ({processes.name(pid)}) in it has other rights than user {peer.uid} has.",
                        "End it, and save again.",
                    )

    # -- inside

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Have nothing else done in the sleeper meanwhile, by no deputy of any broker.

        Raises
        ------
        KernelLost : the sleeper has ended.
        Refused : something else is being done there.
        """
        if self._pidfd < 0:
            raise _nonsense()
        deadline = time.monotonic() + _TURN
        with self._register.opened(self._pid) as note:
            # The processes that work there hold it, too, until they become another program: also without this one.
            while not _lock(note):
                if time.monotonic() > deadline:
                    raise Refused(
                        "The broker refused a request.",
                        "Another operation on this kernel or job is in progress.",
                        "Wait until it has finished, and try again.",
                    )
                time.sleep(_LOOK)
            yield

    def _inside(
        self, peer: Peer, work: Callable[[], None], seconds: float, afterwards: Callable[[], None] = lambda: None
    ) -> int | None:
        """Do something in a process of the sleeper's namespaces; return its exit status, None if it took too long.

        Raises
        ------
        KernelLost : the sleeper has ended.
        GpuckptError : the work raised it.
        """
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            _in_child(lambda: _run_inside(peer, self._namespaces, work, seconds, afterwards, write), write)
        os.close(write)
        leader = 0
        ended: Ended | None = None
        refusal: Refusal | None = None
        failure = ""
        for told in reports_of(child, read, seconds + _START_TIMEOUT):
            match told:
                case Led():
                    leader = told.leader
                case Began():
                    with contextlib.suppress(OSError):  # the keeper died meanwhile: criu goes on
                        self._say(Started(told.inner))
                case Ended():
                    ended = told
                case Refusal():
                    refusal = told
                case Broke():
                    failure = told.failed
        if refusal is not None:
            raise GpuckptError.from_dict(refusal.error)
        if readable(self._pidfd, seconds=0):
            raise KernelLost("The kernel's namespace is gone.", "Its process 1 ended.")
        if failure or ended is None:
            raise OSError(0, failure or "it was killed")
        if ended.status != 0 and leader:
            processes.end_session(self._pid, leader)
        return ended.status


def _folders_of(program: CriuProgram) -> Iterator[Path]:
    """Yield where criu, its loader and its libraries lie."""
    yield Path(program.path)
    yield from (path for word in program.argv for path in map(Path, word.split(":")) if path.is_absolute())


def _as_seen_by(peer: Peer, pid: int) -> int:
    return pid if peer.container is None else peer.container.inner(pid)


def _nonsense() -> Refused:
    return Refused(
        "The broker refused a request.",
        "The request is unknown, or not allowed at this point.",
        "Upgrade the older of the two: the broker, or jupyter_gpuckpt where the kernel was started.",
    )


def _refuse_strange_folder(peer: Peer, descriptor: int) -> None:
    about = os.fstat(descriptor)
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != peer.uid:
        raise Refused("The broker refused a request.", "A folder in it is not its user's.", "")


def _refuse_where_users_may_not_trace() -> None:
    """Refuse to serve where criu could dump, but not restore: that it does without CAP_SYS_PTRACE.

    It attaches to processes that it has made itself: allowed to ancestors, and not from 2 on.
    """
    scope = yama.ptrace_scope()
    if scope > yama.ANCESTORS:
        raise Unavailable(
            "Kernels and jobs cannot be saved on this machine.",
            f"Its users may not trace their own processes (kernel.yama.ptrace_scope is {scope}), as CRIU does.",
            "An administrator can set it to 1 or 0 in /etc/sysctl.d and restart the machine.",
        )


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# -- processes of the deputy's


def _in_child(work: Callable[[], None], to: int) -> NoReturn:
    """Do something in this forked process, and end it; a failure is reported."""
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        turn_away()
        work()
    except GpuckptError as e:
        report(to, Refusal(e.as_dict()))
    except BaseException as e:  # noqa: BLE001 - nobody else tells of it
        report(to, Broke(f"{type(e).__name__}: {e}"))
    finally:
        os._exit(1)


def _reap(child: int) -> None:
    """Wait a moment for the end of a child; what its user keeps (by tracing it, or stopping it) is left to the broker.

    Which reaps it, as the parent of all orphans, when both this process and that one have ended.
    """
    deadline = time.monotonic() + _END
    while os.waitpid(child, os.WNOHANG)[0] == 0 and time.monotonic() < deadline:
        time.sleep(_LOOK)


def _have_looked_into(peer: Peer, stay: int, secret: str, to: int) -> None:
    """Have a process of the user's that has a secret in its environment, until `stay` is closed."""
    peer.enter()  # its user can make it do anything
    child = os.fork()
    if child == 0:
        _in_child(lambda: _be_looked_into(peer, stay, secret), to)
    report(to, Led(child))
    os.close(to)
    os.read(stay, 1)
    with contextlib.suppress(PermissionError):  # without CAP_KILL
        os.kill(child, signal.SIGKILL)
    _reap(child)
    os._exit(0)


def _be_looked_into(peer: Peer, stay: int, secret: str) -> None:
    os.dup2(stay, 0)
    become(peer)
    # That of a container's user: no more than the user can have run anyway.
    python = sys.executable if peer.container is None else peer.container.python
    os.execve(python, [python, "-I", "-S", "-c", "import sys; sys.stdin.read()"], {PROOF: secret})


def _make_namespaces(peer: Peer, run_dir: int, listener: int, programs: int, to: int) -> None:
    """Become a sleeper's parent for a moment, and let it go."""
    machine = os.open("/proc", os.O_PATH | os.O_DIRECTORY)
    peer.enter()
    if peer.container is not None and os.fork():  # those of the container's pids, of which a sleeper's are made
        os._exit(0)
    # A folder is bound from the mount namespace that it is seen in, and only the working folder follows into a new one.
    # No right of root's is wanted for the user's folders, nor had by a broker with few capabilities.
    act_as(peer.uid, peer.gid)
    os.fchdir(run_dir)
    try:
        with counting_to(peer.uid):
            _check(_libc.unshare(spawning.CLONE_NEWPID | spawning.CLONE_NEWNS), "unshare")
    except OSError as e:
        if e.errno != errno.ENOSPC:
            raise
        raise Refused(
            "No sleeper could be started.",
            "The user has reached the limit of namespaces on this machine (max_pid_namespaces, max_mnt_namespaces).",
            "Shut down a kernel; an administrator can raise the limits in /proc/sys/user.",
        ) from e
    act_as(peer.uid, peer.gid)
    if os.fork():
        os._exit(0)
    _in_child(lambda: _become_sleeper(peer, listener, programs, machine, to), to)


def _become_sleeper(peer: Peer, listener: int, programs: int, machine: int, to: int) -> None:
    report(to, Slept(int(os.readlink("self", dir_fd=machine))))
    spawning.furnish(".", peer.uid, peer.gid)
    os.chdir("/")
    python, program = sys.executable, spawning.SLEEPER
    if peer.container is not None:
        act_as(0, 0)
        containers.furnish(peer.container)
        python = peer.container.python
        program = f"{os.readlink(f'/proc/self/fd/{programs}')}/{os.path.basename(program)}"  # noqa: PTH115, PTH119
    _place({_LISTENER: listener})
    become(peer, descriptors=(_LISTENER,))
    arguments = [str(_LISTENER)]
    if Path(spawning.NAMESPACE_RUN_DIR, proof.WANTED).exists():
        os.dup2(proof.make(), _PROOF)
        arguments.append(str(_PROOF))
    # The keeper connects at once; whoever connects is told the pid and the user of who listens (unix(7)): this one.
    listening = socket.socket(fileno=_LISTENER)
    listening.listen()
    listening.detach()
    os.execve(python, [python, "-I", "-S", "-B", program, *arguments], {})


def _run_inside(
    peer: Peer,
    namespaces: Sequence[int],
    work: Callable[[], None],
    seconds: float,
    afterwards: Callable[[], None],
    to: int,
) -> None:
    """Enter the namespaces, have a child do the work, and tell how it ended."""
    cgroups.join(peer.cgroups)  # what criu restores is where criu is
    if peer.container is not None:
        peer.container.enter(but=("pid", "mnt"))
    for namespace in namespaces:
        _check(_libc.setns(namespace, 0), "setns")
    os.chdir("/")
    child = os.fork()
    if child == 0:
        _in_child(lambda: _work_inside(work, to), to)
    report(to, Led(child))
    held = os.pidfd_open(child)
    in_time = bool(readable(held, seconds=seconds))
    if not in_time:
        signal.pidfd_send_signal(held, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    afterwards()
    report(to, Ended(status if in_time else None))
    os._exit(0)


def _work_inside(work: Callable[[], None], to: int) -> None:
    report(to, Began(os.getpid()))
    work()
    os._exit(0)


def _place(descriptors: dict[int, int]) -> None:
    """Give these descriptors these numbers, to be kept over an exec."""
    moved = {number: os.dup(descriptor) for number, descriptor in descriptors.items()}
    while any(held in moved for held in moved.values()):
        moved = {number: os.dup(held) for number, held in moved.items()}
    for number, held in moved.items():
        os.dup2(held, number)


def _check(result: int, doing: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{doing}: {os.strerror(number)}")
