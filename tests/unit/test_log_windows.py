"""Windows of a log by byte position: whole lines, in both directions, searched in pieces."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.storage.log_parts import part_path, parts_folder
from paceline.view.output import log_blocks
from paceline.view.output.log_blocks import containing, position_at
from paceline.view.output.log_windows import Query, Window, around, read
from support import recorded


def line(number: int, text: str, generation: int = 1, mark: str = "|") -> bytes:
    return f"{recorded.at(number * 0.001)} g{generation} {mark} {text}\n".encode()


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_blocks, "BLOCK", 100)


def write(folder: Path, count: int = 1000) -> Path:
    path = folder / "worker-0.log"
    path.write_bytes(b"".join(line(number, f"{number} {'x' * (number % 37)}") for number in range(count)))
    return path


def numbers(window: Window) -> list[int]:
    return [int(each.text.split()[0]) for each in window.lines]


def test_pages_forward_and_backward_have_every_line_once(tmp_path: Path, small_blocks: None) -> None:
    path = write(tmp_path)
    forward, position = [], 0
    while (window := read(path, Query(position, limit=7))).lines:
        assert window.begin == position
        forward += numbers(window)
        position = window.next
    backward: list[int] = []
    position = window.end
    while (window := read(path, Query(position, backward=True, limit=7))).lines:
        backward = numbers(window) + backward
        position = window.begin
    assert forward == backward == list(range(1000)) and position == 0


def test_the_end_is_shown_without_a_position(tmp_path: Path) -> None:
    window = read(write(tmp_path), Query(backward=True, limit=3))
    assert numbers(window) == [997, 998, 999] and window.next == window.end


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("windows"))


@given(position=st.integers(0, 60_000), limit=st.integers(1, 50), backward=st.booleans())
def test_a_window_from_any_byte_begins_with_a_whole_line(log: Path, position: int, limit: int, backward: bool) -> None:
    window = read(log, Query(position, backward, limit))
    expected = numbers(window)
    assert expected == list(range(expected[0], expected[0] + len(expected))) if expected else True
    data = log.read_bytes()
    assert all(data.startswith(each.at.encode(), each.position) for each in window.lines)
    assert len(window.lines) == limit or window.next == len(data) or (backward and window.begin == 0)


def test_around_a_position(tmp_path: Path) -> None:
    path = write(tmp_path)
    middle = read(path, Query(0, limit=500)).next
    window = around(path, middle, Query(limit=10))
    assert numbers(window) == list(range(495, 505))
    assert numbers(around(path, 0, Query(limit=4))) == [0, 1, 2, 3]


@pytest.mark.parametrize("first", [0, 1, 500, 999, 1000])
def test_the_position_of_a_time(tmp_path: Path, first: int) -> None:
    path = write(tmp_path)
    position = position_at(path, recorded.at(first * 0.001))
    assert numbers(read(path, Query(position, limit=1))) == [first][: 1000 - first]


def test_a_search_finds_lines_whatever_their_case_and_colors(tmp_path: Path, small_blocks: None) -> None:
    path = tmp_path / "worker-0.log"
    texts = ["alpha", "Beta", "gamma", "b\x1b[31mETA\x1b[0m", "delta", "größe"]
    path.write_bytes(b"".join(line(number, text) for number, text in enumerate(texts * 50)))
    window = read(path, Query(search=containing("beta"), limit=1000))
    assert [each.text for each in window.lines] == ["Beta", "bETA"] * 50
    backward = read(path, Query(backward=True, search=containing("beta"), limit=3))
    assert [each.text for each in backward.lines] == ["bETA", "Beta", "bETA"]
    assert len(read(path, Query(search=containing("GRÖSSE"), limit=1000)).lines) == 50


def test_a_search_that_takes_too_long_says_where_to_continue(tmp_path: Path, small_blocks: None) -> None:
    path = write(tmp_path)
    pieces, position = 0, 0
    matching: list[int] = []
    while True:
        window = read(path, Query(position, search=containing("999 "), limit=10, seconds=0.0))
        matching, pieces = matching + numbers(window), pieces + 1
        if window.is_complete:
            break
        assert window.scanned > position
        position = window.scanned
    assert matching == [999] and pieces > 10


def test_an_incomplete_line_appears_when_it_is_complete_or_nothing_follows(tmp_path: Path) -> None:
    path = tmp_path / "worker-0.log"
    path.write_bytes(line(1, "one") + line(2, "two")[:-2])
    assert [each.text for each in read(path, Query()).lines] == ["one"]
    assert [each.text for each in read(path, Query(is_final=True)).lines] == ["one", "tw"]


def test_long_lines_are_cut_and_control_sequences_shown(tmp_path: Path) -> None:
    path = tmp_path / "worker-0.log"
    path.write_bytes(line(1, "y" * 10_000) + line(2, "\x1b]52;c;bHM=\x07<script>", mark="~"))
    long, hostile = read(path, Query()).lines
    assert long.is_cut and len(long.text) == log_blocks.SHOWN
    assert hostile.text == "\\x1b]52;c;bHM=\\x07<script>" and hostile.progress
    assert len(read(path, Query(limit=1, shown=log_blocks.LONGEST)).lines[0].text) == 10_000


def test_a_line_without_end_uses_little_memory(tmp_path: Path) -> None:
    import tracemalloc

    path = tmp_path / "worker-0.log"
    path.write_bytes(line(1, "one"))
    os.truncate(path, 64 << 20)
    tracemalloc.start()
    read(path, Query(limit=2))
    read(path, Query(backward=True, limit=2))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 24 << 20


def test_deleted_parts_are_skipped(tmp_path: Path) -> None:
    path = write(tmp_path, 100)
    data = path.read_bytes()
    cut, middle = data.index(b"30 x") - 30, data.index(b"60 x") - 30
    cut, middle = data.index(b"\n", cut) + 1, data.index(b"\n", middle) + 1
    Path(parts_folder(str(path))).mkdir()
    Path(part_path(str(path), cut)).write_bytes(data[cut:middle])
    path.write_bytes(data[middle:])
    window = read(path, Query(0, limit=1000))
    assert (window.first, window.end) == (cut, len(data))
    assert numbers(window) == list(range(numbers(window)[0], 100)) and numbers(window)[0] in (30, 31)
    assert numbers(read(path, Query(backward=True, limit=1000))) == numbers(window)


def test_a_log_that_does_not_exist_is_empty(tmp_path: Path) -> None:
    window = read(tmp_path / "worker-0.log", Query())
    assert window.lines == () and window.end == 0
    assert position_at(tmp_path / "worker-0.log", recorded.at(1)) == 0
