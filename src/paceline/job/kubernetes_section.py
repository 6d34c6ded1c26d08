"""The `kubernetes` and `credentials` sections of a job file, as pydantic models."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field, PlainValidator, WithJsonSchema

from paceline.job import kubernetes_values as values
from paceline.job.fields import EnvValue, Memory, Strict, Switch, Text, choice, number_schema, text_schema, whole

OPERATORS = ("Equal", "Exists")
EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
PULL_POLICIES = ("Always", "IfNotPresent", "Never")
PLACEMENTS = ("spread", "pack")
SOURCES = ("claim", "secret", "config_map", "empty")
WORK = f"{values.OWN}/work"

FIELD_ALIASES = {
    "runasuser": "user",
    "serviceaccountname": "service_account",
    "priorityclassname": "priority_class",
    "kubecontext": "context",
    "workdir": "work",
    "workingdir": "work",
    "tolerationseconds": "seconds",
    "mountpath": "mount",
    "path": "mount",
    "pvc": "claim",
    "persistentvolumeclaim": "claim",
    "claimname": "claim",
    "secretname": "secret",
    "secretref": "secret",
    "configmapref": "config_map",
    "emptydir": "empty",
    "sizelimit": "empty",
    "key": "file",
}
"""The names of these fields in Kubernetes, in lowercase without `_` and `-`."""

_PLACEMENT_ALIASES = {
    "spreadout": "spread",
    "scatter": "spread",
    "binpack": "pack",
    "packed": "pack",
    "together": "pack",
}


def _mapping(key: str, value: dict[str, Any]) -> WithJsonSchema:
    return WithJsonSchema({"type": "object", "propertyNames": {"pattern": key}, "additionalProperties": value})


_LABEL_VALUE = text_schema(values.LABEL_VALUE, maxLength=values.LABEL_LENGTH)

Namespace = Annotated[
    str,
    PlainValidator(values.namespace),
    WithJsonSchema(text_schema(f"^{values.LABEL}$", maxLength=values.LABEL_LENGTH)),
]
VolumeName = Annotated[
    str,
    PlainValidator(values.volume_name),
    WithJsonSchema(text_schema(f"^(?!paceline-){values.LABEL}$", maxLength=values.LABEL_LENGTH)),
]
Image = Annotated[str, PlainValidator(values.image), WithJsonSchema(text_schema(r"^\S+$"))]
ObjectName = Annotated[
    str,
    PlainValidator(values.object_name),
    WithJsonSchema(text_schema(f"^{values.SUBDOMAIN}$", maxLength=values.SUBDOMAIN_LENGTH)),
]
SecretFile = Annotated[
    str,
    PlainValidator(values.secret_file),
    WithJsonSchema(text_schema(values.FILE, maxLength=values.SUBDOMAIN_LENGTH)),
]
User = Annotated[
    int | str,
    PlainValidator(values.user),
    WithJsonSchema({"anyOf": [number_schema("integer", 1, values.MAX_USER), {"enum": ["cluster"]}]}),
]
Resource = Annotated[str, PlainValidator(values.resource), WithJsonSchema(text_schema(values.RESOURCE))]
LabelKey = Annotated[str, PlainValidator(values.label_key), WithJsonSchema(text_schema(values.LABEL_KEY))]
OwnKey = Annotated[str, PlainValidator(values.own_key)]
LabelValue = Annotated[str, PlainValidator(values.label_value), WithJsonSchema(_LABEL_VALUE)]
Selector = Annotated[dict[LabelKey, LabelValue], _mapping(values.LABEL_KEY, _LABEL_VALUE)]
Labels = Annotated[dict[OwnKey, LabelValue], _mapping(values.LABEL_KEY, _LABEL_VALUE)]
Annotations = Annotated[dict[OwnKey, EnvValue], _mapping(values.LABEL_KEY, {"type": "string"})]
Folder = Annotated[
    str,
    PlainValidator(values.folder),
    WithJsonSchema(text_schema(values.FOLDER, maxLength=values.FOLDER_LENGTH)),
]
Prefix = Annotated[
    str,
    PlainValidator(values.prefix),
    WithJsonSchema(text_schema("^(?!PACELINE_)[A-Za-z_][A-Za-z0-9_]*$", maxLength=values.SUBDOMAIN_LENGTH)),
]
Names = Annotated[list[ObjectName], BeforeValidator(values.items("names"))]
Affinity = Annotated[
    dict[str, Any],
    PlainValidator(values.affinity),
    WithJsonSchema(
        {
            "type": "object",
            "properties": {name: {"type": "object"} for name in values.AFFINITIES},
            "additionalProperties": False,
        }
    ),
]
Pod = Annotated[
    dict[str, Any],
    PlainValidator(values.pod),
    WithJsonSchema({"type": "object", "propertyNames": {"not": {"enum": sorted(values.WHOLE_POD)}}}),
]


class Credentials(Strict):
    """A file from a Secret, for tasks; `GOOGLE_APPLICATION_CREDENTIALS` is its path. Plans never contain the file."""

    model_config = ConfigDict(json_schema_extra={"required": ["secret", "file"]})

    secret: ObjectName | None = Field(
        default=None, description="A Secret in the namespace of the run.", examples=["store-key"]
    )
    file: SecretFile | None = Field(default=None, description="The file (key) in the Secret.", examples=["key.json"])


class Toleration(Strict):
    """A node taint that hosts tolerate."""

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {"required": ["key"]},
                {"required": ["operator"], "properties": {"operator": {"const": "Exists"}}},
            ],
            "dependentSchemas": {
                "value": {"properties": {"operator": {"const": "Equal"}}},
                "seconds": {"required": ["effect"], "properties": {"effect": {"const": "NoExecute"}}},
            },
        }
    )

    key: LabelKey | None = Field(
        default=None,
        description="The taint's key. Default: every taint, which requires `operator: Exists`.",
        examples=["nvidia.com/gpu"],
    )
    operator: Annotated[str, *choice(OPERATORS, {"is": "Equal", "any": "Exists"})] | None = Field(
        default=None,
        description="Whether the taint's value must equal `value`. Default: `Equal` if `value` is set, otherwise "
        "`Exists`.",
    )
    value: LabelValue | None = Field(default=None, description="The taint's value.", examples=["present"])
    effect: Annotated[str, *choice(EFFECTS, {})] | None = Field(
        default=None, description="The taint's effect. Default: every effect."
    )
    seconds: Annotated[int, *whole(0, values.MAX_USER)] | None = Field(
        default=None,
        description="With `effect: NoExecute`: how long a host stays after the taint is added. Default: forever.",
    )


class Volume(Strict):
    """A folder that is mounted in the container: exactly one of `claim`, `secret`, `config_map` and `empty`."""

    model_config = ConfigDict(
        json_schema_extra={"required": ["mount"], "oneOf": [{"required": [source]} for source in SOURCES]}
    )

    name: VolumeName | None = Field(
        default=None,
        description="The name of the volume in the pod. Default: `volume-0`, `volume-1`, by position in the list.",
    )
    mount: Folder | None = Field(
        default=None, description="The absolute path at which tasks find it.", examples=["/data"]
    )
    read_only: Switch | None = Field(
        default=None,
        description="Whether the volume is read-only. `secret` and `config_map` always are. Default: false for the "
        "others.",
    )
    claim: ObjectName | None = Field(default=None, description="A PersistentVolumeClaim in the namespace.")
    secret: ObjectName | None = Field(default=None, description="A Secret in the namespace.")
    config_map: ObjectName | None = Field(default=None, description="A ConfigMap in the namespace.")
    empty: Memory | None = Field(
        default=None,
        description="An empty folder of at most this size for each host, deleted with the host.",
        examples=["20Gi"],
    )


class EnvFrom(Strict):
    """Environment variables for tasks from an object in the namespace: exactly one of `secret` and `config_map`."""

    model_config = ConfigDict(
        json_schema_extra={"oneOf": [{"required": [source]} for source in ("secret", "config_map")]}
    )

    secret: ObjectName | None = Field(default=None, description="A Secret in the namespace.")
    config_map: ObjectName | None = Field(default=None, description="A ConfigMap in the namespace.")
    prefix: Prefix | None = Field(
        default=None, description="A prefix for the name of each variable.", examples=["STORE_"]
    )


class Kubernetes(Strict):
    """Used on clusters only. On one machine it is checked, and a note reports that it is not used."""

    image: Image | None = Field(
        default=None,
        description="The container image that tasks run in. Required on a cluster.",
        examples=["tensorflow/tensorflow:2.21.0-gpu"],
    )
    namespace: Namespace | None = Field(
        default=None, description="The namespace to run in. Default: the namespace of the context.", examples=["team-a"]
    )
    context: Text | None = Field(
        default=None, description="The kubeconfig context. Default: the current context.", examples=["gpu-cluster"]
    )
    image_pull_policy: Annotated[str, *choice(PULL_POLICIES, {})] | None = Field(
        default=None, description="When nodes pull the image. Default: the cluster's default."
    )
    image_pull_secrets: Names = Field(
        default_factory=list,
        description="Secrets in the namespace with credentials for pulling the image.",
        examples=[["registry"]],
    )
    user: User = Field(
        default=1000,
        description="The user ID that containers run as, or `cluster` to let the cluster choose, as OpenShift "
        "requires.",
        examples=[1000, "cluster"],
    )
    service_account: ObjectName | None = Field(
        default=None,
        description="The ServiceAccount of pods; its token is not mounted. Default: the namespace's default.",
    )
    priority_class: ObjectName | None = Field(default=None, description="The PriorityClass of pods.")
    gpu_resource: Resource = Field(
        default="nvidia.com/gpu", description="The resource that `gpus` counts.", examples=["amd.com/gpu"]
    )
    node_selector: Selector = Field(
        default_factory=dict,
        description="Labels that nodes must have. Values are strings: put numbers and true in quotes.",
        examples=[{"disk": "ssd"}],
    )
    tolerations: Annotated[list[Toleration], BeforeValidator(values.items("mappings"))] = Field(
        default_factory=list,
        description="Node taints that hosts tolerate.",
        examples=[[{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]],
    )
    affinity: Affinity = Field(
        default_factory=dict,
        description="The affinity of pods, in the form that Kubernetes uses: `nodeAffinity` and the others.",
    )
    placement: Annotated[str, *choice(PLACEMENTS, _PLACEMENT_ALIASES)] | None = Field(
        default=None,
        description="Whether to place the hosts of a host pool on as many nodes as possible (`spread`) or on as few "
        "(`pack`). Default: the scheduler chooses.",
    )
    volumes: Annotated[list[Volume], BeforeValidator(values.items("mappings"))] = Field(
        default_factory=list,
        description="Folders to mount in the container.",
        examples=[[{"mount": "/data", "claim": "digits", "read_only": True}]],
    )
    env_from: Annotated[list[EnvFrom], BeforeValidator(values.items("mappings"))] = Field(
        default_factory=list,
        description="Environment variables for tasks from Secrets and ConfigMaps; `env` overrides them.",
        examples=[[{"secret": "store-key"}]],
    )
    labels: Labels = Field(
        default_factory=dict, description="Labels for the objects of the run.", examples=[{"team": "vision"}]
    )
    annotations: Annotations = Field(default_factory=dict, description="Annotations for the objects of the run.")
    work: Folder = Field(
        default=WORK,
        description="The folder in the container that the code is copied to and tasks run in. "
        "With `code: image`: the folder of the image that tasks run in, by default the image's working directory.",
        examples=["/app"],
    )
    pod: Pod = Field(
        default_factory=dict,
        description="A strategic merge patch for the spec of every pod with tasks, for settings that have no field "
        "here. A key without a value is removed from the spec. The container with the tasks has the name of their "
        "role; any other container needs an image.",
        examples=[{"runtimeClassName": "nvidia"}],
    )


ITEMS: dict[str, type[Strict]] = {"tolerations": Toleration, "volumes": Volume, "env_from": EnvFrom}


def with_defaults(section: Kubernetes) -> Kubernetes:
    """The section with the defaults of its items."""
    tolerations = [
        item.model_copy(update={"operator": item.operator or ("Exists" if item.value is None else "Equal")})
        for item in section.tolerations
    ]
    volumes = [
        item.model_copy(update={"name": name_of(item, index), "read_only": _read_only(item)})
        for index, item in enumerate(section.volumes)
    ]
    return section.model_copy(update={"tolerations": tolerations, "volumes": volumes})


def name_of(volume: Volume, index: int) -> str:
    return volume.name or f"volume-{index}"


def _read_only(volume: Volume) -> bool:
    if volume.read_only is None:
        return volume.secret is not None or volume.config_map is not None
    return volume.read_only
