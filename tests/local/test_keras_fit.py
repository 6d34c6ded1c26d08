"""Keras 3's fit on two workers, with programs that do not use Paceline: the results are those of a single process."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.runs import PROGRAMS, Run, Starter, job, kill, starter
from support.tensorflows import start as alone

pytestmark = [pytest.mark.timeout(900), pytest.mark.xdist_group("keras_fit")]

PROGRAM = "keras_fit.py"
FRAMEWORK_S = 300.0
TENSORFLOW = {"framework": "tensorflow", "env": {"TF_CPP_MIN_LOG_LEVEL": "2"}, "restart": {"warm": False, "limit": 0}}
PATCHED = "is patched for several workers (tensorflow.patch_keras)"
# Gradients are summed in half precision, in another order.
TOLERANCE = {"float16": 4e-3, "bfloat16": 3e-2}

Result = dict[str, Any]


def read_results(folder: Path, rank: int) -> dict[str, Result]:
    """The results of a process, by case."""
    ending = f"-{rank}.json"
    return {path.name[: -len(ending)]: json.loads(path.read_text()) for path in folder.glob(f"*{ending}")}


@contextlib.contextmanager
def running(folder: Path, *cases: str, share: int = 1) -> Iterator[Run]:
    """A run of two workers, the first with this share; the folder `alone` gets the results of one process meanwhile."""
    process = alone(PROGRAM, folder / "alone", *cases, env={})
    with starter(folder) as start:
        try:
            roles = {"worker": [{"share": share}, {}] if share > 1 else {"replicas": 2}}
            command = ["python", str(PROGRAMS / PROGRAM), str(folder / "pair"), *cases]
            run = start(job(command, **TENSORFLOW, roles=roles))
            run.succeeds(FRAMEWORK_S)
            _, stderr = process.communicate(timeout=FRAMEWORK_S)
        finally:
            process.kill()
        assert process.returncode == 0, stderr[-6000:]
        yield run


FIRST = ("plain", "sample weights", "float16", "bfloat16", "shuffled", "shuffled by a seed", "callbacks")
OTHERS = (
    "classes", "weighted mean", "own mean", "masked", "two outputs", "regularized", "clipped", "own step", "endless",
    "normalized", "noted",
)  # fmt: skip
CASES = [*FIRST, *(pytest.param(case, marks=pytest.mark.long) for case in OTHERS)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    with running(tmp_path_factory.mktemp("fit"), *FIRST) as run:
        yield run


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    with running(tmp_path_factory.mktemp("others"), *OTHERS, share=2) as run:
        yield run


Results = tuple[dict[str, Result], dict[str, Result], dict[str, Result]]


def all_results(run: Run) -> Results:
    """Of one process, of worker-0, of worker-1."""
    folder = run.place.parent
    return read_results(folder / "alone", 0), read_results(folder / "pair", 0), read_results(folder / "pair", 1)


@pytest.fixture
def results(case: str, request: pytest.FixtureRequest) -> Results:
    return all_results(request.getfixturevalue("others" if case in OTHERS else "run"))


OWN = ("noted", "shuffled", "shuffled by a seed")  # not compared with one process
OF_ONE_WORKER = {"best", "lines", "boards"}  # only the first worker reads the files


@pytest.mark.parametrize("case", CASES)
def test_two_workers_get_the_results_of_one_process(results: Results, case: str) -> None:
    one, first, second = results
    assert {name: value for name, value in first[case].items() if name not in OF_ONE_WORKER} == {
        name: value for name, value in second[case].items() if name not in OF_ONE_WORKER
    }, "equal to the last bit, so that callbacks decide alike"
    assert all(map(math.isfinite, numbers(first[case]).values()))
    if case in OWN:
        return
    assert numbers(first[case]) == pytest.approx(numbers(one[case]), rel=TOLERANCE.get(case, 1e-4), abs=1e-5)


def numbers(value: Any, path: str = "") -> dict[str, float]:
    """Each number by its path."""
    if isinstance(value, dict):
        return {key: each for name in value for key, each in numbers(value[name], f"{path}/{name}").items()}
    if isinstance(value, list):
        return {key: each for index, item in enumerate(value) for key, each in numbers(item, f"{path}/{index}").items()}
    return {path: float(value)}


@pytest.mark.long
def test_a_batch_is_divided_by_the_shares_of_hosts(others: Run) -> None:
    """The batches of `normalized` have 8 examples."""
    assert "| rows 6\n" in others.log("worker-0") and "| rows 2\n" in others.log("worker-1")


def test_every_example_of_shuffled_arrays_is_seen_once_an_epoch(run: Run) -> None:
    _, first, _ = all_results(run)
    for case in ("shuffled", "shuffled by a seed"):
        assert first[case] == {"seen": [2.0] * 37, "alike": 0.0}


def test_a_step_that_overflows_on_one_worker_is_skipped_by_all(run: Run) -> None:
    _, first, second = all_results(run)
    assert (first["float16"]["iterations"], first["float16"]["scale"]) == (9, 32.0)
    assert second["float16"]["weights"] == first["float16"]["weights"]


def test_callbacks_stop_and_resume_as_in_one_process(run: Run) -> None:
    """An epoch is in the table twice if the first fit was interrupted after it and before it was saved."""
    one, first, _ = all_results(run)
    assert first["callbacks"]["interrupted"] and first["callbacks"]["lines"] == one["callbacks"]["lines"]
    assert first["callbacks"]["lines"][:4] == [0, 1, 2, 3] and len(first["callbacks"]["lines"]) < 40
    assert first["callbacks"]["boards"] == one["callbacks"]["boards"]


def test_one_line_says_that_keras_is_patched(run: Run) -> None:
    assert [run.log(task).count(PATCHED) for task in ("worker-0", "worker-1")] == [1, 0]
    assert re.search(r"paceline: Keras 3\.\d+\.\d+ is patched", run.log("worker-0"))


# ---- without the patch


def test_keras_fails_without_the_patch(start: Starter, tmp_path: Path) -> None:
    """Once this test fails, the patch can be removed."""
    command = ["python", str(PROGRAMS / PROGRAM), str(tmp_path / "found"), "plain"]
    run = start(job(command, **TENSORFLOW, tensorflow={"patch_keras": False}))
    run.fails(FRAMEWORK_S)
    assert PATCHED not in run.log("worker-0") and "PerReplica" in run.log("worker-0")


UNKNOWN = """
import importlib.util, sys
import keras, numpy
spec = importlib.util.spec_from_file_location("fit", sys.argv[1])
fit = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fit)
keras.__version__ = "3.99.1"
fit.register(keras)
model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
x = numpy.ones((1, 1))
model.fit(x, x, verbose=0)
fit.is_multi_worker = lambda strategy: True
for _ in range(2):
    model.fit(x, x, verbose=0)
"""


def test_an_unknown_keras_is_not_patched_and_a_warning_is_printed(tmp_path: Path) -> None:
    (tmp_path / "unknown.py").write_text(UNKNOWN)
    source = Path(__file__).parents[2] / "src" / "paceline" / "frameworks" / "keras_fit.py"
    process = alone(str(tmp_path / "unknown.py"), source, env={})
    try:
        _, stderr = process.communicate(timeout=FRAMEWORK_S)
    finally:
        process.kill()
    assert process.returncode == 0, stderr[-6000:]
    assert [line for line in stderr.splitlines() if "paceline" in line] == [
        "paceline: Keras 3.99.1 is not patched for several workers (tested versions: 3.15); pin a tested version, "
        "write `tensorflow: {keras: legacy}` and use tf.keras, or write your own training loop"
    ]


# ---- parameter servers, and tf_keras

SERVERS = {
    "strategy": "parameter-server",
    "roles": {"chief": {}, "worker": {}, "ps": {}},
    "framework": "tensorflow",
    "restart": {"warm": False, "limit": 0},
}
SERVED = """
import os, sys, json
import numpy as np, tensorflow as tf
keras = tf.keras
if "ps" in sys.argv:
    strategy = tf.distribute.ParameterServerStrategy(tf.distribute.cluster_resolver.TFConfigClusterResolver())
else:
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.layers.Dense(1, input_shape=(4,))])
    model.compile("sgd", "mse")
x = np.ones((64, 4), "float32")
data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).repeat().batch(8)
losses = model.fit(data, epochs=3, steps_per_epoch=4, verbose=0).history["loss"]
print(keras.__name__, "fits", losses[-1] < losses[0], flush=True)
"""


@pytest.fixture
def served(tmp_path: Path) -> str:
    (tmp_path / "served.py").write_text(SERVED)
    return str(tmp_path / "served.py")


def test_fit_with_parameter_servers_is_refused_in_one_line(start: Starter, served: str) -> None:
    roles = {"chief": {"command": ["python", served, "ps"]}, "worker": {}, "ps": {}}
    run = start({"name": "ps", **SERVERS, "roles": roles})
    run.fails(FRAMEWORK_S)
    [line] = [line for line in run.log("chief-0").splitlines() if "NotImplementedError: " in line]
    assert "`tensorflow: {keras: legacy}`" in line and "examples/resnet-ps" in line


@pytest.mark.long
def test_tf_keras_fits_with_both_strategies(start: Starter, served: str) -> None:
    roles = {"chief": {"command": ["python", served, "ps"]}, "worker": {}, "ps": {}}
    run = start({"name": "ps", **SERVERS, "roles": roles, "tensorflow": {"keras": "legacy"}})
    run.succeeds(FRAMEWORK_S)
    assert "tf_keras.api._v2.keras fits True" in run.log("chief-0")
    run = start(job(["python", served], **TENSORFLOW, tensorflow={"keras": "legacy"}))
    run.succeeds(FRAMEWORK_S)
    for task in ("worker-0", "worker-1"):
        assert "tf_keras.api._v2.keras fits True" in run.log(task) and "paceline: Keras" not in run.log(task)


# ---- from a spare

WARM = """
import sys, time
from pathlib import Path
import keras, numpy as np, tensorflow as tf
strategy = tf.distribute.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.ones((64, 4), "float32")

class Waits(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        while epoch == 1 and not Path(sys.argv[1]).exists():
            time.sleep(0.05)

model.fit(x, x[:, :1], batch_size=16, epochs=3, callbacks=[Waits()], verbose=0)
print("fitted", flush=True)
"""


def test_keras_is_patched_in_tasks_that_start_from_a_spare(start: Starter, tmp_path: Path) -> None:
    (tmp_path / "warm.py").write_text(WARM)
    warm = {**TENSORFLOW, "restart": {"warm": True, "limit": 3}}
    run = start(job(["python", str(tmp_path / "warm.py"), str(tmp_path / "go")], **warm))
    for host in ("worker-host-0", "worker-host-1"):
        run.wait("spare-ready", FRAMEWORK_S, host=host)
    kill(run.task("worker-1"))
    run.wait("generation-formed", FRAMEWORK_S, generation=2)
    (tmp_path / "go").touch()
    run.succeeds(FRAMEWORK_S)
    started = [event for event in run.events("task-started") if event["generation"] == 2]
    assert [event["warm"] for event in started] == [True, True]
    assert run.log("worker-0").count(PATCHED) == 2 and "fitted" in run.log("worker-1")
