"""Where this kernel's Python and its modules lie: what has to go with a snapshot for later imports to work."""

from __future__ import annotations

import os
import sys
import sysconfig

__all__ = ["describe"]

_OWN_ENVIRONMENT = ("pyvenv.cfg", "conda-meta")
"""What stands at the top of a folder that is nothing but one Python environment."""
_FOR_PACKAGES = ("site-packages", "dist-packages")


def describe() -> dict[str, list[str]]:
    """Return absolute paths: ``folders`` that are kept whole, ``modules``, of which only modules are, and ``files``.

    A folder of ``sys.path`` that is not made for packages (the notebook's own, say) holds other things as well.
    """
    paths = sysconfig.get_paths()
    folders = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    if any(os.path.exists(os.path.join(sys.prefix, mark)) for mark in _OWN_ENVIRONMENT):  # noqa: PTH110, PTH118
        folders.append(sys.prefix)
    modules = []
    files = [path for path in (sys.executable, getattr(sys, "_base_executable", "")) if path]
    for entry in sys.path:
        try:
            path = os.path.abspath(entry)  # noqa: PTH100 - its links are the keeper's to follow
        except FileNotFoundError:  # of a working folder that is gone nothing is imported
            continue
        if os.path.isfile(path):  # noqa: PTH113
            files.append(path)  # an archive of modules
        elif os.path.basename(path) in _FOR_PACKAGES:  # noqa: PTH119
            folders.append(path)
        else:
            modules.append(path)
    modules = [path for path in modules if not any(path == top or path.startswith(top + "/") for top in folders)]
    return {key: sorted(set(found)) for key, found in (("folders", folders), ("modules", modules), ("files", files))}
