"""Creates variables under MultiWorkerMirroredStrategy, and prints which initial values the first worker has sent, and a
digest of the values that each variable has then."""

import hashlib
import json
import os
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import collective_ops

LARGE = 2**20  # numbers, of 4 bytes
strategy = tf.distribute.MultiWorkerMirroredStrategy()
rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
drawn = []


def draw() -> tf.Tensor:
    drawn.append(1)
    return tf.random.normal([LARGE])


values: dict[str, Any] = {
    "zeros": tf.zeros([LARGE]),
    "seeded": lambda: tf.random.stateless_normal([LARGE // 4, 4], seed=[1, 2]),
    "integers": tf.range(LARGE),
    "own": tf.fill([LARGE], float(rank)),
    "one differs": tf.concat([tf.zeros([LARGE]), [float(rank)]], axis=0),
    "drawn": draw,
    "small": tf.zeros([4]),
}
sent: list[str] = []


def recorded(original: Any) -> Any:
    def send_or_receive(*args: Any) -> Any:
        sent.append(current)
        return original(*args)

    return send_or_receive


collective_ops.broadcast_send = recorded(collective_ops.broadcast_send)
collective_ops.broadcast_recv = recorded(collective_ops.broadcast_recv)
digests = {}
for current, value in values.items():
    with strategy.scope():
        variable = tf.Variable(value)
    numbers = strategy.experimental_local_results(variable)[0].numpy()
    digests[current] = hashlib.sha256(numbers.tobytes()).hexdigest()
    if current in ("own", "one differs"):
        assert numbers.max() == 0, current  # the first worker's
assert len(drawn) == 1
print(f"sent {', '.join(sent)}")
print(f"weights {hashlib.sha256(json.dumps(digests).encode()).hexdigest()}", flush=True)
