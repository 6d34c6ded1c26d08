"""The resources of this machine for a run: cores, GPUs, and the interpreter that `python` means."""

from __future__ import annotations

import functools
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from paceline.agent import machine
from paceline.agent.tasks.python_command import active_interpreter
from paceline.errors import USAGE, PacelineError
from paceline.plan import CODE_IN_IMAGE, Plan
from paceline.view import machine_info


class CannotRun(PacelineError):
    """This machine cannot run the job."""

    exit_code = USAGE


@dataclass(frozen=True)
class Share:
    """The part of this machine that one host gets."""

    cores: float
    devices: tuple[str, ...]


def assign(plan: Plan) -> dict[str, Share]:
    """Cores are shared equally among tasks, each GPU goes to one host. CannotRun: there are too few GPUs."""
    if plan.code == CODE_IN_IMAGE:
        raise CannotRun(
            "`code: image` means that the code is in a container image",
            remedy="run with --on kubernetes, or set `code` to a folder",
        )
    needed = sum(host.gpus for host in plan.hosts)
    devices = gpus() if needed else ()
    if needed > len(devices):
        available = "no GPU" if not devices else f"{len(devices)} GPU{'s' * (len(devices) > 1)}"
        roles = ", ".join(
            f"{role.name} {sum(h.gpus for h in plan.hosts if h.role == role.name)}" for role in plan.roles
        )
        raise CannotRun(
            f"the job needs {needed} GPUs ({roles}) and this machine has {available}", remedy="lower gpus or replicas"
        )
    cores = float(machine.cores())
    shares = {}
    for host in plan.hosts:
        assigned, devices = devices[: host.gpus], devices[host.gpus :]
        share = cores * len(host.tasks) / len(plan.tasks)
        shares[host.name] = Share(min(host.cpu, cores) if host.cpu else share, assigned)
    return shares


def caveats(plan: Plan) -> list[str]:
    """Warnings about running this plan on this machine."""
    notes = []
    if sys.platform != "linux":
        notes.append("this is not Linux: tasks of a killed agent may keep running, and there are no spares")
    if Path("/dev/nvidia0").exists() and not any(host.gpus for host in plan.hosts):
        notes.append("this machine has a GPU but the job requests none (gpus), so its tasks cannot use it")
    return notes


@functools.cache
def gpus() -> tuple[str, ...]:
    """The GPUs this process may use, as CUDA names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(name.strip() for name in visible.split(",") if name.strip() and name.strip() != "-1")
    return tuple(str(number) for number in range(len(machine_info.gpus() or ())))


def interpreter() -> str:
    """The user's active environment; if none is active, the one Paceline runs in."""
    return active_interpreter()
