"""Requests that an agent sends to its porter, the answers, and their JSON form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any, Union, cast

from paceline.agent.fast_dataclass import record
from paceline.agent.net.codec import Codec, mapping_of, read_file, sequence_of
from paceline.agent.net.frames import WireError
from paceline.storage.snapshots.manifest import File, SnapshotId
from paceline.storage.stored_run_files import Ranges
from paceline.storage.watched.folder_contents import Signature

MOST_FILES = 1_000_000  # of a snapshot; its manifest has room for fewer
LongText = str
Metrics = Mapping[str, float]
Signatures = Mapping[str, Signature]  # path in a folder -> what changes when the file does

# Kinds of failures. HERE: an error of this machine, not of the store.
DAMAGED, NEWER, SUPERSEDED, UNFIT, UNWANTED, STORE, LATER, HERE = (
    "damaged", "newer", "superseded", "unfit", "unwanted", "store", "later", "here"
)  # fmt: skip


# ---- requests of the captain


@record
class ListSnapshots:
    """List the contents of the store. `metric`: include its value for each snapshot that has one."""

    metric: str | None = None
    evaluations: bool = False  # include the metrics of evaluators


@record
class BeginGeneration:
    """Write the record of a generation. `seen`: the current snapshots when `parent` was chosen."""

    generation: int
    parent: SnapshotId | None
    seen: tuple[SnapshotId, ...] = ()
    by: str = ""  # the requesting captain, which may repeat its request


@record
class CommitSnapshot:
    """`generation`: the newest that the captain knows; if the store has a later one, another captain leads the run."""

    snapshot: SnapshotId
    manifest: LongText
    generation: int = 0  # 0: that of the snapshot


@record
class RecordEvaluation:
    snapshot: SnapshotId
    task: str
    metrics: Metrics
    at: str


@record
class DeleteSnapshot:
    """`generation`: the newest that the captain knows. If the store has a later one, nothing is deleted: this captain
    may have been frozen since it asked."""

    snapshot: SnapshotId
    generation: int


@record
class DeleteUncommitted:
    """Delete what was sent of a snapshot that will never be committed; if it is committed, nothing is deleted.
    `generation`: as above."""

    snapshot: SnapshotId
    generation: int


@record
class SweepGenerations:
    """Delete files of earlier generations that no manifest lists, except those of a snapshot that may be committed."""

    generation: int
    parent: SnapshotId | None = None


@record
class CheckSnapshot:
    """Read all files of a committed snapshot in the store, and compare them with its manifest."""

    snapshot: SnapshotId


@record
class AdoptOrigin:
    """Copy the snapshot that the run starts from into its own store."""


# ---- requests of members


@record
class SendPart:
    snapshot: SnapshotId
    task: str
    folder: str


@record
class FetchSnapshot:
    """Fetch a snapshot to a new folder and verify it. `held`: folders whose files need not be fetched."""

    snapshot: SnapshotId
    folder: str
    held: tuple[str, ...] = ()


@record
class LinkSnapshot:
    """Build a folder to resume from out of the parts that hosts have; this host fetches those that it lacks. Files are
    linked, not copied. `sources`: task -> address of the host that has its part; empty if it is below one of `held`.
    `in_memory`: where to build it, with a link at `folder`, if all parts are in memory, below the first of `held`;
    empty: never."""

    snapshot: SnapshotId
    folder: str
    held: tuple[str, ...]
    sources: Mapping[str, str]
    in_memory: str = ""


@record
class FetchParts:
    """Fetch parts of a snapshot from other hosts in advance, so that `LinkSnapshot` finds them. `sources`: task ->
    address."""

    snapshot: SnapshotId
    sources: Mapping[str, str]


@record
class MoveToDisk:
    """Move a folder from memory to disk. `link`: leads to it."""

    link: str


@record
class RestoreWatched:
    """Restore a snapshot to the folder to which a program writes its own checkpoints."""

    folder: str
    own: str
    copies: str
    run: str
    host: str
    generation: int
    source: str  # empty: no snapshot
    inner: tuple[str, ...]


@record
class CaptureWatched:
    """Copy the folder to which a program writes its own checkpoints."""

    folder: str
    own: str
    copies: str
    to: str
    metrics: Metrics
    leader: str
    doubtful: Signatures


@record
class RemoveFolders:
    """Delete folders on this machine."""

    folders: tuple[str, ...] = ()


@record
class UploadLogs:
    piece: str
    ranges: Ranges
    scratch: str


@record
class FoldEvents:
    """Replace the oldest pieces of this host, if there are too many. `scratch`: path of a temporary file."""

    host: str
    scratch: str


@record
class TrimCurves:
    """Keep one curve per tag in TensorBoard's event files. `host`: update its copy in the store, if not empty."""

    folder: str
    notes: str
    host: str
    scratch: str
    last: bool = False


@record
class KeepCompiled:
    """Limit and sync what frameworks have compiled. `host`: store it under this name, if not empty."""

    root: str  # of all such folders on this machine
    folder: str
    host: str
    scratch: str


@record
class FetchCompiled:
    """Fetch what an earlier instance of the host has stored."""

    folder: str
    host: str
    scratch: str


@record
class Cancel:
    """Cancel a request: it is answered with UNWANTED."""

    number: int


Request = Union[
    ListSnapshots, BeginGeneration, CommitSnapshot, RecordEvaluation, DeleteSnapshot, DeleteUncommitted,
    SweepGenerations, CheckSnapshot, AdoptOrigin, SendPart, FetchSnapshot, LinkSnapshot, FetchParts, MoveToDisk,
    RestoreWatched, CaptureWatched, RemoveFolders, UploadLogs, FoldEvents, TrimCurves, KeepCompiled, FetchCompiled,
    Cancel,
]  # fmt: skip


# ---- answers


@record
class Failure:
    """`passing`: the same request may succeed later. `reason`: why, without the file or object; empty: see `text`."""

    kind: str
    text: str
    passing: bool
    reason: str = ""


@record
class Done:
    pass


@record
class SnapshotList:
    generation: int
    counted: tuple[SnapshotId, ...]  # newest first
    committed: tuple[SnapshotId, ...]
    metrics: Mapping[SnapshotId, float] = field(default_factory=dict)
    evaluations: Mapping[SnapshotId, Metrics] = field(default_factory=dict)


@record
class GenerationBegun:
    """`late`: the current snapshots, newest first, if more were committed since the parent was chosen; else empty."""

    late: tuple[SnapshotId, ...] = ()


@record
class EvaluationRecorded:
    """The metrics in effect: those of the first evaluation, if a snapshot was evaluated twice."""

    metrics: Metrics


@record
class OriginAdopted:
    snapshot: SnapshotId
    origin: str
    size: int
    passed: tuple[str, ...] = ()  # why newer snapshots were skipped


@record
class PartSent:
    files: tuple[File, ...]


@record
class SnapshotFetched:
    size: int
    received: int  # bytes that were not on this machine before


@record
class WatchedRestored:
    kept: str  # where the previous contents of the folder are now; empty: there were none
    doubtful: Signatures


@record
class WatchedCaptured:
    captured: bool


Answer = Union[
    Failure, Done, SnapshotList, GenerationBegun, EvaluationRecorded, OriginAdopted, PartSent, SnapshotFetched,
    WatchedRestored, WatchedCaptured,
]  # fmt: skip


# ---- as JSON


def _range(value: Any) -> tuple[str, int, int]:
    path, begin, end = value
    return str(path), int(begin), int(end)


_READERS = {
    "Ranges": mapping_of(_range),
    "Signatures": mapping_of(sequence_of(int)),
    "tuple[File, ...]": sequence_of(read_file, MOST_FILES),
}
_REQUESTS = Codec(
    {
        "known": ListSnapshots, "begin": BeginGeneration, "commit": CommitSnapshot, "evaluated": RecordEvaluation,
        "delete": DeleteSnapshot, "delete-uncommitted": DeleteUncommitted, "sweep": SweepGenerations,
        "check": CheckSnapshot, "adopt": AdoptOrigin, "send": SendPart,
        "fetch": FetchSnapshot, "link": LinkSnapshot, "fetch-parts": FetchParts, "to-disk": MoveToDisk,
        "put": RestoreWatched, "take": CaptureWatched, "remove": RemoveFolders, "keep": UploadLogs,
        "fold": FoldEvents,
        "curves": TrimCurves, "compiled": KeepCompiled, "fetch-compiled": FetchCompiled, "forget": Cancel,
    },
    "do", _READERS,
)  # fmt: skip
_ANSWERS = Codec({each.__name__: each for each in Answer.__args__}, "is", _READERS)  # type: ignore[attr-defined]


def request_to_object(request: Request) -> dict[str, Any]:
    return _REQUESTS.encode(request)


def read_request(data: Mapping[str, Any]) -> Request:
    request = _REQUESTS.decode(data)
    if request is None:
        raise WireError(f"unknown request {data['do']!r}")
    return cast(Request, request)


def answer_to_object(answer: Answer) -> dict[str, Any]:
    return _ANSWERS.encode(answer)


def read_answer(data: Mapping[str, Any]) -> Answer:
    answer = _ANSWERS.decode(data)
    if answer is None:
        raise WireError(f"unknown answer {data['is']!r}")
    return cast(Answer, answer)
