"""The folder in which the tasks of a host keep what their framework compiles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Callable

from paceline.agent.captain.events import TaskExit
from paceline.agent.options import Options
from paceline.frameworks import compile_cache
from paceline.plan import Plan
from paceline.storage import compiled_files

CRASHES = ("SIGBUS", "SIGSEGV", "SIGILL", "SIGFPE")


def compiled_folder(plan: Plan, options: Options) -> str:
    """The same for all runs of the job on this machine; empty: nothing is kept."""
    if not options.compiled or not plan.restart.compile_cache or plan.framework not in compile_cache.FRAMEWORKS:
        return ""
    if plan.framework == "jax" and _has_gpus_on_several_machines(plan, options):
        # Processes that compile for GPUs wait for results of all others. They would wait forever for a process that has
        # found what they lack in its own folder.
        return ""
    return f"{options.compiled}/{plan.name}/{compile_cache.machine_key()}"


def _has_gpus_on_several_machines(plan: Plan, options: Options) -> bool:
    hosts = {task.host for task in plan.tasks if task.rank >= 0}
    return any(plan.host(host).gpus for host in hosts) and not hosts <= {options.host, *options.machine}


def variables(
    plan: Plan, options: Options, environ: Mapping[str, str], notify: Callable[[str], None]
) -> dict[str, str]:
    """Prepares the folder and returns the variables that tell the framework to use it."""
    folder = compiled_folder(plan, options)
    if not folder or not compile_cache.is_used(plan.framework, environ):
        return {}
    names = folder[len(options.compiled) + 1 :].split("/")
    try:
        # Nobody else can reach the folders of a pod.
        (compile_cache.make_own if options.echo else compile_cache.make_private)(options.compiled, *names)
    except compile_cache.UnsafeFolder as error:
        notify(f"what {plan.framework} compiles is not kept for later starts: {error}")
        return {}
    compiled_files.drop_unsynced(folder)
    return compile_cache.variables(plan.framework, folder, environ)


def is_suspect(folder: str, exit: TaskExit, step: int | None) -> bool:
    """Whether a task that never reported a step may have failed because of a damaged file in the folder: one that a
    compiler was writing when its process was killed, or code for another CPU."""
    has_crashed = exit.signal in CRASHES or f"{folder}/" in exit.detail
    return bool(folder) and step is None and not exit.expected and has_crashed
