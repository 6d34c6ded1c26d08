"""Translates texts with a snapshot: arguments, or lines of standard input. `paceline try RUN -- TEXT...`"""

import argparse
import sys

from restored import restored
from search import Search
from vocab import END

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("texts", nargs="*", metavar="TEXT", help="default: lines of standard input")
parser.add_argument("--beam", type=int, default=4, help="number of candidate texts; 1 is greedy")
parser.add_argument("--letters", action="store_true", help="put spaces between letters, as cmudict_pairs.py does")
parser.add_argument("--longest", type=int, default=128, help="maximum number of tokens of a translation")
args = parser.parse_args()

model, source, target = restored()
search = Search(model)
for line in args.texts or sys.stdin:
    text = line.strip()
    if text:
        numbers = source.encode(" ".join(text) if args.letters else text)
        print(f"{text}\t{target.decode(search([*numbers, END], args.beam, args.longest))}", flush=True)
