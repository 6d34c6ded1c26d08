"""Programs for real frameworks train across pods and nodes, with the same result as a single process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.people import Person, Run, lines

pytestmark = pytest.mark.timeout(900, func_only=True)

PROGRAMS = Path(__file__).parents[1] / "programs"  # also used by tests on one machine
TENSORFLOW, TORCH_JAX = "lab.local/tensorflow:1", "lab.local/torch-jax:1"
ENDS_S = 500


def job(framework: str, image: str, *command: object, **more: Any) -> dict[str, Any]:
    """Started cold: this machine is too small for a spare interpreter per task."""
    volumes = [{"mount": "/shared", "claim": "shared"}]
    kubernetes = {"image": image, "image_pull_policy": "IfNotPresent", "placement": "spread", "volumes": volumes}
    return {
        "framework": framework, "code": str(PROGRAMS), "command": ["python", *map(str, command)],
        "env": {"TF_CPP_MIN_LOG_LEVEL": "2"}, "restart": {"warm": False}, "kubernetes": kubernetes, **more,
    }  # fmt: skip


def train_with_one_worker(person: Person) -> dict[str, str]:
    """The last lines of worker-0 when the same job file runs on this machine with one worker."""
    result = person.call("run", "work/job.yaml", "--set", "roles.worker.replicas=1", "-o", "json")
    assert result.returncode == 0, result.stderr
    return last_lines(Path(json.loads(result.stdout)["folder"]), "worker-0")


def last_lines(folder: Path, task: str) -> dict[str, str]:
    """The lines that the task printed: first word -> rest of the last line that begins with it."""
    return {first: rest for first, _, rest in (line.partition(" ") for line in lines(folder, task))}


def finished(run: Run, *tasks: str) -> dict[str, dict[str, str]]:
    """The last lines of each of these tasks, in a run that has to succeed without a restart."""
    assert run.ends(ENDS_S) == 0, run.said()
    assert (run.report()["status"], run.report()["generations"], run.report()["restarts"]) == ("succeeded", 1, [])
    return {task: last_lines(run.folder, task) for task in tasks}


def assert_same_model(outputs: dict[str, dict[str, str]], name: str, expected: str) -> None:
    """All tasks print the same digest of the weights, and the same figure `name` as a single process."""
    assert len({each["weights"] for each in outputs.values()}) == 1, outputs
    for each in outputs.values():
        assert float(each[name]) == pytest.approx(float(expected), abs=1e-4)


def test_tensorflow_workers_on_three_nodes_train_as_one(person: Person, start: Callable[..., Run]) -> None:
    person.cluster.images("tensorflow")
    steps = 8  # few enough that the error still differs if training differs
    fields = job("tensorflow", TENSORFLOW, "tf_multiworker.py", "--steps", steps, strategy="multi-worker")
    run = start(**fields, workers=3)
    outputs = finished(run, "worker-0", "worker-1", "worker-2")
    assert {pod["spec"]["nodeName"] for pod in run.pods("worker")} == set(person.cluster.nodes)
    assert {(each["replicas"], each["step"]) for each in outputs.values()} == {("3", str(steps))}
    expected = train_with_one_worker(person)
    assert expected["replicas"] == "1" and float(expected["error"]) > 0.01
    assert_same_model(outputs, "error", expected["error"])


def test_a_program_for_cluster_config_and_pod_name_needs_nothing_else(
    person: Person, start: Callable[..., Run]
) -> None:
    person.cluster.images("tensorflow")
    roles = {"worker": {"replicas": 2}, "ps": {"replicas": 1}}
    fields = job("tensorflow", TENSORFLOW, "cluster_config.py", "--steps", 20, strategy="parameter-server", roles=roles)
    outputs = finished(start(**fields), "worker-0", "worker-1", "ps-0")
    assert [outputs[task]["counter"] for task in ("worker-0", "worker-1")] == ["40", "40"]
    assert outputs["ps-0"]["serving"] == "ps 0"


def test_torch_workers_train_as_one(person: Person, start: Callable[..., Run]) -> None:
    person.cluster.images("torch-jax")
    run = start(**job("torch", TORCH_JAX, "torch_ddp.py", "--steps", 8), workers=2)
    outputs = finished(run, "worker-0", "worker-1")
    assert [each["rank"] for each in outputs.values()] == [f"{rank} of 2, local rank 0, gloo" for rank in range(2)]
    assert len({pod["spec"]["nodeName"] for pod in run.pods("worker")}) == 2
    assert_same_model(outputs, "answer", train_with_one_worker(person)["answer"])


def test_jax_processes_train_as_one(person: Person, start: Callable[..., Run]) -> None:
    person.cluster.images("torch-jax")
    run = start(**job("jax", TORCH_JAX, "jax_allreduce.py", "--steps", 8), workers=2)
    outputs = finished(run, "worker-0", "worker-1")
    assert [each["rank"] for each in outputs.values()] == [f"{rank} of 2, 2 devices" for rank in range(2)]
    assert len({pod["spec"]["nodeName"] for pod in run.pods("worker")}) == 2
    assert_same_model(outputs, "error", train_with_one_worker(person)["error"])


def test_the_steps_of_pods_are_profiled(person: Person, start: Callable[..., Run]) -> None:
    person.cluster.images("torch-jax")
    run = start(**job("torch", TORCH_JAX, "profiled.py", "torch", "/shared/finish"), workers=2)
    for task in ("worker-0", "worker-1"):
        run.wait("step", task=task)
    result = person.call("profile", run.name, "--steps", "3", "--to", "profiles", "-o", "json")
    assert result.returncode == 0, result.stderr
    for task in json.loads(result.stdout)["tasks"]:
        assert (task["steps"], task["problem"]) == (3, "")
        (file,) = map(Path, task["files"])
        assert file.name.startswith(f"{task['task']}.") and file.parents[3].name == "profiles"
        assert "aten::matmul" in {event.get("name") for event in json.loads(file.read_text())["traceEvents"]}
    person.finish()
    finished(run)
