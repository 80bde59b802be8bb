"""Numbers on a GPU, by the driver alone: a process has them within a second, where torch takes ten to be imported."""

from __future__ import annotations

import array
import ctypes

COUNT = 2**20
SUM = COUNT * (COUNT - 1) // 2


class Numbers:
    """0, 1, 2, … on the first GPU, in its primary context, 8 bytes each."""

    def __init__(self) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self._context, self._address = ctypes.c_void_p(), ctypes.c_uint64()
        self._size = ctypes.c_size_t(8 * COUNT)
        numbers = array.array("q", range(COUNT))
        self._call("cuInit", 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), 0)
        self._call("cuCtxSetCurrent", self._context)
        self._call("cuMemAlloc_v2", ctypes.byref(self._address), self._size)
        self._call("cuMemcpyHtoD_v2", self._address, ctypes.c_void_p(numbers.buffer_info()[0]), self._size)

    def _call(self, name: str, *arguments: object) -> None:
        result = getattr(self.cuda, name)(*arguments)
        assert result == 0, f"{name} gave CUresult {result}"

    def data_ptr(self) -> int:
        """Return where they are."""
        return self._address.value

    def sum(self) -> int:
        """Return their sum, of what is on the GPU now."""
        there = array.array("q", bytes(8 * COUNT))
        self._call("cuMemcpyDtoH_v2", ctypes.c_void_p(there.buffer_info()[0]), self._address, self._size)
        return sum(there)
