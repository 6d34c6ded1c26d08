"""The process that carries snapshots: asked over pipes, by its own protocol."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.storage.manifest import File, Id, Manifest, Part
from support.runs import SOURCE

pytestmark = pytest.mark.timeout(60)

RUN = "digits-3f9a"


class Porter:
    def __init__(self, place: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "paceline.agent.porter", json.dumps({"place": place, "run": RUN})],
            env={**os.environ, "PYTHONPATH": str(SOURCE)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self._asked = 0

    def begin(self, do: str, **words: Any) -> int:
        assert self.process.stdin
        self._asked += 1
        self.process.stdin.write(json.dumps({"id": self._asked, "do": do, **words}).encode() + b"\n")
        self.process.stdin.flush()
        return self._asked

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def ask(self, do: str, **words: Any) -> dict[str, Any]:
        number = self.begin(do, **words)
        answer = self.answer()
        assert answer.pop("id") == number
        return answer

    def saved(self, folder: Path, step: int, generation: int = 1) -> Manifest:
        """Sent and committed."""
        sent = self.ask("send", snapshot=[step, generation], task="worker-0", folder=str(folder))
        parts = (Part("worker-0", tuple(File(*file) for file in sent["files"])),)
        made = Manifest(RUN, Id(step, generation), 1, parts, {"loss": 0.5})
        assert self.ask("commit", manifest=made.to_bytes().decode()) == {"new": True}
        return made


@pytest.fixture
def porter(tmp_path: Path) -> Iterator[Porter]:
    started = Porter(str(tmp_path / "place"))
    yield started
    assert started.process.stdin
    started.process.stdin.close()
    assert started.process.wait(30) == 0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "step-10"
    made.mkdir()
    (made / "weights").write_bytes(os.urandom(9_000_000))
    return made


def test_it_sends_commits_knows_fetches_and_deletes(porter: Porter, folder: Path, tmp_path: Path) -> None:
    assert porter.ask("known") == {"generation": 0, "counted": [], "committed": [], "metrics": [], "evaluated": []}
    assert porter.ask("begin", generation=1, parent=None, seen=[]) == {"late": []}
    made = porter.saved(folder, 10)
    assert porter.ask("commit", manifest=made.to_bytes().decode()) == {"new": False}
    known = porter.ask("known", metric="loss")
    known_to_it = {"generation": 1, "counted": [[10, 1]], "committed": [[10, 1]], "metrics": [[[10, 1], 0.5]]}
    assert known == {**known_to_it, "evaluated": []}
    size = (folder / "weights").stat().st_size
    fetched = porter.ask("fetch", snapshot=[10, 1], folder=str(tmp_path / "restored"))
    assert fetched == {"bytes": size, "came": size}
    assert (tmp_path / "restored" / "weights").read_bytes() == (folder / "weights").read_bytes()
    assert porter.ask("delete", snapshot=[10, 1]) == {}
    assert porter.ask("known")["counted"] == []


def test_what_goes_wrong_is_an_answer(porter: Porter, folder: Path, tmp_path: Path) -> None:
    porter.ask("begin", generation=2, parent=None, seen=[])
    assert porter.ask("begin", generation=2, parent=None, seen=[])["error"]["kind"] == "superseded"
    porter.saved(folder, 10, 2)
    next((tmp_path / "place").rglob("weights")).write_bytes(b"other")
    failed = porter.ask("fetch", snapshot=[10, 2], folder=str(tmp_path / "restored"))["error"]
    assert failed["kind"] == "damaged" and "step-10-g2/worker-0/weights" in failed["text"]
    assert not (tmp_path / "restored").exists()
    (folder / "odd").symlink_to("weights")
    assert porter.ask("send", snapshot=[11, 2], task="worker-0", folder=str(folder))["error"]["kind"] == "unfit"
    gone = porter.ask("send", snapshot=[11, 2], task="worker-0", folder=str(tmp_path / "gone"))["error"]
    assert gone["kind"] == "here" and gone["text"].endswith("gone/: No such file or directory")


def test_a_short_request_does_not_wait_for_a_transfer_that_can_be_given_up(porter: Porter, tmp_path: Path) -> None:
    endless = tmp_path / "endless"
    endless.mkdir()
    with (endless / "zeros").open("wb") as file:
        file.truncate(1 << 40)  # of nothing: it takes no room here, and more than there is at its place
    sending = porter.begin("send", snapshot=[10, 1], task="worker-0", folder=str(endless))
    asked = porter.begin("known")
    assert porter.answer() == {
        "id": asked,
        "generation": 0,
        "counted": [],
        "committed": [],
        "metrics": [],
        "evaluated": [],
    }
    porter.begin("forget", which=sending)
    answer = porter.answer()
    assert (answer["id"], answer["error"]["kind"]) == (sending, "unwanted")
    assert not [path for path in (tmp_path / "place").rglob("*") if path.is_file()]


def test_what_is_held_here_is_not_fetched_unless_it_was_changed(porter: Porter, folder: Path, tmp_path: Path) -> None:
    porter.ask("begin", generation=1, parent=None, seen=[])
    porter.saved(folder, 10)
    held = tmp_path / "held" / "worker-0" / "step-10-g1"
    held.parent.mkdir(parents=True)
    folder.rename(held)
    size = (held / "weights").stat().st_size
    asked: dict[str, Any] = {"snapshot": [10, 1], "held": str(tmp_path / "held")}
    assert porter.ask("fetch", folder=str(tmp_path / "first"), **asked) == {"bytes": size, "came": 0}
    first = (tmp_path / "first" / "weights").read_bytes()
    (held / "weights").write_bytes(b"x" * size)
    assert porter.ask("fetch", folder=str(tmp_path / "second"), **asked) == {"bytes": size, "came": size}
    assert (tmp_path / "second" / "weights").read_bytes() == first


def test_a_place_that_cannot_be_used_at_all_is_an_answer(tmp_path: Path) -> None:
    porter = Porter("ftp://somewhere")
    assert "ftp://somewhere is no place for snapshots" in porter.ask("known")["error"]["text"]
    assert porter.process.stdin
    porter.process.stdin.close()
    assert porter.process.wait(30) == 0
