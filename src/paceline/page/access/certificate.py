"""A self-signed certificate for the page, whose fingerprint the user compares with what the browser shows."""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import ssl
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from paceline.errors import PacelineError

_VALID = datetime.timedelta(days=90)
_CLOCK_SKEW = datetime.timedelta(days=1)
CERTIFICATE, KEY = "page.pem", "page.key"


def make(folder: Path, names: Sequence[str]) -> tuple[Path, Path]:
    """Writes a certificate and its key to the folder. `names`: host names and addresses of the server."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "paceline page")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + _VALID)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([_name(each) for each in names]), critical=False)
        .sign(key, hashes.SHA256())
    )
    paths = folder / CERTIFICATE, folder / KEY
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    paths[1].touch(mode=0o600)
    paths[1].write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return paths


def fingerprint(certificate: Path) -> str:
    """SHA-256, as browsers show it."""
    digest = hashlib.sha256(ssl.PEM_cert_to_DER_cert(_first(certificate.read_text()))).hexdigest().upper()
    return ":".join(digest[index : index + 2] for index in range(0, len(digest), 2))


def check(certificate: Path, key: Path) -> None:
    """PacelineError: they cannot be used."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=lambda: "")
    except (OSError, ValueError) as error:
        what = (
            f"cannot use this certificate with this key: {error.strerror or error}"
            if isinstance(error, OSError)
            else f"cannot use this certificate: {error}"
        )
        raise PacelineError(
            what, where=str(certificate), remedy="use files in PEM format, without a passphrase"
        ) from None


def _first(text: str) -> str:
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    return text[text.index(begin) : text.index(end) + len(end)]


def _name(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text.strip("[]")))
    except ValueError:
        return x509.DNSName(text)
