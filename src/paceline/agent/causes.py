"""Why a task ended, from its exit status and the end of its log. Pure: the member gathers the evidence."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<name>.+))?$')
_ERROR = re.compile(
    r"^(?P<type>[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Warning|Fault|Timeout|[A-Z]\w*))(?:: (?P<text>.*))?$"
)
_TRACEBACK = "Traceback (most recent call last):"
_PORT_IN_USE = re.compile(
    r"address already in use|EADDRINUSE|errno: ?98|port is already (?:in use|allocated)|already bound|Address in use",
    re.I,
)
_SURVIVOR = re.compile(
    r"connection reset by peer|connection closed by peer|connection refused|broken pipe|socket closed|"
    r"UnavailableError|AbortedError|CancelledError|DeadlineExceeded|DEADLINE_EXCEEDED|"
    r"failed to connect to all addresses|"
    r"Collective ops is aborted|coordination service|CoordinationService|heartbeat timeout|"
    r"The tasks have crashed|task .* unexpectedly|RPC: /tensorflow|JaxRuntimeError: (?:UNAVAILABLE|ABORTED|INTERNAL)|"
    r"DistBackendError|DistNetworkError|remote process exited|NCCL (?:error|communicator)|gloo.*(?:timed out|closed)|"
    r"JAX distributed service detected fatal errors|Terminating process because|recvValue failed|Socket Timeout",
    re.I,
)
_LOOK_BACK = 60  # lines of the log that count as its end


@dataclass(frozen=True)
class Cause:
    kind: str  # empty: success
    detail: str = ""
    place: str = ""
    survivor: bool = False


@dataclass(frozen=True)
class Raised:
    """An uncaught exception as it stands in the log."""

    type: str
    text: str
    place: str  # file:line of the innermost frame
    lines: int  # of the log after it

    def __str__(self) -> str:
        first = self.text.splitlines()[0] if self.text else ""
        return f"{self.type}: {first[:300]} at {self.place}" if first else f"{self.type} at {self.place}"


def classify(status: int, tail: Sequence[str], asked_to_leave: bool = False, out_of_memory: str | None = None) -> Cause:
    """`status` is waitpid's; `asked_to_leave`: its host was told to go; `out_of_memory`: the kernel's evidence."""
    number = _signal(status)
    end = list(tail)[-_LOOK_BACK:]
    survivor = any(_SURVIVOR.search(line) for line in end)
    if number == 0 and os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0:
        return Cause("")
    if asked_to_leave:
        return Cause("preempted", "its host was told to go (SIGTERM)")
    if number == signal.SIGKILL and out_of_memory:
        return Cause("out-of-memory", out_of_memory)
    if number == signal.SIGTERM:
        return Cause("preempted", "ended by a SIGTERM from outside")
    if number:
        name = signal_name(number)
        return Cause("signal", f"killed by {name}", name, survivor and number != signal.SIGKILL)
    code = os.WEXITSTATUS(status)
    if any(_PORT_IN_USE.search(line) for line in end):
        line = next(line for line in end if _PORT_IN_USE.search(line))
        return Cause("port-in-use", line.strip()[:300], "")
    raised = traceback(tail)
    if raised is not None:
        return Cause("program-error", str(raised), f"{raised.type} {raised.place}", survivor)
    last = next((line.strip() for line in reversed(end) if line.strip()), "")
    said = f"; its last line: {last[:300]}" if last else " without a word"
    return Cause("program-error", f"exit code {code}{said}", f"exit code {code}", survivor)


def own_error(tail: Sequence[str]) -> Cause | None:
    """For a task that was ended from outside: the error it had already shown, if its log ends with one."""
    raised = traceback(tail)
    if raised is None or raised.lines > 3:
        return None
    survivor = any(_SURVIVOR.search(line) for line in list(tail)[-_LOOK_BACK:])
    return Cause("program-error", str(raised), f"{raised.type} {raised.place}", survivor)


def traceback(tail: Sequence[str]) -> Raised | None:
    """The last uncaught exception in these lines."""
    lines = list(tail)
    starts = [number for number, line in enumerate(lines) if line.strip().endswith(_TRACEBACK)]
    for start in reversed(starts):
        place = ""
        for number in range(start + 1, len(lines)):
            line = lines[number]
            frame = _FRAME.match(line)
            if frame:
                place = f"{frame['file']}:{frame['line']}"
            elif place and line[:1].strip():
                error = _ERROR.match(line)
                if error:
                    return Raised(error["type"], error["text"] or "", place, len(lines) - number - 1)
                break
    return None


def stacks(lines: Sequence[str]) -> str:
    """What faulthandler wrote when the task was ended: from its first line to the last."""
    text: list[str] = list(lines)
    for number, line in enumerate(text):
        if line.startswith("Fatal Python error"):
            return "\n".join(text[number:])
    return ""


def _signal(status: int) -> int:
    if os.WIFSIGNALED(status):
        return os.WTERMSIG(status)
    code = os.WEXITSTATUS(status)
    known = {int(number) for number in signal.valid_signals()}
    return code - 128 if code > 128 and code - 128 in known else 0  # as shells say it


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
