"""What serves a model on a cluster: rendered objects, valid against the API's schema, and nothing of the run itself."""

from __future__ import annotations

import json
import os
from pathlib import Path

import kubernetes_validate
import pytest

from paceline.backends.kubernetes import names
from paceline.view.yaml import dump
from support.served import JOBS, RUN, Object, rendered

GOLDEN = Path(__file__).parent / "rendered"
VERSION = "1.36"


def spec(objects: list[Object], kind: str) -> Object:
    return next(each["spec"] for each in objects if each["kind"] == kind)


@pytest.mark.parametrize("which", JOBS)
def test_objects_are_valid_and_as_published(which: str, tmp_path: Path) -> None:
    objects = rendered(which, tmp_path, code=() if "code: image" in JOBS[which][0] else (b"part one", b"part two"))
    for each in objects:
        kubernetes_validate.validate(each, VERSION, strict=True)
    text = "".join(f"---\n{dump(each)}" for each in objects)
    path = GOLDEN / f"{which}.yaml"
    if os.environ.get("UPDATE_RENDERED"):
        path.write_text(text)
    assert text == path.read_text(), "UPDATE_RENDERED=1 writes the files anew: look at the difference"


@pytest.mark.parametrize("which", JOBS)
def test_nothing_that_looks_for_the_run_finds_it(which: str, tmp_path: Path) -> None:
    objects = rendered(which, tmp_path)
    deployment = objects[0]
    assert (deployment["kind"], deployment["metadata"]["name"]) == ("Deployment", f"{RUN}-serve")
    labels = [each["metadata"]["labels"] for each in objects]
    labels.append(deployment["spec"]["template"]["metadata"]["labels"])
    for each in labels:
        assert each[names.SERVES_LABEL] == RUN and not {names.RUN_LABEL, names.ROLE_LABEL} & set(each)
    ours = {names.SERVES_LABEL: RUN}
    assert deployment["spec"]["selector"] == {"matchLabels": ours}
    assert spec(objects, "Service")["selector"] == ours
    assert spec(objects, "NetworkPolicy")["podSelector"] == {"matchLabels": ours}


@pytest.mark.parametrize("which", JOBS)
def test_its_pods_pass_the_restricted_level(which: str, tmp_path: Path) -> None:
    pod = rendered(which, tmp_path)[0]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True and pod["automountServiceAccountToken"] is False
    for container in (*pod["initContainers"], *pod["containers"]):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "readOnlyRootFilesystem": True,
        }  # fmt: skip
        mounted = {each["name"] for each in container["volumeMounts"]}
        assert mounted <= {each["name"] for each in pod["volumes"]}
        assert {"paceline-tmp", "paceline-home", "paceline-models"} <= mounted


def test_another_snapshot_changes_the_pods_and_sends_nothing_anew(tmp_path: Path) -> None:
    first, second = rendered("tensorflow-serving", tmp_path), rendered("tensorflow-serving", tmp_path, "step-240-g3")
    assert first[0] != second[0] and first[1:] == second[1:]
    told = json.loads(second[0]["spec"]["template"]["spec"]["initContainers"][0]["env"][0]["value"])
    assert (told["snapshot"], told["to"]) == ("step-240-g3", "/models/digits")
    other = rendered("tensorflow-serving", tmp_path, code=(b"changed",))
    kept = {each["metadata"]["name"] for each in first} & {each["metadata"]["name"] for each in other}
    assert {each["metadata"]["name"] for each in other} - kept == {
        each["metadata"]["name"] for each in other if "-serve-code-00-" in each["metadata"]["name"]
    }


def test_no_request_is_dropped_by_an_update(tmp_path: Path) -> None:
    """By shape; tests/cluster/test_serve.py sees it."""
    deployment = rendered("paceline-serve", tmp_path)[0]["spec"]
    assert deployment["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": "25%"}
    pod = deployment["template"]["spec"]
    server = pod["containers"][0]
    assert server["lifecycle"] == {"preStop": {"sleep": {"seconds": 5}}}
    assert pod["terminationGracePeriodSeconds"] > 5 + 30  # the longest request
    assert server["readinessProbe"]["httpGet"]["path"] == "/readyz"


def test_pods_share_a_node_where_a_claim_cannot_be_on_two(tmp_path: Path) -> None:
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    own = f"  affinity: {{nodeAffinity: {{}}, podAffinity: {{{required}: [{{topologyKey: zone}}]}}}}\n"
    pod = rendered("paceline-serve", tmp_path, more=own)[0]["spec"]["template"]["spec"]
    assert "topologySpreadConstraints" not in pod and "nodeAffinity" in pod["affinity"]
    theirs, ours = pod["affinity"]["podAffinity"][required]
    assert theirs == {"topologyKey": "zone"}
    node = {"topologyKey": "kubernetes.io/hostname"}
    assert ours == {"labelSelector": {"matchLabels": {names.SERVES_LABEL: RUN}}, **node}
    [beside] = pod["affinity"]["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    captain = {names.RUN_LABEL: RUN, names.ROLE_LABEL: "captain"}
    assert beside == {"weight": 100, "podAffinityTerm": {"labelSelector": {"matchLabels": captain}, **node}}
    bucket = rendered("tensorflow-serving", tmp_path)[0]["spec"]["template"]["spec"]
    assert "affinity" not in bucket and bucket["topologySpreadConstraints"][0]["whenUnsatisfiable"] == "ScheduleAnyway"
