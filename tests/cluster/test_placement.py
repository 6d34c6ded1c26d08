"""Where hosts are placed, which resources they request, and that tasks keep their order on any node."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.lab.cluster import Cluster
from support.people import IMAGE, Person, Run, lines

pytestmark = pytest.mark.timeout(900, func_only=True)

GPU = "nvidia.com/gpu"
SHOWS_ENVIRONMENT = Path(__file__).parents[1] / "programs" / "environment.py"
ROLL_CALL = Path(__file__).parent / "programs" / "roll_call.py"
PRINTS_USER = "import os; print('user', os.getuid(), 'group', os.getgid())"
QUICK = {"restart": {"warm": False}, "limits": {"grace": "5s", "start": "5m"}}


def settings(**more: Any) -> dict[str, Any]:
    return {"image": IMAGE, "image_pull_policy": "IfNotPresent", **more}


def assert_succeeds(run: Run) -> None:
    assert run.ends() == 0, run.said()
    assert (run.report()["generations"], run.report()["restarts"]) == (1, [])


def nodes(run: Run, role: str = "worker") -> list[str]:
    return [pod["spec"]["nodeName"] for pod in run.pods(role)]


def requested_gpus(run: Run, role: str) -> list[str | None]:
    """How many GPUs the pods of the role request."""
    containers = [pod["spec"]["containers"][0] for pod in run.pods(role)]
    return [container["resources"].get("limits", {}).get(GPU) for container in containers]


@contextlib.contextmanager
def set_apart(cluster: Cluster, node: str) -> Iterator[None]:
    """Label the node `pool=apart`, and taint it so that only pods that tolerate the taint run on it."""
    cluster.kubectl("label", "node", node, "pool=apart")
    cluster.kubectl("taint", "node", node, "dedicated=apart:NoSchedule")
    try:
        yield
    finally:
        cluster.kubectl("taint", "node", node, "dedicated-")
        cluster.kubectl("label", "node", node, "pool-")


def test_unequal_hosts_get_a_task_for_each_gpu_in_order(
    breakable: Cluster, person: Person, start: Callable[..., Run]
) -> None:
    many, *few = breakable.nodes
    for node, gpus in ((many, 8), *((node, 2) for node in few)):
        breakable.extended_resources(node, {GPU: gpus})
    roles = {"worker": [{"replicas": 1, "gpus": 8}, {"replicas": 4, "gpus": 1}], "evaluator": {}}
    run = start(
        program=SHOWS_ENVIRONMENT.read_text(), framework="tensorflow", roles=roles, kubernetes=settings(), **QUICK
    )
    assert_succeeds(run)
    assert (nodes(run)[0], sorted(nodes(run)[1:])) == (many, sorted(few * 2))
    assert requested_gpus(run, "worker") == ["8", "1", "1", "1", "1"]
    assert (requested_gpus(run, "captain"), requested_gpus(run, "evaluator")) == ([None], [None])
    environments = [_variables(run, f"worker-{index}") for index in range(12)]
    assert [env["PACELINE_RANK"] for env in environments] == [str(rank) for rank in range(12)]
    assert {env["PACELINE_WORLD_SIZE"] for env in environments} == {"12"}
    assert [env["CUDA_VISIBLE_DEVICES"] for env in environments] == [*"012345670000"]
    names = [f"{run.name}-worker-0"] * 8 + [f"{run.name}-worker-g1-{index}" for index in range(4)]
    assert [env["HOSTNAME"] for env in environments] == names
    configs = [json.loads(env["TF_CONFIG"]) for env in environments]
    assert [config["task"]["index"] for config in configs] == list(range(12))
    addresses = configs[0]["cluster"]["worker"]
    assert len(set(addresses)) == 12
    hosts = [0] * 8 + [1, 2, 3, 4]
    assert [address.rpartition(":")[0] for address in addresses] == [_address(run, host) for host in hosts]
    assert _variables(run, "evaluator-0")["CUDA_VISIBLE_DEVICES"] == ""


def _address(run: Run, host: int) -> str:
    address: str = run.pods("worker")[host]["status"]["podIP"]
    return address


def _variables(run: Run, task: str) -> dict[str, str]:
    output_line = next(line for line in lines(run.folder, task) if line.startswith("environment "))
    variables: dict[str, str] = json.loads(output_line.removeprefix("environment "))["variables"]
    return variables


def test_packed_hosts_share_a_node_and_spread_ones_do_not(
    person: Person, breakable: Cluster, start: Callable[..., Run]
) -> None:
    """On a cluster that no other test uses at the same time."""
    placed = {}
    for placement in ("pack", "spread"):
        # So many and so large that the scheduler by default would distribute them evenly.
        worker = {"replicas": 6, "cpu": "250m", "memory": "512Mi"}
        run = start(program="", roles={"worker": worker}, kubernetes=settings(placement=placement), **QUICK)
        assert_succeeds(run)
        placed[placement] = Counter(nodes(run))
    assert list(placed["pack"].values()) == [6], placed
    assert list(placed["spread"].values()) == [2, 2, 2], placed


def test_hosts_respect_node_selector_and_tolerations(
    breakable: Cluster, person: Person, start: Callable[..., Run]
) -> None:
    node = breakable.nodes[1]
    toleration = {"key": "dedicated", "value": "apart", "effect": "NoSchedule"}
    with set_apart(breakable, node):
        on_node = start(
            program="", kubernetes=settings(node_selector={"pool": "apart"}, tolerations=[toleration]), **QUICK
        )
        assert_succeeds(on_node)
        elsewhere = start(program="", kubernetes=settings(placement="spread"), **QUICK)
        assert_succeeds(elsewhere)
    assert (set(nodes(on_node)), set(nodes(on_node, "captain"))) == ({node}, {node})
    assert node not in nodes(elsewhere) + nodes(elsewhere, "captain")


def test_hosts_follow_a_volume_to_its_node(person: Person, start: Callable[..., Run]) -> None:
    node = person.cluster.nodes[2]
    folder = person.cluster.local_volume(person.namespace, "disk", node)
    program = "import os; open('/disk/' + os.environ['PACELINE_TASK'], 'w').close()"
    volumes = [{"mount": "/disk", "claim": "disk"}]
    run = start(program=program, workers=2, kubernetes=settings(placement="spread", volumes=volumes), **QUICK)
    assert_succeeds(run)
    assert nodes(run) == [node, node]
    assert sorted(path.name for path in folder.iterdir()) == ["worker-0", "worker-1"]


def test_more_than_ten_hosts_keep_their_order(person: Person, start: Callable[..., Run]) -> None:
    run = start(program=ROLL_CALL.read_text(), workers=12, kubernetes=settings(), **QUICK)
    assert_succeeds(run)
    assert lines(run.folder, "worker-0") == ["present " + " ".join(map(str, range(12)))]
    assert [lines(run.folder, f"worker-{index}") for index in range(1, 12)] == [["answered 12"]] * 11
    hostnames = {pod["spec"]["hostname"] for pod in run.pods("worker")}
    assert hostnames == {f"{run.name}-worker-{index}" for index in range(12)}


def test_the_user_can_be_that_of_the_image(person: Person, start: Callable[..., Run]) -> None:
    person.cluster.images("numbered")
    image = {"image": "lab.local/numbered:1", "user": "cluster"}
    run = start(program=PRINTS_USER, workers=1, kubernetes=settings(**image), **QUICK)
    assert_succeeds(run)
    assert lines(run.folder, "worker-0") == ["user 65534 group 65534"]
