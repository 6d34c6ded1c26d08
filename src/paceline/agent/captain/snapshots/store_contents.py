"""The captain's view of the run's snapshots in the store: which are on the run's chain, which is the best, which to
delete. No I/O.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Callable

from paceline.agent.captain import instructions as ins
from paceline.agent.captain.snapshots.abandoned_steps import AbandonedSteps
from paceline.agent.transfers.requests import Answer, DeleteSnapshot, Failure, ListSnapshots, Metrics, SnapshotList
from paceline.plan import Plan
from paceline.storage.snapshots.manifest import SnapshotId
from paceline.storage.snapshots.retention import best, to_delete


@dataclass(frozen=True)
class BestSnapshot:
    snapshot: SnapshotId
    metric: str
    value: float

    def to_json(self) -> dict[str, Any]:
        return {"snapshot": str(self.snapshot), "metric": self.metric, "value": self.value}


class StoreContents:
    def __init__(self, plan: Plan, instruct: Callable[[ins.Instruction], None], emit: Callable[..., None]) -> None:
        self._plan = plan
        self._instruct, self._emit = instruct, emit
        self.is_known = False  # whether the store has listed its snapshots
        self.chain: list[SnapshotId] = []  # committed snapshots on the run's current chain, newest first
        self.abandoned = AbandonedSteps()  # never on the chain, whatever the store lists
        self._committed: set[SnapshotId] = set()  # all in the store, on the chain or not
        self._uncertain: set[SnapshotId] = set()  # snapshots whose commit was requested but not confirmed
        self._exempt: set[SnapshotId] = set()  # written by a newer version of Paceline: never deleted
        self._is_stale = False  # the store has metrics that this captain does not know
        self.deleting: set[SnapshotId] = set()
        self._failed_deletions: set[SnapshotId] = set()  # warned about
        self._values: dict[SnapshotId, float] = {}  # values of the metric in snapshots.best
        self.evaluations: dict[SnapshotId, Metrics] = {}  # results of evaluators, as in the store
        self.awaiting_evaluation: Callable[[float], set[SnapshotId]] = lambda now: set()
        self.being_fetched: Callable[[], set[SnapshotId]] = set  # by hosts, while others train
        self._warned_of_metric = False

    def list_request(self) -> ListSnapshots:
        criterion = self._plan.snapshots.best
        evaluated = any(role.name == "evaluator" for role in self._plan.roles)
        return ListSnapshots(None if criterion is None else criterion[0], evaluated)

    def newest_step(self) -> int:
        """Of the snapshots on the chain; -1: none."""
        return self.chain[0].step if self.chain else -1

    def is_past(self, snapshot: SnapshotId) -> bool:
        """Whether this snapshot need not be committed: it, or a later one of its generation, is committed; or it is
        abandoned."""
        is_later = self.later_committed(snapshot) is not None
        return snapshot in self._committed or is_later or self.abandoned.cover(snapshot)

    def later_committed(self, snapshot: SnapshotId) -> SnapshotId | None:
        """The newest snapshot on the chain, if it is a later one of the same generation."""
        newest = self.chain[0] if self.chain else None
        is_later = newest is not None and newest.generation == snapshot.generation and newest > snapshot
        return newest if is_later else None

    def has_missed(self, listed: Iterable[SnapshotId], seen: Collection[SnapshotId], parent: SnapshotId | None) -> bool:
        """Whether a generation should have started from another snapshot than `parent`. `listed`: the chain before it.
        `seen`: the chain that the choice was made from."""
        listed = list(listed)
        current = self._without_abandoned(listed)
        if current == listed:
            return bool(listed)  # the store has compared them
        return any(each not in seen and (parent is None or not _is_before(each, parent)) for each in current)

    # ---- contents

    def update(self, listing: SnapshotList) -> None:
        self.is_known = True
        self.chain = self._without_abandoned(each for each in listing.counted if each not in self.deleting)
        self._committed = set(listing.committed) - self.deleting - self._exempt
        self._values = dict(listing.metrics)
        for snapshot, metrics in listing.evaluations.items():
            self.add_evaluation(snapshot, metrics)

    def add_origin(self, snapshot: SnapshotId) -> None:
        """The snapshot that the run starts from was copied."""
        self.chain.append(snapshot)
        self._committed.add(snapshot)

    def add_late(self, chain: Iterable[SnapshotId]) -> None:
        """Another captain, or a commit that seemed to fail, has added snapshots to the chain."""
        listed = list(chain)
        self.chain = self._without_abandoned(listed)
        self._committed.update(snapshot for snapshot in listed if snapshot not in self._exempt)
        self._is_stale = True

    def add_committed(self, snapshot: SnapshotId, metrics: Metrics, now: float) -> None:
        self.chain.insert(0, snapshot)
        self._committed.add(snapshot)
        self._uncertain.discard(snapshot)
        criterion = self._plan.snapshots.best
        if criterion is not None and criterion[0] in metrics:
            self._values[snapshot] = metrics[criterion[0]]
        elif snapshot not in self.awaiting_evaluation(now):  # else an evaluator may report it
            self._warn_of_missing_metric(snapshot, metrics)

    def mark_uncertain(self, snapshot: SnapshotId) -> None:
        """The store may have committed this snapshot, without confirmation."""
        self._uncertain.add(snapshot)

    def relist_if_stale(self) -> None:
        if self._is_stale:
            self._is_stale = False
            self._instruct(ins.AskStore(self.list_request()))

    def continue_from(self, parent: SnapshotId | None) -> None:
        """The new generation resumes from this snapshot, which may not be committed yet: newer ones leave the chain."""
        self.chain = [] if parent is None else [each for each in self.chain if _is_before(each, parent)]

    def abandon(self, generation: int, step: int, resumed: int | None) -> bool:
        """Snapshots from this step on leave the chain, and are deleted; see `AbandonedSteps.add`. Returns whether there
        may be any."""
        is_new = self.abandoned.add(generation, step, resumed)
        self.chain = self._without_abandoned(self.chain)
        return is_new

    def _without_abandoned(self, snapshots: Iterable[SnapshotId]) -> list[SnapshotId]:
        return [each for each in snapshots if not self.abandoned.cover(each)]

    def exempt(self, snapshot: SnapshotId) -> None:
        """Never delete this snapshot: a newer version of Paceline wrote it."""
        self._exempt.add(snapshot)
        self._committed.discard(snapshot)

    # ---- evaluators

    def announce_to(self, host: str) -> None:
        if self.chain:
            self._instruct(ins.AnnounceCommit(host, self.chain[0]))

    def announce_to_evaluators(self) -> None:
        for host in self._plan.hosts:
            if host.role == "evaluator":
                self.announce_to(host.name)

    # ---- the best snapshot

    def add_evaluation(self, snapshot: SnapshotId, metrics: Metrics) -> None:
        """Add the result of an evaluator, which overrides the metrics saved with the snapshot."""
        self.evaluations[snapshot] = metrics
        criterion = self._plan.snapshots.best
        if criterion is not None and criterion[0] in metrics:
            self._values[snapshot] = float(metrics[criterion[0]])
        elif snapshot not in self._values:
            self._warn_of_missing_metric(snapshot, metrics)

    def best(self, awaiting_evaluation: Collection[SnapshotId] = ()) -> BestSnapshot | None:
        """The snapshot with the best value of `snapshots.best`, except those that await evaluation."""
        if self._plan.snapshots.best is None:
            return None
        metric, lowest = self._plan.snapshots.best
        candidates = [snapshot for snapshot in self.chain if snapshot not in awaiting_evaluation]
        winner = best(candidates, self._values, lowest)
        return None if winner is None else BestSnapshot(winner, metric, self._values[winner])

    def _warn_of_missing_metric(self, snapshot: SnapshotId, metrics: Metrics) -> None:
        criterion = self._plan.snapshots.best
        if criterion is None or self._values or self._warned_of_metric:
            return
        self._warned_of_metric = True
        metric, names = criterion[0], f"only {', '.join(sorted(metrics))}" if metrics else "no metrics"
        text = f"the snapshot of step {snapshot.step} has no {metric}, which snapshots.best needs; it has {names}"
        self._emit("warning", text=text)

    # ---- retention

    def delete_surplus(self, now: float, generation: int) -> None:
        """Delete snapshots beyond `snapshots.keep`. If a commit is uncertain, list the store first. `generation`: the
        newest that this captain knows."""
        if not self.is_known:
            return
        if self._uncertain:
            self._instruct(ins.AskStore(self.list_request()))
            return
        settings = self._plan.snapshots
        lowest = settings.best is None or settings.best[1]
        present, awaiting = sorted(self._committed - self.being_fetched()), self.awaiting_evaluation(now)
        for snapshot in to_delete(self.chain, present, settings.keep, self._values, lowest, awaiting):
            self._committed.discard(snapshot)
            self.deleting.add(snapshot)
            self._instruct(ins.AskStore(DeleteSnapshot(snapshot, generation)))
        self.chain = [snapshot for snapshot in self.chain if snapshot in self._committed]

    def resolve_uncertain(self, now: float, generation: int) -> None:
        """The store has been listed."""
        if self._uncertain:
            self._uncertain.clear()
            self.delete_surplus(now, generation)

    def on_deleted(self, snapshot: SnapshotId, answer: Answer) -> None:
        self.deleting.discard(snapshot)
        if not isinstance(answer, Failure):
            self._forget_deleted()
            return
        self._committed.add(snapshot)  # tried again after the next commit
        if snapshot not in self._failed_deletions:
            self._failed_deletions.add(snapshot)
            self._emit("warning", text=f"an old snapshot could not be deleted: {answer.text}")

    def may_exist(self, snapshot: SnapshotId) -> bool:
        """Whether the store may have this snapshot."""
        known = (self._committed, self._uncertain, self._exempt, self.deleting, self.chain)
        return any(snapshot in each for each in known)

    def _forget_deleted(self) -> None:
        """A run may commit and delete a snapshot every minute, for months."""
        self._values = {each: value for each, value in self._values.items() if self.may_exist(each)}
        self._failed_deletions = set(filter(self.may_exist, self._failed_deletions))
        for snapshot in [each for each in self.evaluations if not self.may_exist(each)]:
            del self.evaluations[snapshot]


def _is_before(snapshot: SnapshotId, parent: SnapshotId) -> bool:
    """Whether a snapshot on the chain stays on it if the next generation starts from `parent`."""
    return snapshot.generation < parent.generation or (
        snapshot.generation == parent.generation and snapshot.step <= parent.step
    )
