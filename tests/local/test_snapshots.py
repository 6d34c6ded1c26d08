"""Snapshots of real runs, in a folder and in a bucket: what is committed is never lost, and training does not wait."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.storage.manifest import VERSION, Damaged, Id
from support import runs
from support.runs import (
    Run,
    Starter,
    alive,
    causes,
    eventually,
    fill,
    fill_names,
    job,
    kill,
    misbehave,
    small_disk,
)
from support.saving import Place, a_job, bucket, commit, do, done, finish, folder, restores, starts, warnings
from support.stores.faults import Toxiproxy
from support.stores.refusing import Fault, proxy
from support.stores.servers import Store as Server

pytestmark = pytest.mark.timeout(180)

MB = 1_000_000
AT_ONCE_S = 30.0  # for a run that cannot begin to say so: one request has 8 s, and a transfer a minute
OF_HOSTS = ("staging", "held", "restored", "committed")  # what is there only while the run is


@pytest.fixture(params=["folder", "s3", "gcs", "azure"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return folder(tmp_path / "place") if request.param == "folder" else bucket(request.getfixturevalue(request.param))


def committed_steps(run: Run) -> list[int]:
    return [event["step"] for event in run.events("committed")]


def recovered(run: Run, restore: str | None, generation: int = 2) -> None:
    formed = run.wait("generation-formed", generation=generation)
    assert formed["restore"] == restore, run.story()
    step = 0 if restore is None else int(restore.split("-")[1])
    for task in ("worker-0", "worker-1"):
        words = f" g{generation} | start "
        eventually(f"{task} goes on", lambda task=task, words=words: words in run.log(task), more=run.story)  # type: ignore[misc]
        assert starts(run, task)[-1] == step


def whole(run: Run, place: Place, tmp_path: Path) -> None:
    """Every snapshot that counts verifies."""
    snapshots = place.of(run)
    for id in snapshots.known().counted():
        snapshots.fetch(snapshots.manifest(id), str(tmp_path / "verified" / str(id)))


# ---- from saved to restored


def test_a_run_goes_on_from_the_newest(start: Starter, state: Path, place: Place, tmp_path: Path) -> None:
    run = start(a_job(state, place), env=place.env)
    commit(run, state, 10, 20)
    kill(run.task("worker-1"))
    recovered(run, "step-20-g1")
    commit(run, state, 30)
    finish(run, state)
    assert place.counted(run) == ["step-30-g2", "step-20-g1", "step-10-g1"]
    whole(run, place, tmp_path)


def test_a_program_that_imports_nothing_of_ours_goes_on_too(start: Starter, state: Path) -> None:
    fault = ["--fail-at", 15, "--fail-rank", 0, "--fail-once", state / "failed", "--fail-when", state / "fail"]
    run = start(job(misbehave("--resume", "--report", "--steps", 30, *fault, "--fail-how", "SIGKILL")))
    run.wait("committed")
    (state / "fail").touch()
    run.succeeds()
    restored = restores(run)[1]
    assert restored is not None and f"start {restored.split('-')[1]}\n" in run.log("worker-1")
    assert committed_steps(run)[-1] == 30


def test_without_a_place_they_go_to_the_run_s_own_folder(start: Starter, state: Path) -> None:
    run = start(a_job(state, None))
    commit(run, state, 10)
    finish(run, state)
    assert folder(run.folder / "snapshots").counted(run) == ["step-10-g1"]


@pytest.mark.parametrize("name", ["mit Leerzeichen und Ümläuten ω 100%", "a 'quoted' \"name\" $HOME;"])
def test_the_path_of_a_folder_may_be_any(start: Starter, state: Path, tmp_path: Path, name: str) -> None:
    place = folder(tmp_path / name / "Schnappschüsse")
    run = start(a_job(state, place))
    commit(run, state, 10)
    kill(run.task("worker-0"))
    recovered(run, "step-10-g1")
    finish(run, state)
    assert place.counted(run) == ["step-10-g1"]


def test_a_part_of_each_task_is_one_snapshot(start: Starter, state: Path, place: Place, tmp_path: Path) -> None:
    run = start(a_job(state, place, "--parts", 2), env=place.env)
    commit(run, state, 10)
    kill(run.task("worker-1"))
    recovered(run, "step-10-g1")
    finish(run, state)
    parts = place.of(run).manifest(Id(10, 1)).parts
    assert {part.task: sorted(file.path for file in part.files) for part in parts} == {
        f"worker-{rank}": ["paceline.json", f"sum-{rank}", f"weights-{rank}"] for rank in (0, 1)
    }
    whole(run, place, tmp_path)


def test_the_newest_and_the_best_are_kept(start: Starter, state: Path, place: Place) -> None:
    kept = {"keep": 2, "best": {"metric": "loss"}}
    run = start(a_job(state, place, "--losses", 0.5, 0.1, 0.4, 0.3, 0.2, snapshots=kept), env=place.env)
    commit(run, state, 10, 20, 30, 40, 50)
    finish(run, state)
    assert place.counted(run) == ["step-50-g1", "step-40-g1", "step-20-g1"]
    eventually("the others are gone", lambda: place.of(run).known().committed == {Id(50, 1), Id(40, 1), Id(20, 1)})


def test_an_evaluator_gets_a_snapshot_that_it_could_not_have_at_first(
    start: Starter, state: Path, s3: Server, toxiproxy: Toxiproxy
) -> None:
    link, place = toxiproxy.link(s3.port), bucket(s3)
    worker, evaluator = {"replicas": 1}, {"replicas": 1, "env": {"AWS_ENDPOINT_URL": link.endpoint}}
    run = start(a_job(state, place, roles={"worker": worker, "evaluator": evaluator}), env=place.env)
    commit(run, state, 10)
    eventually("it has seen the first", lambda: "seen 10" in run.log("evaluator-0"), more=run.story)
    with link.down():
        commit(run, state, 20)
        warning = run.wait("warning")["text"]
    assert "did not get step 20" in warning
    eventually("it has seen the second", lambda: "seen 20" in run.log("evaluator-0"), more=run.story)
    (state / "last").write_text("20")
    finish(run, state)


def test_an_evaluator_has_the_last_snapshot_before_the_run_ends(start: Starter, state: Path, place: Place) -> None:
    roles = {"worker": {"replicas": 1}, "evaluator": {"replicas": 1}}
    run = start(a_job(state, place, roles=roles), env=place.env)
    commit(run, state, 10)
    eventually("it has seen the first", lambda: "seen 10" in run.log("evaluator-0"), more=run.story)
    do(state, 20)
    (state / "last").write_text("20")
    finish(run, state)
    assert run.log("evaluator-0").splitlines()[-1].endswith("seen 20")
    assert committed_steps(run) == [10, 20]


def test_nothing_is_left_in_the_run_s_folder(start: Starter, state: Path, place: Place) -> None:
    run = start(a_job(state, place), env=place.env)
    commit(run, state, 10)
    kill(run.task("worker-1"))
    recovered(run, "step-10-g1")
    commit(run, state, 20)
    finish(run, state)  # and no process is left
    assert not [name for name in OF_HOSTS if (run.folder / name).exists()]
    assert not [path for path in run.folder.rglob("*") if path.name.endswith((".partial", ".gone"))]


# ---- killed at moments of a save

Kill = Callable[[Run], None]
VICTIMS: dict[str, Kill] = {
    "task": lambda run: kill(run.task("worker-0")),
    "agent": lambda run: kill(run.agent("worker-host-0")),
    "host": lambda run: kill(run.keeper("worker-host-0")),
    "captain": lambda run: kill(run.agent("captain")),
    "captain's host": lambda run: kill(run.keeper("captain")),
}
VICTIM = pytest.mark.parametrize("victim", VICTIMS)


def gone(run: Run, victim: str, after: int) -> None:
    """The captain knows of it."""
    if "captain" in victim:
        assert run.wait("captain-returned", after=after)["adopted"] is True
    else:
        run.wait("restart", after=after)


@VICTIM
def test_killed_while_the_task_writes(start: Starter, state: Path, tmp_path: Path, victim: str) -> None:
    place = folder(tmp_path / "place")
    run = start(a_job(state, place, "--stop-in", 20))
    commit(run, state, 10)
    do(state, 20)
    eventually("half of it is written", (state / "half").exists, more=run.story)
    after = run.position()
    VICTIMS[victim](run)
    gone(run, victim, after)
    if "captain" in victim:
        kill(run.task("worker-0"))
    recovered(run, "step-10-g1")
    run.wait("committed", step=20)  # by the next generation, as it was told to do that step
    finish(run, state)
    assert place.counted(run) == ["step-20-g2", "step-10-g1"]
    whole(run, place, tmp_path)


@VICTIM
def test_killed_while_it_is_sent(
    start: Starter, state: Path, s3: Server, toxiproxy: Toxiproxy, tmp_path: Path, victim: str
) -> None:
    """It is saved, so it is not lost: it is committed once the way is free, and that is what training goes on from."""
    link = toxiproxy.link(s3.port)
    place = bucket(s3, s3.through(link))
    run = start(a_job(state, place, "--size", MB), env=place.env)
    commit(run, state, 10)
    with link.bandwidth(10_000, "upstream"):
        do(state, 20)
        run.wait("saved", step=20)
        after = run.position()
        VICTIMS[victim](run)
        gone(run, victim, after)
        assert committed_steps(run) == [10]
    run.wait("committed", step=20)
    if "captain" not in victim:
        recovered(run, "step-20-g1")
    commit(run, state, 30)
    report = finish(run, state)
    assert committed_steps(run) == [10, 20, 30]
    assert len(report["restarts"]) == ("captain" not in victim)
    whole(run, place, tmp_path)


@VICTIM
@pytest.mark.parametrize("place", ["folder", "s3"], indirect=True)
def test_killed_as_soon_as_it_is_committed(
    start: Starter, state: Path, place: Place, tmp_path: Path, victim: str
) -> None:
    run = start(a_job(state, place), env=place.env)
    commit(run, state, 10, 20)
    after = run.position()
    VICTIMS[victim](run)
    gone(run, victim, after)
    if "captain" not in victim:
        recovered(run, "step-20-g1")
    commit(run, state, 30)
    finish(run, state)
    assert committed_steps(run) == [10, 20, 30]
    assert place.counted(run)[1:] == ["step-20-g1", "step-10-g1"]
    whole(run, place, tmp_path)


@pytest.mark.parametrize("place", ["folder", "s3"], indirect=True)
def test_everything_at_once(start: Starter, state: Path, place: Place) -> None:
    """Captain and all hosts, while a snapshot is on its way or not."""
    run = start(a_job(state, place), env=place.env)
    commit(run, state, 10)
    do(state, 20)
    run.wait("saved", step=20)
    keepers = [run.keeper(host) for host in ("captain", "worker-host-0", "worker-host-1")]
    for keeper in keepers:
        kill(keeper)
    recovered(run, "step-20-g1")
    finish(run, state)


# ---- damage at the place


def spoil_file(place: Place, name: str, tmp_path: Path) -> str:
    (tmp_path / "other").write_bytes(b"other")
    place.store.send_all([(str(tmp_path / "other"), f"{name}/worker-0/weights-0")], lambda _: True, {})
    return f"{name}/worker-0/weights-0 is damaged: it has 5 bytes instead of 1000"


def remove_file(place: Place, name: str, tmp_path: Path) -> str:
    place.store.delete(f"{name}/worker-0/sum-0")
    return f"{name}/worker-0/sum-0 is gone"


def spoil_manifest(place: Place, name: str, tmp_path: Path) -> str:
    (tmp_path / "other").write_bytes(b"{")
    place.store.send_all([(str(tmp_path / "other"), f"{name}/manifest.json")], lambda _: True, {})
    return f"{name}/manifest.json is damaged: it is no JSON with a version"


def write_by_a_later_version(place: Place, name: str, tmp_path: Path) -> str:
    data = json.loads(place.store.read(f"{name}/manifest.json", MB) or b"")
    (tmp_path / "other").write_text(json.dumps({**data, "version": VERSION + 1}))
    place.store.send_all([(str(tmp_path / "other"), f"{name}/manifest.json")], lambda _: True, {})
    return f"{name}/manifest.json has version {VERSION + 1}, and this Paceline knows version {VERSION}"


@pytest.mark.parametrize("spoil", [spoil_file, remove_file, spoil_manifest, write_by_a_later_version])
def test_a_damaged_one_is_passed_over_by_all_hosts(
    start: Starter, state: Path, tmp_path: Path, spoil: Callable[[Place, str, Path], str]
) -> None:
    place = folder(tmp_path / "place")
    run = start(a_job(state, place))
    commit(run, state, 10, 20)
    what = spoil(place, f"{run.folder.name}/step-20-g1", tmp_path)
    kill(run.task("worker-1"))
    recovered(run, "step-10-g1")
    assert warnings(run) == [f"the snapshot of step 20 is passed over: {what}"]
    run.wait("committed", step=20, generation=2)  # once more
    finish(run, state)
    assert place.counted(run) == ["step-20-g2", "step-10-g1"]


def test_a_bucket_s_damage_is_passed_over_too(start: Starter, state: Path, s3: Server, tmp_path: Path) -> None:
    place = bucket(s3)
    run = start(a_job(state, place), env=place.env)
    commit(run, state, 10, 20)
    what = spoil_manifest(place, f"{run.folder.name}/step-20-g1", tmp_path)
    kill(run.task("worker-1"))
    recovered(run, "step-10-g1")
    assert warnings(run) == [f"the snapshot of step 20 is passed over: {what}"]
    finish(run, state)


def test_a_file_that_hosts_still_have_as_it_was_need_not_come_from_the_bucket(
    start: Starter, state: Path, s3: Server, tmp_path: Path
) -> None:
    place = bucket(s3)
    run = start(a_job(state, place), env=place.env)
    commit(run, state, 10, 20)
    remove_file(place, f"{run.folder.name}/step-20-g1", tmp_path)
    kill(run.task("worker-1"))
    recovered(run, "step-20-g1")
    assert warnings(run) == []
    finish(run, state)
    snapshots = place.of(run)
    with pytest.raises(Damaged):
        snapshots.fetch(snapshots.manifest(Id(20, 1)), str(tmp_path / "verified"))


# ---- a place that cannot be used from the start

# As on a cluster, where the command line has not what pods have to reach the store with, and the captain finds out.
UNCHECKED = [
    sys.executable,
    "-c",
    "from paceline.view import origin; origin.check = origin.taken = lambda *_: ''; "
    "from paceline.cli import main; main()",
]


def never_begins(run: Run, began: float, *said: str) -> None:
    report = run.fails(60)
    assert time.monotonic() - began < AT_ONCE_S
    assert report["cause"] == "store" and not run.events("task-started")
    for words in said:
        assert words in report["reason"], report["reason"]


def test_a_bucket_that_is_not_there(start: Starter, state: Path, s3: Server) -> None:
    place = bucket(s3.bucket("nowhere-to-be-found"))
    began = time.monotonic()
    never_begins(
        start(a_job(state, place), env=place.env, command=UNCHECKED),
        began,
        "s3://nowhere-to-be-found",
        "no such bucket",
    )


def test_credentials_that_are_wrong(start: Starter, state: Path, s3: Server) -> None:
    place = bucket(s3, s3.stranger())
    began = time.monotonic()
    never_begins(
        start(a_job(state, place), env=place.env, command=UNCHECKED), began, s3.url, "the credentials are not accepted"
    )


@pytest.mark.parametrize("how", ["down", "silence"])
def test_a_store_that_does_not_answer(start: Starter, state: Path, s3: Server, toxiproxy: Toxiproxy, how: str) -> None:
    link = toxiproxy.link(s3.port)
    place = bucket(s3, s3.through(link))
    began = time.monotonic()
    with link.down() if how == "down" else link.silence():
        never_begins(start(a_job(state, place), env=place.env, command=UNCHECKED), began, f"cannot read {s3.url}")


def test_a_bucket_to_start_from_that_does_not_answer(
    start: Starter, state: Path, s3: Server, toxiproxy: Toxiproxy, tmp_path: Path
) -> None:
    link = toxiproxy.link(s3.port)
    place = bucket(s3, s3.through(link))
    wanted = a_job(state, folder(tmp_path / "own"))
    wanted["snapshots"]["from"] = f"{s3.url}/other-run"
    began = time.monotonic()
    with link.down():
        never_begins(start(wanted, env=place.env, command=UNCHECKED), began, f"cannot list {s3.url}")


def test_a_bucket_that_may_only_be_read(start: Starter, state: Path, s3: Server) -> None:
    """What the command line asks of it, it may: the captain finds out, before any task."""
    place = bucket(s3, s3.reader())
    began = time.monotonic()
    never_begins(
        start(a_job(state, place), env=place.env), began, f"cannot write {s3.url}", "lack the right to write there"
    )


@pytest.mark.long  # needs root, to mount a disk
def test_a_folder_that_is_read_only(start: Starter, state: Path, tmp_path: Path) -> None:
    path = tmp_path / "read-only"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro,size=1m", "tmpfs", str(path)], check=True)
    try:
        began = time.monotonic()
        never_begins(start(a_job(state, folder(path))), began, f"cannot write {path}", "Read-only file system")
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_folder_that_is_a_file(start: Starter, state: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    began = time.monotonic()
    run = start(a_job(state, folder(tmp_path / "file")), command=UNCHECKED)
    never_begins(run, began, f"{tmp_path / 'file'}", "Not a directory")


# ---- a place that fails later


def not_yet(step: int) -> str:
    return f"the snapshot of step {step} is not committed yet"


def test_a_store_that_is_away_for_a_while(
    start: Starter, state: Path, s3: Server, toxiproxy: Toxiproxy, tmp_path: Path
) -> None:
    link = toxiproxy.link(s3.port)
    place = bucket(s3, s3.through(link))
    run = start(a_job(state, place), env=place.env)
    commit(run, state, 10)
    with link.down():
        do(state, 20)
        warning = run.wait("warning")["text"]
        assert warning.startswith(f"{not_yet(20)}: cannot write {s3.url}")
        tasks = run.tasks()
        do(state, 30)
        done(run, state, 30, rank=1)
        run.wait("saved", step=30)  # else the one of step 20 might be sent first
        assert all(map(alive, tasks.values()))
    run.wait("committed", step=30)
    finish(run, state)
    # One that is tried before the way is free again is not committed yet, either.
    said = [text.partition(": ")[0] for text in warnings(run)]
    assert said in ([not_yet(20)], [not_yet(20), not_yet(30)])
    assert committed_steps(run) == [10, 30]
    whole(run, place, tmp_path)


def test_a_store_that_refuses_for_a_while(start: Starter, state: Path, s3: Server, tmp_path: Path) -> None:
    with proxy(s3.port) as way:
        place = bucket(s3, s3.through(way))
        run = start(a_job(state, place), env=place.env)
        commit(run, state, 10)
        with way.wrong(lambda asked: Fault(403, reaches="no") if asked.method == "PUT" else None):
            do(state, 20)
            warning = run.wait("warning")["text"]
            assert warning.startswith(f"the snapshot of step 20 is not committed yet: cannot write {s3.url}")
            assert "lack the right to write there: grant it, or use others" in warning
        do(state, 30)
        run.wait("committed", step=30)
        finish(run, state)
        whole(run, place, tmp_path)


def test_a_generation_waits_for_a_store_that_is_away(
    start: Starter, state: Path, s3: Server, toxiproxy: Toxiproxy
) -> None:
    link = toxiproxy.link(s3.port)
    place = bucket(s3, s3.through(link))
    run = start(a_job(state, place), env=place.env)
    commit(run, state, 10)
    with link.down():
        kill(run.task("worker-1"))
        assert run.wait("warning")["text"].startswith("generation 2 waits for its snapshot: cannot read s3://")
        assert len(run.events("generation-formed")) == 1
    recovered(run, "step-10-g1")
    finish(run, state)


def test_over_a_slow_way_the_newest_goes_and_training_does_not_wait(
    start: Starter, state: Path, s3: Server, toxiproxy: Toxiproxy
) -> None:
    link = toxiproxy.link(s3.port)
    place = bucket(s3, s3.through(link))
    run = start(a_job(state, place, "--size", MB), env=place.env)
    with link.bandwidth(10_000, "upstream"):
        for step in (10, 20, 30, 40, 50):
            do(state, step)
            run.wait("saved", step=step)
        assert committed_steps(run) == []
    run.wait("committed", step=50)
    finish(run, state)
    assert committed_steps(run) == [10, 50]
    notes = json.loads((run.folder / "captain.json").read_text())
    assert notes["captain"]["skipped"] == 3


def test_the_last_snapshot_is_committed_after_the_program_has_ended(
    start: Starter, state: Path, s3: Server, toxiproxy: Toxiproxy, tmp_path: Path
) -> None:
    link = toxiproxy.link(s3.port)
    place = bucket(s3, s3.through(link))
    run = start(a_job(state, place, "--size", MB), env=place.env)
    with link.bandwidth(10_000, "upstream"):
        do(state, 10)
        (state / "finish").touch()
        for task in ("worker-0", "worker-1"):
            run.wait("task-exited", task=task, code=0)
        assert run.cli.poll() is None and not run.events("committed")
    run.succeeds()
    assert place.counted(run) == ["step-10-g1"]
    whole(run, place, tmp_path)


def test_a_last_snapshot_that_cannot_be_committed_fails_the_run_and_stays_on_its_host(
    start: Starter, state: Path, s3: Server, toxiproxy: Toxiproxy
) -> None:
    link = toxiproxy.link(s3.port)
    place = bucket(s3, s3.through(link))
    run = start(a_job(state, place, limits={"commit": "5s"}), env=place.env)
    commit(run, state, 10)
    with link.down():
        do(state, 20)
        (state / "finish").touch()
        report = run.fails()
    assert report["cause"] == "store"
    words = "training succeeded, but the last snapshot (step 20) is not committed and is on worker-host-0 only: cannot"
    assert report["reason"].startswith(words)
    kept = run.folder / "held" / "worker-0" / "step-20-g1"
    assert sorted(path.name for path in kept.iterdir()) == ["paceline.json", "sum-0", "weights-0"]


def test_a_run_that_is_stopped_commits_its_last_snapshot(
    start: Starter, state: Path, s3: Server, toxiproxy: Toxiproxy
) -> None:
    link = toxiproxy.link(s3.port)
    place = bucket(s3, s3.through(link))
    run = start(a_job(state, place, "--size", MB), env=place.env)
    with link.bandwidth(10_000, "upstream"):
        do(state, 10)
        run.wait("saved", step=10)
        stopped = subprocess.Popen(
            [sys.executable, "-m", "paceline.cli", "stop", run.folder.name], env=run.env, stdout=subprocess.DEVNULL
        )
        for task in ("worker-0", "worker-1"):
            run.wait("task-exited", task=task)
        assert not run.events("committed")
    _, report = run.end()
    stopped.wait(60)
    assert report["status"] == "stopped" and place.counted(run) == ["step-10-g1"]


@pytest.mark.long  # needs root, to mount a disk
def test_where_tasks_have_no_room_to_save_training_goes_on(state: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    place = folder(tmp_path / "place")
    with small_disk(home, "4m"), runs.starter(tmp_path) as start:
        run = start(a_job(state, place, "--size", 100_000), home=home)
        commit(run, state, 10)
        tasks = run.tasks()
        ballast = fill(home)
        do(state, 20)
        for rank in (0, 1):
            done(run, state, 20, rank)
        assert all(map(alive, tasks.values()))
        ballast.unlink()
        commit(run, state, 30)
        finish(run, state)
        assert committed_steps(run) == [10, 30]


@pytest.mark.long  # needs root, to mount a disk
@pytest.mark.parametrize("full", [fill, fill_names])
def test_where_hosts_have_no_room_to_restore_the_generation_waits_for_it(
    state: Path, tmp_path: Path, full: Callable[[Path], Path]
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    place = folder(tmp_path / "place")
    with small_disk(home, "4m,nr_inodes=1000"), runs.starter(tmp_path) as start:
        run = start(a_job(state, place, "--size", 100_000), home=home)
        commit(run, state, 10)
        tasks = run.tasks()
        agents = [run.agent(f"worker-host-{number}") for number in (0, 1)]
        ballast = full(home)
        kill(tasks["worker-1"])
        eventually("the group is ended", lambda: not alive(tasks["worker-0"]), more=run.story)
        warning = f"generation 2 waits for its snapshot: {run.folder}/restored"
        eventually("somebody says why", lambda: full is fill or warning in str(warnings(run)), more=run.story)
        shutil.rmtree(ballast) if ballast.is_dir() else ballast.unlink()
        eventually("it goes on", lambda: (state / "start-1").read_text() == "10", more=run.story)
        assert [run.agent(f"worker-host-{number}") for number in (0, 1)] == agents
        commit(run, state, 30)
        finish(run, state)
    assert place.counted(run)[-1] == "step-10-g1"


@pytest.mark.long  # needs root, to mount a disk
def test_a_full_place_is_a_warning_and_what_waits_is_committed_once_there_is_room(
    start: Starter, state: Path, tmp_path: Path
) -> None:
    path = tmp_path / "place"
    path.mkdir()
    with small_disk(path, "2m"):
        run = start(a_job(state, folder(path), "--size", 100_000))
        commit(run, state, 10)
        ballast = fill(path)
        do(state, 20)
        assert "No space left on device" in run.wait("warning")["text"]
        do(state, 30)
        done(run, state, 30)
        ballast.unlink()
        run.wait("committed", step=30)
        kill(run.task("worker-1"))
        recovered(run, "step-30-g1")
        finish(run, state)
    assert causes(run.report()) == [("signal", "worker-1")]


@contextlib.contextmanager
def mounted_read_only(path: Path) -> Iterator[None]:
    # Whoever has a file open for writing there is not in the way for long.
    remount = ["mount", "-o", "remount,ro", str(path)]
    eventually("it is mounted read-only", lambda: subprocess.run(remount, stderr=subprocess.DEVNULL).returncode == 0)
    try:
        yield
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(path)], check=True)


@contextlib.contextmanager
def not_allowed(path: Path) -> Iterator[None]:
    def allow(mode: int) -> None:
        for each, _, _ in os.walk(path):
            Path(each).chmod(mode)

    allow(0o500)
    try:
        yield
    finally:
        allow(0o700)


# Root without the right to write whatever it likes.
BOUND = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"]


@pytest.mark.long  # needs root, to mount a disk
@pytest.mark.parametrize(
    ("closed", "why"), [(mounted_read_only, "Read-only file system"), (not_allowed, "Permission denied")]
)
def test_a_folder_that_cannot_be_written_for_a_while(
    start: Starter, state: Path, tmp_path: Path, closed: Callable[[Path], Any], why: str
) -> None:
    path = tmp_path / "place"
    path.mkdir()
    with small_disk(path, "2m"):
        place = folder(path)
        command = [*BOUND, sys.executable, "-m", "paceline.cli"]
        run = start(a_job(state, place, limits={"commit": "1s", "grace": "1s"}), command=command)
        commit(run, state, 10)
        with closed(path):
            do(state, 20)
            warning = run.wait("warning")["text"]
            assert warning.startswith(f"{not_yet(20)}: cannot write {path}") and warning.endswith(why)
            kill(run.task("worker-1"))
            recovered(run, "step-10-g1")
            done(run, state, 20, rank=1)
            owed = f"the place for snapshots cannot be written to: training goes on, .*: cannot write {path}.*: {why}"
            assert re.fullmatch(owed, warnings(run)[1])
            assert committed_steps(run) == [10]
        commit(run, state, 30)
        with closed(path):
            do(state, 40)
            eventually("it is said again", lambda: warnings(run)[-1].startswith(not_yet(40)), more=run.story)
            (state / "finish").touch()
            report = run.fails()
        assert report["cause"] == "store" and report["reason"].endswith(why)
        words = "training succeeded, but the last snapshot (step 40) is not committed and is on worker-host-0 only: "
        assert report["reason"].startswith(words)
        kept = run.folder / "held" / "worker-0" / "step-40-g2"
        assert sorted(each.name for each in kept.iterdir()) == ["paceline.json", "sum-0", "weights-0"]
        assert place.counted(run)[0] == "step-30-g2" and place.counted(run)[-1] == "step-10-g1"
        whole(run, place, tmp_path)
