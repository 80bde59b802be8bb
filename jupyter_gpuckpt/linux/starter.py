"""What a keeper's process does before all else: it starts the kernel, in a sleeper, and then becomes the keeper.

Run as a program by whoever starts a kernel (`python -I -S -B starter.py FOLDER RUN_DIR LOCK_FD READY_FD`). A user
waits for the kernel, and nobody for its keeper, whose imports take longer than all that is done here: they come beside
the beginning of the kernel's own Python. So this is a program of its own, which imports next to nothing before the
kernel is spawned: Python's own beginning is most of what it takes.

From standard input it reads a dictionary, marshalled by the same Python: ``kernel``, what is to be spawned
(`spawning.Program`), and ``keeper``, the keeper's environment. The sleeper has no environment, and nothing that is open
here. What fails is told by the last line of standard error; nothing is left then.
"""

from __future__ import annotations

import marshal
import os
import sys

sys.path.append(os.path.dirname(os.path.abspath(__file__)))  # -I leaves it out; nothing else is imported from there
import spawning  # type: ignore[import-not-found]


def main(folder: str, run_dir: str, lock_fd: str, ready_fd: str) -> None:
    """Start the kernel and become its keeper."""
    wanted = marshal.load(sys.stdin.buffer)  # noqa: S302 - of whoever runs this program
    kernel = spawning.program_in(wanted["kernel"])
    report, tell = os.pipe()
    spawning.become_subreaper()
    spawning.mind_children()
    child = os.fork()
    if child == 0:
        for fd in (report, int(lock_fd), int(ready_fd)):
            os.close(fd)
        _start_and_sleep(folder, run_dir, kernel, tell)
    os.close(tell)
    with open(report) as told:
        pids = told.read().split()
    os.waitpid(child, 0)
    if not pids:
        sys.exit(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    started = (os.path.basename(run_dir), *pids)
    keeper = [sys.executable, "-m", "jupyter_gpuckpt.keeper", folder, lock_fd, ready_fd, "hold", *started]
    os.execve(sys.executable, keeper, wanted["keeper"])


def _start_and_sleep(folder: str, run_dir: str, kernel: spawning.Program, tell: int) -> None:
    """Become the sleeper, start the kernel, and tell the pids of both."""
    pid = spawning.make_namespaces(run_dir)
    spawned = spawning.spawn(kernel)
    import sleeper  # type: ignore[import-not-found]  # only now: the kernel does not wait for it

    secret = sleeper.demanded()
    listener = sleeper.listen(folder, run_dir)
    # Where whoever is to hear it was killed, this fails, and the kernel ends with this process. Once it is told, the
    # sleeper can be found.
    os.write(tell, f"{pid} {spawned}".encode())
    os.close(tell)
    sleeper.turn_away()
    sleeper.Sleeper(listener, secret, [spawned]).run()


if __name__ == "__main__":
    os.umask(0o077)
    main(*sys.argv[1:])
