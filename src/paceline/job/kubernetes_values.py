"""Validators for the fields for clusters. They reject what a cluster would reject, before anything runs."""

from __future__ import annotations

import math
import posixpath
import re
from collections.abc import Callable
from typing import Any

from paceline.job.errors import BadValueError, describe, join_names, visible
from paceline.job.similar_names import did_you_mean, nearest
from paceline.job.values import ENV_NAME, label, quoted, text, whole

LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
LABEL_LENGTH = 63
SUBDOMAIN = rf"{LABEL}(\.{LABEL})*"
SUBDOMAIN_LENGTH = 253
_PART = r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?"
_DOMAIN = rf"(?=[^/]{{1,{SUBDOMAIN_LENGTH}}}/){SUBDOMAIN}/"
_LAST = rf"(?=[^/]{{1,{LABEL_LENGTH}}}$){_PART}"
LABEL_KEY = rf"^({_DOMAIN})?{_LAST}$"
LABEL_VALUE = rf"^({_PART})?$"
RESOURCE = rf"^(?!.*kubernetes\.io/)(?!requests\.){_DOMAIN}{_LAST}$"
FILE = r"^(?!\.\.|\.$)[-._a-zA-Z0-9]+$"
FOLDER = r"^(?!.*/\.\.(/|$))(?!(/\.?)*$)/[^:]*$"
FOLDER_LENGTH = 4096
MAX_USER = 2**31 - 1
AFFINITIES = ("nodeAffinity", "podAffinity", "podAntiAffinity")
OWN = "/paceline"  # the folder in containers that is reserved for Paceline

_NAMES = f"lowercase letters, digits, - and ., at most {SUBDOMAIN_LENGTH} characters"
_FILES = f"letters, digits, -, _ and ., at most {SUBDOMAIN_LENGTH} characters"
_PREFIXES = "letters, digits and _, not starting with a digit"
_KEY_LENGTH = SUBDOMAIN_LENGTH + 1 + LABEL_LENGTH
_USERS = f"a whole number from 1 to {MAX_USER}, or cluster"
_LABELS = 'a name such as "tier" or "example.com/tier", of letters, digits, -, _ and .'
_LABEL_VALUES = f"letters, digits, -, _ and ., at most {LABEL_LENGTH} characters"
_RESOURCES = 'a resource with its domain, such as "nvidia.com/gpu"'
_KNOWN_RESOURCES = ("nvidia.com/gpu", "amd.com/gpu", "gpu.intel.com/i915", "gpu.intel.com/xe", "habana.ai/gaudi")
_FOLDERS = 'an absolute path such as "/data"'
_SET_BY_PACELINE = {f"app.kubernetes.io/{name}" for name in ("name", "instance", "component", "managed-by")}
WHOLE_POD = {
    "spec": "remove it, and write its fields here",
    "metadata": "use kubernetes.labels and kubernetes.annotations",
    **dict.fromkeys(("apiVersion", "kind", "status"), "remove it"),
}
_LARGEST = 2**63


def namespace(value: Any) -> str:
    return label(value, LABEL, LABEL_LENGTH, "lowercase letters, digits and -")


def volume_name(value: Any) -> str:
    name = label(value, LABEL, LABEL_LENGTH, "lowercase letters, digits and -")
    if name.startswith("paceline-"):
        raise BadValueError(f'"{name}" is reserved: names that start with "paceline-" belong to Paceline')
    return name


def image(value: Any) -> str:
    text(value)
    if re.search(r"\s", value):
        raise BadValueError(f'"{visible(value, 60)}" is not a valid image name: it contains a space')
    return str(value)


def object_name(value: Any) -> str:
    """The name of a Secret, a claim or another object."""
    string = _string(value, SUBDOMAIN_LENGTH, _NAMES, quoted(value))
    if not re.fullmatch(SUBDOMAIN, string):
        parts = re.sub("[^a-z0-9.]+", "-", string.lower()).split(".")
        near = ".".join(filter(None, (part.strip("-") for part in parts)))
        hint = f'did you mean "{near}"?' if near else None
        raise BadValueError(f'"{visible(string)}" is not a valid name', hint, _NAMES)
    return string


def secret_file(value: Any) -> str:
    string = _string(value, SUBDOMAIN_LENGTH, _FILES, quoted(value))
    if not re.fullmatch(FILE, string):
        last = string.rstrip("/").rpartition("/")[2]
        hint = f'did you mean "{last}"?' if last != string and re.fullmatch(FILE, last) else None
        raise BadValueError(f'"{visible(string, 60)}" is not a valid name of a file in a Secret', hint, _FILES)
    return string


def user(value: Any) -> int | str:
    if value == "cluster":
        return "cluster"
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise BadValueError(f"must be a whole number or the word cluster, got {describe(value)}", allowed=_USERS)
    if isinstance(value, str):
        number = re.fullmatch("[0-9]{1,10}", value)
        hint = "write it without quotes" if number else did_you_mean(value, ["cluster"])
        raise BadValueError(f'"{visible(value, 60)}" is not a user ID', hint, _USERS)
    if value == 0:
        raise BadValueError("must not be 0: tasks do not run as root", allowed=_USERS)
    try:
        return whole(1, MAX_USER)(value)
    except BadValueError as error:
        raise BadValueError(error.message, allowed=_USERS) from None


def resource(value: Any) -> str:
    string = _string(value, _KEY_LENGTH, _RESOURCES)
    if not re.fullmatch(RESOURCE, string):
        word = string.lower()
        near = nearest(word, _KNOWN_RESOURCES) or next((name for name in _KNOWN_RESOURCES if word in name), None)
        hint = f'did you mean "{near}"?' if word and near else None
        raise BadValueError(f'"{visible(string, 60)}" is not a valid resource name', hint, _RESOURCES)
    return string


def label_key(value: Any) -> str:
    string = _string(value, _KEY_LENGTH, _LABELS)
    if not re.fullmatch(LABEL_KEY, string):
        domain, slash, last = string.rpartition("/")
        near = domain.lower() + slash + re.sub("[^A-Za-z0-9_.-]+", "-", last).strip("-_.")
        hint = f'did you mean "{near}"?' if re.fullmatch(LABEL_KEY, near) else None
        raise BadValueError(f'"{visible(string, 60)}" is not a valid key', hint, _LABELS)
    return string


def own_key(value: Any) -> str:
    """A label or annotation that users may add to the objects of a run."""
    key = label_key(value)
    if key in _SET_BY_PACELINE or key.startswith(("paceline.dev/", "batch.kubernetes.io/")):
        raise BadValueError(f'"{key}" is set by Paceline or by the cluster', "remove it")
    return key


def label_value(value: Any) -> str:
    string = _string(value, LABEL_LENGTH, _LABEL_VALUES, quoted(value))
    if not re.fullmatch(LABEL_VALUE, string):
        near = re.sub("[^A-Za-z0-9_.-]+", "-", string).strip("-_.")
        hint = f'did you mean "{near}"?' if near else None
        raise BadValueError(f'"{visible(string)}" is not a valid label value', hint, _LABEL_VALUES)
    return string


def prefix(value: Any) -> str:
    string = _string(value, SUBDOMAIN_LENGTH, _PREFIXES)
    if not re.fullmatch(ENV_NAME, string):
        raise BadValueError(f'"{visible(string, 60)}" is not a valid prefix for variable names', allowed=_PREFIXES)
    if string.startswith("PACELINE_"):
        raise BadValueError(f'"{visible(string, 60)}" is reserved: variables that start with it belong to Paceline')
    return string


def folder(value: Any) -> str:
    """A folder in the container.

    >>> folder("/data//digits/")
    '/data/digits'
    """
    string = _string(value, FOLDER_LENGTH, _FOLDERS)
    quoted_path = f'"{visible(string, 60)}"'
    if not string.startswith("/"):
        hint = f'did you mean "/{visible(string, 60)}"?' if re.fullmatch("[A-Za-z0-9_-][^:~$]*", string) else None
        raise BadValueError(f"{quoted_path} is not an absolute path in the container", hint, _FOLDERS)
    if ".." in string.split("/"):
        raise BadValueError(f'{quoted_path} contains ".."', "write the full path in the container", _FOLDERS)
    if ":" in string or not string.isprintable():
        raise BadValueError(f'{quoted_path} contains ":" or a character that cannot be printed', allowed=_FOLDERS)
    path = posixpath.normpath("/" + string.strip("/"))
    if path == "/":
        raise BadValueError(f"{quoted_path} is the root folder, which would hide the whole image", allowed=_FOLDERS)
    return path


def items(kind: str) -> Callable[[Any], Any]:
    """A validator that runs before the items of a list are read, and checks that the value is a list."""

    def read(value: Any) -> Any:
        if isinstance(value, list):
            return value
        hint = "put it in a list: [{...}]" if isinstance(value, dict) and kind == "mappings" else None
        hint = f"write [{visible(value, 60)}]" if isinstance(value, str) and kind == "names" else hint
        raise BadValueError(f"must be a list of {kind}, got {describe(value)}", hint)

    return read


def affinity(value: Any) -> dict[str, Any]:
    mapping = _mapping(value, None, join_names(AFFINITIES))
    for key, inner in mapping.items():
        if key not in AFFINITIES:
            hint = did_you_mean(key, AFFINITIES)
            raise BadValueError(f'unknown key "{visible(key, 60)}"', hint, join_names(AFFINITIES), (key,), at_key=True)
        if not isinstance(inner, dict):
            raise BadValueError(f"must be a mapping, got {describe(inner)}", inside=(key,))
    _check_nested(mapping, ())
    return mapping


def pod(value: Any) -> dict[str, Any]:
    mapping = _mapping(value, "write the fields of a pod's spec")
    for key in mapping:
        if key in WHOLE_POD:
            hint = WHOLE_POD[key]
            raise BadValueError(f'"{key}" is not a field of a pod spec', hint, inside=(key,), at_key=True)
    _check_nested(mapping, ())
    return mapping


def _string(value: Any, max_length: int, allowed: str, hint: str | None = None) -> str:
    if not isinstance(value, str):
        raise BadValueError(f"must be a string, got {describe(value)}", hint, allowed)
    if len(value) > max_length:
        limit = f"at most {max_length} characters"
        raise BadValueError(f'"{visible(value, 60)}" is {len(value)} characters long', allowed=limit)
    return value


def _mapping(value: Any, hint: str | None = None, allowed: str | None = None) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadValueError(f"must be a mapping in the form that Kubernetes uses, got {describe(value)}", hint, allowed)
    return value


def _check_nested(value: Any, inside: tuple[str | int, ...]) -> None:
    """Reject what JSON or Kubernetes cannot represent, at any depth."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if not re.fullmatch("[ -~]{1,320}", key):
                raise BadValueError(
                    f'"{visible(key, 60)}" is not a valid key in Kubernetes', inside=(*inside, key), at_key=True
                )
            _check_nested(inner, (*inside, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            if inner is None:
                raise BadValueError("has no value", inside=(*inside, index))
            _check_nested(inner, (*inside, index))
    elif isinstance(value, float) and not math.isfinite(value):
        raise BadValueError(f"must be a finite number, got {value}", inside=inside)
    elif isinstance(value, int) and not -_LARGEST <= value < _LARGEST:
        raise BadValueError(f"{visible(str(value), 40)} is too large", inside=inside)
