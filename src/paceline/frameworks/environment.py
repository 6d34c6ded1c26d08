"""The environment of one task: the variables of its framework, and Paceline's own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from paceline.plan import Plan, Task, cluster

Roster = Mapping[str, str]  # task -> host:port


def task_variables(plan: Plan, task: Task, roster: Roster, run: str, generation: int, restarts: int) -> dict[str, str]:
    """Variables that differ between tasks of a host or between generations. They are set when a task starts."""
    variables = {
        "PACELINE_RUN": run,
        "PACELINE_ROLE": task.role,
        "PACELINE_INDEX": str(task.index),
        "PACELINE_TASK": task.name,
        "PACELINE_LOCAL_INDEX": str(task.local_index),
        "PACELINE_LOCAL_WORLD_SIZE": str(len(plan.host(task.host).tasks)),
        "PACELINE_RANK": str(task.rank),
        "PACELINE_WORLD_SIZE": str(plan.world_size),
        "PACELINE_GENERATION": str(generation),
        "POD_NAME": task.name,
    }
    if plan.framework == "tensorflow":
        variables.update(_tensorflow(plan, task, roster))
    elif plan.framework == "none":
        variables["CLUSTER_CONFIG"] = json.dumps(_spec(plan, roster))
    elif task.rank < 0:
        pass  # an evaluator is not part of the group, and must not try to join it
    elif plan.framework == "torch":
        variables.update(_torch(plan, task, roster, run, restarts))
    elif plan.framework == "jax":
        variables["PACELINE_JAX_COORDINATOR"] = roster[_leader(plan)]
    return variables


def threads(cores: float, tasks: int) -> dict[str, str]:
    """Thread counts for one of `tasks` equal tasks that share `cores`."""
    share = str(max(1, int(cores / max(1, tasks))))
    return {"OMP_NUM_THREADS": share, "TF_NUM_INTRAOP_THREADS": share}


def gpus(plan: Plan, task: Task, devices: Sequence[str]) -> dict[str, str]:
    """The GPUs that a task sees: one for TensorFlow, all of the host for others, none if the job requests none."""
    if plan.framework == "tensorflow" and devices:
        return {"CUDA_VISIBLE_DEVICES": devices[task.local_index % len(devices)]}
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices)}


def _tensorflow(plan: Plan, task: Task, roster: Roster) -> dict[str, str]:
    spec = _spec(plan, roster)
    config = {"cluster": spec, "task": {"type": task.role, "index": task.index}}
    patch = {"PACELINE_PATCH_KERAS": "1"} if plan.patch_keras else {}
    return {"TF_CONFIG": json.dumps(config), "CLUSTER_CONFIG": json.dumps(spec), **patch}


def _spec(plan: Plan, roster: Roster) -> dict[str, list[str]]:
    return {role: [roster[member.name] for member in members] for role, members in cluster(plan)}


def _torch(plan: Plan, task: Task, roster: Roster, run: str, restarts: int) -> dict[str, str]:
    address, _, port = roster[_leader(plan)].rpartition(":")
    host = plan.host(task.host)
    world = str(plan.world_size)
    return {
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "RANK": str(task.rank),
        "WORLD_SIZE": world,
        "LOCAL_RANK": str(task.local_index),
        "LOCAL_WORLD_SIZE": str(len(host.tasks)),
        "GROUP_RANK": str(host.index),
        "GROUP_WORLD_SIZE": str(sum(1 for other in plan.hosts if other.role == host.role)),
        "ROLE_NAME": task.role,
        "ROLE_RANK": str(task.rank),
        "ROLE_WORLD_SIZE": world,
        "TORCHELASTIC_RUN_ID": run,
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(plan.restart.limit),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }


def _leader(plan: Plan) -> str:
    ranked: list[Task] = [task for task in plan.tasks if task.rank == 0]
    return ranked[0].name
