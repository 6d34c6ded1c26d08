"""What of a SavedModel would reach more than its own folder and what it is asked with.

Its graph is a program of TensorFlow's operators, and some of those read and write files, or call Python. TensorFlow
marks those that do more than compute as stateful; but not all that read files. So what is let through are stateless
operators but for those, and of stateful ones those that a model has for its variables, tables, loops and chance.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Not all of them stateful, and yet they read or write files, or run a program of another kind: data sets may take their
# data from files, protocol buffers their description.
_REACH = re.compile(
    r"_\w+|Abort|Copy(Host)?|Debug\w+|GenerateVocabRemapping|ImmutableConst|MlirPassthroughOp|"
    r"\w*(Dataset|File(?!name)|Iterator|Print|Proto|PyFunc|Reader|Xla)\w*"
)
# Stateful, and yet they reach nothing but the state of the model.
_OWN = re.compile(
    r"(VarHandle|ReadVariable|Assign(Add|Sub)?Variable|VarIsInitialized|VariableShape|DestroyResource|Resource)\w*|"
    r"DisableCopyOnRead|(Anonymous)?(Mutable)?(Dense)?HashTable\w*|LookupTable\w+|InitializeTableV2|"
    r"TensorArray\w*|Stack\w*|StatefulPartitionedCall|If|While|Case|Assert|CheckNumerics\w*|DeviceIndex|Empty|"
    r"GuaranteeConst|CudnnRNN\w*|Random\w+|Rng\w+|(Parameterized)?TruncatedNormal|Multinomial|NonDeterministicInts|"
    r"StatelessRandomGetAlg|Stateful(StandardNormal|Truncated|Uniform|RandomBinomial)\w*|SampleDistortedBoundingBox\w*"
)
# Every SavedModel has these, to be saved and restored by; TensorFlow itself restores it without them.
_SAVING = frozenset(("MergeV2Checkpoints", "RestoreV2", "SaveV2"))
_TABLE = "InitializeTableFromTextFileV2"  # fills a table from a file: from one of its assets, that is
_ALLOWED = "operators that compute, and those of variables and tables, are let through"


def wrong(folder: Path) -> str:
    """Why it is not to be loaded; found before anything of it runs, as loading runs what fills its tables."""
    from google.protobuf.message import DecodeError
    from tensorflow.core.protobuf.saved_model_pb2 import SavedModel

    try:
        graphs = SavedModel.FromString((folder / "saved_model.pb").read_bytes()).meta_graphs
    except DecodeError:
        return "is damaged: its saved_model.pb cannot be read"
    if len(graphs) != 1 or not graphs[0].HasField("object_graph_def"):
        return "is a SavedModel of TensorFlow 1: export it with TensorFlow 2"
    return next(_wrong(folder, graphs[0]), "")


def _wrong(folder: Path, model: Any) -> Iterator[str]:
    objects, library = model.object_graph_def, model.graph_def.library
    names = {each.signature.name for each in library.function}
    bodies = [model.graph_def.node, *(each.node_def for each in library.function)]
    if found := sorted({node.op for body in bodies for node in body if not _allowed(node.op, names)}):
        yield f"uses {', '.join(found)}: {_ALLOWED}"
    # What can be run are the functions of its objects, and what those name; not the graph that holds them all.
    named = {name for each in library.function for name in _named(each, names)}
    named |= {each.gradient_func for each in (*library.gradient, *library.registered_gradients)}
    named |= {each.signature.name for each in library.function if "api_implements" in each.attr}
    for each in library.function:
        name = each.signature.name
        saving = sorted({node.op for node in each.node_def} & _SAVING)
        if saving and (name in named or name in objects.concrete_functions):
            yield f"uses {', '.join(saving)} where it can be asked: {_ALLOWED}"
        for node in each.node_def:
            if node.op == _TABLE and (name in named or not _from_asset(node, each, objects)):
                yield "fills a table from a file that is none of its assets"
    assets = (folder / "assets").resolve()
    for each in model.asset_file_def:
        if assets not in (assets / each.filename).resolve().parents:
            yield f"has an asset at {each.filename!r}, outside of its folder"


def _allowed(op: str, functions: set[str]) -> bool:
    from tensorflow.python.framework import op_def_registry

    known = op_def_registry.get(op)
    if known is None:
        return op in functions
    if op in _SAVING or op == _TABLE:
        return True  # where: asked apart
    return not _REACH.fullmatch(op) and (not known.is_stateful or bool(_OWN.fullmatch(op)))


def _named(function: Any, functions: set[str]) -> Iterator[str]:
    """Other functions that it names anywhere, in whatever way."""
    yield from (node.op for node in function.node_def if node.op in functions)
    left = [function.attr, *(node.attr for node in function.node_def)]
    while left:
        for value in left.pop().values():
            given = (value.func, *value.list.func)
            left += [each.attr for each in given]
            names = (*(each.name for each in given), *(text.decode("latin-1") for text in (value.s, *value.list.s)))
            yield from (name for name in names if name in functions)


def _from_asset(node: Any, function: Any, objects: Any) -> bool:
    """Whether the file's name is among what the function is bound to, and is that of an asset."""
    bound = objects.concrete_functions[function.signature.name].bound_inputs
    arguments = [each.name for each in function.signature.input_arg][-len(bound) :] if bound else []
    index = dict(zip(arguments, bound, strict=False)).get(node.input[1])
    return index is not None and objects.nodes[index].WhichOneof("kind") == "asset"
