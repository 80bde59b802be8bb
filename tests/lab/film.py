"""The moving pictures of README: kernels are ruined, restored and undone in a real JupyterLab (`make screenshots`).

Each is an animated PNG, which browsers show wherever they show a PNG. The browser that was filmed finds what has
changed from one picture to the next and encodes it, so that nothing but that is kept.
"""

from __future__ import annotations

import base64
import shutil
import struct
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jupyter_servers import running
from lab_window import CONFIG, Window, prepare
from playwright.sync_api import Page, expect, sync_playwright

_WIDTH = 960
_CHANGED = """async pictures => {
  const changed = [];
  let last = null;
  for (const picture of pictures) {
    const bitmap = await createImageBitmap(await (await fetch('data:image/png;base64,' + picture)).blob());
    const { width, height } = bitmap;
    const canvas = new OffscreenCanvas(width, height);
    const context = canvas.getContext('2d', { willReadFrequently: true });
    context.drawImage(bitmap, 0, 0);
    const pixels = new Uint32Array(context.getImageData(0, 0, width, height).data.buffer);
    const news = pixels.slice();
    let [left, top, right, bottom] = last ? [width, height, 0, 0] : [0, 0, width, height];
    for (let i = 0; last && i < pixels.length; i++) {
      if (pixels[i] !== last[i]) {
        const x = i % width, y = Math.floor(i / width);
        [left, top, right, bottom] = [Math.min(left, x), Math.min(top, y), Math.max(right, x + 1), y + 1];
      } else {
        news[i] = 0;
      }
    }
    last = pixels;
    if (right > left) {
      const part = new OffscreenCanvas(right - left, bottom - top);
      const shown = new ImageData(new Uint8ClampedArray(news.buffer), width, height);
      part.getContext('2d').putImageData(shown, -left, -top);
      const bytes = new Uint8Array(await (await part.convertToBlob({ type: 'image/png' })).arrayBuffer());
      const png = btoa(Array.from(bytes, byte => String.fromCharCode(byte)).join(''));
      changed.push({ left, top, png });
    } else {
      changed.push(null);
    }
  }
  return changed;
}"""


class Film:
    """Pictures of a page, and for how long each is shown."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._pictures: list[tuple[bytes, float]] = []

    def show(self, seconds: float) -> None:
        """Take a picture of what is to be seen now."""
        self._pictures.append((self._page.screenshot(caret="hide", animations="disabled"), seconds))

    def write(self, path: Path) -> None:
        """Write an animated PNG, which starts again at its end."""
        encoded = [base64.b64encode(picture).decode() for picture, _ in self._pictures]
        changed: list[dict[str, Any] | None] = self._page.evaluate(_CHANGED, encoded)
        frames: list[tuple[dict[str, Any], float]] = []
        for part, (_, seconds) in zip(changed, self._pictures, strict=True):
            if part is None:  # nothing moved: what is there stays for longer
                frames[-1] = (frames[-1][0], frames[-1][1] + seconds)
            else:
                frames.append((part, seconds))
        path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(_animated(frames)))


def _animated(frames: list[tuple[dict[str, Any], float]]) -> Iterator[bytes]:
    """Yield the chunks of the whole (PNG specification, third edition: APNG)."""
    sequence = 0
    for number, (part, seconds) in enumerate(frames):
        chunks = list(_chunks(base64.b64decode(part["png"])))
        header = chunks[0][1]
        if number == 0:
            kind = header[8:]
            yield _chunk(b"IHDR", header)
            yield _chunk(b"acTL", struct.pack(">II", len(frames), 0))
        assert header[8:] == kind, "the browser has encoded one picture in another way"
        place = (part["left"], part["top"])
        # What is transparent in it is still there: only what has changed is drawn over it.
        over = number > 0
        shown = struct.pack(">I8sIIHHBB", sequence, header[:8], *place, round(seconds * 1000), 1000, 0, over)
        yield _chunk(b"fcTL", shown)
        sequence += 1
        for data in (data for name, data in chunks if name == b"IDAT"):
            if number == 0:
                yield _chunk(b"IDAT", data)
            else:
                yield _chunk(b"fdAT", struct.pack(">I", sequence) + data)
                sequence += 1
    yield _chunk(b"IEND", b"")


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def _chunks(png: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = 8
    while at < len(png):
        (size,) = struct.unpack_from(">I", png, at)
        yield png[at + 4 : at + 8], png[at + 8 : at + 8 + size]
        at += size + 12


def _restore(window: Window, film: Film) -> None:
    """Save, ruin and restore, as a user does."""
    window.show_sidebar()
    window.run("model = {'epoch': 12, 'loss': 0.31}")
    window.run("model")
    film.show(1.5)
    window.run("%gpuckpt save epoch-12")
    window.line("epoch-12").wait_for()
    window.is_told_nothing_more()
    film.show(2.5)
    window.run("model = None  # oops")
    film.show(1.2)
    window.line("epoch-12").hover()
    button = window.line("epoch-12").get_by_role("button", name="Restore epoch-12")
    expect(button).to_be_visible()
    film.show(1.2)
    button.click()
    window.dialog.wait_for()
    film.show(2.5)
    window.accept("Restore")
    window.is_told("Restored epoch-12")
    expect(window.page.locator(".Toastify__toast")).to_have_count(1)
    film.show(2.0)
    window.is_told_nothing_more()
    window.run("model")
    film.show(3.0)


def _undo(window: Window, film: Film) -> None:
    """Have each cell followed by a save, ruin something in place, and undo that."""
    window.show_sidebar()
    film.show(1.2)
    window.sidebar.get_by_label("Save after each cell").click()
    expect(window.sidebar.get_by_label("Save after each cell")).to_be_checked()
    here = window.sidebar.locator('[aria-current="true"]')
    window.run("measured = [21.4, 22.0, 19.8]")
    expect(here).to_contain_text("measured = ")
    film.show(2.0)
    window.run("measured.clear()  # oops\nmeasured")
    expect(here).to_contain_text("clear")
    film.show(2.0)
    button = window.sidebar.get_by_role("button", name="Undo cell")
    button.hover()
    film.show(1.2)
    button.click()
    window.is_told("The kernel is as it was after")
    expect(window.page.locator(".Toastify__toast")).to_have_count(1)
    window.page.locator(".jp-gpuckpt-mod-stale").wait_for()
    film.show(3.0)
    window.is_told_nothing_more()
    window.run("measured")
    expect(here).to_contain_text("auto-2-2")
    film.show(3.0)


_SCENES = {"train": (_restore, 440), "weather": (_undo, 520)}
"""By their notebooks: what is done, and how high the page is."""


def main() -> None:
    """Film them, and write the pictures to the paths that are named: of the restore, and of the undo."""
    targets = map(Path, sys.argv[1:])
    program = shutil.which("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        for (notebook, (act, height)), target in zip(_SCENES.items(), targets, strict=True):
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                with running(folder, CONFIG, "lab", **prepare(folder)) as server:
                    window = Window(browser.new_context(), server, notebook)
                    window.load(f"{notebook}.ipynb", "python3-gpuckpt")
                    window.page.set_viewport_size({"width": _WIDTH, "height": height})
                    film = Film(window.page)
                    act(window, film)
                    film.write(target)
        browser.close()


if __name__ == "__main__":
    main()
