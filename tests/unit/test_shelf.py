"""What becomes of a snapshot, one situation at a time: from saved to committed, and what a generation begins from."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.agent import events as ev
from paceline.agent.captaincy import MEMBER_LIMIT
from paceline.agent.messages import FILES_AT_ONCE, read_member, stored
from paceline.agent.shelf import restores
from paceline.agent.wire import Decoder, encode
from paceline.plan import Snapshots
from paceline.storage import manifest
from paceline.storage.manifest import PATH_LIMIT, Id, Manifest
from support.committing import AWAY, a_plan, asked, committed, counted, warnings
from support.worlds import LEASE, World, up

REFUSED = {"kind": "store", "text": "the credentials are not accepted", "passing": False}
HOSTS = ("worker-host-0", "worker-host-1")


def held(world: World) -> dict[str, list[Id]]:
    """By host, what is there."""
    return {name: [id for _, id in sorted(machine.held)] for name, machine in world.machines.items()}


def restored(world: World) -> list[str | None]:
    return [fields["restore"] for kind, _, fields in world.events if kind == "generation-formed"]


def words(world: World, host: str) -> list[str]:
    """What the captain has said to a host and it has not heard yet."""
    return [word.message["type"] for word in world.machines[host].inbox if isinstance(word, ev.Say)]


def tell_stored(world: World, files: list[Any], lost: int | None = None) -> None:
    """By worker-0, of step 10, in messages of which one may be lost."""
    world.place.sent.add(("worker-0", Id(10, 1)))
    for number, message in enumerate(stored("worker-0", Id(10, 1), files)):
        (received,) = Decoder(MEMBER_LIMIT).feed(encode(message))
        if number != lost:
            world.tell(read_member(received, HOSTS[0]))
    world.answer()


def ends_well(world: World) -> None:
    for task in ("worker-0", "worker-1"):
        world.exit(task, "")


# ---- saved, then committed


def test_what_is_saved_is_committed() -> None:
    world = up(a_plan())
    world.save("worker-0", 10)
    assert world.last("saved") == {"step": 10, "snapshot": "step-10-g1"}
    assert world.told_committed == []
    world.now += 1.5
    world.deliver_all()
    assert world.last("committed") == {"step": 10, "snapshot": "step-10-g1", "bytes": 1, "took_s": 1.5}
    assert counted(world) == [Id(10, 1)]
    manifest = world.place.snapshots.manifest(Id(10, 1))
    assert (manifest.run, manifest.world, [part.task for part in manifest.parts]) == ("run", 2, ["worker-0"])


def test_the_newest_is_next_and_what_is_skipped_is_counted() -> None:
    world = up(a_plan())
    for step in (10, 20, 30, 40):
        world.save("worker-0", step)
    assert words(world, HOSTS[0]).count("send") == 1, "one is sent at a time"
    world.deliver_all()
    assert counted(world) == [Id(40, 1), Id(10, 1)]
    assert world.captain.shelf.skipped == 2
    assert held(world)[HOSTS[0]] == [Id(40, 1)], "what was skipped is let go"


def test_a_part_of_each_task_makes_one_snapshot_and_all_of_them_are_needed() -> None:
    world = up(a_plan())
    world.save("worker-1", 10, parts=2)
    world.deliver_all()
    assert "saved" not in world.kinds() and counted(world) == []
    world.save("worker-0", 10, parts=2)
    world.deliver_all()
    assert world.kinds().count("saved") == 1 and counted(world) == [Id(10, 1)]
    manifest = world.place.snapshots.manifest(Id(10, 1))
    assert [part.task for part in manifest.parts] == ["worker-0", "worker-1"], "in the order of the tasks"


def test_nothing_is_committed_while_one_part_is_still_on_its_way() -> None:
    world = up(a_plan())
    for task in ("worker-0", "worker-1"):
        world.save(task, 10, parts=2)
    world.deliver(HOSTS[0])
    world.answer()
    assert counted(world) == []
    world.deliver(HOSTS[1])
    world.answer()
    assert counted(world) == [Id(10, 1)]


def test_a_part_that_is_lost_with_its_host_is_never_committed() -> None:
    world = committed(up(a_plan()), 10)
    for task in ("worker-0", "worker-1"):
        world.save(task, 20, parts=2)
    world.deliver(HOSTS[0])
    world.host_is_replaced(HOSTS[1], dead=True)
    world.join_all()
    world.deliver_all()
    world.pass_time(60)
    world.deliver_all()
    assert counted(world) == [Id(10, 1)] and restored(world) == [None, "step-10-g1"]
    assert held(world) == {HOSTS[0]: [Id(10, 1)], HOSTS[1]: []}


def test_where_each_task_saves_the_whole_one_copy_is_taken() -> None:
    world = up(a_plan(3))
    for task in ("worker-1", "worker-0", "worker-2"):
        world.save(task, 10)
    world.deliver_all()
    assert world.told_committed == [Id(10, 1)] and world.kinds().count("saved") == 1
    assert held(world) == {HOSTS[0]: [], HOSTS[1]: [Id(10, 1)], "worker-host-2": []}


def test_a_folder_that_cannot_be_a_snapshot_is_dropped_with_its_reason() -> None:
    world = committed(up(a_plan()), 10)
    world.save("worker-0", 20)
    unfit = {"kind": "unfit", "text": "'odd' is no file", "passing": False}
    world.tell(ev.Stored(HOSTS[0], "worker-0", Id(20, 1), error=unfit))
    world.deliver_all()
    assert warnings(world) == ["the snapshot of step 20 by worker-0 on worker-host-0 is not taken: 'odd' is no file"]
    assert held(world)[HOSTS[0]] == [Id(10, 1)]
    assert counted(committed(world, 30)) == [Id(30, 1), Id(10, 1)]


def test_a_snapshot_of_90_000_files_is_told_in_messages_that_the_captain_takes() -> None:
    files = [[f"of/rank-0/{number:06d}.array", 1, f"{number:064x}"] for number in range(90_000)]
    world = up(a_plan())
    world.save("worker-0", 10)
    tell_stored(world, files)
    assert [file.path for file in world.place.snapshots.manifest(Id(10, 1)).parts[0].files] == [f[0] for f in files]
    longest = [["\U0001f6b4" * PATH_LIMIT, 2**50, "0" * 64]] * FILES_AT_ONCE
    assert all(len(encode(message)) < MEMBER_LIMIT for message in stored("worker-0", Id(10, 1), longest))


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_files_whose_message_is_lost_are_told_again_with_the_others(lost: int) -> None:
    files = [[f"{number:06d}", 1, "0" * 64] for number in range(2 * FILES_AT_ONCE + 1)]
    world = up(a_plan())
    world.save("worker-0", 10)
    tell_stored(world, files, lost)
    assert counted(world) == []
    world.disconnect(HOSTS[0])
    world.join(HOSTS[0])
    assert "send" in words(world, HOSTS[0])
    tell_stored(world, files)
    assert len(world.place.snapshots.manifest(Id(10, 1)).parts[0].files) == len(files)


def test_a_snapshot_whose_manifest_would_be_too_large_is_dropped_with_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(manifest, "MOST_BYTES", 2**20)
    files = [[f"{number:0{PATH_LIMIT}d}", 1, "0" * 64] for number in range(1000)]
    world = committed(up(a_plan()), 5)
    world.save("worker-0", 10)
    tell_stored(world, files)
    world.deliver_all()
    limit = "its 1000 files take 2 MiB in a manifest, which may have 1 MiB, room for about 400,000"
    assert warnings(world) == [f"the snapshot of step 10 by all its tasks is not taken: {limit}"]
    assert counted(committed(world, 20)) == [Id(20, 1), Id(5, 1)]


def test_a_task_that_saves_an_earlier_step_takes_nothing_back() -> None:
    world = committed(up(a_plan()), 20)
    committed(world, 10)
    world.exit("worker-1", "signal")
    world.deliver_all()
    assert restored(world)[-1] == "step-20-g1" and counted(world)[0] == Id(20, 1)


def test_each_new_snapshot_is_progress_also_behind_steps_that_were_lost() -> None:
    world = committed(up(a_plan(limit=1)), 10)
    world.step(50)
    for step in (20, 30, 40):
        world.exit("worker-1", "signal")
        world.deliver_all()
        assert world.last("restart")["count"] == 1 and world.last("restart")["delay_s"] == 0
        committed(world, step)


# ---- retention, and copies on hosts


def test_the_newest_few_are_kept() -> None:
    world = committed(up(a_plan(snapshots=Snapshots("s3://bucket", keep=2))), 10, 20, 30, 40)
    assert counted(world) == [Id(40, 1), Id(30, 1)]
    assert world.place.snapshots.known().committed == {Id(40, 1), Id(30, 1)}


@pytest.mark.parametrize(("lowest", "best"), [(True, 20), (False, 10)])
def test_the_best_by_a_metric_is_kept_besides(lowest: bool, best: int) -> None:
    world = up(a_plan(snapshots=Snapshots("s3://bucket", keep=1, best=("loss", lowest))))
    for step, loss in ((10, 0.9), (20, 0.1), (30, 0.5), (40, 0.4)):
        world.save("worker-0", step, loss=loss)
        world.deliver_all()
    assert counted(world) == [Id(40, 1), Id(best, 1)]


def test_a_metric_that_no_snapshot_has_is_told_once() -> None:
    world = up(a_plan(snapshots=Snapshots("s3://bucket", keep=1, best=("los", True))))
    for step in (10, 20):
        world.save("worker-0", step, loss=0.5, accuracy=0.9)
        world.deliver_all()
    assert warnings(world) == [
        "the snapshot of step 10 has no los, by which snapshots.best chooses: only accuracy, loss"
    ]


def test_a_captain_that_returns_knows_which_was_the_best() -> None:
    world = up(a_plan(snapshots=Snapshots("s3://bucket", keep=1, best=("loss", True))))
    for step, loss in ((10, 0.1), (20, 0.5)):
        world.save("worker-0", step, loss=loss)
        world.deliver_all()
    world.restart_captain(with_notes=False)
    world.join_all()
    world.deliver_all()
    world.save("worker-0", 30, loss=0.4)
    world.deliver_all()
    assert counted(world) == [Id(30, 1), Id(10, 1)]


def test_the_snapshots_that_a_run_before_it_left_out_of_the_chain_go_too() -> None:
    world = committed(up(a_plan(snapshots=Snapshots("s3://bucket", keep=2))), 10)
    world.exit("worker-0", "signal")
    world.deliver_all()
    committed(world, 20, 30)
    assert world.place.snapshots.known().committed == {Id(30, 2), Id(20, 2)}


def test_a_host_keeps_the_newest_that_is_committed_until_there_is_a_newer_one() -> None:
    world = committed(up(a_plan()), 10)
    assert held(world)[HOSTS[0]] == [Id(10, 1)]
    assert held(committed(world, 20))[HOSTS[0]] == [Id(20, 1)]


def test_when_the_run_is_over_hosts_keep_nothing_that_is_committed() -> None:
    world = committed(up(a_plan()), 10)
    ends_well(world)
    world.deliver_all()
    assert world.over is not None and held(world) == {HOSTS[0]: [], HOSTS[1]: []}


@pytest.mark.parametrize("to", ["", "/mnt/snapshots"])
def test_where_the_place_is_a_folder_hosts_keep_nothing(to: str) -> None:
    world = committed(up(a_plan(snapshots=Snapshots(to))), 10)
    assert held(world)[HOSTS[0]] == []


def test_what_an_older_generation_had_saved_and_not_committed_is_let_go() -> None:
    world = up(a_plan())
    world.save("worker-0", 10, parts=2)
    world.exit("worker-1", "signal")
    world.deliver_all()
    assert restored(world) == [None, None] and held(world)[HOSTS[0]] == []


def test_what_was_sent_and_never_committed_goes_when_the_next_generation_has_begun() -> None:
    world = committed(up(a_plan()), 10)
    for name in ("step-20-g1/worker-0/state", "step-30-g2/worker-0/state"):
        world.place.store.create(f"run/{name}", b"1")
    owing(world)
    assert world.place.store.names("run/step-20"), "it may still be committed, and then it counts"
    world.place.read_only = None
    world.pass_time(3)
    world.exit("worker-1", "signal")
    world.deliver_all()
    world.pass_time(3)  # the back-off of a second failure
    world.deliver_all()
    assert world.captain.generation == 3
    assert not world.place.store.names("run/step-20") and not world.place.store.names("run/step-30")
    assert counted(world) == [Id(10, 1)]


def test_an_old_snapshot_that_cannot_be_deleted_is_a_warning_and_goes_with_the_next() -> None:
    world = committed(up(a_plan(snapshots=Snapshots("s3://bucket", keep=1))), 10)
    world.save("worker-0", 20)
    world.deliver(HOSTS[0])
    world.answer_one()
    world.place.read_only = REFUSED
    world.deliver_all()
    assert warnings(world) == ["an old snapshot could not be deleted: the credentials are not accepted"]
    world.place.read_only = None
    committed(world, 30)
    assert counted(world) == [Id(30, 1)]
    assert not world.place.store.names("run/step-10") and not world.place.store.names("run/step-20")


# ---- what a generation begins from


def test_a_generation_begins_from_the_newest_and_not_before_every_host_has_it() -> None:
    world = committed(up(a_plan()), 10, 20)
    world.exit("worker-1", "signal")
    world.deliver(HOSTS[0])
    world.deliver(HOSTS[1])
    world.deliver(HOSTS[0])
    assert world.machines[HOSTS[0]].restored == Id(20, 1) and restored(world) == [None]
    world.deliver_all()
    assert restored(world) == [None, "step-20-g1"]


def test_what_is_saved_settles_before_a_generation_begins() -> None:
    world = committed(up(a_plan()), 10)
    world.save("worker-0", 20)
    world.exit("worker-0", "signal")
    world.deliver_all()
    assert restored(world) == [None, "step-20-g1"]


def test_what_does_not_settle_within_the_grace_is_given_up() -> None:
    world = committed(up(a_plan()), 10)
    world.save("worker-0", 20)
    sends = world.machines[HOSTS[0]].inbox.popleft()
    assert sends.message["type"] == "send"
    world.exit("worker-1", "signal")
    world.deliver_all()
    assert restored(world) == [None]
    world.pass_time(world.plan.limits.grace + 1)
    world.deliver_all()
    assert restored(world) == [None, "step-10-g1"]
    assert held(world)[HOSTS[0]] == [Id(10, 1)]


@pytest.mark.parametrize("kind", ["damaged", "newer"])
def test_one_that_cannot_be_read_is_passed_over_on_all_hosts_with_a_warning_that_names_it(kind: str) -> None:
    world = committed(up(a_plan()), 10, 20, 30)
    world.place.damaged = {Id(30, 1), Id(20, 1)}
    world.place.damage = kind
    world.exit("worker-1", "signal")
    world.deliver_all()
    assert restored(world) == [None, "step-10-g1"]
    assert [machine.restored for machine in world.machines.values()] == [Id(10, 1)] * 2
    assert warnings(world) == [
        "the snapshot of step 30 is passed over: step-30-g1 is damaged",
        "the snapshot of step 20 is passed over: step-20-g1 is damaged",
    ]
    assert counted(committed(world, 15)) == [Id(15, 2), Id(10, 1)], "what was passed over does not count any more"


def test_what_was_passed_over_is_not_kept_in_the_place_of_what_counts() -> None:
    world = committed(up(a_plan(snapshots=Snapshots("s3://bucket/runs", keep=2))), 20, 30)
    world.place.damaged = {Id(30, 1)}
    world.exit("worker-1", "signal")
    world.deliver_all()
    committed(world, 25)
    assert counted(world) == [Id(25, 2), Id(20, 1)]
    assert world.place.snapshots.known().committed == {Id(25, 2), Id(20, 1)}


def test_one_of_a_newer_version_is_not_deleted() -> None:
    world = committed(up(a_plan(snapshots=Snapshots("s3://bucket/runs", keep=1))), 20)
    world.place.damaged, world.place.damage = {Id(20, 1)}, "newer"
    world.exit("worker-1", "signal")
    world.deliver_all()
    committed(world, 5)
    assert world.place.snapshots.known().committed == {Id(5, 2), Id(20, 1)}


def test_where_none_can_be_read_training_begins_from_nothing() -> None:
    world = committed(up(a_plan()), 10)
    world.place.damaged = {Id(10, 1)}
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
    assert world.machines[HOSTS[1]].restored == Id(10, 1)


def test_an_answer_to_a_beginning_that_was_given_up_is_no_answer_to_the_next() -> None:
    world = up(a_plan())
    world.exit("worker-1", "signal")
    world.deliver(HOSTS[0])
    world.deliver(HOSTS[1])
    (first,) = asked(world, "begin")
    world.disconnect(HOSTS[1])
    world.join(HOSTS[1])
    assert len(asked(world, "begin")) == 2, "the first was given up"
    world.place.asked.popleft()
    world.tell(ev.Answered(first, world.place.answer(first)))
    assert restored(world) == [None], "the record of this generation is not there yet"
    world.deliver_all()
    assert restored(world) == [None, None]
    assert world.place.snapshots.known().generation == world.captain.generation


def test_of_a_parameter_server_job_the_chief_alone_restores() -> None:
    world = up(a_plan(1, ps=1, chief=True))
    world.save("chief-0", 10)
    world.deliver_all()
    world.exit("ps-0", "signal")
    world.deliver_all()
    assert restored(world)[-1] == "step-10-g1"
    assert {name: machine.restored for name, machine in world.machines.items()} == {
        "chief-host-0": Id(10, 1), "worker-host-0": None, "ps-host-0": None,
    }  # fmt: skip
    assert [task.name for task in world.plan.tasks if restores(world.plan, task)] == ["chief-0"]


# ---- a place that fails


@pytest.mark.parametrize("error", [AWAY, REFUSED])
@pytest.mark.parametrize("how", ["fails", "read_only"])
def test_a_place_that_fails_at_the_start_ends_the_run_before_any_task(error: dict[str, Any], how: str) -> None:
    world = World(a_plan())
    setattr(world.place, how, error)
    world.join_all()
    world.deliver_all()
    assert world.over is not None
    assert (world.over.status, world.over.reason, world.over.cause) == ("failed", error["text"], "store")
    assert world.started == []


def test_a_place_that_fails_later_is_a_warning_and_what_was_saved_is_committed_once_it_heals() -> None:
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
    assert counted(world) == [Id(20, 1), Id(10, 1)]


def test_while_a_place_fails_the_newest_takes_the_turn_of_what_waits() -> None:
    world = up(a_plan())
    world.place.fails = AWAY
    committed(world, 10, 20, 30)
    world.place.fails = None
    world.pass_time(5)
    world.deliver_all()
    assert counted(world) == [Id(30, 1)] and world.captain.shelf.skipped == 2


def test_a_generation_waits_for_a_place_that_is_away_and_says_so() -> None:
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


def test_a_place_that_stays_away_ends_the_run_after_limits_start() -> None:
    world = committed(up(a_plan(start=30.0)), 10)
    world.place.fails = AWAY
    world.exit("worker-1", "signal")
    world.deliver_all()
    for _ in range(20):
        world.pass_time(2)
        world.deliver_all()
    assert world.over is not None and (world.over.reason, world.over.cause) == (AWAY["text"], "store")


def test_a_place_that_refuses_ends_a_run_that_must_begin_again() -> None:
    world = committed(up(a_plan()), 10)
    world.place.fails = REFUSED
    world.exit("worker-1", "signal")
    world.deliver_all()
    assert world.over is not None and (world.over.reason, world.over.cause) == (REFUSED["text"], "store")


def owing(world: World) -> World:
    """Its second generation trains, and the record of that is not at the place."""
    world.place.read_only = AWAY
    world.exit("worker-1", "signal")
    world.deliver_all()
    assert restored(world)[1:] == ["step-10-g1"] and world.captain.shelf.owed is not None
    return world


def test_a_record_that_cannot_be_written_is_owed_and_training_goes_on() -> None:
    world = owing(committed(up(a_plan()), 10))
    assert len(world.running()) == 2
    (text,) = warnings(world)
    assert text == (
        "the place for snapshots cannot be written to: training goes on, and nothing is committed until it can: "
        + AWAY["text"]
    )


def test_nothing_is_committed_before_a_record_that_is_owed_is_there() -> None:
    world = owing(committed(up(a_plan()), 10))
    committed(world, 20)
    world.pass_time(10)
    world.deliver_all()
    assert world.place.snapshots.known().committed == {Id(10, 1)}
    world.place.read_only = None
    world.pass_time(3)
    assert world.place.snapshots.known().generation == 2
    world.deliver_all()
    assert counted(world) == [Id(20, 2), Id(10, 1)] and restored(world) == [None, "step-10-g1"]


def test_a_place_that_was_away_for_the_fetch_and_for_the_record_holds_nothing_up() -> None:
    world = committed(up(a_plan()), 10)
    world.place.fails = AWAY
    world.exit("worker-1", "signal")
    world.deliver_all()
    world.place.fails, world.place.read_only = None, AWAY
    world.pass_time(3)
    world.deliver_all()
    assert restored(world) == [None, "step-10-g1"] and len(world.running()) == 2


@pytest.mark.parametrize("with_notes", [True, False])
def test_a_captain_that_returns_owes_what_the_one_before_owed(with_notes: bool) -> None:
    world = owing(committed(up(a_plan()), 10))
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


def test_it_does_so_where_the_place_answers_before_anybody_joins() -> None:
    world = owing(committed(up(a_plan()), 10))
    world.save("worker-0", 20)
    world.place.read_only = None
    world.restart_captain()
    world.tell(ev.Tick())
    world.answer()
    world.join_all()
    world.deliver_all()
    world.pass_time(5)
    world.deliver_all()
    assert counted(world)[0] == Id(20, 2) and world.captain.generation == 2


def test_a_record_that_was_written_just_before_the_captain_died_is_not_owed_any_more() -> None:
    world = owing(committed(up(a_plan()), 10))
    world.place.read_only = None
    owed = world.captain.shelf.owed
    assert owed is not None
    assert world.place.answer(owed) == {"late": []}, "and nobody hears of it"
    world.restart_captain()
    world.join_all()
    world.pass_time(3)
    world.deliver_all()
    assert world.left is None and world.captain.generation == 2
    assert counted(committed(world, 20)) == [Id(20, 2), Id(10, 1)]


def test_a_captain_that_hears_of_a_later_generation_while_an_earlier_one_sends_goes_on_committing() -> None:
    world = committed(up(a_plan()), 10)
    world.place.read_only = AWAY
    world.exit("worker-1", "signal")
    for host in HOSTS:
        world.deliver(host)  # they have the snapshot of step 10
    world.answer()
    assert world.captain.generation == 2 and world.captain.shelf.owed is not None
    last = ev.Saved(HOSTS[0], "worker-0", Id(20, 1), 1, {})  # by a task that was ended then: nobody has heard of it
    world.machines[HOSTS[0]].held["worker-0", last.id] = last
    world.deliver(HOSTS[1])  # it has begun generation 2, of which the other does not know
    world.restart_captain(with_notes=False)
    world.place.read_only = None
    world.join(HOSTS[0])
    world.answer()
    assert "send" in words(world, HOSTS[0]), "as far as the captain knows, this is generation 1"
    world.join(HOSTS[1])
    for _ in range(5):
        world.pass_time(3)
        world.deliver_all()
    assert committed(world, 30).told_committed == [Id(10, 1), Id(30, 3)]


# ---- the end


def test_the_last_snapshot_is_awaited_at_the_end() -> None:
    world = up(a_plan(commit=60))
    world.place.fails = AWAY
    committed(world, 10)
    ends_well(world)
    world.pass_time(20)
    assert world.over is None and world.running() == []
    world.place.fails = None
    world.pass_time(20)
    world.deliver_all()
    world.pass_time(1)
    assert counted(world) == [Id(10, 1)]
    assert world.over is not None and world.over.status == "succeeded"


@pytest.mark.parametrize(("error", "waits"), [(AWAY, 60.0), (REFUSED, 0.0)])
def test_training_that_succeeded_without_its_last_snapshot_has_failed(error: dict[str, Any], waits: float) -> None:
    world = committed(up(a_plan(commit=60)), 10)
    world.place.fails = error
    committed(world, 20)
    ends_well(world)
    before = world.now
    while world.over is None:
        world.pass_time(1)
        world.deliver_all()
    assert world.now - before == pytest.approx(waits, abs=2)
    assert (world.over.status, world.over.cause) == ("failed", "store")
    assert world.over.reason == (
        "training succeeded, but the last snapshot (step 20) is not committed and is on worker-host-0 only: "
        + error["text"]
    )


def test_a_snapshot_that_takes_longer_than_limits_commit_says_so() -> None:
    world = up(a_plan(commit=60))
    world.save("worker-0", 10)
    ends_well(world)
    world.machines[HOSTS[0]].inbox.clear()  # it is being sent, for ever
    world.pass_time(70)
    world.deliver_all()
    assert world.over is not None and world.over.reason.endswith(": 60 s (limits.commit) were not enough")


def test_a_record_that_is_still_owed_at_the_end_is_the_reason() -> None:
    world = owing(committed(up(a_plan(commit=20)), 10))
    committed(world, 20)
    ends_well(world)
    for _ in range(30):
        world.pass_time(1)
        world.deliver_all()
    assert world.over is not None and world.over.status == "failed"
    assert world.over.reason.endswith("(step 20) is not committed and is on worker-host-0 only: " + AWAY["text"])


def test_a_last_snapshot_that_is_lost_with_its_host_fails_the_run() -> None:
    world = up(a_plan())
    world.save("worker-0", 10)
    ends_well(world)
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
    world.tell(ev.Stop("a person said so"))
    world.deliver_all()
    assert world.running() == [] and world.over is None
    world.place.fails = None
    world.pass_time(5)
    world.deliver_all()
    world.pass_time(1)
    assert counted(world) == [Id(10, 1)]
    assert world.over is not None and world.over.status == "stopped"


def test_a_run_that_is_stopped_without_its_last_snapshot_stays_stopped_and_says_so() -> None:
    world = up(a_plan(commit=30))
    world.place.fails = AWAY
    committed(world, 10)
    world.tell(ev.Stop("a person said so"))
    for _ in range(40):
        world.pass_time(1)
        world.deliver_all()
    assert world.over is not None and world.over.status == "stopped"
    assert warnings(world)[-1].startswith("the last snapshot (step 10) is not committed and is on worker-host-0 only")


# ---- evaluators


def test_an_evaluator_is_told_of_each_that_is_committed_and_one_that_joins_later_of_the_newest() -> None:
    world = committed(up(a_plan(evaluator=True)), 10)
    assert world.machines["evaluator-host-0"].shown == Id(10, 1)
    committed(world, 20)
    assert world.machines["evaluator-host-0"].shown == Id(20, 1)
    world.host_is_replaced("evaluator-host-0", dead=True)
    world.join_all()
    world.deliver_all()
    assert world.machines["evaluator-host-0"].shown == Id(20, 1)


@pytest.mark.parametrize("to", ["", "s3://bucket"])
def test_an_evaluator_is_told_by_a_captain_that_has_returned(to: str) -> None:
    world = committed(up(a_plan(evaluator=True, snapshots=Snapshots(to))), 10)
    world.host_is_replaced("evaluator-host-0", dead=True)
    world.restart_captain()
    world.join_all()
    world.deliver_all()
    assert world.machines["evaluator-host-0"].shown == Id(10, 1)


# ---- captains that come and go


def returns(world: World, with_notes: bool) -> None:
    world.restart_captain(with_notes)
    world.join_all()
    world.deliver_all()
    world.pass_time(2)
    world.deliver_all()


@pytest.mark.parametrize("with_notes", [True, False])
def test_a_captain_that_returns_while_a_snapshot_is_sent_commits_it_once(with_notes: bool) -> None:
    world = committed(up(a_plan()), 10)
    world.save("worker-0", 20)
    returns(world, with_notes)
    assert world.told_committed == [Id(10, 1), Id(20, 1)] and world.captain.generation == 1
    assert world.captain.shelf.counted == counted(world) == [Id(20, 1), Id(10, 1)]


@pytest.mark.parametrize("with_notes", [True, False])
@pytest.mark.parametrize("to", ["", "s3://bucket"])
def test_what_the_captain_before_had_committed_unheard_counts_once(with_notes: bool, to: str) -> None:
    world = committed(up(a_plan(snapshots=Snapshots(to, keep=2))), 10)
    world.save("worker-0", 20)
    world.deliver(HOSTS[0])
    (commit,) = asked(world, "commit")
    assert world.place.answer(commit) == {"new": True}, "and nobody hears of it"
    returns(world, with_notes)
    assert world.captain.shelf.counted == counted(world) == [Id(20, 1), Id(10, 1)]
    assert held(world)[HOSTS[0]] == ([Id(20, 1)] if to else [])
    assert counted(committed(world, 30)) == [Id(30, 1), Id(20, 1)]


@pytest.mark.parametrize("with_notes", [True, False])
def test_a_snapshot_that_was_skipped_is_not_committed_after_a_newer_one(with_notes: bool) -> None:
    world = committed(up(a_plan()), 30)
    here = world.machines[HOSTS[0]].held
    here["worker-0", Id(25, 1)] = ev.Saved(HOSTS[0], "worker-0", Id(25, 1))  # the word that it may go was lost
    returns(world, with_notes)
    assert counted(world)[0] == Id(30, 1) and Id(25, 1) not in counted(world)
    assert held(world)[HOSTS[0]] == [Id(30, 1)]


def test_a_member_that_dials_again_while_it_sends_is_asked_again_and_told_of_once() -> None:
    world = up(a_plan())
    world.save("worker-0", 10)
    world.disconnect(HOSTS[0])
    world.join(HOSTS[0])
    world.deliver_all()
    assert world.told_committed == [Id(10, 1)]
    assert world.kinds().count("saved") == 1


def test_a_captain_that_another_has_overtaken_leaves() -> None:
    world = committed(up(a_plan()), 10)
    world.save("worker-0", 20)
    world.place.snapshots.begin(2, Id(10, 1), [Id(10, 1)], "another captain")
    world.deliver_all()
    assert world.left is not None and "there is a later generation than 1" in world.left
    assert world.told_committed == [Id(10, 1)] and world.over is None


def test_what_an_older_captain_commits_between_the_choice_and_the_record_is_not_lost() -> None:
    world = committed(up(a_plan()), 10)
    part = world.place.snapshots.manifest(Id(10, 1)).parts
    world.exit("worker-1", "signal")
    world.deliver(HOSTS[0])
    assert words(world, HOSTS[1]) == ["prepare"], "step 10 is chosen"
    assert world.place.snapshots.commit(Manifest("run", Id(20, 1), 2, part))
    world.deliver_all()
    assert restored(world) == [None, "step-20-g1"] and world.captain.generation == 3
    assert counted(world) == [Id(20, 1), Id(10, 1)]


def test_what_an_older_captain_commits_before_a_record_that_is_owed_is_gone_back_to() -> None:
    world = committed(up(a_plan()), 10)
    part = world.place.snapshots.manifest(Id(10, 1)).parts
    owing(world)
    assert world.place.snapshots.commit(Manifest("run", Id(20, 1), 2, part))
    world.place.read_only = None
    world.pass_time(3)
    world.deliver_all()
    assert restored(world) == [None, "step-10-g1", "step-20-g1"]
    assert counted(committed(world, 30)) == [Id(30, 3), Id(20, 1), Id(10, 1)]


def test_a_captain_back_after_the_lease_begins_from_what_was_saved_meanwhile() -> None:
    world = committed(up(a_plan()), 10)
    world.restart_captain()
    world.save("worker-0", 20)
    world.pass_time(LEASE + 2)
    world.join_all()
    world.deliver_all()
    world.pass_time(LEASE + 2)
    world.deliver_all()
    assert restored(world)[-1] == "step-20-g1" and counted(world)[0] == Id(20, 1)


def test_a_folder_that_is_watched_is_made_ready_on_every_host_without_a_snapshot_too() -> None:
    world = World(a_plan(snapshots=Snapshots(watch="ckpt")))
    world.join_all()
    world.answer()
    world.deliver(HOSTS[0])
    assert words(world, HOSTS[1]) == ["prepare"] and world.started == []
    world.deliver_all()
    assert len(world.started) == 2
    world.exit("worker-1", "signal")
    world.deliver_all()
    assert restored(world) == [None, None]
    assert [machine.prepared for machine in world.machines.values()] == [2, 2]
