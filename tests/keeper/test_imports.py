"""Imports go down only: no floor knows one above it, and in the keeper no module needs one that needs it."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

import jupyter_gpuckpt

_ROOT = Path(jupyter_gpuckpt.__file__).parent
_MODULES = {
    ".".join(("jupyter_gpuckpt", *path.relative_to(_ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in _ROOT.rglob("*.py")
    if not {"labextension", "recipes"} & {*path.relative_to(_ROOT).parts}
}
_EVERYBODYS = {path.stem for path in _ROOT.glob("*.py")} - {"__init__", "provisioner"}
_MAY_IMPORT: dict[str, set[str]] = {
    "linux": set(),
    "operations": set(),
    "freeze": {"linux"},
    "store": {"linux"},
    "snapshots": {"operations", "freeze", "store"},
    "broker": {"linux", "freeze", "machine"},
    "client": {"linux", "operations", "freeze", "store", "snapshots", "broker"},
    "keeper": {"linux", "operations", "freeze", "store", "snapshots", "client"},
    "kernel": {"linux", "operations"},
    "machine": {"linux", "freeze", "store", "client"},
    "provisioner": {"linux", "operations", "client", "machine"},
    "server": {"linux", "operations", "freeze", "store", "snapshots", "client", "machine", "provisioner"},
    "cli": {"linux", "operations", "freeze", "store", "snapshots", "client", "machine", "broker", "kernel"},
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


def test_no_module_of_these_floors_needs_one_that_needs_it() -> None:
    graph = {
        name: set(imports(name)) - {"jupyter_gpuckpt"}
        for name in _MODULES
        if _floor(name) in ("linux", "freeze", "snapshots", "broker", "client", "keeper")
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as e:
        raise AssertionError("a cycle: " + " <- ".join(e.args[1])) from None


def test_no_floor_knows_one_above_it() -> None:
    floors = {name: _floor(name) for name in _MODULES}
    assert set(floors.values()) == {"", *_EVERYBODYS, *_MAY_IMPORT}
    wrong = [
        (name, other)
        for name, floor in floors.items()
        for other in imports(name)
        if name != "jupyter_gpuckpt"
        and floors[other] not in {floor, "", *_EVERYBODYS, *_MAY_IMPORT.get(floor, {"linux"})}
    ]
    assert wrong == []


def _floor(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def test_a_keeper_starts_its_job_before_it_imports_what_it_can_do_with_it() -> None:
    """The job and the rest of the keeper begin side by side. (A new kernel does not wait for its keeper at all.)"""
    early = loaded_with("jupyter_gpuckpt.keeper.__main__")
    assert "jupyter_gpuckpt.keeper.kernel_life" in early  # what starts it
    late = ("google.protobuf", "zmq", "blake3", "zstandard", "jupyter_gpuckpt.store", "jupyter_gpuckpt.freeze.images")
    operations = {f"jupyter_gpuckpt.keeper.operations.{name}" for name in ("save", "restore", "fork", "hibernate")}
    assert early.isdisjoint({*late, *operations, "jupyter_gpuckpt.keeper.requests"})


def test_a_server_starts_without_what_it_does_rarely_or_leaves_to_keepers() -> None:
    loaded = loaded_with("jupyter_gpuckpt.server.app")
    assert "jupyter_gpuckpt.server.handlers" in loaded
    rare = ("machine", "store.transfer", "snapshots.comparison", "keeper", "broker.service", "freeze.cuda")
    ours = {name.removeprefix("jupyter_gpuckpt.") for name in loaded if name.startswith("jupyter_gpuckpt.")}
    assert [name for name in ours if name in rare or name.startswith(tuple(f"{one}." for one in rare))] == []


def test_what_root_runs_is_this_and_no_more() -> None:
    """The broker: docs/security.md names how much there is to be read."""
    loaded = loaded_with("jupyter_gpuckpt.broker.service")
    ours = {name.partition(".")[2] for name in loaded if name.startswith("jupyter_gpuckpt.")}
    assert {name for name in ours if "." not in name} == {
        *("broker", "freeze", "linux"),
        *("checked", "errors", "installed", "quick_dataclass", "setting", "spelling", "subject"),
    }
    assert {name for name in ours if name.startswith(("freeze.", "linux."))} == {
        *(f"freeze.{name}" for name in ("criu", "criu_errors", "criu_program", "random_state")),
        *(f"linux.{name}" for name in ("capabilities", "proc", "processes", "proof", "readiness", "root_only")),
        *(f"linux.{name}" for name in ("seccomp", "spawning", "yama")),
    }
    others = {name.partition(".")[0] for name in loaded} - sys.stdlib_module_names - {"__main__", "_distutils_hack"}
    assert others == {"jupyter_gpuckpt", "jupyter_core", "platformdirs"}
    said = (_ROOT.parent / "docs" / "security.md").read_text()
    lines = sum(len(_MODULES[f"jupyter_gpuckpt.{name}"].read_text().splitlines()) for name in ours)
    assert f"about {round(lines, -2):,} lines" in said


def test_every_module_can_be_loaded() -> None:
    """Some are loaded by what people do rarely."""
    names = [name for name in _MODULES if not name.endswith("__main__")]
    assert loaded_with(", ".join(names)).issuperset(names)


def loaded_with(module: str) -> set[str]:
    """Return the modules that a Python loads which imports one of ours, or several."""
    program = f"import json, sys, {module}; print(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    return set(json.loads(done.stdout))
