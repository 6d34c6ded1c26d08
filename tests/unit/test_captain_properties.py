"""The captain under any order of events: hosts, agents, connections, tasks and captains come and go at any time."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paceline.agent.captain import events as ev
from paceline.agent.captain.ledger import LIVE, OVER, PAUSED
from paceline.agent.captain.snapshots import incomplete_snapshots
from paceline.agent.options import SHARED_FOLDER
from paceline.agent.transfers.requests import DAMAGED, NEWER, STORE, Failure
from paceline.plan import GROUP, HOST, INGEST, LEAD, ON_NAN, OWN, ROLLBACK, TASK, WARN
from paceline.storage.snapshots.manifest import parse_id
from support.polling import PollingTasks
from support.worlds import LEASE, World, make_plan

LIMIT = 4
# The newest complete snapshot, the one that is being sent, the newest committed one, and incomplete ones.
MOST_HELD = 3 + incomplete_snapshots.MOST


class SavesTogether:
    """Tasks of a group agree on steps at which all of them save. PollingTasks checks whatever the captain says."""

    world: World
    polling: PollingTasks
    step: int

    def _train(self, steps: int) -> None:
        """All messages arrive at once."""
        for _ in range(steps):
            for name in self.polling.names():
                self.polling.call(name, self.step)
            for name in self.polling.names():
                self.polling.answer(name)
            self.world.beat_all()
            self.world.deliver_all()

    @precondition(lambda self: self.polling.names())
    @rule(data=st.data(), times=st.integers(1, 5), all_tasks=st.booleans())
    def tasks_ask_whether_to_save(self, data: Any, times: int, all_tasks: bool) -> None:
        names = self.polling.names()
        for _ in range(times):
            for name in names if all_tasks else [data.draw(st.sampled_from(names))]:
                self.polling.call(name, self.step)
        self.world.beat_all()

    @precondition(lambda self: self.polling.names())
    @rule(data=st.data())
    def a_task_requests_a_snapshot_of_the_group(self, data: Any) -> None:
        task = data.draw(st.sampled_from(self.polling.names()))
        host = self.world.plan.host(next(each.host for each in self.world.plan.tasks if each.name == task)).name
        if self.world.machines[host].connected:
            self.world.tell(ev.SaveRequested(host, task))

    @precondition(lambda self: self.polling.names())
    @rule(data=st.data(), all_tasks=st.booleans())
    def replies_of_tasks_arrive(self, data: Any, all_tasks: bool) -> None:
        """Also those to a captain that has died since."""
        names = self.polling.names()
        for name in names if all_tasks else [data.draw(st.sampled_from(names))]:
            self.polling.answer(name)

    @precondition(lambda self: self.polling.names())
    @rule(steps=st.integers(1, 8))
    def tasks_train_undisturbed(self, steps: int) -> None:
        self._train(steps)

    @precondition(lambda self: self.polling.waiting())
    @rule(data=st.data())
    def a_task_has_waited_for_too_long(self, data: Any) -> None:
        self.polling.be_late(data.draw(st.sampled_from(self.polling.waiting())))

    @invariant()
    def all_tasks_that_save_for_one_proposal_save_at_the_same_call(self) -> None:
        if hasattr(self, "polling"):
            assert all(len(calls) == 1 for calls in self.polling.saves.values()), self.polling.saves


class AnyOrder(SavesTogether, RuleBasedStateMachine):
    @initialize(
        workers=st.integers(1, 3),
        evaluator=st.integers(0, 2),
        servers=st.sampled_from([(0, False), (0, True), (1, True), (2, False)]),
        per_host=st.integers(1, 2),
        watch=st.sampled_from(["", "ckpt"]),
        ingest=st.booleans(),
        serves=st.sampled_from([SHARED_FOLDER, "", "10.0.0.1:7000"]),
        has_begun=st.booleans(),
        on_nan=st.sampled_from(ON_NAN),
        least=st.sampled_from([None, None, 1, 2]),
        first=st.sampled_from([None, 1, 2]),
        every=st.sampled_from([0.5, 20.0]),
        scope=st.sampled_from([GROUP, GROUP, HOST, TASK]),
    )
    def begin(
        self,
        workers: int,
        evaluator: int,
        servers: tuple[int, bool],
        per_host: int,
        watch: str,
        ingest: bool,
        serves: str,
        has_begun: bool,
        on_nan: str,
        least: int | None,
        first: int | None,
        every: float,
        scope: str,
    ) -> None:
        """`has_begun`: all tasks run, and ask at each step whether to save."""
        ps, chief = servers
        scope = GROUP if ps or chief else scope
        on_nan = on_nan if chief or not ps else WARN
        kinds = {"evaluator": evaluator, "ps": ps, "chief": chief, "per_host": per_host, "ingest": ingest}
        worker_hosts = -(-workers // per_host)
        if (ps and not chief) or least is None or scope != GROUP:
            elastic = {}
        else:
            least = min(least, worker_hosts)
            first = None if first is None or ps else max(least, min(first, worker_hosts))
            elastic = {"least": least, "first": first, "wait": 5.0, "every": every}
        if scope != GROUP and on_nan == ROLLBACK:
            on_nan = WARN
        watch = "" if elastic or scope != GROUP else watch
        settings = {"limit": LIMIT, "start": 1e6, "watch": watch, "on_nan": on_nan, "scope": scope, **elastic}
        plan = make_plan(workers, **kinds, **settings)  # type: ignore[arg-type]
        self.world = World(plan, serves)
        self.polling = PollingTasks(self.world)
        self.step = 0
        self.reports: list[tuple[int, int]] = []  # step of the first metric that was not finite, and its generation
        if has_begun:
            self.world.join_all()
            self.world.deliver_all()
            if ingest:
                self.world.exit(INGEST, "")
            self.world.deliver_all()
            self._train(1)

    def _host(self, data: Any) -> str:
        return str(data.draw(st.sampled_from(sorted(self.world.machines))))

    def _together(self) -> set[str]:
        plan = self.world.plan
        return {task.name for task in plan.tasks if plan.role(task.role).restarts in (GROUP, LEAD, *OWN)}

    def _running(self) -> list[str]:
        return sorted({name for m in self.world.machines.values() for name in m.processes})

    def _evaluators(self) -> list[str]:
        return [name for name in self._running() if name.startswith("evaluator")]

    @rule(data=st.data())
    def member_joins(self, data: Any) -> None:
        self.world.join(self._host(data))

    @rule()
    def all_members_join(self) -> None:
        self.world.join_all()

    @rule(data=st.data())
    def connection_ends(self, data: Any) -> None:
        self.world.disconnect(self._host(data))

    @rule(data=st.data())
    def messages_arrive(self, data: Any) -> None:
        self.world.deliver(self._host(data))

    @rule()
    def all_messages_arrive(self) -> None:
        self.world.deliver_all()

    @rule(data=st.data())
    def a_host_has_fetched_a_snapshot_in_advance(self, data: Any) -> None:
        self.world.finish_prefetch(self._host(data))

    @rule(data=st.data())
    def agent_dies(self, data: Any) -> None:
        self.world.agent_dies(self._host(data))

    @rule(data=st.data(), dead=st.booleans())
    def host_is_replaced(self, data: Any, dead: bool) -> None:
        host = self._host(data)
        if not self.world.machines[host].finished:
            self.world.host_is_replaced(host, dead)

    @precondition(lambda self: self._running())
    @rule(
        data=st.data(), cause=st.sampled_from(["signal", "program-error", "out-of-memory", ""]), survivor=st.booleans()
    )
    def task_ends(self, data: Any, cause: str, survivor: bool) -> None:
        task = data.draw(st.sampled_from(self._running()))
        location = data.draw(st.sampled_from(["a.py:1", "b.py:2"])) if cause == "program-error" else ""
        ran, checkpoint = data.draw(st.sampled_from([(0.0, ""), (100.0, ""), (1.0, "model.pt")]))
        self.world.exit(task, cause, location, survivor, ran, checkpoint=checkpoint)

    @precondition(lambda self: self._running())
    @rule()
    def training_steps(self) -> None:
        self.step += 1
        self.world.step(self.step)

    @precondition(lambda self: self._running())
    @rule(whole=st.booleans(), back=st.sampled_from([0, 0, 0, 1, 2]))
    def tasks_save(self, whole: bool, back: int) -> None:
        """One task saves everything, or every task saves a part; sometimes a step that was saved before."""
        self.step += 1
        has_evaluator = bool(self.world.plan.tasks_of("evaluator"))  # evaluates them in order
        step = self.step if has_evaluator else max(1, self.step - back)
        training_tasks = [name for name in self._running() if not name.startswith(("ps", "evaluator", "ingest"))]
        for task in training_tasks[:1] if whole else training_tasks:
            self.world.save(task, step, 1 if whole else len(training_tasks))

    @precondition(lambda self: self._running())
    @rule(data=st.data(), count=st.integers(1, 8))
    def one_task_saves_parts_that_others_may_never_save(self, data: Any, count: int) -> None:
        names = [name for name in self._running() if not name.startswith(("ps", "evaluator", "ingest"))]
        for task in [data.draw(st.sampled_from(names))] if names else []:
            for step in range(self.step + 1, self.step + 1 + count):
                self.world.save(task, step, 2)

    @precondition(lambda self: self._running())
    @rule(data=st.data(), ahead=st.integers(-3, 1))
    def a_metric_is_nan(self, data: Any, ahead: int) -> None:
        task = data.draw(st.sampled_from(self._running()))
        self.reports.append((self.step + ahead, self.world.captain.generation))
        self.world.report(task, data.draw(st.sampled_from([self.step + ahead, None])))

    @precondition(lambda self: self._evaluators())
    @rule(data=st.data())
    def an_evaluator_follows(self, data: Any) -> None:
        self.world.follow(data.draw(st.sampled_from(self._evaluators())))

    @precondition(lambda self: self._evaluators())
    @rule(data=st.data())
    def an_evaluator_is_done(self, data: Any) -> None:
        self.world.evaluate(data.draw(st.sampled_from(self._evaluators())), accuracy=self.step)

    @rule()
    def the_store_answers(self) -> None:
        self.world.answer()

    @rule(fails=st.sampled_from([None, None, Failure(STORE, "away", True)]))
    def the_store_fails_or_recovers(self, fails: Failure | None) -> None:
        self.world.place.fails = fails if self.world.captain.generation else None

    @rule(fails=st.sampled_from([None, Failure(STORE, "read-only", True)]))
    def the_store_becomes_read_only_or_writable(self, fails: Failure | None) -> None:
        self.world.place.read_only = fails if self.world.captain.generation else None

    @rule(fails=st.sampled_from([None, Failure(STORE, "unreachable", True)]))
    def hosts_cannot_reach_each_other(self, fails: Failure | None) -> None:
        self.world.peers_fail = fails

    @rule(data=st.data(), says=st.sampled_from([None, DAMAGED, NEWER]))
    def a_host_reads_wrong_data_from_the_store(self, data: Any, says: str | None) -> None:
        self.world.faulty_hosts = {self._host(data): says} if says else {}

    @rule(seconds=st.sampled_from([0.5, 2.0, LEASE + 1.5, 70.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    @rule(notes=st.booleans(), answers_are_lost=st.booleans())
    def captain_dies_and_returns(self, notes: bool, answers_are_lost: bool) -> None:
        if not self.world.is_over:
            self.world.restart_captain(notes, answers_are_lost=answers_are_lost, stale=True)

    @rule(stop=st.integers(0, 9))
    def the_user_stops_it(self, stop: int) -> None:
        if stop == 0:
            self.world.tell(ev.StopRequested("stop"))

    @precondition(lambda self: self.world.plan.scalable)
    @rule(hosts=st.integers(1, 3))
    def the_user_scales_it(self, hosts: int) -> None:
        self.world.scale(hosts)

    @rule(within=st.sampled_from([1.0, 600.0]), now=st.booleans(), releases=st.booleans(), pause=st.integers(0, 2))
    def the_user_pauses_it(self, within: float, now: bool, releases: bool, pause: int) -> None:
        if pause == 0:
            self.world.pause(within, now, releases)

    @rule()
    def the_user_resumes_it(self) -> None:
        self.world.resume()

    @invariant()
    def nothing_runs_while_it_is_paused(self) -> None:
        """Unless the captain has lost its notes, and the members that run tasks have not joined yet."""
        captain = self.world.captain if hasattr(self, "world") else None
        if captain and captain.ledger.pause == PAUSED and captain.phase == LIVE and captain.generation:
            assert not self.world.running()

    @invariant()
    def at_most_one_generation_lives(self) -> None:
        """No task of an old generation runs once a new one has started, and no task runs twice."""
        if not hasattr(self, "world"):
            return
        together = self._together()
        running = self.world.running()
        generations = {process.generation for name, process in running if name in together}
        assert len(generations) <= 1, running
        # A captain whose notes are lost may not know that a lost host still runs an ingest. The two attempts take turns
        # at the location of the data.
        names = [name for name, _ in running if name != INGEST]
        assert len(names) == len(set(names)), running

    @invariant()
    def generations_only_grow(self) -> None:
        if not hasattr(self, "world"):
            return
        started = [generation for name, generation in self.world.started if name in self._together()]
        assert started == sorted(started)

    @invariant()
    def a_reported_commit_is_on_the_chain(self) -> None:
        if not hasattr(self, "world") or not self.world.told_committed:
            return
        newest = self.world.told_committed[-1]
        chain = self.world.place.snapshots.inventory().current()
        abandoned = self.world.plan.restart.on_nan == ROLLBACK and any(
            newest.step >= step and newest.generation <= generation for step, generation in self.reports
        )
        assert newest in chain or abandoned, (newest, chain)
        assert self.world.left is None

    @invariant()
    def a_committed_snapshot_has_all_its_files(self) -> None:
        """Nothing of it is deleted, neither as the remains of an upload that failed nor otherwise."""
        if not hasattr(self, "world"):
            return
        snapshots = self.world.place.snapshots
        for snapshot in snapshots.inventory().committed:
            missing = [
                part.task
                for part in snapshots.manifest(snapshot).parts
                if not self.world.place.has_part(part.task, snapshot)
            ]
            assert not missing, (snapshot, missing)

    @invariant()
    def evaluated_events_match_the_stored_evaluations(self) -> None:
        if not hasattr(self, "world"):
            return
        snapshots = self.world.place.snapshots
        for kind, _, fields in self.world.events:
            if kind == "evaluated" and (id := parse_id(fields["snapshot"])) is not None and snapshots.has(id):
                evaluation = snapshots.evaluation(id)
                assert evaluation is not None and evaluation.metrics == fields["metrics"]

    @invariant()
    def no_two_evaluators_have_the_same_snapshot(self) -> None:
        """Unless one evaluator is on a host that was lost or replaced and may still be running."""
        if not hasattr(self, "world"):
            return
        connected = [machine for machine in self.world.machines.values() if machine.connected]
        snapshot_ids = [id for machine in connected for id in machine.follows.values() if id is not None]
        assert len(snapshot_ids) == len(set(snapshot_ids)), snapshot_ids

    @invariant()
    def hosts_are_wanted_within_limits(self) -> None:
        if not hasattr(self, "world"):
            return
        for role, elastic in self.world.plan.scalable.items():
            most = sum(host.role == role for host in self.world.plan.hosts)
            assert elastic.min <= self.world.captain.ledger.sizes[role] <= most

    @invariant()
    def hosts_hold_few_snapshots(self) -> None:
        """What a host holds once it has received all instructions, while the captain knows what all hosts and the store
        have."""
        captain = self.world.captain if hasattr(self, "world") else None
        if captain is None or captain.phase == OVER or not captain._have_all_joined():
            return
        if not captain.commits.contents.is_known or captain.commits._store_is_empty:
            return
        known = {*captain.commits._drafts, *captain.commits._copies}
        assert len(known) <= MOST_HELD + len(captain.commits.contents.being_fetched()), known
        for machine in self.world.machines.values():
            if machine.connected and not machine.inbox and not machine.finished:
                assert {snapshot for _, snapshot in machine.held} <= known

    @invariant()
    def restart_budgets_are_respected(self) -> None:
        if not hasattr(self, "world"):
            return
        for unit in self.world.captain.units:
            assert all(count <= LIMIT + 1 for count in unit.budget.counts.values())

    def teardown(self) -> None:
        """From any state: with all hosts back, the run continues to its end."""
        if not hasattr(self, "world"):
            return
        world = self.world
        world.place.fails = world.place.read_only = world.peers_fail = None
        world.faulty_hosts = {}
        for _ in range(12):
            world.resume()
            for host, machine in list(world.machines.items()):
                if machine.finished and not world.is_over:
                    world.host_is_replaced(host, dead=True)
            world.join_all()
            world.deliver_all()
            world.pass_time(LEASE + 2)
            world.deliver_all()
            if world.is_over:
                break
            self.step += 1
            world.step(self.step)
            for task in self._running():
                following = task.startswith("evaluator") and any(task in m.follows for m in world.machines.values())
                if not following:
                    world.exit(task, "")
            for _ in range(30):
                for task in self._evaluators():
                    world.evaluate(task, accuracy=1.0)
                world.deliver_all()
        assert world.is_over, (
            world.captain.phase,
            [(u.name, u.phase, u.not_ready, u.live) for u in world.captain.units],
        )
        world.deliver_all()
        for host in world.machines:
            world.disconnect(host)  # the captain has left; the leases of members that did not receive the end run out
        world.pass_time(LEASE + 2)
        assert world.running() == []
        assert world.over is not None and world.over.status in ("succeeded", "failed", "stopped")
        if len(world.plan.tasks_of("evaluator")) == 1 and world.no_more:
            snapshots = world.place.snapshots
            assert all(map(snapshots.evaluation, snapshots.inventory().current())), (
                "the last snapshot was not evaluated"
            )


AnyOrder.TestCase.settings = settings(
    max_examples=300,
    report_multiple_bugs=False,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestAnyOrder = AnyOrder.TestCase


class GroupSaves(SavesTogether, RuleBasedStateMachine):
    """Only what matters to an agreement, so that many are reached: tasks train, and messages and captains get lost."""

    @initialize(workers=st.integers(2, 3))
    def begin(self, workers: int) -> None:
        self.world = World(make_plan(workers, limit=LIMIT, start=1e6, hang_after=None))
        self.polling = PollingTasks(self.world)
        self.step = 0
        self.world.join_all()
        self.world.deliver_all()
        self._train(1)

    @rule(data=st.data())
    def connection_ends(self, data: Any) -> None:
        self.world.disconnect(data.draw(st.sampled_from(sorted(self.world.machines))))

    @rule()
    def all_members_join(self) -> None:
        self.world.join_all()

    @rule(data=st.data())
    def messages_arrive(self, data: Any) -> None:
        self.world.deliver(data.draw(st.sampled_from(sorted(self.world.machines))))

    @rule(notes=st.booleans())
    def captain_dies_and_returns(self, notes: bool) -> None:
        self.world.restart_captain(notes)
        self.world.join_all()
        self.world.answer()
        self.world.beat_all()

    @rule(seconds=st.sampled_from([0.5, 62.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.join_all()
        self.world.pass_time(seconds)

    def teardown(self) -> None:
        """Whatever has happened: the next request leads to a snapshot of all tasks."""
        if not hasattr(self, "polling") or self.world.is_over or not self.polling.names():
            return
        self.world.join_all()
        self.world.deliver_all()
        self._train(30)
        self.world.pass_time(62)
        self._train(2)
        saves = len(self.polling.saves)
        self.world.tell(ev.SaveRequested("worker-host-0", "worker-0"))
        self._train(40)
        assert len(self.polling.saves) > saves


GroupSaves.TestCase.settings = AnyOrder.TestCase.settings
TestGroupSaves = GroupSaves.TestCase
