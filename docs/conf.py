"""The documentation site: `make docs`. The pages are read on GitHub as they are, so they have no directives of Sphinx.

What stands where is said by the pages with lists of links (`_LISTS`): their lists are the site's navigation.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import generated_pages  # noqa: E402 - it lies beside this file

import jupyter_gpuckpt  # noqa: E402 - of this checkout, whatever is installed

project = "jupyter_gpuckpt"
author = "the jupyter_gpuckpt contributors"
project_copyright = author
release = version = jupyter_gpuckpt.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
myst_heading_anchors = 4
myst_enable_extensions = ["html_image"]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
napoleon_numpy_docstring = True
highlight_language = "text"

html_theme = "pydata_sphinx_theme"
html_title = "jupyter_gpuckpt"
html_show_sourcelink = False
html_static_path: list[str] = []
html_extra_path = ["jupyterlab-light.png", "jupyterlab-dark.png"]  # a <picture> of the README names them
html_theme_options = {
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "header_links_before_dropdown": 4,
    "navbar_align": "left",
    "footer_start": ["copyright"],
    "footer_end": [],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
html_sidebars = {"index": [], "terminology": [], "generated/tutorial": [], "faq": []}

_LISTS = ("index", "guides", "admins", "reference", "explanation")
"""The pages whose lists of links are the navigation."""
_OF_THE_CODE = """
Made of the code:

- [Every command](generated/commands.md)
- [Every magic](generated/magics.md)
- [Every request](generated/rest.md) of the REST API
- [Python API](generated/python.md), with the errors
"""
_ENTRY = re.compile(r"^- \[([^\]]*)\]\(([\w./-]+)\.md\)", re.MULTILINE)


def _read(app: Any, page: str, text: list[str]) -> None:
    """Have a page's links lead to the pages of the site, and its list be navigation (called by Sphinx)."""
    del app
    if page.startswith("generated/"):
        return
    text[0] = generated_pages.linked(text[0], "../" * page.count("/"))
    if page == "reference":
        text[0] = text[0].partition("\nThe documentation site")[0] + _OF_THE_CODE
    if page in _LISTS:
        entries = "\n".join(f"{title} </{entry}>" for title, entry in _ENTRY.findall(text[0]))
        text[0] += f"\n```{{toctree}}\n:hidden:\n{entries}\n```\n"


def setup(app: Any) -> None:
    """Write the generated pages where they are not as they should be (called by Sphinx)."""
    folder = Path(__file__).parent / "generated"
    folder.mkdir(exist_ok=True)
    for name, text in generated_pages.pages().items():
        page = folder / f"{name}.md"
        if not page.exists() or page.read_text() != text:
            page.write_text(text)
    app.connect("source-read", _read)
