"""Renders the chart of deploy/helm: by helm where that is on the PATH, and else by `render_chart`, built here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml

__all__ = ["CHART", "Chart", "Refused", "what_is_missing"]

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "gpuckpt"
_SOURCE = Path(__file__).parent / "render_chart"
_LIBRARIES = Path("/usr/share/gocode")
"""Where Debian's packages of Go's libraries put them."""
_IMPORTED = ("github.com/Masterminds/sprig", "github.com/xeipuuv/gojsonschema", "sigs.k8s.io/yaml")


class Refused(Exception):
    """The chart, or its schema, refuses the values. It says why."""


def what_is_missing(*, notes: bool = False) -> str:
    """Return what is to be installed before a chart, or its notes, can be rendered here; nothing if all is there."""
    if not notes and shutil.which("helm"):
        return ""
    there = shutil.which("go") and all((_LIBRARIES / "src" / library).is_dir() for library in _IMPORTED)
    return "" if there else "no helm, nor Go with the libraries of Debian 12; as root: make test-chart"


class Chart:
    """What renders it, in a folder for what is built."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._program = ""

    def renders(self, values: dict[str, Any] | None = None, *words: str, release: str = "lab") -> list[dict[str, Any]]:
        """Return its resources with these values, and with words of helm's such as `--set`; raise Refused."""
        helm = shutil.which("helm")
        own = [helm, "template", "--kube-version=1.34.0", release, str(CHART)] if helm else [self._built()]
        given = [*words, *self._values(values)]
        text = _run([*own, *given] if helm else [*own, *given, release, str(CHART)])
        return [one for one in yaml.safe_load_all(text) if one]

    def notes(self, values: dict[str, Any] | None = None) -> str:
        """Return what is said once it is installed, which `helm template` does not say."""
        return _run([self._built(), *self._values(values), "-notes", "lab", str(CHART)])

    def _values(self, values: dict[str, Any] | None) -> list[str]:
        file = self._folder / "values.json"
        file.write_text(json.dumps(values or {}))
        return ["--values", str(file)]

    def _built(self) -> str:
        if not self._program:
            program = self._folder / "render_chart"
            told = {"GO111MODULE": "off", "GOPATH": str(_LIBRARIES), "GOFLAGS": "", "CGO_ENABLED": "0"}
            environment = {"GOCACHE": str(self._folder / "cache")} | os.environ | told
            subprocess.run(["go", "build", "-o", str(program), "."], cwd=_SOURCE, env=environment, check=True)
            self._program = str(program)
        return self._program


def _run(words: list[str]) -> str:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise Refused(done.stderr)
    return done.stdout
