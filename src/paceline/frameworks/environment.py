"""The environment of one task: the variables of its framework, and Paceline's own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from paceline.plan import GROUP, TASK, Plan, Task, cluster, launcher_of

Roster = Mapping[str, str]  # task -> host:port
Machine = Mapping[str, Sequence[str]]  # hosts on the same machine as a task -> their GPUs
SHARE_VARIABLES = ("PACELINE_SHARE", "PACELINE_SHARE_OFFSET", "PACELINE_SHARE_TOTAL")  # only if shares are not equal


def task_variables(
    plan: Plan, task: Task, roster: Roster, run: str, generation: int, restarts: int, machine: Machine | None = None
) -> dict[str, str]:
    """Variables that differ between tasks of a host or between generations. They are set when a task starts.

    `plan`, `task`: of the generation, see `Plan.of_generation`.
    `machine`: the hosts that share the task's machine, as on the local backend. Other hosts have machines of their own.
    """
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
        "POD_NAME": f"{task.role}-{task.index}",
        **_share(plan, task),
    }
    if plan.framework == "tensorflow":
        variables.update(_tensorflow(plan, task, roster))
    elif plan.framework == "none":
        variables["CLUSTER_CONFIG"] = json.dumps(_spec(plan, roster))
    elif task.rank < 0:
        pass  # an evaluator is not part of the group, and must not try to join it
    elif plan.framework == "torch":
        unit = plan.of_unit(task)
        # Hosts that restart on their own are machines of their own, as on a cluster.
        shared = machine if unit is plan else None
        variables.update(_torch(unit, unit.task(task.name), roster, run, restarts, shared or {}))
    elif plan.framework == "jax":
        variables.update(_jax(plan, task, roster))
    return variables


def _share(plan: Plan, task: Task) -> dict[str, str]:
    """The task's share of each batch, if shares are not equal: see runtime/task_share.py."""
    share_of = {host.name: host.share for host in plan.hosts}
    if task.rank < 0 or set(share_of.values()) == {1}:
        return {}
    shares = [share_of[each.host] for each in plan.tasks if each.rank >= 0]  # by rank
    own, offset, total = shares[task.rank], sum(shares[: task.rank]), sum(shares)
    return dict(zip(SHARE_VARIABLES, map(str, (own, offset, total))))


def threads(cores: float, tasks: int) -> dict[str, str]:
    """Thread counts for one of `tasks` equal tasks that share `cores`."""
    share = str(max(1, int(cores / max(1, tasks))))
    return {"OMP_NUM_THREADS": share, "TF_NUM_INTRAOP_THREADS": share}


def gpus(plan: Plan, task: Task, devices: Sequence[str], machine: Machine | None = None) -> dict[str, str]:
    """The GPUs that a task sees: one for TensorFlow, all of the host for others, none if the job requests none.

    A torch task sees those of all hosts on its machine: LOCAL_RANK, the index of its GPU, counts over the machine. A
    launcher such as torchrun sets LOCAL_RANK itself and counts over the host. If hosts restart on their own, it sees
    those of its host; if tasks do, its share of them.
    """
    if plan.framework == "tensorflow" and devices:
        return {"CUDA_VISIBLE_DEVICES": devices[task.local_index % len(devices)]}
    if plan.framework == "torch" and task.rank >= 0 and devices and plan.restart_scope == TASK:  # LOCAL_RANK is 0
        devices = devices[task.local_index % len(devices) :: len(plan.host(task.host).tasks)]
    machine = machine if plan.restart_scope == GROUP else None
    is_launcher = launcher_of(plan.role(task.role).command) is not None
    if plan.framework == "torch" and task.rank >= 0 and devices and machine and not is_launcher:
        devices = _devices_by_local_rank(plan, task, machine)
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices)}


def rendezvous(plan: Plan, roster: Roster) -> str:
    """The address at which rank 0 listens for the other tasks that train together."""
    return roster[next(task.name for task in plan.tasks if task.rank == 0)]


def _leader(plan: Plan, task: Task, roster: Roster) -> dict[str, str]:
    """For tasks that connect to the first one of their group: see `leader_wait`."""
    return {"PACELINE_LEADER": rendezvous(plan, roster)} if task.rank > 0 else {}


def _tensorflow(plan: Plan, task: Task, roster: Roster) -> dict[str, str]:
    spec = _spec(plan, roster)
    config = {"cluster": spec, "task": {"type": task.role, "index": task.index}}
    patch = {"PACELINE_PATCH_KERAS": "1"} if plan.patch_keras else {}
    # Roles with the same command all load the hook, or none does, such as those that call `python -I`.
    if plan.strategy == "multi-worker" and len({plan.role(role).command for role in spec}) == 1:
        patch["PACELINE_COMPARE_INITIAL_VALUES"] = "1"
    if plan.strategy == "multi-worker":
        patch.update(_leader(plan, task, roster))
    return {"TF_CONFIG": json.dumps(config), "CLUSTER_CONFIG": json.dumps(spec), **patch}


def _spec(plan: Plan, roster: Roster) -> dict[str, list[str]]:
    return {role: [roster[member.name] for member in members] for role, members in cluster(plan)}


def _jax(plan: Plan, task: Task, roster: Roster) -> dict[str, str]:
    coordinator = rendezvous(plan, roster)
    variables = {"PACELINE_JAX_COORDINATOR": coordinator, **_leader(plan, task, roster)}
    if "jaxjob" in plan.env_of:
        address, _, port = coordinator.rpartition(":")
        variables.update(
            COORDINATOR_ADDRESS=address,
            COORDINATOR_PORT=port,
            PROCESS_ID=str(task.rank),
            NUM_PROCESSES=str(plan.world_size),
        )
    return variables


def _torch(plan: Plan, task: Task, roster: Roster, run: str, restarts: int, machine: Machine) -> dict[str, str]:
    address, _, port = rendezvous(plan, roster).rpartition(":")
    host = plan.host(task.host)
    world = str(plan.world_size)
    local_tasks = _local_tasks(plan, task, machine)
    groups = _machines(plan, machine)
    role_env = plan.role(task.role).env
    return {
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "RANK": str(task.rank),
        "WORLD_SIZE": world,
        "LOCAL_RANK": str(local_tasks.index(task)),
        "LOCAL_WORLD_SIZE": str(len(local_tasks)),
        "GROUP_RANK": str(groups.index(_machine_of(task.host, machine))),
        "GROUP_WORLD_SIZE": str(len(groups)),
        "ROLE_NAME": task.role,
        "ROLE_RANK": str(task.rank),
        "ROLE_WORLD_SIZE": world,
        "TORCHELASTIC_RUN_ID": run,
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(plan.restart.limit),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        # Defaults of the options of torchrun: each task that runs it is one of its nodes.
        "PET_NNODES": world,
        "PET_NODE_RANK": str(task.rank),
        "PET_NPROC_PER_NODE": role_env.get("PET_NPROC_PER_NODE") or str(max(1, host.gpus // len(host.tasks))),
        "PET_MASTER_ADDR": address,
        "PET_MASTER_PORT": port,
    }


def _local_tasks(plan: Plan, task: Task, machine: Machine) -> list[Task]:
    """The tasks on the machine that train together, by LOCAL_RANK: those with GPUs first, so that it is the index of
    their GPU, then by rank."""
    hosts = {host.name: host for host in plan.hosts if host.name in (machine or (task.host,))}
    ranked = [each for each in plan.tasks if each.rank >= 0 and each.host in hosts]
    return sorted(ranked, key=lambda each: (hosts[each.host].gpus == 0, each.rank))


def _machine_of(host: str, machine: Machine) -> str:
    """A name for the machine of a host: that of the first host on it."""
    return next(iter(machine)) if host in machine else host


def _machines(plan: Plan, machine: Machine) -> list[str]:
    """The machines of the tasks that train together, in rank order."""
    return list(dict.fromkeys(_machine_of(task.host, machine) for task in plan.tasks if task.rank >= 0))


def _devices_by_local_rank(plan: Plan, task: Task, machine: Machine) -> list[str]:
    """The GPUs of the machine: first one for each task, at the index that is its LOCAL_RANK, then those that remain."""
    tasks = _local_tasks(plan, task, machine)
    own = [machine[each.host][each.local_index % len(machine[each.host])] for each in tasks if machine[each.host]]
    return list(dict.fromkeys([*own, *(device for each in tasks for device in machine[each.host])]))
