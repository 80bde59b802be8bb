"""Who may ask for what: every route, without a token, without XSRF, from another origin, and with read-only rights."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
import yaml
from jupyter_servers import Server, running

import jupyter_gpuckpt.server.routes
from jupyter_gpuckpt.server.routes import ROUTES

SPEC = Path(jupyter_gpuckpt.server.routes.__file__).with_name("rest-api.yml")
_EXAMPLES = {
    "kernel_id": "01234567-89ab-cdef-0123-456789abcdef",
    "name": "some-name",
    "other": "other-name",
    "id": "0" * 32,
}
_METHODS = ("get", "post", "put", "patch", "delete")
_READ_ONLY = """
from jupyter_server.auth import Authorizer

class ReadOnly(Authorizer):
    def is_authorized(self, handler, user, action, resource):
        assert resource == "gpuckpt" or not handler.request.path.startswith("/api/gpuckpt"), resource
        return action == "read"

c.ServerApp.authorizer_class = ReadOnly
"""


def _described() -> list[tuple[str, str]]:
    """Return method and path of all that the API's description has."""
    paths = yaml.safe_load(SPEC.read_text())["paths"]
    return [(method, path) for path, item in paths.items() for method in item if method in _METHODS]


def _path(template: str) -> str:
    return re.sub(r"{(\w+)}", lambda match: _EXAMPLES[match[1]], template).lstrip("/")


REQUESTS = [(method.upper(), _path(template)) for method, template in _described()]
WRITES = [(method, path) for method, path in REQUESTS if method != "GET"]
GIVES_MEMORY_AWAY = {("GET", "snapshots/some-name/export")}


def test_the_description_has_every_route_and_no_other() -> None:
    described = {(method, _path(template)) for method, template in _described()}
    served = {
        (method, path)
        for pattern, handler in ROUTES.items()
        for path in {path for _, path in described if re.fullmatch(pattern, path)} or {f"not described: {pattern}"}
        for method in _METHODS
        if method in vars(handler)
    }
    assert served == described


@pytest.fixture(scope="module")
def read_only(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("read-only"), _READ_ONLY) as started:
        yield started


@pytest.fixture(scope="module")
def browser(server: Server) -> requests.Session:
    """One who has logged in and has the cookies for it, among them the one against XSRF."""
    session = requests.Session()
    session.get(f"{server.url}login", timeout=60)
    form = {"password": "token-of-the-tests", "_xsrf": session.cookies["_xsrf"]}
    session.post(f"{server.url}login", data=form, timeout=60).raise_for_status()
    return session


@pytest.mark.parametrize(("method", "path"), REQUESTS)
def test_without_a_token_nothing_is_answered(server: Server, method: str, path: str) -> None:
    for headers in ({}, {"Authorization": "token wrong"}):
        response = requests.request(method, f"{server.url}api/gpuckpt/{path}", headers=headers, timeout=60)
        assert response.status_code == 403
        assert set(response.json()) <= {"message", "reason"}


@pytest.mark.parametrize(("method", "path"), WRITES)
def test_a_cookie_alone_changes_nothing(server: Server, browser: requests.Session, method: str, path: str) -> None:
    address = f"{server.url}api/gpuckpt/{path}"
    without = browser.request(method, address, json={}, timeout=60)
    assert without.status_code == 403
    assert "_xsrf" in without.json()["message"]
    if path == "import":  # it is closed, since the file is not read, and a client must not send the next one there
        assert without.headers["Connection"] == "close"
    allowed = {"X-XSRFToken": browser.cookies["_xsrf"]}
    assert browser.request(method, address, json={}, headers=allowed, timeout=60).status_code != 403


@pytest.mark.parametrize(("method", "path"), REQUESTS)
def test_another_origin_is_refused(server: Server, browser: requests.Session, method: str, path: str) -> None:
    headers = {"Origin": "http://elsewhere.example", "X-XSRFToken": browser.cookies["_xsrf"]}
    response = browser.request(method, f"{server.url}api/gpuckpt/{path}", json={}, headers=headers, timeout=60)
    assert response.status_code in (403, 404)
    assert "error" not in response.json()
    assert not response.ok


@pytest.mark.parametrize(("method", "path"), REQUESTS)
def test_read_only_rights_read_and_change_nothing(read_only: Server, method: str, path: str) -> None:
    response = read_only.request(method, f"api/gpuckpt/{path}", json={})
    if method == "GET" and (method, path) not in GIVES_MEMORY_AWAY:
        assert response.status_code != 403
    else:
        assert response.status_code == 403
        assert "not authorized to write on resource: gpuckpt" in response.json()["message"]
