"""A host uploads its output in pieces: however its agent ends, each line is stored once, in order and complete."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import plan as plans
from paceline.agent.limited_log import LimitedLog
from paceline.agent.options import Options
from paceline.agent.transfers import log_upload, stored_events
from paceline.agent.transfers.log_upload import LogUpload
from paceline.agent.transfers.porter import Porter
from paceline.agent.transfers.requests import (
    STORE,
    Answer,
    Failure,
    FoldEvents,
    UploadLogs,
    read_request,
    request_to_object,
)
from paceline.backends import archive_import
from paceline.backends.archive_import import merged
from paceline.job import load_text, planning
from paceline.storage.log_parts import bounds, read_range
from paceline.storage.snapshots.manifest import Damaged, Newer
from paceline.storage.snapshots.repository import SnapshotRepository
from paceline.storage.stored_run_files import StoredRunFiles
from paceline.storage.stores.folder import FolderStore
from support.worlds import make_plan

RUN = "digits-3f9a"
HOST = "worker-host-0"
TASKS = ("worker-0", "worker-1")
PLAN = plans.to_json(make_plan(2, per_host=2))
UNAVAILABLE = Failure(STORE, "cannot write s3://here/it: no answer", True, "no answer")


class Killed(BaseException):
    """Kills an agent and its porter."""


class Loop:
    """The agent's event loop, without a clock: short timers fire at the next turn, longer ones never."""

    def __init__(self) -> None:
        self._timers: list[Callable[[], None]] = []

    def after(self, seconds: float, callback: Callable[[], None]) -> None:
        if seconds < log_upload.LAST_S:
            self._timers.append(callback)

    def turn(self) -> None:
        due, self._timers = self._timers, []
        for callback in due:
            callback()


class LocalPorter:
    """A porter in this process: it answers at the next turn of the loop."""

    def __init__(self, location: Path, loop: Loop) -> None:
        store = FolderStore(str(location))
        snapshots = SnapshotRepository(store, RUN)
        self._porter = Porter(snapshots, snapshots, lambda *_: None, lanes=(), archive=StoredRunFiles(store, RUN))
        self._loop = loop
        self.unavailable = False
        self.failures = 0  # this many requests fail
        self.requested: list[str] = []

    def ask(self, request: UploadLogs | FoldEvents, answered: Callable[[Answer], None]) -> int:
        self.requested.append(request.piece if isinstance(request, UploadLogs) else request.host)
        decoded = read_request(json.loads(json.dumps(request_to_object(request))))
        self._loop.after(0.0, lambda: answered(UNAVAILABLE if self._fails() else self._porter.execute(decoded)))
        return 0

    def _fails(self) -> bool:
        self.failures -= 1
        return self.unavailable or self.failures >= 0


class Pod:
    """A run folder and its current agent."""

    def __init__(
        self, location: Path, folder: Path, to: str = "s3://somewhere/kept", echo: bool = True, is_captain: bool = False
    ) -> None:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        self.location, self.folder, self.is_captain = location, folder, is_captain
        fields = {"name": "digits", "framework": "none", "command": ["true"], "kubernetes": {"image": "any"}}
        fields |= {"snapshots": {"to": to}} if to else {}
        self.plan = planning.make_plan(load_text(json.dumps(fields), "job.yaml", folder, cluster=True).job)
        self.options = Options(RUN, HOST, "", str(folder), "", "", echo=echo)
        self.warnings: list[str] = []
        self.start()

    def start(self) -> None:
        loop: Any = Loop()
        porter: Any = LocalPorter(self.location, loop)
        names = ["events.jsonl"] if self.is_captain else [f"logs/{task}.log" for task in TASKS]
        files = {name: str(self.folder / name) for name in names}
        self.loop, self.porter = loop, porter
        self.upload = LogUpload(self.plan, self.options, files, porter, loop, self.warnings.append)

    def write(self, task: str, text: str) -> None:
        with (self.folder / "logs" / f"{task}.log").open("a") as file:
            file.write(text)

    def log_texts(self) -> dict[str, str]:
        return {path.stem: path.read_text() for path in (self.folder / "logs").glob("*.log")}

    def close(self) -> None:
        closed: list[bool] = []
        self.upload.close(lambda: closed.append(True))
        while not closed:
            self.loop.turn()


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces end after a few lines."""
    monkeypatch.setattr(log_upload, "LARGE", 300)
    monkeypatch.setattr(log_upload, "MOST", 800)
    monkeypatch.setattr(log_upload, "LONGEST_LINE", 200)
    monkeypatch.setattr(log_upload, "EVERY", 0.0)


@pytest.fixture
def location(tmp_path: Path) -> Path:
    return tmp_path / "store"


def line(number: int, task: str = "worker-0", generation: int = 1) -> str:
    return f"2026-11-15T10:{number // 60:02}:{number % 60:02}.000Z g{generation} | {task} line {number}\n"


def some_output(pod: Pod, turns: int = 40) -> Iterator[None]:
    for number in range(turns):
        task = TASKS[number % 3 == 0]
        for repeat in range(30 if number == 5 else number % 2):  # more than fits into one piece
            pod.write(task, line(number, f"{task} {repeat}"))
        yield


def import_logs(location: Path, folder: Path) -> dict[str, str]:
    folder.mkdir(exist_ok=True)
    (folder / "plan.json").write_text(PLAN)
    archive_import.import_hosts(StoredRunFiles(FolderStore(str(location)), RUN), folder, [HOST])
    assert not list(folder.glob(".*"))
    return {path.stem: path.read_text() for path in (folder / "logs").glob("*.log")}


def test_growing_output_is_stored_in_few_pieces(location: Path, tmp_path: Path) -> None:
    pod = Pod(location, tmp_path / "pod")
    for _ in some_output(pod):
        pod.loop.turn()
    pod.close()
    assert import_logs(location, tmp_path / "here") == pod.log_texts()
    names = FolderStore(str(location)).names(f"{RUN}/logs/{HOST}/")
    assert len(names) == len(set(pod.porter.requested)) < 12 < len(pod.porter.requested)
    assert sum(map(len, pod.log_texts().values())) / len(names) > 300
    archive = StoredRunFiles(FolderStore(str(location)), RUN)
    for piece in archive.pieces(HOST):
        assert all(
            data.endswith(b"\n") for data in archive.read(piece).values()
        )  # no line is cut, even if this is the last piece
    assert not pod.warnings


def test_nothing_is_sent_without_new_output(location: Path, tmp_path: Path) -> None:
    pod = Pod(location, tmp_path / "pod")
    pod.close()
    assert not pod.porter.requested
    pod.start()
    pod.write("worker-0", line(1))
    for _ in range(10):
        pod.loop.turn()
    pod.close()
    assert len(pod.porter.requested) == 1


@pytest.mark.parametrize(("to", "echo"), [("", True), ("s3://somewhere/kept", False)], ids=["with-its-pods", "here"])
def test_nothing_is_uploaded_without_a_location_or_for_a_local_run(
    location: Path, tmp_path: Path, to: str, echo: bool
) -> None:
    pod = Pod(location, tmp_path / "pod", to, echo)
    pod.write("worker-0", line(1))
    pod.loop.turn()
    pod.close()
    assert not pod.porter.requested


class Fuse:
    """Raises Killed at the n-th file change from now on; 0: never."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.remaining = 0
        for name in ("write", "rename", "replace", "unlink"):
            monkeypatch.setattr(os, name, self._guarded(getattr(os, name)))

    def _guarded(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.remaining -= 1
            if self.remaining == 0:
                raise Killed
            return real(*args, **kwargs)

        return call


def test_each_line_is_stored_once_if_the_agent_is_killed_at_any_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)  # processes die here, not machines
    fuse = Fuse(monkeypatch)
    for number in itertools.count(1):
        location, folder = tmp_path / f"store-{number}", tmp_path / f"pod-{number}"
        fuse.remaining = number
        try:
            pod = Pod(location, folder)
        except Killed:
            pod = Pod(location, folder)
        for _ in some_output(pod, 30):
            try:
                pod.loop.turn()
            except Killed:
                pod.start()
        try:
            pod.close()
        except Killed:
            pod.start()
            pod.close()
        survived, fuse.remaining = fuse.remaining > 0, 0
        assert import_logs(location, tmp_path / f"here-{number}") == pod.log_texts(), f"killed at write {number}"
        if survived:
            break
    assert number > 100


def test_a_replaced_host_continues_as_a_new_life(location: Path, tmp_path: Path) -> None:
    """Lines that the first pod had not uploaded come from a client that followed them."""
    first = Pod(location, tmp_path / "first")
    for number in range(1, 20):
        first.write("worker-0", line(number))
        first.loop.turn()
    first.loop.turn()
    first.write("worker-0", line(20))  # is lost with its node
    second = Pod(location, tmp_path / "second")
    for number in range(18, 30):  # its clock is behind
        second.write("worker-0", line(number, "worker-0 again", 2))
        second.loop.turn()
    second.close()
    before, after = first.log_texts()["worker-0"], second.log_texts()["worker-0"]
    assert import_logs(location, tmp_path / "here") == {"worker-0": before.removesuffix(line(20)) + after}
    for followed in (before, before + after, line(20), before[100:], after):
        folder = tmp_path / f"followed-{len(followed)}"
        (folder / "logs").mkdir(parents=True)
        (folder / "logs" / "worker-0.log").write_text(followed[followed.index("2026") :])
        expected = before if line(20) in followed else before.removesuffix(line(20))
        assert import_logs(location, folder) == {"worker-0": expected + after}


def test_a_failing_location_is_reported_once_and_retried(location: Path, tmp_path: Path) -> None:
    pod = Pod(location, tmp_path / "pod")
    pod.porter.unavailable = True
    for _ in some_output(pod, 30):
        pod.loop.turn()
    assert pod.warnings == ["cannot upload the run's logs and events to s3://somewhere/kept (no answer); retrying"]
    pod.porter.unavailable = False
    pod.loop.turn()
    pod.close()
    assert import_logs(location, tmp_path / "here") == pod.log_texts()
    assert len(pod.warnings) == 1


def test_a_failing_location_does_not_delay_the_end(location: Path, tmp_path: Path) -> None:
    pod = Pod(location, tmp_path / "pod")
    pod.porter.unavailable = True
    pod.write("worker-0", line(1))
    pod.close()
    assert len(pod.warnings) == 1


def test_a_broken_connection_at_the_end_loses_nothing(location: Path, tmp_path: Path) -> None:
    pod = Pod(location, tmp_path / "pod")
    pod.porter.failures = 1
    pod.write("worker-0", line(1))
    pod.close()
    assert import_logs(location, tmp_path / "here") == pod.log_texts()


def test_a_file_that_appears_only_at_the_end_is_uploaded(location: Path, tmp_path: Path) -> None:
    """As the report does."""
    pod = Pod(location, tmp_path / "pod")
    for number in range(40):
        pod.write("worker-0", line(number))
        pod.loop.turn()
    pod.write("worker-1", line(41, "worker-1"))
    pod.close()
    assert import_logs(location, tmp_path / "imported") == pod.log_texts()


def test_the_plan_of_the_last_captain_is_used(location: Path, tmp_path: Path) -> None:
    archive = StoredRunFiles(FolderStore(str(location)), RUN)
    for life in ("1", "2"):
        files = {"events.jsonl": f'{{"at": "2026-11-15T10:00:0{life}.000Z"}}\n', "plan.json": f'{{"life": {life}}}'}
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        ranges = {name: (str(tmp_path / name), 0, len(text)) for name, text in files.items()}
        archive.send(f"captain/{life}/00000001", ranges, str(tmp_path / "scratch"), lambda _: True)
    (tmp_path / "here").mkdir()
    archive_import.import_hosts(archive, tmp_path / "here", ["captain"])
    assert (tmp_path / "here" / "plan.json").read_text() == '{"life": 2}'
    assert (tmp_path / "here" / "events.jsonl").read_text().count("at") == 2


@pytest.mark.parametrize(
    "head",
    [b"", b"{}", b'{"version": 1, "files": {"logs/../../x.log": 1}}', b'{"version": 1, "files": {"plan.json": 2}}'],
)
def test_an_invalid_piece_is_damaged(location: Path, head: bytes) -> None:
    store = FolderStore(str(location))
    store.create(f"{RUN}/logs/{HOST}/1/00000001", head + b"\nx")
    with pytest.raises(Damaged, match=f"{RUN}/logs/{HOST}/1/00000001 is damaged"):
        StoredRunFiles(store, RUN).read(f"{HOST}/1/00000001")


def test_a_piece_of_a_newer_version_is_reported_as_newer(location: Path) -> None:
    store = FolderStore(str(location))
    store.create(f"{RUN}/logs/{HOST}/1/00000001", b'{"version": 2}\n')
    with pytest.raises(Newer):
        StoredRunFiles(store, RUN).read(f"{HOST}/1/00000001")


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.booleans()), max_size=60))
def test_merging_two_incomplete_logs_gives_all_lines(drawn: list[tuple[int, bool, bool]]) -> None:
    """Lines with the same timestamp were written together: a side lacks all of them or none."""
    number, sides = 0, {}
    lines = []
    for later, remote, local in drawn:
        number += later
        sides.setdefault(number, (remote, local))
        lines.append((line(number, f"worker-0 {len(lines)}").encode(), *sides[number]))
    expected = [text for text, remote, local in lines if remote or local]
    assert list(merged((t for t, remote, _ in lines if remote), (t for t, _, local in lines if local))) == expected


def limited_output(pod: Pod, numbers: range, limit: int = 4000) -> None:
    log = LimitedLog(str(pod.folder / "logs" / "worker-0.log"), pytest.fail, limit)
    for number in numbers:
        log.write(line(number).encode())
        if number % 5 == 0:
            pod.loop.turn()
    log.close()


def uploaded_numbers(location: Path, folder: Path) -> list[int]:
    return [int(text.split()[-1]) for text in import_logs(location, folder)["worker-0"].splitlines()]


def test_all_output_is_uploaded_although_the_host_keeps_little_of_it(location: Path, tmp_path: Path) -> None:
    pod = Pod(location, tmp_path / "pod")
    limited_output(pod, range(300))
    pod.start()  # the agent was restarted
    limited_output(pod, range(300, 500))
    pod.close()
    assert len(pod.log_texts()["worker-0"].splitlines()) < 30
    assert uploaded_numbers(location, tmp_path / "here") == list(range(500)) and not pod.warnings


def test_the_last_output_is_imported_into_a_folder_that_keeps_little(location: Path, tmp_path: Path) -> None:
    """Also if the folder has some of it."""
    pod = Pod(location, tmp_path / "pod")
    limited_output(pod, range(500))
    pod.close()
    folder = tmp_path / "here"
    (folder / "logs").mkdir(parents=True)
    (folder / "plan.json").write_text(PLAN)
    archive, path = StoredRunFiles(FolderStore(str(location)), RUN), str(folder / "logs" / "worker-0.log")
    for _ in range(3):
        archive_import.import_hosts(archive, folder, [HOST], log_limit=4000)
        assert {each.name for each in folder.iterdir()} == {"plan.json", "logs"}
        first, end = bounds(path)
        lines = read_range(path, first, end).decode().splitlines(keepends=True)
        assert lines == list(map(line, range(500 - len(lines), 500))) and 3000 < end - first <= 4000
        assert end == len("".join(map(line, range(500))))


@pytest.mark.parametrize("is_restarted", [False, True])
def test_output_that_was_deleted_before_it_was_uploaded_is_a_gap(
    location: Path, tmp_path: Path, is_restarted: bool
) -> None:
    """It is mentioned once. What was uploaded before stays, also if its piece was not complete."""
    pod = Pod(location, tmp_path / "pod")
    pod.write("worker-0", line(0) + line(1))
    pod.loop.turn()
    pod.loop.turn()
    assert uploaded_numbers(location, tmp_path / "first") == [0, 1]
    pod.porter.unavailable = True
    limited_output(pod, range(2, 300))
    if is_restarted:
        pod.start()
    pod.porter.unavailable = False
    for _ in range(40):
        pod.loop.turn()
    limited_output(pod, range(300, 500))
    pod.close()
    numbers = uploaded_numbers(location, tmp_path / "here")
    begin = numbers[2]
    assert numbers == [0, 1, *range(begin, 500)] and 200 < begin < 300
    deleted = [text for text in pod.warnings if "was deleted before it was uploaded to s3://somewhere/kept" in text]
    assert len(deleted) == 1 and len(pod.warnings) == 2


def test_of_the_output_of_tasks_everything_is_stored_but_of_events_a_limited_number(
    location: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name, value in (
        (stored_events, "MOST", 6), (stored_events, "KEPT", 3), (log_upload, "CHECK_EVERY", 2),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    archive = StoredRunFiles(FolderStore(str(location)), RUN)
    pod, captain = Pod(location, tmp_path / "pod"), Pod(location, tmp_path / "captain", is_captain=True)
    captain.options = replace(captain.options, host="captain")
    captain.start()
    counts = []
    for number in range(100):
        pod.write("worker-0", line(number) * 2)
        with (captain.folder / "events.jsonl").open("a") as file:
            at = line(number).split()[0]
            file.write(json.dumps({"at": at, "event": "note", "generation": 1, "text": "x" * 200}) + "\n")
        if number == 50:
            captain.start()  # it is restarted
        for each in (pod, captain):
            each.loop.turn()
            each.loop.turn()
        counts.append(len(archive.pieces("captain")))
    pod.close()
    captain.close()
    assert max(counts) == 8 and counts[-1] <= 8 and len(archive.pieces(HOST)) > 15
    assert import_logs(location, tmp_path / "here") == pod.log_texts()
    archive_import.import_hosts(archive, tmp_path / "here", ["captain"])
    events = [json.loads(each) for each in (tmp_path / "here" / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events[:1]] == ["rotated"] and len(events) > 4
    assert [each for each in pod.porter.requested if each == HOST] == [], "only the captain has events"


@pytest.mark.parametrize("state", ["", "[]", "{}", '{"life": "a/b", "number": 1e400, "begins": {}}', "[" * 100_000])
def test_a_damaged_state_starts_a_new_upload(tmp_path: Path, location: Path, state: str) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / f".{HOST}.kept").write_text(state)
    pod = Pod(location, folder)
    pod.write(TASKS[0], line(1))
    pod.close()
    archive = StoredRunFiles(FolderStore(str(location)), RUN)
    [piece] = archive.pieces(HOST)
    assert archive.read(piece) == {f"logs/{TASKS[0]}.log": line(1).encode()}


@pytest.mark.parametrize(
    "fields",
    [{"life": "other-host/x"}, {"life": f"{HOST}/.."}, {"life": f"../{HOST}"}, {"number": 10**8}, {"number": 10**400}],
    ids=["host", "up", "out", "number", "large"],
)
def test_an_upload_that_no_store_accepts_is_not_continued(
    tmp_path: Path, location: Path, fields: dict[str, object]
) -> None:
    pod = Pod(location, tmp_path / "run")
    state_file = tmp_path / "run" / f".{HOST}.kept"
    state_file.write_text(json.dumps({**json.loads(state_file.read_text()), **fields}))
    pod.start()
    pod.write(TASKS[0], line(1))
    pod.close()
    archive = StoredRunFiles(FolderStore(str(location)), RUN)
    [piece] = archive.pieces(HOST)
    assert archive.read(piece) == {f"logs/{TASKS[0]}.log": line(1).encode()}
