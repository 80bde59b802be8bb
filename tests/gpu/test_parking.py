"""torch's memory leaves the kernel for a save and comes back at the same addresses, whatever happens meanwhile."""

from __future__ import annotations

import pytest
from gpu_memory import DIGEST, GIB, SAME, STATE, leaving_free
from notebooks import Notebook, StartKernel, wait_until

from jupyter_gpuckpt import settings
from jupyter_gpuckpt.freeze.parking import PARKED
from jupyter_gpuckpt.freeze.parking_channel import waits
from jupyter_gpuckpt.store import Store

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300), pytest.mark.shared_kernel]


def parked_bytes(name: str) -> int:
    """Return how many bytes of a snapshot were parked."""
    store = Store(settings.store_dir())
    contents = store.contents(store.get(name))
    return sum(contents.size_of(path) for path in contents.files if path.endswith(PARKED))


def test_it_comes_back_bit_for_bit_with_its_graphs_and_is_no_ones_afterwards(notebook: Notebook) -> None:
    notebook.run("import torch\n" + DIGEST + STATE, timeout=120)
    for _ in range(2):
        notebook.run("%gpuckpt save here --replace", timeout=120)
        assert parked_bytes("here") > GIB // 2
        assert notebook.value(SAME) == "True"
    after = "graph.replay(), digest(b) == digest(a + a)"
    notebook.run("x.zero_(); y.clear(); b.zero_(); torch.cuda.empty_cache(); z = torch.ones(2**29, device='cuda')")
    for _ in range(2):
        notebook.run("%gpuckpt restore here", timeout=120)
        assert notebook.value(SAME) == "True"
        assert notebook.value(after) == "None True"
    # The memory is torch's own again: it can be given back to the driver, and had again.
    notebook.run("free = torch.cuda.mem_get_info()[0]; y.clear(); del x; torch.cuda.empty_cache()")
    assert int(notebook.value("torch.cuda.mem_get_info()[0] - free")) > GIB // 2
    folder = settings.NAMESPACE_VRAM_DIR
    assert notebook.value(f"__import__('os').listdir({folder!r})") == "[]"
    wait_until(lambda: int(notebook.value(f"__import__('shutil').disk_usage({folder!r}).used")) == 0)


LOCAL = """
import cupy, torch
from cuda.bindings import driver
parked, words = torch.ones(2**28, device='cuda'), torch.arange(2**20, device='cuda', dtype=torch.int32)
kernel = cupy.RawKernel(r'''
extern "C" __global__ void mix(unsigned *out, const unsigned *in, int n) {
  unsigned local[2048], sum = 0, i = blockIdx.x * blockDim.x + threadIdx.x;
  for (int k = 0; k < 2048; k++) local[k] = in[(i + k) % n] + k;
  for (int k = 0; k < 3000; k++) { sum = sum * 31 + local[(sum + k * 7) % 2048]; local[(k * 13 + sum) % 2048] ^= sum; }
  out[i] = sum;
}''', 'mix')
def mix():
    out = torch.zeros_like(words)
    with cupy.cuda.Stream.from_external(torch.cuda.current_stream()):
        kernel((4096,), (256,), (cupy.asarray(out), cupy.asarray(words), cupy.int32(2**20)))
    return out
expected, graph = mix(), torch.cuda.CUDAGraph()
with torch.cuda.graph(graph): out = mix()
def limit(): return driver.cuCtxGetLimit(driver.CUlimit.CU_LIMIT_STACK_SIZE)[1]
def works():
    graph.replay()
    return [bool((one == expected).all()) for one in (out, mix())]
"""


@pytest.mark.shared_kernel(False)
def test_local_memory_is_not_saved_and_kernels_and_graphs_have_it_again(notebook: Notebook) -> None:
    notebook.run(LOCAL, timeout=120)
    # 8 KiB for each thread that can run at once: more than 2 GB on an H100.
    assert notebook.value("limit(), works()") == "8192 [True, True]"
    for _ in range(2):
        notebook.run("%gpuckpt save here --replace", timeout=120)
        assert notebook.value("limit(), works()") == "8192 [True, True]"
    contents = Store(settings.store_dir()).contents(Store(settings.store_dir()).get("here"))
    others = [contents.size_of(path) for path in contents.files if path.startswith("vram/") and PARKED not in path]
    assert others
    assert sum(others) < GIB
    notebook.run("%gpuckpt restore here", timeout=120)
    assert notebook.value("limit(), works()") == "8192 [True, True]"


@pytest.mark.shared_kernel(False)
def test_a_thread_that_uses_the_gpu_all_the_time_misses_nothing(notebook: Notebook) -> None:
    notebook.run(
        """
import threading, torch
y, n, lock = torch.zeros(2**28, device='cuda'), 0, threading.Lock()
def work():
    global n
    while True:
        with lock: y.add_(1); n += 1
def counts():
    with lock: return y.min().item() == n == y.max().item()
threading.Thread(target=work, daemon=True).start()
""",
        timeout=120,
    )
    for _ in range(2):
        notebook.run("%gpuckpt save here --replace", timeout=120)
        assert notebook.value("counts()") == "True"
    notebook.run("%gpuckpt restore here", timeout=120)
    assert notebook.value("counts()") == "True"
    assert notebook.value("(m := n, __import__('time').sleep(0.5), n > m)[2]") == "True"


@pytest.mark.shared_kernel(False)
@pytest.mark.parametrize("size", [2**28, 2**10], ids=["parked", "not parked"])
def test_a_thread_that_synchronizes_all_the_time_goes_on(notebook: Notebook, size: int) -> None:
    """`cuCtxSynchronize` of a checkpointed process ends it: the thread has to wait in front of it."""
    notebook.run(
        f"""
import threading, time, torch
x, n = torch.ones({size}, device='cuda'), 0
def work():
    global n
    while True: torch.cuda.synchronize(); n += 1; time.sleep(0.0005)
threading.Thread(target=work, daemon=True).start()
""",
        timeout=120,
    )
    for line in ("save here", "save here --replace", "restore here", "save here --replace"):
        notebook.run(f"%gpuckpt {line}", timeout=120)
        assert notebook.value("(m := n, time.sleep(0.5), n > m)[2]") == "True"


@pytest.mark.parametrize("free", [3 * GIB, 5 * GIB // 4, GIB // 4], ids=["one part", "no part", "no helper"])
def test_a_gpu_without_room_for_anything_twice(notebook: Notebook, free: int) -> None:
    notebook.run("import torch\n" + DIGEST + STATE, timeout=120)
    notebook.run("del graph; w = torch.randint(0, 2**62, (2**28 + 12345,), device='cuda'); d = digest(x, *y, a, b, w)")
    notebook.run("torch.cuda.empty_cache()")
    with leaving_free(free):
        notebook.run("%gpuckpt save here", timeout=120)
        assert (parked_bytes("here") > 0) == (free > GIB)
        assert notebook.value("digest(x, *y, a, b, w) == d") == "True"
    notebook.run("w.zero_(); x.zero_()")
    notebook.run("%gpuckpt restore here", timeout=120)
    assert notebook.value("digest(x, *y, a, b, w) == d") == "True"


def test_a_keeper_killed_while_the_memory_is_parked_is_replaced_and_gives_it_back(notebook: Notebook) -> None:
    notebook.run("import torch\n" + DIGEST + STATE, timeout=120)
    with notebook.keeper as keeper:
        status = keeper.request("status")
    request = notebook.client.execute("%gpuckpt save here")
    wait_until(lambda: waits(status["pid"]), 60)
    notebook.kill_keeper()
    reply = notebook.reply(120)
    assert reply["parent_header"]["msg_id"] == request
    assert notebook.value(SAME) == "True"
    notebook.run("%gpuckpt save after", timeout=120)
    notebook.run("x.zero_()")
    notebook.run("%gpuckpt restore after", timeout=120)
    assert notebook.value(SAME) == "True"


def test_without_parking_the_driver_copies(start: StartKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUCKPT_PARKING", "off")
    notebook = start()
    notebook.run("import torch\n" + DIGEST + STATE, timeout=120)
    notebook.run("%gpuckpt save here", timeout=120)
    assert parked_bytes("here") == 0
    notebook.run("x.zero_()")
    notebook.run("%gpuckpt restore here", timeout=120)
    assert notebook.value(SAME) == "True"


@pytest.mark.shared_kernel(False)
def test_allocating_and_freeing_loses_nothing(notebook: Notebook) -> None:
    notebook.run(
        """
import random, torch
torch.cuda.init(); torch.zeros(1, device='cuda'); random.seed(1)
free = torch.cuda.mem_get_info()[0]
for _ in range(100):
    held = [torch.full((random.randrange(1, 2**26),), 7, dtype=torch.uint8, device='cuda') for _ in range(20)]
    assert all(bool((t == 7).all()) for t in held)
    held.clear(); torch.cuda.empty_cache()
""",
        timeout=120,
    )
    assert abs(int(notebook.value("torch.cuda.mem_get_info()[0] - free"))) < 64 << 20
    # More than there is: torch's own error, and all as before.
    assert notebook.fails("torch.empty(2**40, device='cuda')").ename == "OutOfMemoryError"
    assert notebook.value("torch.ones(2**25, device='cuda').sum().item()") == str(float(2**25))
