"""Measures what the tasks of a host and the host use, from /proc: every few seconds, without starting a process."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Callable

from paceline.agent import memory_limits, os_processes
from paceline.agent.captain.events import GpuResources, HostResources, TaskResources

SAMPLE_EVERY = 5.0  # seconds
SEND_EVERY = 10.0
FIRST_AFTER = 1.0  # seconds after the start of a task
MOST_SHARE = 0.001  # of a core that measuring may take
MOST_PROCESSES = 256  # of a task; the others are not measured
LARGEST = 1e18  # the captain ignores larger numbers
NETWORK = "/proc/self/net/dev"


@dataclass
class Totals:
    """What the processes of a task have used since they began."""

    cpu: float = 0.0  # seconds
    read: int = 0  # bytes
    written: int = 0

    def add(self, other: Totals) -> None:
        self.cpu, self.read, self.written = self.cpu + other.cpu, self.read + other.read, self.written + other.written


@dataclass
class _Task:
    sent_at: float  # when `sent` was measured
    sent: Totals
    now: Totals
    memory: int = 0
    memory_peak: int = 0


class ResourceSampler:
    def __init__(
        self,
        memory: memory_limits.Memory,
        gpus: Callable[[], tuple[GpuResources, ...]],
        now: float,
        clock: Callable[[], float],
    ) -> None:
        """`gpus`: returns what was last measured, at once. `clock`: the CPU time of this thread, in seconds."""
        self._memory, self._gpus, self._clock = memory, gpus, clock
        self._tasks: dict[tuple[str, int], _Task] = {}  # by name and attempt
        self._memory_used = self._memory_limit = 0
        self._network = network_totals()
        self._network_at = now
        self._sample_at, self._send_at = now, now
        self._sampled_at: float | None = None  # when `_tasks` was measured; None: it has been taken since

    def sample(self, attempts: Mapping[tuple[str, int], tuple[int, float]], now: float) -> None:
        """Call it often: it measures only from time to time. `attempts`: name and attempt -> pid and start time."""
        for key, (pid, started) in attempts.items():
            if pid and key not in self._tasks:
                self._tasks[key] = _Task(started, Totals(), Totals())
                self._sample_at = now + FIRST_AFTER  # before, it has hardly begun to use anything
        for key in self._tasks.keys() - attempts.keys():
            del self._tasks[key]
        if now < self._sample_at or not self._tasks:
            return
        began = self._clock()
        self._memory_used, self._memory_limit = self._memory.used_and_limit()
        for key, task in self._tasks.items():
            self._measure(task, attempts[key][0])
        self._sampled_at = now
        self._sample_at = now + max(SAMPLE_EVERY, (self._clock() - began) / MOST_SHARE)

    def _measure(self, task: _Task, pid: int) -> None:
        totals, resident = Totals(), 0
        pids = [pid, *os_processes.descendants(pid, MOST_PROCESSES - 1)]
        for each in pids:
            totals.add(totals_of(each))
            resident += os_processes.resident(each)
        if len(self._tasks) == 1 and self._memory.is_limited():
            resident = self._memory_used  # what counts is the limit of the cgroup, which this task has to itself
        resident = min(resident, self._memory_limit or resident)
        peak = os_processes.peak_resident(pid) if len(pids) == 1 else 0
        task.now, task.memory = totals, resident
        task.memory_peak = max(task.memory_peak, resident, min(peak, self._memory_limit or peak))

    def take(self, now: float) -> HostResources | None:
        """What has been measured since the last call that returned anything; None: nothing yet, or too early."""
        sampled_at = self._sampled_at
        if sampled_at is None or now < self._send_at:
            return None
        self._sampled_at, self._send_at = None, now + SEND_EVERY
        tasks = {name: _taken(task, sampled_at) for (name, _), task in self._tasks.items() if task.memory}
        received, sent = network_totals()
        seconds = max(0.001, now - self._network_at)
        rates = [min(LARGEST, max(0, new - old) / seconds) for new, old in zip((received, sent), self._network)]
        self._network, self._network_at = (received, sent), now
        return HostResources(self._memory_used, self._memory_limit, rates[0], rates[1], tasks, self._gpus())


def _taken(task: _Task, at: float) -> TaskResources:
    """What it has used since the last time."""
    seconds = max(0.001, at - task.sent_at)
    new, old = task.now, task.sent
    rates = [
        min(LARGEST, max(0.0, after - before) / seconds)
        for after, before in ((new.cpu, old.cpu), (new.read, old.read), (new.written, old.written))
    ]
    resources = TaskResources(rates[0], task.memory, task.memory_peak, rates[1], rates[2])
    task.sent, task.sent_at, task.memory_peak = new, at, 0
    return resources


def totals_of(pid: int) -> Totals:
    """Of one process, including its children that have ended."""
    totals = Totals(cpu=os_processes.cpu_with_children(pid))
    try:
        with open(f"/proc/{pid}/io", "rb") as file:
            fields = dict(line.split(b": ", 1) for line in file.read().splitlines())
        totals.read, totals.written = int(fields[b"read_bytes"]), int(fields[b"write_bytes"])
    except (OSError, ValueError, KeyError):
        pass  # it has ended, or belongs to another user
    return totals


def network_totals() -> tuple[int, int]:
    """Bytes received and sent by the interfaces of this host, without the loopback."""
    received = sent = 0
    try:
        with open(NETWORK) as file:
            for line in file:
                name, _, numbers = line.partition(":")
                fields = numbers.split()
                if name.strip() != "lo" and len(fields) >= 9 and fields[0].isdigit() and fields[8].isdigit():
                    received, sent = received + int(fields[0]), sent + int(fields[8])
    except OSError:
        pass
    return received, sent


def cpu_clock() -> float:
    return time.thread_time() if hasattr(time, "thread_time") else sum(os.times()[:2])
