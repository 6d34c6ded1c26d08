"""The cluster a person can already use: kubeconfig, context and namespace as kubectl has them, errors as one line."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.request import getproxies

import httpx2
from lightkube import ApiError, Client, KubeConfig
from lightkube.config.client_adapter import verify_cluster
from lightkube.config.kubeconfig import SingleConfig
from lightkube.config.models import NameValue
from lightkube.core import decoders
from lightkube.core.exceptions import ConfigError
from lightkube.resources.batch_v1 import Job
from lightkube.resources.core_v1 import Event, Pod
from lightkube.types import CascadeType

from paceline.backends.kubernetes.reasons import remedy

REACH_S = 5.0  # until a cluster that does not answer counts as away
ANSWER_S = 30.0

Result = TypeVar("Result")
LOG_IN = (ConfigError, OSError, KeyError)  # how a program for credentials fails
_LEARNING = threading.Lock()


class Unreachable(Exception):
    """No cluster answers; the text says which was asked, and what to do."""

    def __init__(self, text: str, sent: bool = False) -> None:
        super().__init__(text)
        self.sent = sent  # the request may have come through


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
            message, reason = (status.message or str(error)).strip(), status.reason or ""
            raise Refused(f"cannot {what}: {message}{remedy(reason, message, self.namespace)}", reason) from None
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            raise Unreachable(
                f"no cluster answers at {self.server} (context {self.context}): {_short(error)}; "
                "is it up, and is this the context you mean? See --context and KUBECONFIG"
            ) from None
        except httpx2.HTTPError as error:
            text = f"cannot {what}: the connection to {self.server} failed: {_short(error)}"
            raise Unreachable(text, sent=True) from None
        except LOG_IN as error:
            raise Unreachable(
                f"cannot {what}: the kubeconfig's program for logging in to {self.context} failed: {_short(error)}"
            ) from None

    def find(self, kind: Any, name: str) -> Any:
        """None: it is not there."""
        try:
            return self.ask(f"read the {kind.__name__} {name}", lambda: self.client.get(kind, name))
        except Refused as error:
            if error.reason == "NotFound":
                return None
            raise

    def delete(self, kind: Any, name: str) -> bool:
        """With what it owns, in the background. False: it is not there."""
        what = f"delete the {kind.__name__} {name}"
        try:
            self.ask(what, lambda: self.client.delete(kind, name, cascade=CascadeType.BACKGROUND))
        except Refused as error:
            if error.reason == "NotFound":
                return False
            raise
        return True


def connect(context: str | None = None, namespace: str | None = None) -> Cluster:
    """Nothing is asked of the cluster yet."""
    _learn_types()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # an API server that hangs up must not end us
    single = _config(context)
    client = Client(
        config=single,
        namespace=namespace or single.namespace,
        timeout=httpx2.Timeout(ANSWER_S, connect=REACH_S),
        field_manager="paceline",
        transport=_transport(single),
    )
    return Cluster(client, single.context_name, namespace or single.namespace, single.cluster.server)


def _transport(single: SingleConfig) -> httpx2.HTTPTransport | None:
    """One that notices when the other end is gone, though a watch or a log may be silent for hours.

    None where a proxy stands between, which the library finds by itself: that one would be asked, not the cluster.
    """
    if {"https", "all"} & set(getproxies()) or not single.user:
        return None
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
    verify = verify_cluster(single.cluster, single.user, single.abs_file)
    return httpx2.HTTPTransport(verify=verify, limits=httpx2.Limits(max_connections=None), socket_options=options)


def _learn_types() -> None:
    """What several threads read at once: the decoder crashes where two of them are the first to meet a type."""
    with _LEARNING:
        for kind in (Job, Pod, Event):
            decoders.decode_list(b'{"items": []}', kind)
        decoders.decode_watch_event(b'{"type": "ADDED", "object": {}}')
        decoders.decode_status(b"{}")


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
                _explain_to_plugin(found)
                return found
    except (ConfigError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise Unreachable(f"{paths[0]} is not a kubeconfig: {error!r}") from None
    there = ", ".join(sorted({name for each in configs for name in each.contexts})) or "none"
    raise Unreachable(f"there is no context {wanted!r} in {' and '.join(map(str, paths))}; there are: {there}")


def _explain_to_plugin(single: SingleConfig) -> None:
    """The program that fetches credentials is told what kubectl would tell it, and found where kubectl finds it."""
    plugin = single.user.exec if single.user else None
    if plugin is None:
        return
    info = {"apiVersion": plugin.apiVersion, "kind": "ExecCredential", "spec": {"interactive": sys.stdin.isatty()}}
    plugin.env = [*(plugin.env or []), NameValue(name="KUBERNETES_EXEC_INFO", value=json.dumps(info))]
    plugin.apiVersion = "client.authentication.k8s.io/v1beta1"  # v1 is the same here, and lightkube knows only this
    if os.sep in plugin.command:
        plugin.command = str(single.abs_file(plugin.command))


def _merged(first: KubeConfig, others: list[KubeConfig]) -> KubeConfig:
    """A context may name a cluster or a user of another file; what comes first wins."""
    for other in others:
        for kind in ("clusters", "users"):
            mine: dict[str, Any] = getattr(first, kind)
            for name, value in getattr(other, kind).items():
                mine.setdefault(name, value)
    return first


def _short(error: Exception) -> str:
    return str(error) or type(error).__name__
