"""Job file fields for clusters: how valid fields are read, and the message for each invalid field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline import job, plan
from paceline.job import planning

HEAD = "name: digits\nframework: torch\ncommand: [python, train.py]\n"
NAMES = "allowed: lowercase letters, digits, - and ., at most 253 characters"
FILES = "allowed: letters, digits, -, _ and ., at most 253 characters"
USERS = "allowed: a whole number from 1 to 2147483647, or cluster"
RESOURCES = 'allowed: a resource with its domain, such as "nvidia.com/gpu"'
KEYS = 'allowed: a name such as "tier" or "example.com/tier", of letters, digits, -, _ and .'
VALUES = "allowed: letters, digits, -, _ and ., at most 63 characters"
FOLDERS = 'allowed: an absolute path such as "/data"'
AFFINITIES = "allowed: nodeAffinity, podAffinity, podAntiAffinity"
TOLERATION = "allowed: effect, key, operator, seconds, value"
VOLUME = "allowed: claim, config_map, empty, mount, name, read_only, secret"
SECTION = (
    "allowed: affinity, annotations, context, env_from, gpu_resource, image, image_pull_policy, image_pull_secrets, "
    "labels, namespace, node_selector, placement, pod, priority_class, service_account, "
    "tolerations, user, volumes, work"
)

EVERYTHING = """
tensorboard:
  image: a/tensorboard
  memory: 2Gi
  service: NodePort
  ingress: {host: digits.example.com, class: nginx, tls: digits-tls}
export: {command: [python, train.py]}
serve: {replicas: 3, image: team/serve, cpu: 2, memory: 1Gi, gpus: 1, service: LoadBalancer}
credentials: {secret: store-key, file: key.json}
limits: {keep_finished: 2h}
kubernetes:
  image: a/b:1
  namespace: team-a
  context: admin@gpu
  image_pull_policy: IfNotPresent
  image_pull_secrets: [registry, other.registry]
  user: 2000
  service_account: trainer
  priority_class: high
  gpu_resource: amd.com/gpu
  node_selector: {example.com/pool: "1"}
  tolerations:
    - {key: a, effect: NoSchedule}
    - {key: b, value: c}
    - {operator: Exists, effect: NoExecute, seconds: 30}
  affinity: {nodeAffinity: {required: [{weight: 1, on: true}]}}
  placement: spread
  volumes:
    - {mount: /data/, claim: digits, read_only: true}
    - {mount: /tmp/keys, secret: keys}
    - {name: settings, mount: /etc/settings, config_map: settings}
    - {mount: /paceline/work/scratch, empty: 1Gi}
  env_from: [{secret: a}, {config_map: b, prefix: B_}]
  labels: {team: vision}
  annotations: {example.com/why: "a reason: 1"}
  work: /paceline/work
  pod: {runtimeClassName: nvidia, hostname: null, containers: [{name: worker, tty: true}]}
"""
SOURCES: dict[str, Any] = {"claim": None, "secret": None, "config_map": None, "empty": None}
DEFAULTS: dict[str, Any] = {
    "image": None,
    "namespace": None,
    "context": None,
    "image_pull_policy": None,
    "image_pull_secrets": [],
    "user": 1000,
    "service_account": None,
    "priority_class": None,
    "gpu_resource": "nvidia.com/gpu",
    "node_selector": {},
    "tolerations": [],
    "affinity": {},
    "placement": None,
    "volumes": [],
    "env_from": [],
    "labels": {},
    "annotations": {},
    "work": "/paceline/work",
    "pod": {},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("")
    return tmp_path


def make_plan(text: str, folder: Path, *overrides: str) -> plan.Plan:
    return planning.make_plan(job.load_text(HEAD + text, "job.yaml", folder, overrides, cluster=True).job)


def load_error(text: str, folder: Path, *overrides: str) -> str:
    with pytest.raises(job.JobError) as caught:
        job.load_text(text, "job.yaml", folder, overrides)
    return str(caught.value).replace(str(folder), "FOLDER")


def test_every_field_reaches_the_plan(folder: Path) -> None:
    job_plan = make_plan(EVERYTHING, folder)
    assert job_plan.credentials == {"secret": "store-key", "file": "key.json"}
    ingress = {"host": "digits.example.com", "class": "nginx", "tls": "digits-tls"}
    assert job_plan.tensorboard == {
        "image": "a/tensorboard",
        "memory": 2**31,
        "service": "NodePort",
        "ingress": ingress,
    }
    serve = {"replicas": 3, "image": "team/serve", "cpu": 2.0, "memory": 2**30, "gpus": 1, "service": "LoadBalancer"}
    assert job_plan.serve == serve
    assert job_plan.limits.keep_finished == 7200.0
    assert job_plan.kubernetes == {
        "image": "a/b:1",
        "namespace": "team-a",
        "context": "admin@gpu",
        "image_pull_policy": "IfNotPresent",
        "image_pull_secrets": ["registry", "other.registry"],
        "user": 2000,
        "service_account": "trainer",
        "priority_class": "high",
        "gpu_resource": "amd.com/gpu",
        "node_selector": {"example.com/pool": "1"},
        "tolerations": [
            {"key": "a", "operator": "Exists", "value": None, "effect": "NoSchedule", "seconds": None},
            {"key": "b", "operator": "Equal", "value": "c", "effect": None, "seconds": None},
            {"key": None, "operator": "Exists", "value": None, "effect": "NoExecute", "seconds": 30},
        ],
        "affinity": {"nodeAffinity": {"required": [{"weight": 1, "on": True}]}},
        "placement": "spread",
        "volumes": [
            {**SOURCES, "name": "volume-0", "mount": "/data", "read_only": True, "claim": "digits"},
            {**SOURCES, "name": "volume-1", "mount": "/tmp/keys", "read_only": True, "secret": "keys"},
            {**SOURCES, "name": "settings", "mount": "/etc/settings", "read_only": True, "config_map": "settings"},
            {**SOURCES, "name": "volume-3", "mount": "/paceline/work/scratch", "read_only": False, "empty": 2**30},
        ],
        "env_from": [
            {"secret": "a", "config_map": None, "prefix": None},
            {"secret": None, "config_map": "b", "prefix": "B_"},
        ],
        "labels": {"team": "vision"},
        "annotations": {"example.com/why": "a reason: 1"},
        "work": "/paceline/work",
        "pod": {"runtimeClassName": "nvidia", "hostname": None, "containers": [{"name": "worker", "tty": True}]},
    }


def test_the_plan_is_the_same_bytes_and_survives_json(folder: Path) -> None:
    job_plan = make_plan(EVERYTHING, folder)
    assert plan.to_json(make_plan(EVERYTHING, folder)) == plan.to_json(job_plan)
    assert plan.from_data(json.loads(plan.to_json(job_plan))) == job_plan


def test_defaults(folder: Path) -> None:
    minimal = make_plan("", folder)
    assert (minimal.tensorboard, minimal.credentials, minimal.kubernetes, minimal.limits.keep_finished) == (
        {},
        {},
        {},
        3600.0,
    )
    assert make_plan("kubernetes: {}\n", folder).kubernetes == DEFAULTS
    unset = dict.fromkeys(("image", "memory", "service", "ingress"))
    assert [make_plan(f"tensorboard: {value}\n", folder).tensorboard for value in ("true", "{}")] == [unset, unset]
    assert make_plan("tensorboard: false\n", folder).tensorboard == {}
    head = HEAD.replace("torch", "tensorflow") + "export: {command: [python, train.py]}\nserve: {}\n"
    serve = planning.make_plan(job.load_text(head, "job.yaml", folder).job).serve
    assert (serve["image"], serve["replicas"], serve["service"]) == ("tensorflow/serving:2.19.1", 1, "ClusterIP")
    assert make_plan("kubernetes: {user: cluster}\n", folder).kubernetes == {**DEFAULTS, "user": "cluster"}


def test_one_note_names_the_fields_that_this_machine_does_not_use(folder: Path) -> None:
    def notes(text: str, cluster: bool = False) -> list[str]:
        return job.load_text(HEAD + text, "job.yaml", folder, cluster=cluster).notes

    assert notes(EVERYTHING) == [
        "tensorboard.image, tensorboard.service, tensorboard.ingress, serve, credentials, limits.keep_finished, "
        "kubernetes: not used on this machine",
    ]
    assert notes("kubernetes: {image: a}\n") == ["kubernetes: not used on this machine"]
    assert notes("snapshots: {memory: 8Gi}\n") == ["snapshots.memory: not used on this machine"]
    assert notes("snapshots: {memory: 8Gi}\n", cluster=True) == []
    assert notes("tensorboard: true\nlimits: {grace: 5s}\n") == []
    assert notes("tensorboard: true\n", cluster=True) == []
    warning = "TensorBoard has no authentication: anyone who can reach its {} can see what this run writes"
    assert notes(EVERYTHING, cluster=True) == [warning.format("Ingress")]
    assert notes("tensorboard: {service: NodePort}\n", cluster=True) == [warning.format("Service (NodePort)")]
    assert notes("cpu: 1\nroles: {worker: {cpu: 2}}\n", cluster=True) == [
        "cpu: not used, because every role sets its own"
    ]


def test_code_in_the_image(folder: Path) -> None:
    head = "name: a\nframework: none\ncommand: [/opt/app/start, --fast]\n"
    job_plan = planning.make_plan(job.load_text(head + "code: image\n", "job.yaml", folder).job)
    assert job_plan.code == plan.CODE_IN_IMAGE == "image" and job_plan.code_in_image
    assert plan.from_data(json.loads(plan.to_json(job_plan))).code_in_image
    overridden = job.load_text(head, "job.yaml", folder, ["code=image"])
    assert planning.make_plan(overridden.job).code_in_image and "code: image\n" in overridden.text


def test_a_folder_that_is_named_image(folder: Path) -> None:
    (folder / "image").mkdir()
    (folder / "image" / "train.py").write_text("")
    job_plan = make_plan("code: ./image\n", folder)
    assert job_plan.code == str(folder / "image") and not job_plan.code_in_image
    (folder / "image" / "train.py").unlink()
    assert 'the script "train.py" does not exist: looked in FOLDER/image' in load_error(
        HEAD + "code: ./image\n", folder
    )


@pytest.mark.parametrize(
    "command", ["[only-in-the-image, a]", "[/opt/only/there, a]", "[python, /opt/only/there.py]", "[python, train.py]"]
)
def test_paths_inside_the_image_are_not_checked_locally(command: str, folder: Path) -> None:
    text = f"name: a\nframework: none\ncommand: {command}\n"
    assert job.load_text(text, "job.yaml", folder, cluster=True).job.code == str(folder)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("[python, trian.py]", 'the script "trian.py" does not exist: looked in FOLDER; did you mean "train.py"?'),
        ("[./start.sh]", 'the program "./start.sh" does not exist: looked in FOLDER'),
        ("[python]", "runs Python without a script: a task cannot read one from standard input"),
    ],
)
def test_commands_in_the_uploaded_code_are_checked(command: str, message: str, folder: Path) -> None:
    text = f"name: a\nframework: none\ncommand: {command}\n"
    with pytest.raises(job.JobError) as caught:
        job.load_text(text, "job.yaml", folder, cluster=True)
    assert message in str(caught.value).replace(str(folder), "FOLDER")


# (the value of `credentials`, the expected message)
CREDENTIALS = {
    "text": ("a", 'credentials: must be a mapping, got the string "a"; allowed: file, secret'),
    "no file": (
        "{secret: a}",
        "credentials.file: is missing: credentials need a Secret and the name of a file in it; write file: key.json",
    ),
    "no secret": (
        "{file: a}",
        "credentials.secret: is missing: credentials need a Secret and the name of a file in it; write secret: "
        "store-key",
    ),
    "a name": ("{secret: A_b, file: c}", f'credentials.secret: "A_b" is not a valid name; did you mean "a-b"? {NAMES}'),
    "a path": (
        "{secret: a, file: /etc/key.json}",
        'credentials.file: "/etc/key.json" is not a valid name of a file in a Secret; did you mean "key.json"? '
        f"{FILES}",
    ),
    "a folder above": (
        "{secret: a, file: ..}",
        f'credentials.file: ".." is not a valid name of a file in a Secret; {FILES}',
    ),
    "a long name": (
        f"{{secret: {'a' * 254}, file: b}}",
        f'credentials.secret: "{"a" * 57}..." is 254 characters long; allowed: at most 253 characters',
    ),
    "a key of Kubernetes": (
        "{secret: a, key: b}",
        'credentials.key: unknown key "key"; did you mean "file"? allowed: file, secret',
    ),
}


@pytest.mark.parametrize("case", CREDENTIALS)
def test_wrong_credentials(case: str, folder: Path) -> None:
    value, message = CREDENTIALS[case]
    error = load_error(f"{HEAD}credentials: {value}\n", folder)
    assert error.partition("\n")[0] == f"job.yaml:4: {message}" and error.count("job.yaml:") == 1


# (a line of the section, the message after "kubernetes.")
WRONG = {
    "unknown": ("imag: a", f'imag: unknown key "imag"; did you mean "image"? {SECTION}'),
    "a key of Kubernetes": (
        "serviceAccountName: a",
        f'serviceAccountName: unknown key "serviceAccountName"; did you mean "service_account"? {SECTION}',
    ),
    "another key of Kubernetes": (
        "nodeSelector: {a: b}",
        f'nodeSelector: unknown key "nodeSelector"; did you mean "node_selector"? {SECTION}',
    ),
    "a field of the job": (
        "command: [a]",
        f'command: unknown key "command"; did you mean "roles.worker.command"? {SECTION}',
    ),
    "context": ("context: 3", 'context: must be a string, got the number 3; write "3"'),
    "no context": ('context: ""', "context: is empty"),
    "root": ("user: 0", f"user: must not be 0: tasks do not run as root; {USERS}"),
    "negative user": ("user: -1", f"user: must be at least 1, got -1; {USERS}"),
    "large user": ("user: 2147483648", f"user: must be at most 2147483647, got 2147483648; {USERS}"),
    "quoted user": ('user: "1000"', f'user: "1000" is not a user ID; write it without quotes; {USERS}'),
    "named user": ("user: root", f'user: "root" is not a user ID; {USERS}'),
    "nearly cluster": ("user: clustr", f'user: "clustr" is not a user ID; did you mean "cluster"? {USERS}'),
    "true user": ("user: true", f"user: must be a whole number or the word cluster, got true; {USERS}"),
    "resource without domain": (
        "gpu_resource: gpu",
        f'gpu_resource: "gpu" is not a valid resource name; did you mean "nvidia.com/gpu"? {RESOURCES}',
    ),
    "nearly a resource": (
        "gpu_resource: amd.com/gpu/0",
        f'gpu_resource: "amd.com/gpu/0" is not a valid resource name; did you mean "amd.com/gpu"? {RESOURCES}',
    ),
    "resource of Kubernetes": (
        "gpu_resource: kubernetes.io/gpu",
        f'gpu_resource: "kubernetes.io/gpu" is not a valid resource name; {RESOURCES}',
    ),
    "resource as number": ("gpu_resource: 1", f"gpu_resource: must be a string, got the number 1; {RESOURCES}"),
    "selector": (
        "node_selector: gpu",
        'node_selector: must be a mapping, got the string "gpu"; write node_selector: {name: value}',
    ),
    "selector's value": (
        "node_selector: {gpu: true}",
        f'node_selector.gpu: must be a string, got true; write "true"; {VALUES}',
    ),
    "selector's key": (
        "node_selector: {my pool: a}",
        f'node_selector.my pool: "my pool" is not a valid key; did you mean "my-pool"? {KEYS}',
    ),
    "a toleration alone": (
        "tolerations: {key: a}",
        "tolerations: must be a list of mappings, got a mapping; put it in a list: [{...}]",
    ),
    "a toleration as text": ("tolerations: [a]", f'tolerations.0: must be a mapping, got the string "a"; {TOLERATION}'),
    "a toleration without a key": (
        "tolerations: [{effect: NoSchedule}]",
        "tolerations.0: does not name a taint; write a key, or operator: Exists to tolerate every taint",
    ),
    "operator": (
        "tolerations: [{key: a, operator: exist}]",
        'tolerations.0.operator: "exist" is not a valid value; did you mean "Exists"? allowed: Equal, Exists',
    ),
    "effect": (
        "tolerations: [{key: a, effect: NoScheduling, seconds: 3}]",
        'tolerations.0.effect: "NoScheduling" is not a valid value; did you mean "NoSchedule"? '
        "allowed: NoSchedule, PreferNoSchedule, NoExecute",
    ),
    "a value without effect": (
        "tolerations: [{key: a, operator: Exists, value: b}]",
        "tolerations.0.value: has no effect with operator: Exists; remove it, or write operator: Equal",
    ),
    "seconds without effect": (
        "tolerations: [{key: a, seconds: 5}]",
        "tolerations.0.seconds: has no effect: it applies only to effect: NoExecute; write effect: NoExecute",
    ),
    "seconds of Kubernetes": (
        "tolerations: [{key: a, tolerationSeconds: 5}]",
        f'tolerations.0.tolerationSeconds: unknown key "tolerationSeconds"; did you mean "seconds"? {TOLERATION}',
    ),
    "negative seconds": (
        "tolerations: [{key: a, effect: NoExecute, seconds: -5}]",
        "tolerations.0.seconds: must be at least 0, got -5; allowed: a whole number from 0 to 2147483647",
    ),
    "affinity": (
        "affinity: [a]",
        f"affinity: must be a mapping in the form that Kubernetes uses, got a list; {AFFINITIES}",
    ),
    "affinity's key": (
        "affinity: {nodeAfinity: {}}",
        f'affinity.nodeAfinity: unknown key "nodeAfinity"; did you mean "nodeAffinity"? {AFFINITIES}',
    ),
    "affinity's value": ("affinity: {podAffinity: a}", 'affinity.podAffinity: must be a mapping, got the string "a"'),
    "a key of affinity without value": (
        "affinity: {podAffinity: {a: }}",
        "affinity.podAffinity.a: has no value; give it a value, or remove the key",
    ),
    "an infinite number": (
        "affinity: {podAffinity: {a: [1, .inf]}}",
        "affinity.podAffinity.a.1: must be a finite number, got inf",
    ),
    "priority": ("priority_class: High", f'priority_class: "High" is not a valid name; did you mean "high"? {NAMES}'),
    "account": ("service_account: a_b", f'service_account: "a_b" is not a valid name; did you mean "a-b"? {NAMES}'),
    "one pull secret": (
        "image_pull_secrets: registry",
        'image_pull_secrets: must be a list of names, got the string "registry"; write [registry]',
    ),
    "a pull secret": (
        "image_pull_secrets: [a, 3]",
        f'image_pull_secrets.1: must be a string, got the number 3; write "3"; {NAMES}',
    ),
    "pull policy": (
        "image_pull_policy: always",
        'image_pull_policy: "always" is not a valid value; did you mean "Always"? allowed: Always, IfNotPresent, Never',
    ),
    "one volume": (
        "volumes: {mount: /a, claim: b}",
        "volumes: must be a list of mappings, got a mapping; put it in a list: [{...}]",
    ),
    "a volume without a source": (
        "volumes: [{mount: /a}]",
        "volumes.0: a volume needs one of claim, secret, config_map, empty",
    ),
    "a volume with two sources": (
        "volumes: [{mount: /a, claim: b, empty: 1Gi}]",
        "volumes.0.empty: a volume must have exactly one of claim, secret, config_map, empty, got claim, empty; "
        "remove claim or empty",
    ),
    "a volume without a mount": (
        "volumes: [{claim: a}]",
        "volumes.0.mount: is missing: a volume needs a path to be mounted at; write mount: /data",
    ),
    "a folder of the node": (
        "volumes: [{mount: /a, host_path: /b}]",
        "volumes.0.host_path: a folder of the node cannot be mounted: the restricted Pod Security level forbids it; "
        "use one of claim, secret, config_map, empty",
    ),
    "a folder of the node, in the spelling of Kubernetes": (
        "volumes: [{mount: /a, hostPath: {path: /b}}]",
        "volumes.0.hostPath: a folder of the node cannot be mounted: the restricted Pod Security level forbids it; "
        "use one of claim, secret, config_map, empty",
    ),
    "mountPath": (
        "volumes: [{mountPath: /a, claim: b}]",
        f'volumes.0.mountPath: unknown key "mountPath"; did you mean "mount"? {VOLUME}',
    ),
    "emptyDir": (
        "volumes: [{mount: /a, emptyDir: {}}]",
        f'volumes.0.emptyDir: unknown key "emptyDir"; did you mean "empty"? {VOLUME}',
    ),
    "a relative mount": (
        "volumes: [{mount: data, claim: b}]",
        'volumes.0.mount: "data" is not an absolute path in the container; '
        f'did you mean "/data"? {FOLDERS}',
    ),
    "a mount over the root": (
        "volumes: [{mount: /, claim: b}]",
        f'volumes.0.mount: "/" is the root folder, which would hide the whole image; {FOLDERS}',
    ),
    "a mount with ..": (
        "volumes: [{mount: /a/../b, claim: b}]",
        f'volumes.0.mount: "/a/../b" contains ".."; write the full path in the container; {FOLDERS}',
    ),
    "a mount with a colon": (
        'volumes: [{mount: "/a:b", claim: b}]',
        f'volumes.0.mount: "/a:b" contains ":" or a character that cannot be printed; {FOLDERS}',
    ),
    "two volumes at one path": (
        "volumes: [{mount: /a, claim: b}, {mount: /a/, claim: c}]",
        'volumes.1.mount: another volume is already mounted at "/a"',
    ),
    "two volumes with one name": (
        "volumes: [{name: a, mount: /a, claim: b}, {name: a, mount: /c, claim: b}]",
        'volumes.1.name: another volume is also named "a"; give each volume its own name',
    ),
    "a volume in place of the code": (
        "volumes: [{mount: /paceline/work, claim: b}]",
        'volumes.0.mount: "/paceline/work" conflicts with /paceline/work, which Paceline uses; '
        "use another path, or one below kubernetes.work",
    ),
    "a volume in a folder of Paceline": (
        "volumes: [{mount: /paceline/a, claim: b}]",
        'volumes.0.mount: "/paceline/a" conflicts with /paceline, which Paceline uses; '
        "use another path, or one below kubernetes.work",
    ),
    "a reserved name": (
        "volumes: [{name: paceline-a, mount: /a, claim: b}]",
        'volumes.0.name: "paceline-a" is reserved: names that start with "paceline-" belong to Paceline',
    ),
    "a writable secret": (
        "volumes: [{mount: /a, secret: b, read_only: false}]",
        "volumes.0.read_only: has no effect: a secret is always read-only; remove it",
    ),
    "an empty volume of three bytes": (
        "volumes: [{mount: /a, empty: 3}]",
        'volumes.0.empty: must be at least 1Mi, got 3; did you mean "3Gi"? allowed: an amount such as "8Gi" or "512Mi" '
        '(1024), "8G" or "500M" (1000), or a number of bytes',
    ),
    "variables without a source": (
        "env_from: [{prefix: A_}]",
        "env_from.0: an item of env_from needs one of secret, config_map",
    ),
    "variables from two sources": (
        "env_from: [{secret: a, config_map: b}]",
        "env_from.0.config_map: an item of env_from must have exactly one of secret, config_map, got secret, "
        "config_map; "
        "remove secret or config_map",
    ),
    "secretRef": (
        "env_from: [{secretRef: {name: a}}]",
        'env_from.0.secretRef: unknown key "secretRef"; did you mean "secret"? allowed: config_map, prefix, secret',
    ),
    "prefix": (
        "env_from: [{secret: a, prefix: 3-}]",
        'env_from.0.prefix: "3-" is not a valid prefix for variable names; allowed: letters, digits and _, not '
        'starting with a digit',
    ),
    "a reserved prefix": (
        "env_from: [{secret: a, prefix: PACELINE_}]",
        'env_from.0.prefix: "PACELINE_" is reserved: variables that start with it belong to Paceline',
    ),
    "label's value": (
        "labels: {team: my team}",
        f'labels.team: "my team" is not a valid label value; did you mean "my-team"? {VALUES}',
    ),
    "long label": (
        f"labels: {{team: {'a' * 64}}}",
        f'labels.team: "{"a" * 57}..." is 64 characters long; allowed: at most 63 characters',
    ),
    "label as number": ("labels: {team: 07}", f'labels.team: must be a string, got the number 7; write "07"; {VALUES}'),
    "a reserved label": (
        "labels: {paceline.dev/run: a}",
        'labels.paceline.dev/run: "paceline.dev/run" is set by Paceline or by the cluster; remove it',
    ),
    "annotation": ("annotations: {team: 7}", 'annotations.team: must be a string, got the number 7; write "7"'),
    "annotation's key": ("annotations: {-a: b}", f'annotations.-a: "-a" is not a valid key; did you mean "a"? {KEYS}'),
    "placement": (
        "placement: binpack",
        'placement: "binpack" is not a valid value; did you mean "pack"? allowed: spread, pack',
    ),
    "work": (
        "work: app",
        'work: "app" is not an absolute path in the container; '
        f'did you mean "/app"? {FOLDERS}',
    ),
    "work in a folder of Paceline": (
        "work: /paceline/code",
        'work: "/paceline/code" conflicts with a folder that Paceline uses; '
        'write "/paceline/work", or another folder of the image',
    ),
    "work over a folder of Paceline": (
        "work: /tmp",
        'work: "/tmp" conflicts with a folder that Paceline uses; write "/paceline/work", or another folder of the '
        'image',
    ),
    "a volume in place of shared memory": (
        "volumes: [{mount: /dev, empty: 1Gi}]",
        'volumes.0.mount: "/dev" conflicts with /dev/shm, which Paceline uses; '
        "use another path, or one below kubernetes.work",
    ),
    "pod": (
        "pod: [a]",
        "pod: must be a mapping in the form that Kubernetes uses, got a list; write the fields of a pod's spec",
    ),
    "pod's spec": (
        "pod: {spec: {a: b}}",
        'pod.spec: "spec" is not a field of a pod spec; remove it, and write its fields here',
    ),
    "pod's metadata": (
        "pod: {metadata: {a: b}}",
        'pod.metadata: "metadata" is not a field of a pod spec; use kubernetes.labels and kubernetes.annotations',
    ),
    "not a number in a pod": ("pod: {a: {b: .nan}}", "pod.a.b: must be a finite number, got nan"),
    "a huge number in a pod": ("pod: {a: 9223372036854775808}", "pod.a: 9223372036854775808 is too large"),
    "an item of a pod without value": ("pod: {a: [1, ~]}", "pod.a.1: has no value"),
    "a key of a pod": ('pod: {"": 1}', 'pod.: "" is not a valid key in Kubernetes'),
    "an unknown container": (
        "pod: {containers: [{name: task, tty: true}]}",
        'pod.containers.0.name: no container is named "task", and a new one needs an image; '
        "the containers are named after the roles of the job: worker",
    ),
    "a container without a name": (
        "pod: {containers: [{tty: true}]}",
        "pod.containers.0: a container needs a name; the containers are named after the roles of the job: worker",
    ),
    "containers by name": (
        "pod: {containers: {worker: {tty: true}}}",
        "pod.containers: must be a list of containers; write - {name: ...} for each",
    ),
    "an init container without an image": (
        "pod: {initContainers: [{name: worker}]}",
        'pod.initContainers.0.name: no container is named "worker", and a new one needs an image; write image: ...',
    ),
    "no pod": ("pod:", "pod: has no value; give it a value, or remove the key"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_field(case: str, folder: Path) -> None:
    line, message = WRONG[case]
    error = load_error(f"{HEAD}kubernetes:\n  {line}\n", folder)
    assert error == f"job.yaml:5: kubernetes.{message}\n      {line}"


@pytest.mark.parametrize("case", [case for case in WRONG if "{" not in WRONG[case][0] and case != "no pod"])
def test_a_wrong_override(case: str, folder: Path) -> None:
    line, message = WRONG[case]
    key, _, value = line.partition(": ")
    override = f"kubernetes.{key}={value}"
    assert load_error(HEAD, folder, override) == f"--set {override}: kubernetes.{message}"


def test_several_mistakes_are_reported_together_each_at_its_line(folder: Path) -> None:
    text = """\
code: imag
tensorboard: 1
credentials: {secret: A}
kubernetes:
  user: 0
  tolerations:
    - a
    - {effect: NoSchedule}
  volumes:
    - {mount: /a}
    - 3
    - mount: b
      claim: C
    - {claim: d, read_only: 1}
    - {hostpath: /e}
  pod:
    spec: {}
"""
    with pytest.raises(job.JobError) as caught:
        job.load_text(HEAD + text, "job.yaml", folder)
    assert [(problem.line, problem.path) for problem in caught.value.problems] == [
        (4, "code"),
        (5, "tensorboard"),
        (6, "credentials.file"),
        (6, "credentials.secret"),
        (8, "kubernetes.user"),
        (10, "kubernetes.tolerations.0"),
        (11, "kubernetes.tolerations.1"),
        (13, "kubernetes.volumes.0"),
        (14, "kubernetes.volumes.1"),
        (15, "kubernetes.volumes.2.mount"),
        (16, "kubernetes.volumes.2.claim"),
        (17, "kubernetes.volumes.3.mount"),
        (17, "kubernetes.volumes.3.read_only"),
        (18, "kubernetes.volumes.4.hostpath"),
        (20, "kubernetes.pod.spec"),
    ]


def test_code_in_the_image_may_be_on_a_volume(folder: Path) -> None:
    section = "kubernetes: {work: /app, volumes: [{mount: /app, claim: a}]}\n"
    assert make_plan("code: image\n" + section, folder).kubernetes["work"] == "/app"
    assert '"/app" conflicts with /app' in load_error(HEAD + section, folder)


OVERRIDES = {
    "a label's key is one step": ("kubernetes.labels.example.com/a.b=1", ("labels", {"example.com/a.b": "1"})),
    "a selector is text": ("kubernetes.node_selector.gpu=true", ("node_selector", {"gpu": "true"})),
    "an annotation with signs": ("kubernetes.annotations.a=b: [c #", ("annotations", {"a": "b: [c #"})),
    "a user": ("kubernetes.user=cluster", ("user", "cluster")),
    "a list": ("kubernetes.image_pull_secrets=[a, b]", ("image_pull_secrets", ["a", "b"])),
    "a patch": ("kubernetes.pod.securityContext.fsGroup=2000", ("pod", {"securityContext": {"fsGroup": 2000}})),
    "a patch that removes": ("kubernetes.pod.hostname=null", ("pod", {"hostname": None})),
}


@pytest.mark.parametrize("case", OVERRIDES)
def test_an_override(case: str, folder: Path) -> None:
    override, (field, value) = OVERRIDES[case]
    loaded = job.load_text(HEAD, "job.yaml", folder, [override])
    assert planning.make_plan(loaded.job).kubernetes[field] == value
    assert job.load_text(loaded.text, "job.yaml", folder).job == loaded.job


def test_an_override_of_a_volume(folder: Path) -> None:
    text = "kubernetes:\n  volumes:\n    - {mount: /a, claim: b}\n"
    for override in ("kubernetes.volumes.0.claim=c", "kubernetes.volumes.claim=c"):
        assert make_plan(text, folder, override).kubernetes["volumes"][0]["claim"] == "c"
    assert load_error(HEAD + text, folder, "kubernetes.volumes.0.secret=C") == (
        '--set kubernetes.volumes.0.secret=C: kubernetes.volumes.0.secret: "C" is not a valid name; '
        f'did you mean "c"? {NAMES}'
    )
