"""Subword vocabularies by byte-pair encoding: the same text gives the same vocabulary, on every machine."""

from __future__ import annotations

import heapq
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise

PAD, UNKNOWN, START, END = range(4)
SPECIAL = ["[pad]", "[unknown]", "[start]", "[end]"]
SPACE = "▁"  # starts every word that follows a space, so that text can be reassembled
WORDS = re.compile(rf"{SPACE}?\w+|{SPACE}?[^\w\s{SPACE}]+|{SPACE}")


class Vocabulary:
    """Text to numbers and back. A token's number is its index in `tokens`, which is all that has to be saved."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self._number = {token: number for number, token in enumerate(tokens)}
        self._encoded: dict[str, list[int]] = {}  # words that were already encoded

    def __len__(self) -> int:
        return len(self.tokens)

    def encode(self, text: str) -> list[int]:
        return [number for word in words(text) for number in self._word(word)]

    def decode(self, numbers: Iterable[int]) -> str:
        text = "".join(self.tokens[number] for number in numbers if number >= len(SPECIAL))
        return text.replace(SPACE, " ").strip()

    def _word(self, word: str) -> list[int]:
        if word not in self._encoded:
            parts = list(word)
            while len(parts) > 1:
                # Join the pair that became a token first, as when the vocabulary was built.
                joined = [self._number.get(left + right, len(self)) for left, right in pairwise(parts)]
                first = min(range(len(joined)), key=joined.__getitem__)
                if joined[first] == len(self):
                    break
                parts[first : first + 2] = [parts[first] + parts[first + 1]]
            self._encoded[word] = [self._number.get(part, UNKNOWN) for part in parts]
        return self._encoded[word]


def words(text: str) -> list[str]:
    return WORDS.findall("".join(SPACE + word for word in text.replace(SPACE, " ").split()))


def build(lines: Iterable[str], size: int, least: int = 2) -> Vocabulary:
    """At most `size` tokens: characters and pairs of tokens that occur at least `least` times."""
    counts = Counter(word for line in lines for word in words(line))
    characters: Counter[str] = Counter()
    for word, count in counts.items():
        for character in word:
            characters[character] += count
    common = sorted(characters.items(), key=lambda item: (-item[1], item[0]))
    tokens = [*SPECIAL, *(character for character, count in common if count >= least)][:size]
    for pair in _pairs(counts, least):
        if len(tokens) >= size:
            break
        tokens.append(pair)
    return Vocabulary(list(dict.fromkeys(tokens)))


def _pairs(counts: Counter[str], least: int) -> Iterator[str]:
    """Pairs of adjacent tokens, the most frequent first; each is one token from then on."""
    split = [list(word) for word in counts]
    times = list(counts.values())
    frequency: Counter[tuple[str, str]] = Counter()
    words_with: defaultdict[tuple[str, str], set[int]] = defaultdict(
        set
    )  # indices of words that contain it, or once did
    for index, parts in enumerate(split):
        for pair in pairwise(parts):
            frequency[pair] += times[index]
            words_with[pair].add(index)
    queue = [(-count, pair) for pair, count in frequency.items()]
    heapq.heapify(queue)
    while queue:
        count, pair = heapq.heappop(queue)
        if -count != frequency[pair]:  # outdated: the pair is in the queue again with its new count
            continue
        if -count < least:
            return
        yield "".join(pair)
        changed = set()
        for index in words_with.pop(pair):
            before = split[index]
            after = _join(before, pair)
            for sign, parts in ((-1, before), (1, after)):
                for each in pairwise(parts):
                    frequency[each] += sign * times[index]
                    changed.add(each)
            for each in pairwise(after):
                words_with[each].add(index)
            split[index] = after
        frequency[pair] = 0
        for each in changed - {pair}:
            if frequency[each]:
                heapq.heappush(queue, (-frequency[each], each))


def _join(parts: list[str], pair: tuple[str, str]) -> list[str]:
    joined, index = [], 0
    while index < len(parts):
        if (parts[index], *parts[index + 1 : index + 2]) == pair:
            joined.append("".join(pair))
            index += 2
        else:
            joined.append(parts[index])
            index += 1
    return joined
