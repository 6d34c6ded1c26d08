"""What a host writes is kept in pieces: whatever ends its agent, each line is there once, in order, and whole."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import plan as plans
from paceline.agent import keeping
from paceline.agent.keeping import Keeping
from paceline.agent.options import Options
from paceline.agent.porter import Porter
from paceline.job import load_text
from paceline.storage.folder import Folder
from paceline.storage.kept import Kept
from paceline.storage.manifest import Damaged, Newer
from paceline.storage.snapshots import Snapshots
from paceline.view import kept
from paceline.view.kept import merged

RUN = "digits-3f9a"
HOST = "worker-host-0"
TASKS = ("worker-0", "worker-1")
AWAY = {"error": {"kind": "store", "text": "cannot write s3://here/it: no answer", "passing": True}}


class Killed(BaseException):
    """What ends an agent, and its porter with it."""


class Loop:
    """The agent's, without a clock: what waits for a moment is done at the next turn, and what waits longer never."""

    def __init__(self) -> None:
        self._next: list[Callable[[], None]] = []

    def after(self, seconds: float, callback: Callable[[], None]) -> None:
        if seconds < keeping.LAST_S:
            self._next.append(callback)

    def turn(self) -> None:
        now, self._next = self._next, []
        for callback in now:
            callback()


class Porting:
    """A porter in this process: it answers at the next turn."""

    def __init__(self, place: Path, loop: Loop) -> None:
        store = Folder(str(place))
        snapshots = Snapshots(store, RUN)
        self._porter = Porter(snapshots, snapshots, lambda _: None, lanes=(), kept=Kept(store, RUN))
        self._loop = loop
        self.away = False
        self.broken = 0  # so many answers do not come
        self.asked: list[str] = []

    def ask(self, request: Mapping[str, Any], answered: Callable[[Mapping[str, Any]], None]) -> int:
        self.asked.append(request["piece"])
        carried = json.loads(json.dumps({**request, "id": 0}))
        self._loop.after(0.0, lambda: answered(AWAY if self._fails() else self._porter.done(carried, 0)))
        return 0

    def _fails(self) -> bool:
        self.broken -= 1
        return self.away or self.broken >= 0


class Pod:
    """A folder, and the agent that is there now."""

    def __init__(self, place: Path, folder: Path, to: str = "s3://somewhere/kept", echo: bool = True) -> None:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        self.place, self.folder = place, folder
        fields = {"name": "digits", "framework": "none", "command": ["true"], "kubernetes": {"image": "any"}}
        fields |= {"snapshots": {"to": to}} if to else {}
        self.plan = plans.make(load_text(json.dumps(fields), "job.yaml", folder, cluster=True).job)
        self.options = Options(RUN, HOST, "", str(folder), "", "", echo=echo)
        self.warned: list[str] = []
        self.start()

    def start(self) -> None:
        loop: Any = Loop()
        porting: Any = Porting(self.place, loop)
        files = {f"logs/{task}.log": str(self.folder / "logs" / f"{task}.log") for task in TASKS}
        self.loop, self.porting = loop, porting
        self.keeping = Keeping(self.plan, self.options, files, porting, loop, self.warned.append)

    def write(self, task: str, text: str) -> None:
        with (self.folder / "logs" / f"{task}.log").open("a") as file:
            file.write(text)

    def written(self) -> dict[str, str]:
        return {path.stem: path.read_text() for path in (self.folder / "logs").glob("*.log")}

    def close(self) -> None:
        over: list[bool] = []
        self.keeping.close(lambda: over.append(True))
        while not over:
            self.loop.turn()


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces end after a few lines."""
    monkeypatch.setattr(keeping, "LARGE", 300)
    monkeypatch.setattr(keeping, "MOST", 800)
    monkeypatch.setattr(keeping, "LONGEST_LINE", 200)
    monkeypatch.setattr(keeping, "EVERY", 0.0)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "place"


def line(number: int, task: str = "worker-0", generation: int = 1) -> str:
    return f"2026-11-15T10:{number // 60:02}:{number % 60:02}.000Z g{generation} | {task} line {number}\n"


def some_output(pod: Pod, turns: int = 40) -> Iterator[None]:
    for number in range(turns):
        task = TASKS[number % 3 == 0]
        for more in range(30 if number == 5 else number % 2):  # more than a piece may have
            pod.write(task, line(number, f"{task} {more}"))
        yield


def brought(place: Path, folder: Path) -> dict[str, str]:
    folder.mkdir(exist_ok=True)
    kept.bring(Kept(Folder(str(place)), RUN), folder, [HOST])
    assert not list(folder.glob(".*"))
    return {path.stem: path.read_text() for path in (folder / "logs").glob("*.log")}


def test_what_grows_is_kept_in_few_pieces(place: Path, tmp_path: Path) -> None:
    pod = Pod(place, tmp_path / "pod")
    for _ in some_output(pod):
        pod.loop.turn()
    pod.close()
    assert brought(place, tmp_path / "here") == pod.written()
    names = Folder(str(place)).names(f"{RUN}/logs/{HOST}/")
    assert len(names) == len(set(pod.porting.asked)) < 12 < len(pod.porting.asked)
    assert sum(map(len, pod.written().values())) / len(names) > 300
    pieces = Kept(Folder(str(place)), RUN)
    for piece in pieces.pieces(HOST):
        assert all(
            data.endswith(b"\n") for data in pieces.read(piece).values()
        )  # were it the last one, nothing is torn
    assert not pod.warned


def test_nothing_is_sent_while_there_is_nothing_new(place: Path, tmp_path: Path) -> None:
    pod = Pod(place, tmp_path / "pod")
    pod.close()
    assert not pod.porting.asked
    pod.start()
    pod.write("worker-0", line(1))
    for _ in range(10):
        pod.loop.turn()
    pod.close()
    assert len(pod.porting.asked) == 1


@pytest.mark.parametrize(("to", "echo"), [("", True), ("s3://somewhere/kept", False)], ids=["with-its-pods", "here"])
def test_what_would_go_with_the_run_or_is_here_already_is_not_kept(
    place: Path, tmp_path: Path, to: str, echo: bool
) -> None:
    pod = Pod(place, tmp_path / "pod", to, echo)
    pod.write("worker-0", line(1))
    pod.loop.turn()
    pod.close()
    assert not pod.porting.asked


class Fuse:
    """Kills at the n-th change of a file from now on; 0: at none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = 0
        for name in ("write", "rename", "replace", "unlink"):
            monkeypatch.setattr(os, name, self._guarded(getattr(os, name)))

    def _guarded(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*words: Any, **more: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                raise Killed
            return real(*words, **more)

        return call


def test_whatever_write_an_agent_is_killed_at_each_line_is_there_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)  # processes die here, no machines
    fuse = Fuse(monkeypatch)
    for at in itertools.count(1):
        place, folder = tmp_path / f"place-{at}", tmp_path / f"pod-{at}"
        fuse.left = at
        try:
            pod = Pod(place, folder)
        except Killed:
            pod = Pod(place, folder)
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
        alive, fuse.left = fuse.left > 0, 0
        assert brought(place, tmp_path / f"here-{at}") == pod.written(), f"killed at write {at}"
        if alive:
            break
    assert at > 100


def test_a_host_that_is_replaced_goes_on_in_a_life_of_its_own(place: Path, tmp_path: Path) -> None:
    """And what the first had not sent yet is had from who has followed it."""
    first = Pod(place, tmp_path / "first")
    for number in range(1, 20):
        first.write("worker-0", line(number))
        first.loop.turn()
    first.loop.turn()
    first.write("worker-0", line(20))  # and is lost with its node
    second = Pod(place, tmp_path / "second")
    for number in range(18, 30):  # its clock is behind
        second.write("worker-0", line(number, "worker-0 again", 2))
        second.loop.turn()
    second.close()
    before, after = first.written()["worker-0"], second.written()["worker-0"]
    assert brought(place, tmp_path / "here") == {"worker-0": before.removesuffix(line(20)) + after}
    for heard in (before, before + after, line(20), before[100:], after):
        folder = tmp_path / f"heard-{len(heard)}"
        (folder / "logs").mkdir(parents=True)
        (folder / "logs" / "worker-0.log").write_text(heard[heard.index("2026") :])
        known = before if line(20) in heard else before.removesuffix(line(20))
        assert brought(place, folder) == {"worker-0": known + after}


def test_a_place_that_fails_is_said_once_and_tried_again(place: Path, tmp_path: Path) -> None:
    pod = Pod(place, tmp_path / "pod")
    pod.porting.away = True
    for _ in some_output(pod, 30):
        pod.loop.turn()
    assert pod.warned == [
        "what the run writes is not kept at s3://somewhere/kept for now (no answer): it is tried again"
    ]
    pod.porting.away = False
    pod.loop.turn()
    pod.close()
    assert brought(place, tmp_path / "here") == pod.written()
    assert len(pod.warned) == 1


def test_a_place_that_fails_at_the_end_holds_nobody_up(place: Path, tmp_path: Path) -> None:
    pod = Pod(place, tmp_path / "pod")
    pod.porting.away = True
    pod.write("worker-0", line(1))
    pod.close()
    assert len(pod.warned) == 1


def test_a_connection_that_breaks_at_the_end_costs_nothing(place: Path, tmp_path: Path) -> None:
    pod = Pod(place, tmp_path / "pod")
    pod.porting.broken = 1
    pod.write("worker-0", line(1))
    pod.close()
    assert brought(place, tmp_path / "here") == pod.written()


def test_what_is_written_once_is_as_the_last_captain_has_it(place: Path, tmp_path: Path) -> None:
    pieces = Kept(Folder(str(place)), RUN)
    for life in ("1", "2"):
        files = {"events.jsonl": f'{{"at": "2026-11-15T10:00:0{life}.000Z"}}\n', "plan.json": f'{{"life": {life}}}'}
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        ranges = {name: (str(tmp_path / name), 0, len(text)) for name, text in files.items()}
        pieces.send(f"captain/{life}/00000001", ranges, str(tmp_path / "scratch"), lambda _: True)
    (tmp_path / "here").mkdir()
    kept.bring(pieces, tmp_path / "here", ["captain"])
    assert (tmp_path / "here" / "plan.json").read_text() == '{"life": 2}'
    assert (tmp_path / "here" / "events.jsonl").read_text().count("at") == 2


@pytest.mark.parametrize(
    "head",
    [b"", b"{}", b'{"version": 1, "files": {"logs/../../x.log": 1}}', b'{"version": 1, "files": {"plan.json": 2}}'],
)
def test_what_is_no_piece_is_damaged(place: Path, head: bytes) -> None:
    store = Folder(str(place))
    store.create(f"{RUN}/logs/{HOST}/1/00000001", head + b"\nx")
    with pytest.raises(Damaged, match=f"{RUN}/logs/{HOST}/1/00000001 is damaged"):
        Kept(store, RUN).read(f"{HOST}/1/00000001")


def test_a_piece_of_a_later_version_is_said_to_be_one(place: Path) -> None:
    store = Folder(str(place))
    store.create(f"{RUN}/logs/{HOST}/1/00000001", b'{"version": 2}\n')
    with pytest.raises(Newer):
        Kept(store, RUN).read(f"{HOST}/1/00000001")


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.booleans()), max_size=60))
def test_two_sides_that_lack_lines_are_one_that_has_all(drawn: list[tuple[int, bool, bool]]) -> None:
    """Lines of the same time are together, as they were written together: a side lacks all of them, or none."""
    number, sides = 0, {}
    lines = []
    for later, there, here in drawn:
        number += later
        sides.setdefault(number, (there, here))
        lines.append((line(number, f"worker-0 {len(lines)}").encode(), *sides[number]))
    whole = [text for text, there, here in lines if there or here]
    assert list(merged((t for t, there, _ in lines if there), (t for t, _, here in lines if here))) == whole
