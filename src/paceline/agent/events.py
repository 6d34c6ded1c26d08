"""What the captain is told and what it answers: plain data, so that any order of it can be tried without a socket."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.storage.manifest import File, Id

# ---- told to the captain


@dataclass(frozen=True)
class Exit:
    """How one attempt of a task ended, as its member saw it."""

    task: str
    attempt: int
    code: int | None = None
    signal: str | None = None
    expected: bool = False  # the captain had asked for it
    cause: str = ""  # empty: success
    detail: str = ""
    place: str = ""  # where the program failed; equal places are the same error
    survivor: bool = False  # it reads like the loss of a peer, so another failure is the likelier cause
    age: float = 0.0  # seconds between the exit and this message


@dataclass(frozen=True)
class Saved:
    """A task has saved a snapshot, or its part of one, on its host."""

    host: str
    task: str
    id: Id
    parts: int = 1  # how many tasks save a part of it
    metrics: Mapping[str, float] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluated:
    """An evaluator is done with a snapshot; or its host cannot have it."""

    host: str
    task: str
    id: Id
    metrics: Mapping[str, float] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True)
class Follows:
    """An evaluator wants the next snapshot."""

    host: str
    task: str


@dataclass(frozen=True)
class Joined:
    host: str
    instance: str  # one for each life of the host; an agent that was started again keeps it
    agent: int  # which agent of that life
    replaces: bool  # nothing of an earlier instance of this host can be running
    place: str  # the same for an earlier instance that was in this place
    generation: int  # the highest it has seen
    running: Mapping[str, int] = field(default_factory=dict)  # task -> attempt
    exits: tuple[Exit, ...] = ()  # the last attempt of tasks that have ended
    offers: Mapping[str, str] = field(default_factory=dict)  # task -> address for its next start
    held: tuple[Saved, ...] = ()  # snapshots that are on this host
    follows: Mapping[str, Id | None] = field(default_factory=dict)  # evaluator -> what it has; None: wants the next
    evaluated: tuple[Evaluated, ...] = ()  # what the captain has not taken note of yet
    data: str = ""  # where the data is, as it has heard


@dataclass(frozen=True)
class Disconnected:
    host: str


@dataclass(frozen=True)
class Progress:
    step: int | None
    step_age: float
    output_age: float
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Beat:
    host: str
    tasks: Mapping[str, Progress]
    memory: float = 0.0  # share of what the host may use
    asking: tuple[str, ...] = ()  # tasks that ask once a step whether to take a snapshot


@dataclass(frozen=True)
class Started:
    host: str
    task: str
    attempt: int
    pid: int
    warm: bool


@dataclass(frozen=True)
class SpareReady:
    host: str
    seconds: float


@dataclass(frozen=True)
class Exited:
    host: str
    exit: Exit


@dataclass(frozen=True)
class Ended:
    """All that was asked to end on this host has ended."""

    host: str
    tasks: Mapping[str, int]  # task -> attempt
    offers: Mapping[str, str]
    states: Mapping[str, str] = field(
        default_factory=dict
    )  # task -> "stopped", "busy", "waiting" when a hang was ended
    stacks: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Stored:
    """What a task has saved is at the place for snapshots; or why not."""

    host: str
    task: str
    id: Id
    files: tuple[File, ...] = ()
    error: Mapping[str, Any] | None = None  # kind, text, passing
    at: int = 0  # how many files were told of before these
    more: bool = False  # others follow


@dataclass(frozen=True)
class Prepared:
    """A host has a verified copy of the snapshot to go on from; or why not."""

    host: str
    id: Id | None  # None: it has done what is to be done without one
    error: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Answered:
    """What the place for snapshots has answered."""

    request: Mapping[str, Any]
    answer: Mapping[str, Any]


@dataclass(frozen=True)
class Ingested:
    """How far the data is: another run makes it (`run`), it is being made, or it is there."""

    host: str
    stage: str  # "waiting", "making" or "there"
    data: str = ""  # where it is
    run: str = ""  # that makes, or has made it
    made: bool = False  # by this attempt
    files: int = 0
    size: int = 0


@dataclass(frozen=True)
class Leaving:
    host: str
    reason: str


@dataclass(frozen=True)
class SaveNow:
    """A task has asked for a snapshot of its group."""

    host: str
    task: str


@dataclass(frozen=True)
class Agrees:
    """What a task says on the way to a common step: here, yes or late; and there: saves."""

    host: str
    task: str
    say: str
    which: int
    count: int
    step: int = 0


@dataclass(frozen=True)
class Said:
    host: str
    text: str
    warning: bool = False


@dataclass(frozen=True)
class Left:
    host: str


@dataclass(frozen=True)
class Stop:
    reason: str


@dataclass(frozen=True)
class Tick:
    pass


# ---- answered


@dataclass(frozen=True)
class Start:
    """Start these attempts of tasks; `hosts` says where, `roster` is the same for all."""

    generation: int
    restarts: int
    roster: dict[str, str]
    restore: Id | None
    hosts: dict[str, dict[str, int]]  # host -> task -> attempt
    data: str = ""  # where the data is that the job has made


@dataclass(frozen=True)
class End:
    host: str
    tasks: dict[str, int]
    how: str  # "kill", "term" (SIGTERM, then grace) or "abort" (stacks first)
    grace: float = 0.0


@dataclass(frozen=True)
class Finish:
    host: str
    status: str
    reason: str


@dataclass(frozen=True)
class Say:
    """A word to a member, about snapshots."""

    host: str
    message: dict[str, Any]


@dataclass(frozen=True)
class Ask:
    """Of the place for snapshots; the answer comes as Answered."""

    request: dict[str, Any]


@dataclass(frozen=True)
class Leave:
    """Another captain has taken over."""

    reason: str


@dataclass(frozen=True)
class Emit:
    kind: str
    generation: int
    fields: dict[str, Any]


@dataclass(frozen=True)
class Over:
    """The captain's work is done: write the report and leave."""

    status: str
    reason: str
    cause: str | None


Told = Any
Instruction = Any
Instructions = list[Instruction]
