"""Runs that start from what another has left: its snapshots, in a folder or a bucket, or any folder of files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.environment import without
from support.runs import SOURCE, Run, Starter, eventually, job, kill
from support.saving import Place, a_job, bucket, commit, finish, folder, restores, starts
from support.stores.servers import Store as Server

pytestmark = pytest.mark.timeout(180)


def state_of(tmp_path: Path, name: str) -> Path:
    (tmp_path / name).mkdir()
    return tmp_path / name


def paceline(home: Path, *words: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    kept = without("PACELINE", "PYTEST")
    kept |= {"PACELINE_HOME": str(home), "PYTHONPATH": str(SOURCE), **env}
    command = [sys.executable, "-m", "paceline.cli", *words]
    return subprocess.run(command, env=kept, cwd=cwd, capture_output=True, text=True, timeout=60)


def ended(start: Starter, tmp_path: Path, place: Place | None, *steps: int) -> Run:
    """A run that has committed these steps."""
    state = state_of(tmp_path, "first")
    run = start(a_job(state, place, env=place.env if place else {}), "--run", "first-1", home=tmp_path / "home")
    commit(run, state, *steps)
    finish(run, state)
    return run


@pytest.mark.parametrize("kind", ["own folder", "folder", "s3"])
def test_a_run_starts_from_another(start: Starter, tmp_path: Path, kind: str, request: pytest.FixtureRequest) -> None:
    place = {
        "own folder": lambda: None,
        "folder": lambda: folder(tmp_path / "place"),
        "s3": lambda: bucket(request.getfixturevalue("s3")),
    }[kind]()
    first = ended(start, tmp_path, place, 3, 7)
    env = place.env if place else {}
    state = state_of(tmp_path, "second")
    wanted = a_job(state, place, workers=3, env=env, snapshots={"from": "first-1"})
    (tmp_path / "second.yaml").write_text(json.dumps(wanted))
    planned = json.loads(paceline(first.home, "plan", "-o", "json", "second.yaml", cwd=tmp_path).stdout)
    assert planned["snapshots"]["origin"].endswith("/first-1")
    run = start(wanted, "--run", "second-1", home=first.home)
    tasks = [f"worker-{index}" for index in range(3)]
    eventually("all have started", lambda: all(starts(run, task) for task in tasks), more=run.story)
    gone = paceline(first.home, "delete", "--yes", "--snapshots", "first-1", **env)
    assert gone.returncode == 0, gone.stderr
    kill(run.task("worker-2"))
    run.wait("generation-formed", generation=2)
    eventually("all go on", lambda: all(len(starts(run, task)) == 2 for task in tasks), more=run.story)
    commit(run, state, 9)
    assert finish(run, state)["status"] == "succeeded"
    assert restores(run) == ["step-7-g0", "step-7-g0"]
    assert [starts(run, task) for task in tasks] == [[7, 7]] * 3
    shown = paceline(run.home, "status", "second-1").stdout
    listed = paceline(run.home, "snapshots", "ls", "-o", "json", "second-1", **env)
    told = {each["snapshot"]: each for each in json.loads(listed.stdout)}
    assert list(told) == ["step-9-g2", "step-7-g0"]
    assert told["step-7-g0"]["origin"].endswith("/first-1/step-7-g1") and told["step-7-g0"]["world"] == 2
    assert f"from         {told['step-7-g0']['origin'].removesuffix('/step-7-g1')}" in shown, shown


@pytest.mark.parametrize("kind", ["folder", "s3"])
def test_an_id_that_its_place_knows_is_not_used_again(
    start: Starter, tmp_path: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    place = folder(tmp_path / "place") if kind == "folder" else bucket(request.getfixturevalue("s3"))
    first = ended(start, tmp_path, place, 3, 7)
    assert paceline(first.home, "delete", "--yes", "first-1", **place.env).returncode == 0
    before = listed(first.home, place)
    (tmp_path / "job.yaml").write_text(json.dumps(a_job(state_of(tmp_path, "second"), place, env=place.env)))
    for home in (first.home, tmp_path / "another machine"):
        done = paceline(home, "run", "job.yaml", "--run", "first-1", cwd=tmp_path)
        assert (done.returncode, f"error: there is another run first-1 at {place.to}: " in done.stderr) == (2, True)
        assert not list((home / "runs").iterdir())
    assert listed(first.home, place) == before == ["step-7-g1", "step-3-g1"]


def listed(home: Path, place: Place) -> list[str]:
    return paceline(home, "snapshots", "ls", "-o", "name", f"{place.to}/first-1", **place.env).stdout.split()


def test_a_folder_of_files_and_what_it_may_do(start: Starter, tmp_path: Path) -> None:
    given = tmp_path / "weights"
    (given / "model").mkdir(parents=True)
    (given / "model" / "w.txt").write_text("0.5")
    reads = "open(os.environ['PACELINE_RESTORE'] + '/model/w.txt').read()"
    tells = f"import os; print({reads}, os.environ.get('PACELINE_TRUST'))"
    run = start(job([sys.executable, "-c", tells], snapshots={"from": "../weights", "trust": True}))
    run.succeeds()
    assert "0.5 1" in run.log("worker-0") and "0.5 1" in run.log("worker-1")
    assert (given / "model" / "w.txt").read_text() == "0.5"


REFUSED = [
    ("firzt-1", 2, "no run 'firzt-1'; did you mean 'first-1'?"),
    ("./nowhere", 1, "there is no folder {cwd}/nowhere to start from"),
    ("{home}/runs/first-1/snapshots", 1, "holds runs and is none: first-1; write"),
    ("{home}/runs/first-1/snapshots/first-1/step-4-g1", 1, "/first-1/step-4-g1 to start from"),
    ("a b", 2, "snapshots.from: is no id of a run; write ./a b for a folder"),
    ("claim://kept/first-1", 2, "snapshots.from: is a volume claim, and this machine has none"),
]


def test_what_cannot_be_started_from_is_said_before_anything_starts(start: Starter, tmp_path: Path) -> None:
    first = ended(start, tmp_path, None, 7)
    where = {"home": first.home, "cwd": tmp_path}
    for origin, code, says in REFUSED:
        wanted = job(["python", "-c", "pass"], snapshots={"from": origin.format(**where)})
        (tmp_path / "job.yaml").write_text(json.dumps(wanted))
        done = paceline(first.home, "run", "job.yaml", cwd=tmp_path)
        assert (done.returncode, says.format(**where) in done.stderr) == (code, True), done.stderr
    assert [folder.name for folder in (first.home / "runs").iterdir()] == ["first-1"]


def unreachable(server: Server) -> dict[str, str]:
    return {**server.options, "AWS_ENDPOINT_URL": "http://127.0.0.1:9"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda server: {"to": server.url, "env": unreachable(server)}, "no answer from http://127.0.0.1:9"),
        (
            lambda server: {"to": server.url, "env": {**server.options, "AWS_SECRET_ACCESS_KEY": "wrong"}},
            "credentials are not accepted",
        ),
        (lambda server: {"to": "s3://no-such-bucket/digits", "env": server.options}, "no-such-bucket"),
    ],
    ids=["unreachable", "wrong credentials", "no bucket"],
)
def test_a_bucket_that_does_not_answer_is_said_before_anything_starts(
    tmp_path: Path, s3: Server, change: Any, says: str
) -> None:
    given = change(s3)
    wanted = job(["python", "-c", "pass"], snapshots={"to": given["to"]}, env=given["env"])
    (tmp_path / "job.yaml").write_text(json.dumps(wanted))
    done = paceline(tmp_path / "home", "run", "job.yaml", cwd=tmp_path)
    assert (done.returncode, says in done.stderr) == (1, True), done.stderr
    assert not (tmp_path / "home" / "runs").exists()


SAVES = """
import os, pathlib
saves = pathlib.Path(os.environ["PACELINE_SNAPSHOT_DIR"])
(saves / "new").mkdir()
(saves / "new" / "key").write_text(pathlib.Path(os.environ["GOOGLE_APPLICATION_CREDENTIALS"]).read_text())
(saves / "new").rename(saves / "step-1")
"""


@pytest.mark.parametrize("named", ["where the command is typed", "in the job file"])
def test_a_file_of_credentials_is_found_by_agents_which_work_elsewhere(tmp_path: Path, gcs: Server, named: str) -> None:
    typed = named == "where the command is typed"
    settings, key = dict(gcs.options), {"GOOGLE_APPLICATION_CREDENTIALS": "key.json"}
    (tmp_path / "work").mkdir()
    (tmp_path / ("" if typed else "work") / "key.json").write_text(settings.pop("GOOGLE_SERVICE_ACCOUNT_KEY"))
    wanted = job(["python", "-c", SAVES], snapshots={"to": gcs.url}, env={} if typed else key)
    (tmp_path / "work" / "job.yaml").write_text(json.dumps(wanted))
    settings |= key if typed else {}
    done = paceline(tmp_path / "home", "run", "work/job.yaml", cwd=tmp_path, **settings)
    assert done.returncode == 0 and "step 1 committed: gs://" in done.stderr, done.stderr
