"""`paceline snapshots` and `paceline delete --snapshots` on a bucket, as a user calls them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from paceline.storage.snapshots.manifest import Manifest, SnapshotId
from paceline.storage.snapshots.repository import SnapshotRepository
from paceline.storage.stores.bucket import BucketStore
from paceline.storage.stores.protocol import PIECE
from support import committed, recorded
from support.committed import NAMES, RUN
from support.stores.faults import Toxiproxy
from support.stores.servers import Store

pytestmark = pytest.mark.timeout(400)
SAVING = """
import os
from pathlib import Path

partial = Path(os.environ["PACELINE_SNAPSHOT_DIR"], "partial")
partial.mkdir()
(partial / "state").write_text("seven")
partial.rename(partial.with_name("step-7"))
"""
SOON_S = 50.0  # the patience of one request is 8 s; the rest is for a busy machine


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


@pytest.fixture
def location(s3: Store, tmp_path: Path) -> str:
    """The location of the snapshots of a run on another machine, next to those of another run."""
    for run in (RUN, f"{RUN}b"):
        committed.life(bucket(s3), tmp_path / run, run)
    return f"{s3.url}/{RUN}"


def bucket(store: Store) -> BucketStore:
    return BucketStore(store.url, **store.config)


def call(home: Path, store: Store, *arguments: str) -> subprocess.CompletedProcess[str]:
    """With the credentials in the environment, as users have them."""
    return recorded.call(home, *arguments, env=store.options)


def write_run(home: Path, store: Store, env: dict[str, str] | None = None) -> Path:
    folder = recorded.write(home, RUN, report=recorded.REPORT)
    roles = [{"name": "worker", "decides": True, "env": env or {}}]
    plan = json.loads((folder / "plan.json").read_text())
    (folder / "plan.json").write_text(json.dumps({**plan, "roles": roles, "snapshots": {"to": store.url}}))
    return folder


def test_all_snapshot_verbs_work_with_a_bucket(s3: Store, home: Path, location: str, tmp_path: Path) -> None:
    assert call(home, s3, "snapshots", "ls", location, "-o", "name").stdout.split() == NAMES
    snapshot = json.loads(call(home, s3, "snapshots", "show", location, "30", "-o", "json").stdout)
    assert (snapshot["place"], snapshot["counts"]) == (f"{location}/step-30-g1", False)
    target = tmp_path / "copy"
    assert call(home, s3, "snapshots", "get", location, "--to", str(target)).returncode == 0
    assert recorded.contents(target) == {"variables/weights": committed.weights(40), "step": b"40"}
    assert call(home, s3, "snapshots", "verify", location, "--all").returncode == 0
    bucket(s3).delete(f"{RUN}/step-40-g2/worker-0/step")
    result = call(home, s3, "snapshots", "verify", location)
    assert (result.returncode, result.stdout) == (1, f"step-40-g2: {RUN}/step-40-g2/worker-0/step is missing\n")
    refused = call(home, s3, "snapshots", "rm", location, "40", "--yes")
    assert (refused.returncode, refused.stderr) == (
        1,
        f"error: nothing at {location} reports the end of {RUN}: it may still be training on another machine, "
        "and would resume from step-40-g2; --force deletes it anyway\n",
    )
    assert call(home, s3, "snapshots", "rm", location, "30", "--yes").stderr == "deleted step-30-g1\n"
    assert call(home, s3, "snapshots", "rm", location, "40", "--yes", "--force").stderr == "deleted step-40-g2\n"
    assert call(home, s3, "snapshots", "ls", location, "-o", "name").stdout.split() == NAMES[1:]


def test_snapshots_that_a_real_run_commits_to_a_bucket_are_found_there(s3: Store, home: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SAVING)
    job = {"name": "digits", "framework": "none", "command": ["python", "train.py"], "snapshots": {"to": s3.url}}
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    run = recorded.paceline_command("run", str(tmp_path / "job.yaml"), "--run", RUN)
    env = {**recorded.environment(home), **s3.options}
    result = subprocess.run(run, env=env, cwd=home, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert f"  snapshots    step 7 committed: {s3.url}/{RUN}/step-7-g1\n" in result.stderr
    assert call(home, s3, "snapshots", "ls", "-o", "name").stdout == "step-7-g1\n"
    assert call(home, s3, "snapshots", "verify").returncode == 0
    assert call(home, s3, "delete", RUN, "--yes").returncode == 0
    assert call(home, s3, "snapshots", "get", f"{s3.url}/{RUN}", "--to", str(tmp_path / "copy")).returncode == 0
    assert recorded.contents(tmp_path / "copy") == {"state": b"seven"}


def test_snapshots_of_a_local_run_are_read_at_the_location_in_its_plan(s3: Store, home: Path, location: str) -> None:
    write_run(home, s3)
    assert call(home, s3, "snapshots", "ls", RUN, "-o", "name").stdout.split() == NAMES


def test_the_environment_of_the_job_is_used_to_reach_its_bucket(s3: Store, home: Path, location: str) -> None:
    write_run(home, s3, s3.options)
    assert recorded.call(home, "snapshots", "ls", RUN, "-o", "name").stdout.split() == NAMES


def test_a_run_on_a_cluster_is_read_at_its_bucket(s3: Store, home: Path, location: str) -> None:
    folder = write_run(home, s3)
    (folder / "run.json").write_text(json.dumps({**json.loads((folder / "run.json").read_text()), "on": "kubernetes"}))
    assert call(home, s3, "snapshots", "ls", RUN, "-o", "name").stdout.split() == NAMES


def test_delete_leaves_a_bucket_alone_unless_asked_to(s3: Store, home: Path, location: str) -> None:
    write_run(home, s3)
    before = bucket(s3).names("")
    result = call(home, s3, "delete", RUN, "--yes")
    assert (result.returncode, result.stderr) == (
        0,
        f"deleted {RUN}; its snapshots are kept at {location}: `paceline delete --snapshots {location}` deletes them\n",
    )
    assert bucket(s3).names("") == before
    assert call(home, s3, "delete", "--snapshots", location, "--yes").returncode == 1
    assert bucket(s3).names("") == before
    result = call(home, s3, "delete", "--snapshots", location, "--yes", "--force")
    assert (result.returncode, result.stderr) == (0, f"deleted the snapshots of {RUN} at {location}\n")
    assert bucket(s3).names("") == [name for name in before if name.startswith(f"{RUN}b/")]


def test_a_run_is_deleted_with_its_snapshots_at_a_bucket(s3: Store, home: Path, location: str) -> None:
    folder = write_run(home, s3)
    refused = call(home, s3.stranger(), "delete", "--snapshots", RUN, "--yes")
    assert refused.returncode == 1 and refused.stderr.startswith(f"error: {RUN} was not deleted: ")
    assert folder.exists()
    result = call(home, s3, "delete", "--snapshots", RUN, "--yes")
    assert (result.returncode, result.stderr) == (0, f"deleted the snapshots of {RUN} at {location}\ndeleted {RUN}\n")
    assert not folder.exists()
    assert {name.split("/")[0] for name in bucket(s3).names("")} == {f"{RUN}b"}


VERBS = (["ls"], ["show"], ["get", "--to", "copy"], ["verify"], ["rm", "10", "--yes"])
TROUBLE = [(kind, arguments) for arguments in VERBS for kind in ("credentials", "bucket", "away")]


@pytest.mark.parametrize(("trouble", "arguments"), TROUBLE, ids=str)
def test_errors_of_a_bucket_are_reported_soon_in_one_line(
    s3: Store, home: Path, toxiproxy: Toxiproxy, trouble: str, arguments: list[str]
) -> None:
    link = toxiproxy.link(s3.port)
    server, message = {
        "credentials": (s3.stranger(), "the credentials are not accepted"),
        "bucket": (s3.bucket("nowhere-to-be-found"), "the bucket does not exist"),
        "away": (s3.through(link), f"no response from {link.endpoint}"),
    }[trouble]
    verb, *options = arguments
    began = time.monotonic()
    with link.down():
        result = call(home, server, "snapshots", verb, f"{server.url}/{RUN}", *options)
    assert (result.returncode, result.stdout, len(result.stderr.splitlines())) == (1, "", 1), result.stderr
    assert result.stderr.startswith("error: cannot list ") and message in result.stderr
    assert time.monotonic() - began < SOON_S
    assert not (home / "copy").exists()


def test_a_server_that_never_answers_is_reported_soon(s3: Store, home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        env = {**s3.options, "AWS_ENDPOINT_URL": endpoint}
        began = time.monotonic()
        result = recorded.call(home, "snapshots", "ls", f"{s3.url}/{RUN}", env=env)
        assert time.monotonic() - began < SOON_S
    message = f"error: cannot list {s3.url}/{RUN}/: no response from {endpoint}\n"
    assert (result.returncode, result.stderr) == (1, message)


def test_a_slow_link_is_no_failure_and_ctrl_c_does_not_wait_for_it(
    s3: Store, home: Path, location: str, toxiproxy: Toxiproxy, tmp_path: Path
) -> None:
    (tmp_path / "big").mkdir()
    (tmp_path / "big" / "weights").write_bytes(os.urandom(PIECE))
    snapshots = SnapshotRepository(bucket(s3), RUN)
    id = SnapshotId(50, 2)
    assert snapshots.commit(Manifest(RUN, id, 1, (snapshots.send(id, "worker-0", str(tmp_path / "big")),)))
    link = toxiproxy.link(s3.port)
    command = recorded.paceline_command("snapshots", "get", location, "--to", str(tmp_path / "new" / "copy"))
    env = {**recorded.environment(home), **s3.through(link).options}
    with link.bandwidth(80_000):  # it takes minutes
        process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
        while not list(tmp_path.glob("new/.copy.*.partial/weights")):
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        assert process.communicate(timeout=120)[1] == "" and process.returncode == 130
        assert time.monotonic() - began < SOON_S and not (tmp_path / "new").exists()
    with link.bandwidth(800_000):  # it takes longer than the limit for a response
        result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert recorded.contents(tmp_path / "new" / "copy") == recorded.contents(tmp_path / "big")


def test_missing_settings_are_reported_in_one_line(home: Path) -> None:
    result = recorded.call(home, "snapshots", "ls", f"az://container/{RUN}", env={"AZURE_STORAGE_ACCOUNT_NAME": ""})
    assert (result.returncode, result.stdout, len(result.stderr.splitlines())) == (1, "", 1), result.stderr
