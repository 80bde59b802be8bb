"""Imports go down only: no floor knows one above it, and in the keeper no module needs one that needs it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

import jupyter_gpuckpt

_ROOT = Path(jupyter_gpuckpt.__file__).parent
_MODULES = {
    ".".join(("jupyter_gpuckpt", *path.relative_to(_ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in _ROOT.rglob("*.py")
    if "labextension" not in path.relative_to(_ROOT).parts
}
_KNOWS_NOTHING_OF = {
    "freeze": ("store", "keeper", "kernel", "server", "cli", "machine", "broker"),
    "store": ("freeze", "keeper", "kernel", "server", "cli", "machine", "broker"),
    "kernel": ("freeze", "store", "server", "cli"),
    "keeper": ("kernel", "server", "cli"),
}


def imports(name: str) -> Iterator[str]:
    """Yield the modules of the package that a module imports, at its top, for its types or in a function."""
    path = _MODULES[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package) if node.level else str(node.module)
            found = [one if (one := f"{base}.{alias.name}") in _MODULES else base for alias in node.names]
        else:
            continue
        yield from (one for one in found if one in _MODULES and one != name)


def test_no_module_of_the_keeper_needs_one_that_needs_it() -> None:
    graph = {name: set(imports(name)) for name in _MODULES if name.startswith("jupyter_gpuckpt.keeper")}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as e:
        raise AssertionError("a cycle: " + " <- ".join(e.args[1])) from None


def test_no_floor_knows_one_above_it() -> None:
    upwards = [
        (name, other)
        for name in _MODULES
        for other in imports(name)
        if _floor(other) in _KNOWS_NOTHING_OF.get(_floor(name), ())
    ]
    assert upwards == []


def _floor(module: str) -> str:
    return module.split(".")[1] if "." in module else ""
