"""The credentials of a context. Those that expire or are refused are read again: a run may be followed for days."""

from __future__ import annotations

import base64
import math
import os
import ssl
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from lightkube.config.kubeconfig import SingleConfig
from lightkube.config.models import User
from lightkube.core.exceptions import ConfigError

from paceline.backends.kubernetes.api import credential_plugin, kubeconfig
from paceline.storage.regular_files import open_regular

PLUGIN_PAUSE_S = 30.0  # seconds between two starts of a credential plugin: it may ask a server, or the user
CHECK_PAUSE_S = 5.0  # seconds between two checks whether the certificate was replaced, if connections fail
_LARGEST_FILE = 1024 * 1024  # bytes
_EARLY_S = 5.0  # a credential is replaced so many seconds before it expires


@dataclass(frozen=True)
class Certificate:
    """A client certificate and its key, as PEM."""

    chain: bytes
    key: bytes = field(repr=False)

    def load_into(self, context: ssl.SSLContext) -> None:
        """Raises ssl.SSLError, an OSError."""
        with tempfile.NamedTemporaryFile() as chain, tempfile.NamedTemporaryFile() as key:
            for file, data in ((chain, self.chain), (key, self.key)):
                file.write(data)
                file.flush()
            context.load_cert_chain(chain.name, key.name, password="")  # do not ask on the terminal


@dataclass(frozen=True)
class Credential:
    """What a request is sent with."""

    authorization: str = field(default="", repr=False)  # the header
    certificate: Certificate | None = None
    expires: float = math.inf  # seconds since 1970


class Credentials:
    """Safe to use in several threads."""

    def __init__(self, paths: Sequence[Path], single: SingleConfig) -> None:
        """`paths`: the files of the kubeconfig. `single`: the context as read from them."""
        self._paths, self._single = paths, single
        self._lock = threading.Lock()
        self._current: Credential | None = None
        self._plugin_ran_at = -math.inf
        self._plugin_error: ConfigError | None = None
        self._checked_at = -math.inf

    def current(self, until: float = math.inf) -> Credential:
        """Raises ConfigError or OSError if there is none. `until`: a time of time.monotonic(), at which a credential
        plugin is ended."""
        with self._locked(until):
            if self._current is None or self._current.expires - _EARLY_S <= time.time():
                self._current = self._read(self._single, until) or self._current
            if self._current is None:
                raise ConfigError("the credential plugin printed no credential")
            return self._current

    def renewed(self, refused: Credential, until: float = math.inf) -> Credential | None:
        """The credential to use in place of one that the cluster refused; None: there is no other."""
        with self._locked(until):
            if self._current is not None and self._current != refused:
                return self._current  # another thread has read it
            return self._read_again(refused, until)

    @contextmanager
    def _locked(self, until: float) -> Iterator[None]:
        """Another thread may wait for a credential plugin."""
        if not self._lock.acquire(timeout=max(0.0, min(until - time.monotonic(), threading.TIMEOUT_MAX))):
            raise ConfigError("the credential plugin did not finish within the time limit")
        try:
            yield
        finally:
            self._lock.release()

    def renewed_certificate(self, failed: Credential, until: float = math.inf) -> Credential | None:
        """The same after a connection failed, which an expired certificate may cause. Starts no plugin."""
        with self._locked(until):
            if self._current is not None and self._current.certificate != failed.certificate:
                return self._current
            is_early = time.monotonic() - self._checked_at < CHECK_PAUSE_S
            if failed.certificate is None or is_early or (self._single.user and self._single.user.exec):
                return None
            self._checked_at = time.monotonic()
            renewed = self._read_again(failed, math.inf)
            return renewed if renewed and renewed.certificate != failed.certificate else None

    def _read_again(self, refused: Credential, until: float) -> Credential | None:
        try:
            single = kubeconfig.read_context(self._paths, self._single.context_name)
        except kubeconfig.InvalidKubeconfig:
            return None  # it is being written
        if single.cluster.server != self._single.cluster.server:
            return None  # these credentials are for another cluster
        has_plugin = bool(single.user and single.user.exec)
        try:
            credential = self._read(single, until)
        except (ConfigError, OSError):
            if has_plugin:
                raise
            return None  # a certificate that does not match its key: one of the files is being replaced
        if credential is None or credential == refused:
            return None
        self._single, self._current = single, credential
        return credential

    def _read(self, single: SingleConfig, until: float) -> Credential | None:
        """None: the credential plugin has run a moment ago."""
        user = single.user or User()
        certificate = _certificate_of(single, user)
        if user.token_file:
            return Credential(_bearer(_token_in(single, user.token_file)), certificate)
        if user.token:
            return Credential(_bearer(user.token), certificate)
        if user.exec:
            return self._from_plugin(single, certificate, until)
        if user.username and user.password:
            pair = base64.b64encode(f"{user.username}:{user.password}".encode()).decode()
            return Credential(f"Basic {pair}", certificate)
        if user.auth_provider:
            raise ConfigError("the user's auth-provider is not supported: kubectl has replaced it with exec plugins")
        return Credential("", certificate)

    def _from_plugin(self, single: SingleConfig, certificate: Certificate | None, until: float) -> Credential | None:
        assert single.user and single.user.exec
        if time.monotonic() - self._plugin_ran_at < PLUGIN_PAUSE_S:
            if self._plugin_error is not None:
                raise self._plugin_error
            return None
        try:
            status = credential_plugin.run(single, single.user.exec, until - time.monotonic())
            chain, key, token = (status.get(name) for name in ("clientCertificateData", "clientKeyData", "token"))
            if chain:
                certificate = _checked(Certificate(str(chain).encode(), str(key or "").encode()))
            authorization = _bearer(str(token)) if token else ""
            self._plugin_error = None
        except ConfigError as error:
            self._plugin_error = error
            raise
        finally:
            self._plugin_ran_at = time.monotonic()
        return Credential(authorization, certificate, credential_plugin.expiry(status))


def _bearer(token: str) -> str:
    """The header. An HTTP library that rejects a header quotes it, and so the token, in its error."""
    if not token.isascii() or not token.isprintable():
        raise ConfigError("the token contains a character that is not allowed, such as a line end")
    return f"Bearer {token}"


def _content(path: str | os.PathLike[str]) -> bytes:
    """Never waits, as it would for a pipe."""
    with os.fdopen(open_regular(os.fspath(path), follow=True), "rb") as file:
        return file.read(_LARGEST_FILE)


def _token_in(single: SingleConfig, path: str) -> str:
    """Relative to the kubeconfig, as for kubectl."""
    try:
        token = _content(single.abs_file(path)).decode().strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the token file {path}: {error}") from None
    if not token:
        raise ConfigError(f"the token file {path} is empty")
    return token


def _certificate_of(single: SingleConfig, user: User) -> Certificate | None:
    if not (user.client_cert or user.client_cert_data):
        return None

    def content(data: str | None, path: str | None) -> bytes:
        return base64.b64decode(data) if data else _content(single.abs_file(path or ""))

    try:
        return _checked(
            Certificate(
                content(user.client_cert_data, user.client_cert), content(user.client_key_data, user.client_key)
            )
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the client certificate: {error}") from None


def _checked(certificate: Certificate) -> Certificate:
    try:
        certificate.load_into(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    except OSError as error:
        raise ConfigError(f"the client certificate and its key cannot be used: {error}") from None
    return certificate
