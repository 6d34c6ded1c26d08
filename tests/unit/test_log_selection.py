"""`paceline logs --grep`, `--tail` and `--since`: parts of large logs, read no further back than necessary."""

from __future__ import annotations

import contextlib
import json
import random
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from paceline.agent.limited_log import LimitedLog
from paceline.plan import to_json
from paceline.storage.log_parts import LogReader
from paceline.view.output import tail as tails
from paceline.view.output.merged_logs import Logs, deleted_reason, settle, stamp
from paceline.view.text.wording import size
from support import recorded
from support.recorded import at, call
from support.worlds import make_plan


def line(seconds: float, text: str, generation: int = 1, mark: str = "|") -> str:
    return f"{at(seconds)} g{generation} {mark} {text}\n"


LOGS = {
    "worker-0": line(1, "loss 0.9") + line(3, "loss 0.8") + line(5, "10%", 2, "~") + line(6, "20%", 2, "~"),
    "worker-1": line(2, "\x1b[31mValueError\x1b[0m: no digit") + line(4, "loss nan", 2),
}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    recorded.write(tmp_path, report=recorded.REPORT, logs=LOGS)
    return tmp_path


def texts(home: Path, *arguments: str) -> list[str]:
    result = call(home, "logs", *arguments, "-o", "json")
    assert (result.returncode, result.stderr) == (0, "")
    return [json.loads(line)["text"] for line in result.stdout.splitlines()]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--grep", "loss"], ["loss 0.9", "loss 0.8", "loss nan"]),
        (["--grep", "^loss 0"], ["loss 0.9", "loss 0.8"]),
        (["--grep", "LOSS"], []),
        (["--grep", "(?i)LOSS N|ERROR: no"], ["\x1b[31mValueError\x1b[0m: no digit", "loss nan"]),
        (["--grep", "worker"], []),
        (["--grep", "10%"], []),
        (["--grep", "%$"], ["20%"]),
        (["--grep", "[[]"], []),
        (["--tail", "2"], ["loss nan", "20%"]),
        (["--tail", "1"], ["20%"]),
        (["--tail", "0"], []),
        (["--tail", "100"], ["loss 0.9", "\x1b[31mValueError\x1b[0m: no digit", "loss 0.8", "loss nan", "20%"]),
        (["--tail", "1", "--grep", "loss"], ["loss nan"]),
        (["--tail", "2", "--grep", "loss"], ["loss 0.8", "loss nan"]),
        (["--tail", "1", "-g", "1"], ["loss 0.8"]),
        (["--tail", "2", "-t", "worker-1"], ["\x1b[31mValueError\x1b[0m: no digit", "loss nan"]),
        (["--tail", "3", "--since", at(4)], ["loss nan", "20%"]),
        (["--tail", "1", "--since", at(2), "--grep", "Error"], ["\x1b[31mValueError\x1b[0m: no digit"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_parts_of_logs(home: Path, arguments: list[str], expected: list[str]) -> None:
    assert texts(home, *arguments) == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--grep", "^loss 0"], ["loss 0.9", "loss 0.8"]),
        (["--grep", "10%"], []),
        (["--grep", "%$"], ["20%"]),
        (["--tail", "2", "--grep", "loss"], ["loss 0.8", "loss nan"]),
        (["--tail", "1"], ["loss nan", "20%"]),  # the bar may still move: it is not one of the lines so far
        (["--tail", "0"], []),
    ],
    ids=lambda value: " ".join(value),
)
def test_parts_of_logs_that_are_followed(home: Path, arguments: list[str], expected: list[str]) -> None:
    assert texts(home, "-f", *arguments) == expected


def test_lines_that_follow_are_searched_and_all_of_them_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = recorded.write(
        tmp_path, events=recorded.LIFE[:5], logs={"worker-0": line(1, "loss 9") + line(2, "loss 8")}
    )
    with contextlib.ExitStack() as supervisor:
        supervisor.enter_context(recorded.supervised(folder))

        def train(_: float) -> None:
            with open(folder / "logs" / "worker-0.log", "a") as file:
                file.write(line(3, "loss 7") + line(4, "saving") + line(5, "loss 6"))
            supervisor.close()

        monkeypatch.setattr("paceline.cli.logs.time.sleep", train)
        assert texts(tmp_path, "-f", "--grep", "loss", "--tail", "1") == ["loss 8", "loss 7", "loss 6"]


@pytest.mark.parametrize(("age", "count"), [("5m", 1), ("1h30m", 2), ("90 m", 2), ("5400.5s", 2), ("1d", 3)])
def test_ages_are_written_like_durations_of_the_job_file(tmp_path: Path, age: str, count: int) -> None:
    now = datetime.now(UTC)
    log = "".join(f"{stamp(now - timedelta(hours=hours))} g1 | {hours}\n" for hours in (10, 1, 0))
    recorded.write(tmp_path, logs={"worker-0": log})
    assert len(texts(tmp_path, "--since", age)) == count


def random_logs(seed: int) -> dict[str, str]:
    """Output of three tasks with progress bars, restarts, incomplete and damaged lines, and long ones."""
    rng = random.Random(seed)
    logs = {}
    for task in ("worker-0", "worker-1", "evaluator-0"):
        log, seconds, generation = "", 0.0, 1
        for number in range(rng.randrange(60)):
            seconds += rng.choice([0, 0.001, 0.3])
            generation += rng.random() < 0.05
            text = f"{number} {'x' * rng.choice([0, 0, 10, 300])}"
            log += line(seconds, text, generation, rng.choice("||~")) if rng.random() < 0.95 else f"damaged {number}\n"
        logs[task] = log + rng.choice(["", "", line(seconds, "incomplete", generation)[:-1]])
    return logs


@pytest.mark.parametrize("seed", range(20))
def test_the_last_lines_are_those_that_all_lines_end_with(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tails, "_BLOCK", random.Random(seed).choice([1, 7, 64, 200, 1 << 16]))
    recorded.write(tmp_path, logs=random_logs(seed))
    for options in ((), ("-g", "2"), ("--since", at(2)), ("-t", "worker", "--grep", "x|incomplete")):
        everything = texts(tmp_path, *options)
        for count in (0, 1, 2, 5, 17, 1000):
            assert texts(tmp_path, *options, "--tail", str(count)) == (everything[-count:] if count else [])


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of bytes that are read from logs."""
    counts: list[int] = []
    read = LogReader.read

    def counted(self: LogReader, size: int) -> bytes:
        data = read(self, size)
        counts.append(len(data))
        return data

    monkeypatch.setattr(LogReader, "read", counted)
    return counts


def test_only_the_end_of_a_large_log_is_read(tmp_path: Path, reads: list[int]) -> None:
    log = "".join(line(number / 1000, f"{number} {'x' * 100}") for number in range(50_000))
    folder = recorded.write(tmp_path, logs={"worker-0": log})
    logs = Logs(folder)
    logs.skip_to_last(100)
    lines = list(settle(logs.backlog()))
    assert lines[-1].text.startswith("49999 ") and 100 <= len(lines) < 110
    assert 0 < sum(reads) < 200_000 < len(log) / 20
    logs.close()


def test_a_log_that_appears_later_is_shown_from_its_beginning(tmp_path: Path) -> None:
    folder = recorded.write(tmp_path, logs={"worker-0": line(1, "a") + line(2, "b")})
    logs = Logs(folder)
    logs.skip_to_last(1)
    assert [one.text for one in logs.backlog()] == ["b"]
    (folder / "logs" / "worker-1.log").write_text(line(3, "c") + line(4, "d"))
    assert [one.text for one in logs.more()] == ["c", "d"]
    logs.close()


def test_a_line_that_is_incomplete_is_shown_once_it_is_complete(tmp_path: Path) -> None:
    complete = line(2, "b")
    folder = recorded.write(tmp_path, logs={"worker-0": line(1, "a") + complete[:-2]})
    logs = Logs(folder)
    logs.skip_to_last(0)
    assert list(logs.backlog()) == []
    with open(folder / "logs" / "worker-0.log", "a") as file:
        file.write(complete[-2:])
    assert [one.text for one in logs.more()] == ["b"]
    logs.close()


def test_logs_in_a_store_are_searched_in_the_same_way(tmp_path: Path) -> None:
    uploaded = {
        "captain": {
            "events.jsonl": "".join(json.dumps(event) + "\n" for event in recorded.LIFE),
            "plan.json": to_json(make_plan(2)),
        },
        **{f"worker-host-{index}": {f"logs/worker-{index}.log": LOGS[f"worker-{index}"]} for index in range(2)},
    }
    location = tmp_path / "store" / "digits-3f9a"
    for host, files in uploaded.items():
        piece = location / "logs" / host / "life" / "00000001"
        piece.parent.mkdir(parents=True)
        head = {"version": 1, "files": {name: len(text.encode()) for name, text in files.items()}}
        piece.write_text(json.dumps(head) + "\n" + "".join(files.values()))
    home = tmp_path / "home"
    home.mkdir()
    assert texts(home, str(location), "--grep", "loss", "--tail", "2") == ["loss 0.8", "loss nan"]
    assert texts(home, str(location), "--tail", "2", "--since", at(3)) == ["loss nan", "20%"]


# ---- logs whose oldest parts were deleted


def long_log(folder: Path, lines: int = 400, limit: int = 8000, first: int = 0) -> None:
    log = LimitedLog(str(folder / "logs" / "worker-0.log"), pytest.fail, limit)
    for number in range(first, first + lines):
        log.write(line(number / 10, f"line {number}").encode())
    log.close()


def shown(home: Path, *arguments: str) -> tuple[list[int], str]:
    result = call(home, "logs", *arguments, "-o", "json")
    assert result.returncode == 0
    numbers = [json.loads(line)["text"].split()[-1] for line in result.stdout.splitlines()]
    return [int(number) for number in numbers], result.stderr


@pytest.fixture
def long(tmp_path: Path) -> Path:
    folder = recorded.write(tmp_path, report=recorded.REPORT, logs={"worker-1": ""})
    long_log(folder)
    return tmp_path


def test_what_was_deleted_is_mentioned_once(long: Path) -> None:
    numbers, messages = shown(long)
    assert numbers == list(range(numbers[0], 400)) and 200 < numbers[0] < 300
    dropped = sum(len(line(number / 10, f"line {number}")) for number in range(numbers[0]))
    assert messages == (
        f"note: not shown: {size(dropped)} of the output of worker-0, which was deleted: limits.log keeps the last "
        "1.0 GiB of each task\n"
    )
    assert shown(long, "-f") == (numbers, messages)
    assert shown(long, "--grep", "9$") == ([number for number in numbers if number % 10 == 9], messages)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--tail", "3"], [397, 398, 399]),
        (["--since", at(39.55)], [396, 397, 398, 399]),
        (["--tail", "2", "--since", at(39.55)], [398, 399]),
        (["-t", "worker-1"], []),
    ],
    ids=lambda value: " ".join(map(str, value)),
)
def test_what_was_deleted_is_not_mentioned_if_it_was_not_asked_for(
    long: Path, arguments: list[str], expected: list[int]
) -> None:
    assert shown(long, *arguments) == (expected, "")


@pytest.mark.parametrize("arguments", [["--tail", "350"], ["--since", at(5)]], ids=" ".join)
def test_what_was_asked_for_may_have_been_deleted(long: Path, arguments: list[str]) -> None:
    numbers, messages = shown(long, *arguments)
    assert numbers == shown(long)[0] and messages.startswith("note: not shown: ")


def test_every_time_is_found_in_a_log_of_parts(long: Path) -> None:
    first = shown(long)[0][0]
    for number in range(first + 1, 400, 7):
        assert shown(long, "--since", at(number / 10))[0] == list(range(number, 400))
    for count in range(1, 400 - first, 11):
        assert shown(long, "--tail", str(count))[0] == list(range(400 - count, 400))


def test_a_reader_that_is_too_slow_continues_with_whole_lines(tmp_path: Path) -> None:
    folder = recorded.write(tmp_path, logs={})
    long_log(folder, 100)
    logs = Logs(folder)
    seen = [one.text for one in logs.backlog()]
    assert len(seen) == 100 and logs.missed() == ""
    long_log(folder, 20, first=100)
    seen += [one.text for one in logs.more()]
    long_log(folder, 400, first=120)
    while lines := logs.more():
        seen += [one.text for one in lines]
    assert logs.missed().startswith("not shown: ") and logs.missed(last=True) == ""
    numbers = [int(text.removeprefix("line ")) for text in seen]
    assert numbers[:120] == list(range(120)) and numbers[-1] == 519 and len(set(numbers)) == len(numbers) < 400
    logs.close()


@pytest.mark.parametrize(
    ("to", "where"),
    [
        ("s3://models/digits", "; `paceline logs s3://models/digits/digits-3f9a` shows all output"),
        ("claim://models/digits", "; `paceline logs claim://models/digits/digits-3f9a` shows all output"),
        ("", ""),
    ],
)
def test_where_all_output_is(tmp_path: Path, to: str, where: str) -> None:
    folder = recorded.write(tmp_path, logs={})
    (folder / "run.json").write_text(json.dumps({"run": folder.name, "on": "kubernetes", "context": "a"}))
    (folder / "plan.json").write_text(json.dumps({"limits": {"log": 64 << 20}, "snapshots": {"to": to}}))
    expected = f"which was deleted: limits.log keeps the last 64 MiB of each task{where}"
    assert deleted_reason(folder) == expected


def test_a_reader_that_is_always_too_slow_is_not_told_all_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.view.output.merged_logs.time.monotonic", lambda: now)
    folder = recorded.write(tmp_path, logs={})
    logs, messages = Logs(folder), []
    for now in range(1000, 1100):  # noqa: B007
        long_log(folder, 50, limit=800)
        logs.more()
        messages.append(logs.missed())
    messages.append(logs.missed(last=True))
    assert [bool(text) for text in messages] == [number in (0, 60, 100) for number in range(101)]
    logs.close()
