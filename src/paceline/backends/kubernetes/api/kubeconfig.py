"""Reads one context of the kubeconfig, whose files are found and merged as kubectl does."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightkube import KubeConfig
from lightkube.config.kubeconfig import SingleConfig

from paceline.errors import PacelineError


class InvalidKubeconfig(PacelineError):
    """There is no kubeconfig, or it does not define the context."""


def find_files() -> list[Path]:
    """Absolute paths: they are read again later."""
    expand = os.path.expanduser  # unlike Path.expanduser, it accepts a user without a home folder
    configured = [Path(expand(path)) for path in os.environ.get("KUBECONFIG", "").split(os.pathsep) if path]
    paths = [path.absolute() for path in configured or [Path(expand("~/.kube/config"))] if path.is_file()]
    if not paths:
        missing = " and ".join(map(str, configured)) or "~/.kube/config"
        raise InvalidKubeconfig(
            f"no kubeconfig found at {missing}", remedy="set KUBECONFIG to the path of your kubeconfig"
        )
    return paths


def read_context(paths: Sequence[Path], context: str | None) -> SingleConfig:
    """`context`: None selects the current one."""
    configs = []
    try:
        configs = [KubeConfig.from_file(path) for path in paths]
        name = context or next((each.current_context for each in configs if each.current_context), None)
        if name is None:
            raise InvalidKubeconfig(
                "the kubeconfig has no current context",
                where=str(paths[0]),
                remedy="name one, or select one with `kubectl config use-context`",
            )
        for config in configs:
            if name in config.contexts:
                single = _merged(config, configs).get(name)
                assert single is not None
                return single
    except InvalidKubeconfig:
        raise
    except Exception as error:  # of the YAML parser, or because a field is missing or has a wrong type
        raise InvalidKubeconfig(f"not a kubeconfig: {error!r}", where=str(paths[0])) from None
    contexts = ", ".join(sorted({name for each in configs for name in each.contexts})) or "none"
    raise InvalidKubeconfig(
        f"there is no context {name!r} in {' and '.join(map(str, paths))}", remedy=f"available contexts: {contexts}"
    )


def _merged(first: KubeConfig, others: list[KubeConfig]) -> KubeConfig:
    """A context may refer to a cluster or user in another file; the first definition wins."""
    for other in others:
        for kind in ("clusters", "users"):
            entries: dict[str, Any] = getattr(first, kind)
            for name, value in getattr(other, kind).items():
                entries.setdefault(name, value)
    return first


def list_contexts(paths: Sequence[Path]) -> tuple[dict[str, str | None], str | None]:
    """The namespace of each context, and the name of the current one."""
    namespaces: dict[str, str | None] = {}
    current = None
    try:
        for path in paths:
            config = KubeConfig.from_file(path)
            current = current or config.current_context
            for name, context in config.contexts.items():
                namespaces.setdefault(name, context.namespace)
    except Exception as error:  # of the YAML parser, or because a field is missing or has a wrong type
        raise InvalidKubeconfig(f"not a kubeconfig: {error!r}", where=str(paths[0])) from None
    return namespaces, current
