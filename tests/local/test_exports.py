"""The helpers that export models: what they accept and refuse, and the refusal of manipulated files."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.runtime import model_folder
from paceline.runtime.model_folder import CannotExport
from support.alone import alone

RAN: list[str] = []


def about(folder: Path) -> Any:
    return json.loads((folder / model_folder.ABOUT).read_text())


def test_the_target_is_set_by_paceline_export_or_by_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PACELINE_EXPORT_DIR", raising=False)
    with pytest.raises(CannotExport, match="run `paceline export RUN --to DIR`, or pass to=DIR"):
        model_folder.target()
    assert model_folder.target(tmp_path / "a" / "b").is_dir()
    (tmp_path / "a" / "full").touch()
    with pytest.raises(CannotExport, match="a is not empty"):
        model_folder.target(tmp_path / "a")
    monkeypatch.setenv("PACELINE_EXPORT_DIR", str(tmp_path / "c"))
    assert model_folder.target("elsewhere") == tmp_path / "c"


# ---- torch


class Evil:
    def __reduce__(self) -> Any:
        return RAN.append, ("pickle",)


def change_member(path: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    with zipfile.ZipFile(path) as file:
        parts = {each: file.read(each) for each in file.namelist()}
    parts[name] = change(parts.get(name, b""))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as file:
        for each, data in parts.items():
            file.writestr(each, data)


def replacing(old: str, new: str) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        assert old.encode() in data
        return data.replace(old.encode(), new.encode())

    return change


GRAPH = "model/models/model.json"
MANIPULATED = {
    "another function": (
        GRAPH,
        replacing("torch.ops.aten.linear.default", "torch.hub.load"),
        "has 'torch.hub.load' as target",
    ),
    "an operator that reads a file": (
        GRAPH,
        replacing("torch.ops.aten.linear.default", "torch.ops.aten.from_file.default"),
        "has 'torch.ops.aten.from_file.default' as target",
    ),
    "no operator": (
        GRAPH,
        replacing("torch.ops.aten.linear.default", "torch.ops.aten.__setattr__"),
        "has 'torch.ops.aten.__setattr__' as target",
    ),
    "a way to any object": (
        GRAPH,
        replacing("torch.ops.aten.linear.default", "_operator.attrgetter"),
        "has '_operator.attrgetter' as target",
    ),
    "an expression": (GRAPH, replacing("Symbol('s", "open(chr(47)) or Symbol('s"), "as expr_str"),
    "a guard": (GRAPH, replacing('"guards_code": [', '"guards_code": ["exit()", '), r"it evaluates 'exit\(\)"),
    "an argument": (GRAPH, replacing('"image', '"image=exit()'), "image=exit"),
    "pickled weights": (
        "model/data/weights/model_weights_config.json",
        replacing('"use_pickle": false', '"use_pickle": true'),
        "is pickled",
    ),
    "pickled examples": (
        "model/data/sample_inputs/model.pt",
        lambda _: pickle.dumps(Evil()),
        "its example inputs cannot be read without running code",
    ),
    "a library": ("model/data/aotinductor/model/a.so", lambda _: b"", "it contains 'data/aotinductor/model/a.so'"),
    "no graph": (GRAPH, lambda _: b"[", "not a model written by torch.export"),
}  # fmt: skip


@alone
def test_a_torch_model_is_loaded_without_running_code_that_came_with_it(tmp_path: Path) -> None:
    import torch

    import paceline.torch

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3, 2)

        def forward(self, image: Any, weight: Any) -> Any:
            return self.layer(image) * weight[:, None], weight.sum()

    model, examples = Model(), (torch.ones(2, 3), torch.ones(2))
    for wrong, message in {
        (torch.ones(2, 3), torch.tensor(1.0)): "the example of weight is not a batch",
        (torch.ones(2, 3), torch.ones(3)): "the examples of all inputs must be batches of the same size",
        (torch.ones(2, 3),): "forward cannot be called with these inputs: missing a required argument: 'weight'",
    }.items():
        with pytest.raises(CannotExport, match=message):
            paceline.torch.export(model, wrong, to=tmp_path / "wrong")
    folder = paceline.torch.export(model, examples, outputs=("scaled", "sum"), to=tmp_path / "model")
    assert about(folder)["signatures"]["serving_default"]["outputs"] == {
        "scaled": {"dtype": "float32", "shape": [-1, 2]}, "sum": {"dtype": "float32", "shape": []},
    }  # fmt: skip
    inputs = torch.rand(5, 3), torch.rand(5)
    outputs = paceline.torch.load(folder)(image=inputs[0], weight=inputs[1])
    assert all(map(torch.equal, outputs, model(*inputs)))
    path = folder / "model.pt2"
    original = path.read_bytes()
    for name, change, message in MANIPULATED.values():
        path.write_bytes(original)
        change_member(path, name, change)
        with pytest.raises(paceline.torch.SnapshotRefused, match=message):
            paceline.torch.load(folder)
    assert not RAN


# ---- TensorFlow


@alone
def test_a_tensorflow_module_is_exported_by_its_functions(tmp_path: Path) -> None:
    import tensorflow as tf

    import paceline.tensorflow

    class Model(tf.Module):
        def __init__(self) -> None:
            self.scale = tf.Variable(2.0)
            keys = tf.lookup.KeyValueTensorInitializer(["a", "b"], [1.0, 2.0])
            self.table = tf.lookup.StaticHashTable(keys, 0.0)
            self.unused = tf.Variable(tf.zeros([1000]))

        def __call__(self, words: Any) -> Any:
            return self.table.lookup(words) * self.scale

        @tf.function(input_signature=[tf.TensorSpec([None], tf.float32, "number")])
        def double(self, number: Any) -> Any:
            return {"doubled": number * self.scale}

    model = Model()
    with pytest.raises(CannotExport, match="the inputs of serving_default are unknown; pass inputs="):
        paceline.tensorflow.export(model, to=tmp_path / "wrong")
    with pytest.raises(CannotExport, match="the example of words is a single value"):
        paceline.tensorflow.export(model, {"words": "a"}, to=tmp_path / "wrong")
    folder = paceline.tensorflow.export(model, {"words": ["a"]}, to=tmp_path / "call")
    loaded = tf.saved_model.load(str(folder)).signatures["serving_default"]
    assert loaded(words=tf.constant(["b", "a", "c"]))["output_0"].numpy().tolist() == [4.0, 2.0, 0.0]
    assert about(folder)["signatures"]["serving_default"]["inputs"] == {"words": {"dtype": "string", "shape": [-1]}}
    assert sum(path.stat().st_size for path in (folder / "variables").iterdir()) < 4000  # without unused variables
    folder = paceline.tensorflow.export(model, signatures={"double": model.double}, to=tmp_path / "functions")
    signatures = about(folder)["signatures"]
    assert set(signatures) == {"double", "serving_default"} and signatures["double"] == signatures["serving_default"]
    assert signatures["double"]["outputs"] == {"doubled": {"dtype": "float32", "shape": [-1]}}


WORDS = ["one", "two", "three"]


@alone
def test_saved_models_of_many_kinds_are_served(tmp_path: Path) -> None:
    import keras
    import tensorflow as tf

    import paceline.tensorflow
    from paceline.serve import model_loading

    layers = keras.layers
    vocabulary = tmp_path / "vocabulary.txt"
    vocabulary.write_text("\n".join(WORDS))

    class Module(tf.Module):
        def __init__(self) -> None:
            file = tf.lookup.TextFileInitializer(
                str(vocabulary), tf.string, tf.lookup.TextFileIndex.WHOLE_LINE, tf.int64,
                tf.lookup.TextFileIndex.LINE_NUMBER,
            )  # fmt: skip
            self.static = tf.lookup.StaticHashTable(file, -1)
            self.mutable = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)
            self.call_count = tf.Variable(0)
            self.generator = tf.random.Generator.from_seed(1)

        def __call__(self, words: Any) -> Any:
            numbers = self.static.lookup(words)
            self.mutable.insert(numbers, tf.cast(numbers, tf.float32))
            self.call_count.assign_add(1)
            tf.debugging.assert_less(numbers, 10 + tf.cast(self.call_count, tf.int64))
            doubled = tf.map_fn(lambda each: each * 2, numbers)
            for _ in tf.range(3):
                doubled += 1
            drawn = self.generator.uniform([]) + tf.random.uniform([]) + tf.random.stateless_uniform([], (1, 2))
            return {"number": doubled, "noise": self.mutable.lookup(numbers) * drawn}

    def text(*stack: Any) -> Any:
        inputs = keras.Input((), dtype="string", name="given")
        outputs = inputs
        for layer in stack:
            outputs = layer(outputs)
        return keras.Model(inputs, outputs)

    def numbers(shape: tuple[int, ...], dtype: str, *stack: Any) -> Any:
        return keras.Sequential([keras.Input(shape, dtype=dtype, name="given"), *stack])

    attending = keras.Input((5, 4), name="given")
    models = {
        "recurrent": numbers(
            (7,), "int32", layers.Embedding(9, 4, mask_zero=True), layers.Dropout(0.5),
            layers.Bidirectional(layers.LSTM(3, return_sequences=True)), layers.GRU(3), layers.Dense(2, "softmax"),
        ),
        "images": numbers(
            (8, 8, 3), "float32", layers.RandomFlip(), layers.Rescaling(0.1), layers.Conv2D(4, 3),
            layers.MaxPooling2D(), layers.BatchNormalization(), layers.UpSampling2D(),
            layers.GlobalAveragePooling2D(), layers.Dense(2),
        ),
        "attention": keras.Model(
            attending, layers.LayerNormalization()(layers.MultiHeadAttention(2, 3)(attending, attending))
        ),
        "words": text(layers.StringLookup(vocabulary=WORDS), layers.Embedding(5, 2)),
        "lines": text(layers.TextVectorization(vocabulary=WORDS, output_sequence_length=4), layers.Embedding(6, 2)),
        "file": text(layers.StringLookup(vocabulary=str(vocabulary), output_mode="one_hot")),
        "buckets": numbers((2,), "float32", layers.Discretization([0.0, 1.0]), layers.CategoryEncoding(3)),
        "module": Module(),
    }  # fmt: skip
    for name, model in models.items():
        inputs = {"words": ["one", "four"]} if name == "module" else None
        folder = paceline.tensorflow.export(model, inputs, to=tmp_path / name)
        loaded = model_loading.load(folder, 1)
        ((key, spec),) = loaded.signatures["serving_default"].inputs.items()
        shape = (2, *(spec.shape or ())[1:])
        values = np.array([b"two", b"four"]) if spec.dtype == "string" else np.ones(shape, spec.dtype)
        outputs = loaded.calls["serving_default"]({key: values})
        assert outputs and all(len(each) == 2 for each in outputs.values()), name


# Each reads or writes a file, calls Python, or runs a program of another kind.
REFUSED = (
    "CSVDataset", "CacheDataset", "CreateSummaryFileWriter", "DebugIdentity", "DebugIdentityV3", "DecodeProtoV2",
    "EagerPyFunc", "EncodeProto", "FixedLengthRecordDatasetV2", "FixedLengthRecordReaderV2", "GenerateVocabRemapping",
    "ImmutableConst",
    "InitializeTableFromTextFile", "LMDBDataset", "LoadDataset", "MatchingFiles", "Print", "PrintV2", "PyFunc",
    "PyFuncStateless", "ReadFile", "RecordInput", "RemoteCall", "Restore", "RestoreSlice", "Save", "SaveDatasetV2",
    "SaveSlices", "SnapshotDatasetV2", "SqlDataset", "TFRecordDatasetV2", "TFRecordReaderV2", "TextLineDataset",
    "TextLineReaderV2", "WholeFileReaderV2", "WriteFile", "WriteScalarSummary", "XlaCallModule", "XlaLaunch",
    "NobodyKnowsThis",
)  # fmt: skip


@alone
def test_a_saved_model_that_accesses_anything_outside_itself_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tensorflow as tf
    from tensorflow.core.protobuf.saved_model_pb2 import SavedModel

    from paceline.serve import model_loading, saved_model_safety

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "secret").write_text("one\ntwo")
    secret = str(tmp_path / "secret")

    def saved(name: str, function: Any) -> str:
        module = tf.Module()
        table = tf.lookup.TextFileInitializer(
            secret, tf.string, tf.lookup.TextFileIndex.WHOLE_LINE, tf.int64, tf.lookup.TextFileIndex.LINE_NUMBER
        )
        module.table = tf.lookup.StaticHashTable(table, -1)
        spec = tf.TensorSpec([None], tf.float32, "x")
        module.function = tf.function(lambda x: {"y": function(module, x)}, input_signature=[spec])
        tf.saved_model.save(module, str(tmp_path / name), signatures=module.function)
        return saved_model_safety.find_problem(tmp_path / name)

    def prints(_: Any, x: Any) -> Any:
        tf.print(x, output_stream=f"file://{secret}")
        return x

    def restores(_: Any, x: Any) -> Any:
        return (
            x + tf.raw_ops.RestoreV2(prefix=secret, tensor_names=["a"], shape_and_slices=[""], dtypes=[tf.float32])[0]
        )

    def fills(module: Any, x: Any) -> Any:
        handle = module.table.resource_handle
        tf.raw_ops.InitializeTableFromTextFileV2(
            table_handle=handle, filename=secret, key_index=-2, value_index=-1, vocab_size=-1
        )
        return x

    allowed = "only operators for computation, variables and tables are allowed"
    assert saved("nothing", lambda module, x: x + tf.cast(module.table.size(), tf.float32)) == ""
    deep = tf.function(lambda x: tf.strings.to_number(tf.io.read_file(secret)) + x)
    assert saved(
        "deep", lambda _, x: tf.map_fn(lambda each: tf.cond(each > 0, lambda: deep(each), lambda: each), x)
    ) == (f"uses ReadFile: {allowed}")
    assert saved("prints", prints) == f"uses PrintV2: {allowed}"
    assert saved("python", lambda _, x: tf.numpy_function(np.sin, [x], tf.float32)) == f"uses PyFunc: {allowed}"
    lines = tf.function(lambda: tf.data.TextLineDataset(secret).reduce(0.0, lambda n, _: n + 1.0))
    assert "TextLineDataset" in saved("lines", lambda _, x: x + lines())
    assert saved("restores", restores) == f"uses RestoreV2 in a function that can be called: {allowed}"
    assert saved("fills", fills) == "fills a table from a file that is not one of its assets"

    path = tmp_path / "nothing" / "saved_model.pb"
    original = path.read_bytes()
    for op in REFUSED:
        model = SavedModel.FromString(original)
        model.meta_graphs[0].graph_def.library.function[0].node_def.add(name="more", op=op)
        path.write_bytes(model.SerializeToString())
        assert saved_model_safety.find_problem(path.parent) == f"uses {op}: {allowed}"
    model = SavedModel.FromString(original)
    model.meta_graphs[0].asset_file_def[0].filename = "../../secret"
    path.write_bytes(model.SerializeToString())
    assert saved_model_safety.find_problem(path.parent) == "has an asset at '../../secret', outside its folder"
    model.meta_graphs[0].ClearField("object_graph_def")
    path.write_bytes(model.SerializeToString())
    assert (
        saved_model_safety.find_problem(path.parent) == "is a SavedModel of TensorFlow 1: export it with TensorFlow 2"
    )
    path.write_bytes(original[: len(original) // 2])
    assert saved_model_safety.find_problem(path.parent) == "is damaged: its saved_model.pb cannot be read"

    # TensorFlow loads what was checked, whatever happens to the folder meanwhile.
    path.write_bytes(original)
    (tmp_path / "nothing" / "saved_model.pbtxt").write_text("not read")
    load, reads_files = tf.saved_model.load, (tmp_path / "deep" / "saved_model.pb").read_bytes()

    def load_later(folder: str) -> Any:
        path.write_bytes(reads_files)
        return load(folder)

    monkeypatch.setattr(tf.saved_model, "load", load_later)
    model = model_loading.load(tmp_path / "nothing", 1)
    (outputs,) = model.calls["serving_default"]({"x": np.ones(1, np.float32)}).values()
    assert outputs.tolist() == [3.0] and path.read_bytes() == reads_files
    assert not list(Path(tempfile.gettempdir()).glob("paceline-model-*"))

    # Nothing in the folder leads elsewhere, and nothing blocks.
    path.write_bytes(original)
    (asset,) = (tmp_path / "nothing" / "assets").iterdir()
    asset.unlink()
    for create, kind in ((asset.symlink_to, "a symbolic link"), (lambda _: os.mkfifo(asset), "not a file")):
        create(tmp_path / "secret")
        with pytest.raises(model_loading.CannotLoad, match=f"contains 'assets/{asset.name}', which is {kind}; copy"):
            model_loading.load(tmp_path / "nothing", 1)
        asset.unlink()


# ---- JAX


@alone
def test_a_jax_function_is_exported_with_any_tree_of_parameters(tmp_path: Path) -> None:
    import jax
    import jax.numpy as jnp

    import paceline.jax

    params = {"file": [jnp.ones((2, 2), jnp.bfloat16), 3], "key": jax.random.key(1), "half": np.float16(0.5)}

    def function(params: Any, image: Any) -> Any:
        weights, count = params["file"]
        drawn = jax.random.normal(params["key"], (2,))
        return image @ weights.astype(jnp.float32) * count + drawn, image.sum() * params["half"]

    with pytest.raises(CannotExport, match="the example of inputs is a single number"):
        paceline.jax.export(function, params, 1.0, to=tmp_path / "wrong")
    folder = paceline.jax.export(function, params, np.zeros((1, 2), np.float32), to=tmp_path / "model")
    image = np.arange(6, dtype=np.float32).reshape(3, 2)
    outputs, expected = paceline.jax.load(folder)({"inputs": image}), jax.jit(function)(params, image)
    assert all(np.array_equal(outputs[f"output_{number}"], each) for number, each in enumerate(expected))
    assert about(folder)["signatures"]["serving_default"] == {
        "inputs": {"inputs": {"dtype": "float32", "shape": [-1, 2]}},
        "outputs": {
            "output_0": {"dtype": "float32", "shape": [-1, 2]}, "output_1": {"dtype": "float32", "shape": []},
        },
    }  # fmt: skip
    # Without Paceline, as docs/models.md shows.
    exported = jax.export.deserialize(bytearray((folder / "model.stablehlo").read_bytes()))
    again = exported.call(dict(np.load(folder / "params.npz")), {"inputs": image})
    assert np.allclose(again["output_0"], expected[0])


@alone
def test_a_jax_model_is_loaded_only_if_it_computes_and_calls_nothing(tmp_path: Path) -> None:
    import jax
    import jax.numpy as jnp

    import paceline.jax

    def computes(weights: Any, image: Any) -> Any:
        whole = jnp.einsum("bij,bjk->bik", image, jnp.swapaxes(image, 1, 2)) + jnp.eye(3)
        drawn = jax.random.normal(jax.random.key(0), (3,)) * weights
        counted = jax.lax.fori_loop(0, 3, lambda n, value: jax.lax.cond(n > 1, lambda x: x + n, jnp.sin, value), whole)
        value = jnp.linalg.svd(whole)[1] + jnp.linalg.cholesky(whole).sum(1) + jnp.linalg.solve(whole, whole).sum(1)
        return {"found": value + drawn, "counted": counted, "top": jax.lax.top_k(jnp.sort(image), 2)[0]}

    example = np.ones((2, 3, 4), np.float32)
    folder = paceline.jax.export(computes, jnp.ones(3), example, to=tmp_path / "model")
    outputs = paceline.jax.load(folder)({"inputs": example})
    expected = jax.jit(computes)(jnp.ones(3), example)
    assert all(np.allclose(outputs[name], expected[name], atol=1e-4) for name in expected)

    # A call in a branch, exported by jax with its check disabled; the second file does not record that.
    foreign = jax.ffi.ffi_call("foreign", jax.ShapeDtypeStruct((2, 3, 4), np.float32))

    def calls(params: Any, inputs: Any) -> Any:
        return {"output_0": jax.lax.cond(params["w"] > 0, foreign, lambda x: x, inputs["inputs"])}

    off = jax.export.DisabledSafetyCheck.custom_call("foreign")
    with pytest.raises(ValueError, match="foreign"):
        paceline.jax.export(lambda _, x: foreign(x), {}, example, to=tmp_path / "refused")
    kinds = {"w": jax.ShapeDtypeStruct((), np.float32)}, {"inputs": jax.ShapeDtypeStruct((2, 3, 4), np.float32)}
    recorded = jax.export.export(jax.jit(calls), disabled_checks=[off])(*kinds)
    unrecorded = dataclasses.replace(recorded, disabled_safety_checks=())
    for exported, message in (
        (recorded, "it disables a check of jax.export: "),
        (unrecorded, "it calls 'foreign': only"),
    ):
        (folder / "model.stablehlo").write_bytes(exported.serialize())
        with pytest.raises(paceline.jax.SnapshotRefused, match=message):
            paceline.jax.load(folder)
