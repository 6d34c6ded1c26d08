"""Rendered objects: valid against the API's schema, always the same, with names that are neither cut nor shared."""

from __future__ import annotations

import base64
import gzip
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from paceline import plan as plans
from paceline.backends import certificates
from paceline.backends.kubernetes.objects import names, pods, run_objects
from paceline.backends.kubernetes.objects.pod_patch import merge
from paceline.job import load_text, planning
from paceline.view.text.yaml_output import dump

GOLDEN = Path(__file__).parent / "rendered"
VERSION = "1.36"
LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
Object = dict[str, Any]

JOBS = {
    "mirrored": """
        name: digits
        framework: tensorflow
        command: [python, train.py]
        roles: {worker: {replicas: 3, cpu: 2, memory: 4Gi}, evaluator: {}}
        limits: {runtime: 6h, keep_finished: 10m}
        kubernetes: {image: "registry.example/tf:1", namespace: team-a}
    """,
    "servers": """
        name: servers
        framework: tensorflow
        strategy: parameter-server
        command: [python, train.py]
        roles:
          chief: {}
          ps: {replicas: 2, memory: 1Gi}
          worker: [{replicas: 1, gpus: 8}, {replicas: 1, gpus: 1}]
        kubernetes: {image: "registry.example/tf:1", user: cluster, gpu_resource: example.com/gpu}
    """,
    "board": """
        name: digits
        framework: tensorflow
        command: [python, train.py]
        code: image
        tensorboard: {image: "registry.example/tb:1", memory: 2Gi}
        kubernetes: {image: "registry.example/tf:1"}
    """,
    "published": """
        name: digits
        framework: tensorflow
        command: [python, train.py]
        code: image
        tensorboard:
          service: NodePort
          ingress: {host: digits.example.com, class: nginx, tls: digits-tls}
        kubernetes: {image: "registry.example/tf:1"}
    """,
    "metrics": """
        name: digits
        framework: torch
        command: [python, train.py]
        code: image
        metrics: true
        kubernetes: {image: "registry.example/torch:1", namespace: team-a, annotations: {prometheus.io/port: "1"}}
    """,
    "data": """
        name: digits
        framework: tensorflow
        command: [python, train.py]
        roles: {worker: {replicas: 2}, evaluator: {}}
        ingest: {command: [python, train.py], to: claim://data/of digits, limit: 1h}
        limits: {runtime: 6h}
        kubernetes: {image: "registry.example/tf:1"}
    """,
    "memory": """
        name: digits
        framework: torch
        command: [python, train.py]
        code: image
        roles:
          worker: [{replicas: 2, cpu: 2, memory: 4Gi}, {replicas: 1}]
          evaluator: {memory: 1Gi}
        snapshots: {memory: 8G}
        kubernetes: {image: "registry.example/torch:1"}
    """,
    "everything": """
        name: everything
        framework: torch
        command: [python, train.py]
        code: image
        roles: {worker: {replicas: 2, gpus: 1}}
        credentials: {secret: gcs-key, file: key.json}
        kubernetes:
          image: "registry.example/torch:1"
          user: 4242
          node_selector: {disk: ssd}
          tolerations:
          - {key: gpu, operator: Exists, effect: NoSchedule}
          - {key: spot, value: "yes", effect: NoExecute, seconds: 60}
          affinity: {nodeAffinity: {}}
          priority_class: high
          service_account: trainer
          image_pull_secrets: [pull]
          image_pull_policy: Always
          placement: pack
          work: /srv/work
          volumes:
          - {mount: /data, claim: data, read_only: true}
          - {mount: /cache, empty: 1Gi}
          - {name: settings, mount: /settings, config_map: settings}
          env_from: [{secret: tokens}, {config_map: flags, prefix: FLAG_}]
          labels: {team: a}
          annotations: {example.com/note: hello}
          pod: {runtimeClassName: nvidia, containers: [{name: worker, env: [{name: EXTRA, value: "1"}]}]}
    """,
}

AGENT = b"agent"


def plan_of(text: str, folder: Path) -> plans.Plan:
    (folder / "train.py").touch()
    lines = [line[8:] for line in text.splitlines()]
    return planning.make_plan(load_text("\n".join(lines), "job.yaml", folder, cluster=True).job)


def rendered(name: str, folder: Path, run: str = "digits-3f9a", **more: Any) -> list[Object]:
    return run_objects.render(plan_of(JOBS[name], folder), run, AGENT, **more)


def find_object(objects: list[Object], kind: str, name: str) -> Object:
    return next(each for each in objects if (each["kind"], each["metadata"]["name"]) == (kind, name))


@pytest.mark.parametrize("name", JOBS)
def test_objects_are_valid_and_match_the_golden_files(name: str, tmp_path: Path) -> None:
    objects = rendered(name, tmp_path, code=[] if "code: image" in JOBS[name] else [b"part one", b"part two"])
    for each in objects:
        kubernetes_validate.validate(each, VERSION, strict=True)
    text = "".join(f"---\n{dump(each)}" for each in objects).replace(str(tmp_path), "/the/folder")
    path = GOLDEN / f"{name}.yaml"
    if os.environ.get("UPDATE_RENDERED"):
        path.write_text(text)
    assert text == path.read_text(), "UPDATE_RENDERED=1 rewrites the files: review the difference"


def test_the_same_input_gives_the_same_objects_without_a_secret(tmp_path: Path) -> None:
    first, second = rendered("mirrored", tmp_path), rendered("mirrored", tmp_path)
    assert dump(first) == dump(second)
    assert find_object(first, "Secret", "digits-3f9a")["data"] == {}


def test_certificates_are_included_on_request_without_the_key_that_signed_them(tmp_path: Path) -> None:
    generated = certificates.generate()
    secret = find_object(rendered("mirrored", tmp_path, certificates=generated), "Secret", "digits-3f9a")
    assert {name: base64.b64decode(text).decode() for name, text in secret["data"].items()} == generated
    assert [name for name in generated if name.endswith(".key")] == ["captain.key", "member.key", "tensorboard.key"]


@pytest.mark.parametrize("name", JOBS)
def test_what_pods_mount_is_immutable(name: str, tmp_path: Path) -> None:
    """Nothing updates these objects, so nobody else can: a pod that is replaced gets what the first one got."""
    objects = rendered(name, tmp_path, code=[b"part"], library=[b"part"])
    mounted = [each for each in objects if each["kind"] in ("Secret", "ConfigMap")]
    assert len(mounted) >= 4 and all(each["immutable"] is True for each in mounted)


def test_the_captains_job_comes_first_and_decides_the_outcome_of_the_run(tmp_path: Path) -> None:
    objects = rendered("mirrored", tmp_path)
    captain = objects[0]
    assert (captain["kind"], captain["metadata"]["name"]) == ("Job", "digits-3f9a")
    rule = captain["spec"]["podFailurePolicy"]["rules"][0]
    assert (rule["action"], rule["onExitCodes"]["values"]) == ("FailJob", [64, 66])
    assert captain["spec"]["ttlSecondsAfterFinished"] == 600
    for job in (each for each in objects[1:] if each["kind"] == "Job"):
        assert "ttlSecondsAfterFinished" not in job["spec"] and "podFailurePolicy" not in job["spec"]
        assert job["spec"]["activeDeadlineSeconds"] == 30 * 60 + 6 * 3600 + 30 + 10 * 60 + 86400 + 120


def test_gpus_go_to_the_roles_that_request_them_and_unequal_hosts_get_their_own_jobs(tmp_path: Path) -> None:
    objects = rendered("servers", tmp_path, run="servers-0001")
    limits = {
        job["metadata"]["name"]: job["spec"]["template"]["spec"]["containers"][0]["resources"].get("limits", {})
        for job in objects
        if job["kind"] == "Job"
    }
    gpus = {name: limit.get("example.com/gpu") for name, limit in limits.items()}
    assert gpus == {
        "servers-0001": None,
        "servers-0001-chief": None,
        "servers-0001-worker": "8",
        "servers-0001-worker-g1": "1",
        "servers-0001-ps": None,
    }
    settings = json.loads(
        find_object(objects, "Job", "servers-0001-worker-g1")["spec"]["template"]["spec"]["containers"][0]["env"][0][
            "value"
        ]
    )
    assert settings["first"] == 1  # the second group continues the numbers of the first


def test_a_job_with_max_starts_with_its_replicas_and_its_plan_has_all_hosts(tmp_path: Path) -> None:
    more = "roles: {worker: {replicas: 2, min: 1, max: 4}, evaluator: {}}"
    plan = plan_of(JOBS["data"].replace("roles: {worker: {replicas: 2}, evaluator: {}}", more), tmp_path)
    objects = run_objects.render(plan, "digits-3f9a", AGENT)
    for name, count in (("digits-3f9a-worker", 2), ("digits-3f9a-evaluator", 1)):
        spec = find_object(objects, "Job", name)["spec"]
        kubernetes_validate.validate(find_object(objects, "Job", name), VERSION, strict=True)
        assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (count, count, "Indexed")
    sent = plans.from_data(json.loads(find_object(objects, "ConfigMap", "digits-3f9a-plan")["data"]["plan.json"]))
    assert len([host for host in sent.hosts if host.role == "worker"]) == 4 and sent.sizes == {"worker": 2}


def test_memory_for_snapshots_is_added_to_that_of_hosts_that_save(tmp_path: Path) -> None:
    """/dev/shm of programs keeps its size. A container without a limit gets none."""

    def member(job: str) -> tuple[Object, Object, str]:
        pod = find_object(rendered("memory", tmp_path), "Job", f"digits-3f9a-{job}")["spec"]["template"]["spec"]
        [container] = pod["containers"]
        volumes = {each["name"]: each["emptyDir"] for each in pod["volumes"] if "emptyDir" in each}
        folders = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        in_memory = {folders[name]: volume for name, volume in volumes.items() if volume.get("medium") == "Memory"}
        settings = json.loads(container["env"][0]["value"])
        del container["resources"]["requests"]["ephemeral-storage"]
        return container["resources"], in_memory, settings.get("memory", "")

    amount, full_pages = 8_000_000_000, 8_000_000_000 // 65536 * 65536
    folder = {"/paceline/memory": {"medium": "Memory", "sizeLimit": str(full_pages)}}
    resources = {"cpu": "2000m", "memory": str((4 << 30) + amount)}
    shm = {"medium": "Memory", "sizeLimit": str(2 << 30)}
    assert member("worker") == (
        {"requests": resources, "limits": resources}, {**folder, "/dev/shm": shm}, "/paceline/memory",
    )  # fmt: skip
    assert member("worker-g1") == (
        {"requests": {"memory": str(amount)}}, {**folder, "/dev/shm": {"medium": "Memory"}}, "/paceline/memory",
    )  # fmt: skip
    resources = {"memory": str(1 << 30)}
    shm = {"medium": "Memory", "sizeLimit": str(1 << 29)}
    assert member("evaluator") == ({"requests": resources, "limits": resources}, {"/dev/shm": shm}, "")


@pytest.mark.parametrize(("limit", "per_task"), [("", 1 << 30), ("limits: {log: 80Mi}", 80 << 20)])
def test_logs_have_a_volume_that_is_larger_than_they_can_be(tmp_path: Path, limit: str, per_task: int) -> None:
    """Logs that exceed its size would evict the pod. The disk that it needs is requested; other files have no limit."""
    plan = plan_of(f"{JOBS['servers'].rstrip()}\n        {limit}", tmp_path)
    for pool in names.pools(plan):
        spec = pods.member(plan, "servers-0001", pool, [], [])
        [container] = spec["containers"]
        [mount] = [each for each in container["volumeMounts"] if each["name"] == "paceline-logs"]
        [volume] = [each for each in spec["volumes"] if each["name"] == mount["name"]]
        size = int(volume["emptyDir"]["sizeLimit"])
        assert round(0.8 * size) == len(pool.hosts[0].tasks) * per_task
        assert mount["mountPath"] == "/paceline/run/logs"
        assert container["resources"]["requests"]["ephemeral-storage"] == str(size)
        assert "ephemeral-storage" not in container["resources"].get("limits", {})
    others = [each for each in spec["volumes"] if each["name"] in ("paceline-run", "paceline-home", "paceline-tmp")]
    assert [each["emptyDir"] for each in others] == [{}, {}, {}]


def test_no_name_is_cut_or_too_long(tmp_path: Path) -> None:
    name = "a" + 38 * "b" + "c"
    text = (
        JOBS["servers"]
        .replace("name: servers", f"name: {name}")
        .replace("replicas: 2, memory", "replicas: 10001, memory")
    )
    plan = plan_of(text, tmp_path)
    run = f"{name}-3f9a"
    for each in run_objects.render(plan, run, AGENT, [b"x"]):
        assert each["metadata"]["name"].startswith(run) and LABEL.fullmatch(each["metadata"]["name"])
    for pool in names.pools(plan):
        assert LABEL.fullmatch(f"{names.job_of(run, pool)}-{len(pool.hosts) - 1}")


@pytest.mark.parametrize("name", JOBS)
def test_no_object_shows_the_folder_of_the_code_on_the_submitters_machine(name: str, tmp_path: Path) -> None:
    """Others can read the ConfigMap of the plan. In pods, the code is in another folder."""
    objects = rendered(name, tmp_path, code=[b"part"])
    assert str(tmp_path) not in json.dumps(objects)
    plan = json.loads(find_object(objects, "ConfigMap", "digits-3f9a-plan")["data"]["plan.json"])
    assert plan["code"] == ("image" if "code: image" in JOBS[name] else plan["kubernetes"]["work"])


def test_a_plan_of_thousands_of_tasks_still_fits(tmp_path: Path) -> None:
    plan = plan_of(JOBS["mirrored"].replace("replicas: 3", "replicas: 5000"), tmp_path)
    objects = run_objects.render(plan, "digits-3f9a", AGENT, certificates=certificates.generate())
    config = find_object(objects, "ConfigMap", "digits-3f9a-plan")
    packed = base64.b64decode(config["binaryData"]["plan.json.gz"])
    assert plans.from_data(json.loads(gzip.decompress(packed))) == replace(plan, code="/paceline/work")
    assert max(len(json.dumps(each)) for each in objects) < 400_000


def test_pods_pass_the_restricted_level_and_keep_out_of_a_mesh(tmp_path: Path) -> None:
    for name in JOBS:
        visit = run_objects.visit(plan_of(JOBS[name], tmp_path), "digits-3f9a", "paceline-visit-0123", is_own=True)
        for job in [*rendered(name, tmp_path), visit]:
            if job["kind"] not in ("Job", "Deployment"):
                continue
            template = job["spec"]["template"]
            pod, container = template["spec"], template["spec"]["containers"][0]
            assert pod["securityContext"]["runAsNonRoot"] is True
            assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert pod["automountServiceAccountToken"] is False
            assert template["metadata"]["labels"]["sidecar.istio.io/inject"] == "false"


def test_a_visit_of_another_users_run_takes_only_image_and_user_from_its_plan(tmp_path: Path) -> None:
    text = JOBS["everything"].replace(
        "        kubernetes:", "        snapshots: {to: 'claim://kept/x'}\n        kubernetes:"
    )
    plan = plan_of(text, tmp_path)
    own, other = (run_objects.visit(plan, "digits-3f9a", "paceline-visit-0123", is_own) for is_own in (True, False))
    kubernetes_validate.validate(other, VERSION, strict=True)
    template = other["spec"]["template"]
    pod = template["spec"]
    assert {"serviceAccountName", "priorityClassName", "nodeSelector"} <= set(own["spec"]["template"]["spec"])
    assert set(pod) == {
        "automountServiceAccountToken", "enableServiceLinks", "terminationGracePeriodSeconds", "securityContext",
        "tolerations", "containers", "volumes", "restartPolicy", "imagePullSecrets",
    }  # fmt: skip
    assert all(each["key"].startswith("node.kubernetes.io/") for each in pod["tolerations"])
    assert "fsGroup" not in pod["securityContext"] and pod["automountServiceAccountToken"] is False
    assert template["metadata"]["annotations"] == {"linkerd.io/inject": "disabled"}
    assert "team" not in template["metadata"]["labels"] and "namespace" not in other["metadata"]
    container = own["spec"]["template"]["spec"]["containers"]
    assert pod["containers"] == container and pod["volumes"] == own["spec"]["template"]["spec"]["volumes"]


@pytest.mark.parametrize("user", [0, -1, True, "root", None, 2**40])
def test_a_visit_of_another_users_run_does_not_fail_with_any_settings(user: Any, tmp_path: Path) -> None:
    plan = replace(
        plan_of(JOBS["mirrored"], tmp_path), kubernetes={"image": 3, "user": user, "image_pull_secrets": "x"}
    )
    visit = run_objects.visit(plan, "digits-3f9a", "paceline-visit-0123", is_own=False)
    assert "runAsUser" not in visit["spec"]["template"]["spec"]["securityContext"]


def test_a_visit_mounts_the_claim_is_not_part_of_the_run_and_is_deleted_automatically(tmp_path: Path) -> None:
    text = JOBS["everything"].replace(
        "        kubernetes:", "        snapshots: {to: 'claim://kept/x'}\n        kubernetes:"
    )
    visit = run_objects.visit(plan_of(text, tmp_path), "digits-3f9a", "paceline-visit-0123", is_own=True)
    kubernetes_validate.validate(visit, VERSION, strict=True)
    spec, pod = visit["spec"], visit["spec"]["template"]["spec"]
    assert (spec["backoffLimit"], spec["activeDeadlineSeconds"], spec["ttlSecondsAfterFinished"]) == (0, 86400, 0)
    for labels in (visit["metadata"]["labels"], spec["template"]["metadata"]["labels"]):
        assert labels["team"] == "a" and not {names.RUN_LABEL, names.ROLE_LABEL} & set(labels)
    claim = {"name": "paceline-snapshots", "persistentVolumeClaim": {"claimName": "kept"}}
    assert pod["volumes"] == [{"name": "paceline-tmp", "emptyDir": {}}, claim]
    assert (pod["nodeSelector"], pod["imagePullSecrets"]) == ({"disk": "ssd"}, [{"name": "pull"}])
    assert "env" not in pod["containers"][0] and "envFrom" not in pod["containers"][0]


def test_tensorboard_is_suspended_with_the_run_and_has_its_own_certificate(tmp_path: Path) -> None:
    for suspended, replicas in ((True, 0), (False, 1)):
        board = find_object(rendered("board", tmp_path, suspended=suspended), "Deployment", "digits-3f9a-tensorboard")[
            "spec"
        ]
        assert board["replicas"] == replicas
    pod = board["template"]["spec"]
    tls = next(volume for volume in pod["volumes"] if volume["name"] == "paceline-tls")
    assert [item["key"] for item in tls["secret"]["items"]] == ["ca.pem", "tensorboard.pem", "tensorboard.key"]
    service = find_object(rendered("board", tmp_path), "Service", "digits-3f9a-tensorboard")["spec"]
    assert service["selector"] == board["selector"]["matchLabels"]
    plain = rendered("mirrored", tmp_path)
    assert not [each for each in plain if each["metadata"]["name"].endswith("-tensorboard")]


def test_only_the_page_of_a_published_tensorboard_is_reachable(tmp_path: Path) -> None:
    objects = rendered("published", tmp_path)
    name, labels = (
        "digits-3f9a-tensorboard-page",
        {"paceline.dev/run": "digits-3f9a", "paceline.dev/role": "tensorboard"},
    )
    service = find_object(objects, "Service", name)["spec"]
    assert service == {"type": "NodePort", "selector": labels, "ports": [{"name": "page", "port": 6006}]}
    policy = find_object(objects, "NetworkPolicy", name)["spec"]
    assert (policy["podSelector"], policy["ingress"]) == ({"matchLabels": labels}, [{"ports": [{"port": 6006}]}])
    ingress = find_object(objects, "Ingress", name)["spec"]
    assert ingress["ingressClassName"] == "nginx"
    assert ingress["tls"] == [{"hosts": ["digits.example.com"], "secretName": "digits-tls"}]
    assert ingress["rules"][0]["http"]["paths"][0]["backend"]["service"] == {"name": name, "port": {"name": "page"}}
    assert not [each for each in rendered("board", tmp_path) if each["metadata"]["name"] == name]


def test_only_pods_of_the_run_reach_its_ports(tmp_path: Path) -> None:
    """Checks the object only: no network policy engine runs on the test machines."""
    policy = find_object(rendered("mirrored", tmp_path), "NetworkPolicy", "digits-3f9a")["spec"]
    selector = {"matchLabels": {names.RUN_LABEL: "digits-3f9a"}}
    assert policy == {
        "podSelector": selector,
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": selector}]}],
    }


def test_a_patch_merges_lists_of_named_items_and_replaces_everything_else() -> None:
    base = {"volumes": [{"name": "a", "emptyDir": {}}], "args": ["x"], "hostname": "h"}
    patch = {
        "volumes": [{"name": "a", "emptyDir": {"sizeLimit": "1Gi"}}, {"name": "b"}],
        "args": ["y"],
        "hostname": None,
    }
    assert merge(base, patch) == {
        "volumes": [{"name": "a", "emptyDir": {"sizeLimit": "1Gi"}}, {"name": "b"}],
        "args": ["y"],
    }


def test_a_patch_for_the_container_of_one_role_changes_only_the_pods_of_that_role(tmp_path: Path) -> None:
    text = """
        name: digits
        framework: none
        command: [python, train.py]
        roles: {worker: {replicas: 1}, evaluator: {replicas: 1}}
        kubernetes:
          image: example.com/image
          pod: {containers: [{name: worker, tty: true}, {name: proxy, image: example.com/proxy}]}
    """
    objects = run_objects.render(plan_of(text, tmp_path), "digits-3f9a", AGENT)
    containers = {
        role: find_object(objects, "Job", f"digits-3f9a-{role}")["spec"]["template"]["spec"]["containers"]
        for role in ("worker", "evaluator")
    }
    names = {role: [each["name"] for each in of_role] for role, of_role in containers.items()}
    assert names == {"worker": ["worker", "proxy"], "evaluator": ["evaluator", "proxy"]}
    assert all(each["image"] for of_role in containers.values() for each in of_role)
    assert containers["worker"][0]["tty"] and "tty" not in containers["evaluator"][0]
