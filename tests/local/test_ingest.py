"""Data that a job builds once, in a folder or a bucket, and data that tasks fetch, with real processes and real S3."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from paceline.storage.ingested.dataset import MANIFEST
from paceline.storage.stores.bucket import BucketStore
from paceline.storage.stores.folder import FolderStore
from paceline.storage.stores.protocol import Store
from support.runs import PROGRAMS, Run, Starter, causes, eventually, job, kill
from support.stores.refusing import Asked, Fault, proxy
from support.stores.servers import Store as Server

FILES = {"large.bin", "parts/words.txt", "whole"}


class Location:
    def __init__(self, to: str, env: dict[str, str], store: Store) -> None:
        self.to, self.env, self.store = to, env, store

    def complete(self) -> list[str]:
        """The folders with a manifest."""
        return sorted(name for name in self.store.folders("") if self.store.has(f"{name}{MANIFEST}"))

    def names(self) -> list[str]:
        """All names except the records of which run builds the data."""
        return [name for name in self.store.names("") if not name.startswith(".turns/")]


def folder(path: Path) -> Location:
    return Location(str(path), {}, FolderStore(str(path)))


def bucket(server: Server, client: Server | None = None) -> Location:
    return Location(server.url, (client or server).options, BucketStore(server.url, **server.config))


@pytest.fixture(params=["folder", "s3"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    return folder(tmp_path / "data") if request.param == "folder" else bucket(request.getfixturevalue("s3"))


@pytest.fixture
def code(tmp_path: Path) -> Path:
    code_folder = tmp_path / "code"
    code_folder.mkdir()
    (code_folder / "words.txt").write_text("one two")
    return code_folder


def a_job(state: Path, code: Path, location: Location, workers: int = 2, **more: Any) -> dict[str, Any]:
    ingest = {
        "command": ["python", str(PROGRAMS / "ingests.py"), str(state)],
        "to": location.to,
        "inputs": ["words.txt"],
    }
    command = ["python", str(PROGRAMS / "reads.py"), str(state)]
    return job(command, workers, code=str(code), ingest={**ingest, **more.pop("ingest", {})}, **more)


def times_started(state: Path) -> int:
    """How often the command was started."""
    return len((state / "made").read_text().splitlines()) if (state / "made").exists() else 0


def wait_until_started(run: Run, state: Path, times: int = 1) -> None:
    eventually(f"the command runs for the {times}. time", lambda: times_started(state) >= times, more=run.story)


def read(state: Path, task: str, generation: int = 1) -> dict[str, Any]:
    output: dict[str, Any] = json.loads((state / f"{task}-g{generation}.json").read_text())
    return output


def test_data_is_built_once_and_again_if_its_inputs_change(
    start: Starter, state: Path, code: Path, location: Location
) -> None:
    fields = a_job(state, code, location)
    first = start(fields, env=location.env)
    first.succeeds()
    ingested = first.wait("ingest-done")
    assert (ingested["files"], ingested["bytes"] > 10_000_000) == (3, True)
    kinds = [event["event"] for event in first.events()]
    assert kinds.index("ingest-started") < kinds.index("ingest-done") < kinds.index("generation-formed")
    for task in ("worker-0", "worker-1"):
        assert read(state, task)["address"] == ingested["data"]
        assert set(read(state, task)["files"]) == FILES
    assert " g0 | making" in first.log("ingest-0")
    name = ingested["data"].rstrip("/").rpartition("/")[2]
    assert location.complete() == [name]
    files = location.names()
    assert files == sorted([f"{name}{MANIFEST}", *(f"{name}/{path}" for path in FILES)])

    second = start(fields, env=location.env)
    second.succeeds()
    skipped = second.wait("ingest-skipped")
    assert (skipped["data"], skipped["run"], times_started(state)) == (ingested["data"], first.folder.name, 1)
    assert not second.events("ingest-started", "ingest-done")

    (code / "words.txt").write_text("three")
    third = start(fields, env=location.env)
    third.succeeds()
    other_data = third.wait("ingest-done")["data"]
    assert (other_data != ingested["data"], times_started(state)) == (True, 2)
    assert set(files) < set(location.names())  # the first data is unchanged

    rebuilt = start(fields, "--ingest", env=location.env)
    rebuilt.succeeds()
    assert (rebuilt.wait("ingest-done")["data"].rstrip("/"), times_started(state)) == (other_data.rstrip("/") + "-2", 3)
    last = start(fields, env=location.env)
    last.succeeds()
    assert last.wait("ingest-skipped")["data"] == rebuilt.wait("ingest-done")["data"]


def test_two_concurrent_runs_build_the_data_once(start: Starter, state: Path, code: Path, location: Location) -> None:
    (state / "wait").touch()
    first = start(a_job(state, code, location), env=location.env)
    wait_until_started(first, state)
    second = start(a_job(state, code, location), env=location.env)
    second.wait("note", text=f"waiting for {first.folder.name} to build the data")
    status = json.loads(first.call("status", first.folder.name, "-o", "json").stdout)
    assert status["reason"].startswith("building the data on worker-host-0: ")
    (state / "wait").unlink()
    first.succeeds()
    second.succeeds()
    assert second.wait("ingest-skipped")["run"] == first.folder.name
    assert (times_started(state), len(location.complete())) == (1, 1)


def test_a_failed_ingest_leaves_nothing_that_looks_complete(
    start: Starter, state: Path, code: Path, location: Location
) -> None:
    (state / "fail").touch()
    run = start(a_job(state, code, location), env=location.env)
    report = run.fails()
    assert report["cause"] == "program-error"
    assert report["reason"].startswith("ingest failed: ValueError: no such language at ")
    assert run.wait("ingest-failed")["cause"] == "program-error"
    assert (times_started(state), location.names(), run.events("generation-formed")) == (1, [], [])
    assert not list(run.folder.glob("ingest/*"))
    (state / "fail").unlink()
    again = start(a_job(state, code, location), env=location.env)
    again.succeeds()
    assert (times_started(state), len(location.complete())) == (2, 1)


def test_ingest_survives_kills(start: Starter, state: Path, code: Path, tmp_path: Path) -> None:
    location = folder(tmp_path / "data")
    (state / "wait").touch()
    run = start(a_job(state, code, location))
    wait_until_started(run, state)
    kill(run.task("ingest-0"))
    wait_until_started(run, state, 2)
    kill(run.keeper("worker-host-0"))
    wait_until_started(run, state, 3)
    eventually("the third start is known", lambda: len(run.events("task-started")) == 3, more=run.story)
    task = run.task("ingest-0")
    before = run.position()
    kill(run.agent("captain"))
    run.wait("captain-returned", after=before)
    assert run.task("ingest-0") == task  # it was not disturbed
    (state / "wait").unlink()
    report = run.succeeds()
    assert causes(report) == [("signal", "ingest-0"), ("host-lost", "ingest-0")]
    assert (times_started(state), len(location.complete())) == (3, 1)
    assert len(location.names()) == len(FILES) + 1  # no files of the killed attempts


@pytest.mark.parametrize("how", ["stop", "ctrl-c", "all is killed"])
def test_a_run_that_is_stopped_during_ingest(start: Starter, state: Path, code: Path, tmp_path: Path, how: str) -> None:
    location = folder(tmp_path / "data")
    (state / "wait").touch()
    run = start(a_job(state, code, location))
    wait_until_started(run, state)
    if how == "all is killed":
        for pid in (run.supervisor, *run.below(run.supervisor), run.cli.pid):
            kill(pid)
        run.nothing_left()
    else:
        kill(run.cli.pid, signal.SIGINT) if how == "ctrl-c" else run.call("stop", run.folder.name)
        exit_code, report = run.end()
        assert (exit_code, report["status"]) == (130, "stopped")
    assert location.complete() == []
    (state / "wait").unlink()
    after = start(a_job(state, code, location))
    after.succeeds()
    has_waited = any(event["text"].startswith("waiting for ") for event in after.events("note"))
    assert how == "all is killed" or not has_waited, "for a run that has given up its lease"
    assert (times_started(state), len(location.complete())) == (2, 1)


def test_ingest_ends_at_its_limit(start: Starter, state: Path, code: Path, tmp_path: Path) -> None:
    (state / "wait").touch()
    location = folder(tmp_path / "data")
    report = start(a_job(state, code, location, ingest={"limit": "2s"})).fails()
    assert (report["cause"], report["reason"]) == (
        "ingest-limit", "the data was not ready within 2 s (ingest.limit)"
    )  # fmt: skip
    assert location.complete() == []


def test_an_ingest_that_writes_nothing(start: Starter, state: Path, code: Path, tmp_path: Path) -> None:
    nothing = {"command": ["python", "-c", "import sys; print('this is', sys.argv[1])", "$PACELINE_TASK"], "inputs": []}
    run = start(a_job(state, code, folder(tmp_path / "data"), ingest=nothing))
    report = run.fails()
    assert report["reason"] == (
        "ingest failed: the command succeeded, but PACELINE_INGEST_DIR is empty"
    )  # fmt: skip
    assert "| this is ingest-0\n" in run.log("ingest-0")

    (run.place / "job.yaml").write_text(json.dumps(job(["true"])))
    result = run.call("run", "--ingest")
    assert (result.returncode, "--ingest: the job has no `ingest`" in result.stderr) == (2, True)


# ---- fetch


def test_fetched_data_is_downloaded_once_per_host(start: Starter, state: Path, s3: Server) -> None:
    """However many tasks fetch it, also after a restart, and with an interpreter that has no library for buckets."""
    store = BucketStore(s3.url, **s3.config)
    for name, data in {"raw/a/one.txt": b"one", "raw/two.bin": b"2" * 9_000_000, "raw.txt": b"beside"}.items():
        path = state / "source"
        path.write_bytes(data)
        store.send_all([(str(path), name)], lambda _: True, {})
    (state / "die").touch()
    with proxy(s3.port) as s3_proxy, s3_proxy.wrong(lambda _: None) as requests:
        command = ["python", "-S", str(PROGRAMS / "reads.py"), str(state), f"{s3.url}/raw"]
        run = start(job(command, 4), env=s3.through(s3_proxy).options)
        run.succeeds()
    assert [event["restore"] for event in run.events("generation-formed")] == [None, None]
    outputs = [read(state, f"worker-{n}", 2) for n in range(4)]
    assert [set(each["files"]) for each in outputs] == 4 * [{"a/one.txt", "two.bin"}]
    assert len({(each["data"], each["inode"]) for each in outputs}) == 1
    downloads = [each.path for each in requests if each.method == "GET" and "/raw/" in each.path]
    assert len(downloads) == 2, downloads
    assert not (run.folder / "fetched").exists()  # it is deleted with the run
    assert not [path for path in outputs[0]["path"] if path.endswith("-packages")]


def test_a_failed_fetch_is_reported(start: Starter, state: Path, s3: Server) -> None:
    command = ["python", str(PROGRAMS / "reads.py"), str(state), f"{s3.url}/nothing"]
    run = start(job(command, 1), env=s3.options)
    report = run.fails()
    assert f"FetchError: cannot fetch {s3.url}/nothing: it does not exist or is empty" in report["reason"]


def test_a_file_is_never_incomplete(start: Starter, state: Path, code: Path, s3: Server) -> None:
    """A broken-off download resumes; a file that does not match its manifest is refused."""
    location = bucket(s3)
    with proxy(s3.port) as s3_proxy:
        client = s3.through(s3_proxy)

        def break_off(request: Asked) -> Fault | None:
            return (
                Fault(half=True)
                if request.method == "GET" and "large.bin" in request.path and not request.again
                else None
            )

        with s3_proxy.wrong(break_off):
            start(a_job(state, code, location, 1), env=client.options).succeeds()
    assert set(read(state, "worker-0")["files"]) == FILES
    name = location.complete()[0]
    path = state / "damaged"
    path.write_bytes(b"x" * 10_240_000)
    location.store.send_all([(str(path), f"{name}/large.bin")], lambda _: True, {})
    report = start(a_job(state, code, location, 1), env=location.env).fails()
    assert f"{name}/large.bin is damaged: it does not match its manifest" in report["reason"]
