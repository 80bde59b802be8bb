"""What criu says, and what a user is told to do about it."""

from __future__ import annotations

import errno
from pathlib import Path

from jupyter_gpuckpt.freeze.criu_errors import Cause, CriuError, first_line, in_log

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
    error = in_log(log)
    assert error.words == "Error (criu/sockets.c:500): Can't get 1:16 opt: Operation not supported"
    # An old CRIU on a new Linux: `criu check` does not notice.
    assert error.cause is Cause.OLD_CRIU
    assert "`gpuckpt setup`" in error.cause.advice


_TRIED_OUT = """\
Error (criu/tun.c:85): tun: Unable to create tun: No such file or directory
Warn  (criu/sk-unix.c:224): unix: Unable to open a socket file: Operation not permitted
Error (criu/libnetlink.c:54): -1 reported by netlink: Operation not permitted
Error (criu/net.c:4151): net: Unable to create a veth pair: -1
Error (criu/net.c:1253): net: Unexpected error: -1(Operation not permitted)
Error (criu/util.c:1534): rlimit: Can't setup RLIMIT_NOFILE for self: Operation not permitted
"""


def test_what_criu_only_tries_out_is_never_quoted_for_its_error(tmp_path: Path) -> None:
    log = tmp_path / "restore.log"
    log.write_text(_TRIED_OUT)
    assert in_log(log) == CriuError("", Cause.UNKNOWN)
    log.write_text(f"{_TRIED_OUT}10000: Error (criu/files.c:1418): Can't find it\n")
    assert in_log(log).words.endswith("Can't find it")


def test_what_is_not_known_leads_to_the_log(tmp_path: Path) -> None:
    assert in_log(tmp_path / "none") == CriuError("", Cause.UNKNOWN)
    assert "log" in CriuError.said("Error (criu/x.c:1): never heard of").cause.advice


def test_the_words_of_a_program_that_criu_ran_stand_before_its_error(tmp_path: Path) -> None:
    log = tmp_path / "dump.log"
    # criu says some of its own without a mark.
    unmarked = "(00.1) inet: Can't check shutdown state of inet socket\nCan't check shutdown state of inet socket\n"
    log.write_text(
        f"{unmarked}tar: write error: No space left on device\n(00.2) Error (criu/util.c:9): exited, status=2\n"
    )
    assert in_log(log) == CriuError("tar: write error: No space left on device", Cause.DISK_FULL)


def test_a_full_disk_is_the_cause_though_the_log_was_cut_off(tmp_path: Path) -> None:
    cut = CriuError.said("Error (criu/image.c:3): Can't write").without_disk(tmp_path)
    assert cut.cause is Cause.DISK_FULL
    assert str(tmp_path) in cut.words
    assert "Can't write" in cut.words
    said = CriuError.said("Error (criu/image.c:3): No space left on device")
    assert said.without_disk(tmp_path) is said


def test_a_right_that_only_processes_of_other_users_need_is_named() -> None:
    said = CriuError.said("Error (criu/cr-dump.c:389): Can't get rlimit 0: Operation not permitted")
    assert "CAP_SYS_RESOURCE" in said.cause.advice


def test_errors_of_the_system_are_told_by_their_number() -> None:
    assert Cause.of(OSError(errno.ENOSPC, "in any language")) is Cause.DISK_FULL
    assert Cause.of(ValueError("No space left in the queue")) is Cause.UNKNOWN


def test_the_first_line_is_quoted_where_none_is_marked() -> None:
    assert first_line("\n  CRIU needs a capability\nsetcap it\n") == "CRIU needs a capability"
    assert first_line("") == ""
