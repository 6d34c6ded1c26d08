"""Checks whether a `.pt2` file can be loaded without running code contained in it.

`torch.export.load` ("never load data from an untrusted source") unpickles pickled parts of such a file, calls whatever
the graph names below `torch`, and generates Python code from its names, sizes and guards. A model of tensors and of
torch's own operators needs no pickle, and only plain names and sums: a file with anything else is rejected.
"""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from paceline.runtime.snapshot_mismatches import SnapshotRefused

_MOST_BYTES = 256 * 1024 * 1024  # size limit of the graph
_PARTS = re.compile(
    r"models/model\.json|data/weights/(model_weights_config\.json|weight_\d+)|data/sample_inputs/model\.pt|"
    r"data/constants/(model_constants_config\.json|tensor_\d+)|archive_format|archive_version|byteorder|version|"
    r"\.data/\w+"
)
_CONTROL = "cond|while_loop|map_impl|scan|associative_scan|wrap_with_set_grad_enabled|wrap_with_autocast"
# Not all of Python's operators: attrgetter and methodcaller give access to everything from any object.
_SUMS = "abs|add|and_|eq|floordiv|ge|getitem|gt|inv|le|lshift|lt|mod|mul|ne|neg|not_|or_|pos|pow|rshift|sub|truediv|xor"
_TARGET = re.compile(rf"torch\.ops\.higher_order\.({_CONTROL})|_operator\.({_SUMS})|math\.[a-z]\w*|torch\.sym_\w+")
_FILES = ("from_file", "save")  # operators of torch that read and write files
_OPERATOR = re.compile(r"torch\.ops\.(aten|prims)\.(\w+)\.(\w+)")
_NAME = re.compile(r"[\w.]*", re.ASCII)
_TEXT = (
    "as_string",
    "stack_trace",
    "source_fn_stack",
    "nn_module_stack",
    "torch_fn",
    "torch_version",
)  # never evaluated
_TREES = ("builtins.tuple", "builtins.list", "builtins.dict", "collections.OrderedDict", None)
_SYMBOL = re.compile(r"Symbol\('[a-z]+\d+'(, \w+=(True|False))*\)")
_SIZE = re.compile(
    r"(s0|\d+|Integer|Float|Rational|Add|Mul|Pow|Max|Min|Mod|PythonMod|FloorDiv|CeilDiv|CleanDiv|IntTrueDiv|PowByNatural|"
    r"ModularIndexing|Eq|Ne|Lt|Le|Gt|Ge|Equality|Unequality|StrictLessThan|LessThan|StrictGreaterThan|GreaterThan|And|Or|"
    r"Not|Where|TruncToInt|FloorToInt|CeilToInt|ToFloat|Identity|IntInfinity|true|false|[\s,()-])*"
)
_SIZE_QUERY = re.compile(r"L\['\w+'\](\[('\w+'|\d+)\])*\.(size|stride)\(\)\[\d+\]")
_GUARD = re.compile(r"(s0|\d+|and|or|not|min|max|Mod|[\s,()+\-*/%<>=!])*")


def check(path: Path) -> None:
    """Raises SnapshotRefused, with the first part that could run code."""
    try:
        with zipfile.ZipFile(path) as file:
            problem = next(_problems(file), "")
    except (zipfile.BadZipFile, LookupError, ValueError, TypeError, AttributeError) as error:
        raise SnapshotRefused(f"{path}: not a model written by torch.export: {error}") from error
    if problem:
        raise SnapshotRefused(f"{path}: the model was not loaded: {problem}")


def _problems(file: zipfile.ZipFile) -> Iterator[str]:
    names = {name.partition("/")[2]: name for name in file.namelist()}  # all below one folder
    yield from (f"it contains {name!r}" for name in names if not _PARTS.fullmatch(name))
    for kind in ("weights/model_weights", "constants/model_constants"):
        for name, each in json.loads(_read(file, names[f"data/{kind}_config.json"]))["config"].items():
            if each["use_pickle"] or not re.fullmatch(r"(weight|tensor)_\d+", each["path_name"]):
                yield f"{name} is pickled"
    try:
        torch.load(io.BytesIO(_read(file, names["data/sample_inputs/model.pt"])), weights_only=True)
    except Exception as error:
        yield f"its example inputs cannot be read without running code: {str(error).splitlines()[0]}"
    model = json.loads(_read(file, names["models/model.json"]))
    for guard in model.pop("guards_code", []):
        if not _GUARD.fullmatch(_SIZE_QUERY.sub("s0", guard)):
            yield f"it evaluates {guard!r}"
    for key, value in _texts(model):
        if not _NAME.fullmatch(key):
            yield f"it has a name {key!r}"
        elif not _is_plain(key, value):
            yield f"its graph has {value!r} as {key}"


def _is_plain(key: str, value: str) -> bool:
    if not value:
        return True
    if key in ("target", "as_operator"):
        return bool(_TARGET.fullmatch(value)) or _is_safe_operator(value)
    if key == "expr_str":
        return bool(_SIZE.fullmatch(_SYMBOL.sub("s0", value)))
    if key in ("in_spec", "out_spec"):
        return _is_plain_tree(json.loads(value)[1], key == "in_spec")
    return key in _TEXT or bool(_NAME.fullmatch(value))


def _is_safe_operator(target: str) -> bool:
    match = _OPERATOR.fullmatch(target)
    if not match or match[2] in _FILES:
        return False
    packet = getattr(getattr(torch.ops, match[1]), match[2], None)
    return isinstance(getattr(packet, match[3], None), torch._ops.OpOverload)


def _is_plain_tree(spec: Any, are_arguments: bool) -> bool:
    """`are_arguments`: the keys of dictionaries become names of arguments."""
    keys = json.loads(spec["context"]) if spec["type"] and spec["context"] else None
    plain = spec["type"] in _TREES and (not are_arguments or all(_NAME.fullmatch(str(each)) for each in keys or ()))
    return plain and all(_is_plain_tree(each, are_arguments) for each in spec["children_spec"])


def _read(file: zipfile.ZipFile, name: str) -> bytes:
    if file.getinfo(name).file_size > _MOST_BYTES:
        raise ValueError(f"{name} is too large")
    return file.read(name)


def _texts(data: Any) -> Iterator[tuple[str, str]]:
    """Every key of a graph, with its text if its value is one."""
    pending: list[tuple[str, Any]] = [("", data)]
    while pending:
        parent_key, node = pending.pop()
        for key, value in node.items() if isinstance(node, dict) else ((parent_key, each) for each in node):
            yield key, value if isinstance(value, str) else ""
            if isinstance(value, (dict, list)):
                pending.append((key, value))
