"""Bytes that go through a little memory: all of them arrive, and who fills a room has it alone, whatever happens."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jupyter_gpuckpt.freeze.line_program import LineProgram
from jupyter_gpuckpt.freeze.staging_buffer import StagingBuffer

NEVER = 1 << 30
PIECES = 200
SIZE = 300_000
"""Bytes of a piece; not all of a room."""


@pytest.fixture
def target(tmp_path: Path) -> Path:
    target = tmp_path / "gpu"
    target.write_bytes(b"\xdd" * PIECES * SIZE)
    return target


@pytest.fixture
def buffer(tmp_path: Path) -> Iterator[StagingBuffer]:
    buffer = StagingBuffer(tmp_path / "rooms")
    assert (tmp_path / "rooms").stat().st_mode & 0o777 == 0o600
    yield buffer
    buffer.close()
    assert not (tmp_path / "rooms").exists()


def emptier(tmp_path: Path, target: Path, last: int) -> LineProgram:
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    arguments = (str(tmp_path / "rooms"), str(target), str(last))
    return LineProgram("room_emptier", *arguments, environment={**os.environ, "PYTHONPATH": path})


def piece(number: int) -> bytes:
    return bytes([number]) * SIZE


def bring_all(buffer: StagingBuffer) -> list[int]:
    """Bring all pieces by many threads; return those that found something else in their room than they had filled."""
    together = threading.Barrier(12)
    disturbed = []

    def bring(first: int) -> None:
        together.wait(30)
        for number in range(first, PIECES, 12):
            with buffer.room(number * SIZE, SIZE) as room:
                for begin in range(0, SIZE, 1000):  # slowly: others have time to disturb it
                    room[begin : begin + 1000] = piece(number)[begin : begin + 1000]
                if bytes(room) != piece(number):
                    disturbed.append(number)

    with ThreadPoolExecutor(12) as threads:
        list(threads.map(bring, range(12)))
    return disturbed


def test_every_byte_arrives_where_it_belongs(tmp_path: Path, target: Path, buffer: StagingBuffer) -> None:
    program = emptier(tmp_path, target, NEVER)
    try:
        buffer.start(program)
        assert bring_all(buffer) == []
        assert buffer.finish()
        assert target.read_bytes() == b"".join(map(piece, range(PIECES)))
    finally:
        program.kill()
        program.close()


def test_where_the_program_ends_nobody_waits_and_it_is_told(
    tmp_path: Path, target: Path, buffer: StagingBuffer
) -> None:
    program = emptier(tmp_path, target, PIECES // 3)
    try:
        buffer.start(program)
        bring_all(buffer)
        assert not buffer.finish()
    finally:
        program.kill()
        program.close()


def test_a_room_that_is_being_filled_when_the_program_ends_is_lent_to_nobody_else(
    tmp_path: Path, target: Path, buffer: StagingBuffer
) -> None:
    program = emptier(tmp_path, target, 5)
    rooms = len(buffer._rooms)
    try:
        buffer.start(program)
        with buffer.room(0, SIZE) as own:
            own[:] = piece(1)
            for number in range(2 * rooms):  # more than there are: its end was noticed
                with buffer.room(number * SIZE, SIZE) as room:
                    room[:] = piece(2)
            with contextlib.ExitStack() as stack:
                for _ in range(rooms - 1):
                    stack.enter_context(buffer.room(0, SIZE))[:] = piece(3)
                assert bytes(own) == piece(1)
        assert not buffer.finish()
    finally:
        program.kill()
        program.close()


def test_a_room_whose_filling_failed_is_not_emptied(tmp_path: Path, target: Path, buffer: StagingBuffer) -> None:
    program = emptier(tmp_path, target, NEVER)
    try:
        buffer.start(program)
        with contextlib.suppress(ValueError), buffer.room(0, SIZE) as room:
            room[:5] = b"wrong"
            raise ValueError
        assert buffer.finish()
        assert target.read_bytes() == b"\xdd" * PIECES * SIZE
    finally:
        program.kill()
        program.close()


def test_while_it_is_held_back_nobody_has_room(tmp_path: Path, target: Path, buffer: StagingBuffer) -> None:
    program = emptier(tmp_path, target, NEVER)
    try:
        buffer.start(program)
        buffer.hold_back()
        with ThreadPoolExecutor(1) as other:
            bringing = other.submit(bring_all, buffer)
            with pytest.raises(concurrent.futures.TimeoutError):
                bringing.result(0.3)
            buffer.go_on()
            assert bringing.result(30) == []
        assert buffer.finish()
        assert target.read_bytes() == b"".join(map(piece, range(PIECES)))
    finally:
        program.kill()
        program.close()
