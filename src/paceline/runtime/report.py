"""Report the progress of training to Paceline: `report(step=12, loss=0.5)`."""

from __future__ import annotations

import atexit
import json
import math
import os
import stat
import sys
import time
from collections.abc import Mapping
from typing import Any, Callable

_UNKNOWN = -2
GPU_VARIABLES = ("CUDA_", "NCCL_", "FI_", "OFI_", "UCX_", "RDMAV_")  # that CUDA, NCCL and its networks read
_NONE = -1
_UNTHROTTLED = 32  # the first reports are sent immediately, to show the start without delay
_EVERY = 0.5  # seconds between later ones: each wakes the agent, which may share a core with the program
_POLL_EVERY = 0.05  # seconds between looks for a request of the agent
_descriptor = _UNKNOWN
_pending: dict[str, float] = {}
_unread: dict[str, Any] = {}  # metrics of the newest step that are still on a device
_not_finite: set[str] = set()  # metrics that were NaN or infinite, in a message that was sent
_due = 0.0
_sent = 0
_poll_at = 0.0
polls = True  # whether reports look for requests of the agent; False: something else reads the messages of the agent
# Called after each report with its step, if it has one, while the program is profiled.
on_report: Callable[[int | None], None] | None = None


def report(step: int | None = None, **metrics: Any) -> None:
    """Report a completed step and any metrics. Never blocks, takes microseconds, and does nothing outside a run.

    >>> report(step=12, loss=0.5)
    """
    if _descriptor == _NONE or (_descriptor == _UNKNOWN and _open() == _NONE):
        return
    if step is not None:
        _pending["step"] = int(step)
    is_urgent = False
    for name, value in metrics.items():
        as_float = number(value)
        if as_float is not None:
            _pending[name] = as_float
            _unread.pop(name, None)
            is_urgent = is_urgent or (not math.isfinite(as_float) and name not in _not_finite)
    now = time.monotonic()
    if is_urgent or now >= _due:  # the first NaN must not be replaced by the next value before it is sent
        _send()
    if now >= _poll_at and polls:
        _poll(now)
    if on_report is not None:
        on_report(None if step is None else int(step))


def report_step(step: int, metrics: Mapping[str, Any]) -> None:
    """For the `step` of helpers, which programs call at every step. Reading a number from a GPU waits for it, so such
    numbers are read only when a message is due: at most twice a second."""
    if _descriptor == _NONE:
        return
    is_due = time.monotonic() >= _due
    readable = {name: value for name, value in metrics.items() if is_due or _is_on_host(value)}
    report(step, **readable)
    for name, value in metrics.items():
        if name not in readable:
            _unread[name] = value.detach().clone() if hasattr(value, "detach") else value  # torch: may change in place


def report_last_step() -> None:
    """For the `close` of helpers, when training is over: sends what `report_step` has not read. May wait for a GPU."""
    unread = dict(_unread)
    _unread.clear()
    for name, value in unread.items():
        try:
            report(**{name: value})
        except RuntimeError:
            pass  # JAX has deleted the array, because the program donated it


def _is_on_host(value: Any) -> bool:
    if hasattr(value, "is_ready"):  # JAX computes asynchronously, even on CPUs
        return bool(value.is_ready())
    return "cpu" in str(getattr(value, "device", "cpu")).lower()


def number(value: Any) -> float | None:
    """The value, which may be a tensor or array of one number, as a float. (For torch, float() alone warns.)"""
    try:
        return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError):
        return None


def send_to_agent(message: dict[str, Any]) -> bool:
    """Sends a message from the runtime itself, immediately. False: the agent is busy or has ended."""
    if descriptor() == _NONE:
        return False
    try:
        os.write(_descriptor, json.dumps(message).encode())
    except OSError:
        return False
    return True


def warn(text: str) -> None:
    """Shows the user a warning of the run; on stderr if there is no agent."""
    if descriptor() == _NONE:
        print(f"paceline: {text}", file=sys.stderr, flush=True)
    send_to_agent({"_": "warning", "text": text})


def descriptor() -> int:
    """The descriptor of the socket to the agent; negative if there is none."""
    return _open() if _descriptor == _UNKNOWN else _descriptor


def _poll(now: float) -> None:
    """Handles requests of the agent."""
    global _poll_at
    _poll_at = now + _POLL_EVERY
    while True:
        try:
            data = os.read(_descriptor, 4096)
        except OSError:
            return  # there is none
        if not data:
            return
        try:
            handle_request(json.loads(data))
        except ValueError:
            continue


def handle_request(message: Any) -> None:
    """Begins to profile this process, if that is what the agent requests."""
    if not isinstance(message, dict) or message.get("say") != "profile":
        return
    from paceline.runtime import profiling

    try:
        profiling.begin(message)
    except (ValueError, TypeError, KeyError):
        pass  # of an agent of another version


def _send() -> None:
    """Sends all reports since the last message; keeps them for the next one if the agent is busy or has ended."""
    global _due, _sent
    if not _pending:
        return
    try:
        if not _sent and os.environ.get("CUDA_VISIBLE_DEVICES"):
            # With these, the context of this task's successor is created in advance; the program may have set some.
            variables = {name: value for name, value in os.environ.items() if name.startswith(GPU_VARIABLES)}
            os.write(_descriptor, json.dumps({"_": "gpu", "environment": variables}).encode())
        os.write(_descriptor, json.dumps(_pending).encode())
        _not_finite.update(name for name, value in _pending.items() if name != "step" and not math.isfinite(value))
        _pending.clear()
        _sent += 1
        _due = time.monotonic() + _EVERY if _sent >= _UNTHROTTLED else 0.0
    except OSError:
        pass  # training must not be affected


def _open() -> int:
    """The inherited socket, unless its descriptor refers to another file in this process."""
    global _descriptor, polls
    _descriptor = _NONE
    polls = polls and os.environ.get("PACELINE_ROLE") != "evaluator"  # its messages are for `snapshots.follow`
    try:
        number, inode = os.environ["PACELINE_REPORT_FD"], os.environ["PACELINE_REPORT_INODE"]
        status = os.fstat(int(number))
        if stat.S_ISSOCK(status.st_mode) and str(status.st_ino) == inode:
            _descriptor = int(number)
            os.set_blocking(_descriptor, False)
            atexit.register(_send)
    except (KeyError, ValueError, OSError):
        pass
    return _descriptor
