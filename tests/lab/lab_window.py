"""One browser window with JupyterLab in it, and what a user does there."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import nbformat
from jupyter_servers import TOKEN, Server
from playwright.sync_api import BrowserContext, ConsoleMessage, Error, Locator, Route, ViewportSize, expect
from playwright.sync_api import TimeoutError as TookTooLong

CONFIG = "".join(f"c.{app}.expose_app_in_browser = True\n" for app in ("LabApp", "JupyterNotebookApp"))
"""For the server: tests reach the application by ``window.jupyterapp``."""
PATIENCE = 180_000  # milliseconds: a page has much to load
_KERNEL = "window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel"
_CELLS = "window.jupyterapp.shell.currentWidget.content.model.sharedModel.cells"
_IN_FRONT = ".jp-NotebookPanel:not(.lm-mod-hidden)"
_SIZE: ViewportSize = {"width": 1280, "height": 800}
_CLEAR = """async () => {
  const { commands, shell } = window.jupyterapp;
  for (const widget of [...shell.widgets('main')]) {
    widget.dispose();
  }
  await commands.execute('apputils:dismiss-notification');
  await commands.execute('filebrowser:go-to-path', { path: '/' });
  await commands.execute('filebrowser:activate');
}"""
_AXE = Path(__file__).parents[2] / "labextension" / "node_modules" / "axe-core" / "axe.min.js"
expect.set_options(timeout=PATIENCE)


_NO_NEWS = {"fetchNews": "false", "checkForUpdates": False}
_PLAIN = {
    "argv": ["python3", "-m", "ipykernel_launcher", "-f", "{connection_file}"],
    "display_name": "Plain",
    "language": "python",
    "metadata": {"kernel_provisioner": {"provisioner_name": "local-provisioner"}},
}


def prepare(folder: Path) -> dict[str, str]:
    """Give a server the settings and the plain kernel that the tests want; return its environment."""
    settings = folder / "lab" / "settings" / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True)
    (settings / "notification.jupyterlab-settings").write_text(json.dumps(_NO_NEWS))
    spec = folder / "share" / "kernels" / "plain"
    spec.mkdir(parents=True)
    (spec / "kernel.json").write_text(json.dumps(_PLAIN))
    return {"JUPYTER_PATH": os.pathsep.join(filter(None, [str(folder / "share"), os.environ.get("JUPYTER_PATH")]))}


class Window:
    """A browser window that shares nothing with others but the server and the browser's cache.

    A page whose scripts are in the cache takes half the processor's time to load.
    """

    def __init__(self, browser: BrowserContext, server: Server, workspace: str) -> None:
        self.server, self.workspace = server, workspace
        self.complaints: list[str] = []
        self.page = browser.new_page()
        self.page.set_viewport_size(_SIZE)
        self.page.set_default_timeout(PATIENCE)
        self.page.on("console", self._on_console)
        self.page.on("pageerror", self._on_page_error)

    def _on_console(self, message: ConsoleMessage) -> None:
        # How long a start takes says more of what else the machine does.
        if "to activate" in message.text:
            return
        if message.type in ("error", "warning") and "gpuckpt" in f"{message.text} {message.location}":
            self.complaints.append(f"{message.text} {message.location.get('url', '')}")

    def _on_page_error(self, error: Error) -> None:
        if "gpuckpt" in f"{error} {error.stack}":
            self.complaints.append(str(error))

    def close(self) -> None:
        self.page.close()

    def load(self, notebook: str | None, spec: str) -> None:
        """Load JupyterLab, with a notebook or without; a new notebook is made where there is none of that name."""
        where = f"lab/workspaces/{self.workspace}"
        if notebook is not None:
            self._make(notebook, spec)
            where += f"/tree/{notebook}"
        self.page.goto(f"{self.server.url}{where}?token={TOKEN}")
        self.loaded()
        if notebook is not None:
            self._notebook_is_there(spec)

    def open(self, notebook: str, spec: str) -> None:
        """Open a notebook where JupyterLab is loaded; a new one is made where there is none of that name."""
        self._make(notebook, spec)
        self.command("docmanager:open", path=notebook)
        self._notebook_is_there(spec)

    def _make(self, notebook: str, spec: str) -> None:
        path = self.server.root / notebook
        if not path.exists():
            new = nbformat.v4.new_notebook(
                cells=[nbformat.v4.new_code_cell("")],
                metadata={"kernelspec": {"name": spec, "display_name": spec, "language": "python"}},
            )
            nbformat.write(new, path)

    def _notebook_is_there(self, spec: str) -> None:
        self.page.locator(f"{_IN_FRONT} .jp-Notebook .jp-Cell").first.wait_for()
        if spec:
            self.kernel_is_idle()

    def is_clear(self) -> bool:
        """Whether it has neither a notebook nor a question."""
        return self.page.locator(".jp-NotebookPanel, .jp-Dialog").count() == 0

    def clear(self) -> None:
        """Make it as one that was just loaded, without a notebook."""
        self.complaints.clear()
        self.page.unroute_all()
        search = self.sidebar.get_by_label("Search snapshots")
        if search.is_visible():
            search.fill("")
        self.page.evaluate(_CLEAR)
        self.is_told_nothing_more()
        if self.page.locator('body[data-jp-theme-light="false"]').count():
            self.command("apputils:change-theme", theme="JupyterLab Light")
            self.page.locator('body[data-jp-theme-light="true"]').wait_for(state="attached")
        if self.page.viewport_size != _SIZE:
            self.page.set_viewport_size(_SIZE)

    def loaded(self) -> None:
        """Wait until JupyterLab is there."""
        self.page.locator("#jupyterlab-splash").wait_for(state="detached")
        self.page.wait_for_function("window.jupyterapp?.restored.then(() => true)")

    def command(self, command: str, **arguments: Any) -> None:
        """Execute one of JupyterLab's commands."""
        execute = "async ([id, args]) => { await window.jupyterapp.commands.execute(id, args) }"
        self.page.evaluate(execute, [command, arguments])

    def choose(self, **settings: Any) -> None:
        """Write the user's settings of the extension; a page that is loaded after this has them."""
        save = "text => window.jupyterapp.serviceManager.settings.save('jupyter_gpuckpt:plugin', text)"
        self.page.evaluate(save, json.dumps(settings))

    # -- the notebook

    def kernel_is_idle(self) -> None:
        """Wait until the notebook's kernel has answered all that the page asked of it."""
        try:
            self.page.wait_for_function(f"{_KERNEL}?.status === 'idle'")
        except Error as e:
            status = self.page.evaluate(f"[{_KERNEL}?.status, {_KERNEL}?.connectionStatus].join(', ')")
            log = self.server.log.read_text()[-5000:]
            raise AssertionError(f"the kernel is {status}, and the server says:\n{log}") from e

    def kernel_is_ready(self) -> None:
        """Wait until the toolbar lets the kernel be saved."""
        self.kernel_is_idle()
        self.toolbar("gpuckpt-save").locator('jp-button[aria-disabled="false"]').wait_for()

    def toolbar(self, item: str) -> Locator:
        return self.page.locator(f'{_IN_FRONT} .jp-NotebookPanel-toolbar [data-jp-item-name="{item}"]')

    def restart_kernel(self) -> None:
        """Have the kernel start fresh, and wait until it is there."""
        # Not waited for: the command ends when its question is answered.
        self.page.evaluate("() => void window.jupyterapp.commands.execute('kernelmenu:restart')")
        self.accept("Confirm Kernel Restart")
        self.kernel_is_idle()

    def run(self, code: str) -> Locator:
        """Type code into the last cell, run it, wait until it is done, and return the cell."""
        cell = self.begin(code)
        expect(cell.locator(".jp-InputPrompt")).to_contain_text("[")
        expect(cell.locator(".jp-InputPrompt")).not_to_contain_text("*")
        expect(cell.locator(".jp-InputPrompt")).not_to_have_text("[ ]:")
        return cell

    def begin(self, code: str) -> Locator:
        """Type code into the last cell, run it, and return the cell."""
        cells = self.page.locator(f"{_IN_FRONT} .jp-Notebook .jp-CodeCell")
        before = self.page.evaluate(f"{_CELLS}.length")
        expect(cells).to_have_count(before)  # a page that was just loaded may not show all of them yet
        cell = cells.nth(before - 1)
        cell.locator(".cm-content").click()
        self.page.keyboard.insert_text(code)
        self.page.keyboard.press("Shift+Enter")
        expect(cells).to_have_count(before + 1)
        return cell

    def value(self, expression: str) -> str:
        """Return what a new cell shows for an expression."""
        return self.run(expression).locator(".jp-OutputArea-executeResult .jp-OutputArea-output").inner_text().strip()

    # -- ours

    @property
    def sidebar(self) -> Locator:
        return self.page.locator("#jp-gpuckpt-sidebar")

    def show_sidebar(self) -> None:
        self.page.get_by_role("tab", name="Kernel Snapshots").click()
        self.sidebar.wait_for(state="visible")

    def line(self, name: str) -> Locator:
        return self.sidebar.locator(f'[data-snapshot="{name}"]')

    @property
    def dialog(self) -> Locator:
        return self.page.get_by_role("dialog")

    def dialog_listens(self) -> None:
        """Wait until what is pressed goes to the dialog."""
        self.page.wait_for_function("document.querySelector('.jp-Dialog')?.contains(document.activeElement)")

    def accept(self, button: str) -> None:
        self.dialog.get_by_role("button", name=button, exact=True).click()

    def is_told(self, text: str | re.Pattern[str]) -> Locator:
        """Wait for a notification, and return it: not one that moves out while what it has become is there already."""
        told = self.page.locator(".Toastify__toast:not([class*=slide-exit])", has_text=text)
        told.wait_for()
        return told

    def answer(self, told: Locator, button: str) -> None:
        """Press a button of a notification, by the keyboard: it moves under the mouse where another one goes."""
        told.get_by_role("button", name=button).press("Enter")

    def is_told_nothing_more(self) -> None:
        """Wait until the notifications have gone by themselves; those under the mouse stay."""
        self.page.mouse.move(0, 0)
        expect(self.page.locator(".Toastify__toast")).to_have_text([])

    def save(self, name: str, note: str = "") -> None:
        """Save the kernel by way of the toolbar, and wait for it."""
        self.kernel_is_ready()
        self.toolbar("gpuckpt-save").click()
        self.dialog.get_by_label("Name").fill(name)
        self.dialog.get_by_label("Note").fill(note)
        self.accept("Save")
        self.is_told(f"Saved {name}")

    def restore(self, name: str) -> None:
        """Restore by way of the sidebar, and wait for it."""
        self.press(self.line(name), f"Restore {name}")
        self.accept("Restore")
        self.is_told(f"Restored {name}")

    def press(self, line: Locator, button: str) -> None:
        """Press a button of a line, which shows it while the mouse is there: again where the list has moved since."""
        deadline = time.monotonic() + PATIENCE / 1000
        while True:
            line.hover()
            try:
                line.get_by_role("button", name=button).click(timeout=5000)
                return
            except TookTooLong:
                if time.monotonic() > deadline:
                    raise

    def more(self, name: str, command: str) -> None:
        """Choose a command from the menu behind a snapshot's button."""
        self.press(self.line(name), f"More about {name}")
        self.page.get_by_role("menuitem", name=command).click()

    def slow_down(self, times: int) -> None:
        """Have the page take so many times as long for all it does; 1 is as quick as it can."""
        self.page.context.new_cdp_session(self.page).send("Emulation.setCPUThrottlingRate", {"rate": times})

    def dark(self) -> None:
        """Change to the dark theme, and wait until it is there."""
        self.command("apputils:change-theme", theme="JupyterLab Dark")
        self.page.locator('body[data-jp-theme-light="false"]').wait_for(state="attached")

    def accessibility_faults(self, selector: str) -> list[str]:
        """Return what axe-core finds amiss in one part of the page."""
        if not self.page.evaluate("Boolean(window.axe)"):
            self.page.evaluate(_AXE.read_text("utf-8"))
        found = self.page.evaluate("selector => axe.run(selector)", selector)
        return [f"{v['id']}: {v['help']}: {n['html']}" for v in found["violations"] for n in v["nodes"]]


Routes = Mapping[re.Pattern[str], Callable[[Route], None]]
"""What answers for the server, by the addresses that are asked for."""
OpenWindow = Callable[..., Window]
"""Opens a window on a server, a notebook in it, and that on a kernel of a kernelspec."""
