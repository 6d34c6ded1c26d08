"""Output becomes log lines: timestamped, folded and bounded; a failing disk never stops the task."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path

import pytest

from paceline.agent.captain_process.event_log import EventLog
from paceline.agent.run_files import Appender, stamp
from paceline.agent.tasks import overwritten_lines, task_log
from paceline.agent.tasks.task_log import TaskLog


def read(path: Path) -> list[str]:
    lines = path.read_text().splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z g\d+ [|~] ", line) for line in lines)
    return [line.split(" ", 1)[1] for line in lines]


@pytest.fixture
def log(tmp_path: Path) -> TaskLog:
    new_log = TaskLog(str(tmp_path / "worker-0.log"), lambda text: None)
    new_log.begin(1)
    return new_log


def test_lines_are_complete_however_the_output_is_split(log: TaskLog, tmp_path: Path) -> None:
    for piece in (b"one\ntw", b"o\nthree", b"\n", b"four"):
        log.feed(piece)
    log.end()
    assert read(tmp_path / "worker-0.log") == ["g1 | one", "g1 | two", "g1 | three", "g1 | four"]


def test_a_new_generation_starts_a_new_tail(log: TaskLog, tmp_path: Path) -> None:
    log.feed(b"old\n")
    log.begin(2)
    log.feed(b"new\n")
    assert list(log.tail) == ["new"]
    assert read(tmp_path / "worker-0.log") == ["g1 | old", "g2 | new"]


def test_a_progress_bar_keeps_its_latest_state(log: TaskLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overwritten_lines, "STATE_EVERY", 1e9)
    for percent in range(0, 100, 10):
        log.feed(f"\r{percent}%".encode())
    log.feed(b"\rdone\n")
    assert read(tmp_path / "worker-0.log")[-1] == "g1 | done"
    assert len(read(tmp_path / "worker-0.log")) <= 2


def test_bars_are_shown_while_they_run(log: TaskLog, tmp_path: Path) -> None:
    log.feed(b"\r10%")
    assert read(tmp_path / "worker-0.log") == ["g1 ~ 10%"]


def test_windows_line_endings_end_a_line(log: TaskLog, tmp_path: Path) -> None:
    log.feed(b"one\r\ntwo\r\n")
    assert read(tmp_path / "worker-0.log") == ["g1 | one", "g1 | two"]


def test_a_very_long_line_is_split(log: TaskLog, tmp_path: Path) -> None:
    log.feed(b"x" * (task_log.LONGEST_LINE * 3 + 5))
    log.end()
    lines = read(tmp_path / "worker-0.log")
    assert len(lines) == 4 and sum(line.count("x") for line in lines) == task_log.LONGEST_LINE * 3 + 5


def test_invalid_utf8_is_replaced(log: TaskLog, tmp_path: Path) -> None:
    log.feed(b"a\xff\xfeb\n")
    assert read(tmp_path / "worker-0.log") == ["g1 | a��b"]


def test_a_full_disk_is_reported_once_and_raises_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    appender = Appender(str(tmp_path / "x"), messages.append)
    appender.write(b"before\n")

    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        for _ in range(3):
            appender.write(b"lost\n")
    assert len(messages) == 1 and "No space left" in messages[0] and "training continues" in messages[0]
    appender._retry_at = 0.0
    appender.write(b"after\n")
    assert (tmp_path / "x").read_text() == "before\nafter\n"


@pytest.mark.timeout(20)
def test_a_pipe_in_place_of_a_log_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x")
    messages: list[str] = []
    assert not Appender(str(tmp_path / "x"), messages.append).write(b"line\n")
    assert len(messages) == 1 and "training continues, but output is lost" in messages[0]


def test_events_are_written_when_the_disk_has_space_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Except steps, of which newer ones follow."""
    log = EventLog(str(tmp_path), None, lambda _: None)
    log.write("generation-formed", 1, {})

    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        log.write("saved", 1, {})
        log.write("step", 1, {})
        log.write("committed", 1, {})
    log.write("saved", 2, {})
    log.write("step", 2, {})
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(event["event"], event["generation"]) for event in events] == [
        ("generation-formed", 1), ("saved", 1), ("committed", 1), ("saved", 2), ("step", 2),
    ]  # fmt: skip


def test_a_line_that_was_torn_twice_is_ended_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    appender, write = Appender(str(tmp_path / "x"), lambda _: None), os.write
    for most in (3, 5, 100):
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", lambda fd, data, most=most: write(fd, data[:most]))
            appender.try_again()
            appender.write(b"12345")
    assert (tmp_path / "x").read_text() == "123\n1234\n12345"


def test_stamps_are_utc_with_milliseconds() -> None:
    assert stamp(1.5) == "1970-01-01T00:00:01.500Z"
