"""Every request to a porter and every answer arrives unchanged."""

from __future__ import annotations

import json
from typing import get_args

import pytest

from paceline.agent.net.frames import WireError
from paceline.agent.transfers import requests as req
from paceline.storage.snapshots.manifest import File, SnapshotId

SNAPSHOT = SnapshotId(20, 3)
REQUESTS: list[req.Request] = [
    req.ListSnapshots(),
    req.ListSnapshots("loss", True),
    req.BeginGeneration(4, None),
    req.BeginGeneration(4, SNAPSHOT, (SNAPSHOT, SnapshotId(10, 1)), "captain"),
    req.CommitSnapshot(SNAPSHOT, "{}" * 100_000, 4),
    req.RecordEvaluation(SNAPSHOT, "evaluator-0", {"accuracy": 0.9}, "2026-11-17T00:00:00Z"),
    req.DeleteSnapshot(SNAPSHOT, 3),
    req.DeleteUncommitted(SNAPSHOT, 3),
    req.SweepGenerations(4),
    req.SweepGenerations(4, SNAPSHOT),
    req.CheckSnapshot(SNAPSHOT),
    req.AdoptOrigin(),
    req.SendPart(SNAPSHOT, "worker-0", "/folder"),
    req.FetchSnapshot(SNAPSHOT, "/folder", ("/held",)),
    req.LinkSnapshot(SNAPSHOT, "/folder", ("/held",), {"worker-0": "", "worker-1": "10.0.0.1:7000"}),
    req.LinkSnapshot(SNAPSHOT, "/folder", ("/memory/held", "/held"), {"worker-0": ""}, "/memory/restored"),
    req.FetchParts(SNAPSHOT, {"worker-0": "10.0.0.1:7000"}),
    req.MoveToDisk("/folder"),
    req.RestoreWatched("/code/ckpt", "/own", "/copies", "run", "host", 4, "", ("/code", "/own")),
    req.CaptureWatched("/code/ckpt", "/own", "/copies", "/to", {}, "worker-0", {"model": (1, 2, 3)}),
    req.RemoveFolders(("/a", "/b")),
    req.UploadLogs("host/life/0001", {"logs/worker-0.log": ("/logs/worker-0.log", 0, 100)}, "/scratch"),
    req.FoldEvents("captain", "/scratch"),
    req.TrimCurves("/tensorboard", "/notes", "", "/scratch", True),
    req.KeepCompiled("/compiled", "/compiled/digits/x86_64-1", "worker-host-0", "/scratch"),
    req.FetchCompiled("/compiled/digits/x86_64-1", "worker-host-0", "/scratch"),
    req.Cancel(7),
]
ANSWERS: list[req.Answer] = [
    req.Failure(req.STORE, "away", True),
    req.Done(),
    req.SnapshotList(0, (), ()),
    req.SnapshotList(4, (SNAPSHOT,), (SNAPSHOT,), {SNAPSHOT: 0.5}, {SNAPSHOT: {"accuracy": 0.9}}),
    req.GenerationBegun((SNAPSHOT,)),
    req.EvaluationRecorded({"accuracy": 0.9}),
    req.OriginAdopted(SNAPSHOT, "s3://bucket/run/step-20-g3", 100, ("step 30 is damaged",)),
    req.PartSent((File("weights", 3, "0" * 64),)),
    req.SnapshotFetched(100, 0),
    req.WatchedRestored("/kept", {"model": (1, 2, 3)}),
    req.WatchedCaptured(True),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: type(request).__name__)
def test_a_request_arrives_unchanged(request_: req.Request) -> None:
    assert req.read_request(json.loads(json.dumps(req.request_to_object(request_)))) == request_


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: type(answer).__name__)
def test_an_answer_arrives_unchanged(answer: req.Answer) -> None:
    assert req.read_answer(json.loads(json.dumps(req.answer_to_object(answer)))) == answer


def test_every_type_is_covered() -> None:
    assert {type(each) for each in REQUESTS} == set(get_args(req.Request))
    assert {type(each) for each in ANSWERS} == set(get_args(req.Answer))


def test_an_unknown_type_is_an_error() -> None:
    with pytest.raises(WireError, match="unknown request 'sing'"):
        req.read_request({"do": "sing"})
    with pytest.raises(WireError, match="unknown answer 'Song'"):
        req.read_answer({"is": "Song"})


def test_a_pending_record_keeps_its_format_in_the_notes_of_a_captain() -> None:
    """A captain can read notes that were written before an update."""
    stored = {"do": "begin", "generation": 4, "parent": [20, 3], "seen": [[20, 3]], "by": "captain"}
    record = req.BeginGeneration(4, SNAPSHOT, (SNAPSHOT,), "captain")
    assert req.read_request(stored) == record and req.request_to_object(record) == stored


def test_a_part_may_have_as_many_files_as_a_manifest_has_room_for() -> None:
    answer = req.PartSent(tuple(File(f"{number}", 1, "0" * 64) for number in range(400_000)))
    assert req.read_answer(req.answer_to_object(answer)) == answer
