"""Connects to a cluster with the kubeconfig, context and namespace of kubectl; errors are one line."""

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

from paceline.backends.kubernetes.api.pending_reasons import remedy
from paceline.errors import PacelineError

CONNECT_S = 5.0  # seconds until a cluster that does not respond is reported as unreachable
RESPONSE_S = 30.0

Result = TypeVar("Result")
LOG_IN_ERRORS = (ConfigError, OSError, KeyError)  # raised if a credential plugin fails
_DECODERS = threading.Lock()


class Unreachable(PacelineError):
    """The cluster does not respond."""

    def __init__(self, what: str, *, where: str = "", remedy: str = "", sent: bool = False) -> None:
        super().__init__(what, where=where, remedy=remedy)
        self.sent = sent  # the cluster may have received the request


class Refused(PacelineError):
    """The cluster refused a request."""

    def __init__(self, what: str, reason: str, *, message: str = "", remedy: str = "") -> None:
        super().__init__(what, remedy=remedy)
        self.reason = reason  # reason code of the API: AlreadyExists, NotFound, Forbidden, ...
        self.message = message  # message of the API


@dataclass(frozen=True)
class Cluster:
    client: Client
    context: str
    namespace: str
    server: str

    def request(self, action: str, call: Callable[[], Result]) -> Result:
        """Send one request; `action` completes "cannot ..."."""
        try:
            return call()
        except ApiError as error:
            status = error.status
            message, reason = (status.message or str(error)).strip(), status.reason or ""
            hint = remedy(reason, message, self.namespace)
            raise Refused(f"cannot {action}: {message}", reason, message=message, remedy=hint) from None
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            raise Unreachable(
                f"cannot connect to the cluster at {self.server} (context {self.context}): {_short(error)}",
                remedy="check that it is up and that this is the right context (--context, KUBECONFIG)",
            ) from None
        except httpx2.HTTPError as error:
            text = f"cannot {action}: the connection to {self.server} failed: {_short(error)}"
            raise Unreachable(text, sent=True) from None
        except LOG_IN_ERRORS as error:
            raise Unreachable(
                f"cannot {action}: the kubeconfig's credential plugin for {self.context} failed: {_short(error)}"
            ) from None

    def find(self, kind: Any, name: str) -> Any:
        """None: it does not exist."""
        try:
            return self.request(f"read the {kind.__name__} {name}", lambda: self.client.get(kind, name))
        except Refused as error:
            if error.reason == "NotFound":
                return None
            raise

    def delete(self, kind: Any, name: str) -> bool:
        """Delete it and what it owns, in the background. False: it does not exist."""
        action = f"delete the {kind.__name__} {name}"
        try:
            self.request(action, lambda: self.client.delete(kind, name, cascade=CascadeType.BACKGROUND))
        except Refused as error:
            if error.reason == "NotFound":
                return False
            raise
        return True


def connect(context: str | None = None, namespace: str | None = None) -> Cluster:
    """Sends no request yet."""
    _prepare_decoders()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # an API server that hangs up must not end this process
    single = _config(context)
    client = Client(
        config=single,
        namespace=namespace or single.namespace,
        timeout=httpx2.Timeout(RESPONSE_S, connect=CONNECT_S),
        field_manager="paceline",
        transport=_transport(single),
    )
    return Cluster(client, single.context_name, namespace or single.namespace, single.cluster.server)


def _transport(single: SingleConfig) -> httpx2.HTTPTransport | None:
    """A transport with TCP keepalive, to notice a lost connection although a watch or a log may be silent for hours.

    None if there is a proxy: the library detects proxies itself, and this transport would bypass them.
    """
    if {"https", "all"} & set(getproxies()) or not single.user:
        return None
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
    verify = verify_cluster(single.cluster, single.user, single.abs_file)
    return httpx2.HTTPTransport(verify=verify, limits=httpx2.Limits(max_connections=None), socket_options=options)


def _prepare_decoders() -> None:
    """lightkube's decoder crashes if two threads are the first to decode a type: decode each type once here."""
    with _DECODERS:
        for kind in (Job, Pod, Event):
            decoders.decode_list(b'{"items": []}', kind)
        decoders.decode_watch_event(b'{"type": "ADDED", "object": {}}')
        decoders.decode_status(b"{}")


def _config(context: str | None) -> SingleConfig:
    expand = os.path.expanduser  # unlike Path.expanduser, it accepts a user without a home folder
    configured = [Path(expand(path)) for path in os.environ.get("KUBECONFIG", "").split(os.pathsep) if path]
    paths = [path for path in configured or [Path(expand("~/.kube/config"))] if path.is_file()]
    if not paths:
        missing = " and ".join(map(str, configured)) or "~/.kube/config"
        raise Unreachable(f"no kubeconfig found at {missing}", remedy="set KUBECONFIG to the path of your kubeconfig")
    configs = []
    try:
        configs = [KubeConfig.from_file(path) for path in paths]
        name = context or next((each.current_context for each in configs if each.current_context), None)
        if name is None:
            raise Unreachable(
                "the kubeconfig has no current context", where=str(paths[0]), remedy="select one with --context NAME"
            )
        for config in configs:
            if name in config.contexts:
                single = _merged(config, configs).get(name)
                assert single is not None
                _configure_plugin(single)
                return single
    except (ConfigError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise Unreachable(f"not a kubeconfig: {error!r}", where=str(paths[0])) from None
    contexts = ", ".join(sorted({name for each in configs for name in each.contexts})) or "none"
    raise Unreachable(
        f"there is no context {name!r} in {' and '.join(map(str, paths))}", remedy=f"available contexts: {contexts}"
    )


def _configure_plugin(single: SingleConfig) -> None:
    """Give the credential plugin the environment that kubectl gives it, and resolve its path as kubectl does."""
    plugin = single.user.exec if single.user else None
    if plugin is None:
        return
    info = {"apiVersion": plugin.apiVersion, "kind": "ExecCredential", "spec": {"interactive": sys.stdin.isatty()}}
    plugin.env = [*(plugin.env or []), NameValue(name="KUBERNETES_EXEC_INFO", value=json.dumps(info))]
    plugin.apiVersion = "client.authentication.k8s.io/v1beta1"  # v1 is the same here, and lightkube supports only this
    if os.sep in plugin.command:
        plugin.command = str(single.abs_file(plugin.command))


def _merged(first: KubeConfig, others: list[KubeConfig]) -> KubeConfig:
    """A context may refer to a cluster or user in another file; the first definition wins."""
    for other in others:
        for kind in ("clusters", "users"):
            entries: dict[str, Any] = getattr(first, kind)
            for name, value in getattr(other, kind).items():
                entries.setdefault(name, value)
    return first


def _short(error: Exception) -> str:
    return str(error) or type(error).__name__
