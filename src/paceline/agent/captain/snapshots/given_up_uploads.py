"""Parts in the store of snapshots that were never committed, because an upload failed and a newer one was committed.

The next generation deletes them all; a run without restarts would keep them for months. They are deleted after a newer
snapshot of the same generation has been committed: hosts send one snapshot at a time, so no host still sends them. No
I/O.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Callable

from paceline.agent.captain import instructions as ins
from paceline.agent.transfers.requests import Answer, DeleteUncommitted, Failure
from paceline.storage.snapshots.manifest import SnapshotId

MOST = 1000  # uploads that are remembered; the next generation deletes what remains of older ones
AT_ONCE = 3  # deletions after each commit: they delay the next one
# Seconds after a commit that failed, or that an earlier captain may have requested: the request may still be on its way
# to the store. Buckets refuse requests that were signed more than 15 minutes ago.
DOUBT_S = 3600.0


@dataclass
class _Upload:
    is_given_up: bool = False
    not_before: float = 0.0  # when it may be deleted


class GivenUpUploads:
    def __init__(self, instruct: Callable[[ins.Instruction], None]) -> None:
        self._instruct = instruct
        self._uploads: dict[SnapshotId, _Upload] = {}  # oldest first
        self._deleting: set[SnapshotId] = set()
        self._newest_deleted: SnapshotId | None = None

    def __len__(self) -> int:
        return len(self._uploads)

    def on_saved(self, snapshot: SnapshotId, is_doubtful: bool, now: float) -> None:
        """A host has a part of a snapshot that is new, or that was given up. `is_doubtful`: an earlier captain may have
        requested its commit."""
        upload = self._uploads.get(snapshot)
        if upload is not None:
            upload.is_given_up = False
        elif is_doubtful:
            self._add(snapshot).not_before = now + DOUBT_S

    def on_sending(self, snapshot: SnapshotId) -> None:
        self._add(snapshot)

    def on_commit_requested(self, snapshot: SnapshotId) -> None:
        self._add(snapshot).not_before = math.inf

    def on_commit_failed(self, snapshot: SnapshotId, now: float) -> None:
        if snapshot in self._uploads:
            self._uploads[snapshot].not_before = now + DOUBT_S

    def give_up(self, snapshot: SnapshotId) -> None:
        if snapshot in self._uploads:
            self._uploads[snapshot].is_given_up = True

    def _add(self, snapshot: SnapshotId) -> _Upload:
        upload = self._uploads.setdefault(snapshot, _Upload())
        if len(self._uploads) > MOST:
            del self._uploads[next(iter(self._uploads))]
        return upload

    def is_deleted(self, snapshot: SnapshotId) -> bool:
        """Whether this snapshot must not be sent or committed: a host may believe that its part is in the store."""
        newest = self._newest_deleted
        return newest is not None and snapshot.generation == newest.generation and snapshot <= newest

    def on_committed(self, committed: SnapshotId, generation: int, now: float) -> None:
        """Delete what is older. `generation`: the newest that this captain knows."""
        self._uploads.pop(committed, None)
        # Those of later generations stay: the parent of a generation may be committed after some of its own snapshots
        # were sent, and a request to commit one of them may still be on its way.
        self._uploads = {
            each: upload for each, upload in self._uploads.items() if each.generation >= committed.generation
        }
        due = [
            each for each, upload in self._uploads.items()
            if each.generation == committed.generation and upload.is_given_up and now >= upload.not_before
        ]  # fmt: skip
        for snapshot in sorted(each for each in due if each < committed and each not in self._deleting)[:AT_ONCE]:
            self._deleting.add(snapshot)
            if not self.is_deleted(snapshot):
                self._newest_deleted = snapshot
            self._instruct(ins.AskStore(DeleteUncommitted(snapshot, generation)))

    def on_answered(self, snapshot: SnapshotId, answer: Answer) -> None:
        """If it failed, it is tried again after the next commit."""
        self._deleting.discard(snapshot)
        if not isinstance(answer, Failure):
            self._uploads.pop(snapshot, None)
