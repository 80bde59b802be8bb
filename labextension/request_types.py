"""Write what the operations' descriptions say of their requests, as types for the extension: `src/requests.ts`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from jupyter_gpuckpt.operations.description import Offered, arguments_of
from jupyter_gpuckpt.operations.requests import Long, operations
from jupyter_gpuckpt.server.bodies import member, members

FILE = Path(__file__).parent / "src" / "requests.ts"
_TYPES = {str: "string", bool: "boolean", int: "number", list: "string[]"}
_HEAD = """\
/**
 * What the REST API takes for each operation on a kernel.
 *
 * Made from `jupyter_gpuckpt/operations/requests.py` by `python labextension/request_types.py`.
 */
export interface IRequests {
"""


def text() -> str:
    """Return what the file has to say."""
    lines = [line for kind in operations() for line in _request(kind)]
    return _HEAD + "\n".join(lines) + "\n}\n"


def _request(kind: type[Long]) -> Iterator[str]:
    types = members(kind)
    if not types:
        yield f"  {kind.op}: Record<string, never>;"
        return
    said = {member(field, argument)[0]: argument for field, argument in arguments_of(kind, Offered.REST)}
    yield f"  {kind.op}: {{"
    for name, type_ in types.items():
        needed = name in said and said[name].required
        yield f"    {name}{'' if needed else '?'}: {_TYPES[type_]};"
    yield "  };"


if __name__ == "__main__":
    FILE.write_text(text())
