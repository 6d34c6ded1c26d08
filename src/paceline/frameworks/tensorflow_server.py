"""The default command of a ps or worker: a plain tf.distribute.Server."""

from __future__ import annotations

_CODE = """
import json, os
import tensorflow as tf
config = json.loads(os.environ["TF_CONFIG"])
options = tf.compat.v1.ConfigProto()
options.inter_op_parallelism_threads = max(os.cpu_count() or 1, 1 + sum(map(len, config["cluster"].values())))
task = config["task"]
server = tf.distribute.Server(config["cluster"], task["type"], task["index"], protocol="grpc", config=options)
print("serving at", server.target, flush=True)
server.join()
"""

COMMAND: tuple[str, ...] = ("python", "-c", _CODE)
