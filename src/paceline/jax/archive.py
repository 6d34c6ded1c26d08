"""Whether a `.stablehlo` file can be run without code that came with it, or that was never meant for it.

A program of StableHLO computes; what reaches further is a custom call, of a function of this process by its name: jax's
callbacks into Python are such, and take an address in memory. `jax.export` knows which of jax's own calls are safe to
keep in a file, and asks when it writes, not when it reads: here it is asked again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from jax import export as jax_export
from jax.interpreters import mlir

from paceline.runtime.misfits import SnapshotRefused

_DIALECTS = ("builtin", "chlo", "func", "sdy", "stablehlo")  # what jax.export writes
# Those of its calls that hold a program of another kind: kernels of Pallas, and graphs of TensorFlow.
_PROGRAMS = ("mosaic_gpu_v2", "tf.call_tf_function", "tpu_custom_call")
# As jax itself has it, for itself. Should it be gone, all calls are refused.
_LIST = "_CUSTOM_CALL_TARGETS_GUARANTEED_STABLE"
_KNOWN = frozenset(getattr(sys.modules.get(jax_export.Exported.__module__), _LIST, ())) - set(_PROGRAMS)


def check(made: Any, path: Any) -> None:
    """SnapshotRefused: what of it could reach more than its inputs. `made`: what `jax.export` has read from there."""
    why = next(_wrong(made), "")
    if why:
        raise SnapshotRefused(f"{path} is not loaded: {why}")


def _wrong(made: Any) -> Iterator[str]:
    yield from (f"a check of jax.export is turned off in it: {each}" for each in made.disabled_safety_checks)
    with mlir.make_ir_context():
        module = mlir.ir.Module.parse(made.mlir_module())
        for op in _ops(module.operation):
            dialect, _, name = op.name.partition(".")
            if dialect not in _DIALECTS:
                yield f"it has {op.name}, which is not of StableHLO"
            elif name == "custom_call":
                target = mlir.ir.StringAttr(op.attributes["call_target_name"]).value
                if target not in _KNOWN:
                    yield f"it calls {target!r}: of calls, only those of jax that compute are let through"


def _ops(op: Any) -> Iterator[Any]:
    left = [op]
    while left:
        above = left.pop()
        yield above
        left += [each.operation for region in above.regions for block in region for each in block]
