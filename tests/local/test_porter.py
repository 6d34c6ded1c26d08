"""The process that transfers snapshots (the porter), called over pipes with its own protocol."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.agent.transfers import requests as req
from paceline.storage.snapshots.manifest import Manifest, Part, SnapshotId
from support.runs import SOURCE

pytestmark = pytest.mark.timeout(300)

RUN = "digits-3f9a"
NOTHING = req.SnapshotList(0, (), ())


class Porter:
    def __init__(self, location: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "paceline.agent.transfers.porter", json.dumps({"place": location, "run": RUN})],
            env={**os.environ, "PYTHONPATH": str(SOURCE)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self._last_id = 0

    def begin(self, request: req.Request) -> int:
        assert self.process.stdin
        self._last_id += 1
        data = {"id": self._last_id, **req.request_to_object(request)}
        self.process.stdin.write(json.dumps(data).encode() + b"\n")
        self.process.stdin.flush()
        return self._last_id

    def answer(self) -> tuple[int, req.Answer]:
        assert self.process.stdout
        data: dict[str, Any] = json.loads(self.process.stdout.readline())
        return data.pop("id"), req.read_answer(data)

    def call(self, request: req.Request) -> req.Answer:
        number = self.begin(request)
        answered, answer = self.answer()
        assert answered == number
        return answer

    def fails(self, request: req.Request) -> req.Failure:
        answer = self.call(request)
        assert isinstance(answer, req.Failure), answer
        return answer

    def save(self, folder: Path, step: int, generation: int = 1) -> Manifest:
        """Sends and commits a snapshot."""
        snapshot = SnapshotId(step, generation)
        sent = self.call(req.SendPart(snapshot, "worker-0", str(folder)))
        assert isinstance(sent, req.PartSent), sent
        manifest = Manifest(RUN, snapshot, 1, (Part("worker-0", sent.files),), {"loss": 0.5})
        assert self.call(req.CommitSnapshot(snapshot, manifest.to_bytes().decode())) == req.Done()
        return manifest


@pytest.fixture
def porter(tmp_path: Path) -> Iterator[Porter]:
    started = Porter(str(tmp_path / "place"))
    yield started
    assert started.process.stdin
    started.process.stdin.close()
    assert started.process.wait(120) == 0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "step-10"
    path.mkdir()
    (path / "weights").write_bytes(os.urandom(9_000_000))
    return path


def test_it_sends_commits_lists_fetches_and_deletes(porter: Porter, folder: Path, tmp_path: Path) -> None:
    assert porter.call(req.ListSnapshots()) == NOTHING
    assert porter.call(req.BeginGeneration(1, None)) == req.GenerationBegun()
    manifest = porter.save(folder, 10)
    assert porter.call(req.CommitSnapshot(manifest.id, manifest.to_bytes().decode())) == req.Done(), (
        "it was committed before"
    )
    assert porter.call(req.ListSnapshots("loss")) == req.SnapshotList(
        1, (manifest.id,), (manifest.id,), {manifest.id: 0.5}
    )
    size = (folder / "weights").stat().st_size
    fetched = porter.call(req.FetchSnapshot(manifest.id, str(tmp_path / "restored")))
    assert fetched == req.SnapshotFetched(size, size)
    assert (tmp_path / "restored" / "weights").read_bytes() == (folder / "weights").read_bytes()
    assert porter.call(req.DeleteSnapshot(manifest.id, 1)) == req.Done()
    assert porter.call(req.ListSnapshots()) == replace(NOTHING, generation=1)


def test_errors_are_answers(porter: Porter, folder: Path, tmp_path: Path) -> None:
    porter.call(req.BeginGeneration(2, None))
    assert porter.fails(req.BeginGeneration(2, None)).kind == req.SUPERSEDED
    porter.save(folder, 10, 2)
    next((tmp_path / "place").rglob("weights")).write_bytes(b"other")
    damaged = porter.fails(req.FetchSnapshot(SnapshotId(10, 2), str(tmp_path / "restored")))
    assert damaged.kind == req.DAMAGED and "step-10-g2/worker-0/weights" in damaged.text
    assert not (tmp_path / "restored").exists()
    (folder / "odd").symlink_to("weights")
    assert porter.fails(req.SendPart(SnapshotId(11, 2), "worker-0", str(folder))).kind == req.UNFIT
    missing = porter.fails(req.SendPart(SnapshotId(11, 2), "worker-0", str(tmp_path / "gone")))
    assert missing.kind == req.HERE and missing.text.endswith("gone/: No such file or directory")


def test_a_short_request_does_not_wait_for_a_transfer_which_can_be_canceled(porter: Porter, tmp_path: Path) -> None:
    endless = tmp_path / "endless"
    endless.mkdir()
    with (endless / "zeros").open("wb") as file:
        file.truncate(1 << 40)  # a sparse file: it takes no space here, and more than its destination has
    sending = porter.begin(req.SendPart(SnapshotId(10, 1), "worker-0", str(endless)))
    listing = porter.begin(req.ListSnapshots())
    assert porter.answer() == (listing, NOTHING)
    porter.begin(req.Cancel(sending))
    number, answer = porter.answer()
    assert isinstance(answer, req.Failure) and (number, answer.kind) == (sending, req.UNWANTED)
    assert not [path for path in (tmp_path / "place").rglob("*") if path.is_file()]


def test_a_local_copy_replaces_a_fetch_unless_it_was_changed(porter: Porter, folder: Path, tmp_path: Path) -> None:
    porter.call(req.BeginGeneration(1, None))
    porter.save(folder, 10)
    local_copy = tmp_path / "held" / "worker-0" / "step-10-g1"
    local_copy.parent.mkdir(parents=True)
    folder.rename(local_copy)
    size = (local_copy / "weights").stat().st_size
    snapshot, local_folders = SnapshotId(10, 1), (str(tmp_path / "memory" / "held"), str(tmp_path / "held"))
    first_fetch = req.FetchSnapshot(snapshot, str(tmp_path / "first"), local_folders)
    assert porter.call(first_fetch) == req.SnapshotFetched(size, 0)
    first = (tmp_path / "first" / "weights").read_bytes()
    (local_copy / "weights").write_bytes(b"x" * size)
    second_fetch = req.FetchSnapshot(snapshot, str(tmp_path / "second"), local_folders)
    assert porter.call(second_fetch) == req.SnapshotFetched(size, size)
    assert (tmp_path / "second" / "weights").read_bytes() == first


def test_an_unusable_location_is_reported_as_an_answer(tmp_path: Path) -> None:
    porter = Porter("ftp://somewhere")
    assert "ftp://somewhere is not a location for snapshots" in porter.fails(req.ListSnapshots()).text
    assert porter.process.stdin
    porter.process.stdin.close()
    assert porter.process.wait(120) == 0
