"""Short scenarios with snapshots, each in one TensorFlow process; prints their observations as JSON.

`tf_stories.py FOLDER` runs all of them. TensorFlow is imported once: each scenario runs in a fork of this process, in
its own folder.
"""

import contextlib
import io
import json
import os
import resource
import shutil
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

import keras
import tensorflow as tf

import paceline
import paceline.keras
import paceline.tensorflow
from paceline.runtime import snapshot_folders
from paceline.tensorflow import SnapshotMismatch, SnapshotRefused, Snapshots

FOLDER = Path()  # of the current scenario
LIMIT_S = 60


def hold_writes() -> threading.Event:
    """From now on, snapshots are written only after the returned event is set."""
    writing, gate = snapshot_folders.writing, threading.Event()

    def delayed(*args: object, **kwargs: object) -> object:
        gate.wait()
        return writing(*args, **kwargs)

    snapshot_folders.writing = delayed
    return gate


def steps() -> list[str]:
    return sorted(path.name for path in FOLDER.iterdir()) if FOLDER.exists() else []


def later_updates() -> object:
    """Training continues while a snapshot is blocked, with every kind of update; it has the values of its step."""
    weights = {name: tf.Variable(tf.random.normal([64, 4])) for name in ("add", "rows", "slice", "adam", "function")}
    optimizer = keras.optimizers.Adam(0.1)
    optimizer.build([weights["adam"]])
    state = {**weights, "optimizer": optimizer}
    before = {name: variable.numpy() for name, variable in weights.items()}
    compiled = tf.function(lambda: weights["function"].assign_add(tf.ones([64, 4])), jit_compile=True)
    gate = hold_writes()
    with Snapshots(state) as snapshots:
        snapshots.save(1)
        for _ in range(3):
            weights["add"].assign_add(tf.ones([64, 4]))
            weights["rows"].scatter_add(tf.IndexedSlices(tf.ones([2, 4]), [1, 2]))
            weights["slice"][1:5].assign(weights["slice"][2:6] + 1.0)
            optimizer.apply([tf.ones([64, 4])], [weights["adam"]])
            compiled()
        changed = [name for name, variable in weights.items() if (variable.numpy() != before[name]).any()]
        gate.set()
    reader = tf.train.load_checkpoint(str(FOLDER / "step-1"))
    stored = {name: reader.get_tensor(f"{name}/.ATTRIBUTES/VARIABLE_VALUE") for name in weights}
    same = [name for name in weights if (stored[name] == before[name]).all()]
    tf.train.Checkpoint(**state).read(str(FOLDER / "step-1" / "ckpt")).assert_consumed()
    restored = [name for name, variable in weights.items() if (variable.numpy() == before[name]).all()]
    return {"changed": changed, "kept": same, "read by TensorFlow": restored}


def about() -> object:
    snapshots = Snapshots({"x": tf.Variable(1.0)}, every=2)
    for step in range(1, 3):
        snapshots.step(step, loss=tf.constant(0.5), accuracy=0.25)
    snapshots.close()
    return {"steps": steps(), "about": json.loads((FOLDER / "step-2" / "paceline.json").read_text())}


def disk() -> object:
    """A write fails, training continues, a later write succeeds, and closing after another failure raises."""
    receiver, sender = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    os.environ["PACELINE_REPORT_FD"] = str(sender.fileno())
    os.environ["PACELINE_REPORT_INODE"] = str(os.fstat(sender.fileno()).st_ino)
    _, hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    snapshots = Snapshots({"x": tf.Variable(tf.zeros([1 << 20]))})
    messages, steps_seen = [], []
    for step, limit in enumerate([1 << 16, hard_limit, 1 << 16], start=1):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard_limit))
        snapshots.save(step)
        messages.append(json.loads(receiver.recv(1 << 16)))
        steps_seen.append(steps())
    try:
        snapshots.close()
        raised = ""
    except tf.errors.OpError as error:
        raised = type(error).__name__
    snapshots.close()
    return {"told": messages, "steps": steps_seen, "raised": raised}


def busy() -> object:
    """Snapshots are due at 2, 4, 6 and 8; the first write ends after step 5, the next after the last step."""
    x = tf.Variable(0.0)
    gate = hold_writes()
    snapshots = Snapshots({"x": x}, every=2)
    skipped = []
    for step in range(1, 9):
        x.assign(float(step))
        snapshots.step(step)
        skipped.append(snapshots.skipped)
        if step == 5:
            gate.set()
            snapshots._background.wait()
            gate.clear()
    gate.set()
    snapshots.close()
    values = {
        name: float(tf.train.load_checkpoint(str(FOLDER / name)).get_tensor("x/.ATTRIBUTES/VARIABLE_VALUE"))
        for name in steps()
    }
    return {"skipped": skipped, "values": values}


def leaving() -> object:
    """The snapshot before leaving is not skipped, whatever is still being written."""
    x = tf.Variable(0.0)
    gate = hold_writes()
    answers = []
    with Snapshots({"x": x}, every=2) as snapshots:
        for step in range(1, 9):
            if step == 5:
                paceline.tensorflow.should_save = lambda _: True
                paceline.tensorflow.is_stopping = lambda: True
                gate.set()
            answers.append(snapshots.step(step))
            if answers[-1]:
                break
    return {"answers": answers, "steps": steps()}


def requested() -> object:
    """Snapshots that are taken at step 3 on request and at step 5 because the time is up; no task is leaving."""
    paceline.tensorflow.should_save = lambda step: step == 3
    paceline.tensorflow.is_stopping = lambda: False
    answers = []
    with Snapshots({"x": tf.Variable(0.0)}) as snapshots:
        for step in range(1, 7):
            snapshots._schedule.check_time = lambda: step == 5  # noqa: B023 it is called in this iteration
            answers.append(snapshots.step(step))
            snapshots._background.wait()
    return {"answers": answers, "steps": steps()}


def mismatch() -> object:
    saved = {"same": tf.Variable([1.0]), "other": tf.Variable([1.0, 2.0]), "kind": tf.Variable(1.0)}
    with Snapshots({**saved, "gone": tf.Variable(3.0)}) as writer:
        writer.save(1)
    os.environ["PACELINE_RESTORE"] = str(FOLDER / "step-1")
    loaded = {
        "same": tf.Variable([7.0]),
        "other": tf.Variable([7.0, 7.0, 7.0]),
        "kind": tf.Variable(7.0, dtype=tf.float64),
        "new": tf.Variable(7.0),
    }
    reader = Snapshots(loaded, order=paceline.Shards(9, 3))
    error = refused(reader.restore)
    strict = [value.numpy().tolist() for value in loaded.values()]
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        step = reader.restore(partial=True)
    partial = [value.numpy().tolist() for value in loaded.values()]
    return {"error": error, "strict": strict, "step": step, "partial": partial, "said": stderr.getvalue()}


def batches() -> object:
    """Every variable is a batch of its own; partially, too. A counter of TensorFlow itself may be missing."""
    paceline.tensorflow.state._BATCH = 1

    def new_state(number: int) -> tf.train.Checkpoint:
        layer = keras.layers.Dense(2)
        layer.build((3, 4))
        optimizer = keras.optimizers.Adam(0.1)
        optimizer.build(layer.trainable_variables)
        optimizer.apply([tf.random.normal(variable.shape) for variable in layer.trainable_variables])
        variables = {
            "count": tf.Variable(number, dtype=tf.int64),
            "flag": tf.Variable(number == 1),
            "half": tf.Variable([float(number)] * 3, dtype=tf.bfloat16),
            "text": tf.Variable(f"number {number}"),
        }
        return tf.train.Checkpoint(layer=layer, optimizer=optimizer, dropout=keras.layers.Dropout(0.5), **variables)

    def values(checkpoint: tf.train.Checkpoint) -> list[object]:
        variables = [*checkpoint.layer.variables, *checkpoint.optimizer.variables, *checkpoint.dropout.variables]
        variables += [checkpoint.count, checkpoint.flag, checkpoint.half, checkpoint.text]
        return [tf.io.serialize_tensor(tf.convert_to_tensor(variable)).numpy() for variable in variables]

    saved = new_state(1)
    saved.save_counter.assign_add(5)
    with Snapshots(saved) as writer:
        writer.save(1)
    os.environ["PACELINE_RESTORE"] = str(FOLDER / "step-1")
    counted, uncounted, more = new_state(2), new_state(3), new_state(4)
    counted.save_counter.assign_add(1)
    more.new = tf.Variable(7.0)
    for checkpoint in (counted, uncounted, more):
        assert values(checkpoint)[0] != values(saved)[0]
        with contextlib.redirect_stderr(io.StringIO()):
            Snapshots(checkpoint).restore(partial=checkpoint is more)
    same = [values(checkpoint) == values(saved) for checkpoint in (counted, uncounted, more)]
    return {"same": same, "counter": int(counted.save_counter), "new": float(more.new)}


def tables() -> object:
    """A table is restored with everything else, and stays unchanged if not everything fits."""

    def new_state(number: int) -> dict[str, object]:
        table = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, -1)
        table.insert(["a", f"only {number}"], [number, number])
        return {"table": table, "x": tf.Variable(float(number))}

    def values(state: dict[str, object]) -> list[object]:
        return [state["table"].lookup(tf.constant(["a", "only 1", "only 2"])).numpy().tolist(), float(state["x"])]

    with Snapshots(new_state(1)) as writer:
        writer.save(1)
    os.environ["PACELINE_RESTORE"] = str(FOLDER / "step-1")
    whole, partial = new_state(2), {**new_state(2), "new": tf.Variable(7.0)}
    Snapshots(whole).restore()
    with contextlib.redirect_stderr(io.StringIO()):
        Snapshots(partial).restore(partial=True)
    return {"whole": values(whole), "partial": values(partial)}


def settings() -> object:
    """Settings are stored in the snapshot; other settings do not match, a program without settings may restore it."""
    saved = {"sizes": {"width": 8, "depth": 2}, "words": ["a"] * 500, "heads": (2, 3)}
    before = paceline.tensorflow.settings()
    with Snapshots({"x": tf.Variable(1.0)}, settings=saved) as writer:
        writer.save(1)
    os.environ["PACELINE_RESTORE"] = str(FOLDER / "step-1")
    same = Snapshots({"x": tf.Variable(7.0)}, settings=saved).restore()
    changed = {"sizes": {"width": 9, "depth": 2}, "words": ["b"] * 500, "heads": (2, 3), "more": 1}
    x = tf.Variable(7.0)
    error = refused(Snapshots({"x": x}, settings=changed).restore)
    without = Snapshots({"x": tf.Variable(7.0)}).restore()
    read_back = paceline.tensorflow.settings()
    return [before, read_back == {**saved, "heads": [2, 3]}, same, error, float(x), without]


def rates() -> object:
    """A learning rate that has decayed since is no difference; another initial rate in the program is."""

    def new_optimizer(rate: float) -> keras.optimizers.Optimizer:
        optimizer = keras.optimizers.SGD(rate)
        optimizer.build([tf.Variable(1.0)])
        return optimizer

    first = new_optimizer(0.5)
    with Snapshots({"optimizer": first}) as writer:
        writer.restore()
        first.learning_rate = 0.125
        writer.save(1)
    results = []
    for name, rate in (("step-1-g1", 0.5), ("step-1-g1", 0.25), ("step-1-g0", 0.25)):
        (FOLDER / name).exists() or shutil.copytree(FOLDER / "step-1", FOLDER / name)
        os.environ["PACELINE_RESTORE"] = str(FOLDER / name)
        optimizer = new_optimizer(rate)
        with contextlib.redirect_stderr(io.StringIO()) as stderr:
            Snapshots({"optimizer": optimizer}).restore()
        results.append([float(optimizer.learning_rate), stderr.getvalue()])
    return results


def orders() -> object:
    """Only the snapshot has a position in the data, or the position belongs to other data."""
    with Snapshots({"x": tf.Variable(1.0)}, order=paceline.Shards(9, 3)) as writer:
        writer.save(1)
    os.environ["PACELINE_RESTORE"] = str(FOLDER / "step-1")
    return [refused(Snapshots({"x": tf.Variable(1.0)}, order=order).restore) for order in (None, paceline.Shards(8, 3))]


def foreign() -> object:
    """A checkpoint written by TensorFlow itself."""
    state = {"x": tf.Variable(1.0)}
    tf.train.Checkpoint(**state).write(str(FOLDER / "step-1" / "ckpt"))
    os.environ["PACELINE_RESTORE"] = str(FOLDER / "step-1")
    return [refused(Snapshots(state).restore), refused(paceline.keras.Snapshots)]


def late() -> object:
    """A variable created after restore() cannot be restored: the first run reports it."""
    state = tf.train.Checkpoint(x=tf.Variable(1.0))
    snapshots = Snapshots(state)
    snapshots.restore()
    state.y = tf.Variable(2.0, name="y")
    snapshots.save(1)
    return {"error": refused(snapshots.close), "steps": steps()}


def outside() -> object:
    """Outside a run: nothing is written, and nothing fails."""
    del os.environ["PACELINE_SNAPSHOT_DIR"]
    with Snapshots({"x": tf.Variable(1.0)}, every=1) as snapshots:
        return {"restored": snapshots.restore(), "answers": [snapshots.step(step) for step in (1, 2)], "steps": steps()}


def refused(call: object) -> str:
    try:
        call()
    except (SnapshotMismatch, SnapshotRefused) as error:
        return str(error).replace(str(FOLDER), "...")
    return ""


STORIES = (
    later_updates, about, disk, busy, leaving, requested, mismatch, batches, tables, settings, rates, orders, foreign,
    late, outside,
)  # fmt: skip


def run_story(story: Callable[[], object], folder: Path) -> object:
    """The observations of the scenario, or its traceback."""
    global FOLDER
    result = folder / f"{story.__name__}.json"
    pid = os.fork()
    if pid == 0:
        signal.alarm(LIMIT_S)
        FOLDER = folder / story.__name__
        os.environ.update(PACELINE_SNAPSHOT_DIR=str(FOLDER), PACELINE_RESTORE="")
        try:
            observations = story()
        except Exception:
            observations = {"failed": traceback.format_exc()}
        result.write_text(json.dumps(observations))
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    return json.loads(result.read_text()) if status == 0 else {"failed": f"status {status}"}


print(json.dumps({story.__name__: run_story(story, Path(sys.argv[1])) for story in STORIES}))
