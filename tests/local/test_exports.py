"""The helpers that export models: what they take, what they refuse, and what is refused of a file that was prepared."""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from alone import alone

from paceline.runtime import exporting
from paceline.runtime.exporting import CannotExport

pytestmark = pytest.mark.timeout(180)
RAN: list[str] = []


def about(folder: Path) -> Any:
    return json.loads((folder / exporting.ABOUT).read_text())


def test_where_to_is_said_by_paceline_export_or_by_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_EXPORT_DIR", raising=False)
    with pytest.raises(CannotExport, match="run this by `paceline export RUN --to DIR`, or give to=DIR"):
        exporting.target()
    assert exporting.target(tmp_path / "a" / "b").is_dir()
    (tmp_path / "a" / "full").touch()
    with pytest.raises(CannotExport, match="a is not empty"):
        exporting.target(tmp_path / "a")
    monkeypatch.setenv("PACELINE_EXPORT_DIR", str(tmp_path / "c"))
    assert exporting.target("elsewhere") == tmp_path / "c"


# ---- torch


class Evil:
    def __reduce__(self) -> Any:
        return RAN.append, ("pickle",)


def changed(path: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    with zipfile.ZipFile(path) as file:
        parts = {each: file.read(each) for each in file.namelist()}
    parts[name] = change(parts.get(name, b""))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as file:
        for each, data in parts.items():
            file.writestr(each, data)


def said(old: str, new: str) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        assert old.encode() in data
        return data.replace(old.encode(), new.encode())

    return change


GRAPH = "model/models/model.json"
PREPARED = {
    "another function": (
        GRAPH,
        said("torch.ops.aten.linear.default", "torch.hub.load"),
        "has 'torch.hub.load' as target",
    ),
    "an expression": (GRAPH, said("Symbol('s", "open(chr(47)) or Symbol('s"), "as expr_str"),
    "a guard": (GRAPH, said('"guards_code": [', '"guards_code": ["exit()", '), r"it evaluates 'exit\(\)"),
    "an argument": (GRAPH, said('"image', '"image=exit()'), "image=exit"),
    "pickled weights": (
        "model/data/weights/model_weights_config.json",
        said('"use_pickle": false', '"use_pickle": true'),
        "is pickled",
    ),
    "pickled examples": (
        "model/data/sample_inputs/model.pt",
        lambda _: pickle.dumps(Evil()),
        "its example inputs cannot be read without running code",
    ),
    "a library": ("model/data/aotinductor/model/a.so", lambda _: b"", "it holds 'data/aotinductor/model/a.so'"),
    "no graph": (GRAPH, lambda _: b"[", "is no model of torch.export"),
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
    for wrong, words in {
        (torch.ones(2, 3), torch.tensor(1.0)): "the example of weight is no batch",
        (torch.ones(2, 3), torch.ones(3)): "the examples of all inputs are batches of the same size",
        (torch.ones(2, 3),): "forward cannot be called with these inputs: missing a required argument: 'weight'",
    }.items():
        with pytest.raises(CannotExport, match=words):
            paceline.torch.export(model, wrong, to=tmp_path / "wrong")
    folder = paceline.torch.export(model, examples, outputs=("scaled", "sum"), to=tmp_path / "model")
    assert about(folder)["signatures"]["serving_default"]["outputs"] == {
        "scaled": {"dtype": "float32", "shape": [-1, 2]}, "sum": {"dtype": "float32", "shape": []},
    }  # fmt: skip
    given = torch.rand(5, 3), torch.rand(5)
    found = paceline.torch.load(folder)(image=given[0], weight=given[1])
    assert all(map(torch.equal, found, model(*given)))
    path = folder / "model.pt2"
    whole = path.read_bytes()
    for name, change, words in PREPARED.values():
        path.write_bytes(whole)
        changed(path, name, change)
        with pytest.raises(paceline.torch.SnapshotRefused, match=words):
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
    with pytest.raises(CannotExport, match="nothing says what serving_default takes: give inputs="):
        paceline.tensorflow.export(model, to=tmp_path / "wrong")
    with pytest.raises(CannotExport, match="the example of words is one number"):
        paceline.tensorflow.export(model, {"words": "a"}, to=tmp_path / "wrong")
    folder = paceline.tensorflow.export(model, {"words": ["a"]}, to=tmp_path / "call")
    loaded = tf.saved_model.load(str(folder)).signatures["serving_default"]
    assert loaded(words=tf.constant(["b", "a", "c"]))["output_0"].numpy().tolist() == [4.0, 2.0, 0.0]
    assert about(folder)["signatures"]["serving_default"]["inputs"] == {"words": {"dtype": "string", "shape": [-1]}}
    assert sum(path.stat().st_size for path in (folder / "variables").iterdir()) < 4000  # what it does not use
    folder = paceline.tensorflow.export(model, signatures={"double": model.double}, to=tmp_path / "functions")
    told = about(folder)["signatures"]
    assert set(told) == {"double", "serving_default"} and told["double"] == told["serving_default"]
    assert told["double"]["outputs"] == {"doubled": {"dtype": "float32", "shape": [-1]}}


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

    with pytest.raises(CannotExport, match="the example of inputs is one number"):
        paceline.jax.export(function, params, 1.0, to=tmp_path / "wrong")
    folder = paceline.jax.export(function, params, np.zeros((1, 2), np.float32), to=tmp_path / "model")
    image = np.arange(6, dtype=np.float32).reshape(3, 2)
    found, wanted = paceline.jax.load(folder)({"inputs": image}), jax.jit(function)(params, image)
    assert all(np.array_equal(found[f"output_{number}"], each) for number, each in enumerate(wanted))
    assert about(folder)["signatures"]["serving_default"] == {
        "inputs": {"inputs": {"dtype": "float32", "shape": [-1, 2]}},
        "outputs": {
            "output_0": {"dtype": "float32", "shape": [-1, 2]}, "output_1": {"dtype": "float32", "shape": []},
        },
    }  # fmt: skip
    # Without Paceline, as docs/models.md has it.
    made = jax.export.deserialize(bytearray((folder / "model.stablehlo").read_bytes()))
    again = made.call(dict(np.load(folder / "params.npz")), {"inputs": image})
    assert np.allclose(again["output_0"], wanted[0])
