"""Python stacks of tasks, as messages: what the captain requests from members, and what they reply."""

from __future__ import annotations

from paceline.agent.fast_dataclass import record
from paceline.agent.net.codec import Seconds

MOST_SECONDS = 60.0  # of one request
PER_SECOND = 20  # samples
MOST_PROCESSES = 64  # of a task; there is a reply for each
ANSWER_WITHIN = 4.0  # seconds in which all hosts have to reply, besides those in which they take samples


@record
class Frame:
    file: str
    line: int  # 0: unknown
    function: str

    def to_wire(self) -> list[str | int]:
        return [self.file, self.line, self.function]


@record
class ThreadSamples:
    """What one thread did, as indexes into the stacks of its process; one if no time was given."""

    native_id: int  # equal to the pid in the main thread
    samples: tuple[int, ...]
    seconds: Seconds = 0.0  # that the samples stand for


@record
class TakeStacks:
    """Reply with the stacks of these tasks, in several StacksTaken. `seconds`: take samples for that time; 0: one."""

    request: int
    tasks: tuple[str, ...]
    seconds: Seconds = 0.0


@record
class StacksTaken:
    """The threads of one process of a task. `problem`: why there are none."""

    host: str
    request: int
    task: str
    problem: str = ""
    pid: int = 0
    frames: tuple[Frame, ...] = ()
    stacks: tuple[tuple[int, ...], ...] = ()  # indexes into `frames`, innermost first
    threads: tuple[ThreadSamples, ...] = ()  # the main thread first
    last: bool = False  # whether it is the last reply of this host
