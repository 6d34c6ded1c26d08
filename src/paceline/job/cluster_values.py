"""How the values of fields for clusters are read: what a cluster would refuse is refused here, before anything runs."""

from __future__ import annotations

import math
import posixpath
import re
from collections.abc import Callable
from typing import Any

from paceline.job.errors import BadValueError, described, did_you_mean, listed, nearest, visible
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
MOST_USER = 2**31 - 1
AFFINITIES = ("nodeAffinity", "podAffinity", "podAntiAffinity")
OWN = "/paceline"  # the folder in containers that Paceline keeps for itself

_NAMES = f"lower case letters, digits, - and ., at most {SUBDOMAIN_LENGTH} characters"
_FILES = f"letters, digits, -, _ and ., at most {SUBDOMAIN_LENGTH} characters"
_PREFIXES = "letters, digits and _, no digit first"
_KEY_LENGTH = SUBDOMAIN_LENGTH + 1 + LABEL_LENGTH
_USERS = f"a whole number from 1 to {MOST_USER}, or cluster"
_LABELS = 'a name such as "tier" or "example.com/tier", of letters, digits, -, _ and .'
_LABEL_VALUES = f"letters, digits, -, _ and ., at most {LABEL_LENGTH} characters"
_RESOURCES = 'a resource with its domain, such as "nvidia.com/gpu"'
_KNOWN_RESOURCES = ("nvidia.com/gpu", "amd.com/gpu", "gpu.intel.com/i915", "gpu.intel.com/xe", "habana.ai/gaudi")
_FOLDERS = 'an absolute path such as "/data"'
_SET_BY_PACELINE = {f"app.kubernetes.io/{name}" for name in ("name", "instance", "component", "managed-by")}
WHOLE_POD = {
    "spec": "leave it out, and write here what it holds",
    "metadata": "use labels and annotations of kubernetes",
    **dict.fromkeys(("apiVersion", "kind", "status"), "remove it"),
}
_LARGEST = 2**63


def namespace(value: Any) -> str:
    return label(value, LABEL, LABEL_LENGTH, "lower case letters, digits and -")


def volume_name(value: Any) -> str:
    named = label(value, LABEL, LABEL_LENGTH, "lower case letters, digits and -")
    if named.startswith("paceline-"):
        raise BadValueError(f'"{named}" is taken: names that start with "paceline-" are those of Paceline itself')
    return named


def image(value: Any) -> str:
    text(value)
    if re.search(r"\s", value):
        raise BadValueError(f'"{visible(value, 60)}" is not the name of an image: it holds a space')
    return str(value)


def object_name(value: Any) -> str:
    """The name of a Secret, a claim and the like."""
    written = _written(value, SUBDOMAIN_LENGTH, _NAMES, quoted(value))
    if not re.fullmatch(SUBDOMAIN, written):
        parts = re.sub("[^a-z0-9.]+", "-", written.lower()).split(".")
        near = ".".join(filter(None, (part.strip("-") for part in parts)))
        hint = f'did you mean "{near}"?' if near else None
        raise BadValueError(f'"{visible(written)}" is not a valid name', hint, _NAMES)
    return written


def secret_file(value: Any) -> str:
    written = _written(value, SUBDOMAIN_LENGTH, _FILES, quoted(value))
    if not re.fullmatch(FILE, written):
        last = written.rstrip("/").rpartition("/")[2]
        hint = f'did you mean "{last}"?' if last != written and re.fullmatch(FILE, last) else None
        raise BadValueError(f'"{visible(written, 60)}" is not the name of a file in a Secret', hint, _FILES)
    return written


def user(value: Any) -> int | str:
    if value == "cluster":
        return "cluster"
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise BadValueError(f"must be a whole number or the word cluster, got {described(value)}", allowed=_USERS)
    if isinstance(value, str):
        number = re.fullmatch("[0-9]{1,10}", value)
        hint = "write it without quotes" if number else did_you_mean(value, ["cluster"])
        raise BadValueError(f'"{visible(value, 60)}" is not the number of a user', hint, _USERS)
    if value == 0:
        raise BadValueError("is 0: tasks do not run as root", allowed=_USERS)
    try:
        return whole(1, MOST_USER)(value)
    except BadValueError as error:
        raise BadValueError(error.message, allowed=_USERS) from None


def resource(value: Any) -> str:
    written = _written(value, _KEY_LENGTH, _RESOURCES)
    if not re.fullmatch(RESOURCE, written):
        word = written.lower()
        near = nearest(word, _KNOWN_RESOURCES) or next((known for known in _KNOWN_RESOURCES if word in known), None)
        hint = f'did you mean "{near}"?' if word and near else None
        raise BadValueError(f'"{visible(written, 60)}" is not the name of a resource', hint, _RESOURCES)
    return written


def label_key(value: Any) -> str:
    written = _written(value, _KEY_LENGTH, _LABELS)
    if not re.fullmatch(LABEL_KEY, written):
        domain, slash, last = written.rpartition("/")
        near = domain.lower() + slash + re.sub("[^A-Za-z0-9_.-]+", "-", last).strip("-_.")
        hint = f'did you mean "{near}"?' if re.fullmatch(LABEL_KEY, near) else None
        raise BadValueError(f'"{visible(written, 60)}" is not a valid key', hint, _LABELS)
    return written


def own_key(value: Any) -> str:
    """A label or annotation that a person may add to the objects of a run."""
    key = label_key(value)
    if key in _SET_BY_PACELINE or key.startswith(("paceline.dev/", "batch.kubernetes.io/")):
        raise BadValueError(f'"{key}" is set by Paceline or the cluster itself', "remove it")
    return key


def label_value(value: Any) -> str:
    written = _written(value, LABEL_LENGTH, _LABEL_VALUES, quoted(value))
    if not re.fullmatch(LABEL_VALUE, written):
        near = re.sub("[^A-Za-z0-9_.-]+", "-", written).strip("-_.")
        hint = f'did you mean "{near}"?' if near else None
        raise BadValueError(f'"{visible(written)}" is not a valid value of a label', hint, _LABEL_VALUES)
    return written


def prefix(value: Any) -> str:
    written = _written(value, SUBDOMAIN_LENGTH, _PREFIXES)
    if not re.fullmatch(ENV_NAME, written):
        raise BadValueError(f'"{visible(written, 60)}" cannot begin the name of a variable', allowed=_PREFIXES)
    if written.startswith("PACELINE_"):
        raise BadValueError(f'"{visible(written, 60)}" is taken: such variables are those of Paceline itself')
    return written


def folder(value: Any) -> str:
    """A folder in the container.

    >>> folder("/data//digits/")
    '/data/digits'
    """
    written = _written(value, FOLDER_LENGTH, _FOLDERS)
    shown = f'"{visible(written, 60)}"'
    if not written.startswith("/"):
        meant = f'did you mean "/{visible(written, 60)}"?' if re.fullmatch("[A-Za-z0-9_-][^:~$]*", written) else None
        raise BadValueError(f"{shown} is not an absolute path: it is a folder in the container", meant, _FOLDERS)
    if ".." in written.split("/"):
        raise BadValueError(f'{shown} holds "..": a path in the container is written in full', allowed=_FOLDERS)
    if ":" in written or not written.isprintable():
        raise BadValueError(f'{shown} holds a ":" or a sign that cannot be printed', allowed=_FOLDERS)
    clean = posixpath.normpath("/" + written.strip("/"))
    if clean == "/":
        raise BadValueError(f"{shown} is the root: it would hide the whole image", allowed=_FOLDERS)
    return clean


def items(what: str) -> Callable[[Any], Any]:
    """What comes before the items of a list are read one by one: is it a list at all?"""

    def read(value: Any) -> Any:
        if isinstance(value, list):
            return value
        one = "put it in a list: [{...}]" if isinstance(value, dict) and what == "mappings" else None
        hint = f"write [{visible(value, 60)}]" if isinstance(value, str) and what == "names" else one
        raise BadValueError(f"must be a list of {what}, got {described(value)}", hint)

    return read


def affinity(value: Any) -> dict[str, Any]:
    mapping = _mapping(value, None, listed(AFFINITIES))
    for key, inner in mapping.items():
        if key not in AFFINITIES:
            hint = did_you_mean(key, AFFINITIES)
            raise BadValueError(f'unknown key "{visible(key, 60)}"', hint, listed(AFFINITIES), (key,), at_key=True)
        if not isinstance(inner, dict):
            raise BadValueError(f"must be a mapping, got {described(inner)}", inside=(key,))
    _plain(mapping, ())
    return mapping


def pod(value: Any) -> dict[str, Any]:
    mapping = _mapping(value, "write what stands under spec: in a pod")
    for key in mapping:
        if key in WHOLE_POD:
            hint = WHOLE_POD[key]
            raise BadValueError(f'"{key}" is no part of the spec of a pod', hint, inside=(key,), at_key=True)
    _plain(mapping, ())
    return mapping


def _written(value: Any, most: int, allowed: str, hint: str | None = None) -> str:
    if not isinstance(value, str):
        raise BadValueError(f"must be text, got {described(value)}", hint, allowed)
    if len(value) > most:
        short = f"at most {most} characters"
        raise BadValueError(f'"{visible(value, 60)}" is {len(value)} characters long', allowed=short)
    return value


def _mapping(value: Any, hint: str | None = None, allowed: str | None = None) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadValueError(f"must be a mapping as Kubernetes has it, got {described(value)}", hint, allowed)
    return value


def _plain(value: Any, inside: tuple[str | int, ...]) -> None:
    """Refuses what JSON or Kubernetes has no form for, at whatever depth."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if not re.fullmatch("[ -~]{1,320}", key):
                raise BadValueError(
                    f'"{visible(key, 60)}" is no key that Kubernetes has', inside=(*inside, key), at_key=True
                )
            _plain(inner, (*inside, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            if inner is None:
                raise BadValueError("has no value", inside=(*inside, index))
            _plain(inner, (*inside, index))
    elif isinstance(value, float) and not math.isfinite(value):
        raise BadValueError(f"must be a finite number, got {value}", inside=inside)
    elif isinstance(value, int) and not -_LARGEST <= value < _LARGEST:
        raise BadValueError(f"{visible(str(value), 40)} is too large a number", inside=inside)
