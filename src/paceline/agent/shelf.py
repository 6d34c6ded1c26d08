"""The captain's shelf: what tasks have saved, on its way to being committed, and what is. Decides, does nothing itself.

One snapshot is sent at a time. When more are saved meanwhile, the newest is next, and the others are skipped.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Callable

from paceline.agent import events as ev
from paceline.agent.journal import stamp
from paceline.plan import Plan, Task
from paceline.storage.manifest import File, Id, Manifest, Part, pair
from paceline.storage.retention import best, to_delete

PAUSE = 2.0  # seconds until a place that does not answer is asked again
LONGEST_PAUSE = 60.0  # seconds between tries to send a snapshot

Answer = Mapping[str, Any]


@dataclass
class Piece:
    host: str
    part: Part | None = None  # once it is at the place
    told: list[File] = field(default_factory=list)  # of a part, until all of its files are


@dataclass
class Draft:
    """A snapshot that is not committed yet."""

    id: Id
    parts: int  # how many tasks write one
    since: float
    pieces: dict[str, Piece] = field(default_factory=dict)  # by task
    metrics: dict[str, float] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    tries: int = 0
    not_before: float = 0.0
    failed: str = ""  # why the last try did
    hopeless: bool = False  # it will not help to try again soon
    anew: bool = False  # it was at the place, and is not any more

    @property
    def complete(self) -> bool:
        return len(self.pieces) >= self.parts


class Shelf:
    def __init__(
        self,
        plan: Plan,
        run: str,
        put: Callable[[ev.Instruction], None],
        emit: Callable[..., None],
        copies: bool = False,
    ) -> None:
        """`copies`: hosts keep the newest committed one, so that they need not fetch it, and the place may be lost."""
        self._plan, self._run = plan, run
        self._copies = copies
        self.watches = bool(plan.snapshots.watch)  # hosts have something to do before tasks start, snapshot or not
        self._put, self._emit = put, emit
        self._order = {task.name: number for number, task in enumerate(plan.tasks)}
        self.generation = 0  # what may be saved is of this one
        self.recorded = 0  # the newest that is known to have its record at the place
        self.returned = False  # a captain before this one has led the run
        self.known = False  # whether the place has said what it has
        self._ask_at: float | None = 0.0  # None: it has been asked
        self.counted: list[Id] = []  # newest first
        self.skipped = 0
        self._committed: set[Id] = set()
        self.deleting: set[Id] = set()
        self._undeleted: set[Id] = set()  # told of
        self._values: dict[Id, float] = {}  # of the metric that the best is chosen by
        self.results: dict[Id, Mapping[str, float]] = {}  # what evaluators said of snapshots, as it is at the place
        self.needed: Callable[[float], set[Id]] = lambda _: set()  # what they have not judged yet
        self._misses_best = False  # told that a snapshot has no such metric
        self._drafts: dict[Id, Draft] = {}
        self._moving: Id | None = None
        self._committing = False
        self.trouble = ""  # why the place does not say what it has, or does not take a record that is owed
        self.owed: dict[str, Any] | None = None  # the record of this generation, which is not at the place yet
        self._owed_at: float | None = 0.0  # when it is sent again; None: it is on its way
        self.gone: tuple[Id, str] | None = None  # the newest that was lost before it was committed, and its host
        self.missed = False  # this generation began from an older snapshot than it could have
        self.numbers = itertools.count(1)  # of what is asked while a generation begins
        self._lost = False  # the place knows nothing of what this run has done
        self._bringing: Id | None = None  # back to such a place
        self._held: dict[Id, Draft] = {}  # copies of what is committed, or of an earlier generation

    # ---- what is asked by the captain

    def busy(self) -> bool:
        """Whether something that is saved may soon be committed."""
        hopeful = any(draft.complete and not draft.hopeless for draft in self._drafts.values())
        unsure = self._lost or (self.returned and not self.known)
        return self._committing or unsure or (hopeful and not self.stuck())

    def stuck(self) -> bool:
        """Whether nothing that this generation saves can count: it began from an older snapshot than it could have, or
        a captain before this one owed its record, and nobody knows what that was."""
        bringing = self._bringing in self._drafts
        unrecorded = self.known and self.owed is None and self.generation > self.recorded and not bringing
        return self.missed or (unrecorded and not self._lost)

    def newest(self) -> int:
        """The step of the newest that is committed; -1: there is none."""
        return self.counted[0].step if self.counted else -1

    def committing(self) -> bool:
        return self._committing

    def unfinished(self) -> Draft | None:
        """The newest that is saved and not committed."""
        return max((draft for draft in self._drafts.values() if draft.complete), key=lambda d: d.id, default=None)

    @property
    def origin(self) -> str:
        """What the run starts from, where that is not nothing."""
        return self._plan.snapshots.origin

    def adopted(self, id: Id, words: Mapping[str, Any]) -> None:
        """What the run starts from is at the place."""
        self.counted.append(id)
        self._committed.add(id)
        self._emit("committed", step=id.step, snapshot=str(id), **words)
        self._tell_evaluators()

    def question(self) -> dict[str, Any]:
        wanted = self._plan.snapshots.best
        evaluated = any(role.name == "evaluator" for role in self._plan.roles)
        return {"do": "known", "metric": None if wanted is None else wanted[0], "evaluated": evaluated}

    def open(self, generation: int) -> None:
        """From now on, only what this generation saves counts."""
        self.generation = generation
        self.owed, self.missed, self.gone, self._lost = None, False, None, False
        for id in list(self._drafts):
            if id.generation != generation:
                self._drop(id)

    def learn(self, generation: int) -> None:
        """A captain that returns hears from one member after the other how far the run was."""
        self.generation = max(self.generation, generation)
        for id in [id for id in self._drafts if id.generation < self.generation]:
            self._held[id] = self._drafts.pop(id)
            if self._moving == id:
                self._moving = None

    def descend(self, parent: Id | None) -> None:
        """This generation goes on from it: what was passed over does not count any more."""
        self.counted = self.counted[self.counted.index(parent) :] if parent in self.counted else []

    def leave(self, id: Id) -> None:
        """It is not for this version to delete."""
        self._committed.discard(id)

    def owe(self, record: dict[str, Any], why: str, now: float) -> None:
        """Before anything of this generation is committed, its record must be at the place."""
        self.owed, self._owed_at, self.trouble = record, now + PAUSE, why
        text = "the place for snapshots cannot be written to: training goes on, and nothing is committed until it can"
        self._emit("warning", text=f"{text}: {why}")

    # ---- what members tell

    def saved(self, told: ev.Saved, now: float) -> bool:
        """True when a snapshot is complete on its hosts by this."""
        id = told.id
        if id.generation != self.generation or self.past(id):
            _add(self._held.setdefault(id, Draft(id, told.parts, now)), told)
            self._let_go()
            return False
        draft = self._drafts.setdefault(id, Draft(id, told.parts, now))
        if draft.complete and told.task not in draft.pieces:
            self._put(_drop(told.host, told.task, id))  # each task has saved the whole: one is enough
            return False
        was_complete = draft.complete
        _add(draft, told)
        if self._moving == id:
            self._ask_for(draft)
        return draft.complete and not was_complete

    def stored(self, told: ev.Stored, now: float) -> None:
        draft = self._drafts.get(told.id)
        if draft is None or draft.pieces.get(told.task, Piece("")).host != told.host or self._moving != told.id:
            return
        if told.error is not None:
            self._fails(draft, told.error, f"{told.task} on {told.host}", now)
            return
        piece = draft.pieces[told.task]
        if told.at == 0:
            piece.told = []
        if told.at != len(piece.told):
            return  # those before were lost with a connection: when its host joins, it is asked again
        piece.told += told.files
        if not told.more:
            piece.part, piece.told = Part(told.task, tuple(piece.told)), []
            self._commit_if_stored(draft)

    def joined(self, host: str, has: Iterable[ev.Saved]) -> None:
        """What it had not sent and does not have any more is gone."""
        here = {(saved.task, saved.id) for saved in has}
        for draft in list(self._drafts.values()):
            was_complete = draft.complete
            for task, piece in list(draft.pieces.items()):
                if piece.host == host and piece.part is None and (task, draft.id) not in here:
                    del draft.pieces[task]
            if was_complete and not draft.complete and (self.gone is None or draft.id > self.gone[0]):
                self.gone = draft.id, host
            if not draft.pieces:
                self._drop(draft.id)
            elif not draft.complete and self._moving == draft.id:
                self._moving = None
        for copy in self._held.values():
            copy.pieces = {task: piece for task, piece in copy.pieces.items() if piece.host != host}

    # ---- what the place answers

    def answered(self, request: Answer, answer: Answer, now: float) -> None:
        owed = self.owed is not None and request.get("generation") == self.owed["generation"]
        if request["do"] in ("known", "begin"):
            self.trouble = str(answer["error"]["text"]) if "error" in answer else ""
        if request["do"] == "known" and "error" in answer:
            self._ask_at = now + PAUSE
        elif request["do"] == "known":
            unknown = int(answer["generation"]) < self.generation and self.owed is None
            self._lost = unknown and not answer["counted"]
            self.take(answer)
            begun = self.generation if self.owed is None else max(self.generation, int(self.owed["generation"]))
            if int(answer["generation"]) > begun:
                self.open(int(answer["generation"]))  # a captain before this one had begun it
        elif request["do"] == "begin" and owed and "error" in answer:
            self._owed_at = now + PAUSE
        elif request["do"] == "begin" and owed:
            self.owed, self.recorded = None, max(self.recorded, int(request["generation"]))
            if answer["late"]:
                self.missed = True
                self.counted = [Id(*each) for each in answer["late"]]
                self._committed.update(self.counted)
        elif request["do"] == "commit":
            self._on_commit(request, answer, now)
        elif request["do"] == "delete":
            id = Id(*request["snapshot"])
            self.deleting.discard(id)
            if "error" in answer:
                self._committed.add(id)  # it is tried again with the next commit
                if id not in self._undeleted:
                    self._undeleted.add(id)
                    self._emit("warning", text=f"an old snapshot could not be deleted: {answer['error']['text']}")

    def take(self, answer: Answer) -> None:
        """What there is at the place."""
        self.known = True
        self.recorded = max(self.recorded, int(answer["generation"]))
        self.counted = [Id(*each) for each in answer["counted"]]
        self._committed = {Id(*each) for each in answer["committed"]}
        self._values = {Id(*each): float(value) for each, value in answer["metrics"]}
        for each, metrics in answer["evaluated"]:
            self.judged(Id(*each), metrics)
        for id in [id for id in self._drafts if self.past(id)]:
            self._held[id] = self._drafts.pop(id)
        self._let_go()
        self._tell_evaluators()

    def past(self, id: Id) -> bool:
        """Whether it, or a later one of its generation, is committed."""
        newest = self.counted[:1]
        return id in self._committed or any(each.generation == id.generation and each > id for each in newest)

    def _on_commit(self, request: Answer, answer: Answer, now: float) -> None:
        self._committing = False
        id = Id(*request["_id"])
        draft = self._drafts.get(id)
        if draft is None:
            return
        if "error" in answer:
            self._fails(draft, answer["error"], "all its tasks", now)
            return
        del self._drafts[id]
        self._moving = None
        self.counted.insert(0, id)
        self._committed.add(id)
        wanted = self._plan.snapshots.best
        if wanted is not None and wanted[0] in draft.metrics:
            self._values[id] = draft.metrics[wanted[0]]
        elif id not in self.needed(now):  # else an evaluator may have it
            self._miss_best(id, draft.metrics)
        parts = [piece.part for piece in draft.pieces.values() if piece.part is not None]
        size = sum(file.size for part in parts for file in part.files)
        words = {"bytes": size, "took_s": round(now - draft.since, 3), **self.best_words(self.needed(now))}
        self._emit("committed", step=id.step, snapshot=str(id), **words)
        self._held[id] = draft
        self._let_go()
        if id.generation < self.generation:  # it was brought back from copies
            self.owed, self._owed_at = _record(self.generation, id), now
        self._tell_evaluators()
        self.retain(now)

    # ---- which is the best

    def judged(self, id: Id, metrics: Mapping[str, float]) -> None:
        """By an evaluator, whose word counts more than what the snapshot says of itself."""
        self.results[id] = metrics
        wanted = self._plan.snapshots.best
        if wanted is not None and wanted[0] in metrics:
            self._values[id] = float(metrics[wanted[0]])
        elif id not in self._values:
            self._miss_best(id, metrics)

    def _miss_best(self, id: Id, metrics: Mapping[str, float]) -> None:
        wanted = self._plan.snapshots.best
        if wanted is None or self._values or self._misses_best:
            return
        self._misses_best = True
        known = f"only {', '.join(sorted(metrics))}" if metrics else "none"
        text = f"the snapshot of step {id.step} has no {wanted[0]}, by which snapshots.best chooses: {known}"
        self._emit("warning", text=text)

    def best_words(self, unjudged: Collection[Id] = ()) -> dict[str, Any]:
        """For events: {} where nothing is known."""
        wanted = self._plan.snapshots.best
        if wanted is None:
            return {}
        found = best([id for id in self.counted if id not in unjudged], self._values, wanted[1])
        if found is None:
            return {}
        return {"best": {"snapshot": str(found), "metric": wanted[0], "value": self._values[found]}}

    # ---- from one to the next

    def advance(self, now: float, all_there: bool = True) -> None:
        """`all_there`: no host is expected that may have more copies."""
        if not self.known:
            if self.returned and self._ask_at is not None and now >= self._ask_at:
                self._ask_at = None
                self._put(ev.Ask(self.question()))
            return
        if self._lost and all_there:
            self._lost = False
            self._bring_back(now)
        if self.owed is not None:
            if self._owed_at is not None and now >= self._owed_at:
                self._owed_at = None
                self._put(ev.Ask(self.owed))
            return
        if self._moving is not None or self.stuck():
            return
        complete = sorted((draft for draft in self._drafts.values() if draft.complete), key=lambda d: d.id)
        if not complete:
            return
        newest = complete[-1]
        for draft in list(self._drafts.values()):
            if draft.id < newest.id:
                self.skipped += draft.complete
                self._drop(draft.id)
        if now >= newest.not_before:
            self._moving = newest.id
            self._ask_for(newest)

    def _bring_back(self, now: float) -> None:
        """Hosts have copies: the newest that is whole goes to the place again, and before it what makes it count."""
        whole = [draft for draft in (*self._held.values(), *self._drafts.values()) if draft.complete]
        if not whole:
            self.owed, self._owed_at = _record(self.generation, None), now
            return
        newest = max(whole, key=lambda draft: (draft.id.generation, draft.id.step))
        self._emit("note", text=f"the place for snapshots is empty: step {newest.id.step} is brought back from copies")
        self._held.pop(newest.id, None)
        self._drafts = {newest.id: newest}
        self._bringing, newest.anew = newest.id, True
        for piece in newest.pieces.values():
            piece.part = None
        self.owed, self._owed_at = _record(newest.id.generation, None), now

    def tell_evaluator(self, host: str) -> None:
        if self.counted:
            self._put(ev.Say(host, {"type": "committed", "snapshot": pair(self.counted[0])}))

    def _tell_evaluators(self) -> None:
        for host in self._plan.hosts:
            if host.role == "evaluator":
                self.tell_evaluator(host.name)

    def _ask_for(self, draft: Draft) -> None:
        for task, piece in draft.pieces.items():
            if piece.part is None:
                words = {"task": task, "snapshot": pair(draft.id), "anew": draft.anew}
                self._put(ev.Say(piece.host, {"type": "send", **words}))
        self._commit_if_stored(draft)

    def _commit_if_stored(self, draft: Draft) -> None:
        parts = [draft.pieces[task].part for task in sorted(draft.pieces, key=self._order.__getitem__)]
        if self._committing or not draft.complete or None in parts:
            return
        made = Manifest(
            self._run, draft.id, self._plan.world_size, tuple(part for part in parts if part is not None),
            draft.metrics, draft.versions, stamp(),
        )  # fmt: skip
        self._committing = True
        self._put(ev.Ask({"do": "commit", "manifest": made.to_bytes().decode(), "_id": pair(draft.id)}))

    def _fails(self, draft: Draft, error: Answer, who: str, now: float) -> None:
        self._moving = None
        text = str(error["text"])
        if error["kind"] == "unwanted":
            return
        if error["kind"] == "unfit":
            self._emit("warning", text=f"the snapshot of step {draft.id.step} by {who} is not taken: {text}")
            self._drop(draft.id)
            return
        draft.tries += 1
        draft.not_before = now + min(LONGEST_PAUSE, 2.0**draft.tries)
        draft.failed, draft.hopeless = text, not error["passing"]
        if draft.tries == 1:
            self._emit("warning", text=f"the snapshot of step {draft.id.step} is not committed yet: {text}")

    def _drop(self, id: Id) -> None:
        draft = self._drafts.pop(id)
        for task, piece in draft.pieces.items():
            self._put(_drop(piece.host, task, id))
        if self._moving == id:
            self._moving = None

    def close(self) -> None:
        """The run is over: hosts keep nothing that is committed."""
        self._let_go(over=True)

    def _let_go(self, over: bool = False) -> None:
        """Of copies on hosts that are of no use any more."""
        if not self.known or self._lost:
            return
        kept = set(self.counted[:1]) if self._copies and not over else set()
        for id in [id for id in self._held if id not in kept]:
            for task, piece in self._held.pop(id).pieces.items():
                self._put(_drop(piece.host, task, id))

    def retain(self, now: float) -> None:
        """No more than is to be kept."""
        if not self.known or self._lost:
            return
        settings = self._plan.snapshots
        lowest = settings.best is None or settings.best[1]
        needed = self.needed(now)
        gone = to_delete(self.counted, sorted(self._committed), settings.keep, self._values, lowest, needed)
        for id in gone:
            self._committed.discard(id)
            self.deleting.add(id)
            self._put(ev.Ask({"do": "delete", "snapshot": pair(id)}))
        self.counted = [id for id in self.counted if id in self._committed]


def _add(draft: Draft, told: ev.Saved) -> None:
    before = draft.pieces.get(told.task)
    if before is None or before.host != told.host:
        draft.pieces[told.task] = Piece(told.host)
    draft.metrics.update(told.metrics)
    draft.versions.update(told.versions)


def _record(generation: int, parent: Id | None) -> dict[str, Any]:
    before = [] if parent is None else [pair(parent)]
    return {"do": "begin", "generation": generation, "parent": before[0] if before else None, "seen": before}


def _drop(host: str, task: str, id: Id) -> ev.Say:
    return ev.Say(host, {"type": "drop", "task": task, "snapshot": pair(id)})


def restoring(plan: Plan, units: Iterable[Any]) -> set[str]:
    """The hosts whose tasks go on from a snapshot: all of a group; of a parameter-server job, the chief's."""
    return {task.host for unit in units for task in unit.tasks if restores(plan, task)}


def restores(plan: Plan, task: Task) -> bool:
    return task.role == "chief" if plan.strategy == "parameter-server" else task.rank >= 0
