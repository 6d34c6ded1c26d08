"""Snapshots, one situation at a time: from saved to committed, and which one a generation starts from."""

from __future__ import annotations

import pytest

from paceline.agent.captain import events as ev
from paceline.agent.captain import instructions as ins
from paceline.agent.captain.snapshots.commits import MOST_COPIES, MOST_DRAFTS
from paceline.agent.captain.snapshots.drafts import LONGEST_NAME, MOST_ENTRIES
from paceline.agent.captain.snapshots.given_up_uploads import AT_ONCE, DOUBT_S, GivenUpUploads
from paceline.agent.captain.snapshots.restoring_tasks import restores
from paceline.agent.net.frames import MEMBER_LIMIT, Decoder, encode
from paceline.agent.net.messages import FILES_AT_ONCE, member_message, read_member, stored_messages
from paceline.agent.transfers import requests as req
from paceline.plan import ROLLBACK, Plan, Snapshots
from paceline.storage.snapshots import manifest
from paceline.storage.snapshots.manifest import PATH_LIMIT, File, Manifest, SnapshotId
from support import worlds
from support.committing import AWAY, a_plan, asked, committed, counted, warnings
from support.worlds import LEASE, World

REFUSED = req.Failure(req.STORE, "the credentials are not accepted", False)
HOSTS = ("worker-host-0", "worker-host-1")
EVERY_SECOND = Snapshots("s3://bucket/runs", keep=10, commit_every=1.0)


def up(plan: Plan) -> World:
    """Hosts that cannot get snapshots from each other: what only one of them has must be committed first."""
    return worlds.up(plan, serves="")


def copies_on_hosts(world: World) -> dict[str, list[SnapshotId]]:
    """The snapshots on each host."""
    return {name: [id for _, id in sorted(machine.held)] for name, machine in world.machines.items()}


def restored(world: World) -> list[str | None]:
    return [fields["restore"] for kind, _, fields in world.events if kind == "generation-formed"]


def pending_instructions(world: World, host: str) -> list[type]:
    """The types of the instructions that the captain has sent to a host and that it has not received yet."""
    return [type(each) for each in world.machines[host].inbox]


def report_stored(world: World, files: tuple[File, ...], lost: int | None = None) -> None:
    """worker-0 reports the files of step 10, in messages of which one may be lost."""
    world.place.send("worker-0", SnapshotId(10, 1))
    for number, event in enumerate(stored_messages(HOSTS[0], "worker-0", SnapshotId(10, 1), files)):
        (received,) = Decoder(MEMBER_LIMIT).feed(encode(member_message(event)))
        member_event = read_member(received, HOSTS[0])
        if number != lost and member_event is not None:
            world.tell(member_event)
    world.answer()


def finish_training(world: World) -> None:
    for task in ("worker-0", "worker-1"):
        world.exit(task, "")


# ---- saved, then committed


def test_a_saved_snapshot_is_committed() -> None:
    world = up(a_plan())
    world.save("worker-0", 10)
    assert world.last("saved") == {"step": 10, "snapshot": "step-10-g1"}
    assert world.told_committed == []
    world.now += 1.5
    world.deliver_all()
    assert world.last("committed") == {"step": 10, "snapshot": "step-10-g1", "bytes": 1, "took_s": 1.5}
    assert counted(world) == [SnapshotId(10, 1)]
    manifest = world.place.snapshots.manifest(SnapshotId(10, 1))
    assert (manifest.run, manifest.world, [part.task for part in manifest.parts]) == ("run", 2, ["worker-0"])


def test_a_snapshot_that_is_never_complete_is_named_at_the_end() -> None:
    world = up(a_plan())
    world.save("worker-0", 10, parts=2)
    world.save("worker-1", 10, parts=2)
    world.deliver_all()
    world.save("worker-0", 20, parts=2)
    world.deliver_all()
    assert counted(world) == [SnapshotId(10, 1)] and warnings(world) == []
    finish_training(world)
    world.deliver_all()
    [text] = warnings(world)
    expected = "the snapshot of step 20 is incomplete and cannot be used: it needs 2 parts, but only worker-0 saved one"
    assert text.startswith(expected)


def test_the_newest_snapshot_is_next_and_skipped_snapshots_are_counted() -> None:
    world = up(a_plan())
    for step in (10, 20, 30, 40):
        world.save("worker-0", step)
    assert pending_instructions(world, HOSTS[0]).count(ins.StorePart) == 1, "one is sent at a time"
    world.deliver_all()
    assert counted(world) == [SnapshotId(40, 1), SnapshotId(10, 1)]
    assert world.captain.commits.skipped == 2
    assert copies_on_hosts(world)[HOSTS[0]] == [SnapshotId(40, 1)], "skipped snapshots are deleted"


def test_a_snapshot_needs_a_part_of_each_task() -> None:
    world = up(a_plan())
    world.save("worker-1", 10, parts=2)
    world.deliver_all()
    assert "saved" not in world.kinds() and counted(world) == []
    world.save("worker-0", 10, parts=2)
    world.deliver_all()
    assert world.kinds().count("saved") == 1 and counted(world) == [SnapshotId(10, 1)]
    manifest = world.place.snapshots.manifest(SnapshotId(10, 1))
    assert [part.task for part in manifest.parts] == ["worker-0", "worker-1"], "in the order of the tasks"


def test_nothing_is_committed_while_a_part_is_still_being_sent() -> None:
    world = up(a_plan())
    for task in ("worker-0", "worker-1"):
        world.save(task, 10, parts=2)
    world.deliver(HOSTS[0])
    world.answer()
    assert counted(world) == []
    world.deliver(HOSTS[1])
    world.answer()
    assert counted(world) == [SnapshotId(10, 1)]


def test_a_snapshot_is_never_committed_if_a_part_is_lost_with_its_host() -> None:
    world = committed(up(a_plan()), 10)
    for task in ("worker-0", "worker-1"):
        world.save(task, 20, parts=2)
    world.deliver(HOSTS[0])
    world.host_is_replaced(HOSTS[1], dead=True)
    world.join_all()
    world.deliver_all()
    world.pass_time(60)
    world.deliver_all()
    assert counted(world) == [SnapshotId(10, 1)] and restored(world) == [None, "step-10-g1"]
    assert copies_on_hosts(world) == {HOSTS[0]: [SnapshotId(10, 1)], HOSTS[1]: []}


def test_one_copy_is_used_if_each_task_saves_the_whole_snapshot() -> None:
    world = up(a_plan(3))
    for task in ("worker-1", "worker-0", "worker-2"):
        world.save(task, 10)
    world.deliver_all()
    assert world.told_committed == [SnapshotId(10, 1)] and world.kinds().count("saved") == 1
    assert copies_on_hosts(world) == {HOSTS[0]: [], HOSTS[1]: [SnapshotId(10, 1)], "worker-host-2": []}


def test_a_folder_that_cannot_be_a_snapshot_is_rejected_with_a_reason() -> None:
    world = committed(up(a_plan()), 10)
    world.save("worker-0", 20)
    unfit = req.Failure(req.UNFIT, "'odd' is no file", False)
    world.tell(ev.PartStored(HOSTS[0], "worker-0", SnapshotId(20, 1), error=unfit))
    world.deliver_all()
    assert warnings(world) == ["the snapshot of step 20 (worker-0 on worker-host-0) was rejected: 'odd' is no file"]
    assert copies_on_hosts(world)[HOSTS[0]] == [SnapshotId(10, 1)]
    assert counted(committed(world, 30)) == [SnapshotId(30, 1), SnapshotId(10, 1)]


def test_a_snapshot_of_90_000_files_is_reported_in_messages_that_the_captain_accepts() -> None:
    files = tuple(File(f"of/rank-0/{number:06d}.array", 1, f"{number:064x}") for number in range(90_000))
    world = up(a_plan())
    world.save("worker-0", 10)
    report_stored(world, files)
    assert world.place.snapshots.manifest(SnapshotId(10, 1)).parts[0].files == files
    longest = (File("\U0001f6b4" * PATH_LIMIT, 2**50, "0" * 64),) * FILES_AT_ONCE
    for event in stored_messages(HOSTS[0], "worker-0", SnapshotId(10, 1), longest):
        assert len(encode(member_message(event))) < MEMBER_LIMIT


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_all_files_are_reported_again_if_a_message_is_lost(lost: int) -> None:
    files = tuple(File(f"{number:06d}", 1, "0" * 64) for number in range(2 * FILES_AT_ONCE + 1))
    world = up(a_plan())
    world.save("worker-0", 10)
    report_stored(world, files, lost)
    assert counted(world) == []
    world.disconnect(HOSTS[0])
    world.join(HOSTS[0])
    assert ins.StorePart in pending_instructions(world, HOSTS[0])
    report_stored(world, files)
    assert len(world.place.snapshots.manifest(SnapshotId(10, 1)).parts[0].files) == len(files)


def test_a_snapshot_whose_manifest_would_be_too_large_is_rejected_with_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(manifest, "MOST_BYTES", 2**20)
    files = tuple(File(f"{number:0{PATH_LIMIT}d}", 1, "0" * 64) for number in range(1000))
    world = committed(up(a_plan()), 5)
    world.save("worker-0", 10)
    report_stored(world, files)
    world.deliver_all()
    limit = "its 1000 files take 2 MiB in the manifest, and the limit is 1 MiB, enough for about 400,000 files"
    assert warnings(world) == [f"the snapshot of step 10 (all tasks) was rejected: {limit}"]
    assert counted(committed(world, 20)) == [SnapshotId(20, 1), SnapshotId(5, 1)]


def test_saving_an_earlier_step_does_not_supersede_a_later_one() -> None:
    world = committed(up(a_plan()), 20)
    committed(world, 10)
    world.exit("worker-1", "signal")
    world.deliver_all()
    assert restored(world)[-1] == "step-20-g1" and counted(world)[0] == SnapshotId(20, 1)


def test_each_new_snapshot_is_progress_even_before_the_last_lost_step() -> None:
    world = committed(up(a_plan(limit=1)), 10)
    world.step(50)
    for step in (20, 30, 40):
        world.exit("worker-1", "signal")
        world.deliver_all()
        assert world.last("restart")["count"] == 1 and world.last("restart")["delay_s"] == 0
        committed(world, step)


# ---- retention, and copies on hosts


def test_the_newest_snapshots_are_kept() -> None:
    world = committed(up(a_plan(snapshots=Snapshots("s3://bucket", keep=2))), 10, 20, 30, 40)
    assert counted(world) == [SnapshotId(40, 1), SnapshotId(30, 1)]
    assert world.place.snapshots.inventory().committed == {SnapshotId(40, 1), SnapshotId(30, 1)}


@pytest.mark.parametrize(("lowest", "best"), [(True, 20), (False, 10)])
def test_the_best_snapshot_by_a_metric_is_kept_too(lowest: bool, best: int) -> None:
    world = up(a_plan(snapshots=Snapshots("s3://bucket", keep=1, best=("loss", lowest))))
    for step, loss in ((10, 0.9), (20, 0.1), (30, 0.5), (40, 0.4)):
        world.save("worker-0", step, loss=loss)
        world.deliver_all()
    assert counted(world) == [SnapshotId(40, 1), SnapshotId(best, 1)]


def test_a_metric_that_no_snapshot_has_is_reported_once() -> None:
    world = up(a_plan(snapshots=Snapshots("s3://bucket", keep=1, best=("los", True))))
    for step in (10, 20):
        world.save("worker-0", step, loss=0.5, accuracy=0.9)
        world.deliver_all()
    assert warnings(world) == [
        "the snapshot of step 10 has no los, which snapshots.best needs; it has only accuracy, loss"
    ]


def test_a_returning_captain_knows_the_best_snapshot() -> None:
    world = up(a_plan(snapshots=Snapshots("s3://bucket", keep=1, best=("loss", True))))
    for step, loss in ((10, 0.1), (20, 0.5)):
        world.save("worker-0", step, loss=loss)
        world.deliver_all()
    world.restart_captain(with_notes=False)
    world.join_all()
    world.deliver_all()
    world.save("worker-0", 30, loss=0.4)
    world.deliver_all()
    assert counted(world) == [SnapshotId(30, 1), SnapshotId(10, 1)]


def test_old_snapshots_of_an_earlier_generation_are_deleted_too() -> None:
    world = committed(up(a_plan(snapshots=Snapshots("s3://bucket", keep=2))), 10)
    world.exit("worker-0", "signal")
    world.deliver_all()
    committed(world, 20, 30)
    assert world.place.snapshots.inventory().committed == {SnapshotId(30, 2), SnapshotId(20, 2)}


def test_a_host_keeps_the_newest_committed_snapshot() -> None:
    world = committed(up(a_plan()), 10)
    assert copies_on_hosts(world)[HOSTS[0]] == [SnapshotId(10, 1)]
    assert copies_on_hosts(committed(world, 20))[HOSTS[0]] == [SnapshotId(20, 1)]


def test_hosts_delete_committed_snapshots_when_the_run_is_over() -> None:
    world = committed(up(a_plan()), 10)
    finish_training(world)
    world.deliver_all()
    assert world.over is not None and copies_on_hosts(world) == {HOSTS[0]: [], HOSTS[1]: []}


@pytest.mark.parametrize("to", ["", "/mnt/snapshots"])
def test_hosts_keep_the_newest_snapshot_if_snapshots_are_stored_in_a_folder_too(to: str) -> None:
    world = committed(up(a_plan(snapshots=Snapshots(to))), 10, 20)
    assert copies_on_hosts(world)[HOSTS[0]] == [SnapshotId(20, 1)]


def test_uncommitted_snapshots_of_an_older_generation_are_deleted() -> None:
    world = up(a_plan())
    world.save("worker-0", 10, parts=2)
    world.exit("worker-1", "signal")
    world.deliver_all()
    assert restored(world) == [None, None] and copies_on_hosts(world)[HOSTS[0]] == []


def test_uncommitted_files_in_the_store_are_deleted_when_the_next_generation_has_started() -> None:
    world = committed(up(a_plan()), 10)
    for name in ("step-20-g1/worker-0/state", "step-30-g2/worker-0/state"):
        world.place.store.create(f"run/{name}", b"1")
    with_owed_record(world)
    assert world.place.store.names("run/step-20"), "it may still be committed"
    world.place.read_only = None
    world.pass_time(3)
    world.exit("worker-1", "signal")
    world.deliver_all()
    world.pass_time(3)  # the back-off of a second failure
    world.deliver_all()
    assert world.captain.generation == 3
    assert not world.place.store.names("run/step-20") and not world.place.store.names("run/step-30")
    assert counted(world) == [SnapshotId(10, 1)]


def fail_to_send(world: World, step: int) -> None:
    """worker-0 has sent its part of the snapshot, and worker-1 cannot."""
    save_both(world, step)
    world.deliver(HOSTS[0])
    world.place.fails = AWAY
    world.deliver(HOSTS[1])
    world.place.fails = None
    assert world.place.has_part("worker-0", SnapshotId(step, 1))


def save_both(world: World, step: int) -> None:
    """What failed before is not sent again: this snapshot is complete before the pause has passed."""
    for task in ("worker-0", "worker-1"):
        world.save(task, step, parts=2)
    world.pass_time(60)


def commit_both(world: World, step: int) -> None:
    save_both(world, step)
    world.deliver_all()
    assert world.told_committed[-1] == SnapshotId(step, 1)


def test_what_was_sent_of_a_superseded_snapshot_is_deleted_in_the_same_generation() -> None:
    world = up(a_plan(snapshots=EVERY_SECOND, hang_after=None))
    for step in range(10, 100, 20):
        fail_to_send(world, step)
        commit_both(world, step + 10)
        assert not world.place.store.names(f"run/step-{step}-g1/")
    assert world.captain.generation == 1 and counted(world) == [SnapshotId(step, 1) for step in range(100, 0, -20)]
    assert len(world.captain.commits.uploads) == 0


def test_an_upload_that_failed_stays_while_it_may_still_be_committed() -> None:
    world = up(a_plan(snapshots=EVERY_SECOND, hang_after=None))
    fail_to_send(world, 10)
    world.save("worker-0", 20, parts=2)  # not complete: step 10 is next
    world.pass_time(5)
    world.deliver_all()
    assert counted(world) == [SnapshotId(10, 1)] and not asked(world, req.DeleteUncommitted)
    commit_both(world, 20)
    assert counted(world) == [SnapshotId(20, 1), SnapshotId(10, 1)]


def test_a_snapshot_whose_commit_may_still_arrive_is_deleted_only_after_an_hour() -> None:
    """The store answers with an error, and later carries out the request."""
    world = up(a_plan(snapshots=EVERY_SECOND, hang_after=None))
    world.save("worker-0", 10)
    world.deliver(HOSTS[0])
    request, _ = world.place.asked.popleft()
    assert isinstance(request, req.CommitSnapshot)
    world.tell(ev.StoreAnswered(request, AWAY))
    world.now += 3
    committed(world, 20)
    assert world.place.has_part("worker-0", SnapshotId(10, 1))
    world.now += DOUBT_S - 10
    committed(world, 30)
    assert world.place.has_part("worker-0", SnapshotId(10, 1))
    world.now += 10
    committed(world, 40)
    assert not world.place.has_part("worker-0", SnapshotId(10, 1))
    assert counted(world) == [SnapshotId(40, 1), SnapshotId(30, 1), SnapshotId(20, 1)]


def test_a_committed_snapshot_is_never_deleted_as_the_remains_of_an_upload() -> None:
    world = up(a_plan(snapshots=EVERY_SECOND, hang_after=None))
    fail_to_send(world, 10)
    other_captain = Manifest("run", SnapshotId(10, 1), 2, (), {}, {}, "2026-11-18T00:00:00Z")
    world.place.snapshots.create(other_captain)
    commit_both(world, 20)
    assert world.place.has_part("worker-0", SnapshotId(10, 1))


def test_what_an_earlier_captain_may_have_committed_is_deleted_only_after_an_hour() -> None:
    world = up(a_plan(snapshots=EVERY_SECOND, hang_after=None))
    fail_to_send(world, 10)
    world.restart_captain()
    world.join_all()
    world.answer()
    fail_to_send(world, 20)
    commit_both(world, 30)
    assert world.place.has_part("worker-0", SnapshotId(10, 1)), "its captain may have requested the commit"
    assert not world.place.has_part("worker-0", SnapshotId(20, 1))
    world.now += DOUBT_S
    world.output()
    commit_both(world, 40)
    assert not world.place.has_part("worker-0", SnapshotId(10, 1))


def test_a_parent_that_is_committed_late_does_not_end_the_doubt_about_other_commits() -> None:
    """A manifest that is written after the parts were deleted would be of a snapshot that cannot be restored."""
    instructions: list[ins.Instruction] = []
    uploads = GivenUpUploads(instructions.append)
    first, parent, doubtful, newer = (SnapshotId(*each) for each in ((10, 1), (20, 1), (30, 2), (40, 2)))
    uploads.on_sending(first)
    uploads.give_up(first)
    uploads.on_saved(doubtful, is_doubtful=True, now=100.0)
    uploads.on_committed(parent, 2, 110.0)
    assert instructions == [ins.AskStore(req.DeleteUncommitted(first, 2))]
    uploads.on_answered(first, req.Done())
    uploads.on_sending(doubtful)  # fails
    uploads.give_up(doubtful)
    uploads.on_committed(newer, 2, 120.0)
    assert len(instructions) == 1
    uploads.on_committed(SnapshotId(50, 2), 2, 101.0 + DOUBT_S)
    assert instructions[1:] == [ins.AskStore(req.DeleteUncommitted(doubtful, 2))]


def test_remains_that_cannot_be_deleted_are_deleted_after_the_next_commit() -> None:
    world = up(a_plan(snapshots=EVERY_SECOND, hang_after=None))
    fail_to_send(world, 10)
    save_both(world, 20)
    world.deliver(HOSTS[0])
    world.deliver(HOSTS[1])
    world.answer_one()
    world.place.fails = AWAY
    world.answer()
    world.place.fails = None
    assert counted(world) == [SnapshotId(20, 1)] and world.place.has_part("worker-0", SnapshotId(10, 1))
    commit_both(world, 30)
    assert not world.place.has_part("worker-0", SnapshotId(10, 1))


def test_few_remains_are_deleted_after_each_commit() -> None:
    world = up(a_plan(snapshots=EVERY_SECOND, hang_after=None))
    for step in range(10, 90, 10):
        fail_to_send(world, step)
    commit_both(world, 90)
    assert len([each for each in world.place.store.folders("run/") if each != "generations"]) == 1 + 8 - AT_ONCE
    for step in (100, 110):
        commit_both(world, step)
    assert len(world.captain.commits.uploads) == 0


def test_a_host_that_kept_a_deleted_upload_cannot_have_it_committed() -> None:
    """It was disconnected when the captain gave the snapshot up, and still believes that its part is in the store."""
    world = up(a_plan(on_nan=ROLLBACK))
    world.save("worker-0", 10)
    world.deliver(HOSTS[0])
    request, _ = world.place.asked.popleft()
    world.tell(ev.StoreAnswered(request, AWAY))
    world.disconnect(HOSTS[0])
    world.save("worker-1", 20)
    world.now += 3
    world.tell(ev.Tick())
    world.deliver_all()
    world.now += DOUBT_S
    world.save("worker-1", 30)
    world.deliver_all()
    assert world.told_committed[-1] == SnapshotId(30, 1) and not world.place.has_part("worker-0", SnapshotId(10, 1))
    world.report("worker-1", 15)
    world.join(HOSTS[0])
    world.deliver_all()
    world.pass_time(60)
    world.deliver_all()
    assert world.captain.generation > 1 and SnapshotId(10, 1) not in world.told_committed


def test_an_old_snapshot_that_cannot_be_deleted_is_a_warning_and_is_deleted_with_the_next() -> None:
    world = committed(up(a_plan(snapshots=Snapshots("s3://bucket", keep=1))), 10)
    world.save("worker-0", 20)
    world.deliver(HOSTS[0])
    world.answer_one()
    world.place.read_only = REFUSED
    world.deliver_all()
    assert warnings(world) == ["an old snapshot could not be deleted: the credentials are not accepted"]
    world.place.read_only = None
    committed(world, 30)
    assert counted(world) == [SnapshotId(30, 1)]
    assert not world.place.store.names("run/step-10") and not world.place.store.names("run/step-20")


def test_a_snapshot_whose_commit_seemed_to_fail_is_deleted_when_it_is_old() -> None:
    world = up(a_plan(snapshots=Snapshots("s3://bucket", keep=1)))
    world.save("worker-0", 10)
    world.deliver(HOSTS[0])
    request, _ = world.place.asked.popleft()
    assert isinstance(request, req.CommitSnapshot) and world.place.answer(request) == req.Done()
    world.tell(ev.StoreAnswered(request, AWAY))
    assert counted(world) == [SnapshotId(10, 1)] and world.told_committed == []
    world.now += 3
    assert counted(committed(world, 20)) == [SnapshotId(20, 1)]
    assert not world.place.store.names("run/step-10")


def test_a_snapshot_whose_commit_seemed_to_fail_is_kept_while_it_is_recent() -> None:
    world = committed(up(a_plan(snapshots=Snapshots("s3://bucket", keep=3))), 10)
    world.save("worker-0", 20)
    world.deliver(HOSTS[0])
    request, _ = world.place.asked.popleft()
    world.place.answer(request)
    world.tell(ev.StoreAnswered(request, AWAY))
    world.now += 3
    assert counted(committed(world, 30)) == [SnapshotId(30, 1), SnapshotId(20, 1), SnapshotId(10, 1)]
    assert world.captain.commits.contents.chain == counted(world)
    assert counted(committed(world, 40)) == [SnapshotId(40, 1), SnapshotId(30, 1), SnapshotId(20, 1)]


# ---- the snapshot that a generation starts from


def test_a_generation_starts_from_the_newest_snapshot_once_every_host_has_it() -> None:
    world = committed(up(a_plan()), 10, 20)
    world.exit("worker-1", "signal")
    world.deliver(HOSTS[0])
    assert world.machines[HOSTS[0]].restored == SnapshotId(20, 1) and restored(world) == [None]
    world.deliver_all()
    assert restored(world) == [None, "step-20-g1"]


def test_a_saved_snapshot_is_committed_before_the_next_generation_starts() -> None:
    world = committed(up(a_plan()), 10)
    world.save("worker-0", 20)
    world.exit("worker-0", "signal")
    world.deliver_all()
    assert restored(world) == [None, "step-20-g1"]


def test_a_snapshot_that_is_not_committed_within_the_grace_is_given_up() -> None:
    world = committed(up(a_plan()), 10)
    world.save("worker-0", 20)
    assert isinstance(world.machines[HOSTS[0]].inbox.popleft(), ins.StorePart)
    world.exit("worker-1", "signal")
    world.deliver_all()
    assert restored(world) == [None]
    world.pass_time(world.plan.limits.grace + 1)
    world.deliver_all()
    assert restored(world) == [None, "step-10-g1"]
    assert copies_on_hosts(world)[HOSTS[0]] == [SnapshotId(10, 1)]


def test_the_metrics_of_a_snapshot_are_limited_however_often_they_are_sent() -> None:
    world = up(a_plan())
    snapshot = SnapshotId(10, 1)
    world.place.send("worker-0", snapshot)
    for first in range(0, 5 * MOST_ENTRIES, 500):
        metrics = {f"metric {number}": 1.0 for number in range(first, first + 2 * MOST_ENTRIES)}
        versions = {"x" * (LONGEST_NAME + 1): "1", **dict.fromkeys(metrics, "1")}
        world.tell(ev.PartSaved(HOSTS[0], "worker-0", snapshot, 2, metrics, versions))
    world.tell(ev.PartSaved(HOSTS[1], "worker-1", snapshot, 2, {"loss": 0.5}, {"paceline": "1.0"}))
    draft = world.captain.commits.newest_uncommitted()
    assert draft is not None and draft.metrics["loss"] == 0.5 and draft.versions["paceline"] == "1.0"
    assert (len(draft.metrics), len(draft.versions)) == (MOST_ENTRIES + 1, MOST_ENTRIES + 1)


def test_copies_on_hosts_are_limited_while_the_store_cannot_be_listed() -> None:
    world = committed(up(a_plan()), 10)
    world.exit("worker-1", "signal")
    world.deliver_all()
    world.restart_captain()
    world.place.fails = AWAY
    world.join(HOSTS[1])
    for step in range(1000, 1000 + 2 * MOST_COPIES):
        world.tell(ev.PartSaved(HOSTS[1], "worker-1", SnapshotId(step, 999)))
    text = f"{HOSTS[1]} has more than {MOST_COPIES} snapshots that are not committed, or not of this generation"
    text += ": step 1000 is ignored"
    assert world.captain.commits.held_count == MOST_COPIES and warnings(world) == [text]
    world.join(HOSTS[0])
    assert world.captain.commits.held_count == MOST_COPIES + 1, "what another host has counts"


def test_of_too_many_copies_on_a_host_the_newest_are_used() -> None:
    """A host reports what it has in ascending order; the newest are the only ones that a restart can use."""
    world = committed(up(a_plan()), 10)
    world.restart_captain()
    world.place.fails = AWAY
    world.join(HOSTS[1])
    others = [SnapshotId(5000, 998), *(SnapshotId(step, 999) for step in range(1000, 1000 + MOST_COPIES + 5))]
    earlier = SnapshotId(999, 999)
    for snapshot in (*others, earlier):
        world.tell(ev.PartSaved(HOSTS[1], "worker-1", snapshot))
    reachable = [each for each in (*others, earlier) if world.captain.commits.sources(each, HOSTS[1]) is not None]
    assert reachable == others[-MOST_COPIES:]
    (text,) = warnings(world)
    assert text.endswith(": step 5000 is ignored")
    assert copies_on_hosts(world)[HOSTS[0]] == [SnapshotId(10, 1)], "nothing is deleted"


def test_incomplete_snapshots_are_limited_while_a_host_has_not_joined() -> None:
    world = up(a_plan())
    world.restart_captain()
    world.join(HOSTS[1])
    for step in range(MOST_DRAFTS + 10):
        world.tell(ev.PartSaved(HOSTS[1], "worker-1", SnapshotId(step, 1), 2))
    assert world.captain.commits.held_count == MOST_DRAFTS
    (text,) = warnings(world)
    assert text.endswith(f": step {MOST_DRAFTS} is ignored")


def test_a_warning_says_that_lower_steps_are_not_committed_after_one_that_was_far_too_high() -> None:
    world = committed(up(a_plan()), 10, 20)
    world.save("worker-1", 1_700_000_000)
    world.deliver_all()
    committed(world, 30, 40)
    assert warnings(world) == []
    committed(world, 50, 60, 70, 80, 90)
    (text,) = warnings(world)
    assert text.startswith("the snapshot of step 50 is not committed, because the later step 1700000000 is. Save snap")
    world.pause(now=True)
    world.deliver_all()
    world.resume()
    world.join_all()
    world.deliver_all()
    assert restored(world) == [None, "step-1700000000-g1"]
    committed(world, 60)
    assert counted(world)[:2] == [SnapshotId(60, 2), SnapshotId(1_700_000_000, 1)] and len(warnings(world)) == 1


def test_a_task_that_is_behind_the_others_causes_no_warning() -> None:
    world = up(a_plan())
    for step in range(100, 200, 10):
        committed(world, step)
        world.save("worker-1", step - 90)
        world.deliver_all()
    assert warnings(world) == []


def test_hosts_that_join_again_cause_no_warning_about_lower_steps() -> None:
    world = committed(up(a_plan()), 100)
    for step in range(10, 60, 10):
        snapshot = SnapshotId(step, 1)
        world.machines[HOSTS[1]].held["worker-1", snapshot] = ev.PartSaved(HOSTS[1], "worker-1", snapshot)
    world.disconnect(HOSTS[1])
    world.join_all()
    world.deliver_all()
    assert warnings(world) == []


@pytest.mark.parametrize("kind", ["damaged", "newer"])
def test_an_unreadable_snapshot_is_skipped_on_all_hosts_with_a_warning(kind: str) -> None:
    world = committed(up(a_plan()), 10, 20, 30)
    world.place.damaged = {SnapshotId(30, 1), SnapshotId(20, 1)}
    world.place.damage = kind
    world.exit("worker-1", "signal")
    world.deliver_all()
    assert restored(world) == [None, "step-10-g1"]
    assert [machine.restored for machine in world.machines.values()] == [SnapshotId(10, 1)] * 2
    assert warnings(world) == [
        "the snapshot of step 30 is skipped: step-30-g1 is damaged",
        "the snapshot of step 20 is skipped: step-20-g1 is damaged",
    ]
    assert counted(committed(world, 15)) == [SnapshotId(15, 2), SnapshotId(10, 1)], (
        "skipped snapshots are no longer on the chain"
    )


def test_skipped_snapshots_are_not_kept_instead_of_current_ones() -> None:
    world = committed(up(a_plan(snapshots=Snapshots("s3://bucket/runs", keep=2))), 20, 30)
    world.place.damaged = {SnapshotId(30, 1)}
    world.exit("worker-1", "signal")
    world.deliver_all()
    committed(world, 25)
    assert counted(world) == [SnapshotId(25, 2), SnapshotId(20, 1)]
    assert world.place.snapshots.inventory().committed == {SnapshotId(25, 2), SnapshotId(20, 1)}


def test_a_snapshot_of_a_newer_version_is_not_deleted() -> None:
    world = committed(up(a_plan(snapshots=Snapshots("s3://bucket/runs", keep=1))), 20)
    world.place.damaged, world.place.damage = {SnapshotId(20, 1)}, "newer"
    world.exit("worker-1", "signal")
    world.deliver_all()
    committed(world, 5)
    assert world.place.snapshots.inventory().committed == {SnapshotId(5, 2), SnapshotId(20, 1)}


def notes(world: World) -> list[str]:
    return [fields["text"] for kind, _, fields in world.events if kind == "note"]


@pytest.mark.parametrize("kind", ["damaged", "newer"])
def test_a_snapshot_is_not_skipped_if_only_one_host_says_that_it_is_damaged(kind: str) -> None:
    """Its memory may be faulty, or it may lie: training would start over, and all snapshots would be deleted."""
    world = committed(up(a_plan(snapshots=Snapshots("s3://bucket/runs", keep=2))), 10, 20)
    world.faulty_hosts = {HOSTS[1]: kind}
    world.exit("worker-1", "signal")
    world.deliver_all()
    assert restored(world) == [None]
    said = f"{HOSTS[1]} cannot use the snapshot of step 20, which is"
    assert notes(world) == [f"{said} now checked in the store: its SHA-256 differs"]
    waits = f"generation 2 waits for its snapshot: {said} intact in the store: its SHA-256 differs"
    assert warnings(world) == [waits]
    world.faulty_hosts = {}
    world.pass_time(10)
    world.deliver_all()
    assert restored(world) == [None, "step-20-g1"] and len(warnings(world)) == 1
    assert counted(world) == [SnapshotId(20, 1), SnapshotId(10, 1)]


def test_the_run_ends_if_a_host_can_never_use_an_intact_snapshot() -> None:
    world = committed(up(a_plan()), 10)
    world.faulty_hosts = {HOSTS[1]: "damaged"}
    world.exit("worker-1", "signal")
    for _ in range(80):
        world.deliver_all()
        world.pass_time(5)
    assert world.over is not None and world.over.cause == "store"
    text = f"{HOSTS[1]} cannot use the snapshot of step 10, which is intact in the store: its SHA-256 differs"
    assert world.over.reason == text and counted(world) == [SnapshotId(10, 1)]


def test_hosts_are_ready_after_a_long_check_of_the_snapshot_and_have_all_their_time_to_try_again() -> None:
    world = committed(up(a_plan()), 10)
    world.faulty_hosts = {HOSTS[1]: "damaged"}
    world.exit("worker-1", "signal")
    for host in (*HOSTS, *HOSTS):
        world.deliver(host)
    assert asked(world, req.CheckSnapshot) == [req.CheckSnapshot(SnapshotId(10, 1))]
    check = world.place.asked.pop()
    for _ in range(400):
        world.now += 1
        world.beat_all()
        world.tell(ev.Tick())
    assert world.over is None and restored(world) == [None]
    world.faulty_hosts = {}
    world.place.asked.append(check)
    world.deliver_all()
    assert world.over is None and restored(world) == [None, "step-10-g1"] and warnings(world) == []


def test_hosts_have_all_their_time_for_the_snapshot_before_one_whose_check_took_long() -> None:
    world = committed(up(a_plan()), 10, 20)
    world.place.damaged = {SnapshotId(20, 1)}
    world.exit("worker-1", "signal")
    for host in (*HOSTS, *HOSTS):
        world.deliver(host)
    check = world.place.asked.pop()
    for _ in range(400):
        world.now += 1
        world.beat_all()
        world.tell(ev.Tick())
    world.place.asked.append(check)
    world.answer_one()
    world.tell(ev.Tick())
    assert world.over is None
    world.deliver_all()
    assert restored(world) == [None, "step-10-g1"]


def test_training_starts_from_scratch_after_a_check_for_which_the_store_did_not_answer_at_first() -> None:
    world = committed(up(a_plan()), 10)
    world.place.damaged = {SnapshotId(10, 1)}
    world.exit("worker-1", "signal")
    for host in (*HOSTS, *HOSTS):
        world.deliver(host)
    world.place.fails = AWAY
    world.deliver_all()
    world.place.fails = None
    world.pass_time(10)
    world.deliver_all()
    assert world.over is None and restored(world) == [None, None]


def test_a_snapshot_is_checked_again_if_the_store_did_not_answer() -> None:
    world = committed(up(a_plan()), 10, 20)
    world.place.damaged = {SnapshotId(20, 1)}
    world.exit("worker-1", "signal")
    for host in (*HOSTS, *HOSTS):
        world.deliver(host)
    world.place.fails = AWAY
    world.deliver_all()
    assert warnings(world) == [f"generation 2 waits for its snapshot: {AWAY.text}"]
    world.place.fails = None
    world.pass_time(10)
    world.deliver_all()
    assert restored(world) == [None, "step-10-g1"]
    assert warnings(world)[1:] == ["the snapshot of step 20 is skipped: step-20-g1 is damaged"]


def test_training_starts_from_scratch_if_no_snapshot_can_be_read() -> None:
    world = committed(up(a_plan()), 10)
    world.place.damaged = {SnapshotId(10, 1)}
    world.exit("worker-1", "signal")
    world.deliver_all()
    assert restored(world) == [None, None] and len(warnings(world)) == 1


def test_a_host_that_is_replaced_while_it_fetches_fetches_again() -> None:
    world = committed(up(a_plan()), 10)
    world.exit("worker-1", "signal")
    world.deliver(HOSTS[0])
    world.host_is_replaced(HOSTS[1], dead=True)
    world.join_all()
    world.deliver_all()
    assert restored(world) == [None, "step-10-g1"]
    assert world.machines[HOSTS[1]].restored == SnapshotId(10, 1)


def test_an_answer_to_an_abandoned_start_of_a_generation_does_not_count_for_the_next() -> None:
    world = World(a_plan())
    world.join_all()
    world.answer_one()  # the contents of the store
    ((first, ticket),) = world.place.asked
    assert isinstance(first, req.BeginGeneration)
    world.disconnect(HOSTS[1])
    world.join(HOSTS[1])
    assert len(asked(world, req.BeginGeneration)) == 2, "the first was given up"
    world.place.asked.popleft()
    world.tell(ev.StoreAnswered(first, world.place.answer(first), ticket))
    assert restored(world) == [], "the record of this generation does not exist yet"
    world.deliver_all()
    assert restored(world) == [None]
    assert world.place.snapshots.inventory().generation == world.captain.generation


def test_only_the_chief_of_a_parameter_server_job_restores() -> None:
    world = up(a_plan(1, ps=1, chief=True))
    world.save("chief-0", 10)
    world.deliver_all()
    world.exit("ps-0", "signal")
    world.deliver_all()
    assert "step-10-g1" in restored(world)
    assert {name: machine.restored for name, machine in world.machines.items()} == {
        "chief-host-0": SnapshotId(10, 1), "worker-host-0": None, "ps-host-0": None,
    }  # fmt: skip
    assert [task.name for task in world.plan.tasks if restores(world.plan, task)] == ["chief-0"]


# ---- a store that fails


@pytest.mark.parametrize("error", [AWAY, REFUSED])
@pytest.mark.parametrize("failure_mode", ["fails", "read_only"])
def test_a_store_that_fails_at_the_start_ends_the_run_before_any_task_starts(
    error: req.Failure, failure_mode: str
) -> None:
    world = World(a_plan())
    setattr(world.place, failure_mode, error)
    world.join_all()
    world.deliver_all()
    assert world.over is not None
    assert (world.over.status, world.over.reason, world.over.cause) == ("failed", error.text, "store")
    assert world.started == []


def test_a_store_that_fails_later_is_a_warning_and_snapshots_are_committed_once_it_recovers() -> None:
    world = committed(up(a_plan()), 10)
    world.place.fails = AWAY
    committed(world, 20)
    for _ in range(60):
        world.output()
        world.pass_time(1)
        world.deliver_all()
    assert warnings(world) == ["the snapshot of step 20 is not committed yet: the bucket does not answer"]
    assert len(world.running()) == 2 and world.captain.generation == 1
    world.place.fails = None
    world.pass_time(60)
    world.deliver_all()
    assert counted(world) == [SnapshotId(20, 1), SnapshotId(10, 1)]


def test_while_a_store_fails_the_newest_snapshot_replaces_a_waiting_one() -> None:
    world = up(a_plan())
    world.place.fails = AWAY
    committed(world, 10, 20, 30)
    world.place.fails = None
    world.pass_time(5)
    world.deliver_all()
    assert counted(world) == [SnapshotId(30, 1)] and world.captain.commits.skipped == 2


def test_a_generation_waits_for_an_unavailable_store_with_a_warning() -> None:
    world = committed(up(a_plan()), 10)
    world.place.fails = AWAY
    world.exit("worker-1", "signal")
    world.deliver_all()
    for _ in range(5):
        world.pass_time(3)
        world.deliver_all()
    assert world.running() == [] and world.over is None
    assert warnings(world) == ["generation 2 waits for its snapshot: the bucket does not answer"]
    world.place.fails = None
    world.pass_time(3)
    world.deliver_all()
    assert restored(world) == [None, "step-10-g1"]


def test_a_store_that_stays_unavailable_ends_the_run_after_limits_start() -> None:
    world = committed(up(a_plan(start=30.0)), 10)
    world.place.fails = AWAY
    world.exit("worker-1", "signal")
    world.deliver_all()
    for _ in range(20):
        world.pass_time(2)
        world.deliver_all()
    assert world.over is not None and (world.over.reason, world.over.cause) == (AWAY.text, "store")


def test_a_store_that_refuses_access_ends_a_run_that_must_restart() -> None:
    world = committed(up(a_plan()), 10)
    world.place.fails = REFUSED
    world.exit("worker-1", "signal")
    world.deliver_all()
    assert world.over is not None and (world.over.reason, world.over.cause) == (REFUSED.text, "store")


def with_owed_record(world: World) -> World:
    """Its second generation trains, and the record of that generation is not in the store."""
    world.place.read_only = AWAY
    world.exit("worker-1", "signal")
    world.deliver_all()
    assert restored(world)[1:] == ["step-10-g1"] and world.captain.commits.records
    return world


def test_training_continues_if_the_generation_record_cannot_be_written() -> None:
    world = with_owed_record(committed(up(a_plan()), 10))
    assert len(world.running()) == 2
    (text,) = warnings(world)
    assert text == (
        "cannot write to the snapshot store; training continues, but no snapshot is committed until this works: "
        + AWAY.text
    )


def test_nothing_is_committed_before_an_owed_record_is_written() -> None:
    world = with_owed_record(committed(up(a_plan()), 10))
    committed(world, 20)
    world.pass_time(10)
    world.deliver_all()
    assert world.place.snapshots.inventory().committed == {SnapshotId(10, 1)}
    world.place.read_only = None
    world.pass_time(3)
    assert world.place.snapshots.inventory().generation == 2
    world.deliver_all()
    assert counted(world) == [SnapshotId(20, 2), SnapshotId(10, 1)] and restored(world) == [None, "step-10-g1"]


def test_a_store_unavailable_for_the_fetch_and_for_the_record_does_not_block_training() -> None:
    world = committed(up(a_plan()), 10)
    world.place.fails = AWAY
    world.exit("worker-1", "signal")
    world.deliver_all()
    world.place.fails, world.place.read_only = None, AWAY
    world.pass_time(3)
    world.deliver_all()
    assert restored(world) == [None, "step-10-g1"] and len(world.running()) == 2


@pytest.mark.parametrize("with_notes", [True, False])
def test_a_returning_captain_still_owes_the_record(with_notes: bool) -> None:
    world = with_owed_record(committed(up(a_plan()), 10))
    committed(world, 20)
    world.place.read_only = None
    world.restart_captain(with_notes)
    world.join_all()
    world.deliver_all()
    world.pass_time(5)
    world.deliver_all()
    newest = committed(world, 30).told_committed[-1]
    assert counted(world)[0] == newest and newest.step == 30
    assert world.left is None


def test_a_returning_captain_owes_the_record_even_if_the_store_answers_before_members_join() -> None:
    world = with_owed_record(committed(up(a_plan()), 10))
    world.save("worker-0", 20)
    world.place.read_only = None
    world.restart_captain()
    world.tell(ev.Tick())
    world.answer()
    world.join_all()
    world.deliver_all()
    world.pass_time(5)
    world.deliver_all()
    assert counted(world)[0] == SnapshotId(20, 2) and world.captain.generation == 2


def test_a_record_that_was_written_just_before_the_captain_died_is_no_longer_owed() -> None:
    world = with_owed_record(committed(up(a_plan()), 10))
    world.place.read_only = None
    (owed,) = world.captain.commits.records.to_notes()
    assert world.place.answer(req.read_request(owed)) == req.GenerationBegun(), "and the answer is lost"
    world.restart_captain()
    world.join_all()
    world.pass_time(3)
    world.deliver_all()
    assert world.left is None and world.captain.generation == 2
    assert counted(committed(world, 20)) == [SnapshotId(20, 2), SnapshotId(10, 1)]


def test_a_captain_that_learns_of_a_later_generation_while_an_earlier_one_sends_can_still_commit() -> None:
    world = committed(up(a_plan()), 10)
    world.place.read_only = AWAY
    world.exit("worker-1", "signal")
    for host in HOSTS:
        world.deliver(host)  # they have the snapshot of step 10
    world.answer()
    assert world.captain.generation == 2 and world.captain.commits.records
    last_part = ev.PartSaved(
        HOSTS[0], "worker-0", SnapshotId(20, 1), 1, {}
    )  # by a task that was ended then: the captain does not know of it
    world.machines[HOSTS[0]].held["worker-0", last_part.snapshot] = last_part
    world.deliver(HOSTS[1])  # it has started generation 2, which the other host does not know of
    world.restart_captain(with_notes=False)
    world.place.read_only = None
    world.join(HOSTS[0])
    world.answer()
    assert ins.StorePart in pending_instructions(world, HOSTS[0]), "as far as the captain knows, this is generation 1"
    world.join(HOSTS[1])
    for _ in range(5):
        world.pass_time(3)
        world.deliver_all()
    assert committed(world, 30).told_committed == [SnapshotId(10, 1), SnapshotId(30, 3)]


# ---- the end


def test_the_run_waits_for_the_last_snapshot_at_the_end() -> None:
    world = up(a_plan(commit=60))
    world.place.fails = AWAY
    committed(world, 10)
    finish_training(world)
    world.pass_time(20)
    assert world.over is None and world.running() == []
    world.place.fails = None
    world.pass_time(20)
    world.deliver_all()
    world.pass_time(1)
    assert counted(world) == [SnapshotId(10, 1)]
    assert world.over is not None and world.over.status == "succeeded"


@pytest.mark.parametrize(("error", "waits"), [(AWAY, 60.0), (REFUSED, 0.0)])
def test_a_run_fails_if_its_last_snapshot_is_not_committed(error: req.Failure, waits: float) -> None:
    world = committed(up(a_plan(commit=60)), 10)
    world.place.fails = error
    committed(world, 20)
    finish_training(world)
    training_ended = world.now
    while world.over is None:
        world.pass_time(1)
        world.deliver_all()
    assert world.now - training_ended == pytest.approx(waits, abs=2)
    assert (world.over.status, world.over.cause) == ("failed", "store")
    assert world.over.reason == (
        "training succeeded, but the last snapshot (step 20) is not committed and exists only on worker-host-0: "
        + error.text
    )


def test_the_reason_names_limits_commit_if_the_last_snapshot_takes_longer() -> None:
    world = up(a_plan(commit=60))
    world.save("worker-0", 10)
    finish_training(world)
    world.machines[HOSTS[0]].inbox.clear()  # it is being sent forever
    world.pass_time(70)
    world.deliver_all()
    assert world.over is not None and world.over.reason.endswith(": it took longer than 60 s (limits.commit)")


def test_a_record_that_is_still_owed_at_the_end_is_the_reason() -> None:
    world = with_owed_record(committed(up(a_plan(commit=20)), 10))
    committed(world, 20)
    finish_training(world)
    for _ in range(30):
        world.pass_time(1)
        world.deliver_all()
    assert world.over is not None and world.over.status == "failed"
    assert world.over.reason.endswith("(step 20) is not committed and exists only on worker-host-0: " + AWAY.text)


def test_a_run_fails_if_its_last_snapshot_is_lost_with_its_host() -> None:
    world = up(a_plan())
    world.save("worker-0", 10)
    finish_training(world)
    world.host_is_replaced(HOSTS[0], dead=True)
    world.join_all()
    world.deliver_all()
    world.pass_time(10)
    world.deliver_all()
    assert world.over is not None and (world.over.status, world.over.cause) == ("failed", "store")
    assert world.over.reason == (
        "training succeeded, but the last snapshot (step 10) is not committed: it was lost with worker-host-0"
    )


def test_stop_waits_for_the_last_snapshot_too() -> None:
    world = up(a_plan())
    world.place.fails = AWAY
    committed(world, 10)
    world.tell(ev.StopRequested("a person said so"))
    world.deliver_all()
    assert world.running() == [] and world.over is None
    world.place.fails = None
    world.pass_time(5)
    world.deliver_all()
    world.pass_time(1)
    assert counted(world) == [SnapshotId(10, 1)]
    assert world.over is not None and world.over.status == "stopped"


def test_a_run_that_is_stopped_without_its_last_snapshot_stays_stopped_with_a_warning() -> None:
    world = up(a_plan(commit=30))
    world.place.fails = AWAY
    committed(world, 10)
    world.tell(ev.StopRequested("a person said so"))
    for _ in range(40):
        world.pass_time(1)
        world.deliver_all()
    assert world.over is not None and world.over.status == "stopped"
    assert warnings(world)[-1].startswith(
        "the last snapshot (step 10) is not committed and exists only on worker-host-0"
    )


# ---- evaluators


def test_an_evaluator_learns_of_each_committed_snapshot_and_a_late_one_of_the_newest() -> None:
    world = committed(up(a_plan(evaluator=True)), 10)
    assert world.machines["evaluator-host-0"].shown == SnapshotId(10, 1)
    committed(world, 20)
    assert world.machines["evaluator-host-0"].shown == SnapshotId(20, 1)
    world.host_is_replaced("evaluator-host-0", dead=True)
    world.join_all()
    world.deliver_all()
    assert world.machines["evaluator-host-0"].shown == SnapshotId(20, 1)


@pytest.mark.parametrize("to", ["", "s3://bucket"])
def test_an_evaluator_learns_of_the_newest_snapshot_from_a_returning_captain(to: str) -> None:
    world = committed(up(a_plan(evaluator=True, snapshots=Snapshots(to))), 10)
    world.host_is_replaced("evaluator-host-0", dead=True)
    world.restart_captain()
    world.join_all()
    world.deliver_all()
    assert world.machines["evaluator-host-0"].shown == SnapshotId(10, 1)


# ---- captains that come and go


def captain_returns(world: World, with_notes: bool) -> None:
    world.restart_captain(with_notes)
    world.join_all()
    world.deliver_all()
    world.pass_time(2)
    world.deliver_all()


@pytest.mark.parametrize("with_notes", [True, False])
def test_a_captain_that_returns_while_a_snapshot_is_sent_commits_it_once(with_notes: bool) -> None:
    world = committed(up(a_plan()), 10)
    world.save("worker-0", 20)
    captain_returns(world, with_notes)
    assert world.told_committed == [SnapshotId(10, 1), SnapshotId(20, 1)] and world.captain.generation == 1
    assert world.captain.commits.contents.chain == counted(world) == [SnapshotId(20, 1), SnapshotId(10, 1)]


@pytest.mark.parametrize("with_notes", [True, False])
@pytest.mark.parametrize("to", ["", "s3://bucket"])
def test_a_snapshot_committed_just_before_the_captain_died_counts_once(with_notes: bool, to: str) -> None:
    world = committed(up(a_plan(snapshots=Snapshots(to, keep=2))), 10)
    world.save("worker-0", 20)
    world.deliver(HOSTS[0])
    (commit,) = asked(world, req.CommitSnapshot)
    assert world.place.answer(commit) == req.Done(), "and the answer is lost"
    captain_returns(world, with_notes)
    assert world.captain.commits.contents.chain == counted(world) == [SnapshotId(20, 1), SnapshotId(10, 1)]
    assert copies_on_hosts(world)[HOSTS[0]] == [SnapshotId(20, 1)]
    assert counted(committed(world, 30)) == [SnapshotId(30, 1), SnapshotId(20, 1)]


@pytest.mark.parametrize("with_notes", [True, False])
def test_a_snapshot_that_was_skipped_is_not_committed_after_a_newer_one(with_notes: bool) -> None:
    world = committed(up(a_plan()), 30)
    copies = world.machines[HOSTS[0]].held
    copies["worker-0", SnapshotId(25, 1)] = ev.PartSaved(
        HOSTS[0], "worker-0", SnapshotId(25, 1)
    )  # the instruction to delete it was lost
    captain_returns(world, with_notes)
    assert counted(world)[0] == SnapshotId(30, 1) and SnapshotId(25, 1) not in counted(world)
    assert copies_on_hosts(world)[HOSTS[0]] == [SnapshotId(30, 1)]


def test_a_snapshot_of_a_member_that_reconnects_while_sending_is_reported_once() -> None:
    world = up(a_plan())
    world.save("worker-0", 10)
    world.disconnect(HOSTS[0])
    world.join(HOSTS[0])
    world.deliver_all()
    assert world.told_committed == [SnapshotId(10, 1)]
    assert world.kinds().count("saved") == 1


def test_a_captain_that_was_superseded_leaves() -> None:
    world = committed(up(a_plan()), 10)
    world.save("worker-0", 20)
    world.place.snapshots.begin(2, SnapshotId(10, 1), [SnapshotId(10, 1)], "another captain")
    world.deliver_all()
    assert world.left is not None and "a generation later than 1 exists" in world.left
    assert world.told_committed == [SnapshotId(10, 1)] and world.over is None


def test_a_commit_of_an_older_captain_between_the_choice_and_the_record_is_not_lost() -> None:
    world = committed(up(a_plan()), 10)
    parts = world.place.snapshots.manifest(SnapshotId(10, 1)).parts
    world.exit("worker-1", "signal")
    world.deliver(HOSTS[0])
    assert pending_instructions(world, HOSTS[1]) == [ins.PrepareHost], "step 10 is chosen"
    assert world.place.snapshots.commit(Manifest("run", SnapshotId(20, 1), 2, parts))
    world.deliver_all()
    assert restored(world) == [None, "step-10-g1", "step-20-g1"] and world.captain.generation == 3
    assert counted(world) == [SnapshotId(20, 1), SnapshotId(10, 1)]


@pytest.mark.parametrize("owes_record", [False, True])
def test_a_late_commit_of_an_older_captain_is_deleted_when_it_is_old(owes_record: bool) -> None:
    world = committed(up(a_plan(snapshots=Snapshots("s3://bucket", keep=2))), 10)
    parts = world.place.snapshots.manifest(SnapshotId(10, 1)).parts
    if owes_record:
        with_owed_record(world)
    else:
        world.exit("worker-1", "signal")
        world.deliver(HOSTS[0])
    assert world.place.snapshots.commit(Manifest("run", SnapshotId(20, 1), 2, parts))
    world.place.read_only = None
    world.pass_time(3)
    world.deliver_all()
    assert counted(committed(world, 30)) == [SnapshotId(30, 3), SnapshotId(20, 1)]
    assert counted(committed(world, 40)) == [SnapshotId(40, 3), SnapshotId(30, 3)]


def test_a_late_commit_of_an_older_captain_is_kept_if_it_is_the_best() -> None:
    world = up(a_plan(snapshots=Snapshots("s3://bucket", keep=1, best=("loss", True))))
    world.save("worker-0", 10, loss=0.9)
    world.deliver_all()
    parts = world.place.snapshots.manifest(SnapshotId(10, 1)).parts
    world.exit("worker-1", "signal")
    world.deliver(HOSTS[0])
    assert world.place.snapshots.commit(Manifest("run", SnapshotId(20, 1), 2, parts, {"loss": 0.1}))
    world.deliver_all()
    world.save("worker-0", 30, loss=0.5)
    world.deliver_all()
    assert counted(world) == [SnapshotId(30, 3), SnapshotId(20, 1)]
    assert world.last("committed")["best"]["snapshot"] == "step-20-g1"


def test_a_snapshot_of_a_newer_version_is_not_deleted_after_a_late_commit_of_an_older_captain() -> None:
    world = committed(up(a_plan(snapshots=Snapshots("s3://bucket", keep=2))), 10, 30)
    parts = world.place.snapshots.manifest(SnapshotId(10, 1)).parts
    world.place.damaged, world.place.damage = {SnapshotId(30, 1)}, "newer"
    world.exit("worker-1", "signal")
    world.deliver(HOSTS[0])
    assert world.place.snapshots.commit(Manifest("run", SnapshotId(20, 1), 2, parts))
    world.deliver_all()
    committed(world, 40)
    assert world.place.snapshots.has(SnapshotId(30, 1))


def test_training_restarts_from_a_late_commit_of_an_older_captain_before_an_owed_record() -> None:
    world = committed(up(a_plan()), 10)
    parts = world.place.snapshots.manifest(SnapshotId(10, 1)).parts
    with_owed_record(world)
    assert world.place.snapshots.commit(Manifest("run", SnapshotId(20, 1), 2, parts))
    world.place.read_only = None
    world.pass_time(3)
    world.deliver_all()
    assert restored(world) == [None, "step-10-g1", "step-20-g1"]
    assert counted(committed(world, 30)) == [SnapshotId(30, 3), SnapshotId(20, 1), SnapshotId(10, 1)]


def test_a_captain_that_returns_after_the_lease_starts_from_the_snapshot_saved_meanwhile() -> None:
    world = committed(up(a_plan()), 10)
    world.restart_captain()
    world.save("worker-0", 20)
    world.pass_time(LEASE + 2)
    world.join_all()
    world.deliver_all()
    world.pass_time(LEASE + 2)
    world.deliver_all()
    assert restored(world)[-1] == "step-20-g1" and counted(world)[0] == SnapshotId(20, 1)


def test_a_watched_folder_is_prepared_on_every_host_even_without_a_snapshot() -> None:
    world = World(a_plan(snapshots=Snapshots(watch="ckpt")))
    world.join_all()
    world.answer()
    world.deliver(HOSTS[0])
    assert pending_instructions(world, HOSTS[1]) == [ins.PrepareHost] and world.started == []
    world.deliver_all()
    assert len(world.started) == 2
    world.exit("worker-1", "signal")
    world.deliver_all()
    assert restored(world) == [None, None]
    assert [machine.prepared for machine in world.machines.values()] == [2, 2]


def test_a_captain_that_was_frozen_before_a_deletion_deletes_nothing_and_steps_down() -> None:
    world = committed(up(a_plan(snapshots=Snapshots("s3://bucket", keep=1))), 10)
    world.save("worker-0", 20)
    world.deliver(HOSTS[0])
    world.answer_one()  # step 20 is committed, and step 10 is about to be deleted
    assert [request.snapshot for request in asked(world, req.DeleteSnapshot)] == [SnapshotId(10, 1)]
    both = [SnapshotId(20, 1), SnapshotId(10, 1)]
    world.place.snapshots.begin(2, SnapshotId(10, 1), both, "another captain")
    world.deliver_all()
    assert world.place.snapshots.inventory().current() == [SnapshotId(10, 1)]
    assert world.left is not None and "a generation later than 1 exists" in world.left
