"""Hold a store against a plain model, a dictionary, under random operations that are killed at random calls.

A program: ``model_cases.py EXAMPLES`` ends with status 0 when all went well. It stands alone so that its children are
forked from a process that has no other threads.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from store_helpers import ABOUT, abandon, fill, litter, read_back
from system_calls import CHANGES, Fault, Run, run

from jupyter_gpuckpt.errors import NameTaken, NoSuchSnapshot
from jupyter_gpuckpt.store import Changed, Piece, Store, Writer, hints
from jupyter_gpuckpt.store.upkeep.retention import keep_last

PAGE = 4096
PIECE = 4 * PAGE
_SAME = random.Random(1).randbytes(PIECE - PAGE)
BLOCKS = [bytes(PIECE), *(_SAME + random.Random(n).randbytes(PAGE) for n in range(12))]
"""All but the first are alike in most pages: one can be a delta of another."""
NAMES = st.sampled_from("xyz")
CONTENT = st.dictionaries(
    st.sampled_from(["pages", "core", "deep/er"]),
    st.lists(st.integers(0, len(BLOCKS) - 1), max_size=5).map(lambda numbers: b"".join(BLOCKS[n] for n in numbers)),
    max_size=3,
)
hints._MANY_PARTS = 2
KILLED_AT = st.none() | st.integers(0, 80)

Files = dict[str, bytes]


def tell(store: Store, writer: Writer, files: Files, over: str) -> None:
    before = list(store.contents(store.get(over)).chunks())
    for path in files:
        pieces: list[Piece] = [Changed(PIECE, before[n % len(before)].hash) if before else PIECE for n in range(5)]
        writer.tell(path, pieces[: len(files[path]) // PIECE])


class Machine(RuleBasedStateMachine):
    """The store and its model, side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="gpuckpt-model-"))
        self.root = self.folder / "store"
        self.model: dict[str, Files] = {}
        self.writers: list[Writer] = []

    def run(self, operation: Callable[[Store], object], killed_at: int | None) -> Run:
        """Do it in a process of its own, which may be killed at one of its calls."""

        def silent() -> None:
            operation(Store(self.root))

        outcome = run(silent, CHANGES, None if killed_at is None else Fault(killed_at, kill=True))
        assert outcome.failure == "", outcome.text
        return outcome

    def do(self, operation: Callable[[Store], object], killed_at: int | None, after: dict[str, Files]) -> None:
        """Do it, and let the model follow."""
        outcome = self.run(operation, killed_at)
        killed = killed_at is not None and killed_at < len(outcome.calls)
        found = self.found()
        assert found == after or (killed and found == self.model), (found, self.model, after)
        self.model = found

    def found(self) -> dict[str, Files]:
        store = Store(self.root)
        manifests, broken = store.scan()
        assert broken == []
        return {m.name: read_back(store, m.name) for m in manifests}

    @rule(name=NAMES, files=CONTENT, replace=st.booleans(), over=st.integers(0, 2), killed_at=KILLED_AT)
    def save(self, name: str, files: Files, replace: bool, over: int, killed_at: int | None) -> None:
        """Save, and tell the store what another snapshot has at each place."""

        def operation(store: Store) -> None:
            with contextlib.suppress(NameTaken), store.writer(name, replace=replace) as writer:
                fill(writer, files)
                if over < len(self.model):
                    tell(store, writer, files, sorted(self.model)[over])
                writer.commit(message="", cut=lambda f: [PIECE] * (f.stat().st_size // PIECE), **ABOUT)

        taken = name in self.model and not replace
        self.do(operation, killed_at, self.model if taken else {**self.model, name: files})

    @rule(name=NAMES, killed_at=KILLED_AT)
    def remove(self, name: str, killed_at: int | None) -> None:
        def operation(store: Store) -> None:
            with contextlib.suppress(NoSuchSnapshot):
                store.remove(name)

        self.do(operation, killed_at, {n: files for n, files in self.model.items() if n != name})

    @rule(killed_at=KILLED_AT)
    def collect(self, killed_at: int | None) -> None:
        self.do(Store.collect, killed_at, self.model)

    @rule(killed_at=KILLED_AT)
    def compact(self, killed_at: int | None) -> None:
        self.do(Store.compact, killed_at, self.model)

    @rule(name=NAMES, new=NAMES, killed_at=KILLED_AT)
    def rename(self, name: str, new: str, killed_at: int | None) -> None:
        def operation(store: Store) -> None:
            with contextlib.suppress(NoSuchSnapshot, NameTaken):
                store.rename(name, new)

        after = self.model
        if name in after and new not in after:
            after = {new if n == name else n: files for n, files in after.items()}
            both = {**self.model, new: self.model[name]}
            self.run(operation, killed_at)
            self.model, found = self.found(), self.model
            assert self.model in (after, both, found)
            assert killed_at is not None or self.model == after

    @rule(killed_at=KILLED_AT, last=st.integers(1, 3))
    def keep(self, killed_at: int | None, last: int) -> None:
        order = [m.name for m in Store(self.root).list()]
        self.run(lambda store: keep_last(store, last), killed_at)
        found = self.found()
        assert {n: self.model[n] for n in order[:last]}.items() <= found.items() <= self.model.items()
        assert killed_at is not None or len(found) == min(last, len(order))
        self.model = found

    @rule(files=CONTENT)
    def begin(self, files: Files) -> None:
        """Begin a save that somebody else will end, or nobody."""
        writer = Store(self.root).writer("w", replace=True)
        fill(writer, files)
        self.writers.append(writer)

    @rule()
    def give_up(self) -> None:
        if self.writers:
            abandon(self.writers.pop())

    @rule()
    def finish(self) -> None:
        if self.writers:
            with self.writers.pop() as writer:
                files = {
                    str(p.relative_to(writer.directory)): p.read_bytes()
                    for p in writer.directory.rglob("*")
                    if p.is_file()
                }
                writer.commit(message="", cut=lambda f: [PIECE] * (f.stat().st_size // PIECE), **ABOUT)
                self.model = {**self.model, "w": files}

    @invariant()
    def same(self) -> None:
        assert self.found() == self.model

    def teardown(self) -> None:
        while self.writers:
            abandon(self.writers.pop())
        store = Store(self.root)
        if store.root.exists() and (store.root / "format.json").exists():
            store.collect()
            assert litter(store) == []
            assert self.found() == self.model
        shutil.rmtree(self.folder)


if __name__ == "__main__":
    examples = int(sys.argv[1])
    run_state_machine_as_test(
        Machine,
        settings=settings(max_examples=examples, stateful_step_count=25, deadline=None, derandomize=examples < 100),
    )
