"""Requests to a server of JupyterHub's follow the scopes of the token that they come with."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub import Hub, Server
from notebooks import wait_until
from people import Machine

_PAGE = (Path(__file__).parents[2] / "docs" / "jupyterhub.md").read_text()
_SCOPES, _AUTHORIZER = (
    next(block for block in re.findall(r"^```python\n(.*?)^```", _PAGE, re.MULTILINE | re.DOTALL) if sign in block)
    for sign in ("custom_scopes =", "authorizer_class =")
)
"""The configuration that the page has."""
_LOOKS = ("kernels", "snapshots", "hibernated", "operations", "doctor")


@pytest.fixture
def alice(hub: Hub) -> Server:
    alice = hub.start("alice")
    alice.run("x = 41")
    return alice


def _status(server: Server, method: str, path: str, **how: object) -> int:
    return server.request(method, f"api/gpuckpt/{path}", **how).status_code


def test_a_token_without_access_to_the_server_can_do_nothing(hub: Hub, alice: Server) -> None:
    kernel = alice.opened()
    hub.start("bob")
    strangers = {
        "bob's, for his own server": hub.token("bob", "access:servers!user=bob"),
        "alice's, which only tells who she is": hub.token("alice", "read:users:name!user=alice"),
    }
    for token in strangers.values():
        stranger = alice.with_token(token)
        assert {_status(stranger, "GET", path) for path in _LOOKS} == {403}
        assert _status(stranger, "POST", f"kernels/{kernel}/save", json={"name": "mine"}) == 403
        assert stranger.request("GET", "metrics").status_code == 403
        assert _status(stranger, "POST", "hibernated/train/resume", json={}) == 403
    assert _status(alice.with_token("no-token-of-anybody"), "GET", "kernels") == 403
    hers = alice.with_token(hub.token("alice", "access:servers!user=alice"))
    assert {_status(hers, "GET", path) for path in _LOOKS} == {200}
    # A scrape does not wait for kernels that take a moment to answer: the next one has what they said.
    wait_until(lambda: "gpuckpt_kernels" in hers.request("GET", "metrics").text)
    assert _status(hers, "POST", f"kernels/{kernel}/save", json={"name": "mine"}) == 202


@pytest.fixture
def granular(machine: Machine) -> Iterator[Hub]:
    hub = Hub(machine, config=_SCOPES, server_config=_AUTHORIZER)
    yield hub
    hub.close()


def test_a_token_that_may_only_read_cannot_save_nor_have_what_is_in_a_snapshot(granular: Hub) -> None:
    access = "access:servers!user=alice"
    alice = granular.start("alice").with_token(granular.token("alice", access, "custom:gpuckpt:write"))
    reader = alice.with_token(granular.token("alice", access, "custom:gpuckpt:read"))
    neither = alice.with_token(granular.token("alice", access))
    assert {_status(neither, "GET", path) for path in _LOOKS} == {403}
    assert {_status(reader, "GET", path) for path in _LOOKS} == {200}
    kernel = alice.opened()
    save = {"name": "mine"}
    assert _status(reader, "POST", f"kernels/{kernel}/save", json=save) == 403
    alice.ask("POST", f"kernels/{kernel}/save", save, 202)
    (snapshot,) = wait_until(lambda: [one["name"] for one in reader.ask("GET", "snapshots")["snapshots"]])
    assert _status(reader, "DELETE", f"snapshots/{snapshot}") == 403
    assert _status(reader, "GET", f"snapshots/{snapshot}/export") == 403
    assert _status(reader, "GET", "snapshots?store=/etc") == 403
    assert _status(alice, "DELETE", f"snapshots/{snapshot}") == 200
