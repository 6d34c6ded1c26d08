"""The cluster a person can already use: kubeconfig, context and namespace as kubectl has them, errors as one line."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx2
from lightkube import ApiError, Client, KubeConfig
from lightkube.config.kubeconfig import SingleConfig
from lightkube.core.exceptions import ConfigError

REACH_S = 5.0  # until a cluster that does not answer counts as away
ANSWER_S = 30.0

Result = TypeVar("Result")


class Unreachable(Exception):
    """No cluster answers; the text says which was asked, and what to do."""


class Refused(Exception):
    """The cluster has answered no; the text says to what and why."""

    def __init__(self, text: str, reason: str) -> None:
        super().__init__(text)
        self.reason = reason  # as the API has it: AlreadyExists, NotFound, Forbidden, ...


@dataclass(frozen=True)
class Cluster:
    client: Client
    context: str
    namespace: str
    server: str

    def ask(self, what: str, call: Callable[[], Result]) -> Result:
        """One request; `what` completes "cannot ..."."""
        try:
            return call()
        except ApiError as error:
            status = error.status
            text = f"cannot {what}: {(status.message or str(error)).strip()}"
            raise Refused(text + _remedy(status.reason or "", self.namespace), status.reason or "") from None
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            raise Unreachable(
                f"no cluster answers at {self.server} (context {self.context}): {_short(error)}; "
                "is it up, and is this the context you mean? See --context and KUBECONFIG"
            ) from None
        except httpx2.HTTPError as error:
            raise Unreachable(f"cannot {what}: the connection to {self.server} failed: {_short(error)}") from None


def connect(context: str | None = None, namespace: str | None = None) -> Cluster:
    """Nothing is asked of the cluster yet."""
    single = _config(context)
    client = Client(
        config=single,
        namespace=namespace or single.namespace,
        timeout=httpx2.Timeout(ANSWER_S, connect=REACH_S),
        field_manager="paceline",
    )
    return Cluster(client, single.context_name, namespace or single.namespace, single.cluster.server)


def _config(context: str | None) -> SingleConfig:
    where = [Path(path).expanduser() for path in os.environ.get("KUBECONFIG", "").split(os.pathsep) if path]
    paths = [path for path in where or [Path("~/.kube/config").expanduser()] if path.is_file()]
    if not paths:
        asked = " and ".join(map(str, where)) or "~/.kube/config"
        raise Unreachable(f"there is no kubeconfig: {asked} is not there; KUBECONFIG can name another")
    configs = []
    try:
        configs = [KubeConfig.from_file(path) for path in paths]
        wanted = context or next((each.current_context for each in configs if each.current_context), None)
        if wanted is None:
            raise Unreachable(f"{paths[0]} has no current context: say which with --context")
        for config in configs:
            if wanted in config.contexts:
                found = _merged(config, configs).get(wanted)
                assert found is not None
                return found
    except (ConfigError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise Unreachable(f"{paths[0]} is not a kubeconfig: {error!r}") from None
    there = ", ".join(sorted({name for each in configs for name in each.contexts})) or "none"
    raise Unreachable(f"there is no context {wanted!r} in {' and '.join(map(str, paths))}; there are: {there}")


def _merged(first: KubeConfig, others: list[KubeConfig]) -> KubeConfig:
    """A context may name a cluster or a user of another file; what comes first wins."""
    for other in others:
        for kind in ("clusters", "users"):
            mine: dict[str, Any] = getattr(first, kind)
            for name, value in getattr(other, kind).items():
                mine.setdefault(name, value)
    return first


def _remedy(reason: str, namespace: str) -> str:
    if reason == "Forbidden":
        return f"; `paceline doctor --on kubernetes` shows which rights are missing in {namespace}"
    return ""


def _short(error: Exception) -> str:
    return str(error) or type(error).__name__
