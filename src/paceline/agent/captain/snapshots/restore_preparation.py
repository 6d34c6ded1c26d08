"""What a generation restores: the newest snapshot that can be read is chosen, and each host that needs it gets it. Then
its tasks start. No I/O.

Snapshots on the hosts need not be committed, so a restart after the death of a process does not wait for the store. The
record of the first generation is written before its tasks start, which shows that the store works; the records of later
ones are written while they train.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Callable

from paceline.agent.captain import events as ev
from paceline.agent.captain import instructions as ins
from paceline.agent.captain.snapshots.commits import Commits
from paceline.agent.captain.snapshots.pending_records import PAUSE
from paceline.agent.transfers import requests as req
from paceline.plan import Snapshots
from paceline.storage.snapshots.manifest import SnapshotId

SETTLING, LISTING, ADOPTING, FETCHING, CHECKING, RECORDING, READY = (
    "settling", "listing", "adopting", "fetching", "checking", "recording", "ready"
)  # fmt: skip


class RestorePreparation:
    def __init__(
        self,
        commits: Commits,
        settings: Snapshots,
        number: int,
        hosts: Iterable[str],
        instruct: Callable[[ins.Instruction], None],
        emit: Callable[..., None],
        now: float,
        settle: float,
        is_first: bool,
    ) -> None:
        """`number`: the generation number. `settle`: how long to wait for the commit of a snapshot that was saved, but
        that the hosts no longer have. `is_first`: no generation of this run has started yet."""
        self._commits, self._settings = commits, settings
        self._instruct, self._emit = instruct, emit
        self.number, self._is_first = number, is_first
        self.hosts = set(hosts)
        self.since = now
        self.stage = SETTLING
        self.snapshot: SnapshotId | None = None
        self.failure: tuple[str, bool] | None = None  # an error of the store, and whether it may be temporary
        self.is_recorded = False  # whether the record is in the store
        self._settle, self._settle_until = settle, now + settle
        self._prepared: set[str] = set()
        self._from_hosts: set[str] = set()  # hosts that get the snapshot from hosts, not from the store
        self._unreadable: set[SnapshotId] = set()
        self._intact: SnapshotId | None = None  # the snapshot that was checked in the store, and is not damaged there
        self._checked_since = now
        self._chain: tuple[SnapshotId, ...] = ()
        self._retry_at: float | None = None
        self._ticket = 0
        self._has_warned = False

    def unprepared_hosts(self) -> list[str]:
        """The hosts that do not have the snapshot yet."""
        return sorted(self.hosts - self._prepared) if self.stage == FETCHING else []

    def _enter(self, stage: str) -> None:
        self.stage, self._retry_at = stage, None

    def advance(self, now: float) -> None:
        if self._retry_at is not None and now >= self._retry_at:
            self._retry_at = None
            repeat: dict[str, Callable[[], None]] = {
                LISTING: self._list, ADOPTING: self._adopt, FETCHING: self._fetch,
                CHECKING: lambda: self._request_check(now), RECORDING: self._record,
            }  # fmt: skip
            repeat[self.stage]()
        if self.stage == SETTLING and self._is_settled(now):
            self._choose() if self._commits.contents.is_known else self._list()

    def _is_settled(self, now: float) -> bool:
        is_late = now >= self._settle_until and not self._commits.is_committing
        return is_late or not self._commits.awaits_store(self.hosts)

    @property
    def record(self) -> req.BeginGeneration:
        return self._commits.record_of(self.number, self.snapshot, self._chain)

    def _list(self) -> None:
        self._enter(LISTING)
        self._request(self._commits.contents.list_request())

    def _choose(self) -> None:
        self._chain = tuple(self._commits.contents.chain)
        self.snapshot = next(filter(self._is_usable, self._commits.restorable(self.hosts)), None)
        self._prepared = set()
        origin = self._settings.origin
        if self.snapshot is None and origin and not self._unreadable:
            self._adopt()
        elif self.snapshot is None and origin:
            self.failure = f"no snapshot of {origin} (snapshots.from) can be read", False
        elif (self.snapshot is not None or self._settings.watch) and self.hosts:
            self._fetch()
        else:
            self._record()

    def _is_usable(self, snapshot: SnapshotId) -> bool:
        return snapshot not in self._unreadable and not self._commits.contents.abandoned.cover(snapshot)

    def _adopt(self) -> None:
        self._enter(ADOPTING)
        self._request(req.AdoptOrigin())

    def _adopted(self, adopted: req.OriginAdopted, now: float) -> None:
        for text in adopted.passed:
            self._emit("warning", text=text)
        self._commits.on_origin_adopted(adopted, took_s=round(now - self.since, 3))
        self._choose()

    def _fetch(self) -> None:
        self._enter(FETCHING)
        for host in sorted(self.hosts - self._prepared):
            self._prepare(host)

    def _prepare(self, host: str) -> None:
        sources = None if self.snapshot is None else self._commits.sources(self.snapshot, host)
        self._from_hosts.add(host) if sources else self._from_hosts.discard(host)
        self._instruct(ins.PrepareHost(host, self.snapshot, self.number, sources or {}))

    def _check(self, host: str, failure: req.Failure, now: float) -> None:
        """A host says that nobody can use the snapshot. It may be wrong: its memory or its disk may be faulty, or it
        may lie. Without this check, it could have training start over, and all snapshots deleted."""
        assert self.snapshot is not None
        text = f"{host} cannot use the snapshot of step {self.snapshot.step}, which is now checked in the store"
        self._emit("note", text=f"{text}: {failure.text}")
        self._request_check(now)

    def _request_check(self, now: float) -> None:
        assert self.snapshot is not None
        self._checked_since = now
        self._enter(CHECKING)
        self._request(req.CheckSnapshot(self.snapshot))

    def _checked(self) -> None:
        """It is intact: hosts that could not use it try again."""
        self._intact = self.snapshot
        self._fetch()
        if self._prepared == self.hosts:
            self._record()

    def _skip(self, failure: req.Failure) -> None:
        assert self.snapshot is not None
        self.failure = None  # of an earlier attempt to check it
        self._emit("warning", text=f"the snapshot of step {self.snapshot.step} is skipped: {failure.text}")
        self._unreadable.add(self.snapshot)
        if failure.kind == req.NEWER:
            self._commits.contents.exempt(self.snapshot)
        self._choose()

    def _record(self) -> None:
        if self._is_first:
            self._enter(RECORDING)
            self._request(self.record)
        else:
            self._enter(READY)

    def _request(self, request: req.Request) -> None:
        self._ticket = next(self._commits.tickets)  # the answer to an abandoned request may still arrive
        self._instruct(ins.AskStore(request, self._ticket))

    # ---- events

    def on_joined(self, host: str) -> None:
        """The host may not have received the instruction: send it again."""
        if self.stage in (FETCHING, CHECKING) and host in self.hosts:
            self._prepared.discard(host)
            self._prepare(host)

    def on_prepared(self, event: ev.HostPrepared, now: float) -> None:
        is_current = event.snapshot == self.snapshot and event.from_hosts == (event.host in self._from_hosts)
        if self.stage not in (FETCHING, CHECKING) or not is_current or event.host not in self.hosts:
            return
        if event.error is None:
            self._prepared.add(event.host)
        if self.stage == CHECKING:
            return  # those that could not get it try again afterwards
        if event.error is None:
            self.failure = None
            if self._prepared == self.hosts:
                self._record()
        elif event.error.kind == req.DAMAGED and event.snapshot is not None and event.from_hosts:
            self._commits.discard_copies(event.snapshot)
            text = f"the snapshot of step {event.snapshot.step} on {event.host} cannot be used: {event.error.text}"
            self._emit("warning", text=text)
            self._choose()  # the store may have it
        elif event.from_hosts and event.error.kind != req.HERE:  # not, for example, a full disk
            self._commits.on_unreachable(event.snapshot)
            self._emit("warning", text=f"{event.host} cannot get the snapshot from other hosts: {event.error.text}")
            self._enter(SETTLING)
            self._settle_until = now + self._settle
            self.advance(now)
        elif event.error.kind in (req.DAMAGED, req.NEWER) and event.snapshot is not None:
            if event.snapshot != self._intact:
                self._check(event.host, event.error, now)
                return
            text = f"{event.host} cannot use the snapshot of step {event.snapshot.step}, which is intact in the store"
            self._failed(req.Failure(req.HERE, f"{text}: {event.error.text}", True), now)
        else:
            self._failed(event.error, now)

    def on_answered(self, event: ev.StoreAnswered, now: float) -> None:
        if event.ticket != self._ticket:
            return
        answer = event.answer
        if isinstance(event.request, req.CheckSnapshot):
            self.since += now - self._checked_since  # the hosts have waited for this, and may still take limits.start
        if isinstance(answer, req.Failure):
            is_checked = isinstance(event.request, req.CheckSnapshot) and answer.kind in (req.DAMAGED, req.NEWER)
            self._skip(answer) if is_checked else self._failed(answer, now)
            return
        self.failure = None
        if isinstance(answer, req.SnapshotList):
            self._commits.update_contents(answer)
            self.number = max(self.number, answer.generation + 1)
            self._choose()
        elif isinstance(answer, req.OriginAdopted):
            self._adopted(answer, now)
        elif isinstance(answer, req.GenerationBegun):
            if answer.late:
                self._commits.contents.add_late(answer.late)
                self.number += 1
                self._choose()
            else:
                self._enter(READY)
                self.is_recorded = True
        elif isinstance(event.request, req.CheckSnapshot):
            self._checked()

    def _failed(self, failure: req.Failure, now: float) -> None:
        self.failure = failure.text, failure.passing
        if not self._has_warned and failure.passing and not self._is_first:
            self._has_warned = True
            self._emit("warning", text=f"generation {self.number} waits for its snapshot: {failure.text}")
        self._retry_at = now + PAUSE
