"""Requests of users to change the number of hosts of a role, or to see how far a change is."""

from __future__ import annotations

from typing import Any, Callable

from paceline.agent.captain import events as ev
from paceline.agent.captain.state_machine import Captain
from paceline.agent.net.frames import Message, WireError
from paceline.agent.net.task_request import REFUSED, end_type

SCALE = "scale"  # type of the request, and of its reply
MOST_NAMES = 20  # of hosts, in a reply


def reply_to(message: Message, captain: Captain, handle: Callable[[ev.Event], None]) -> list[Message]:
    """Carry out the request, and return the replies. Without `hosts`, nothing changes. WireError: not a valid request.
    `handle`: passes an event to the captain, which has saved the request when it returns."""
    role: Any = message.get("role")
    hosts: Any = message.get("hosts")
    if not isinstance(role, str) or not (hosts is None or type(hosts) is int):
        raise WireError("scale: not a role and a number of hosts")
    current = captain.ledger.sizes.get(role, 0)
    if problem := captain.scaling.problem_with(role, current if hosts is None else hosts):
        return [{"type": REFUSED, "reason": problem}]
    if hosts is not None:
        handle(ev.ScaleRequested(role, hosts))
    joining, leaving = captain.scaling.joining_hosts(), captain.scaling.leaving_hosts()
    progress = {"joining": joining[:MOST_NAMES], "leaving": leaving[:MOST_NAMES]}
    return [{"type": SCALE, "hosts": captain.ledger.sizes[role], **progress}, {"type": end_type(message)}]
