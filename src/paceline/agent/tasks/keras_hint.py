"""Recognizes errors that programs written for Keras 2 raise under Keras 3, as far as the error itself shows it."""

from __future__ import annotations

import re

from paceline.agent.tasks.tracebacks import Raised

HINT = "written for Keras 2? set tensorflow: {keras: legacy}"

# Errors that Keras itself raises: its frame is the innermost.
_IN_KERAS = re.compile(
    r"in Keras 3|Keras 3 only supports|must end in `\.(?:keras|weights\.h5)`|Invalid filepath extension for saving|"
    r"The following argument\(s\) are not supported|Argument\(s\) not recognized|"
    r"Unrecognized keyword arguments passed to|"
    r"A KerasTensor cannot be used as input to a TensorFlow function|reduction=auto|`add_loss\(\)` can only be called"
)
_OPTIMIZERS = "SGD|Adam|AdamW|RMSprop|Adagrad|Adadelta|Adafactor|Adamax|Nadam|Ftrl|Lion|LossScaleOptimizer"
# Errors of Python about names that Keras 3 no longer has: the innermost frame may be in the program.
_ANYWHERE = {
    "AttributeError": re.compile(
        r"module '(?:keras|tensorflow\.keras)[\w.]*' has no attribute|module 'tensorflow' has no attribute 'estimator'|"
        rf"'(?:{_OPTIMIZERS})' object has no attribute '(?:minimize|lr|get_weights|weights|_\w+)'|"
        r"object has no attribute '(?:(?:fit|evaluate|predict)_generator|predict_(?:classes|proba)|reset_states|"
        r"get_(?:in|out)put(?:_shape)?_at|_set_hyper|_get_hyper|add_metric|_make_train_function)'"
    ),
    "TypeError": re.compile(
        r"\b(?:Trainer|TensorFlowTrainer|Model|ModelCheckpoint|TensorBoard|BaseOptimizer)\.\w+\(\) "
        r"got an unexpected keyword argument|"
        r"unexpected keyword argument '(?:experimental_run_tf_function|experimental_aggregate_gradients)'"
    ),
    "ImportError": re.compile(r"cannot import name '\w+' from '(?:tensorflow\.)?keras\b"),
    "ModuleNotFoundError": re.compile(r"No module named 'tensorflow\.(?:keras|estimator)\b"),
}


def is_for_keras_2(raised: Raised) -> bool:
    """Whether the program that raised this was probably written for Keras 2."""
    is_in_keras = "keras/src/" in (raised.library or raised.place)
    if is_in_keras and raised.type in ("ValueError", "ImportError") and _IN_KERAS.search(raised.text):
        return True
    pattern = _ANYWHERE.get(raised.type)
    return pattern is not None and pattern.search(raised.text) is not None
