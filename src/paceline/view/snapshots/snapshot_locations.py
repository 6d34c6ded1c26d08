"""The location of a run's snapshots, according to its plan; opens those in a folder or a bucket."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from paceline.errors import USAGE, PacelineError
from paceline.plan import CAPTAIN, CLAIM
from paceline.storage.stores.locations import is_bucket
from paceline.view.files import run_files, run_folders
from paceline.view.files.run_folders import Run
from paceline.view.snapshots import store_settings

if TYPE_CHECKING:
    from paceline.storage.snapshots.evaluation import Evaluation
    from paceline.storage.snapshots.manifest import File, Manifest, SnapshotId
    from paceline.storage.snapshots.repository import Inventory
    from paceline.storage.stored_run_files import StoredRunFiles
    from paceline.storage.stores.protocol import ContinueCheck

PATIENCE_S = 8.0  # seconds for one request to a store with all retries: a user is waiting
_IN_POD = "captain:/paceline/run/snapshots"  # the notation of `kubectl cp` for a folder in a pod


class InvalidLocation(PacelineError):
    """The address does not lead to the snapshots of a run; the message suggests one that does."""

    exit_code = USAGE


class OutOfReach(PacelineError):
    """The snapshots cannot be accessed now; the message says where they are, and what to do."""


class NoClaim(OutOfReach):
    """The volume claim was deleted, with everything in it."""


class Reader(Protocol):
    """Reads the snapshots of one run; SnapshotRepository does so in a folder or a bucket."""

    def inventory(self) -> Inventory: ...

    def manifest(self, id: SnapshotId) -> Manifest: ...

    def evaluation(self, id: SnapshotId) -> Evaluation | None: ...

    def check(self, id: SnapshotId, task: str, file: File, should_continue: ContinueCheck) -> None:
        """Read every byte of a file; Damaged if it differs from what was committed."""

    def fetch(self, manifest: Manifest, folder: str, should_continue: ContinueCheck) -> int:
        """Fetch into a new folder, which appears only when all files are verified."""

    def delete(self, id: SnapshotId) -> None: ...

    def delete_all(self) -> None: ...


@dataclass(frozen=True)
class Source:
    run: str
    location: str  # everything below <location>/<run>/ belongs to the run
    reader: Reader  # with a short timeout
    transfers: Reader  # with a long timeout, for transfers: a slow connection is not a failure
    archive: StoredRunFiles  # logs and events
    folder: Path | None = None  # the run's folder, if this machine knows the run
    close: Callable[[], None] = lambda: None

    @property
    def address(self) -> str:
        return f"{self.location.rstrip('/')}/{self.run}"

    @property
    def alive(self) -> bool:
        """As far as this machine knows."""
        return self.folder is not None and run_folders.alive(self.folder)

    def doubt(self) -> str:
        """Why a run that is unknown here may still be alive; empty: it has ended, or is known here."""
        if self.folder is not None or self.archive.ended(CAPTAIN):
            return ""
        return f"nothing at {self.address} reports the end of {self.run}: it may still be training on another machine"


def is_location(text: str) -> bool:
    """Whether the text is an address, not a run id: ids have no slash.

    >>> is_location("digits-3f9a"), is_location("s3://training/digits-3f9a"), is_location("./digits-3f9a")
    (False, True, True)
    """
    return "/" in text or text in (".", "..", "~")


def location_of(run: Run) -> str:
    """The location to which a run known on this machine commits."""
    to = str(run_files.planned(run.folder).get("snapshots", {}).get("to", ""))
    if run_folders.on_cluster(run.folder):
        # A folder would be one of the pod; the plan of another user must not lead to a folder on this machine.
        return to if to.startswith(CLAIM) or is_bucket(to) else _IN_POD
    return to if to.startswith("/") or is_bucket(to) else str(run.folder / "snapshots")


def in_pod(run: Run) -> bool:
    """Whether the snapshots are in the captain's pod, and lost with it."""
    return location_of(run) == _IN_POD


def in_claim(run: Run) -> bool:
    return location_of(run).startswith(CLAIM)


def described(run: Run, snapshot: str) -> str:
    """The address of a snapshot, as text."""
    try:
        location = location_of(run)
    except (run_files.DamagedRun, run_files.NewerRun) as error:
        return f"where is unknown ({error})"
    if location == _IN_POD:
        return "in its captain's pod"
    address = f"{location.rstrip('/')}/{run.name}/{snapshot}"
    return f"{address} on its cluster" if location.startswith(CLAIM) else address


def open_source(run: Run, patience: float = PATIENCE_S) -> Source:
    """Open snapshots in a folder or a bucket. Sends no request yet. `patience`: seconds for one request."""
    location = location_of(run)
    settings = store_settings.settings_of(run.folder, location, run.endpoint) if is_bucket(location) else None
    return source_of(run.name, location, run.folder, settings, patience)


def source_of(
    run: str,
    location: str,
    folder: Path | None,
    settings: Mapping[str, str] | None = None,
    patience: float = PATIENCE_S,
) -> Source:
    """`folder`: the run's folder, if this machine knows the run. `settings`: variables for access to the bucket."""
    from paceline.storage.snapshots.repository import SnapshotRepository
    from paceline.storage.stored_run_files import StoredRunFiles
    from paceline.storage.stores.locations import open_store

    store, transfers = open_store(location, patience, settings), open_store(location, None, settings)
    reader, slow_reader = SnapshotRepository(store, run), SnapshotRepository(transfers, run)
    return Source(run, location, reader, slow_reader, StoredRunFiles(store, run, transfers), folder)


def origin_of(folder: Path) -> str:
    """The address from which a run known on this machine was started; empty: none."""
    return str(run_folders.plan(folder).get("snapshots", {}).get("origin", ""))


def holds_committed(run: Run) -> bool:
    """Whether the run's own folder contains a committed snapshot, which would be deleted with it. A folder that cannot
    be read is an error: it must not be treated as empty."""
    try:
        with os.scandir(run.folder / "snapshots" / run.name) as entries:
            return any(is_of_a_run(entry.name) and (Path(entry.path) / "manifest.json").exists() for entry in entries)
    except (FileNotFoundError, NotADirectoryError):
        return False


def is_of_a_run(name: str) -> bool:
    from paceline.storage import stored_run_files, tensorboard_event_files
    from paceline.storage.snapshots.manifest import parse_id

    folders = ("generations", stored_run_files.FOLDER, tensorboard_event_files.FOLDER)
    return name in folders or parse_id(name) is not None
