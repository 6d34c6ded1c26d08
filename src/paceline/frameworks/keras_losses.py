"""Losses, gradients and moving averages of Keras 3 on several workers: those of the whole batch."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def patch(fit: "Any") -> None:
    """`fit`: what keras_fit.py has."""
    _losses(fit.step, fit.replace)
    _gradients(fit.step, fit.replace, fit.several)
    _averages(fit.step, fit.replace)


def _losses(step: "Any", replace: "Any") -> None:
    import tensorflow as tf
    from keras.src.losses import loss

    def total(*values: "Any") -> "Any":
        numbers = tf.stack([tf.cast(value, tf.float32) for value in values])
        return tf.unstack(tf.distribute.get_replica_context().all_reduce("SUM", tf.stop_gradient(numbers)))

    def with_value(share: "Any", value: "Any") -> "Any":
        """Optimizers add the gradients of all shares; what is shown and recorded is the value."""
        return share + tf.stop_gradient(tf.cast(value, share.dtype) - share)

    def reduce(original: "Any") -> "Any":
        def reduce_weighted_values(
            values: "Any",
            sample_weight: "Any" = None,
            mask: "Any" = None,
            reduction: "Any" = "sum_over_batch_size",
            dtype: "Any" = None,
        ) -> "Any":
            if step.rows is None or reduction in (None, "none"):
                return original(values, sample_weight, mask, reduction, dtype)
            summed = tf.reduce_sum(original(values, sample_weight, mask, "sum", dtype))
            if reduction == "sum":
                return with_value(summed, total(summed)[0])
            values = tf.convert_to_tensor(values)
            if values.shape.rank == 0 and sample_weight is None and mask is None:  # a mean of the program's own
                count = step.rows
                summed = tf.math.multiply_no_nan(summed, tf.cast(count, summed.dtype))
            else:
                count = divisor(values, sample_weight, mask, reduction)
            whole, divided_by = total(summed, count)
            share = tf.math.divide_no_nan(summed, tf.cast(divided_by, summed.dtype))
            return with_value(share, tf.math.divide_no_nan(whole, divided_by))

        return reduce_weighted_values

    def divisor(values: "Any", sample_weight: "Any", mask: "Any", reduction: str) -> "Any":
        """What Keras divides by, as far as it is of this worker's examples."""
        if reduction == "mean_with_sample_weight" and not (sample_weight is None and mask is None):
            return tf.reduce_sum(loss.apply_mask(sample_weight, mask, "float32", reduction))
        size = tf.cast(tf.size(values if values.shape.rank else sample_weight), tf.float32)
        if mask is None:
            return size
        valid = tf.reduce_sum(tf.cast(mask, tf.float32))
        return valid * tf.math.divide_no_nan(size, tf.cast(tf.size(mask), tf.float32))

    def scale(original: "Any") -> "Any":
        def scale_loss_for_distribution(value: "Any") -> "Any":
            """Of losses that layers add."""
            if step.rows is None:
                return original(value)
            replicas = tf.distribute.get_strategy().num_replicas_in_sync
            return with_value(value / replicas, total(value)[0] / replicas)

        return scale_loss_for_distribution

    def unscale(original: "Any") -> "Any":
        def unscale_loss_for_distribution(value: "Any") -> "Any":
            return original(value) if step.rows is None else value

        return unscale_loss_for_distribution

    replace(loss, "reduce_weighted_values", reduce)
    replace(loss, "scale_loss_for_distribution", scale)
    replace(loss, "unscale_loss_for_distribution", unscale)


def _gradients(step: "Any", replace: "Any", several: "Any") -> None:
    import tensorflow as tf
    from keras.src.optimizers import base_optimizer, loss_scale_optimizer

    inner: set[int] = set()  # optimizers inside of others, which another thread than the step's applies

    def clip(original: "Any") -> "Any":
        def _clip_gradients(self: "Any", grads: "Any") -> "Any":
            """Keras clips what each worker has, and adds that: here, the sum is clipped."""
            context = tf.distribute.get_replica_context()
            clips = (self.clipnorm or self.global_clipnorm or self.clipvalue) and context is not None
            if not clips or not several(context.strategy) or (step.rows is None and id(self) not in inner):
                return original(self, grads)
            replicas = context.num_replicas_in_sync
            summed = iter(context.all_reduce("SUM", [grad for grad in grads if grad is not None]))
            clipped = original(self, [None if grad is None else next(summed) for grad in grads])
            return [None if grad is None else tf.math.scalar_mul(1 / replicas, grad) for grad in clipped]

        return _clip_gradients

    def spoilt(grad: "Any", wrong: "Any") -> "Any":
        if isinstance(grad, tf.IndexedSlices):
            return tf.IndexedSlices(spoilt(grad.values, wrong), grad.indices, grad.dense_shape)
        return tf.where(wrong, tf.constant(float("nan"), grad.dtype), grad)

    def apply(original: "Any") -> "Any":
        def apply_(self: "Any", grads: "Any", trainable_variables: "Any" = None) -> "Any":
            """A worker whose gradients overflow skips the step: then all must, or the others wait for it."""
            if step.rows is None:
                return original(self, grads, trainable_variables)
            inner.add(id(self.inner_optimizer))
            wrong = 1.0 - tf.cast(self.check_finite(grads), tf.float32)
            wrong = tf.distribute.get_replica_context().all_reduce("SUM", wrong) > 0
            grads = [None if grad is None else spoilt(grad, wrong) for grad in grads]
            return original(self, grads, trainable_variables)

        return apply_

    replace(base_optimizer.BaseOptimizer, "_clip_gradients", clip)
    replace(loss_scale_optimizer.LossScaleOptimizer, "apply", apply)


def _averages(step: "Any", replace: "Any") -> None:
    import tensorflow as tf
    from keras.src import backend

    def assign(original: "Any") -> "Any":
        def _direct_assign(self: "Any", value: "Any") -> None:
            """What layers note down of their inputs, as BatchNormalization does: else each worker has its own."""
            noted = not self.trainable and self.aggregation == "none" and backend.is_float_dtype(self._dtype)
            if step.rows is not None and noted and self.synchronization != "on_read":
                rows = tf.cast(step.rows, self._dtype)
                mine = tf.math.multiply_no_nan(tf.cast(value, self._dtype), rows)
                total, whole = tf.distribute.get_replica_context().all_reduce("SUM", [mine, rows])
                value = total / whole
            original(self, value)

        return _direct_assign

    replace(backend.Variable, "_direct_assign", assign)
