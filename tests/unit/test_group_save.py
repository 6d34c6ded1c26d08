"""The tasks of a group agree on a step at which all take a snapshot, whatever messages are lost or late."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.agent.captain import events as ev
from paceline.agent.captain import instructions as ins
from paceline.storage.snapshots.manifest import File, SnapshotId
from support.agreeing import AgreeingTasks
from support.worlds import make_plan, up


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> Iterator[AgreeingTasks]:
    """worker-0 and worker-1, each on its own host."""
    agreeing = AgreeingTasks(up(make_plan(2, hang_after=None)), monkeypatch)
    yield agreeing
    agreeing.close()


def request(tasks: AgreeingTasks) -> None:
    tasks.world.tell(ev.SaveRequested("worker-host-0", "worker-0"))


def leave(tasks: AgreeingTasks, host: str = "worker-host-0") -> None:
    tasks.world.tell(ev.HostLeaving(host, "SIGTERM"))


def commit(tasks: AgreeingTasks, step: int) -> None:
    world, id = tasks.world, SnapshotId(step, 1)
    world.tell(ev.PartSaved("worker-host-0", "worker-0", id, 1, {}))
    world.place.send("worker-0", id)
    world.tell(ev.PartStored("worker-host-0", "worker-0", id, (File("state", 1, "0" * 64),)))
    world.answer()


def released(tasks: AgreeingTasks) -> list[str]:
    inboxes = [machine.inbox for machine in tasks.world.machines.values()]
    return [each.host for inbox in inboxes for each in inbox if isinstance(each, ins.ReleaseHost)]


def steps(tasks: AgreeingTasks) -> list[int]:
    """At which all tasks have saved."""
    first, *others = tasks.saves.values()
    assert all(each == first for each in others), tasks.saves
    return first


def propose(tasks: AgreeingTasks) -> int:
    """A snapshot is requested, and all tasks have accepted the proposed step, but the captain has not received that.
    Returns the step before it."""
    request(tasks)
    tasks.train(1, 1)  # where, here
    for task in tasks.saves:
        tasks.hear(task)
        tasks.call(task, 2)
    assert [agreement.save_at for agreement in tasks._agreements.values()] == [5, 5]
    return 3  # their first call was before step 1


# ---- lost messages


@pytest.mark.parametrize("lost", ["where", "here", "at", "yes", "go", "saves"])
def test_a_message_that_is_lost_with_its_connection_is_repeated(tasks: AgreeingTasks, lost: str) -> None:
    tasks.lost = lost
    request(tasks)
    tasks.train(1, 20)
    assert tasks.lost == "" and len(steps(tasks)) == 1
    leave(tasks)
    tasks.train(21, 40)
    _, last = steps(tasks)
    commit(tasks, last)
    assert released(tasks) == ["worker-host-0"]
    assert tasks.world.now == 1000.0  # no task had to wait


@pytest.mark.parametrize("says", ["where", "at", "go"])
def test_a_message_that_arrives_twice_changes_nothing(tasks: AgreeingTasks, says: str) -> None:
    request(tasks)
    for step in range(1, 20):
        tasks.train(step, step)
        if says in tasks.messages:
            tasks.reconnect("worker-host-1")
    assert len(steps(tasks)) == 1
    request(tasks)
    tasks.train(20, 40)
    assert len(steps(tasks)) == 2


def test_a_task_that_does_not_answer_blocks_later_snapshots_for_a_minute_only(tasks: AgreeingTasks) -> None:
    request(tasks)
    tasks.pass_messages()
    tasks.lose_unread("worker-1")
    tasks.train(1, 10)
    tasks.world.pass_time(50)
    request(tasks)
    tasks.train(11, 20)
    assert "at" not in tasks.messages
    tasks.world.pass_time(15)
    request(tasks)
    tasks.train(21, 40)
    assert len(steps(tasks)) == 1


def test_slow_steps_have_more_time(tasks: AgreeingTasks) -> None:
    for step in range(1, 3):
        tasks.world.pass_time(40)
        tasks.world.step(step)
    request(tasks)
    tasks.pass_messages()
    tasks.world.pass_time(100)
    tasks.train(3, 20)
    assert len(steps(tasks)) == 1


def test_a_host_that_shuts_down_meanwhile_gets_another_try(tasks: AgreeingTasks) -> None:
    request(tasks)
    tasks.pass_messages()
    tasks.lose_unread("worker-1")
    leave(tasks)
    tasks.world.pass_time(62)
    assert released(tasks) == []
    tasks.train(1, 20)
    commit(tasks, *steps(tasks))
    assert released(tasks) == ["worker-host-0"]


def test_a_host_that_shuts_down_is_released_if_no_task_answers(tasks: AgreeingTasks) -> None:
    leave(tasks)
    tasks.world.pass_time(62)
    assert released(tasks) == ["worker-host-0"]


# ---- any order


class AnyOrder:
    """Tasks step, messages arrive, connections end and time passes in random order, also while tasks wait."""

    def __init__(self, tasks: AgreeingTasks, random: Random) -> None:
        self._tasks, self._random = tasks, random
        self.next_steps = dict.fromkeys(tasks.saves, 1)
        self._waiting: list[str] = []
        self._is_calm = False
        tasks.on_wait = self._on_wait

    def act(self) -> None:
        tasks, world = self._tasks, self._tasks.world
        task = self._random.choice(sorted(self.next_steps))
        host = f"worker-host-{task[-1]}"
        action = self._random.choice(["step"] * 6 + ["hear", "answer"] * 3 + ["join", "lose", "request", "leave"])
        world.now += self._random.choice([0.0, 0.0, 0.1, 1.0])
        if action == "step":
            self.step(task)
        elif action == "hear" and world.machines[host].connected:
            tasks.hear(task)
        elif action == "answer":
            tasks.answer(task)
        elif action == "join":
            world.join(host)
        elif action == "lose":
            world.disconnect(host)
        elif action == "request":
            request(tasks)
        elif action == "leave":
            leave(tasks, host)

    def step(self, task: str) -> None:
        if task not in self._waiting:
            self._waiting.append(task)
            self._tasks.call(task, self.next_steps[task])
            self.next_steps[task] += 1
            self._waiting.remove(task)

    def catch_up(self) -> None:
        """From now on, nothing is lost, and all tasks do the same number of steps."""
        self._is_calm = True
        self._tasks.world.join_all()
        last = max(self.next_steps.values()) + 100
        while any(step <= last for step in self.next_steps.values()):
            self._tasks.pass_messages()
            self.step(min(self.next_steps, key=lambda task: self.next_steps[task]))

    def _on_wait(self, seconds: float) -> None:
        if self._is_calm or self._random.random() < 0.3:  # an agent ends its tasks if it cannot reconnect
            self._tasks.world.join_all()
            self._tasks.pass_messages()
            self._tasks.world.now += min(seconds, 1.0)
        else:
            self.act()


@settings(max_examples=100)
@given(random=st.randoms(use_true_random=True))
def test_all_tasks_save_at_the_same_steps_whatever_the_order_of_messages(random: Random) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        tasks = AgreeingTasks(up(make_plan(3, hang_after=None)), monkeypatch)
        order = AnyOrder(tasks, random)
        for _ in range(150):
            order.act()
        order.catch_up()
        count_before = len(steps(tasks))
        tasks.world.beat_all()
        tasks.world.pass_time(62)  # an agreement that could not be reached has failed
        request(tasks)
        order.catch_up()
        assert len(steps(tasks)) == count_before + 1
        tasks.close()


def test_tasks_that_have_just_agreed_have_time_to_save(tasks: AgreeingTasks) -> None:
    """However long the agreement took."""
    before = propose(tasks)
    tasks.world.pass_time(59)
    for task in tasks.saves:
        tasks.answer(task)
    tasks.world.pass_time(5)
    tasks.reconnect("worker-host-1")
    tasks.train(3, before + 20)
    assert steps(tasks) == [before + 1]


# ---- tasks that wait


def test_a_proposal_is_withdrawn_if_a_task_has_waited_for_too_long(tasks: AgreeingTasks) -> None:
    """The other one accepts it afterwards."""
    request(tasks)
    tasks.train(1, 1)
    tasks.pass_messages()

    def time_is_up() -> None:
        tasks.world.now += 10

    tasks.while_waiting.extend([time_is_up, lambda: tasks.pass_messages()])
    for step in range(2, 6):
        tasks.call("worker-0", step)
        tasks.answer("worker-0")
    assert tasks.world.now == 1010.0 and tasks.messages[-1] != "go"
    for step in range(2, 6):
        tasks.call("worker-1", step)
        tasks.pass_messages()
    assert steps(tasks) == []
    tasks.train(6, 30)
    assert len(steps(tasks)) == 1
    assert tasks.world.now == 1010.0


def test_a_task_that_has_waited_for_too_long_still_saves_if_others_were_told_to(tasks: AgreeingTasks) -> None:
    """The confirmation is on its way to it."""
    before = propose(tasks)
    for task in tasks.saves:
        tasks.answer(task)  # the captain confirms
    for step in range(3, before + 1):
        tasks.call("worker-1", step)
    tasks.hear("worker-1")
    assert tasks.call("worker-1", before + 1)

    def time_is_up() -> None:
        tasks.world.now += 10

    def connection_is_lost() -> None:
        tasks.answer("worker-0")
        tasks.reconnect("worker-host-0")

    tasks.while_waiting.extend([time_is_up, connection_is_lost, lambda: tasks.hear("worker-0")])
    for step in range(3, before + 2):
        tasks.call("worker-0", step)
    assert steps(tasks) == [before + 1]


@pytest.mark.parametrize("arrives_first", ["late", "yes"])
def test_late_and_yes_at_the_same_time(tasks: AgreeingTasks, arrives_first: str) -> None:
    """Whichever arrives first: both tasks save, or none does."""
    before = propose(tasks)
    tasks.answer("worker-0")

    def time_is_up() -> None:
        tasks.world.now += 10

    def answers_arrive() -> None:
        for task in ("worker-0", "worker-1") if arrives_first == "late" else ("worker-1", "worker-0"):
            tasks.answer(task)
        for task in ("worker-0", "worker-1"):
            tasks.hear(task)

    tasks.while_waiting.extend([time_is_up, answers_arrive])
    for step in range(3, before + 2):
        tasks.call("worker-0", step)
    for step in range(3, before + 2):
        tasks.call("worker-1", step)
    assert steps(tasks) == ([] if arrives_first == "late" else [before + 1])
    tasks.train(before + 2, before + 30)
    assert len(steps(tasks)) == 1


def test_a_task_does_not_wait_for_a_proposal_of_a_previous_captain(tasks: AgreeingTasks) -> None:
    before = propose(tasks)
    tasks.world.restart_captain()

    def captain_returns() -> None:
        tasks.world.now += 12
        tasks.world.join_all()
        tasks.world.deliver_all()

    tasks.while_waiting.extend([captain_returns, tasks.pass_messages])
    for step in range(3, before + 2):
        assert not tasks.call("worker-0", step)
    assert tasks.world.now == 1012.0
    assert not any(tasks.call("worker-1", step) for step in range(3, before + 2))
    tasks.announce()
    request(tasks)
    tasks.train(before + 2, before + 20)
    assert len(steps(tasks)) == 1


def test_late_replies_to_a_previous_captain_are_not_taken_for_replies_to_the_next(tasks: AgreeingTasks) -> None:
    """Both have accepted the first proposal of the previous captain, and the next one also makes its first."""
    before = propose(tasks)
    tasks.world.restart_captain()
    tasks.world.pass_time(12)
    tasks.world.join_all()
    tasks.world.deliver_all()
    tasks.announce()
    request(tasks)
    for task in tasks.saves:
        tasks.answer(task)
    assert tasks.messages[-2:] == ["yes", "yes"]
    inboxes = [machine.inbox for machine in tasks.world.machines.values()]
    assert [each.words["say"] for inbox in inboxes for each in inbox if isinstance(each, ins.AgreeOnStep)] == [
        "where",
        "where",
    ]
    tasks.train(before, before + 20)
    assert len(steps(tasks)) == 1


def test_a_task_stops_waiting_for_a_captain_that_cannot_be_reached(tasks: AgreeingTasks) -> None:
    before = propose(tasks)
    tasks.world.disconnect("worker-host-0")
    assert not any(tasks.call("worker-0", step) for step in range(3, before + 2))
    assert tasks.world.now == pytest.approx(1050.0)
    assert not tasks.call("worker-0", before + 2) and tasks.world.now == pytest.approx(1050.0)


def test_a_task_that_waits_continues_as_soon_as_another_step_is_proposed(tasks: AgreeingTasks) -> None:
    before = propose(tasks)
    tasks.answer("worker-0")
    proposal = tasks._agreements["worker-0"].proposal

    def other_is_late() -> None:
        tasks.world.tell(ev.AgreementReply("worker-host-1", "worker-1", "late", proposal, 20))
        tasks.hear("worker-0")

    tasks.while_waiting.append(other_is_late)
    assert not any(tasks.call("worker-0", step) for step in range(3, before + 2))
    assert tasks.world.now == 1000.0


# ---- a host begins to shut down while a snapshot is being taken


def save_in_one_task(tasks: AgreeingTasks) -> int:
    """All tasks are told to save, and one of them has."""
    before = propose(tasks)
    for task in tasks.saves:
        tasks.answer(task)
    for step in range(3, before + 2):
        tasks.hear("worker-0")
        tasks.call("worker-0", step)
    tasks.answer("worker-0")
    return before + 1


@pytest.mark.parametrize("after", [lambda tasks: None, request])
def test_the_snapshot_that_is_being_taken_serves_a_host_that_begins_to_shut_down(
    tasks: AgreeingTasks, after: Callable[[AgreeingTasks], None]
) -> None:
    """Even if a task has requested another one since. All tasks take it for the same reason, which decides how."""
    step = save_in_one_task(tasks)
    after(tasks)
    leave(tasks)
    for n in range(3, step + 1):
        tasks.hear("worker-1")
        tasks.call("worker-1", n)
    tasks.answer("worker-1")
    assert (steps(tasks), tasks.stopping) == ([step], [False, False])
    commit(tasks, step)
    assert released(tasks) == ["worker-host-0"]


def test_a_host_that_begins_to_shut_down_gets_another_try_if_a_task_does_not_save(tasks: AgreeingTasks) -> None:
    step = save_in_one_task(tasks)
    leave(tasks)
    tasks.world.pass_time(62)
    assert released(tasks) == []
    for n in range(3, step + 1):  # only now does the other task reach the step
        tasks.hear("worker-1")
        tasks.call("worker-1", n)
    tasks.train(step + 1, step + 30)
    first, second = steps(tasks)
    assert (first, tasks.stopping) == (step, [False, False, True, True])
    commit(tasks, second)
    assert released(tasks) == ["worker-host-0"]


# ---- a task that counts its calls differently


def warnings(tasks: AgreeingTasks) -> list[str]:
    return [fields["text"] for kind, _, fields in tasks.world.events if kind == "warning"]


def reply_with(tasks: AgreeingTasks, count: int) -> None:
    """A snapshot is requested, and worker-1 replies with another number of calls than it has made."""
    request(tasks)
    for task in tasks.saves:
        tasks.hear(task)
    proposal = tasks.world.captain._group_snapshot._agreement.proposal  # type: ignore[union-attr]
    tasks.world.tell(ev.AgreementReply("worker-host-1", "worker-1", "here", proposal, count))


def test_tasks_do_not_agree_on_a_call_that_none_can_reach(tasks: AgreeingTasks) -> None:
    for _ in range(2):
        reply_with(tasks, 2**52)
        tasks.train(1, 10)
    assert "at" not in tasks.messages
    assert warnings(tasks) == [
        "tasks cannot agree on a step at which all save, so no snapshot of the group was taken: worker-1 has called "
        "should_save 4503599627370496 times, worker-0 2 times. Each task must call it once per step"
    ]
    leave(tasks)
    tasks.train(11, 20)
    commit(tasks, *steps(tasks))
    assert released(tasks) == ["worker-host-0"]


def test_a_task_rejects_a_call_that_it_cannot_reach(tasks: AgreeingTasks) -> None:
    tasks.world.captain._group_snapshot._rate = lambda task: 1e15  # a program reports any steps
    request(tasks)
    tasks.train(1, 30)
    assert "late" in tasks.messages and "yes" not in tasks.messages


def test_an_agreed_call_that_is_far_away_does_not_block_later_snapshots(tasks: AgreeingTasks) -> None:
    reply_with(tasks, 100_000)
    tasks.train(1, 20)
    assert tasks.messages.count("go") == 2 and tasks.saves == {"worker-0": [], "worker-1": []}
    tasks.world.pass_time(62)
    leave(tasks)
    tasks.train(21, 60)
    commit(tasks, *steps(tasks))
    assert released(tasks) == ["worker-host-0"]


def test_an_agreed_call_that_tasks_will_reach_stays_agreed(tasks: AgreeingTasks) -> None:
    reply_with(tasks, 150)
    tasks.train(1, 20)
    tasks.world.pass_time(62)
    tasks.train(21, 100)
    request(tasks)
    tasks.train(101, 200)
    first, *_ = steps(tasks)
    assert 150 <= first <= 160


def test_a_task_that_takes_no_part_does_not_decide_which_step_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = AgreeingTasks(up(make_plan(2, evaluator=1, hang_after=None)), monkeypatch)
    try:
        request(tasks)
        tasks.train(1, 20)
        group = tasks.world.captain._group_snapshot
        assert group._agreement is not None
        tasks.world.tell(
            ev.AgreementReply("evaluator-host-0", "evaluator-0", "saves", group._agreement.proposal, 1, 2**52)
        )
        assert group.awaited_step == tasks.saves["worker-0"][0]
    finally:
        tasks.close()
