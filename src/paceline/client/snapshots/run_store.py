"""Opens the snapshots of a run in a folder, a bucket or a cluster, by run or by location."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import Argument, Call
from paceline.plan import CLAIM, NAME
from paceline.view.files import run_folders
from paceline.view.files.run_files import DamagedRun, NewerRun
from paceline.view.files.run_folders import Run
from paceline.view.snapshots import store_settings
from paceline.view.snapshots.snapshot_locations import (
    PATIENCE_S,
    InvalidLocation,
    OutOfReach,
    Source,
    in_claim,
    in_pod,
    is_of_a_run,
    location_of,
    open_source,
    source_of,
)

if TYPE_CHECKING:
    from paceline.storage.stores.protocol import Store


def open_run(run: Run, note: Callable[[str], None] = lambda text: None) -> Source:
    """Does not contact the store yet. `note`: called if the store takes long to respond."""
    return _open_through_pod(run, location_of(run), note) if in_pod(run) or in_claim(run) else open_source(run)


def open_location(address: str, note: Callable[[str], None] = lambda text: None, endpoint: str = "") -> Source:
    """`address`: `s3://bucket/path/RUN` or `/folder/RUN`, of a run started on any machine. Checks that it exists.
    `endpoint`: the server of the bucket, as chosen by the user."""
    from paceline.storage.stores.locations import open_store

    location, run = _split(address)
    if location.startswith(CLAIM):
        return open_run(Run(run, _folder_for_claim(location, run), endpoint), note)
    settings = store_settings.chosen(location, endpoint)
    store = open_store(location, PATIENCE_S, settings)
    folders = store.folders(f"{run}/")
    if not any(is_of_a_run(name) for name in folders):
        raise _not_a_run(store, location, run, folders)
    return source_of(run, location, _known_folder(location, run), settings)


def _open_through_pod(run: Run, location: str, note: Callable[[str], None]) -> Source:
    from paceline.backends.kubernetes.api.cluster import Refused, Unreachable
    from paceline.backends.kubernetes.runs.snapshot_reader import SnapshotPod
    from paceline.storage.snapshots.repository import SnapshotRepository
    from paceline.storage.stored_run_files import StoredRunFiles
    from paceline.storage.stores.peer_client import PeerStore, Transport

    reach = SnapshotPod(run.folder, note)

    def dial() -> Transport:
        try:
            return reach.dial()
        except (Refused, Unreachable) as error:
            raise OutOfReach(str(error)) from None

    peer = PeerStore(dial, location)
    reader = SnapshotRepository(peer, run.name)

    def close() -> None:
        peer.close()
        reach.close()

    return Source(run.name, location, reader, reader, StoredRunFiles(peer, run.name), run.folder, close)


def delete_all(source: Source) -> None:
    """Deletes what belongs to the run at its location, and nothing else."""
    from paceline.storage.stores.protocol import StoreError

    folder = Path(source.address)
    is_local = source.location.startswith("/")
    if is_local and folder.is_symlink():
        raise StoreError(f"{folder} is a symbolic link: its target is not deleted")
    source.reader.delete_all()
    if not is_local or not folder.is_dir():
        return
    import shutil

    for entry in folder.iterdir():  # left by crashes, under names unknown to the store
        if is_of_a_run(entry.name) and entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
    if not any(folder.iterdir()):
        folder.rmdir()


def _split(address: str) -> tuple[str, str]:
    """The location of the snapshots and the run id."""
    scheme, separator, bucket_path = address.rpartition("://")
    path = bucket_path.rstrip("/") if separator else os.path.abspath(os.path.expanduser(address))  # noqa: PTH100, PTH111
    location, _, run = path.rpartition("/")
    if separator and not location:
        raise InvalidLocation(f"{address} does not name a run", remedy=f"write {scheme}://bucket/path/RUN")
    location = f"{scheme}{separator}{location}" if separator else location or "/"
    from paceline.storage.snapshots.manifest import parse_id

    if parse_id(run) is not None:
        raise InvalidLocation(
            f"{address} is a snapshot, not a run", remedy=f"write the run, then the snapshot: {location} {run}"
        )
    if not re.fullmatch(NAME, run):
        raise InvalidLocation(f"{address} does not name a run: {run!r} is not a valid run id")
    return location, run


def _not_a_run(store: Store, location: str, run: str, folders: list[str]) -> InvalidLocation:
    runs = [name for name in folders if any(is_of_a_run(each) for each in store.folders(f"{run}/{name}/"))]
    address = f"{location.rstrip('/')}/{run}"
    if runs:
        names = ", ".join(runs[:5]) + (", ..." if len(runs) > 5 else "")
        return InvalidLocation(f"{address} contains runs but is not one: {names}", remedy=f"write {address}/{runs[0]}")
    from difflib import get_close_matches

    near = get_close_matches(run, store.folders(""), n=1, cutoff=0.5)
    remedy = f"did you mean {near[0]!r}?" if near else ""
    return InvalidLocation(f"no snapshots of a run {run!r} at {location}", remedy=remedy)


def _folder_for_claim(location: str, run: str) -> Path:
    folder = _known_folder(location, run)
    if folder is None:
        find = Call("get", arguments=(Argument("run", run), Argument("on", "kubernetes")))
        raise InvalidLocation(
            f"{location} is a volume claim on a cluster, and this machine knows no run {run} with snapshots there",
            remedy=("`", find, "` finds the run on the cluster"),
        )
    return folder


def _known_folder(location: str, run: str) -> Path | None:
    """The folder of the run, if this machine knows it and its snapshots are at `location`."""
    folder = run_folders.runs_folder() / run
    try:
        return folder if folder.is_dir() and location_of(Run(run, folder)) == location else None
    except (DamagedRun, NewerRun):
        return None
