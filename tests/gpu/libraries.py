"""Programs of libraries that are common on GPUs, as their users write them; each is the source of a cell.

Each defines ``step()``, which goes on and returns text that depends on all that came before, exact to the last bit.
Where there is no GPU they run on the CPU, so that they can be tried there, but for those of Numba, Triton, CuPy, Warp,
nvcc.
"""

from __future__ import annotations

from dataclasses import dataclass

_TORCH = """
import os
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
import torch
torch.manual_seed(0)
torch.use_deterministic_algorithms(True, warn_only=True)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

def exact(*tensors):
    import hashlib
    data = b"".join(t.detach().contiguous().cpu().flatten().view(torch.uint8).numpy().tobytes() for t in tensors)
    return hashlib.blake2b(data, digest_size=12).hexdigest()
"""

_TRAINER = """
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

config = LlamaConfig(vocab_size=256, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4)
model = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))
rows = [{"input_ids": torch.randint(256, (64,)), "labels": torch.randint(256, (64,))} for _ in range(64)]
arguments = TrainingArguments(
    output_dir="trainer", max_steps=4, per_device_train_batch_size=4, bf16=DEVICE == "cuda", logging_steps=2,
    report_to="tensorboard", save_strategy="no", dataloader_num_workers=2, dataloader_persistent_workers=True,
    disable_tqdm=True, learning_rate=1e-2,
)
trainer = Trainer(model=model, args=arguments, train_dataset=rows)

def step():
    told = trainer.train()
    return f"{told.training_loss.hex()} {exact(*(p for p in model.parameters() if p.requires_grad))}"

step()
"""

_LIGHTNING = """
# It imports mpi4py where that is installed, whose daemon would open the GPUs by OpenCL.
os.environ["HWLOC_COMPONENTS"] = "-opencl"
import lightning

class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Conv2d(3, 32, 3), torch.nn.BatchNorm2d(32), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1),
            torch.nn.Flatten(), torch.nn.Dropout(0.2), torch.nn.Linear(32, 10),
        )

    def training_step(self, batch, _):
        loss = torch.nn.functional.cross_entropy(self.body(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

images = torch.utils.data.TensorDataset(torch.randn(128, 3, 32, 32), torch.randint(10, (128,)))
loader = torch.utils.data.DataLoader(images, 32, shuffle=True, num_workers=2, persistent_workers=True, pin_memory=True)
net = Net()
fitter = lightning.Trainer(
    max_epochs=0, accelerator="auto", devices=1, precision="bf16-mixed", logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)

def step():
    fitter.fit_loop.max_epochs += 1
    fitter.fit(net, loader)
    return f"{float(fitter.callback_metrics['loss']).hex()} {exact(*net.state_dict().values())}"

step()
"""

_GENERATE = """
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4)
model = LlamaForCausalLM(config).to(DEVICE).eval()
text = torch.randint(512, (2, 8), device=DEVICE)

def step():
    global text
    text = model.generate(
        text[:, -32:], max_new_tokens=16, do_sample=True, cache_implementation="static", disable_compile=True,
        pad_token_id=0, eos_token_id=None,
    )
    return exact(text)

step()
"""

_AMP = """
import timm

model = timm.create_model("resnet18", num_classes=10).to(DEVICE, memory_format=torch.channels_last)
torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True
optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler(DEVICE)
stream = torch.cuda.Stream() if DEVICE == "cuda" else None

def step():
    host = torch.randn(16, 3, 64, 64)
    if stream is not None:
        with torch.cuda.stream(stream):
            images = host.pin_memory().to(DEVICE, non_blocking=True)
        torch.cuda.current_stream().wait_stream(stream)
    else:
        images = host
    with torch.autocast(DEVICE, torch.float16 if DEVICE == "cuda" else torch.bfloat16):
        loss = torch.nn.functional.cross_entropy(model(images), torch.arange(16, device=DEVICE) % 10)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return f"{loss.item().hex()} {scaler.get_scale()} {exact(*model.state_dict().values())}"

step()
"""

_COMPILED = """
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4))).to(DEVICE)
compiled = torch.compile(model, mode="reduce-overhead" if DEVICE == "cuda" else "default")
optimizer = torch.optim.SGD(model.parameters(), 0.01)
batch = torch.randn(64, 256, device=DEVICE)

def step():
    optimizer.zero_grad()
    loss = compiled(batch).square().mean()
    loss.backward()
    optimizer.step()
    return f"{loss.item().hex()} {exact(*model.parameters())}"

for _ in range(5):
    step()
"""

_GRAPHED = """
model = torch.nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True).to(DEVICE)
sample = torch.randn(8, 64, 128, device=DEVICE, requires_grad=True)
graphed = torch.cuda.make_graphed_callables(model, (sample,)) if DEVICE == "cuda" else model
optimizer = torch.optim.Adam(model.parameters(), fused=DEVICE == "cuda")

def step():
    optimizer.zero_grad(set_to_none=False)
    loss = graphed(torch.randn(8, 64, 128, device=DEVICE, requires_grad=True)).square().mean()
    loss.backward()
    optimizer.step()
    return f"{loss.item().hex()} {exact(*model.parameters())}"

step()
"""

_GEOMETRIC = """
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv

edges = torch.randint(500, (2, 4000))
graph = Data(x=torch.randn(500, 16), edge_index=edges, y=torch.randint(4, (500,))).to(DEVICE)
layers = torch.nn.ModuleList([GCNConv(16, 32), GCNConv(32, 4)]).to(DEVICE)
optimizer = torch.optim.Adam(layers.parameters(), 0.01)

def step():
    optimizer.zero_grad()
    hidden = torch.nn.functional.dropout(layers[0](graph.x, graph.edge_index).relu(), 0.5)
    loss = torch.nn.functional.cross_entropy(layers[1](hidden, graph.edge_index), graph.y)
    loss.backward()
    optimizer.step()
    return f"{loss.item().hex()} {exact(*layers.parameters())}"

step()
"""

_GAUSSIAN = """
import gpytorch

class Model(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

x = torch.linspace(0, 1, 200, device=DEVICE)
y = torch.sin(6 * x) + 0.1 * torch.randn(200, device=DEVICE)
likelihood = gpytorch.likelihoods.GaussianLikelihood().to(DEVICE)
model = Model(x, y, likelihood).to(DEVICE)
optimizer = torch.optim.Adam(model.parameters(), 0.1)
marginal = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)

def step():
    with gpytorch.settings.fast_computations(False, False, False):
        optimizer.zero_grad()
        loss = -marginal(model(x), y)
        loss.backward()
        optimizer.step()
    return f"{loss.item().hex()} {exact(*model.parameters())}"

step()
"""

_EXTENSION = """
from torch.utils.cpp_extension import load_inline

source = '''
__global__ void mixed(int64_t *words, int64_t n) {
  int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
  if (i < n) words[i] = words[i] * 6364136223846793005L + 1442695040888963407L;
}
void mix(torch::Tensor t) { mixed<<<(t.numel() + 255) / 256, 256>>>(t.data_ptr<int64_t>(), t.numel()); }
'''
built = load_inline("mixing", "void mix(torch::Tensor t);", source, functions=["mix"], with_cuda=True)
words = torch.arange(1 << 24, device="cuda")

def step():
    built.mix(words)
    return str(words.sum().item())

step()
"""

_TRITON = """
import triton
import triton.language as tl

@triton.jit
def mixed(words, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = tl.load(words + at, mask=at < n)
    tl.store(words + at, there * 1664525 + 1013904223, mask=at < n)

words = torch.arange(1 << 24, device="cuda", dtype=torch.int32)

def step():
    mixed[(triton.cdiv(len(words), 1024),)](words, len(words), BLOCK=1024)
    return str(words.sum().item())

step()
"""

_PROFILED = """
model = torch.nn.Linear(512, 512).to(DEVICE)
optimizer = torch.optim.Adam(model.parameters())
torch.cuda.memory._record_memory_history()

def step():
    with torch.cuda.nvtx.range("step"):
        optimizer.zero_grad()
        loss = model(torch.randn(64, 512, device=DEVICE)).square().mean()
        loss.backward()
        optimizer.step()
    return f"{loss.item().hex()} {exact(*model.parameters())} {torch.cuda.memory_allocated()}"

step()
"""

_JAX = """
import os
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_deterministic_ops=true"
import jax, jax.numpy as jnp, numpy

def exact(tree):
    import hashlib
    data = b"".join(numpy.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree))
    return hashlib.blake2b(data, digest_size=12).hexdigest()
"""

_NUMPYRO = """
import numpyro, numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS

def model(x, y):
    a, b = numpyro.sample("a", dist.Normal(0, 1)), numpyro.sample("b", dist.Normal(0, 1))
    numpyro.sample("y", dist.Normal(a + b * x, numpyro.sample("s", dist.HalfNormal(1))), obs=y)

x = jnp.linspace(0, 1, 100)
y = 1 + 2 * x + 0.1 * jax.random.normal(jax.random.PRNGKey(0), (100,))
chain = MCMC(NUTS(model), num_warmup=50, num_samples=20, progress_bar=False)
chain.run(jax.random.PRNGKey(1), x, y)

def step():
    chain.post_warmup_state = chain.last_state
    chain.run(chain.post_warmup_state.rng_key, x, y)
    return exact(chain.get_samples())
"""

_FLAX = """
import optax
from flax import nnx

class Net(nnx.Module):
    def __init__(self, rngs):
        self.first, self.last = nnx.Linear(32, 256, rngs=rngs), nnx.Linear(256, 1, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return self.last(self.drop(nnx.relu(self.first(x))))

net = Net(nnx.Rngs(0))
optimizer = nnx.Optimizer(net, optax.adamw(1e-3), wrt=nnx.Param)
seen = []

@nnx.jit
def trained(net, optimizer, x):
    loss, gradients = nnx.value_and_grad(lambda net: jnp.mean(net(x) ** 2))(net)
    optimizer.update(net, gradients)
    jax.debug.callback(lambda loss: seen.append(float(loss)), loss)
    return loss

key = jax.random.PRNGKey(0)

def step():
    global key
    key, own = jax.random.split(key)
    loss = trained(net, optimizer, jax.random.normal(own, (64, 32)))
    jax.effects_barrier()
    return f"{float(loss).hex()} {len(seen)} {exact(nnx.state(net, nnx.Param))}"

step()
"""

_DIFFRAX = """
import diffrax

@jax.jit
def solved(y):
    field = diffrax.ODETerm(lambda t, y, _: jnp.stack([y[1], -jnp.sin(y[0])]))
    return diffrax.diffeqsolve(field, diffrax.Tsit5(), 0, 1, 0.01, y).ys[-1]

y = jnp.stack([jnp.linspace(0, 1, 10_000), jnp.zeros(10_000)])

def step():
    global y
    y = solved(y)
    return exact(y)

step()
"""

_NUMBA = """
import hashlib, numpy
from numba import cuda
from numba.cuda.random import create_xoroshiro128p_states, xoroshiro128p_uniform_float32

@cuda.jit
def walk(at, states):
    i = cuda.grid(1)
    if i < at.size:
        at[i] += xoroshiro128p_uniform_float32(states, i) - numpy.float32(0.5)

at, stream = cuda.to_device(numpy.zeros(1 << 16, numpy.float32)), cuda.stream()
states = create_xoroshiro128p_states(1 << 16, 1)
pinned = cuda.pinned_array(1 << 16, numpy.float32)

def step():
    walk[256, 256, stream](at, states)
    at.copy_to_host(pinned, stream=stream)
    stream.synchronize()
    return hashlib.blake2b(pinned.tobytes(), digest_size=12).hexdigest()

step()
"""

_CUPY = """
import cupy, cupyx.scipy.sparse, hashlib

kernel = cupy.RawKernel('''
extern "C" __global__ void mix(unsigned *w) {
  unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  w[i] = w[i] * 1664525u + 1013904223u;
}
''', "mix")
words = cupy.arange(1 << 22, dtype=cupy.uint32)
chosen = cupy.random.RandomState(0)
matrix = cupyx.scipy.sparse.random(500, 500, 0.05, format="csr", dtype=cupy.float64, random_state=chosen)
vector = cupy.ones(500)

def step():
    global vector
    kernel((words.size // 256,), (256,), (words,))
    vector = cupy.linalg.qr(cupy.random.RandomState(int(words[0]) % 1000).rand(500, 500))[0] @ vector
    spectrum = cupy.fft.rfft(words.astype(cupy.float32))
    vector += abs(spectrum[:500]) / abs(spectrum).max() + (matrix @ vector) * 0.01
    vector /= cupy.linalg.norm(vector)
    return f"{int(words.sum(dtype=cupy.uint64))} {hashlib.blake2b(vector.get().tobytes(), digest_size=12).hexdigest()}"

step()
"""

_TINYGRAD = """
import hashlib, os
os.environ["DEV"] = "CUDA" if os.path.exists("/dev/nvidiactl") else "PYTHON"
from tinygrad import Tensor, TinyJit, nn
from tinygrad.helpers import Context

Tensor.manual_seed(0)
weights = [Tensor.randn(n, m).realize() for n, m in ((64, 256), (256, 10))]
for one in weights: one.requires_grad = True
optimizer = nn.optim.Adam(weights)

@TinyJit
def trained(x):
    optimizer.zero_grad()
    loss = (((x @ weights[0]).relu().dropout(0.1) @ weights[1]) ** 2).mean()
    loss.backward()
    optimizer.step()
    return loss.realize()

def step():
    with Context(TRAINING=1):
        loss = trained(Tensor.randn(16, 64).realize()).item()
    data = b"".join(bytes(one.data()) for one in weights)
    return f"{loss.hex()} {hashlib.blake2b(data, digest_size=12).hexdigest()}"

for _ in range(4):
    step()
"""

_WARP = """
import hashlib
import warp

warp.init()

@warp.kernel
def walk(at: warp.array(dtype=warp.vec3), steps: warp.array(dtype=int)):
    i = warp.tid()
    chance = warp.rand_init(steps[i], i)
    at[i] = at[i] + warp.vec3(warp.randf(chance), warp.randf(chance), warp.randf(chance))
    steps[i] = steps[i] + 1

at = warp.zeros(1 << 20, dtype=warp.vec3, device="cuda:0")
steps = warp.zeros(1 << 20, dtype=int, device="cuda:0")
warp.launch(walk, len(at), [at, steps], device="cuda:0")
with warp.ScopedCapture(device="cuda:0") as captured:
    for _ in range(3): warp.launch(walk, len(at), [at, steps], device="cuda:0")

def step():
    warp.capture_launch(captured.graph)
    return hashlib.blake2b(at.numpy().tobytes() + steps.numpy().tobytes(), digest_size=12).hexdigest()

step()
"""

_NVCC = """
import pathlib, subprocess

pathlib.Path("mixing.cu").write_text('''
#include <cstdio>
#include <cstdint>
__global__ void mix(uint64_t *w) { w[blockIdx.x * 256 + threadIdx.x] += blockIdx.x * 7 + threadIdx.x + w[0] % 3; }
int main() {
  uint64_t *words, host[256], sum;
  int c;
  cudaMalloc(&words, 64 << 20);
  cudaMemset(words, 1, 64 << 20);
  while ((c = getchar()) != EOF) {
    mix<<<(8 << 20) / 256, 256>>>(words);
    cudaError_t failed = cudaMemcpy(host, words + (4 << 20), sizeof host, cudaMemcpyDeviceToHost);
    sum = 0;
    for (uint64_t w : host) sum = sum * 31 + w;
    printf("%d %llu\\\\n", (int)failed, (unsigned long long)sum);
    fflush(stdout);
  }
}
''')
subprocess.run(["nvcc", "-O1", "-o", "mixing", "mixing.cu"], check=True)
child = subprocess.Popen(["./mixing"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)

def step():
    child.stdin.write(b"x")
    line = b""
    while not line.endswith(b"\\n"):
        line += child.stdout.read(1)
    return line.decode()

step()
"""


@dataclass(frozen=True)
class Library:
    """A program, and what must be there for it.

    Attributes
    ----------
    packages : by the names that are imported.
    tools : programs that it calls.
    """

    source: str
    packages: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()


LIBRARIES = {
    "transformers_trainer_with_peft": Library(_TORCH + _TRAINER, ("torch", "transformers", "peft", "tensorboard")),
    "lightning": Library(_TORCH + _LIGHTNING, ("torch", "lightning")),
    "transformers_generate": Library(_TORCH + _GENERATE, ("torch", "transformers")),
    "timm_with_amp": Library(_TORCH + _AMP, ("torch", "timm")),
    "torch_compile_with_cuda_graphs": Library(_TORCH + _COMPILED, ("torch",)),
    "torch_graphed_callables": Library(_TORCH + _GRAPHED, ("torch",)),
    "torch_geometric": Library(_TORCH + _GEOMETRIC, ("torch", "torch_geometric")),
    "gpytorch": Library(_TORCH + _GAUSSIAN, ("torch", "gpytorch")),
    "torch_extension": Library(_TORCH + _EXTENSION, ("torch",), ("nvcc", "ninja")),
    "triton": Library(_TORCH + _TRITON, ("torch", "triton")),
    "torch_nvtx_and_memory_history": Library(_TORCH + _PROFILED, ("torch",)),
    "numpyro": Library(_JAX + _NUMPYRO, ("jax", "numpyro")),
    "flax": Library(_JAX + _FLAX, ("jax", "flax", "optax")),
    "diffrax": Library(_JAX + _DIFFRAX, ("jax", "diffrax")),
    "numba": Library(_NUMBA, ("numba",)),
    "cupy": Library(_CUPY, ("cupy",)),
    "tinygrad": Library(_TINYGRAD, ("tinygrad",)),
    "warp": Library(_WARP, ("warp",)),
    "a_program_of_nvcc": Library(_NVCC, (), ("nvcc",)),
}
