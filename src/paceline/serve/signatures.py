"""Names, types and shapes of a model's inputs and outputs; checks and converts requests and responses."""

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


_UNEQUAL = "its lists have unequal lengths"


class BadRequest(Exception):
    """The request is invalid; the message says why."""


class _InvalidValue(ValueError):
    """A value that no input of the type accepts."""


@dataclass(frozen=True)
class Tensor:
    dtype: str  # numpy name, or STRING
    shape: tuple[int, ...] | None  # -1: any size; None: any shape

    def text(self) -> str:
        return f"{self.dtype} of any shape" if self.shape is None else f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True)
class Signature:
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]

    @property
    def can_batch(self) -> bool:
        """Whether rows of several requests can be processed in one model call and split again."""
        tensors = (*self.inputs.values(), *self.outputs.values())
        return bool(self.inputs) and all(each.shape is not None and each.shape[:1] == (-1,) for each in tensors)


def read(data: Mapping[str, Any]) -> dict[str, Signature]:
    """Reads the `signatures` in paceline.json."""

    def tensors(section: Mapping[str, Any]) -> dict[str, Tensor]:
        return {name: Tensor(str(each["dtype"]), tuple(map(int, each["shape"]))) for name, each in section.items()}

    return {name: Signature(tensors(each["inputs"]), tensors(each["outputs"])) for name, each in data.items()}


# ---- from JSON


def from_rows(signature: Signature, instances: Any) -> tuple[Arrays, int]:
    """`instances`: a list with one object per example; if there is only one input, one value per example."""
    if not isinstance(instances, list) or not instances:
        raise BadRequest('"instances" must be a list of at least one example')
    names = list(signature.inputs)
    if len(names) == 1 and not (isinstance(instances[0], dict) and "b64" not in instances[0]):
        columns = {names[0]: instances}
    else:
        for number, row in enumerate(instances):
            if not isinstance(row, dict):
                raise BadRequest(f"instance {number} must be an object with {_quoted(names)}")
            _check_names(row, names, f"instance {number}")
        columns = {name: [row[name] for row in instances] for name in names}
    return {name: array(name, signature.inputs[name], column) for name, column in columns.items()}, len(instances)


def from_columns(signature: Signature, inputs: Any) -> tuple[Arrays, int]:
    """`inputs`: an object with all examples of each input; if there is only one input, its value."""
    names = list(signature.inputs)
    if not (isinstance(inputs, dict) and "b64" not in inputs):
        if len(names) != 1:
            raise BadRequest(f'"inputs" must be an object with {_quoted(names)}')
        inputs = {names[0]: inputs}
    _check_names(inputs, names, '"inputs"')
    arrays = {name: array(name, signature.inputs[name], inputs[name]) for name in names}
    rows = {name: each.shape[0] for name, each in arrays.items() if each.ndim}
    if signature.can_batch and len(set(rows.values())) > 1:
        raise BadRequest("all inputs must have the same number of examples: " + str(rows))
    return arrays, max(rows.values(), default=1)


def _check_names(values: Mapping[str, Any], names: list[str], where: str) -> None:
    if missing := [name for name in names if name not in values]:
        raise BadRequest(f"{where} lacks {_quoted(missing)}")
    if unknown := [name for name in values if name not in names]:
        raise BadRequest(f"{where} has unknown {_quoted(unknown)}; the model takes {_quoted(names)}")


def array(name: str, tensor: Tensor, value: Any) -> np.ndarray[Any, Any]:
    try:
        result = _strings(value) if tensor.dtype == STRING else np.asarray(value)
    except _InvalidValue as error:
        raise BadRequest(f'input "{name}": {error}') from None
    except ValueError as error:
        raise BadRequest(f'input "{name}": {_UNEQUAL if _has_unequal_lists(value) else error}') from None
    if tensor.dtype != STRING:
        result = _cast(name, tensor, result)
    shape = tensor.shape
    if shape is not None and (
        result.ndim != len(shape) or any(size not in (-1, got) for size, got in zip(shape, result.shape, strict=True))
    ):
        raise BadRequest(f'input "{name}": the model takes {tensor.text()}, got {list(result.shape)}')
    return result


def _has_unequal_lists(value: Any) -> bool:
    """Whether nested lists of the same level differ in length, or are mixed with other values."""
    level = [value]
    while level and all(isinstance(each, list) for each in level):
        if len({len(each) for each in level}) > 1:
            return True
        level = [item for each in level for item in each]
    return any(isinstance(each, list) for each in level)


def _cast(name: str, tensor: Tensor, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    kind = values.dtype.kind
    number = np.dtype("float32" if tensor.dtype == "bfloat16" else tensor.dtype)
    fits = {"b": "b", "f": "fiu", "i": "iu", "u": "iu"}[number.kind]
    if kind not in fits and values.size:
        got = {
            "b": "true or false",
            "f": "fractional numbers",
            "U": "text",
            "O": "values of mixed types or null",
        }
        raise BadRequest(f'input "{name}": the model takes {tensor.text()}, got {got.get(kind, values.dtype.name)}')
    if number.kind in "iu" and values.size:
        least, most = np.iinfo(number).min, np.iinfo(number).max
        if int(values.min()) < least or int(values.max()) > most:
            raise BadRequest(f'input "{name}": {tensor.dtype} takes {least} to {most}')
    return values.astype(number, copy=False)


def _strings(value: Any) -> np.ndarray[Any, Any]:
    def plain(each: Any) -> Any:
        if isinstance(each, str):
            return each.encode()
        if isinstance(each, dict) and set(each) == {"b64"} and isinstance(each["b64"], str):
            try:
                return base64.b64decode(each["b64"], validate=True)
            except binascii.Error:
                raise _InvalidValue("a b64 value is not valid base64") from None
        if isinstance(each, list):
            return [plain(item) for item in each]
        raise _InvalidValue("the value must be text or {'b64': ...}")

    values = np.array(plain(value), dtype=object)
    if any(isinstance(each, list) for each in values.flat):
        raise _InvalidValue(_UNEQUAL)
    return values


def _quoted(names: list[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


# ---- to JSON


def to_rows(outputs: Arrays, rows: int) -> list[Any]:
    for name, each in outputs.items():
        if each.ndim == 0 or each.shape[0] != rows:
            raise BadRequest(f'output "{name}" does not have one row per example; use "inputs" instead of "instances"')
    plain = {name: to_json(name, each) for name, each in outputs.items()}
    if len(plain) == 1:
        return list(next(iter(plain.values())))
    return [{name: plain[name][row] for name in plain} for row in range(rows)]


def to_columns(outputs: Arrays) -> Any:
    plain = {name: to_json(name, each) for name, each in outputs.items()}
    return next(iter(plain.values())) if len(plain) == 1 else plain


def to_json(name: str, value: np.ndarray[Any, Any]) -> Any:
    """Bytes become text if they are valid UTF-8 and the name does not end with _bytes, otherwise base64."""
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
    """The model's description in the format of TensorFlow Serving."""

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

    definitions = {
        each: {
            "inputs": described(each, signature.inputs),
            "outputs": described("StatefulPartitionedCall", signature.outputs),
            "method_name": "tensorflow/serving/predict",
        }
        for each, signature in signatures.items()
    }
    spec = {"name": name, "signature_name": "", "version": str(version)}
    return {"model_spec": spec, "metadata": {"signature_def": {"signature_def": definitions}}}
