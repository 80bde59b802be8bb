"""Print the oldest versions that the package is said to work with, as constraints for pip.

What comes with those is of their time, too: whoever has an old ipykernel has no new IPython.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement

_OF_THEIR_TIME = ("ipython<9", "pyzmq<27", "tornado<6.5")


def oldest_versions() -> Iterator[str]:
    """Yield a line for each requirement of an installation with all extras that are for users."""
    for requirement in map(Requirement, metadata.requires("jupyter_gpuckpt") or ()):
        if requirement.marker is None or not {"dev", "docs"} & set(str(requirement.marker).split('"')):
            yield from (f"{requirement.name}=={one.version}" for one in requirement.specifier if one.operator == ">=")


if __name__ == "__main__":
    print(*oldest_versions(), *_OF_THEIR_TIME, sep="\n")
