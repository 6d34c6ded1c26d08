"""The captain: decides for the run. A state machine without I/O: what happened goes in, instructions come out."""

from __future__ import annotations

from typing import Any, Callable

from paceline.agent import events as ev
from paceline.agent.ending import Ending
from paceline.agent.evaluating import Evaluating
from paceline.agent.failing import Failing, failure_of
from paceline.agent.forming import Forming
from paceline.agent.ingesting import Ingesting
from paceline.agent.ledger import CLOSING, DONE, ENDING, LIVE, OVER, RETURNING, RUNNING, STOPPING, WAITING, Ledger, Unit
from paceline.agent.progress import Watch
from paceline.agent.shelf import Shelf
from paceline.agent.together import Together
from paceline.plan import ALONE, BEFORE, Plan
from paceline.storage.manifest import Id

SAID_AGAIN = 600.0  # seconds after which the same words are news


class Captain:
    def __init__(
        self,
        plan: Plan,
        run: str,
        lease: float,
        now: float,
        wall: float,
        saved: dict[str, Any] | None = None,
        copies: bool = False,
        ahead: float = 0.0,
    ) -> None:
        """`wall`: for people alone; it may be set to anything at any time. `copies`: hosts keep the newest snapshot.
        `ahead`: by how much `now` is ahead of the clock of the captain that has saved."""
        self.plan = plan
        self.run = run
        self.lease = lease
        self.books = Ledger(plan)
        self.members = self.books.members
        self.units = self.books.units
        self._unit_of = self.books.unit_of
        self._task = self.books.task
        self._wall_offset = wall - now
        self.watch = Watch(plan)
        self.shelf = Shelf(plan, run, self._put, self._emit, copies)
        self._together = Together(self.books, self.shelf, self.watch.rate, self._put)
        self.evaluating = Evaluating(plan, self.books, self.shelf, self.watch.measured, self._put, self._emit)
        self.shelf.needed = self.evaluating.needed
        self._ending = Ending(plan, self.books, self.shelf, self.evaluating, lease, self._put, self._emit)
        self.failing = Failing(
            plan, self.books, self.watch, self._ending, self.evaluating, lease, self._wall_offset, self._put, self._emit
        )
        self._ingesting = Ingesting(plan, self.books, self._ending, self._put, self._emit)
        self._forming = Forming(
            plan, self.books, self.shelf, self._ending, self._ingesting, self._start, self._put, self._emit
        )
        self.leaving: set[str] = set()  # hosts that have been told to go, and are still there
        self._runtime_until: float | None = None
        self._said: dict[str, float] = {}  # when
        self._out: ev.Instructions = []
        if saved and (saved.get("generation") or saved["ingest"]["until"] is not None):
            self._load(saved, ahead)
            self._return(now)

    @property
    def generation(self) -> int:
        return self.books.generation

    @property
    def phase(self) -> str:
        return self.books.phase

    @property
    def is_stopping(self) -> bool:
        """Whether tasks are being ended because others have failed: why is told once all of them are gone."""
        return any(unit.phase == STOPPING for unit in self.units)

    # ---- in and out

    def handle(self, told: ev.Told, now: float) -> ev.Instructions:
        self._out = []
        if self.phase != OVER:
            handler: Callable[[Any, float], None] = getattr(self, "_on_" + type(told).__name__.lower())
            handler(told, now)
            if self._out or not isinstance(told, ev.Beat):
                self._advance(now)
        return self._out

    def _put(self, instruction: ev.Instruction) -> None:
        self._out.append(instruction)

    def _emit(self, kind: str, **fields: Any) -> None:
        self._out.append(ev.Emit(kind, self.generation, fields))

    # ---- members come and go

    def _on_joined(self, told: ev.Joined, now: float) -> None:
        member = self.members.get(told.host)
        if member is None:
            return
        self._forming.joined(now)
        if self.generation == 0 and told.generation > 0 and self.phase == LIVE:
            self._return(now)  # a captain before this one has led the run, and its notes are lost
        self.books.generation = max(self.generation, told.generation)
        held = self.books.held(told.host)
        if member.instance and told.instance != member.instance and held:
            if told.replaces or (told.place and told.place == member.place):
                self.failing.gone(held, f"{told.host} was lost and has been replaced", now)
            else:
                self.books.ghosts.append((member.lease_until, held))
                for name in held:
                    self.failing.lost(name, f"{told.host} was lost and has been replaced", now)
        elif held:  # while returning: what this captain has adopted itself
            self._compare(told, held, now)
        if self.phase == RETURNING:
            self._adopt(told, now)
        self._ingesting.joined(told, now)
        for name, attempt in told.running.items():
            unit = self._unit_of.get(name)
            unwanted = unit is None or self.books.live.get(name) != attempt or unit.phase == STOPPING
            if unwanted:
                self._out.append(ev.End(told.host, {name: attempt}, "kill"))
            elif self.phase == ENDING:
                self._ending.end_too(told.host, name, attempt, now)
        self.books.withdraw(member)
        member.connected, member.left = True, False
        if told.instance != member.instance:
            self.leaving.discard(told.host)
        member.instance, member.place = told.instance, told.place
        member.lease_until = now + self.lease
        self.books.offer(member, told.offers)
        self._emit("member-joined", host=told.host)
        self._take_stock(told, now)
        self._ending.joined(told.host)

    def _take_stock(self, told: ev.Joined, now: float) -> None:
        """Of the snapshots that are on a host that has joined."""
        if self._forming.beginning is None:
            self.shelf.learn(max(self.generation, self._forming.recorded))
        self.shelf.joined(told.host, told.held)
        for saved in told.held:
            self._on_saved(saved, now)
        if self.plan.host(told.host).role == "evaluator":
            self.shelf.tell_evaluator(told.host)
            self.evaluating.joined(told, now)
        if self._forming.beginning is not None:
            self._forming.beginning.joined(told.host)

    def _compare(self, told: ev.Joined, held: dict[str, int], now: float) -> None:
        """A member that dialled again: what it ran before may have ended meanwhile."""
        exits = {exit.task: exit for exit in told.exits}
        for name, attempt in held.items():
            if told.running.get(name) == attempt:
                continue
            known = exits.get(name)
            if known is not None and known.attempt == attempt:
                self.failing.exited(told.host, known, now)
            else:
                self.failing.gone({name: attempt}, f"{told.host} does not run it any more: its agent died", now)

    def _adopt(self, told: ev.Joined, now: float) -> None:
        for name, attempt in told.running.items():
            task = self._task.get(name)
            if task is not None and task.host == told.host and attempt >= self.books.attempts.get(name, 0):
                self.books.lives(name, attempt)
        for exit in told.exits:
            if exit.task in self._task and exit.attempt >= self.books.attempts.get(exit.task, 0):
                self.books.attempts[exit.task] = exit.attempt
                unit = self._unit_of[exit.task]
                if not exit.cause and not exit.expected:
                    self.books.succeeded.add(exit.task)
                elif exit.cause and unit.name not in self.books.waited:
                    unit.failures.append(failure_of(exit, now))

    def _on_disconnected(self, told: ev.Disconnected, now: float) -> None:
        member = self.members[told.host]
        if member.connected:
            member.connected = False
            self.books.withdraw(member)
            if not member.left:
                self._emit("member-lost", host=told.host, reason="the connection ended")

    def _on_ingested(self, told: ev.Ingested, now: float) -> None:
        self._ingesting.told(told, now)

    def _on_leaving(self, told: ev.Leaving, now: float) -> None:
        self.books.withdraw(self.members[told.host])
        self.leaving.add(told.host)
        self._emit("note", text=f"{told.host} has been told to go: {told.reason}")
        if self.phase == LIVE:
            self._together.must_go(told.host)

    def _on_savenow(self, told: ev.SaveNow, now: float) -> None:
        if self.phase == LIVE:
            self._together.wish()

    def _on_agrees(self, told: ev.Agrees, now: float) -> None:
        self._together.agrees(told)

    def _on_left(self, told: ev.Left, now: float) -> None:
        self.members[told.host].left = True
        self.leaving.discard(told.host)

    def _on_said(self, told: ev.Said, now: float) -> None:
        if now >= self._said.get(told.text, -SAID_AGAIN) + SAID_AGAIN:  # several hosts may say the same: a full disk
            self._said[told.text] = now
            self._emit("warning" if told.warning else "note", text=told.text)

    def _on_stop(self, told: ev.Stop, now: float) -> None:
        self._ending.stop(told.reason, now)

    def _on_tick(self, told: ev.Tick, now: float) -> None:
        self.failing.silence(now)
        if self.phase == LIVE and self._runtime_until is not None and now >= self._runtime_until:
            reason = f"the run took {self.plan.limits.runtime:g} s, which is limits.runtime"
            self._ending.end("failed", reason, "runtime-limit", now, "term")
        if self.phase == LIVE:
            self._ingesting.check(now)
        if self.phase == LIVE:
            self.failing.judge(now)
        if self.phase == LIVE:
            self._forming.check(now)

    # ---- tasks

    def _on_started(self, told: ev.Started, now: float) -> None:
        if self.books.held(told.host).get(told.task) == told.attempt:
            self._emit("task-started", task=told.task, pid=told.pid, warm=told.warm, host=told.host)

    def _on_spareready(self, told: ev.SpareReady, now: float) -> None:
        self._emit("spare-ready", host=told.host, took_s=round(told.seconds, 1))

    def _on_beat(self, told: ev.Beat, now: float) -> None:
        member = self.members[told.host]
        member.lease_until = now + self.lease
        member.memory = told.memory
        self._together.asks(told.asking)
        held = self.books.held(told.host)
        for name, progress in told.tasks.items():
            if name not in held or self._unit_of[name].phase != RUNNING or self._unit_of[name].kind == BEFORE:
                continue
            stepped = self.watch.update(name, progress, now)
            if stepped and progress.step is not None:
                fields = {"task": name, "step": progress.step, "metrics": dict(progress.metrics)}
                self._emit("step", **fields, steps_per_s=self.watch.rate(name))
                if self._task[name].role == "evaluator":
                    self.evaluating.steps(name)
                else:
                    self.failing.stepped(progress.step, now - progress.step_age)

    def _on_exited(self, told: ev.Exited, now: float) -> None:
        self.failing.exited(told.host, told.exit, now)

    def _on_ended(self, told: ev.Ended, now: float) -> None:
        self.failing.ended(told, now)
        self.books.offer(self.members[told.host], told.offers)

    # ---- snapshots

    def _on_saved(self, told: ev.Saved, now: float) -> None:
        if told.task not in self.plan.host(told.host).tasks:
            return
        if self.shelf.saved(told, now):
            self._emit("saved", step=told.id.step, snapshot=str(told.id))
            self._together.saved(told.id)
            self.watch.snapshot(now)
            self.failing.reached(told.id.step)

    def _on_follows(self, told: ev.Follows, now: float) -> None:
        self.evaluating.asks(told)

    def _on_evaluated(self, told: ev.Evaluated, now: float) -> None:
        self.evaluating.evaluated(told, now)

    def _on_stored(self, told: ev.Stored, now: float) -> None:
        self.shelf.stored(told, now)

    def _on_prepared(self, told: ev.Prepared, now: float) -> None:
        if self._forming.beginning is not None:
            self._forming.beginning.prepared(told, now)

    def _on_answered(self, told: ev.Answered, now: float) -> None:
        error = told.answer.get("error")
        if error is not None and error["kind"] == "superseded":
            self.books.phase = OVER
            self._out.append(ev.Leave(str(error["text"])))
        elif told.request["do"] == "evaluated":
            self.evaluating.answered(told.request, told.answer, now)
        elif "_number" not in told.request:
            before = self.shelf.newest()
            self.shelf.answered(told.request, told.answer, now)
            if told.request["do"] == "commit" and self.shelf.newest() > before:
                self.failing.forgive()  # also where a generation before this one had been further, and that was lost
        elif self.generation == 0 and told.answer.get("generation"):
            # A captain before this one has led the run, its notes are lost, and nobody who joined knows of it.
            self.shelf.take(told.answer)
            self.books.generation, self._forming.beginning = int(told.answer["generation"]), None
            self._return(now)
        elif self._forming.beginning is not None:
            self._forming.beginning.answered(told.request, told.answer, now)

    # ---- starting

    def _begin_again(self, now: float) -> None:
        """With nothing that this generation has saved."""
        for unit in self.units:
            if unit.kind not in (ALONE, BEFORE) and unit.phase == RUNNING:
                self.failing.stop(unit, now)

    def _start(self, units: list[Unit], restore: Id | None, now: float) -> None:
        hosts: dict[str, dict[str, int]] = {}
        for unit in units:
            unit.turn(RUNNING)
            for task in unit.tasks:
                if task.name in self.books.succeeded and unit.kind == ALONE:
                    continue
                hosts.setdefault(task.host, {})[task.name] = self.books.begin(task)
                self._together.begins(task.name, unit.kind == ALONE)
                self.evaluating.begins(task.name)
                self.watch.begin(task.name, now)
        if self._runtime_until is None and self.plan.limits.runtime is not None:
            self._runtime_until = now + self.plan.limits.runtime
        self.evaluating.not_after = self._runtime_until
        self._out.append(
            ev.Start(
                self.generation, len(self.failing.restarts), dict(self.books.addresses), restore, hosts,
                self._ingesting.data,
            )
        )  # fmt: skip
        tasks = [name for names in hosts.values() for name in names]
        self._emit("generation-formed", tasks=tasks, restore=None if restore is None else str(restore))

    # ---- what follows from the state, whatever was told

    def _advance(self, now: float) -> None:
        if self.phase == RETURNING:
            self._settle_return(now)
        if self.phase == LIVE and self._forming.beginning is None and self.generation and self.shelf.stuck():
            self._begin_again(now)
        if self.phase == LIVE:
            self.failing.advance(now)
        if self.phase == LIVE:
            self._forming.advance(now)
        elif self.phase == CLOSING and self.evaluating.left(now):
            self.failing.advance(now)
            self._forming.again(now)
        self._together.advance()
        if self.phase != OVER:
            self.shelf.advance(now, all_there=self.phase != RETURNING)
            self.evaluating.advance(now)
        self._ending.advance(now)

    # ---- a captain that returns

    def _return(self, now: float) -> None:
        self.books.phase = RETURNING
        self.shelf.returned = True
        self._forming.hold_until = now + self.lease

    def _settle_return(self, now: float) -> None:
        if now < self._forming.hold_until and not all(member.connected for member in self.members.values()):
            return
        self.books.phase = LIVE
        if self._ending.outcome[0]:  # the captain before this one had decided how the run ends
            self._emit("captain-returned", adopted=True)
            if self._ending.outcome[0] == "succeeded":
                self._close_again(now)
            else:
                self._ending.end(*self._ending.outcome, now, "term")
            return
        complete = True
        for unit in self.units:
            if unit.phase == DONE:
                continue
            if unit.name in self.books.waited and not unit.live:
                unit.turn(WAITING, now)
                complete = False
                continue
            lacking = [t for t in unit.tasks if t.name not in self.books.live and t.name not in self.books.succeeded]
            unit.turn(RUNNING)
            for task in unit.tasks if unit.kind != BEFORE else ():
                self.watch.begin(task.name, now)
            if lacking:
                complete = False
                if unit.failures:
                    self.failing.stop(unit, now)
                else:
                    name = lacking[0].name
                    self.failing.lost(name, f"{name} was gone when the captain came back", now)
        if complete:
            self._forming.hold_until = 0.0
        self._emit("captain-returned", adopted=complete)

    def _close_again(self, now: float) -> None:
        """Training had succeeded: an evaluator may not have seen all of it."""
        for unit in self.units:
            task = unit.tasks[0]
            if unit.phase != DONE:
                gone = task.role == "evaluator" and not unit.live and task.name not in self.books.succeeded
                unit.turn(WAITING if gone else RUNNING, now)
        self._forming.hold_until = 0.0
        self._ending.close(now)

    # ---- notes for the next captain

    def milestone(self) -> tuple[object, ...]:
        """Differs when something happened that the next captain must know and no member could tell it."""
        failed = len(self.failing.restarts), len(self.failing.recovering)
        owed, ingest = self.shelf.owed is not None, self._ingesting.saved()
        return self.generation, *failed, self._ending.outcome, self.phase, owed, *ingest.values()

    def saved(self) -> dict[str, Any]:
        return {
            "generation": self.generation,
            **self.failing.saved(),
            "recorded": self._forming.recorded,
            "owed": self.shelf.owed,
            "skipped": self.shelf.skipped,
            "runtime_until": self._runtime_until,
            "outcome": list(self._ending.outcome),
            "ingest": self._ingesting.saved(),
            "books": self.books.saved(),
            "watch": self.watch.saved(),
            "follows": sorted(self.evaluating.follows),
        }

    def _load(self, saved: dict[str, Any], ahead: float) -> None:
        self.books.generation = saved["generation"]
        self.failing.load(saved, ahead)
        self._forming.recorded = saved["recorded"]
        self.shelf.owed = saved["owed"]
        self.shelf.skipped = saved["skipped"]
        status, reason, cause = saved["outcome"]
        self._ending.outcome = (status, reason, cause)
        self._ingesting.load(saved["ingest"], ahead)
        self.books.load(saved["books"])
        self.watch.load(saved["watch"])
        self.evaluating.follows = set(saved["follows"])
        if saved["runtime_until"] is not None:
            self._runtime_until = self.evaluating.not_after = saved["runtime_until"] + ahead
