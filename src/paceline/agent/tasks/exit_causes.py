"""Determines why a task ended, from its exit status and the end of its log. Pure functions without I/O."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.agent.captain.restart_budget import PLAIN_EXIT
from paceline.agent.tasks import launcher_errors
from paceline.agent.tasks.tracebacks import LONGEST_LINE, Raised, traceback

_PORT_IN_USE = re.compile(
    r"address already in use|EADDRINUSE|errno: ?98|port is already (?:in use|allocated)|already bound|Address in use|"
    r"Could not start gRPC server",  # TensorFlow's
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
_LOOK_BACK = 60  # lines of the log that are searched
_LONGEST_TEXT = 10_000  # characters of an exception that are searched


@dataclass(frozen=True)
class Cause:
    kind: str  # empty: success
    detail: str = ""
    place: str = ""
    survivor: bool = False
    raised: Raised | None = None  # the exception, if one is known


def classify(
    status: int,
    tail: Sequence[str],
    asked_to_leave: bool = False,
    out_of_memory: str | None = None,
    raised: Raised | None = None,
) -> Cause:
    """Why the task ended.

    `status`: from waitpid. `asked_to_leave`: whether its host must shut down. `out_of_memory`: a text if the kernel
    killed it. `raised`: the uncaught exception that it reported; if None, its log is searched for one.
    """
    number = signal_of(status)
    tail = [line[:LONGEST_LINE] for line in tail]
    end = tail[-_LOOK_BACK:]
    if asked_to_leave:  # even with exit code 0: many programs exit normally on SIGTERM, but unfinished
        return Cause("preempted", "its host was asked to shut down (SIGTERM)")
    if number == 0 and os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0:
        return Cause("")
    if number == signal.SIGKILL and out_of_memory:
        return Cause("out-of-memory", out_of_memory)
    if number == signal.SIGTERM:
        return Cause("preempted", "terminated by an external SIGTERM")
    below = launcher_errors.find(tail, raised)
    if below is not None:
        return _cause_below(below, out_of_memory)
    if raised is not None:
        return _exception_cause(raised)
    if number:
        name = signal_name(number)
        survivor = number != signal.SIGKILL and any(_SURVIVOR.search(line) for line in end)
        return Cause("signal", f"killed by {name}", name, survivor)
    code = os.WEXITSTATUS(status)
    raised = traceback(tail)
    if raised is not None:
        return _exception_cause(raised)
    port_line = next((line for line in end if _PORT_IN_USE.search(line)), None)
    if port_line is not None:
        return Cause("port-in-use", port_line.strip()[:300])
    survivor = any(_SURVIVOR.search(line) for line in end)
    last_line = next((line.strip() for line in reversed(end) if line.strip()), "")
    output = f"; last line of output: {last_line[:300]}" if last_line else " without any output"
    # Nothing but the last line tells two errors with the same exit code apart.
    return Cause("program-error", f"exit code {code}{output}", f"{PLAIN_EXIT} {code}: {last_line[:300]}", survivor)


def own_error(tail: Sequence[str], raised: Raised | None = None) -> Cause | None:
    """For a task that was ended on request: the error that it had before, reported or at the end of its log."""
    below = launcher_errors.find(tail, raised)
    if below is not None:
        return _cause_below(below, None)
    if raised is None:
        raised = traceback(tail)
        if raised is None or len(raised.text.splitlines()) > 4:
            return None
    return _exception_cause(raised)


def _cause_below(below: launcher_errors.Below, out_of_memory: str | None) -> Cause:
    """The cause of a launcher's failure: that of the process which it had started."""
    exceptions = [_exception_cause(each) for each in below.exceptions]
    if exceptions:
        return next((cause for cause in exceptions if not cause.survivor), exceptions[0])
    if below.signal == signal.SIGKILL and out_of_memory:
        return Cause("out-of-memory", out_of_memory)
    if below.signal == signal.SIGTERM:
        return Cause("preempted", "terminated by an external SIGTERM")
    if below.signal:
        name = signal_name(below.signal)
        return Cause("signal", f"killed by {name}", name)
    detail = f"exit code {below.code}; last line of output: {below.last_line[:300]}"
    return Cause("program-error", detail, f"{PLAIN_EXIT} {below.code}: {below.last_line[:300]}")


def _exception_cause(raised: Raised) -> Cause:
    full_text = f"{raised.type}: {raised.text}"[:_LONGEST_TEXT]
    if _PORT_IN_USE.search(full_text):
        return Cause("port-in-use", str(raised))
    place = " ".join(filter(None, (raised.type, raised.place, raised.library)))
    return Cause("program-error", str(raised), place, bool(_SURVIVOR.search(full_text)), raised)


def stacks(lines: Sequence[str]) -> str:
    """The stacks that faulthandler wrote when the task was aborted."""
    all_lines = list(lines)
    for number, line in enumerate(all_lines):
        if line.startswith("Fatal Python error"):
            return "\n".join(all_lines[number:])
    return ""


def signal_below(tail: Sequence[str], raised: Raised | None) -> int:
    """The signal that killed a process below a launcher such as torchrun; 0: none."""
    below = launcher_errors.find(tail, raised)
    return 0 if below is None or below.exceptions else below.signal


def signal_of(status: int) -> int:
    """The signal that killed the task, or a child whose status it passed on as shells do; 0: none."""
    if os.WIFSIGNALED(status):
        return os.WTERMSIG(status)
    code = os.WEXITSTATUS(status)
    valid = {int(number) for number in signal.valid_signals()}
    return code - 128 if code > 128 and code - 128 in valid else 0


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
