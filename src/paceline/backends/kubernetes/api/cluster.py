"""Connects to a cluster with the kubeconfig, context and namespace of kubectl; errors are one line."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx2
from lightkube import ApiError, Client
from lightkube.config.models import User
from lightkube.core import decoders
from lightkube.core.exceptions import ConfigError
from lightkube.resources.batch_v1 import Job
from lightkube.resources.core_v1 import Event, Pod
from lightkube.types import CascadeType

from paceline.backends.kubernetes.api import kubeconfig
from paceline.backends.kubernetes.api.connections import Access, Transport
from paceline.backends.kubernetes.api.credential_renewal import Credentials
from paceline.backends.kubernetes.api.pending_reasons import remedy
from paceline.errors import PacelineError, Text

CONNECT_S = 5.0  # seconds until a cluster that does not respond is reported as unreachable
RESPONSE_S = 30.0

Result = TypeVar("Result")
LOG_IN_ERRORS = (ConfigError, OSError, KeyError)  # raised if there are no credentials
_DECODERS = threading.Lock()


class Unreachable(PacelineError):
    """The cluster does not respond."""

    def __init__(self, what: str, *, where: Text = "", remedy: Text = "", sent: bool = False) -> None:
        super().__init__(what, where=where, remedy=remedy)
        self.sent = sent  # the cluster may have received the request


class NoCredentials(Unreachable):
    """The kubeconfig has no usable credentials."""


class Refused(PacelineError):
    """The cluster refused a request."""

    def __init__(self, what: str, reason: str, *, message: str = "", remedy: Text = "") -> None:
        super().__init__(what, remedy=remedy)
        self.reason = reason  # reason code of the API: AlreadyExists, NotFound, Forbidden, ...
        self.message = message  # message of the API


@dataclass(frozen=True)
class Cluster:
    client: Client
    context: str
    namespace: str
    server: str
    access: Access | None = None
    transport: Transport | None = None  # of `client`
    kubeconfig: tuple[Path, ...] = ()  # the files that it was read from

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
                remedy="check that it is up and that this is the right context of your kubeconfig",
            ) from None
        except httpx2.HTTPError as error:
            text = f"cannot {action}: the connection to {self.server} failed: {_short(error)}"
            raise Unreachable(text, sent=True) from None
        except KeyError:  # of the library, if there is no Content-Type
            text = f"cannot {action}: {self.server} did not answer as a Kubernetes API server does"
            raise Unreachable(text, sent=True) from None
        except LOG_IN_ERRORS as error:
            text = f"cannot {action}: no credentials for context {self.context}: {_short(error)}"
            raise NoCredentials(text) from None

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

    def interrupt(self) -> None:
        """End all requests of `client`, in whichever thread, and refuse new ones."""
        if self.transport is not None:
            self.transport.interrupt()

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()


def connect(
    context: str | None = None, namespace: str | None = None, files: Sequence[Path] = (), until: float = math.inf
) -> Cluster:
    """Sends no request yet. `files`: of the kubeconfig; default: those that KUBECONFIG names. `until`: a time of
    time.monotonic(), at which all requests end."""
    _prepare_decoders()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # an API server that hangs up must not end this process
    try:
        paths = list(files) or kubeconfig.find_files()
        single = kubeconfig.read_context(paths, context)
    except kubeconfig.InvalidKubeconfig as error:
        raise Unreachable(error.what, where=error.where_text, remedy=error.remedy_text) from None
    access = Access(single, Credentials(paths, single))
    transport = access.transport(until)
    try:
        client = Client(
            config=single._replace(user=User()),  # the transport adds the credentials
            namespace=namespace or single.namespace,
            timeout=httpx2.Timeout(RESPONSE_S, connect=CONNECT_S),
            field_manager="paceline",
            transport=transport,
        )
    except (OSError, ValueError) as error:
        raise Unreachable(
            f"cannot read the certificate authority of context {single.context_name}: {_short(error)}",
            where=str(single.fname or paths[0]),
        ) from None
    namespace = namespace or single.namespace
    return Cluster(client, single.context_name, namespace, single.cluster.server, access, transport, tuple(paths))


def _prepare_decoders() -> None:
    """lightkube's decoder crashes if two threads are the first to decode a type: decode each type once here."""
    with _DECODERS:
        for kind in (Job, Pod, Event):
            decoders.decode_list(b'{"items": []}', kind)
        decoders.decode_watch_event(b'{"type": "ADDED", "object": {}}')
        decoders.decode_status(b"{}")


def _short(error: Exception) -> str:
    return str(error) or type(error).__name__
