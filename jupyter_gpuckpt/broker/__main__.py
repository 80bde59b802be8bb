"""Run the broker: ``python -I -m jupyter_gpuckpt.broker GROUP [--containers]``; so it is started as a service."""

from __future__ import annotations

import sys

from ..errors import GpuckptError
from .service import CONTAINERS, run

if __name__ == "__main__":
    try:
        run(sys.argv[1], with_containers=CONTAINERS in sys.argv[2:])
    except GpuckptError as e:
        sys.exit(str(e))
