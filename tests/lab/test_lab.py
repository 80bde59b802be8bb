"""JupyterLab as a person has it: a browser, a notebook on our kernel, a mouse and a keyboard."""

from __future__ import annotations

import pytest
from jupyter_servers import Server
from lab_window import OpenWindow
from playwright.sync_api import expect

pytestmark = pytest.mark.criu


def test_a_kernel_is_saved_changed_and_restored(lab: Server, open_window: OpenWindow) -> None:
    window = open_window(lab, "train.ipynb")
    window.run("x = 1")
    window.save("before")
    changed = window.run("x = 2")
    assert window.value("x") == "2"
    window.show_sidebar()
    expect(window.line("before")).to_contain_text("here")
    window.restore("before")
    assert window.value("x") == "1"
    expect(changed).to_have_class(lambda_stale())
    kept = window.page.locator(".jp-CodeCell").first
    expect(kept).not_to_have_class(lambda_stale())


def lambda_stale() -> object:
    import re

    return re.compile("jp-gpuckpt-mod-stale")
