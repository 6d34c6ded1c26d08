"""`paceline snapshots` and `paceline delete --snapshots` on a bucket, as a person calls them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from paceline.storage.manifest import Id, Manifest
from paceline.storage.objects import Objects
from paceline.storage.snapshots import Snapshots
from paceline.storage.store import PIECE
from support import committed, recorded
from support.committed import NAMES, RUN
from support.stores.faults import Toxiproxy
from support.stores.servers import Store

pytestmark = pytest.mark.timeout(180)
SAVING = """
import os
from pathlib import Path

partial = Path(os.environ["PACELINE_SNAPSHOT_DIR"], "partial")
partial.mkdir()
(partial / "state").write_text("seven")
partial.rename(partial.with_name("step-7"))
"""
SOON_S = 30.0  # the patience of one request is 8 s; the rest is for a busy machine


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


@pytest.fixture
def there(s3: Store, tmp_path: Path) -> str:
    """The snapshots of a run of some other machine, beside those of another run."""
    for run in (RUN, f"{RUN}b"):
        committed.life(bucket(s3), tmp_path / run, run)
    return f"{s3.url}/{RUN}"


def bucket(store: Store) -> Objects:
    return Objects(store.url, **store.config)


def call(home: Path, store: Store, *words: str) -> subprocess.CompletedProcess[str]:
    """With the credentials in the environment, as people have them."""
    return recorded.call(home, *words, env=store.options)


def known_here(home: Path, store: Store, env: dict[str, str] | None = None) -> Path:
    folder = recorded.write(home, RUN, report=recorded.REPORT)
    roles = [{"name": "worker", "decides": True, "env": env or {}}]
    plan = json.loads((folder / "plan.json").read_text())
    (folder / "plan.json").write_text(json.dumps({**plan, "roles": roles, "snapshots": {"to": store.url}}))
    return folder


def test_all_that_can_be_done_with_snapshots_at_a_bucket(s3: Store, home: Path, there: str, tmp_path: Path) -> None:
    assert call(home, s3, "snapshots", "ls", there, "-o", "name").stdout.split() == NAMES
    shown = json.loads(call(home, s3, "snapshots", "show", there, "30", "-o", "json").stdout)
    assert (shown["place"], shown["counts"]) == (f"{there}/step-30-g1", False)
    target = tmp_path / "copy"
    assert call(home, s3, "snapshots", "get", there, "--to", str(target)).returncode == 0
    assert recorded.contents(target) == {"variables/weights": committed.weights(40), "step": b"40"}
    assert call(home, s3, "snapshots", "verify", there, "--all").returncode == 0
    bucket(s3).delete(f"{RUN}/step-40-g2/worker-0/step")
    done = call(home, s3, "snapshots", "verify", there)
    assert (done.returncode, done.stdout) == (1, f"step-40-g2: {RUN}/step-40-g2/worker-0/step is gone\n")
    refused = call(home, s3, "snapshots", "rm", there, "40", "--yes")
    assert (refused.returncode, refused.stderr) == (
        1,
        f"error: nothing at {there} says that {RUN} has ended: it may still train on another machine, and would go on "
        "from step-40-g2; --force deletes it all the same\n",
    )
    assert call(home, s3, "snapshots", "rm", there, "30", "--yes").stderr == "deleted step-30-g1\n"
    assert call(home, s3, "snapshots", "rm", there, "40", "--yes", "--force").stderr == "deleted step-40-g2\n"
    assert call(home, s3, "snapshots", "ls", there, "-o", "name").stdout.split() == NAMES[1:]


def test_what_a_real_run_commits_to_a_bucket_is_found_there(s3: Store, home: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SAVING)
    job = {"name": "digits", "framework": "none", "command": ["python", "train.py"], "snapshots": {"to": s3.url}}
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    run = recorded.paceline_command("run", str(tmp_path / "job.yaml"), "--run", RUN)
    env = {**recorded.environment(home), **s3.options}
    done = subprocess.run(run, env=env, cwd=home, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert f"  snapshots    step 7 committed: {s3.url}/{RUN}/step-7-g1\n" in done.stderr
    assert call(home, s3, "snapshots", "ls", "-o", "name").stdout == "step-7-g1\n"
    assert call(home, s3, "snapshots", "verify").returncode == 0
    assert call(home, s3, "delete", RUN, "--yes").returncode == 0
    assert call(home, s3, "snapshots", "get", f"{s3.url}/{RUN}", "--to", str(tmp_path / "copy")).returncode == 0
    assert recorded.contents(tmp_path / "copy") == {"state": b"seven"}


def test_a_run_known_here_is_read_where_its_plan_says(s3: Store, home: Path, there: str) -> None:
    known_here(home, s3)
    assert call(home, s3, "snapshots", "ls", RUN, "-o", "name").stdout.split() == NAMES


def test_what_the_job_says_of_its_bucket_is_used_as_its_agents_do(s3: Store, home: Path, there: str) -> None:
    known_here(home, s3, s3.options)
    assert recorded.call(home, "snapshots", "ls", RUN, "-o", "name").stdout.split() == NAMES


def test_a_run_on_a_cluster_is_read_at_its_bucket(s3: Store, home: Path, there: str) -> None:
    folder = known_here(home, s3)
    (folder / "run.json").write_text(json.dumps({**json.loads((folder / "run.json").read_text()), "on": "kubernetes"}))
    assert call(home, s3, "snapshots", "ls", RUN, "-o", "name").stdout.split() == NAMES


def test_delete_leaves_a_bucket_alone_unless_asked_to(s3: Store, home: Path, there: str) -> None:
    known_here(home, s3)
    before = bucket(s3).names("")
    done = call(home, s3, "delete", RUN, "--yes")
    assert (done.returncode, done.stderr) == (
        0,
        f"deleted {RUN}; its snapshots stay at {there}: `paceline delete --snapshots {there}` deletes them\n",
    )
    assert bucket(s3).names("") == before
    assert call(home, s3, "delete", "--snapshots", there, "--yes").returncode == 1
    assert bucket(s3).names("") == before
    done = call(home, s3, "delete", "--snapshots", there, "--yes", "--force")
    assert (done.returncode, done.stderr) == (0, f"deleted the snapshots of {RUN} at {there}\n")
    assert bucket(s3).names("") == [name for name in before if name.startswith(f"{RUN}b/")]


def test_a_run_is_deleted_with_its_snapshots_at_a_bucket(s3: Store, home: Path, there: str) -> None:
    folder = known_here(home, s3)
    refused = call(home, s3.stranger(), "delete", "--snapshots", RUN, "--yes")
    assert refused.returncode == 1 and refused.stderr.endswith(f"error: {RUN} is left as it is\n")
    assert folder.exists()
    done = call(home, s3, "delete", "--snapshots", RUN, "--yes")
    assert (done.returncode, done.stderr) == (0, f"deleted the snapshots of {RUN} at {there}\ndeleted {RUN}\n")
    assert not folder.exists()
    assert {name.split("/")[0] for name in bucket(s3).names("")} == {f"{RUN}b"}


VERBS = (["ls"], ["show"], ["get", "--to", "copy"], ["verify"], ["rm", "10", "--yes"])
TROUBLE = [(kind, words) for words in VERBS for kind in ("credentials", "bucket", "away")]


@pytest.mark.parametrize(("trouble", "words"), TROUBLE, ids=str)
def test_what_is_wrong_with_a_bucket_is_one_line_and_soon(
    s3: Store, home: Path, toxiproxy: Toxiproxy, trouble: str, words: list[str]
) -> None:
    link = toxiproxy.link(s3.port)
    given, message = {
        "credentials": (s3.stranger(), "the credentials are not accepted"),
        "bucket": (s3.bucket("nowhere-to-be-found"), "there is no such bucket"),
        "away": (s3.through(link), f"no answer from {link.endpoint}"),
    }[trouble]
    verb, *more = words
    began = time.monotonic()
    with link.down():
        done = call(home, given, "snapshots", verb, f"{given.url}/{RUN}", *more)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, "", 1), done.stderr
    assert done.stderr.startswith("error: cannot list ") and message in done.stderr
    assert time.monotonic() - began < SOON_S
    assert not (home / "copy").exists()


def test_a_server_that_never_answers_is_given_up_soon(s3: Store, home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        env = {**s3.options, "AWS_ENDPOINT_URL": endpoint}
        began = time.monotonic()
        done = recorded.call(home, "snapshots", "ls", f"{s3.url}/{RUN}", env=env)
        assert time.monotonic() - began < SOON_S
    assert (done.returncode, done.stderr) == (1, f"error: cannot list {s3.url}/{RUN}/: no answer from {endpoint}\n")


def test_a_slow_line_is_no_failure_and_ctrl_c_does_not_wait_for_it(
    s3: Store, home: Path, there: str, toxiproxy: Toxiproxy, tmp_path: Path
) -> None:
    (tmp_path / "big").mkdir()
    (tmp_path / "big" / "weights").write_bytes(os.urandom(PIECE))
    snapshots = Snapshots(bucket(s3), RUN)
    id = Id(50, 2)
    assert snapshots.commit(Manifest(RUN, id, 1, (snapshots.send(id, "worker-0", str(tmp_path / "big")),)))
    link = toxiproxy.link(s3.port)
    words = recorded.paceline_command("snapshots", "get", there, "--to", str(tmp_path / "new" / "copy"))
    env = {**recorded.environment(home), **s3.through(link).options}
    with link.bandwidth(800_000):  # longer than the patience for an answer
        begun = subprocess.Popen(words, env=env, stderr=subprocess.PIPE, text=True)
        while not list(tmp_path.glob("new/.copy.*.partial/weights")):
            assert begun.poll() is None
            time.sleep(0.02)
        begun.send_signal(signal.SIGINT)
        began = time.monotonic()
        assert begun.communicate(timeout=60)[1] == "" and begun.returncode == 130
        assert time.monotonic() - began < 5 and not (tmp_path / "new").exists()
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert recorded.contents(tmp_path / "new" / "copy") == recorded.contents(tmp_path / "big")


def test_settings_that_are_missing_are_one_line(home: Path) -> None:
    done = recorded.call(home, "snapshots", "ls", f"az://container/{RUN}", env={"AZURE_STORAGE_ACCOUNT_NAME": ""})
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, "", 1), done.stderr
