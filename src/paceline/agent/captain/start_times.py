"""Where the time of a start goes: what tasks report, as phases, and what would make it shorter. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.agent.captain.events import StartTimes

FIELDS = ("imports_s", "joining_s", "joined_s", "restoring_s", "restored_s", "first_step_s")
KEPT = 10  # generations in report.json; events.jsonl has all
LEAST_S, LEAST_SHARE = 1.0, 0.25  # of a phase that is worth a remark

IMPORTS, BEFORE_JOINING, JOINING = "imports", "before joining", "joining"
BEFORE_RESTORING, RESTORING, FIRST_STEP = "before restoring", "restoring", "first step"

Measured = Mapping[str, Any]  # of one task: warm, and those of FIELDS that are known
Starts = dict[int, dict[str, dict[str, Any]]]  # generation -> task -> Measured


def fields_of(times: StartTimes) -> dict[str, float]:
    """The fields of an event: only what is known."""
    return {f"{name}_s": round(value, 3) for name, value in vars(times).items() if value is not None}


def record_started(starts: Starts, generation: int, task: str, warm: bool) -> None:
    starts.setdefault(generation, {})[task] = {"warm": warm}


def record_measured(starts: Starts, generation: int, task: str, fields: Mapping[str, Any]) -> None:
    known = {name: fields[name] for name in FIELDS if fields.get(name) is not None}
    starts.setdefault(generation, {}).setdefault(task, {}).update(known)


def forget_old(starts: Starts) -> None:
    for generation in sorted(starts)[:-KEPT]:
        del starts[generation]


def to_report(starts: Starts) -> list[dict[str, Any]]:
    """For report.json: the generations for which anything was measured."""
    return [
        {"generation": generation, "tasks": tasks, "advice": advice(generation, tasks) or None}
        for generation, tasks in sorted(starts.items())
        if any(name in measured for measured in tasks.values() for name in FIELDS)
    ]


def slowest(tasks: Mapping[str, Measured]) -> str:
    """The task that the others wait for: the last one that began to join the group, or else that did its first step."""
    for field in ("joining_s", "first_step_s"):
        known = {task: measured[field] for task, measured in tasks.items() if field in measured}
        if known:
            return max(known, key=known.__getitem__)
    return ""


def phases(measured: Measured) -> dict[str, float]:
    """Seconds of each phase of a start, in order. What was not observed is part of the next phase that was."""
    spent = {IMPORTS: measured["imports_s"]} if "imports_s" in measured else {}
    before = measured.get("imports_s", 0.0)
    for field, phase in (
        ("joining_s", BEFORE_JOINING),
        ("joined_s", JOINING),
        ("restoring_s", BEFORE_RESTORING),
        ("restored_s", RESTORING),
        ("first_step_s", FIRST_STEP),
    ):
        if field in measured:
            spent[phase] = max(0.0, measured[field] - before)
            before = max(before, measured[field])
    return spent


def advice(generation: int, tasks: Mapping[str, Measured]) -> str:
    """What would make this start shorter: about the longest phase that a user can change, if it matters."""
    task = slowest(tasks)
    measured = tasks.get(task, {})
    total, spent = measured.get("first_step_s"), phases(measured)
    remedies = {
        BEFORE_JOINING: f"before {task} joined the group: prepare data in `ingest`",
        BEFORE_RESTORING: f"in {task} before it restored its state: prepare data in `ingest`",
    }
    if RESTORING in spent:  # otherwise the phase of the first step has everything else in it
        remedies[FIRST_STEP] = f"between restoring and the first step of {task}: trace or compile less"
    if generation > 1 and not measured.get("warm", True):
        remedies[IMPORTS] = f"for imports: {task} was not started from a spare"
    seconds, phase = max(((spent[phase], phase) for phase in remedies if phase in spent), default=(0.0, ""))
    if total is None or seconds < LEAST_S or seconds < LEAST_SHARE * total:
        return ""
    return f"{seconds:.1f} s of {total:.1f} s {remedies[phase]}"
