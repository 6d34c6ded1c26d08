"""Snapshots of real runs, in a folder and in a bucket: a committed one is never lost, and training does not wait."""

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

from paceline.storage.snapshots.manifest import VERSION, Damaged, SnapshotId
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

pytestmark = pytest.mark.timeout(400)

MB = 1_000_000
AT_ONCE_S = 50.0  # for a run that cannot start to report it: one request has 8 s, and a transfer a minute
OF_HOSTS = ("staging", "held", "restored", "committed")  # these exist only while the run does


@pytest.fixture(params=["folder", "s3", "gcs", "azure"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return folder(tmp_path / "place") if request.param == "folder" else bucket(request.getfixturevalue(request.param))


def committed_steps(run: Run) -> list[int]:
    return [event["step"] for event in run.events("committed")]


def assert_recovered(run: Run, restore: str | None, generation: int = 2) -> None:
    formed = run.wait("generation-formed", generation=generation)
    assert formed["restore"] == restore, run.story()
    step = 0 if restore is None else int(restore.split("-")[1])
    for task in ("worker-0", "worker-1"):
        line = rf" g{generation} \| start \d+\n"
        eventually(f"{task} resumes", lambda task=task, line=line: re.search(line, run.log(task)), more=run.story)  # type: ignore[misc]
        assert starts(run, task)[-1] == step


def verify_current(run: Run, location: Place, tmp_path: Path) -> None:
    """Every current snapshot is valid."""
    snapshots = location.of(run)
    for id in snapshots.inventory().current():
        snapshots.fetch(snapshots.manifest(id), str(tmp_path / "verified" / str(id)))


# ---- from saved to restored


def test_a_run_resumes_from_the_newest_snapshot(start: Starter, state: Path, location: Place, tmp_path: Path) -> None:
    run = start(a_job(state, location), env=location.env)
    commit(run, state, 10, 20)
    kill(run.task("worker-1"))
    assert_recovered(run, "step-20-g1")
    commit(run, state, 30)
    finish(run, state)
    assert location.counted(run) == ["step-30-g2", "step-20-g1", "step-10-g1"]
    verify_current(run, location, tmp_path)


def test_a_restart_does_not_wait_for_a_slow_store(start: Starter, state: Path, tmp_path: Path) -> None:
    """The next generation resumes from a snapshot that is still being sent, without copying it, and commits it."""
    location = folder(tmp_path / "place")
    run = start(a_job(state, location, "--size", 16 * MB, snapshots={"rate": "1Mi"}))
    do(state, 10)
    run.wait("saved", step=10)
    kill(run.task("worker-1"))
    assert_recovered(run, "step-10-g1")
    assert run.events("committed") == [], "the commit takes longer than a restart"
    held, restored = (
        run.folder / name / "step-10-g1" / "weights-0" for name in ("held/worker-0", "restored/worker-host-1")
    )
    assert restored.samefile(held)
    run.wait("committed", step=10, generation=2)
    finish(run, state)
    assert location.counted(run) == ["step-10-g1"]


def test_a_program_that_does_not_import_paceline_resumes_too(start: Starter, state: Path) -> None:
    fault = ["--fail-at", 15, "--fail-rank", 0, "--fail-once", state / "failed", "--fail-when", state / "fail"]
    run = start(job(misbehave("--resume", "--report", "--steps", 30, *fault, "--fail-how", "SIGKILL")))
    run.wait("committed")
    (state / "fail").touch()
    run.succeeds()
    restored = restores(run)[1]
    assert restored is not None and f"start {restored.split('-')[1]}\n" in run.log("worker-1")
    assert committed_steps(run)[-1] == 30


def test_without_a_location_snapshots_go_to_the_run_s_own_folder(start: Starter, state: Path) -> None:
    run = start(a_job(state, None))
    commit(run, state, 10)
    finish(run, state)
    assert folder(run.folder / "snapshots").counted(run) == ["step-10-g1"]


@pytest.mark.parametrize("name", ["mit Leerzeichen und Ümläuten ω 100%", "a 'quoted' \"name\" $HOME;"])
def test_the_path_of_a_folder_may_have_any_characters(start: Starter, state: Path, tmp_path: Path, name: str) -> None:
    location = folder(tmp_path / name / "Schnappschüsse")
    run = start(a_job(state, location))
    commit(run, state, 10)
    kill(run.task("worker-0"))
    assert_recovered(run, "step-10-g1")
    finish(run, state)
    assert location.counted(run) == ["step-10-g1"]


def test_the_parts_of_all_tasks_are_one_snapshot(start: Starter, state: Path, location: Place, tmp_path: Path) -> None:
    run = start(a_job(state, location, "--parts", 2), env=location.env)
    commit(run, state, 10)
    kill(run.task("worker-1"))
    assert_recovered(run, "step-10-g1")
    finish(run, state)
    parts = location.of(run).manifest(SnapshotId(10, 1)).parts
    assert {part.task: sorted(file.path for file in part.files) for part in parts} == {
        f"worker-{rank}": ["paceline.json", f"sum-{rank}", f"weights-{rank}"] for rank in (0, 1)
    }
    verify_current(run, location, tmp_path)


def test_the_newest_and_the_best_are_kept(start: Starter, state: Path, location: Place) -> None:
    retention = {"keep": 2, "best": {"metric": "loss"}}
    run = start(a_job(state, location, "--losses", 0.5, 0.1, 0.4, 0.3, 0.2, snapshots=retention), env=location.env)
    commit(run, state, 10, 20, 30, 40, 50)
    finish(run, state)
    assert location.counted(run) == ["step-50-g1", "step-40-g1", "step-20-g1"]
    eventually(
        "the others are deleted",
        lambda: location.of(run).inventory().committed == {SnapshotId(50, 1), SnapshotId(40, 1), SnapshotId(20, 1)},
    )


def test_an_evaluator_gets_a_snapshot_that_it_could_not_fetch_at_first(
    start: Starter, state: Path, s3: Server, toxiproxy: Toxiproxy
) -> None:
    link, location = toxiproxy.link(s3.port), bucket(s3)
    worker, evaluator = {"replicas": 1}, {"replicas": 1, "env": {"AWS_ENDPOINT_URL": link.endpoint}}
    run = start(a_job(state, location, roles={"worker": worker, "evaluator": evaluator}), env=location.env)
    commit(run, state, 10)
    eventually("it has seen the first snapshot", lambda: "seen 10" in run.log("evaluator-0"), more=run.story)
    with link.down():
        commit(run, state, 20)
        text = "cannot fetch the snapshot of step 20"
        eventually("a warning says so", lambda: any(text in each for each in warnings(run)), more=run.story)
    eventually("it has seen the second snapshot", lambda: "seen 20" in run.log("evaluator-0"), more=run.story)
    (state / "last").write_text("20")
    finish(run, state)


def test_an_evaluator_has_the_last_snapshot_before_the_run_ends(start: Starter, state: Path, location: Place) -> None:
    roles = {"worker": {"replicas": 1}, "evaluator": {"replicas": 1}}
    run = start(a_job(state, location, roles=roles), env=location.env)
    commit(run, state, 10)
    eventually("it has seen the first snapshot", lambda: "seen 10" in run.log("evaluator-0"), more=run.story)
    do(state, 20)
    (state / "last").write_text("20")
    finish(run, state)
    assert run.log("evaluator-0").splitlines()[-1].endswith("seen 20")
    assert committed_steps(run) == [10, 20]


def test_nothing_is_left_in_the_run_s_folder(start: Starter, state: Path, location: Place) -> None:
    run = start(a_job(state, location), env=location.env)
    commit(run, state, 10)
    kill(run.task("worker-1"))
    assert_recovered(run, "step-10-g1")
    commit(run, state, 20)
    finish(run, state)  # and no process is left
    assert not [name for name in OF_HOSTS if (run.folder / name).exists()]
    assert not [path for path in run.folder.rglob("*") if path.name.endswith((".partial", ".gone"))]


# ---- killed during a save

Kill = Callable[[Run], None]
VICTIMS: dict[str, Kill] = {
    "task": lambda run: kill(run.task("worker-0")),
    "agent": lambda run: kill(run.agent("worker-host-0")),
    "host": lambda run: kill(run.keeper("worker-host-0")),
    "captain": lambda run: kill(run.agent("captain")),
    "captain's host": lambda run: kill(run.keeper("captain")),
}
VICTIM = pytest.mark.parametrize("victim", VICTIMS)


def wait_for_loss(run: Run, victim: str, after: int) -> None:
    """Waits until the captain has noticed."""
    if "captain" in victim:
        assert run.wait("captain-returned", after=after)["adopted"] is True
    else:
        run.wait("restart", after=after)


@VICTIM
def test_killed_while_the_task_writes(start: Starter, state: Path, tmp_path: Path, victim: str) -> None:
    location = folder(tmp_path / "place")
    run = start(a_job(state, location, "--stop-in", 20))
    commit(run, state, 10)
    do(state, 20)
    eventually("half of it is written", (state / "half").exists, more=run.story)
    after = run.position()
    VICTIMS[victim](run)
    wait_for_loss(run, victim, after)
    if "captain" in victim:
        kill(run.task("worker-0"))
    assert_recovered(run, "step-10-g1")
    run.wait("committed", step=20)  # by the next generation, which repeats that step
    finish(run, state)
    assert location.counted(run) == ["step-20-g2", "step-10-g1"]
    verify_current(run, location, tmp_path)


@VICTIM
def test_killed_while_a_snapshot_is_sent(
    start: Starter, state: Path, s3: Server, toxiproxy: Toxiproxy, tmp_path: Path, victim: str
) -> None:
    """A saved snapshot is not lost: it is committed once the link is free, and training resumes from it."""
    link = toxiproxy.link(s3.port)
    location = bucket(s3, s3.through(link))
    run = start(a_job(state, location, "--size", MB), env=location.env)
    commit(run, state, 10)
    with link.bandwidth(10_000, "upstream"):
        do(state, 20)
        run.wait("saved", step=20)
        after = run.position()
        VICTIMS[victim](run)
        wait_for_loss(run, victim, after)
        assert committed_steps(run) == [10]
    run.wait("committed", step=20)
    if "captain" not in victim:
        assert_recovered(run, "step-20-g1")
    commit(run, state, 30)
    report = finish(run, state)
    assert committed_steps(run) == [10, 20, 30]
    assert len(report["restarts"]) == ("captain" not in victim)
    verify_current(run, location, tmp_path)


@VICTIM
@pytest.mark.parametrize("location", ["folder", "s3"], indirect=True)
def test_killed_right_after_a_commit(start: Starter, state: Path, location: Place, tmp_path: Path, victim: str) -> None:
    run = start(a_job(state, location), env=location.env)
    commit(run, state, 10, 20)
    after = run.position()
    VICTIMS[victim](run)
    wait_for_loss(run, victim, after)
    if "captain" not in victim:
        assert_recovered(run, "step-20-g1")
    commit(run, state, 30)
    finish(run, state)
    assert committed_steps(run) == [10, 20, 30]
    assert location.counted(run)[1:] == ["step-20-g1", "step-10-g1"]
    verify_current(run, location, tmp_path)


@pytest.mark.parametrize("location", ["folder", "s3"], indirect=True)
def test_all_hosts_killed_at_once(start: Starter, state: Path, location: Place) -> None:
    """The captain and all hosts, whether or not a snapshot is being sent."""
    run = start(a_job(state, location), env=location.env)
    commit(run, state, 10)
    do(state, 20)
    run.wait("saved", step=20)
    keepers = [run.keeper(host) for host in ("captain", "worker-host-0", "worker-host-1")]
    for keeper in keepers:
        kill(keeper)
    assert_recovered(run, "step-20-g1")
    finish(run, state)


# ---- damage in the store


def spoil_file(location: Place, name: str, tmp_path: Path) -> str:
    (tmp_path / "other").write_bytes(b"other")
    location.store.send_all([(str(tmp_path / "other"), f"{name}/worker-0/weights-0")], lambda _: True, {})
    return f"{name}/worker-0/weights-0 is damaged: it has 5 bytes instead of 1000"


def remove_file(location: Place, name: str, tmp_path: Path) -> str:
    location.store.delete(f"{name}/worker-0/sum-0")
    return f"{name}/worker-0/sum-0 is missing"


def spoil_manifest(location: Place, name: str, tmp_path: Path) -> str:
    (tmp_path / "other").write_bytes(b"{")
    location.store.send_all([(str(tmp_path / "other"), f"{name}/manifest.json")], lambda _: True, {})
    return f"{name}/manifest.json is damaged: it is not JSON with a version"


def write_by_a_later_version(location: Place, name: str, tmp_path: Path) -> str:
    data = json.loads(location.store.read(f"{name}/manifest.json", MB) or b"")
    (tmp_path / "other").write_text(json.dumps({**data, "version": VERSION + 1}))
    location.store.send_all([(str(tmp_path / "other"), f"{name}/manifest.json")], lambda _: True, {})
    supported = f"but this Paceline supports only version {VERSION}; use a newer Paceline"
    return f"{name}/manifest.json has format version {VERSION + 1}, {supported}"


def lose_copy(run: Run, step: int) -> str:
    """The copy on the host of the task that saved the snapshot. Returns what the run says about it."""
    copy = run.folder / "held" / "worker-0" / f"step-{step}-g1"
    shutil.rmtree(copy)
    return f"cannot be used: {copy} is missing"


@pytest.mark.parametrize("spoil", [spoil_file, remove_file, spoil_manifest, write_by_a_later_version])
def test_a_damaged_snapshot_is_skipped_by_all_hosts(
    start: Starter, state: Path, tmp_path: Path, spoil: Callable[[Place, str, Path], str]
) -> None:
    location = folder(tmp_path / "place")
    run = start(a_job(state, location))
    commit(run, state, 10, 20)
    damage = spoil(location, f"{run.folder.name}/step-20-g1", tmp_path)
    loss = lose_copy(run, 20)
    kill(run.task("worker-1"))
    assert_recovered(run, "step-10-g1")
    first, second = warnings(run)
    assert first.endswith(loss) and second == f"the snapshot of step 20 is skipped: {damage}"
    run.wait("committed", step=20, generation=2)  # once more
    finish(run, state)
    assert location.counted(run) == ["step-20-g2", "step-10-g1"]


def test_a_damaged_snapshot_in_a_bucket_is_skipped_too(start: Starter, state: Path, s3: Server, tmp_path: Path) -> None:
    location = bucket(s3)
    run = start(a_job(state, location), env=location.env)
    commit(run, state, 10, 20)
    damage = spoil_manifest(location, f"{run.folder.name}/step-20-g1", tmp_path)
    lose_copy(run, 20)
    kill(run.task("worker-1"))
    assert_recovered(run, "step-10-g1")
    assert warnings(run)[-1] == f"the snapshot of step 20 is skipped: {damage}"
    finish(run, state)


def test_a_file_missing_in_the_bucket_is_restored_from_a_host_s_copy(
    start: Starter, state: Path, s3: Server, tmp_path: Path
) -> None:
    location = bucket(s3)
    run = start(a_job(state, location), env=location.env)
    commit(run, state, 10, 20)
    remove_file(location, f"{run.folder.name}/step-20-g1", tmp_path)
    kill(run.task("worker-1"))
    assert_recovered(run, "step-20-g1")
    assert warnings(run) == []
    finish(run, state)
    snapshots = location.of(run)
    with pytest.raises(Damaged):
        snapshots.fetch(snapshots.manifest(SnapshotId(20, 1)), str(tmp_path / "verified"))


# ---- a store that cannot be used from the start

# As on a cluster, where the command line lacks the pods' access to the store, and the captain finds out.
UNCHECKED = [
    sys.executable,
    "-c",
    "from paceline.backends import snapshot_origin as o; o.check = o.taken = lambda *_: ''; "
    "from paceline.cli import main; main()",
]


def assert_never_starts(run: Run, began: float, *fragments: str) -> None:
    report = run.fails(120)
    assert time.monotonic() - began < AT_ONCE_S
    assert report["cause"] == "store" and not run.events("task-started")
    for fragment in fragments:
        assert fragment in report["reason"], report["reason"]


def test_a_bucket_that_does_not_exist(start: Starter, state: Path, s3: Server) -> None:
    location = bucket(s3.bucket("nowhere-to-be-found"))
    began = time.monotonic()
    assert_never_starts(
        start(a_job(state, location), env=location.env, command=UNCHECKED),
        began,
        "s3://nowhere-to-be-found",
        "the bucket does not exist",
    )


def test_wrong_credentials(start: Starter, state: Path, s3: Server) -> None:
    location = bucket(s3, s3.stranger())
    began = time.monotonic()
    assert_never_starts(
        start(a_job(state, location), env=location.env, command=UNCHECKED),
        began,
        s3.url,
        "the credentials are not accepted",
    )


@pytest.mark.parametrize("how", ["down", "silence"])
def test_a_store_that_does_not_answer(start: Starter, state: Path, s3: Server, toxiproxy: Toxiproxy, how: str) -> None:
    link = toxiproxy.link(s3.port)
    location = bucket(s3, s3.through(link))
    began = time.monotonic()
    with link.down() if how == "down" else link.silence():
        assert_never_starts(
            start(a_job(state, location), env=location.env, command=UNCHECKED), began, f"cannot read {s3.url}"
        )


def test_a_source_bucket_that_does_not_answer(
    start: Starter, state: Path, s3: Server, toxiproxy: Toxiproxy, tmp_path: Path
) -> None:
    link = toxiproxy.link(s3.port)
    location = bucket(s3, s3.through(link))
    fields = a_job(state, folder(tmp_path / "own"))
    fields["snapshots"]["from"] = f"{s3.url}/other-run"
    began = time.monotonic()
    with link.down():
        assert_never_starts(start(fields, env=location.env, command=UNCHECKED), began, f"cannot list {s3.url}")


def test_a_read_only_bucket(start: Starter, state: Path, s3: Server) -> None:
    """The checks of the command line succeed; the captain finds out, before any task starts."""
    location = bucket(s3, s3.reader())
    began = time.monotonic()
    assert_never_starts(
        start(a_job(state, location), env=location.env),
        began,
        f"cannot write {s3.url}",
        "lack the permission to write there",
    )


@pytest.mark.long  # needs root, to mount a disk
def test_a_read_only_folder(start: Starter, state: Path, tmp_path: Path) -> None:
    path = tmp_path / "read-only"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro,size=1m", "tmpfs", str(path)], check=True)
    try:
        began = time.monotonic()
        assert_never_starts(start(a_job(state, folder(path))), began, f"cannot write {path}", "Read-only file system")
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_folder_that_is_a_file(start: Starter, state: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    began = time.monotonic()
    run = start(a_job(state, folder(tmp_path / "file")), command=UNCHECKED)
    assert_never_starts(run, began, f"{tmp_path / 'file'}", "Not a directory")


# ---- a store that fails later


def not_yet(step: int) -> str:
    return f"the snapshot of step {step} is not committed yet"


def test_a_store_that_is_unreachable_for_a_while(
    start: Starter, state: Path, s3: Server, toxiproxy: Toxiproxy, tmp_path: Path
) -> None:
    link = toxiproxy.link(s3.port)
    location = bucket(s3, s3.through(link))
    run = start(a_job(state, location), env=location.env)
    commit(run, state, 10)
    with link.down():
        do(state, 20)
        warning = run.wait("warning")["text"]
        assert warning.startswith(f"{not_yet(20)}: cannot write {s3.url}")
        tasks = run.tasks()
        do(state, 30)
        done(run, state, 30, rank=1)
        run.wait("saved", step=30)  # otherwise the snapshot of step 20 might be sent first
        assert all(map(alive, tasks.values()))
    run.wait("committed", step=30)
    finish(run, state)
    # A snapshot that is tried before the link is up again is not committed yet, either.
    prefixes = [text.partition(": ")[0] for text in warnings(run)]
    assert prefixes in ([not_yet(20)], [not_yet(20), not_yet(30)])
    assert committed_steps(run) == [10, 30]
    verify_current(run, location, tmp_path)


def test_a_store_that_refuses_for_a_while(start: Starter, state: Path, s3: Server, tmp_path: Path) -> None:
    with proxy(s3.port) as store_proxy:
        location = bucket(s3, s3.through(store_proxy))
        run = start(a_job(state, location), env=location.env)
        commit(run, state, 10)
        with store_proxy.wrong(lambda request: Fault(403, reaches="no") if request.method == "PUT" else None):
            do(state, 20)
            warning = run.wait("warning")["text"]
            assert warning.startswith(f"the snapshot of step 20 is not committed yet: cannot write {s3.url}")
            assert "lack the permission to write there" in warning and "; grant the permission, or use" in warning
        do(state, 30)
        run.wait("committed", step=30)
        finish(run, state)
        verify_current(run, location, tmp_path)


def test_a_generation_waits_for_an_unreachable_store(
    start: Starter, state: Path, s3: Server, toxiproxy: Toxiproxy
) -> None:
    link = toxiproxy.link(s3.port)
    location = bucket(s3, s3.through(link))
    run = start(a_job(state, location), env=location.env)
    commit(run, state, 10)
    lose_copy(run, 10)
    with link.down():
        kill(run.task("worker-1"))
        waits = "generation 2 waits for its snapshot: cannot read s3://"
        eventually("it waits", lambda: any(text.startswith(waits) for text in warnings(run)), more=run.story)
        assert len(run.events("generation-formed")) == 1
    assert_recovered(run, "step-10-g1")
    finish(run, state)


def test_over_a_slow_link_the_newest_is_sent_and_training_does_not_wait(
    start: Starter, state: Path, s3: Server, toxiproxy: Toxiproxy
) -> None:
    link = toxiproxy.link(s3.port)
    location = bucket(s3, s3.through(link))
    run = start(a_job(state, location, "--size", MB), env=location.env)
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
    location = bucket(s3, s3.through(link))
    run = start(a_job(state, location, "--size", MB), env=location.env)
    with link.bandwidth(10_000, "upstream"):
        do(state, 10)
        (state / "finish").touch()
        for task in ("worker-0", "worker-1"):
            run.wait("task-exited", task=task, code=0)
        assert run.cli.poll() is None and not run.events("committed")
    run.succeeds()
    assert location.counted(run) == ["step-10-g1"]
    verify_current(run, location, tmp_path)


def test_a_last_snapshot_that_cannot_be_committed_fails_the_run_and_stays_on_its_host(
    start: Starter, state: Path, s3: Server, toxiproxy: Toxiproxy
) -> None:
    link = toxiproxy.link(s3.port)
    location = bucket(s3, s3.through(link))
    run = start(a_job(state, location, limits={"commit": "5s"}), env=location.env)
    commit(run, state, 10)
    with link.down():
        do(state, 20)
        (state / "finish").touch()
        report = run.fails()
    assert report["cause"] == "store"
    reason = "training succeeded, but the last snapshot (step 20) is not committed and exists only on worker-host-0"
    assert report["reason"].startswith(f"{reason}: cannot")
    local_copy = run.folder / "held" / "worker-0" / "step-20-g1"
    assert sorted(path.name for path in local_copy.iterdir()) == ["paceline.json", "sum-0", "weights-0"]


def test_a_run_that_is_stopped_commits_its_last_snapshot(
    start: Starter, state: Path, s3: Server, toxiproxy: Toxiproxy
) -> None:
    link = toxiproxy.link(s3.port)
    location = bucket(s3, s3.through(link))
    run = start(a_job(state, location, "--size", MB), env=location.env)
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
    assert report["status"] == "stopped" and location.counted(run) == ["step-10-g1"]


@pytest.mark.long  # needs root, to mount a disk
def test_training_continues_if_tasks_have_no_space_to_save(state: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    location = folder(tmp_path / "place")
    with small_disk(home, "4m"), runs.starter(tmp_path) as start:
        run = start(a_job(state, location, "--size", 100_000), home=home)
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
def test_a_generation_waits_until_hosts_have_space_to_restore(
    state: Path, tmp_path: Path, full: Callable[[Path], Path]
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    location = folder(tmp_path / "place")
    with small_disk(home, "4m,nr_inodes=1000"), runs.starter(tmp_path) as start:
        run = start(a_job(state, location, "--size", 100_000), home=home)
        commit(run, state, 10)
        tasks = run.tasks()
        agents = [run.agent(f"worker-host-{number}") for number in (0, 1)]
        ballast = full(home)
        kill(tasks["worker-1"])
        eventually("the group is ended", lambda: not alive(tasks["worker-0"]), more=run.story)
        warning = f"generation 2 waits for its snapshot: {run.folder}/restored"
        eventually("a warning says why", lambda: full is fill or warning in str(warnings(run)), more=run.story)
        shutil.rmtree(ballast) if ballast.is_dir() else ballast.unlink()
        eventually("training resumes", lambda: (state / "start-1").read_text() == "10", more=run.story)
        assert [run.agent(f"worker-host-{number}") for number in (0, 1)] == agents
        commit(run, state, 30)
        finish(run, state)
    assert location.counted(run)[-1] == "step-10-g1"


@pytest.mark.long  # needs root, to mount a disk
def test_a_full_store_is_a_warning_and_pending_snapshots_are_committed_once_there_is_space(
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
        assert_recovered(run, "step-30-g1")
        finish(run, state)
    assert causes(run.report()) == [("signal", "worker-1")]


@contextlib.contextmanager
def mounted_read_only(path: Path) -> Iterator[None]:
    # A process that has a file open for writing prevents this only briefly.
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


# Root, but subject to file permissions.
BOUND = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"]


@pytest.mark.long  # needs root, to mount a disk
@pytest.mark.parametrize(
    ("closed", "error"), [(mounted_read_only, "Read-only file system"), (not_allowed, "Permission denied")]
)
def test_a_folder_that_cannot_be_written_for_a_while(
    start: Starter, state: Path, tmp_path: Path, closed: Callable[[Path], Any], error: str
) -> None:
    path = tmp_path / "place"
    path.mkdir()
    with small_disk(path, "2m"):
        location = folder(path)
        command = [*BOUND, sys.executable, "-m", "paceline.cli"]
        run = start(a_job(state, location, limits={"commit": "1s", "grace": "1s"}), command=command)
        commit(run, state, 10)
        with closed(path):
            do(state, 20)
            warning = run.wait("warning")["text"]
            assert warning.startswith(f"{not_yet(20)}: cannot write {path}") and warning.endswith(error)
            kill(run.task("worker-1"))
            assert_recovered(run, "step-20-g1")
            eventually("the record cannot be written", lambda: len(warnings(run)) > 1, more=run.story)
            pattern = f"cannot write to the snapshot store; training continues, .*: cannot write {path}.*: {error}"
            assert re.fullmatch(pattern, warnings(run)[1])
            assert committed_steps(run) == [10]
        commit(run, state, 30)
        with closed(path):
            do(state, 40)
            eventually("the warning is repeated", lambda: warnings(run)[-1].startswith(not_yet(40)), more=run.story)
            (state / "finish").touch()
            report = run.fails()
        assert report["cause"] == "store" and report["reason"].endswith(error)
        reason = (
            "training succeeded, but the last snapshot (step 40) is not committed and exists only on worker-host-0:"
        )
        assert report["reason"].startswith(reason)
        local_copy = run.folder / "held" / "worker-0" / "step-40-g2"
        assert sorted(each.name for each in local_copy.iterdir()) == ["paceline.json", "sum-0", "weights-0"]
        assert location.counted(run)[0] == "step-30-g2" and location.counted(run)[-1] == "step-10-g1"
        verify_current(run, location, tmp_path)
