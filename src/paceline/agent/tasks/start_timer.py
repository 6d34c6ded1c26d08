"""Measures the start of one attempt of a task: when the agent received the report of each stage."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paceline.agent.captain.events import StartTimes
from paceline.agent.net.codec import is_finite

QUIET_S = 30.0  # without a further stage, after which what is known is sent: the program may never report a step
_STAGES = ("joining", "joined", "restoring", "restored")


class StartTimer:
    def __init__(self, started: float, framework: str) -> None:
        """`framework`: reports about others are ignored, such as that of a TensorFlow program that imports torch."""
        self._started = started
        self._framework = framework
        self._last = started
        self._times = StartTimes()
        self._sent = StartTimes()

    def on_report(self, message: dict[str, Any], now: float) -> None:
        """A stage that the task reports. The first report of each counts, until the first step."""
        if self._times.first_step is not None or message.get("framework", self._framework) != self._framework:
            return
        imports: Any = message.get("imports")
        if is_finite(imports) and 0 <= imports <= now - self._started:
            self._change(now, imports=float(imports))
        stage = message.get("stage")
        if stage in _STAGES and getattr(self._times, stage) is None:
            self._change(now, **{stage: now - self._started})

    def on_first_step(self, now: float) -> None:
        self._change(now, first_step=now - self._started)

    def restart(self) -> None:
        """The program starts again from the beginning, in the same process."""
        self._times = StartTimes()

    def unsent(self, now: float, at_once: bool = False) -> StartTimes | None:
        """What is to be sent to the captain now, if anything. `at_once`: without waiting for further stages."""
        if self._times == self._sent or not (at_once or now - self._last >= QUIET_S):
            return None
        self._sent = self._times
        return self._times

    def _change(self, now: float, **fields: float) -> None:
        self._times = replace(self._times, **{name: round(seconds, 4) for name, seconds in fields.items()})
        self._last = now
