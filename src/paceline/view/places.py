"""Where the snapshots of a run are: as its plan says, or as a person has written it; opened to be read."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from paceline.plan import CAPTAIN
from paceline.view import runs
from paceline.view.runs import Run

if TYPE_CHECKING:
    from paceline.storage.evaluation import Evaluation
    from paceline.storage.kept import Kept
    from paceline.storage.manifest import File, Id, Manifest
    from paceline.storage.snapshots import Known
    from paceline.storage.store import Store, Wanted

PATIENCE_S = 8.0  # for one answer of a store, with all its tries: a person waits
_CLAIM = "claim://"
_IN_POD = "captain:/paceline/run/snapshots"  # as `kubectl cp` writes a folder of a pod
_BUCKET = re.compile(r"(s3|gs|az)://")
_RUN = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_SETTINGS = ("AWS_", "GOOGLE_", "AZURE_")


class NoPlace(Exception):
    """What was written leads to no run's snapshots; the message says what does."""


class OutOfReach(Exception):
    """The snapshots are where nobody can get at them now; the message says where, and what to do."""


class NoClaim(OutOfReach):
    """The volume claim is gone, with all that was in it."""


class Reader(Protocol):
    """The snapshots of one run, wherever they are: storage.Snapshots reads those in a folder or a bucket."""

    def known(self) -> Known: ...

    def manifest(self, id: Id) -> Manifest: ...

    def evaluation(self, id: Id) -> Evaluation | None: ...

    def check(self, id: Id, task: str, file: File, still: Wanted) -> None:
        """Reads every byte of a file; Damaged where it is not what was committed."""

    def fetch(self, wanted: Manifest, folder: str, still: Wanted) -> int:
        """Into a new folder, which has its name only when all of it was verified."""

    def delete(self, id: Id) -> None: ...

    def delete_all(self) -> None: ...


@dataclass(frozen=True)
class Source:
    run: str
    place: str  # <place>/<run>/ is what belongs to the run
    reader: Reader  # answers soon, or fails soon
    transfers: Reader  # the same for what takes its time: a slow line is no failure
    kept: Kept  # what it wrote besides
    folder: Path | None = None  # where this machine keeps the run, if it knows it
    close: Callable[[], None] = lambda: None  # when nobody asks any more

    @property
    def where(self) -> str:
        return f"{self.place.rstrip('/')}/{self.run}"

    @property
    def alive(self) -> bool:
        """As far as this machine can tell."""
        return self.folder is not None and runs.alive(self.folder)

    def doubt(self) -> str:
        """Why it may still be alive, where this machine does not know; empty: it is not, or this machine knows."""
        if self.folder is not None or self.kept.ended(CAPTAIN):
            return ""
        return f"nothing at {self.where} says that {self.run} has ended: it may still train on another machine"


def is_bucket(place: str) -> bool:
    return bool(_BUCKET.match(place))


def is_place(written: str) -> bool:
    """Ids of runs have no slash.

    >>> is_place("digits-3f9a"), is_place("s3://training/digits-3f9a"), is_place("./digits-3f9a")
    (False, True, True)
    """
    return "/" in written or written in (".", "..", "~")


def place_of(run: Run) -> str:
    """Where a run that this machine knows commits to."""
    to = planned_place(run.folder)
    if runs.on_cluster(run.folder):
        return to or _IN_POD
    return to if to.startswith("/") or is_bucket(to) else str(run.folder / "snapshots")


def in_pod(run: Run) -> bool:
    """Whether they are in its captain's pod, which nothing outlives."""
    return place_of(run) == _IN_POD


def in_claim(run: Run) -> bool:
    return place_of(run).startswith(_CLAIM)


def described(run: Run, snapshot: str) -> str:
    """Where that snapshot is, in words."""
    if in_pod(run):
        return "in its captain's pod"
    where = f"{place_of(run).rstrip('/')}/{run.name}/{snapshot}"
    return f"{where} on its cluster" if in_claim(run) else where


def of_run(run: Run, note: Callable[[str], None] = lambda text: None) -> Source:
    """Nothing is asked of the place yet. `note`: told where it takes its time until that answers."""
    place = place_of(run)
    if in_pod(run) or in_claim(run):
        return _through_a_pod(run, place, note)
    if is_bucket(place):
        os.environ.update(_settings(run.folder))
    from paceline.storage.places import open_store

    return _source(run.name, place, open_store(place, PATIENCE_S), run.folder)


def at_place(written: str, note: Callable[[str], None] = lambda text: None) -> Source:
    """`s3://bucket/path/RUN` or `/folder/RUN`: of a run of any machine. Looks whether it is there."""
    from paceline.storage.places import open_store

    place, run = _split(written)
    if place.startswith(_CLAIM):
        return of_run(Run(run, _known_to_claim(place, run)), note)
    store = open_store(place, PATIENCE_S)
    inside = store.folders(f"{run}/")
    if not any(_of_a_run(name) for name in inside):
        raise NoPlace(_none_there(store, place, run, inside))
    return _source(run, place, store, _known_here(place, run))


def _source(run: str, place: str, store: Store, folder: Path | None) -> Source:
    from paceline.storage.kept import Kept
    from paceline.storage.places import open_store
    from paceline.storage.snapshots import Snapshots

    transfers = open_store(place)
    return Source(
        run, place, Snapshots(store, run), Snapshots(transfers, run), Kept(store, run, transfers), folder
    )  # fmt: skip


def _through_a_pod(run: Run, place: str, note: Callable[[str], None]) -> Source:
    from paceline.backends.kubernetes.cluster import Refused, Unreachable
    from paceline.backends.kubernetes.reach import Reach
    from paceline.storage.kept import Kept
    from paceline.storage.peer import Line, Peer
    from paceline.storage.snapshots import Snapshots

    reach = Reach(run.folder, note)

    def dial() -> Line:
        try:
            return reach.dial()
        except (Refused, Unreachable) as error:
            raise OutOfReach(str(error)) from None

    peer = Peer(dial, place)
    reader = Snapshots(peer, run.name)

    def close() -> None:
        peer.close()
        reach.close()

    return Source(run.name, place, reader, reader, Kept(peer, run.name), run.folder, close)


def delete_all(source: Source) -> None:
    """What belongs to the run at its place, and nothing else."""
    from paceline.storage.store import StoreError

    folder = Path(source.where)
    here = source.place.startswith("/")
    if here and folder.is_symlink():
        raise StoreError(f"{folder} is a link: what it leads to is not deleted")
    source.reader.delete_all()
    if not here or not folder.is_dir():
        return
    import shutil

    for left in folder.iterdir():  # what crashes have left there has no name that a store knows
        if _of_a_run(left.name) and left.is_dir() and not left.is_symlink():
            shutil.rmtree(left, ignore_errors=True)
    if not any(folder.iterdir()):
        folder.rmdir()


def holds_committed(run: Run) -> bool:
    """Whether a committed snapshot is in the run's own folder, which would be deleted with it. A folder that cannot be
    read is an error: nobody may take it for an empty one."""
    try:
        with os.scandir(run.folder / "snapshots" / run.name) as entries:
            return any(_of_a_run(entry.name) and (Path(entry.path) / "manifest.json").exists() for entry in entries)
    except (FileNotFoundError, NotADirectoryError):
        return False


def planned_place(folder: Path) -> str:
    planned = (runs.read_object(folder / "plan.json") or {}).get("snapshots")
    to = planned.get("to") if isinstance(planned, dict) else None
    return to if isinstance(to, str) else ""


def _settings(folder: Path) -> dict[str, str]:
    """What the job itself says of its bucket: agents read it from there, too."""
    roles = (runs.read_object(folder / "plan.json") or {}).get("roles")
    given: Any = next((role.get("env") for role in roles or [] if isinstance(role, dict) and role.get("decides")), {})
    named = given.items() if isinstance(given, dict) else ()
    return {str(name): str(value) for name, value in named if str(name).startswith(_SETTINGS)}


def _split(written: str) -> tuple[str, str]:
    scheme, separator, rest = written.rpartition("://")
    path = rest.rstrip("/") if separator else os.path.abspath(os.path.expanduser(written))  # noqa: PTH100, PTH111
    place, _, run = path.rpartition("/")
    if separator and not place:
        raise NoPlace(f"{written} names no run: write {scheme}://bucket/path/RUN")
    place = f"{scheme}{separator}{place}" if separator else place or "/"
    from paceline.storage.manifest import parse_id

    if parse_id(run) is not None:
        raise NoPlace(f"{written} is a snapshot: write the run first, then the snapshot: {place} {run}")
    if not _RUN.fullmatch(run):
        raise NoPlace(f"{written} names no run: {run!r} cannot be a run's id")
    return place, run


def _of_a_run(name: str) -> bool:
    from paceline.storage import curves, kept
    from paceline.storage.manifest import parse_id

    return name in ("generations", kept.FOLDER, curves.FOLDER) or parse_id(name) is not None


def _none_there(store: Store, place: str, run: str, inside: list[str]) -> str:
    below = [name for name in inside if any(_of_a_run(each) for each in store.folders(f"{run}/{name}/"))]
    where = f"{place.rstrip('/')}/{run}"
    if below:
        more = ", ..." if len(below) > 5 else ""
        return f"{where} holds runs and is none: {', '.join(below[:5])}{more}; write {where}/{below[0]}"
    from difflib import get_close_matches

    near = get_close_matches(run, store.folders(""), n=1, cutoff=0.5)
    return f"there are no snapshots of a run {run!r} at {place}" + (f"; did you mean {near[0]!r}?" if near else "")


def _known_to_claim(place: str, run: str) -> Path:
    folder = _known_here(place, run)
    if folder is None:
        raise NoPlace(
            f"{place} is a volume claim of a cluster, and {run} is no run that this machine knows to have snapshots "
            f"there: `paceline snapshots ls {run} --on kubernetes` looks for the run itself"
        )
    return folder


def _known_here(place: str, run: str) -> Path | None:
    """The folder of that run, if it is one of this machine."""
    folder = runs.runs_folder() / run
    return folder if folder.is_dir() and place_of(Run(run, folder)) == place else None
