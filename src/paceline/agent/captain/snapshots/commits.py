"""Commits of saved snapshots. No I/O.

One snapshot is sent at a time, as often as `CommitPace` allows. If more are saved until then, the newest is next, and
the others are skipped. A generation commits its own snapshots and, if it started from one that was not committed yet,
that one. Hosts keep the newest committed snapshot, so that tasks resume from it without the store, and it survives the
loss of the store.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Callable

from paceline.agent.captain import events as ev
from paceline.agent.captain import instructions as ins
from paceline.agent.captain.ledger import Member
from paceline.agent.captain.snapshots.commit_pace import CommitPace
from paceline.agent.captain.snapshots.drafts import Draft
from paceline.agent.captain.snapshots.given_up_uploads import GivenUpUploads
from paceline.agent.captain.snapshots.incomplete_snapshots import MOST, IncompleteSnapshots
from paceline.agent.captain.snapshots.low_steps import LowSteps
from paceline.agent.captain.snapshots.pending_records import PAUSE, PendingRecords
from paceline.agent.captain.snapshots.store_contents import StoreContents
from paceline.agent.options import SHARED_FOLDER
from paceline.agent.transfers import requests as req
from paceline.plan import Plan
from paceline.storage.snapshots.manifest import Part, SnapshotId

# Snapshots on a host: those of this generation, until all hosts have joined, and others, until the store is listed.
# Usually, there are fewer than ten. A host reports at most 1000 at once.
MOST_DRAFTS, MOST_COPIES = 2000, 100


class Commits:
    def __init__(
        self,
        plan: Plan,
        run: str,
        name: str,
        members: Mapping[str, Member],
        instruct: Callable[[ins.Instruction], None],
        emit: Callable[..., None],
    ) -> None:
        """`name`: of the captain; makes its records unique."""
        self._plan, self._run, self._name, self._members = plan, run, name, members
        self._instruct, self._emit = instruct, emit
        self._order = {task.name: number for number, task in enumerate(plan.tasks)}
        self.contents = StoreContents(plan, instruct, emit)
        self.records = PendingRecords(instruct, emit)
        self.uploads = GivenUpUploads(instruct)
        training = {task.name for task in plan.tasks if task.rank >= 0 or task.role == "chief"}
        self.incomplete = IncompleteSnapshots(training, emit)
        self._low_steps = LowSteps(emit)
        self.generation = 0  # only its snapshots, and `parent`, are committed
        self.parent: SnapshotId | None = None  # the snapshot that this generation started from
        self.has_returned = False  # a previous captain has led the run
        self._list_at: float | None = 0.0  # when to list the store; None: the request was sent
        self._list_error = ""  # why that failed
        self.pace = CommitPace(plan.snapshots.commit_every)
        self.skipped = 0
        self._drafts: dict[SnapshotId, Draft] = {}
        self._sending: SnapshotId | None = None
        self.is_committing = False
        self.lost_snapshot: tuple[SnapshotId, str] | None = None  # the newest lost before its commit, and its host
        self.missed_newer = False  # this generation started from an outdated snapshot
        self.tickets = itertools.count(1)  # tickets of requests while a generation starts
        self._store_is_empty = False  # it has lost the data of this run
        self._restoring: SnapshotId | None = None  # the snapshot that is sent again to an empty store
        self.world_sizes: dict[int, int] = {}  # of the newest generations: how many tasks train together
        self._has_warned_of_many = False
        self._copies: dict[SnapshotId, Draft] = {}  # on hosts: committed snapshots, or those of earlier generations
        # Whether a host has fetched all parts of a snapshot that are on others.
        self.has_fetched: Callable[[str, SnapshotId], bool] = lambda host, snapshot: False

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
        is_unrecorded = is_known and not self.records and self.generation > self.records.written and not is_restoring
        return self.missed_newer or (is_unrecorded and not self._store_is_empty)

    def is_out_of_reach(self) -> bool:
        """Whether the newest snapshot that is not committed cannot be, as hosts that have a part of it are gone."""
        draft = self.newest_uncommitted()
        if draft is None or self.is_committing or not self.contents.is_known:
            return False
        hosts = [self._members[part.host] for part in draft.parts.values() if part.stored is None]
        return any(host.has_left or not host.connected for host in hosts)

    @property
    def held_count(self) -> int:
        """The number of snapshots of which a host has at least one part."""
        return len(self._drafts) + len(self._copies)

    @property
    def has_surplus(self) -> bool:
        """Whether there are more incomplete snapshots than hosts should keep."""
        return len(self._drafts) > MOST and sum(not draft.is_complete for draft in self._drafts.values()) > MOST

    @property
    def store_error(self) -> str:
        """Why listing the store, or writing a record, failed."""
        return self._list_error or self.records.error

    def needs(self, host: str) -> bool:
        """Whether the host has a part of a snapshot that is not committed yet."""
        return any(part.host == host for draft in self._drafts.values() for part in draft.parts.values())

    def newest_uncommitted(self) -> Draft | None:
        complete = (draft for draft in self._drafts.values() if draft.is_complete)
        return max(complete, key=lambda draft: draft.snapshot, default=None)

    def newest_incomplete(self) -> Draft | None:
        """The newest snapshot if not all tasks have saved their part of it; all complete ones are older."""
        newest = max(self._drafts.values(), key=lambda draft: draft.snapshot, default=None)
        return None if newest is None or newest.is_complete else newest

    # ---- snapshots on hosts

    def restorable(self, hosts: Collection[str]) -> list[SnapshotId]:
        """The snapshots that these hosts can resume from, newest first. Those that are not committed yet come first: a
        process that died does not wait for the store."""
        if self.is_stuck():
            return list(self.contents.chain)  # what this generation saved may not be committed
        on_hosts = (draft for draft in self._drafts.values() if self._is_reachable(draft, hosts))
        return [*sorted((draft.snapshot for draft in on_hosts), reverse=True), *self.contents.chain]

    def awaits_store(self, hosts: Collection[str]) -> bool:
        """Whether a snapshot may be restorable soon that is newer than those that are now: its commit completes it."""
        if self.is_stuck():
            return False
        if self._store_is_empty or (self.has_returned and not self.contents.is_known):
            return True
        newest = self.newest_uncommitted()
        if newest is None:
            return self.is_committing
        return not newest.is_hopeless and not self._is_reachable(newest, hosts)

    def sources(self, snapshot: SnapshotId, host: str) -> dict[str, str] | None:
        """Where the host gets each part: task -> address of the host that has it, empty if it is on this host. None:
        from the store. The address of a host that is gone stands for what was fetched from it."""
        draft = self._drafts.get(snapshot) or self._copies.get(snapshot)
        if draft is None or not self._is_reachable(draft, [host]):
            return None
        tasks = sorted(draft.parts, key=self._order.__getitem__)
        return {task: self._address(draft.parts[task].host, host) for task in tasks}

    def newest_on_hosts(self) -> SnapshotId | None:
        """The snapshot that a restart would resume from, if hosts have all of it."""
        if self.is_stuck():
            return None
        drafts = [draft.snapshot for draft in self._drafts.values() if draft.is_on_hosts]
        copy = self._copies.get(self.contents.chain[0]) if self.contents.chain else None
        return max(drafts, default=None) or (copy.snapshot if copy is not None and copy.is_on_hosts else None)

    def lacking_hosts(self, snapshot: SnapshotId, hosts: Collection[str]) -> list[str]:
        """Those of these hosts that would have to fetch parts of the snapshot, in order."""
        draft = self._drafts.get(snapshot) or self._copies.get(snapshot)
        holders = set() if draft is None else {part.host for part in draft.parts.values()}
        remote = {holder for holder in holders if self._members[holder].serves not in ("", SHARED_FOLDER)}
        return sorted(host for host in hosts if self._members[host].connected and len(remote) > (host in remote))

    def on_unreachable(self, snapshot: SnapshotId | None) -> None:
        """A host could not get this snapshot from the hosts that have it: until these join again, the store is used."""
        draft = None if snapshot is None else self._drafts.get(snapshot) or self._copies.get(snapshot)
        for part in () if draft is None else draft.parts.values():
            self._members[part.host].serves = ""

    def discard_copies(self, snapshot: SnapshotId) -> None:
        """Delete what hosts have of a snapshot, because it is damaged."""
        if snapshot in self._drafts:
            self._drop(snapshot)
        if snapshot in self._copies:
            self._drop_copy(snapshot)

    def discard_incomplete(self, tasks: Collection[str]) -> None:
        """These tasks start again in the same generation, and may save the same steps again: their parts of snapshots
        that are not complete must not be combined with those that they save from now on."""
        for draft in [each for each in self._drafts.values() if not each.is_complete]:
            for task in tasks & draft.parts.keys():
                self._instruct(ins.DropPart(draft.parts.pop(task).host, task, draft.snapshot))
            if not draft.parts:
                self._drop(draft.snapshot)

    def abandon(self, generation: int, step: int, now: float) -> None:
        """Never restore or commit the snapshots of this generation, and of those before it, from this step on. Those
        that it has resumed from stay: tasks choose the steps that they report."""
        if self.contents.abandon(generation, step, self._resumed_step()):
            for snapshot in [each for each in self._drafts if self.contents.abandoned.cover(each)]:
                self._drop(snapshot)
            self._drop_copies()
            self.delete_surplus(now)

    def _resumed_step(self) -> int | None:
        """The step that this generation has resumed from; -1: none, or the snapshot of another run, whose steps may be
        counted differently. None: unknown, because this captain has lost its notes."""
        if self.parent is None and self.has_returned and not self.contents.is_known:
            return None
        origins = [self.parent, *self.contents.chain]
        return max((each.step for each in origins if each and 0 < each.generation < self.generation), default=-1)

    def _is_reachable(self, draft: Draft, hosts: Collection[str]) -> bool:
        """Whether each of these hosts can get all parts from hosts. If a host is gone that had a part, they must have
        fetched it, and it must be in the store: otherwise the snapshot could never be committed."""
        holders = {part.host for part in draft.parts.values()}
        gone = {holder for holder in holders if not self._members[holder].connected}
        parts = draft.parts.values()
        is_safe = all(part.stored is not None if part.host in gone else part.is_held for part in parts)
        if not hosts or not draft.is_complete or not is_safe:
            return False
        if gone and not all(self.has_fetched(host, draft.snapshot) for host in hosts):
            return False
        return all(holder == host or self._members[holder].serves for holder in holders for host in hosts)

    def _address(self, holder: str, host: str) -> str:
        serves = self._members[holder].serves
        return "" if holder == host or serves == SHARED_FOLDER else serves

    # ---- generations

    def record_of(self, generation: int, parent: SnapshotId | None, seen: Iterable[SnapshotId]) -> req.BeginGeneration:
        return req.BeginGeneration(generation, parent, tuple(seen), self._name)

    def begin_generation(self, record: req.BeginGeneration, world_size: int, is_written: bool, now: float) -> None:
        """`world_size`: how many tasks train together. `is_written`: the record is in the store. Otherwise, it is
        written now, while tasks start."""
        parent = 0 if record.parent is None else record.parent.generation
        self.world_sizes = {each: size for each, size in self.world_sizes.items() if each == parent}
        self.world_sizes[record.generation] = world_size
        self._open_generation(record.generation, record.parent)
        self.contents.continue_from(record.parent)
        if is_written:
            self.records.written = max(self.records.written, record.generation)
            self.contents.relist_if_stale()
        else:
            self.records.add(record, now)

    def _open_generation(self, generation: int, parent: SnapshotId | None) -> None:
        """From now on, only snapshots of this generation, and its parent, are committed."""
        self.generation, self.parent = generation, parent
        self.missed_newer, self.lost_snapshot, self._store_is_empty = False, None, False
        for snapshot in [each for each in self._drafts if not self._may_commit(each)]:
            self._drop(snapshot)

    def learn_generation(self, generation: int) -> None:
        """A restarted captain learns the generation from its members, as they join."""
        if generation > self.generation:
            self.generation = generation
            for snapshot in [each for each in self._drafts if not self._may_commit(each)]:
                self._copies[snapshot] = self._drafts.pop(snapshot)
            self._forget_sending()

    def learn_records(self, records: Collection[ev.GenerationRecord], now: float) -> None:
        """A captain that has lost its notes learns from its members which records may not be in the store."""
        newest = max(records, key=lambda record: record.generation, default=None)
        if newest is not None and self.has_returned and newest.generation > self.records.newest:
            owed = (req.BeginGeneration(each.generation, each.parent, (), each.by) for each in records)
            self.records.replace(sorted(owed, key=lambda record: record.generation), now)
            self.parent = newest.parent

    def _may_commit(self, snapshot: SnapshotId) -> bool:
        return snapshot.generation == self.generation or snapshot == self.parent

    def on_origin_adopted(self, adopted: req.OriginAdopted, took_s: float) -> None:
        """The snapshot that the run starts from has been copied to its store."""
        snapshot = adopted.snapshot
        self.contents.add_origin(snapshot)
        fields = {"bytes": adopted.size, "took_s": took_s, "origin": adopted.origin}
        self._emit("committed", step=snapshot.step, snapshot=str(snapshot), **fields)
        self.contents.announce_to_evaluators()

    # ---- events of members

    def on_saved(self, event: ev.PartSaved, now: float, is_known: bool = False) -> Draft | None:
        """Returns the snapshot that this part completes on its hosts. `is_known`: an earlier captain may know of it."""
        snapshot = event.snapshot
        self.incomplete.on_saved(event.task, snapshot)
        self._low_steps.on_saved(snapshot, self.contents.later_committed(snapshot), is_known)
        is_useless = self.contents.is_past(snapshot) or self.uploads.is_deleted(snapshot)
        if is_useless or not self._may_commit(snapshot):
            self._add_copy(event, now)
            self._drop_copies()
            return None
        if self._has_too_many_drafts(event):
            return None
        if snapshot not in self._drafts:
            self.uploads.on_saved(snapshot, is_known and self.has_returned, now)
        draft = self._drafts.setdefault(snapshot, Draft(snapshot, event.parts, now))
        if draft.is_complete and event.task not in draft.parts:
            # Each task has saved the whole snapshot: one copy is enough.
            self._instruct(ins.DropPart(event.host, event.task, snapshot))
            return None
        was_complete = draft.is_complete
        draft.add(event)
        if self._sending == snapshot:
            self._send(draft)
        if was_complete or not draft.is_complete:
            return None
        self._skip_older()
        return draft

    def _add_copy(self, event: ev.PartSaved, now: float) -> None:
        """Copies that are not needed are dropped once the store has been listed."""
        others = [] if event.snapshot in self._copies else _snapshots_of(event.host, self._copies, MOST_COPIES)
        if len(others) >= MOST_COPIES:
            oldest = min([*others, event.snapshot], key=_age_order)
            self._warn_of_many(event.host, MOST_COPIES, oldest)
            if oldest == event.snapshot:
                return
            self._forget_copy(event.host, oldest)
        self._copies.setdefault(event.snapshot, Draft(event.snapshot, event.parts, now)).add(event)

    def _forget_copy(self, host: str, snapshot: SnapshotId) -> None:
        """The host keeps it: the snapshot may be needed, as the store has not been listed."""
        copy = self._copies[snapshot]
        copy.parts = {task: part for task, part in copy.parts.items() if part.host != host}
        if not copy.parts:
            del self._copies[snapshot]

    def _has_too_many_drafts(self, event: ev.PartSaved) -> bool:
        """Whether the host has so many other snapshots that this one is ignored: members choose steps."""
        if event.snapshot in self._drafts or len(_snapshots_of(event.host, self._drafts, MOST_DRAFTS)) < MOST_DRAFTS:
            return False
        self._warn_of_many(event.host, MOST_DRAFTS, event.snapshot)
        return True

    def _warn_of_many(self, host: str, most: int, ignored: SnapshotId) -> None:
        if not self._has_warned_of_many:
            self._has_warned_of_many = True
            text = f"{host} has more than {most} snapshots that are not committed, or not of this generation"
            self._emit("warning", text=f"{text}: step {ignored.step} is ignored")

    def _skip_older(self) -> None:
        """Of complete snapshots, hosts hold only the newest, and the one that is being sent."""
        newest = self.newest_uncommitted()
        for draft in list(self._drafts.values()):
            if newest is not None and draft.snapshot < newest.snapshot and draft.snapshot != self._sending:
                if draft.is_complete and not self.skipped and not self.pace.failures:
                    self._emit("note", text=f"not every saved snapshot is committed: the newest is sent {self.pace}")
                self.skipped += draft.is_complete
                if draft.snapshot in self.contents.being_fetched():
                    self._copies[draft.snapshot] = self._drafts.pop(draft.snapshot)
                    self.uploads.give_up(draft.snapshot)
                else:
                    self._drop(draft.snapshot)

    def limit_incomplete(self, live: Collection[str], awaited: int | None) -> None:
        """Delete surplus incomplete snapshots; see IncompleteSnapshots.surplus."""
        for draft in self.incomplete.surplus(self._drafts, live, awaited):
            self._drop(draft.snapshot)

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
                if part.host == host and (task, draft.snapshot) not in present:
                    part.is_held = False
                    if part.stored is None:
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

    def on_lost(self, host: str) -> None:
        """The lease of a host has expired, and others may continue without it: what only it has is lost unless it
        returns."""
        self.on_joined(host, ())

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
        elif isinstance(request, req.DeleteUncommitted):
            self.uploads.on_answered(request.snapshot, answer)

    def _listed(self, answer: req.Answer, now: float) -> None:
        if isinstance(answer, req.Failure):
            self._list_error, self._list_at = answer.text, now + PAUSE
            return
        assert isinstance(answer, req.SnapshotList)
        self._list_error = ""
        is_behind = answer.generation < self.generation and (answer.generation == 0 or not self.records)
        self._store_is_empty = is_behind and not answer.counted  # the first record was written before any task started
        newest_known = max(self.generation, self.records.newest)
        self.update_contents(answer)
        if not self._store_is_empty:
            self.contents.resolve_uncertain(now, self._newest_generation())
        if answer.generation > newest_known:
            self._open_generation(answer.generation, None)  # a previous captain began it

    def _recorded(self, request: req.BeginGeneration, answer: req.Answer, now: float) -> None:
        begun = self.records.on_answered(request, answer, now)
        if begun is None:
            return
        if self.contents.has_missed(begun.late, request.seen, request.parent):
            self.missed_newer = True
            self.contents.add_late(begun.late)
        elif not self.records:
            self.contents.relist_if_stale()
            if self.generation > 1:
                self._instruct(ins.AskStore(req.SweepGenerations(self.generation, self.parent)))

    def _committed(self, request: req.CommitSnapshot, answer: req.Answer, now: float) -> None:
        self.is_committing = False
        snapshot = request.snapshot
        self.contents.mark_uncertain(snapshot)
        draft = self._drafts.get(snapshot)
        if draft is None:
            if self.contents.abandoned.cover(snapshot):
                self.delete_surplus(now)
            return
        if isinstance(answer, req.Failure):
            self.uploads.on_commit_failed(snapshot, now)
            self._failed(draft, answer, "all tasks", now)
            return
        del self._drafts[snapshot]
        self._sending = None
        self.pace.end(now)
        self.contents.add_committed(snapshot, draft.metrics, now)
        size = sum(file.size for part in draft.parts.values() if part.stored for file in part.stored.files)
        fields: dict[str, Any] = {"bytes": size, "took_s": round(now - draft.since, 3)}
        best = self.contents.best(self.contents.awaiting_evaluation(now))
        if best is not None:
            fields["best"] = best.to_json()
        self._emit("committed", step=snapshot.step, snapshot=str(snapshot), **fields)
        self._copies[snapshot] = draft
        self._drop_copies()
        if snapshot == self._restoring and snapshot.generation < self.generation:
            self.records.replace([self.record_of(self.generation, snapshot, [snapshot])], now)
        self.contents.announce_to_evaluators()
        self.delete_surplus(now)
        self.uploads.on_committed(snapshot, self._newest_generation(), now)

    def update_contents(self, listing: req.SnapshotList) -> None:
        self.records.learn_written(listing.generation)
        self.contents.update(listing)
        for snapshot in [each for each in self._drafts if self.contents.is_past(each)]:
            self._copies[snapshot] = self._drafts.pop(snapshot)
            self.uploads.give_up(snapshot)
        self._forget_sending()
        self._drop_copies()
        self.contents.announce_to_evaluators()

    # ---- progress

    def advance(self, now: float, all_joined: bool = True, is_urgent: bool = True) -> None:
        """`all_joined`: no host with more copies is expected to join. `is_urgent`: see `CommitPace`."""
        if not self.contents.is_known:
            if self.has_returned and self._list_at is not None and now >= self._list_at:
                self._list_at = None
                self._instruct(ins.AskStore(self.contents.list_request()))
            return
        if self._store_is_empty:
            if not all_joined:
                return
            self._store_is_empty = False
            self._restore_from_copies(now)
        if self.records:
            self.records.advance(now)
            return
        if self._sending is not None or self.is_stuck():
            return
        newest = self.newest_uncommitted()
        if newest is None:
            return
        self._skip_older()
        if self.pace.is_due(now, is_urgent):
            self.pace.begin(now)
            self._sending = newest.snapshot
            self._send(newest)

    def _restore_from_copies(self, now: float) -> None:
        """Send the newest complete copy from the hosts to the store again, after the record of its generation."""
        on_hosts = [draft for draft in (*self._copies.values(), *self._drafts.values()) if draft.is_complete]
        complete = [draft for draft in on_hosts if not self.contents.abandoned.cover(draft.snapshot)]
        if not complete:
            self.records.replace([self.record_of(self.generation, None, [])], now)
            return
        newest = max(complete, key=lambda draft: _age_order(draft.snapshot))
        step = newest.snapshot.step
        self._emit("note", text=f"the snapshot store is empty: storing step {step} again, from copies on the hosts")
        self._copies.pop(newest.snapshot, None)
        self._drafts = {newest.snapshot: newest}
        self._forget_sending()
        self._restoring, newest.is_resend = newest.snapshot, True
        for part in newest.parts.values():
            part.stored = None
        self.records.replace([self.record_of(newest.snapshot.generation, None, [])], now)

    def _send(self, draft: Draft) -> None:
        self.uploads.on_sending(draft.snapshot)
        for task, part in draft.parts.items():
            if part.stored is None:
                self._instruct(ins.StorePart(part.host, task, draft.snapshot, draft.is_resend))
        self._commit_if_stored(draft)

    def _commit_if_stored(self, draft: Draft) -> None:
        tasks = sorted(draft.parts, key=self._order.__getitem__)
        stored = [part for part in (draft.parts[task].stored for task in tasks) if part is not None]
        if self.is_committing or not draft.is_complete or len(stored) < len(tasks):
            return
        world_size = self.world_sizes.get(draft.snapshot.generation, self._plan.world_size)
        manifest = draft.manifest(self._run, world_size, stored).to_bytes().decode()
        self.is_committing = True
        self.uploads.on_commit_requested(draft.snapshot)
        self._instruct(ins.AskStore(req.CommitSnapshot(draft.snapshot, manifest, self._newest_generation())))

    def _failed(self, draft: Draft, failure: req.Failure, source: str, now: float) -> None:
        self._sending = None
        step = draft.snapshot.step
        if failure.kind == req.UNWANTED:
            return
        if failure.kind == req.UNFIT:
            self._emit("warning", text=f"the snapshot of step {step} ({source}) was rejected: {failure.text}")
            self._drop(draft.snapshot)
            return
        self.pace.fail(now)
        draft.failure, draft.is_hopeless = failure.text, not failure.passing
        if self.pace.failures == 1:
            self._emit("warning", text=f"the snapshot of step {step} is not committed yet: {failure.text}")

    def delete_surplus(self, now: float) -> None:
        if not self._store_is_empty:
            self.contents.delete_surplus(now, self._newest_generation())

    def _newest_generation(self) -> int:
        """The newest that may have a record, as far as this captain knows."""
        return max(self.generation, self.records.written)

    # ---- copies on hosts

    def _drop(self, snapshot: SnapshotId) -> None:
        draft = self._drafts.pop(snapshot)
        self.uploads.give_up(snapshot)
        for task, part in draft.parts.items():
            self._instruct(ins.DropPart(part.host, task, snapshot))
        if self._sending == snapshot:
            self._sending = None

    def _forget_sending(self) -> None:
        """The snapshot that is being sent may have been committed by an earlier request, whose answer was lost."""
        if self._sending not in self._drafts:
            self._sending = None

    def drop_all_copies(self) -> None:
        """The run has ended: hosts keep no committed snapshots."""
        self._drop_copies(is_over=True)

    def drop_copies_on(self, host: str) -> None:
        """The host leaves, and may not come back: it keeps no committed snapshots."""
        for snapshot, copy in list(self._copies.items()):
            for task in [task for task, part in copy.parts.items() if part.host == host]:
                del copy.parts[task]
                self._instruct(ins.DropPart(host, task, snapshot))
            if not copy.parts:
                del self._copies[snapshot]

    def on_fetched(self, now: float) -> None:
        """A host has the snapshot that others have kept for it."""
        self._drop_copies()
        self.delete_surplus(now)

    def _drop_copies(self, is_over: bool = False) -> None:
        """Drop copies that are no longer needed."""
        if not self.contents.is_known or self._store_is_empty:
            return
        needed = set() if is_over else {*self.contents.chain[:1], *self.contents.being_fetched()}
        for snapshot in [each for each in self._copies if each not in needed]:
            self._drop_copy(snapshot)

    def _drop_copy(self, snapshot: SnapshotId) -> None:
        for task, part in self._copies.pop(snapshot).parts.items():
            self._instruct(ins.DropPart(part.host, task, snapshot))


def _snapshots_of(host: str, drafts: Mapping[SnapshotId, Draft], most: int) -> list[SnapshotId]:
    """Those of which the host has a part; [] if there are fewer than `most` of all hosts."""
    if len(drafts) < most:
        return []
    return [each for each, draft in drafts.items() if any(part.host == host for part in draft.parts.values())]


def _age_order(snapshot: SnapshotId) -> tuple[int, int]:
    return snapshot.generation, snapshot.step
