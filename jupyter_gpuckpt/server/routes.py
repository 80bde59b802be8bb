"""Which address of the API leads to which handler."""

from __future__ import annotations

from typing import Any

from ..operations.requests import operations
from . import handlers as api
from .service import Service

__all__ = ["ROUTES", "handlers"]

_KERNEL = r"kernels/([^/]+)"
_SNAPSHOT = r"snapshots/([^/]+)"


ROUTES: dict[str, type[Any]] = {
    r"kernels": api.KernelsHandler,
    _KERNEL: api.KernelHandler,
    rf"{_KERNEL}/({'|'.join(kind.op for kind in operations())})": api.OperateHandler,
    rf"{_KERNEL}/auto": api.AutoHandler,
    rf"{_KERNEL}/adopt": api.AdoptHandler,
    rf"{_KERNEL}/executed": api.ExecutedHandler,
    rf"{_KERNEL}/log": api.KernelLogHandler,
    r"hibernated": api.HibernatedHandler,
    r"hibernated/([^/]+)/resume": api.ResumeHandler,
    r"snapshots": api.SnapshotsHandler,
    _SNAPSHOT: api.SnapshotHandler,
    r"removal": api.RemovalHandler,
    rf"{_SNAPSHOT}/rename": api.RenameHandler,
    rf"{_SNAPSHOT}/pin": api.PinHandler,
    rf"{_SNAPSHOT}/push": api.PushHandler,
    rf"{_SNAPSHOT}/export": api.ExportHandler,
    r"pull": api.PullHandler,
    r"import": api.ImportHandler,
    r"import/look": api.LookHandler,
    r"trust": api.TrustHandler,
    rf"{_SNAPSHOT}/log": api.OriginsHandler,
    rf"{_SNAPSHOT}/diff/([^/]+)": api.DifferenceHandler,
    r"operations": api.OperationsHandler,
    r"operations/([^/]+)": api.OperationHandler,
    r"operations/([^/]+)/log": api.OperationLogHandler,
    r"doctor": api.DoctorHandler,
}
"""By the path below ``/api/gpuckpt/``, as a regular expression. ``rest-api.yml`` describes them."""


def handlers(service: Service) -> list[tuple[str, type[Any], dict[str, Any]]]:
    """Return the handlers of the API by their addresses, which a server joins to its own."""
    routes: list[tuple[str, type[Any]]] = [*ROUTES.items(), (r".*", api.NowhereHandler)]
    return [(rf"api/gpuckpt/{path}", handler, {"service": service}) for path, handler in routes]
