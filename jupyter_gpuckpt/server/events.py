"""What happens to operations and snapshots, told through Jupyter Server's event system."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jupyter_events import EventLogger

__all__ = ["OPERATION", "SNAPSHOTS", "Events"]

OPERATION = "https://schema.jupyter.org/jupyter_gpuckpt/operation/v1"
SNAPSHOTS = "https://schema.jupyter.org/jupyter_gpuckpt/snapshots/v1"
"""The ids of the two schemas, in ``event_schemas/``."""

_SCHEMAS = Path(__file__).with_name("event_schemas")


class Events:
    """The two kinds of events; a browser hears them at ``/api/events/subscribe``, as it does all of the server's."""

    def __init__(self, logger: EventLogger) -> None:
        self._logger = logger
        for schema in sorted(_SCHEMAS.glob("*.yaml")):
            logger.register_event_schema(schema)

    def operation(self, outline: dict[str, Any]) -> None:
        """Tell that an operation has begun, moved on or ended."""
        self._logger.emit(schema_id=OPERATION, data=outline)

    def snapshots(self, change: str, name: str) -> None:
        """Tell that a snapshot was ``saved``, ``pulled``, ``removed``, ``renamed`` or ``labelled`` by this server."""
        self._logger.emit(schema_id=SNAPSHOTS, data={"change": change, "name": name})
