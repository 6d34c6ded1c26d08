"""How fast a run continues with fewer and with more hosts, and what that costs: an elastic run, compared with torchrun.

Rows: `pod` (a pod is deleted), `drain` (a node is drained, later a host joins), `off` (a node is switched off), and the
goodput while hosts leave and come back: `leaving` (told to go, or coming back, every 45 s) and `switching` (a node is
switched off every 90 s, and on again 45 s later).
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import clusters
import elastic_sides
import group_stamps
import measure
from clusters import BenchCluster
from elastic_sides import LEAST, NODES, PACELINE, STEP_S, TORCHRUN, Side
from group_stamps import Change

START_LIMIT = 300.0
CHANGE_LIMIT = 180.0
JOIN_LIMIT = 240.0
SETTLED = 50  # steps of a group before the next event
BASELINE_S = 30.0  # undisturbed, before the goodput is measured: as long as between two snapshots
EVENT_S = 45.0  # between two events of the goodput
LEASE_S = 30.0
POD, DRAIN, OFF, LEAVING, SWITCHING = ROWS = ("pod", "drain", "off", "leaving", "switching")
JOIN = "join"
ABOUT = {
    OFF: "node switched off -> next step", POD: "pod deleted -> next step", DRAIN: "node drained -> next step",
    JOIN: "a host joins: pause of training", LEAVING: "goodput, a host leaves or comes back every 45 s",
    SWITCHING: "goodput, a node is switched off every 90 s",
}  # fmt: skip
GOAL_S = {OFF: LEASE_S + 3.0, POD: 3.0, DRAIN: 3.0, JOIN: 2.0}
GOAL_RATIO = 0.2
GOAL_GOODPUT = {LEAVING: 0.9, SWITCHING: 0.6}


@dataclass
class Results:
    """For each row, and each side, what was measured; None: not within the limit."""

    changes: dict[str, dict[str, list[Change | None]]] = field(default_factory=dict)
    goodputs: dict[str, dict[str, float]] = field(default_factory=dict)

    def add(self, row: str, side: Side, change: Change | None) -> None:
        self.changes.setdefault(row, {}).setdefault(side.name, []).append(change)
        measure.progress(f"{side.name}, {row}: {change or 'no step within the limit'}")


def main() -> None:
    parser = measure.options(__doc__ or "")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--sides", nargs="+", choices=(PACELINE, TORCHRUN), default=[PACELINE, TORCHRUN])
    parser.add_argument("--state-gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=2, help="of pod and drain; a node is switched off once")
    parser.add_argument("--minutes", type=float, default=10.0, help="of each measurement of the goodput")
    args = parser.parse_args()
    machine_info = measure.machine("torch")
    measure.say(
        f"{NODES} torch workers (at least {LEAST}), one on each node of a real cluster; {STEP_S * 1000:g} ms of"
    )
    measure.say(f"waiting in each step, a state of {args.state_gib:g} GiB, saved every {elastic_sides.EVERY_S} s.")
    measure.say(f"Peer: torchrun --nnodes={LEAST}:{NODES} with c10d in an Indexed Job of the same pods, torch.save and")
    measure.say("torch.load on a shared volume; its options have their default values. One side after the other.")
    measure.say(f"On: {machine_info}\n")
    results = Results()
    with clusters.bench_cluster(nodes=NODES, images=("plain", "torch-jax")) as bench:
        elastic_sides.prepare(bench, args.state_gib)
        for name in args.sides:
            with elastic_sides.running(bench, name, args.state_gib) as side:
                _measure(bench, side, args.rows, args.rounds, args.minutes, results)
    _report(args, machine_info, results)


def _measure(bench: BenchCluster, side: Side, rows: list[str], rounds: int, minutes: float, results: Results) -> None:
    _settle(side, NODES, START_LIMIT)
    for _ in range(rounds):
        if POD in rows:
            results.add(POD, side, _after(side, lambda: _delete_pod(bench, side, _other_nodes(bench, side)[0])))
            _settle(side, NODES, JOIN_LIMIT)
        if DRAIN in rows:
            node = _other_nodes(bench, side)[1]
            results.add(DRAIN, side, _after(side, lambda node=node: _drain(bench, node)))
            _settle(side, LEAST, CHANGE_LIMIT)
            results.add(JOIN, side, _after(side, lambda node=node: _uncordon(bench, node), JOIN_LIMIT))
            _settle(side, NODES, JOIN_LIMIT)
    if OFF in rows:
        node = _other_nodes(bench, side)[1]
        results.add(OFF, side, _after(side, lambda: bench.cluster.power_off(node)))
        bench.cluster.power_on(node)
        _settle(side, NODES, JOIN_LIMIT)
    for row, disturb in ((LEAVING, _leave_and_return), (SWITCHING, _switch)):
        if row in rows:
            results.goodputs.setdefault(row, {})[side.name] = _goodput(bench, side, minutes, disturb)
            measure.progress(f"{side.name}, {row}: {results.goodputs[row][side.name]:.3f}")
            for node in bench.cluster.nodes:
                bench.cluster.power_on(node)
                _uncordon(bench, node)
            _settle(side, NODES, JOIN_LIMIT)


# ---- waiting


def _settle(side: Side, size: int, limit: float) -> None:
    """Wait until a group of that size has done some steps that are new."""

    def has_settled() -> bool:
        stamps = elastic_sides.stamps(side)
        groups = group_stamps.groups(stamps)
        if not groups or group_stamps.size(stamps, groups[-1]) != size:
            return False
        steps = [each.step for each in stamps if each.pid == groups[-1]]
        newest = max((each.step for each in stamps if each.pid != groups[-1]), default=min(steps))
        return max(steps) >= newest + SETTLED

    measure.wait_until(has_settled, limit, f"{SETTLED} steps of {size} workers", every=0.2)


def _after(side: Side, act: Callable[[], object], limit: float = CHANGE_LIMIT) -> Change | None:
    """What the group did after the event."""
    old = group_stamps.groups(elastic_sides.stamps(side))[-1]
    before = measure.now()
    act()
    deadline = time.monotonic() + limit
    while (change := group_stamps.change(elastic_sides.stamps(side), old, before)) is None:
        if time.monotonic() > deadline:
            return None
        time.sleep(0.2)
    return change


# ---- events


def _other_nodes(bench: BenchCluster, side: Side) -> list[str]:
    spared = side.spared_node()
    return [node for node in bench.cluster.nodes if node != spared]


def _delete_pod(bench: BenchCluster, side: Side, node: str) -> None:
    """As an eviction does it: the pod is told to go, and has its grace period."""
    name = next(pod["metadata"]["name"] for pod in side.pods() if pod["spec"]["nodeName"] == node)
    bench.cluster.kubectl("delete", "pod", name, "--wait=false", f"--namespace={bench.namespace}")


def _drain(bench: BenchCluster, node: str) -> None:
    options = ["--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=120s"]
    command = [*bench.cluster.kubectl_command(), "drain", node, *options]
    subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # it waits until pods have gone


def _uncordon(bench: BenchCluster, node: str) -> None:
    bench.cluster.kubectl("uncordon", node)


def _leave_and_return(bench: BenchCluster, side: Side, number: int) -> int:
    """A host is told to go, or comes back. Returns how many hosts there are from now on."""
    node = _other_nodes(bench, side)[number // 2 % 2]
    if number % 2:
        _uncordon(bench, node)
        return NODES
    bench.cluster.kubectl("cordon", node)
    _delete_pod(bench, side, node)
    return NODES - 1


def _switch(bench: BenchCluster, side: Side, number: int) -> int:
    """The same, by switching a node off and on."""
    node = _other_nodes(bench, side)[number // 2 % 2]
    if number % 2:
        bench.cluster.power_on(node)
        return NODES
    bench.cluster.power_off(node)
    return NODES - 1


def _goodput(
    bench: BenchCluster, side: Side, minutes: float, disturb: Callable[[BenchCluster, Side, int], int]
) -> float:
    """The work of the group, as a share of what it would have done undisturbed with the mean number of hosts."""
    began = measure.now()
    time.sleep(BASELINE_S)
    rate = group_stamps.work(elastic_sides.stamps(side), began, measure.now()) / (measure.now() - began) / NODES
    began, until, hosts, available = measure.now(), measure.now() + 60 * minutes, NODES, 0.0
    number, since = 0, began
    while measure.now() < until:
        time.sleep(max(0.0, min(until, began + (number + 1) * EVENT_S) - measure.now()))
        at = measure.now()
        available += hosts * (at - since)
        since = at
        if at < until:
            hosts = disturb(bench, side, number)
            number += 1
    return group_stamps.work(elastic_sides.stamps(side), began, since) / (rate * available)


# ---- results


def _report(args: Any, machine_info: dict[str, Any], results: Results) -> None:
    rows, details = [], {}
    for row, goal in GOAL_S.items():
        if row not in results.changes:
            continue
        medians = {side: _median(row, changes) for side, changes in results.changes[row].items()}
        for side, changes in results.changes[row].items():
            without_new = [each.without_new for each in changes if each]
            rows.append([
                ABOUT[row], side, measure.seconds(medians[side]),
                measure.spread([_value(row, each) for each in changes if each]),
                measure.seconds(measure.median(without_new)), f"{goal:g} s" if side == PACELINE else "",
            ])  # fmt: skip
        ratio = measure.ratio(medians.get(PACELINE), medians.get(TORCHRUN))
        rows.append([ABOUT[row], "ratio", str(ratio or "-"), "", "", f"{GOAL_RATIO:g}" if row != OFF else ""])
        details[row] = {
            side: [each and vars(each) for each in changes] for side, changes in results.changes[row].items()
        }
    measure.table(["what", "side", "median", "range", "without a new step", "goal"], rows)
    shares = [
        [ABOUT[row], side, f"{value:.3f}", f"{GOAL_GOODPUT[row]:g}" if side == PACELINE else ""]
        for row, sides in results.goodputs.items()
        for side, value in sides.items()
    ]
    if shares:
        measure.table(["what", "side", "goodput", "goal"], shares)
    measure.finish(
        {
            "bench": "cluster_elastic", "state_gib": args.state_gib, "machine": machine_info, "minutes": args.minutes,
            "changes": details, "goodput": results.goodputs, "goals_s": GOAL_S, "goal_ratio": GOAL_RATIO,
            "goals_goodput": GOAL_GOODPUT,
            "reached": _is_reached(results),
        }
    )  # fmt: skip


def _value(row: str, change: Change) -> float:
    return change.paused if row == JOIN else change.next_step


def _median(row: str, changes: list[Change | None]) -> float | None:
    return measure.median([_value(row, each) for each in changes if each])


def _is_reached(results: Results) -> bool:
    """Whether all goals of the measured rows are reached."""
    for row, sides in results.changes.items():
        ours, theirs = (_median(row, sides.get(side, [])) for side in (PACELINE, TORCHRUN))
        ratio = measure.ratio(ours, theirs)
        if ours is None or ours > GOAL_S[row] or (row != OFF and ratio is not None and ratio > GOAL_RATIO):
            return False
    return all(sides.get(PACELINE, 0.0) >= GOAL_GOODPUT[row] for row, sides in results.goodputs.items())


if __name__ == "__main__":
    main()
