"""Forks of kernels with GPU state, and the way from one GPU to another."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence

import pytest
from copies import Fork, forking
from gpu_memory import DIGEST, TRAINING, used_by_gpu
from notebooks import Notebook, StartKernel, wait_until

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

MIB = 1 << 20
NOISE = 128 * MIB
RATES = (1e-3, 1e-2)


@pytest.fixture
def fork() -> Iterator[Fork]:
    with forking() as fork:
        yield fork


@pytest.fixture
def several_gpus() -> None:
    if len(used_by_gpu()) < 2:
        pytest.skip("needs two GPUs, and this machine has one")


def grown(before: Sequence[int]) -> list[int]:
    """Return by how many MiB each GPU is fuller than before."""
    return [(now - was) // MIB for now, was in zip(used_by_gpu(), before, strict=True)]


def holding(mib: int, device: str = "cuda:0", name: str = "x") -> str:
    return f"{name} = torch.randint(0, 2**62, ({mib * 2**17},), device={device!r}); torch.cuda.synchronize()\n"


def fine_tune(kernel: Notebook, rate: float) -> str:
    kernel.run(f"for group in optimizer.param_groups: group['lr'] = {rate}", timeout=120)
    return kernel.value("train(20), everything()")


def test_a_fine_tune_forked_twice_gives_what_two_restores_give(notebook: Notebook, fork: Fork) -> None:
    notebook.run("import torch\n" + DIGEST + TRAINING, timeout=120)
    state = notebook.value("everything()")
    copies = fork(notebook, count=2)
    assert notebook.value("everything()") == state, "the fork itself changed something"
    notebook.run("%gpuckpt save base", timeout=120)
    forked = [fine_tune(copy, rate) for copy, rate in zip(copies, RATES, strict=True)]
    for copy in copies:
        copy.close()
    restored = []
    for rate in RATES:
        notebook.run("%gpuckpt restore base", timeout=120)
        assert notebook.value("everything()") == state
        restored.append(fine_tune(notebook, rate))
    assert forked == restored
    assert forked[0] != forked[1]


def test_copies_have_their_own_gpu_memory_and_give_it_back(notebook: Notebook, fork: Fork) -> None:
    notebook.run("import torch\n" + DIGEST + holding(1024) + "d = digest(x)", timeout=120)
    before = used_by_gpu()
    copies = fork(notebook, count=2)
    notebook.run("x.zero_(); torch.cuda.synchronize()")
    copies[0].run("x.fill_(1); torch.cuda.synchronize()")
    assert copies[1].value("digest(x) == d") == "True"
    assert max(grown(before)) > 2 * 1024
    for copy in copies:
        copy.close()
    wait_until(lambda: max(grown(before)) * MIB < NOISE, 30, "GPU memory is still held")


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_random_streams_on_the_gpu_stay_equal_unless_they_are_reseeded(
    notebook: Notebook, fork: Fork, library: str
) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    if library == "torch":
        notebook.run(
            "import torch\ntorch.rand(1, device='cuda'); own = torch.Generator('cuda')\n"
            "def draw(): return [torch.rand(1).item(), torch.rand(1, device='cuda').item(), "
            "torch.rand(1, device='cuda', generator=own).item()]",
            timeout=120,
        )
    else:
        notebook.run("%env XLA_PYTHON_CLIENT_PREALLOCATE=false\n%env XLA_PYTHON_CLIENT_MEM_FRACTION=0.05")
        notebook.run(
            "import jax\nkey, keys = jax.random.key(0), jax.random.split(jax.random.key(1), 4).reshape(2, 2)\n"
            "def draw(): return [jax.random.uniform(key).item(), jax.random.uniform(keys[1, 0]).item()]\ndraw()",
            timeout=120,
        )
    (copy,) = fork(notebook)
    (reseeded,) = fork(notebook, reseed=True)
    original = notebook.value("draw()")
    assert copy.value("draw()") == original
    assert not set(eval(reseeded.value("draw()"))) & set(eval(original))


@pytest.mark.usefixtures("several_gpus")
def test_a_kernel_moves_to_another_gpu_and_back_and_the_old_one_is_free(notebook: Notebook) -> None:
    before = used_by_gpu()
    notebook.run("import torch\n" + DIGEST + holding(2048) + "d = digest(x)", timeout=120)
    here = grown(before)
    assert here[0] > 2048
    told = notebook.run("%gpuckpt move --gpu 1", timeout=120).text
    assert "is now on GPU 1" in told
    assert notebook.value("digest(x) == d, (x + 1).sum().item() == x.sum().item() + len(x)") == "True True"
    wait_until(lambda: abs(grown(before)[0]) * MIB < NOISE, 30, "memory of the old GPU is still held")
    assert grown(before)[1] > 2048
    assert "It is already there" in notebook.fails("%gpuckpt move --gpu 1", timeout=120).text
    notebook.run("%gpuckpt save there", timeout=120)
    notebook.run("%gpuckpt move --gpu 0", timeout=120)
    assert notebook.value("digest(x) == d") == "True"
    wait_until(lambda: abs(grown(before)[1]) * MIB < NOISE, 30, "memory of the old GPU is still held")
    notebook.run("%gpuckpt restore there", timeout=120)
    assert notebook.value("digest(x) == d") == "True"


@pytest.mark.usefixtures("several_gpus")
def test_what_a_kernel_says_of_its_gpu_after_a_move(notebook: Notebook) -> None:
    """Measured for docs/copies.md: PyTorch remembers the properties of the device that it first saw."""
    notebook.run(f"import torch\n{holding(64)}first = str(torch.cuda.get_device_properties(0).uuid)", timeout=120)
    notebook.run("%gpuckpt move --gpu 1", timeout=120)
    told = notebook.value(
        "str(torch.cuda.get_device_properties(0).uuid) == first, torch.cuda.current_device(), str(x.device)"
    )
    print("after a move, (same uuid as before, current_device, device of a tensor):", told)
    assert told.endswith("0 cuda:0")


@pytest.mark.usefixtures("several_gpus")
@pytest.mark.parametrize("visible", ["", "1"])
def test_a_snapshot_is_restored_and_forked_to_the_gpu_that_is_named(
    start: StartKernel, fork: Fork, monkeypatch: pytest.MonkeyPatch, visible: str
) -> None:
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    at, other = (1, 0) if visible else (0, 1)
    before = used_by_gpu()
    notebook = start()
    notebook.run("import torch\n" + DIGEST + holding(2048) + "d = digest(x)", timeout=120)
    assert grown(before)[at] > 2048
    (copy,) = fork(notebook, gpus=[other])
    assert copy.value("digest(x) == d") == "True"
    assert grown(before)[other] > 2048
    copy.close()
    notebook.run("%gpuckpt save here", timeout=120)
    notebook.run(f"%gpuckpt restore here --gpu {other}", timeout=120)
    assert notebook.value("digest(x) == d") == "True"
    assert grown(before)[other] > 2048
    wait_until(lambda: abs(grown(before)[at]) * MIB < NOISE, 30, "memory of the old GPU is still held")


@pytest.mark.usefixtures("several_gpus")
def test_a_copy_goes_to_another_gpu_by_itself_where_its_own_is_too_full(start: StartKernel, fork: Fork) -> None:
    notebook, ballast = start(), start()
    notebook.run("import torch\n" + DIGEST + holding(8192) + "d = digest(x)", timeout=120)
    free = "torch.cuda.mem_get_info(0)[0] // 2**20"
    ballast.run(
        f"import torch\nroom = {free} - 6000\ny = torch.empty(room * 2**20, dtype=torch.uint8, device='cuda:0')"
    )
    before = used_by_gpu()
    (copy,) = fork(notebook)
    assert copy.value("digest(x) == d") == "True"
    assert max(grown(before)[1:]) > 8192
    assert any("is now on GPU" in warning for warning in fork.warnings)  # type: ignore[attr-defined]


@pytest.mark.usefixtures("several_gpus")
def test_the_state_of_every_gpu_goes_to_the_next_one_round_and_back(notebook: Notebook) -> None:
    before = used_by_gpu()
    count = len(before)
    cells = "".join(holding(256 * (n + 1), f"cuda:{n}", f"x{n}") for n in range(count))
    everything = f"digest({', '.join(f'x{n}' for n in range(count))})"
    notebook.run(f"import torch\n{DIGEST}{cells}d = {everything}", timeout=120)
    start = grown(before)
    shift = ",".join(str((n + 1) % count) for n in range(count))
    held = start
    for _ in range(count):
        notebook.run(f"%gpuckpt move --gpu {shift}", timeout=200)
        held = held[-1:] + held[:-1]
        wait_until(lambda held=held: near(grown(before), held), 30, f"{grown(before)} instead of {held}")  # type: ignore[misc]
        assert notebook.value(f"{everything} == d") == "True"
    assert near(grown(before), start)


@pytest.mark.usefixtures("several_gpus")
def test_nccl_in_one_process_works_on_in_a_copy(notebook: Notebook, fork: Fork) -> None:
    notebook.run(
        "import torch, torch.cuda.nccl as nccl\n"
        "x = [torch.ones(2**16, device=f'cuda:{n}') for n in range(2)]\n"
        "def total():\n    nccl.all_reduce(x); return [t.sum().item() / len(t) for t in x]",
        timeout=120,
    )
    assert notebook.value("total()") == "[2.0, 2.0]"
    (copy,) = fork(notebook)
    assert [kernel.value("total()") for kernel in (notebook, copy, copy)] == ["[4.0, 4.0]", "[4.0, 4.0]", "[8.0, 8.0]"]


def near(found: Sequence[int], wanted: Sequence[int]) -> bool:
    return all(abs(a - b) * MIB < NOISE for a, b in zip(found, wanted, strict=True))


@pytest.mark.usefixtures("several_gpus")
@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("%gpuckpt move --gpu 9", "there is no GPU 9"),
        ("%gpuckpt move --gpu 0,1", "it uses 1 GPUs, and 2 were named"),
        ("%gpuckpt fork --gpu 9", "there is no GPU 9"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_touched(notebook: Notebook, line: str, says: str) -> None:
    notebook.run("import torch\n" + DIGEST + holding(64) + "d = digest(x)", timeout=120)
    assert says in notebook.fails(line, timeout=120).text
    assert notebook.value("digest(x) == d") == "True"
