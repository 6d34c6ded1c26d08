"""A run in TensorBoard after three kills: one line per tag and each step once, as TensorBoard's own readers see it."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from paceline.storage.stores.bucket import BucketStore
from support import recorded
from support.pods import Pods
from support.runs import PROGRAMS, SOURCE, Starter, end_started_since, eventually, job, kill
from support.stores.servers import Store

pytestmark = pytest.mark.timeout(600)


def steps(folder: Path, tag: str) -> list[int]:
    accumulator = EventAccumulator(str(folder), size_guidance={"tensors": 0, "scalars": 0}, purge_orphaned_data=False)
    accumulator.Reload()
    tags = accumulator.Tags()
    return [event.step for event in (accumulator.Tensors(tag) if tag in tags["tensors"] else accumulator.Scalars(tag))]


@pytest.mark.parametrize(
    ("kind", "saves"), [("torch", True), pytest.param("tensorflow", False, marks=pytest.mark.long)]
)
def test_each_step_appears_once_after_three_kills(kind: str, saves: bool, start: Starter, state: Path) -> None:
    """For programs that resume from snapshots, and for one that starts over each time. An evaluator that survives
    the kills and counts on its own keeps everything that it wrote."""
    program = [sys.executable, str(PROGRAMS / "curves.py"), kind, str(state), *(["--saves"] if saves else [])]
    evaluator = {"evaluator": {"replicas": 1}} if kind == "tensorflow" else {}
    run = start(job(program, framework=kind, roles={"worker": {"replicas": 1}, **evaluator}))
    assert run.succeeds(240)["generations"] == 4, run.said()
    assert steps(run.folder / "tensorboard" / "train", "loss") == list(range(1, 61))
    assert steps(run.folder / "tensorboard" / "train", "epoch") == [1, 2, 3]
    if evaluator:
        assert steps(run.folder / "tensorboard" / "eval", "accuracy") == list(range(1000, 1021))
    leftovers = [path.name for path in run.folder.glob(".*") if not path.name.endswith((".generation", ".json"))]
    assert not [name for name in leftovers if "curves" in name]


def page(url: str, run: str = "train", tag: str = "loss") -> list[int]:
    """The steps that the page draws."""
    try:
        with urllib.request.urlopen(f"{url}data/plugin/scalars/scalars?run={run}&tag={tag}", timeout=10) as response:
            return [int(step) for _, step, _ in json.load(response)]
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError):
        return []


@pytest.mark.parametrize("reader", ["data server", pytest.param("python", marks=pytest.mark.long)])
def test_the_page_of_a_run_shows_one_line_while_tasks_are_killed(
    reader: str, start: Starter, state: Path, tmp_path: Path
) -> None:
    """TensorBoard has already read the steps that are written again: both of its readers have to drop them."""
    if reader == "python":
        package = tmp_path / "without" / "tensorboard_data_server"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("raise ImportError")
    env = {"PYTHONPATH": f"{tmp_path / 'without'}:{SOURCE}"}
    program = [sys.executable, str(PROGRAMS / "curves.py"), "torch", str(state), "--saves", "--shown"]
    run = start(job(program, framework="torch", workers=1, tensorboard=True), env=env)
    run.wait("task-started")
    url = json.loads(run.call("status", "-o", "json").stdout)["tensorboard"]
    eventually("its address is printed", lambda: f"TensorBoard: {url}\n" in run.said(), more=run.story)
    assert url in run.call("status").stdout
    eventually("the steps before the first kill", lambda: page(url) == list(range(1, 17)), 240, run.said)
    (state / "seen").touch()
    eventually("one line", lambda: page(url) == list(range(1, 61)), 240, lambda: str(page(url)))
    second_call = run.call("tensorboard")
    assert (second_call.returncode, second_call.stdout) == (0, f"{url}\n"), second_call.stderr
    (state / "finish").touch()
    assert run.succeeds()["generations"] == 4
    assert page(url) == []
    assert run.call("status", "-o", "json").stdout.count('"tensorboard": null') == 1


# Writes its generation and counts from 1, with nothing but what the agent brings.
COUNTING = """
import os, time
import paceline
from paceline.storage import tfrecord
folder = os.path.join(os.environ["PACELINE_TENSORBOARD_DIR"], os.environ["PACELINE_TASK"])
os.makedirs(folder, exist_ok=True)
generation, count = int(os.environ["PACELINE_GENERATION"]), 0
with open(f"{folder}/new", "wb", 0) as file:
    file.write(tfrecord.first(time.time()))
    file.write(tfrecord.scalars(generation, time.time(), {"generation": 1.0}))
    # Its pod may be lost as soon as something of this file is in the bucket.
    os.rename(f"{folder}/new", f"{folder}/events.out.tfevents.{int(time.time()):010}.here.{os.getpid()}.0")
    while not os.path.exists("../../finish"):
        count += 1
        file.write(tfrecord.scalars(count, time.time(), {"loss": 1.0 / count}))
        paceline.report(step=count)
        time.sleep(0.05)
"""


def test_files_of_a_run_on_a_cluster_are_kept_in_its_bucket_even_those_of_a_lost_pod(tmp_path: Path, s3: Store) -> None:
    before = set(psutil.Process().children())
    pods = Pods(tmp_path, COUNTING, env=s3.options, snapshots={"to": s3.url})
    pods.overrides = {"lease": 7.0}  # a lost pod is given up soon, and no other on a busy machine
    store, worker = BucketStore(s3.url, **s3.config), "tiny-0000-worker"
    try:
        pods.all()
        eventually("its files", lambda: store.names("tiny-0000/tensorboard/worker-host-1/"))
        lost = psutil.Process(pods.started.pop(f"{worker}-1").pid)
        for process in (lost, *lost.children(recursive=True)):
            kill(process.pid)
        (tmp_path / f"{worker}-1").rename(tmp_path / "lost")
        pods.start(worker, 1)
        new_folder = tmp_path / f"{worker}-1" / "run" / "tensorboard" / "worker-1"
        eventually("the files of both", lambda: new_folder.is_dir() and len(list(new_folder.iterdir())) > 1)
        (tmp_path / "finish").touch()
        assert set(pods.codes().values()) == {0}
        env = {**recorded.environment(tmp_path), **s3.options, "VIRTUAL_ENV": sys.prefix}
        command = recorded.paceline_command("tensorboard", f"{s3.url}/tiny-0000", "--port", "0")
        tensorboard = subprocess.Popen(command, env=env, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        assert tensorboard.stdout is not None
        url = tensorboard.stdout.readline().strip()
        loss = eventually("its page", lambda: page(url, "worker-1"))
        assert loss == list(range(1, len(loss) + 1))
        assert page(url, "worker-1", "generation") == [1, 2] and page(url, "worker-0", "generation") == [1, 2]
        tensorboard.send_signal(signal.SIGINT)
        assert tensorboard.wait(60) == 0
        tensorboard.stdout.close()
    finally:
        end_started_since(before)
