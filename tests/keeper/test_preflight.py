"""What differs between the machine that a snapshot was saved on and this one: all of it is named at once."""

from __future__ import annotations

import dataclasses
import json
import platform
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy
import pytest
from keeper_faults import store
from notebooks import Notebook, run_folders

from jupyter_gpuckpt.freeze.elf import build_id
from jupyter_gpuckpt.keeper.preflight import cpu_flags
from jupyter_gpuckpt.store import Store


def rewrite(name: str, **changes: dict[str, Any]) -> None:
    """Have a snapshot say other things of its machine or its processes."""
    manifest = Store(store()).get(name)
    merged = {member: {**getattr(manifest, member), **change} for member, change in changes.items()}
    path = store() / "snapshots" / f"{name}.json"
    path.write_bytes(dataclasses.replace(manifest, **merged).to_json())
    Store(store()).sign(name)


def test_all_differences_are_named_at_once_with_both_values(notebook: Notebook, tmp_path: Path) -> None:
    for name in ("gone", "shorter"):
        (tmp_path / name).write_bytes(bytes(10))
    notebook.run(f"x = 1; files = [open({str(tmp_path)!r} + '/' + name) for name in ('gone', 'shorter')]")
    notebook.run("%gpuckpt save here")
    notebook.run("x = 2")
    (tmp_path / "gone").unlink()
    (tmp_path / "shorter").write_bytes(bytes(9))
    rewrite(
        "here",
        machine={"cpu_flags": [*cpu_flags(), "avx999", "a_mitigation"], "criu": "99.1"},
        process={"private_bytes": 10**15},
    )
    sleepers = list(notebook.folder.glob("run-*"))
    answer = notebook.fails("%gpuckpt restore here")
    assert answer.ename == "Refused"
    for said in ("- CRIU: saved with 99.1, here 4.", "It needs 1,000,000,", "MB are free"):
        assert said in answer.text
    if platform.machine() == "x86_64":
        assert "Processor features: saved with avx999, here without it." in answer.text
    assert f"{tmp_path}/gone: had 10 bytes, is gone" in answer.text
    assert f"{tmp_path}/shorter: had 10 bytes, here 9" in answer.text
    rewrite("here", machine={"arch": "z80"})
    answer = notebook.fails("%gpuckpt restore here")
    assert f"- Processor architecture: saved with z80, here {platform.machine()}." in answer.text
    assert list(notebook.folder.glob("run-*")) == sleepers
    assert notebook.value("x") == "2"


def test_another_build_of_a_library_is_refused_and_other_data_is_told(notebook: Notebook, tmp_path: Path) -> None:
    source = next(path for path in Path(numpy.__file__).parent.rglob("*.so") if build_id(path))
    library, data = tmp_path / "library.so", tmp_path / "data.txt"
    shutil.copyfile(source, library)
    data.write_text("ten bytes\n")
    notebook.run("import mmap")
    for path in (library, data):
        notebook.run(f"f = open({str(path)!r}, 'rb'); m = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ); k = f, m")
        notebook.run(f"{path.stem} = k")
    notebook.run("%gpuckpt save here")
    notebook.run("%gpuckpt restore here")
    was = build_id(library)
    library.write_bytes(source.read_bytes().replace(bytes.fromhex(was), bytes.fromhex(was)[::-1]))
    now = build_id(library)
    assert now not in ("", was)
    answer = notebook.fails("%gpuckpt restore here")
    assert f"{library}: a different build of the same size: was {was}, here {now}" in answer.text
    shutil.copyfile(source, library)
    data.write_text("TEN BYTES\n")
    rewrite("here", machine={"kernel": "6.0.0-elsewhere"})
    answer = notebook.run("%gpuckpt restore here")
    assert f"have changed since the save: {data} (different contents, same size)." in answer.text
    assert f"Linux: saved with 6.0.0-elsewhere, here {platform.release()}" in answer.text


def test_a_program_is_the_same_build_whatever_its_build_id_looks_like(notebook: Notebook, tmp_path: Path) -> None:
    source = next(path for path in Path(numpy.__file__).parent.rglob("*.so") if build_id(path))
    known = bytes.fromhex(build_id(source))
    odd = {"zeros": source.read_bytes().replace(known, known[:-2] + bytes(2)), "32_bit": small_program_of_32_bits()}
    notebook.run("x = 1; files = []")
    for name, content in odd.items():
        (tmp_path / name).write_bytes(content)
        notebook.run(f"files.append(open({str(tmp_path / name)!r}, 'rb'))")
    notebook.run("%gpuckpt save here")
    notebook.run("x = 2")
    notebook.run("%gpuckpt restore here")
    assert notebook.value("x") == "1"
    (tmp_path / "32_bit").write_bytes(odd["32_bit"].replace(b"an id", b"no id"))
    assert "32_bit: a different build" in notebook.fails("%gpuckpt restore here").text


def small_program_of_32_bits() -> bytes:
    """Return an ELF file with nothing but a build id, of five bytes (elf(5))."""
    note = struct.pack("<3I4s8s", 4, 5, 3, b"GNU", b"an id")
    header = struct.pack("<16s2H5I6H", b"\x7fELF\1\1\1", 3, 3, 1, 0, 52, 0, 0, 52, 32, 1, 40, 0, 0)
    return header + struct.pack("<8I", 4, 84, 84, 84, len(note), len(note), 4, 4) + note


def test_a_snapshot_from_before_files_were_written_down_is_restored(notebook: Notebook, tmp_path: Path) -> None:
    path = tmp_path / "data.txt"
    path.write_text("ten bytes\n")
    notebook.run(f"x = 1; f = open({str(path)!r})")
    notebook.run("%gpuckpt save new")
    old = Store(store())
    with old.open("new", tmp_path / "taken") as taken, old.writer("old") as writer:
        said = json.loads((taken.directory / "needs.json").read_text())
        assert str(path) in {file["path"] for file in said["files"]}
        for part in taken.directory.iterdir():
            if part.name != "needs.json":
                part.rename(writer.directory / part.name)
        about = {key: getattr(taken.manifest, key) for key in ("kernel", "machine", "cuda", "process")}
        writer.commit(message="", parent=None, **about)
    notebook.run("x = 2")
    notebook.run("%gpuckpt restore old")
    assert notebook.value("x, f.read()") == "1 ten bytes"
    path.unlink()
    assert str(path) in notebook.fails("%gpuckpt restore old").text


@pytest.mark.parametrize(
    "odd", [{"process": {"pid": "one"}}, {"kernel": {"connection": [1]}}, {"machine": {"criu": 4}}]
)
def test_a_manifest_of_another_form_is_refused_before_anything_is_touched(
    notebook: Notebook, odd: dict[str, dict[str, object]]
) -> None:
    notebook.run("x = 1")
    notebook.run("%gpuckpt save here")
    notebook.run("x = 2")
    rewrite("here", **odd)
    answer = notebook.fails("%gpuckpt restore here")
    assert (answer.ename, notebook.value("x")) == ("Damaged", "2")
    ((_, members),) = odd.items()
    assert f"{next(iter(members))} is" in answer.text
    assert len(run_folders(notebook.folder)) == 1
