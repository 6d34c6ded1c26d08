"""Turns a valid job into its plan, without I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.plan import (
    ALONE,
    LEAD,
    ORDER,
    VERSION,
    Elastic,
    ElasticHosts,
    Host,
    Ingest,
    Limits,
    Plan,
    Program,
    Restart,
    Role,
    Snapshots,
    Task,
    Track,
    Webhook,
    launcher_of,
)

if TYPE_CHECKING:
    from paceline.job.schema_models import HostPool, Job


def make_plan(job: Job) -> Plan:
    """Build the plan of a validated job. The same job gives the same plan, byte for byte."""
    roles: list[Role] = []
    hosts: list[Host] = []
    tasks: list[Task] = []
    rank = 0
    parameter_server = job.strategy == "parameter-server"
    for name in ORDER:
        pools = job.roles.get(name)
        if not pools:
            continue
        first = pools[0]
        roles.append(
            Role(
                name=name,
                command=tuple(first.command if first.command is not None else job.command or []),
                env={**_keras_env(job), **job.env, **first.env},
                restarts=_restarts(name, parameter_server, job.restart.scope),
                watched=name in ("chief", "worker"),
                decides=name == ("chief" if "chief" in job.roles else "worker"),
            )
        )
        in_group = name in ("chief", "worker") and not parameter_server
        host_index = task_index = 0
        for pool_index, pool in enumerate(pools):
            gpus = gpus_of(job, name, pool)
            per_host = tasks_per_host(job, name, pool)
            for _ in range(pool.max or pool.replicas):
                host = f"{name}-host-{host_index}"
                names = tuple(f"{name}-{task_index + i}" for i in range(per_host))
                hosts.append(
                    Host(
                        host, name, host_index, pool_index, gpus,
                        _first(pool.cpu, job.cpu, None), _first(pool.memory, job.memory, None), names,
                        _first(pool.share, 1),
                    )
                )  # fmt: skip
                for local, task in enumerate(names):
                    tasks.append(Task(task, name, task_index + local, host, local, rank if in_group else -1))
                    rank += in_group
                host_index += 1
                task_index += per_host
    return Plan(
        version=VERSION,
        name=job.name,
        framework=job.framework,
        strategy=job.strategy or "",
        code=job.code,
        roles=tuple(roles),
        hosts=tuple(hosts),
        tasks=tuple(tasks),
        restart=Restart(
            job.restart.limit,
            job.restart.hang_after,
            job.restart.warm,
            job.restart.compile_cache,
            job.restart.on_nan,
        ),
        limits=Limits(
            job.limits.start,
            job.limits.runtime,
            job.limits.grace,
            job.limits.keep_finished,
            job.limits.commit,
            job.limits.evaluation,
            job.limits.log,
        ),
        snapshots=_snapshots(job),
        ingest=_ingest(job),
        tensorboard=job.tensorboard.model_dump() if job.tensorboard is not None else {},
        patch_keras=job.framework == "tensorflow" and job.tensorflow.patch_keras and job.tensorflow.keras is None,
        credentials=job.credentials.model_dump() if job.credentials is not None else {},
        kubernetes=job.kubernetes.model_dump() if job.kubernetes is not None else {},
        programs={
            name: Program(tuple(command), {**_keras_env(job), **job.env}) for name, command in job.programs.items()
        },
        serve=job.serve.model_dump() if job.serve is not None else {},
        metrics=job.metrics,
        env_of=tuple(job.env_of),
        notify=tuple(
            Webhook(each.url or "", each.url_from or "", tuple(dict.fromkeys(each.on)), each.format)
            for each in job.notify
        ),
        elastic=_elastic(job),
        track=None if job.track is None else Track(job.track.mlflow, job.track.experiment or job.name, job.parameters),
    )


def _keras_env(job: Job) -> dict[str, str]:
    """Makes `tf.keras` an alias of tf_keras; TensorFlow reads it on import."""
    return {"TF_USE_LEGACY_KERAS": "1"} if job.tensorflow.keras == "legacy" else {}


def _snapshots(job: Job) -> Snapshots:
    section = job.snapshots
    best = None if section.best is None else (section.best.metric, section.best.mode == "min")
    claim = {} if section.claim is None else section.claim.model_dump()
    return Snapshots(
        section.to or "", section.keep, best, section.rate, claim, section.watch or "", section.origin, section.trust,
        section.commit_every, section.memory,
    )  # fmt: skip


def _elastic(job: Job) -> Elastic | None:
    hosts = tuple(
        ElasticHosts(role, index, pool.min or pool.replicas, None if pool.max is None else pool.replicas)
        for role, pools in job.roles.items()
        for index, pool in enumerate(pools)
        if pool.min is not None or pool.max is not None
    )
    return Elastic(job.elastic.wait, job.elastic.every, hosts) if hosts else None


def _ingest(job: Job) -> Ingest | None:
    section = job.ingest
    if section is None:
        return None
    inputs = None if section.inputs is None else tuple(section.inputs)
    return Ingest(tuple(section.command), section.to, inputs, section.limit)


def gpus_of(job: Job, role: str, pool: HostPool) -> int:
    """GPUs per host. The job-wide number applies to the roles that train; ps and evaluator have their own."""
    return int(_first(pool.gpus, job.gpus if role in ("chief", "worker") else None, 0))


def tasks_per_host(job: Job, role: str, pool: HostPool) -> int:
    command = pool.command if pool.command is not None else job.command
    starts_its_own = job.framework == "torch" and launcher_of(command or ()) is not None
    return int(_first(pool.tasks_per_host, 1 if starts_its_own else max(1, gpus_of(job, role, pool))))


def _restarts(role: str, parameter_server: bool, scope: str) -> str:
    if role == "evaluator":
        return ALONE
    if parameter_server:
        return ALONE if role == "worker" else LEAD
    return scope


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)
