"""The clusters that the kubeconfig knows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Context:
    name: str
    namespace: str | None  # None: the default one
    is_current: bool


def known_contexts() -> list[Context]:
    """Those of the kubeconfig, the current one first; without a kubeconfig: none. Sends no request."""
    from paceline.backends.kubernetes.api.kubeconfig import InvalidKubeconfig, find_files, list_contexts

    try:
        namespaces, current = list_contexts(find_files())
    except InvalidKubeconfig:
        return []
    contexts = [Context(name, namespace, name == current) for name, namespace in namespaces.items()]
    return sorted(contexts, key=lambda each: (not each.is_current, each.name))
