"""Parts of one snapshot that this host has fetched from other hosts, when a restart needed them or in advance.

<folder>/<task>/<snapshot>         complete
<folder>/.<snapshot>.*/<task>      being fetched
A fetch in advance has one connection. A restart that needs the same snapshot continues what such a fetch has begun,
with more.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Mapping
from typing import Callable

from paceline.storage.local_files import remove_tree
from paceline.storage.snapshots import shared_parts
from paceline.storage.snapshots.manifest import Damaged, SnapshotId
from paceline.storage.snapshots.parts_from_hosts import Dial, PartsFetch
from paceline.storage.stores.protocol import ContinueCheck, TransferCanceled

AT_ONCE = 4  # connections of a fetch that tasks wait for: one is slower than most networks and disks
LEFT_FREE = 0.15  # of a disk: on a cluster, pods are evicted from a node whose disk is nearly full
DELETED_WITHIN_S = 5.0  # seconds until a restart no longer waits for room
HANDOVER_S = 1.0  # seconds until a restart no longer waits for the fetch that it interrupts: its host may not answer


class FetchedParts:
    def __init__(self, folder: str, dial: Dial) -> None:
        self._folder, self._dial = folder, dial
        self._lock = threading.Lock()  # of the fetch that is active
        self._is_needed = threading.Event()  # a restart waits: a fetch in advance ends
        self._interrupted: PartsFetch | None = None

    def part(self, task: str, snapshot: SnapshotId) -> str:
        return f"{self._folder}/{task}/{snapshot}"

    def fetch(self, addresses: Mapping[str, str], snapshot: SnapshotId, should_continue: ContinueCheck) -> int:
        """Fetch the parts that this host does not have yet; return the number of bytes. Tasks wait for them.
        `addresses`: of the hosts that have them, by task."""
        self._is_needed.set()
        is_alone = self._lock.acquire(timeout=HANDOVER_S)
        self._is_needed.clear()
        try:
            fetch = self._begin(addresses, snapshot, may_continue=is_alone)
            return self._run(fetch, AT_ONCE, should_continue, self._check_fits)
        finally:
            if is_alone:
                self._lock.release()

    def fetch_in_advance(
        self, addresses: Mapping[str, str], snapshot: SnapshotId, should_continue: ContinueCheck
    ) -> int:
        """The same, before a restart needs them. TransferCanceled: one does now, and continues this fetch."""
        with self._lock:
            fetch = self._begin(addresses, snapshot, may_continue=True)
            is_wanted = lambda size: not self._is_needed.is_set() and should_continue(size)  # noqa: E731
            return self._run(fetch, 1, is_wanted, self._check_leaves_room)

    def _begin(self, addresses: Mapping[str, str], snapshot: SnapshotId, may_continue: bool) -> PartsFetch:
        missing = self._missing(addresses, snapshot)
        fetch, self._interrupted = self._interrupted if may_continue else None, None
        if fetch is None or (fetch.addresses, fetch.snapshot) != (missing, snapshot):
            folder = f"{self._folder}/.{snapshot}.{os.urandom(4).hex()}"
            fetch = PartsFetch(missing, snapshot, folder, self._dial)
        self._keep_only(snapshot, os.path.basename(fetch.folder))
        return fetch

    def _missing(self, addresses: Mapping[str, str], snapshot: SnapshotId) -> dict[str, str]:
        """Without the parts that are complete, unless a program has changed them."""
        return {task: address for task, address in addresses.items() if not self._is_intact(task, snapshot)}

    def _is_intact(self, task: str, snapshot: SnapshotId) -> bool:
        part = self.part(task, snapshot)
        if not os.path.isdir(part):
            return False
        try:
            if shared_parts.is_signed(part):
                shared_parts.verify(part)
                return True
        except Damaged:
            pass
        self._delete(part)
        shared_parts.forget(part)
        return False

    def _run(
        self,
        fetch: PartsFetch,
        at_once: int,
        should_continue: ContinueCheck,
        need: Callable[[int], None],
    ) -> int:
        if not fetch.addresses:
            return 0
        try:
            received = fetch.run(at_once, should_continue, need)
            for task in fetch.addresses:
                part = self.part(task, fetch.snapshot)
                os.makedirs(os.path.dirname(part), exist_ok=True)
                if not os.path.isdir(part):  # a restart did not wait for this fetch, and has fetched it, too
                    os.rename(f"{fetch.folder}/{task}", part)
                    shared_parts.sign(part)
        except BaseException as error:
            if isinstance(error, TransferCanceled) and fetch.can_continue:
                self._interrupted = fetch
            else:
                remove_tree(fetch.folder, ignore_errors=True)
            raise
        remove_tree(fetch.folder, ignore_errors=True)
        return received

    def _check_fits(self, size: int) -> None:
        """What tasks wait for may fill the disk. Files of an earlier restart may still be being deleted."""
        deadline = time.monotonic() + DELETED_WITHIN_S
        while self._room()[0] < size and time.monotonic() < deadline:
            time.sleep(0.05)
        self._check_room(size, 0, "too little room to fetch the snapshot")

    def _check_leaves_room(self, size: int) -> None:
        """What is fetched in advance leaves room for a snapshot of the same size, and a share of the disk."""
        least_left = max(size, int(LEFT_FREE * self._room()[1]))
        self._check_room(size, least_left, "too little room to fetch a snapshot in advance")

    def _check_room(self, size: int, least_left: int, problem: str) -> None:
        free = self._room()[0]
        if free - size < least_left:
            sizes = f"it has {size >> 20} MiB, and {free >> 20} MiB are free"
            raise OSError(errno.ENOSPC, f"{problem}: {sizes}", self._folder)

    def _room(self) -> tuple[int, int]:
        """Bytes that are free on the disk, and its size."""
        os.makedirs(self._folder, exist_ok=True)
        disk = os.statvfs(self._folder)
        return disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize

    def _keep_only(self, snapshot: SnapshotId, unfinished: str) -> None:
        """Delete the parts of other snapshots, and what other fetches have left behind."""
        for name in _names(self._folder):
            if name.startswith("."):
                if name != unfinished:
                    remove_tree(f"{self._folder}/{name}", ignore_errors=True)
                continue
            for part in _names(f"{self._folder}/{name}"):
                if part not in (str(snapshot), f".{snapshot}.shared"):
                    self._delete(f"{self._folder}/{name}/{part}")

    def _delete(self, path: str) -> None:
        """Renames it first: a part of which some files are missing would be taken for a complete one."""
        removed = f"{self._folder}/.{os.urandom(4).hex()}.removed"
        with contextlib.suppress(OSError):
            os.rename(path, removed)
            if os.path.isdir(removed):
                remove_tree(removed, ignore_errors=True)
            else:
                os.unlink(removed)


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
