"""A kernel that is saved by itself after its cells, and put back and forward among these snapshots."""

from __future__ import annotations

import contextlib
import inspect
import os
import shutil
import signal
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from keeper_faults import Asked, Criu, small_disk
from notebooks import PATIENCE, Notebook, StartKernel, start_kernel, wait_until

from jupyter_gpuckpt.operations.results import Labelled, Progress
from jupyter_gpuckpt.store import Store

pytestmark = [pytest.mark.criu, pytest.mark.shared_kernel]


def snapshots(notebook: Notebook) -> Sequence[Labelled]:
    with notebook.keeper as keeper:
        return [Labelled(**one) for one in keeper.request("list")["snapshots"]]


def names(notebook: Notebook) -> list[str]:
    """Return the names of the automatic snapshots, oldest first."""
    return [one.label for one in reversed(snapshots(notebook)) if one.automatic]


def run_saved(notebook: Notebook, cell: str) -> None:
    """Run a cell, and wait until it was followed by a save."""
    before = {one.id for one in snapshots(notebook)}
    notebook.run(cell)
    wait_until(lambda: {one.id for one in snapshots(notebook)} - before)
    wait_for_idle_keeper(notebook)  # it has noted what it saved


def wait_for_idle_keeper(notebook: Notebook) -> None:
    with notebook.keeper as keeper:
        wait_until(lambda: not keeper.request("status")["stage"])


_LENGTH = int(os.environ.get("WALK_STEPS", "8"))
"""How many steps a walk has; more of them take a few seconds each."""
_FAULTS = [
    "the disk is full",
    "the snapshot is damaged",
    "undo while a cell asks",
    "the keeper is killed",
    "undo in the middle of a cell",
]
_STEPS = st.lists(
    st.sampled_from(["cell", "cell", "cell that is not saved", "undo", "undo 2", "redo", "redo 2", *_FAULTS]),
    min_size=_LENGTH,
    max_size=_LENGTH,
)
_BEGIN = """
import random, threading
x, trail, ticks, stop = 0, [], 0, threading.Event()
def tick():
    global ticks
    while not stop.wait(0.02): ticks += 1
ticker = threading.Thread(target=tick, daemon=True)
ticker.start()
"""
_ON = "%gpuckpt auto on --keep 1000"
_STATE = "repr((x, trail, random.getstate()[2], hash(random.getstate()), ticker.is_alive()))"
_ENDLESS = {"undo while a cell asks": "input('more? ')", "undo in the middle of a cell": "print('in it'); stop.wait()"}


class Walk:
    """A notebook that is saved after its cells, and where it has to be after what was done.

    Where it is not to be saved, `auto on` comes with the next cell: by itself, it has saved what is not saved yet.
    """

    def __init__(self, notebook: Notebook, store: Path) -> None:
        self.notebook, self.store = notebook, store
        self.here = self.latest = 0
        self.is_saved = True
        self.undone: list[int] = []
        self.parents: dict[int, int] = {}
        self.ids: dict[int, str] = {}
        """The snapshot of each state that it was in."""
        self.amid: set[int] = set()
        """The states of the middle of a cell."""

    def run(self, step: str) -> None:
        """Take a step."""
        match step:
            case "the keeper is killed":
                self.notebook.kill_keeper()
            case "redo" | "redo 2":
                self._redo(f"%gpuckpt {step}", int(step[4:] or "1"))
            case "undo" | "undo 2":
                self._undo(f"%gpuckpt {step}", int(step[4:] or "1"))
            case "the snapshot is damaged":
                self._damage()
            case "cell":
                run_saved(self.notebook, f"{_ON}\n{self._cell()}")
                self.is_saved, self.undone = True, []
            case "cell that is not saved":
                self.notebook.run("%gpuckpt auto off")
                self.notebook.run(self._cell())
            case "the disk is full":
                self._fill_disk()
            case _:
                self._undo_while_it_runs(f"{self._cell()}; {_ENDLESS[step]}")

    def _cell(self) -> str:
        """Return the next cell. Those that were not saved are one step with the next that is."""
        self.parents[self.latest + 1] = self.here if self.is_saved else self.parents[self.here]
        self.latest = self.here = self.latest + 1
        self.is_saved = False
        return f"x = {self.here}; trail.append(x); random.random()"

    def _redo(self, line: str, steps: int) -> None:
        if steps > len(self.undone):
            self.notebook.fails(line)
            return
        target, undone = self.undone[-steps], self.undone[:-steps] if self.is_saved else []
        self._go(line, target)
        self.here, self.is_saved, self.undone = target, True, undone

    def _undo(self, line: str, steps: int) -> None:
        target = self.here
        for _ in range(steps):
            target = self.parents.get(target, -1)
        if target < 0:
            self.notebook.fails(line)
        else:
            self._go(line, target)
            self._has_undone(target)

    def _go(self, line: str, target: int) -> None:
        """Go to a state; a cell that ran in it stops there."""
        text = self.notebook.run(line).text
        assert ("Stopped here" in text) == (target in self.amid), text

    def _has_undone(self, target: int) -> None:
        self.undone = [*(self.undone if self.is_saved else []), self.here]
        self.here, self.is_saved = target, True

    def _damage(self) -> None:
        """What an undo would lead to is damaged: it is refused. Then the disk is put in order."""
        packs = sorted(self.store.glob(f"packs/{self.ids.get(self.parents.get(self.here, -1))}-*"))
        if not packs:
            return
        parent, whole = self._parent(), [pack.read_bytes() for pack in packs]
        for pack in packs:
            pack.write_bytes(bytes(pack.stat().st_size))
        assert self.notebook.fails("%gpuckpt undo").ename == "Damaged"
        for pack, content in zip(packs, whole, strict=True):
            pack.write_bytes(content)
        if self._parent() != parent:  # what it is now was kept first: not all damage is seen before
            self.is_saved, self.undone = True, []

    def _fill_disk(self) -> None:
        """A cell is not saved for lack of room, nor undone, since it could not be kept; then there is room again."""
        ballast = self.store.parent / "ballast"
        with ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(self.store).free)
        self.notebook.run(f"{_ON}\n{self._cell()}")  # which forgets what went wrong before
        with self.notebook.keeper as keeper:
            wait_until(lambda: keeper.request("auto")["failed"])
        self.notebook.run("%gpuckpt auto off")
        wait_for_idle_keeper(self.notebook)  # it may have tried once more
        assert "could not be saved first" in self.notebook.fails("%gpuckpt undo").text
        ballast.unlink()

    def _undo_while_it_runs(self, cell: str) -> None:
        """Undo a cell that would never end, as the button in JupyterLab does."""
        asked = Asked(self.notebook, cell)
        if "input(" in cell:
            self.notebook.client.get_stdin_msg(timeout=PATIENCE)
        else:
            self.notebook.until_printed("in it")
        with self.notebook.keeper as keeper:
            keeper.request("undo", {}, timeout=PATIENCE)
        target = self.parents[self.here]
        assert asked.answer()["status"] == "error", "it did not ask, and what waits behind it is not run"
        self.amid.add(self.here)
        self._has_undone(target)

    def _parent(self) -> str:
        with self.notebook.keeper as keeper:
            return str(keeper.request("status")["parent"]["id"])

    def look(self) -> str:
        """Return the state of the kernel, whose thread goes on; note the snapshot that it came from or went to."""
        if self.is_saved:
            self.ids[self.here] = self._parent()
        before = int(self.notebook.look("ticks"))
        wait_until(lambda: int(self.notebook.look("ticks")) > before, what="its thread stands still")
        return self.notebook.look(_STATE)


by_root = pytest.mark.skipif(os.geteuid() != 0, reason="asking for another process's memory takes root")


def huge(process: str = "self") -> int:
    """Return how much of its memory a process has in huge pages, in MiB."""
    return int(Path(f"/proc/{process}/smaps_rollup").read_text().partition("AnonHugePages:")[2].split()[0]) >> 10


_HUGE = f"from pathlib import Path\n{inspect.getsource(huge)}"


@by_root
def test_memory_is_put_into_huge_pages_before_it_is_saved(start: StartKernel) -> None:
    """Then the kernel is not paused for longer the more it has in memory."""
    notebook = start()
    notebook.run("import hashlib, os; blocks = [os.urandom(1 << 20) for _ in range(150)]")
    notebook.run("def digest(): return hashlib.blake2b(b''.join(blocks)).hexdigest()")
    notebook.run(_HUGE)
    before = int(notebook.value("huge()"))
    notebook.run("%gpuckpt auto on")

    def is_in_huge_pages() -> bool:
        run_saved(notebook, "x = 1")
        return int(notebook.value("huge()")) > before + 64

    wait_until(is_in_huge_pages)  # on a busy machine, half a second before a save is enough for a part only
    run_saved(notebook, "was = digest()")
    run_saved(notebook, "blocks = None")
    notebook.run("%gpuckpt undo")
    assert notebook.value("digest() == was") == "True"


@by_root
def test_a_cell_that_comes_meanwhile_runs_beside_none_of_that(start: StartKernel) -> None:
    notebook = start()
    notebook.run(f"{_HUGE}\nimport time\nblocks = [b'x' * (1 << 20) for _ in range(600)]")
    before = int(notebook.value("huge()"))
    with notebook.keeper as keeper:
        kernel = str(keeper.request("status")["pid"])
    notebook.run("%gpuckpt auto on")
    wait_until(lambda: huge(kernel) > before)
    notebook.run("began = huge(); time.sleep(1); ended = huge()")
    assert int(notebook.value("ended - began")) < 64


def test_the_first_cell_is_undone_too(start: StartKernel) -> None:
    notebook = start()
    run_saved(notebook, "%gpuckpt auto on")
    run_saved(notebook, "x = 1")
    assert "Restored auto-0 (before the first cell)" in notebook.run("%gpuckpt undo").text
    assert notebook.fails("x").ename == "NameError"
    notebook.run("%gpuckpt redo")
    assert notebook.value("x") == "1"


def test_what_cells_did_before_it_is_switched_on_from_outside_is_saved_at_once(start: StartKernel) -> None:
    notebook = start()
    notebook.run("x = 1")
    with notebook.keeper as keeper:
        keeper.request("auto", {"switch": "on", "after": 100.0})
    wait_until(lambda: snapshots(notebook))
    wait_for_idle_keeper(notebook)
    notebook.run("x = 2")  # which is too short to be followed by a save
    notebook.run("%gpuckpt undo")
    assert notebook.value("x") == "1"


@pytest.mark.parametrize("in_a_cell", [False, True])
def test_an_undo_passes_over_the_automatic_snapshot_of_the_same_state(notebook: Notebook, *, in_a_cell: bool) -> None:
    """Somebody has saved the kernel after it had been saved by itself: no cell lies between the two."""
    for x in (1, 2, 3):
        run_saved(notebook, f"%gpuckpt auto on\nx = {x}")
    if in_a_cell:
        notebook.run("%gpuckpt save mine")
    else:
        with notebook.keeper as keeper:
            keeper.request("save", {"name": "mine"})
    notebook.run("%gpuckpt undo")
    assert notebook.look("x") == "2"
    notebook.run("%gpuckpt redo")
    assert notebook.look("x") == "3"
    notebook.run("%gpuckpt undo 2")
    assert notebook.look("x") == "1"
    notebook.run("%gpuckpt auto off")


def test_an_undo_says_where_it_takes_back_more_than_was_asked_for(notebook: Notebook) -> None:
    notebook.run("x = 1")
    notebook.run("%gpuckpt save here")
    notebook.run("x = 2")
    assert "This undid" not in notebook.run("%gpuckpt undo").text
    notebook.run("x = 2")
    notebook.run("x = 3")
    notebook.run("x = 4")
    assert "This undid 3 cells; no state between them was saved." in notebook.run("%gpuckpt undo").text
    assert notebook.value("x") == "1"
    assert "This undid" not in notebook.run("%gpuckpt redo").text
    assert notebook.value("x") == "4"


@pytest.mark.shared_kernel(False)
@settings(max_examples=1, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=_STEPS)
@example(steps=[*_FAULTS, "redo", "cell", "undo 2", "redo", "undo", "undo", "redo 2"])
def test_every_state_of_a_walk_back_and_forth_is_the_right_one(
    steps: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = tmp_path / uuid.uuid4().hex
    with small_disk(disk, 400):
        monkeypatch.setenv("GPUCKPT_STORE", str(disk / "store"))
        notebook = start_kernel()
        try:
            notebook.run(_ON)
            run_saved(notebook, _BEGIN)
            walk = Walk(notebook, disk / "store")
            seen: dict[int, str] = {}
            for step in ["", "cell", *steps]:
                if step:
                    walk.run(step)
                state = walk.look()
                assert state.startswith(f"'({walk.here}, "), f"after {step}"
                assert state == seen.setdefault(walk.here, state), f"after {step}"
        finally:
            notebook.close()


def test_what_is_saved_by_itself_goes_by_a_rule_and_what_was_named_stays(notebook: Notebook) -> None:
    assert "not saved by itself" in notebook.run("%gpuckpt auto").text
    none = notebook.fails("%gpuckpt undo").text
    assert "There is no snapshot before what the kernel is now." in none
    assert "`%gpuckpt auto on` saves it after each cell from now on." in none
    notebook.run("%gpuckpt save mine")
    assert "the newest 2 are kept" in notebook.run("%gpuckpt auto on --keep 2").text
    run_saved(notebook, "x = 1")
    (first,) = names(notebook)
    no_rule = notebook.fails(f"%gpuckpt keep {first} as auto-mine").text
    assert "Names that begin with auto- are those of snapshots that go by themselves." in no_rule
    assert "Type it like this: `%gpuckpt keep auto-12 as before_merge`." in no_rule
    renamed = notebook.run(f"%gpuckpt keep {first.replace('-', '/', 1)} as before_it").text
    assert renamed.endswith(" is now before_it.")
    for x in range(2, 5):
        run_saved(notebook, f"x = {x}")
    wait_until(lambda: len(names(notebook)) == 2)
    assert "after each cell; the newest 2 are kept" in notebook.run("%gpuckpt status").text
    none = notebook.fails("%gpuckpt undo 9").text
    assert "There is only 1 snapshot before what the kernel is now." in none
    assert "auto on" not in none
    assert [one.message for one in snapshots(notebook) if one.automatic] == ["x = 4", "x = 3"]
    assert "before_it" in (listed := notebook.run("%gpuckpt list").text)
    assert "mine" in listed
    assert "auto-" not in listed
    assert "auto-" in notebook.run("%gpuckpt list --auto").text
    notebook.run("%gpuckpt keep --last 1")
    assert len(names(notebook)) == 2
    notebook.run("%gpuckpt restore")  # the latest that somebody saved
    assert notebook.look("x") == "1"
    notebook.run("%gpuckpt auto off")
    notebook.run("x = 5")
    assert "not saved by itself" in notebook.run("%gpuckpt auto").text
    assert len(names(notebook)) == 2


def test_what_removed_snapshots_leave_behind_does_not_fill_the_store(notebook: Notebook) -> None:
    """Each save has much that the next does not need, and a little that all later ones do."""
    notebook.run("import random; kept = []")
    notebook.run("%gpuckpt auto on --keep 2")
    store = Store(Path(os.environ["GPUCKPT_STORE"]))
    most = 0
    for _ in range(12):  # with no pause: there always is another save to come
        run_saved(notebook, "kept.append(random.randbytes(100_000)); passing = random.randbytes(12_000_000)")
        most = max(most, store.used())
    # What is needed is about 90 MB; when 64 more have come, it is written again, and lies there twice for a moment.
    assert most < 330_000_000
    state = notebook.look("hash(tuple(kept)), hash(passing)")
    notebook.run("kept, passing = [], b''")
    notebook.run("%gpuckpt undo")
    assert notebook.look("hash(tuple(kept)), hash(passing)") == state
    notebook.run("%gpuckpt auto off")


def test_the_cell_after_an_undo_is_never_interrupted(notebook: Notebook) -> None:
    """It may run before all of the undo is done, and is not the one that was saved."""
    notebook.run(
        "import time\n"
        "from jupyter_gpuckpt.kernel.reconnection import Reconnection\n"
        "def answer(self, *args, **kwargs):\n"
        "    begun, end = self._agent.cells.begun, time.monotonic() + 60\n"
        "    answer.was(self, *args, **kwargs)\n"
        "    while self._agent.cells.begun == begun and time.monotonic() < end:\n"
        "        time.sleep(0.01)\n"
        "answer.was, Reconnection._answer_restored = Reconnection._answer_restored, answer"
    )
    notebook.run("%gpuckpt auto on")
    run_saved(notebook, "x = 1")
    run_saved(notebook, "x = 2")
    notebook.run("%gpuckpt undo")
    assert notebook.run("for _ in range(100): time.sleep(0.01)\nx += 10").text == ""
    assert notebook.look("x") == "11"
    notebook.run("%gpuckpt undo")
    assert notebook.look("x") == "1"
    notebook.run("Reconnection._answer_restored = answer.was")
    notebook.run("%gpuckpt auto off")


def test_only_cells_that_ran_for_long_are_followed_by_a_save(notebook: Notebook) -> None:
    notebook.run("import time; x = 0")
    notebook.run("%gpuckpt auto on --after 0.5s")
    notebook.run("x = 1")
    notebook.client.execute("x = 2; time.sleep(0.6)")
    notebook.run("x = 3")  # at once: it is saved with the one before, however short it is
    wait_until(lambda: any(one.message[:5] in ("x = 2", "x = 3") for one in snapshots(notebook)))
    for name in names(notebook):
        with notebook.keeper as keeper:
            after = keeper.request("show", {"name": name})["kernel"]["after"]
        assert after["begins"] == "x = 3" or after["seconds"] >= 0.5
    notebook.run("%gpuckpt auto off")


def test_a_kernel_is_saved_every_so_often_also_in_the_middle_of_a_cell(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run("import time; from pathlib import Path; steps = 0")
    assert "every 1 s in which it does something" in notebook.run("%gpuckpt auto on --every 1s").text
    go_on = tmp_path / "go_on"
    asked = Asked(notebook, f"while not Path({str(go_on)!r}).exists(): steps += 1; time.sleep(0.01)")
    in_it = "in the middle of: while not Path("
    name = wait_until(lambda: next((one.label for one in snapshots(notebook) if one.message.startswith(in_it)), ""))
    with notebook.keeper as keeper:
        wait_until(lambda: keeper.request("status")["state"] == "saving")
        keeper.request("save", {"name": "mine"})  # waits for the save that nobody asked for
        keeper.request("auto", {"switch": "off"})
    go_on.touch()
    assert asked.answer()["status"] == "ok"
    notebook.run("steps = -10**9")
    notebook.run(f"%gpuckpt restore {name}")  # which has the rest of that loop run
    assert int(notebook.look("steps")) > 0


def test_what_waits_behind_a_cell_that_is_undone_from_outside_is_not_run(notebook: Notebook) -> None:
    """Also where the undo leads to the middle of another cell, here of one that asked for an undo itself."""
    run_saved(notebook, "%gpuckpt auto on\nx = 1")
    notebook.run("%gpuckpt auto off")
    notebook.run("x = 2")
    notebook.run("%gpuckpt undo")
    notebook.run("%gpuckpt redo")
    undone = Asked(notebook, "x = 3; print('in it', flush=True)\nwhile True: pass")
    notebook.until_printed("in it")
    behind = Asked(notebook, "x = 'it was run'")
    with notebook.keeper as keeper:
        keeper.request("undo", {}, timeout=PATIENCE)
    assert [undone.answer()["status"], behind.answer()["status"]] == ["error", "aborted"]
    assert notebook.look("x") == "2"


def test_what_undos_have_kept_goes_by_the_rule_too_also_when_the_keeper_has_seen_no_cell(notebook: Notebook) -> None:
    notebook.run("%gpuckpt auto on --keep 1 --after 1h")
    notebook.run("%gpuckpt save mine")
    for x in range(3):
        notebook.run(f"x = {x}")
        notebook.kill_keeper()
        notebook.run("%gpuckpt undo")
    assert "auto-" not in notebook.run("%gpuckpt list").text
    assert len(names(notebook)) == 1
    notebook.run("%gpuckpt auto off")


class StepByStep:
    """A notebook that is saved after its cells, by saves that wait for the test before the freeze and after it."""

    def __init__(self, notebook: Notebook, folder: Path) -> None:
        self.notebook, self.folder = notebook, folder
        folder.mkdir()
        for step in ("freeze", "go on"):
            (folder / step).touch()
        notebook.run("%gpuckpt auto on")
        begin = f"""
            import jupyter_gpuckpt, time
            from pathlib import Path
            folder, n = Path({str(folder)!r}), -1
            def wait_for(name):
                while not (folder / name).exists(): time.sleep(0.01)
            def until_it_is_over():
                (folder / "begun").touch()
                wait_for("over")
                (folder / "ended").touch()
            @jupyter_gpuckpt.before_save
            def begins():
                (folder / "prepared").touch()
                wait_for("freeze")
            @jupyter_gpuckpt.after_restore
            def is_over(resumed):
                (folder / "over").touch()
                if not resumed.restored: wait_for("go on")
        """
        run_saved(notebook, begin)

    @contextlib.contextmanager
    def save(self, cell: str) -> Iterator[int]:
        """Run a cell, and give its number when the save after it has begun; the freeze waits for the context's end."""
        for step in self.folder.iterdir():
            step.unlink()
        count = self.notebook.run(cell).count
        assert count is not None
        wait_until((self.folder / "prepared").exists)
        yield count
        (self.folder / "freeze").touch()

    def run_in_the_freeze(self, *, silent: bool) -> None:
        """Have the kernel execute something that ends as soon as the freeze is over."""
        self.asked = self.notebook.client.execute("until_it_is_over()", silent=silent)
        wait_until((self.folder / "begun").exists)

    def go_on(self) -> None:
        """Let the save go on when what was run in the freeze has ended."""
        while self.notebook.reply()["parent_header"]["msg_id"] != self.asked:
            pass
        self.notebook.look("n")  # what is answered has ended
        (self.folder / "go on").touch()


@pytest.mark.shared_kernel(False)
def test_an_automatic_snapshot_is_of_the_moment_after_the_cell_that_it_is_called_by(
    criu: Criu, notebook: Notebook, tmp_path: Path
) -> None:
    steps = StepByStep(notebook, tmp_path / "steps")
    with steps.save("n = 0"):
        count = notebook.run("n = 1").count  # begins and ends before the freeze of the save after the one before
    (steps.folder / "go on").touch()
    wait_until(lambda: len(snapshots(notebook)) == 2)
    (saved, first) = snapshots(notebook)
    with notebook.keeper as keeper:
        after = keeper.request("show", {"name": saved.label})["kernel"]["after"]
    assert (saved.label, saved.message, after["begins"], after["number"]) == (f"auto-{count}", "n = 1", "n = 1", count)
    with steps.save("n = 2"):
        steps.run_in_the_freeze(silent=False)
    steps.go_on()
    wait_until(lambda: len(snapshots(notebook)) == 3)
    with criu.held_at("dump", "start") as reached:
        with steps.save("n = 3"):
            pass
        reached()
        steps.run_in_the_freeze(silent=True)
    steps.go_on()
    wait_until(lambda: len(snapshots(notebook)) == 4)
    notebook.run("%gpuckpt auto off")
    (steps.folder / "ended").unlink()
    states = [("n = 3", "3"), ("until_it_is_over()", "2"), ("n = 1", "1"), (first.message, "-1")]
    for one, (message, state) in zip(snapshots(notebook), states, strict=True):
        notebook.run(f"%gpuckpt restore {one.label} --discard")
        assert (one.message, notebook.look("n")) == (message, state)
        assert not (steps.folder / "ended").exists(), f"{one.label} is of the middle of {message}"


@pytest.mark.shared_kernel(False)
def test_the_rule_outlives_the_keeper_and_a_restore(start: StartKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUCKPT_AUTO", "on")
    notebook = start()
    assert "saved after each cell" in notebook.run("%gpuckpt auto").text
    run_saved(notebook, "x = 1")
    notebook.kill_keeper()
    run_saved(notebook, "x = 2")
    notebook.run("%gpuckpt undo")
    notebook.kill_keeper()  # as soon as the cell has its answer
    assert notebook.look("x") == "1"
    notebook.run("%gpuckpt redo")
    assert notebook.look("x") == "2"
    run_saved(notebook, "x = 3")


@pytest.mark.shared_kernel(False)
@pytest.mark.parametrize(
    ("chosen", "rule"),
    [("2s", "after each cell that ran for 2 s or longer"), ("every 10m", "every 10 m")],
)
def test_the_rule_of_all_kernels_is_a_setting(
    start: StartKernel, monkeypatch: pytest.MonkeyPatch, chosen: str, rule: str
) -> None:
    monkeypatch.setenv("GPUCKPT_AUTO", chosen)
    notebook = start()
    assert rule in notebook.run("%gpuckpt auto").text
    assert "To begin anew, restart the kernel" in notebook.fails("%gpuckpt undo").text


@pytest.mark.shared_kernel(False)
def test_an_undo_waits_until_the_snapshot_before_it_is_written(slow_disk: Path, start: StartKernel) -> None:
    notebook = start()
    notebook.run("%gpuckpt auto on")
    run_saved(notebook, "x = 1")
    slow_disk.touch()
    notebook.run("x = 2")
    told: list[Progress] = []
    with notebook.keeper as keeper, notebook.keeper as other, ThreadPoolExecutor() as pool:
        wait_until(lambda: "auto-" in (other.request("list").get("writing") or ""))
        undoing = pool.submit(keeper.request, "undo", timeout=PATIENCE, progress=told.append)
        wait_until(lambda: len(told) > 1)
        slow_disk.unlink()
        undoing.result()
    first, second = told[:2]
    assert first.stage == second.stage == f"waiting until {names(notebook)[-1]} is written"
    assert second.seconds > 1, "whoever waits is told every two seconds"
    assert notebook.value("x") == "1"


@pytest.mark.shared_kernel(False)
def test_what_is_being_written_when_the_kernel_dies_can_be_restored_in_the_next(
    slow_disk: Path, start: StartKernel
) -> None:
    notebook = start()
    notebook.run("%gpuckpt auto on")
    run_saved(notebook, "x = 1")
    slow_disk.touch()
    notebook.run("x = 2")
    with notebook.keeper as keeper:
        wait_until(lambda: "auto-" in (keeper.request("list").get("writing") or ""))
        os.kill(keeper.request("status")["pid"], signal.SIGKILL)
    wait_until(lambda: not notebook.manager.is_alive())
    notebook.manager.restart_kernel(now=True)
    notebook.wait_for_ready()
    (before,) = names(notebook)
    assert "is still being written; `%gpuckpt restore auto-" in notebook.fails("%gpuckpt undo").text
    told: list[Progress] = []
    with notebook.keeper as keeper, ThreadPoolExecutor() as pool:
        restoring = pool.submit(keeper.request, "restore", timeout=PATIENCE, progress=told.append)
        wait_until(lambda: any("is saved" in one.stage for one in told))
        slow_disk.unlink()
        assert restoring.result()["name"] != before
    assert notebook.value("x") == "2"


@pytest.mark.shared_kernel(False)
def test_why_a_save_failed_is_told_once_in_a_cell_and_where_somebody_asks(
    start: StartKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUCKPT_STORE_QUOTA", "1M")
    notebook = start()
    notebook.run("%gpuckpt auto on")
    notebook.run("x = 2")
    with notebook.keeper as keeper:
        wait_until(lambda: keeper.request("auto")["failed"])
    assert "could not be stored" in notebook.run("%gpuckpt auto").text
    assert names(notebook) == []
    told = [notebook.run("x = 3").text]
    wait_until(lambda: told.append(notebook.run("x = 4").text) or any(told))  # the kernel may hear of it a moment later
    told += [notebook.run(f"x = {n}").text for n in range(3)]
    (said,) = filter(None, told)
    assert "The kernel could not be saved automatically. The snapshot auto-" in said
    assert "`%gpuckpt auto off`" in said
    assert "The last automatic save failed: " in notebook.fails("%gpuckpt undo").text
    assert "the last time it was not" in notebook.run("%gpuckpt status").text


@pytest.mark.shared_kernel(False)
def test_an_undo_to_a_damaged_snapshot_is_refused_and_the_kernel_goes_on(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run("%gpuckpt auto on")
    run_saved(notebook, "import os; x = os.urandom(10**6)")
    damaged = [path for path in (tmp_path / "store").rglob("*") if path.is_file() and path.stat().st_size > 10**5]
    run_saved(notebook, "x = 2")
    for path in damaged:
        path.write_bytes(bytes(path.stat().st_size))
    answer = notebook.fails("%gpuckpt undo")
    assert answer.ename == "Damaged"
    assert notebook.look("x") == "2"


def test_a_restore_keeps_what_was_not_saved_and_says_how_to_get_it_back(notebook: Notebook) -> None:
    notebook.run("x = 1")
    notebook.run("%gpuckpt save base")
    assert "kept" not in notebook.run("%gpuckpt restore base").text  # there was nothing to keep
    notebook.run("x = 2")
    text = notebook.run("%gpuckpt restore base\nx = 'the rest of the cell'").text
    assert notebook.look("x") == "1"
    (kept,) = names(notebook)
    assert f"What it was before is kept as {kept}: `%gpuckpt restore {kept}`." in text
    assert "Discarded" not in text
    text = notebook.run(f"%gpuckpt restore {kept}").text
    assert (f"Restored {kept}" in text, "kept" in text.partition(kept)[2]) == (True, False)
    assert notebook.look("x") == "2"  # and the rest of the cell that asked for the restore is not run
    notebook.run("x = 3")
    assert "Discarded, and in no snapshot: 1 cell " in notebook.run("%gpuckpt restore base --discard").text
    assert names(notebook) == [kept]
    notebook.run("%gpuckpt save in_a_cell\nx = 'the rest of the cell'")
    assert "Stopped here" in notebook.run("%gpuckpt undo").text
    assert notebook.look("x") == "1"


def test_what_a_cell_does_after_a_save_in_its_middle_is_saved_after_its_end(notebook: Notebook, tmp_path: Path) -> None:
    """A restore keeps it, too; but not again what a cell did that ends with a save, or stopped where it was saved."""

    def restored(name: str) -> tuple[str, bool]:
        text = notebook.run(f"%gpuckpt restore {name} --stop-here").text
        return notebook.look("x"), "What it was before is kept as" in text

    notebook.run("%gpuckpt auto on")
    notebook.run("x = 1\n%gpuckpt save one\nx = 2")
    (two,) = wait_until(lambda: names(notebook))
    wait_for_idle_keeper(notebook)
    notebook.run("%gpuckpt auto off")
    assert restored("one") == ("1", False)
    assert restored(two) == ("2", False)
    notebook.run("x = 3\n%gpuckpt save three\nx = 4")
    notebook.run("%gpuckpt undo")
    assert notebook.look("x") == "3"
    notebook.run("%gpuckpt redo")
    assert notebook.look("x") == "4"
    assert restored("one") == ("1", False)
    notebook.run("%gpuckpt restore three")  # which has the rest of the cell run
    assert notebook.look("x") == "4"
    assert restored("one") == ("1", True)
    notebook.run("x = 5\n\n%gpuckpt save five")
    assert restored("one") == ("1", False)
    assert restored("five") == ("5", False)
    go_on = tmp_path / "go_on"
    waits = f"import os, time\nwhile not os.path.exists({str(go_on)!r}): time.sleep(0.01)"
    asked = Asked(notebook, f"x = 6; print('in it', flush=True); {waits}\nx = 7")
    notebook.until_printed("in it")
    with notebook.keeper as keeper:
        keeper.request("save", {"name": "six"})
    go_on.touch()
    assert asked.answer()["status"] == "ok"
    go_on.unlink()  # so that the restored cell does not end by itself
    assert restored("six") == ("6", True)


def test_what_a_cell_did_before_it_asks_for_a_restore_is_kept(notebook: Notebook) -> None:
    notebook.run("x = 1")
    notebook.run("%gpuckpt save base")
    for cell in ("%gpuckpt restore base", "# back\n\n%gpuckpt restore base\nx = 2"):
        assert "What it was before is kept as" not in notebook.run(cell).text
        assert (names(notebook), notebook.look("x")) == ([], "1")
    text = notebook.run("x = 3\n%gpuckpt restore base").text
    (kept,) = names(notebook)
    assert f"What it was before is kept as {kept}" in text
    assert notebook.look("x") == "1"
    notebook.run("%gpuckpt redo")
    assert notebook.look("x") == "3"
    notebook.run("x = 4\n%gpuckpt undo")  # of this cell alone
    assert notebook.look("x") == "3"


def test_what_cannot_be_kept_in_a_moment_does_not_stand_in_the_way_of_a_restore(
    criu: Criu, start: StartKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUCKPT_KEEP_UNSAVED", "2s")
    notebook = start()
    notebook.run("x = 1")
    notebook.run("%gpuckpt save base")
    notebook.run("x = 2")
    criu.first("dump", "sleep 600")
    slow = notebook.run("%gpuckpt restore base").text
    assert "Discarded, and in no snapshot: 1 cell" in slow
    assert "That could not be saved first: it took longer than 2 s." in slow
    assert notebook.look("x") == "1"
    criu.first("dump", "echo 'nothing is dumped today' >&2; exit 1")
    notebook.run("x = 2")
    undone = notebook.run("%gpuckpt undo", allow_error=True).text  # which would keep it in any case
    assert "Nothing was restored: the present state of the kernel could not be saved first." in undone
    assert notebook.look("x") == "2"
    notebook.run("%gpuckpt restore base --discard")
    criu.honest()
    notebook.run("large = bytearray(b'1') * 2_100_000_000")
    assert "Discarded" in notebook.run("%gpuckpt restore base").text
    assert names(notebook) == []


def test_a_kernel_that_says_that_it_has_much_on_a_gpu_is_restored_without_its_hooks(
    start: StartKernel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GPUCKPT_KEEP_UNSAVED", "60s")  # for which it may have 60 GB
    notebook, run = start(), tmp_path / "run"
    notebook.run(
        "import sys; from pathlib import Path; from types import SimpleNamespace as Of\n"
        "import jupyter_gpuckpt\n"
        f"@jupyter_gpuckpt.before_save\ndef hook(): Path({str(run)!r}).open('a').write('.')\n"
        "used = [50_000_000_000, 0]\n"
        "of_torch = dict(is_initialized=lambda: True, device_count=lambda: 2, memory_allocated=lambda gpu: used[gpu])\n"
        "sys.modules['torch'] = Of(cuda=Of(**of_torch))"
    )
    notebook.run("%gpuckpt save base")
    notebook.run("used[1] = 11_000_000_000")
    assert "Discarded, and in no snapshot: 1 cell" in notebook.run("%gpuckpt restore base").text
    assert run.read_text() == "."
    notebook.run("used[1] = 9_000_000_000")
    notebook.run("%gpuckpt restore base")
    assert run.read_text() == ".."


def test_a_save_that_fails_does_not_stand_in_the_way_of_a_restore(criu: Criu, notebook: Notebook) -> None:
    notebook.run("x = 1")
    notebook.run("%gpuckpt save base")
    notebook.run("x = 2")
    criu.first("dump", "echo 'nothing is dumped today' >&2; exit 1")
    text = notebook.run("%gpuckpt restore base").text
    assert "That could not be saved first: criu ended with status 1" in text
    assert notebook.look("x") == "1"
    assert names(notebook) == []
