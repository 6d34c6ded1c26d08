"""The fields for clusters: what comes out of those that are right, and the message that each wrong one ends in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline import job, plan

HEAD = "name: digits\nframework: torch\ncommand: [python, train.py]\n"
NAMES = "allowed: lower case letters, digits, - and ., at most 253 characters"
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
  pod: {runtimeClassName: nvidia, hostname: null, containers: [{name: task, tty: true}]}
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


def planned(text: str, folder: Path, *overrides: str) -> plan.Plan:
    return plan.make(job.load_text(HEAD + text, "job.yaml", folder, overrides, cluster=True).job)


def mistakes(text: str, folder: Path, *overrides: str) -> str:
    with pytest.raises(job.JobError) as caught:
        job.load_text(text, "job.yaml", folder, overrides)
    return str(caught.value).replace(str(folder), "FOLDER")


def test_every_field_reaches_the_plan(folder: Path) -> None:
    made = planned(EVERYTHING, folder)
    assert made.credentials == {"secret": "store-key", "file": "key.json"}
    ingress = {"host": "digits.example.com", "class": "nginx", "tls": "digits-tls"}
    assert made.tensorboard == {"image": "a/tensorboard", "memory": 2**31, "service": "NodePort", "ingress": ingress}
    served = {"replicas": 3, "image": "team/serve", "cpu": 2.0, "memory": 2**30, "gpus": 1, "service": "LoadBalancer"}
    assert made.serve == served
    assert made.limits.keep_finished == 7200.0
    assert made.kubernetes == {
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
        "pod": {"runtimeClassName": "nvidia", "hostname": None, "containers": [{"name": "task", "tty": True}]},
    }


def test_the_plan_is_the_same_bytes_and_survives_json(folder: Path) -> None:
    made = planned(EVERYTHING, folder)
    assert plan.to_json(planned(EVERYTHING, folder)) == plan.to_json(made)
    assert plan.from_data(json.loads(plan.to_json(made))) == made


def test_what_holds_unless_set(folder: Path) -> None:
    bare = planned("", folder)
    assert (bare.tensorboard, bare.credentials, bare.kubernetes, bare.limits.keep_finished) == ({}, {}, {}, 3600.0)
    assert planned("kubernetes: {}\n", folder).kubernetes == DEFAULTS
    unset = dict.fromkeys(("image", "memory", "service", "ingress"))
    assert [planned(f"tensorboard: {given}\n", folder).tensorboard for given in ("true", "{}")] == [unset, unset]
    assert planned("tensorboard: false\n", folder).tensorboard == {}
    head = HEAD.replace("torch", "tensorflow") + "export: {command: [python, train.py]}\nserve: {}\n"
    served = plan.make(job.load_text(head, "job.yaml", folder).job).serve
    assert (served["image"], served["replicas"], served["service"]) == ("tensorflow/serving:2.19.1", 1, "ClusterIP")
    assert planned("kubernetes: {user: cluster}\n", folder).kubernetes == {**DEFAULTS, "user": "cluster"}


def test_one_note_names_the_fields_that_this_machine_does_not_use(folder: Path) -> None:
    def notes(text: str, cluster: bool = False) -> list[str]:
        return job.load_text(HEAD + text, "job.yaml", folder, cluster=cluster).notes

    assert notes(EVERYTHING) == [
        "tensorboard.image, tensorboard.service, tensorboard.ingress, serve, credentials, limits.keep_finished, "
        "kubernetes: not used on this machine",
    ]
    assert notes("kubernetes: {image: a}\n") == ["kubernetes: not used on this machine"]
    assert notes("tensorboard: true\nlimits: {grace: 5s}\n") == []
    assert notes("tensorboard: true\n", cluster=True) == []
    warned = "TensorBoard asks nobody who they are: whoever reaches its {} sees what this run writes"
    assert notes(EVERYTHING, cluster=True) == [warned.format("Ingress")]
    assert notes("tensorboard: {service: NodePort}\n", cluster=True) == [warned.format("Service (NodePort)")]
    assert notes("cpu: 1\nroles: {worker: {cpu: 2}}\n", cluster=True) == ["cpu: not used, every role has its own"]


def test_code_in_the_image(folder: Path) -> None:
    head = "name: a\nframework: none\ncommand: [/opt/app/start, --fast]\n"
    made = plan.make(job.load_text(head + "code: image\n", "job.yaml", folder).job)
    assert made.code == plan.CODE_IN_IMAGE == "image" and made.code_in_image
    assert plan.from_data(json.loads(plan.to_json(made))).code_in_image
    overridden = job.load_text(head, "job.yaml", folder, ["code=image"])
    assert plan.make(overridden.job).code_in_image and "code: image\n" in overridden.text


def test_a_folder_that_is_named_image(folder: Path) -> None:
    (folder / "image").mkdir()
    (folder / "image" / "train.py").write_text("")
    made = planned("code: ./image\n", folder)
    assert made.code == str(folder / "image") and not made.code_in_image
    (folder / "image" / "train.py").unlink()
    assert 'the script "train.py" is not there: looked in FOLDER/image' in mistakes(HEAD + "code: ./image\n", folder)


@pytest.mark.parametrize(
    "command", ["[only-in-the-image, a]", "[/opt/only/there, a]", "[python, /opt/only/there.py]", "[python, train.py]"]
)
def test_what_is_in_an_image_is_not_looked_for_here(command: str, folder: Path) -> None:
    text = f"name: a\nframework: none\ncommand: {command}\n"
    assert job.load_text(text, "job.yaml", folder, cluster=True).job.code == str(folder)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("[python, trian.py]", 'the script "trian.py" is not there: looked in FOLDER; did you mean "train.py"?'),
        ("[./start.sh]", 'the program "./start.sh" is not there: looked in FOLDER'),
        ("[python]", "runs Python without a script: a task has no input to read one from"),
    ],
)
def test_what_is_sent_along_is_looked_for(command: str, message: str, folder: Path) -> None:
    text = f"name: a\nframework: none\ncommand: {command}\n"
    with pytest.raises(job.JobError) as caught:
        job.load_text(text, "job.yaml", folder, cluster=True)
    assert message in str(caught.value).replace(str(folder), "FOLDER")


# (what is added to the job, the message after the path of the field)
CREDENTIALS = {
    "text": ("a", 'credentials: must be a mapping, got the text "a"; allowed: file, secret'),
    "no file": (
        "{secret: a}",
        "credentials.file: is missing: credentials are a Secret and the file in it; write file: key.json",
    ),
    "no secret": (
        "{file: a}",
        "credentials.secret: is missing: credentials are a Secret and the file in it; write secret: store-key",
    ),
    "a name": ("{secret: A_b, file: c}", f'credentials.secret: "A_b" is not a valid name; did you mean "a-b"? {NAMES}'),
    "a path": (
        "{secret: a, file: /etc/key.json}",
        f'credentials.file: "/etc/key.json" is not the name of a file in a Secret; did you mean "key.json"? {FILES}',
    ),
    "a folder above": (
        "{secret: a, file: ..}",
        f'credentials.file: ".." is not the name of a file in a Secret; {FILES}',
    ),
    "a long name": (
        f"{{secret: {'a' * 254}, file: b}}",
        f'credentials.secret: "{"a" * 57}..." is 254 characters long; allowed: at most 253 characters',
    ),
    "the word of Kubernetes": (
        "{secret: a, key: b}",
        'credentials.key: unknown key "key"; did you mean "file"? allowed: file, secret',
    ),
}


@pytest.mark.parametrize("case", CREDENTIALS)
def test_wrong_credentials(case: str, folder: Path) -> None:
    given, message = CREDENTIALS[case]
    shown = mistakes(f"{HEAD}credentials: {given}\n", folder)
    assert shown.partition("\n")[0] == f"job.yaml:4: {message}" and shown.count("job.yaml:") == 1


# (a line of the section, the message after "kubernetes.")
WRONG = {
    "unknown": ("imag: a", f'imag: unknown key "imag"; did you mean "image"? {SECTION}'),
    "a word of Kubernetes": (
        "serviceAccountName: a",
        f'serviceAccountName: unknown key "serviceAccountName"; did you mean "service_account"? {SECTION}',
    ),
    "another word of Kubernetes": (
        "nodeSelector: {a: b}",
        f'nodeSelector: unknown key "nodeSelector"; did you mean "node_selector"? {SECTION}',
    ),
    "a field of the job": (
        "command: [a]",
        f'command: unknown key "command"; did you mean "roles.worker.command"? {SECTION}',
    ),
    "context": ("context: 3", 'context: must be text, got the number 3; write "3"'),
    "no context": ('context: ""', "context: is empty"),
    "root": ("user: 0", f"user: is 0: tasks do not run as root; {USERS}"),
    "negative user": ("user: -1", f"user: must be at least 1, got -1; {USERS}"),
    "large user": ("user: 2147483648", f"user: must be at most 2147483647, got 2147483648; {USERS}"),
    "quoted user": ('user: "1000"', f'user: "1000" is not the number of a user; write it without quotes; {USERS}'),
    "named user": ("user: root", f'user: "root" is not the number of a user; {USERS}'),
    "nearly cluster": ("user: clustr", f'user: "clustr" is not the number of a user; did you mean "cluster"? {USERS}'),
    "true user": ("user: true", f"user: must be a whole number or the word cluster, got true; {USERS}"),
    "resource without domain": (
        "gpu_resource: gpu",
        f'gpu_resource: "gpu" is not the name of a resource; did you mean "nvidia.com/gpu"? {RESOURCES}',
    ),
    "nearly a resource": (
        "gpu_resource: amd.com/gpu/0",
        f'gpu_resource: "amd.com/gpu/0" is not the name of a resource; did you mean "amd.com/gpu"? {RESOURCES}',
    ),
    "resource of Kubernetes": (
        "gpu_resource: kubernetes.io/gpu",
        f'gpu_resource: "kubernetes.io/gpu" is not the name of a resource; {RESOURCES}',
    ),
    "resource as number": ("gpu_resource: 1", f"gpu_resource: must be text, got the number 1; {RESOURCES}"),
    "selector": (
        "node_selector: gpu",
        'node_selector: must be a mapping, got the text "gpu"; write node_selector: {name: value}',
    ),
    "selector's value": (
        "node_selector: {gpu: true}",
        f'node_selector.gpu: must be text, got true; write "true"; {VALUES}',
    ),
    "selector's key": (
        "node_selector: {my pool: a}",
        f'node_selector.my pool: "my pool" is not a valid key; did you mean "my-pool"? {KEYS}',
    ),
    "a toleration alone": (
        "tolerations: {key: a}",
        "tolerations: must be a list of mappings, got a mapping; put it in a list: [{...}]",
    ),
    "a toleration as text": ("tolerations: [a]", f'tolerations.0: must be a mapping, got the text "a"; {TOLERATION}'),
    "a toleration of nothing": (
        "tolerations: [{effect: NoSchedule}]",
        "tolerations.0: names no taint; write its key, or operator: Exists for every taint",
    ),
    "operator": (
        "tolerations: [{key: a, operator: exist}]",
        'tolerations.0.operator: "exist" is not known here; did you mean "Exists"? allowed: Equal, Exists',
    ),
    "effect": (
        "tolerations: [{key: a, effect: NoScheduling, seconds: 3}]",
        'tolerations.0.effect: "NoScheduling" is not known here; did you mean "NoSchedule"? '
        "allowed: NoSchedule, PreferNoSchedule, NoExecute",
    ),
    "a value that is not looked at": (
        "tolerations: [{key: a, operator: Exists, value: b}]",
        "tolerations.0.value: has no effect under operator Exists; remove it, or write operator: Equal",
    ),
    "seconds without effect": (
        "tolerations: [{key: a, seconds: 5}]",
        "tolerations.0.seconds: has no effect: only NoExecute waits; write effect: NoExecute",
    ),
    "seconds of Kubernetes": (
        "tolerations: [{key: a, tolerationSeconds: 5}]",
        f'tolerations.0.tolerationSeconds: unknown key "tolerationSeconds"; did you mean "seconds"? {TOLERATION}',
    ),
    "negative seconds": (
        "tolerations: [{key: a, effect: NoExecute, seconds: -5}]",
        "tolerations.0.seconds: must be at least 0, got -5; allowed: a whole number from 0 to 2147483647",
    ),
    "affinity": ("affinity: [a]", f"affinity: must be a mapping as Kubernetes has it, got a list; {AFFINITIES}"),
    "affinity's key": (
        "affinity: {nodeAfinity: {}}",
        f'affinity.nodeAfinity: unknown key "nodeAfinity"; did you mean "nodeAffinity"? {AFFINITIES}',
    ),
    "affinity's value": ("affinity: {podAffinity: a}", 'affinity.podAffinity: must be a mapping, got the text "a"'),
    "a key of affinity without value": (
        "affinity: {podAffinity: {a: }}",
        "affinity.podAffinity.a: has no value; give it one, or remove the key",
    ),
    "an endless number": (
        "affinity: {podAffinity: {a: [1, .inf]}}",
        "affinity.podAffinity.a.1: must be a finite number, got inf",
    ),
    "priority": ("priority_class: High", f'priority_class: "High" is not a valid name; did you mean "high"? {NAMES}'),
    "account": ("service_account: a_b", f'service_account: "a_b" is not a valid name; did you mean "a-b"? {NAMES}'),
    "one pull secret": (
        "image_pull_secrets: registry",
        'image_pull_secrets: must be a list of names, got the text "registry"; write [registry]',
    ),
    "a pull secret": (
        "image_pull_secrets: [a, 3]",
        f'image_pull_secrets.1: must be text, got the number 3; write "3"; {NAMES}',
    ),
    "pull policy": (
        "image_pull_policy: always",
        'image_pull_policy: "always" is not known here; did you mean "Always"? allowed: Always, IfNotPresent, Never',
    ),
    "one volume": (
        "volumes: {mount: /a, claim: b}",
        "volumes: must be a list of mappings, got a mapping; put it in a list: [{...}]",
    ),
    "a volume of nothing": (
        "volumes: [{mount: /a}]",
        "volumes.0: a volume needs one of claim, secret, config_map, empty",
    ),
    "a volume of two things": (
        "volumes: [{mount: /a, claim: b, empty: 1Gi}]",
        "volumes.0.empty: a volume has exactly one of claim, secret, config_map, empty, got claim, empty; "
        "remove claim or empty",
    ),
    "a volume nowhere": (
        "volumes: [{claim: a}]",
        "volumes.0.mount: is missing: where tasks find the volume; write mount: /data",
    ),
    "a folder of the node": (
        "volumes: [{mount: /a, host_path: /b}]",
        "volumes.0.host_path: a folder of the node cannot be mounted: the restricted Pod Security level forbids it; "
        "use one of claim, secret, config_map, empty",
    ),
    "a folder of the node, as Kubernetes says it": (
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
        'volumes.0.mount: "data" is not an absolute path: it is a folder in the container; '
        f'did you mean "/data"? {FOLDERS}',
    ),
    "a mount over everything": (
        "volumes: [{mount: /, claim: b}]",
        f'volumes.0.mount: "/" is the root: it would hide the whole image; {FOLDERS}',
    ),
    "a mount upwards": (
        "volumes: [{mount: /a/../b, claim: b}]",
        f'volumes.0.mount: "/a/../b" holds "..": a path in the container is written in full; {FOLDERS}',
    ),
    "a mount with a colon": (
        'volumes: [{mount: "/a:b", claim: b}]',
        f'volumes.0.mount: "/a:b" holds a ":" or a sign that cannot be printed; {FOLDERS}',
    ),
    "two volumes in one place": (
        "volumes: [{mount: /a, claim: b}, {mount: /a/, claim: c}]",
        'volumes.1.mount: another volume is mounted at "/a" already',
    ),
    "two volumes of one name": (
        "volumes: [{name: a, mount: /a, claim: b}, {name: a, mount: /c, claim: b}]",
        'volumes.1.name: "a" is the name of another volume too; give each its own',
    ),
    "a volume in place of the code": (
        "volumes: [{mount: /paceline/work, claim: b}]",
        'volumes.0.mount: "/paceline/work" is in the way of /paceline/work, which Paceline itself uses; '
        "choose another path, or one below kubernetes.work",
    ),
    "a volume in our folder": (
        "volumes: [{mount: /paceline/a, claim: b}]",
        'volumes.0.mount: "/paceline/a" is in the way of /paceline, which Paceline itself uses; '
        "choose another path, or one below kubernetes.work",
    ),
    "a name of ours": (
        "volumes: [{name: paceline-a, mount: /a, claim: b}]",
        'volumes.0.name: "paceline-a" is taken: names that start with "paceline-" are those of Paceline itself',
    ),
    "a secret that can be written": (
        "volumes: [{mount: /a, secret: b, read_only: false}]",
        "volumes.0.read_only: has no effect: a secret can never be written to; remove it",
    ),
    "an empty volume of three bytes": (
        "volumes: [{mount: /a, empty: 3}]",
        'volumes.0.empty: must be at least 1Mi, got 3; did you mean "3Gi"? allowed: an amount such as "8Gi" or "512Mi" '
        '(1024), "8G" or "500M" (1000), or a number of bytes',
    ),
    "variables from nothing": (
        "env_from: [{prefix: A_}]",
        "env_from.0: a source of variables needs one of secret, config_map",
    ),
    "variables from two things": (
        "env_from: [{secret: a, config_map: b}]",
        "env_from.0.config_map: a source of variables has exactly one of secret, config_map, got secret, config_map; "
        "remove secret or config_map",
    ),
    "secretRef": (
        "env_from: [{secretRef: {name: a}}]",
        'env_from.0.secretRef: unknown key "secretRef"; did you mean "secret"? allowed: config_map, prefix, secret',
    ),
    "prefix": (
        "env_from: [{secret: a, prefix: 3-}]",
        'env_from.0.prefix: "3-" cannot begin the name of a variable; allowed: letters, digits and _, no digit first',
    ),
    "prefix of ours": (
        "env_from: [{secret: a, prefix: PACELINE_}]",
        'env_from.0.prefix: "PACELINE_" is taken: such variables are those of Paceline itself',
    ),
    "label's value": (
        "labels: {team: my team}",
        f'labels.team: "my team" is not a valid value of a label; did you mean "my-team"? {VALUES}',
    ),
    "long label": (
        f"labels: {{team: {'a' * 64}}}",
        f'labels.team: "{"a" * 57}..." is 64 characters long; allowed: at most 63 characters',
    ),
    "label as number": ("labels: {team: 07}", f'labels.team: must be text, got the number 7; write "07"; {VALUES}'),
    "label of ours": (
        "labels: {paceline.dev/run: a}",
        'labels.paceline.dev/run: "paceline.dev/run" is set by Paceline or the cluster itself; remove it',
    ),
    "annotation": ("annotations: {team: 7}", 'annotations.team: must be text, got the number 7; write "7"'),
    "annotation's key": ("annotations: {-a: b}", f'annotations.-a: "-a" is not a valid key; did you mean "a"? {KEYS}'),
    "placement": (
        "placement: binpack",
        'placement: "binpack" is not known here; did you mean "pack"? allowed: spread, pack',
    ),
    "work": (
        "work: app",
        'work: "app" is not an absolute path: it is a folder in the container; '
        f'did you mean "/app"? {FOLDERS}',
    ),
    "work in our folder": (
        "work: /paceline/code",
        'work: "/paceline/code" is in the way of what Paceline itself uses; '
        'write "/paceline/work", or a path of the image',
    ),
    "work over our folder": (
        "work: /tmp",
        'work: "/tmp" is in the way of what Paceline itself uses; write "/paceline/work", or a path of the image',
    ),
    "a volume in place of shared memory": (
        "volumes: [{mount: /dev, empty: 1Gi}]",
        'volumes.0.mount: "/dev" is in the way of /dev/shm, which Paceline itself uses; '
        "choose another path, or one below kubernetes.work",
    ),
    "pod": (
        "pod: [a]",
        "pod: must be a mapping as Kubernetes has it, got a list; write what stands under spec: in a pod",
    ),
    "pod's spec": (
        "pod: {spec: {a: b}}",
        'pod.spec: "spec" is no part of the spec of a pod; leave it out, and write here what it holds',
    ),
    "pod's metadata": (
        "pod: {metadata: {a: b}}",
        'pod.metadata: "metadata" is no part of the spec of a pod; use labels and annotations of kubernetes',
    ),
    "an endless number in a pod": ("pod: {a: {b: .nan}}", "pod.a.b: must be a finite number, got nan"),
    "a huge number in a pod": ("pod: {a: 9223372036854775808}", "pod.a: 9223372036854775808 is too large a number"),
    "an item of a pod without value": ("pod: {a: [1, ~]}", "pod.a.1: has no value"),
    "a key of a pod": ('pod: {"": 1}', 'pod.: "" is no key that Kubernetes has'),
    "no pod": ("pod:", "pod: has no value; give it one, or remove the key"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_field(case: str, folder: Path) -> None:
    line, message = WRONG[case]
    shown = mistakes(f"{HEAD}kubernetes:\n  {line}\n", folder)
    assert shown == f"job.yaml:5: kubernetes.{message}\n      {line}"


@pytest.mark.parametrize("case", [case for case in WRONG if "{" not in WRONG[case][0] and case != "no pod"])
def test_a_wrong_override(case: str, folder: Path) -> None:
    line, message = WRONG[case]
    key, _, value = line.partition(": ")
    override = f"kubernetes.{key}={value}"
    assert mistakes(HEAD, folder, override) == f"--set {override}: kubernetes.{message}"


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


def test_code_in_the_image_may_lie_on_a_volume(folder: Path) -> None:
    section = "kubernetes: {work: /app, volumes: [{mount: /app, claim: a}]}\n"
    assert planned("code: image\n" + section, folder).kubernetes["work"] == "/app"
    assert '"/app" is in the way of /app' in mistakes(HEAD + section, folder)


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
    assert plan.make(loaded.job).kubernetes[field] == value
    assert job.load_text(loaded.text, "job.yaml", folder).job == loaded.job


def test_an_override_of_a_volume(folder: Path) -> None:
    text = "kubernetes:\n  volumes:\n    - {mount: /a, claim: b}\n"
    for override in ("kubernetes.volumes.0.claim=c", "kubernetes.volumes.claim=c"):
        assert planned(text, folder, override).kubernetes["volumes"][0]["claim"] == "c"
    assert mistakes(HEAD + text, folder, "kubernetes.volumes.0.secret=C") == (
        '--set kubernetes.volumes.0.secret=C: kubernetes.volumes.0.secret: "C" is not a valid name; '
        f'did you mean "c"? {NAMES}'
    )
