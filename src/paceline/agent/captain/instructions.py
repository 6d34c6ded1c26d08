"""Instructions from the captain, carried out by its process or by a member."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any, Union

from paceline.agent.captain.events import GenerationRecord
from paceline.agent.fast_dataclass import record
from paceline.agent.net.codec import Seconds
from paceline.agent.transfers.requests import Request
from paceline.storage.snapshots.manifest import SnapshotId

# How tasks end. TERMINATE: SIGTERM, then SIGKILL. INTERRUPT: SIGINT before these, as Ctrl-C would send it. ABORT: after
# they have written their stack traces.
KILL, TERMINATE, INTERRUPT, ABORT = "kill", "term", "int", "abort"
RELEASED = "released"  # status of a member that is dismissed while the run continues without its host

# ---- for members


@record
class EndTasks:
    host: str
    tasks: Mapping[str, int]  # task -> attempt
    how: str
    grace: Seconds = 0.0


@record
class DismissMember:
    """The run has ended or is paused, another instance has replaced the host, or the host is no longer wanted."""

    host: str
    status: str
    reason: str


@record
class StorePart:
    """Send the files that a task saved to the store. `anew`: send them again, because the store has lost them."""

    host: str
    task: str
    snapshot: SnapshotId
    anew: bool = False


@record
class DropPart:
    """Delete the copy of a snapshot on a host: it is no longer needed."""

    host: str
    task: str
    snapshot: SnapshotId


@record
class PrepareHost:
    """Get the snapshot that the next generation resumes from. `sources`: task -> address of the host that has its part;
    empty if it is on this host. Without sources: from the store."""

    host: str
    snapshot: SnapshotId | None
    generation: int
    sources: Mapping[str, str] = field(default_factory=dict)


@record
class PrefetchSnapshot:
    """Fetch the parts of a snapshot that this host lacks, so that a restart need not; stop fetching another one.
    `sources`: as above, without the parts on this host; none: only stop."""

    host: str
    snapshot: SnapshotId
    sources: Mapping[str, str]


@record
class AnnounceCommit:
    """For evaluators that do not request snapshots but watch for them."""

    host: str
    snapshot: SnapshotId


@record
class EvaluateSnapshot:
    """`snapshot` None: no more snapshots will follow."""

    host: str
    task: str
    snapshot: SnapshotId | None


@record
class AcknowledgeEvaluation:
    host: str
    snapshot: SnapshotId


@record
class AgreeOnStep:
    """A message to tasks that must save at the same step: see paceline.runtime.group_save."""

    host: str
    tasks: tuple[str, ...]
    words: Mapping[str, Any]


@record
class ReleaseHost:
    """Let a host shut down: the snapshot of its group is committed."""

    host: str


@record
class PrepareSpare:
    """A host on which no task has run gets the record of what the program imports, so that it can start a spare."""

    host: str
    imports: str


MemberInstruction = Union[
    EndTasks, DismissMember, StorePart, DropPart, PrepareHost, PrefetchSnapshot, AnnounceCommit, EvaluateSnapshot,
    AcknowledgeEvaluation, AgreeOnStep, ReleaseHost, PrepareSpare,
]  # fmt: skip


# ---- for the captain's process


@record
class StartTasks:
    """Start attempts of tasks on their hosts. All hosts get the same `roster`."""

    generation: int
    restarts: int
    roster: Mapping[str, str]
    restore: SnapshotId | None
    hosts: Mapping[str, Mapping[str, int]]  # host -> task -> attempt
    data: str = ""  # location of the ingested data
    records: tuple[GenerationRecord, ...] = ()  # not in the store yet


@record
class AskStore:
    """Send a request to the store. Its answer is a StoreAnswered event with the same ticket."""

    request: Request
    ticket: int = 0


@record
class StepDown:
    """Exit, because another captain leads the run."""

    reason: str


@record
class EmitEvent:
    """Write a line to events.jsonl."""

    kind: str
    generation: int
    fields: Mapping[str, Any]


@record
class EndRun:
    """Write the report and exit: the run has ended."""

    status: str
    reason: str
    cause: str | None


Instruction = Union[MemberInstruction, StartTasks, AskStore, StepDown, EmitEvent, EndRun]
Instructions = list[Instruction]
