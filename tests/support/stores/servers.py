"""The servers by kind, each with one bucket, and the settings that a client needs to use it."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import http.client
import json
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from support.stores import google, parts, signing
from support.stores.faults import Link
from support.stores.refusing import Proxy
from support.stores.serving import HOST, Port, Server, ServerFailed, running

BUCKET = "paceline"
ACCOUNT = "pacelinetests"
EMAIL = "tests@paceline.iam.gserviceaccount.com"
ANSWER_S = 30.0  # for one small request to a server that is up


@dataclass(frozen=True)
class Store:
    """A bucket on a server, or a prefix in it, as a client sees it."""

    url: str
    """Such as s3://bucket/prefix."""
    endpoint: str
    """Such as http://127.0.0.1:1234."""
    servers: tuple[Server, ...]
    known: Callable[[str], Mapping[str, str]]
    unknown: Callable[[str], Mapping[str, str]]
    reading: Callable[[str], Mapping[str, str]] | None = None

    @property
    def options(self) -> dict[str, str]:
        """The settings of a client, as environment variables."""
        return dict(self.known(self.endpoint))

    @property
    def config(self) -> dict[str, str]:
        """The same for obstore's `config`, to be used with `client_options={"allow_http": True}`."""
        return {name: value for name, value in self.options.items() if not name.endswith("_ALLOW_HTTP")}

    @property
    def port(self) -> int:
        """The port of the server itself, also for a client that uses a link."""
        return self.servers[-1].port.number

    def at(self, prefix: str) -> Store:
        return dataclasses.replace(self, url=f"{self.url}/{prefix}")

    def bucket(self, name: str) -> Store:
        """Another bucket on the same server; it does not have to exist."""
        return dataclasses.replace(self, url=f"{self.url.partition('://')[0]}://{name}")

    def through(self, link: Link | Proxy) -> Store:
        """The same location, reached through this link."""
        return dataclasses.replace(self, endpoint=link.endpoint)

    def stranger(self) -> Store:
        """The same location, with credentials that the server does not know."""
        return dataclasses.replace(self, known=self.unknown)

    def reader(self) -> Store:
        """The same location, with credentials for reading only. Supported by S3 only."""
        assert self.reading
        return dataclasses.replace(self, known=self.reading)

    def start(self) -> None:
        for server in self.servers:
            server.start()

    def stop(self) -> None:
        """Stops the servers cleanly: acknowledged data is kept. Open connections are closed."""
        for server in reversed(self.servers):
            server.stop()

    def restart(self) -> None:
        self.stop()
        self.start()


# ---- S3


@contextlib.contextmanager
def s3(folder: Path) -> Iterator[Store]:
    """Runs Versity's gateway on a folder, whose file system must support extended attributes."""
    access, secret = secrets.token_hex(10), secrets.token_hex(20)
    reader = secrets.token_hex(10)

    def options(endpoint: str, secret: str = secret, access: str = access) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": signing.REGION,
            "AWS_ACCESS_KEY_ID": access,
            "AWS_SECRET_ACCESS_KEY": secret,
        }

    def unknown(endpoint: str) -> dict[str, str]:
        return options(endpoint, secrets.token_hex(20))

    def reading(endpoint: str) -> dict[str, str]:
        return options(endpoint, secret, reader)

    server = _versitygw(folder, access, secret, reader)
    with running(folder, server):
        _let_read(server.port, access, secret, reader)
        yield Store(f"s3://{BUCKET}", _endpoint(server), (server,), options, unknown, reading)


def _versitygw(folder: Path, access: str, secret: str, reader: str = "") -> Server:
    """`reader`: the access key of a second user, with the same secret."""
    objects, users = folder / "objects", folder / "people"
    (objects / BUCKET).mkdir(parents=True)  # each folder in it is a bucket
    users.mkdir()
    accounts = {reader: {"access": reader, "secret": secret, "role": "user"}} if reader else {}
    (users / "users.json").write_text(json.dumps({"accessAccounts": accounts}))
    port = Port()
    command: list[str | Path] = [parts.versitygw(), "--port", port.address, "--iam-dir", users, "posix", objects]
    return Server("versitygw", folder, port, command, {"ROOT_ACCESS_KEY": access, "ROOT_SECRET_KEY": secret})


def _let_read(port: Port, access: str, secret: str, reader: str) -> None:
    bucket = f"arn:aws:s3:::{BUCKET}"
    resources = {"s3:ListBucket": bucket, "s3:GetObject": f"{bucket}/*"}
    rules = [
        {"Effect": "Allow", "Principal": reader, "Action": action, "Resource": resource}
        for action, resource in resources.items()
    ]
    body = json.dumps({"Statement": rules}).encode()
    path, headers = signing.s3(access, secret, "PUT", f"/{BUCKET}", {"policy": ""}, {"host": port.address}, body)
    connection = http.client.HTTPConnection(port.address, timeout=ANSWER_S)
    try:
        connection.request("PUT", path, body, headers)
        response = connection.getresponse()
        if response.status >= 300:
            raise ServerFailed(f"versitygw refused the policy: {response.status} {response.read().decode()}")
    finally:
        connection.close()


# ---- Google


@contextlib.contextmanager
def gcs(folder: Path) -> Iterator[Store]:
    """A substitute: see stores.google for its limitations."""
    access, secret = secrets.token_hex(10), secrets.token_hex(20)
    key = _key()
    upstream = _versitygw(folder, access, secret)
    port = Port()
    settings = google.Settings(HOST, port.number, upstream.port.address, access, secret, EMAIL, _public(key))
    path = folder / "google.json"
    path.write_text(json.dumps(dataclasses.asdict(settings)))
    server = Server(
        "google", folder, port, [sys.executable, "-m", google.__name__, path], {"PYTHONPATH": str(parts.TESTS)}
    )
    with running(folder, upstream, server):
        yield Store(
            f"gs://{BUCKET}",
            _endpoint(server),
            (upstream, server),
            lambda endpoint: _service_account(endpoint, key),
            lambda endpoint: _service_account(endpoint, _key()),
        )


def _service_account(endpoint: str, key: rsa.RSAPrivateKey) -> dict[str, str]:
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
    account = {"type": "service_account", "client_email": EMAIL, "private_key_id": "1", "private_key": pem}
    return {"GOOGLE_BASE_URL": endpoint, "GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(account)}


def _key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


def _public(key: rsa.RSAPrivateKey) -> str:
    return (
        key.public_key()
        .public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        .decode()
    )


# ---- Azure


@contextlib.contextmanager
def azure(folder: Path) -> Iterator[Store]:
    """Azurite."""
    key = _azure_key()
    port = Port()
    command: list[str | Path] = [
        parts.azurite(), "--blobHost", HOST, "--blobPort", str(port.number), "--location", folder,
        "--silent", "--skipApiVersionCheck", "--disableTelemetry",
    ]  # fmt: skip
    server = Server("azurite", folder, port, command, {"AZURITE_ACCOUNTS": f"{ACCOUNT}:{key}"})

    def options(endpoint: str, key: str = key) -> dict[str, str]:
        return {
            "AZURE_STORAGE_ENDPOINT": f"{endpoint}/{ACCOUNT}",
            "AZURE_ALLOW_HTTP": "true",
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": key,
        }

    def unknown(endpoint: str) -> dict[str, str]:
        return options(endpoint, _azure_key())

    with running(folder, server):
        make_container(port, key, BUCKET)
        yield Store(f"az://{BUCKET}", _endpoint(server), (server,), options, unknown)


def make_container(port: Port, key: str, name: str) -> None:
    path = f"/{ACCOUNT}/{name}"
    connection = http.client.HTTPConnection(port.address, timeout=ANSWER_S)
    try:
        connection.request("PUT", f"{path}?restype=container", headers=signing.azure_container(ACCOUNT, key, path))
        response = connection.getresponse()
        if response.status != 201:
            raise ServerFailed(f"azurite did not create the container: {response.status} {response.read().decode()}")
    finally:
        connection.close()


def _azure_key() -> str:
    return base64.b64encode(os.urandom(64)).decode()


def _endpoint(server: Server) -> str:
    return f"http://{server.port.address}"
