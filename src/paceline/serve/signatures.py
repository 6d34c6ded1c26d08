"""What a model takes and gives: names, types and shapes, and the checks of what a request holds against them."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

STRING = "string"
TYPES = {
    "float16": "DT_HALF", "bfloat16": "DT_BFLOAT16", "float32": "DT_FLOAT", "float64": "DT_DOUBLE",
    "int8": "DT_INT8", "int16": "DT_INT16", "int32": "DT_INT32", "int64": "DT_INT64",
    "uint8": "DT_UINT8", "uint16": "DT_UINT16", "uint32": "DT_UINT32", "uint64": "DT_UINT64",
    "bool": "DT_BOOL", STRING: "DT_STRING",
}  # fmt: skip
DEFAULT = "serving_default"

Arrays = dict[str, np.ndarray[Any, Any]]


class BadRequest(Exception):
    """What a client sent cannot be used; the text says why."""


@dataclass(frozen=True)
class Tensor:
    dtype: str  # as numpy names it, or STRING
    shape: tuple[int, ...] | None  # -1: any size; None: any shape

    def text(self) -> str:
        return f"{self.dtype} of any shape" if self.shape is None else f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True)
class Signature:
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]

    @property
    def joins(self) -> bool:
        """Whether rows of several requests can go through the model together, and come apart again."""
        both = (*self.inputs.values(), *self.outputs.values())
        return bool(self.inputs) and all(each.shape is not None and each.shape[:1] == (-1,) for each in both)


def read(data: Mapping[str, Any]) -> dict[str, Signature]:
    """Of the `signatures` in paceline.json."""

    def tensors(given: Mapping[str, Any]) -> dict[str, Tensor]:
        return {name: Tensor(str(each["dtype"]), tuple(map(int, each["shape"]))) for name, each in given.items()}

    return {name: Signature(tensors(each["inputs"]), tensors(each["outputs"])) for name, each in data.items()}


# ---- from JSON


def from_rows(signature: Signature, instances: Any) -> tuple[Arrays, int]:
    """`instances`: a list with an object (or, with one input, a value) for each example."""
    if not isinstance(instances, list) or not instances:
        raise BadRequest('"instances" must be a list of at least one example')
    names = list(signature.inputs)
    if len(names) == 1 and not (isinstance(instances[0], dict) and "b64" not in instances[0]):
        columns = {names[0]: instances}
    else:
        for number, row in enumerate(instances):
            if not isinstance(row, dict):
                raise BadRequest(f"instance {number} must be an object with {_listed(names)}")
            _same_names(row, names, f"instance {number}")
        columns = {name: [row[name] for row in instances] for name in names}
    return {name: array(name, signature.inputs[name], column) for name, column in columns.items()}, len(instances)


def from_columns(signature: Signature, inputs: Any) -> tuple[Arrays, int]:
    """`inputs`: an object with all examples of each input, or, with one input, its value."""
    names = list(signature.inputs)
    if not (isinstance(inputs, dict) and "b64" not in inputs):
        if len(names) != 1:
            raise BadRequest(f'"inputs" must be an object with {_listed(names)}')
        inputs = {names[0]: inputs}
    _same_names(inputs, names, '"inputs"')
    arrays = {name: array(name, signature.inputs[name], inputs[name]) for name in names}
    rows = {name: each.shape[0] for name, each in arrays.items() if each.ndim}
    if signature.joins and len(set(rows.values())) > 1:
        raise BadRequest("all inputs must have as many examples as the others: " + str(rows))
    return arrays, max(rows.values(), default=1)


def _same_names(given: Mapping[str, Any], names: list[str], where: str) -> None:
    if missing := [name for name in names if name not in given]:
        raise BadRequest(f"{where} lacks {_listed(missing)}")
    if more := [name for name in given if name not in names]:
        raise BadRequest(f"{where} has {_listed(more)}; the model takes {_listed(names)}")


def array(name: str, tensor: Tensor, value: Any) -> np.ndarray[Any, Any]:
    try:
        made = _strings(value) if tensor.dtype == STRING else np.asarray(value)
    except ValueError as error:
        what = "its lists are not of equal length" if "inhomogeneous" in str(error) else str(error)
        raise BadRequest(f'input "{name}": {what}') from None
    if tensor.dtype != STRING:
        made = _cast(name, tensor, made)
    wanted = tensor.shape
    if wanted is not None and (
        made.ndim != len(wanted) or any(size not in (-1, got) for size, got in zip(wanted, made.shape, strict=True))
    ):
        raise BadRequest(f'input "{name}": the model takes {tensor.text()}, got {list(made.shape)}')
    return made


def _cast(name: str, tensor: Tensor, made: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    kind = made.dtype.kind
    number = np.dtype("float32" if tensor.dtype == "bfloat16" else tensor.dtype)
    fits = {"b": "b", "f": "fiu", "i": "iu", "u": "iu"}[number.kind]
    if kind not in fits and made.size:
        got = {
            "b": "true or false",
            "f": "numbers with a fraction",
            "U": "text",
            "O": "values of several kinds or null",
        }
        raise BadRequest(f'input "{name}": the model takes {tensor.text()}, got {got.get(kind, made.dtype.name)}')
    if number.kind in "iu" and made.size:
        least, most = np.iinfo(number).min, np.iinfo(number).max
        if int(made.min()) < least or int(made.max()) > most:
            raise BadRequest(f'input "{name}": {tensor.dtype} holds {least} to {most}')
    return made.astype(number, copy=False)


def _strings(value: Any) -> np.ndarray[Any, Any]:
    def plain(each: Any) -> Any:
        if isinstance(each, str):
            return each.encode()
        if isinstance(each, dict) and set(each) == {"b64"} and isinstance(each["b64"], str):
            try:
                return base64.b64decode(each["b64"], validate=True)
            except binascii.Error:
                raise ValueError("a b64 is not base64") from None
        if isinstance(each, list):
            return [plain(item) for item in each]
        raise ValueError("it must be text, or {'b64': ...}")

    made = np.array(plain(value), dtype=object)
    if any(isinstance(each, list) for each in made.flat):
        raise ValueError("its lists are not of equal length")
    return made


def _listed(names: list[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


# ---- to JSON


def to_rows(outputs: Arrays, rows: int) -> list[Any]:
    for name, each in outputs.items():
        if each.ndim == 0 or each.shape[0] != rows:
            raise BadRequest(f'output "{name}" has no row for each example: ask with "inputs" instead of "instances"')
    plain = {name: listed(name, each) for name, each in outputs.items()}
    if len(plain) == 1:
        return list(next(iter(plain.values())))
    return [{name: plain[name][row] for name in plain} for row in range(rows)]


def to_columns(outputs: Arrays) -> Any:
    plain = {name: listed(name, each) for name, each in outputs.items()}
    return next(iter(plain.values())) if len(plain) == 1 else plain


def listed(name: str, value: np.ndarray[Any, Any]) -> Any:
    """As JSON has it. Bytes are text where they can be, and never where the name ends with _bytes."""
    if value.dtype.kind not in "OS":
        return value if value.ndim and value.flags.c_contiguous and value.dtype != np.float16 else value.tolist()

    def plain(each: Any) -> Any:
        if isinstance(each, list):
            return [plain(item) for item in each]
        data = each if isinstance(each, bytes) else str(each).encode()
        if not name.endswith("_bytes"):
            try:
                return data.decode()
            except UnicodeDecodeError:
                pass
        return {"b64": base64.b64encode(data).decode()}

    return plain(value.tolist())


def metadata(name: str, version: int, signatures: Mapping[str, Signature]) -> dict[str, Any]:
    """As TensorFlow Serving describes a model."""

    def described(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        return {
            each: {
                "dtype": TYPES.get(tensor.dtype, "DT_INVALID"),
                "tensor_shape": {
                    "dim": [{"size": str(size), "name": ""} for size in tensor.shape or ()],
                    "unknown_rank": tensor.shape is None,
                },
                "name": f"{prefix}_{each}:0",
            }
            for each, tensor in tensors.items()
        }

    known = {
        each: {
            "inputs": described(each, signature.inputs),
            "outputs": described("StatefulPartitionedCall", signature.outputs),
            "method_name": "tensorflow/serving/predict",
        }
        for each, signature in signatures.items()
    }
    spec = {"name": name, "signature_name": "", "version": str(version)}
    return {"model_spec": spec, "metadata": {"signature_def": {"signature_def": known}}}
