"""The requests of the REST API: each reads its arguments, asks the service, and writes the answer as JSON."""

from __future__ import annotations

import asyncio
import functools
import json
import re
from collections.abc import Callable, Coroutine, Mapping
from contextlib import ExitStack, suppress
from typing import Any, TypeVar, cast
from urllib.parse import unquote

from jupyter_client.multikernelmanager import MultiKernelManager
from jupyter_server.auth.decorator import authorized
from jupyter_server.base.handlers import APIHandler
from tornado import web
from tornado.iostream import StreamClosedError

from ..checked import to_json
from ..errors import (
    BadName,
    Busy,
    Damaged,
    GpuckptError,
    Incompatible,
    KeeperGone,
    NameTaken,
    NoSuchKernel,
    NoSuchSnapshot,
    Pinned,
    Refused,
    Sealed,
    Unavailable,
    Untrusted,
)
from ..operations.requests import operations
from ..spelling import in_a_cell
from . import bodies
from .limits import TooMany
from .operations import NoSuchOperation
from .service import Service
from .snapshots import Snapshots
from .upload import Upload

__all__ = [
    "RESOURCE",
    "AdoptHandler",
    "AutoHandler",
    "DifferenceHandler",
    "DoctorHandler",
    "ExecutedHandler",
    "ExportHandler",
    "HibernatedHandler",
    "ImportHandler",
    "KernelHandler",
    "KernelLogHandler",
    "KernelsHandler",
    "LookHandler",
    "NowhereHandler",
    "OperateHandler",
    "OperationHandler",
    "OperationLogHandler",
    "OperationsHandler",
    "OriginsHandler",
    "PinHandler",
    "PullHandler",
    "PushHandler",
    "RemovalHandler",
    "RenameHandler",
    "ResumeHandler",
    "SnapshotHandler",
    "SnapshotsHandler",
    "TrustHandler",
]

RESOURCE = "gpuckpt"
"""What an authorizer is asked about: ``read`` for what only looks, ``write`` for all else, and for what gives a
kernel's memory away."""


class BadRequest(GpuckptError):
    """The request's body is not what the API asks for."""


_STATUSES: tuple[tuple[type[GpuckptError], int], ...] = (
    (BadRequest, 400),
    (TooMany, 429),
    (BadName, 400),
    (NoSuchKernel, 404),
    (NoSuchSnapshot, 404),
    (NoSuchOperation, 404),
    (NameTaken, 409),
    (Pinned, 409),
    (Busy, 409),
    (Refused, 409),
    (Damaged, 409),
    (Incompatible, 409),
    (Untrusted, 409),
    (Sealed, 409),
    (Unavailable, 503),
    (KeeperGone, 503),
)


class _Handler(APIHandler):
    """What all requests share."""

    auth_resource = RESOURCE

    def initialize(self, service: Service) -> None:
        self.service = service

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        """Write an error; one of ours as Jupyter's clients expect errors, with all of it as ``error``."""
        error = kwargs.get("exc_info", (None, None, None))[1]
        if not isinstance(error, GpuckptError):
            super().write_error(status_code, **kwargs)
            return
        self.set_status(next((status for kind, status in _STATUSES if isinstance(error, kind)), 500))
        if isinstance(error, TooMany):
            self.set_header("Retry-After", str(error.data["retry_after"]))
        self.finish({"message": error.what, "reason": error.why or None, "error": error.spelled(in_a_cell).as_dict()})

    def answer(self, found: object) -> None:
        """Answer with a dataclass, or with JSON."""
        self.finish(to_json(found))

    def set_status(self, status_code: int, reason: str | None = None) -> None:
        """Set the answer's status; with the methods that there are where it is that another is not one of them."""
        super().set_status(status_code, reason)
        if status_code == 405:
            methods = [name.upper() for name in ("get", "post", "patch", "delete") if name in vars(type(self))]
            self.set_header("Allow", ", ".join([*methods, "OPTIONS"]))

    def log_exception(self, kind: Any, error: Any, trace: Any) -> None:
        """Leave errors that are answers out of the log."""
        if not isinstance(error, GpuckptError):
            super().log_exception(kind, error, trace)

    def arguments_in_body(self, **fields: type) -> dict[str, Any]:
        """Return the members of the request's JSON object; those left out have their type's empty value.

        A number that is left out is None.

        Raises
        ------
        BadRequest : as `members_of_body`.
        """
        found = self.members_of_body(**fields)
        return {name: found.get(name, None if kind is int else kind()) for name, kind in fields.items()}

    def flag(self, name: str) -> bool:
        """Return a member of the query that is ``true`` or ``false``; left out it is false. Raises `BadRequest`."""
        said = self.get_query_argument(name, "false")
        if said not in ("true", "false"):
            raise BadRequest("The request cannot be used.", f"Its {name!r} is no such value.", "Send true or false.")
        return said == "true"

    def passphrase(self) -> str:
        """Return what a header gives as `_OPENED_BY`, percent-encoded; empty where none does. Raises `BadRequest`.

        It stands in none of what is logged: addresses are.
        """
        try:
            return unquote(self.request.headers.get(_OPENED_BY, ""), errors="strict")
        except UnicodeDecodeError:
            raise BadRequest(
                "The request cannot be used.", f"Its {_OPENED_BY} is no text.", "Send it as percent-encoded UTF-8."
            ) from None

    async def snapshots(self) -> Snapshots:
        """Return what a request for snapshots is about: those in the folder that is its `store`, or the usual ones."""
        folder = self.get_query_argument("store", "")
        return await self._elsewhere(folder) if folder else self.service.snapshots

    @authorized(action="write")  # type: ignore[untyped-decorator]
    async def _elsewhere(self, folder: str) -> Snapshots:
        """Who may only read is not to look into any folder."""
        return self.service.snapshots_in(folder)

    def members_of_body(self, **fields: type) -> dict[str, Any]:
        """Return those of the members that the request's JSON object has; a number is from 0 to what `_LARGEST` has.

        Raises
        ------
        BadRequest : it is no JSON object, is too long, or has other members or types.
        """
        if len(self.request.body) > _LONGEST_BODY:
            raise _bad_request(f"It has more than {_LONGEST_BODY:,} bytes.", fields)
        try:
            found = json.loads(self.request.body or b"{}")
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, Mapping):
            raise _bad_request("It is not a JSON object.", fields)
        if odd := sorted(found.keys() - fields.keys()):
            raise _bad_request(f"It has {', '.join(ascii(name[:_SHOWN]) for name in odd[:_SHOWN])}.", fields)
        for name, value in found.items():
            kind = fields[name]
            is_beyond = isinstance(value, int) and not 0 <= value <= _LARGEST.get(kind, 0)
            is_odd = isinstance(value, list) and not all(isinstance(one, str) for one in value)
            if type(value) is not (int if kind is Bytes else kind) or is_beyond or is_odd:  # to Python, true is an int
                raise _bad_request(f"Its {name!r} is not of that type.", fields)
        return dict(found)


class Bytes(int):
    """What stands for a number of bytes among a body's types: it may be larger than others."""


_Method = TypeVar("_Method", bound=Callable[..., Coroutine[Any, Any, None]])


def _costly(method: _Method) -> _Method:
    """Have a request that reads a disk, asks a keeper or starts a process be one of those that are limited."""

    @functools.wraps(method)
    async def limited(self: _Handler, *words: str) -> None:
        with self.service.looks.one_more():
            await method(self, *words)

    return cast(_Method, limited)


def _bad_request(why: str, fields: Mapping[str, type]) -> BadRequest:
    known = ", ".join(f"{name} ({_TYPES[kind]})" for name, kind in fields.items())
    return BadRequest("The request's body cannot be used.", why, f"Send a JSON object; it can have: {known}.")


_OPENED_BY = "Gpuckpt-Passphrase"
_LONGEST_BODY = 256 * 1024  # bytes: a keeper takes a mebibyte, in which a character can be three times as long
_SHOWN = 20
"""Of how many odd members an error tells, and how many characters of each."""
_LARGEST = {bool: 1, int: 10**9 - 1, Bytes: 2**53 - 1}
_TYPES: Mapping[type, str] = {
    str: "a string",
    list: "a list of strings",
    bool: "true or false",
    **{kind: f"a number from 0 to {_LARGEST[kind]}" for kind in (int, Bytes)},
}


class KernelsHandler(_Handler):
    """``kernels``"""

    @web.authenticated
    @authorized
    @_costly
    async def get(self) -> None:
        """List the kernels."""
        self.finish(await self.service.kernels(kernel_names(self.kernel_manager)))


def kernel_names(manager: MultiKernelManager) -> dict[str, str]:
    """Return the names of a server's kernels by their ids.

    Jupyter's own list fails while a kernel starts that has not got all its traits yet (jupyter_server 2.21,
    ``last_activity``).
    """
    names = {}
    for kernel_id in manager.list_kernel_ids():
        with suppress(KeyError, web.HTTPError):  # it has just ended
            names[kernel_id] = str(manager.get_kernel(kernel_id).kernel_name)
    return names


_KINDS = {kind.op: kind for kind in operations()}


class OperateHandler(_Handler):
    """``kernels/ID/OPERATION``"""

    @web.authenticated
    @authorized
    @_costly
    async def post(self, kernel_id: str, op: str) -> None:
        """Begin an operation on a kernel."""
        kind = _KINDS[op]
        fields = bodies.members(kind)
        try:
            asked = bodies.request(kind, self.arguments_in_body(**fields))
        except bodies.Unfit as e:
            raise _bad_request(str(e), fields) from None
        operation = await self.service.operate(kind, kernel_id, asked)
        self.set_status(202)
        self.finish(operation.as_dict())


class HibernatedHandler(_Handler):
    """``hibernated``"""

    @web.authenticated
    @authorized
    @_costly
    async def get(self) -> None:
        """List the snapshots of hibernated kernels."""
        self.finish(await self.service.hibernated())


class ResumeHandler(_Handler):
    """``hibernated/NAME/resume``"""

    @web.authenticated
    @authorized
    @_costly
    async def post(self, name: str) -> None:
        """Begin to bring a hibernated kernel back."""
        operation = await self.service.resume(name, self.arguments_in_body(kernel_id=str)["kernel_id"])
        self.set_status(202)
        self.finish(operation.as_dict())


class KernelHandler(_Handler):
    """``kernels/ID``"""

    @web.authenticated
    @authorized
    @_costly
    async def patch(self, kernel_id: str) -> None:
        """Change when a kernel goes to sleep."""
        changes = self.members_of_body(pinned=bool, sleep_after=int)
        self.finish(await self.service.change(kernel_id, changes))


class AutoHandler(_Handler):
    """``kernels/ID/auto``"""

    @web.authenticated
    @authorized
    @_costly
    async def get(self, kernel_id: str) -> None:
        """Tell whether a kernel is saved by itself after its cells."""
        self.answer(await self.service.auto(kernel_id, {}))

    @web.authenticated
    @authorized
    @_costly
    async def post(self, kernel_id: str) -> None:
        """Have a kernel saved by itself after its cells, or no longer."""
        fields = {"on": bool, "after": int, "every": int, "keep": int, "under": Bytes}
        asked = self.members_of_body(**fields)
        if "on" not in asked:
            raise _bad_request("It has no 'on'.", fields)
        if asked.get("keep") == 0:
            raise _bad_request("Its 'keep' is 0: the newest is always kept.", fields)
        if asked.get("every") == 0:
            raise _bad_request("Its 'every' is 0.", fields)
        switch = "on" if asked.pop("on") else "off"
        self.answer(await self.service.auto(kernel_id, {"switch": switch, **asked}))


class AdoptHandler(_Handler):
    """``kernels/ID/adopt``"""

    @web.authenticated
    @authorized
    @_costly
    async def post(self, kernel_id: str) -> None:
        """Hold a kernel that nobody holds."""
        self.arguments_in_body()
        self.finish(await self.service.adopt(kernel_id))


class ExecutedHandler(_Handler):
    """``kernels/ID/executed``"""

    @web.authenticated
    @authorized
    @_costly
    async def get(self, kernel_id: str) -> None:
        """Tell which cells a kernel has executed."""
        self.answer(await self.service.executed(kernel_id))


class KernelLogHandler(_Handler):
    """``kernels/ID/log``"""

    @web.authenticated
    @authorized
    @_costly
    async def get(self, kernel_id: str) -> None:
        """Tell what the keeper of a kernel has logged."""
        self.finish(await self.service.kernel_log(kernel_id))


class SnapshotsHandler(_Handler):
    """``snapshots``"""

    @web.authenticated
    @authorized
    @_costly
    async def get(self) -> None:
        """List the snapshots."""
        self.finish(await (await self.snapshots()).all())


class SnapshotHandler(_Handler):
    """``snapshots/NAME``"""

    @web.authenticated
    @authorized
    @_costly
    async def get(self, name: str) -> None:
        """Tell all about one snapshot."""
        self.answer(await (await self.snapshots()).details(name))

    @web.authenticated
    @authorized
    @_costly
    async def patch(self, name: str) -> None:
        """Change what people say of a snapshot."""
        changes = self.members_of_body(message=str, tags=list)
        self.finish(await (await self.snapshots()).describe(name, changes.get("message"), changes.get("tags")))

    @web.authenticated
    @authorized
    @_costly
    async def delete(self, name: str) -> None:
        """Remove a snapshot."""
        self.finish(await (await self.snapshots()).remove(name))


class RemovalHandler(_Handler):
    """``removal``"""

    @web.authenticated
    @authorized
    @_costly
    async def post(self) -> None:
        """Remove several snapshots, or say what that would free."""
        asked = self.arguments_in_body(names=list, dry_run=bool)
        if not asked["names"]:
            raise _bad_request("It has no 'names'.", {"names": list, "dry_run": bool})
        self.finish(await (await self.snapshots()).remove_all(asked["names"], asked["dry_run"]))


class RenameHandler(_Handler):
    """``snapshots/NAME/rename``"""

    @web.authenticated
    @authorized
    @_costly
    async def post(self, name: str) -> None:
        """Give a snapshot another name."""
        self.answer(await (await self.snapshots()).rename(name, self.arguments_in_body(name=str)["name"]))


class PinHandler(_Handler):
    """``snapshots/NAME/pin``"""

    @web.authenticated
    @authorized
    @_costly
    async def post(self, name: str) -> None:
        """Have a snapshot kept, or no longer."""
        self.finish(await (await self.snapshots()).pin(name, self.arguments_in_body(pinned=bool)["pinned"]))


class PushHandler(_Handler):
    """``snapshots/NAME/push``"""

    @web.authenticated
    @authorized
    @_costly
    async def post(self, name: str) -> None:
        """Begin to send a snapshot elsewhere."""
        asked = self.arguments_in_body(url=str, replace=bool)
        operation = await self.service.transfers.push(name, _checked_url(asked["url"]), asked["replace"])
        self.set_status(202)
        self.finish(operation.as_dict())


class ExportHandler(_Handler):
    """``snapshots/NAME/export``"""

    @web.authenticated
    @authorized(action="write")  # type: ignore[untyped-decorator]
    @_costly
    async def get(self, name: str) -> None:
        """Send a snapshot as one file."""

        def begin(size: int) -> None:
            self.set_header("Content-Type", _FILE)
            # The store holds it, so that its name, behind a notebook's, has only letters, digits and . _ - ~
            self.set_header("Content-Disposition", f'attachment; filename="{name.rpartition(":")[2]}.gpuckpt"')
            self.set_header("Content-Length", str(size))  # by which a browser says how much is left
            self.set_header("Cache-Control", "no-store")

        async def send(piece: bytes) -> None:
            self.write(piece)
            await asyncio.wait_for(self.flush(), _PATIENCE)  # else it would stay one of those that are limited

        try:
            await self.service.transfers.export(name, begin, send)
        except StreamClosedError:
            return  # the client has gone
        except Exception:
            if not self._headers_written:
                raise
            # The only way left to say that this is not all: the answer does not end as it has to.
            self.log.exception("The download of the snapshot %s was broken off.", name)
            self.request.connection.stream.close()  # type: ignore[union-attr]
            return
        self.finish(set_content_type=_FILE)


_FILE = "application/octet-stream"
_PATIENCE = 300.0
"""For how long a client may take nothing of a download, in seconds."""


class PullHandler(_Handler):
    """``pull``"""

    @web.authenticated
    @authorized
    @_costly
    async def post(self) -> None:
        """Begin to fetch a snapshot from elsewhere."""
        asked = self.arguments_in_body(url=str, name=str, replace=bool, older=bool, passphrase=str)
        operation = await self.service.transfers.pull(**{**asked, "url": _checked_url(asked["url"])})
        self.set_status(202)
        self.finish(operation.as_dict())


class LookHandler(_Handler):
    """``import/look``"""

    @web.authenticated
    @authorized
    @_costly
    async def post(self) -> None:
        """Judge a file by how it begins."""
        if len(self.request.body) > _LONGEST_HEAD:
            raise BadRequest("The request's body cannot be used.", f"It has more than {_LONGEST_HEAD:,} bytes.", _HEAD)
        size = self.get_query_argument("size", "")
        if not re.fullmatch(r"[0-9]{1,18}", size, re.ASCII):
            raise BadRequest("The request cannot be used.", "Its 'size' is no number of bytes.", _HEAD)
        older, passphrase = self.flag("older"), self.passphrase()
        self.answer(await self.service.transfers.look_at(self.request.body, int(size), older, passphrase))


_LONGEST_HEAD = 20 * 1024 * 1024
_HEAD = "Send the first bytes of the file, and how many all of it has as `size`."


@web.stream_request_body
class ImportHandler(_Handler):
    """``import``"""

    async def prepare(self) -> None:  # type: ignore[override]  # as in the class above
        """Begin before the body comes, of which no more is kept than is being read."""
        self._upload: Upload | None = None
        self._stack = ExitStack()
        await super().prepare()
        if self.request.method == "POST":
            await self._begin()

    @authorized  # which refuses whoever is not known, too
    async def _begin(self) -> None:
        replace, older, passphrase = self.flag("replace"), self.flag("older"), self.passphrase()
        length = self.request.headers.get("Content-Length", "")
        if not re.fullmatch(r"[0-9]{1,18}", length, re.ASCII):
            raise BadRequest("The request cannot be used.", "It does not say how long it is.", "Send Content-Length.")
        self._stack.enter_context(self.service.looks.one_more())
        self._upload = await self.service.transfers.import_from(int(length), replace, older, passphrase)
        self.request.connection.set_max_body_size(int(length))  # type: ignore[union-attr]

    async def data_received(self, chunk: bytes) -> None:
        """Pass on what has come."""
        if self._upload is not None:
            await self._upload.take(chunk)

    @web.authenticated
    @authorized
    async def post(self) -> None:
        """Bring in the snapshot that the body is."""
        assert self._upload is not None
        self.answer(await self.service.transfers.imported(self._upload))

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        """Say that no other request can come this way: Tornado closes a connection whose body it has not read."""
        self.set_header("Connection", "close")
        super().write_error(status_code, **kwargs)

    def on_connection_close(self) -> None:
        """Give up what will not come any more."""
        super().on_connection_close()
        self._stack.close()
        if self._upload is not None:
            self._giving_up = asyncio.ensure_future(self._upload.take(None))

    def on_finish(self) -> None:
        """Let others in."""
        super().on_finish()
        self._stack.close()


class TrustHandler(_Handler):
    """``trust``"""

    @web.authenticated
    @authorized
    @_costly
    async def post(self) -> None:
        """Trust somebody's key."""
        asked = self.arguments_in_body(key=str, comment=str)
        self.finish(await self.service.trust(asked["key"], asked["comment"]))


def _checked_url(url: str) -> str:
    """Return an address that does not depend on the folder in which the server was started. Raises `BadRequest`."""
    if "://" not in url and not url.startswith("/"):
        raise BadRequest(
            "The address cannot be used.",
            "It is neither an address such as s3://bucket/folder nor the path of a folder from / on.",
            "Send one of these as `url`.",
        )
    return url


class OriginsHandler(_Handler):
    """``snapshots/NAME/log``"""

    @web.authenticated
    @authorized
    @_costly
    async def get(self, name: str) -> None:
        """List a snapshot and those that it came from."""
        self.finish(await (await self.snapshots()).origins(name))


class DifferenceHandler(_Handler):
    """``snapshots/NAME/diff/OTHER``"""

    @web.authenticated
    @authorized
    @_costly
    async def get(self, name: str, other: str) -> None:
        """Tell what is in the other snapshot and not in this one."""
        self.answer(await (await self.snapshots()).difference(name, other))


class OperationsHandler(_Handler):
    """``operations``"""

    @web.authenticated
    @authorized
    async def get(self) -> None:
        """List the operations."""
        self.finish({"operations": [operation.as_dict() for operation in self.service.operations.all()]})


class OperationHandler(_Handler):
    """``operations/ID``"""

    @web.authenticated
    @authorized
    async def get(self, operation_id: str) -> None:
        """Tell how far an operation is, or how it ended."""
        self.finish(self.service.operations.get(operation_id).as_dict())

    @web.authenticated
    @authorized
    async def delete(self, operation_id: str) -> None:
        """Cancel an operation."""
        self.finish((await self.service.cancel(operation_id)).as_dict())


class OperationLogHandler(_Handler):
    """``operations/ID/log``"""

    @web.authenticated
    @authorized
    async def get(self, operation_id: str) -> None:
        """Tell what was logged during an operation."""
        self.finish(self.service.operation_log(operation_id))


class DoctorHandler(_Handler):
    """``doctor``"""

    @web.authenticated
    @authorized
    @_costly
    async def get(self) -> None:
        """Judge the machine."""
        self.finish(await self.service.doctor())


class NowhereHandler(_Handler):
    """An address below ours that leads nowhere."""

    async def prepare(self) -> None:  # type: ignore[override]  # as in the class above
        """Say so, as JSON; Jupyter Server would answer with a page for people."""
        await super().prepare()
        raise web.HTTPError(404, "The API of gpuckpt has no such address.")
