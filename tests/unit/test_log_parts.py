"""Of a log that is too large, the oldest parts are deleted; what is kept is read as one file, while it is written."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.agent.limited_log import LimitedLog
from paceline.agent.tasks.task_log import TaskLog
from paceline.storage.log_parts import LogReader, bounds, part_path, parts, read_range


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "worker-0.log")


OPEN: list[LimitedLog | TaskLog] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while OPEN:
        OPEN.pop().close()


def limited(path: str, limit: int = 800) -> LimitedLog:
    OPEN.append(log := LimitedLog(path, pytest.fail, limit))
    return log


def line(number: int) -> bytes:
    return b"line %d\n" % number


def kept(path: str) -> int:
    folder = Path(path).parent
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def read_all(reader: LogReader) -> bytes:
    return b"".join(iter(lambda: reader.read(64), b""))


def test_a_small_log_is_one_file(path: str) -> None:
    log = limited(path)
    for number in range(5):
        log.write(line(number))
    assert [file.name for file in Path(path).parent.iterdir()] == ["worker-0.log"]
    assert Path(path).read_bytes() == b"".join(map(line, range(5)))


def test_the_oldest_output_is_deleted_in_whole_lines(path: str) -> None:
    log = limited(path)
    written = b""
    for number in range(1000):
        log.write(line(number))
        written += line(number)
        assert kept(path) <= 800
    reader = LogReader(path)
    text = read_all(reader)
    assert written.endswith(b"\n" + text) and len(text) > 600
    assert reader.dropped == bounds(path)[0] == len(written) - len(text)


def test_a_restarted_agent_continues(path: str) -> None:
    written = b""
    for number in range(300):
        log = limited(path)
        log.write(line(number))
        log.close()
        written += line(number)
    assert kept(path) <= 800
    assert bounds(path)[1] == len(written) and written.endswith(read_all(LogReader(path)))


def test_much_output_at_once_stays_within_the_limit(path: str) -> None:
    OPEN.append(log := TaskLog(path, pytest.fail, limit=160_000))
    log.feed(b"\n" * 65536)
    assert kept(path) <= 160_000
    assert {text.partition(b"g0 ")[2] for text in read_all(LogReader(path)).splitlines()} == {b"| "}


@pytest.mark.parametrize("seed", range(20))
def test_a_reader_gets_each_byte_once_while_the_log_is_written(path: str, seed: int) -> None:
    """If it reads fast enough; otherwise it knows how much it has missed."""
    rng = random.Random(seed)
    log, reader, position, written = limited(path), None, 0, b""
    for number in range(400):
        text = line(number) * rng.randrange(1, 4)
        log.write(text)
        written += text
        if rng.random() < rng.choice([0.02, 0.5]):
            reader = reader or LogReader(path)
            while data := reader.read(rng.randrange(1, 200)):
                position += len(data)
                missed = reader.dropped
                assert data == written[position + missed - len(data) : position + missed]
    assert reader is not None and position + reader.dropped == reader.tell() <= len(written)
    assert written.endswith(read_all(reader)) and reader.tell() == len(written)


def test_positions_stay_the_same(path: str) -> None:
    log = limited(path)
    for number in range(80):
        log.write(line(number))
    first, end = bounds(path)
    expected = b"".join(map(line, range(80)))
    assert first == 0 and read_range(path, 350, 450) == expected[350:450]
    for number in range(80, 110):
        log.write(line(number))
    assert read_range(path, 350, 450) == expected[350:450]
    with pytest.raises(OSError, match="was deleted"):
        read_range(path, 0, 450)
    with pytest.raises(OSError, match="truncated"):
        read_range(path, end, end + 10_000)


def test_a_log_between_two_parts_has_no_more_output_yet(path: str) -> None:
    log = limited(path)
    for number in range(12):
        log.write(line(number))
    reader = LogReader(path)
    read_all(reader)
    assert not parts(path)
    log.write(line(12) * 12)  # a new part
    Path(path).unlink()  # it is not there yet
    assert len(parts(path)) == 1 and read_all(reader) == b""


def test_other_files_in_the_folder_are_ignored(path: str) -> None:
    log = limited(path)
    for number in range(50):
        log.write(line(number))
    folder = Path(f"{path}.parts")
    (folder / ".DS_Store").write_bytes(b"x")
    (folder / ("9" * 20)).mkdir()
    (folder / ("8" * 20)).symlink_to("/dev/zero")
    assert read_all(LogReader(path)) == b"".join(map(line, range(50)))
    for number in range(50, 60):
        log.write(line(number))
    assert read_all(LogReader(path)) == b"".join(map(line, range(60)))


def test_a_log_that_was_deleted_begins_again(path: str) -> None:
    log = limited(path)
    for number in range(15):
        log.write(line(number))
    Path(path).unlink()
    for number in range(15, 50):
        log.write(line(number))
    assert Path(path).exists() and line(49) in read_all(LogReader(path))


def test_folders_in_place_of_parts_do_not_lift_the_limit(path: str) -> None:
    Path(part_path(path, 0), "not empty").mkdir(parents=True)
    log = limited(path, 800)
    for number in range(1000):
        assert log.write(b"%099d\n" % number)
        assert kept(path) <= 1000
    assert Path(path).read_bytes().endswith(b"999\n")
