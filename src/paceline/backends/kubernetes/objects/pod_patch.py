"""Merges the user's patch into a pod, as `kubectl patch --type strategic` does: lists of named items by name."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

# Lists in a pod that are merged, and the key of their items; any other list is replaced.
KEYS = {
    "containers": "name", "initContainers": "name", "volumes": "name", "env": "name", "volumeMounts": "mountPath",
    "volumeDevices": "devicePath", "ports": "containerPort", "imagePullSecrets": "name", "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey", "resourceClaims": "name",
}  # fmt: skip


def patch_for(patch: dict[str, Any], role: str, roles: Collection[str]) -> dict[str, Any]:
    """The user's patch for pods of this role, without patches for the containers of other roles.

    >>> patch_for({"containers": [{"name": "worker", "tty": True}]}, "evaluator", ("worker", "evaluator"))
    {'containers': []}
    """
    if not isinstance(patch.get("containers"), list):
        return patch
    others = set(roles) - {role}
    return {**patch, "containers": [each for each in patch["containers"] if _key(each, "name") not in others]}


def merge(base: Any, patch: Any, key: str = "") -> Any:
    """
    >>> merge({"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"c": 4, "d": None}})
    {'a': 1, 'b': {'c': 4}}
    >>> merge({"env": [{"name": "A", "value": "1"}]}, {"env": [{"name": "B", "value": "2"}]})
    {'env': [{'name': 'A', 'value': '1'}, {'name': 'B', 'value': '2'}]}
    """
    if isinstance(base, dict) and isinstance(patch, dict):
        merged = dict(base)
        for name, value in patch.items():
            if value is None:
                merged.pop(name, None)
            else:
                merged[name] = merge(merged.get(name), value, name)
        return merged
    if isinstance(base, list) and isinstance(patch, list) and key in KEYS:
        return _by_key(base, patch, KEYS[key])
    return patch


def _by_key(base: list[Any], patch: list[Any], key: str) -> list[Any]:
    merged = list(base)
    for item in patch:
        at = [index for index, other in enumerate(merged) if _key(other, key) == _key(item, key) is not None]
        if at:
            merged[at[0]] = merge(merged[at[0]], item)
        else:
            merged.append(item)
    return merged


def _key(item: Any, key: str) -> Any:
    return item.get(key) if isinstance(item, dict) else None
