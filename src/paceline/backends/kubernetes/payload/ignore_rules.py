"""Which files are not sent: .gitignore as git itself reads it, .pacelineignore, and built-in rules.

- `.gitignore` files apply at every level, including those of the repository above the folder.
- `.pacelineignore` has the same syntax and takes precedence over .gitignore, wherever the two files are. Its
  `!data/words.txt` also re-includes a file in a folder that .gitignore excludes; a folder that .pacelineignore excludes
  stays excluded, as in git.
- Keys, credentials, caches and the like (`SECRETS`, `NEVER`) are excluded whatever .gitignore says. Only a `!` line of
  .pacelineignore that ends in the exact name re-includes one, such as `!certs/ca.pem`: `!*` or `!*.json`, written
  to include other files, must not send a key by accident.

Patterns are translated here because they decide what leaves the machine, so they must be exact: pathspec 1.1.1 does not
support `[[:digit:]]` or `[\\]]`, so it would send files that git ignores, and it fails on `[z-a]`.
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
    IGNORED = "ignored"  # by .gitignore: a `!` line of .pacelineignore can still re-include files in it
    HIDDEN = "hidden"  # by a built-in rule: a `!` line with the exact name can re-include it
    CLOSED = "closed"  # by .pacelineignore


@dataclass(frozen=True)
class Pattern:
    """One line. Paths are bytes, as in git, decoded as latin-1, and relative to the folder of the ignore file."""

    regex: re.Pattern[str]
    whole: bool  # matches the whole path; otherwise only the last name
    folders_only: bool
    reincludes: bool
    literal: bool  # its last name has no wildcards
    parents: tuple[re.Pattern[str], ...]  # the folders above what it re-includes

    def matches(self, path: str, folder: bool) -> bool:
        if self.folders_only and not folder:
            return False
        return self.regex.fullmatch(path if self.whole else path.rpartition("/")[2]) is not None


Lines = tuple[str, tuple[Pattern, ...]]  # the path of an ignore file's folder, ending in / unless empty; its patterns


@dataclass(frozen=True)
class Rules:
    """The ignore files that apply in one folder, the deepest last."""

    git: tuple[Lines, ...] = ()
    own: tuple[Lines, ...] = ()

    def within(self, base: str, git: tuple[Pattern, ...], own: tuple[Pattern, ...]) -> Rules:
        """The rules in a folder that has its own ignore files."""
        if not git and not own:
            return self
        return Rules((*self.git, (base, git)), (*self.own, (base, own)))

    def fate(self, path: str, folder: bool, above: Fate, hidden: bool = False) -> Fate:
        """Whether `path` is sent, if `above` applies to its folder. `hidden`: a built-in rule applies to the path."""
        own = _last_match(self.own, path, folder)
        if own is not None and not own.reincludes:
            return Fate.CLOSED
        if hidden or above is Fate.HIDDEN or is_secret(path, folder) or _any(_NEVER, path, folder):
            return Fate.SENT if own is not None and own.literal else Fate.HIDDEN
        if own is not None:
            return Fate.SENT
        return Fate.IGNORED if above is Fate.IGNORED or self.ignored_by_git(path, folder) else Fate.SENT

    def ignored_by_git(self, path: str, folder: bool) -> bool:
        git = _last_match(self.git, path, folder)
        return git is not None and not git.reincludes

    def may_reinclude(self, path: str) -> bool:
        """Whether a pattern may re-include something in this folder, which itself is not sent."""
        return any(
            parent.fullmatch(path[len(base) :])
            for base, patterns in self.own
            for pattern in patterns
            for parent in pattern.parents
        )


def is_secret(path: str, folder: bool) -> bool:
    return _any(_SECRETS, path.lower(), folder)


def read(data: bytes) -> tuple[Pattern, ...]:
    """The patterns of a file. Lines that are invalid for git match nothing here either."""
    lines = data.removeprefix(b"\xef\xbb\xbf").decode("latin-1").split("\n")
    patterns = (_pattern(_trimmed(line.removesuffix("\r"))) for line in lines)
    return tuple(pattern for pattern in patterns if pattern is not None)


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
    """Without trailing spaces, except one that is escaped by a backslash."""
    stripped = line.rstrip(" ")
    backslashes = len(stripped) - len(stripped.rstrip("\\"))
    return stripped + " " if backslashes % 2 and len(stripped) < len(line) else stripped


def _pattern(line: str) -> Pattern | None:
    if not line or line.startswith("#"):
        return None
    reincludes = line.startswith("!")
    body = line[reincludes:]
    folders_only = body.endswith("/")
    body = body.removesuffix("/")
    whole = "/" in body
    body = body.removeprefix("/")
    regex = _regex(body)
    if regex is None:
        return None
    names = body.split("/")
    prefixes = ("/".join(names[:count]) for count in range(1, len(names))) if reincludes else ()
    parents = tuple(parent for parent in map(_regex, prefixes) if parent is not None)
    return Pattern(regex, whole, folders_only, reincludes, not set("*?[") & set(names[-1]), parents)


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
            bracket = _set(glob, at + 1)
            if bracket is None:
                return None
            chars, at = bracket
            parts.append("[" + "".join(map(re.escape, sorted(chars))) + "]" if chars else "(?!)")
        else:
            char, at = _unescaped(glob, at)
            if not char:
                return None
            parts.append(re.escape(char))
    return re.compile("".join(parts), re.DOTALL) if parts else None


def _set(glob: str, at: int) -> tuple[set[str], int] | None:
    """The characters of the bracket expression that opens before `at`, and its end; None: it has no end."""
    negated = glob[at : at + 1] in ("!", "^")
    at += negated
    start = at
    chars: set[str] = set()
    before = ""  # the possible start of a range
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
