"""Which address of the API leads to which handler."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from jupyter_server.utils import url_path_join

from .. import settings
from ..store import Store
from . import handlers
from .events import Events
from .instead import install
from .metrics import register
from .notebooks import follow_files, follow_sessions
from .service import Service

if TYPE_CHECKING:
    from jupyter_server.serverapp import ServerApp

__all__ = ["ROUTES", "add_routes"]

_KERNEL = r"kernels/([^/]+)"
_SNAPSHOT = r"snapshots/([^/]+)"


ROUTES: dict[str, type[Any]] = {
    r"kernels": handlers.KernelsHandler,
    _KERNEL: handlers.KernelHandler,
    rf"{_KERNEL}/save": handlers.SaveHandler,
    rf"{_KERNEL}/restore": handlers.RestoreHandler,
    rf"{_KERNEL}/fork": handlers.ForkHandler,
    rf"{_KERNEL}/move": handlers.MoveHandler,
    rf"{_KERNEL}/(sleep|wake|hibernate)": handlers.SleepingHandler,
    rf"{_KERNEL}/adopt": handlers.AdoptHandler,
    rf"{_KERNEL}/executed": handlers.ExecutedHandler,
    rf"{_KERNEL}/log": handlers.KernelLogHandler,
    r"hibernated": handlers.HibernatedHandler,
    r"hibernated/([^/]+)/resume": handlers.ResumeHandler,
    r"snapshots": handlers.SnapshotsHandler,
    _SNAPSHOT: handlers.SnapshotHandler,
    r"removal": handlers.RemovalHandler,
    rf"{_SNAPSHOT}/rename": handlers.RenameHandler,
    rf"{_SNAPSHOT}/pin": handlers.PinHandler,
    rf"{_SNAPSHOT}/push": handlers.PushHandler,
    rf"{_SNAPSHOT}/export": handlers.ExportHandler,
    r"pull": handlers.PullHandler,
    r"import": handlers.ImportHandler,
    r"import/look": handlers.LookHandler,
    r"trust": handlers.TrustHandler,
    rf"{_SNAPSHOT}/log": handlers.OriginsHandler,
    rf"{_SNAPSHOT}/diff/([^/]+)": handlers.DifferenceHandler,
    r"operations": handlers.OperationsHandler,
    r"operations/([^/]+)": handlers.OperationHandler,
    r"operations/([^/]+)/log": handlers.OperationLogHandler,
    r"doctor": handlers.DoctorHandler,
}
"""By the path below ``/api/gpuckpt/``, as a regular expression. ``rest-api.yml`` describes them."""


def add_routes(app: ServerApp) -> None:
    """Add the API to a server that is starting."""
    assert app.event_logger is not None  # made before any extension is loaded
    events = Events(app.event_logger)
    service = Service(events, app.kernel_manager)
    register(service.look)
    install(app.kernel_manager)
    root = Path(app.kernel_manager.root_dir).absolute()
    follow_sessions(app.session_manager, app.kernel_manager, root)
    follow_files(app.event_logger, Store(settings.store_dir()), events, root)
    base = url_path_join(app.web_app.settings["base_url"], "api/gpuckpt")
    routes = [*ROUTES.items(), (r".*", handlers.NowhereHandler)]
    app.web_app.add_handlers(  # type: ignore[no-untyped-call]
        ".*$",
        [(rf"{base}/{path}", handler, {"service": service}) for path, handler in routes],
    )
