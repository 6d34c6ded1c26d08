"""Runs that start from the snapshots of another run, in a folder or a bucket, or from any folder of files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.environment import without
from support.runs import LIMIT_S, SOURCE, Run, Starter, eventually, job, kill
from support.saving import Place, a_job, bucket, commit, finish, folder, restores, starts
from support.stores.servers import Store as Server


def state_of(tmp_path: Path, name: str) -> Path:
    (tmp_path / name).mkdir()
    return tmp_path / name


def paceline(home: Path, *arguments: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    environment = without("PACELINE", "PYTEST")
    environment |= {"PACELINE_HOME": str(home), "PYTHONPATH": str(SOURCE), **env}
    command = [sys.executable, "-m", "paceline.cli", *arguments]
    return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=LIMIT_S)


def run_to_end(start: Starter, tmp_path: Path, location: Place | None, *steps: int) -> Run:
    """A run that has committed these steps."""
    state = state_of(tmp_path, "first")
    run = start(
        a_job(state, location, env=location.env if location else {}), "--run", "first-1", home=tmp_path / "home"
    )
    commit(run, state, *steps)
    finish(run, state)
    return run


@pytest.mark.parametrize("kind", ["own folder", "folder", "s3"])
def test_a_run_starts_from_another(start: Starter, tmp_path: Path, kind: str, request: pytest.FixtureRequest) -> None:
    location = {
        "own folder": lambda: None,
        "folder": lambda: folder(tmp_path / "place"),
        "s3": lambda: bucket(request.getfixturevalue("s3")),
    }[kind]()
    first = run_to_end(start, tmp_path, location, 3, 7)
    env = location.env if location else {}
    state = state_of(tmp_path, "second")
    fields = a_job(state, location, workers=3, env=env, snapshots={"from": "first-1"})
    (tmp_path / "second.yaml").write_text(json.dumps(fields))
    plan = json.loads(paceline(first.home, "plan", "-o", "json", "second.yaml", cwd=tmp_path).stdout)
    assert plan["snapshots"]["origin"].endswith("/first-1")
    run = start(fields, "--run", "second-1", home=first.home)
    tasks = [f"worker-{index}" for index in range(3)]
    eventually("all have started", lambda: all(starts(run, task) for task in tasks), more=run.story)
    deleted = paceline(first.home, "delete", "--yes", "--snapshots", "first-1", **env)
    assert deleted.returncode == 0, deleted.stderr
    kill(run.task("worker-2"))
    run.wait("generation-formed", generation=2)
    eventually("all tasks resume", lambda: all(len(starts(run, task)) == 2 for task in tasks), more=run.story)
    commit(run, state, 9)
    assert finish(run, state)["status"] == "succeeded"
    assert restores(run) == ["step-7-g0", "step-7-g0"]
    assert [starts(run, task) for task in tasks] == [[7, 7]] * 3
    status = paceline(run.home, "status", "second-1").stdout
    listing = paceline(run.home, "snapshots", "ls", "-o", "json", "second-1", **env)
    snapshots = {each["snapshot"]: each for each in json.loads(listing.stdout)}
    assert list(snapshots) == ["step-9-g2", "step-7-g0"]
    assert snapshots["step-7-g0"]["origin"].endswith("/first-1/step-7-g1") and snapshots["step-7-g0"]["world"] == 2
    assert f"from         {snapshots['step-7-g0']['origin'].removesuffix('/step-7-g1')}" in status, status


@pytest.mark.parametrize("kind", ["folder", "s3"])
def test_a_run_id_that_exists_at_the_location_is_not_used_again(
    start: Starter, tmp_path: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    location = folder(tmp_path / "place") if kind == "folder" else bucket(request.getfixturevalue("s3"))
    first = run_to_end(start, tmp_path, location, 3, 7)
    assert paceline(first.home, "delete", "--yes", "first-1", **location.env).returncode == 0
    before = listed(first.home, location)
    (tmp_path / "job.yaml").write_text(json.dumps(a_job(state_of(tmp_path, "second"), location, env=location.env)))
    for home in (first.home, tmp_path / "another machine"):
        result = paceline(home, "run", "job.yaml", "--run", "first-1", cwd=tmp_path)
        assert (
            result.returncode,
            f"error: another run first-1 already exists at {location.to}; " in result.stderr,
        ) == (
            2,
            True,
        )
        assert not list((home / "runs").iterdir())
    assert listed(first.home, location) == before == ["step-7-g1", "step-3-g1"]


def listed(home: Path, location: Place) -> list[str]:
    return paceline(home, "snapshots", "ls", "-o", "name", f"{location.to}/first-1", **location.env).stdout.split()


def test_a_run_starts_from_a_trusted_folder_of_files(start: Starter, tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    (weights / "model").mkdir(parents=True)
    (weights / "model" / "w.txt").write_text("0.5")
    expression = "open(os.environ['PACELINE_RESTORE'] + '/model/w.txt').read()"
    program = f"import os; print({expression}, os.environ.get('PACELINE_TRUST'))"
    run = start(job([sys.executable, "-c", program], snapshots={"from": "../weights", "trust": True}))
    run.succeeds()
    assert "0.5 1" in run.log("worker-0") and "0.5 1" in run.log("worker-1")
    assert (weights / "model" / "w.txt").read_text() == "0.5"


REFUSED = [
    ("firzt-1", 2, "no run 'firzt-1'; did you mean 'first-1'?"),
    ("./nowhere", 1, "the folder {cwd}/nowhere to start from does not exist"),
    ("{home}/runs/first-1/snapshots", 1, "contains runs but is not one: first-1; use"),
    ("{home}/runs/first-1/snapshots/first-1/step-4-g1", 1, "/first-1/step-4-g1 to start from"),
    ("a b", 2, "snapshots.from: is not a run id; write ./a b for a folder"),
    ("claim://kept/first-1", 2, "snapshots.from: is a volume claim, which only a cluster has"),
]


def test_an_unusable_origin_is_reported_before_anything_starts(start: Starter, tmp_path: Path) -> None:
    first = run_to_end(start, tmp_path, None, 7)
    paths = {"home": first.home, "cwd": tmp_path}
    for origin, code, message in REFUSED:
        fields = job(["python", "-c", "pass"], snapshots={"from": origin.format(**paths)})
        (tmp_path / "job.yaml").write_text(json.dumps(fields))
        result = paceline(first.home, "run", "job.yaml", cwd=tmp_path)
        assert (result.returncode, message.format(**paths) in result.stderr) == (code, True), result.stderr
    assert [folder.name for folder in (first.home / "runs").iterdir()] == ["first-1"]


def unreachable(server: Server) -> dict[str, str]:
    return {**server.options, "AWS_ENDPOINT_URL": "http://127.0.0.1:9"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda server: {"to": server.url, "env": unreachable(server)}, "no response from http://127.0.0.1:9"),
        (
            lambda server: {"to": server.url, "env": {**server.options, "AWS_SECRET_ACCESS_KEY": "wrong"}},
            "credentials are not accepted",
        ),
        (lambda server: {"to": "s3://no-such-bucket/digits", "env": server.options}, "no-such-bucket"),
    ],
    ids=["unreachable", "wrong credentials", "no bucket"],
)
def test_an_unusable_bucket_is_reported_before_anything_starts(
    tmp_path: Path, s3: Server, change: Any, message: str
) -> None:
    settings = change(s3)
    fields = job(["python", "-c", "pass"], snapshots={"to": settings["to"]}, env=settings["env"])
    (tmp_path / "job.yaml").write_text(json.dumps(fields))
    result = paceline(tmp_path / "home", "run", "job.yaml", cwd=tmp_path)
    assert (result.returncode, message in result.stderr) == (1, True), result.stderr
    assert not (tmp_path / "home" / "runs").exists()


SAVES = """
import os, pathlib
saves = pathlib.Path(os.environ["PACELINE_SNAPSHOT_DIR"])
(saves / "new").mkdir()
(saves / "new" / "key").write_text(pathlib.Path(os.environ["GOOGLE_APPLICATION_CREDENTIALS"]).read_text())
(saves / "new").rename(saves / "step-1")
"""


@pytest.mark.parametrize("named", ["where the command is typed", "in the job file"])
def test_a_credentials_file_is_found_by_agents_that_run_in_another_folder(
    tmp_path: Path, gcs: Server, named: str
) -> None:
    is_in_shell = named == "where the command is typed"
    settings, key = dict(gcs.options), {"GOOGLE_APPLICATION_CREDENTIALS": "key.json"}
    (tmp_path / "work").mkdir()
    (tmp_path / ("" if is_in_shell else "work") / "key.json").write_text(settings.pop("GOOGLE_SERVICE_ACCOUNT_KEY"))
    fields = job(["python", "-c", SAVES], snapshots={"to": gcs.url}, env={} if is_in_shell else key)
    (tmp_path / "work" / "job.yaml").write_text(json.dumps(fields))
    settings |= key if is_in_shell else {}
    result = paceline(tmp_path / "home", "run", "work/job.yaml", cwd=tmp_path, **settings)
    assert result.returncode == 0 and "step 1 committed: gs://" in result.stderr, result.stderr
