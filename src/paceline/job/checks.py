"""What must hold between the fields of a job: roles, commands and fields that would have no effect."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from paceline.job import cluster, cluster_checks
from paceline.job.errors import Finding, did_you_mean, listed, visible
from paceline.job.fields import ROLES
from paceline.job.models import Job
from paceline.job.programs import NAMES
from paceline.job.serving import TENSORFLOW_SERVING
from paceline.plan import CLAIM, CODE_IN_IMAGE, tasks_per_host

Path = tuple[str | int, ...]

MOST_TASKS = 100_000
MOST_FINDINGS = 100  # of the items of lists, which may be many
MULTI_WORKER, PARAMETER_SERVER = "multi-worker", "parameter-server"


def with_defaults(job: Job) -> Job:
    """The job with what follows from its other fields where it does not say."""
    if job.framework == "tensorflow" and job.strategy is None:
        job = job.model_copy(update={"strategy": MULTI_WORKER})
    if job.serve is not None and job.serve.image is None and job.framework == "tensorflow":
        job = job.model_copy(update={"serve": job.serve.model_copy(update={"image": TENSORFLOW_SERVING})})
    if job.kubernetes is not None:
        job = job.model_copy(update={"kubernetes": cluster.with_defaults(job.kubernetes)})
    return job


def check(job: Job, broken: Sequence[Path]) -> list[Finding]:
    """Everything wrong between fields. `broken` are paths already reported: nothing is concluded from them."""
    findings: list[Finding] = []
    roles_known = not any(path[0] == "roles" and len(path) <= 3 for path in broken if path)
    framework_known = ("framework",) not in broken and ("strategy",) not in broken
    if framework_known:
        findings += _strategy(job)
        findings += _tensorflow(job)
        if ("roles",) not in broken:
            findings += _allowed_roles(job)
        if roles_known:
            findings += _needed_roles(job)
    if roles_known:
        findings += _commands(job, broken, framework_known)
        findings += _sizes(job)
        findings += _same_groups(job)
        findings += _limits(job)
        findings += _watch(job)
    findings += _serve(job, broken)
    if job.credentials is not None:
        findings += cluster_checks.credentials(job.credentials, broken)
    if job.kubernetes is not None:
        in_image = job.code == CODE_IN_IMAGE
        findings += islice(cluster_checks.kubernetes(job.kubernetes, in_image, broken), MOST_FINDINGS)
    return findings


def notes(job: Job, cluster: bool) -> list[str]:
    """What a person may want to know about a job that is right."""
    found = []
    groups = [group for role in job.roles.values() for group in role]
    for field in ("command", "cpu", "memory", "gpus"):
        if getattr(job, field) is not None and all(getattr(group, field) is not None for group in groups):
            found.append(f"{field}: not used, every role has its own")
    beside = job.tensorboard
    if cluster and beside is not None and (beside.service or beside.ingress):
        where = "its Ingress" if beside.ingress else f"its Service ({beside.service})"
        found.append(f"TensorBoard asks nobody who they are: whoever reaches {where} sees what this run writes")
    unused = [] if cluster else _for_clusters(job)
    if unused:
        found.append(f"{listed(unused)}: not used on this machine")
    if not cluster and job.ingest is not None and job.ingest.to.startswith(CLAIM):
        found.append("ingest.to: a folder of Paceline's own stands for the claim on this machine")
    return found


def _for_clusters(job: Job) -> list[str]:
    """The fields that were given and that only a cluster uses."""
    given = {
        "snapshots.to": (job.snapshots.to or "").startswith(CLAIM),
        **{f"tensorboard.{name}": getattr(job.tensorboard, name, None) for name in ("image", "service", "ingress")},
        "serve": job.serve is not None,
        "credentials": job.credentials is not None,
        "limits.keep_finished": "keep_finished" in job.limits.model_fields_set,
        "kubernetes": job.kubernetes is not None,
    }
    return [field for field, is_given in given.items() if is_given]


def allowed_roles(framework: str, strategy: str | None) -> tuple[str, ...]:
    if framework != "tensorflow":
        return ("worker", "evaluator")
    return ROLES if strategy == PARAMETER_SERVER else ("chief", "worker", "evaluator")


def _kind(job: Job) -> str:
    if job.framework == "tensorflow":
        return f"tensorflow job with strategy {job.strategy or MULTI_WORKER}"
    return "job of no framework" if job.framework == "none" else f"{job.framework} job"


def _strategy(job: Job) -> Iterator[Finding]:
    if job.strategy is not None and job.framework != "tensorflow":
        yield Finding(("strategy",), f"has no effect in a {_kind(job)}: only tensorflow has strategies", "remove it")


def _tensorflow(job: Job) -> Iterator[Finding]:
    given = job.tensorflow.model_fields_set
    if job.framework != "tensorflow":
        if "tensorflow" in job.model_fields_set:
            yield Finding(("tensorflow",), f"has no effect in a {_kind(job)}", "remove it", at_key=True)
    elif "patch_keras" in given and job.tensorflow.keras is not None:
        what = "has no effect with keras: legacy, which is not patched"
        yield Finding(("tensorflow", "patch_keras"), what, "remove one of them")


def _allowed_roles(job: Job) -> Iterator[Finding]:
    names = allowed_roles(job.framework, job.strategy)
    for role in job.roles:
        if role in names:
            continue
        if role not in ROLES:
            hint = did_you_mean(role, names)
            yield Finding(("roles", role), f'unknown role "{visible(role, 60)}"', hint, listed(names), at_key=True)
            continue
        hint = 'did you mean "strategy: parameter-server"?' if role == "ps" and job.framework == "tensorflow" else None
        yield Finding(("roles", role), f'a {_kind(job)} has no role "{role}"', hint, listed(names), at_key=True)


def _needed_roles(job: Job) -> Iterator[Finding]:
    if not job.roles:
        yield Finding(("roles",), "is empty", "remove it for one worker, or write {worker: {replicas: 2}}")
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
        known = job.roles.keys() & set(allowed_roles(job.framework, job.strategy))
        if known:
            yield Finding(("roles",), 'has no "worker": nothing would train', "add worker: {replicas: 1}", at_key=True)


def _commands(job: Job, broken: Sequence[Path], framework_known: bool) -> Iterator[Finding]:
    if job.command is not None or any("command" in path and path[0] not in NAMES for path in broken):
        return
    hint = "write command: [python, train.py]"
    if all(group.command is None for groups in job.roles.values() for group in groups):
        yield Finding(("command",), "is missing: nothing says what to run", hint)
    elif framework_known:
        names = set(allowed_roles(job.framework, job.strategy)) - _servers(job)
        for role, groups in job.roles.items():
            if role in names and groups[0].command is None:
                path = ("roles", role, "command")
                yield Finding(path, "is missing, and the job has no command either", hint, at_key=True)


def _servers(job: Job) -> set[str]:
    """The roles that run a plain server where they have no command."""
    if job.framework != "tensorflow" or job.strategy != PARAMETER_SERVER:
        return set()
    return {"ps", "worker"} if "chief" in job.roles else {"ps"}


def _sizes(job: Job) -> Iterator[Finding]:
    chiefs = job.roles.get("chief", [])
    replicas = sum(group.replicas for group in chiefs)
    if replicas > 1:
        where: Path = ("roles", "chief", 0, "replicas") if len(chiefs) == 1 else ("roles", "chief")
        yield Finding(where, f"a job has exactly one chief, got {replicas}", allowed="1")
    elif chiefs and tasks_per_host(job, "chief", chiefs[0]) > 1:
        tasks = tasks_per_host(job, "chief", chiefs[0])
        own = next((field for field in ("tasks_per_host", "gpus") if getattr(chiefs[0], field) is not None), None)
        where = ("roles", "chief", 0, own) if own else ("gpus",)
        why = "" if own == "tasks_per_host" else ", one a GPU"
        hint = "write tasks_per_host: 1 in roles.chief"
        yield Finding(where, f"a job has exactly one chief, and this makes {tasks} tasks of it{why}", hint)
    tasks = sum(
        group.replicas * tasks_per_host(job, role, group) for role, groups in job.roles.items() for group in groups
    )
    if tasks > MOST_TASKS:
        yield Finding(("roles",), f"makes {tasks} tasks; a job has at most {MOST_TASKS}", at_key=True)


def _limits(job: Job) -> Iterator[Finding]:
    if job.limits.evaluation is not None and "evaluator" not in job.roles:
        yield Finding(("limits", "evaluation"), "has no effect: the job has no evaluator", "remove it")


def _serve(job: Job, broken: Sequence[Path]) -> Iterator[Finding]:
    if job.serve is None:
        return
    if job.export is None and not any(path[:1] == ("export",) for path in broken):
        what = "has no effect without export, which makes the model of a snapshot"
        yield Finding(("serve",), what, "write export: {command: [python, export.py]}", at_key=True)
    known = not any(path in (("framework",), ("serve", "image")) for path in broken)
    if job.serve.image is None and job.framework != "tensorflow" and known:
        framework = "" if job.framework == "none" else f" and {job.framework}"
        what = "is missing: only for tensorflow there is an image that serves its models"
        yield Finding(("serve", "image"), what, f"name one that holds paceline[serve]{framework}")


def _watch(job: Job) -> Iterator[Finding]:
    if job.snapshots.watch is not None and job.strategy == PARAMETER_SERVER and "chief" not in job.roles:
        yield Finding(
            ("snapshots", "watch"),
            "has no effect: in a parameter-server job it is the chief's folder that is watched, and the job has none",
            "add roles.chief, or remove it",
        )


def _same_groups(job: Job) -> Iterator[Finding]:
    for role, groups in job.roles.items():
        for index, group in enumerate(groups[1:], start=1):
            for field in ("command", "env"):
                if getattr(group, field) != getattr(groups[0], field):
                    yield Finding(
                        ("roles", role, index, field),
                        f"differs from the {field} of the first group: all groups of a role have the same",
                        f"give every group of {role} the same {field}",
                    )
