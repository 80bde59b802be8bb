"""How results, listings and progress look in a notebook: plain text everywhere, HTML where there is a browser."""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..checked import to_json
from ..errors import GpuckptError
from ..operations import results
from ..spelling import Spell, in_a_cell
from .tables import Blocks, Listing, Marked, Shown, details, one_line

_NOTICED = 0.01
"""Seconds by which one pause has to be longer than another for both to be told."""
_NAMED = 6
"""How many environment variables an account names."""


def size(count: int) -> str:
    """Return a number of bytes as people write it."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def moment(created: str) -> str:
    """Return a time of a manifest in this machine's time zone, to the second."""
    return datetime.datetime.fromisoformat(created).astimezone().isoformat(" ", "seconds")[:19]


def duration(seconds: float) -> str:
    """Return a duration as people write it."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min {seconds % 60:.0f} s"


def remaining(seconds: float) -> str:
    """Return how long something may still take: roughly, since it is an estimate."""
    if seconds < 3:
        return "a moment left"
    for unit, length, upto, step in (("s", 1, 20, 1), ("s", 1, 90, 5), ("min", 60, 90, 1)):
        if (count := round(seconds / length / step) * step) < upto:
            return f"about {count} {unit} left"
    return f"about {seconds / 3600:.0f} h left"


def unsaved(done: results.Unsaved) -> str:
    """Say what a kernel has done that is in no snapshot."""
    since = max(0.0, time.time() - datetime.datetime.fromisoformat(done.since).timestamp())
    cells, cell = done.cells, done.cell
    what = f"{cells} {'cell' if cells == 1 else 'cells'}" if cells else f"{duration(done.computed)} of computing"
    running = f", the running cell [{cell.number}] `{cell.begins}` among them" if cell else ""
    if cell and not cells:
        what, running = f"what the running cell [{cell.number}] `{cell.begins}` has done", ""
    return f"{what} in the last {duration(since)}{running}"


def span(seconds: float) -> str:
    """Return a time as people set it: in the largest unit that it is a whole number of."""
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= length and seconds % length == 0:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:g} s"


class Saved(Shown):
    """What a save gives: returned twice, like fork; once in the kernel that goes on, once in the restored one.

    Attributes
    ----------
    name, id, message, created : of the snapshot.
    store : the folder that it was saved to, where that was said.
    restored : False in the kernel that was saved, True in one restored from the snapshot.
    written : whether the snapshot is on the disk. The cell may have gone on before that: this changes when it is, and
        until then the name is not there, and `size` is what was taken.
    error : why it could not be written after the cell had gone on; None where nothing is known to be wrong.
    size, gpu_memory : of the snapshot, in bytes.
    seconds : how long the save took; None in a restored kernel.
    frozen_seconds : for how long the kernel was paused.
    gpu_seconds : for how long it could not use its GPUs; None without GPU state.
    """

    error: GpuckptError | None = None

    def __init__(
        self, found: results.Saved | results.Restored | results.Taken, progress: results.Progress | None = None
    ) -> None:
        """Show what a save gave; of what was only taken, with how far the writing is."""
        self.restored: bool = found.restored
        self.complete(found, progress)

    @property
    def written(self) -> bool:
        return self.progress is None

    def complete(
        self, found: results.Saved | results.Restored | results.Taken, progress: results.Progress | None = None
    ) -> None:
        """Take in what the keeper says of the save."""
        self.progress = progress
        self.name, self.id, self.message = label_of(found), found.id, found.message
        self.created, self.size, self.gpu_memory = found.created, found.size, found.gpu_memory
        self.frozen_seconds, self.seconds = found.frozen_seconds or 0.0, found.seconds
        self.gpu_seconds = found.gpu_seconds
        self.store, self._notes = found.store or "", found.notes
        self._who = "job" if found.job else "kernel"

    def fail(self, error: GpuckptError) -> None:
        """Take in that it could not be written."""
        self.error = error

    def text(self) -> str:
        if self.restored:
            return f"Back at {self.name}, saved {moment(self.created)}."
        if self.error is not None:
            return f"{self.name} was NOT saved. {self.error}"
        paused = _paused(self.frozen_seconds, self.gpu_seconds)
        if self.progress is not None:
            far = how_far(self.progress, "Writing")
            return f"{self.name} captured ({self._who} paused {paused}). {far}; not safe until written."
        gpu = f" ({size(self.gpu_memory)} of it GPU memory)" if self.gpu_memory else ""
        took = f"in {duration(self.seconds or 0)}; the {self._who} was paused for {paused}."
        where = f" to {self.store}" if self.store else ""
        lines = [f"Saved {self.name}{where}: {size(self.size)}{gpu} {took}"]
        return "\n".join([*lines, *self._notes])


def _paused(seconds: float, on_gpu: float | None) -> str:
    """Say for how long a kernel was paused, and its work on GPUs where that was longer by more than one sees."""
    longer = on_gpu is not None and on_gpu > seconds + _NOTICED
    return duration(seconds) + (f", its GPU work for {duration(on_gpu)}" if on_gpu is not None and longer else "")


def not_executed_again(cells: int) -> list[str]:
    """Say how many cells waited behind a save and are not executed by the kernel that was restored."""
    if not cells:
        return []
    return [
        f"{'1 cell' if cells == 1 else f'{cells} cells'} that waited behind the save "
        f"{'was' if cells == 1 else 'were'} not executed again."
    ]


def brought_up_to_date(names: Sequence[str]) -> list[str]:
    """Say which environment variables are others in a restored kernel than they were; never what they are."""
    if not names:
        return []
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return [f"Environment variables were brought up to date: {', '.join(names[:_NAMED])}{more}."]


class Restored(Shown):
    """The account of a restore, shown in the cell that asked for it."""

    def __init__(
        self, result: results.Restored, asked_at: float, faults: Sequence[str], spell: Spell = in_a_cell
    ) -> None:
        self.name, self._created, self._message = label_of(result), result.created, result.message
        # The clock of the day: a restored process's monotonic clock goes on from the save.
        self._seconds = max(0.0, time.time() - asked_at)
        self._notes = [*result.warnings, *faults]
        self._answered, self._given_up, self._kept = result.answered, result.given_up, result.kept
        self._spell = spell
        self._follows = result.gpu_memory if result.lazy and self._answered is None else 0

    def text(self) -> str:
        message = f" ({one_line(self._message)})" if self._message else ""
        text = f"Restored {self.name}{message}, saved {moment(self._created)}, in {duration(self._seconds)}"
        if self._answered is not None:
            text += f"; it answered after {duration(self._answered)}"
        text += "."
        if self._follows:
            text += f" {size(self._follows)} of GPU memory are still loading; what needs them waits."
        before = [f"Discarded, and in no snapshot: {unsaved(self._given_up)}."] if self._given_up else []
        if self._kept:
            before = [self._spell(f"What it was before is kept as {self._kept}: `gpuckpt restore @ {self._kept}`.")]
        return "\n".join([text, *before, *self._notes])


class Forked(Shown):
    """What a fork gives: returned in the kernel that runs on, and in each copy.

    Attributes
    ----------
    copy : the number of this copy, from 0; None in the kernel that was forked.
    restored : False in the kernel that was forked; True in a copy, and in one restored from what the fork saved.
    kernels : an object for each copy: ``id``, ``connection_file``, ``ports`` and more; empty where restored.
    warnings : what kernel and copies share.
    seconds : how long the fork took; None where restored.
    frozen_seconds : for how long the kernel was paused; None for a fork from a snapshot.
    gpu_seconds : for how long it could not use its GPUs; None without GPU state, or for a fork from a snapshot.
    """

    def __init__(self, result: results.Forked | results.Restored) -> None:
        self.warnings, self.seconds = list(result.warnings), result.seconds
        self.frozen_seconds, self.gpu_seconds = result.frozen_seconds, result.gpu_seconds
        self.kernels: list[dict[str, Any]] = []
        self._copies: Sequence[results.NewCopy] = ()
        self.copy: int | None = None
        self._name = self._own_id = ""
        self.restored: bool = result.restored
        if not result.restored:
            self.kernels, self._copies = to_json(result.kernels), result.kernels
            return
        self._name = label_of(result)
        if result.copy is not None:
            self.copy, self._own_id = result.copy.index, result.copy.kernel_id

    def text(self) -> str:
        if self.copy is not None:
            return f"This is copy {self.copy}, kernel {self._own_id}."
        if self.restored:
            return f"Back at {self._name}."
        many = f"{len(self._copies)} copies" if len(self._copies) > 1 else "one copy"
        seconds = self.frozen_seconds
        paused = f"; the kernel was paused for {_paused(seconds, self.gpu_seconds)}" if seconds else ""
        lines = [f"Forked: {many}, in {duration(self.seconds or 0)}{paused}."]
        for copy in self._copies:
            lines += fork_lines(copy)
        return "\n".join(lines + self.warnings)


def fork_lines(kernel: results.NewCopy) -> list[str]:
    """Return what there is to say of one copy: how to open it, and what is another there."""
    how = f"jupyter console --existing {kernel.connection_file.rpartition('/')[2]}"
    held = "; a Jupyter server holds it: choose it as a notebook's kernel" if kernel.held else ""
    return [
        f"Copy {kernel.index} is kernel {kernel.id}{held}. In a terminal: {how}",
        *(f"  Port {port} is port {new} there." for port, new in kernel.ports.items()),
        *(f"  {note}" for note in kernel.notes),
    ]


class Moved(Shown):
    """What a move gives: which GPU is which now."""

    def __init__(self, result: results.Moved) -> None:
        self.moves, self.seconds = result.moves, result.seconds

    def text(self) -> str:
        return "\n".join([f"Moved in {duration(self.seconds)}.", *self.moves])


class Asleep(Shown):
    """What putting a kernel to sleep gives."""

    def __init__(self, result: results.Slept) -> None:
        self.already, self.freed, self.seconds = result.already, result.freed, result.seconds

    def text(self) -> str:
        what = f"{size(self.freed)} of GPU memory freed" if self.freed else "it had no GPU memory to free"
        if self.already:
            return f"Already asleep: {what}."
        return f"Asleep in {duration(self.seconds)}: {what}. A cell that is run wakes the kernel."


class Hibernated(Shown):
    """What hibernating a kernel gives; to itself it is told when it is awake again."""

    def __init__(self, result: results.Hibernated | results.WokenLater) -> None:
        self._result = result

    def text(self) -> str:
        result = self._result
        if result.woken:
            return "Hibernated, and awake again."
        took = f" in {duration(result.seconds)}" if result.seconds else " already"
        back = f"`restore {result.job}` brings the job back." if result.job else "A cell that is run wakes the kernel."
        return f"Hibernated{took} as {label_of(result)}: {size(result.size)}. {back}"


class Awake(Shown):
    """What waking a kernel gives."""

    def __init__(self, result: results.Woken) -> None:
        self.already, self.back, self.seconds = result.already, result.back, result.seconds

    def text(self) -> str:
        if self.already:
            return "Already awake."
        back = f": {size(self.back)} are back on the GPU" if self.back else ""
        return f"Woke in {duration(self.seconds)}{back}."


RESULTS: Mapping[str, type[Forked | Moved | Asleep | Awake]] = {
    "fork": Forked,
    "move": Moved,
    "sleep": Asleep,
    "wake": Awake,
}
"""What shows the result of an operation, where all that it takes is the result."""


def auto_sleep(after: float | None) -> str:
    """Say after what time, in seconds, a kernel goes to sleep by itself now."""
    return f"It goes to sleep when idle for {span(after)}." if after else "It does not go to sleep by itself."


def auto_saving(how: results.AutoSaving) -> str:
    """Say whether a kernel is saved by itself, and by what rule."""
    if how.after is None:
        return "It is not saved by itself."
    failed = f"\nThe last time it was not: {how.failed}" if how.failed else ""
    return f"It is saved {_rule(how)}.{failed}"


def _in_status(how: results.AutoSaving) -> str:
    return f"{_rule(how)}; the last time it was not (`auto` says why)" if how.failed else _rule(how)


def _rule(how: results.AutoSaving) -> str:
    """Say when a kernel is saved by itself, and how much of that is kept."""
    when = f"after each cell that ran for {span(how.after or 0)} or longer" if how.after else "after each cell"
    if how.every is not None:
        also = ", also in the middle of a cell" if how.has_cells else ""
        when = f"every {span(how.every)} in which it does something{also}"
    kept = "the newest one is kept" if how.keep == 1 else f"the newest {how.keep} are kept"
    room = "" if how.under is None else f", and fewer where the store takes more than {size(how.under)}"
    return f"{when}; {kept}{room}"


_ROWS = 30
"""How many rows of each kind a comparison shows; `--json` has all."""
_NAMES = 20
"""How many names a line of it has."""
_TELLING = 1000
"""From how many bytes on the size of a variable is said."""


def comparison(found: results.Comparison) -> Blocks:
    """Return what changed from one snapshot to another, as the keeper gives it."""
    old, new = found.old, found.new
    rows = [[v.name, v.how, *_both(v.old, v.new)] for v in found.variables]
    files = [[file.path, file.how] for file in (*found.used_files, *found.kept_files)]
    parts = [] if found.unchanged is not None else _parts(found.files)  # nothing else is known of what is in it
    return Blocks(
        [
            f"{_about_variables(found)}\n{_about_memory(found)}",
            _longest(["variable", "change", old, new], rows),
            _longest(["file", "change"], files),
            _longest(["part of the snapshot", "change", old, new], parts),
        ]
    )


def _about_variables(found: results.Comparison) -> str:
    """Say how many variables changed, and which of the others may have."""
    if found.unchanged is None:
        return "Nothing is known of variables: one of the two is not of a Python kernel with our agent."
    hows = [row.how for row in found.variables]
    new, deleted = hows.count("new"), hows.count("deleted")
    counts = {"changed": len(hows) - new - deleted, "new": new, "deleted": deleted, "unchanged": found.unchanged}
    told = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    lines = [f"Variables: {told or 'none changed'}."]
    if names := found.not_compared:
        more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
        why = "" if found.same_origin else ", as the snapshots are of different kernels"
        lines.append(f"May have changed: {', '.join(names[:_NAMES])}{more} (only types and sizes are known{why}).")
    return "\n".join(lines)


def _about_memory(found: results.Comparison) -> str:
    """Say in a line by how much the snapshots differ."""
    if not found.changed:
        return f"{found.old} and {found.new} hold the same."
    amounts = [
        f"{size(changed)} of {what}"
        for what, rows in (("memory", found.memory), ("GPU memory", found.gpu_memory))
        if (changed := sum(row.changed for row in rows))
    ]
    of_it = f" ({', '.join(amounts)})" if amounts else ""
    return f"{found.new} differs from {found.old} by {size(found.changed)}{of_it}."


def _longest(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Listing | str:
    more = [f"... and {len(rows) - _ROWS} more (--json has all)"] if len(rows) > _ROWS else []
    return Listing(head, rows[:_ROWS], "", more, elastic=head[1:]) if rows else ""


def _both(old: results.Variable | None, new: results.Variable | None) -> tuple[str, str]:
    """Return what is known of a variable in both, with the modules of its types where these have the same name."""
    types = [about.type for about in (old, new) if about]
    full = len(set(types)) > len({kind.rpartition(".")[2] for kind in types})
    return _variable(old, full=full), _variable(new, full=full)


def _variable(about: results.Variable | None, *, full: bool) -> str:
    if about is None:
        return ""
    kind = about.type if full else about.type.rpartition(".")[2]
    shape = f"({', '.join(map(str, about.shape))})" if about.shape is not None else ""
    length = f"of length {about.length}" if about.length is not None else ""
    arrays = "" if about.arrays is None else f"with {about.arrays} {'array' if about.arrays == 1 else 'arrays'}"
    words = [kind, shape, about.dtype, about.device, length, arrays]
    bytes_ = max(about.size or 0, about.holds or 0)
    large = size(bytes_) if bytes_ >= _TELLING else ""
    return ", ".join(filter(None, [" ".join(filter(None, words)), large]))


def _parts(parts: Sequence[results.PartChange]) -> list[list[str]]:
    rows = []
    for part in parts:
        if not part.changed and part.old == part.new:
            continue
        how = "deleted" if part.new is None else f"{size(part.changed)} changed"
        if part.old is None:
            how = "new"
        rows.append([part.path, how, size(part.old or 0), size(part.new or 0)])
    return rows


def label_of(snapshot: results.Summary | results.Taken) -> str:
    """Return what people call a snapshot; a keeper of an older version knows no more than its name."""
    return snapshot.label or snapshot.name


def snapshots(found: results.Snapshots, here: Mapping[str, Sequence[str]], spell: Spell) -> Listing:
    """Return the listing of snapshots, as the keeper gives it, with commands spelled as where it is shown.

    `here` has the names of the kernels that are based on a snapshot, by its id.
    """
    rows = [
        [
            label_of(s),
            moment(s.created),
            size(s.size),
            size(s.stored),
            size(s.gpu_memory) if s.gpu_memory else "",
            _marks(s, here),
            f"job {s.job}" if s.job else s.notebook.rpartition("/")[2],
            s.message,
        ]
        for s in found.snapshots
    ]
    faults = [str(fault["what"]) for fault in found.faults]
    if found.writing:
        faults.append(f"{found.writing} is being written.")
    head = ["name", "saved", "size", "added", "GPU memory", "tags", "notebook", "note"]
    empty = spell("No snapshots yet. Save one: `gpuckpt save @ NAME`")
    elastic = ("tags", "notebook", "note")
    return Listing(head, rows, empty, faults, elastic=elastic, spare=_SPARE)


_SPARE = ("added", "GPU memory", "size", "notebook", "note", "saved")
"""What a narrow terminal has no room for, the first first."""


def _marks(snapshot: results.Labelled, here: Mapping[str, Sequence[str]]) -> str:
    """Return what is said of a snapshot beside what it is: who is based on it, whether it is pinned, its tags."""
    labels = [*["pinned"] * snapshot.pinned, *snapshot.tags]
    if snapshot.id not in here:
        return " ".join(labels)
    return Marked(" ".join([here_text(snapshot, here[snapshot.id]), *labels]), "here")


def here_text(snapshot: results.Summary, kernels: Sequence[str]) -> Marked:
    """Say that kernels are based on a snapshot: those of these names, or its notebook's or job's own."""
    own = f"job {snapshot.job}" if snapshot.job else snapshot.notebook.rpartition("/")[2]
    others = set(kernels) - {own}
    return Marked(f"here: {', '.join(kernels)}" if others else "here", "here")


def snapshot(found: results.Details) -> Listing:
    """Return all about one snapshot, as the keeper gives it."""
    gpus = ", ".join(gpu["name"] for gpu in found.cuda.get("gpus", []))
    files = found.process.get("files")
    own = f"{files['count']} (Python and its packages among them), {size(files['bytes'])}" if files else ""
    return details(
        [
            ("name", label_of(found)),
            ("note", found.message),
            ("saved", moment(found.created)),
            ("size", size(found.size)),
            ("added to the store", f"{size(found.stored)} (what no earlier snapshot had, compressed)"),
            ("GPU memory", size(found.gpu_memory) if found.gpu_memory else ""),
            ("own files", own),
            ("notebook", found.notebook),
            ("job", found.job),
            ("kernel", "" if found.job else found.kernel_id),
            ("processes", str(len(found.process.get("processes", ())) or "")),
            ("paused for", "" if found.frozen_seconds is None else _paused(found.frozen_seconds, found.gpu_seconds)),
            ("GPUs", gpus),
            ("driver", str(found.cuda.get("driver") or "")),
            ("CRIU", str(found.machine.get("criu") or "")),
            ("id", found.id),
        ]
    )


_SHORT = 8
"""How much of a kernel's id is enough to name it, for people."""


def based_on(kernel: results.KernelStatus) -> str:
    """Say which snapshot a kernel last came from or went to, or else which kernel it is a copy of; empty where none."""
    if kernel.parent is not None:
        return kernel.parent.name
    return f"fork of {kernel.copy_of[:_SHORT]}" if kernel.copy_of else ""


def status(kernel: results.KernelStatus, generation: str, notes: Iterable[str]) -> Listing:
    """Return all about a kernel, or a job, as its keeper gives it; `generation` is empty where it is not known."""
    gpu, job = kernel.gpu, kernel.job
    asleep = [("freed on GPUs", size(gpu.freed)), ("in host memory for it", size(gpu.host_memory))]
    return details(
        [
            ("job", job) if job else ("kernel", kernel.kernel_id),
            ("notebook", kernel.notebook),
            ("state", kernel.state),
            ("based on", based_on(kernel) or f"nothing: a fresh {'job' if job else 'kernel'}"),
            *([("resumed from", resumed_from(kernel.resumed))] if kernel.resumed is not None else ()),
            ("pid", str(kernel.pid)),
            *([("saved by itself", _in_status(kernel.auto))] if kernel.auto and kernel.auto.after is not None else ()),
            ("processes", str(len(kernel.pids))),
            ("memory", size(kernel.memory)),
            *(asleep if gpu.freed else ()),
            ("generation", generation),
        ],
        [*notes],
    )


def resumed_from(origin: results.ResumedFrom) -> str:
    """Say where a kernel comes from that was hibernated."""
    where = f" on {origin.host}" if origin.host else ""
    return f"{origin.name}, saved {moment(origin.saved)}{where}; resumed {moment(origin.at)}"


def still_running(kernel: results.KernelStatus) -> str:
    """Say that another kernel of the notebook outlived its server, and how to go on with it."""
    since, memory = moment(kernel.started), size(kernel.memory)
    return "\n".join(
        [
            f"Another kernel of this notebook is still running, since {since} ({memory}): it outlived its server.",
            "To reconnect, reopen the notebook in JupyterLab, which offers it; or continue in a terminal:",
            f"    jupyter console --existing {kernel.connection_file}",
            f"To end it, in a terminal: jupyter gpuckpt stop {kernel.kernel_id}",
        ]
    )


def progress_text(verb: str, progress: results.Progress) -> str:
    """Return one line that says how far an operation is."""
    return f"{verb}: {'cancelling…' if progress.cancelling else how_far(progress, progress.stage)}"


def how_far(progress: results.Progress, stage: str) -> str:
    """Return how far an operation is: how much of its `stage` is done, and how long it will or did take."""
    words = [stage] if stage else []
    if progress.total:
        words.append(f"{100 * progress.done // progress.total} % of {size(progress.total)}")
    parts = [" ".join(words)]
    if progress.rate and progress.left is not None:
        parts += [f"{size(int(progress.rate))}/s", remaining(progress.left)]
        return ", ".join(parts)
    return parts[0] + (f" ({duration(progress.seconds)})" if progress.seconds is not None else "")


def error_content(error: GpuckptError) -> dict[str, Any]:
    """Return an error as the Jupyter protocol describes one."""
    return {
        "ename": type(error).__name__,
        "evalue": error.what,
        "traceback": str(error).splitlines(),
    }
