"""Limits the names and texts in the events of a run before readers keep them: those of another user may be forged.

Runs with thousands of tasks remain far below these limits. Without them, a few bytes of a file, such as a name in a
list of tasks, would become hundreds of bytes in memory.
"""

from __future__ import annotations

import sys
from typing import Any

from paceline.view.state.events import Event

MOST_NAMES = 20_000  # of tasks; as many of hosts, and of GPUs
LONGEST_NAME = 255  # characters
MOST_ROLES = 20  # whose number of tasks has changed
MOST_METRICS = 200_000  # of all tasks together
MOST_OF_EVENT = 2_000  # metrics
MOST_OF_HOST = 64  # GPUs; see agent/net/messages.py
LONG_TEXT = 1_000  # characters: shorter texts are not limited
MOST_TEXT = 48 * 1024 * 1024  # bytes of longer texts; then they are cut

_TASKS, _HOSTS, _GPUS = "names of tasks", "names of hosts", "GPUs"
_METRICS, _TEXTS = "names of metrics", "texts"
_NAMES = {"task": _TASKS, "host": _HOSTS}
_LISTS = {"tasks": _TASKS, "scope": _TASKS, "absent": _TASKS, "hosts": _HOSTS, "missing": _HOSTS}


class EventLimits:
    """For all events of one run."""

    def __init__(self) -> None:
        self._names: dict[str, set[str]] = {_TASKS: set(), _HOSTS: set(), _GPUS: set()}
        self._metrics: dict[str, dict[str, str]] = {}  # by task, names of metrics: one string for all events
        self._metric_count = self._text_size = 0
        self._exceeded: set[str] = set()

    @property
    def left_out(self) -> list[str]:
        """What readers do not get, as text."""
        return [f"events.jsonl: too many or too long {kind}: not all are shown" for kind in sorted(self._exceeded)]

    def admit(self, event: Event) -> bool:
        """Changes the event, if necessary. False: it has to be left out."""
        data = event.data
        for key, kind in _NAMES.items():
            if data.get(key) is not None and not self._is_known(kind, data[key]):
                return False
        for key, value in data.items():
            if isinstance(value, str):
                if len(value) > LONG_TEXT:
                    data[key] = self._text(value)
            elif key in _LISTS and isinstance(value, list):
                data[key] = [name for name in value if self._is_known(_LISTS[key], name)]
            elif key == "tasks" and isinstance(value, dict):
                data[key] = {name: used for name, used in value.items() if self._is_known(_TASKS, name)}
            elif key == "gpus" and isinstance(value, list):
                gpus = value[:MOST_OF_HOST]
                data[key] = [gpu for n, gpu in enumerate(gpus) if self._is_known(_GPUS, f"{data.get('host')}/{n}")]
            elif key == "metrics":
                data[key] = self._known_metrics(str(data.get("task")), value) if isinstance(value, dict) else {}
        return True

    def _is_known(self, kind: str, name: Any) -> bool:
        names = self._names[kind]
        if isinstance(name, str) and name in names:
            return True
        if not isinstance(name, str) or len(name) > LONGEST_NAME or len(names) >= MOST_NAMES:
            self._exceeded.add(kind)
            return False
        names.add(name)
        return True

    def _known_metrics(self, task: str, values: dict[str, Any]) -> dict[str, Any]:
        known = self._metrics.setdefault(task, {})
        admitted: dict[str, Any] = {}
        for name, value in values.items():
            if name not in known:
                if self._metric_count >= MOST_METRICS or len(name) > LONGEST_NAME:
                    self._exceeded.add(_METRICS)
                    continue
                known[name] = name
                self._metric_count += 1
            if len(admitted) >= MOST_OF_EVENT:
                self._exceeded.add(_METRICS)
                break
            admitted[known[name]] = value
        return admitted

    def _text(self, text: str) -> str:
        self._text_size += sys.getsizeof(text)
        if self._text_size <= MOST_TEXT:
            return text
        self._exceeded.add(_TEXTS)
        return text[:LONG_TEXT]
