"""A folder that tasks keep their own checkpoints in: the agent of the task that leads has it taken whenever it has
changed, and every agent has it put back before tasks start.

Nothing is taken of what a task left that died, as it may have died while it wrote.

<folder>/watched/<host>/        copies of what was taken
<folder>/watched/tasks/<task>   the processes that may write to it
<folder>/watched/begun.json     for which generation it was put back
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Callable

from paceline.agent.attempt import Attempt
from paceline.agent.loop import Loop
from paceline.agent.options import Options
from paceline.agent.porting import Answer, Porting
from paceline.agent.shelf import restores
from paceline.plan import Plan
from paceline.storage.manifest import Id
from paceline.storage.putting import TASKS, tidy

RUN = "$PACELINE_RUN"  # in the name of the folder: runs that share a working folder do not share that
SAID_AFTER = 120.0  # seconds in which it could not be taken
AGAIN = 0.2  # seconds until the last one is tried again


class Watching:
    def __init__(
        self,
        plan: Plan,
        options: Options,
        loop: Loop,
        porting: Porting,
        take: Callable[[str, Id, str], None],
        said: Callable[..., None],
    ) -> None:
        """`take`: what lies in that folder is a snapshot of that task."""
        self._plan, self._options, self._loop, self._porting = plan, options, loop, porting
        self._take, self._said = take, said
        watch = plan.snapshots.watch.replace(RUN, options.run)
        work = options.work or plan.code
        self.folder = os.path.join(work, watch) if watch else ""
        self._own = f"{options.folder}/watched"
        first = next((task for task in plan.tasks if restores(plan, task)), None)
        self._leader = first.name if first is not None and first.host == options.host and watch else ""
        copies = f"{self._own}/{options.host}" if self._leader else ""
        self._words = {"folder": self.folder, "own": self._own, "copies": copies}
        self._inner = [work, options.folder, *filter(os.path.isabs, [options.snapshots, plan.snapshots.to])]
        self._asked: int | None = None
        self._step = 0  # of what was restored or taken last
        self._late_since: float | None = None
        self._doubtful: Answer = {}  # files that a task may have died in
        self._warned: set[str] = set()

    # ---- before tasks start

    def put(self, generation: int, id: Id | None, source: str, answered: Callable[[Answer], None]) -> int:
        """`source`: the snapshot; empty: there is none. The number of the request."""

        def done(answer: Answer) -> None:
            self._step, self._doubtful = 0 if id is None else id.step, answer.get("doubtful", {})
            if answer.get("kept"):
                self._said(f"what was in {self.folder} before the run is in {answer['kept']} now")
            answered({name: value for name, value in answer.items() if name not in ("kept", "doubtful")})

        who = {"run": self._options.run, "host": self._options.host}
        words = {**who, "generation": generation, "source": source, "inner": self._inner}
        return self._porting.ask({"do": "put", **self._words, **words}, done)

    # ---- while they run

    def began(self, attempt: Attempt) -> None:
        if self.folder and restores(self._plan, attempt.task):
            try:
                with open(f"{self._own}/{TASKS}/{attempt.task.name}", "w") as file:
                    file.write(str(attempt.pid))
            except OSError as error:
                self._warn_once(f"{self.folder} is not taken: {error.filename}: {error.strerror}")

    def look(self, attempts: Mapping[str, Attempt]) -> None:
        """Once a second."""
        attempt = attempts.get(self._leader)
        if attempt is not None and attempt.pid and self._asked is None:
            self._ask(attempt, self._leader, self._warn)

    def _ask(self, attempt: Attempt, leader: str, told: Callable[[Answer], None]) -> None:
        """`leader`: empty once that has ended well. `told`: why nothing could be taken; or nothing, where there is
        nothing to take any more."""
        to, step = f"{self._words['copies']}/taken-{os.urandom(4).hex()}", attempt.step

        def answered(answer: Answer) -> None:
            if number == self._asked:
                self._asked = None
            if answer.get("taken"):
                self._step = max(self._step + 1, step or 0)
                self._take(attempt.task.name, Id(self._step, attempt.generation), to)
            told(answer.get("error") or {})

        words = {"to": to, "metrics": attempt.metrics, "leader": leader, "doubtful": self._doubtful}
        request = {"do": "take", **self._words, **words}
        self._asked = number = self._porting.ask(request, answered)

    def _warn(self, error: Answer) -> None:
        kind, text, now = error.get("kind"), error.get("text"), self._loop.now()
        if kind in (None, "unwanted"):
            self._late_since = None
        elif kind != "later":
            self._warn_once(f"{self.folder} is not taken: {text}")
        elif self._late_since is None:
            self._late_since = now
        elif now - self._late_since > SAID_AFTER:
            self._warn_once(f"{self.folder} has changed, and could not be taken for {SAID_AFTER:g} s: {text}")

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            self._said(text, True)

    # ---- once the task that leads has ended

    def ended(self, attempt: Attempt, well: bool, then: Callable[[], None]) -> None:
        """`then` follows when all is taken that there is to take; at once where that is nothing."""
        task = attempt.task.name
        if well and self.folder and restores(self._plan, attempt.task):
            with contextlib.suppress(OSError):
                os.unlink(f"{self._own}/{TASKS}/{task}")
        if well and task == self._leader:
            self._take_the_last(attempt, then)
            return
        if task == self._leader and self._asked is not None:
            self._porting.forget(self._asked)
        then()

    def _take_the_last(self, attempt: Attempt, then: Callable[[], None]) -> None:
        attempt.pid = 0  # it is gone, and its number may be another's
        why = "there was no time for it"

        def answered(error: Answer) -> None:
            nonlocal why
            why = error.get("text", "")
            if error.get("kind") == "later":
                self._loop.after(AGAIN, ask)
            else:
                finish()

        def ask() -> None:
            if attempt.gives_up is not None:
                self._ask(attempt, "", answered)

        def finish() -> None:
            if attempt.gives_up is None:
                return
            attempt.gives_up = None
            timer.cancel()
            if why:
                self._said(f"{self.folder} was not taken after {attempt.task.name} had ended: {why}", True)
            if self._asked is not None:
                self._porting.forget(self._asked)
            then()

        def give_up() -> None:
            self._loop.after(0.0, finish)

        timer = self._loop.after(self._limit(), finish)
        attempt.gives_up = give_up
        ask()

    def _limit(self) -> float:
        """Seconds for the last one: a task that needs more would seem to hang."""
        hang_after, commit = self._plan.restart.hang_after, self._plan.limits.commit
        return commit if hang_after is None else min(commit, hang_after / 2)

    def tidy(self) -> None:
        """The run is over."""
        if self.folder:
            tidy(self.folder, self._own, (self._options.run, self._options.host))
