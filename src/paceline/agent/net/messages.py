"""Messages between captain and members: every field is validated, in both directions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Union, cast

from paceline.agent import generation_numbers
from paceline.agent.captain import events as ev
from paceline.agent.captain import instructions as ins
from paceline.agent.captain.events import GenerationRecord
from paceline.agent.fast_dataclass import record
from paceline.agent.net.codec import (
    Codec,
    HostPort,
    Seconds,
    dispensable,
    mapping_of,
    optional,
    positional_reader_of,
    read_integers,
    reader_of,
    sequence_of,
)
from paceline.agent.net.frames import PROTOCOL, Message, WireError
from paceline.agent.profile_messages import ProfileTaken, TakeProfile
from paceline.agent.stack_messages import Frame, StacksTaken, TakeStacks, ThreadSamples
from paceline.agent.transfers.requests import Failure
from paceline.storage.snapshots.manifest import File, SnapshotId, pair

FILES_AT_ONCE = 500  # files of a snapshot in one message: even with the longest paths, this is below the size limit
MOST_GPUS = 64  # of a host

# ---- from members


_TASK_RESOURCES = {"Mapping[str, TaskResources]": mapping_of(reader_of(ev.TaskResources))}
_GPU_RESOURCES = {"tuple[GpuResources, ...]": sequence_of(reader_of(ev.GpuResources), MOST_GPUS)}
_READERS = {
    "Failure | None": optional(reader_of(Failure)),
    "TaskExit": reader_of(ev.TaskExit),
    "StartTimes": reader_of(ev.StartTimes),
    "tuple[TaskExit, ...]": sequence_of(reader_of(ev.TaskExit)),
    "tuple[PartSaved, ...]": sequence_of(reader_of(ev.PartSaved)),
    "tuple[SnapshotEvaluated, ...]": sequence_of(reader_of(ev.SnapshotEvaluated)),
    "tuple[GenerationRecord, ...]": sequence_of(reader_of(ev.GenerationRecord)),
    "tuple[MetricNotFinite, ...]": sequence_of(reader_of(ev.MetricNotFinite)),
    "Mapping[str, TaskProgress]": mapping_of(positional_reader_of(ev.TaskProgress)),
    "HostResources | None": dispensable(reader_of(ev.HostResources, {**_TASK_RESOURCES, **_GPU_RESOURCES})),
    "tuple[Frame, ...]": sequence_of(positional_reader_of(Frame)),
    "tuple[tuple[int, ...], ...]": sequence_of(read_integers),
    "tuple[ThreadSamples, ...]": sequence_of(reader_of(ThreadSamples)),
}
_FROM_MEMBERS = Codec(
    {
        "beat": ev.Heartbeat,
        "started": ev.TaskStarted,
        "measured": ev.StartMeasured,
        "not-finite": ev.MetricNotFinite,
        "spare": ev.SpareReady,
        "exited": ev.TaskExited,
        "ended": ev.TasksEnded,
        "saved": ev.PartSaved,
        "stored": ev.PartStored,
        "prepared": ev.HostPrepared,
        "prefetched": ev.SnapshotPrefetched,
        "evaluated": ev.SnapshotEvaluated,
        "follow": ev.EvaluatorWaiting,
        "ingest": ev.IngestProgress,
        "leaving": ev.HostLeaving,
        "save": ev.SaveRequested,
        "agree": ev.AgreementReply,
        "said": ev.Notice,
        "stacks": StacksTaken,
        "profile": ProfileTaken,
        "left": ev.MemberLeft,
    },
    readers=_READERS,
    implied=("host",),
)
_JOIN = Codec({"join": ev.MemberJoined}, readers=_READERS)


def join_message(run: str, joined: ev.MemberJoined) -> Message:
    return {**_JOIN.encode(joined), "protocol": PROTOCOL, "run": run}


def read_join(message: Message, run: str) -> ev.MemberJoined:
    if message.get("protocol") != PROTOCOL:
        raise WireError(f"protocol {message.get('protocol')!r} is not supported, only {PROTOCOL}")
    if message.get("run") != run:
        raise WireError(f"this captain belongs to run {run}")
    joined: ev.MemberJoined | None = _JOIN.decode(message)
    if joined is None:
        raise WireError("not a join message")
    if not 0 <= joined.generation <= generation_numbers.MOST:
        raise WireError(f"generation {joined.generation} is not a number from 0 to {generation_numbers.MOST}")
    _check_records(joined.records)
    held = tuple(replace(each, host=joined.host) for each in joined.held)
    evaluated = tuple(replace(each, host=joined.host) for each in joined.evaluated)
    not_finite = tuple(replace(each, host=joined.host) for each in joined.not_finite)
    return replace(joined, held=held, evaluated=evaluated, not_finite=not_finite)


def read_records(value: object) -> tuple[GenerationRecord, ...]:
    """As `records_to_list` returned them; a member keeps them in a file."""
    records = cast("tuple[GenerationRecord, ...]", _READERS["tuple[GenerationRecord, ...]"](value))
    _check_records(records)
    return records


def _check_records(records: tuple[GenerationRecord, ...]) -> None:
    for each in records:
        is_number = 0 < each.generation <= generation_numbers.MOST
        if not is_number or (each.parent and each.parent.generation >= each.generation):
            raise WireError(f"generation {each.generation} has no valid record")


def records_to_list(records: tuple[GenerationRecord, ...]) -> list[Message]:
    return [{**vars(each), "parent": None if each.parent is None else pair(each.parent)} for each in records]


# The captain decides nothing by stacks and profiles of tasks, and passes them on to the user who has requested them.
MemberMessage = Union[ev.MemberEvent, StacksTaken, ProfileTaken]


def member_message(message: MemberMessage) -> Message:
    return _FROM_MEMBERS.encode(message)


def read_member(message: Message, host: str) -> MemberMessage | None:
    """A message from a joined member; None for an unknown kind (a newer agent may send more kinds)."""
    return cast("MemberMessage | None", _FROM_MEMBERS.decode(message, host=host))


def stored_messages(host: str, task: str, snapshot: SnapshotId, files: tuple[File, ...]) -> Iterator[ev.PartStored]:
    """The messages that together list all files."""
    for at in range(0, max(1, len(files)), FILES_AT_ONCE):
        more = at + FILES_AT_ONCE < len(files)
        yield ev.PartStored(host, task, snapshot, files[at : at + FILES_AT_ONCE], at=at, more=more)


# ---- from the captain


@record
class Welcome:
    """The member has joined the run, and has a lease."""

    lease: Seconds
    beat: Seconds


@record
class Wait:
    """Another instance of this host has not left yet."""


@record
class HeartbeatReply:
    n: int


@record
class Roster:
    """The addresses of the tasks of a generation: task -> address."""

    generation: int
    roster: Mapping[str, HostPort]


@record
class StartOnHost:
    generation: int
    restarts: int
    data: str
    restore: str | None
    tasks: Mapping[str, int]  # task -> attempt
    records: tuple[GenerationRecord, ...] = ()  # not in the store yet
    mlflow_run: str = ""  # the id of the run of MLflow; empty: none is known


CaptainMessage = Union[
    Welcome, Wait, HeartbeatReply, Roster, StartOnHost, TakeStacks, TakeProfile, ins.MemberInstruction
]  # fmt: skip

_FROM_CAPTAIN = Codec(
    {
        "welcome": Welcome,
        "wait": Wait,
        "beat": HeartbeatReply,
        "roster": Roster,
        "start": StartOnHost,
        "stacks": TakeStacks,
        "profile": TakeProfile,
        "end": ins.EndTasks,
        "finish": ins.DismissMember,
        "send": ins.StorePart,
        "drop": ins.DropPart,
        "prepare": ins.PrepareHost,
        "prefetch": ins.PrefetchSnapshot,
        "committed": ins.AnnounceCommit,
        "evaluate": ins.EvaluateSnapshot,
        "noted": ins.AcknowledgeEvaluation,
        "agree": ins.AgreeOnStep,
        "farewell": ins.ReleaseHost,
        "spare": ins.PrepareSpare,
    },
    readers={**_READERS, "Mapping[str, Any]": mapping_of(lambda value: value)},
    implied=("host",),
)


def captain_message(message: CaptainMessage) -> Message:
    return _FROM_CAPTAIN.encode(message)


def read_captain(message: Message, host: str) -> CaptainMessage | None:
    """A message from the captain; None for an unknown kind."""
    return cast("CaptainMessage | None", _FROM_CAPTAIN.decode(message, host=host))
