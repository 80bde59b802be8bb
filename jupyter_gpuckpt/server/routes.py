"""Which address of the API leads to which handler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jupyter_server.utils import url_path_join

from . import handlers
from .events import Events
from .service import Service

if TYPE_CHECKING:
    from jupyter_server.serverapp import ServerApp

__all__ = ["OPTIONAL", "ROUTES", "add_routes"]

_KERNEL = r"kernels/([^/]+)"
_SNAPSHOT = r"snapshots/([^/]+)"


def _not_yet(what: str, instead: str) -> tuple[type[Any], dict[str, str]]:
    return handlers.NotYetHandler, {"what": what, "instead": instead}


_COPY = "Copy the store's folder (GPUCKPT_STORE)."

ROUTES: dict[str, tuple[type[Any], dict[str, str]]] = {
    r"kernels": (handlers.KernelsHandler, {}),
    rf"{_KERNEL}/save": (handlers.SaveHandler, {}),
    rf"{_KERNEL}/restore": (handlers.RestoreHandler, {}),
    rf"{_KERNEL}/executed": (handlers.ExecutedHandler, {}),
    rf"{_KERNEL}/log": (handlers.KernelLogHandler, {}),
    rf"{_KERNEL}/fork": _not_yet("Forking a kernel", "Save it, and restore the snapshot in another notebook."),
    r"snapshots": (handlers.SnapshotsHandler, {}),
    _SNAPSHOT: (handlers.SnapshotHandler, {}),
    rf"{_SNAPSHOT}/rename": (handlers.RenameHandler, {}),
    rf"{_SNAPSHOT}/pin": (handlers.PinHandler, {}),
    rf"{_SNAPSHOT}/log": (handlers.OriginsHandler, {}),
    rf"{_SNAPSHOT}/diff/([^/]+)": (handlers.DifferenceHandler, {}),
    rf"{_SNAPSHOT}/push": _not_yet("Sending a snapshot elsewhere", _COPY),
    r"pull": _not_yet("Fetching a snapshot from elsewhere", _COPY),
    r"operations": (handlers.OperationsHandler, {}),
    r"operations/([^/]+)": (handlers.OperationHandler, {}),
    r"operations/([^/]+)/log": (handlers.OperationLogHandler, {}),
    r"doctor": (handlers.DoctorHandler, {}),
}
"""By the path below ``/api/gpuckpt/``, as a regular expression. ``rest-api.yml`` describes them."""

OPTIONAL = {"fork": rf"{_KERNEL}/fork", "push": rf"{_SNAPSHOT}/push", "pull": r"pull"}
"""What a version of the API may lack, with its address: the answer to `kernels` names what is there."""


def _features() -> list[str]:
    return [name for name, path in OPTIONAL.items() if ROUTES[path][0] is not handlers.NotYetHandler]


def add_routes(app: ServerApp) -> None:
    """Add the API to a server that is starting."""
    assert app.event_logger is not None  # made before any extension is loaded
    service = Service(Events(app.event_logger), _features())
    base = url_path_join(app.web_app.settings["base_url"], "api/gpuckpt")
    routes = [*ROUTES.items(), (r".*", (handlers.NowhereHandler, {}))]
    app.web_app.add_handlers(  # type: ignore[no-untyped-call]
        ".*$",
        [(rf"{base}/{path}", handler, {"service": service, **extra}) for path, (handler, extra) in routes],
    )
