"""What a keeper's process does before all else: it starts the kernel, in a sleeper, and then becomes the keeper.

Run as a program by whoever starts a kernel (`python -I -S starter.py FOLDER RUN_DIR LOCK_FD READY_FD`). A person waits
for the kernel, and nobody for its keeper: what a keeper imports takes longer than all that is done here. So this
program, like the sleeper's, has the standard library alone, and the keeper begins beside the kernel's own Python.

From standard input it reads one JSON object: ``kernel``, what the sleeper is to spawn, and ``keeper``, the environment
of the keeper. The kernel's sleeper gets none, and nothing that is open here. What fails is told by the last line of
standard error; nothing is left then.
"""

import json
import os
import sys

sys.path.append(os.path.dirname(os.path.abspath(__file__)))  # what is beside this file is all that it needs
import sleeper


def main(folder: str, run_dir: str, lock_fd: str, ready_fd: str) -> None:
    """Start the kernel and become its keeper."""
    wanted = json.load(sys.stdin)
    report, tell = os.pipe()
    sleeper.become_subreaper()
    child = os.fork()
    if child == 0:
        for fd in (report, int(lock_fd), int(ready_fd)):
            os.close(fd)
        pid, listener = sleeper.make_namespaces(folder, run_dir)
        process_1 = sleeper.Sleeper(listener)
        kernel = process_1.spawn(wanted["kernel"])
        # Where this process's parent was killed meanwhile, that fails: process 1 ends, and the kernel with it.
        os.write(tell, f"{pid} {kernel}".encode())
        os.close(tell)
        sleeper.turn_away()
        process_1.run()
    os.close(tell)
    with open(report) as told:
        pids = told.read().split()
    os.waitpid(child, 0)
    if not pids:
        sys.exit(1)
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    held = ("hold", os.path.basename(run_dir), *pids)
    keeper = [sys.executable, "-m", "jupyter_gpuckpt.keeper", folder, lock_fd, ready_fd, *held]
    os.execve(sys.executable, keeper, wanted["keeper"])


if __name__ == "__main__":
    os.umask(0o077)
    main(*sys.argv[1:])
