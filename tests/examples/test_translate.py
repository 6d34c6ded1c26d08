"""examples/translate: its accuracy, and that its workers train like a single process, although some are killed; then
its snapshot, tried and exported."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest

from support import example_runs
from support.example_runs import LIMIT_S, held, job, kill_held
from support.runs import Run, Starter

# Workers start ten times.
pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("translate")]

SMALL = ("--depth", 1, "--width", 32, "--inner", 64, "--heads", 2, "--dropout", 0.02, "--warm-up", 400, "--rate", 0.3)
OPTIONS = ("--batch", 64, "--epochs", 2, "--snapshot-every", 0.1)
# Held-out words and their pronunciations.
PRONUNCIATIONS = {"begs": "B EH G Z", "cabs": "K AE B Z", "dent": "D EH N T", "flan": "F L AE N", "fled": "F L EH D"}
SERVES = """
import json, pathlib, sys
import tensorflow as tf
from vocab import END, Vocabulary

vocabularies = json.loads(pathlib.Path(sys.argv[1], "vocabularies.json").read_text(encoding="utf-8"))
source, target = Vocabulary(vocabularies["source"]), Vocabulary(vocabularies["target"])
texts = tf.ragged.constant([[*source.encode(" ".join(word)), END] for word in sys.argv[2:]], tf.int32).to_tensor()
for text in tf.saved_model.load(sys.argv[1]).signatures["translate"](source=texts)["target"].numpy():
    print(target.decode(text))
"""  # all texts in one batch, although their lengths differ
EPOCH = re.compile(
    r"epoch (\d+): loss ([\d.]+), accuracy ([\d.]+)%; validation: loss ([\d.]+), accuracy ([\d.]+)% of (\d+)"
)


run_program = functools.partial(example_runs.done, "translate")


def train(start: Starter, home: Path, *options: object, hold: tuple[str, int], workers: int = 2, **fields: Any) -> Run:
    """The example's job, with a smaller model; its data is prepared only if `fields` contain `ingest`.

    `hold`: the task that waits to be killed, and after which step.
    """
    base = {name: value for name, value in job("translate").items() if name != "ingest"}
    base["command"] = held([*base["command"], *SMALL, *options], *hold)
    roles = {"worker": {"replicas": workers}}
    return start({**base, "roles": roles, "restart": {"warm": False}, **fields}, home=home)


@pytest.fixture(scope="module")
def word_pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of pairs: short words and their pronunciations."""
    pairs = tmp_path_factory.mktemp("words") / "words.tsv"
    assert run_program("cmudict_pairs.py", pairs, "--longest", 5).endswith(f" pairs in {pairs}\n")
    return pairs


def ingest(word_pairs: Path, tmp_path: Path) -> dict[str, Any]:
    return {"command": ["python", "prepare.py", str(word_pairs)], "to": str(tmp_path / "prepared")}


@pytest.mark.long
def test_it_learns_pronunciations_although_a_worker_is_killed_and_is_tried_and_exported(
    start: Starter, word_pairs: Path, tmp_path: Path
) -> None:
    run = train(start, tmp_path / "home", *OPTIONS, hold=("worker-0", 120), ingest=ingest(word_pairs, tmp_path))
    kill_held(run, "worker-0")
    # On a busy machine the error of its peer may be detected before the kill: the cause does not matter here.
    assert run.succeeds(LIMIT_S)["restarts"], run.story()
    *_, last_epoch = EPOCH.findall(run.log("worker-0"))
    assert float(last_epoch[4]) >= 80, run.log("worker-0")  # % of the phonemes of held-out words
    assert len(list((tmp_path / "prepared").glob("*/numbers.npz"))) == 1

    input_lines = "".join(f"{word}\n" for word in PRONUNCIATIONS)
    tried = run.call("try", run.folder.name, "--", "--letters", "--beam", "1", limit=LIMIT_S, input=input_lines)
    assert tried.returncode == 0, tried.stderr[-4000:]
    answers = dict(line.split("\t") for line in tried.stdout.splitlines())
    assert list(answers) == list(PRONUNCIATIONS)
    assert sum(answers[word] == pronunciation for word, pronunciation in PRONUNCIATIONS.items()) >= 4, answers

    exported = run.call("export", run.folder.name, "--to", str(tmp_path / "model"), limit=LIMIT_S)
    assert exported.returncode == 0, exported.stderr[-4000:]
    served = run_program("-c", SERVES, tmp_path / "model", *PRONUNCIATIONS)
    assert served.splitlines() == list(answers.values())


@pytest.mark.long
def test_workers_train_as_one_process_does(start: Starter, word_pairs: Path, tmp_path: Path) -> None:
    """Texts of all lengths, in unequal shares: three workers get 12 pairs per step, and 5 in the last step. One of them
    is killed; what is printed about an epoch is about all of it, although a part of it was repeated."""
    pairs = tmp_path / "pairs" / "few.tsv"
    pairs.parent.mkdir()
    pairs.write_text("".join(word_pairs.read_text().splitlines(keepends=True)[::180]))
    options = ("--epochs", 2, "--validation", 0.2, "--warm-up", 10, "--dropout", 0)
    run = train(
        start, tmp_path / "home", "--data", pairs.parent, *options, "--batch", 4, "--snapshot-every", 0.1,
        hold=("worker-2", 5), workers=3,
    )  # fmt: skip
    kill_held(run, "worker-2")
    alone = EPOCH.findall(run_program("train.py", "--data", pairs, *SMALL, *options, "--batch", 12))
    assert run.succeeds(LIMIT_S)["restarts"], run.story()
    together = EPOCH.findall(run.log("worker-0"))
    assert len(alone) == len(together) == 2
    for one, other in zip(alone, together, strict=True):
        assert [float(value) for value in one] == pytest.approx([float(value) for value in other], abs=2e-3), run
