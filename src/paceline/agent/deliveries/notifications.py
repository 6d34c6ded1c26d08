"""Which events are notifications, and what their receivers get: JSON, or the form that Slack and others understand."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from paceline.agent.fast_dataclass import record
from paceline.plan import FAILED, HANG, RESTART, SLACK, STOPPED, SUCCEEDED

VERSION = 1  # of the body
LONGEST_TEXT = 4000  # characters of each text
_STATUSES = (FAILED, SUCCEEDED, STOPPED)
_OWN = ("at", "event", "generation")


@record
class Notification:
    kind: str  # one of plan.NOTIFY_ON
    id: str  # the same whenever it is sent again
    body: dict[str, Any]

    def encoded(self, form: str) -> bytes:
        """`form`: a field `format` of the job."""
        if form == SLACK:
            return json.dumps({"text": without_markup(self.body["text"])}).encode()
        return json.dumps(self.body).encode()


def without_markup(text: str) -> str:
    """For Slack, a text that a program has written as it is: it must not call everybody in a channel. Slack reads
    <!channel>; compatible services also read @channel, which an invisible character after the @ prevents.

    >>> without_markup("<!here> @all")
    '&lt;!here&gt; @\u200ball'
    """
    for char, replacement in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("@", "@\u200b")):
        text = text.replace(char, replacement)
    return text


def notification(event: Mapping[str, Any], run: str, job: str) -> Notification | None:
    """None: nobody is notified of this event."""
    kind, sentence = _described(event)
    if not kind:
        return None
    digest = hashlib.sha256(f"{run} {json.dumps(event, sort_keys=True)}".encode()).hexdigest()[:32]
    body = {
        "version": VERSION,
        "id": digest,
        "run": run,
        "job": job,
        "event": kind,
        "at": event.get("at"),
        "generation": event.get("generation"),
        "text": f"{run} {sentence}"[:LONGEST_TEXT],
        "details": {name: _shortened(value) for name, value in event.items() if name not in _OWN},
    }
    return Notification(kind, digest, body)


def _described(event: Mapping[str, Any]) -> tuple[str, str]:
    """The kind of notification, and what has happened to the run."""
    kind = event.get("event")
    if kind == "run-ended" and event.get("status") in _STATUSES:
        if event["status"] == SUCCEEDED:
            return SUCCEEDED, "succeeded"
        verb = "was stopped" if event["status"] == STOPPED else "failed"
        return event["status"], f"{verb}: {event.get('reason')}"
    if kind == "hang":
        tasks = event.get("tasks")
        names = ", ".join(map(str, tasks)) if isinstance(tasks, list) else "a task"
        progress = "step" if event.get("progress") == "step" else "output"
        return HANG, f"hangs: no {progress} from {names} for {_seconds(event.get('silent_s'))}"
    if kind == "restart":
        task = f" of {event['task']}" if event.get("task") else ""
        detail = f": {event['detail']}" if event.get("detail") else ""
        return RESTART, f"is restarting after a failure{task} ({event.get('cause')}){detail}"
    return "", ""


def _seconds(value: Any) -> str:
    return f"{value:.0f} s" if isinstance(value, (int, float)) else "a while"


def _shortened(value: Any) -> Any:
    return value[:LONGEST_TEXT] if isinstance(value, str) else value
