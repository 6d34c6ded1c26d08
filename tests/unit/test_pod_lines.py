"""Lines of pods that are received again, over another connection or by another process, are stored once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.agent.run_files import replace
from paceline.backends.kubernetes.runs.pod_lines import Inbox, try_lock
from paceline.view.files import run_folders
from paceline.view.state import status_reader


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    return tmp_path


def line(number: int, second: int | None = None) -> str:
    return f"worker-0 2026-11-15T10:00:{number if second is None else second:02}.000Z g1 | line {number}"


def take(inbox: Inbox, *lines: str, captain: bool = False) -> None:
    reader = inbox.reader(captain)
    for each in lines:
        reader.take(each)
    inbox.close()


def numbers(folder: Path) -> list[int]:
    return [int(each.split()[-1]) for each in (folder / "logs" / "worker-0.log").read_text().splitlines()]


def event(kind: str, second: int, **more: str) -> str:
    return json.dumps({"at": f"2026-11-15T10:00:{second:02}.000Z", "event": kind, "generation": 1, **more})


def kinds(folder: Path) -> list[str]:
    return [json.loads(each)["event"] for each in (folder / "events.jsonl").read_text().splitlines()]


def test_a_new_connection_adds_only_new_lines(folder: Path) -> None:
    inbox = Inbox(folder)
    take(inbox, line(1), line(2), line(3))
    take(inbox, line(2), line(3), line(4))
    take(Inbox(folder), line(1), line(2), line(3), line(4), line(5))
    assert numbers(folder) == [1, 2, 3, 4, 5]


def test_lines_with_the_same_timestamp_are_told_apart(folder: Path) -> None:
    take(Inbox(folder), line(1, 7), line(2, 7))
    take(Inbox(folder), line(1, 7), line(2, 7), line(3, 7))
    assert numbers(folder) == [1, 2, 3]


def test_a_clock_that_is_set_back_loses_nothing(folder: Path) -> None:
    take(Inbox(folder), line(1, 30), line(2, 10), line(3, 11))
    assert numbers(folder) == [1, 2, 3]


@pytest.mark.parametrize("width", range(200, 300, 7))
def test_a_long_file_is_continued(folder: Path, width: int) -> None:
    """Wherever a block of the file's end happens to start."""
    lines = [f"{line(number)[:-1]}{'x' * width} {number}" for number in range(1, 60) for _ in range(10)]
    distinct = [f"{each} {number}" for number, each in enumerate(lines)]
    take(Inbox(folder), *distinct[:-1])
    assert (folder / "logs" / "worker-0.log").stat().st_size > 64 * 1024
    take(Inbox(folder), *distinct)
    assert numbers(folder) == list(range(len(distinct)))


def test_notes_of_this_machine_do_not_hide_events_of_the_captain(folder: Path) -> None:
    take(Inbox(folder), event("run-started", 1), captain=True)
    Inbox(folder).note("no node takes it")
    take(Inbox(folder), event("run-started", 1), event("member-joined", 2, host="worker-host-0"), captain=True)
    assert kinds(folder) == ["run-started", "note", "member-joined"]


def test_messages_of_agents_are_stored_separately_and_once(folder: Path) -> None:
    for _ in range(2):
        inbox = Inbox(folder)
        take(inbox, "paceline: cannot find the captain: no name server answers", line(1))
        take(inbox, "Traceback (most recent call last):", captain=True)
    assert (folder / "agents.log").read_text().splitlines() == [
        "paceline: cannot find the captain: no name server answers",
        "Traceback (most recent call last):",
    ]


def test_a_task_cannot_write_elsewhere(folder: Path) -> None:
    take(Inbox(folder), line(1).replace("worker-0", "../../worker-0", 1))
    assert not (folder / "logs" / "worker-0.log").exists() and not (folder.parent / "worker-0.log").exists()


@pytest.mark.parametrize("name", ["..", "x" * 300, "a\x1b]0;b", "\udcff", "worker\u202e"])
def test_a_name_that_no_task_can_have_is_not_used_for_a_file(folder: Path, name: str) -> None:
    take(Inbox(folder), line(1).replace("worker-0", name, 1), line(2).replace("g1", f"g{'9' * 5000}"), line(3))
    assert [path.name for path in (folder / "logs").iterdir()] == ["worker-0.log"] and numbers(folder) == [3]


def test_an_interrupted_submission_is_abandoned(folder: Path) -> None:
    (folder / "run.json").write_text(json.dumps({"on": "kubernetes", "submitted": False, "context": "c"}))
    run = run_folders.Run(folder.name, folder)
    with try_lock(folder) as locked:
        assert locked and run_folders.alive(folder) and status_reader.read(run).report["status"] == "starting"
        with try_lock(folder) as locked_again:
            assert not locked_again
    assert not run_folders.alive(folder) and status_reader.read(run).report["status"] == "abandoned"


def test_the_output_of_another_users_run_does_not_fill_the_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace(str(folder / "run.json"), {"run": "r", "on": "kubernetes", "adopted": True})
    monkeypatch.setattr(run_folders, "COPY_LIMIT", 2000)
    for _ in range(2):
        inbox = Inbox(folder)
        take(inbox, *map(line, range(1, 60)))
        take(inbox, "a line of an agent")
    size = sum(path.stat().st_size for path in (folder / "logs").iterdir())
    assert 1900 < size <= 2000 and numbers(folder)[0] == 1
    assert kinds(folder) == ["note", "note"], "one for each process"
    assert "no more output of this run is copied" in (folder / "events.jsonl").read_text()
    replace(str(folder / "run.json"), {"run": "r", "on": "kubernetes", "adopted": False})
    take(Inbox(folder), *map(line, range(1, 60)))
    assert numbers(folder)[-1] == 59, "this user's own run has no such limit"


def test_output_of_another_users_run_that_was_deleted_again_does_not_count(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace(str(folder / "run.json"), {"run": "r", "on": "kubernetes", "adopted": True})
    monkeypatch.setattr(run_folders, "COPY_LIMIT", 2000)
    inbox = Inbox(folder, log_limit=800)
    take(inbox, *(line(number, 1) for number in range(500)))
    assert numbers(folder)[-1] == 499
    assert not (folder / "events.jsonl").exists(), "no note: at most 800 bytes are kept"


def test_all_parts_of_the_output_of_another_users_run_count(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace(str(folder / "run.json"), {"run": "r", "on": "kubernetes", "adopted": True})
    monkeypatch.setattr(run_folders, "COPY_LIMIT", 2000)
    for name in ("agents.log", "logs/worker-1.log"):
        (folder / f"{name}.parts").mkdir()
        (folder / f"{name}.parts" / f"{0:020}").write_bytes(b"x" * 900)
        (folder / name).write_bytes(b"x" * 95)
    take(Inbox(folder), line(1))
    assert not (folder / "logs" / "worker-0.log").exists() and kinds(folder) == ["note"]


def test_output_of_tasks_that_the_run_does_not_have_makes_no_files(folder: Path) -> None:
    others = [line(1).replace("worker-0", f"worker-{number}", 1) for number in range(1, 50)]
    take(Inbox(folder, ["worker-0"]), line(1), *others)
    assert [path.name for path in (folder / "logs").iterdir()] == ["worker-0.log"]


@pytest.mark.parametrize(
    "fields",
    [
        {"at": "2026-11-17T12:00:00nan"}, {"at": None}, {"at": 7}, {"at": []}, {"at": "2026-99-99T12:00:00.000Z"},
        {"event": None}, {"event": ["step"]}, {"task": json.loads("[" * 300 + "]" * 300)}, {"metrics": [{"a": {}}]},
        {"metrics": {"a": float("nan")}}, {"step": float("inf")}, {"step": 10**300}, {"generation": -(10**300)},
    ],
)  # fmt: skip
def test_whatever_a_captain_writes_its_next_events_are_copied(folder: Path, fields: dict[str, Any]) -> None:
    """The captain may be of another user."""
    hostile = {
        "at": "2026-11-15T10:00:01.000Z",
        "event": "step",
        "task": "worker-0",
        "step": 1,
        "generation": 1,
        **fields,
    }
    inbox = Inbox(folder)
    inbox._events._rotate_at = 1  # rotate after every event
    take(inbox, json.dumps(hostile), event("run-started", 2), json.dumps(hostile), event("saved", 3), captain=True)
    assert {"run-started", "saved"} <= set(kinds(folder))
    status_reader.read(run_folders.Run("r", folder))
