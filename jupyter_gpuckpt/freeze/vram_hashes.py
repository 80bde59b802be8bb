"""The hashes of chunks of GPU memory, made on the GPU: what the store has already need not leave it.

``python -m jupyter_gpuckpt.freeze.vram_hashes`` makes vram_hashes.ptx of vram_hashes.cu, where NVRTC is (the package
nvidia-cuda-nvrtc-cu12, of CUDA 12.8, so that every driver that can checkpoint reads it).
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

from blake3 import blake3
from cuda.bindings import driver

from .parking import HASH

__all__ = ["CHUNK", "ZEROS", "Hasher"]

CHUNK = 2 << 20
"""Bytes of which a hash is made, as the store cuts files (`store.chunks`): parts of GPU memory are multiples of it."""
ZEROS = blake3(bytes(CHUNK)).digest()
"""The hash of a chunk of zeros."""
_THREADS = 256  # as in vram_hashes.cu
_PTX = Path(__file__).with_name("vram_hashes.ptx")
_OLDEST = b"--gpu-architecture=compute_75"


class Hasher:
    """Makes hashes on the GPU whose context this thread uses.

    Raises
    ------
    RuntimeError : the driver cannot, or what it makes is not the hash.
    """

    def __init__(self) -> None:
        program = ctypes.create_string_buffer(_PTX.read_bytes())
        self._function = _run(
            "cuModuleGetFunction", _run("cuModuleLoadData", ctypes.addressof(program)), b"hash_chunks"
        )
        self._try()

    def _try(self) -> None:
        known = bytes(CHUNK - 4096) + os.urandom(4096)
        address = int(_run("cuMemAlloc", 2 * CHUNK))
        try:
            _run("cuMemsetD8", address, 0, 2 * CHUNK)
            _run("cuMemcpyHtoD", address, known, CHUNK)
            if self.hashes(address, 2) != blake3(known).digest() + ZEROS:
                raise RuntimeError("hashes that are made on this GPU are wrong")
        finally:
            _run("cuMemFree", address)

    def hashes(self, address: int, count: int) -> bytes:
        """Return the hashes of so many chunks that follow one another from an address on, one after the other."""
        made = ctypes.create_string_buffer(count * HASH)
        to = int(_run("cuMemAlloc", len(made)))
        try:
            arguments = ((address, to), (ctypes.c_void_p, ctypes.c_void_p))
            _run("cuLaunchKernel", self._function, count, 1, 1, _THREADS, 1, 1, 0, 0, arguments, 0)
            _run("cuMemcpyDtoH", ctypes.addressof(made), to, len(made))
        finally:
            _run("cuMemFree", to)
        return made.raw


def _run(call: str, *arguments: Any) -> Any:
    result, *values = getattr(driver, call)(*arguments)
    if int(result):
        raise RuntimeError(f"{call} gave {result.name}")
    return values[0] if values else None


def _make() -> None:
    from cuda.bindings import nvrtc

    def run(call: str, *arguments: Any) -> Any:
        result, *values = getattr(nvrtc, call)(*arguments)
        if int(result):
            raise SystemExit(f"{call} gave {result.name}")
        return values[0] if values else None

    source = _PTX.with_suffix(".cu")
    program = run("nvrtcCreateProgram", source.read_bytes(), source.name.encode(), 0, [], [])
    run("nvrtcCompileProgram", program, 1, [_OLDEST])
    made = bytearray(run("nvrtcGetPTXSize", program))
    buffer = bytes(made)
    run("nvrtcGetPTX", program, buffer)
    digest = blake3(source.read_bytes()).hexdigest()
    _PTX.write_bytes(f"// of {source.name}, whose BLAKE3 is {digest}\n".encode() + buffer.rstrip(b"\0"))


if __name__ == "__main__":
    _make()
