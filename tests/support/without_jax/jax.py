"""For PYTHONPATH: hides JAX."""

raise ImportError("tests/support/without_jax hides JAX from TensorFlow")
