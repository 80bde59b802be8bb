"""What criu says, and what a person is told to do about it."""

from __future__ import annotations

from pathlib import Path

from jupyter_gpuckpt.freeze import criu

_LOG = """\
(00.000012) Error (criu/util.c:1): Can't setup RLIMIT_NOFILE for self
(00.020113) Error (criu/sk-inet.c:839): inet: Can't check shutdown state of inet socket
(00.031207) Warn  (criu/kerndat.c:2): harmless
(00.102233)  10000: Error (criu/sockets.c:500): Can't get 1:16 opt: Operation not supported
(00.102300) Error (criu/cr-dump.c:2111): Dumping FAILED.
"""


def test_the_first_error_is_quoted_and_comes_with_advice(tmp_path: Path) -> None:
    log = tmp_path / "dump.log"
    log.write_text(_LOG)
    said = criu.first_error(log)
    assert said == "Error (criu/sockets.c:500): Can't get 1:16 opt: Operation not supported"
    # An old CRIU on a new Linux: `criu check` does not notice.
    assert "`gpuckpt setup`" in criu.advice(said)


def test_what_is_not_known_leads_to_the_log(tmp_path: Path) -> None:
    assert criu.first_error(tmp_path / "none") == ""
    assert "log" in criu.advice("Error (criu/x.c:1): never heard of")
