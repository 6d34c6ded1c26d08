"""The start of a generation: saved snapshots are committed, one is chosen, every host that needs it fetches it, and
the record of the generation is written to the store. Only then do its tasks start. No I/O.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Callable

from paceline.agent.captain import events as ev
from paceline.agent.captain import instructions as ins
from paceline.agent.captain.commits import PAUSE, Commits
from paceline.agent.transfers import requests as req
from paceline.plan import Snapshots
from paceline.storage.snapshots.manifest import SnapshotId

SETTLING, LISTING, ADOPTING, FETCHING, RECORDING, READY = (
    "settling", "listing", "adopting", "fetching", "recording", "ready"
)  # fmt: skip


class GenerationStart:
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
    ) -> None:
        """`number`: the generation number. `settle`: how long to wait until saved snapshots are committed."""
        self._commits, self._settings = commits, settings
        self._instruct, self._emit = instruct, emit
        self.number = number
        self.hosts = set(hosts)
        self.since = now
        self.stage = SETTLING
        self.snapshot: SnapshotId | None = None
        self.failure: tuple[str, bool] | None = None  # an error of the store, and whether it may be temporary
        self.owed_record: tuple[req.BeginGeneration, str] | None = None  # to write later, and why the store rejected it
        self._settle_until = now + settle
        self._prepared: set[str] = set()
        self._unreadable: set[SnapshotId] = set()
        self._chain: tuple[SnapshotId, ...] = ()
        self._retry_at: float | None = None
        self._ticket = 0
        self._has_warned = False

    def unprepared_hosts(self) -> list[str]:
        """The hosts that do not have the snapshot yet."""
        return sorted(self.hosts - self._prepared) if self.stage == FETCHING else []

    def advance(self, now: float) -> None:
        if self._retry_at is not None and now >= self._retry_at:
            self._retry_at = None
            {LISTING: self._list, ADOPTING: self._adopt, FETCHING: self._fetch, RECORDING: self._record}[self.stage]()
        is_settled = not self._commits.is_busy() or (now >= self._settle_until and not self._commits.is_committing)
        if self.stage == SETTLING and is_settled:
            self._commits.open_generation(self.number)
            self._choose() if self._commits.contents.is_known else self._list()

    def _list(self) -> None:
        self.stage = LISTING
        self._request(self._commits.contents.list_request())

    def _choose(self) -> None:
        self._chain = tuple(self._commits.contents.chain)
        self.snapshot = next((snapshot for snapshot in self._chain if snapshot not in self._unreadable), None)
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

    def _adopt(self) -> None:
        self.stage = ADOPTING
        self._request(req.AdoptOrigin())

    def _adopted(self, adopted: req.OriginAdopted, now: float) -> None:
        for text in adopted.passed:
            self._emit("warning", text=text)
        self._commits.on_origin_adopted(adopted, took_s=round(now - self.since, 3))
        self._choose()

    def _fetch(self) -> None:
        self.stage = FETCHING
        for host in sorted(self.hosts - self._prepared):
            self._prepare(host)

    def _prepare(self, host: str) -> None:
        self._instruct(ins.PrepareHost(host, self.snapshot, self.number))

    def _record(self) -> None:
        self.stage = RECORDING
        self._commits.open_generation(self.number)
        self._request(req.BeginGeneration(self.number, self.snapshot, self._chain))

    def _request(self, request: req.Request) -> None:
        self._ticket = next(self._commits.tickets)  # the answer to an abandoned request may still arrive
        self._instruct(ins.AskStore(request, self._ticket))

    # ---- events

    def on_joined(self, host: str) -> None:
        """The host may not have received the instruction: send it again."""
        if self.stage == FETCHING and host in self.hosts:
            self._prepared.discard(host)
            self._prepare(host)

    def on_prepared(self, event: ev.HostPrepared, now: float) -> None:
        if self.stage != FETCHING or event.snapshot != self.snapshot or event.host not in self.hosts:
            return
        if event.error is None:
            self.failure = None
            self._prepared.add(event.host)
            if self._prepared == self.hosts:
                self._record()
        elif event.error.kind in (req.DAMAGED, req.NEWER) and event.snapshot is not None:
            text = f"the snapshot of step {event.snapshot.step} is skipped: {event.error.text}"
            self._emit("warning", text=text)
            self._unreadable.add(event.snapshot)
            if event.error.kind == req.NEWER:
                self._commits.contents.exempt(event.snapshot)
            self._choose()
        else:
            self._failed(event.error, now)

    def on_answered(self, event: ev.StoreAnswered, now: float) -> None:
        if event.ticket != self._ticket:
            return
        answer = event.answer
        if isinstance(answer, req.Failure):
            # A retry writes the same record: it may have been written, and only the answer lost.
            self._failed(answer, now, event.request if isinstance(event.request, req.BeginGeneration) else None)
            return
        self.failure = None
        if isinstance(answer, req.SnapshotList):
            self._commits.update_contents(answer)
            self.number = max(self.number, answer.generation + 1)
            self._choose()
        elif isinstance(answer, req.OriginAdopted):
            self._adopted(answer, now)
        elif isinstance(answer, req.GenerationBegun):
            self._commits.recorded = self.number
            if answer.late:
                self._commits.contents.add_late(answer.late)
                self.number += 1
                self._choose()
            else:
                self.stage = READY

    def _failed(self, failure: req.Failure, now: float, record: req.BeginGeneration | None = None) -> None:
        if record is not None and failure.passing and self.number > 1:
            self.failure = None
            self.stage = READY  # training need not wait: the record is written later, and nothing is committed before
            self.owed_record = (
                replace(record, generation=self.number, parent=self.snapshot, seen=self._chain),
                failure.text,
            )
            return
        self.failure = failure.text, failure.passing
        if not self._has_warned and failure.passing and self.number > 1:
            self._has_warned = True
            self._emit("warning", text=f"generation {self.number} waits for its snapshot: {failure.text}")
        self._retry_at = now + PAUSE
