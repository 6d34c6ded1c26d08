"""References to Paceline's variables, such as $PACELINE_RANK, in commands and `env`: they are expanded when a process
starts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

# What a job file may refer to. A process has only those that apply to it: an evaluator has no coordinator.
NAMES = (
    "PACELINE_RUN", "PACELINE_ROLE", "PACELINE_INDEX", "PACELINE_TASK", "PACELINE_LOCAL_INDEX",
    "PACELINE_LOCAL_WORLD_SIZE", "PACELINE_RANK", "PACELINE_WORLD_SIZE", "PACELINE_SHARE", "PACELINE_SHARE_OFFSET",
    "PACELINE_SHARE_TOTAL", "PACELINE_GENERATION", "PACELINE_SNAPSHOT_DIR", "PACELINE_SNAPSHOT_MEMORY_DIR",
    "PACELINE_RESTORE", "PACELINE_COMMITTED_DIR", "PACELINE_DATA",
    "PACELINE_FETCHED_DIR", "PACELINE_TENSORBOARD_DIR", "PACELINE_JAX_COORDINATOR", "PACELINE_INGEST_DIR",
    "PACELINE_EXPORT_DIR",
)  # fmt: skip
_REFERENCE = re.compile(r"\$(?P<escape>\$?)(?:\{(?P<braced>PACELINE_\w*)\}|(?P<plain>PACELINE_\w*))", re.ASCII)
_SHELLS = ("sh", "bash", "dash", "ash", "zsh", "ksh")


def expand(text: str, variables: Mapping[str, str]) -> str:
    """The text with the values of variables; a variable that the process does not have is empty.

    >>> expand("--rank=$PACELINE_RANK of ${PACELINE_WORLD_SIZE}, $HOME, $$PACELINE_RANK", {"PACELINE_RANK": "1"})
    '--rank=1 of , $HOME, $PACELINE_RANK'
    """

    def value(match: re.Match[str]) -> str:
        return match[0][1:] if match["escape"] else variables.get(match["braced"] or match["plain"], "")

    return _REFERENCE.sub(value, text) if "$" in text else text


def names_in(text: str) -> list[str]:
    """The names of the variables that the text refers to."""
    matches = _REFERENCE.finditer(text) if "$" in text else ()
    return [match["braced"] or match["plain"] for match in matches if not match["escape"]]


def is_changed(text: str) -> bool:
    """Whether expanding the text may change it."""
    return "$" in text and _REFERENCE.search(text) is not None


def expand_command(command: Sequence[str], variables: Mapping[str, str]) -> tuple[str, ...]:
    script = shell_script(command)
    return tuple(word if index == script else expand(word, variables) for index, word in enumerate(command))


def shell_script(command: Sequence[str]) -> int | None:
    """The index of a script that the command passes to a shell, which expands references itself.

    >>> shell_script(["bash", "-eo", "pipefail", "-c", "echo $PACELINE_RANK"]), shell_script(["bash", "train.sh"])
    (4, None)
    """
    if not command or command[0].rpartition("/")[2] not in _SHELLS:
        return None
    is_value = False  # of an option: as in -o pipefail
    for index, word in enumerate(command[1:-1], start=1):
        if re.fullmatch("-[a-zA-Z]*c", word):
            return index + 1
        if not is_value and not word.startswith(("-", "+")):
            return None
        is_value = re.fullmatch("[-+][a-zA-Z]*[oO]", word) is not None
    return None


def expand_env(env: Mapping[str, str], variables: Mapping[str, str]) -> dict[str, str]:
    """Without those that refer to a variable that the process does not have."""
    return {
        name: expand(value, variables)
        for name, value in env.items()
        if all(reference in variables for reference in names_in(value))
    }
