"""Translates texts with a snapshot: those given, or the lines of standard input. `paceline try RUN -- TEXT...`"""

import argparse
import sys

from restored import restored
from search import Search
from vocab import END

options = argparse.ArgumentParser(description=__doc__)
options.add_argument("texts", nargs="*", metavar="TEXT", help="without any, lines of standard input")
options.add_argument("--beam", type=int, default=4, help="texts that are followed at once; 1 is greedy")
options.add_argument("--letters", action="store_true", help="put spaces between letters, as cmudict_pairs.py does")
options.add_argument("--longest", type=int, default=128, help="tokens of a translation, at most")
given = options.parse_args()

model, source, target = restored()
search = Search(model)
for line in given.texts or sys.stdin:
    text = line.strip()
    if text:
        numbers = source.encode(" ".join(text) if given.letters else text)
        print(f"{text}\t{target.decode(search([*numbers, END], given.beam, given.longest))}", flush=True)
