"""The examples for people who come from other recipes, on a real cluster: each learns what it is to, across pods."""

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

pytestmark = pytest.mark.timeout(400, func_only=True)

EXAMPLES = Path(__file__).parents[2] / "examples"
ENDS_S = 300


def fields(name: str, *options: object, file: str = "job.yaml", store: bool = False, **more: Any) -> dict[str, Any]:
    """The example's own job file, with the image and what makes it short. Started cold: this machine has 2 cores."""
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


def by_hand(folder: Path, *words: object) -> None:
    """A program of an example that makes its data, on this machine."""
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, cwd=folder, env={"PYTHONPATH": str(SOURCE)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_mnist_loop_twice_side_by_side_under_one_name(
    person: Person, start: Callable[..., Run], cluster: Cluster, tmp_path: Path
) -> None:
    """In two namespaces: neither knows of the other, and both end with the same."""
    person.cluster.images("tensorflow")
    (tmp_path / "other").mkdir()
    with cluster.namespace(f"team-{uuid.uuid4().hex[:6]}") as namespace:
        other = Person(cluster, namespace, tmp_path / "other")
        job = fields("mnist-loop", "--epochs", 4)
        runs = [start("--run", "mnist", **job), Run(other, other.job(**job), "--run", "mnist")]
        try:
            for run in runs:
                finished(run)
        finally:
            runs[1].clean_up()
    told = [re.findall(r"epoch 4: (\d+) of 1000", "\n".join(lines(run.folder, "worker-0"))) for run in runs]
    assert told[0] == told[1] and int(told[0][0]) >= 900


def test_mnist_keras(person: Person, start: Callable[..., Run]) -> None:
    """Keras' own fit, on two nodes, with no line of ours in it."""
    person.cluster.images("tensorflow")
    run = start(**fields("mnist-keras", "--epochs", 4))
    finished(run)
    said = "\n".join(lines(run.folder, "worker-0"))
    assert "is patched" in said
    assert float(re.findall(r"([\d.]+)% of \d+ held-out", said)[-1]) >= 90
    assert run.events("committed")


def test_translate(person: Person, start: Callable[..., Run], tmp_path: Path) -> None:
    """Its pairs are at a bucket, which no pod but one reads: the others find what that has made of them."""
    person.cluster.images("tensorflow")
    bucket_of(person)
    words = tmp_path / "words.tsv"
    by_hand(EXAMPLES / "translate", "cmudict_pairs.py", words, "--longest", 4)
    (person.shared / "objects" / "digits" / "words.tsv").write_bytes(words.read_bytes())
    small = ("--depth", 1, "--width", 32, "--inner", 64, "--heads", 2, "--dropout", 0.02, "--warm-up", 400)
    short = (*small, "--rate", 0.3, "--batch", 64, "--epochs", 2, "--snapshot-every", 1)
    ingest = {"command": ["python", "prepare.py", "s3://digits/words.tsv"], "to": "s3://digits/prepared"}
    snapshots = {"to": "s3://digits/kept"}
    run = start(**fields("translate", *short, store=True, ingest=ingest, snapshots=snapshots))
    finished(run)
    (told,) = re.findall(r"epoch 2: .*accuracy ([\d.]+)% of \d+", "\n".join(lines(run.folder, "worker-0")))
    assert float(told) >= 55
    assert list((person.shared / "objects/digits/kept" / run.name).glob("step-*/manifest.json"))


def test_resnet_ps_with_an_evaluator_beside(person: Person, start: Callable[..., Run], tmp_path: Path) -> None:
    person.cluster.images("tensorflow")
    bucket_of(person)
    by_hand(EXAMPLES / "resnet-ps", "digits_as_cifar.py", tmp_path / "cifar")
    there = person.shared / "objects" / "digits" / "cifar"
    there.mkdir()
    for path in (tmp_path / "cifar").iterdir():
        (there / path.name).write_bytes(path.read_bytes())
    job = fields("resnet-ps", file="side-car.yaml", store=True, snapshots={"to": "s3://digits/kept"})
    place = job["command"].index("--data") + 1
    job["command"][place] = "s3://digits/cifar/"
    job["command"] += ["--depth", "8", "--epochs", "3", "--cuts", "2", "--every", "60", "--no-flip"]
    job["roles"] = {"chief": {}, "worker": {"replicas": 2}, "ps": {}, "evaluator": {}}
    run = start(**job)
    report = finished(run)
    assert report["metrics"]["evaluator-0"]["accuracy"] >= 0.8
    assert f"step {report['steps']}: " in lines(run.folder, "evaluator-0")[-1]
