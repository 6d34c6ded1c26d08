"""The examples for users of other recipes, on a real cluster: each reaches its accuracy across pods."""

from __future__ import annotations

import re
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from support.lab.cluster import Cluster
from support.people import SOURCE, Person, Run, bucket_of, lines

pytestmark = pytest.mark.timeout(900, func_only=True)

EXAMPLES = Path(__file__).parents[2] / "examples"
ENDS_S = 600


def fields(name: str, *options: object, file: str = "job.yaml", store: bool = False, **more: Any) -> dict[str, Any]:
    """The example's job file, with the image and options for a short run. Started cold: this machine has 2 cores."""
    job: dict[str, Any] = YAML(typ="safe").load(EXAMPLES / name / file)
    kubernetes: dict[str, Any] = {
        "image": "lab.local/tensorflow:1", "image_pull_policy": "IfNotPresent", "placement": "spread",
        **({"env_from": [{"secret": "store"}]} if store else {}),
    }  # fmt: skip
    job |= {"code": str(EXAMPLES / name), "command": [*job["command"], *map(str, options)]}
    return {**job, "restart": {"warm": False}, "limits": {"grace": "5s"}, "kubernetes": kubernetes, **more}


def finished(run: Run, nodes: int = 2) -> dict[str, Any]:
    assert run.ends(ENDS_S) == 0, run.said()
    assert (run.report()["status"], run.report()["restarts"]) == ("succeeded", [])
    assert len({pod["spec"]["nodeName"] for pod in run.pods("worker")}) >= nodes
    return run.report()


def run_locally(folder: Path, *arguments: object) -> None:
    """Run a program of an example that creates its data, on this machine."""
    command = [sys.executable, *map(str, arguments)]
    result = subprocess.run(command, cwd=folder, env={"PYTHONPATH": str(SOURCE)}, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_mnist_loop_beside_another_run_of_the_same_name(
    person: Person, start: Callable[..., Run], cluster: Cluster, tmp_path: Path
) -> None:
    """In two namespaces: the runs are independent."""
    person.cluster.images("tensorflow")
    (tmp_path / "other").mkdir()
    with cluster.namespace(f"team-{uuid.uuid4().hex[:6]}") as namespace:
        other = Person(cluster, namespace, tmp_path / "other")
        run = start("--run", "mnist", **fields("mnist-loop", "--epochs", 4))
        another = Run(other, other.job(command=["python", "-c", "print('another')"]), "--run", "mnist")
        try:
            assert another.ends(ENDS_S) == 0, another.said()
            finished(run)
        finally:
            another.clean_up()
    assert lines(another.folder, "worker-0") == ["another"]
    assert int(re.findall(r"epoch 4: (\d+) of 1000", "\n".join(lines(run.folder, "worker-0")))[0]) >= 900


def test_mnist_keras(person: Person, start: Callable[..., Run]) -> None:
    """Keras' own fit, on two nodes, in a program that does not import Paceline."""
    person.cluster.images("tensorflow")
    run = start(**fields("mnist-keras", "--epochs", 4))
    finished(run)
    output = "\n".join(lines(run.folder, "worker-0"))
    assert "is patched" in output
    assert float(re.findall(r"([\d.]+)% of \d+ held-out", output)[-1]) >= 90
    assert run.events("committed")


def test_resnet_ps_with_an_evaluator(person: Person, start: Callable[..., Run], tmp_path: Path) -> None:
    person.cluster.images("tensorflow")
    bucket_of(person)
    run_locally(EXAMPLES / "resnet-ps", "digits_as_cifar.py", tmp_path / "cifar")
    data_folder = person.shared / "objects" / "digits" / "cifar"
    data_folder.mkdir()
    for path in (tmp_path / "cifar").iterdir():
        (data_folder / path.name).write_bytes(path.read_bytes())
    job = fields("resnet-ps", file="side-car.yaml", store=True, snapshots={"to": "s3://digits/kept"})
    data_index = job["command"].index("--data") + 1
    job["command"][data_index] = "s3://digits/cifar/"
    job["command"] += ["--depth", "8", "--epochs", "3", "--cuts", "2", "--every", "60", "--no-flip"]
    job["roles"] = {"chief": {}, "worker": {"replicas": 2}, "ps": {}, "evaluator": {}}
    run = start(**job)
    report = finished(run)
    assert report["metrics"]["evaluator-0"]["accuracy"] >= 0.8
    evaluated = [line for line in lines(run.folder, "evaluator-0") if line.startswith("step ")]  # not of TensorFlow
    assert f"step {report['steps']}: " in evaluated[-1]
