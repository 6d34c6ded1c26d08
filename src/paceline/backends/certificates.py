"""Certificates for one run: they prove only membership in the run. The signing key is never written to disk."""

from __future__ import annotations

import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from paceline.agent.net.tls import BOARD_NAME, MEMBER_NAME, SERVER_NAME
from paceline.backends.private_files import write

VALID = datetime.timedelta(days=3 * 365)  # longer than any queue and any run
CLOCK_SKEW = datetime.timedelta(days=1)


def make(folder: Path, valid: datetime.timedelta = VALID) -> None:
    write(folder, generate(valid))


def generate(valid: datetime.timedelta = VALID) -> dict[str, str]:
    """File name -> content: ca.pem, and certificate and key for the captain, the members and TensorBoard."""
    begin = datetime.datetime.now(datetime.UTC) - CLOCK_SKEW
    end = datetime.datetime.now(datetime.UTC) + valid
    authority = ec.generate_private_key(ec.SECP256R1())
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a run of paceline")])

    def sign(name: x509.Name, key: ec.EllipticCurvePrivateKey, server_name: str | None, is_authority: bool) -> str:
        builder = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(issuer)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(begin)
            .not_valid_after(end)
            .add_extension(
                x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None), critical=True
            )
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)
        )
        if is_authority:
            usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
            builder = builder.add_extension(usage, critical=True)
        else:
            uses = [ExtendedKeyUsageOID.CLIENT_AUTH] + ([ExtendedKeyUsageOID.SERVER_AUTH] if server_name else [])
            builder = builder.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        if server_name:
            builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(server_name)]), critical=False)
        return builder.sign(authority, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()

    files = {"ca.pem": sign(issuer, authority, None, True)}
    for name, server_name in (("captain", SERVER_NAME), ("member", MEMBER_NAME), ("tensorboard", BOARD_NAME)):
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        files[f"{name}.pem"] = sign(subject, key, server_name, False)
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        files[f"{name}.key"] = private.decode()
    return files
