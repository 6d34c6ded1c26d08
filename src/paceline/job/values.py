"""Validators for single fields: each takes a value from YAML, and returns the parsed value or raises BadValueError."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Callable, Mapping
from typing import Any

from paceline.job.errors import BadValueError, describe, join_names, visible
from paceline.job.similar_names import did_you_mean, nearest
from paceline.plan import NAME

NAME_LENGTH = 40

_NUMBER = r"(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
DURATION = rf"^(?=.)(?:{_NUMBER}d)?(?:{_NUMBER}h)?(?:{_NUMBER}m)?(?:{_NUMBER}s)?$"
MEMORY = rf"^{_NUMBER}(?:[KMGTP]i|[kKMGTP])?$"
CPU = rf"^{_NUMBER}m?$"
ENV_NAME = r"^[A-Za-z_][A-Za-z0-9_]*$"

MAX_SECONDS = 3650 * 86400  # longer than any run, and small enough for every timer
MIN_MEMORY = 2**20
MAX_MEMORY = 2**60
MAX_CPU = 100_000

DURATIONS = 'a duration such as "90s", "10m", "6h", "1h30m" or "2d", or a number of seconds'
MEMORIES = 'an amount such as "8Gi" or "512Mi" (1024), "8G" or "500M" (1000), or a number of bytes'
CPUS = 'a number of cores such as 4 or 0.5, or millicores such as "500m"'

_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_BYTES = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15} | {
    f"{unit}i": 2 ** (10 * power) for power, unit in enumerate("KMGTP", start=1)
}

SET_BY_PACELINE = frozenset(
    [
        "TF_CONFIG",
        "CLUSTER_CONFIG",
        "POD_NAME",
        "MASTER_ADDR",
        "MASTER_PORT",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "ROLE_NAME",
        "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_MAX_RESTARTS",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_USE_AGENT_STORE",
        "TORCHELASTIC_ERROR_FILE",
        "PET_NNODES",
        "PET_NODE_RANK",
        "PET_MASTER_ADDR",
        "PET_MASTER_PORT",
        "JAX_COORDINATOR_ADDRESS",
        "JAX_COORDINATOR_PORT",
        "JAX_NUM_PROCESSES",
        "JAX_PROCESS_ID",
        "JAX_LOCAL_DEVICE_IDS",
        "CUDA_VISIBLE_DEVICES",
    ]
)


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise BadValueError(f"must be a string, got {describe(value)}", hint=quoted(value))
    if not value.strip():
        raise BadValueError("is empty")
    return value


def whole(minimum: int, maximum: int | None = None) -> Callable[[Any], int]:
    """A validator for whole numbers from `minimum` to `maximum`."""
    allowed = f"a whole number of at least {minimum}"
    if maximum is not None:
        allowed = f"a whole number from {minimum} to {maximum}"

    def read(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            is_quoted_number = isinstance(value, str) and re.fullmatch("[0-9]{1,9}", value)
            raise BadValueError(
                f"must be a whole number, got {describe(value)}",
                "write it without quotes" if is_quoted_number else None,
                allowed,
            )
        if value < minimum:
            raise BadValueError(f"must be at least {minimum}, got {_short(value)}", allowed=allowed)
        if maximum is not None and value > maximum:
            raise BadValueError(f"must be at most {maximum}, got {_short(value)}", allowed=allowed)
        return value

    return read


def switch(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    hint = None
    if isinstance(value, str):
        hint = {"yes": "write true", "on": "write true", "no": "write false", "off": "write false"}.get(value.lower())
        hint = "write it without quotes" if value.lower() in ("true", "false") else hint
    raise BadValueError(f"must be true or false, got {describe(value)}", hint, "true, false")


def choice(names: tuple[str, ...], aliases: Mapping[str, str]) -> Callable[[Any], str]:
    """A validator for one of the names. `aliases` maps other common words to names, for hints."""

    def read(value: Any) -> str:
        if isinstance(value, str) and value in names:
            return value
        if not isinstance(value, str):
            raise BadValueError(f"must be a string, got {describe(value)}", allowed=join_names(names))
        meant = aliases.get(re.sub("[^a-z]", "", value[:60].lower()))
        hint = f'did you mean "{meant}"?' if meant else did_you_mean(value, names)
        raise BadValueError(f'"{visible(value, 60)}" is not a valid value', hint, join_names(names))

    return read


def duration(value: Any) -> float:
    """Seconds.

    >>> duration("1h30m"), duration(90), duration("0.5s")
    (5400.0, 90.0, 0.5)
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise BadValueError(f"must be a duration, got {describe(value)}", allowed=DURATIONS)
    if isinstance(value, str):
        parsed = parse_duration(value)
        if parsed is None:
            raise BadValueError(f'"{visible(value, 60)}" is not a duration', _similar_duration(value), DURATIONS)
        seconds = parsed
    else:
        seconds = _float(value)
    if math.isnan(seconds) or seconds <= 0:
        raise BadValueError(f"must be longer than 0 seconds, got {_as_written(value)}", allowed=DURATIONS)
    if seconds > MAX_SECONDS:
        raise BadValueError(f"must be at most 3650d, got {_as_written(value)}", allowed=DURATIONS)
    return seconds


def parse_duration(text: str) -> float | None:
    """Seconds of any number; None: the text is not a duration.

    >>> parse_duration("1h30m"), parse_duration("90")
    (5400.0, None)
    """
    if len(text) > 60 or not re.fullmatch(DURATION, text, re.ASCII):
        return None
    return sum(float(number) * _SECONDS[unit] for number, unit in re.findall(rf"({_NUMBER})([dhms])", text))


def memory(value: Any) -> int:
    """Bytes.

    >>> memory("8Gi"), memory("1.5G"), memory(2097152)
    (8589934592, 1500000000, 2097152)
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise BadValueError(f"must be an amount of memory, got {describe(value)}", allowed=MEMORIES)
    size: float = 0
    if isinstance(value, str):
        match = re.fullmatch(rf"({_NUMBER})([A-Za-z]*)", value) if len(value) <= 60 else None
        if match is None or match[2] not in _BYTES:
            raise BadValueError(f'"{visible(value, 60)}" is not an amount of memory', _similar_memory(value), MEMORIES)
        size = float(match[1]) * _BYTES[match[2]]
    else:
        size = _float(value)
    if size < MIN_MEMORY:
        hint = f'did you mean "{value}Gi"?' if re.fullmatch("[0-9]{1,4}", str(value)) and size > 0 else None
        raise BadValueError(f"must be at least 1Mi, got {_as_written(value)}", hint, MEMORIES)
    if size > MAX_MEMORY:
        raise BadValueError(f"must be at most 1024Pi, got {_as_written(value)}", allowed=MEMORIES)
    return int(size)


def cpu(value: Any) -> float:
    """Cores.

    >>> cpu("500m"), cpu(4), cpu("2.5")
    (0.5, 4.0, 2.5)
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise BadValueError(f"must be a number of cores, got {describe(value)}", allowed=CPUS)
    if isinstance(value, str):
        if len(value) > 60 or not re.fullmatch(CPU, value, re.ASCII):
            number = re.match(_NUMBER, value.strip())
            hint = f"did you mean {number[0]}?" if number else None
            raise BadValueError(f'"{visible(value, 60)}" is not a number of cores', hint, CPUS)
        cores = float(value.removesuffix("m")) / (1000 if value.endswith("m") else 1)
    else:
        cores = _float(value)
    if math.isnan(cores) or cores < 0.001:
        raise BadValueError(f"must be at least 0.001, got {_as_written(value)}", allowed=CPUS)
    if cores > MAX_CPU:
        raise BadValueError(f"must be at most {MAX_CPU}, got {_as_written(value)}", allowed=CPUS)
    return cores


def name(value: Any) -> str:
    return label(value, NAME, NAME_LENGTH, "a lowercase letter, then lowercase letters, digits and -")


def env_name(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(ENV_NAME, value) or len(value) > 255:
        slug = re.sub("[^A-Za-z0-9_]+", "_", str(value))[:60].strip("_")
        hint = f'did you mean "{slug}"?' if re.fullmatch(ENV_NAME, slug) and slug != value else None
        raise BadValueError(
            f'"{visible(str(value), 60)}" is not a valid variable name',
            hint,
            "letters, digits and _, not starting with a digit",
        )
    if value in SET_BY_PACELINE or value.startswith("PACELINE_"):
        hint = "use gpus to set the number of GPUs" if value == "CUDA_VISIBLE_DEVICES" else "remove it"
        raise BadValueError(f'"{value}" is set by Paceline for each task', hint)
    return value


def env_value(value: Any) -> str:
    if not isinstance(value, str):
        raise BadValueError(f"must be a string, got {describe(value)}", hint=quoted(value))
    return value


def argument(value: Any) -> str:
    if not isinstance(value, str):
        raise BadValueError(f"must be a string, got {describe(value)}", hint=quoted(value))
    if not value:
        raise BadValueError("is empty")
    return value


def arguments(value: Any) -> Any:
    """A validator that runs before the items of a command are read, and checks that the command is a list."""
    if isinstance(value, str):
        try:
            parts = shlex.split(value)
        except ValueError:
            parts = value.split()
        items = join_names(
            [word if re.fullmatch("[A-Za-z./_-][A-Za-z0-9./_=-]*", word) else json.dumps(word) for word in parts]
        )
        hint = f"write [{items}]" if parts and len(items) <= 200 else None
        raise BadValueError("must be a list of arguments, got a single string", hint)
    if not isinstance(value, list):
        raise BadValueError(f"must be a list of arguments, got {describe(value)}", "write [python, train.py]")
    if not value:
        raise BadValueError("is empty", "write what to run, such as [python, train.py]")
    return value


def pools(value: Any) -> Any:
    """One host pool or a list of them, as a list."""
    if isinstance(value, dict):
        return [value]
    if not isinstance(value, list):
        is_count = isinstance(value, int) and not isinstance(value, bool)
        hint = f"write {{replicas: {_short(value)}}}" if is_count else None
        raise BadValueError(f"must be a mapping or a list of mappings, got {describe(value)}", hint)
    if not value:
        raise BadValueError("is an empty list: a role needs at least one host pool")
    return value


def slug(text: str, max_length: int = NAME_LENGTH) -> str | None:
    """The text as a valid name, or None if no valid character remains.

    >>> slug("My Job_2")
    'my-job-2'
    """
    lowered = re.sub("[^a-z0-9]+", "-", text[:200].lower())
    return re.sub("^[^a-z]+", "", lowered)[:max_length].strip("-") or None


def quoted(value: Any) -> str | None:
    """The hint for a string that needs quotes."""
    return 'write "{text}"' if isinstance(value, bool | int | float) else None


def label(value: Any, pattern: str, max_length: int, allowed: str) -> str:
    """A name that matches the pattern."""
    allowed = f"{allowed}, at most {max_length} characters"
    if not isinstance(value, str):
        raise BadValueError(f"must be a string, got {describe(value)}", quoted(value), allowed)
    if len(value) > max_length:
        raise BadValueError(f'"{visible(value, 60)}" is {len(value)} characters long', allowed=allowed)
    if not re.fullmatch(pattern, value):
        near = slug(value, max_length)
        hint = f'did you mean "{near}"?' if near else None
        raise BadValueError(f'"{visible(value)}" is not a valid name', hint, allowed)
    return value


def _similar_duration(value: str) -> str | None:
    folded = re.sub(r"\s+", "", value[:60].lower())
    for word, unit in (("day", "d"), ("hour", "h"), ("hr", "h"), ("min", "m"), ("sec", "s")):
        folded = re.sub(rf"{word}[a-z]*", unit, folded)
    clock = re.fullmatch("([0-9]{1,3}):([0-9]{2})(?::([0-9]{2}))?", folded)
    if clock:
        folded = f"{int(clock[1])}h{int(clock[2])}m" + (f"{int(clock[3])}s" if clock[3] else "")
    if re.fullmatch("[0-9]+", folded):
        return "write the number without quotes, or add a unit"
    return f'did you mean "{folded}"?' if re.fullmatch(DURATION, folded, re.ASCII) and folded != value else None


def _similar_memory(value: str) -> str | None:
    match = re.fullmatch(rf"\s*({_NUMBER})\s*([A-Za-z]*)\s*[A-Za-z]*\s*", value[:60])
    if match is None:
        return None
    unit = match[2][:1].upper() + ("i" if match[2][1:2] == "i" else "")
    return f'did you mean "{match[1]}{unit}"?' if unit and nearest(unit, _BYTES) else None


def _as_written(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else _short(value)


def _short(value: Any) -> str:
    return visible(str(value), 40)


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf
