"""What this machine has for a run: cores, GPUs, and the interpreter that `python` means."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from paceline.plan import CODE_IN_IMAGE, Plan


class CannotRun(Exception):
    """This machine cannot run the job; the text says why and what to do."""


@dataclass(frozen=True)
class Share:
    """What one host gets of this machine."""

    cores: float
    devices: tuple[str, ...]


def assign(plan: Plan) -> dict[str, Share]:
    """Cores in equal shares, GPUs each to one host; CannotRun where there are too few."""
    if plan.code == CODE_IN_IMAGE:
        raise CannotRun("code: image says that the code is in a container image: give --on kubernetes, or a folder")
    wanted = sum(host.gpus for host in plan.hosts)
    devices = gpus() if wanted else ()
    if wanted > len(devices):
        has = "no GPU" if not devices else f"{len(devices)} GPU{'s' * (len(devices) > 1)}"
        roles = ", ".join(
            f"{role.name} {sum(h.gpus for h in plan.hosts if h.role == role.name)}" for role in plan.roles
        )
        raise CannotRun(f"the job asks for {wanted} GPUs ({roles}) and this machine has {has}: lower gpus or replicas")
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    shares = {}
    for host in plan.hosts:
        taken, devices = devices[: host.gpus], devices[host.gpus :]
        share = cores * len(host.tasks) / len(plan.tasks)
        shares[host.name] = Share(min(host.cpu, cores) if host.cpu else share, taken)
    return shares


def caveats(plan: Plan) -> list[str]:
    """What a person should know before this plan runs on this machine."""
    notes = []
    if sys.platform != "linux":
        notes.append("this is not Linux: tasks of an agent that is killed may live on, and there are no spares")
    if Path("/dev/nvidia0").exists() and not any(host.gpus for host in plan.hosts):
        notes.append("this machine has a GPU and the job asks for none (gpus), so its tasks will not see it")
    return notes


@functools.cache
def gpus() -> tuple[str, ...]:
    """The GPUs this process may use, as CUDA names them."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return tuple(name.strip() for name in chosen.split(",") if name.strip() and name.strip() != "-1")
    found = shutil.which("nvidia-smi")
    if found is None:
        return ()
    try:
        listed = subprocess.run([found, "-L"], capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return tuple(str(number) for number in range(sum(line.startswith("GPU ") for line in listed.splitlines())))


def interpreter() -> str:
    """The person's own environment where one is active, else the one Paceline runs in."""
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        active = os.environ.get(name)
        if active:
            python = Path(active) / "bin" / "python"
            if python.exists():
                return str(python)
    return sys.executable
