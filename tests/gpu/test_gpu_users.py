"""GPU kernels of users without root: the driver is called, and memory is traced, with the user's own rights."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from people import Machine, Person

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.fixture
def alice() -> Iterator[Person]:
    machine = Machine.or_skip()
    try:
        alice = machine.person("alice")
        alice.starts_kernel()
        yield alice
    finally:
        machine.close()


def run(alice: Person, cell: str) -> str:
    """Execute a cell; what fails says why: an error of the driver's is the news here."""
    return str(alice.does(f"notebook.run({cell!r}, timeout=120, allow_error=True).text"))


def test_a_user_saves_and_restores_what_is_on_the_gpu(alice: Person) -> None:
    assert run(alice, "import torch; x = torch.arange(2**26, device='cuda'); print(int(x.sum()))") == str(
        sum(range(2**26))
    )
    said = run(alice, "%gpuckpt save here")
    assert "Saved here" in said, said
    assert "of it GPU memory" in said, said
    assert run(alice, "print(int(x.sum())); x.zero_()").startswith(str(sum(range(2**26))))
    said = run(alice, "%gpuckpt restore here")
    assert "Restored here" in said, said
    assert run(alice, "print(int(x.sum()))") == str(sum(range(2**26)))
    assert run(alice, "print(float((x * 2).sum() / x.sum()))") == "2.0"
