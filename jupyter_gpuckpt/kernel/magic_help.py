"""The help of ``%gpuckpt``: what it says of each command."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["HELP", "help_of"]

_SAID_FROM = 46
"""The column in which it is said what is done."""


@dataclass(frozen=True)
class _About:
    """What is said of a command, or of several that share it: rows of how it is typed and what that does."""

    commands: tuple[str, ...]
    rows: tuple[tuple[str, str], ...]

    def text(self) -> str:
        return "\n".join(f"{typed:<{_SAID_FROM}}{said}".rstrip() for typed, said in self.rows)


_COMMANDS = (
    _About(
        ("save",),
        (
            ("%gpuckpt save NAME [-m MESSAGE] [--replace]", "save this kernel under a name; it runs on"),
            ("    --with-files", "and keep the files that it needs, Python and its packages, with it"),
            ("    --wait", "and wait until it is on the disk"),
            ("    --to FOLDER", "into a folder, on another disk for example"),
        ),
    ),
    _About(
        ("restore",),
        (
            (
                "%gpuckpt restore [NAME] [--gpu N[,N ...]]",
                "put this kernel back (without a name: to this notebook's latest)",
            ),
            ("    --from NOTEBOOK:NAME", "to a snapshot of another notebook"),
            ("    --store FOLDER", "out of a folder that something was saved --to"),
            ("    --lazy", "and answer before all of its GPU memory is back"),
            ("    --in-place", "and discard this kernel before the other one is up"),
            ("    --stop-here", "and do not run the rest of the cell that it was saved in"),
        ),
    ),
    _About(
        ("fork",),
        (
            (
                "%gpuckpt fork [NAME] [-n COUNT] [--reseed]",
                "a copy of this kernel beside it (with a name: of that snapshot);",
            ),
            (
                "              [--save NAME] [--gpu N[,N ...]]",
                "  --reseed: with other random numbers; --save: and save it",
            ),
        ),
    ),
    _About(
        ("sleep", "wake"),
        (
            ("%gpuckpt sleep · wake", "move its GPU memory to host memory, and back;"),
            ("", "a kernel that sleeps wakes by itself when a cell is run"),
        ),
    ),
    _About(("hibernate",), (("%gpuckpt hibernate", "the same with all of the kernel, to the disk"),)),
    _About(("awake",), (("%gpuckpt awake on · off", "keep this kernel awake even if others need the GPU"),)),
    _About(
        ("autosleep",),
        (("%gpuckpt autosleep TIME · off", "put it to sleep when it has been idle for so long (45s, 30m, 2h)"),),
    ),
    _About(("move",), (("%gpuckpt move --gpu N[,N ...]", "move what this kernel has on the GPU to another"),)),
    _About(
        ("list",),
        (
            ("%gpuckpt list [-n N] [--notebook NOTEBOOK] [--tag TAG] [--since WHEN] [--pinned] [--format TEXT]", ""),
            ("", "the snapshots there are; since: 2h, 7d ago, or a date"),
        ),
    ),
    _About(("log",), (("%gpuckpt log [-n N]", "which of them came from which; -n: of the newest N"),)),
    _About(("show",), (("%gpuckpt show NAME", "all about one of them"),)),
    _About(("diff",), (("%gpuckpt diff A B", "what changed from one to another"),)),
    _About(("rm",), (("%gpuckpt rm NAME [NAME ...]", "remove snapshots"),)),
    _About(
        ("keep",),
        (
            (
                "%gpuckpt keep --last N · --under SIZE",
                "remove this notebook's oldest ones, but the last N, or until the store",
            ),
            ("    --dry-run", "takes no more than SIZE (20G); --dry-run: only say which"),
        ),
    ),
    _About(("mv",), (("%gpuckpt mv NAME NEW", "give one another name"),)),
    _About(
        ("pin", "unpin"),
        (("%gpuckpt pin NAME · unpin NAME", "protect one from removal and replacement, or no longer"),),
    ),
    _About(("note",), (('%gpuckpt note NAME "TEXT"', 'give one another note ("" for none)'),)),
    _About(("tag",), (("%gpuckpt tag NAME TAG [--remove TAG]", "add tags to one, or take them away"),)),
    _About(
        ("list", "log", "show", "diff", "rm", "keep", "mv", "pin", "unpin", "note", "tag"),
        (("    --store FOLDER", "all of these, from list on: in a folder that something was saved --to"),),
    ),
    _About(("panel",), (("%gpuckpt panel", "all of that with buttons, in the cell"),)),
    _About(("status",), (("%gpuckpt status", "this kernel, and the snapshot that it came from or went to"),)),
    _About(("help",), (("%gpuckpt help [COMMAND]", "this text, or what it says of a command"),)),
)

HELP = (
    "\n".join(about.text() for about in _COMMANDS)
    + """

`r = %gpuckpt save x` returns twice, like fork: r.restored is False now, and True after a restore of x.
`f = %gpuckpt fork -n 3` returns in each: f.copy is None here, and 0, 1, 2 in the copies.
Functions of your own around a save: jupyter_gpuckpt.before_save(fn), jupyter_gpuckpt.after_restore(fn)."""
)


def help_of(command: str) -> str:
    """Return the lines of the help that are about one command; nothing of what is none."""
    return "\n".join(about.text() for about in _COMMANDS if command in about.commands)
