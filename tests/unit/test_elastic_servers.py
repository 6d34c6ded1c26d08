"""What the captain decides in elastic parameter-server jobs: which workers a chief leads, and when that changes."""

from __future__ import annotations

import json

from paceline.agent.captain.restart_units import RUNNING
from paceline.frameworks.environment import task_variables
from support.worlds import LEASE, World, make_plan, up

EVERY, WAIT = 120.0, 30.0


def elastic(workers: int = 3, least: int = 2) -> World:
    return World(make_plan(workers, ps=1, chief=True, least=least, hang_after=None))


def join(world: World, *hosts: str) -> None:
    for host in hosts:
        world.join(host)


def settle(world: World, seconds: float) -> None:
    """Time passes, and all messages arrive."""
    for _ in range(int(seconds)):
        world.pass_time(1)
        world.deliver_all()


def names(world: World) -> list[str]:
    return sorted(name for name, _ in world.running())


def without_one_worker() -> World:
    """A run that has started without worker-1."""
    world = elastic()
    join(world, "chief-host-0", "ps-host-0", "worker-host-0", "worker-host-2")
    settle(world, WAIT + 1)
    return world


def cluster(world: World, task: str) -> dict[str, object]:
    plan = world.plan.of_generation(world.captain.ledger.roster())
    variables = task_variables(plan, plan.task(task), world.captain.ledger.roster(), "run", 1, 0)
    config: dict[str, object] = json.loads(variables["TF_CONFIG"])
    return config


def test_a_chief_starts_with_the_workers_that_are_there_once_it_has_waited() -> None:
    world = elastic()
    join(world, "chief-host-0", "ps-host-0", "worker-host-0", "worker-host-2")
    settle(world, WAIT - 2)
    assert names(world) == []
    settle(world, 3)
    assert names(world) == ["chief-0", "ps-0", "worker-0", "worker-2"]
    assert world.last("generation-formed")["absent"] == ["worker-1"]
    spec = {"chief": ["h:chief-0"], "ps": ["h:ps-0"], "worker": ["h:worker-0", "h:worker-2"]}
    assert cluster(world, "worker-2") == {"cluster": spec, "task": {"type": "worker", "index": 1}}


def test_below_min_no_task_starts() -> None:
    world = elastic()
    join(world, "chief-host-0", "ps-host-0", "worker-host-2")
    settle(world, WAIT + 60)
    assert names(world) == []
    assert world.last("waiting")["missing"] == ["worker-host-0", "worker-host-1"]


def test_a_worker_that_the_chief_does_not_know_joins_with_a_new_generation() -> None:
    world = without_one_worker()
    world.join("worker-host-1")
    settle(world, EVERY + WAIT)
    assert names(world) == ["chief-0", "ps-0", "worker-0", "worker-2"]
    world.save("chief-0", 10)
    settle(world, 5)
    assert names(world) == ["chief-0", "ps-0", "worker-0", "worker-1", "worker-2"]
    assert world.captain.generation == 2
    assert "absent" not in world.last("generation-formed")
    assert world.last("generation-formed")["restore"] == "step-10-g1"
    assert cluster(world, "worker-2")["task"] == {"type": "worker", "index": 2}
    assert world.captain.failures.restarts == []


def test_a_lost_worker_is_not_awaited_while_enough_others_train() -> None:
    world = up(make_plan(3, ps=1, chief=True, least=2, hang_after=None, start=60.0))
    world.disconnect("worker-host-1")
    settle(world, LEASE + 100)
    assert world.over is None
    assert names(world) == ["chief-0", "ps-0", "worker-0", "worker-2"]
    world.join("worker-host-1")
    settle(world, 5)
    assert {name: process.generation for name, process in world.running()}["worker-1"] == 1
    assert cluster(world, "worker-1")["task"] == {"type": "worker", "index": 1}


def test_the_limit_of_a_worker_that_was_lost_long_ago_begins_once_too_few_are_left() -> None:
    world = up(make_plan(3, ps=1, chief=True, least=2, hang_after=None, start=60.0))
    world.disconnect("worker-host-1")
    settle(world, LEASE + 100)
    world.disconnect("worker-host-2")
    settle(world, 2)
    assert world.over is None
    world.join("worker-host-2")
    settle(world, 100)
    assert world.over is None and "worker-2" in names(world)
    world.disconnect("worker-host-2")
    settle(world, 70)
    assert world.over is not None and "did not start within 60 s" in world.over.reason


def test_below_min_a_lost_worker_is_awaited_for_limits_start() -> None:
    world = up(make_plan(3, ps=1, chief=True, least=3, hang_after=None, start=60.0))
    world.disconnect("worker-host-1")
    settle(world, LEASE + 100)
    assert world.over is not None and "worker-1 did not start within 60 s" in world.over.reason


def test_a_chief_that_restarts_does_not_wait_for_a_lost_worker() -> None:
    world = up(make_plan(3, ps=1, chief=True, least=2, hang_after=None))
    world.disconnect("worker-host-1")
    settle(world, LEASE + 1)
    world.exit("ps-0", "signal")
    settle(world, 3)
    assert names(world) == ["chief-0", "ps-0", "worker-0", "worker-2"]
    assert world.captain.generation == 2
    assert world.last("generation-formed")["absent"] == ["worker-1"]


def test_a_worker_that_dies_restarts_alone_with_the_number_that_the_chief_knows() -> None:
    world = without_one_worker()
    world.exit("worker-2", "signal")
    settle(world, 3)
    assert {name: process.attempt for name, process in world.running()} == {
        "chief-0": 1, "ps-0": 1, "worker-0": 1, "worker-2": 2,
    }  # fmt: skip
    assert cluster(world, "worker-2")["task"] == {"type": "worker", "index": 1}


def test_a_captain_that_returns_knows_which_workers_are_absent() -> None:
    world = without_one_worker()
    world.restart_captain()
    world.join_all()
    settle(world, LEASE + 5)
    assert names(world) == ["chief-0", "ps-0", "worker-0", "worker-2"]
    world.exit("worker-2", "signal")
    settle(world, 3)
    assert cluster(world, "worker-2")["task"] == {"type": "worker", "index": 1}
    assert all(unit.phase == RUNNING for unit in world.captain.units if not unit.is_absent)


def test_a_captain_that_returns_while_the_chief_starts_again_leads_workers_that_start_with_it() -> None:
    world = up(make_plan(3, ps=1, chief=True, least=2, hang_after=None))
    world.disconnect("ps-host-0")
    settle(world, LEASE - 2)
    world.disconnect("worker-host-1")
    settle(world, 3)
    assert names(world) == ["worker-1"], "it has not been told that the others were stopped"
    world.restart_captain()
    world.join_all()
    settle(world, LEASE + 5)
    assert names(world) == ["chief-0", "ps-0", "worker-0", "worker-1", "worker-2"]
    assert not any(unit.is_absent for unit in world.captain.units)


def test_a_chief_that_dies_while_no_captain_is_there_starts_again_with_its_workers() -> None:
    world = elastic()
    world.join_all()
    world.deliver_all()
    world.restart_captain()
    world.agent_dies("chief-host-0")
    world.join_all()
    settle(world, 2 * LEASE)
    assert names(world) == ["chief-0", "ps-0", "worker-0", "worker-1", "worker-2"]
    assert world.captain.generation == 2 and len(world.captain.failures.restarts) == 1


def test_a_captain_without_notes_starts_all_tasks_again_if_one_dies() -> None:
    """Elastic or not: it does not know the addresses that the others have been told."""
    world = up(make_plan(2, ps=1, chief=True))
    world.restart_captain(with_notes=False)
    world.join_all()
    settle(world, LEASE)
    assert {name: process.attempt for name, process in world.running()} == dict.fromkeys(
        ["chief-0", "ps-0", "worker-0", "worker-1"], 1
    )
    world.exit("worker-1", "signal")
    settle(world, 2 * LEASE)
    assert {name: process.generation for name, process in world.running()} == dict.fromkeys(
        ["chief-0", "ps-0", "worker-0", "worker-1"], 2
    )
    assert sorted(world.captain.ledger.roster()) == ["chief-0", "ps-0", "worker-0", "worker-1"]
