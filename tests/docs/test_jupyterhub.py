"""JupyterHub: the page has the recipe as it is, and what is set there fits together."""

from __future__ import annotations

from pathlib import Path

from traitlets.config import PyFileConfigLoader

import jupyter_gpuckpt
from jupyter_gpuckpt import settings

_RECIPE = Path(jupyter_gpuckpt.__file__).parent / "recipes" / "jupyterhub_config.py"
_PAGE = Path(__file__).parents[2] / "docs" / "jupyterhub.md"


def test_the_page_has_the_recipe() -> None:
    assert f"```python\n{_RECIPE.read_text()}```\n" in _PAGE.read_text()


def test_what_the_recipe_sets_is_understood_and_kernels_are_on_the_disk_before_any_spawner_kills() -> None:
    found = PyFileConfigLoader(_RECIPE.name, str(_RECIPE.parent)).load_config()
    environment = found.Spawner.environment.get_value({})
    known = {one.variable: one for one in settings.ALL}
    assert environment.keys() <= known.keys()
    read = {name: known[name].read_from(environment) for name in environment}
    assert read["GPUCKPT_HIBERNATE_ON"] == {"cull", "stop"}
    assert read["GPUCKPT_RESUME"] == "auto"
    unit = found.SystemdSpawner.unit_extra_properties.get_value({})
    limits = (
        found.LocalProcessSpawner.interrupt_timeout,
        found.KubeSpawner.delete_grace_period,
        unit["TimeoutStopSec"],
    )
    assert all(read["GPUCKPT_HIBERNATE_DEADLINE"] <= int(limit) - 10 for limit in limits)
