"""What apt is set up with, in both of its formats."""

from __future__ import annotations

import shutil

import pytest

from jupyter_gpuckpt.machine.apt_sources import (
    AptSource,
    configured_sources,
    parse_lines,
    parse_stanzas,
)

LINES = """\
# deb http://old.example/debian bookworm main
deb http://mirror.example/debian bookworm main contrib  # the mirror
deb-src http://mirror.example/debian bookworm main
deb [arch=amd64,arm64 signed-by=/k/a.gpg trusted=yes] https://b.example/x noble main universe
deb cdrom:[Debian GNU/Linux 12 _Bookworm_]/ bookworm main
"""

STANZAS = """\
# a comment
Types: deb deb-src
URIs: http://mirror.example/debian
  http://second.example/debian
Suites: bookworm bookworm-updates
Components: main
# in between
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 mDMEYCQ
 -----END PGP PUBLIC KEY BLOCK-----

Enabled: no
Types: deb
URIs: http://off.example/debian
Suites: bookworm
Components: main

Types: deb-src
URIs: http://source.example/debian
Suites: bookworm
Components: main
"""


def test_lines() -> None:
    first, second = parse_lines(LINES)
    assert first == AptSource("http://mirror.example/debian", ("bookworm",), ("main", "contrib"), ())
    assert second.uris == "https://b.example/x"
    assert second.components == ("main", "universe")
    assert dict(second.options) == {
        "architectures": "amd64 arm64",
        "signed-by": "/k/a.gpg",
        "trusted": "yes",
    }


def test_stanzas() -> None:
    (source,) = parse_stanzas(STANZAS)
    assert source.uris == "http://mirror.example/debian http://second.example/debian"
    assert source.suites == ("bookworm", "bookworm-updates")
    assert source.components == ("main",)
    assert "mDMEYCQ" in dict(source.options)["signed-by"]


@pytest.mark.parametrize("source", [*parse_lines(LINES), *parse_stanzas(STANZAS)])
def test_another_release_keeps_the_place_and_the_keys(source: AptSource) -> None:
    (again,) = parse_stanzas(source.stanza("trixie", "main"))
    assert again.suites == ("trixie",)
    assert again.components == ("main",)
    assert again.uris == source.uris
    assert again.options == source.options


@pytest.mark.skipif(shutil.which("apt-config") is None, reason="a system without apt")
def test_what_this_systems_apt_is_set_up_with() -> None:
    assert any("main" in source.components for source in configured_sources())
