"""Pages of the documentation site that are made of the code: commands, magics, REST API, Python API, the tutorial.

`docs/conf.py` writes them into `docs/generated`, and the project's own pages from outside `docs` beside them.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from jupyter_gpuckpt.cli.parsers import program
from jupyter_gpuckpt.kernel.magic_parser import help_of, help_of_all, parser_of_lines

ROOT = Path(__file__).parent.parent
TUTORIAL = "examples/tutorial.ipynb"
OUTSIDE = {
    "README.md": "readme",
    "CONTRIBUTING.md": "contributing",
    "CHANGELOG.md": "changes",
    "SECURITY.md": "reporting",
    TUTORIAL: "tutorial",
}
"""What lies outside of `docs` and is a page, by the name of that page."""
_WIDTH = 80  # columns of a command's help


def pages() -> dict[str, str]:
    """Return the text of each page, in MyST Markdown, by its name."""
    of_the_code = {"commands": _commands(), "magics": _magics(), "rest": _rest(), "python": _PYTHON}
    outside = {name: _moved((ROOT / path).read_text()) for path, name in OUTSIDE.items() if path.endswith(".md")}
    outside["readme"] = f"---\norphan: true\n---\n{outside['readme']}"
    return {**of_the_code, **outside, "tutorial": _moved(_notebook(ROOT / TUTORIAL))}


def linked(text: str, above: str) -> str:
    """Return a page of `docs` with its links to pages outside of `docs` as they are in the site.

    `above` is the way from the page to `docs`: empty, or ``../`` from a folder in it.
    """
    for path, name in OUTSIDE.items():
        text = text.replace(f"](../{above}{path}", f"]({above}generated/{name}.md")
    return text


def _moved(text: str) -> str:
    """Return a page from the root of the repository with its links as they are from `docs/generated`."""
    for path, name in OUTSIDE.items():
        text = re.sub(rf"\]\((\.\./)?{re.escape(path)}", f"]({name}.md", text)
    text = re.sub(r"\]\((?:\.\./)?docs/", "](../", text)
    text = text.replace('srcset="docs/', 'srcset="../').replace('src="docs/', 'src="../')
    return re.sub(r"\]\((?=(?:\.\./)?(?:tests|examples|jupyter_gpuckpt)/)(?:\.\./)?", "](../../", text)


def _fenced(text: str, kind: str = "text") -> str:
    return f"```{kind}\n{text.rstrip()}\n```\n"


def _notebook(path: Path) -> str:
    """Return a notebook as a page: its text, its cells, and what they showed when it was last run."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source + "\n")
            continue
        parts.append(_fenced(source, "ipython"))
        shown = "".join("".join(_shown(output)) for output in cell["outputs"])
        if shown:
            parts.append(_fenced(shown))
    return "\n".join(parts)


def _shown(output: dict[str, Any]) -> str:
    of_data = output.get("data", {}).get("text/plain", "")
    return "".join(output.get("text", of_data))


def _commands() -> str:
    """Return what `--help` says of each command, in the groups of the help."""
    there = program()
    wide = partial(argparse.RawDescriptionHelpFormatter, width=_WIDTH)
    lines = [
        "# Every command\n",
        "What `jupyter gpuckpt COMMAND --help` says. [The command line](../command-line.md) explains it.\n",
    ]
    for group in there.groups:
        lines.append(f"## {group.title[0].upper()}{group.title[1:]}\n")
        for name in group.names:
            about = there.commands.choices[name]
            about.epilog = None  # the exit statuses, the same for all
            about.formatter_class = wide
            lines += [f"### `{name}`\n", _fenced(about.format_help())]
    return "\n".join(lines)


def _magics() -> str:
    said = "What `%gpuckpt help` says in a cell, and `%gpuckpt help COMMAND` of each command."
    lines = [f"# Every magic\n\n{said} [README](readme.md#use-it) has the most common ones.\n", _fenced(help_of_all())]
    for name in parser_of_lines()[1].choices:
        lines += [f"## {name}\n", _fenced(help_of(name))]
    return "\n".join(lines)


_PYTHON = """\
# Python API

What code in a kernel can import. [Hooks](../configuration.md#hooks) shows it in use.

```{eval-rst}
.. automodule:: jupyter_gpuckpt
   :members: before_save, after_restore, Resumed, generation_id
```

## Errors

```{eval-rst}
.. automodule:: jupyter_gpuckpt.errors
   :members:
   :show-inheritance:
```
"""


def _rest() -> str:
    """Return the requests of the REST API, as its OpenAPI file describes them."""
    described = yaml.safe_load((ROOT / "jupyter_gpuckpt" / "server" / "rest-api.yml").read_text())
    lines = [
        "# Every request\n",
        "Made of [the OpenAPI description](../../jupyter_gpuckpt/server/rest-api.yml). "
        "[The REST API](../rest-api.md) explains it. All are under `/api/gpuckpt`.\n",
    ]
    for path, methods in described["paths"].items():
        shared = methods.get("parameters", [])
        for method, about in methods.items():
            if method != "parameters":
                lines += _request(described, f"{method.upper()} {path}", about, shared)
    return "\n".join(lines)


def _request(described: dict[str, Any], title: str, about: dict[str, Any], shared: list[Any]) -> Iterator[str]:
    yield f"## `{title}`\n\n{about['summary']}.\n"
    if "description" in about:
        yield f"{about['description']}\n"
    given = [_resolved(described, one) for one in (*shared, *about.get("parameters", ()))]
    content = _resolved(described, about.get("requestBody", {})).get("content", {})
    schema = _resolved(described, content.get("application/json", {}).get("schema", {}))
    rows = [
        *((one["name"], one["in"], one.get("schema", {}), one.get("description", "")) for one in given),
        *((name, "body", one, one.get("description", "")) for name, one in schema.get("properties", {}).items()),
    ]
    if rows:
        yield "| what | where | type | meaning |\n| --- | --- | --- | --- |"
        for name, where, one, meaning in rows:
            whole = _resolved(described, one)
            told = " ".join((meaning or whole.get("description", "")).split()).replace("|", "\\|")
            yield f"| `{name}` | {where} | {_type(whole)} | {told} |"
        yield ""
    yield (
        "Answers: "
        + ", ".join(
            f"`{status}` {_resolved(described, answer).get('description', '').rstrip('.')}".strip()
            for status, answer in about["responses"].items()
        )
        + ".\n"
    )


def _resolved(described: dict[str, Any], part: Any) -> dict[str, Any]:
    """Return a part of the description, or what it refers to."""
    if isinstance(part, dict) and "$ref" in part:
        found: Any = described
        for step in part["$ref"].removeprefix("#/").split("/"):
            found = found[step]
        return _resolved(described, found)
    return dict(part)


def _type(schema: dict[str, Any]) -> str:
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    return str(schema.get("type", ""))
