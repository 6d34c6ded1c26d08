"""Workers of a MultiWorkerMirroredStrategy do not send each other initial values that all of them have.

TensorFlow sends the initial value of each variable from the first worker to the others, one after the other: seconds
for a GiB at each start. But the state of an optimizer is zeros at first, and values from the same seed are the same in
all workers. So workers compare fingerprints of large values, and send only those that differ.

Loaded like the other hooks. All workers must do this, or none: environment.py decides.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

TESTED = ("2.21.",)  # versions of TensorFlow for which the replacement below was tested
_LARGE = 4 << 20  # bytes; sending less does not take much longer than comparing


def register(module: "Any") -> None:
    """Called with tensorflow.python.distribute.collective_all_reduce_strategy after it is imported. A version that was
    not tested is not changed, and sends all values."""
    try:
        from tensorflow.python.framework import versions

        if versions.VERSION.startswith(TESTED):
            _patch(module.CollectiveAllReduceExtended)
    except Exception:
        return


def _patch(extended: "Any") -> None:
    original = extended._get_variable_creator_initial_value

    def _get_variable_creator_initial_value(
        self: "Any", replica_id: int, device: str, primary_var: "Any", **kwargs: "Any"
    ) -> "Callable[[], Any]":
        def with_arguments(**changed: "Any") -> "Callable[[], Any]":
            arguments = {"replica_id": replica_id, "device": device, "primary_var": primary_var, **kwargs, **changed}
            function: Callable[[], Any] = original(self, **arguments)
            return function

        def compare() -> "Any":
            import tensorflow as tf

            value = kwargs["initial_value"]
            with tf.device(device):
                value = tf.convert_to_tensor(value() if callable(value) else value, dtype=kwargs.get("dtype"))
                if _is_large(value) and _is_same_everywhere(self, device, value):
                    return value
            send_or_receive = with_arguments(initial_value=value)
            return send_or_receive()

        # Only the first replica of each worker gets a value from another worker. GPUs have faster ways to send it.
        is_compared = replica_id == 0 and self._num_workers > 1 and "CPU" in device
        return compare if is_compared else with_arguments()

    extended._get_variable_creator_initial_value = _get_variable_creator_initial_value


def _is_large(value: "Any") -> bool:
    import tensorflow as tf

    if not tf.executing_eagerly() or not (value.dtype.is_floating or value.dtype.is_integer):
        return False
    return bool(value.shape.num_elements() * value.dtype.size >= _LARGE)


def _is_same_everywhere(extended: "Any", device: str, value: "Any") -> bool:
    """A collective, as sending is: all workers call it for the same variable."""
    import tensorflow as tf
    from tensorflow.python.ops import collective_ops

    keys = extended._collective_keys
    group = keys.get_group_key([device])
    # 8 bytes, as float32: the only type that every communication backend supports.
    fingerprint = tf.cast(tf.fingerprint(tf.reshape(value, [1, -1])), tf.float32)
    fingerprints = collective_ops.all_gather(
        fingerprint, extended._num_workers, group, keys.get_instance_key(group, device)
    )
    return bool(tf.reduce_all(fingerprints == fingerprints[0]))
