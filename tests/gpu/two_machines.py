"""A GPU kernel saved on one machine and restored on another, by hand, in two steps.

On the first: ``PYTHONPATH=tests:. python tests/gpu/two_machines.py save FOLDER``, which fills FOLDER with files of at
most 15 MB. On the second, which has the same driver and GPU model and need not have what the kernel was started from:
the same with ``restore FOLDER``. Both end with status 0 only where all is as it should be.

The kernel runs from a small virtual environment in `HOME` and uses the GPU by the driver's own library alone, so that
its snapshot is small.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from jupyter_client import KernelManager
from notebooks import Notebook, open_channels
from small_environment import SPEC, small_environment

HOME = Path("/opt/gpuckpt-two-machines")
_PART = 15 * 10**6

_STATE = """
import ctypes, hashlib, sys
cuda = ctypes.CDLL("libcuda.so.1")
def ok(status): assert status == 0, status
ok(cuda.cuInit(0))
device, context, pointer = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
ok(cuda.cuDeviceGet(ctypes.byref(device), 0))
ok(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
ok(cuda.cuCtxSetCurrent(context))
SIZE = 64 << 20
ok(cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(SIZE)))
pattern = bytes(range(256)) * (SIZE // 256)
ok(cuda.cuMemcpyHtoD_v2(pointer, pattern, ctypes.c_size_t(SIZE)))
expected = hashlib.blake2b(pattern).hexdigest()
del pattern
def on_gpu():
    ok(cuda.cuCtxSetCurrent(context))
    found = ctypes.create_string_buffer(SIZE)
    ok(cuda.cuMemcpyDtoH_v2(found, pointer, ctypes.c_size_t(SIZE)))
    return hashlib.blake2b(found.raw).hexdigest()
"""


def _started(spec: str) -> Notebook:
    manager = KernelManager(kernel_name=spec)
    manager.start_kernel()
    client = manager.client()
    open_channels(client)
    client.wait_for_ready(120)
    return Notebook(manager, client)


def save(folder: Path) -> None:
    """Start a kernel, save it with its files, and pack the store."""
    HOME.mkdir()
    small_environment(HOME / "env", HOME / "jupyter")
    os.environ["JUPYTER_PATH"] = str(HOME / "jupyter")
    kernel = _started(SPEC)
    kernel.run(_STATE)
    assert kernel.value("on_gpu() == expected") == "True"
    print(kernel.run("%gpuckpt save travelling --with-files", timeout=300).text)
    print(kernel.run("%gpuckpt show travelling").text)
    kernel.close()
    folder.mkdir(parents=True, exist_ok=True)
    key = subprocess.run(["jupyter", "gpuckpt", "trust", "--own"], check=True, stdout=subprocess.PIPE, text=True)
    (folder / "maker").write_text(key.stdout.split()[0])
    store = os.environ["GPUCKPT_STORE"]
    packed = subprocess.run(["tar", "-c", "-C", store, "."], check=True, stdout=subprocess.PIPE).stdout
    for number, at in enumerate(range(0, len(packed), _PART)):
        (folder / f"store.{number:03}").write_bytes(packed[at : at + _PART])
    print(f"{len(packed) / 1e6:.0f} MB packed into {folder}")


def restore(folder: Path) -> None:
    """Unpack the store, and restore the kernel where its environment is not."""
    assert not HOME.exists(), f"{HOME} is here already: move it away, or take another machine"
    store = Path(os.environ["GPUCKPT_STORE"])
    store.mkdir(mode=0o700, parents=True)
    packed = b"".join(part.read_bytes() for part in sorted(folder.glob("store.*")))
    subprocess.run(["tar", "-x", "-p", "-C", str(store)], check=True, input=packed)
    subprocess.run(["jupyter", "gpuckpt", "trust", (folder / "maker").read_text()], check=True)
    kernel = _started("python3-gpuckpt")
    print(kernel.run("%gpuckpt restore travelling", timeout=300).text)
    assert kernel.value("on_gpu() == expected") == "True"
    assert kernel.value("sys.prefix") == str(HOME / "env")
    kernel.run("import latecomer")
    assert kernel.value("latecomer.answer") == "42"
    kernel.close()
    assert not HOME.exists()
    print("All is as it was saved.")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        for variable, name in (
            ("JUPYTER_RUNTIME_DIR", "runtime"),
            ("GPUCKPT_STORE", "store"),
            ("GPUCKPT_KEYS", "keys"),
            ("IPYTHONDIR", "ipython"),
        ):
            os.environ[variable] = str(Path(place, name))
        {"save": save, "restore": restore}[sys.argv[1]](Path(sys.argv[2]))
