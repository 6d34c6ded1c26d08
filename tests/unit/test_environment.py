"""The environment variables of each task, for each framework."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline import plan
from paceline.frameworks import environment
from paceline.job import load_text


def plan_of(tmp_path: Path, text: str) -> plan.Plan:
    (tmp_path / "train.py").write_text("")
    return plan.make(load_text(text, "job.yaml", tmp_path).job)


def roster(job_plan: plan.Plan) -> dict[str, str]:
    return {task.name: f"10.0.0.{number}:{5000 + number}" for number, task in enumerate(job_plan.tasks)}


def variables_of(job_plan: plan.Plan, name: str, **more: Any) -> dict[str, str]:
    task = next(task for task in job_plan.tasks if task.name == name)
    return environment.task_variables(
        job_plan, task, roster(job_plan), "run-1234", more.get("generation", 1), more.get("restarts", 0)
    )


MULTI_WORKER = """
name: a
framework: tensorflow
command: [python, train.py]
roles: {worker: {replicas: 12}, evaluator: {}}
"""


def test_tf_config_is_valid_json_in_order_and_without_the_evaluator(tmp_path: Path) -> None:
    job_plan = plan_of(tmp_path, MULTI_WORKER)
    config = json.loads(variables_of(job_plan, "worker-11")["TF_CONFIG"])
    assert config["task"] == {"type": "worker", "index": 11}
    assert list(config["cluster"]) == ["worker"]
    assert config["cluster"]["worker"] == [f"10.0.0.{n}:{5000 + n}" for n in range(12)]
    evaluator = json.loads(variables_of(job_plan, "evaluator-0")["TF_CONFIG"])
    assert evaluator["task"] == {"type": "evaluator", "index": 0} and "evaluator" not in evaluator["cluster"]


def test_keras_is_patched_unless_the_job_says_otherwise(tmp_path: Path) -> None:
    def keras_settings(more: str) -> tuple[str | None, str | None]:
        job_plan = plan_of(tmp_path, MULTI_WORKER + more)
        return variables_of(job_plan, "worker-0").get("PACELINE_PATCH_KERAS"), job_plan.role("worker").env.get(
            "TF_USE_LEGACY_KERAS"
        )

    assert keras_settings("") == ("1", None)
    assert keras_settings("tensorflow: {patch_keras: false}") == (None, None)
    assert keras_settings("tensorflow: {keras: legacy}") == (None, "1")
    torch = "{name: a, framework: torch, command: [python, train.py]}"
    assert "PACELINE_PATCH_KERAS" not in variables_of(plan_of(tmp_path, torch), "worker-0")


def test_the_contract_of_any_image(tmp_path: Path) -> None:
    text = "{name: a, framework: tensorflow, strategy: parameter-server, command: [python, train.py],"
    job_plan = plan_of(tmp_path, text + " roles: {worker: {replicas: 2}, ps: {}}}")
    variables = variables_of(job_plan, "ps-0")
    assert variables["POD_NAME"] == "ps-0"
    assert json.loads(variables["CLUSTER_CONFIG"]) == {
        "worker": ["10.0.0.0:5000", "10.0.0.1:5001"],
        "ps": ["10.0.0.2:5002"],
    }


def test_torch_ranks_span_hosts_of_different_sizes(tmp_path: Path) -> None:
    text = "{name: a, framework: torch, command: [python, train.py], roles: {worker: [{gpus: 1}, {gpus: 8}]}}"
    job_plan = plan_of(tmp_path, text)
    assert len(job_plan.tasks) == 9
    variables = variables_of(job_plan, "worker-5", restarts=2)
    expected = {
        "MASTER_ADDR": "10.0.0.0", "MASTER_PORT": "5000", "RANK": "5", "WORLD_SIZE": "9", "LOCAL_RANK": "4",
        "LOCAL_WORLD_SIZE": "8", "GROUP_RANK": "1", "TORCHELASTIC_RESTART_COUNT": "2",
    }  # fmt: skip
    assert {name: variables[name] for name in expected} == expected


def test_jax_gets_the_address_of_the_first_task(tmp_path: Path) -> None:
    job_plan = plan_of(
        tmp_path, "{name: a, framework: jax, command: [python, train.py], roles: {worker: {replicas: 2}}}"
    )
    variables = variables_of(job_plan, "worker-1")
    assert variables["PACELINE_JAX_COORDINATOR"] == "10.0.0.0:5000"
    assert (variables["PACELINE_RANK"], variables["PACELINE_WORLD_SIZE"]) == ("1", "2")


@pytest.mark.parametrize("framework", ["torch", "jax", "none"])
def test_an_evaluator_is_not_part_of_any_group(tmp_path: Path, framework: str) -> None:
    roles = "roles: {worker: {replicas: 2}, evaluator: {}}"
    job_plan = plan_of(tmp_path, f"{{name: a, framework: {framework}, command: [python, train.py], {roles}}}")
    variables = variables_of(job_plan, "evaluator-0")
    assert (variables["PACELINE_RANK"], variables["PACELINE_WORLD_SIZE"]) == ("-1", "2")
    assert not {"RANK", "MASTER_ADDR", "PACELINE_JAX_COORDINATOR"} & variables.keys()
    assert variables_of(job_plan, "worker-0").get("GROUP_WORLD_SIZE", "2") == "2"


@pytest.mark.parametrize(
    ("framework", "devices", "local", "visible"),
    [
        ("tensorflow", ("2", "3"), 1, "3"),
        ("torch", ("2", "3"), 1, "2,3"),
        ("jax", ("2", "3"), 1, "2,3"),
        ("tensorflow", (), 0, ""),
        ("none", (), 0, ""),
    ],
)
def test_gpus(tmp_path: Path, framework: str, devices: tuple[str, ...], local: int, visible: str) -> None:
    text = f"{{name: a, framework: {framework}, command: [python, train.py], roles: {{worker: {{tasks_per_host: 2}}}}}}"
    job_plan = plan_of(tmp_path, text)
    assert environment.gpus(job_plan, job_plan.tasks[local], devices)["CUDA_VISIBLE_DEVICES"] == visible


@pytest.mark.parametrize(("cores", "tasks", "threads"), [(8, 2, "4"), (2, 3, "1"), (1.5, 1, "1"), (0.2, 1, "1")])
def test_each_task_gets_its_share_of_cores_as_threads(cores: float, tasks: int, threads: str) -> None:
    assert environment.threads(cores, tasks)["OMP_NUM_THREADS"] == threads


def test_generation_and_run_are_set(tmp_path: Path) -> None:
    variables = variables_of(plan_of(tmp_path, MULTI_WORKER), "worker-3", generation=7)
    assert (variables["PACELINE_GENERATION"], variables["PACELINE_RUN"]) == ("7", "run-1234")
