"""The resources of this machine for a run: cores, GPUs, and the interpreter that `python` means."""

from __future__ import annotations

import functools
import os
import resource
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.agent import os_processes
from paceline.agent.deliveries.addresses import address_of, problem_with
from paceline.agent.tasks.python_command import active_interpreter
from paceline.errors import USAGE, Argument, PacelineError
from paceline.plan import CODE_IN_IMAGE, Plan
from paceline.view import machine_info
from paceline.view.text.wording import count

LEAST_MEMORY = 5 * 1024 * 1024  # bytes of a process that has just started
LONGEST_PATH = 4096 - 400  # bytes of a path, less those of the files of a run
OWN_FILES = 24  # open files of a captain, besides one per host


class CannotRun(PacelineError):
    """This machine cannot run the job."""

    exit_code = USAGE


@dataclass(frozen=True)
class Share:
    """The part of this machine that one host gets."""

    cores: float
    devices: tuple[str, ...]


def assign(plan: Plan) -> dict[str, Share]:
    """Cores are shared equally among the tasks that the run starts with, each GPU goes to one host. A host that can be
    added later has no share if there are no GPUs left for it. CannotRun: there are too few GPUs."""
    if plan.code == CODE_IN_IMAGE:
        raise CannotRun(
            "`code: image` means that the code is in a container image",
            remedy=("run with ", Argument("on", "kubernetes"), ", or set `code` to a folder"),
        )
    _check_limits(plan)
    first = plan.first_hosts
    needed = sum(host.gpus for host in first)
    devices = gpus() if needed else ()
    if needed > len(devices):
        available = count(len(devices), "GPU") if devices else "no GPU"
        by_role = {role.name: sum(host.gpus for host in first if host.role == role.name) for role in plan.roles}
        roles = ", ".join(f"{role} {gpus}" for role, gpus in by_role.items() if gpus)
        raise CannotRun(
            f"the job needs {count(needed, 'GPU')} ({roles}), but this machine has {available}",
            remedy="lower gpus or replicas",
        )
    cores = float(os_processes.cores())
    shares: dict[str, Share] = {}
    tasks = sum(len(host.tasks) for host in first)
    names = {host.name for host in first}
    for host in (*first, *(host for host in plan.hosts if host.name not in names)):
        if host.gpus <= len(devices):
            assigned, devices = devices[: host.gpus], devices[host.gpus :]
            share = cores * len(host.tasks) / tasks
            shares[host.name] = Share(min(host.cpu, cores) if host.cpu else share, assigned)
    return shares


def fitting(plan: Plan, shares: Mapping[str, Share]) -> Plan:
    """The plan without the hosts that this machine has no GPUs for: `paceline scale` cannot add them."""
    if len(shares) == len(plan.hosts):
        return plan
    hosts = tuple(host for host in plan.hosts if host.name in shares)
    return replace(plan, hosts=hosts, tasks=tuple(task for task in plan.tasks if task.host in shares))


def _check_limits(plan: Plan) -> None:
    """CannotRun: this machine does not have enough memory, processes or open files for so many hosts and tasks."""
    hosts, tasks = len(plan.first_hosts), sum(len(host.tasks) for host in plan.first_hosts)
    processes = 2 * hosts + tasks
    count = f"{tasks} tasks on {hosts} hosts"
    memory = machine_info.memory()
    if memory is not None and processes * LEAST_MEMORY > memory:
        needed = f"{processes * LEAST_MEMORY >> 30} GiB"
        raise CannotRun(
            f"{count} need at least {needed} of memory before they train, and this machine has {memory >> 30} GiB",
            remedy=("lower replicas, or run with ", Argument("on", "kubernetes")),
        )
    most = machine_info.processes()
    if most is not None and processes > most:
        raise CannotRun(
            f"{count} need at least {processes} processes, and the limit here is {most}",
            remedy="lower replicas, or raise the limit (ulimit -u, or pids.max of the container)",
        )
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if files != resource.RLIM_INFINITY and hosts + OWN_FILES > files:
        raise CannotRun(
            f"the captain of {hosts} hosts needs up to {hosts + OWN_FILES} open files, and the limit here is {files}",
            remedy="raise it with ulimit -n, or lower replicas",
        )


def check_loopback() -> None:
    """CannotRun: processes on this machine cannot reach each other."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), 5).close()
    except OSError as error:
        raise CannotRun(
            f"127.0.0.1 cannot be used: {os.strerror(error.errno) if error.errno else error}",
            remedy="bring up the loopback interface with its IPv4 address: ip link set lo up",
        ) from None


def check_path(runs: Path) -> None:
    """CannotRun: the paths of files in a run's folder would be too long."""
    length = len(os.fsencode(runs))
    if length > LONGEST_PATH:
        raise CannotRun(
            f"the path of the folder for runs is too long: {length} bytes; at most {LONGEST_PATH} are allowed",
            remedy="set PACELINE_HOME to another folder",
        )


def check_addresses(plan: Plan) -> None:
    """CannotRun: the address of a receiver of notifications is not known."""
    environment = {**os.environ, **next(role.env for role in plan.roles if role.decides)}
    for number, webhook in enumerate(plan.notify):
        if not address_of(webhook, environment):
            raise CannotRun(
                f"notify[{number}].url_from: the variable {webhook.url_from} is not set",
                remedy=f"set it to the address of the receiver: export {webhook.url_from}=https://...",
            )
        if problem := problem_with(address_of(webhook, environment)):
            raise CannotRun(f"notify[{number}].url_from: the address in {webhook.url_from} {problem}")


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
