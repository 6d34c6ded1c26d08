"""Data that a job prepares once, on a real cluster: in a bucket, with an image without support for buckets, and in
a volume claim.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.people import Person, Run, bucket_of, eventually, lines

pytestmark = pytest.mark.timeout(900, func_only=True)

# Waits, the first time, until the test has deleted its pod.
INGEST = """
import os, pathlib, time
folder = pathlib.Path(os.environ["PACELINE_INGEST_DIR"])
print("making", flush=True)
(folder / "words.txt").write_text("one two three")
while not os.path.exists("/shared/go"):
    time.sleep(0.05)
(folder / "more").mkdir()
(folder / "more" / "large.bin").write_bytes(b"x" * 9_000_000)
"""
READS = """
import os
import paceline
data = paceline.fetch(os.environ["PACELINE_DATA"])
print("read", os.environ["PACELINE_DATA"], (data / "words.txt").read_text(), (data / "more/large.bin").stat().st_size)
"""


def start_ingest(person: Person, start: Callable[..., Run], to: str, *arguments: str) -> Run:
    settings = json.loads(person.job().read_text())["kubernetes"]
    (person.folder / "work" / "ingest.py").write_text(INGEST)
    return start(
        *arguments, program=READS, workers=2, ingest={"command": ["python3", "ingest.py"], "to": to},
        kubernetes={**settings, "env_from": [{"secret": "store"}]} if to.startswith("s3") else settings,
    )  # fmt: skip


def read_lines(run: Run) -> list[str]:
    return [line for task in ("worker-0", "worker-1") for line in lines(run.folder, task) if line.startswith("read ")]


def manifests(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in folder.glob("*.manifest.json")]


def test_ingest_into_a_bucket(person: Person, start: Callable[..., Run]) -> None:
    """A pod is lost while it prepares the data; a concurrent run waits for the data and uses it."""
    bucket_of(person)
    first = start_ingest(person, start, "s3://digits/data")
    data = first.wait("ingest-started")["data"]
    eventually("the command runs", lambda: "making" in lines(first.folder, "ingest-0"), more=first.said)
    second = start_ingest(person, start, "s3://digits/data")
    second.wait("note", text=f"waiting for {first.name} to build the data")
    person.cluster.kubectl(
        "delete", "pod", first.pods("worker")[0]["metadata"]["name"], "-n", person.namespace, "--grace-period=1"
    )
    (person.shared / "go").touch()
    assert (first.ends(), second.ends()) == (0, 0), first.said() + second.said()
    [manifest] = manifests(person.shared / "objects" / "digits" / "data")
    assert {file["path"] for file in manifest["files"]} == {"words.txt", "more/large.bin"}
    location = f"s3://digits/data/{manifest['name']}/"
    assert location.startswith(data.rstrip("/"))
    assert read_lines(first) == read_lines(second) == 2 * [f"read {location} one two three 9000000"]
    skipped = {run.name: bool(run.events("ingest-skipped")) for run in (first, second)}
    assert sorted(skipped.values()) == [False, True] and not skipped[manifest["run"]]


def test_ingest_into_a_claim(person: Person, start: Callable[..., Run]) -> None:
    """All pods mount the claim; a captain that is lost while the data is prepared is replaced."""
    folder = person.shared / "data"
    folder.mkdir()
    folder.chmod(0o777)
    run = start_ingest(person, start, "claim://shared/data")
    eventually("the command runs", lambda: "making" in lines(run.folder, "ingest-0"), more=run.said)
    captain = run.pods("captain")[0]["metadata"]["name"]
    person.cluster.kubectl("delete", "pod", captain, "-n", person.namespace, "--grace-period=1")
    eventually(
        "another captain", lambda: [p for p in run.pods("captain") if p["metadata"]["name"] != captain], more=run.said
    )
    (person.shared / "go").touch()
    assert run.ends() == 0, run.said()
    [manifest] = manifests(folder)
    assert read_lines(run) == 2 * [f"read /paceline/data/data/{manifest['name']} one two three 9000000"]
    assert lines(run.folder, "ingest-0").count("making") == 1
    again = start_ingest(person, start, "claim://shared/data")
    assert again.ends() == 0, again.said()
    assert [event["run"] for event in again.events("ingest-skipped")] == [run.name]
    rebuilt = start_ingest(person, start, "claim://shared/data", "--ingest")
    assert rebuilt.ends() == 0, rebuilt.said()
    assert sorted(each["name"] for each in manifests(folder)) == [manifest["name"], f"{manifest['name']}-2"]
