"""Makes Keras 3 compute losses, gradients and moving averages over the batch of all workers."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def patch(fit: "Any") -> None:
    """`fit`: the globals of keras_fit.py."""
    _losses(fit.step, fit.replace)
    _gradients(fit.step, fit.replace, fit.is_multi_worker)
    _averages(fit.step, fit.replace)


def _losses(step: "Any", replace: "Any") -> None:
    import tensorflow as tf
    from keras.src.losses import loss

    def total(*values: "Any") -> "Any":
        numbers = tf.stack([tf.cast(value, tf.float32) for value in values])
        return tf.unstack(tf.distribute.get_replica_context().all_reduce("SUM", tf.stop_gradient(numbers)))

    def with_value(share: "Any", value: "Any") -> "Any":
        """The gradient of this worker's share, which optimizers add up, with the value of the whole batch."""
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
            if values.shape.rank == 0 and sample_weight is None and mask is None:  # the program has already averaged
                count = step.rows
                summed = tf.math.multiply_no_nan(summed, tf.cast(count, summed.dtype))
            else:
                count = divisor(values, sample_weight, mask, reduction)
            total_sum, total_count = total(summed, count)
            share = tf.math.divide_no_nan(summed, tf.cast(total_count, summed.dtype))
            return with_value(share, tf.math.divide_no_nan(total_sum, total_count))

        return reduce_weighted_values

    def divisor(values: "Any", sample_weight: "Any", mask: "Any", reduction: str) -> "Any":
        """The part of Keras' divisor that comes from this worker's examples."""
        if reduction == "mean_with_sample_weight" and not (sample_weight is None and mask is None):
            return tf.reduce_sum(loss.apply_mask(sample_weight, mask, "float32", reduction))
        size = tf.cast(tf.size(values if values.shape.rank else sample_weight), tf.float32)
        if mask is None:
            return size
        valid = tf.reduce_sum(tf.cast(mask, tf.float32))
        return valid * tf.math.divide_no_nan(size, tf.cast(tf.size(mask), tf.float32))

    def scale(original: "Any") -> "Any":
        def scale_loss_for_distribution(value: "Any") -> "Any":
            """For losses that layers add: means over the examples of this worker, or independent of them."""
            if step.rows is None:
                return original(value)
            weighted = tf.math.multiply_no_nan(tf.cast(value, tf.float32), tf.cast(step.rows, tf.float32))
            total_value, total_rows = total(weighted, step.rows)
            return with_value(tf.cast(weighted / total_rows, value.dtype), total_value / total_rows)

        return scale_loss_for_distribution

    def unscale(original: "Any") -> "Any":
        def unscale_loss_for_distribution(value: "Any") -> "Any":
            return original(value) if step.rows is None else value

        return unscale_loss_for_distribution

    replace(loss, "reduce_weighted_values", reduce)
    replace(loss, "scale_loss_for_distribution", scale)
    replace(loss, "unscale_loss_for_distribution", unscale)


def _gradients(step: "Any", replace: "Any", is_multi_worker: "Any") -> None:
    import tensorflow as tf
    from keras.src.optimizers import base_optimizer, loss_scale_optimizer

    inner: set[int] = set()  # optimizers inside others: they are applied in another thread than the step

    def clip(original: "Any") -> "Any":
        def _clip_gradients(self: "Any", grads: "Any") -> "Any":
            """Clip the sum of the gradients of all workers, instead of each worker's gradients."""
            context = tf.distribute.get_replica_context()
            clips = (self.clipnorm or self.global_clipnorm or self.clipvalue) and context is not None
            if not clips or not is_multi_worker(context.strategy) or (step.rows is None and id(self) not in inner):
                return original(self, grads)
            replicas = context.num_replicas_in_sync
            summed = iter(context.all_reduce("SUM", [grad for grad in grads if grad is not None]))
            clipped = original(self, [None if grad is None else next(summed) for grad in grads])
            return [None if grad is None else tf.math.scalar_mul(1 / replicas, grad) for grad in clipped]

        return _clip_gradients

    def of_examples(grads: "Any") -> "Any":
        """Zeros on a worker without examples: some gradients are NaN there, as those of BatchNormalization."""
        dense = [grad for grad in grads if isinstance(grad, tf.Tensor)]
        values = iter(tf.cond(step.rows > 0, lambda: dense, lambda: [tf.zeros_like(grad) for grad in dense]))
        return [next(values) if isinstance(grad, tf.Tensor) else grad for grad in grads]

    def with_nan(grad: "Any", overflow: "Any") -> "Any":
        if isinstance(grad, tf.IndexedSlices):
            return tf.IndexedSlices(with_nan(grad.values, overflow), grad.indices, grad.dense_shape)
        return tf.where(overflow, tf.constant(float("nan"), grad.dtype), grad)

    def apply(original: "Any") -> "Any":
        def apply_(self: "Any", grads: "Any", trainable_variables: "Any" = None) -> "Any":
            return original(self, grads if step.rows is None else of_examples(grads), trainable_variables)

        return apply_

    def apply_scaled(original: "Any") -> "Any":
        def apply_(self: "Any", grads: "Any", trainable_variables: "Any" = None) -> "Any":
            """If the gradients of one worker overflow, all workers must skip the step, or the others wait for it."""
            if step.rows is None:
                return original(self, grads, trainable_variables)
            inner.add(id(self.inner_optimizer))
            grads = of_examples(grads)
            overflow = 1.0 - tf.cast(self.check_finite(grads), tf.float32)
            overflow = tf.distribute.get_replica_context().all_reduce("SUM", overflow) > 0
            grads = [None if grad is None else with_nan(grad, overflow) for grad in grads]
            return original(self, grads, trainable_variables)

        return apply_

    replace(base_optimizer.BaseOptimizer, "_clip_gradients", clip)
    replace(base_optimizer.BaseOptimizer, "apply", apply)
    replace(loss_scale_optimizer.LossScaleOptimizer, "apply", apply_scaled)


def _averages(step: "Any", replace: "Any") -> None:
    import tensorflow as tf
    from keras.src import backend

    def assign(original: "Any") -> "Any":
        def _direct_assign(self: "Any", value: "Any") -> None:
            """Average statistics that layers keep, as in BatchNormalization, over the examples of all workers."""
            is_statistic = not self.trainable and self.aggregation == "none" and backend.is_float_dtype(self._dtype)
            if step.rows is not None and is_statistic and self.synchronization != "on_read":
                rows = tf.cast(step.rows, self._dtype)
                weighted = tf.math.multiply_no_nan(tf.cast(value, self._dtype), rows)
                total, total_rows = tf.distribute.get_replica_context().all_reduce("SUM", [weighted, rows])
                value = total / total_rows
            original(self, value)

        return _direct_assign

    replace(backend.Variable, "_direct_assign", assign)
