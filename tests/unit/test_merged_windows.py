"""Windows of the output of several tasks: all lines in the order of their times, in both directions, searched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.view.output import log_blocks, merged_windows
from paceline.view.output.log_blocks import containing
from paceline.view.output.log_windows import Query
from paceline.view.output.merged_windows import MergedWindow, around, byte_position, position_of, read
from support import recorded

TASKS = ["worker-0", "worker-1", "worker-2"]


def line(milliseconds: int, text: str) -> str:
    return f"{recorded.at(milliseconds / 1000)} g1 | {text}\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three tasks that print at different times, several lines in a millisecond."""
    monkeypatch.setattr(log_blocks, "BLOCK", 100)
    monkeypatch.setattr(merged_windows, "_SHOWN", 1)
    for number, task in enumerate(TASKS):
        times = [time for time in range(300) if (time + number) % (number + 2) == 0]
        text = "".join(line(time, f"{time} {task} {copy}") for time in times for copy in range(1 + time % 3))
        (tmp_path / f"{task}.log").write_text(text)
    return tmp_path


def texts(window: MergedWindow) -> list[str]:
    return [each.line.text for each in window.lines]


def expected(folder: Path) -> list[str]:
    lines = [
        (text[:24], number, text.partition("| ")[2])
        for number, task in enumerate(TASKS)
        for text in (folder / f"{task}.log").read_text().splitlines()
    ]
    return [text for _, _, text in sorted(lines, key=lambda each: each[:2])]


@pytest.mark.parametrize("limit", [1, 7, 50])
def test_pages_forward_and_backward_have_every_line_once_in_order(folder: Path, limit: int) -> None:
    forward: list[str] = []
    position = None
    while (window := read(folder, TASKS, Query(position, limit=limit))).lines:
        forward += texts(window)
        position = window.next
    assert forward == expected(folder) and window.next == window.end
    backward: list[str] = []
    position = None
    while (window := read(folder, TASKS, Query(position, backward=True, limit=limit))).lines:
        backward = texts(window) + backward
        position = window.begin
    assert backward == forward and position == window.first


def test_lines_name_their_task_and_their_place_in_its_log(folder: Path) -> None:
    for each in read(folder, TASKS, Query(limit=20)).to_json()["lines"]:
        data = (folder / f"{each['task']}.log").read_bytes()[each["byte"] :]
        assert each["task"] in each["text"] and data.startswith(each["at"].encode())


def test_around_a_time_and_where_each_task_continues(folder: Path) -> None:
    position = position_of(recorded.at(0.1))
    window = around(folder, TASKS, position, Query(limit=10))
    middle = [text for text in expected(folder) if int(text.split()[0]) in range(90, 110)]
    assert texts(window) and set(texts(window)) < set(middle)
    rest = [
        text.partition("| ")[2]
        for number, task in enumerate(TASKS)
        for text in (folder / f"{task}.log")
        .read_text()[byte_position(folder / f"{task}.log", number, position) :]
        .splitlines()
    ]
    assert sorted(rest) == sorted(text for text in expected(folder) if int(text.split()[0]) >= 100)


@pytest.mark.parametrize("backward", [False, True])
def test_a_search_through_all_tasks_goes_on_where_it_ended(folder: Path, backward: bool) -> None:
    matches: list[str] = []
    position, pieces = None, 0
    while True:
        window = read(folder, TASKS, Query(position, backward, 1000, containing("WORKER-1 2"), seconds=0.0))
        matches, pieces = texts(window) + matches if backward else matches + texts(window), pieces + 1
        if window.is_complete:
            break
        assert position is None or (window.scanned < position if backward else window.scanned > position)
        position = window.scanned
    assert matches == [text for text in expected(folder) if "worker-1 2" in text] and pieces > 10


def test_tasks_without_output_and_damaged_lines(tmp_path: Path) -> None:
    empty = read(tmp_path, TASKS, Query())
    assert (empty.lines, empty.first, empty.end) == ((), 0, 0)
    (tmp_path / "worker-0.log").write_text(line(1, "one") + "no time\n" + line(3, "three"))
    (tmp_path / "worker-1.log").write_text(line(2, "two"))
    (tmp_path / "worker-2.log").write_text("")
    for backward in (False, True):
        assert sorted(texts(read(tmp_path, TASKS, Query(backward=backward)))) == ["no time", "one", "three", "two"]


# ---- many lines with the same time


def many(folder: Path, count: int, rest: str = "") -> list[str]:
    """Of each task, lines in the same millisecond; the first task also has lines without a time."""
    for number, task in enumerate(TASKS):
        lines = [line(1, f"{task} first"), *(line(5, f"{task} {index}") for index in range(count))]
        lines += [f"{rest}{task} {index}\n" for index in range(count)] if rest and number == 0 else []
        (folder / f"{task}.log").write_text("".join([*lines, line(9, f"{task} last")]))
    return sorted(log_blocks.line_of(0, each.encode()).text for task in TASKS for each in raw(folder, task))


def raw(folder: Path, task: str) -> list[str]:
    return (folder / f"{task}.log").read_text().splitlines()


def pages(folder: Path, backward: bool, **fields: Any) -> list[MergedWindow]:
    windows: list[MergedWindow] = []
    position, inside = None, ""
    while True:
        window = read(folder, TASKS, Query(position, backward, inside=inside, **fields))
        cursor = (window.begin, window.begin_inside) if backward else (window.next, window.next_inside)
        if not window.lines and window.is_complete:
            return windows
        assert cursor != (position, inside)
        windows.append(window)
        position, inside = cursor


@pytest.mark.parametrize("rest", ["", "no time ", "1 no time "], ids=["times", "text", "digits"])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("limit", [1, 10, 64])
def test_windows_stay_small_however_many_lines_share_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rest: str, backward: bool, limit: int
) -> None:
    monkeypatch.setattr(merged_windows, "_SAME", 20)
    every_line = many(tmp_path, 150, rest)
    windows = pages(tmp_path, backward, limit=limit)
    assert max(len(window.lines) for window in windows) <= limit + 20
    assert sorted(text for window in windows for text in texts(window)) == every_line
    places = [(each.task, each.line.position) for window in windows for each in window.lines]
    for task in TASKS if not backward else ():
        own = [place for name, place in places if name == task]
        assert own == sorted(own)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_a_search_ends_in_time_however_many_lines_share_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backward: bool
) -> None:
    monkeypatch.setattr(merged_windows, "_SAME", 20)
    monkeypatch.setattr(log_blocks, "BLOCK", 4096)
    wanted = [text for text in many(tmp_path, 500) if "7" in text]
    windows = pages(tmp_path, backward, search=containing("7"), seconds=0.0)
    assert max(len(window.lines) for window in windows) <= 22 and len(windows) > 5
    assert sorted(text for window in windows for text in texts(window)) == wanted


def test_a_window_continues_after_and_before_any_of_its_lines(tmp_path: Path) -> None:
    """The page drops lines at the edges of what it shows, and fetches them again."""
    many(tmp_path, 50)
    shown = read(tmp_path, TASKS, Query()).lines
    for number, each in enumerate(shown):
        after = read(tmp_path, TASKS, Query(each.position, inside=f"{each.task}:{each.line.position + 1}"))
        assert after.lines == shown[number + 1 :]
        before = read(tmp_path, TASKS, Query(each.position, True, inside=f"{each.task}:{each.line.position}"))
        assert before.lines == shown[:number]


@pytest.mark.parametrize("rest", ["no time ", "1 no time "], ids=["text", "digits"])
def test_lines_without_a_time_are_around_it(tmp_path: Path, rest: str) -> None:
    every_line = many(tmp_path, 150, rest)
    for milliseconds in (1, 5, 6, 9, 10):
        window = around(tmp_path, TASKS, position_of(recorded.at(milliseconds / 1000)), Query(limit=2000))
        assert sorted(texts(window)) == every_line


def test_a_position_within_a_position_may_be_anything(tmp_path: Path) -> None:
    many(tmp_path, 5)
    whole = read(tmp_path, TASKS, Query(position_of(recorded.at(0.005)))).lines
    for inside in ("", "x", "worker-7:3", "worker-0:", "worker-0:-1", "worker-0:\u0661", f"worker-0:{'9' * 40}"):
        assert read(tmp_path, TASKS, Query(position_of(recorded.at(0.005)), inside=inside)).lines == whole
    beyond = read(tmp_path, TASKS, Query(position_of(recorded.at(0.005)), inside=f"worker-0:{10**16}")).lines
    assert {each.task for each in beyond} == {"worker-1", "worker-2"}


def test_few_lines_are_whole(tmp_path: Path) -> None:
    """With their whole text, a line may have megabytes."""
    many(tmp_path, 500)
    assert len(read(tmp_path, TASKS, Query(limit=1, shown=log_blocks.LONGEST)).lines) == 1
