"""Short stories of snapshots in one TensorFlow process each: what they saw, as JSON.

`tf_stories.py FOLDER` tells all of them. TensorFlow is imported once: each story is told by a fork of this process, in
a folder of its own.
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
from paceline.runtime import contract
from paceline.tensorflow import SnapshotMismatch, SnapshotRefused, Snapshots

FOLDER = Path()  # of the story
LIMIT_S = 60


def held() -> threading.Event:
    """From now on snapshots are written only once this is set."""
    writing, gate = contract.writing, threading.Event()

    def wait(*words: object, **more: object) -> object:
        gate.wait()
        return writing(*words, **more)

    contract.writing = wait
    return gate


def steps() -> list[str]:
    return sorted(path.name for path in FOLDER.iterdir()) if FOLDER.exists() else []


def later_updates() -> object:
    """Training goes on while a snapshot is held up, with every kind of update; the values are those of its step."""
    weights = {name: tf.Variable(tf.random.normal([64, 4])) for name in ("add", "rows", "slice", "adam", "function")}
    optimizer = keras.optimizers.Adam(0.1)
    optimizer.build([weights["adam"]])
    state = {**weights, "optimizer": optimizer}
    before = {name: variable.numpy() for name, variable in weights.items()}
    compiled = tf.function(lambda: weights["function"].assign_add(tf.ones([64, 4])), jit_compile=True)
    gate = held()
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
    kept = {name: reader.get_tensor(f"{name}/.ATTRIBUTES/VARIABLE_VALUE") for name in weights}
    same = [name for name in weights if (kept[name] == before[name]).all()]
    tf.train.Checkpoint(**state).read(str(FOLDER / "step-1" / "ckpt")).assert_consumed()
    back = [name for name, variable in weights.items() if (variable.numpy() == before[name]).all()]
    return {"changed": changed, "kept": same, "read by TensorFlow": back}


def about() -> object:
    snapshots = Snapshots({"x": tf.Variable(1.0)}, every=2)
    for step in range(1, 3):
        snapshots.step(step, loss=tf.constant(0.5), accuracy=0.25)
    snapshots.close()
    return {"steps": steps(), "about": json.loads((FOLDER / "step-2" / "paceline.json").read_text())}


def disk() -> object:
    """Writing fails, training goes on, a later one succeeds, and closing after another failure raises."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    os.environ["PACELINE_REPORT_FD"] = str(theirs.fileno())
    os.environ["PACELINE_REPORT_INODE"] = str(os.fstat(theirs.fileno()).st_ino)
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    snapshots = Snapshots({"x": tf.Variable(tf.zeros([1 << 20]))})
    told, seen = [], []
    for step, limit in enumerate([1 << 16, most, 1 << 16], start=1):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
        snapshots.save(step)
        told.append(json.loads(ours.recv(1 << 16)))
        seen.append(steps())
    try:
        snapshots.close()
        raised = ""
    except tf.errors.OpError as error:
        raised = type(error).__name__
    snapshots.close()
    return {"told": told, "steps": seen, "raised": raised}


def busy() -> object:
    """Due at 2, 4, 6 and 8; the first write ends after step 5, the next one after the last step."""
    x = tf.Variable(0.0)
    gate = held()
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
    gate = held()
    answers = []
    with Snapshots({"x": x}, every=2) as snapshots:
        for step in range(1, 9):
            if step == 5:
                paceline.tensorflow.leaving = lambda _: True
                gate.set()
            answers.append(snapshots.step(step))
            if answers[-1]:
                break
    return {"answers": answers, "steps": steps()}


def mismatch() -> object:
    theirs = {"same": tf.Variable([1.0]), "other": tf.Variable([1.0, 2.0]), "kind": tf.Variable(1.0)}
    with Snapshots({**theirs, "gone": tf.Variable(3.0)}) as one:
        one.save(1)
    os.environ["PACELINE_RESTORE"] = str(FOLDER / "step-1")
    ours = {
        "same": tf.Variable([7.0]),
        "other": tf.Variable([7.0, 7.0, 7.0]),
        "kind": tf.Variable(7.0, dtype=tf.float64),
        "new": tf.Variable(7.0),
    }
    two = Snapshots(ours, order=paceline.Shards(9, 3))
    error = refused(two.restore)
    strict = [value.numpy().tolist() for value in ours.values()]
    with contextlib.redirect_stderr(io.StringIO()) as said:
        step = two.restore(partial=True)
    partial = [value.numpy().tolist() for value in ours.values()]
    return {"error": error, "strict": strict, "step": step, "partial": partial, "said": said.getvalue()}


def settings() -> object:
    """What a model is made of lies in the snapshot; one of another model does not fit, a program without any does."""
    theirs = {"sizes": {"width": 8, "depth": 2}, "words": ["a"] * 500, "heads": (2, 3)}
    before = paceline.tensorflow.settings()
    with Snapshots({"x": tf.Variable(1.0)}, settings=theirs) as one:
        one.save(1)
    os.environ["PACELINE_RESTORE"] = str(FOLDER / "step-1")
    same = Snapshots({"x": tf.Variable(7.0)}, settings=theirs).restore()
    ours = {"sizes": {"width": 9, "depth": 2}, "words": ["b"] * 500, "heads": (2, 3), "more": 1}
    x = tf.Variable(7.0)
    error = refused(Snapshots({"x": x}, settings=ours).restore)
    without = Snapshots({"x": tf.Variable(7.0)}).restore()
    found = paceline.tensorflow.settings()
    return [before, found == {**theirs, "heads": [2, 3]}, same, error, float(x), without]


def rates() -> object:
    """A rate that has fallen since is no difference; one that the program gives otherwise is."""

    def made(rate: float) -> keras.optimizers.Optimizer:
        optimizer = keras.optimizers.SGD(rate)
        optimizer.build([tf.Variable(1.0)])
        return optimizer

    first = made(0.5)
    with Snapshots({"optimizer": first}) as one:
        one.restore()
        first.learning_rate = 0.125
        one.save(1)
    seen = []
    for name, rate in (("step-1-g1", 0.5), ("step-1-g1", 0.25), ("step-1-g0", 0.25)):
        (FOLDER / name).exists() or shutil.copytree(FOLDER / "step-1", FOLDER / name)
        os.environ["PACELINE_RESTORE"] = str(FOLDER / name)
        optimizer = made(rate)
        with contextlib.redirect_stderr(io.StringIO()) as said:
            Snapshots({"optimizer": optimizer}).restore()
        seen.append([float(optimizer.learning_rate), said.getvalue()])
    return seen


def orders() -> object:
    """A position in the data that only the snapshot has, or that is one in other data."""
    with Snapshots({"x": tf.Variable(1.0)}, order=paceline.Shards(9, 3)) as one:
        one.save(1)
    os.environ["PACELINE_RESTORE"] = str(FOLDER / "step-1")
    return [refused(Snapshots({"x": tf.Variable(1.0)}, order=order).restore) for order in (None, paceline.Shards(8, 3))]


def foreign() -> object:
    """A checkpoint that TensorFlow wrote for itself."""
    state = {"x": tf.Variable(1.0)}
    tf.train.Checkpoint(**state).write(str(FOLDER / "step-1" / "ckpt"))
    os.environ["PACELINE_RESTORE"] = str(FOLDER / "step-1")
    return [refused(Snapshots(state).restore), refused(paceline.keras.Snapshots)]


def late() -> object:
    """A variable that comes after restore() could not be restored: that is said in the first run."""
    state = tf.train.Checkpoint(x=tf.Variable(1.0))
    snapshots = Snapshots(state)
    snapshots.restore()
    state.y = tf.Variable(2.0, name="y")
    snapshots.save(1)
    return {"error": refused(snapshots.close), "steps": steps()}


def outside() -> object:
    """No run: nothing is written, and nothing is in the way."""
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
    later_updates, about, disk, busy, leaving, mismatch, settings, rates, orders, foreign, late, outside,
)  # fmt: skip


def told(story: Callable[[], object], folder: Path) -> object:
    """What it saw, or how it failed."""
    global FOLDER
    result = folder / f"{story.__name__}.json"
    pid = os.fork()
    if pid == 0:
        signal.alarm(LIMIT_S)
        FOLDER = folder / story.__name__
        os.environ.update(PACELINE_SNAPSHOT_DIR=str(FOLDER), PACELINE_RESTORE="")
        try:
            seen = story()
        except Exception:
            seen = {"failed": traceback.format_exc()}
        result.write_text(json.dumps(seen))
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    return json.loads(result.read_text()) if status == 0 else {"failed": f"status {status}"}


print(json.dumps({story.__name__: told(story, Path(sys.argv[1])) for story in STORIES}))
