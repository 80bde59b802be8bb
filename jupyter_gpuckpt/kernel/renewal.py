"""What a restored kernel must not have in common with another copy of it, and what it must leave to the original."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
import tempfile
import uuid
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from ..linux import proc

_OPENSSL = "libcrypto"
_SEED = 48  # bytes: what OpenSSL itself seeds its generator with


def renew() -> None:
    """Make secrets differ from those of every other kernel that came from the same state; after every restore.

    What asks the system at each call (`os.urandom`, `secrets`, `uuid.uuid4`) differs by itself.
    """
    _reseed_openssl()
    # It names temporary files, and only starts again when the pid changes, which a restore does not.
    tempfile._name_sequence = None  # type: ignore[attr-defined]


def _reseed_openssl() -> None:
    """Add fresh randomness to the generator of each OpenSSL in the process; those of its threads follow (RAND_add(3)).

    A package may have brought one of its own. OpenSSL itself would only note a fork, by the pid.
    """
    with contextlib.suppress(OSError):
        lines = proc.lines("/proc/self/maps")
        paths = {line.split(maxsplit=5)[-1] for line in lines if _OPENSSL in line}
        for path in paths:
            with contextlib.suppress(OSError, AttributeError):
                library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD)
                library.RAND_add.argtypes = (ctypes.c_char_p, ctypes.c_int, ctypes.c_double)
                library.RAND_add(os.urandom(_SEED), _SEED, float(_SEED))


def become_copy(kernel: Any) -> None:
    """Let the kernel be one of its own beside the original: its messages, and whose temporary files are whose."""
    kernel.session.session = uuid.uuid4().hex
    _leave_temporary_files()


def temporary_folders() -> list[str]:
    """Return the absolute paths of the temporary folders that the process has made, and deletes with itself."""
    return sorted(os.path.abspath(folder.name) for _, folder in _folders_with_finalizers())  # noqa: PTH100


def _folders_with_finalizers() -> Iterator[tuple[Any, Any]]:
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        found = finalizer.peek()
        if found is not None and found[1] == tempfile.TemporaryDirectory._cleanup:  # type: ignore[attr-defined]
            yield finalizer, found[0]


def _leave_temporary_files() -> None:
    """Leave it to the original to delete the temporary files and folders that it has made."""
    for finalizer, folder in _folders_with_finalizers():
        finalizer.detach()
        folder._rmtree = _keep
    closer = tempfile._TemporaryFileCloser  # type: ignore[attr-defined]
    for one in gc.get_referrers(closer):  # its instances are among them, found without a list of all objects
        if type(one) is closer:
            one.delete = False


def _keep(*_: Any, **__: Any) -> None:
    """Stands in for the deletion of a folder that is the original's."""


def reseed(namespace: dict[str, Any]) -> list[str]:
    """Give every random stream that can be found a fresh start; return what failed, in words.

    Those are the streams of `random`, NumPy, torch and CuPy, their generator objects, wherever they are, and the
    variables of the notebook (`namespace`) that hold generators of torch or typed keys of JAX.
    """
    faults = []
    steps: tuple[Callable[[], None], ...] = (
        _reseed_objects,
        _reseed_torch,
        _reseed_cupy,
        lambda: _reseed_variables(namespace),
    )
    for step in steps:
        try:
            step()
        except Exception as e:  # noqa: BLE001 - a library that has changed must not keep the others from it
            faults.append(f"Not every random number generator was reseeded: {type(e).__name__}: {e}")
    return faults


def _reseed_objects() -> None:
    """Reseed generators of the standard library and of NumPy; those that belong to the modules are among them."""
    import random

    numpy = sys.modules.get("numpy")
    legacy = numpy.random.RandomState if numpy is not None else ()
    bits = numpy.random.BitGenerator if numpy is not None else ()
    for found in gc.get_objects():
        kind = type(found)
        if issubclass(kind, random.Random) and not issubclass(kind, random.SystemRandom):
            found.seed()
        elif bits and issubclass(kind, bits):
            with found.lock:
                found.state = kind().state
        elif legacy and issubclass(kind, legacy):
            found.set_state({**found.get_state(legacy=False), "has_gauss": 0})


def _reseed_torch() -> None:
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.seed()  # on the CPU, and on every GPU that is in use


def _reseed_cupy() -> None:
    cupy = sys.modules.get("cupy")
    if cupy is not None:
        cupy.random.seed(None)


def _reseed_variables(namespace: dict[str, Any]) -> None:
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    for name, value in list(namespace.items()):
        if torch is not None and isinstance(value, torch.Generator):
            value.seed()
        elif jax is not None and _is_jax_key(jax, value):
            fold_in = jax.random.fold_in
            for _ in range(value.ndim):
                fold_in = jax.vmap(fold_in, in_axes=(0, None))
            namespace[name] = fold_in(value, int.from_bytes(os.urandom(4), "little"))


def _is_jax_key(jax: Any, value: Any) -> bool:
    """Tell whether a value is a typed key of JAX; untyped ones cannot be told from other arrays."""
    return isinstance(value, jax.Array) and bool(jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key))
