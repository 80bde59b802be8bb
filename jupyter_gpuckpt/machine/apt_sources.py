"""Read where apt gets its packages from, and say the same place with another release.

Both formats of sources.list(5) are read: one line a source, and stanzas of fields.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jupyter_gpuckpt.linux.root_only import environment

__all__ = ["AptSource", "configured_sources", "parse_lines", "parse_stanzas"]

_OPTION_NAMES = {"arch": "architectures", "lang": "languages", "target": "targets"}
_ONE_LINE = re.compile(r"deb\s+(?:\[(?P<options>[^]]*)\]\s*)?(?P<uri>\S+)\s+(?P<rest>.+)")


@dataclass(frozen=True)
class AptSource:
    """One place that apt gets binary packages from.

    `options` are its other fields, by lower-case name: signing keys among them.
    """

    uris: str
    suites: tuple[str, ...]
    components: tuple[str, ...]
    options: tuple[tuple[str, str], ...]

    def stanza(self, suite: str, components: str) -> str:
        """Return a stanza for the same place and the same keys, but another suite."""
        fields = [
            ("Types", "deb"),
            ("URIs", self.uris),
            ("Suites", suite),
            ("Components", components),
            *((name.title(), value) for name, value in self.options),
            # Nothing but package lists: no descriptions, icons or commands.
            ("Targets", "Packages"),
        ]
        return "".join(f"{name}: {value}\n" for name, value in fields)


def configured_sources() -> list[AptSource]:
    """Return every enabled source of binary packages that apt is set up with, in its order.

    Raises `OSError` or `subprocess.CalledProcessError` where apt does not start.
    """
    wanted = ("file", "Dir::Etc::sourcelist/f", "parts", "Dir::Etc::sourceparts/d")
    said = subprocess.run(
        ["apt-config", "shell", *wanted],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    ).stdout
    places = dict(word.split("=", 1) for word in shlex.split(said))
    paths = [Path(places["file"])] if places.get("file") else []
    if places.get("parts"):
        paths += sorted(Path(places["parts"]).glob("*"))
    found: list[AptSource] = []
    for path in paths:
        parse = {".list": parse_lines, ".sources": parse_stanzas}.get(path.suffix)
        if parse is not None and path.is_file():
            found += parse(path.read_text("utf-8", "replace"))
    return found


def parse_lines(text: str) -> Iterator[AptSource]:
    """Yield the binary sources of the one-line format."""
    for line in text.splitlines():
        match = _ONE_LINE.fullmatch(line.partition("#")[0].strip())
        # A disc's name holds spaces and brackets, and no newer release is on it.
        if match is None or match["uri"].startswith("cdrom:"):
            continue
        options = []
        for option in (match["options"] or "").split():
            name, _, value = option.partition("=")
            name = name.lower()
            options.append((_OPTION_NAMES.get(name, name), value.replace(",", " ")))
        suite, *components = match["rest"].split()
        yield AptSource(match["uri"], (suite,), tuple(components), _kept(options))


def parse_stanzas(text: str) -> Iterator[AptSource]:
    """Yield the enabled binary sources of the stanza (deb822) format."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    for stanza in re.split(r"\n\s*\n", "\n".join(lines)):
        # A field goes on over the lines that begin with a space: keys are written out so.
        pairs = re.findall(r"^([\w-]+):[ \t]*(.*(?:\n[ \t].*)*)", stanza, re.MULTILINE)
        fields = {name.lower(): value.strip() for name, value in pairs}
        enabled = fields.get("enabled", "yes").lower() not in ("no", "false", "without", "off", "0")
        if not enabled or "deb" not in fields.get("types", "").split() or "uris" not in fields:
            continue
        yield AptSource(
            " ".join(fields["uris"].split()),
            tuple(fields.get("suites", "").split()),
            tuple(fields.get("components", "").split()),
            _kept(list(fields.items())),
        )


def _kept(fields: list[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    replaced = {"types", "uris", "suites", "components", "enabled", "targets", "languages"}
    return tuple((name, value) for name, value in fields if name not in replaced)
