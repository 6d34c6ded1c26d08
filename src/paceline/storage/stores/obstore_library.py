"""The obstore library, for access to buckets: loaded from a folder if this interpreter does not have it installed."""

from __future__ import annotations

import os
import shutil
import sys
import zipfile
from importlib.util import find_spec

AUTHORITIES = (  # CA certificates, as distributions install them
    "/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/ca-bundle.pem",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem", "/etc/ssl/cert.pem", "/etc/pki/tls/cacert.pem",
)  # fmt: skip
FOLDER = "obstore"


def is_here() -> bool:
    """Whether this interpreter has obstore and finds CA certificates."""
    return find_spec("obstore") is not None and _knows_authorities()


def own() -> str:
    """The folder in which obstore is installed; empty: it is not installed."""
    spec = find_spec("obstore")
    return "" if spec is None or spec.origin is None else os.path.dirname(os.path.dirname(spec.origin))


def use(folder: str) -> None:
    """Import obstore from this folder; what the interpreter has installed takes precedence."""
    if folder not in sys.path:
        sys.path.append(folder)
    certificates = f"{folder}/certifi/cacert.pem"
    if not _knows_authorities() and os.path.exists(certificates):
        os.environ["SSL_CERT_FILE"] = certificates


def unpack(archive: str, folder: str) -> None:
    """The folder appears only when it is complete; several processes may do this at the same time."""
    partial = f"{folder}.{os.urandom(4).hex()}.partial"
    try:
        with zipfile.ZipFile(archive) as packed:
            packed.extractall(partial)
        os.rename(partial, folder)
    except OSError:
        if not os.path.isdir(folder):
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _knows_authorities() -> bool:
    """Whether CA certificates are installed; without any, obstore cannot create a client."""
    if os.environ.get("SSL_CERT_FILE") or os.environ.get("SSL_CERT_DIR"):
        return True
    return any(os.path.isfile(path) for path in AUTHORITIES)
