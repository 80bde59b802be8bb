"""While memory is parked for a sleep, Python runs on; and it has its memory back whoever waits for what meanwhile.

The driver here is made up: its memory is files. That the real one does as much is seen in `tests/gpu`.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jupyter_gpuckpt import installed

pytestmark = [
    pytest.mark.skipif(platform.machine() != "x86_64", reason="parking is for x86-64"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here"),
]

_DRIVER = """
#define _GNU_SOURCE
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
static int creates_left = 1 << 30;
void limit(int n) { creates_left = n; }
int cuMemCreate(uint64_t *h, size_t size, void *p, uint64_t f) {
  if (creates_left-- <= 0) return 2;
  int fd = memfd_create("block", MFD_CLOEXEC); *h = fd; return ftruncate(fd, size); }
int cuMemRelease(uint64_t h) { return close(h); }
int cuMemMap(uint64_t a, size_t size, size_t o, uint64_t h, uint64_t f) {
  return mmap((void *)a, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, h, 0) == MAP_FAILED; }
int cuMemUnmap(uint64_t a, size_t size) {
  return mmap((void *)a, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED; }
int cuMemAddressReserve(uint64_t *a, size_t size, size_t al, uint64_t w, uint64_t f) {
  *a = (uint64_t)mmap(0, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0); return 0; }
int cuMemAddressFree(uint64_t a, size_t size) { return munmap((void *)a, size); }
int cuMemSetAccess(void) { return 0; }
int cuMemExportToShareableHandle(int *fd, uint64_t h, int t, uint64_t f) { *fd = dup(h); return 0; }
int cuMemGetAllocationGranularity(size_t *g, void *p, int o) { *g = 2 << 20; return 0; }
int cuCtxGetCurrent(void **c) { *c = (void *)1; return 0; }
int cuCtxGetDevice(int *d) { *d = 0; return 0; }
int cuCtxSynchronize(void) { return 0; }
int cuCtxPushCurrent_v2(void *c) { return 0; }
int cuCtxPopCurrent_v2(void **c) { return 0; }
int cuDevicePrimaryCtxRetain(void **c, int d) { *c = (void *)1; return 0; }
int cuDeviceGetCount(int *n) { *n = 1; return 0; }
int cuDeviceGetAttribute(int *v, int a, int d) { *v = 0; return 0; }
int cuMemcpyHtoD_v2(uint64_t to, void *from, size_t size) { memcpy((void *)to, from, size); return 0; }
int cudaMalloc(void **a, size_t size) { return 1; }
int cudaFree(void *a) { return 0; }
"""

_WAITING = {
    "cuPointerGetAttribute": 3,
    "cudaDeviceSynchronize": 0,
    "cudaEventQuery": 1,
    "cudaEventSynchronize": 1,
    "cudaMemGetInfo": 2,
    "cudaMemcpy": 4,
    "cudaMemcpy2D": 7,
    "cudaMemcpy2DAsync": 8,
    "cudaMemcpyAsync": 5,
    "cudaMemcpyPeerAsync": 6,
    "cudaMemset": 3,
    "cudaMemsetAsync": 4,
    "cudaPointerGetAttributes": 2,
    "cudaStreamQuery": 1,
    "cudaStreamSynchronize": 1,
}
"""The functions that wait at the gate, and how many arguments each has."""


def _runtime() -> str:
    """Return functions of these names that tell by their result which arguments came through."""
    lines = []
    for name, count in _WAITING.items():
        parameters = ", ".join(f"long a{n}" for n in range(count)) or "void"
        lines.append(
            f"int {name}({parameters}) {{ return 1000 + {'+'.join(f'a{n} * {n + 1}' for n in range(count)) or 0}; }}"
        )
    return "\n".join(lines)


_PROCESS = """
import ctypes, sys, threading
library, driver, runtime, to, back, gate = sys.argv[1:]
parking = ctypes.PyDLL(library, mode=ctypes.RTLD_GLOBAL)
cuda, _ = (ctypes.CDLL(one, mode=ctypes.RTLD_GLOBAL) for one in (driver, runtime))
SIZE = 32 << 20
blocks = []
for n in range(2):
    address = ctypes.c_void_p()
    assert parking.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(SIZE)) == 0
    ctypes.memset(address, 7 + n, SIZE)
    blocks.append(address.value)
def park():
    parking.gpuckpt_park(to.encode(), back.encode())
    sys.stdout.write("back\\n"); sys.stdout.flush()
def call(function, *arguments):
    sys.stdout.write(f"called {function(*arguments)}\\n"); sys.stdout.flush()
for line in sys.stdin:
    word, *rest = line.split()
    if word == "park": threading.Thread(target=park, daemon=True).start()
    elif word == "echo": print("echo", flush=True)
    elif word == "limit": cuda.limit(int(rest[0]))
    elif word == "sums": print(*[set(ctypes.string_at(a, SIZE)) for a in blocks], flush=True)
    elif word == "gate": parking.gpuckpt_gate(gate.encode())
    elif word == "call":
        function = getattr(ctypes.CDLL(library), rest[0])
        arguments = [ctypes.c_long(n + 1) for n in range(int(rest[1]))]
        threading.Thread(target=lambda: call(function, *arguments), daemon=True).start()
    elif word == "free":  # as a thread does that has Python's lock in the call
        threading.Thread(target=call, args=(parking.cudaFree, ctypes.c_void_p(blocks.pop())), daemon=True).start()
"""

_ITEM = struct.Struct("<QQ")


class _Process:
    """A process with two blocks of memory, and this test in the place of its keeper and of the holder."""

    def __init__(self, folder: Path) -> None:
        source, libraries = folder / "driver.c", [folder / "libcuda.so.1", folder / "libcudart.so.12"]
        source.write_text(_DRIVER + _runtime())
        for library in libraries:
            words = ["cc", "-w", "-shared", "-fPIC", f"-Wl,-soname,{library.name}", "-o", library, source]
            subprocess.run(words, check=True)
        names = [folder / name for name in ("to", "back")]
        for name in names:
            os.mkfifo(name)
        self._to, self._back = (os.open(name, os.O_RDWR) for name in names)
        self.gate = folder / "away"
        arguments = [installed.PARKING_LIBRARY, *libraries, *names, self.gate]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROCESS, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.bytes: dict[int, bytes] = {}

    def ask(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def says(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def tell(self, line: str) -> None:
        os.write(self._to, line.encode() + b"\n")

    def hears(self) -> str:
        line = b""
        while not line.endswith(b"\n"):
            line += os.read(self._back, 1)
        return line.decode().strip()

    def socket(self, fd: int) -> socket.socket:
        pidfd = os.pidfd_open(self._process.pid)
        own = ctypes.CDLL(None).syscall(438, pidfd, fd, 0)
        os.close(pidfd)
        return socket.socket(fileno=own)

    def fall_asleep(self) -> None:
        self.ask("park")
        _, _, fd = self.hears().split()
        self.tell("park")
        with self.socket(int(fd)) as there:
            while (item := _received(there))[1]:
                self.bytes[item[0]] = _contents(item[2], item[1])
            there.send(b"h")
        assert self.hears() == "parked"
        self.tell("sleep")

    def fill(self) -> str:
        self.tell("fill")
        with self.socket(int(self.hears().split()[1])) as there:
            there.send(b"n")
            while (item := _received(there))[1]:
                with mmap.mmap(item[2], item[1]) as mapped:
                    mapped[:] = self.bytes[item[0]]
                os.close(item[2])
                there.send(b"n")
        return self.hears()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        os.close(self._to)
        os.close(self._back)


def _received(there: socket.socket) -> tuple[int, int, int]:
    data, descriptors, _, _ = socket.recv_fds(there, _ITEM.size, 1)
    if not data:
        return 0, 0, -1  # the process broke off
    offset, size = _ITEM.unpack(data)
    return offset, size, descriptors[0] if descriptors else -1


def _contents(fd: int, size: int) -> bytes:
    with mmap.mmap(fd, size) as mapped:
        os.close(fd)
        return mapped[:]


@pytest.fixture
def process(tmp_path: Path) -> Iterator[_Process]:
    process = _Process(tmp_path)
    yield process
    process.close()


def test_python_runs_on_and_the_memory_comes_back(process: _Process) -> None:
    for _ in range(2):
        process.fall_asleep()
        process.ask("echo")
        assert process.says() == "echo"
        assert process.fill() == "done"
        assert process.says() == "back"
        process.ask("sums")
        assert process.says() == "{7} {8}"


def test_a_call_that_holds_pythons_lock_meanwhile_goes_on_when_the_memory_is_back(process: _Process) -> None:
    process.fall_asleep()
    process.ask("free")
    assert process.fill() == "done"
    assert {process.says(), process.says()} == {"back", "called 0"}
    process.ask("sums")
    assert process.says() == "{7}"


def _result(name: str) -> str:
    return f"called {1000 + sum((n + 1) ** 2 for n in range(_WAITING[name]))}"


def _next_tick() -> None:
    """Wait until the clock has ticked by which the library looks at the gate: CLOCK_MONOTONIC_COARSE."""
    now = time.clock_gettime(6)
    while time.clock_gettime(6) == now:
        pass


def test_calls_that_would_fail_or_end_a_checkpointed_process_wait_until_all_is_back(process: _Process) -> None:
    for name, count in _WAITING.items():
        process.ask(f"call {name} {count}")
        assert process.says() == _result(name), "without a gate nothing waits"
    process.ask("gate")
    process.ask("call cudaEventQuery 1")
    assert process.says() == _result("cudaEventQuery"), "it is open"
    process.gate.touch()
    _next_tick()
    for name, count in _WAITING.items():
        process.ask(f"call {name} {count}")
    process.ask("echo")
    assert process.says() == "echo"
    process.gate.unlink()
    assert sorted(process.says() for _ in _WAITING) == sorted(map(_result, _WAITING))


def test_where_there_is_no_room_for_all_of_it_nothing_is_kept_and_it_comes_back_later(process: _Process) -> None:
    process.fall_asleep()
    process.ask("limit 1")
    process.ask("echo")
    assert process.says() == "echo"
    assert process.fill() == "error 2"
    process.tell("drop")
    assert process.hears() == "dropped"
    process.ask("limit 9")
    process.ask("echo")
    assert process.says() == "echo"
    assert process.fill() == "done"
    assert process.says() == "back"
    process.ask("sums")
    assert process.says() == "{7} {8}"
