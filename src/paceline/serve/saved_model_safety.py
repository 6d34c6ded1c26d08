"""Rejects SavedModels that could access more than their own folder and their inputs.

A SavedModel's graph is a program of TensorFlow operators, some of which read and write files or call Python. TensorFlow
marks operators with side effects as stateful, but not all that read files. So the check allows stateless operators
except those that access files, and stateful operators only for variables, tables, loops and random numbers.

TensorFlow gets a private copy of the files, which is checked: so nobody can replace a file between check and load, and
no link leads elsewhere.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.runtime.model_folder import private_folder

_GRAPH = "saved_model.pb"
_FOLDERS = ("assets", "variables")  # the other files are not needed to load a model

# Not all of these are stateful, but they read or write files or run other programs: data sets may read files, and
# protocol buffer operators read descriptors.
_EXTERNAL_ACCESS = re.compile(
    r"_\w+|Abort|Copy(Host)?|Debug\w+|GenerateVocabRemapping|ImmutableConst|MlirPassthroughOp|"
    r"\w*(Dataset|File(?!name)|Iterator|Print|Proto|PyFunc|Reader|Xla)\w*"
)
# Stateful, but they access only the model's own state.
_OWN_STATE = re.compile(
    r"(VarHandle|ReadVariable|Assign(Add|Sub)?Variable|VarIsInitialized|VariableShape|DestroyResource|Resource)\w*|"
    r"DisableCopyOnRead|(Anonymous)?(Mutable)?(Dense)?HashTable\w*|LookupTable\w+|InitializeTableV2|"
    r"TensorArray\w*|Stack\w*|StatefulPartitionedCall|If|While|Case|Assert|CheckNumerics\w*|DeviceIndex|Empty|"
    r"GuaranteeConst|CudnnRNN\w*|Random\w+|Rng\w+|(Parameterized)?TruncatedNormal|Multinomial|NonDeterministicInts|"
    r"StatelessRandomGetAlg|Stateful(StandardNormal|Truncated|Uniform|RandomBinomial)\w*|SampleDistortedBoundingBox\w*"
)
# Every SavedModel contains these to save and restore itself; TensorFlow restores it without them.
_SAVING = frozenset(("MergeV2Checkpoints", "RestoreV2", "SaveV2"))
_TABLE = "InitializeTableFromTextFileV2"  # fills a table from a file; allowed for the model's assets
_ALLOWED = "only operators for computation, variables and tables are allowed"


class LinkInModel(Exception):
    """The folder contains something other than files and folders."""


@contextmanager
def private_copy(folder: Path) -> Iterator[Path]:
    """A copy of the graph, the variables and the assets that only this user can change. Raises LinkInModel."""
    with private_folder() as private:
        top = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for name in (_GRAPH, *_FOLDERS):
                _copy(top, name, private / name, name)
        finally:
            os.close(top)
        yield private


def _copy(parent: int, name: str, to: Path, shown: str) -> None:
    """Copies a file or a folder, if it exists. `parent`: a descriptor, because the path could lead elsewhere later."""
    try:
        mode = os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        kind = "a symbolic link" if stat.S_ISLNK(mode) else "not a file"
        raise LinkInModel(f"contains {shown!r}, which is {kind}; copy the model with `cp -rL`")
    source = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=parent)
    try:
        if stat.S_ISDIR(os.fstat(source).st_mode):
            to.mkdir()
            for each in sorted(os.listdir(source)):  # noqa: PTH208
                _copy(source, each, to / each, f"{shown}/{each}")
        else:
            with open(source, "rb", closefd=False) as data, to.open("wb") as copy:
                shutil.copyfileobj(data, copy, 1 << 20)
    finally:
        os.close(source)


def find_problem(folder: Path) -> str:
    """Why the model must not be loaded; empty: it may be. Unlike loading, this check runs nothing of the model."""
    from google.protobuf.message import DecodeError
    from tensorflow.core.protobuf.saved_model_pb2 import SavedModel

    try:
        graphs = SavedModel.FromString((folder / _GRAPH).read_bytes()).meta_graphs
    except DecodeError:
        return "is damaged: its saved_model.pb cannot be read"
    if len(graphs) != 1 or not graphs[0].HasField("object_graph_def"):
        return "is a SavedModel of TensorFlow 1: export it with TensorFlow 2"
    return next(_problems(folder, graphs[0]), "")


def _problems(folder: Path, model: Any) -> Iterator[str]:
    objects, library = model.object_graph_def, model.graph_def.library
    names = {each.signature.name for each in library.function}
    bodies = [model.graph_def.node, *(each.node_def for each in library.function)]
    if forbidden := sorted({node.op for body in bodies for node in body if not _allowed(node.op, names)}):
        yield f"uses {', '.join(forbidden)}: {_ALLOWED}"
    # The functions of the model's objects, and those they name, can be called; the graph around them cannot.
    callable_names = {name for each in library.function for name in _named_functions(each, names)}
    callable_names |= {each.gradient_func for each in (*library.gradient, *library.registered_gradients)}
    callable_names |= {each.signature.name for each in library.function if "api_implements" in each.attr}
    for each in library.function:
        name = each.signature.name
        saving = sorted({node.op for node in each.node_def} & _SAVING)
        if saving and (name in callable_names or name in objects.concrete_functions):
            yield f"uses {', '.join(saving)} in a function that can be called: {_ALLOWED}"
        for node in each.node_def:
            if node.op == _TABLE and (name in callable_names or not _from_asset(node, each, objects)):
                yield "fills a table from a file that is not one of its assets"
    assets = (folder / "assets").resolve()
    for each in model.asset_file_def:
        if assets not in (assets / each.filename).resolve().parents:
            yield f"has an asset at {each.filename!r}, outside its folder"


def _allowed(op: str, functions: set[str]) -> bool:
    from tensorflow.python.framework import op_def_registry

    definition = op_def_registry.get(op)
    if definition is None:
        return op in functions
    if op in _SAVING or op == _TABLE:
        return True  # _problems checks where they are used
    return not _EXTERNAL_ACCESS.fullmatch(op) and (not definition.is_stateful or bool(_OWN_STATE.fullmatch(op)))


def _named_functions(function: Any, functions: set[str]) -> Iterator[str]:
    """Other functions that the function names, in operators or attributes."""
    yield from (node.op for node in function.node_def if node.op in functions)
    pending = [function.attr, *(node.attr for node in function.node_def)]
    while pending:
        for value in pending.pop().values():
            called = (value.func, *value.list.func)
            pending += [each.attr for each in called]
            names = (*(each.name for each in called), *(text.decode("latin-1") for text in (value.s, *value.list.s)))
            yield from (name for name in names if name in functions)


def _from_asset(node: Any, function: Any, objects: Any) -> bool:
    """Whether the file name is a bound input of the function that refers to an asset."""
    bound = objects.concrete_functions[function.signature.name].bound_inputs
    arguments = [each.name for each in function.signature.input_arg][-len(bound) :] if bound else []
    index = dict(zip(arguments, bound, strict=False)).get(node.input[1])
    return index is not None and objects.nodes[index].WhichOneof("kind") == "asset"
