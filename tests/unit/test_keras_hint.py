"""Which errors are those of code written for Keras 2; tests/local/test_keras_hint.py raises real ones."""

from __future__ import annotations

import pytest

from paceline.agent.tasks.keras_hint import is_for_keras_2
from paceline.agent.tasks.tracebacks import Raised

SAVING = "keras/src/saving/saving_api.py:106"
KERAS_2 = [
    ("ValueError", "Argument(s) not recognized: {'lr': 0.1}", "keras/src/optimizers/base_optimizer.py:84"),
    ("ValueError", "Invalid filepath extension for saving. Please add either a `.keras` extension", SAVING),
    ("ValueError", "The filename must end in `.weights.h5`. Received: filepath=ckpt/w", SAVING),
    ("ValueError", "File format not supported: filepath=x. Keras 3 only supports V3 `.keras` files", SAVING),
    ("ValueError", "A KerasTensor cannot be used as input to a TensorFlow function.", "keras/src/backend/x.py:1"),
    ("ImportError", "`keras.optimizers.legacy` is not supported in Keras 3.", "keras/src/optimizers/__init__.py:1"),
    ("TypeError", "Trainer.compile() got an unexpected keyword argument 'experimental_run_tf_function'", ""),
    ("AttributeError", "module 'keras._tf_keras.keras' has no attribute 'estimator'", ""),
    ("AttributeError", "'Adam' object has no attribute 'minimize'", ""),
    ("AttributeError", "'Sequential' object has no attribute 'fit_generator'", ""),
    ("ModuleNotFoundError", "No module named 'tensorflow.keras.layers.experimental'", ""),
]
OTHERS = [
    ("ValueError", "Argument(s) not recognized: {'lr': 0.1}", ""),  # not raised by Keras
    ("ValueError", "Input 0 of layer dense is incompatible with the layer", "keras/src/layers/input_spec.py:227"),
    ("RuntimeError", "Invalid filepath extension for saving", SAVING),
    ("AttributeError", "'Config' object has no attribute 'lr'", ""),
    ("TypeError", "train() got an unexpected keyword argument 'workers'", ""),
    ("ModuleNotFoundError", "No module named 'tensorflow_hub'", ""),
]


@pytest.mark.parametrize(("error", "text", "library"), KERAS_2)
def test_errors_of_code_for_keras_2(error: str, text: str, library: str) -> None:
    assert is_for_keras_2(Raised(error, text, "/code/train.py:3", library))


@pytest.mark.parametrize(("error", "text", "library"), OTHERS)
def test_other_errors(error: str, text: str, library: str) -> None:
    assert not is_for_keras_2(Raised(error, text, "/code/train.py:3", library))
