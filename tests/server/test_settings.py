"""Every setting is described once: what is read, what can be configured, and what the page of the settings says."""

from __future__ import annotations

import os
import re
import runpy
import sys
from pathlib import Path

import pytest
from jupyter_server.serverapp import ServerApp

import jupyter_gpuckpt
from jupyter_gpuckpt import settings
from jupyter_gpuckpt.errors import Refused
from jupyter_gpuckpt.server.app import Gpuckpt

_PACKAGE = Path(jupyter_gpuckpt.__file__).parent
_BETWEEN_OUR_OWN_PROGRAMS = {
    *("RUN_DIR", "ENVIRONMENT", "SHIELDED_FROM", "UNAVAILABLE", "PROOF", "LOG", "SNAPSHOT"),
    *("TELL_SOCKETS", "DUMP_CONNECTIONS", "RESTORE_CONNECTIONS", "DUMP_TWINS", "DUMP_TWINS_FOLDER", "DUMP_UNREAD"),
    "DUMP_MAPPINGS_AHEAD",
    *("DUMP_SHARED_FOLDER", "RESTORE_LOCKS", "RESTORE_THREAD_FILES", "FEATURES"),
}


def test_every_variable_is_a_setting_that_is_described() -> None:
    written = "\n".join(path.read_text() for path in _PACKAGE.rglob("*.py"))
    read = set(re.findall(r'"GPUCKPT_([A-Z_]+)"', written)) - _BETWEEN_OUR_OWN_PROGRAMS
    assert read == {one.variable.removeprefix("GPUCKPT_") for one in settings.ALL}
    assert all(one.what and one.without for one in settings.ALL)


def test_the_page_of_the_settings_is_what_is_made_of_them() -> None:
    """`python docs/settings_table.py` writes it."""
    maker = runpy.run_path(str(_PACKAGE.parent / "docs" / "settings_table.py"))
    (page,) = maker["pages"]()
    assert page.read_text() == maker["renewed"](page.read_text())


def test_help_all_lists_what_can_be_configured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["python -m jupyter_gpuckpt.server", "--help-all"])
    monkeypatch.setattr(Gpuckpt, "classes", Gpuckpt.classes)
    with pytest.raises(SystemExit):
        runpy.run_module("jupyter_gpuckpt.server", run_name="__main__")
    told = capsys.readouterr().out
    missing = [one.trait for one in settings.ALL if one.configurable and f"{one.configurable}.{one.trait}=" not in told]
    assert missing == []


def test_what_is_configured_wins_over_the_variable_and_is_handed_on_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUCKPT_HOOK_TIMEOUT", "7")
    monkeypatch.setenv("GPUCKPT_LOCK_TIMEOUT", "8")
    app = Gpuckpt(hook_timeout=9, sleep_without_gpu=True)
    app.serverapp = ServerApp()
    monkeypatch.setenv("JUPYTER_DEFAULT_PROVISIONER_NAME", "local-provisioner")  # not this process's own
    monkeypatch.setenv("GPUCKPT_SLEEP_WITHOUT_GPU", "off")
    app.initialize_settings()
    assert (settings.hook_timeout(), settings.lock_timeout(), settings.sleep_without_gpu()) == (9, 8, True)
    assert os.environ["GPUCKPT_HOOK_TIMEOUT"] == "9"


def test_a_configured_value_that_cannot_be_understood_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUCKPT_SLEEP_LIMIT", "64G")
    app = Gpuckpt(sleep_limit="a lot")
    app.serverapp = ServerApp()
    with pytest.raises(Refused, match=r"(?s)Gpuckpt\.sleep_limit cannot be understood.*'a lot' is not a size"):
        app.initialize_settings()
    assert settings.sleep_limit() == 64 * 10**9
