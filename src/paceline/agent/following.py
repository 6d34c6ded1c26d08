"""Snapshots for the evaluators of a host: each is fetched when one asks for it, and stays until that asks again.

<folder>/evaluating/<task>/step-<n>-g<generation>      a verified copy of what the task evaluates
<folder>/evaluated/<host>/step-<n>-g<generation>.json  what it said, until the captain has taken note of it
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterable
from typing import Any, Callable

from paceline.agent.events import Evaluated
from paceline.agent.journal import replace
from paceline.agent.loop import Loop
from paceline.agent.options import Options
from paceline.agent.porting import Answer, Porting
from paceline.agent.wire import Message
from paceline.plan import Plan
from paceline.storage.manifest import Id, pair, parse_id

AGAIN = 2.0  # seconds until a copy that could not be had is tried again
MOST_METRICS = 100


class Follow:
    """One attempt of a task that follows."""

    def __init__(self) -> None:
        self.wants = False  # the next one
        self.has: Id | None = None  # what it evaluates, or has evaluated and the captain has not noted
        self.fetch = 0  # of the porter


class Following:
    def __init__(
        self,
        plan: Plan,
        options: Options,
        porting: Porting,
        loop: Loop,
        tell: Callable[[Message], None],
        said: Callable[..., None],
        remove: Callable[[Iterable[str]], None],
        answer: Callable[[str, dict[str, Any]], None],
    ) -> None:
        """`answer`: to a task. `remove`: folders of this machine."""
        self._host = options.host
        self._above = [f"{options.folder}/evaluating", f"{options.folder}/evaluated"]
        self._copies, self._kept = self._above[0], f"{self._above[1]}/{options.host}"
        self._own = [f"{self._copies}/{task}" for task in plan.host(options.host).tasks]
        self._porting, self._loop = porting, loop
        self._tell, self._said, self._remove, self._answer = tell, said, remove, answer
        self._tasks: dict[str, Follow] = {}
        self._unnoted: dict[Id, Evaluated] = self._read()
        for task in plan.host(options.host).tasks:
            self._clear(task)  # of an agent before this one

    def __bool__(self) -> bool:
        """Whether a task here follows."""
        return bool(self._tasks)

    # ---- tasks

    def told(self, task: str, message: dict[str, Any]) -> None:
        """It is done with one, or wants one, or both."""
        follow = self._tasks.setdefault(task, Follow())
        follow.wants = bool(message.get("wants"))
        done = parse_id(str(message.get("done")))
        if done is not None and done == follow.has:
            self._finish(Evaluated(self._host, task, done, _numbers(message.get("metrics"))))
        elif follow.has is None and follow.wants:
            self._tell({"type": "follow", "task": task})

    def gone(self, task: str) -> None:
        """Its attempt has ended."""
        follow = self._tasks.pop(task, None)
        if follow is not None:
            self._porting.forget(follow.fetch)
            self._clear(task)

    def _clear(self, task: str) -> None:
        """What is in its folder, not the folder itself: that goes at the end, with all that is not yet removed."""
        folder = f"{self._copies}/{task}"
        with contextlib.suppress(FileNotFoundError):
            self._remove([f"{folder}/{name}" for name in os.listdir(folder)])

    def _finish(self, told: Evaluated) -> None:
        """On disk first: whoever dies now, it is not evaluated again."""
        self._unnoted[told.id] = told
        with contextlib.suppress(OSError):  # a full disk: this agent still knows
            os.makedirs(self._kept, exist_ok=True)
            replace(f"{self._kept}/{told.id}.json", _words(told))
        self._tell({"type": "evaluated", **_words(told)})
        self._remove([f"{self._copies}/{told.task}/{told.id}"])

    # ---- the captain

    def follows(self) -> dict[str, Id | None]:
        asking = {task: follow.has for task, follow in self._tasks.items()}
        return {task: has for task, has in asking.items() if has is not None or self._tasks[task].wants}

    def unnoted(self) -> tuple[Evaluated, ...]:
        return tuple(self._unnoted.values())

    def receive(self, message: Message) -> None:
        if message["type"] == "noted":
            self._noted(Id(*message["snapshot"]))
            return
        follow = self._tasks.get(str(message["task"]))
        if follow is None or not follow.wants or follow.has is not None:
            return  # it has died meanwhile, or has this one already
        if message["snapshot"] is None:
            follow.wants = False
            self._answer(str(message["task"]), {"over": True})
            return
        follow.has = Id(*message["snapshot"])
        self._fetch(str(message["task"]), follow, follow.has)

    def _noted(self, id: Id) -> None:
        self._unnoted.pop(id, None)
        with contextlib.suppress(OSError):
            os.unlink(f"{self._kept}/{id}.json")
        for task, follow in self._tasks.items():
            if follow.has == id:
                follow.has = None
                if follow.wants:
                    self._tell({"type": "follow", "task": task})

    def _fetch(self, task: str, follow: Follow, id: Id, again: bool = False) -> None:
        if self._tasks.get(task) is not follow:
            return
        folder = f"{self._copies}/{task}/{id}"

        def fetched(answer: Answer) -> None:
            if self._tasks.get(task) is not follow:
                return
            error = answer.get("error")
            if error is None:
                follow.wants = False
                self._answer(task, {"snapshot": str(id), "path": folder})
            elif error["kind"] in ("damaged", "newer"):
                self._unnoted[id] = Evaluated(self._host, task, id, error=str(error["text"]))
                self._tell({"type": "evaluated", **_words(self._unnoted[id])})
            else:
                if not again:
                    self._said(f"{task} did not get step {id.step}: {error['text']}", True)
                self._loop.after(AGAIN, lambda: self._fetch(task, follow, id, again=True))

        self._remove([folder])
        with contextlib.suppress(OSError):
            os.makedirs(os.path.dirname(folder), exist_ok=True)
        follow.fetch = self._porting.ask({"do": "fetch", "snapshot": pair(id), "folder": folder}, fetched)

    # ---- on disk

    def _read(self) -> dict[Id, Evaluated]:
        found = {}
        for name in os.listdir(self._kept) if os.path.isdir(self._kept) else ():
            id = parse_id(name[: -len(".json")])
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError), open(f"{self._kept}/{name}") as file:
                told = json.load(file)
                if id is not None:
                    found[id] = Evaluated(self._host, str(told["task"]), id, _numbers(told["metrics"]))
        return found

    def tidy(self) -> None:
        """The run is over."""
        for folder in (*self._own, self._kept):
            shutil.rmtree(folder, ignore_errors=True)
        for above in self._above:
            with contextlib.suppress(OSError):  # it holds something of other hosts
                os.rmdir(above)


def _numbers(found: Any) -> dict[str, float]:
    items = list(found.items())[:MOST_METRICS] if isinstance(found, dict) else ()
    return {str(k)[:100]: float(v) for k, v in items if isinstance(v, (int, float)) and abs(v) < 1e300}


def _words(told: Evaluated) -> Message:
    return {"task": told.task, "snapshot": pair(told.id), "metrics": dict(told.metrics), "error": told.error}
