"""NCCL communicators between the processes of a tree: taken down for a save, and made again after it.

The driver cannot restore processes that have one between them. The library in front of NCCL (`kernel/nccl/`) stops
their operations, says how far each process has got, and does what it is told here. Each process listens at a FIFO in
the run folder, named by its pid, from its first communicator on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import select
import time
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import DriverError, Refused
from ..linux.readiness import readable

__all__ = ["Communicators"]

log = logging.getLogger("gpuckpt.keeper")

_FIFO = re.compile(r"nccl-(\d+)$")
_ID = re.compile(r"id ([0-9a-f]{16}) [0-9a-f]{256}$")
_LONGEST = 1 << 20
"""Bytes of a line, at most."""
_PROTOCOL = 1
_TAKE_DOWN, _MAKE, _ANSWER, _APPEAR = 20.0, 60.0, 10.0, 20.0
"""Seconds: for coming to one point and taking down; for making again; for an answer; for being restored."""
_LISTENS = 1.0  # seconds until a process listens again, after a conversation
_LOOK_AGAIN, _BREATH, _LOOK = 0.002, 0.05, 0.2
_OF_A_COLLECTIVE = 0
_REASONS = {
    1: "was used in a CUDA graph that was captured (torch.cuda.graph, or torch.compile with graphs)",
    2: "has memory of the program registered (windows, symmetric memory, or ncclMemAlloc)",
    4: "may use NVLink multicast (NVLS)",
    8: "was shrunk, grown, revoked or suspended",
}
_ADVICE = {
    1: "Capture no collectives, or save before the first capture.",
    2: "Do without registered memory and symmetric memory.",
    4: "Set NCCL_NVLS_ENABLE=0 in the environment of the program, and start it again.",
    8: "Make the communicator anew (`destroy_process_group`, `init_process_group`), and save again.",
}
_NOT_TOUCHED = "The save was refused; nothing was touched."


@dataclass
class _Comm:
    """One rank of a communicator, as its process tells of it."""

    key: str
    rank: int
    size: int
    reasons: int
    counts: dict[int, int]


@dataclass
class _State:
    phase: str = ""
    working: bool = False
    error: int = 0
    unsettled: int = 0
    is_late: bool = False
    comms: list[_Comm] = field(default_factory=list)


class _Gone(Exception):
    """A process does not answer any more."""


class _Process:
    """The way to one process's library."""

    def __init__(self, run_dir: Path, pid: int) -> None:
        self.pid = pid
        fifo = run_dir / f"nccl-{pid}"
        self._from = self._to = -1
        self._rest = b""
        self._number = secrets.randbits(32)
        try:
            # For both directions: it is not at its end before the process has opened its own.
            self._from = os.open(f"{fifo}.said", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
            self._to = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as e:
            self.close()
            raise _Gone(pid) from e

    def ask(self, *lines: str) -> list[str]:
        """Say these lines, and return what is answered to them."""
        answers: list[str] = []
        for line in lines:
            self._number += 1
            try:
                os.write(self._to, f"{self._number} {line}\n".encode())
            except OSError as e:
                raise _Gone(self.pid) from e
            while self._line() != f"begin {self._number}":
                pass  # what an earlier keeper was answered
            while (answer := self._line()) != f"end {self._number}":
                answers.append(answer)
        return answers

    def _line(self) -> str:
        deadline = time.monotonic() + _ANSWER
        while b"\n" not in self._rest:
            if self._is_over() or time.monotonic() > deadline:
                raise _Gone(self.pid)
            if not readable(self._from, seconds=_LOOK):
                continue
            try:
                got = os.read(self._from, 1 << 16)
            except BlockingIOError:
                continue
            self._rest += got
            if len(self._rest) > _LONGEST:
                raise _Gone(self.pid)
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode("ascii", "replace")

    def _is_over(self) -> bool:
        poll = select.poll()
        poll.register(self._to, select.POLLERR)
        return any(event & select.POLLERR for _, event in poll.poll(0))

    def state(self) -> _State:
        """Return how it is. What is no message is as good as none."""
        lines = self.ask("state")
        try:
            return self._state(lines)
        except (ValueError, IndexError) as e:
            raise _Gone(self.pid) from e

    def _state(self, lines: Iterable[str]) -> _State:
        state = _State()
        for line in lines:
            word, *words = line.split()
            if word == "state":
                if int(words[0]) != _PROTOCOL:
                    raise _Gone(self.pid)
                state.phase, state.working, state.error = words[1], words[2] == "1", int(words[3])
                state.unsettled = int(words[4])
            elif word == "late":
                state.is_late = words[0] == "1"
            elif word == "comm":
                counts = {int(index): int(count) for index, count in (one.split("=") for one in words[5:])}
                state.comms.append(_Comm(words[0], int(words[1]), int(words[2]), int(words[4]), counts))
        return state

    def close(self) -> None:
        for fd in (self._from, self._to):
            if fd >= 0:
                os.close(fd)


def _listening(run_dir: Path, living: Container[int]) -> list[int]:
    """Return the pids (in the namespace) of the living processes that have a communicator, or had one once."""
    found = [int(m[1]) for m in map(_FIFO.match, os.listdir(run_dir)) if m]  # noqa: PTH208
    return sorted(pid for pid in found if pid in living)


class Communicators:
    """Those of the processes of a namespace, from the step before a freeze to that after it.

    Parameters
    ----------
    run_dir : the run folder, where the processes' FIFOs are.
    taken : the pids (in the namespace) of the processes whose communicators are taken down already.

    Attributes
    ----------
    pids : the processes that have communicators.
    began : when the first call was stopped (`time.monotonic`); None where nothing was taken down.
    """

    def __init__(self, run_dir: Path, taken: Sequence[int] = ()) -> None:
        self._run_dir, self.pids = run_dir, list(taken)
        self._are_away, self._patience = bool(taken), _APPEAR if taken else _LISTENS
        self.began: float | None = None

    @classmethod
    def left_behind(cls, run_dir: Path, living: Container[int]) -> Communicators:
        """Return those that a keeper which died had taken down."""
        taken = []
        for pid in _listening(run_dir, living):
            with contextlib.suppress(_Gone), contextlib.closing(_Process(run_dir, pid)) as talk:
                if talk.state().phase == "gone":
                    taken.append(pid)
        return cls(run_dir, taken)

    def look(self, living: Container[int]) -> None:
        """See which of the living processes have communicators: these can be taken down, as far as can be known.

        Raises
        ------
        Refused : a communicator cannot be taken down.
        """
        with _in_words(), contextlib.ExitStack() as stack:
            talks: dict[int, _Process] = {}
            self._connect(stack, _listening(self._run_dir, living), _LISTENS, talks)
            _all(talks, "open")  # a keeper may have died in the middle of a save
            states = {pid: talk.state() for pid, talk in talks.items()}
            self.pids = [pid for pid, state in states.items() if state.comms]
            _refuse_reasons(states)

    def take_down(self) -> None:
        """Have all ranks come to one point, and take down their communicators.

        Raises
        ------
        Refused : it cannot be done, or not now; all go on as before.
        """
        if not self.pids:
            return
        began = time.monotonic()
        deadline = began + _TAKE_DOWN
        talks: dict[int, _Process] = {}
        with contextlib.ExitStack() as stack:
            with _in_words():
                self._connect(stack, self.pids, _LISTENS, talks)
                _refuse_reasons({pid: talk.state() for pid, talk in talks.items()})
                while not self._come_to_one_point(talks, deadline):
                    _all(talks, "open")
                    time.sleep(_BREATH)
                met = time.monotonic()
                _all(talks, "settle")
                _until(talks, "quiet", deadline)
                quiet = time.monotonic()
                self.began, self._are_away = began, True
                _all(talks, "destroy")
            _until(talks, "gone", time.monotonic() + _MAKE)
        now = time.monotonic()
        log.info(
            "NCCL in %d processes: at one point after %.3f s, idle %.3f, taken down %.3f",
            *(len(self.pids), met - began, quiet - met, now - quiet),
        )

    def _come_to_one_point(self, talks: Mapping[int, _Process], deadline: float) -> bool:
        """Stop all, and have those go on that are behind, until all have begun the same operations.

        False, where a communicator is just being made or ended: after a moment it may be another picture.
        """
        _all(talks, "stop")
        states: dict[int, _State] = {}
        while True:
            states = {pid: talk.state() for pid, talk in talks.items()}
            ranks: dict[str, list[_Comm]] = defaultdict(list)
            for state in states.values():
                for comm in state.comms:
                    ranks[comm.key].append(comm)
            whole = all(len(found) == found[0].size for found in ranks.values())
            if time.monotonic() > deadline:
                raise _refused(*_why_not(states, ranks))
            if not whole:
                return False
            if limits := _limits(ranks):
                for pid, talk in talks.items():
                    own = {(comm.key, comm.rank) for comm in states[pid].comms}
                    if lines := [line for of, line in limits if of in own]:
                        talk.ask(*lines)
            elif not any(state.unsettled for state in states.values()):
                return True
            time.sleep(_LOOK_AGAIN)

    def make_again(self) -> None:
        """Make all communicators again, and let the calls that wait go on.

        Raises
        ------
        DriverError : it could not be done; the calls fail, as if one of the ranks had ended.
        """
        if not self._are_away:
            return
        self._are_away = False
        began = time.monotonic()
        with contextlib.ExitStack() as stack:
            talks: dict[int, _Process] = {}
            try:
                self._connect(stack, self.pids, self._patience, talks)
                ids: list[str] = []
                for talk in talks.values():
                    ids += talk.ask("ids")
                by_key = {found[1]: line for line in ids if (found := _ID.match(line))}
                for talk in talks.values():
                    own = {comm.key for comm in talk.state().comms}
                    talk.ask(*(by_key[key] for key in sorted(own) if key in by_key))
                _all(talks, "create")
                _until(talks, "open", time.monotonic() + _MAKE)
            except (_Gone, Refused) as e:
                for talk in talks.values():
                    with contextlib.suppress(_Gone):
                        talk.ask("lost")
                raise DriverError(
                    "The connections between GPUs (NCCL) could not be made again.",
                    f"Process {e} has ended or does not answer." if isinstance(e, _Gone) else e.why,
                    "{Restart}, and restore a snapshot.",
                ) from e
        log.info("NCCL in %d processes: made again in %.3f s", len(self.pids), time.monotonic() - began)

    def _connect(
        self, stack: contextlib.ExitStack, pids: Iterable[int], patience: float, talks: dict[int, _Process]
    ) -> None:
        """Begin to talk with these processes. Raises `_Gone` where one does not listen; the others are there."""
        deadline = time.monotonic() + patience
        gone: _Gone | None = None
        for pid in pids:
            while pid not in talks:
                try:
                    talks[pid] = _Process(self._run_dir, pid)
                    stack.callback(talks[pid].close)
                except _Gone as e:
                    if time.monotonic() > deadline:
                        gone = e
                        break
                    time.sleep(_LOOK_AGAIN)
        if gone is not None:
            raise gone


@contextlib.contextmanager
def _in_words() -> Iterator[None]:
    try:
        yield
    except _Gone as e:
        raise _refused(f"process {e} does not answer, or has ended", "Wait a moment and save again.") from e


def _all(talks: Mapping[int, _Process], line: str) -> None:
    for talk in talks.values():
        talk.ask(line)


def _until(talks: Mapping[int, _Process], phase: str, deadline: float) -> None:
    """Wait until all are in this phase, and none works any longer."""
    waiting = dict(talks)
    while waiting:
        for pid, talk in list(waiting.items()):
            state = talk.state()
            if state.error:
                raise _refused(f"NCCL or the driver gave error {state.error} in process {pid}", "Look into the log.")
            if state.phase == phase and not state.working:
                del waiting[pid]
        if waiting and time.monotonic() > deadline:
            raise _refused(
                f"an operation of NCCL does not end in process {', '.join(map(str, waiting))}",
                "Save again when it has ended.",
            )
        if waiting:
            time.sleep(_LOOK_AGAIN)


def _limits(ranks: Mapping[str, Sequence[_Comm]]) -> list[tuple[tuple[str, int], str]]:
    """Return what those have to reach that have begun fewer operations than the others that take part in them."""
    limits = []
    for key, comms in ranks.items():
        furthest = max(comm.counts.get(_OF_A_COLLECTIVE, 0) for comm in comms)
        for comm in comms:
            wanted = {_OF_A_COLLECTIVE: furthest}
            for other in comms:
                wanted[_sent(other.rank)] = other.counts.get(_received(comm.rank), 0)
                wanted[_received(other.rank)] = other.counts.get(_sent(comm.rank), 0)
            limits += [
                ((key, comm.rank), f"limit {key} {comm.rank} {index} {count}")
                for index, count in wanted.items()
                if comm.counts.get(index, 0) < count
            ]
    return limits


def _sent(peer: int) -> int:
    return 1 + 2 * peer


def _received(peer: int) -> int:
    return 2 + 2 * peer


def _refuse_reasons(states: Mapping[int, _State]) -> None:
    for pid, state in states.items():
        if state.phase != "open" or state.working:
            raise _refused(f"process {pid} still is in an earlier save", "Wait a moment and save again.")
        for comm in state.comms:
            for bit, words in _REASONS.items():
                if comm.reasons & bit:
                    raise _refused(f"an NCCL communicator of process {pid} {words}", _ADVICE[bit])


def _why_not(states: Mapping[int, _State], ranks: Mapping[str, Sequence[_Comm]]) -> tuple[str, str]:
    """Return why the ranks did not come to one point in time, and what to do about it."""
    if missing := [found for found in ranks.values() if len(found) != found[0].size]:
        largest = max(missing, key=lambda found: found[0].size)
        return (
            f"an NCCL communicator has {largest[0].size} ranks, of which {len(largest)} are processes here",
            "All ranks have to belong to what is saved, on one machine. Where they do, save again in a moment.",
        )
    late = [pid for pid, state in states.items() if state.is_late] or list(states)
    return (
        f"process {', '.join(map(str, late))} did not come to the NCCL operation that the others wait in, within "
        f"{_TAKE_DOWN:.0f} s",
        "Save again when it goes on.",
    )


def _refused(why: str, advice: str) -> Refused:
    return Refused(_NOT_TOUCHED, why, advice)
