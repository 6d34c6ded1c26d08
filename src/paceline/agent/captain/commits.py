"""Commits of saved snapshots. No I/O.

One snapshot is sent at a time. If more are saved meanwhile, the newest is next, and the others are skipped.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Callable

from paceline.agent.captain import events as ev
from paceline.agent.captain import instructions as ins
from paceline.agent.captain.ledger import Unit
from paceline.agent.captain.store_contents import StoreContents
from paceline.agent.run_files import stamp
from paceline.agent.transfers import requests as req
from paceline.plan import Plan, Task
from paceline.storage.snapshots.manifest import File, Manifest, Part, SnapshotId

PAUSE = 2.0  # seconds between requests to a store that fails
LONGEST_PAUSE = 60.0  # seconds between attempts to send a snapshot


@dataclass
class DraftPart:
    """The part of a snapshot that one task has saved."""

    host: str
    stored: Part | None = None  # set once it is in the store
    files: list[File] = field(default_factory=list)  # received so far, until the list is complete


@dataclass
class Draft:
    """A snapshot that is not committed yet."""

    snapshot: SnapshotId
    part_count: int  # the number of tasks that save a part
    since: float
    parts: dict[str, DraftPart] = field(default_factory=dict)  # by task
    metrics: dict[str, float] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    tries: int = 0
    not_before: float = 0.0
    failure: str = ""  # why the last attempt failed
    is_hopeless: bool = False  # a retry will not help soon
    is_resend: bool = False  # the store had it and lost it

    @property
    def is_complete(self) -> bool:
        return len(self.parts) >= self.part_count

    def add(self, saved: ev.PartSaved) -> None:
        previous = self.parts.get(saved.task)
        if previous is None or previous.host != saved.host:
            self.parts[saved.task] = DraftPart(saved.host)
        self.metrics.update(saved.metrics)
        self.versions.update(saved.versions)


class Commits:
    def __init__(
        self,
        plan: Plan,
        run: str,
        instruct: Callable[[ins.Instruction], None],
        emit: Callable[..., None],
        keeps_copies: bool = False,
    ) -> None:
        """`keeps_copies`: hosts keep the newest committed snapshot, so that they need not fetch it, and it survives the
        loss of the store."""
        self._plan, self._run = plan, run
        self._keeps_copies = keeps_copies
        self._instruct, self._emit = instruct, emit
        self._order = {task.name: number for number, task in enumerate(plan.tasks)}
        self.contents = StoreContents(plan, instruct, emit)
        self.generation = 0  # only its snapshots are committed
        self.recorded = 0  # the newest generation known to have its record in the store
        self.has_returned = False  # a previous captain has led the run
        self._list_at: float | None = 0.0  # when to list the store; None: the request was sent
        self.skipped = 0
        self._drafts: dict[SnapshotId, Draft] = {}
        self._sending: SnapshotId | None = None
        self.is_committing = False
        self.store_error = ""  # why listing the store, or writing a postponed record, failed
        self.owed_record: req.BeginGeneration | None = None  # the record of this generation, not in the store yet
        self._send_record_at: float | None = 0.0  # None: the request was sent
        self.lost_snapshot: tuple[SnapshotId, str] | None = None  # the newest lost before its commit, and its host
        self.missed_newer = False  # this generation started from an outdated snapshot
        self.tickets = itertools.count(1)  # tickets of requests while a generation starts
        self._store_is_empty = False  # it has lost the data of this run
        self._restoring: SnapshotId | None = None  # the snapshot that is sent again to an empty store
        self._copies: dict[SnapshotId, Draft] = {}  # on hosts: committed snapshots, or those of earlier generations

    # ---- queries

    def is_busy(self) -> bool:
        """Whether a saved snapshot may be committed soon."""
        has_pending = any(draft.is_complete and not draft.is_hopeless for draft in self._drafts.values())
        is_unsure = self._store_is_empty or (self.has_returned and not self.contents.is_known)
        return self.is_committing or is_unsure or (has_pending and not self.is_stuck())

    def is_stuck(self) -> bool:
        """Whether no snapshot of this generation can be committed: it started from an outdated snapshot, or a previous
        captain did not write its record, and its contents are unknown."""
        is_restoring = self._restoring in self._drafts
        is_known = self.contents.is_known
        is_unrecorded = is_known and self.owed_record is None and self.generation > self.recorded and not is_restoring
        return self.missed_newer or (is_unrecorded and not self._store_is_empty)

    def newest_uncommitted(self) -> Draft | None:
        complete = (draft for draft in self._drafts.values() if draft.is_complete)
        return max(complete, key=lambda draft: draft.snapshot, default=None)

    # ---- generations

    def open_generation(self, generation: int) -> None:
        """From now on, only snapshots of this generation are committed."""
        self.generation = generation
        self.owed_record, self.missed_newer, self.lost_snapshot, self._store_is_empty = None, False, None, False
        for snapshot in list(self._drafts):
            if snapshot.generation != generation:
                self._drop(snapshot)

    def learn_generation(self, generation: int) -> None:
        """A restarted captain learns the generation from its members, as they join."""
        self.generation = max(self.generation, generation)
        for snapshot in [each for each in self._drafts if each.generation < self.generation]:
            self._copies[snapshot] = self._drafts.pop(snapshot)
            if self._sending == snapshot:
                self._sending = None

    def owe_record(self, record: req.BeginGeneration, reason: str, now: float) -> None:
        """Write the record of this generation later: it must be in the store before any of its snapshots."""
        self.owed_record, self._send_record_at, self.store_error = record, now + PAUSE, reason
        text = "cannot write to the snapshot store; training continues, but no snapshot is committed until this works"
        self._emit("warning", text=f"{text}: {reason}")

    def on_record_written(self) -> None:
        """The record of this generation is in the store, and defines the chain."""
        self.contents.relist_if_stale()

    def on_origin_adopted(self, adopted: req.OriginAdopted, took_s: float) -> None:
        """The snapshot that the run starts from has been copied to its store."""
        snapshot = adopted.snapshot
        self.contents.add_origin(snapshot)
        fields = {"bytes": adopted.size, "took_s": took_s, "origin": adopted.origin}
        self._emit("committed", step=snapshot.step, snapshot=str(snapshot), **fields)
        self._announce_to_evaluators()

    # ---- events of members

    def on_saved(self, event: ev.PartSaved, now: float) -> bool:
        """Returns whether this part completes a snapshot on its hosts."""
        snapshot = event.snapshot
        if snapshot.generation != self.generation or self.contents.is_past(snapshot):
            self._copies.setdefault(snapshot, Draft(snapshot, event.parts, now)).add(event)
            self._drop_copies()
            return False
        draft = self._drafts.setdefault(snapshot, Draft(snapshot, event.parts, now))
        if draft.is_complete and event.task not in draft.parts:
            # Each task has saved the whole snapshot: one copy is enough.
            self._instruct(ins.DropPart(event.host, event.task, snapshot))
            return False
        was_complete = draft.is_complete
        draft.add(event)
        if self._sending == snapshot:
            self._send(draft)
        return draft.is_complete and not was_complete

    def on_stored(self, event: ev.PartStored, now: float) -> None:
        draft = self._drafts.get(event.snapshot)
        if draft is None or self._sending != event.snapshot:
            return
        part = draft.parts.get(event.task)
        if part is None or part.host != event.host:
            return
        if event.error is not None:
            self._failed(draft, event.error, f"{event.task} on {event.host}", now)
            return
        if event.at == 0:
            part.files = []
        if event.at != len(part.files):
            return  # earlier messages were lost with a connection; the host gets the request again when it joins
        part.files += event.files
        if not event.more:
            part.stored, part.files = Part(event.task, tuple(part.files)), []
            self._commit_if_stored(draft)

    def on_joined(self, host: str, parts: Iterable[ev.PartSaved]) -> None:
        """`parts`: what the host has. Other parts that it had not sent are lost."""
        present = {(part.task, part.snapshot) for part in parts}
        for draft in list(self._drafts.values()):
            was_complete = draft.is_complete
            for task, part in list(draft.parts.items()):
                if part.host == host and part.stored is None and (task, draft.snapshot) not in present:
                    del draft.parts[task]
            is_newest = self.lost_snapshot is None or draft.snapshot > self.lost_snapshot[0]
            if was_complete and not draft.is_complete and is_newest:
                self.lost_snapshot = draft.snapshot, host
            if not draft.parts:
                self._drop(draft.snapshot)
            elif not draft.is_complete and self._sending == draft.snapshot:
                self._sending = None
        for copy in self._copies.values():
            copy.parts = {task: part for task, part in copy.parts.items() if part.host != host}

    # ---- answers of the store

    def on_answered(self, request: req.Request, answer: req.Answer, now: float) -> None:
        if isinstance(request, req.ListSnapshots):
            self._listed(answer, now)
        elif isinstance(request, req.BeginGeneration):
            self._recorded(request, answer, now)
        elif isinstance(request, req.CommitSnapshot):
            self._committed(request, answer, now)
        elif isinstance(request, req.DeleteSnapshot):
            self.contents.on_deleted(request.snapshot, answer)

    def _listed(self, answer: req.Answer, now: float) -> None:
        if isinstance(answer, req.Failure):
            self.store_error, self._list_at = answer.text, now + PAUSE
            return
        assert isinstance(answer, req.SnapshotList)
        self.store_error = ""
        owed = self.owed_record
        self._store_is_empty = answer.generation < self.generation and owed is None and not answer.counted
        self.update_contents(answer)
        if not self._store_is_empty:
            self.contents.resolve_uncertain(now, self._newest_generation())
        newest = self.generation if owed is None else max(self.generation, owed.generation)
        if answer.generation > newest:
            self.open_generation(answer.generation)  # a previous captain began it

    def _recorded(self, request: req.BeginGeneration, answer: req.Answer, now: float) -> None:
        self.store_error = answer.text if isinstance(answer, req.Failure) else ""
        if self.owed_record is None or request.generation != self.owed_record.generation:
            return
        if isinstance(answer, req.Failure):
            self._send_record_at = now + PAUSE
            return
        assert isinstance(answer, req.GenerationBegun)
        self.owed_record, self.recorded = None, max(self.recorded, request.generation)
        if answer.late:
            self.missed_newer = True
            self.contents.add_late(answer.late)
        else:
            self.on_record_written()

    def _committed(self, request: req.CommitSnapshot, answer: req.Answer, now: float) -> None:
        self.is_committing = False
        snapshot = request.snapshot
        self.contents.mark_uncertain(snapshot)
        draft = self._drafts.get(snapshot)
        if draft is None:
            return
        if isinstance(answer, req.Failure):
            self._failed(draft, answer, "all tasks", now)
            return
        del self._drafts[snapshot]
        self._sending = None
        self.contents.add_committed(snapshot, draft.metrics, now)
        size = sum(file.size for part in draft.parts.values() if part.stored for file in part.stored.files)
        fields: dict[str, Any] = {"bytes": size, "took_s": round(now - draft.since, 3)}
        best = self.contents.best(self.contents.awaiting_evaluation(now))
        if best is not None:
            fields["best"] = best.to_json()
        self._emit("committed", step=snapshot.step, snapshot=str(snapshot), **fields)
        self._copies[snapshot] = draft
        self._drop_copies()
        if snapshot.generation < self.generation:  # it was restored from copies
            self.owed_record, self._send_record_at = _record(self.generation, snapshot), now
        self._announce_to_evaluators()
        self.delete_surplus(now)

    def update_contents(self, listing: req.SnapshotList) -> None:
        self.recorded = max(self.recorded, listing.generation)
        self.contents.update(listing)
        for snapshot in [each for each in self._drafts if self.contents.is_past(each)]:
            self._copies[snapshot] = self._drafts.pop(snapshot)
        self._drop_copies()
        self._announce_to_evaluators()

    # ---- progress

    def advance(self, now: float, all_joined: bool = True) -> None:
        """`all_joined`: no host with more copies is expected to join."""
        if not self.contents.is_known:
            if self.has_returned and self._list_at is not None and now >= self._list_at:
                self._list_at = None
                self._instruct(ins.AskStore(self.contents.list_request()))
            return
        if self._store_is_empty and all_joined:
            self._store_is_empty = False
            self._restore_from_copies(now)
        if self.owed_record is not None:
            if self._send_record_at is not None and now >= self._send_record_at:
                self._send_record_at = None
                self._instruct(ins.AskStore(self.owed_record))
            return
        if self._sending is not None or self.is_stuck():
            return
        newest = self.newest_uncommitted()
        if newest is None:
            return
        for draft in list(self._drafts.values()):
            if draft.snapshot < newest.snapshot:
                self.skipped += draft.is_complete
                self._drop(draft.snapshot)
        if now >= newest.not_before:
            self._sending = newest.snapshot
            self._send(newest)

    def _restore_from_copies(self, now: float) -> None:
        """Send the newest complete copy from the hosts to the store again, after the record of its generation."""
        complete = [draft for draft in (*self._copies.values(), *self._drafts.values()) if draft.is_complete]
        if not complete:
            self.owed_record, self._send_record_at = _record(self.generation, None), now
            return
        newest = max(complete, key=lambda draft: (draft.snapshot.generation, draft.snapshot.step))
        step = newest.snapshot.step
        self._emit("note", text=f"the snapshot store is empty: storing step {step} again, from copies on the hosts")
        self._copies.pop(newest.snapshot, None)
        self._drafts = {newest.snapshot: newest}
        self._restoring, newest.is_resend = newest.snapshot, True
        for part in newest.parts.values():
            part.stored = None
        self.owed_record, self._send_record_at = _record(newest.snapshot.generation, None), now

    def _send(self, draft: Draft) -> None:
        for task, part in draft.parts.items():
            if part.stored is None:
                self._instruct(ins.StorePart(part.host, task, draft.snapshot, draft.is_resend))
        self._commit_if_stored(draft)

    def _commit_if_stored(self, draft: Draft) -> None:
        tasks = sorted(draft.parts, key=self._order.__getitem__)
        stored = [part for part in (draft.parts[task].stored for task in tasks) if part is not None]
        if self.is_committing or not draft.is_complete or len(stored) < len(tasks):
            return
        manifest = Manifest(
            self._run, draft.snapshot, self._plan.world_size, tuple(stored), draft.metrics, draft.versions, stamp()
        )
        self.is_committing = True
        self._instruct(ins.AskStore(req.CommitSnapshot(draft.snapshot, manifest.to_bytes().decode())))

    def _failed(self, draft: Draft, failure: req.Failure, source: str, now: float) -> None:
        self._sending = None
        step = draft.snapshot.step
        if failure.kind == req.UNWANTED:
            return
        if failure.kind == req.UNFIT:
            self._emit("warning", text=f"the snapshot of step {step} ({source}) was rejected: {failure.text}")
            self._drop(draft.snapshot)
            return
        draft.tries += 1
        draft.not_before = now + min(LONGEST_PAUSE, 2.0**draft.tries)
        draft.failure, draft.is_hopeless = failure.text, not failure.passing
        if draft.tries == 1:
            self._emit("warning", text=f"the snapshot of step {step} is not committed yet: {failure.text}")

    def delete_surplus(self, now: float) -> None:
        if not self._store_is_empty:
            self.contents.delete_surplus(now, self._newest_generation())

    def _newest_generation(self) -> int:
        """The newest that may have a record, as far as this captain knows."""
        return max(self.generation, self.recorded)

    # ---- copies on hosts

    def _drop(self, snapshot: SnapshotId) -> None:
        draft = self._drafts.pop(snapshot)
        for task, part in draft.parts.items():
            self._instruct(ins.DropPart(part.host, task, snapshot))
        if self._sending == snapshot:
            self._sending = None

    def drop_all_copies(self) -> None:
        """The run has ended: hosts keep no committed snapshots."""
        self._drop_copies(is_over=True)

    def _drop_copies(self, is_over: bool = False) -> None:
        """Drop copies that are no longer needed."""
        if not self.contents.is_known or self._store_is_empty:
            return
        needed = set(self.contents.chain[:1]) if self._keeps_copies and not is_over else set()
        for snapshot in [each for each in self._copies if each not in needed]:
            for task, part in self._copies.pop(snapshot).parts.items():
                self._instruct(ins.DropPart(part.host, task, snapshot))

    # ---- evaluators

    def announce_to(self, host: str) -> None:
        if self.contents.chain:
            self._instruct(ins.AnnounceCommit(host, self.contents.chain[0]))

    def _announce_to_evaluators(self) -> None:
        for host in self._plan.hosts:
            if host.role == "evaluator":
                self.announce_to(host.name)


def _record(generation: int, parent: SnapshotId | None) -> req.BeginGeneration:
    return req.BeginGeneration(generation, parent, () if parent is None else (parent,))


def restoring_hosts(plan: Plan, units: Iterable[Unit]) -> set[str]:
    """The hosts whose tasks resume from a snapshot: all hosts of a group, or the chief's of a parameter-server job."""
    return {task.host for unit in units for task in unit.tasks if restores(plan, task)}


def restores(plan: Plan, task: Task) -> bool:
    return task.role == "chief" if plan.strategy == "parameter-server" else task.rank >= 0
