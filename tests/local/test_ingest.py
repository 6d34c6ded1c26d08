"""Data that a job makes once, in a folder and in a bucket, and what tasks fetch: with real processes and a real S3."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from paceline.storage.data import MANIFEST
from paceline.storage.folder import Folder
from paceline.storage.objects import Objects
from paceline.storage.store import Store
from support.runs import PROGRAMS, Run, Starter, causes, eventually, job, kill
from support.stores.refusing import Asked, Fault, proxy
from support.stores.servers import Store as Server

pytestmark = pytest.mark.timeout(240)

FILES = {"large.bin", "parts/words.txt", "whole"}


class Place:
    def __init__(self, to: str, env: dict[str, str], store: Store) -> None:
        self.to, self.env, self.store = to, env, store

    def complete(self) -> list[str]:
        """The folders with a manifest."""
        return sorted(name for name in self.store.folders("") if self.store.has(f"{name}{MANIFEST}"))

    def names(self) -> list[str]:
        """Of everything, but the records of whose turn it is."""
        return [name for name in self.store.names("") if not name.startswith(".turns/")]


def folder(path: Path) -> Place:
    return Place(str(path), {}, Folder(str(path)))


def bucket(server: Server, client: Server | None = None) -> Place:
    return Place(server.url, (client or server).options, Objects(server.url, **server.config))


@pytest.fixture(params=["folder", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return folder(tmp_path / "data") if request.param == "folder" else bucket(request.getfixturevalue("s3"))


@pytest.fixture
def code(tmp_path: Path) -> Path:
    made = tmp_path / "code"
    made.mkdir()
    (made / "words.txt").write_text("one two")
    return made


def a_job(state: Path, code: Path, place: Place, workers: int = 2, **more: Any) -> dict[str, Any]:
    ingest = {"command": ["python", str(PROGRAMS / "ingests.py"), str(state)], "to": place.to, "inputs": ["words.txt"]}
    command = ["python", str(PROGRAMS / "reads.py"), str(state)]
    return job(command, workers, code=str(code), ingest={**ingest, **more.pop("ingest", {})}, **more)


def made(state: Path) -> int:
    """How often the command was started."""
    return len((state / "made").read_text().splitlines()) if (state / "made").exists() else 0


def making(run: Run, state: Path, times: int = 1) -> None:
    eventually(f"the command runs for the {times}. time", lambda: made(state) >= times, more=run.story)


def read(state: Path, task: str, generation: int = 1) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((state / f"{task}-g{generation}.json").read_text())
    return found


def test_data_is_made_once_and_again_when_it_is_made_of_something_else(
    start: Starter, state: Path, code: Path, place: Place
) -> None:
    given = a_job(state, code, place)
    first = start(given, env=place.env)
    first.succeeds()
    done = first.wait("ingest-done")
    assert (done["files"], done["bytes"] > 10_000_000) == (3, True)
    kinds = [event["event"] for event in first.events()]
    assert kinds.index("ingest-started") < kinds.index("ingest-done") < kinds.index("generation-formed")
    for task in ("worker-0", "worker-1"):
        assert read(state, task)["address"] == done["data"]
        assert set(read(state, task)["files"]) == FILES
    assert " g0 | making" in first.log("ingest-0")
    name = done["data"].rstrip("/").rpartition("/")[2]
    assert place.complete() == [name]
    files = place.names()
    assert files == sorted([f"{name}{MANIFEST}", *(f"{name}/{path}" for path in FILES)])

    second = start(given, env=place.env)
    second.succeeds()
    skipped = second.wait("ingest-skipped")
    assert (skipped["data"], skipped["run"], made(state)) == (done["data"], first.folder.name, 1)
    assert not second.events("ingest-started", "ingest-done")

    (code / "words.txt").write_text("three")
    third = start(given, env=place.env)
    third.succeeds()
    other = third.wait("ingest-done")["data"]
    assert (other != done["data"], made(state)) == (True, 2)
    assert set(files) < set(place.names())  # what was there is as it was

    anew = start(given, "--ingest", env=place.env)
    anew.succeeds()
    assert (anew.wait("ingest-done")["data"].rstrip("/"), made(state)) == (other.rstrip("/") + "-2", 3)
    last = start(given, env=place.env)
    last.succeeds()
    assert last.wait("ingest-skipped")["data"] == anew.wait("ingest-done")["data"]


def test_two_runs_at_once_make_it_once(start: Starter, state: Path, code: Path, place: Place) -> None:
    (state / "wait").touch()
    first = start(a_job(state, code, place), env=place.env)
    making(first, state)
    second = start(a_job(state, code, place), env=place.env)
    second.wait("note", text=f"{first.folder.name} makes the data: waiting for it")
    status = json.loads(first.call("status", first.folder.name, "-o", "json").stdout)
    assert status["reason"].startswith("making the data on worker-host-0: ")
    (state / "wait").unlink()
    first.succeeds()
    second.succeeds()
    assert second.wait("ingest-skipped")["run"] == first.folder.name
    assert (made(state), len(place.complete())) == (1, 1)


def test_an_ingest_that_fails_leaves_nothing_that_looks_done(
    start: Starter, state: Path, code: Path, place: Place
) -> None:
    (state / "fail").touch()
    run = start(a_job(state, code, place), env=place.env)
    report = run.fails()
    assert report["cause"] == "program-error"
    assert report["reason"].startswith("ingest failed: ValueError: no such language at ")
    assert run.wait("ingest-failed")["cause"] == "program-error"
    assert (made(state), place.names(), run.events("generation-formed")) == (1, [], [])
    assert not list(run.folder.glob("ingest/*"))
    (state / "fail").unlink()
    again = start(a_job(state, code, place), env=place.env)
    again.succeeds()
    assert (made(state), len(place.complete())) == (2, 1)


def test_it_survives_what_is_killed(start: Starter, state: Path, code: Path, tmp_path: Path) -> None:
    place = folder(tmp_path / "data")
    (state / "wait").touch()
    run = start(a_job(state, code, place))
    making(run, state)
    kill(run.task("ingest-0"))
    making(run, state, 2)
    kill(run.keeper("worker-host-0"))
    making(run, state, 3)
    task = run.task("ingest-0")
    before = run.position()
    kill(run.agent("captain"))
    run.wait("captain-returned", after=before)
    assert run.task("ingest-0") == task  # nobody noticed
    (state / "wait").unlink()
    report = run.succeeds()
    assert causes(report) == [("signal", "ingest-0"), ("host-lost", "ingest-0")]
    assert (made(state), len(place.complete())) == (3, 1)
    assert len(place.names()) == len(FILES) + 1  # nothing of what the killed ones had made


@pytest.mark.parametrize("how", ["stop", "ctrl-c", "all is killed"])
def test_a_run_that_is_stopped_meanwhile(start: Starter, state: Path, code: Path, tmp_path: Path, how: str) -> None:
    place = folder(tmp_path / "data")
    (state / "wait").touch()
    run = start(a_job(state, code, place))
    making(run, state)
    if how == "all is killed":
        for pid in (run.supervisor, *run.below(run.supervisor), run.cli.pid):
            kill(pid)
        run.nothing_left()
    else:
        kill(run.cli.pid, signal.SIGINT) if how == "ctrl-c" else run.call("stop", run.folder.name)
        code_, report = run.end()
        assert (code_, report["status"]) == (130, "stopped")
    assert place.complete() == []
    (state / "wait").unlink()
    after = start(a_job(state, code, place))
    after.succeeds(limit=30)  # it need not wait for one that is gone
    assert (made(state), len(place.complete())) == (2, 1)


def test_it_does_not_take_longer_than_it_may(start: Starter, state: Path, code: Path, tmp_path: Path) -> None:
    (state / "wait").touch()
    place = folder(tmp_path / "data")
    report = start(a_job(state, code, place, ingest={"limit": "2s"})).fails()
    assert (report["cause"], report["reason"]) == (
        "ingest-limit", "the data was not there within 2 s, which is ingest.limit"
    )  # fmt: skip
    assert place.complete() == []


def test_an_ingest_that_makes_nothing(start: Starter, state: Path, code: Path, tmp_path: Path) -> None:
    nothing = {"command": ["python", "-c", "print('nothing')"], "inputs": []}
    run = start(a_job(state, code, folder(tmp_path / "data"), ingest=nothing))
    report = run.fails()
    assert report["reason"] == (
        "ingest failed: the command has ended well, and PACELINE_INGEST_DIR is empty"
    )  # fmt: skip

    (run.place / "job.yaml").write_text(json.dumps(job(["true"])))
    without = run.call("run", "--ingest")
    assert (without.returncode, "--ingest: the job has no ingest" in without.stderr) == (2, True)


# ---- fetch


def test_what_tasks_fetch_comes_once_a_host(start: Starter, state: Path, s3: Server) -> None:
    """However many ask, also when they start again, and with an interpreter that has no library for buckets."""
    store = Objects(s3.url, **s3.config)
    for name, data in {"raw/a/one.txt": b"one", "raw/two.bin": b"2" * 9_000_000, "raw.txt": b"beside"}.items():
        path = state / "source"
        path.write_bytes(data)
        store.send_all([(str(path), name)], lambda _: True, {})
    (state / "die").touch()
    with proxy(s3.port) as way, way.wrong(lambda _: None) as asked:
        command = ["python", "-S", str(PROGRAMS / "reads.py"), str(state), f"{s3.url}/raw"]
        run = start(job(command, 4), env=s3.through(way).options)
        run.succeeds()
    assert [event["restore"] for event in run.events("generation-formed")] == [None, None]
    found = [read(state, f"worker-{n}", 2) for n in range(4)]
    assert [set(each["files"]) for each in found] == 4 * [{"a/one.txt", "two.bin"}]
    assert len({(each["data"], each["inode"]) for each in found}) == 1
    came = [each.path for each in asked if each.method == "GET" and "/raw/" in each.path]
    assert len(came) == 2, came
    assert not (run.folder / "fetched").exists()  # it goes with the run
    assert not [path for path in found[0]["path"] if path.endswith("-packages")]


def test_what_cannot_be_fetched_is_told(start: Starter, state: Path, s3: Server) -> None:
    command = ["python", str(PROGRAMS / "reads.py"), str(state), f"{s3.url}/nothing"]
    run = start(job(command, 1), env=s3.options)
    report = run.fails()
    assert f"FetchError: cannot fetch {s3.url}/nothing: there is nothing" in report["reason"]


def test_half_of_a_file_is_never_there(start: Starter, state: Path, code: Path, s3: Server) -> None:
    """What breaks off goes on; what is not what its manifest says is refused."""
    place = bucket(s3)
    with proxy(s3.port) as way:
        client = s3.through(way)

        def half(asked: Asked) -> Fault | None:
            return Fault(half=True) if asked.method == "GET" and "large.bin" in asked.path and not asked.again else None

        with way.wrong(half):
            start(a_job(state, code, place, 1), env=client.options).succeeds()
    assert set(read(state, "worker-0")["files"]) == FILES
    name = place.complete()[0]
    path = state / "damaged"
    path.write_bytes(b"x" * 10_240_000)
    place.store.send_all([(str(path), f"{name}/large.bin")], lambda _: True, {})
    report = start(a_job(state, code, place, 1), env=place.env).fails()
    assert f"{name}/large.bin is damaged: it is not what its manifest says" in report["reason"]
