"""Requests of users to pause a run, to resume it, or to see how far that is."""

from __future__ import annotations

from typing import Any, Callable

from paceline.agent.captain import events as ev
from paceline.agent.captain.state_machine import Captain
from paceline.agent.net.frames import Message, WireError
from paceline.agent.net.task_request import REFUSED, end_type

KINDS = ("pause", "resume")  # types of requests, and of their replies
LONGEST = 1e9  # seconds
MOST_NAMES = 20  # of hosts, in a reply


def reply_to(message: Message, captain: Captain, handle: Callable[[ev.Event], None]) -> list[Message]:
    """Carry out the request, and return the replies. With `query`, nothing changes. WireError: not a valid request.
    `handle`: passes an event to the captain, which has saved the request when it returns."""
    kind, within = str(message["type"]), message.get("within", 0.0)
    is_query, now, releases = (_flag(message, name) for name in ("query", "now", "releases"))
    if isinstance(within, bool) or not isinstance(within, (int, float)) or not 0 <= within <= LONGEST:
        raise WireError("pause: not a number of seconds")
    pause = captain.pause
    problem = "" if is_query else pause.problem_with_pause(now) if kind == "pause" else pause.problem_with_resume()
    if problem:
        return [{"type": REFUSED, "reason": problem}]
    if not is_query:
        handle(ev.PauseRequested(float(within), now, releases) if kind == "pause" else ev.ResumeRequested())
    snapshot = pause.newest_snapshot()
    reply = {
        "type": kind, "stage": captain.ledger.pause, "problem": pause.problem, "late": pause.is_late,
        "snapshot": None if snapshot is None else str(snapshot), "step": captain.watch.steps,
        "leaving": pause.leaving_hosts()[:MOST_NAMES], "missing": captain.ledger.missing_hosts()[:MOST_NAMES],
    }  # fmt: skip
    return [reply, {"type": end_type(message)}]


def _flag(message: Message, name: str) -> bool:
    value: Any = message.get(name, False)
    if not isinstance(value, bool):
        raise WireError(f"{name}: not true or false")
    return value
