"""Whether a `.pt2` file can be loaded without running code that came with it.

`torch.export.load` ("never load data from an untrusted source") reads with pickle what is pickled in such a file, calls
whatever below `torch` the graph names, and makes Python code of its names, sizes and guards. A model that is made of
tensors and of torch's own operators needs no pickle, and plain names and sums: a file with anything else is refused.
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

from paceline.runtime.misfits import SnapshotRefused

_MOST_BYTES = 256 * 1024 * 1024  # of the graph
_PARTS = re.compile(
    r"models/model\.json|data/weights/(model_weights_config\.json|weight_\d+)|data/sample_inputs/model\.pt|"
    r"data/constants/(model_constants_config\.json|tensor_\d+)|archive_format|archive_version|byteorder|version|"
    r"\.data/\w+"
)
_CONTROL = "cond|while_loop|map_impl|scan|associative_scan|wrap_with_set_grad_enabled|wrap_with_autocast"
# Not all of Python's operators: attrgetter and methodcaller lead from any object to everything.
_SUMS = "abs|add|and_|eq|floordiv|ge|getitem|gt|inv|le|lshift|lt|mod|mul|ne|neg|not_|or_|pos|pow|rshift|sub|truediv|xor"
_TARGET = re.compile(rf"torch\.ops\.higher_order\.({_CONTROL})|_operator\.({_SUMS})|math\.[a-z]\w*|torch\.sym_\w+")
_FILES = ("from_file", "save")  # torch's operators too, and they read and write files
_OPERATOR = re.compile(r"torch\.ops\.(aten|prims)\.(\w+)\.(\w+)")
_NAME = re.compile(r"[\w.]*", re.ASCII)
_TEXT = ("as_string", "stack_trace", "source_fn_stack", "nn_module_stack", "torch_fn", "torch_version")  # stay text
_TREES = ("builtins.tuple", "builtins.list", "builtins.dict", "collections.OrderedDict", None)
_SYMBOL = re.compile(r"Symbol\('[a-z]+\d+'(, \w+=(True|False))*\)")
_SIZE = re.compile(
    r"(s0|\d+|Integer|Float|Rational|Add|Mul|Pow|Max|Min|Mod|PythonMod|FloorDiv|CeilDiv|CleanDiv|IntTrueDiv|PowByNatural|"
    r"ModularIndexing|Eq|Ne|Lt|Le|Gt|Ge|Equality|Unequality|StrictLessThan|LessThan|StrictGreaterThan|GreaterThan|And|Or|"
    r"Not|Where|TruncToInt|FloorToInt|CeilToInt|ToFloat|Identity|IntInfinity|true|false|[\s,()-])*"
)
_ASKED = re.compile(r"L\['\w+'\](\[('\w+'|\d+)\])*\.(size|stride)\(\)\[\d+\]")
_GUARD = re.compile(r"(s0|\d+|and|or|not|min|max|Mod|[\s,()+\-*/%<>=!])*")


def check(path: Path) -> None:
    """SnapshotRefused: what of it could run code."""
    try:
        with zipfile.ZipFile(path) as file:
            why = next(_wrong(file), "")
    except (zipfile.BadZipFile, LookupError, ValueError, TypeError, AttributeError) as error:
        raise SnapshotRefused(f"{path} is no model of torch.export: {error}") from error
    if why:
        raise SnapshotRefused(f"{path} is not loaded: {why}")


def _wrong(file: zipfile.ZipFile) -> Iterator[str]:
    names = {name.partition("/")[2]: name for name in file.namelist()}  # all below one folder
    yield from (f"it holds {name!r}" for name in names if not _PARTS.fullmatch(name))
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
        if not _GUARD.fullmatch(_ASKED.sub("s0", guard)):
            yield f"it evaluates {guard!r}"
    for key, value in _texts(model):
        if not _NAME.fullmatch(key):
            yield f"it has a name {key!r}"
        elif not _plain(key, value):
            yield f"its graph has {value!r} as {key}"


def _plain(key: str, value: str) -> bool:
    if not value:
        return True
    if key in ("target", "as_operator"):
        return bool(_TARGET.fullmatch(value)) or _computes(value)
    if key == "expr_str":
        return bool(_SIZE.fullmatch(_SYMBOL.sub("s0", value)))
    if key in ("in_spec", "out_spec"):
        return _tree(json.loads(value)[1], key == "in_spec")
    return key in _TEXT or bool(_NAME.fullmatch(value))


def _computes(target: str) -> bool:
    found = _OPERATOR.fullmatch(target)
    if not found or found[2] in _FILES:
        return False
    named = getattr(getattr(torch.ops, found[1]), found[2], None)
    return isinstance(getattr(named, found[3], None), torch._ops.OpOverload)


def _tree(spec: Any, names: bool) -> bool:
    """`names`: the keys of dictionaries become names of arguments."""
    keys = json.loads(spec["context"]) if spec["type"] and spec["context"] else None
    right = spec["type"] in _TREES and (not names or all(_NAME.fullmatch(str(each)) for each in keys or ()))
    return right and all(_tree(each, names) for each in spec["children_spec"])


def _read(file: zipfile.ZipFile, name: str) -> bytes:
    if file.getinfo(name).file_size > _MOST_BYTES:
        raise ValueError(f"{name} is too large")
    return file.read(name)


def _texts(data: Any) -> Iterator[tuple[str, str]]:
    """Every key of a graph, with its text where it has one."""
    left: list[tuple[str, Any]] = [("", data)]
    while left:
        above, found = left.pop()
        for key, value in found.items() if isinstance(found, dict) else ((above, each) for each in found):
            yield key, value if isinstance(value, str) else ""
            if isinstance(value, (dict, list)):
                left.append((key, value))
