"""`recipe`: which configuration files there are, and each one as it is."""

from __future__ import annotations

import subprocess
from pathlib import Path

from command_line import COMMAND, Cli

import jupyter_gpuckpt

_FOLDER = Path(jupyter_gpuckpt.__file__).parent / "recipes"
_RECIPES = {path.name for path in _FOLDER.iterdir() if path.is_file()}


def test_every_recipe_is_listed_with_a_line_that_says_what_it_is_for(cli: Cli) -> None:
    found = cli("recipe", "--json").json["recipes"]
    assert {one["name"] for one in found} == _RECIPES != set()
    shown = cli("recipe").out
    for one in found:
        assert 10 < len(one["summary"]) < 120
        assert one["summary"] in shown


def test_a_recipe_is_printed_byte_for_byte(tmp_path: Path) -> None:
    for name in _RECIPES:
        with (tmp_path / name).open("wb") as file:
            subprocess.run([*COMMAND, "recipe", name], stdout=file, check=True, timeout=60)
        assert (tmp_path / name).read_bytes() == (_FOLDER / name).read_bytes()


def test_an_unknown_recipe_and_a_path_are_refused_with_the_names_that_there_are(cli: Cli) -> None:
    for name in ("nothing", "../pyproject.toml", "/etc/hostname"):
        done = cli("recipe", name)
        assert (done.status, done.out) == (2, "")
        assert all(one in done.err for one in _RECIPES)
