"""Which tasks of this host get a standby: a fork of the spare that creates their next CUDA context in advance."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterable, Mapping

from paceline.agent import memory_limits
from paceline.agent.spares.spare import ContextOrder, Spare
from paceline.agent.tasks.attempt import Attempt
from paceline.agent.tasks.tracebacks import Raised
from paceline.runtime.report import GPU_VARIABLES

# With these, NCCL writes to files, or listens at an address, that are those of the running task.
_NO_NCCL = re.compile(r"NCCL_(DEBUG|COMM_ID|.*DUMP)")
HOST_MEMORY = 1 << 30  # bytes that must be free for each; a context uses about half of it


class GpuStandbys:
    """A task gets one if it has its own GPU, and has done a step with the CUDA variables with which it was started."""

    def __init__(self) -> None:
        self._variables: dict[str, dict[str, str]] = {}  # task -> what CUDA and NCCL read from its environment
        self._devices: dict[str, int | None] = {}  # task -> the index of its GPU; None: unknown
        self._prepared: set[str] = set()  # names of standbys
        self._is_disabled = False

    def take(self, task: str, environ: Mapping[str, str]) -> str:
        """The name of the standby that can become this task; empty if there is none."""
        self._variables[task] = {name: value for name, value in environ.items() if name.startswith(GPU_VARIABLES)}
        self._devices[task] = device_of(environ)
        name = self._name(task)
        if name not in self._prepared:
            return ""
        self._prepared.remove(name)
        return name

    def prepare(self, spare: Spare, attempts: Iterable[Attempt], memory: memory_limits.Memory) -> None:
        """Only once all tasks do steps: a context that is created in the meantime would delay them."""
        running = list(attempts)
        if self._is_disabled or not all(attempt.pid and attempt.step is not None for attempt in running):
            return
        for attempt in running:
            task, name = attempt.task.name, self._name(attempt.task.name)
            device, variables = self._devices.get(task), self._variables.get(task, {})
            reported = attempt.gpu_variables
            if device is None or reported is None or name in self._prepared:
                continue
            if _of_cuda(reported) != _of_cuda(variables):
                continue
            self._prepared.add(name)  # even if there can be none: it is not tried again
            if memory.free() >= HOST_MEMORY:
                with contextlib.suppress(OSError):  # the spare has ended, which is noticed elsewhere
                    # NCCL reads its variables once: if the program sets some, it must read them later.
                    nccl = reported == variables and not any(map(_NO_NCCL.match, variables))
                    spare.prepare(name, ContextOrder(variables, device, attempt.pid, nccl))

    def on_error(self, error: Raised) -> None:
        """A program that needs all memory of its GPU gets no more standbys: they use some of it."""
        self._is_disabled = (
            self._is_disabled or error.type.endswith("OutOfMemoryError") or "out of memory" in error.text
        )

    def clear(self) -> None:
        self._prepared.clear()

    def _name(self, task: str) -> str:
        identity = json.dumps([self._devices.get(task), sorted(self._variables.get(task, {}).items())])
        return hashlib.sha256(identity.encode()).hexdigest()[:16]


def _of_cuda(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name.startswith("CUDA_")}


def device_of(environ: Mapping[str, str]) -> int | None:
    """The index of a task's GPU among those that it sees; None if it has none, or perhaps several.

    >>> device_of({"CUDA_VISIBLE_DEVICES": "4,5", "LOCAL_RANK": "1"})
    1
    """
    count = len(list(filter(None, environ.get("CUDA_VISIBLE_DEVICES", "").split(","))))
    local_rank = environ.get("LOCAL_RANK", "0" if count == 1 else "")
    return int(local_rank) if local_rank.isdecimal() and int(local_rank) < count else None
