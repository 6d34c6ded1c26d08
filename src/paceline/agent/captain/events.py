"""Events that the captain handles: from members, from the store, from the clock. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any, Union

from paceline.agent.fast_dataclass import record
from paceline.agent.net.codec import Amount, DataLocation, HostPort, NotFiniteValue, PartCount, Seconds, ServedAt, Share
from paceline.agent.transfers.requests import Answer, Failure, Metrics, Request
from paceline.storage.snapshots.manifest import File, SnapshotId

# ---- parts of events


@record
class TaskExit:
    """How one attempt of a task ended, as its member saw it."""

    task: str
    attempt: int
    code: int | None = None
    signal: str | None = None
    expected: bool = False  # the captain requested it
    cause: str = ""  # empty: success
    detail: str = ""
    place: str = ""  # where the program failed, or its last line of output; an equal place means the same error
    survivor: bool = False  # the error looks like a lost peer, so another failure is the likelier cause
    age: Seconds = 0.0  # time between the exit and this message
    ran: Seconds = 0.0  # time between its start and its failure
    to_first_output: Seconds = 0.0  # time between its start and its first output
    checkpoint: str = ""  # a file of the program's own that it changed, which looks like a checkpoint
    listened: bool | None = None  # of rank 0: whether any task used its address to join the group; None: unknown


@record
class TaskProgress:
    step: int | None
    step_age: Seconds
    output_age: Seconds
    metrics: Metrics = field(default_factory=dict)

    def to_wire(self) -> list[Any]:
        """A compact form: it is sent once a second for every task."""
        return [self.step, self.step_age, self.output_age, dict(self.metrics)]


@record
class GenerationRecord:
    """The record of a generation, which a member keeps in case the captain could not write it."""

    generation: int
    parent: SnapshotId | None
    by: str


@record
class StartTimes:
    """How far the start of a task has come, in seconds since it began; None: not yet, or it cannot be observed."""

    imports: Seconds | None = None  # time spent in imports
    joining: Seconds | None = None  # when it began to join the group of tasks that train together
    joined: Seconds | None = None
    restoring: Seconds | None = None  # when a helper of Paceline began to restore its state
    restored: Seconds | None = None
    first_step: Seconds | None = None


@record
class TaskResources:
    """What a task uses, over the last few seconds."""

    cpu: Amount  # cores
    memory: Amount  # bytes
    memory_peak: Amount
    read_bytes_per_s: Amount = 0.0  # from disks
    written_bytes_per_s: Amount = 0.0


@record
class GpuResources:
    utilization: Share  # of the time in which it is busy
    memory: Amount  # bytes
    memory_limit: Amount


@record
class HostResources:
    memory: Amount  # bytes
    memory_limit: Amount
    received_bytes_per_s: Amount = 0.0  # from the network
    sent_bytes_per_s: Amount = 0.0
    tasks: Mapping[str, TaskResources] = field(default_factory=dict)
    gpus: tuple[GpuResources, ...] = ()


# ---- sent by members


@record
class PartSaved:
    """A task has saved a snapshot, or its part of one, on its host."""

    host: str
    task: str
    snapshot: SnapshotId
    parts: PartCount = 1  # the number of tasks that save a part of it
    metrics: Metrics = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    not_finite: Mapping[str, NotFiniteValue] = field(default_factory=dict)  # metrics that are not in `metrics`
    stall: Seconds = 0.0  # for which training waited while it was taken


@record
class SnapshotEvaluated:
    """An evaluator has evaluated a snapshot, or its host cannot fetch it (`error`)."""

    host: str
    task: str
    snapshot: SnapshotId
    metrics: Metrics = field(default_factory=dict)
    error: str = ""


@record
class EvaluatorWaiting:
    """An evaluator is ready for the next snapshot."""

    host: str
    task: str


@record
class MetricNotFinite:
    """A task has reported a metric that is NaN or infinite. Sent once for each metric of an attempt."""

    host: str
    task: str
    attempt: int
    metric: str
    value: NotFiniteValue
    step: int | None = None  # None: the task has reported no step


@record
class MemberJoined:
    host: str
    instance: str  # a new id whenever the host is replaced; a restarted agent keeps it
    agent: int  # counts the agents of this instance
    replaces: bool  # no task of an earlier instance of this host can be running
    place: str  # equal to that of an earlier instance if both ran in the same pod
    generation: int  # the highest that the member has seen
    running: Mapping[str, int] = field(default_factory=dict)  # task -> attempt
    exits: tuple[TaskExit, ...] = ()  # how the last attempts ended, of tasks that are not running
    offers: Mapping[str, HostPort] = field(default_factory=dict)  # task -> address for its next start
    held: tuple[PartSaved, ...] = ()  # snapshots, or parts of them, on this host
    follows: Mapping[str, SnapshotId | None] = field(default_factory=dict)  # evaluator -> its snapshot; None: it waits
    evaluated: tuple[SnapshotEvaluated, ...] = ()  # results that the captain has not acknowledged
    data: DataLocation = ""  # location of the ingested data, if the member knows it
    records: tuple[GenerationRecord, ...] = ()  # of its generation, and of earlier ones that may not be in the store
    serves: ServedAt = ""  # how other hosts get its snapshots: SHARED_FOLDER, or an address; empty: not at all
    not_finite: tuple[MetricNotFinite, ...] = ()  # of the last attempts of its tasks, running or not


@record
class Heartbeat:
    host: str
    n: int
    tasks: Mapping[str, TaskProgress]
    memory: Share = 0.0  # memory in use, as a fraction of what the host may use
    asking: tuple[str, ...] = ()  # tasks that check at each step whether to take a snapshot
    resources: HostResources | None = None  # from time to time


@record
class TaskStarted:
    host: str
    task: str
    attempt: int
    pid: int
    warm: bool


@record
class StartMeasured:
    """Sent at the first step of a task; and before, if a task reports no more stages for a while, or ends."""

    host: str
    task: str
    attempt: int
    times: StartTimes


@record
class SpareReady:
    host: str
    seconds: Seconds
    imports: str = ""  # in an elastic job: the record of what its program imports, for hosts on which it has not run


@record
class TaskExited:
    host: str
    exit: TaskExit


@record
class TasksEnded:
    """All tasks of this host that the captain requested to end have ended."""

    host: str
    tasks: Mapping[str, int]  # task -> attempt
    offers: Mapping[str, HostPort]
    # after a hang: task -> "stopped", "waiting", or "busy" with its CPU share, as in "busy 0.97"
    states: Mapping[str, str] = field(default_factory=dict)
    stacks: Mapping[str, str] = field(default_factory=dict)


@record
class PartStored:
    """The files that a task saved are in the store, or could not be stored (`error`)."""

    host: str
    task: str
    snapshot: SnapshotId
    files: tuple[File, ...] = ()
    error: Failure | None = None
    at: int = 0  # the number of files in earlier messages
    more: bool = False  # whether more messages follow


@record
class HostPrepared:
    """A host has the snapshot to restore, or cannot get it (`error`)."""

    host: str
    snapshot: SnapshotId | None  # None: the host is ready to start without one
    error: Failure | None = None
    from_hosts: bool = False  # not from the store


@record
class SnapshotPrefetched:
    """A host has fetched what it lacked of a snapshot before a restart needed it, or could not (`error`)."""

    host: str
    snapshot: SnapshotId
    error: Failure | None = None


@record
class IngestProgress:
    """The state of the data: another run (`run`) builds it, this attempt builds it, or it is ready."""

    host: str
    stage: str  # "waiting", "making" or "there"
    data: DataLocation = ""  # its location
    run: str = ""  # the run that builds or has built it
    made: bool = False  # built by this attempt
    files: int = 0
    size: int = 0


@record
class HostLeaving:
    host: str
    reason: str


@record
class SaveRequested:
    """A task requests a snapshot of its group."""

    host: str
    task: str


@record
class AgreementReply:
    """A task's reply in the agreement on a common step: here, yes or late; and saves, once it has reached the step."""

    host: str
    task: str
    say: str
    which: int
    count: int
    step: int = 0


@record
class Notice:
    """A message for the user."""

    host: str
    text: str
    warning: bool = False


@record
class MemberLeft:
    host: str


MemberEvent = Union[
    MemberJoined, Heartbeat, TaskStarted, StartMeasured, MetricNotFinite, SpareReady, TaskExited, TasksEnded, PartSaved,
    PartStored, HostPrepared, SnapshotPrefetched, SnapshotEvaluated, EvaluatorWaiting, IngestProgress, HostLeaving,
    SaveRequested, AgreementReply, Notice, MemberLeft,
]  # fmt: skip


# ---- sent by the captain's own process


@record
class MemberDisconnected:
    host: str


@record
class StoreAnswered:
    request: Request
    answer: Answer
    ticket: int = 0  # ticket of the AskStore instruction that was answered


@record
class StopRequested:
    reason: str
    interrupt: bool = False  # by Ctrl-C: tasks receive SIGINT before SIGTERM


@record
class ScaleRequested:
    """A user requests that a role has this many hosts."""

    role: str
    hosts: int


@record
class PauseRequested:
    """A user requests that the run releases its hosts, and continues later."""

    within: Seconds  # the time in which a snapshot has to be committed; otherwise, the run is not paused
    now: bool = False  # do not wait for a snapshot
    releases: bool = False  # members are to exit; otherwise, the backend ends them


@record
class ResumeRequested:
    """A user requests that a paused run continues."""


@record
class Tick:
    pass


Event = Union[
    MemberEvent, MemberDisconnected, StoreAnswered, StopRequested, ScaleRequested, PauseRequested, ResumeRequested,
    Tick,
]  # fmt: skip
