"""Which committed snapshots are still to be evaluated, who evaluates which, and what came of it. Decides, does nothing
itself.

Evaluators ask for snapshots; each is given to one of them, the oldest first. What one has not told of when it dies is
given again. A result counts once it is at the place, beside the snapshot: no captain forgets it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Callable

from paceline.agent import events as ev
from paceline.agent.journal import stamp
from paceline.agent.ledger import DONE, ENDING, OVER, Ledger
from paceline.agent.shelf import PAUSE, Shelf
from paceline.plan import Plan
from paceline.storage.manifest import Id, pair

LEAST = 600.0  # seconds that the last ones may take each, where the job does not say;
TIMES = 5  # or so many times as long as the longest before
MANY = 10  # that wait: worth a word, as each is kept until then


class Evaluating:
    def __init__(
        self,
        plan: Plan,
        books: Ledger,
        shelf: Shelf,
        measured: Callable[[str, Mapping[str, float]], None],
        put: Callable[[ev.Instruction], None],
        emit: Callable[..., None],
    ) -> None:
        """`measured`: told the metrics that a task has given."""
        self._plan, self._books, self._shelf = plan, books, shelf
        self._measured, self._put, self._emit = measured, put, emit
        self._tasks = {task.name: task.host for task in plan.tasks if task.role == "evaluator"}
        self.follows: set[str] = set()  # those that have ever asked
        self._begun: dict[str, float] = {}  # when they were first started, by this captain
        self._others: set[str] = set()  # those that report steps without having asked: they look for themselves
        self._asking: set[str] = set()
        self._given: dict[str, tuple[Id, float]] = {}
        self._longest = 0.0
        self._told: set[Id] = set()  # of those that are evaluated, by an event of this captain
        self._passed: set[Id] = set()  # cannot be evaluated
        self._unrecorded: dict[Id, ev.Evaluated] = {}
        self._again_at: dict[Id, float | None] = {}  # of those; None: the place has been asked
        self._warned: set[Any] = set()
        self._needed: set[Id] = set()  # as it was last time
        self._no_more = False  # training is over, and all of it is committed
        self._until: float | None = None  # once it is: for the next result
        self.not_after: float | None = None  # when the run has to end, whatever is left

    # ---- what is told

    def begins(self, task: str) -> None:
        """Another attempt of it."""
        self._asking.discard(task)
        self._given.pop(task, None)

    def steps(self, task: str) -> None:
        self._others.add(task)

    def joined(self, told: ev.Joined, now: float) -> None:
        """What its tasks were doing while the captain was away."""
        for task, id in told.follows.items():
            if self._tasks.get(task) != told.host or task not in self._books.live:
                continue
            self.follows.add(task)
            self._asking.discard(task)
            if id is None:
                self._given.pop(task, None)
                self._asking.add(task)
            else:
                self._given[task] = id, now
        for each in told.evaluated:
            self.evaluated(each, now)

    def asks(self, told: ev.Follows) -> None:
        if self._tasks.get(told.task) == told.host and told.task in self._books.live:
            self.follows.add(told.task)
            self._given.pop(told.task, None)
            self._asking.add(told.task)

    def evaluated(self, told: ev.Evaluated, now: float) -> None:
        if told.task not in self._tasks:
            return
        given, since = self._given.get(told.task, (None, now))
        if given == told.id:
            self._longest = max(self._longest, now - since)
        if told.error:
            self._pass_over(told, told.error, now)
        elif told.id in self._told:
            self._note(told)
        elif told.id not in self._unrecorded:
            self._unrecorded[told.id], self._again_at[told.id] = told, now

    def answered(self, request: Mapping[str, Any], answer: Mapping[str, Any], now: float) -> None:
        id = Id(*request["snapshot"])
        told = self._unrecorded.get(id)
        if told is None:
            return
        error = answer.get("error")
        if error is None:
            self._keep(told, answer["metrics"], now)
        elif error["kind"] == "damaged":
            self._pass_over(told, str(error["text"]), now)
        else:
            self._again_at[id] = now + PAUSE
            self._warn(id, f"what {told.task} says of step {id.step} is not at its place yet: {error['text']}")

    def _keep(self, told: ev.Evaluated, metrics: Mapping[str, float], now: float) -> None:
        id = told.id
        self._told.add(id)
        self._measured(told.task, metrics)
        self._shelf.judged(id, metrics)
        words = {"task": told.task, "step": id.step, "snapshot": str(id), "metrics": dict(metrics)}
        self._emit("evaluated", **words, **self._shelf.best_words(self.needed(now) - {id}))
        self._finish(told, now)

    def _pass_over(self, told: ev.Evaluated, why: str, now: float) -> None:
        self._passed.add(told.id)
        if told.id in self._shelf.counted:
            self._emit("warning", text=f"the snapshot of step {told.id.step} is not evaluated: {why}")
        self._finish(told, now)

    def _finish(self, told: ev.Evaluated, now: float) -> None:
        self._unrecorded.pop(told.id, None)
        self._again_at.pop(told.id, None)
        self._until = None  # the next one has as long
        self._note(told)

    def _note(self, told: ev.Evaluated) -> None:
        if self._given.get(told.task, (None, 0.0))[0] == told.id:
            del self._given[told.task]
        self._put(ev.Say(told.host, {"type": "noted", "snapshot": pair(told.id)}))

    # ---- what is asked

    def waiting(self) -> list[Id]:
        """Those that nobody has evaluated, oldest first; some may be given already."""
        done = (self._shelf.results, self._passed, self._unrecorded)
        return [id for id in reversed(self._shelf.counted) if not any(id in each for each in done)]

    def expected(self, now: float) -> bool:
        """Whether an evaluator is there, or may come, that follows. One that does not ask within limits.start of its
        first start, or says how far it is without having asked, has ways of its own."""
        return any(self._may_ask(task, now) for task in self._tasks)

    def _may_ask(self, task: str, now: float) -> bool:
        if task in self._books.succeeded or self._books.unit_of[task].phase == DONE:
            return False
        late = now >= self._begun.get(task, now) + self._plan.limits.start
        return task in self.follows or not (task in self._others or late)

    def needed(self, now: float) -> set[Id]:
        """What may not be deleted yet."""
        if not self._tasks:
            return set()
        own = {id for id, _ in self._given.values()} | set(self._unrecorded)
        over = self._books.phase in (ENDING, OVER)
        return own.union(self.waiting()) if self.expected(now) and not over else own

    def left(self, now: float) -> bool:
        """Whether an evaluator that follows has something to do, or may have: a captain that returns has to ask."""
        follows = any(task in self.follows and self._may_ask(task, now) for task in self._tasks)
        return bool(self._unrecorded) or (follows and (not self._shelf.known or bool(self.waiting())))

    # ---- the end

    def limit(self) -> float:
        """Seconds for each that is left once training has ended."""
        asked = self._plan.limits.evaluation
        return asked if asked is not None else max(LEAST, TIMES * self._longest)

    def end(self, now: float) -> None:
        """Nothing more will be committed: those that ask are told, once there is nothing left."""
        if not self._no_more:
            self._no_more = True
            self.advance(now)

    def unrecorded(self) -> bool:
        return bool(self._unrecorded)

    def may_finish(self, now: float) -> bool:
        """Whether what is left should be waited for."""
        if not self.left(now):
            return False
        if self._until is None:
            self._until = now + self.limit()
        if now < self._until and (self.not_after is None or now < self.not_after):
            return True
        limit = f"{self.limit():g} s (limits.evaluation)" if now >= self._until else "limits.runtime"
        steps = ", ".join(str(id.step) for id in (*self._unrecorded, *self.waiting()))
        self._warn("end", f"the run ends before step {steps} was evaluated: {limit} has passed")
        return False

    # ---- from one to the next

    def advance(self, now: float) -> None:
        if not self._tasks:
            return
        for task in self._books.live.keys() & self._tasks.keys():
            self._begun.setdefault(task, now)
        for id, at in list(self._again_at.items()):
            if at is not None and now >= at:
                self._again_at[id] = None
                told = self._unrecorded[id]
                words = {"snapshot": pair(id), "task": told.task, "metrics": dict(told.metrics), "at": stamp()}
                self._put(ev.Ask({"do": "evaluated", **words}))
        for task in [task for task in self._given if task not in self._books.live]:
            del self._given[task]
        self._asking &= self._books.live.keys()
        if self._shelf.known and self._asking:
            self._give(now)
        needed = self.needed(now)
        if self._needed - needed:
            self._shelf.retain(now)
        self._needed = needed

    def _give(self, now: float) -> None:
        given = {id for id, _ in self._given.values()}
        free = [id for id in self.waiting() if id not in given]
        if len(free) > MANY and not self._no_more:
            self._warn("many", f"{len(free)} snapshots wait to be evaluated, and are kept until then")
        for task in [task for task in self._tasks if task in self._asking]:
            if free:
                self._given[task] = free.pop(0), now
            elif not self._no_more:
                return
            next = pair(self._given[task][0]) if task in self._given else None
            self._asking.discard(task)
            self._put(ev.Say(self._tasks[task], {"type": "evaluate", "task": task, "snapshot": next}))

    def _warn(self, what: Any, text: str) -> None:
        """Once."""
        if what not in self._warned:
            self._warned.add(what)
            self._emit("warning", text=text)
