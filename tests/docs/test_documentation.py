"""The pages: every link between them leads somewhere, and what the site makes of the code is whole."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import jupyter_gpuckpt
from jupyter_gpuckpt.cli.parsers import program

_ROOT = Path(__file__).parent.parent.parent
_LINK = re.compile(r"(?:\]\(|(?:src|srcset)=\")([^)\s\"]+)")
_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def documents() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return [_ROOT / line for line in listed.splitlines() if not line.startswith(".github/")]


def anchors(document: Path) -> set[str]:
    """Return what GitHub and the site make of the headings."""
    text = _FENCED.sub("", document.read_text())
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title) for title in titles]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in plain}


def broken(document: Path) -> list[str]:
    found = []
    for link in _LINK.findall(_FENCED.sub("", document.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            found.append(link)
    return found


def test_every_link_leads_to_a_page_and_a_heading_that_are_there() -> None:
    assert not {str(document): links for document in documents() if (links := broken(document))}


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Two words\n[here](#two-words) [gone](#three) [gone](none.md) [web](https://example.org/x)\n")
    assert broken(page) == ["#three", "none.md"]


def test_no_page_has_a_section_twice() -> None:
    for document in documents():
        sections = re.findall(r"^## (.+)$", _FENCED.sub("", document.read_text()), re.MULTILINE)
        assert len(set(sections)) == len(sections), document


@pytest.fixture(scope="module")
def generated() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generated_pages", _ROOT / "docs" / "generated_pages.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_generated_pages_have_every_command_and_every_request(generated: ModuleType) -> None:
    pages = generated.pages()
    commands = program().commands.choices
    assert re.findall(r"^### `(.+)`$", pages["commands"], re.MULTILINE) == [
        name for group in program().groups for name in group.names
    ]
    assert all(f"usage: jupyter gpuckpt {name}" in pages["commands"] for name in commands)
    described = yaml.safe_load((_ROOT / "jupyter_gpuckpt" / "server" / "rest-api.yml").read_text())
    requests = {
        f"{method.upper()} {path}"
        for path, methods in described["paths"].items()
        for method in methods
        if method != "parameters"
    }
    assert set(re.findall(r"^## `(.+)`$", pages["rest"], re.MULTILINE)) == requests
    assert "`stop_here`" in pages["rest"]
    assert "%gpuckpt save first" in pages["tutorial"]


def test_every_page_is_in_the_navigation() -> None:
    lists = "".join((_ROOT / "docs" / f"{name}.md").read_text() for name in ("index", "guides", "admins", "reference"))
    lists += (_ROOT / "docs" / "explanation.md").read_text()
    linked = set(re.findall(r"^- \[[^\]]*\]\(([\w./-]+)\)", lists, re.MULTILINE))
    pages = {str(page.relative_to(_ROOT / "docs")) for page in documents() if page.is_relative_to(_ROOT / "docs")}
    assert pages - linked == {"index.md"}


@pytest.mark.parametrize("floor", ["keeper", "client", "snapshots", "operations", "linux"])
def test_the_map_of_modules_has_each_one(floor: str) -> None:
    page = (_ROOT / "docs" / "how-it-works.md").read_text()
    section = page.partition(f"### `{floor}/`")[2].partition("\n### ")[0]
    first_column = "".join(re.findall(r"^\| ([^|]*) \|", section, re.MULTILINE))
    named = set(re.findall(r"`(\w+)\.py`", first_column))
    assert named == {path.stem for path in (_ROOT / "jupyter_gpuckpt" / floor).glob("[a-z]*.py")}


def test_a_version_is_the_same_wherever_it_stands() -> None:
    stands = [
        ("pyproject.toml", r'^version = "(.+)"$'),
        ("CITATION.cff", r"^version: (.+)$"),
        ("deploy/helm/gpuckpt/Chart.yaml", r"^version: (.+)$"),
        ("deploy/helm/gpuckpt/Chart.yaml", r'^appVersion: "(.+)"$'),
        ("labextension/package.json", r'^  "version": "(.+)",$'),
    ]
    versions = {re.findall(found, (_ROOT / file).read_text(), re.MULTILINE)[0] for file, found in stands}
    assert len(versions) == 1


def test_what_is_loaded_late_is_named_for_completion_and_for_the_reference() -> None:
    assert set(jupyter_gpuckpt.__all__) <= set(dir(jupyter_gpuckpt))


@pytest.mark.parametrize("recipe", ["slurm-job.sh", "slurm.conf"])
def test_a_page_shows_a_recipe_as_it_is(recipe: str) -> None:
    text = (_ROOT / "jupyter_gpuckpt" / "recipes" / recipe).read_text()
    assert f"\n{text}```" in (_ROOT / "docs" / "slurm.md").read_text()
