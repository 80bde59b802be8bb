"""What programs find that open NCCL themselves and look its functions up, by real libraries in real processes."""

from __future__ import annotations

import ast
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from jupyter_gpuckpt.installed import NCCL_LIBRARY

_HERE = Path(__file__).parent
_FRONT = NCCL_LIBRARY.name
_NCCL = "libnccl.so.2"
_LIBC_VERSION = {"x86_64": "GLIBC_2.2.5", "aarch64": "GLIBC_2.17"}
_BEGIN = """
import _ctypes, ctypes, os
class Found(ctypes.Structure):
    _fields_ = [("path", ctypes.c_char_p), ("base", ctypes.c_void_p), *((name, ctypes.c_void_p) for name in ("a", "b"))]
class Id(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * 128)]
libc = ctypes.CDLL(None)
libc.dlerror.restype, libc.dlsym.argtypes = ctypes.c_char_p, [ctypes.c_void_p, ctypes.c_char_p]
def path(library, name):
    found = Found()
    libc.dladdr(ctypes.cast(getattr(library, name), ctypes.c_void_p), ctypes.byref(found))
    return found.path.decode()
def file(library, name):
    return os.path.basename(path(library, name))
def communicator(nccl):
    id, handle = Id(), ctypes.c_void_p()
    assert nccl.ncclGetUniqueId(ctypes.byref(id)) == nccl.ncclCommInitRank(ctypes.byref(handle), 1, id, 0) == 0
    return handle
def sum_of(nccl, handle, value):
    given, into = ctypes.c_int64(value), ctypes.c_int64()
    words = ctypes.byref(given), ctypes.byref(into), ctypes.c_size_t(1), 4, 0, handle, None
    return nccl.ncclAllReduce(*words) or into.value
def is_of_nccl(handle):
    return ctypes.c_uint64.from_address(handle.value).value == 0x1234
"""


def _said_by(code: str, *arguments: Path | str, first: Sequence[Path] = (NCCL_LIBRARY,), **environment: str) -> object:
    """Return what a program of Python tells with its last expression; it has these libraries loaded first."""
    body, _, last = code.strip().rpartition("\n")
    variables = {**os.environ, "LD_PRELOAD": ":".join(map(str, first)), **environment}
    words = [sys.executable, "-c", f"import sys\n{_BEGIN}\n{body}\nprint(repr({last}))", *map(str, arguments)]
    ran = subprocess.run(words, env=variables, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    return ast.literal_eval(ran.stdout)


_WHERE = """
nccl = ctypes.CDLL(sys.argv[1])
[file(nccl, name) for name in ("ncclAllReduce", "ncclCommInitRank", "ncclGroupEnd", "ncclGetErrorString")]
"""


@pytest.mark.parametrize("by_path", [True, False])
def test_who_opens_nccl_finds_the_functions_that_are_in_front(made_up_nccl: Path, by_path: bool) -> None:
    opened = made_up_nccl if by_path else made_up_nccl.name
    found = _said_by(_WHERE, opened, LD_LIBRARY_PATH=str(made_up_nccl.parent))
    assert found == [_FRONT, _FRONT, _FRONT, _NCCL]


def test_who_looks_in_a_library_that_is_linked_with_nccl_finds_them(
    made_up_nccl: Path, tmp_path: Path, compiled: Callable[..., Path]
) -> None:
    source = tmp_path / "user.c"
    source.write_text("int ncclGroupStart(void); int user(void) { return ncclGroupStart(); }")
    user = compiled(source, tmp_path / "user.so", str(made_up_nccl), f"-Wl,-rpath,{made_up_nccl.parent}")
    assert _said_by(_WHERE, user) == [_FRONT, _FRONT, _FRONT, _NCCL]


def test_programs_find_the_functions_of_an_nccl_that_is_newer_than_what_is_known(made_up_nccl: Path) -> None:
    assert _said_by(_WHERE, made_up_nccl, MADE_UP_NCCL_VERSION="23300") == [_NCCL] * 4


def test_what_has_functions_of_such_names_and_is_not_nccl_is_left_alone(
    made_up_nccl: Path, tmp_path: Path, compiled: Callable[..., Path]
) -> None:
    source = tmp_path / "stub.c"
    source.write_text("int ncclAllReduce(void) { return 77; }")
    stub = compiled(source, tmp_path / "stub.so")
    code = "stub = ctypes.CDLL(sys.argv[1])\n(stub.ncclAllReduce(), 'libnccl' in open('/proc/self/maps').read())"
    assert _said_by(code, stub, LD_LIBRARY_PATH=str(made_up_nccl.parent)) == (77, False)


def test_of_two_in_one_process_the_second_is_used_as_it_is(made_up_nccl: Path, tmp_path: Path) -> None:
    second = tmp_path / _NCCL
    shutil.copyfile(made_up_nccl, second)
    code = """
both = [ctypes.CDLL(path) for path in sys.argv[1:]]
handles = [communicator(nccl) for nccl in both]
own = [is_of_nccl(handle) for handle in handles]
sums = [sum_of(nccl, handle, 3 + n) for n, (nccl, handle) in enumerate(zip(both, handles))]
ended = [nccl.ncclCommDestroy(handle) for nccl, handle in zip(both, handles)]
([path(nccl, "ncclAllReduce") for nccl in both], own, sums, ended)
"""
    places = [str(NCCL_LIBRARY), str(second)]
    assert _said_by(code, made_up_nccl, second) == (places, [False, True], [3, 4], [0, 0])


def test_one_that_was_closed_and_opened_again_is_the_same(made_up_nccl: Path) -> None:
    code = """
nccl = ctypes.CDLL(sys.argv[1])
handle = communicator(nccl)
_ctypes.dlclose(nccl._handle)
again = ctypes.CDLL(sys.argv[1])
(file(again, "ncclAllReduce"), is_of_nccl(handle), sum_of(again, handle, 5), again.ncclCommDestroy(handle))
"""
    assert _said_by(code, made_up_nccl) == (_FRONT, False, 5, 0)


def test_errors_are_those_of_the_program_s_own_lookups(made_up_nccl: Path) -> None:
    code = """
nccl = ctypes.CDLL(sys.argv[1])
def error_after(name):
    libc.dlsym(nccl._handle, name)
    return libc.dlerror()
error_after(b"getpid") # ctypes itself looks up dlerror
[error_after(name) for name in (b"ncclGetErrorString", b"ncclAllReduce", b"ncclNothing", b"getpid", b"n", b"")]
"""
    found = _said_by(code, made_up_nccl)
    text = f"{made_up_nccl}: undefined symbol: ".encode()
    assert found == [None, None, text + b"ncclNothing", None, text + b"n", text]


@pytest.mark.skipif(platform.machine() not in _LIBC_VERSION, reason="dlsym is left alone on this processor")
@pytest.mark.parametrize("looks_up", [False, True])
def test_another_library_that_is_loaded_first_finds_what_is_behind_it(
    made_up_nccl: Path, tmp_path: Path, compiled: Callable[..., Path], looks_up: bool
) -> None:
    more = [f'-DLOOKS_UP="{_LIBC_VERSION[platform.machine()]}"'] if looks_up else []
    other = compiled(_HERE / "looking_up.c", tmp_path / "other.so", *more)
    code = """
nccl = ctypes.CDLL(sys.argv[1])
lookups, allocations = (ctypes.c_int.in_dll(libc, name).value > 0 for name in ("lookups", "allocations"))
(file(nccl, "ncclAllReduce"), libc.getppid() - os.getpid() > 900_000_000, lookups, allocations)
"""
    front = _NCCL if looks_up else _FRONT  # in front of ours it goes past it, since it asks for the C library's dlsym
    assert _said_by(code, made_up_nccl, first=(NCCL_LIBRARY, other)) == (_FRONT, True, looks_up, True)
    assert _said_by(code, made_up_nccl, first=(other, NCCL_LIBRARY)) == (front, True, looks_up, True)


def test_all_functions_are_there_by_both_names_of_nccl_s() -> None:
    listed = subprocess.run(["nm", "-D", "--defined-only", NCCL_LIBRARY], capture_output=True, text=True, check=True)
    names = {line.split()[-1] for line in listed.stdout.splitlines()}
    first = {name for name in names if name.startswith("nccl")}
    assert len(first) > 50
    assert {name for name in names if name.startswith("pnccl")} == {f"p{name}" for name in first}
