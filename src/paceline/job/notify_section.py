"""The `notify` section of a job file: which webhooks are notified of what happens to a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field, PlainValidator, WithJsonSchema

from paceline.agent.deliveries.addresses import problem_with
from paceline.job import kubernetes_values, values
from paceline.job.errors import BadValueError, Finding, describe, join_names
from paceline.job.fields import Strict, choice, text_schema
from paceline.job.kubernetes_checks import is_reported, items_with_paths, one_of, reported_steps
from paceline.plan import FAILED, JSON, NOTIFY_FORMATS, NOTIFY_ON, STOPPED, SUCCEEDED

if TYPE_CHECKING:
    from paceline.job.schema_models import Job

Path = tuple[str | int, ...]

MOST = 20  # receivers

_ON_ALIASES = {
    "failure": "failed", "fail": "failed", "error": "failed", "success": "succeeded", "succeed": "succeeded",
    "finished": "succeeded", "done": "succeeded", "stop": "stopped", "hung": "hang", "hangs": "hang",
    "restarted": "restart", "restarts": "restart",
}  # fmt: skip


def address(value: Any) -> str:
    if not isinstance(value, str):
        raise BadValueError(f"must be an address, got {describe(value)}", "write https://example.com/hook")
    if problem := problem_with(value):
        raise BadValueError(f"the address {problem}", "put a secret address in a variable, and write url_from: NAME")
    return value


Address = Annotated[str, PlainValidator(address), WithJsonSchema(text_schema("^https?://[^@\\s]+$"))]
VariableName = Annotated[
    str, PlainValidator(values.env_name), WithJsonSchema(text_schema(values.ENV_NAME, maxLength=255))
]
Kinds = Annotated[
    list[Annotated[str, *choice(NOTIFY_ON, _ON_ALIASES)]],
    BeforeValidator(kubernetes_values.items("names")),
    Field(json_schema_extra={"minItems": 1}),
]


class Notify(Strict):
    """A receiver of [notifications](notifications.md): exactly one of `url` and `url_from`."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [{"required": ["url"]}, {"required": ["url_from"]}]})

    url: Address | None = Field(
        default=None,
        description="The address to which notifications are sent with POST. Only on one machine: on a cluster, the "
        "address must come from a Secret, with `url_from`.",
        examples=["http://localhost:8080/paceline"],
    )
    url_from: VariableName | None = Field(
        default=None,
        description="The environment variable with the address: of the shell that starts the run; on a cluster, from a "
        "Secret in `kubernetes.env_from`.",
        examples=["SLACK_URL"],
    )
    on: Kinds = Field(
        default_factory=lambda: [FAILED, SUCCEEDED, STOPPED],
        description="What the receiver is notified of: the end of the run (`failed`, `succeeded`, `stopped`), tasks "
        "without progress (`hang`), and every restart of tasks after a failure (`restart`). Default: the end of the "
        "run.",
        examples=[["failed", "hang"]],
    )
    format: Annotated[str, *choice(NOTIFY_FORMATS, {})] = Field(
        default=JSON,
        description="What is sent: `json`, all details, or `slack`, a text in the format that Slack and compatible "
        "services expect.",
    )


def check(job: Job, broken: Sequence[Path], cluster: bool) -> Iterator[Finding]:
    if len(job.notify) > MOST:
        yield Finding(("notify",), f"has {len(job.notify)} receivers; a job can have at most {MOST}", at_key=True)
    reported = reported_steps(broken)
    for path, item in items_with_paths(job.notify, ("notify",), broken):
        yield from one_of(item, ("url", "url_from"), "a receiver", path, reported)
        if not item.on and not is_reported(reported, path, item, "on"):
            message = "is empty: the receiver would never be notified"
            yield Finding((*path, "on"), message, allowed=join_names(NOTIFY_ON))
        if cluster and item.url is not None:
            message = "on a cluster, the address must come from a Secret: others can read the plan of a run"
            yield Finding((*path, "url"), message, "write url_from: NAME, and add the Secret to kubernetes.env_from")
        elif cluster and item.url_from is not None and not (job.kubernetes and job.kubernetes.env_from):
            message = "names a variable of a Secret, but kubernetes.env_from is empty"
            yield Finding((*path, "url_from"), message, "write env_from: [{secret: NAME}] in kubernetes")
