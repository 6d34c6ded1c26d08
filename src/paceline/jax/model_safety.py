"""Checks whether a `.stablehlo` file only computes, without calling functions of this process.

A StableHLO program can reach beyond its inputs only through custom calls, which call a function of this process by
name: jax's callbacks into Python are such calls, and take a memory address. `jax.export` knows which of jax's own calls
are safe to store in a file, but checks this only when it writes. This module checks again before a file is loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from jax import export as jax_export
from jax.interpreters import mlir

from paceline.runtime.snapshot_mismatches import SnapshotRefused

_DIALECTS = ("builtin", "chlo", "func", "sdy", "stablehlo")  # what jax.export writes
# Calls that contain a program of another kind: Pallas kernels, and TensorFlow graphs.
_EMBEDDED_PROGRAMS = ("mosaic_gpu_v2", "tf.call_tf_function", "tpu_custom_call")
# A private list of jax. If jax removes it, all calls are rejected.
_LIST = "_CUSTOM_CALL_TARGETS_GUARANTEED_STABLE"
_SAFE = frozenset(getattr(sys.modules.get(jax_export.Exported.__module__), _LIST, ())) - set(_EMBEDDED_PROGRAMS)


def check(program: Any, path: Any) -> None:
    """Raises SnapshotRefused, with the first operation that could reach beyond its inputs.

    `program`: what `jax.export` has read from `path`.
    """
    problem = next(_problems(program), "")
    if problem:
        raise SnapshotRefused(f"{path}: the model was not loaded: {problem}")


def _problems(program: Any) -> Iterator[str]:
    yield from (f"it disables a check of jax.export: {each}" for each in program.disabled_safety_checks)
    with mlir.make_ir_context():
        module = mlir.ir.Module.parse(program.mlir_module())
        for op in _ops(module.operation):
            dialect, _, name = op.name.partition(".")
            if dialect not in _DIALECTS:
                yield f"it contains {op.name}, which is not a StableHLO operation"
            elif name == "custom_call":
                target = mlir.ir.StringAttr(op.attributes["call_target_name"]).value
                if target not in _SAFE:
                    yield f"it calls {target!r}: only jax's own computational calls are allowed"


def _ops(op: Any) -> Iterator[Any]:
    pending = [op]
    while pending:
        current = pending.pop()
        yield current
        pending += [each.operation for region in current.regions for block in region for each in block]
