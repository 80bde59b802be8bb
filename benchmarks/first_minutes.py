"""A newcomer's first minutes, walked in a real browser: ``python -m benchmarks.first_minutes``, as root.

From a fresh home and a fresh environment, with a wheel of this checkout: what README's start says is typed as it stands
there, then the kernel is saved and restored by the buttons, and three mistakes are made and put right. For each step it
tells what that asks of a user (commands and cells typed, clicks, words to read) and how long the machine took.
Packages come from pip's cache where they are there.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import nbformat
from playwright.sync_api import Locator, Page, expect, sync_playwright

_ROOT = Path(__file__).parents[1]
_PATIENCE = 180  # seconds
_READ, _TYPED, _CLICKED = 4.0, 20.0, 2.0
"""Of a user: words read in a second, seconds for a command or a cell, seconds for a click."""
_IN_FRONT = ".jp-NotebookPanel:not(.lm-mod-hidden)"
expect.set_options(timeout=_PATIENCE * 1000)


@dataclass
class Step:
    """What one step asked of a user, and of the machine."""

    name: str
    typed: int = 0
    clicks: int = 0
    words: int = 0
    seconds: float = 0.0

    def read(self, text: str) -> str:
        """Count what was to be read, and return it."""
        self.words += len(re.findall(r"\w[\w.'’/-]*", text))
        return text

    @property
    def minutes(self) -> float:
        """About how long it takes a user, who reads everything."""
        own = self.typed * _TYPED + self.clicks * _CLICKED + self.words / _READ
        return (own + self.seconds) / 60


class Walk:
    """The steps, and the machine that they are walked on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.steps: list[Step] = []
        self.environment = _fresh_environment(folder)

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[Step]:
        """Measure a step, and tell of it."""
        step = Step(name)
        began = time.monotonic()
        yield step
        step.seconds = time.monotonic() - began
        self.steps.append(step)
        print(_line(step), flush=True)

    def type(self, step: Step, command: str, expected: int = 0) -> str:
        """Type a command into a terminal, and return what it says."""
        step.typed += 1
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder / "home",
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=20 * _PATIENCE,
        )
        (self.folder / f"{step.name}-{step.typed}.log").write_text(f"$ {command}\n{done.stdout}")
        if done.returncode != expected:
            raise RuntimeError(f"{command} ended with {done.returncode} and said:\n{done.stdout}")
        return done.stdout

    def last_words(self) -> str:
        """Return the last line that Jupyter has written."""
        return (self.folder / "jupyter.log").read_text().strip().splitlines()[-1]


def _fresh_environment(folder: Path) -> dict[str, str]:
    """Return the environment of somebody who has a new home, an empty virtual environment, and nothing else."""
    home, venv = folder / "home", folder / "venv"
    home.mkdir()
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    cache = subprocess.run([sys.executable, "-m", "pip", "cache", "dir"], check=True, capture_output=True, text=True)
    browser = folder / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {folder / "address.new"} && mv {folder}/address.new {folder}/address\n')
    browser.chmod(0o700)
    kept = {name: value for name, value in os.environ.items() if name.startswith("PIP_") or name == "LANG"}
    return {
        **kept,
        "HOME": str(home),
        "PATH": f"{venv / 'bin'}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "PIP_CACHE_DIR": cache.stdout.strip(),
        "PIP_FIND_LINKS": f"{folder / 'wheel'} {os.environ.get('PIP_FIND_LINKS', '')}",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "BROWSER": f"{browser} %s",
    }


def _readme() -> tuple[str, list[str]]:
    """Return README up to the end of its start, which is what a newcomer reads, and the commands in that."""
    text = (_ROOT / "README.md").read_text("utf-8")
    heading = re.search(r"^## Start\n", text, re.M)
    if heading is None:
        raise RuntimeError("README.md has no section Start.")
    end = re.compile(r"^##", re.M).search(text, heading.end())
    start = text[heading.end() : end.start() if end else None]
    blocks = re.findall(r"^```sh\n(.*?)^```", start, re.M | re.S)
    commands = [line.partition("#")[0].strip() for line in blocks[0].splitlines()]
    seen = re.sub(r"<[^>]*>|\]\([^)]*\)", " ", text[: end.start() if end else None])
    return seen, [command for command in commands if command]


def _install(walk: Walk) -> str:
    """Read README, type what stands there, and return the command that starts Jupyter."""
    text, commands = _readme()
    with walk.step("read") as step:
        step.read(text)
    with walk.step("install") as step:
        for command in commands[:-1]:
            said = walk.type(step, command)
            if not command.startswith("pip"):
                step.read(said)
    return commands[-1]


@contextlib.contextmanager
def _jupyter(walk: Walk, command: str) -> Iterator[str]:
    """Start Jupyter as README says, and give the address that it opens a browser at; nothing where it ended."""
    log = walk.folder / "jupyter.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            ["bash", "-c", f"exec {command}"],
            cwd=walk.folder / "home",
            env=walk.environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        address = walk.folder / "address"
        _wait(lambda: address.exists() or process.poll() is not None)
        yield address.read_text().strip() if address.exists() else ""
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(_PATIENCE)


def _wait(look: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _PATIENCE
    while not look():
        if time.monotonic() > deadline:
            raise TimeoutError(f"What is waited for did not come within {_PATIENCE} s.")
        time.sleep(0.05)


class Notebook:
    """What a user does in a notebook."""

    def __init__(self, page: Page) -> None:
        self.page = page

    def click(self, step: Step, target: Locator) -> None:
        step.clicks += 1
        target.click()

    def run(self, step: Step, code: str) -> Locator:
        """Type a cell and run it; return what it shows."""
        step.typed += 1
        cells = self.page.locator(f"{_IN_FRONT} .jp-CodeCell")
        number = cells.count()
        cell = cells.nth(number - 1)
        cell.locator(".cm-content").click()
        self.page.keyboard.insert_text(code)
        self.page.keyboard.press("Shift+Enter")
        expect(cell.locator(".jp-InputPrompt")).to_have_text(re.compile(r"\[\d+\]:"))
        return cell.locator(".jp-OutputArea-output")

    def toolbar(self, item: str) -> Locator:
        return self.page.locator(f'{_IN_FRONT} [data-jp-item-name="{item}"] jp-button[aria-disabled="false"]')

    def answer(self, step: Step, button: str) -> None:
        """Read a dialog, and click one of its buttons."""
        dialog = self.page.get_by_role("dialog")
        dialog.wait_for()
        # What fills in a moment later, what a restore loses say, is to be read as well.
        self.page.wait_for_load_state("networkidle")
        step.read(dialog.inner_text())
        self.click(step, dialog.get_by_role("button", name=button, exact=True))

    def told(self, step: Step, text: str) -> Locator:
        """Wait for a notification, and read it."""
        told = self.page.locator(".Toastify__toast", has_text=text).last
        told.wait_for()
        step.read(told.inner_text())
        return told

    def restore(self, step: Step, name: str, saving: bool = False) -> Locator:
        """Restore a snapshot by way of the notebook's toolbar, and save before if that is wanted."""
        self.click(step, self.toolbar("gpuckpt-restore"))
        self.click(step, self.page.get_by_role("menuitem", name=name).first)
        if saving:
            self.answer(step, "Save first…")
            self.answer(step, "Save")
        else:
            self.answer(step, "Restore")
        return self.told(step, f"Restored {name}")

    def told_no_more(self) -> None:
        """Wait until the notifications have gone by themselves, so that the next one is the next: no part of a step."""
        self.page.mouse.move(0, 0)
        expect(self.page.locator(".Toastify__toast")).to_have_text([])

    def shows(self, code: str, expected: str) -> None:
        """See that all is as it should be: no part of any step."""
        expect(self.run(Step(""), code).last).to_have_text(expected)


def _walk_page(walk: Walk, page: Page, command: str) -> None:
    with contextlib.ExitStack() as held:
        with walk.step("start") as step:
            step.typed += 1
            address = held.enter_context(_jupyter(walk, command))
            if not address:  # Jupyter's own words on what is missing
                step.read(walk.last_words())
                step.typed += 1
                address = held.enter_context(_jupyter(walk, f"{command} --allow-root"))
            page.goto(address)
            notebook = Notebook(page)
            notebook.click(step, page.locator(".jp-LauncherCard", has_text="Python 3 (gpuckpt)").first)
            notebook.toolbar("gpuckpt-save").wait_for()
        _decline_news(page)
        with walk.step("first save") as step:
            notebook.run(step, "x = 1")
            notebook.click(step, notebook.toolbar("gpuckpt-save"))
            page.get_by_role("dialog").get_by_label("Name").fill("first")
            step.typed += 1
            notebook.answer(step, "Save")
            notebook.told(step, "Saved first")
        notebook.told_no_more()
        with walk.step("first restore") as step:
            notebook.run(step, "x = None")
            notebook.restore(step, "first")
        notebook.shows("x", "1")
        notebook.told_no_more()
        with walk.step("mistake: work since the save") as step:
            notebook.run(step, "y = 2")
            told = notebook.restore(step, "first", saving=True)
            notebook.shows("'y' in dir()", "False")
            notebook.click(step, told.get_by_role("button", name="Undo"))
            told = page.locator(".Toastify__toast", has_text="Restored").filter(has_not_text="Restored first")
            step.read(told.inner_text())
            notebook.shows("y", "2")
        with walk.step("mistake: a wrong name") as step:
            step.read(" ".join(notebook.run(step, "%gpuckpt restore frist").all_inner_texts()))
            notebook.run(step, "%gpuckpt restore first")
        notebook.shows("x", "1")


def _decline_news(page: Page) -> None:
    """Answer what JupyterLab asks at its first start, which is none of ours."""
    asked = page.locator(".Toastify__toast", has_text="Jupyter news")
    with contextlib.suppress(Exception):
        asked.get_by_role("button", name="No", exact=True).click(timeout=5000)


def _plain_kernel(walk: Walk) -> None:
    """Run a notebook with a program that knows of no default but Jupyter's own."""
    path = walk.folder / "home" / "plain.ipynb"
    cells = [nbformat.v4.new_code_cell("%gpuckpt save first")]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel}), path)
    with walk.step("mistake: a plain kernel") as step:
        said = walk.type(step, f"jupyter execute {path.name}", expected=1)
        step.read(next(line for line in said.splitlines() if "%gpuckpt` not found" in line))
        walk.type(step, f"jupyter execute --kernel_name=python3-gpuckpt {path.name}")


def _line(step: Step) -> str:
    return f"| {step.name} | {step.typed} | {step.clicks} | {step.words} | {step.seconds:.0f} | {step.minutes:.1f} |"


def _total(steps: list[Step]) -> Step:
    sums = ("typed", "clicks", "words", "seconds")
    return Step("**together**", *(sum(getattr(step, name) for step in steps) for name in sums))


def main() -> None:
    """Walk them, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, help="an empty folder for all that is made, which then stays")
    arguments = parser.parse_args()
    folder = arguments.keep or Path(tempfile.mkdtemp(prefix="first-minutes-"))
    folder.mkdir(mode=0o700, exist_ok=True)
    try:
        pip = [sys.executable, "-m", "pip", "wheel", "-qq", "--no-build-isolation", "--no-deps"]
        subprocess.run([*pip, "-w", folder / "wheel", _ROOT], check=True)
        walk = Walk(folder)
        print(f"{datetime.date.today()}, {os.cpu_count()} processors, {platform.platform()}, as root\n")
        print("| step | typed | clicks | words | seconds of the machine | minutes of a person |")
        print("| --- | --- | --- | --- | --- | --- |")
        command = _install(walk)
        with sync_playwright() as playwright:
            program = shutil.which("chromium")
            browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
            page = browser.new_page(viewport={"width": 1280, "height": 800})
            page.set_default_timeout(_PATIENCE * 1000)
            try:
                _walk_page(walk, page, command)
            except BaseException:
                page.screenshot(path=folder / "failed.png")
                raise
            finally:
                browser.close()
        _plain_kernel(walk)
        print(_line(_total(walk.steps)))
    finally:
        if arguments.keep is None:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
