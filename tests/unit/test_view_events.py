"""Reading events.jsonl and describing its events."""

import json
import sys
from pathlib import Path

import pydantic_core  # noqa: F401
import pytest

from paceline.view.output.tail import Tail
from paceline.view.state import events
from paceline.view.text import wording
from support import recorded
from support.recorded import event


def describe(line: dict[str, object]) -> str:
    parsed = events.parse(json.dumps(line))
    assert parsed is not None
    return wording.describe(parsed)


def test_events_come_in_order(tmp_path: Path) -> None:
    folder = recorded.write(tmp_path)
    assert [one.data for one in events.read(folder)] == recorded.LIFE


def test_both_parsers_read_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [rb'"\u00e9 \ud83d\ude00"', rb'"\udc80"', b"NaN", b"-Infinity", b"1e999", b"12345678901234567890"]
    damaged = [b'"\xff"', b"[1,", b"{} {}"]
    head = b'{"at": "2026-11-15T04:30:11.123Z", "event": "note", "text": '
    lines = [head + text + b"}" for text in (*texts, *damaged)]
    assert "pydantic_core" in sys.modules
    fast = [events.parse(line) for line in lines]
    monkeypatch.delitem(sys.modules, "pydantic_core")
    assert repr(fast) == repr([events.parse(line) for line in lines])
    assert [each is None for each in fast] == [False] * 6 + [True] * 3


def test_a_half_written_last_line_waits_for_its_end(tmp_path: Path) -> None:
    folder = recorded.write(tmp_path, events=[recorded.STARTED])
    tail = events.follow(folder)
    assert len(tail.read()) == 1
    line = json.dumps(recorded.STEP)
    with open(folder / "events.jsonl", "a") as file:
        file.write(line[:20])
        file.flush()
        assert tail.read() == []
        file.write(line[20:] + "\n")
        file.flush()
        assert tail.read() == [line.encode()]
    tail.close()


@pytest.mark.parametrize(
    "line", [b"", b"{", b"[]", b"null", b'{"event": 3}', b'{"event": "step"}', b"\xff\xfe", b"[" * 90000]
)
def test_damaged_lines_are_skipped(line: bytes) -> None:
    assert events.parse(line) is None


def test_an_event_of_another_version_is_shown_with_its_fields() -> None:
    assert describe(event(1, "sang", song="la", times=2)) == "sang song=la times=2"


def test_a_missing_file_has_no_events(tmp_path: Path) -> None:
    assert list(events.read(tmp_path)) == []


def test_an_endless_line_does_not_fill_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "long"
    path.write_bytes(b"x" * (5 << 20))
    tail = Tail(path)
    pieces = []
    while piece := tail.read():
        pieces += piece
    pieces.append(tail.rest())
    tail.close()
    assert b"".join(pieces) == b"x" * (5 << 20)
    assert max(map(len, pieces)) <= 2 << 20


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (recorded.STARTED, "digits-3f9a started: 3 tasks on 3 hosts (tensorflow multi-worker)"),
        (recorded.WAITING, "waiting for worker-host-1 (12 s so far, limit 30 min)"),
        (recorded.FORMED, "starting worker-0 and worker-1 (generation 1)"),
        (
            event(1, "generation-formed", 2, tasks=["worker-0"], restore="step-120"),
            "starting worker-0 from step 120 (generation 2)",
        ),
        (
            event(2, "generation-formed", generation=2, tasks=["worker-0"], restore="step-4-g1", counted=True),
            "starting worker-0 from snapshot 4 (generation 2)",
        ),
        (
            event(2, "generation-formed", generation=2, tasks=["worker-0"], restore=None, from_scratch=True),
            "starting worker-0 from the beginning: no snapshot (generation 2)",
        ),
        (
            event(2, "generation-formed", generation=2, tasks=["evaluator-0"], restore=None),
            "starting evaluator-0 (generation 2)",
        ),
        (event(1, "saved", step=4, snapshot="step-4-g1", counted=True), "snapshot 4 saved"),
        (recorded.KILLED, "worker-1 was killed by SIGKILL"),
        (
            event(1, "task-exited", task="worker-1", code=3, signal=None, expected=False),
            "worker-1 failed with exit code 3",
        ),
        (event(1, "task-exited", task="worker-1", code=None, signal=None, expected=False), "worker-1 was lost"),
        (event(1, "task-exited", task="worker-1", code=0, signal=None, expected=False), "worker-1 finished"),
        (event(1, "task-exited", task="worker-1", code=None, signal="SIGTERM", expected=True), "worker-1 was stopped"),
        (
            recorded.RESTART,
            "restarting after a failure of worker-1 (signal, 1 of 10 without progress): killed by SIGKILL",
        ),
        (
            {**recorded.RESTART, "delay_s": 4.0},
            "restarting after a failure of worker-1 (signal, 1 of 10 without progress): killed by SIGKILL; "
            "next attempt in 4 s",
        ),
        (
            {**recorded.RESTART, "count": 2, "signs_of_work": "model.pt had changed"},
            "restarting after a failure of worker-1 (signal, 2 of 10 without a step or snapshot): killed by SIGKILL; "
            "the same error as before, but model.pt had changed",
        ),
        (
            event(1, "hang", tasks=["worker-0"], silent_s=601.0, limit_s=600.0, progress="output"),
            "worker-0 hangs: no output for 10 min 1 s (limit 10 min)",
        ),
        (recorded.STEP, "worker-0: step 120, loss 0.3123, accuracy 0.91, 30 steps/s"),
        (
            event(1, "run-ended", status="stopped", reason="interrupted", cause="stopped"),
            "the run was stopped: interrupted",
        ),
    ],
)
def test_descriptions_of_events(line: dict[str, object], sentence: str) -> None:
    assert describe(line) == sentence


@pytest.mark.parametrize("line", recorded.LIFE, ids=lambda line: line["event"])
def test_every_kind_has_its_own_description(line: dict[str, object]) -> None:
    assert "=" not in describe(line)


def test_the_name_of_a_number_cannot_look_like_another_line() -> None:
    reported = {"loss": 1.0, "x\n06:00:00 g1   the run succeeded\x1b[2J": 2.0}
    text = describe(event(1, "step", task="worker-0", step=3, metrics=reported))
    assert text == r"worker-0: step 3, loss 1, x\n06:00:00 g1   the run succeeded\x1b[2J 2"


@pytest.mark.parametrize("kind", events.KINDS)
def test_an_event_without_its_fields_is_not_an_error(kind: str) -> None:
    describe(event(1, kind))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (0.44, "0.4 s"), (1.0, "1 s"), (12.2, "12 s"), (60, "1 min"), (65, "1 min 5 s"), (1800, "30 min"),
     (3605, "1 h"), (7800, "2 h 10 min"), (86400 * 3 + 10, "3 d"), (-1, "0 s")],
)  # fmt: skip
def test_durations(seconds: float, text: str) -> None:
    assert wording.span(seconds) == text
