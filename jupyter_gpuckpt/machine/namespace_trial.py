"""Try what a kernel's namespaces need, in short-lived ones of its own.

A program (``python -I -S namespace_trial.py [save|restore FOLDER CRIU…]``) with the standard library and
`linux/spawning.py` alone, so that it starts in milliseconds. It makes a fresh PID and mount namespace as the sleeper
does, and prints one line of JSON: ``{"failed": step, "why": text}``, with an empty step when all went well. Nothing of
it is left when it ends.

Its environment is criu's. With ``save`` it also starts a small process there and has criu dump it;
with ``restore`` it has criu bring that process back, in another namespace, and lets it prove that
its memory came along.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time

sys.path.append(f"{os.path.dirname(os.path.abspath(__file__))}/../linux")  # -I leaves it out
import spawning  # type: ignore[import-not-found]

PR_SET_PDEATHSIG = 1

TRAVELLER = 10_000
"""The pid of the process that is saved. High, because criu itself takes low ones."""

CRIU_TIMEOUT = 60.0
ANSWER_TIMEOUT = 20.0
CRIU_OPTIONS = ("--manage-cgroups=ignore", "-v2")

_libc = ctypes.CDLL(None, use_errno=True)


class StepFailed(Exception):
    """A step did not work: its name and the cause."""


def check(result: int, step: str) -> None:
    """Raise `StepFailed` unless a C function returned 0."""
    if result != 0:
        raise StepFailed(step, os.strerror(ctypes.get_errno()))


def start_at(pid: int) -> int:
    """Fork a child that has the pid `pid`; return 0 in it, and the pid here."""
    try:
        with open("/proc/sys/kernel/ns_last_pid", "w") as file:
            file.write(str(pid - 1))
    except OSError as error:
        raise StepFailed("choose a pid", f"ns_last_pid: {error.strerror}") from None
    child = os.fork()
    if child not in (0, pid):
        raise StepFailed("choose a pid", f"pid {pid} was asked for, and {child} came")
    return child


def try_pids() -> None:
    """Choose a pid, as a restore has to."""
    child = start_at(TRAVELLER)
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)


def travel(folder: str) -> None:
    """Be the process that is saved: tell a secret, wait, and tell it again from memory."""
    os.setsid()
    null = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.closerange(3, 256)
    # Kernels listen, and some CRIUs cannot save a socket on some systems.
    listener = socket.create_server(("127.0.0.1", 0))
    secret = os.urandom(16)
    go = os.open(f"{folder}/go", os.O_RDWR)
    write(f"{folder}/before", secret)
    os.read(go, 1)
    write(f"{folder}/after", secret)
    listener.close()


def write(path: str, content: bytes) -> None:
    """Write a file that appears whole."""
    descriptor = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.write(descriptor, content)
    os.close(descriptor)
    os.rename(f"{path}.new", path)


def read(path: str, step: str) -> bytes:
    """Return what is in a file that is about to appear."""
    end = time.monotonic() + ANSWER_TIMEOUT
    while time.monotonic() < end:
        try:
            with open(path, "rb") as file:
                return file.read()
        except FileNotFoundError:
            time.sleep(0.001)
    raise StepFailed(step, f"the process did not answer within {ANSWER_TIMEOUT:.0f} s")


def run_criu(step: str, folder: str, criu: list[str], *arguments: str) -> None:
    """Run criu on the images in `folder`; its log is ``STEP.log`` beside them."""
    argv = [*criu, *arguments, "-D", folder, "-o", f"{step}.log", *CRIU_OPTIONS]
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=CRIU_TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise StepFailed(step, f"criu did not end within {CRIU_TIMEOUT:.0f} s") from None
    except OSError as error:
        raise StepFailed(step, f"criu does not start: {error.strerror}") from None
    if done.returncode != 0:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise StepFailed(step, said[0] if said else f"criu's exit status is {done.returncode}")


def save(folder: str, criu: list[str]) -> None:
    """Start the traveller and have criu dump it, which ends it."""
    os.mkfifo(f"{folder}/go", 0o600)
    if start_at(TRAVELLER) == 0:
        # Started as a new program, so that the program and its libraries are opened in this namespace:
        # criu cannot dump a file that was opened in another one.
        try:
            os.execv(sys.executable, [sys.executable, "-I", "-S", __file__, "travel", folder])
        finally:
            os._exit(127)
    read(f"{folder}/before", "save")
    run_criu("save", folder, criu, "dump", "-t", str(TRAVELLER))


def restore(folder: str, criu: list[str]) -> None:
    """Have criu bring the traveller back, and hear whether its memory came along."""
    run_criu("restore", folder, criu, "restore", "-d")
    go = os.open(f"{folder}/go", os.O_RDWR)
    os.write(go, b"!")
    after = read(f"{folder}/after", "restore")
    if after != read(f"{folder}/before", "restore"):
        raise StepFailed("restore", "the process came back with different memory")


def be_process_one(arguments: list[str]) -> None:
    """Furnish the namespace and do in it what was asked."""
    # The one who made the namespace may be killed; then it ends too.
    check(_libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
    try:
        spawning.mount_own()
    except OSError as error:
        raise StepFailed("make mounts", str(error.strerror)) from None
    if not arguments:
        try_pids()
        return
    what, folder, *criu = arguments
    {"save": save, "restore": restore}[what](folder, criu)


def tell(step: str, why: str) -> None:
    """Print the outcome."""
    os.write(1, json.dumps({"failed": step, "why": why}).encode() + b"\n")


def main(arguments: list[str]) -> None:
    """Make the namespaces, do in them what was asked, and tell how it went."""
    if arguments[:1] == ["travel"]:
        travel(arguments[1])
        return
    try:
        check(_libc.unshare(spawning.CLONE_NEWPID | spawning.CLONE_NEWNS), "make namespaces")
    except StepFailed as failure:
        tell(*failure.args)
        return
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    try:
        be_process_one(arguments)
        tell("", "")
    except StepFailed as failure:
        tell(*failure.args)
    except OSError as error:
        tell(arguments[0] if arguments else "make namespaces", str(error))
    finally:
        # Nothing of the caller's is run at the end of a forked copy; the death of process 1
        # takes whatever is left in the namespace with it.
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
