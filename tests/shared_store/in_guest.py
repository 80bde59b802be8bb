"""What runs in a machine of `machines` as its first process: it sets the machine up, and then does as it is told."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
SHARED = "/mnt/shared"
"""Where the folder is that all machines have: by NFS, or as a disk of its own."""
TOOLS, NAME, ADDRESSES = json.loads(sys.argv[1])


def run(*words: str, **how: Any) -> str:
    """Run a program, which must do what it is to do, and return what it prints."""
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, **how)
    if done.returncode:
        raise OSError(f"{words}: {done.stdout}{done.stderr}")
    return done.stdout


def tool(*words: str, **how: Any) -> str:
    """Run a program that is not installed."""
    libraries = f"{TOOLS}/usr/lib/x86_64-linux-gnu:{TOOLS}/lib/x86_64-linux-gnu"
    return run(*words, env={**os.environ, "LD_LIBRARY_PATH": libraries}, **how)


def modprobe(name: str) -> None:
    """Load a module of the kernel."""
    tool("modprobe", "-d", TOOLS, name, executable=f"{TOOLS}/bin/kmod")


def set_up() -> None:
    """Mount what a machine has of its own, and bring up its network."""
    os.environ.update(PATH="/usr/sbin:/usr/bin:/sbin:/bin", HOME="/run", TMPDIR="/run", LANG="C.UTF-8")
    run("mount", "-t", "proc", "proc", "/proc")
    for folder in ("/run", "/var/lib", "/mnt"):
        run("mount", "-t", "tmpfs", "own", folder)
    Path("/proc/sys/kernel/hostname").write_text(NAME)
    Path(SHARED).mkdir()
    run("ip", "link", "set", "lo", "up")
    for device, address in ADDRESSES.items():
        run("ip", "address", "add", f"{address}/24", "dev", device)
        run("ip", "link", "set", device, "up")


def serve(lease: int, networks: list[str]) -> None:
    """Have the disk as the shared folder, and export it; the server gives up on a client after so many seconds."""
    modprobe("nfsd")
    run("mount", "/dev/ubda", SHARED)
    run("mount", "-t", "nfsd", "nfsd", "/proc/fs/nfsd")
    for name in ("nfsv4leasetime", "nfsv4gracetime"):
        Path("/proc/fs/nfsd", name).write_text(str(lease))
    for folder in ("/var/lib/nfs/v4recovery", "/run/nfs", "/run/rpcbind"):
        Path(folder).mkdir(parents=True)
    for name in ("etab", "rmtab"):
        Path("/var/lib/nfs", name).touch()
    run("cp", "-a", "/etc", "/run/etc")
    run("mount", "--bind", "/run/etc", "/etc")
    shutil.copy(f"{TOOLS}/etc/netconfig", "/etc/netconfig")
    with Path("/etc/passwd").open("a") as users:
        print("_rpc:x:61899:65534::/run/rpcbind:/bin/false", file=users)
    exported = " ".join(f"{one}(rw,sync,no_root_squash,no_subtree_check,insecure,fsid=0)" for one in networks)
    Path("/etc/exports").write_text(f"{SHARED} {exported}\n")
    tool(f"{TOOLS}/sbin/rpcbind", "-w")
    tool(f"{TOOLS}/usr/sbin/exportfs", "-a")
    tool(f"{TOOLS}/usr/sbin/rpc.mountd", "--no-nfs-version", "2", "--port", "20048")
    tool(f"{TOOLS}/usr/sbin/rpc.nfsd", "--no-udp", "4")


def mount(server: str, client: str, options: str) -> None:
    """Have the server's folder as the shared one."""
    version = 3 if "vers=3" in options else 4
    modprobe(f"nfsv{version}")
    by = f"{options},addr={server}"
    by += f",mountaddr={server},mountport=20048,port=2049" if version == 3 else f",clientaddr={client}"
    folder = SHARED if version == 3 else "/"
    run("mount", "-i", "-t", "nfs" if version == 3 else "nfs4", "-o", by, f"{server}:{folder}", SHARED)


def cut_off(server: str) -> None:
    """Send the server nothing any more."""
    run("ip", "route", "add", "blackhole", f"{server}/32")


def be_back(server: str) -> None:
    """Send to the server again."""
    run("ip", "route", "del", "blackhole", f"{server}/32")


def main() -> None:
    """Execute the statements of each line of JSON; answer with the value of the last one, if it is an expression."""
    told, asked = os.fdopen(os.dup(1), "w"), os.fdopen(os.dup(0))
    log = os.open("/dev/console", os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    set_up()
    sys.path[:0] = [str(TESTS), str(TESTS / "store")]
    names: dict[str, Any] = {**globals()}
    print(json.dumps({"value": None}), file=told, flush=True)
    for line in asked:
        try:
            *statements, last = json.loads(line)
            for statement in statements:
                exec(statement, names)
            try:
                value = compile(last, "<told>", "eval")
            except SyntaxError:
                exec(last, names)
                value = compile("None", "<told>", "eval")
            answer = {"value": eval(value, names)}
        except BaseException:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer, default=str), file=told, flush=True)


main()
