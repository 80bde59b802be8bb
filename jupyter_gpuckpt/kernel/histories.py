"""How histories are drawn: which snapshot came from which."""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from ..operations.results import Summary
from .show import here_text, label_of, moment
from .tables import Line, Marked, Shown, one_line

__all__ = ["Histories"]


class Histories(Shown):
    """Which snapshot came from which, as lines: the newest first, below it what it came from; the unrelated apart.

    Where one came from a snapshot that is not shown, of which `older` has the id, a colon says that more follows.
    `here` is as `show.snapshots` has it, and `faults` is what is said of snapshots that cannot be read.
    """

    def __init__(
        self,
        found: Sequence[Summary],
        here: Mapping[str, Sequence[str]],
        older: Collection[str] = (),
        faults: Sequence[str] = (),
    ) -> None:
        self._lines: list[Line] = _histories(found, here, older) or [["No snapshots yet."]]
        self._lines += [[line] for fault in faults for line in fault.split("\n")]

    def text(self) -> str:
        return "\n".join(one_line("".join(line)) for line in self._lines)

    def lines(self, width: int) -> list[Line]:
        del width  # a terminal breaks what is too long
        return self._lines

    def html(self) -> str:
        return f"<pre>{html.escape(self.text())}</pre>"


def _histories(found: Sequence[Summary], here: Mapping[str, Sequence[str]], older: Collection[str]) -> list[Line]:
    newest_first = sorted(found, key=lambda one: (one.created, one.name), reverse=True)
    places = {one.id: place for place, one in enumerate(newest_first)}
    # A line goes straight on from each snapshot to the newest that came from it; what else came from it branches off.
    begun: list[list[int]] = []
    branches: dict[int, list[list[int]]] = defaultdict(list)
    known: set[int] = set()
    for newest in range(len(newest_first)):
        line, at = [], newest
        while at not in known:
            known.add(at)
            line.append(at)
            origin = places.get(newest_first[at].parent or "", -1)
            if origin <= at:  # none that is older is there
                begun.append(line)
                break
            at = origin
        else:
            branches[at] += [line] if line else []
    titled = len({_whose(one) for one in found}) > 1 or any(one.job for one in found)
    lines: list[Line] = []
    for line in begun:
        lines += [[]] * bool(lines) + [[Marked(f"{_whose(newest_first[line[0]])}:", "word")]] * titled
        # A list in place of recursion: branches can branch off each other as often as they like.
        pending: list[list[str] | tuple[list[int], str]] = [(line, "")]
        while pending:
            part = pending.pop()
            if isinstance(part, list):
                lines.append(part)
                continue
            own, before = part
            drawn: list[list[str] | tuple[list[int], str]] = []
            for place in own:
                for branch in branches[place]:
                    drawn += [(branch, f"{before}| "), [f"{before}|/"]]
                drawn.append(_in_history(before, newest_first[place], here))
            pending += reversed(drawn)
        if newest_first[line[-1]].parent in older:
            lines.append([":"])
    return lines


def _in_history(before: str, one: Summary, here: Mapping[str, Sequence[str]]) -> list[str]:
    message = f"  {one.message}" if one.message else ""
    mark = [" (", here_text(one, here[one.id]), ")"] if one.id in here else []
    return [f"{before}* {label_of(one)}", *mark, f"  {moment(one.created)}{message}"]


def _whose(snapshot: Summary) -> str:
    return f"job {snapshot.job}" if snapshot.job else snapshot.notebook or "without a notebook"
