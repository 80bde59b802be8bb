"""Run the broker: ``python -I -m jupyter_gpuckpt.broker GROUP``; as a service that is how it is started."""

from __future__ import annotations

import sys

from ..errors import GpuckptError
from .service import run

if __name__ == "__main__":
    try:
        run(sys.argv[1])
    except GpuckptError as e:
        sys.exit(str(e))
