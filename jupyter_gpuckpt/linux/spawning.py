"""How process 1 comes to be, and how it spawns programs: what a new kernel waits for.

For programs that begin with `python -I -S -B` (`starter.py`, `sleeper.py`), and for the broker. So it imports next to
nothing: every module of the standard library that is imported before the kernel is spawned is a user's wait.
"""

from __future__ import annotations

import ctypes
import os

if __package__:
    from . import seccomp
else:  # of `starter.py` and `sleeper.py`, which know no package
    import seccomp  # type: ignore[import-not-found, no-redef]

CLONE_NEWNS, CLONE_NEWPID = 0x00020000, 0x20000000
MS_NOSUID, MS_NODEV, MS_NOEXEC = 2, 4, 8
MS_BIND, MS_REC, MS_SLAVE = 0x1000, 0x4000, 0x80000
PR_SET_CHILD_SUBREAPER = 36
# The same as in settings.py, which this program must not import:
NAMESPACE_RUN_DIR = "/dev/shm/gpuckpt"
NAMESPACE_VRAM_DIR = "/dev/shm/gpuckpt-vram"
NAMESPACE_STAGING_DIR = "/dev/shm/gpuckpt-staging/images"
_HERE = os.path.dirname(os.path.abspath(__file__))
STARTER, SLEEPER = f"{_HERE}/starter.py", f"{_HERE}/sleeper.py"
"""Programs: the package does not import them."""
_SHIELD, SHIELD = f"{_HERE}/libgpuckpt-shield.so", "/dev/shm/.gpuckpt-shield.so"
_PARKING, PARKING = f"{os.path.dirname(_HERE)}/kernel/libgpuckpt-parking.so", "/dev/shm/.gpuckpt-parking.so"
_NCCL, NCCL = f"{os.path.dirname(_HERE)}/kernel/libgpuckpt-nccl.so", "/dev/shm/.gpuckpt-nccl.so"
"""The libraries of `shield.c`, `kernel/driver/` and `kernel/nccl/`, and where they are loaded from: what is in that
folder is part of a snapshot, so that it is the same where that comes back."""
_SHIELDED_FROM = "GPUCKPT_SHIELDED_FROM"
_FILES = 256  # places in the table of a spawned process's files
_SIGCHLD, _SIGNALS, _SIGSET_BYTES, _SIG_SETMASK = 17, 64, 128, 2  # as the C library has them

_libc = ctypes.CDLL(None, use_errno=True)


class Program:
    """A program that is to be started, and how: `spawn`. As JSON it is `vars` of this.

    No dataclass: what that takes to import, a new kernel would wait for.

    Parameters
    ----------
    argv, env, cwd, umask : as the program has them.
    stdout : the path of what its output is appended to.
    after_pid : its pid is the next free one after this; 0 for any.
    subreaper : whether what processes below it leave behind become children of it.
    io_uring : whether it may use io_uring.
    shielded : the signals at which it does not end when they come from outside of its namespace.
    parking : whether it and its children have the library in the CUDA driver's place.
    nccl : whether they have the one in front of NCCL.
    """

    def __init__(
        self,
        argv: list[str],
        env: dict[str, str],
        stdout: str,
        cwd: str = "/",
        umask: int = 0o077,
        after_pid: int = 0,
        subreaper: bool = False,
        io_uring: bool = True,
        shielded: list[int] | None = None,
        parking: bool = False,
        nccl: bool = False,
    ) -> None:
        self.argv, self.env, self.stdout, self.cwd, self.umask = argv, env, stdout, cwd, umask
        self.after_pid, self.subreaper, self.io_uring, self.shielded = after_pid, subreaper, io_uring, shielded or []
        self.parking, self.nccl = parking, nccl

    def at_any_pid(self) -> Program:
        """Return the same program for where the next pid is chosen otherwise."""
        return Program(**{**vars(self), "after_pid": 0})


def program_in(raw: dict[str, object]) -> Program:
    """Return the program that a message names.

    Raises
    ------
    ValueError : none.
    """
    defaults = {"cwd": "/", "umask": 0o077, "after_pid": 0, "subreaper": False, "io_uring": True, "shielded": []}
    match {**defaults, "parking": False, "nccl": False, **raw}:
        case {
            "argv": list(argv),
            "env": dict(env),
            "stdout": str(stdout),
            "cwd": str(cwd),
            "umask": int(umask),
            "after_pid": int(after_pid),
            "subreaper": bool(subreaper),
            "io_uring": bool(io_uring),
            "shielded": list(shielded),
            "parking": bool(parking),
            "nccl": bool(nccl),
        } if all(isinstance(one, str) for one in (*argv, *env, *env.values())) and all(
            isinstance(one, int) for one in shielded
        ):
            return Program(argv, env, stdout, cwd, umask, after_pid, subreaper, io_uring, shielded, parking, nccl)
    raise ValueError("what is to be started is not described as it should be")


def socket_name(run_dir: str) -> str:
    """Return the name, in the kernel's folder, of the socket of the sleeper over this run folder."""
    return os.path.basename(run_dir) + ".sock"


def check(result: int, doing: str) -> None:
    """Raise OSError unless a C function returned 0."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{doing}: {os.strerror(number)}")


def _mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    check(
        _libc.mount(source.encode(), target.encode(), kind.encode(), flags, data.encode()),
        f"mount {source} on {target}",
    )


def furnish(run_dir: str, uid: int = 0, gid: int = 0) -> None:
    """Give the namespace its own /proc, /dev/shm and run folder; what is made is this user's."""
    owner = f"uid={uid},gid={gid}"
    mount_own(owner)
    os.mkdir(NAMESPACE_RUN_DIR, 0o700)
    _mount(run_dir, NAMESPACE_RUN_DIR, "none", MS_BIND)
    # In huge pages, files are written and read faster. Those of VRAM are whole numbers of them; among criu's images are
    # many small ones, of which each would take one.
    _mount_memory(NAMESPACE_VRAM_DIR, owner, "always")
    _mount_memory(os.path.dirname(NAMESPACE_STAGING_DIR), owner, "within_size")


def mount_own(owner: str = "uid=0,gid=0") -> None:
    """Give the namespace its own /proc and /dev/shm."""
    # Slave: what the machine mounts or unmounts later is seen, what happens here stays here.
    _mount("none", "/", "none", MS_REC | MS_SLAVE)
    _mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    _mount("gpuckpt", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, f"mode=1777,{owner}")


def _mount_memory(folder: str, owner: str, huge: str) -> None:
    os.mkdir(folder, 0o700)
    # Whoever writes here has seen to it that there is memory: the usual half of it may be too little.
    room = f"mode=0700,{owner},size=100%"
    name = os.path.basename(folder)
    try:
        _mount(name, folder, "tmpfs", MS_NOSUID | MS_NODEV, f"{room},huge={huge}")
    except OSError:  # a kernel without transparent huge pages
        _mount(name, folder, "tmpfs", MS_NOSUID | MS_NODEV, room)


def mind_children() -> None:
    """Let this process wait for its children, also where whoever started it ignores the ends of its own (SIGCHLD)."""
    _libc.signal(_SIGCHLD, None)  # SIG_DFL


def become_subreaper() -> None:
    """Have what processes below this one leave behind become children of this one; over an exec, too."""
    check(_libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl")


def make_namespaces(run_dir: str) -> str:
    """Become process 1 of fresh namespaces over this run folder, and return its pid on the machine.

    Whoever called this has ended: what returns is a child of it.
    """
    check(_libc.unshare(CLONE_NEWPID | CLONE_NEWNS), "unshare")
    if os.fork():
        # The keeper is a subreaper: process 1 becomes its child, or the machine's when the keeper is gone.
        os._exit(0)
    pid = os.readlink("/proc/self")  # still the machine's /proc, which knows process 1 by the machine's pid
    furnish(run_dir)
    return pid


def set_last_pid(pid: int) -> None:
    """Have the next process of this namespace take the next free pid after this one.

    Raises
    ------
    OSError : this process may not.
    """
    with open("/proc/sys/kernel/ns_last_pid", "w") as f:
        f.write(str(pid))


def spawn(program: Program) -> int:
    """Start a program, and return its pid.

    Raises
    ------
    OSError : it could not be started.
    """
    if program.after_pid:
        set_last_pid(program.after_pid)
    fault_read, fault_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            _become(program)
        except BaseException as e:  # noqa: BLE001 - the child has no one else to tell
            os.write(fault_write, str(e).encode())
        finally:
            os._exit(127)
    os.close(fault_write)
    with open(fault_read, "rb") as f:
        fault = f.read()
    if fault:
        os.waitpid(pid, 0)
        raise OSError(fault.decode())
    return pid


def _become(program: Program) -> None:
    """Turn this forked child into the program asked for."""
    os.setsid()
    # What is ignored here would be in the kernel and in all that it starts: none of them could be terminated. (By the C
    # library, since Python's `signal` takes a third as long to import as Python itself takes to begin.)
    for number in range(1, _SIGNALS + 1):
        _libc.signal(number, None)  # SIG_DFL
    _libc.sigprocmask(_SIG_SETMASK, bytes(_SIGSET_BYTES), None)
    if program.subreaper:
        # Processes that a cell sends into the background stay in the kernel's tree, and are saved with it.
        become_subreaper()
    os.umask(program.umask)
    # Standard files are opened here, inside the namespace: criu cannot dump one that was opened outside it.
    null = os.open("/dev/null", os.O_RDONLY)
    out = os.open(program.stdout, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(null, 0)
    os.dup2(out, 1)
    os.dup2(out, 2)
    _make_room_for_files(null)
    os.chdir(program.cwd)
    if not program.io_uring:
        seccomp.forbid_io_uring()
    # All other files are closed by the exec, as Python opens them; the parent hears by one of them if it fails.
    os.execvpe(program.argv[0], program.argv, {**program.env, **_preloaded(program)})


def _preloaded(program: Program) -> dict[str, str]:
    """Return the variables by which a program has the libraries that it is to have, of those that were built."""
    wanted, variables = [], {}
    if program.shielded and provide(_SHIELD, SHIELD):
        wanted.append(SHIELD)
        variables[_SHIELDED_FROM] = ",".join(map(str, program.shielded))
    if program.parking and provide(_PARKING, PARKING):
        wanted.append(PARKING)
    if program.nccl and provide(_NCCL, NCCL):
        wanted.append(NCCL)
    if wanted:
        variables["LD_PRELOAD"] = with_preloaded(program.env.get("LD_PRELOAD", ""), *wanted)
    return variables


def provide(built: str, own: str) -> bool:
    """Have a library in this namespace where it is loaded from; tell whether it was built at all."""
    if not os.path.exists(built):
        return False
    if not os.path.exists(own):
        with open(built, "rb") as source, open(own, "wb") as library:
            library.write(source.read())
        os.chmod(own, 0o500)
    return True


def with_preloaded(before: str, *libraries: str) -> str:
    """Return LD_PRELOAD with these libraries in front of what it has."""
    others = [one for one in before.replace(" ", ":").split(":") if one and one not in libraries]
    return ":".join([*libraries, *others])


def _make_room_for_files(descriptor: int) -> None:
    """Have the system's table of this process's files, which an exec leaves as it is, grow now.

    A kernel of ours has some more than 64 files at its start. A process with threads stands still for 10 to 30 ms when
    its table grows beyond its first 64 places (Linux, `expand_fdtable`: it waits until no processor reads the old one).
    """
    try:
        os.dup2(descriptor, _FILES - 1, inheritable=False)
        os.close(_FILES - 1)
    except OSError:  # it may not have that many (getrlimit(2), RLIMIT_NOFILE)
        pass
