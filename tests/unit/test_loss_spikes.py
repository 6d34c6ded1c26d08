"""Losses that jump are reported once; noise, warm-up and lasting changes are not taken for spikes again and again."""

from __future__ import annotations

import math
import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.agent.captain import events as ev
from paceline.agent.captain.loss_spikes import FEWEST, MOST, QUIET_S, WINDOW, SpikeDetector, Spikes
from support.worlds import World, make_plan, up


def spikes(values: list[float]) -> list[int]:
    """The positions of the values with which a spike begins."""
    detector = SpikeDetector()
    return [number for number, value in enumerate(values) if detector.add(value)]


def noise(count: int, mean: float = 1.0, deviation: float = 0.05, seed: int = 0) -> list[float]:
    source = random.Random(seed)
    return [source.gauss(mean, deviation) for _ in range(count)]


def test_a_spike_is_found_once_until_it_has_returned() -> None:
    values = noise(200)
    values[100:110] = [8.0, 12.0, 9.0, 5.0, 11.0, 4.0, 3.5, 6.0, 9.0, 7.0]
    values[150] = 9.0
    assert spikes(values) == [100, 150]


@pytest.mark.parametrize("deviation", [0.01, 0.1, 0.3])
@pytest.mark.parametrize("seed", range(4))
def test_noise_is_not_a_spike(deviation: float, seed: int) -> None:
    assert spikes(noise(20_000, deviation=deviation, seed=seed)) == []


@pytest.mark.parametrize("seed", range(4))
def test_noise_around_zero_is_not_a_spike(seed: int) -> None:
    assert spikes(noise(20_000, mean=0.0, deviation=1.0, seed=seed)) == []


@given(st.floats(0.001, 1000), st.floats(0.0005, 0.1), st.integers(0, 2**32))
def test_a_decreasing_loss_has_no_spikes(first: float, rate: float, seed: int) -> None:
    source = random.Random(seed)
    curve = [first * (0.02 + math.exp(-rate * step)) for step in range(1000)]
    assert spikes([value * (1 + source.gauss(0, 0.05)) for value in curve]) == []


def test_a_loss_that_rises_slowly_has_no_spikes() -> None:
    assert spikes([value * (1 + step / 1000) for step, value in enumerate(noise(5000))]) == []


@given(st.integers(1, FEWEST))
def test_the_first_values_are_not_judged(count: int) -> None:
    assert spikes([*[1.0] * (count - 1), 1e6]) == []


def test_a_lasting_change_is_one_spike() -> None:
    """What lasts becomes usual: a later spike is measured from there."""
    values = [*noise(100), *noise(500, mean=5.0), 60.0, *noise(50, mean=5.0)]
    assert spikes(values) == [100, 600]


def test_a_constant_loss_can_have_a_spike_and_zero_is_not_compared() -> None:
    assert spikes([*[2.0] * 50, 4.0]) == [] and spikes([*[2.0] * 50, 4.1]) == [50]
    assert spikes([*[-5.0] * 50, 0.0]) == [] and spikes([*[-5.0] * 50, 0.1]) == [50]
    assert spikes([*[0.0] * 50, 0.1, 0.0, 0.15]) == [], "it has no scale yet"


@given(st.lists(st.floats(-1e300, 1e300), max_size=200))
def test_any_values_are_accepted_and_little_is_kept(values: list[float]) -> None:
    detector = SpikeDetector()
    for value in values:
        detector.add(value)
    assert len(detector._values) <= WINDOW and len(detector._spike) < WINDOW


def test_a_value_costs_little() -> None:
    """CPU time: a task may report a hundred times a second."""
    values, detector = noise(20_000), SpikeDetector()
    begin = time.process_time()
    for value in values:
        detector.add(value)
    assert (time.process_time() - begin) / len(values) < 1e-4


# ---- of a run


def varied(number: int) -> float:
    return (1.0, 1.001, 0.999)[number % 3]


class Run:
    def __init__(self) -> None:
        self.events: list[dict[str, object]] = []
        self.spikes = Spikes("worker-0", lambda kind, **fields: self.events.append({"event": kind, **fields}))
        self.now = 1000.0
        self.step = 0

    def report(self, count: int, task: str = "worker-0", **metrics: float) -> None:
        """Values around these; the first of them exactly."""
        for number in range(count):
            self.step, self.now = self.step + 1, self.now + 1.0
            values = {name: value * varied(number) for name, value in metrics.items()}
            self.spikes.on_step(task, self.step, values, self.now)

    def repeat(self, count: int, **metrics: float) -> None:
        """Heartbeats of a task that makes steps and reports no other values."""
        for _ in range(count):
            self.report(1, **metrics)


def test_the_event_has_the_usual_value() -> None:
    run = Run()
    run.report(50, loss=1.0, accuracy=0.1)
    run.report(1, loss=9.0, accuracy=5.0)
    usual = {"task": "worker-0", "metric": "loss", "value": 9.0, "usual": 1.0, "step": 51}
    assert run.events == [{"event": "spike", **usual}]


def test_one_task_is_observed_and_the_leading_one_comes_first() -> None:
    run = Run()
    run.report(50, "worker-1", loss=1.0)
    run.report(50, "worker-2", loss=1.0)
    run.report(1, "worker-2", loss=9.0)
    assert run.events == []
    run.report(1, "worker-1", loss=9.0)
    assert [event["task"] for event in run.events] == ["worker-1"]
    run.report(50, loss=1.0)
    run.report(1, "worker-1", loss=99.0)
    run.now += QUIET_S
    run.report(1, loss=9.0)
    assert [event["task"] for event in run.events] == ["worker-1", "worker-0"]


def test_events_and_metrics_are_limited() -> None:
    run = Run()
    run.report(50, **{f"loss{number}": 1.0 for number in range(3 * MOST)})
    run.report(1, **{f"loss{number}": 9.0 for number in range(3 * MOST)})
    assert len(run.events) == MOST
    run = Run()
    run.report(50, loss=1.0)
    for _ in range(100):
        run.report(1, loss=9.0)
        run.report(1, loss=1.0)
    assert len(run.events) == 1 + 200 // int(QUIET_S)


def test_a_new_generation_begins_anew() -> None:
    run = Run()
    run.report(50, loss=1.0)
    run.spikes.on_group_started()
    run.report(10, loss=9.0)
    assert run.events == []


def test_copies_of_a_value_do_not_become_usual() -> None:
    """A loss that is reported once per epoch varies more than the heartbeats in between, which repeat it."""
    run = Run()
    for _ in range(15):
        run.repeat(2 * WINDOW, val_loss=1.0)
        run.repeat(2 * WINDOW, val_loss=3.0)
    assert run.events == []
    run.repeat(2 * WINDOW, val_loss=30.0)
    assert [(event["value"], event["usual"]) for event in run.events] == [(30.0, 2.0)]


def test_copies_do_not_count_as_the_values_that_are_needed() -> None:
    run = Run()
    run.repeat(2 * WINDOW, loss=1.0)
    run.repeat(1, loss=9.0)
    assert run.events == []


def beat(world: World, step: int, loss: float) -> None:
    world.now += 1.0
    loss *= varied(step) if step % 10 else 1.0
    world.tell(ev.Heartbeat("worker-host-0", step, {"worker-0": ev.TaskProgress(step, 0.0, 0.0, {"loss": loss})}))


def test_a_captain_reports_a_spike_and_does_nothing_else() -> None:
    world = up(make_plan(1))
    for step in range(1, 60):
        beat(world, step, 1.0 if step < 50 else 9.0)
    assert world.kinds().count("spike") == 1
    expected = {"task": "worker-0", "metric": "loss", "value": 9.0, "usual": 1.0, "step": 50}
    assert world.last("spike") == expected and world.captain.generation == 1
    world.exit("worker-0")
    world.deliver_all()
    for step in range(1, 60):
        beat(world, step, 50.0)
    assert world.captain.generation == 2 and world.kinds().count("spike") == 1
