"""Objects that serve a model on a cluster: valid against the API's schema, and separate from those of the run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import kubernetes_validate
import pytest

from paceline.backends.kubernetes.objects import names
from paceline.view.text.yaml_output import dump
from support.served import JOBS, RUN, Object, rendered

GOLDEN = Path(__file__).parent / "rendered"
VERSION = "1.36"


def spec(objects: list[Object], kind: str) -> Object:
    return next(each["spec"] for each in objects if each["kind"] == kind)


@pytest.mark.parametrize("name", JOBS)
def test_objects_are_valid_and_match_the_golden_files(name: str, tmp_path: Path) -> None:
    objects = rendered(name, tmp_path, code=() if "code: image" in JOBS[name][0] else (b"part one", b"part two"))
    for each in objects:
        kubernetes_validate.validate(each, VERSION, strict=True)
    text = "".join(f"---\n{dump(each)}" for each in objects)
    path = GOLDEN / f"{name}.yaml"
    if os.environ.get("UPDATE_RENDERED"):
        path.write_text(text)
    assert text == path.read_text(), "UPDATE_RENDERED=1 rewrites the files: review the difference"


@pytest.mark.parametrize("name", JOBS)
def test_selectors_of_the_run_do_not_match(name: str, tmp_path: Path) -> None:
    objects = rendered(name, tmp_path)
    deployment = objects[0]
    assert (deployment["kind"], deployment["metadata"]["name"]) == ("Deployment", f"{RUN}-serve")
    labels = [each["metadata"]["labels"] for each in objects]
    labels.append(deployment["spec"]["template"]["metadata"]["labels"])
    for each in labels:
        assert each[names.SERVES_LABEL] == RUN and not {names.RUN_LABEL, names.ROLE_LABEL} & set(each)
    serving_labels = {names.SERVES_LABEL: RUN}
    assert deployment["spec"]["selector"] == {"matchLabels": serving_labels}
    assert spec(objects, "Service")["selector"] == serving_labels
    assert spec(objects, "NetworkPolicy")["podSelector"] == {"matchLabels": serving_labels}


@pytest.mark.parametrize("name", JOBS)
def test_pods_pass_the_restricted_level(name: str, tmp_path: Path) -> None:
    pod = rendered(name, tmp_path)[0]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True and pod["automountServiceAccountToken"] is False
    for container in (*pod["initContainers"], *pod["containers"]):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "readOnlyRootFilesystem": True,
        }  # fmt: skip
        mounted = {each["name"] for each in container["volumeMounts"]}
        assert mounted <= {each["name"] for each in pod["volumes"]}
        assert {"paceline-tmp", "paceline-home", "paceline-models"} <= mounted


def test_another_snapshot_changes_the_pods_and_nothing_else(tmp_path: Path) -> None:
    first, second = rendered("tensorflow-serving", tmp_path), rendered("tensorflow-serving", tmp_path, "step-240-g3")
    assert first[0] != second[0] and first[1:] == second[1:]
    settings = json.loads(second[0]["spec"]["template"]["spec"]["initContainers"][0]["env"][0]["value"])
    assert (settings["snapshot"], settings["to"]) == ("step-240-g3", "/models/digits")
    other = rendered("tensorflow-serving", tmp_path, code=(b"changed",))
    unchanged = {each["metadata"]["name"] for each in first} & {each["metadata"]["name"] for each in other}
    assert {each["metadata"]["name"] for each in other} - unchanged == {
        each["metadata"]["name"] for each in other if "-serve-code-00-" in each["metadata"]["name"]
    }


def test_no_request_is_dropped_by_an_update(tmp_path: Path) -> None:
    """Checks the objects only; tests/cluster/test_serve.py checks the behavior."""
    deployment = rendered("paceline-serve", tmp_path)[0]["spec"]
    assert deployment["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": "25%"}
    pod = deployment["template"]["spec"]
    server = pod["containers"][0]
    assert server["lifecycle"] == {"preStop": {"sleep": {"seconds": 5}}}
    assert pod["terminationGracePeriodSeconds"] > 5 + 30  # the longest request
    assert server["readinessProbe"]["httpGet"]["path"] == "/readyz"


def test_pods_share_a_node_if_a_claim_cannot_be_on_two(tmp_path: Path) -> None:
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    affinity = f"  affinity: {{nodeAffinity: {{}}, podAffinity: {{{required}: [{{topologyKey: zone}}]}}}}\n"
    pod = rendered("paceline-serve", tmp_path, more=affinity)[0]["spec"]["template"]["spec"]
    assert "topologySpreadConstraints" not in pod and "nodeAffinity" in pod["affinity"]
    job_term, serving_term = pod["affinity"]["podAffinity"][required]
    assert job_term == {"topologyKey": "zone"}
    node = {"topologyKey": "kubernetes.io/hostname"}
    assert serving_term == {"labelSelector": {"matchLabels": {names.SERVES_LABEL: RUN}}, **node}
    [preferred] = pod["affinity"]["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    captain = {names.RUN_LABEL: RUN, names.ROLE_LABEL: "captain"}
    assert preferred == {"weight": 100, "podAffinityTerm": {"labelSelector": {"matchLabels": captain}, **node}}
    bucket = rendered("tensorflow-serving", tmp_path)[0]["spec"]["template"]["spec"]
    assert "affinity" not in bucket and bucket["topologySpreadConstraints"][0]["whenUnsatisfiable"] == "ScheduleAnyway"
