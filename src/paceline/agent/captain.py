"""The captain: decides for the run. A state machine without I/O: what happened goes in, instructions come out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Callable

from paceline.agent import events as ev
from paceline.agent.beginning import READY, RECORDING, Beginning
from paceline.agent.budget import Failure, blame
from paceline.agent.ledger import DONE, RUNNING, STOPPING, WAITING, Ledger, Member, Unit
from paceline.agent.progress import Watch
from paceline.agent.shelf import Shelf, restoring
from paceline.agent.together import Together
from paceline.plan import ALONE, LEAD, Plan
from paceline.storage.manifest import Id

RETURNING, LIVE, CLOSING, ENDING, OVER = "returning", "live", "closing", "ending", "over"
WAIT_WORDS_EVERY = 10.0
UNKILLABLE = 120.0  # seconds after which a task that was killed and is still there ends the run
NEARLY_FULL = 0.95  # share of memory
FAREWELL = 5.0  # how long members may take to say that they have left


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
        self._deciding = [task.name for task in plan.tasks if plan.role(task.role).decides]
        self.generation = 0
        self.restarts: list[dict[str, Any]] = []
        self.stacks: dict[str, str] = {}
        self.watch = Watch(plan)
        self.shelf = Shelf(plan, run, self._put, self._emit, copies)
        self._beginning: Beginning | None = None
        self._together = Together(self.books, self.shelf, self.watch.rate, self._put)
        self._recorded = 0  # the highest generation that may have a record
        self.phase = LIVE
        self.hold_until = 0.0
        self.outcome: tuple[str, str, str | None] = ("", "", None)
        self._runtime_until: float | None = None
        self._first_joined: float | None = None
        self._closing_until = 0.0
        self._commit_until: float | None = None
        self._how, self._grace_until = "kill", 0.0
        self._farewell_until = 0.0
        self._finished_at: float | None = None
        self._said_waiting = 0.0
        self._said: set[str] = set()
        self._recovering: list[dict[str, Any]] = []
        self._best = -1
        self._out: ev.Instructions = []
        self._wall_offset = wall - now
        if saved and saved.get("generation"):
            self._load(saved, ahead)
            self._return(now)

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
        if self._first_joined is None:
            self._first_joined = now
        if self.generation == 0 and told.generation > 0 and self.phase == LIVE:
            self._return(now)  # a captain before this one has led the run, and its notes are lost
        self.generation = max(self.generation, told.generation)
        held = self.books.held(told.host)
        if member.instance and told.instance != member.instance and held:
            if told.replaces or (told.place and told.place == member.place):
                self._gone(held, now, "host-lost", f"{told.host} was lost and has been replaced")
            else:
                self.books.ghosts.append((member.lease_until, held))
                for name in held:
                    lost = Failure("host-lost", name, f"{told.host} was lost and has been replaced", "", False, now)
                    self._fail(self._unit_of[name], lost, now, "kill")
        elif held:  # while returning: what this captain has adopted itself
            self._compare(told, held, now)
        if self.phase == RETURNING:
            self._adopt(told, now)
        for name, attempt in told.running.items():
            unit = self._unit_of.get(name)
            unwanted = unit is None or self.books.live.get(name) != attempt or unit.phase == STOPPING
            if unwanted:
                self._out.append(ev.End(told.host, {name: attempt}, "kill"))
            elif self.phase == ENDING:
                self._out.append(ev.End(told.host, {name: attempt}, self._how, max(0.0, self._grace_until - now)))
        self.books.withdraw(member)
        member.connected, member.left = True, False
        member.instance, member.place = told.instance, told.place
        member.lease_until = now + self.lease
        self.books.offer(member, told.offers)
        self._emit("member-joined", host=told.host)
        self._take_stock(told, now)
        if self.phase == ENDING and not self.books.anything_live():
            self._out.append(ev.Finish(told.host, self.outcome[0], self.outcome[1]))

    def _take_stock(self, told: ev.Joined, now: float) -> None:
        """Of the snapshots that are on a host that has joined."""
        if self._beginning is None:
            self.shelf.learn(max(self.generation, self._recorded))
        self.shelf.joined(told.host, told.held)
        for saved in told.held:
            self._on_saved(saved, now)
        if self.plan.host(told.host).role == "evaluator":
            self.shelf.tell_evaluator(told.host)
        if self._beginning is not None:
            self._beginning.joined(told.host)

    def _compare(self, told: ev.Joined, held: dict[str, int], now: float) -> None:
        """A member that dialled again: what it ran before may have ended meanwhile."""
        exits = {exit.task: exit for exit in told.exits}
        for name, attempt in held.items():
            if told.running.get(name) == attempt:
                continue
            known = exits.get(name)
            if known is not None and known.attempt == attempt:
                self._exit(told.host, known, now)
            else:
                self._gone({name: attempt}, now, "host-lost", f"{told.host} does not run it any more: its agent died")

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
                    unit.failures.append(_failure(exit, now))

    def _on_disconnected(self, told: ev.Disconnected, now: float) -> None:
        member = self.members[told.host]
        if member.connected:
            member.connected = False
            self.books.withdraw(member)
            if not member.left:
                self._emit("member-lost", host=told.host, reason="the connection ended")

    def _on_leaving(self, told: ev.Leaving, now: float) -> None:
        self.books.withdraw(self.members[told.host])
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

    def _on_said(self, told: ev.Said, now: float) -> None:
        if told.text not in self._said:  # several hosts may have the same to say, a full disk for one
            self._said.add(told.text)
            self._emit("warning" if told.warning else "note", text=told.text)

    def _on_stop(self, told: ev.Stop, now: float) -> None:
        if self.phase == RETURNING:  # once it is known what runs, that gets its grace
            self.outcome = self.outcome if self.outcome[0] else ("stopped", told.reason, None)
        elif self.phase in (LIVE, CLOSING):
            self._end("stopped", told.reason, None, now, "term")

    def _on_tick(self, told: ev.Tick, now: float) -> None:
        for member in self.members.values():
            if not member.connected and member.instance and now >= member.lease_until:
                held = self.books.held(member.host)
                if held:
                    cause, detail = "host-lost", f"{member.host}: no word for {self.lease:g} s"
                    self._gone(held, now, *_perhaps_memory(cause, detail, member))
        for until, held in list(self.books.ghosts):
            if now >= until:
                self.books.ghosts.remove((until, held))
                self._gone(held, now, "host-lost", "a host was replaced and its last lease has run out")
        if self.phase == LIVE:
            self._judge(now)
        if self.phase == LIVE:
            self._check_waits(now)

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
            if name not in held or self._unit_of[name].phase != RUNNING:
                continue
            stepped = self.watch.update(name, progress, now)
            if stepped and progress.step is not None:
                fields = {"task": name, "step": progress.step, "metrics": dict(progress.metrics)}
                self._emit("step", **fields, steps_per_s=self.watch.rate(name))
                if self._task[name].role != "evaluator":
                    self._stepped(name, progress.step, now - progress.step_age)

    def _stepped(self, task: str, step: int, at: float) -> None:
        for record in list(self._recovering):
            if at >= record["_at"]:
                self._recovering.remove(record)
                record["first_step_after_s"] = round(at - record.pop("_at"), 3)
                self._emit("recovered", task=record["task"], first_step_after_s=record["first_step_after_s"])
        self._new_progress(step)

    def _new_progress(self, step: int) -> None:
        if step > self._best:
            self._best = step
            self._forgive()

    def _forgive(self) -> None:
        for unit in self.units:
            unit.budget.reset()

    def _on_exited(self, told: ev.Exited, now: float) -> None:
        self._exit(told.host, told.exit, now)

    def _exit(self, host: str, exit: ev.Exit, now: float) -> None:
        if self.books.held(host).get(exit.task) != exit.attempt:
            return
        unit = self._unit_of[exit.task]
        self.books.dies(exit.task)
        self._emit("task-exited", task=exit.task, code=exit.code, signal=exit.signal, expected=exit.expected)
        if self.phase == ENDING:
            return
        if exit.expected:
            if exit.cause:
                unit.failures.append(_failure(exit, now))
            return
        if not exit.cause:
            self.books.succeeded.add(exit.task)
        elif self.phase == CLOSING:
            self._emit("note", text=f"{exit.task} failed after training had succeeded: {exit.detail}")
        else:
            failure = _failure(exit, now)
            if failure.cause == "signal" and exit.signal == "SIGKILL":
                cause, detail = _perhaps_memory(failure.cause, failure.detail, self.members[host])
                failure = replace(failure, cause=cause, detail=detail)
            self._fail(unit, failure, now, "kill")

    def _on_ended(self, told: ev.Ended, now: float) -> None:
        for name, attempt in told.tasks.items():
            if self.books.held(told.host).get(name) != attempt:
                continue
            self.books.dies(name)
            self._emit("task-exited", task=name, code=None, signal=None, expected=True)
            unit = self._unit_of[name]
            if self.phase == LIVE and unit.phase == RUNNING:
                lost = f"{told.host} ended it: it had heard nothing from the captain for a lease"
                self._fail(unit, Failure("host-lost", name, lost, "", False, now), now, "kill")
        for name, text in told.stacks.items():
            self.stacks[name] = text
            self._emit("stacks", task=name, text=text)
        for name, state in told.states.items():
            if name in self._unit_of:
                of = self._unit_of[name]
                of.failures = [failure.seen(name, state) for failure in of.failures]
        self.books.offer(self.members[told.host], told.offers)

    def _gone(self, held: dict[str, int], now: float, cause: str, detail: str) -> None:
        """These attempts are not running any more, and nobody has said how they ended."""
        for name, attempt in held.items():
            if self.books.live.get(name) != attempt:
                continue
            self.books.dies(name)
            self._emit("task-exited", task=name, code=None, signal=None, expected=self.phase == ENDING)
            if self.phase in (LIVE, RETURNING):
                self._fail(self._unit_of[name], Failure(cause, name, detail, "", False, now), now, "kill")

    # ---- snapshots

    def _on_saved(self, told: ev.Saved, now: float) -> None:
        if told.task not in self.plan.host(told.host).tasks:
            return
        if self.shelf.saved(told, now):
            self._emit("saved", step=told.id.step, snapshot=str(told.id))
            self._together.saved(told.id)
            self.watch.snapshot(now)
            self._new_progress(told.id.step)

    def _on_stored(self, told: ev.Stored, now: float) -> None:
        self.shelf.stored(told, now)

    def _on_prepared(self, told: ev.Prepared, now: float) -> None:
        if self._beginning is not None:
            self._beginning.prepared(told, now)

    def _on_answered(self, told: ev.Answered, now: float) -> None:
        error = told.answer.get("error")
        if error is not None and error["kind"] == "superseded":
            self.phase = OVER
            self._out.append(ev.Leave(str(error["text"])))
        elif "_number" not in told.request:
            before = self.shelf.newest()
            self.shelf.answered(told.request, told.answer, now)
            if told.request["do"] == "commit" and self.shelf.newest() > before:
                self._forgive()  # also where a generation before this one had been further, and that was lost
        elif self.generation == 0 and told.answer.get("generation"):
            # A captain before this one has led the run, its notes are lost, and nobody who joined knows of it.
            self.shelf.take(told.answer)
            self.generation, self._beginning = int(told.answer["generation"]), None
            self._return(now)
        elif self._beginning is not None:
            self._beginning.answered(told.request, told.answer, now)

    def _begin_again(self, now: float) -> None:
        """With nothing that this generation has saved."""
        for unit in self.units:
            if unit.kind != ALONE and unit.phase == RUNNING:
                self._stop(unit, now, "kill")

    # ---- failing and starting again

    def _fail(self, unit: Unit, failure: Failure, now: float, how: str) -> None:
        unit.failures.append(failure)
        if unit.phase != STOPPING:
            self._stop(unit, now, how)

    def _stop(self, unit: Unit, now: float, how: str) -> None:
        for each in [unit, *self._led(unit)]:
            if each is unit or each.phase == RUNNING:
                each.turn(STOPPING, now)
                self._end_tasks([task.name for task in each.tasks], how)

    def _led(self, unit: Unit) -> list[Unit]:
        """The workers of a chief: they start again with it. One that hangs may wait for any of them; and those that
        stayed would need a second to find a ps that was started again, in which the new chief gives up."""
        chief = unit.kind == LEAD and any(task.role == "chief" for task in unit.tasks)
        return [each for each in self.units if chief and each.tasks[0].role == "worker"]

    def _end_tasks(self, names: Iterable[str], how: str, grace: float = 0.0) -> None:
        for host, tasks in self.books.by_host(names).items():
            self._out.append(ev.End(host, tasks, how, grace))

    def _settle(self, unit: Unit, now: float) -> None:
        """All tasks of a failed unit are gone: say why, and start again or give up."""
        failures, unit.failures = unit.failures, []
        unit.turn(WAITING, now)
        if not failures:
            return  # ended with others, through no fault of its own
        failure = blame(failures)
        verdict = unit.budget.count(failure, self.plan.restart.limit)
        if verdict.give_up:
            if self._only_beside(unit):
                unit.phase = DONE
                self._emit("warning", text=f"{unit.name} is given up and training goes on without it: {verdict.reason}")
                return
            self._end("failed", verdict.reason, failure.cause, now, "kill")
            return
        unit.not_before = now + verdict.delay
        record = {
            "cause": failure.cause, "task": failure.task, "detail": failure.detail,
            "at": failure.at + self._wall_offset, "first_step_after_s": None, "_at": failure.at,
        }  # fmt: skip
        self.restarts.append(record)
        if unit.kind != ALONE or self.plan.strategy == "parameter-server":
            self._recovering.append(record)
        what = {"cause": failure.cause, "task": failure.task, "detail": failure.detail}
        count = {"count": verdict.count, "limit": self.plan.restart.limit}
        scope = [task.name for each in [unit, *self._led(unit)] for task in each.tasks]
        self._emit("restart", **what, **count, scope=scope, delay_s=verdict.delay)

    def _only_beside(self, unit: Unit) -> bool:
        return unit.kind == ALONE and unit.tasks[0].role == "evaluator"

    def _start(self, units: list[Unit], restore: Id | None, now: float) -> None:
        hosts: dict[str, dict[str, int]] = {}
        for unit in units:
            unit.turn(RUNNING)
            for task in unit.tasks:
                if task.name in self.books.succeeded and unit.kind == ALONE:
                    continue
                hosts.setdefault(task.host, {})[task.name] = self.books.begin(task)
                self._together.begins(task.name, unit.kind == ALONE)
                self.watch.begin(task.name, now)
        if self._runtime_until is None and self.plan.limits.runtime is not None:
            self._runtime_until = now + self.plan.limits.runtime
        self._out.append(ev.Start(self.generation, len(self.restarts), dict(self.books.addresses), restore, hosts))
        tasks = [name for names in hosts.values() for name in names]
        self._emit("generation-formed", tasks=tasks, restore=None if restore is None else str(restore))

    # ---- what follows from the state, whatever was told

    def _advance(self, now: float) -> None:
        if self.phase == RETURNING:
            self._settle_return(now)
        if self.phase == LIVE and self._beginning is None and self.generation and self.shelf.stuck():
            self._begin_again(now)
        if self.phase == LIVE:
            for unit in self.units:
                if self.phase == LIVE and unit.phase == STOPPING and not unit.live:
                    self._settle(unit, now)
        if self.phase == LIVE:
            self._start_ready(now)
        self._together.advance()
        if self.phase != OVER:
            self.shelf.advance(now, all_there=self.phase != RETURNING)
        if self.phase == LIVE and self._training_succeeded():
            self._close(now)
        if self.phase == CLOSING:
            self._closing(now)
        if self.phase == ENDING:
            self._ending(now)

    def _start_ready(self, now: float) -> None:
        waiting = [unit for unit in self.units if unit.phase == WAITING]
        free = [unit for unit in waiting if not unit.lacking and not unit.live]
        ready = [unit for unit in free if now >= max(unit.not_before, self.hold_until)]
        if self.generation == 0:
            self._begin(ready if len(ready) == len(self.units) else [], now)
            return
        if alone := [unit for unit in ready if unit.kind == ALONE]:
            self._start(alone, None, now)
        self._begin([unit for unit in ready if unit.kind != ALONE], now)

    def _begin(self, units: list[Unit], now: float) -> None:
        """A generation of these, once everything is there; from the start again where they have changed meanwhile."""
        hosts = restoring(self.plan, units)
        if self._beginning is not None and (not units or hosts != self._beginning.hosts):
            self._beginning = None
        if not units:
            return
        if self._beginning is None:
            number = max(self.generation, self._recorded, self.shelf.recorded) + 1
            grace = self.plan.limits.grace
            self._beginning = Beginning(self.shelf, number, hosts, self._put, self._emit, now, grace)
        begun = self._beginning
        begun.advance(now)
        if begun.stage in (RECORDING, READY):
            self._recorded = max(self._recorded, begun.number)
        if begun.trouble is not None:
            text, passing = begun.trouble
            if self.generation == 0 or not passing or now - begun.since >= self.plan.limits.start:
                self._end("failed", text, "store", now, "kill")
        elif begun.stage == READY:
            self._beginning = None
            self.generation = begun.number
            self.shelf.descend(begun.choice)
            if begun.owed is not None:
                self.shelf.owe(*begun.owed, now)
            elif self.generation > 1:
                self._put(ev.Ask({"do": "sweep", "generation": self.generation}))
            self._start(units, begun.choice, now)

    def _check_waits(self, now: float) -> None:
        missing = self.books.missing()
        since: float | None
        if self._beginning is not None and not missing:
            if self._beginning.trouble is not None:
                return  # the place is missing, no host
            missing, since = self._beginning.missing(), self._beginning.since
        elif self.generation == 0:
            since = self._first_joined
        else:
            since = min((u.since for u in self.units if u.phase == WAITING and u.since is not None), default=None)
        if not missing or since is None:
            return
        limit = self.plan.limits.start
        if now - since >= limit:
            tasks = [task for host in missing for task in self.plan.host(host).tasks]
            reason = f"missing {', '.join(tasks)} after {limit:g} s (limits.start)"
            self._end("failed", reason, "start-timeout", now, "kill")
        elif now - max(self._said_waiting, since) >= WAIT_WORDS_EVERY:
            self._said_waiting = now
            self._emit("waiting", missing=missing, since_s=round(now - since, 1), limit_s=limit)

    def _judge(self, now: float) -> None:
        if self._runtime_until is not None and now >= self._runtime_until:
            reason = f"the run took {self.plan.limits.runtime:g} s, which is limits.runtime"
            self._end("failed", reason, "runtime-limit", now, "term")
            return
        for unit in self.units:
            if unit.phase == STOPPING and unit.since is not None and now - unit.since > UNKILLABLE:
                stuck = ", ".join(sorted(unit.live))
                reason = f"{stuck}: not gone {UNKILLABLE:g} s after it was ended; something in the kernel holds it"
                self._end("failed", reason, "hang", now, "kill")
                return
            if unit.phase != RUNNING:
                continue
            hang = self.watch.hung(unit.kind, [task for task in unit.tasks if task.name in unit.live], now)
            if hang is None:
                continue
            silent, limit = round(hang.silent, 1), round(hang.limit, 1)
            self._emit("hang", tasks=hang.tasks, silent_s=silent, limit_s=limit, progress=hang.progress)
            detail = f"no {hang.progress} for {hang.silent:.1f} s (limit {hang.limit:g} s)"
            self._fail(unit, Failure("hang", hang.tasks[0], detail, "", False, now), now, "abort")

    # ---- a captain that returns

    def _return(self, now: float) -> None:
        self.phase = RETURNING
        self.shelf.returned = True
        self.hold_until = now + self.lease

    def _settle_return(self, now: float) -> None:
        if now < self.hold_until and not all(member.connected for member in self.members.values()):
            return
        self.phase = LIVE
        if self.outcome[0]:  # the captain before this one had decided how the run ends
            self._emit("captain-returned", adopted=True)
            self._end(*self.outcome, now, "term")
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
            for task in unit.tasks:
                self.watch.begin(task.name, now)
            if lacking:
                complete = False
                detail = f"{lacking[0].name} was gone when the captain came back"
                lost = Failure("host-lost", lacking[0].name, detail, "", False, now)
                self._fail(unit, unit.failures.pop() if unit.failures else lost, now, "kill")
        if complete:
            self.hold_until = 0.0
        self._emit("captain-returned", adopted=complete)

    # ---- ending

    def _training_succeeded(self) -> bool:
        return all(name in self.books.succeeded for name in self._deciding)

    def _close(self, now: float) -> None:
        """Training has succeeded: servers end at once, evaluator and peers may finish what they do."""
        self.phase = CLOSING
        self.outcome = ("succeeded", "training succeeded", None)
        if self.plan.strategy == "parameter-server":
            servers = [task.name for task in self.plan.tasks if task.role in ("ps", "worker")]
            self._end_tasks(servers, "term", self.plan.limits.grace)
        self._commit_until = now + self.plan.limits.commit
        self._closing_until = now + self.plan.limits.grace
        beside = [name for name in self.books.live if self._task[name].role == "evaluator"]
        if beside:
            text = f"training has succeeded; {', '.join(beside)} may finish"
            self._emit("ending", reason=text, grace_s=self.plan.limits.grace)

    def _closing(self, now: float) -> None:
        if self._committing(now):
            self._closing_until = now + self.plan.limits.grace  # what stands beside training gets the last snapshot too
            return
        if not self.books.anything_live() or now >= self._closing_until:
            self._end(*self.outcome, now, "term")

    def _committing(self, now: float) -> bool:
        """Whether a snapshot that is saved should still be waited for."""
        if self._commit_until is None:
            self._commit_until = now + self.plan.limits.commit
        return self.shelf.busy() and now < self._commit_until

    def _deleting(self, now: float) -> bool:
        """What is not to be kept is gone when the run is over, too."""
        return bool(self.shelf.deleting) and self._commit_until is not None and now < self._commit_until

    def _end(self, status: str, reason: str, cause: str | None, now: float, how: str) -> None:
        self.phase = ENDING
        self.outcome = (status, reason, cause)
        grace = self.plan.limits.grace if how == "term" else 0.0
        if self.books.anything_live():
            self._emit("ending", reason=reason, grace_s=grace)
        self._end_tasks(list(self.books.live), how, grace)
        self._how, self._grace_until = how, now + grace
        self._farewell_until = now + grace + self.lease + FAREWELL

    def _ending(self, now: float) -> None:
        gone = not self.books.anything_live() or now >= self._farewell_until
        if self._finished_at is None and gone and not self._committing(now) and not self._deleting(now):
            self._finished_at = now
            self._check_last_snapshot()
            self.shelf.close()
            for member in self.members.values():
                if member.connected:
                    self._out.append(ev.Finish(member.host, self.outcome[0], self.outcome[1]))
        if self._finished_at is None:
            return
        staying = any(member.connected and not member.left for member in self.members.values())
        if not staying or now >= self._finished_at + FAREWELL:
            self.phase = OVER
            status, reason, cause = self.outcome
            self._emit("run-ended", status=status, reason=reason, cause=cause)
            self._out.append(ev.Over(status, reason, cause, dict(self.stacks)))

    def _check_last_snapshot(self) -> None:
        """Training that has succeeded and whose result is not where it should be has not succeeded."""
        draft, gone = self.shelf.unfinished(), self.shelf.gone
        if draft is not None:
            why = draft.failed or self.shelf.trouble or f"{self.plan.limits.commit:g} s (limits.commit) were not enough"
            hosts = ", ".join(sorted({piece.host for piece in draft.pieces.values()}))
            text = f"the last snapshot (step {draft.id.step}) is not committed and is on {hosts} only: {why}"
        elif gone is not None and not self.shelf.past(gone[0]):
            text = f"the last snapshot (step {gone[0].step}) is not committed: it was lost with {gone[1]}"
        else:
            return
        if self.outcome[0] == "succeeded":
            self.outcome = ("failed", f"training succeeded, but {text}", "store")
        else:
            self._emit("warning", text=text)

    # ---- notes for the next captain

    def milestone(self) -> tuple[object, ...]:
        """Differs when something happened that the next captain must know and no member could tell it."""
        owes = self.shelf.owed is not None
        return self.generation, len(self.restarts), len(self._recovering), self.outcome, self.phase, owes

    def saved(self) -> dict[str, Any]:
        return {
            "generation": self.generation,
            "restarts": self.restarts,
            "recovering": [number for number, record in enumerate(self.restarts) if record in self._recovering],
            "best": self._best,
            "recorded": self._recorded,
            "owed": self.shelf.owed,
            "skipped": self.shelf.skipped,
            "runtime_until": self._runtime_until,
            "stacks": self.stacks,
            "outcome": list(self.outcome),
            "books": self.books.saved(),
            "watch": self.watch.saved(),
        }

    def _load(self, saved: dict[str, Any], ahead: float) -> None:
        self.generation = saved["generation"]
        self.restarts = [dict(record) for record in saved["restarts"]]
        self._recovering = [self.restarts[number] for number in saved["recovering"]]
        for record in self._recovering:
            record["_at"] += ahead
        self._best = saved["best"]
        self._recorded = saved["recorded"]
        self.shelf.owed = saved["owed"]
        self.shelf.skipped = saved["skipped"]
        self.stacks = dict(saved["stacks"])
        status, reason, cause = saved["outcome"]
        self.outcome = (status, reason, cause)
        self.books.load(saved["books"])
        self.watch.load(saved["watch"])
        if saved["runtime_until"] is not None:
            self._runtime_until = saved["runtime_until"] + ahead


def _failure(exit: ev.Exit, now: float) -> Failure:
    return Failure(exit.cause, exit.task, exit.detail, exit.place, exit.survivor, now - exit.age, asked=exit.expected)


def _perhaps_memory(cause: str, detail: str, member: Member) -> tuple[str, str]:
    """What vanished while memory was almost used up was probably killed for that."""
    if member.memory <= NEARLY_FULL:
        return cause, detail
    return "out-of-memory", f"{detail}; probably out of memory ({member.memory:.0%} was in use)"
