"""Whatever one who may use the API sends, he is told what is wrong with it: none of it is the server's own failure."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest
from jupyter_servers import TOKEN, Server
from test_access import SPEC, _described

IDS = {
    "long": "a" * 5000,
    "longer than a file's name": "a" * 250,
    "a folder": "..",
    "a path": quote("../../etc/passwd", safe=""),
    "NUL": "%00",
    "a line's end": "a%0Ab",
    "no UTF-8": "%FF%FE",
    "half a character": "%ED%A0%80",
    "digits of elsewhere": quote("٣" * 8),
    "of a long notebook": quote("n" * 5000 + ".ipynb:it"),
    "of a notebook that cannot be": quote("\0.ipynb:it", safe=""),
    "colons": ":::",
    "for a terminal": quote("\x1b[2J", safe=""),
}
BODIES = {
    "no JSON": b"{",
    "a list": b"[]",
    "no number": b"1e999",
    "no UTF-8": b"\xff\xfe\x00",
    "deep": b'{"a":' * 40_000,
    "deep and whole": b'{"name":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "many digits": b'{"gpu":' + b"9" * 10_000 + b"}",
    "numbers that are none": b'{"gpu":NaN,"sleep_after":Infinity}',
    "other types": b'{"name":{},"url":[],"gpu":"x","count":1.5,"pinned":0,"kernel_id":1,"from":null}',
    "many members": json.dumps({f"member {n}": n for n in range(10_000)}).encode(),
    "long": json.dumps({"message": "m" * 2_000_000, "name": "it", "url": "/x"}).encode(),
}
ADDRESSES = [
    *("", "x", "/\ud800", "file:///\0", "http://[", "ftp://host/", "a\nb://c"),
    *("/" + "a" * 5000, "/dev/null", "/proc/self/mem", "http://a:b:c/", "sftp://h:x/", "http://" + "a" * 70 + "/x"),
]


def sent(server: Server, method: str, path: str, body: bytes | None = None) -> tuple[int, Any]:
    """Send a request as it is, with nothing put right on its way; return the answer's status, and its JSON."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://").rstrip("/"), timeout=60)
    try:
        headers = {"Authorization": f"token {TOKEN}", "Content-Type": "application/json"}
        connection.request(method.upper(), f"/api/gpuckpt/{path}", body, headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def filled(template: str, value: str) -> str:
    """Return the path of a request, with a value for all that it leaves open."""
    for name in ("kernel_id", "name", "other", "id"):
        template = template.replace(f"{{{name}}}", value)
    return template.lstrip("/")


@pytest.mark.parametrize("odd", IDS)
def test_an_odd_id_is_told_of(server: Server, odd: str) -> None:
    asked = [(method, template) for method, template in _described() if "{" in template]
    assert len(asked) > 20, SPEC
    for method, template in asked:
        status, said = sent(server, method, filled(template, IDS[odd]), None if method == "get" else b"{}")
        assert status in (400, 404), (method, template, said)
        assert said["message"]


@pytest.mark.parametrize("odd", BODIES)
def test_an_odd_body_is_told_of(server: Server, odd: str) -> None:
    for method, template in _described():
        if method in ("post", "patch"):
            status, said = sent(server, method, filled(template, "0" * 32), BODIES[odd])
            # What is imported is a file, and no JSON.
            assert status == (409 if template == "/import" else 400), (method, template, said)
            assert len(json.dumps(said)) < 3000


@pytest.mark.parametrize("address", ADDRESSES)
def test_an_odd_address_is_told_of(server: Server, address: str) -> None:
    status, said = sent(server, "post", "pull", json.dumps({"url": address, "name": "it"}).encode())
    assert status in (202, 400, 409)
    if status == 202:
        assert server.finish(said)["error"]["kind"] == "RemoteError"


@pytest.fixture(scope="module")
def kernel(server: Server) -> Iterator[str]:
    with server.notebook() as (kernel_id, notebook):
        yield kernel_id
        assert notebook.value("1") == "1"


@pytest.mark.criu
@pytest.mark.parametrize("number", [-1, 10**9, 2**63, 10**400, True, 1.0, None, "1"])
def test_no_number_is_too_large_for_what_it_is_given_to(server: Server, kernel: str, number: object) -> None:
    for method, path, name in (("patch", "", "sleep_after"), ("post", "/move", "gpu"), ("post", "/fork", "gpu")):
        status, said = sent(server, method, f"kernels/{kernel}{path}", json.dumps({name: number}).encode())
        assert (status, said["error"]["kind"]) == (400, "BadRequest")


@pytest.mark.criu
def test_a_message_is_what_one_may_type_in_any_letters(server: Server, kernel: str) -> None:
    for number, message in enumerate(("\ud800", "\0\x1b[2J", "é" * 120_000)):
        body = json.dumps({"name": f"n{number}", "message": message}, ensure_ascii=number < 2).encode()
        status, begun = sent(server, "post", f"kernels/{kernel}/save", body)
        assert status == 202
        assert server.finish(begun)["state"] == "done"
        assert sent(server, "get", f"snapshots/n{number}")[1]["message"] == message
