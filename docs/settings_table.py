"""Write the table of settings, of what `jupyter_gpuckpt/settings.py` says of them, into the page that has its marks."""

from __future__ import annotations

from pathlib import Path

from jupyter_gpuckpt.settings import ALL

BEGIN, END = "<!-- settings: docs/settings_table.py writes from here -->\n", "<!-- to here -->\n"


def table() -> str:
    """Return the table, in Markdown."""
    lines = ["| variable | in the configuration | what it sets | without it |", "| --- | --- | --- | --- |"]
    for one in ALL:
        configured = f"`c.{one.configurable}.{one.trait}`" if one.configurable else ""
        more = f" ([more]({one.more}))" if one.more else ""
        lines.append(f"| `{one.variable}` | {configured} | {one.what}{more} | {one.without} |")
    return "\n".join(lines) + "\n"


def renewed(text: str) -> str:
    """Return a page with the table between its marks as it has to be."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def pages() -> list[Path]:
    """Return the pages that have the marks."""
    return [page for page in Path(__file__).parent.rglob("*.md") if BEGIN in page.read_text()]


if __name__ == "__main__":
    for page in pages():
        page.write_text(renewed(page.read_text()))
