"""The store keeps a limited number of events of a run, and its state still follows from them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from paceline.agent.event_file import NAME, OLD, EventFile
from paceline.agent.goodput import Goodput
from paceline.agent.run_files import stamp
from paceline.agent.transfers import stored_events
from paceline.backends import archive_import
from paceline.plan import CAPTAIN
from paceline.storage.stored_run_files import StoredRunFiles
from paceline.storage.stores.protocol import StoreError, TransferCanceled
from paceline.view.files.run_folders import Run
from paceline.view.state import events as view_events
from paceline.view.state import run_state
from paceline.view.state.run_reader import RunReader
from support import recorded
from support.worlds import Memory

RUN = "digits-3f9a"
LIVES = ("20261115T043000.000Z-0a1b2c3d", "20261116T043000.000Z-0a1b2c3d", "20261116T043000.001Z-00000000")
MOST, KEPT = 12, 5
Line = dict[str, Any]


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_events, "MOST", MOST)
    monkeypatch.setattr(stored_events, "KEPT", KEPT)


class Archive(StoredRunFiles):
    """Of a run whose captain writes a piece for each few events; it may be replaced."""

    def __init__(self, folder: Path) -> None:
        super().__init__(Memory(), RUN)
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.life, self._numbers = LIVES[0], itertools.count(1)
        self.fails_at = -1  # how many more pieces are sent or deleted before that fails

    def begin_life(self, life: str) -> None:
        self.life, self._numbers = life, itertools.count(1)

    def write(self, events: Iterable[Line] = (), text: bytes = b"", **others: str) -> str:
        """`others`: JSON files. Returns the name of the piece."""
        data = b"".join(json.dumps(event).encode() + b"\n" for event in events) + text
        contents = {NAME: data, **{f"{name}.json": other.encode() for name, other in others.items()}}
        ranges = {}
        for name, content in contents.items():
            (self.folder / name).write_bytes(content)
            ranges[name] = str(self.folder / name), 0, len(content)
        piece = f"{CAPTAIN}/{self.life}/{next(self._numbers):08d}"
        self.send(piece, ranges, str(self.folder / "scratch"), lambda _: True)
        return piece

    def fold(self) -> None:
        stored_events.fold(self, CAPTAIN, str(self.folder / "scratch"), lambda _: True)

    def delete(self, piece: str) -> None:
        self._may_fail()
        super().delete(piece)

    def _send(self, *arguments: Any) -> None:
        self._may_fail()
        super()._send(*arguments)

    def _may_fail(self) -> None:
        self.fails_at -= 1
        if self.fails_at == 0:
            raise StoreError("the store is away")

    def count(self) -> int:
        return len(self.pieces(CAPTAIN))

    def imported(self, name: str = "here") -> Path:
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        archive_import.import_hosts(self, folder, [CAPTAIN])
        return folder


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    return Archive(tmp_path)


def long_run(length: int) -> list[Line]:
    """Events of a run that restarts now and then, one per second."""
    lines = [recorded.STARTED, *recorded.LIFE[1:7]]
    for number in range(length):
        kind = number % 40
        if kind < 37:
            lines.append({**recorded.STEP, "step": number, "metrics": {"loss": 1 / (number + 1)}})
        elif kind == 37:
            lines.append(recorded.event(0, "saved", step=number, snapshot=f"step-{number}-g1"))
        elif kind == 38:
            lines += [recorded.KILLED, recorded.RESTART]
        else:
            restored = {"tasks": ["worker-0", "worker-1"], "restore": f"step-{number - 2}-g1"}
            lines += [recorded.event(0, "generation-formed", 2 + number // 40, **restored)]
            lines += [{**each, "generation": 2 + number // 40} for each in recorded.LIFE[5:7]]
    return [{**line, "at": stamp(1_800_000_000 + number)} for number, line in enumerate(lines)]


def read(folder: Path) -> list[Line]:
    return [json.loads(line) for line in (folder / NAME).read_text().splitlines()]


def shown(lines: Iterable[Line]) -> dict[str, Any]:
    state = run_state.fold(filter(None, (view_events.parse(json.dumps(line)) for line in lines)))
    names = ("generation", "steps", "last_metrics", "saved", "committed", "started", "ended", "restore", "restarts")
    return {
        **{name: value for name, value in vars(state).items() if name in names},
        "goodput": state.goodput.milliseconds(),
        "tasks": {name: (task.step, task.metrics) for name, task in state.tasks.items()},
    }


def send(archive: Archive, lines: list[Line], each: int = 20, folds: bool = True) -> None:
    for begin in range(0, len(lines), each):
        archive.write(lines[begin : begin + each])
        if folds:
            archive.fold()


def test_the_number_of_pieces_is_limited_and_the_state_is_right(archive: Archive) -> None:
    lines = long_run(3000)
    for begin in range(0, len(lines), 20):
        archive.write(lines[begin : begin + 20])
        archive.fold()
        assert archive.count() <= MOST
    result = read(archive.imported())
    assert len(result) < len(lines) / 2 and shown(result) == shown(lines)
    newest = lines[-20 * KEPT :]
    assert result[-len(newest) :] == newest
    (mark,) = [line for line in result if line["event"] == "rotated"]
    assert mark["stored"] and mark["at"] in [line["at"] for line in lines] and mark["generation"] >= 60
    assert sorted(line["at"] for line in result) == [line["at"] for line in result]


def test_few_pieces_stay_as_they_are(archive: Archive) -> None:
    lines = long_run(200)
    send(archive, lines)
    assert archive.count() == -(-len(lines) // 20) <= MOST and read(archive.imported()) == lines


def test_pieces_of_earlier_captains_are_replaced_too(archive: Archive) -> None:
    lines = long_run(1500)
    for life, begin in zip(LIVES, (0, 500, 1000), strict=True):
        archive.begin_life(life)
        send(archive, lines[begin : begin + 500 if begin < 1000 else None])
        assert archive.count() <= MOST
    assert shown(read(archive.imported())) == shown(lines)


@pytest.mark.parametrize("life", range(3))
def test_the_newest_json_files_are_kept(archive: Archive, life: int) -> None:
    """Also if one is in several pieces, of which only the first are replaced."""
    archive.write(plan='{"life": 0}')
    for number in range(1, life + 1):
        archive.begin_life(LIVES[number])
        archive.write(plan='{"life": ')
        send(archive, long_run(20), folds=False)
        archive.write(plan=f"{number}}}", report="{}")
    send(archive, long_run(20 * MOST), folds=False)
    before = archive.count()
    archive.fold()
    assert archive.count() < before
    folder = archive.imported()
    assert json.loads((folder / "plan.json").read_text()) == {"life": life}
    assert (folder / "report.json").exists() == (life > 0)


def test_a_json_file_that_continues_after_the_replaced_pieces_is_whole(archive: Archive) -> None:
    archive.write(plan='{"life": 0}')
    archive.begin_life(LIVES[1])
    for number in range(MOST + 2):
        archive.write(plan=["{", '"life": 1']["life" and number > 0] if number < 2 else "}" if number == MOST else " ")
    archive.fold()
    assert archive.count() == KEPT + 1
    assert json.loads((archive.imported() / "plan.json").read_text()) == {"life": 1}


def test_an_event_that_is_in_two_pieces_is_kept(archive: Archive) -> None:
    """One of them stays."""
    lines = long_run(MOST)
    for number, line in enumerate(lines):
        text = json.dumps(line).encode()
        archive.write(text=b"\n" * (number > 0) + text[:50])
        archive.write(text=text[50:])
        before = archive.count()
        archive.fold()
        assert archive.count() <= before
    archive.write(text=b"\n")
    assert shown(read(archive.imported())) == shown(lines)


def test_a_store_that_fails_at_any_request_loses_and_repeats_nothing(tmp_path: Path) -> None:
    lines = long_run(400)
    for number in itertools.count(1):
        archive = Archive(tmp_path / str(number))
        send(archive, lines, folds=False)
        archive.fails_at = number
        try:
            archive.fold()
            is_done = True
        except StoreError:
            is_done = False
        archive.fails_at = -1
        assert shown(read(archive.imported())) == shown(lines), f"failed at request {number}"
        archive.fold()
        assert archive.count() == KEPT + 1
        assert shown(read(archive.imported("again"))) == shown(lines)
        if is_done:
            break
    assert number > 10


def test_what_a_captain_that_was_presumed_dead_sends_again_counts_once(archive: Archive) -> None:
    lines = long_run(800)
    send(archive, lines[:400], folds=False)
    archive.begin_life(LIVES[1])
    send(archive, lines[400:])
    archive.begin_life(LIVES[0])
    for begin in (0, 20):
        archive.write(lines[begin : begin + 20])
    assert shown(read(archive.imported())) == shown(lines)


def test_pieces_may_be_replaced_while_they_are_read(archive: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = long_run(400)
    send(archive, lines, folds=False)
    listed = archive.pieces(CAPTAIN)
    real = archive.pieces

    def list_and_fold(host: str) -> list[str]:
        monkeypatch.setattr(archive, "pieces", real)
        archive.fold()
        return listed

    monkeypatch.setattr(archive, "pieces", list_and_fold)
    assert shown(read(archive.imported())) == shown(lines)


def test_it_stops_when_it_is_canceled(archive: Archive) -> None:
    send(archive, long_run(400), folds=False)
    before = archive.pieces(CAPTAIN)
    with pytest.raises(TransferCanceled):
        stored_events.fold(archive, CAPTAIN, str(archive.folder / "scratch"), lambda _: False)
    assert archive.pieces(CAPTAIN) == before


# ---- a viewer that has a copy


@pytest.mark.parametrize("followed", [20, 700, 1400, 1500])
def test_a_copy_of_some_events_is_completed(archive: Archive, followed: int) -> None:
    """It has been rotated, too, before or after the newest event that was replaced in the store."""
    lines = [line for line in long_run(1500) if line["event"] != "step"]
    folder = archive.folder / "here"
    folder.mkdir()
    file = EventFile(str(folder), pytest.fail, limit=4_000)
    seen = lines[: followed * len(lines) // 1500]
    for line in seen:
        assert file.write(json.dumps(line).encode() + b"\n", line)
    file.close()
    assert (folder / OLD).exists() == (followed > 100)
    send(archive, lines, each=5)
    archive.imported()
    state = shown(read(folder))
    assert state == shown(lines) and state["goodput"] == Goodput().add_all(lines).milliseconds()
    reader = RunReader(Run(RUN, folder))
    reader.update()
    history = [each.event().at for each in reader.history]
    reader.close()
    assert history == sorted(set(history)), "each event once, in order"
    assert set(history) >= {line["at"] for line in [*seen, *lines[-5 * KEPT :]]}
    with_old = view_events.EventFile(folder, old=True)
    times = []
    while new_events := with_old.read():
        times += [event.at for event, _ in new_events if event.kind != "rotated"]
    with_old.close()
    assert set(times) >= {line["at"] for line in [*seen, *lines[-5 * KEPT :]]}
