"""Which files stay at home: .gitignore as git itself reads it, .pacelineignore, and what is never sent unasked.

- `.gitignore` files count at every level, those of the repository above the folder too.
- `.pacelineignore` has the same syntax and wins over .gitignore, wherever the two stand. Its `!data/words.txt` also
  reaches into a folder that .gitignore leaves out; one that .pacelineignore leaves out is closed for good, as in git.
- Keys, credentials, caches and the like (`SECRETS`, `NEVER`) are left out whatever .gitignore says. What brings one
  back is a `!` line of .pacelineignore that ends in its very name, as `!certs/ca.pem` does: `!*` or `!*.json` say what
  a program needs, not that a key among it may leave this machine.

Patterns are translated here because they decide what leaves the machine, and nearly right is wrong: pathspec 1.1.1
does not know `[[:digit:]]` or `[\\]]`, so it would send what git ignores, and it fails at `[z-a]`.
"""

from __future__ import annotations

import enum
import re
import string
from collections.abc import Sequence
from dataclasses import dataclass

SECRETS = (
    ".env", ".env.*", ".envrc", ".netrc", "_netrc", ".pypirc", ".git-credentials", ".dockercfg",
    "*.pem", "*.key", "*.p12", "*.pfx", "*.ppk", "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*",
    "*credentials*.json", "service-account*.json", "service_account*.json",
    "kubeconfig", "kubeconfig.*", "*.kubeconfig",
    ".aws/", ".ssh/", ".kube/", ".gnupg/", ".azure/", ".docker/", "**/.config/gcloud",
)  # fmt: skip
NEVER = (
    ".git", "__pycache__", "*.pyc", "node_modules", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".DS_Store",
    ".paceline-partial",
)  # fmt: skip

_CLASS = re.compile(r"\[:([^\]]*):\]")
_BYTES = {chr(number) for number in range(256)}
_ASCII = {chr(number) for number in range(128)}
_CLASSES = {
    "alnum": {*string.ascii_letters, *string.digits},
    "alpha": {*string.ascii_letters},
    "blank": {" ", "\t"},
    "cntrl": {char for char in _ASCII if ord(char) < 32 or ord(char) == 127},
    "digit": {*string.digits},
    "graph": {char for char in _ASCII if 32 < ord(char) < 127},
    "lower": {*string.ascii_lowercase},
    "print": {char for char in _ASCII if 32 <= ord(char) < 127},
    "punct": {*string.punctuation},
    "space": {*string.whitespace},
    "upper": {*string.ascii_uppercase},
    "xdigit": {*string.hexdigits},
}


class Fate(enum.Enum):
    SENT = "sent"
    IGNORED = "ignored"  # by .gitignore: a `!` line of .pacelineignore may still reach into it
    HIDDEN = "hidden"  # never sent unasked: as above, by its very name
    CLOSED = "closed"  # by .pacelineignore itself


@dataclass(frozen=True)
class Pattern:
    """One line. Paths are those of git: bytes, here as characters (latin-1), below the folder of the file."""

    regex: re.Pattern[str]
    whole: bool  # compared with the whole path, else with the last name alone
    folders_only: bool
    brings_back: bool
    literal: bool  # its last name has no wildcards
    way: tuple[re.Pattern[str], ...]  # the folders that lead to what it brings back

    def matches(self, path: str, folder: bool) -> bool:
        if self.folders_only and not folder:
            return False
        return self.regex.fullmatch(path if self.whole else path.rpartition("/")[2]) is not None


Lines = tuple[str, tuple[Pattern, ...]]  # the path of a file's folder, ending in / where it is not empty; its patterns


@dataclass(frozen=True)
class Rules:
    """The ignore files that count in one folder, the deepest last."""

    git: tuple[Lines, ...] = ()
    own: tuple[Lines, ...] = ()

    def within(self, base: str, git: tuple[Pattern, ...], own: tuple[Pattern, ...]) -> Rules:
        """Those of a folder with files of its own."""
        if not git and not own:
            return self
        return Rules((*self.git, (base, git)), (*self.own, (base, own)))

    def fate(self, path: str, folder: bool, above: Fate, hidden: bool = False) -> Fate:
        """What becomes of `path` in a folder whose own fate is `above`; `hidden`: known as never to be sent unasked."""
        own = _last_match(self.own, path, folder)
        if own is not None and not own.brings_back:
            return Fate.CLOSED
        if hidden or above is Fate.HIDDEN or is_secret(path, folder) or _any(_NEVER, path, folder):
            return Fate.SENT if own is not None and own.literal else Fate.HIDDEN
        if own is not None:
            return Fate.SENT
        return Fate.IGNORED if above is Fate.IGNORED or self.ignored_by_git(path, folder) else Fate.SENT

    def ignored_by_git(self, path: str, folder: bool) -> bool:
        git = _last_match(self.git, path, folder)
        return git is not None and not git.brings_back

    def reach(self, path: str) -> bool:
        """Whether something in this folder, which itself is not sent, is brought back by its path."""
        return any(
            way.fullmatch(path[len(base) :])
            for base, patterns in self.own
            for pattern in patterns
            for way in pattern.way
        )


def is_secret(path: str, folder: bool) -> bool:
    return _any(_SECRETS, path.lower(), folder)


def read(data: bytes) -> tuple[Pattern, ...]:
    """The patterns of a file. Lines that git can make nothing of match nothing here either."""
    lines = data.removeprefix(b"\xef\xbb\xbf").decode("latin-1").split("\n")
    found = (_pattern(_trimmed(line.removesuffix("\r"))) for line in lines)
    return tuple(pattern for pattern in found if pattern is not None)


def _last_match(files: Sequence[Lines], path: str, folder: bool) -> Pattern | None:
    for base, patterns in reversed(files):
        inside = path[len(base) :]
        for pattern in reversed(patterns):
            if pattern.matches(inside, folder):
                return pattern
    return None


def _any(patterns: Sequence[Pattern], path: str, folder: bool) -> bool:
    return any(pattern.matches(path, folder) for pattern in patterns)


def _trimmed(line: str) -> str:
    """Without spaces at its end, but for one behind a backslash."""
    kept = line.rstrip(" ")
    backslashes = len(kept) - len(kept.rstrip("\\"))
    return kept + " " if backslashes % 2 and len(kept) < len(line) else kept


def _pattern(line: str) -> Pattern | None:
    if not line or line.startswith("#"):
        return None
    brings_back = line.startswith("!")
    body = line[brings_back:]
    folders_only = body.endswith("/")
    body = body.removesuffix("/")
    whole = "/" in body
    body = body.removeprefix("/")
    regex = _regex(body)
    if regex is None:
        return None
    names = body.split("/")
    prefixes = ("/".join(names[:count]) for count in range(1, len(names))) if brings_back else ()
    way = tuple(found for found in map(_regex, prefixes) if found is not None)
    return Pattern(regex, whole, folders_only, brings_back, not set("*?[") & set(names[-1]), way)


def _regex(glob: str) -> re.Pattern[str] | None:
    """git's wildmatch as a regular expression; None: it matches nothing."""
    parts: list[str] = []
    at = 0
    while at < len(glob):
        char = glob[at]
        if char == "*":
            stars = len(glob[at:]) - len(glob[at:].lstrip("*"))
            after = glob[at + stars : at + stars + 1]
            alone = stars > 1 and glob[at - 1 : at] in ("", "/") and after in ("", "/")
            if alone and after:
                parts.append("(?:.*/)?")
                at += 1
            else:
                parts.append(".*" if alone else "[^/]*")
            at += stars
        elif char == "?":
            parts.append("[^/]")
            at += 1
        elif char == "[":
            found = _set(glob, at + 1)
            if found is None:
                return None
            chars, at = found
            parts.append("[" + "".join(map(re.escape, sorted(chars))) + "]" if chars else "(?!)")
        else:
            char, at = _unescaped(glob, at)
            if not char:
                return None
            parts.append(re.escape(char))
    return re.compile("".join(parts), re.DOTALL) if parts else None


def _set(glob: str, at: int) -> tuple[set[str], int] | None:
    """The characters of the bracket expression that opens before `at`, and where it ends; None where it does not."""
    negated = glob[at : at + 1] in ("!", "^")
    at += negated
    start = at
    chars: set[str] = set()
    before = ""  # what a range may begin with
    while at == start or glob[at : at + 1] != "]":
        named = _CLASS.match(glob, at)
        if named:
            if named[1] not in _CLASSES:
                return None
            chars |= _CLASSES[named[1]]
            before, at = "", named.end()
            continue
        if glob[at : at + 1] == "-" and before and glob[at + 1 : at + 2] not in ("", "]"):
            char, at = _unescaped(glob, at + 1)
            chars |= {other for other in _BYTES if before <= other <= char}
            before = ""
        else:
            char, at = _unescaped(glob, at)
            chars.add(char)
            before = char
        if not char:
            return None
    return (_BYTES - chars if negated else chars) - {"/"}, at + 1


def _unescaped(glob: str, at: int) -> tuple[str, int]:
    at += glob[at : at + 1] == "\\"
    return glob[at : at + 1], at + 1


_SECRETS = read("\n".join(SECRETS).encode())
_NEVER = read("\n".join(NEVER).encode())
