"""Draw what `benchmarks.kernel --json` measured: ``python -m benchmarks.picture ROWS.json PICTURE.svg``.

Two graphs of seconds over GiB of VRAM, the plain way beside ours: how long a save pauses the kernel, and how
long a restore takes until the next cell is answered, lazy ones too. With them the least that the bus allows: out and
back, and in.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_BUS = 51.0  # GiB/s, as `benchmarks.gpu_limits` measures it
_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 330, 220, 50, 40, 120
_COLORS = {"plain": "#c0504d", "ours": "#1f77b4", "ours, lazy": "#6baed6", "the bus": "#888888"}

Line = Sequence[tuple[float, float]]


def main(rows: Path, picture: Path) -> None:
    """Draw the rows."""
    measured = [json.loads(line) for line in rows.read_text().splitlines()]
    measured.sort(key=lambda row: float(row["size"]))
    graphs = [
        _graph(measured, "frozen", "a save: the kernel stands still", 2, 0),
        _graph(measured, "first_cell", "a restore: until the next cell is answered", 1, _WIDTH + _GAP),
    ]
    width, height = 2 * _WIDTH + _GAP + _LEFT + 90, _HEIGHT + _TOP + 50
    picture.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="11"><rect width="100%" height="100%" fill="white"/>{"".join(graphs)}</svg>\n'
    )


def _graph(rows: Sequence[dict[str, Any]], key: str, title: str, copies: int, x0: int) -> str:
    lines: dict[str, Line] = {
        way: [(row["size"] / 2**30, row[key][way]) for row in rows if way in row[key]] for way in ("plain", "ours")
    }
    if key == "first_cell":
        lines["ours, lazy"] = [(row["size"] / 2**30, row["lazy"]["cell"]) for row in rows]
    lines["the bus"] = [(gib, copies * gib / _BUS) for gib, _ in lines["ours"]]
    most_x = max(x for line in lines.values() for x, _ in line)
    most_y = max(y for line in lines.values() for _, y in line) * 1.05
    left, bottom = x0 + _LEFT, _TOP + _HEIGHT

    def at(x: float, y: float) -> tuple[float, float]:
        return left + x / most_x * _WIDTH, bottom - y / most_y * _HEIGHT

    step = next(step for step in (1, 2, 5, 10, 20) if most_y / step <= 6)
    parts = [f'<text x="{left}" y="{_TOP - 18}" font-size="13">{title}</text>']
    for tick in range(0, int(most_y) + 1, step):
        y = at(0, tick)[1]
        parts.append(f'<line x1="{left}" x2="{left + _WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#eee"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{tick} s</text>')
    for gib, _ in lines["ours"]:
        x = at(gib, 0)[0]
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{gib:.0f}</text>')
    parts.append(f'<text x="{left + _WIDTH / 2}" y="{bottom + 34}" text-anchor="middle">GiB of VRAM</text>')
    for name, line in lines.items():
        points = [at(x, y) for x, y in line]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashes = ' stroke-dasharray="4 3"' if name == "the bus" else ""
        parts.append(f'<polyline points="{path}" fill="none" stroke="{_COLORS[name]}" stroke-width="2"{dashes}/>')
    # From below, so that none covers the one before.
    lowest = float(bottom + 4)
    for name, line in sorted(lines.items(), key=lambda item: item[1][-1][1]):
        x, y = at(*line[-1])
        y = min(y + 4, lowest)
        parts.append(f'<text x="{x + 4:.1f}" y="{y:.1f}" fill="{_COLORS[name]}">{name} {line[-1][1]:.1f} s</text>')
        lowest = y - 13
    return "".join(parts)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
