"""Which CRIU is used, and what a user is told of the ones that are not."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest

from jupyter_gpuckpt import installed, settings
from jupyter_gpuckpt.errors import Unavailable
from jupyter_gpuckpt.freeze.criu_program import (
    check,
    find_criu,
    minimum_version,
    program_in_prefix,
    refuse_open_sockets,
    version_text,
)

OLD = "#!/bin/sh\necho 'Version: 3.17.1'\n"
NEW = "#!/bin/sh\necho 'Version: 4.2'\necho 'GitID: v4.2'\n"
BROKEN = "#!/bin/sh\necho 'error while loading shared libraries: libnet.so.1' >&2\nexit 127\n"
NO_KERNEL = """#!/bin/sh
case "$*" in
*--version*) echo 'Version: 4.2' ;;
*)
  echo 'Error (criu/rlimit.c:1): rlimit: Cannot setup RLIMIT_NOFILE for self' >&2
  echo 'Error (criu/cr-check.c:42): Kernel lacks everything' >&2
  echo 'Error (criu/cr-check.c:43): And more' >&2
  exit 1 ;;
esac
"""


@pytest.fixture(autouse=True)
def _nothing_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("GPUCKPT_CRIU", raising=False)
    monkeypatch.setenv("GPUCKPT_CRIU_PREFIX", str(tmp_path / "no-prefix"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr("jupyter_gpuckpt.freeze.criu_program._SYSTEM_FOLDERS", ())


def _program(tmp_path: Path, text: str, folder: str = "bin") -> Path:
    path = tmp_path / folder / "criu"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_nothing_installed_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(Unavailable) as caught:
        find_criu()
    assert version_text(minimum_version()) in caught.value.what
    assert str(tmp_path / "no-prefix") in caught.value.why
    assert "`gpuckpt setup`" in caught.value.then


def test_a_new_enough_program_in_path_is_used(tmp_path: Path) -> None:
    path = _program(tmp_path, NEW)
    program = find_criu()
    assert program.path == str(path)
    assert program.version == (4, 2, 0)
    assert program.origin == "system"
    assert program.argv[:2] == (str(path), "--no-default-config")


def test_an_old_program_is_refused_by_name_and_version(tmp_path: Path) -> None:
    path = _program(tmp_path, OLD)
    with pytest.raises(Unavailable) as caught:
        find_criu()
    assert caught.value.data["tried"][str(path)] == f"version 3.17.1 is older than {version_text(minimum_version())}"
    assert str(path) in caught.value.why


def test_a_newer_one_later_in_path_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _program(tmp_path, OLD)
    path = _program(tmp_path, NEW, "bin2")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{tmp_path / 'bin2'}")
    assert find_criu().path == str(path)


def test_a_program_that_does_not_start_is_quoted(tmp_path: Path) -> None:
    path = _program(tmp_path, BROKEN)
    with pytest.raises(Unavailable) as caught:
        find_criu()
    assert "libnet.so.1" in caught.value.data["tried"][str(path)]


def test_a_program_that_was_replaced_is_asked_again(tmp_path: Path) -> None:
    _program(tmp_path, OLD)
    with pytest.raises(Unavailable):
        find_criu()
    (tmp_path / "bin" / "criu").unlink()
    _program(tmp_path, NEW)
    assert find_criu().version == (4, 2, 0)


def test_the_environment_variable_wins_and_is_never_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _program(tmp_path, NEW)
    named = _program(tmp_path, OLD, "mine")
    monkeypatch.setenv("GPUCKPT_CRIU", str(named))
    with pytest.raises(Unavailable, match="GPUCKPT_CRIU") as caught:
        find_criu()
    assert list(caught.value.data["tried"]) == [str(named)]
    named.write_text(NEW)
    assert find_criu().origin == "environment"


def test_a_program_that_is_named_is_started_with_the_libraries_it_was_installed_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = platform.machine()
    prefix, loader = tmp_path / "mine", {"x86_64": "ld-linux-x86-64.so.2", "aarch64": "ld-linux-aarch64.so.1"}[machine]
    for path, text in ((f"usr/lib/{machine}-linux-gnu/{loader}", NEW), ("usr/sbin/criu", BROKEN)):
        (prefix / path).parent.mkdir(parents=True)
        (prefix / path).write_text(text)
        (prefix / path).chmod(0o755)
    (tmp_path / "link").symlink_to(prefix / "usr/sbin/criu")
    for named in (prefix / "usr/sbin/criu", tmp_path / "link"):
        monkeypatch.setenv("GPUCKPT_CRIU", str(named))
        assert find_criu().argv[0] == str(prefix / f"usr/lib/{machine}-linux-gnu" / loader)


@pytest.mark.skipif(os.geteuid() != 0, reason="it is root who runs what others may have changed")
def test_root_uses_no_program_of_which_others_could_change_a_part(tmp_path: Path) -> None:
    machine = platform.machine()
    prefix, loader = tmp_path / "no-prefix", {"x86_64": "ld-linux-x86-64.so.2", "aarch64": "ld-linux-aarch64.so.1"}
    libraries = prefix / "usr/lib" / f"{machine}-linux-gnu"
    paths = [libraries / loader[machine], libraries / "deep" / "er" / "libdeep.so", prefix / "usr/sbin/criu"]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(NEW)
        path.chmod(0o755)
    link = libraries / "deep" / "libnet.so"
    link.symlink_to(paths[0])
    assert find_criu().origin == "prefix"
    for part in (*paths, libraries, libraries / "deep" / "er"):
        part.chmod(0o757)
        _refuses(part)
        part.chmod(0o755)
        os.chown(part, 1234, 0)
        _refuses(part)
        os.chown(part, 0, 0)
    os.chown(link, 1234, 0, follow_symlinks=False)
    _refuses(link)
    link.unlink()
    link.symlink_to(tmp_path)
    tmp_path.chmod(0o757)
    _refuses(tmp_path)
    tmp_path.chmod(0o755)
    assert find_criu().origin == "prefix"


def _refuses(part: Path) -> None:
    with pytest.raises(Unavailable) as caught:
        find_criu()
    assert f"{part} can be changed by users other than root" in caught.value.why


def test_a_prefix_without_a_loader_is_refused(tmp_path: Path) -> None:
    prefix = tmp_path / "prefix"
    (prefix / "sbin").mkdir(parents=True)
    (prefix / "sbin" / "criu").write_text(NEW)
    with pytest.raises(Unavailable, match="another kind of machine"):
        program_in_prefix(prefix)


def test_nothing_of_the_callers_environment_reaches_criu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRIU_CONFIG_FILE", "/etc/passwd")
    monkeypatch.setenv("LD_PRELOAD", "/nonexistent.so")
    seen = tmp_path / "seen"
    _program(tmp_path, f"#!/bin/sh\nenv > {seen}\necho 'Version: 4.2'\n")
    program = find_criu()
    names = {line.partition("=")[0] for line in seen.read_text().splitlines() if "=" in line}
    assert names <= {"PATH", "LC_ALL", "LD_PRELOAD", "GPUCKPT_TELL_SOCKETS", "PWD", "SHLVL", "_"}
    assert set(program.environment()) == {"PATH", "LC_ALL", "LD_PRELOAD"}
    assert program.environment()["LD_PRELOAD"] == str(installed.CRIU_SOCKETS_LIBRARY)


def test_a_program_whose_sockets_are_open_to_other_users_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _program(tmp_path, NEW)
    refuse_open_sockets(find_criu())
    library = tmp_path / "library"
    monkeypatch.setattr(installed, "CRIU_SOCKETS_LIBRARY", library)
    for library_is, said in (("not built", "C compiler"), ("not one that the program loads", "ignores")):
        if library_is != "not built":
            library.touch()
        _program(tmp_path, f"{NEW}# {library_is}\n")
        with pytest.raises(Unavailable, match=said):
            refuse_open_sockets(find_criu())


def test_a_failed_check_quotes_the_first_error_that_matters(tmp_path: Path) -> None:
    _program(tmp_path, NO_KERNEL)
    with pytest.raises(Unavailable) as caught:
        check(find_criu())
    assert "Error (criu/cr-check.c:42): Kernel lacks everything" in caught.value.why
    assert "And more" not in caught.value.why


def test_settings_name_the_prefix(tmp_path: Path) -> None:
    assert settings.criu_prefix() == tmp_path / "no-prefix"


@pytest.mark.parametrize(("kernel", "oldest"), [("6.15.4-amd64", (4, 1, 0)), ("6.16.0", (4, 2, 0)), ("7.0", (4, 2, 0))])
def test_a_recent_kernel_needs_a_recent_criu(
    monkeypatch: pytest.MonkeyPatch, kernel: str, oldest: tuple[int, int, int]
) -> None:
    monkeypatch.setattr("platform.release", lambda: kernel)
    assert minimum_version() == oldest


def test_no_plugin_of_the_systems_is_loaded(tmp_path: Path) -> None:
    _program(tmp_path, NEW)
    argv = find_criu().argv
    plugins = Path(argv[argv.index("--libdir") + 1])
    assert plugins.is_dir()
    assert list(plugins.glob("*.so")) == []
