"""Snapshots on a host: takes what tasks have saved, sends it when the captain says so, fetches what they go on from.

<folder>/staging/<task>/g<generation>/step-<n>     written by the task
<folder>/held/<task>/step-<n>-g<generation>        taken by the agent, until the captain lets it go
<folder>/restored/<host>/step-<n>-g<generation>    a verified copy to go on from
<folder>/committed/<host>/step-<n>                 copies for evaluators that look for themselves; see following.py
Where a folder of their own is watched instead, see watching.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Callable

from paceline.agent import machine, messages
from paceline.agent.events import Saved
from paceline.agent.loop import Loop
from paceline.agent.options import Options
from paceline.agent.porting import Answer, Porting, errand
from paceline.agent.watching import Watching
from paceline.agent.wire import Message
from paceline.plan import Plan
from paceline.storage import library
from paceline.storage.manifest import Id, pair, parse_id
from paceline.storage.watched import ABOUT

ABOUT_LIMIT = 8 * 1024 * 1024
MOST_PARTS = 100_000
FOR_EVALUATORS = 3  # copies that are kept
AGAIN = 2.0  # seconds until a copy that could not be had is tried again
BOOT = "boot"  # beside what is held: which start of the machine it is from
_STEP = re.compile(r"step-(0|[1-9][0-9]{0,15})")
_GENERATION = re.compile(r"g([1-9][0-9]{0,7})")


class _Unfit(Exception):
    """It cannot be a snapshot, as the text says."""


class Staging:
    def __init__(
        self,
        plan: Plan,
        options: Options,
        loop: Loop,
        tell: Callable[[Message], None],
        said: Callable[..., None],
    ) -> None:
        self._plan, self._options, self._loop = plan, options, loop
        self._tell, self._said = tell, said
        host = plan.host(options.host)
        self._tasks = host.tasks
        self._evaluates = host.role == "evaluator"
        self._folder = options.folder
        self._held = f"{options.folder}/held"
        self._restored = f"{options.folder}/restored/{options.host}"
        self._committed = f"{options.folder}/committed/{options.host}"
        environment = {**os.environ, **plan.role(host.role).env}
        self.porting = Porting(errand(plan, options), environment, loop)
        self.watching = Watching(plan, options, loop, self.porting, self._take, said)
        self._sending: dict[tuple[str, Id], int] = {}
        self._stored: dict[tuple[str, Id], list[Any]] = {}  # the files that were told, should the captain ask again
        self._preparing: tuple[Id | None, int] | None = None
        self._prepared: tuple[Id | None] | None = None  # not used by a task yet
        self._fetching = False
        self._newest: Id | None = None  # for evaluators
        self._forget_other_boots()
        self._wanted: Id | None = None  # the same, while another is being fetched

    # ---- for tasks

    def environment(self, task: str, generation: int, restore: str | None) -> dict[str, str]:
        """What a task is given. Its folder is its own, and of this generation alone."""
        folder = f"{self._folder}/staging/{task}"
        own = f"{folder}/g{generation}"
        os.makedirs(own, exist_ok=True)
        old = [f"{folder}/{name}" for name in os.listdir(folder) if name != f"g{generation}"]
        if old:
            self.remove(old)
        self._prepared = None
        given = {"PACELINE_SNAPSHOT_DIR": own, "PACELINE_RESTORE": f"{self._restored}/{restore}" if restore else ""}
        if self._plan.snapshots.trust:
            given["PACELINE_TRUST"] = "1"
        if self._evaluates:
            os.makedirs(self._committed, exist_ok=True)
            given["PACELINE_COMMITTED_DIR"] = self._committed
        return given

    def shared(self) -> dict[str, str]:
        """What all tasks of a host, and an ingest, are given: for paceline.fetch."""
        obstore = library.own() or (f"{self._folder}/{library.FOLDER}" if self._options.obstore else "")
        return {"PACELINE_FETCHED_DIR": f"{self._folder}/fetched", **({"PACELINE_OBSTORE": obstore} if obstore else {})}

    def bring_library(self) -> None:
        """For tasks that fetch, where this host has none: the porter brings it when it is first asked for anything."""

        def answered(answer: Answer) -> None:
            if "error" in answer and answer["error"]["passing"]:
                self._loop.after(AGAIN, self.bring_library)

        if self._options.obstore:
            self.porting.ask({"do": "remove", "folders": []}, answered)

    def look(self) -> None:
        """Takes and tells what tasks have saved since the last look."""
        for task in self._tasks:
            for step, generation, path in list(self._new(task)):
                if self.watching.folder:
                    self.remove([path])
                    self._said(f"{task}: its own snapshots are not taken, as snapshots.watch names a folder", True)
                else:
                    self._take(task, Id(step, generation), path)

    def _take(self, task: str, id: Id, path: str) -> None:
        target = f"{self._held}/{task}/{id}"
        try:
            if os.path.exists(target):
                self.remove([path])  # the same step once more: the first is on its way
                return
            _about(path)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            self._note_boot(task)
            os.rename(path, target)
        except _Unfit as error:
            self._said(f"{task}: the snapshot of step {id.step} is not taken: {error}", True)
            self.remove([path])
            return
        except OSError as error:
            self._said(f"{task}: the snapshot in {path} cannot be taken: {error.strerror}", True)
            return
        self._tell({"type": "saved", **_words(self._saved(task, id))})

    def _note_boot(self, task: str) -> None:
        path = f"{self._held}/{task}/{BOOT}"
        if not os.path.exists(path):
            with open(path, "w") as file:
                file.write(machine.boot())

    def _forget_other_boots(self) -> None:
        """What was held when the machine lost its power may be written in part, or not at all."""
        for task in self._tasks:
            folder = f"{self._held}/{task}"
            found = [name for name in _names(folder) if parse_id(name) is not None]
            try:
                with open(f"{folder}/{BOOT}") as file:
                    same = file.read() == machine.boot()
            except OSError:
                same = False
            if found and not same:
                text = f"{', '.join(sorted(found))} was saved before this machine started again: it is not used"
                self._said(f"{task}: {text}", True)
                self.remove([f"{folder}/{name}" for name in found])
            if not same:
                with contextlib.suppress(OSError):
                    os.unlink(f"{folder}/{BOOT}")

    def held(self) -> list[Saved]:
        """What is here, also from before this agent's life."""
        found = []
        for task in self._tasks:
            ids = filter(None, map(parse_id, _names(f"{self._held}/{task}")))
            for id in sorted(ids):
                with contextlib.suppress(_Unfit):
                    found.append(self._saved(task, id))
        return found

    def _new(self, task: str) -> Iterator[tuple[int, int, str]]:
        folder = f"{self._folder}/staging/{task}"
        for generation in filter(None, map(_GENERATION.fullmatch, _names(folder))):
            steps = filter(None, map(_STEP.fullmatch, _names(f"{folder}/{generation[0]}")))
            for step in sorted(steps, key=lambda found: int(found[1])):
                yield int(step[1]), int(generation[1]), f"{folder}/{generation[0]}/{step[0]}"

    def _saved(self, task: str, id: Id) -> Saved:
        about = _about(f"{self._held}/{task}/{id}")
        parts, metrics, versions = about.get("parts", 1), about.get("metrics", {}), about.get("versions", {})
        numbers = {str(k): float(v) for k, v in _items(metrics) if isinstance(v, (int, float)) and abs(v) < 1e300}
        return Saved(self._options.host, task, id, parts, numbers, {str(k): str(v)[:200] for k, v in _items(versions)})

    # ---- the captain's word

    def receive(self, kind: str, message: Message) -> None:
        if message["snapshot"] is None:
            self._prepare(None, int(message["generation"]))
            return
        step, generation = message["snapshot"]
        id = Id(int(step), int(generation))
        if kind == "send":
            self._send(str(message["task"]), id, bool(message.get("anew")))
        elif kind == "drop":
            self._drop(str(message["task"]), id)
        elif kind == "prepare":
            self._prepare(id, int(message["generation"]))
        elif kind == "committed":
            self._fetch_for_evaluators(id)

    def _send(self, task: str, id: Id, anew: bool) -> None:
        """`anew`: what was there is lost."""
        if (task, id) in self._stored and not anew:
            self._tell_stored(task, id)
            return
        if (task, id) in self._sending or task not in self._tasks:
            return
        words = {"task": task, "snapshot": pair(id)}

        def sent(answer: Answer) -> None:
            self._sending.pop((task, id), None)
            if "error" in answer:
                self._tell({"type": "stored", **words, **answer})
            else:
                self._stored[task, id] = answer["files"]
                self._tell_stored(task, id)

        request = {"do": "send", **words, "folder": f"{self._held}/{task}/{id}"}
        self._sending[task, id] = self.porting.ask(request, sent)

    def _tell_stored(self, task: str, id: Id) -> None:
        for message in messages.stored(task, id, self._stored[task, id]):
            self._tell(message)

    def _drop(self, task: str, id: Id) -> None:
        self._stored.pop((task, id), None)
        number = self._sending.pop((task, id), None)
        if number is not None:
            self.porting.forget(number)
        if task in self._tasks:
            self.remove([f"{self._held}/{task}/{id}"])

    def _prepare(self, id: Id | None, begins: int) -> None:
        """For the generation `begins`."""
        if self._preparing is not None:
            if self._preparing[0] == id:
                return
            self.porting.forget(self._preparing[1])
        words: Message = {"type": "prepared", "snapshot": None if id is None else pair(id)}
        if self._prepared == (id,):
            self._tell(words)
            return
        self._prepared = None
        self.remove([f"{self._restored}/{name}" for name in _names(self._restored)])
        folder = f"{self._restored}/{id}"

        def fetched(answer: Answer) -> None:
            if "error" not in answer and self.watching.folder and self._preparing == (id, number):
                self._preparing = id, self.watching.put(begins, id, folder, done)
            else:
                done(answer)

        def done(answer: Answer) -> None:
            if self._preparing is not None and self._preparing[0] == id:
                self._preparing = None
            if "error" not in answer:
                self._prepared = (id,)
            elif answer["error"]["kind"] == "unwanted":
                return
            self._tell({**words, **answer})

        if id is None:
            self._preparing = None, self.watching.put(begins, None, "", done)
            return
        request = {"do": "fetch", "snapshot": words["snapshot"], "folder": folder, "held": self._held}
        number = self.porting.ask(request, fetched)
        self._preparing = id, number

    def _fetch_for_evaluators(self, id: Id, again: bool = False) -> None:
        if again and id != self._newest:
            return
        self._newest = id
        if self._fetching:
            self._wanted = id
            return
        kept = sorted((name for name in _names(self._committed) if _STEP.fullmatch(name)), key=lambda n: int(n[5:]))
        if f"step-{id.step}" in kept:
            return
        self._fetching = True

        def fetched(answer: Answer) -> None:
            self._fetching = False
            error = answer.get("error")
            if error is not None and self._wanted is None:
                if not again:
                    self._said(f"{self._options.host} did not get step {id.step}: {error['text']}", True)
                if error["passing"]:
                    self._loop.after(AGAIN, lambda: self._fetch_for_evaluators(id, again=True))
            elif error is None:
                self.remove([f"{self._committed}/{name}" for name in kept[: 1 - FOR_EVALUATORS]])
            wanted, self._wanted = self._wanted, None
            if wanted is not None:
                self._fetch_for_evaluators(wanted)

        request = {"do": "fetch", "snapshot": pair(id), "folder": f"{self._committed}/step-{id.step}"}
        self.porting.ask(request, fetched)

    def remove(self, folders: Iterable[str]) -> None:
        """By the porter: it may take a while. Out of the way at once, where something takes its place."""
        gone = []
        for folder in folders:
            try:
                above, name = os.path.split(folder)
                aside = f"{above}/.{name}.{os.urandom(4).hex()}.gone"
                os.rename(folder, aside)
                gone.append(aside)
            except OSError:
                continue  # it is not there
        if gone:
            self.porting.ask({"do": "remove", "folders": gone}, lambda _: None)

    def tidy(self) -> None:
        """The run is over: copies go; what is held and nowhere else stays."""
        own = [f"{self._held}/{task}" for task in self._tasks]
        for folder in own:
            if not any(map(parse_id, _names(folder))):
                with contextlib.suppress(OSError):
                    os.unlink(f"{folder}/{BOOT}")
        let_go = [f"{folder}/{name}" for folder in own for name in _names(folder) if parse_id(name) is None]
        staged = [f"{self._folder}/staging/{task}" for task in self._tasks]
        for folder in (self._restored, self._committed, f"{self._folder}/fetched", *staged, *let_go):
            shutil.rmtree(folder, ignore_errors=True)
        above = [f"{self._folder}/{name}" for name in ("held", "restored", "committed", "staging")]
        self.watching.tidy()
        for folder in (*own, *above):
            try:
                os.rmdir(folder)
            except OSError:
                continue  # it holds something, also of other hosts

    def close(self) -> None:
        self.porting.close()


def _about(folder: str) -> Mapping[str, Any]:
    """What the program says of it; a part whose number of parts cannot be known is not to be taken for the whole."""
    try:
        with open(f"{folder}/{ABOUT}", "rb") as file:
            found = json.loads(file.read(ABOUT_LIMIT))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise _Unfit(f"its {ABOUT} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise _Unfit(f"its {ABOUT} is not an object")
    parts = found.get("parts", 1)
    if type(parts) is not int or not 1 <= parts <= MOST_PARTS:
        raise _Unfit(f"its {ABOUT} has parts {parts!r}, which should be a number from 1 on")
    return found


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _items(found: Any) -> Iterable[tuple[Any, Any]]:
    return list(found.items())[:100] if isinstance(found, dict) else ()


def _words(saved: Saved) -> Message:
    return {
        "task": saved.task, "snapshot": pair(saved.id), "parts": saved.parts,
        "metrics": dict(saved.metrics), "versions": dict(saved.versions),
    }  # fmt: skip
