"""A process with our library before a made-up driver, and what a test asks of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from jupyter_gpuckpt import installed, settings

_SOURCE = Path(__file__).with_name("made_up_driver.c")
_HASHES = Path(installed.__file__).parent / "freeze/vram_hashes.cu"
_FUNCTIONS = Path(installed.__file__).parent / "kernel/driver/functions.h"

NAMES = re.findall(r"X\((\w+)\)", _FUNCTIONS.read_text())
"""All that our library exports of the driver's."""
OTHERS = [name for name in NAMES if not re.search(rf"\b{name}\(", _SOURCE.read_text())]
"""Those of them that the made-up driver answers with a sum."""

PROGRAM = r"""
import ctypes, json, os, select, sys, threading, time
library, driver = sys.argv[1:]
ours = ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
ours.gpuckpt_parkable.restype = ctypes.c_uint64
ours.gpuckpt_parkable_on.restype = ctypes.c_int64
def places():
    found, uuid = [], ctypes.create_string_buffer(16)
    while (size := ours.gpuckpt_parkable_on(len(found), uuid)) >= 0: found.append(("GPU-" + uuid.raw.hex(), size))
    return found
cu = ctypes.CDLL("libcuda.so.1")  # as every program does
blocks, handles = [], []
lock = threading.Lock()
def say(value):
    with lock: print(json.dumps(value), flush=True)
def beside(f): threading.Thread(target=lambda: say(f()), daemon=True).start()
def call(name, *arguments): return getattr(cu, name)(*map(ctypes.c_long, arguments))
def enter():
    global enter
    cu.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), 0)
    enter = lambda: None
def alloc(size):
    enter()
    address = ctypes.c_uint64()
    result = cu.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size))
    if not result: blocks.append((address.value, size))
    return result
def create(size, exported=0):
    enter()
    prop = (ctypes.c_int * 8)(1, exported, 1, 0)
    handle, address = ctypes.c_uint64(), ctypes.c_uint64()
    result = cu.cuMemCreate(ctypes.byref(handle), ctypes.c_size_t(size), prop, ctypes.c_uint64(0))
    if result: return result
    cu.cuMemAddressReserve(ctypes.byref(address), ctypes.c_size_t(size), *[ctypes.c_size_t(0)] * 3)
    access = (ctypes.c_int * 3)(1, 0, 3)
    cu.cuMemMap(address, ctypes.c_size_t(size), ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
    cu.cuMemSetAccess(address, ctypes.c_size_t(size), access, ctypes.c_size_t(1))
    handles.append(handle.value)
    blocks.append((address.value, size))
    return 0
def free():  # of each GPU
    found = []
    for gpu in range(int(os.environ["MADE_UP_GPUS"])):
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        cu.cuCtxPushCurrent_v2(ctypes.c_void_p(gpu + 1))
        cu.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
        cu.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
        found.append(free.value)
    return found
def on(gpu): cu.cuCtxSetCurrent(ctypes.c_void_p(gpu + 1))
def access(n):  # of which GPUs, by their bits
    its = ctypes.CDLL(driver).made_up_access
    return [its(ctypes.c_uint64(blocks[n][0] + at)) for at in (0, blocks[n][1] - 1)]
def mark(n, value):
    address, size = blocks[n]
    for at in (0, size // 2, size - 16): ctypes.memset(address + at, value, 16)
def marks(n):
    address, size = blocks[n]
    return [ctypes.string_at(address + at, 16)[7] for at in (0, size // 2, size - 16)]
def found(name, version=12000):
    address = ctypes.c_void_p()
    result = cu.cuGetProcAddress_v2(name.encode(), ctypes.byref(address), version, ctypes.c_uint64(0), None)
    return result or address.value
def is_ours(address):
    maps = [line.split() for line in open("/proc/self/maps")]
    ranges = [[int(x, 16) for x in m[0].split("-")] for m in maps if m[-1] == library]
    return any(a <= address < b for a, b in ranges)
left = b""
while True:
    while b"\n" not in left:
        select.select([0], [], [])  # asleep where a kernel is, too
        left += os.read(0, 65536) or sys.exit()
    line, _, left = left.partition(b"\n")
    try: say(eval(line))
    except Exception as e: say(repr(e))
"""


class Process:
    """One such process; `free` is what each of the made-up GPUs has, in bytes.

    In a folder that has one already, it is beside that one, on the same GPUs.
    """

    def __init__(self, folder: Path, driver: Path, free: int = 1 << 40, gpus: int = 1) -> None:
        self.driver = folder / "driver" / "libcuda.so.1"
        is_first = not self.driver.exists()
        if is_first:
            self.driver.parent.mkdir()
            self.driver.hardlink_to(driver)
        self.run_dir, self.gate = folder, folder / settings.GATE
        self.gpu = folder / "gpu"
        self.no_imports = folder / "gpu.fails"
        """From when this exists, nobody can open another's memory."""
        self.is_full = folder / "gpu.full"
        """Where this exists, there is no room for the next piece of memory that is asked for; then it is gone."""
        self.is_used = folder / "gpu.used"
        """From when this exists, new memory has what was another's."""
        self.in_a_call = folder / "gpu.in-a-call"
        """While this exists, cuMemsetD16 does not return; `gpu.in-a-call.reached` exists while it is called."""
        self.releases = folder / "gpu.releases"
        """The same for cuMemRelease."""
        if is_first:
            self.gpu.write_bytes(free.to_bytes(8, "little") + bytes(8 + 32 * 8192))
        self._gpus = gpus
        words = [installed.PARKING_LIBRARY, self.driver]
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *map(str, words)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **self.environment},
        )

    @property
    def environment(self) -> dict[str, str]:
        """What others need to use the same GPU."""
        return {
            "MADE_UP_GPU": str(self.gpu),
            "MADE_UP_GPUS": str(self._gpus),
            "LD_LIBRARY_PATH": str(self.driver.parent),
            settings.ENV_RUN_DIR: str(self.run_dir),
        }

    @property
    def pid(self) -> int:
        return self._process.pid

    def begin(self, source: str) -> None:
        """Have it evaluate something."""
        assert self._process.stdin is not None
        self._process.stdin.write(source + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        """Return what it says next."""
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def ask(self, source: str) -> Any:
        """Have it evaluate something, and return its value."""
        self.begin(source)
        return self.answer()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


def build(library: Path) -> None:
    """Compile the made-up driver."""
    rest = library.with_name("rest.h")
    rest.write_text("\n".join(f"SUM({name}, {number})" for number, name in enumerate(OTHERS)))
    # Most of what it does is to hash: with its loops unrolled that takes two thirds of the processor's time.
    hashes = library.with_name("hashes.o")
    subprocess.run(["cc", "-O3", "-funroll-loops", "-fPIC", "-c", "-o", hashes, "-x", "c", _HASHES], check=True)
    flags = ["-w", "-O1", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", f'-DREST="{rest}"']
    subprocess.run(["cc", *flags, "-o", library, _SOURCE, hashes, "-ldl"], check=True)
    nvml = ["-w", "-shared", "-fPIC", "-o", str(library.with_name("libnvidia-ml.so.1"))]
    subprocess.run(["cc", *nvml, str(_SOURCE.with_name("made_up_nvml.c"))], check=True)
