"""Checks whether a `.pt2` file can be loaded without running code contained in it.

`torch.export.load` ("never load data from an untrusted source") unpickles pickled parts of such a file, calls whatever
the graph names below `torch`, and generates Python code from its names, sizes and guards. A model of tensors and of
torch's own operators needs no pickle, and only plain names and sums: a file with anything else is rejected.

torch does not get the file itself, but a new one that contains exactly what was checked, written by this module: torch
reads zip files, JSON and pickles with other readers than this check, and the file could be replaced in the meantime.
"""

from __future__ import annotations

import io
import json
import pickletools
import re
import shutil
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from paceline.runtime.model_folder import private_folder
from paceline.runtime.plain_zip import PlainZip
from paceline.runtime.snapshot_mismatches import SnapshotRefused

_MOST_BYTES = 256 * 1024 * 1024  # size limit of the graph
_GRAPH, _EXAMPLES = "models/model.json", "data/sample_inputs/model.pt"
_CONFIGS = ("data/weights/model_weights_config.json", "data/constants/model_constants_config.json")
_TENSOR = re.compile(r"data/weights/weight_[0-9]+|data/constants/tensor_[0-9]+")
_FACTS = {  # small files, and what they may contain
    "archive_format": re.compile(rb"pt2"),
    "archive_version": re.compile(rb"[0-9]{1,9}"),
    "byteorder": re.compile(rb"little|big"),
    "version": re.compile(rb"[0-9]{1,9}\n?"),
    ".data/version": re.compile(rb"[0-9]{1,9}\n?"),
    ".data/serialization_id": re.compile(rb"[0-9]{1,80}"),
}
_DAMAGE = (
    zipfile.BadZipFile, LookupError, ValueError, TypeError, AttributeError, RuntimeError, EOFError, struct.error,
)  # fmt: skip
_CONTROL = "cond|while_loop|map_impl|scan|associative_scan|wrap_with_set_grad_enabled|wrap_with_autocast"
# Not all of Python's operators: attrgetter and methodcaller give access to everything from any object.
_SUMS = "abs|add|and_|eq|floordiv|ge|getitem|gt|inv|le|lshift|lt|mod|mul|ne|neg|not_|or_|pos|pow|rshift|sub|truediv|xor"
_TARGET = re.compile(rf"torch\.ops\.higher_order\.({_CONTROL})|_operator\.({_SUMS})|math\.[a-z]\w*|torch\.sym_\w+")
_OUTSIDE = ("_print", "from_file", "save", "warn")  # operators of torch that access files or write to the terminal
_IMPORTS = ("GLOBAL", "INST", "STACK_GLOBAL", "EXT1", "EXT2", "EXT4", "BYTEARRAY8")  # instructions of pickle
_EXAMPLE_PART = re.compile(
    r"collections OrderedDict|torch\._utils _rebuild_(tensor|tensor_v2|tensor_v3|parameter)|"
    r"torch (\w+Storage|[a-z]\w+)|torch\.storage (Untyped|Typed)Storage"
)
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
    with _opened(path) as (archive, folder):
        _checked_parts(archive, folder)


@contextmanager
def checked_copy(path: Path) -> Iterator[Path]:
    """A private file with what was checked, for torch to load. Raises SnapshotRefused as `check` does."""
    with private_folder() as private:
        copy = private / path.name
        with _opened(path) as (archive, folder), zipfile.ZipFile(copy, "w", zipfile.ZIP_STORED) as target:
            for name, data in _checked_parts(archive, folder).items():
                target.writestr(f"model/{name}", data)
            for full in archive.sizes:
                name = full[len(folder) + 1 :]
                if _TENSOR.fullmatch(name):
                    with archive.open(full) as source, target.open(f"model/{name}", "w", force_zip64=True) as tensor:
                        shutil.copyfileobj(source, tensor, 1 << 20)
        yield copy


@contextmanager
def _opened(path: Path) -> Iterator[tuple[PlainZip, str]]:
    """The archive and its one top folder. Errors become SnapshotRefused."""
    try:
        with PlainZip(path) as archive:
            folder = next(iter(archive.sizes), "").partition("/")[0]
            yield archive, folder
    except SnapshotRefused as problem:
        raise SnapshotRefused(f"{path}: the model was not loaded: {problem}") from None
    except _DAMAGE as error:
        raise SnapshotRefused(f"{path}: not a model written by torch.export: {error}") from error


def _checked_parts(archive: PlainZip, folder: str) -> dict[str, bytes]:
    """All parts except the numbers of tensors, written anew from what was checked."""
    parts = {}
    for full in archive.sizes:
        if not full.startswith(f"{folder}/"):
            raise SnapshotRefused(f"it contains {full!r} outside of {folder!r}")
        name = full[len(folder) + 1 :]
        if name not in (_GRAPH, _EXAMPLES, *_CONFIGS, *_FACTS) and not _TENSOR.fullmatch(name):
            raise SnapshotRefused(f"it contains {name!r}")
        if name in _FACTS:
            parts[name] = archive.read(full, 100)
            if not _FACTS[name].fullmatch(parts[name]):
                raise SnapshotRefused(f"it has {parts[name]!r} as {name}")
    for name in _CONFIGS:
        parts[name] = json.dumps(_checked_config(_json(archive, f"{folder}/{name}"))).encode()
    data = archive.read(f"{folder}/{_EXAMPLES}", _MOST_BYTES)
    _check_examples(data)
    try:
        examples = torch.load(io.BytesIO(data), weights_only=True)
    except Exception as error:
        reason = (str(error).splitlines() or [repr(error)])[0]
        raise SnapshotRefused(f"its example inputs cannot be read without running code: {reason}") from None
    # torch reads them again, and with pickle if that fails: so it reads what was just written.
    buffer = io.BytesIO()
    torch.save(examples, buffer)
    parts[_EXAMPLES] = buffer.getvalue()
    graph = _json(archive, f"{folder}/{_GRAPH}")
    if problem := next(_graph_problems(graph), ""):
        raise SnapshotRefused(problem)
    parts[_GRAPH] = json.dumps(graph).encode()
    return parts


def _check_examples(data: bytes) -> None:
    """Rejects a small file that needs much memory: entries that are compressed, and what `weights_only` permits besides
    tensors, such as a bytearray or a tensor of any size."""
    try:
        archive = PlainZip(io.BytesIO(data))
    except zipfile.BadZipFile as error:
        raise SnapshotRefused(f"its example inputs cannot be read without running code: {error}") from None
    with archive:
        [name] = [name for name in archive.sizes if name.endswith("/data.pkl")]
        for opcode, argument, _ in pickletools.genops(archive.read(name, _MOST_BYTES)):
            if opcode.name in _IMPORTS and not _EXAMPLE_PART.fullmatch(str(argument)):
                raise SnapshotRefused(f"its example inputs contain {argument or opcode.name!r}")


def _json(archive: PlainZip, name: str) -> dict[str, Any]:
    data = json.loads(archive.read(name, _MOST_BYTES).decode())
    if not isinstance(data, dict):
        raise ValueError(f"{name} is not an object")
    return data


def _checked_config(config: dict[str, Any]) -> dict[str, Any]:
    for name, each in config["config"].items():
        if each["use_pickle"] is not False or not re.fullmatch(r"(weight|tensor)_[0-9]+", each["path_name"]):
            raise SnapshotRefused(f"{name} is pickled")
    return config


def _graph_problems(graph: dict[str, Any]) -> Iterator[str]:
    for guard in graph.get("guards_code", []):
        if not _GUARD.fullmatch(_SIZE_QUERY.sub("s0", guard)):
            yield f"it evaluates {guard!r}"
    for key, value in _texts({key: value for key, value in graph.items() if key != "guards_code"}):
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
    if not match or match[2] in _OUTSIDE:
        return False
    packet = getattr(getattr(torch.ops, match[1]), match[2], None)
    return isinstance(getattr(packet, match[3], None), torch._ops.OpOverload)


def _is_plain_tree(spec: Any, are_arguments: bool) -> bool:
    """`are_arguments`: the keys of dictionaries become names of arguments."""
    keys = json.loads(spec["context"]) if spec["type"] and spec["context"] else None
    plain = spec["type"] in _TREES and (not are_arguments or all(_NAME.fullmatch(str(each)) for each in keys or ()))
    return plain and all(_is_plain_tree(each, are_arguments) for each in spec["children_spec"])


def _texts(data: Any) -> Iterator[tuple[str, str]]:
    """Every key of a graph, with its text if its value is one."""
    pending: list[tuple[str, Any]] = [("", data)]
    while pending:
        parent_key, node = pending.pop()
        for key, value in node.items() if isinstance(node, dict) else ((parent_key, each) for each in node):
            yield key, value if isinstance(value, str) else ""
            if isinstance(value, (dict, list)):
                pending.append((key, value))
