"""Programs that use the GPU as real ones do: for `benchmarks.programs`, and for the tests.

Each one's `setup` is the source of a cell, or the beginning of a script. It defines ``digest()``, text that depends on
every byte of the program's state, computed where the bytes are, and ``step()``, which goes on and returns a number as
text, exact to the last bit. Environment variables are set before a framework is imported. Where there is no NVIDIA
driver they run on the CPU, so that they can be tried, but for those of CuPy.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

_GIB = 1 << 30

_TORCH = """
import hashlib, itertools, os
{environment}
import torch
torch.manual_seed(0)
on_gpu = os.path.exists("/dev/nvidiactl")
DEVICES = [f"cuda:{{k}}" if on_gpu else "cpu" for k in range({gpus})]
DEVICE = DEVICES[0]

def digest():
    # Odd weights modulo 2**32: no word can change without changing the sum.
    weights = {{}}
    h = hashlib.blake2b(digest_size=16)
    for tensor in state():
        data = tensor.detach().contiguous().flatten().view(torch.uint8)
        if len(data) % 4:
            data = torch.nn.functional.pad(data, (0, -len(data) % 4))
        if data.device not in weights:
            weights[data.device] = torch.arange(1, 1 << 23, 2, dtype=torch.int32, device=data.device)
        pieces = data.view(torch.int32).split(1 << 22)
        sums = torch.stack([(piece * weights[data.device][: len(piece)]).sum() for piece in pieces])
        h.update(repr((tensor.dtype, tuple(tensor.shape), sums.tolist())).encode())
    return h.hexdigest()

def generators():
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in DEVICES if on_gpu)]

def random_words(size, device):
    return torch.randint(-(2**63), 2**63 - 1, (size // 8,), device=device)
"""

_BLOCKS = """
blocks = [random_words(BLOCK, DEVICE) for _ in range(max(1, SIZE // BLOCK))]
turns = itertools.count()

def state():
    return [*blocks, *generators()]

def step():
    block = blocks[next(turns) % len(blocks)]
    block.add_(random_words(BLOCK, DEVICE))
    return str(block.sum().item())
"""

_MIXED_SIZES = """
def mixed_sizes():
    kinds, left = itertools.cycle([3 << 10, 100 << 10, 3 << 20, 20 << 20, 100 << 20, 517 << 20]), SIZE
    while left > 0:
        size = min(left, next(kinds))
        yield size
        left -= size
"""

_SEVERAL_GPUS = """
# Blocks below 512 MiB: with larger ones, the driver would not restore the access of one GPU to another's memory.
BLOCK = 256 << 20
held = [[random_words(min(BLOCK, SIZE), DEVICES[0]) for _ in range(max(1, SIZE // BLOCK))]]
for k in range(1, len(DEVICES)):
    held.append([block.to(DEVICES[k], copy=True).mul_(2 * k + 1) for block in held[-1]])
turns = itertools.count()

def state():
    return [*itertools.chain(*held), *generators()]

def step():
    at, last = next(turns) % len(held[0]), held[-1]
    for blocks in held:
        blocks[at].add_(last[at].to(blocks[at].device))
        last = blocks
    return str(last[at].sum().item())
"""

_TRAINING = """
from transformers import LlamaConfig, LlamaForCausalLM

torch.use_deterministic_algorithms(True)
small = SIZE < 1 << 28
width, vocabulary, length = (64, 512, 32) if small else (2048, 32000, 512)
# Parameters, their gradients, and two moments of each.
layers = max(1, round((SIZE / 2 / 4 - vocabulary * width) / (10.5 * width**2)))
config = LlamaConfig(
    vocab_size=vocabulary, hidden_size=width, intermediate_size=width * 11 // 4, num_hidden_layers=layers,
    num_attention_heads=width // 64, num_key_value_heads=max(1, width // 512), max_position_embeddings=length,
    tie_word_embeddings=True, use_cache=False,
)
with torch.device(DEVICE):
    model = LlamaForCausalLM(config).to(torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

def step():
    tokens = torch.randint(vocabulary, (4, length), device=DEVICE)
    optimizer.zero_grad()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    return loss.item().hex()

def state():
    parameters = list(model.parameters())
    moments = [optimizer.state[p][name] for p in parameters for name in sorted(optimizer.state[p])]
    return [*parameters, *(p.grad for p in parameters), *moments, *model.buffers(), *generators()]

for _ in range(3):
    step()
"""

_JAX = """
import functools, hashlib, itertools, os
{environment}
if os.path.exists("/dev/nvidiactl"):
    os.environ["JAX_PLATFORMS"] = "cuda"
import jax, jax.numpy as jnp

@jax.jit
def weighted_sum(array):
    # Odd weights modulo 2**32: no word can change without changing the sum. The compiler makes one loop of it.
    word = {{1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}}[array.dtype.itemsize]
    words = jax.lax.bitcast_convert_type(array, word).reshape(-1).astype(jnp.uint32)
    weights = 2 * jnp.arange(words.size, dtype=jnp.uint32) + 1
    return jnp.sum(words * weights, dtype=jnp.uint32)

def digest():
    sums = [(str(array.dtype), array.shape, int(weighted_sum(array))) for array in jax.tree.leaves(state())]
    return hashlib.blake2b(repr(sums).encode(), digest_size=16).hexdigest()
"""

_JAX_TRAINING = """
import optax

small = SIZE < 1 << 28
width, vocabulary, length, batch = (64, 512, 32, 4) if small else (2048, 32000, 512, 4)
# Parameters, and two moments of each.
layers = max(1, round((SIZE / 2 / 3 - vocabulary * width) / (12.25 * width**2)))
shapes = {
    "query": (width, width), "key": (width, width), "value": (width, width), "output": (width, width),
    "gate": (width, width * 11 // 4), "up": (width, width * 11 // 4), "down": (width * 11 // 4, width),
}

@jax.jit
def initial(key):
    keys = iter(jax.random.split(key, len(shapes) + 1))
    normal = lambda *shape: 0.02 * jax.random.normal(next(keys), shape, jnp.bfloat16)
    blocks = {name: normal(layers, *shape) for name, shape in shapes.items()}
    return {"embedding": normal(vocabulary, width), "blocks": blocks}

def norm(x):
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)).astype(x.dtype)

@jax.checkpoint
def block(x, weights):
    h, heads = norm(x), (batch, length, width // 64, 64)
    query, key, value = ((h @ weights[name]).reshape(heads) for name in ("query", "key", "value"))
    attended = jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="xla")
    x = x + attended.reshape(x.shape) @ weights["output"]
    h = norm(x)
    return x + (jax.nn.silu(h @ weights["gate"]) * (h @ weights["up"])) @ weights["down"], None

def loss_of(parameters, tokens):
    # Products with one-hot vectors: the gradient of a look-up would add in any order.
    hot = jax.nn.one_hot(tokens, vocabulary, dtype=jnp.bfloat16)
    x, _ = jax.lax.scan(block, hot @ parameters["embedding"], parameters["blocks"])
    logits = (norm(x) @ parameters["embedding"].T).astype(jnp.float32)
    return optax.softmax_cross_entropy(logits[:, :-1], hot[:, 1:].astype(jnp.float32)).mean()

adam = optax.adam(1e-4)

@functools.partial(jax.jit, donate_argnums=(0, 1))
def trained(parameters, moments, key):
    tokens = jax.random.randint(key, (batch, length), 0, vocabulary)
    loss, gradients = jax.value_and_grad(loss_of)(parameters, tokens)
    updates, moments = adam.update(gradients, moments, parameters)
    return optax.apply_updates(parameters, updates), moments, loss

key = jax.random.PRNGKey(0)
parameters = initial(key)
moments = jax.jit(adam.init)(parameters)

def step():
    global parameters, moments, key
    key, own = jax.random.split(key)
    parameters, moments, loss = trained(parameters, moments, own)
    return float(loss).hex()

def state():
    return parameters, moments, key

for _ in range(3):
    step()
"""

_JAX_ARRAYS = """
@functools.partial(jax.jit, donate_argnums=0)
def mixed(array):
    array = array * 1664525 + 1013904223
    return array, jnp.sum(array, dtype=jnp.uint32)

arrays = [
    jax.random.bits(jax.random.PRNGKey(n), (max(1, size // 4),), jnp.uint32) for n, size in enumerate(mixed_sizes())
]
turns = itertools.count()

def state():
    return arrays

def step():
    at = next(turns) % len(arrays)
    arrays[at], total = mixed(arrays[at])
    return str(int(total))
"""

_CUPY = """
import hashlib, itertools
import cupy
{environment}

def noise(size, seed):
    words = cupy.arange(max(1, size // 4), dtype=cupy.uint32)
    words += cupy.uint32(seed * 0x9E3779B1 & 0xFFFFFFFF)
    for factor in (0x85EBCA6B, 0xC2B2AE35):
        words ^= words >> cupy.uint32(15)
        words *= cupy.uint32(factor)
    words ^= words >> cupy.uint32(16)
    return words

arrays = [noise(size, n) for n, size in enumerate(mixed_sizes())]
turns = itertools.count()

def digest():
    # Odd weights modulo 2**32: no word can change without changing the sum.
    weights = cupy.arange(1, 1 << 23, 2, dtype=cupy.uint32)
    h = hashlib.blake2b(digest_size=16)
    for array in arrays:
        pieces = [array[at : at + (1 << 22)] for at in range(0, len(array), 1 << 22)]
        sums = cupy.stack([(piece * weights[: len(piece)]).sum(dtype=cupy.uint64) for piece in pieces])
        h.update(repr((array.shape, sums.tolist())).encode())
    return h.hexdigest()

def step():
    array = arrays[next(turns) % len(arrays)]
    array *= cupy.uint32(1664525)
    array += cupy.uint32(1013904223)
    return str(int(array.sum(dtype=cupy.uint64)))
"""


@dataclass(frozen=True)
class Program:
    """One program.

    Attributes
    ----------
    name : as it is called on the command line.
    size : bytes on each GPU that it holds by default, about; what a context or a framework takes comes on top.
    packages : what must be installed, by the names that are imported.
    gpus : how many GPUs it uses.
    takes_all : whether it reserves most of a GPU, whatever it holds.
    """

    name: str
    source: str
    size: int
    packages: tuple[str, ...]
    gpus: int = 1
    takes_all: bool = False

    def setup(self, size: int | None = None) -> str:
        """Return the source that makes the state, of so many bytes on each GPU."""
        return f"SIZE = {self.size if size is None else size}\n{self.source}"

    def lacks(self, gpus: int) -> str:
        """Return why it cannot run on a machine with so many GPUs; nothing where it can."""
        missing = [name for name in self.packages if importlib.util.find_spec(name) is None]
        if missing:
            return f"{' and '.join(missing)} not installed here"
        if gpus < self.gpus:
            return f"it needs {self.gpus} GPUs, and this machine has {gpus}"
        return ""


def _torch(name: str, source: str, gib: float, environment: str = "", gpus: int = 1, extra: str = "") -> Program:
    prelude = _TORCH.format(environment=environment, gpus=gpus)
    return Program(name, prelude + source, int(gib * _GIB), ("torch", *filter(None, [extra])), gpus)


def _allocator(setting: str) -> str:
    return f'os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "{setting}"'


def _blocks(size: str) -> str:
    return f"BLOCK = {size}\n{_BLOCKS}"


_JAX_GROWS = (
    'os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"\n'
    'os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_deterministic_ops=true"'
)
_JAX_ASYNC = _JAX_GROWS + '\nos.environ["XLA_PYTHON_CLIENT_ALLOCATOR"] = "cuda_async"'
_CUPY_ASYNC = "cupy.cuda.set_allocator(cupy.cuda.MemoryAsyncPool().malloc)"

PROGRAMS = {
    program.name: program
    for program in (
        _torch("one_gib", _blocks("SIZE"), 1),
        _torch("blocks", _blocks("min(20 << 20, SIZE)"), 1200 * 20 / 1024),
        _torch("training", _TRAINING, 7, 'os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"', extra="transformers"),
        Program("jax", _JAX.format(environment=_JAX_GROWS) + _JAX_TRAINING, int(5.6 * _GIB), ("jax", "optax")),
        Program(
            "jax_default",
            _JAX.format(environment="") + _MIXED_SIZES + _JAX_ARRAYS,
            4 * _GIB,
            ("jax",),
            takes_all=True,
        ),
        Program("jax_async", _JAX.format(environment=_JAX_ASYNC) + _MIXED_SIZES + _JAX_ARRAYS, 4 * _GIB, ("jax",)),
        Program("cupy", _MIXED_SIZES + _CUPY.format(environment=""), 8 * _GIB, ("cupy",)),
        Program("cupy_async", _MIXED_SIZES + _CUPY.format(environment=_CUPY_ASYNC), 8 * _GIB, ("cupy",)),
        _torch("torch_expandable", _blocks("min(20 << 20, SIZE)"), 8, _allocator("expandable_segments:True")),
        _torch("torch_async", _blocks("min(20 << 20, SIZE)"), 8, _allocator("backend:cudaMallocAsync")),
        _torch("two_gpus", _SEVERAL_GPUS, 8, gpus=2),
        _torch("four_gpus", _SEVERAL_GPUS, 24, gpus=4),
    )
}
