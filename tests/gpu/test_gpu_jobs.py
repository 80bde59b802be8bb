"""Jobs with GPU state: NVIDIA's counter example, and a plain training program."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from job_programs import Job, ask, free_port, program

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

# As NVIDIA's example of cuda-checkpoint does: a server that adds one to a variable on the GPU for each packet.
COUNTER_CU = r"""
#include <arpa/inet.h>
#include <cstdio>
#include <cstdlib>
#include <cuda_runtime.h>
#include <sys/socket.h>

__device__ int counter = 100;
__global__ void add_one() { counter++; }

static void check(cudaError_t error) {
    if (error != cudaSuccess) { printf("CUDA: %s\n", cudaGetErrorString(error)); exit(1); }
}

int main(int, char **argv) {
    check(cudaFree(0));
    int s = socket(AF_INET, SOCK_DGRAM, 0);
    sockaddr_in here{AF_INET, htons(atoi(argv[2])), {inet_addr("127.0.0.1")}};
    if (bind(s, (sockaddr *)&here, sizeof here)) { perror("bind"); return 1; }
    setvbuf(stdout, nullptr, _IONBF, 0);
    printf("ready\n");
    for (;;) {
        char packet[16];
        sockaddr_in asker;
        socklen_t size = sizeof asker;
        recvfrom(s, packet, sizeof packet, 0, (sockaddr *)&asker, &size);
        add_one<<<1, 1>>>();
        int n = 0;
        check(cudaMemcpyFromSymbol(&n, counter, sizeof n));
        printf("%d\n", n);
        int length = snprintf(packet, sizeof packet, "%d", n);
        sendto(s, packet, length, 0, (sockaddr *)&asker, size);
    }
}
"""

# The same where there is no nvcc: the driver compiles the kernel itself.
COUNTER_PY = r'''
import ctypes, socket, sys

PTX = b"""
.version 7.0
.target sm_80
.address_size 64
.visible .global .align 4 .u32 counter = 100;
.visible .entry add_one()
{
    .reg .u32 %r<3>;
    ld.global.u32 %r1, [counter];
    add.u32 %r2, %r1, 1;
    st.global.u32 [counter], %r2;
    ret;
}
"""
cuda = ctypes.CDLL("libcuda.so.1")

def call(name, *args):
    error = getattr(cuda, name)(*args)
    if error:
        print(f"{name}: CUDA error {error}", flush=True)
        sys.exit(1)

device, context, module, function = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
pointer, size = ctypes.c_uint64(), ctypes.c_size_t()
call("cuInit", 0)
call("cuDeviceGet", ctypes.byref(device), 0)
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
call("cuCtxSetCurrent", context)
call("cuModuleLoadData", ctypes.byref(module), PTX)
call("cuModuleGetFunction", ctypes.byref(function), module, b"add_one")
call("cuModuleGetGlobal_v2", ctypes.byref(pointer), ctypes.byref(size), module, b"counter")
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind(("127.0.0.1", int(sys.argv[2])))
print("ready", flush=True)
while True:
    _, asker = s.recvfrom(100)
    call("cuLaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, None, None, None)
    n = ctypes.c_int()
    call("cuMemcpyDtoH_v2", ctypes.byref(n), pointer, ctypes.c_size_t(4))
    print(n.value, flush=True)
    s.sendto(str(n.value).encode(), asker)
'''

TRAIN = """
import os, sys, time
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
import torch
torch.use_deterministic_algorithms(True)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(40):
    x = torch.randn(64, 256, device="cuda")
    loss = ((model(x) - x) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item().hex(), flush=True)
    while step == 19 and not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
"""


def _command(kind: str, folder: Path) -> list[str]:
    """Return the command that starts a counter; ``udp`` and the port come behind it."""
    if kind == "driver":
        return [sys.executable, program(folder, COUNTER_PY)]
    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if nvcc is None:
        pytest.skip("no nvcc here")
    source = folder / "counter.cu"
    source.write_text(COUNTER_CU)
    subprocess.run([nvcc, "-arch=native", "-o", str(folder / "counter"), str(source)], check=True, timeout=120)
    return [str(folder / "counter")]


@pytest.mark.parametrize("kind", ["driver", "nvcc"])
def test_nvidia_s_counter_counts_on_after_it_was_killed(tmp_path: Path, kind: str) -> None:
    command, port = _command(kind, tmp_path), free_port("udp")
    counter = Job("counter")
    counter.start(*command, "udp", str(port))
    counter.wait_for(1)
    assert counter.lines() == ["ready"]
    assert ask("udp", port) == "101"
    counter.save("at-101")
    assert ask("udp", port) == "102"
    counter.kill()
    assert counter.told()["state"] == "ended"
    counter.restore("at-101")
    assert ask("udp", port) == "102"
    counter.restore("at-101")  # over the running one
    assert [ask("udp", port), ask("udp", port)] == ["102", "103"]
    assert counter.lines() == ["ready", "101", "102", "103"]


def test_a_plain_training_writes_the_same_losses_as_an_uninterrupted_one(tmp_path: Path) -> None:
    source, gate = program(tmp_path, TRAIN), tmp_path / "gate"
    gate.touch()
    whole = subprocess.run([sys.executable, source, str(gate)], capture_output=True, text=True, check=True, timeout=120)
    assert len(whole.stdout.splitlines()) == 40
    gate.unlink()
    training = Job("train")
    training.start(sys.executable, source, str(gate))
    training.wait_for(20)
    training.save("half")
    assert training.told()["gpu_memory"] != 0, "it has nothing on the GPU"
    gate.touch()
    assert training.wait_for_end() == 0
    assert training.output() == whole.stdout
    training.restore("half")
    assert training.wait_for_end() == 0
    assert training.output() == whole.stdout
