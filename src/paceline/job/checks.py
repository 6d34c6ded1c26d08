"""Checks across the fields of a job: roles, commands, and fields that would have no effect."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from paceline.agent.redaction import looks_secret
from paceline.agent.tasks import variable_references
from paceline.frameworks import compile_cache
from paceline.job import kubernetes_checks, kubernetes_section
from paceline.job.errors import Finding, join_names, visible
from paceline.job.fields import ROLES
from paceline.job.model_section import NAMES
from paceline.job.planning import tasks_per_host
from paceline.job.schema_models import HostPool, Job
from paceline.job.serve_section import TENSORFLOW_SERVING
from paceline.job.similar_names import did_you_mean
from paceline.plan import CLAIM, CODE_IN_IMAGE, GROUP, HOST, ROLLBACK, launcher_of

Path = tuple[str | int, ...]

MAX_TASKS = 100_000
MAX_FINDINGS = 100  # problems with items of lists, which may be long
JAXJOB = ("COORDINATOR_ADDRESS", "COORDINATOR_PORT", "NUM_PROCESSES", "PROCESS_ID")  # set for env_of: [jaxjob]
MULTI_WORKER, PARAMETER_SERVER = "multi-worker", "parameter-server"
TRAINING = ("chief", "worker")  # roles whose tasks train together, unless there are parameter servers


def with_defaults(job: Job) -> Job:
    """The job with defaults that depend on other fields."""
    if job.framework == "tensorflow" and job.strategy is None:
        job = job.model_copy(update={"strategy": MULTI_WORKER})
    if job.serve is not None and job.serve.image is None and job.framework == "tensorflow":
        job = job.model_copy(update={"serve": job.serve.model_copy(update={"image": TENSORFLOW_SERVING})})
    if job.kubernetes is not None:
        job = job.model_copy(update={"kubernetes": kubernetes_section.with_defaults(job.kubernetes)})
    return job


def check(job: Job, broken: Sequence[Path]) -> list[Finding]:
    """All problems across fields. `broken`: paths that are already reported, and so are not checked again."""
    findings: list[Finding] = []
    roles_valid = not any(path[0] == "roles" and len(path) <= 3 for path in broken if path)
    framework_valid = ("framework",) not in broken and ("strategy",) not in broken
    if framework_valid:
        findings += _strategy(job)
        findings += _tensorflow(job)
        findings += _env_of(job)
        findings += _compile_cache(job)
        findings += _scope_of_framework(job)
        if roles_valid:
            findings += _shares(job)
        if ("roles",) not in broken:
            findings += _allowed_roles(job)
        if roles_valid:
            findings += _required_roles(job)
    if roles_valid:
        findings += _commands(job, broken, framework_valid)
        findings += _sizes(job)
        findings += _same_pools(job)
        findings += _limits(job)
        findings += _watch(job)
        findings += _on_nan(job)
        findings += _scope(job)
        findings += _elastic(job)
        findings += _standalone(job)
    findings += islice(_references(job), MAX_FINDINGS)
    findings += _serve(job, broken)
    if job.credentials is not None:
        findings += kubernetes_checks.credentials(job.credentials, broken)
    if job.kubernetes is not None:
        in_image = job.code == CODE_IN_IMAGE
        findings += islice(
            kubernetes_checks.kubernetes(job.kubernetes, tuple(job.roles), in_image, broken), MAX_FINDINGS
        )
    return findings


def notes(job: Job, cluster: bool) -> list[str]:
    """Notes for the user about a valid job."""
    messages = []
    launcher = next(filter(None, (launcher_of(command) for _, command in _all_commands(job))), None)
    if job.framework == "torch" and launcher is not None:
        messages.append(
            f"{launcher} is not needed: Paceline starts a task for each GPU of a host, or one without GPUs, with the "
            f"variables that torchrun sets; with {launcher}, steps are not reported"
        )
    pools = [pool for role in job.roles.values() for pool in role]
    for field in ("command", "cpu", "memory", "gpus"):
        if getattr(job, field) is not None and all(getattr(pool, field) is not None for pool in pools):
            messages.append(f"{field}: not used, because every role sets its own")
    tensorboard = job.tensorboard
    if cluster and tensorboard is not None and (tensorboard.service or tensorboard.ingress):
        endpoint = "its Ingress" if tensorboard.ingress else f"its Service ({tensorboard.service})"
        messages.append(
            f"TensorBoard has no authentication: anyone who can reach {endpoint} can see what this run writes"
        )
    unused = [] if cluster else _cluster_only_fields(job)
    if unused:
        messages.append(f"{join_names(unused)}: not used on this machine")
    if not cluster and job.ingest is not None and job.ingest.to.startswith(CLAIM):
        messages.append("ingest.to: on this machine, a folder managed by Paceline replaces the volume claim")
    if secrets := _literal_secrets(job):
        instead = "use a Secret and kubernetes.env_from" if cluster else "set it in your shell instead"
        messages.append(
            f"{join_names(secrets)}: a secret in a job file is written to plan.json of the run and printed by "
            f"`paceline plan`; {instead}"
        )
    return messages


def _literal_secrets(job: Job) -> list[str]:
    """The variables whose values look like secrets."""
    environments = {"env": job.env}
    for role, pools in job.roles.items():
        environments[f"roles.{role}.env"] = pools[0].env
    return [
        f"{field}.{name}"
        for field, variables in environments.items()
        for name, value in variables.items()
        if looks_secret(name, value)
    ]


def _cluster_only_fields(job: Job) -> list[str]:
    """The fields that are set but used on clusters only."""
    is_set_by_field = {
        "snapshots.to": (job.snapshots.to or "").startswith(CLAIM),
        "snapshots.memory": job.snapshots.memory is not None,
        **{f"tensorboard.{name}": getattr(job.tensorboard, name, None) for name in ("image", "service", "ingress")},
        "serve": job.serve is not None,
        "credentials": job.credentials is not None,
        "limits.keep_finished": "keep_finished" in job.limits.model_fields_set,
        "kubernetes": job.kubernetes is not None,
    }
    return [field for field, is_set in is_set_by_field.items() if is_set]


def allowed_roles(framework: str, strategy: str | None) -> tuple[str, ...]:
    if framework != "tensorflow":
        return ("worker", "evaluator")
    return ROLES if strategy == PARAMETER_SERVER else ("chief", "worker", "evaluator")


def _kind(job: Job) -> str:
    if job.framework == "tensorflow":
        return f"tensorflow job with strategy {job.strategy or MULTI_WORKER}"
    return "job with framework none" if job.framework == "none" else f"{job.framework} job"


def _strategy(job: Job) -> Iterator[Finding]:
    if job.strategy is not None and job.framework != "tensorflow":
        yield Finding(
            ("strategy",), f"has no effect in a {_kind(job)}: only tensorflow jobs have a strategy", "remove it"
        )


def _tensorflow(job: Job) -> Iterator[Finding]:
    if job.framework != "tensorflow":
        if "tensorflow" in job.model_fields_set:
            yield Finding(("tensorflow",), f"has no effect in a {_kind(job)}", "remove it", at_key=True)
    elif "patch_keras" in job.tensorflow.model_fields_set and job.tensorflow.keras is not None:
        message = "has no effect with keras: legacy, which is not patched"
        yield Finding(("tensorflow", "patch_keras"), message, "remove one of them")


def _env_of(job: Job) -> Iterator[Finding]:
    if job.env_of and job.framework != "jax":
        yield Finding(("env_of",), f"has no effect in a {_kind(job)}: only jax jobs have it", "remove it", at_key=True)
        return
    for path, env in _envs(job):
        for name in JAXJOB if job.env_of else ():
            if name in env:
                yield Finding((*path, name), "is set by Paceline, because of env_of: [jaxjob]", "remove one of them")


def _compile_cache(job: Job) -> Iterator[Finding]:
    if "compile_cache" in job.restart.model_fields_set and job.framework not in compile_cache.FRAMEWORKS:
        message = f"has no effect in a {_kind(job)}: only jax and torch jobs have it"
        yield Finding(("restart", "compile_cache"), message, "remove it")


def _envs(job: Job) -> Iterator[tuple[Path, dict[str, str]]]:
    yield ("env",), job.env
    for role, pools in job.roles.items():
        yield ("roles", role, 0, "env"), pools[0].env


def _all_commands(job: Job) -> Iterator[tuple[Path, list[str]]]:
    yield ("command",), job.command or []
    for role, pools in job.roles.items():
        yield ("roles", role, 0, "command"), pools[0].command or []
    for name, command in job.programs.items():
        yield (name, "command"), command
    if job.ingest is not None:
        yield ("ingest", "command"), job.ingest.command


def _references(job: Job) -> Iterator[Finding]:
    """References to variables that do not exist."""
    texts = [((*path, name), value) for path, env in _envs(job) for name, value in env.items()]
    for path, command in _all_commands(job):
        script = variable_references.shell_script(command)  # a shell may have variables of its own
        texts += [((*path, index), word) for index, word in enumerate(command) if index != script]
    for path, text in texts:
        for name in variable_references.names_in(text):
            if name not in variable_references.NAMES:
                hint = (
                    did_you_mean(name, variable_references.NAMES) or f"write $${visible(name, 60)} for the text itself"
                )
                yield Finding(path, f"${visible(name, 60)} is not a Paceline variable", hint)


def _standalone(job: Job) -> Iterator[Finding]:
    if job.framework != "torch" or "worker" not in job.roles:
        return
    pools = job.roles["worker"]
    path: Path = ("command",) if pools[0].command is None else ("roles", "worker", 0, "command")
    command = (pools[0].command or job.command) or []
    program = next((index for index, word in enumerate(command) if word.endswith(".py")), len(command))
    hosts = sum(pool.max or pool.replicas for pool in pools)
    if hosts > 1 and job.restart.scope == GROUP and launcher_of(command) and "--standalone" in command[:program]:
        message = "makes torchrun train on each host separately"
        hint = "remove it: Paceline sets defaults for torchrun with which all hosts train together"
        yield Finding((*path, command.index("--standalone")), message, hint)


def _allowed_roles(job: Job) -> Iterator[Finding]:
    names = allowed_roles(job.framework, job.strategy)
    for role in job.roles:
        if role in names:
            continue
        if role not in ROLES:
            hint = did_you_mean(role, names)
            yield Finding(("roles", role), f'unknown role "{visible(role, 60)}"', hint, join_names(names), at_key=True)
            continue
        hint = 'did you mean "strategy: parameter-server"?' if role == "ps" and job.framework == "tensorflow" else None
        yield Finding(("roles", role), f'a {_kind(job)} has no role "{role}"', hint, join_names(names), at_key=True)


def _required_roles(job: Job) -> Iterator[Finding]:
    if not job.roles:
        yield Finding(("roles",), "is empty", "remove it to run one worker, or write {worker: {replicas: 2}}")
        return
    if job.framework == "tensorflow" and job.strategy == PARAMETER_SERVER:
        for role in ("worker", "ps"):
            if role not in job.roles:
                yield Finding(
                    ("roles",),
                    f'a {_kind(job)} needs at least one "{role}"',
                    f"add {role}: {{replicas: 1}}",
                    at_key=True,
                )
    elif not job.roles.keys() & {"worker", "chief"}:
        valid = job.roles.keys() & set(allowed_roles(job.framework, job.strategy))
        if valid:
            yield Finding(("roles",), 'has no "worker": no task would train', "add worker: {replicas: 1}", at_key=True)


def _commands(job: Job, broken: Sequence[Path], framework_valid: bool) -> Iterator[Finding]:
    if job.command is not None or any("command" in path and path[0] not in NAMES for path in broken):
        return
    hint = "write command: [python, train.py]"
    if all(pool.command is None for pools in job.roles.values() for pool in pools):
        yield Finding(("command",), "is missing: there is nothing to run", hint)
    elif framework_valid:
        names = set(allowed_roles(job.framework, job.strategy)) - _servers(job)
        for role, pools in job.roles.items():
            if role in names and pools[0].command is None:
                path = ("roles", role, "command")
                yield Finding(path, "is missing, and the job has no command either", hint, at_key=True)


def _servers(job: Job) -> set[str]:
    """The roles that run a plain server if they have no command."""
    if job.framework != "tensorflow" or job.strategy != PARAMETER_SERVER:
        return set()
    return {"ps", "worker"} if "chief" in job.roles else {"ps"}


def _sizes(job: Job) -> Iterator[Finding]:
    chiefs = job.roles.get("chief", [])
    replicas = sum(pool.replicas for pool in chiefs)
    if replicas > 1:
        path: Path = ("roles", "chief", 0, "replicas") if len(chiefs) == 1 else ("roles", "chief")
        yield Finding(path, f"a job must have exactly one chief, got {replicas}", allowed="1")
    elif chiefs and tasks_per_host(job, "chief", chiefs[0]) > 1:
        tasks = tasks_per_host(job, "chief", chiefs[0])
        field = next((field for field in ("tasks_per_host", "gpus") if getattr(chiefs[0], field) is not None), None)
        path = ("roles", "chief", 0, field) if field else ("gpus",)
        reason = "" if field == "tasks_per_host" else ", one per GPU"
        hint = "write tasks_per_host: 1 in roles.chief"
        yield Finding(path, f"a job must have exactly one chief, but this creates {tasks} chief tasks{reason}", hint)
    tasks = sum(
        (pool.max or pool.replicas) * tasks_per_host(job, role, pool)
        for role, pools in job.roles.items()
        for pool in pools
    )
    if tasks > MAX_TASKS:
        yield Finding(("roles",), f"would create {tasks} tasks; a job can have at most {MAX_TASKS}", at_key=True)


def _limits(job: Job) -> Iterator[Finding]:
    if job.limits.evaluation is not None and "evaluator" not in job.roles:
        yield Finding(("limits", "evaluation"), "has no effect: the job has no evaluator", "remove it")


def _serve(job: Job, broken: Sequence[Path]) -> Iterator[Finding]:
    if job.serve is None:
        return
    if job.export is None and not any(path[:1] == ("export",) for path in broken):
        message = "has no effect without export, which creates the model from a snapshot"
        yield Finding(("serve",), message, "write export: {command: [python, export.py]}", at_key=True)
    unreported = not any(path in (("framework",), ("serve", "image")) for path in broken)
    if job.serve.image is None and job.framework != "tensorflow" and unreported:
        framework = "" if job.framework == "none" else f" and {job.framework}"
        message = "is missing: only tensorflow has a default image for serving"
        yield Finding(("serve", "image"), message, f"name an image that contains paceline[serve]{framework}")


def _watch(job: Job) -> Iterator[Finding]:
    if job.snapshots.watch is not None and job.strategy == PARAMETER_SERVER and "chief" not in job.roles:
        yield Finding(
            ("snapshots", "watch"),
            "has no effect: a parameter-server job watches the chief's folder, and this job has no chief",
            "add roles.chief, or remove it",
        )


def _on_nan(job: Job) -> Iterator[Finding]:
    if job.restart.on_nan != ROLLBACK:
        return
    path = ("restart", "on_nan")
    if job.restart.limit == 0:
        yield Finding(path, "has no effect with limit: 0, which allows no restart", "write on_nan: stop")
    if job.strategy == PARAMETER_SERVER and "chief" not in job.roles:
        message = "rollback needs a chief in a parameter-server job: only it resumes from a snapshot"
        yield Finding(path, message, "add roles.chief, or write on_nan: stop")


def _scope_of_framework(job: Job) -> Iterator[Finding]:
    """Which frameworks can continue without a task, and take it back."""
    if "scope" not in job.restart.model_fields_set:
        return
    path = ("restart", "scope")
    alone = "write framework: none if the tasks do not train together through"
    if job.strategy == PARAMETER_SERVER:
        yield Finding(path, f"has no effect in a {_kind(job)}: its workers always restart individually", "remove it")
    elif job.restart.scope != GROUP and job.framework == "tensorflow":
        message = f"cannot be {job.restart.scope} in a {_kind(job)}: a task cannot rejoin its collectives"
        yield Finding(path, message, f"remove it, or {alone} tf.distribute")
    elif job.restart.scope != GROUP and job.framework == "jax":
        message = f"cannot be {job.restart.scope} in a jax job: JAX ends all processes of a group if one of them dies"
        yield Finding(path, message, f"remove it, or {alone} jax.distributed")


def _scope(job: Job) -> Iterator[Finding]:
    """Without `scope: group`, some tasks continue while others restart."""
    scope, path = job.restart.scope, ("restart", "scope")
    if scope == GROUP or job.framework in ("tensorflow", "jax"):
        return
    workers = job.roles.get("worker", [])
    units = sum(pool.replicas * (1 if scope == HOST else tasks_per_host(job, "worker", pool)) for pool in workers)
    if any(pool.min is not None or pool.max is not None for pool in workers):
        message = (
            f"cannot be {scope} for workers with min or max: their number changes only if the whole group restarts"
        )
        yield Finding(path, message, "remove it, or remove min and max")
    elif units == 1:
        what = "one worker host" if scope == HOST else "one worker"
        yield Finding(path, f"has no effect: the job has only {what}", "remove it")
    if job.restart.limit == 0:
        yield Finding(path, "has no effect with limit: 0, which allows no restart", "remove it")
    if job.restart.on_nan == ROLLBACK:
        message = f"cannot be {scope} with on_nan: rollback, which restarts the whole group"
        yield Finding(path, message, "remove it, or write on_nan: stop")
    if job.snapshots.watch:
        message = f"cannot be {scope} with snapshots.watch: its folder can be restored only while no task uses it"
        yield Finding(path, message, "remove one of them")


def _elastic(job: Job) -> Iterator[Finding]:
    elastic: list[tuple[Path, str, HostPool]] = [
        (("roles", role, index, field), role, pool)
        for role, pools in job.roles.items()
        for index, pool in enumerate(pools)
        for field in ("min", "max")
        if getattr(pool, field) is not None
    ]
    if not elastic:
        if "elastic" in job.model_fields_set:
            message = "has no effect: no role has min or max, so every generation needs all hosts"
            yield Finding(("elastic",), message, "write roles: {worker: {replicas: 4, min: 2}}", at_key=True)
        return
    for path, role, pool in elastic:
        yield from _number_of_hosts(job, path, role, pool)
    if job.snapshots.watch:
        path, field = elastic[0][0], elastic[0][0][-1]
        message = "cannot be combined with snapshots.watch: a program's own checkpoints are captured on one host only"
        yield Finding(path, message, f"use Paceline's helpers for snapshots, or remove {field}")
    if job.elastic.wait >= job.limits.start:
        message = f"must be less than limits.start ({job.limits.start:g} s), after which the run fails"
        yield Finding(("elastic", "wait"), message)


def _number_of_hosts(job: Job, path: Path, role: str, pool: HostPool) -> Iterator[Finding]:
    field = path[-1]
    if role != "worker":
        needs = f"a job needs every {role}" if field == "min" else f"the number of hosts of {role} cannot change"
        yield Finding(path, f"{needs}: only workers can have {field}", "remove it")
    elif field == "max" and job.strategy == PARAMETER_SERVER:
        message = "cannot be used in a parameter-server job: a chief cannot get more workers than the run starts with"
        yield Finding(path, message, "remove it")
    elif job.strategy == PARAMETER_SERVER and "chief" not in job.roles:
        message = "requires a chief in a parameter-server job: only a chief gives a lost worker's work to the others"
        yield Finding(path, message, "add a chief, or remove it")
    elif field == "min" and pool.min is not None and pool.min > pool.replicas:
        message = f"is {pool.min}, but there are only {pool.replicas} hosts (replicas)"
        yield Finding(path, message, allowed=f"at most {pool.replicas}")
    elif field == "max" and len(job.roles[role]) > 1:
        message = "cannot be used if workers are in several host pools: `scale` could not tell which pool to extend"
        yield Finding(path, message, "remove it, or write one host pool")
    elif field == "max" and pool.max is not None and pool.max < pool.replicas:
        message = f"is {pool.max}, but the run starts with {pool.replicas} hosts (replicas)"
        yield Finding(path, message, allowed=f"at least {pool.replicas}")


def _shares(job: Job) -> Iterator[Finding]:
    """Whether the tasks that train together can have shares of a batch that are not equal."""
    pools = [(role, index, pool) for role, pools in job.roles.items() for index, pool in enumerate(pools)]
    shares = {pool.share or 1 for role, _, pool in pools if role in TRAINING}
    for role, index, pool in pools:
        hint = "remove it"
        if pool.share is None:
            continue
        if job.strategy == PARAMETER_SERVER:
            message = f"has no effect in a {_kind(job)}: a worker gets its next step when it has done the last one"
        elif job.framework == "torch":
            message = (
                "cannot be used in a torch job: DDP and FSDP average the gradients of all tasks equally, so an example "
                "of a larger share would count less"
            )
        elif role not in TRAINING:
            message = f"has no effect: {role} does not train"
        elif len(shares) == 1:
            message = f"has no effect: all tasks that train have share {pool.share}"
            hint = "remove it, or write host pools with different shares"
        else:
            continue
        yield Finding(("roles", role, index, "share"), message, hint)


def _same_pools(job: Job) -> Iterator[Finding]:
    for role, pools in job.roles.items():
        for index, pool in enumerate(pools[1:], start=1):
            for field in ("command", "env"):
                if getattr(pool, field) != getattr(pools[0], field):
                    yield Finding(
                        ("roles", role, index, field),
                        f"differs from the first host pool: all host pools of a role must have the same {field}",
                        f"use the same {field} in every host pool of {role}",
                    )
