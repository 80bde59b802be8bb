"""A small network that learns to write like the Python manual, for `demo.ipynb`.

It guesses the next character from the `CONTEXT` characters before it: an embedding, one hidden layer, AdamW. It runs in
torch on the GPU where both are there, else in numpy; where there is a GPU but no torch, numpy computes, and everything
that the network learns is kept in GPU memory.
"""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
from numpy.typing import NDArray

CONTEXT, EMBEDDING, HIDDEN = 8, 12, 96
RATE, DECAY, BETA1, BETA2, EPSILON = 3e-3, 1e-2, 0.9, 0.99, 1e-8

Array = NDArray[Any]


def manual() -> str:
    """Return the text that is learned: the manual that comes with Python."""
    text = "\n".join(topics.values())
    return "".join(c for c in text if c == "\n" or " " <= c <= "~")


class Net(ABC):
    """What the notebook sees of a network, whatever computes it.

    Attributes
    ----------
    where : says in words where it is.
    on_gpu : whether any of it is in GPU memory.
    """

    where = ""
    on_gpu = False

    def __init__(self, letters: str, rng: np.random.Generator) -> None:
        self.letters, self.steps = letters, 0
        self._code = {c: i for i, c in enumerate(letters)}

    def batch(self, text: str, rng: np.random.Generator, size: int = 128) -> tuple[Array, Array]:
        """Return random pieces of the text and the characters that follow them, as numbers."""
        starts = rng.integers(0, len(text) - CONTEXT - 1, size)
        codes = np.array([[self._code[c] for c in text[i : i + CONTEXT + 1]] for i in starts])
        return codes[:, :-1], codes[:, -1]

    @abstractmethod
    def step(self, batch: tuple[Array, Array]) -> float:
        """Learn from a batch; return its loss."""

    @abstractmethod
    def likely(self, context: Array) -> Array:
        """Return how likely each character is after this one context."""

    @abstractmethod
    def state(self) -> list[Array]:
        """Return copies of the weights, and of the optimizer's moments."""

    @abstractmethod
    def spoil(self) -> None:
        """Fill all weights with NaN."""

    def fingerprint(self) -> str:
        """Return a hash of every bit that was learned."""
        return hashlib.sha256(b"".join(a.tobytes() for a in self.state())).hexdigest()[:16]

    def write(self, rng: np.random.Generator, count: int, start: str = "\nThe ") -> str:
        """Write some text, character by character."""
        text = start.rjust(CONTEXT)
        for _ in range(count):
            context = np.array([self._code[c] for c in text[-CONTEXT:]])
            p = self.likely(context).astype(np.float64)
            text += self.letters[rng.choice(len(self.letters), p=p / p.sum())]
        return text[-count:]


class NumpyNet(Net):
    """Computed by numpy; `weights` and the two moments of each are kept by `keep`."""

    where = "in numpy, on the CPU"

    def __init__(self, letters: str, rng: np.random.Generator, keep: Callable[[Array], Any] = np.array) -> None:
        super().__init__(letters, rng)
        width = CONTEXT * EMBEDDING
        shapes = [(len(letters), EMBEDDING), (width, HIDDEN), (HIDDEN,), (HIDDEN, len(letters)), (len(letters),)]
        scales = np.array([1, width**-0.5, 0, HIDDEN**-0.5, 0], np.float32)
        arrays = [k * rng.standard_normal(s, np.float32) for s, k in zip(shapes, scales, strict=True)]
        self.weights = [keep(a) for a in arrays]
        self.moments = [(keep(np.zeros_like(a)), keep(np.zeros_like(a))) for a in arrays]

    def step(self, batch: tuple[Array, Array]) -> float:
        context, target = batch
        weights = [np.asarray(w) for w in self.weights]
        embedding, w1, _, w2, _ = weights
        x, h, p = self._forward(weights, context)
        rows = np.arange(len(target))
        loss = -float(np.log(p[rows, target]).mean())
        d = p.copy()
        d[rows, target] -= 1
        d /= np.float32(len(target))
        dh = (d @ w2.T) * (1 - h * h)
        dx = (dh @ w1.T).reshape(*context.shape, EMBEDDING)
        de = np.zeros_like(embedding)
        np.add.at(de, context, dx)
        self._learn(weights, [de, x.T @ dh, dh.sum(0), h.T @ d, d.sum(0)])
        return loss

    def _forward(self, weights: list[Array], context: Array) -> tuple[Array, Array, Array]:
        embedding, w1, b1, w2, b2 = weights
        x = embedding[context].reshape(len(context), -1)
        h = np.tanh(x @ w1 + b1)
        z = h @ w2 + b2
        e = np.exp(z - z.max(1, keepdims=True))
        return x, h, e / e.sum(1, keepdims=True)

    def _learn(self, weights: list[Array], gradients: list[Array]) -> None:
        self.steps += 1
        for kept, (mean, square), w, g in zip(self.weights, self.moments, weights, gradients, strict=True):
            m = BETA1 * np.asarray(mean) + (1 - BETA1) * g
            s = BETA2 * np.asarray(square) + (1 - BETA2) * g * g
            mean[...], square[...] = m, s
            m, s = m / (1 - BETA1**self.steps), s / (1 - BETA2**self.steps)
            kept[...] = w - RATE * (m / (np.sqrt(s) + EPSILON) + DECAY * w)

    def likely(self, context: Array) -> Array:
        _, _, p = self._forward([np.asarray(w) for w in self.weights], context[None])
        return np.asarray(p[0])

    def state(self) -> list[Array]:
        return [np.array(a) for a in (*self.weights, *(m for pair in self.moments for m in pair))]

    def spoil(self) -> None:
        for w in self.weights:
            w[...] = np.full(w.shape, np.nan, np.float32)


class GpuArray:
    """An array that lies in GPU memory, and is copied to be looked at; by the CUDA driver alone."""

    def __init__(self, array: Array) -> None:
        self.shape, self._dtype = array.shape, array.dtype
        (self._address,) = _driver("cuMemAlloc", array.nbytes)
        self[...] = array

    def __setitem__(self, _: Any, array: Array) -> None:
        there = np.ascontiguousarray(array, self._dtype)
        _driver("cuMemcpyHtoD", self._address, there.ctypes.data, there.nbytes)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        here = np.empty(self.shape, self._dtype)
        _driver("cuMemcpyDtoH", here.ctypes.data, self._address, here.nbytes)
        return here if dtype is None else here.astype(dtype)


def _driver(call: str, *arguments: Any) -> Any:
    """Call the CUDA driver on the first GPU; return what it gives."""
    from cuda.bindings import driver
    from cuda.core import Device

    Device(0).set_current()
    error, *given = getattr(driver, call)(*arguments)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{call}: {error.name}")
    return given


class TorchNet(Net):
    """Computed by torch, on the GPU."""

    on_gpu = True

    def __init__(self, letters: str, rng: np.random.Generator) -> None:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the same sums in the same order, every time
        import torch

        super().__init__(letters, rng)
        torch.use_deterministic_algorithms(True)
        torch.manual_seed(int(rng.integers(1 << 31)))
        layers = torch.nn
        self.torch = torch
        self.model = layers.Sequential(
            layers.Embedding(len(letters), EMBEDDING),
            layers.Flatten(),
            layers.Linear(CONTEXT * EMBEDDING, HIDDEN),
            layers.Tanh(),
            layers.Linear(HIDDEN, len(letters)),
        ).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), RATE, (BETA1, BETA2), weight_decay=DECAY)
        self.where = f"in torch, on the {torch.cuda.get_device_name()}"

    def step(self, batch: tuple[Array, Array]) -> float:
        context, target = (self.torch.from_numpy(a).cuda() for a in batch)
        self.optimizer.zero_grad()
        loss = self.torch.nn.functional.cross_entropy(self.model(context), target)
        loss.backward()
        self.optimizer.step()
        self.steps += 1
        return float(loss.item())

    def likely(self, context: Array) -> Array:
        with self.torch.no_grad():
            z = self.model(self.torch.from_numpy(context[None]).cuda())[0]
            return self.torch.softmax(z, 0).cpu().numpy()  # type: ignore[no-any-return]

    def state(self) -> list[Array]:
        tensors = [p.detach() for p in self.model.parameters()]
        for p in self.model.parameters():
            kept = self.optimizer.state.get(p, {})
            tensors += [kept[k] for k in ("exp_avg", "exp_avg_sq") if k in kept]
        return [t.cpu().numpy() for t in tensors]

    def spoil(self) -> None:
        with self.torch.no_grad():
            for p in self.model.parameters():
                p.fill_(float("nan"))


def build(letters: str, rng: np.random.Generator) -> Net:
    """Return a fresh network on the best that this machine has."""
    try:
        import torch

        if torch.cuda.is_available():
            return TorchNet(letters, rng)
    except ImportError:
        pass
    gpu = _gpu_name()
    if not gpu:
        return NumpyNet(letters, rng)
    net = NumpyNet(letters, rng, GpuArray)
    net.on_gpu, net.where = True, f"in numpy, with all that it learns in the memory of the {gpu}"
    return net


def _gpu_name() -> str:
    """Return the name of the first GPU; empty where there is none, or no driver."""
    if not Path("/dev/nvidiactl").exists():
        return ""
    try:
        from cuda.core import Device

        return str(Device(0).name)
    except Exception:  # noqa: BLE001 - a GPU that does not answer is none to compute on
        return ""
