"""Files generated from the models, the JSON Schema and the reference page, match what the loader accepts."""

from __future__ import annotations

import doctest
import functools
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from ruamel.yaml import YAML

from paceline import job, plan
from paceline.agent.tasks import variable_references
from paceline.job import (
    file_checks,
    job_file_reference,
    json_schema,
    kubernetes_values,
    similar_names,
    values,
    yaml_tree,
    yaml_writer,
)

DOCS = Path(__file__).parents[2] / "docs"
HEAD = {"name": "digits", "framework": "tensorflow", "command": ["python", "train.py"]}


@functools.cache
def validator() -> jsonschema.Draft202012Validator:
    schema = job.schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def is_valid(data: Any) -> bool:
    return bool(validator().is_valid(data))


def test_the_published_schema_matches_the_models() -> None:
    assert (DOCS / "job.schema.json").read_text() == json_schema.text(), (
        "run: python -m paceline.job.json_schema > docs/job.schema.json"
    )
    assert json.loads(json_schema.text()) == job.schema()


def test_the_reference_page_matches_the_models() -> None:
    assert (DOCS / "job-file.md").read_text() == job_file_reference.page(), (
        "run: python -m paceline.job.job_file_reference > docs/job-file.md"
    )


def test_every_field_has_a_description() -> None:
    schema = job.schema()
    models = [schema, *schema["$defs"].values()]
    fields = [(name, field) for model in models for name, field in model["properties"].items()]
    assert len(fields) == 26 + 4 + 2 + 2 + 6 + 1 + 1 + 10 + 6 + 7 + 2 + 19 + 5 + 7 + 3 + 10 + 2 + 3 + 4 + 3 + 4 + 2
    assert [name for name, field in fields if not field.get("description")] == []
    assert all("null" not in json.dumps(field) for _, field in fields)


RIGHT: list[dict[str, Any]] = [
    {},
    {"roles": {"worker": {"replicas": 3, "gpus": 1, "cpu": 4, "memory": "8Gi"}}},
    {"roles": {"worker": [{"replicas": 1}, {"gpus": 8, "tasks_per_host": 4}], "evaluator": {}}},
    {"cpu": 0.5, "memory": 1048576, "limits": {"start": 90, "runtime": "1h30m", "grace": 0.5}},
    {"cpu": "500m", "memory": "512Mi", "restart": {"limit": 0, "hang_after": "2d", "warm": False}},
    {"env": {"A": "", "_B1": "x"}, "kubernetes": {"image": "a/b:c", "namespace": "team-a"}, "code": "."},
    {"strategy": "parameter-server", "roles": {"ps": {}, "worker": {}, "chief": {"command": ["python", "train.py"]}}},
    {"code": "image", "tensorboard": True, "limits": {"keep_finished": "2d"}},
    {"credentials": {"secret": "a.b-c", "file": ".a_B.json"}, "tensorboard": False},
    {"try": {"command": ["python", "train.py"]}, "export": {"command": ["python", "-m", "json.tool"]}},
    {"export": {"command": ["python", "train.py"]}, "serve": {"image": "a/b", "replicas": 3, "service": "NodePort"}},
    {"export": {"command": ["python", "train.py"]}, "serve": {"cpu": 2, "memory": "1Gi", "gpus": 1}},
    {"kubernetes": {"user": "cluster", "context": "a b", "gpu_resource": "amd.com/gpu", "image_pull_secrets": ["a"]}},
    {"kubernetes": {"user": 1, "image_pull_policy": "Never", "image_pull_secrets": [], "priority_class": "high.1"}},
    {"kubernetes": {"tolerations": [{"operator": "Exists"}, {"key": "a/b", "effect": "NoExecute", "seconds": 0}]}},
    {"kubernetes": {"tolerations": [{"key": "a", "value": "b"}, {"key": "a", "operator": "Equal", "value": ""}]}},
    {"kubernetes": {"affinity": {"nodeAffinity": {"a": [1, {"b": 0.5}]}}, "placement": "spread", "work": "/app"}},
    {"kubernetes": {"volumes": [{"mount": "/a", "claim": "b"}, {"mount": "/c/", "empty": "1Gi", "read_only": False}]}},
    {"kubernetes": {"volumes": [{"name": "a", "mount": "/a", "secret": "b"}, {"mount": "/c", "config_map": "d"}]}},
    {"kubernetes": {"env_from": [{"secret": "a"}, {"config_map": "b", "prefix": "B_"}], "service_account": "c"}},
    {"tensorboard": {"image": "a/b:c", "memory": "512Mi", "service": "LoadBalancer"}},
    {"notify": [{"url": "http://a:1/b?c=d"}, {"url_from": "B", "on": ["hang"], "format": "slack"}]},
    {"tensorboard": {"ingress": {"host": "a.b", "class": "c", "tls": "d"}}},
    {"kubernetes": {"labels": {"a.b/C_d": "", "e": "F.1"}, "annotations": {"a": "any text: 1\n"}}},
    {"kubernetes": {"node_selector": {"kubernetes.io/arch": "amd64"}, "pod": {"a": None, "b": [{"c": {}}]}}},
]
WRONG: list[dict[str, Any]] = [
    {"nam": "a"},
    {"name": "My Job"},
    {"framework": "pytorch"},
    {"strategy": "ps"},
    {"command": "python train.py"},
    {"command": []},
    {"command": ["python", 3]},
    {"env": {"A": 1}},
    {"env": {"a-b": "c"}},
    {"cpu": "4 cores"},
    {"cpu": 0},
    {"memory": "8G b"},
    {"memory": 8},
    {"gpus": -1},
    {"gpus": 1.5},
    {"roles": {}},
    {"roles": {"worker": []}},
    {"roles": {"worker": 3}},
    {"roles": {"workers": {}}},
    {"roles": {"worker": {"replicas": 0}}},
    {"roles": {"worker": {"replics": 1}}},
    {"restart": {"warm": "yes"}},
    {"restart": {"limit": -1}},
    {"limits": {"start": "soon"}},
    {"limits": {"start": ""}},
    {"limits": {"grace": 0}},
    {"limits": None},
    {"kubernetes": {"namespace": "A"}},
    {"kubernetes": {"image": "a b"}},
    {"tensorboard": {"image": ""}},
    {"tensorboard": {"memory": "much"}},
    {"tensorboard": {"service": "Other"}},
    {"tensorboard": {"ingress": {"class": "c"}}},
    {"kubernetes": {"tensorboard_image": "a"}},
    {"code": " "},
    {"notify": {"url": "http://a/"}},
    {"notify": [{}]},
    {"notify": [{"url": "http://a/", "url_from": "B"}]},
    {"notify": [{"url": "ftp://a/"}]},
    {"notify": [{"url": "http://a:b@c/"}]},
    {"notify": [{"url": "http://a/", "on": []}]},
    {"notify": [{"url": "http://a/", "on": ["end"]}]},
    {"tensorboard": "true"},
    {"try": {}},
    {"try": {"command": []}},
    {"export": {"command": ["python", "train.py"], "to": "a"}},
    {"serve": {"replicas": 0}},
    {"serve": {"service": "Other"}},
    {"credentials": {}},
    {"credentials": {"secret": "a"}},
    {"credentials": {"file": "a"}},
    {"credentials": {"secret": "A", "file": "a"}},
    {"credentials": {"secret": "a", "file": "a/b"}},
    {"credentials": {"secret": "a", "file": ".."}},
    {"limits": {"keep_finished": 0}},
    {"kubernetes": {"context": ""}},
    {"kubernetes": {"user": 0}},
    {"kubernetes": {"user": "1000"}},
    {"kubernetes": {"user": True}},
    {"kubernetes": {"user": 2**31}},
    {"kubernetes": {"gpu_resource": "gpu"}},
    {"kubernetes": {"gpu_resource": "node.kubernetes.io/gpu"}},
    {"kubernetes": {"gpu_resource": "a" * 254 + "/gpu"}},
    {"kubernetes": {"node_selector": {"a": 1}}},
    {"kubernetes": {"node_selector": {"a b": "c"}}},
    {"kubernetes": {"node_selector": {"a": "-"}}},
    {"kubernetes": {"tolerations": {"key": "a"}}},
    {"kubernetes": {"tolerations": [{}]}},
    {"kubernetes": {"tolerations": [{"effect": "NoSchedule"}]}},
    {"kubernetes": {"tolerations": [{"key": "a", "operator": "In"}]}},
    {"kubernetes": {"tolerations": [{"key": "a", "operator": "Exists", "value": "b"}]}},
    {"kubernetes": {"tolerations": [{"key": "a", "seconds": 5}]}},
    {"kubernetes": {"tolerations": [{"key": "a", "effect": "NoSchedule", "seconds": 5}]}},
    {"kubernetes": {"affinity": []}},
    {"kubernetes": {"affinity": {"nodeSelector": {}}}},
    {"kubernetes": {"affinity": {"nodeAffinity": 1}}},
    {"kubernetes": {"priority_class": "A"}},
    {"kubernetes": {"service_account": "a" * 254}},
    {"kubernetes": {"image_pull_secrets": "a"}},
    {"kubernetes": {"image_pull_secrets": ["a b"]}},
    {"kubernetes": {"image_pull_policy": "always"}},
    {"kubernetes": {"volumes": [{"mount": "/a"}]}},
    {"kubernetes": {"volumes": [{"claim": "a"}]}},
    {"kubernetes": {"volumes": [{"mount": "/a", "claim": "b", "empty": "1Gi"}]}},
    {"kubernetes": {"volumes": [{"mount": "/a", "host_path": "/b"}]}},
    {"kubernetes": {"volumes": [{"mount": "a", "claim": "b"}]}},
    {"kubernetes": {"volumes": [{"mount": "/./", "claim": "b"}]}},
    {"kubernetes": {"volumes": [{"mount": "/a/../b", "claim": "b"}]}},
    {"kubernetes": {"volumes": [{"mount": "/a:b", "claim": "b"}]}},
    {"kubernetes": {"volumes": [{"mount": "/a", "claim": "b", "name": "paceline-code"}]}},
    {"kubernetes": {"env_from": [{}]}},
    {"kubernetes": {"env_from": [{"secret": "a", "config_map": "b"}]}},
    {"kubernetes": {"env_from": [{"secret": "a", "prefix": "PACELINE_"}]}},
    {"kubernetes": {"labels": {"a": "b c"}}},
    {"kubernetes": {"annotations": {"a": 1}}},
    {"kubernetes": {"annotations": {"": "a"}}},
    {"kubernetes": {"placement": "binpack"}},
    {"kubernetes": {"work": "app"}},
    {"kubernetes": {"pod": []}},
    {"kubernetes": {"pod": {"spec": {}}}},
]


@pytest.mark.parametrize("extra", RIGHT, ids=str)
def test_the_schema_accepts_what_the_loader_accepts(extra: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    assert is_valid({**HEAD, **extra})
    job.load_text(json.dumps({**HEAD, **extra}), "job.json", tmp_path)


@pytest.mark.parametrize("extra", WRONG, ids=str)
def test_the_schema_rejects_what_the_loader_rejects(extra: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    assert not is_valid({**HEAD, **extra})
    with pytest.raises(job.JobError):
        job.load_text(json.dumps({**HEAD, **extra}), "job.json", tmp_path)


def test_the_examples_are_valid(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    page = job_file_reference.page()
    examples = [text for text in re.findall("```yaml\n(.*?)```", page, re.DOTALL) if text.startswith("name:")]
    assert len(examples) == 2
    for text in examples:
        assert job.load_text(text, "job.yaml", tmp_path, cluster=True).notes == []
        assert is_valid(YAML(typ="safe", pure=True).load(text))
    schema = job.schema()
    for model in [schema, *schema["$defs"].values()]:
        for field in model["properties"].values():
            checker = jsonschema.Draft202012Validator({**field, "$defs": schema["$defs"]})
            assert all(checker.is_valid(example) for example in field.get("examples", []))


@pytest.mark.parametrize(
    "module",
    [kubernetes_values, file_checks, similar_names, yaml_tree, values, yaml_writer, plan, variable_references],
    ids=lambda module: module.__name__,
)
def test_the_examples_in_the_code_are_correct(module: Any) -> None:
    result = doctest.testmod(module)
    assert result.attempted > 0 and result.failed == 0
