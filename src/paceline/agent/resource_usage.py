"""What tasks and hosts use: the last value, the mean and the peak of each number, from events one by one. Pure.

The numbers of a task: cores in use (`cpu`), bytes of `memory`, and bytes that it reads from disks and writes to them.
Of a host: memory and network. Of a GPU: the share of the time in which it is busy (`utilization`), and memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.agent.captain.events import HostResources

TASK_NUMBERS = ("cpu", "memory", "read_bytes_per_s", "written_bytes_per_s")
HOST_NUMBERS = ("memory", "received_bytes_per_s", "sent_bytes_per_s")
GPU_NUMBERS = ("utilization", "memory")
LIMIT = "memory_limit"  # bytes: of the cgroup of the host, or of the machine; of a GPU: its memory
TASKS, HOSTS, GPUS = "tasks", "hosts", "gpus"
_LARGEST = 1e18

Event = Mapping[str, Any]
# Of a number: last, mean, peak, and how often it was measured. By group, name of what uses it, and name of the number.
_Usage = dict[str, dict[str, dict[str, list[float]]]]


def event_fields(resources: HostResources, tasks: Collection[str]) -> dict[str, Any]:
    """The fields of the event. `tasks`: those of this host; others are left out."""
    return {
        "machine": _rounded(vars(resources), (*HOST_NUMBERS, LIMIT)),
        "gpus": [_rounded(vars(gpu), (*GPU_NUMBERS, LIMIT)) for gpu in resources.gpus],
        "tasks": {
            name: _rounded(vars(used), (*TASK_NUMBERS, "memory_peak"))
            for name, used in resources.tasks.items()
            if name in tasks
        },
    }


def series_of(event: Event) -> dict[str, dict[str, float]]:
    """The numbers in an event, by task and for its host."""
    machine = _numbers(event.get("machine"), HOST_NUMBERS)
    for number, gpu in enumerate(_list(event.get("gpus"))):
        machine.update({f"gpu_{number}_{name}": value for name, value in _numbers(gpu, GPU_NUMBERS).items()})
    tasks = _dict(event.get("tasks"))
    return {**{name: _numbers(used, TASK_NUMBERS) for name, used in tasks.items()}, str(event.get("host")): machine}


class Resources:
    def __init__(self) -> None:
        self._usage: _Usage = {TASKS: {}, HOSTS: {}, GPUS: {}}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Resources) and self._usage == other._usage

    __hash__ = None  # type: ignore[assignment]

    def add(self, event: Event) -> None:
        """Events of any kind, in order."""
        kind = event.get("event")
        if kind == "rotated":
            self._load(event.get("resources"))
        elif kind == "resources":
            self._measured(event)

    def add_all(self, events: Iterable[Event]) -> Resources:
        for event in events:
            self.add(event)
        return self

    def _measured(self, event: Event) -> None:
        host, machine = str(event.get("host")), _dict(event.get("machine"))
        self._add(HOSTS, host, _numbers(machine, (*HOST_NUMBERS, LIMIT)))
        for number, gpu in enumerate(_list(event.get("gpus"))):
            self._add(GPUS, f"{host}/{number}", _numbers(gpu, (*GPU_NUMBERS, LIMIT)))
        for task, used in _dict(event.get("tasks")).items():
            self._add(TASKS, task, {**_numbers(used, TASK_NUMBERS), **_numbers(machine, (LIMIT,))})
            for peak in _numbers(used, ("memory_peak",)).values():
                measured = self._usage[TASKS][task].setdefault("memory", [peak, peak, peak, 0])
                measured[2] = max(measured[2], peak)

    def _add(self, group: str, name: str, numbers: Mapping[str, float]) -> None:
        usage = self._usage[group].setdefault(name, {})
        for number, value in numbers.items():
            _, mean, peak, count = usage.get(number, (0.0, 0.0, 0.0, 0))
            usage[number] = [value, mean + (value - mean) / (count + 1), max(peak, value), count + 1]

    # ---- what was found

    def memory(self, task: str) -> float | None:
        """Bytes that the task used when it was last measured; None: unknown."""
        measured = self._usage[TASKS].get(task, {}).get("memory")
        return None if measured is None else measured[0]

    def to_report(self) -> dict[str, Any] | None:
        """For report.json; None: nothing was measured."""
        if not any(self._usage.values()):
            return None
        report: dict[str, Any] = {
            group: {name: _summary(usage) for name, usage in self._usage[group].items()} for group in (TASKS, HOSTS)
        }
        for name, usage in self._usage[GPUS].items():
            host, _, number = name.rpartition("/")
            report[HOSTS].setdefault(host, {}).setdefault(GPUS, {})[number] = _summary(usage)
        return report

    # ---- for the next reader

    def to_json(self) -> dict[str, Any]:
        return {
            group: {
                name: {number: [_short(value) for value in measured] for number, measured in usage.items()}
                for name, usage in users.items()
            }
            for group, users in self._usage.items()
        }

    def _load(self, data: Any) -> None:
        """Continues from what `to_json` returned. What is damaged is left out."""
        for group in self._usage if isinstance(data, dict) else ():
            self._usage[group] = {
                name: {number: list(measured) for number, measured in _dict(usage).items() if _is_measured(measured)}
                for name, usage in _dict(data.get(group)).items()
            }


def _summary(usage: Mapping[str, list[float]]) -> dict[str, Any]:
    numbers: dict[str, Any] = {
        number: dict(zip(("last", "mean", "peak"), map(_round, measured)))
        for number, measured in usage.items()
        if number != LIMIT
    }
    return {**numbers, **({LIMIT: _round(usage[LIMIT][0])} if LIMIT in usage else {})}


def _is_measured(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 4 and all(map(_is_amount, value))


def _is_amount(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= _LARGEST


def _numbers(value: Any, names: Iterable[str]) -> dict[str, float]:
    fields = _dict(value)
    return {name: fields[name] for name in names if _is_amount(fields.get(name))}


def _rounded(values: Mapping[str, Any], names: Iterable[str]) -> dict[str, float]:
    return {name: _round(values[name]) for name in names}


def _round(value: float) -> float:
    """Bytes to whole numbers; cores and shares to thousandths."""
    return round(value) if value >= 1000 else round(value, 3)


def _short(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.10g}")


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
