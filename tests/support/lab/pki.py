"""Certificates and kubeconfig files: one new authority for each cluster."""

from __future__ import annotations

import base64
import datetime
import ipaddress
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from support.lab import network

LIFE = datetime.timedelta(days=365)


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, as PEM."""

    certificate: bytes
    key: bytes


def authority(name: str) -> Pair:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _subject(name, "")
    builder = _builder(subject, subject, key.public_key())
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    builder = builder.add_extension(_usage(signs=True), critical=True)
    return _pair(builder.sign(key, hashes.SHA256()), key)


def issue(signer: Pair, name: str, group: str = "", server_names: Sequence[str] = ()) -> Pair:
    """Issues a client certificate; with server names, it is also a server certificate."""
    key = ec.generate_private_key(ec.SECP256R1())
    issuer = x509.load_pem_x509_certificate(signer.certificate)
    signing_key = serialization.load_pem_private_key(signer.key, None)
    assert isinstance(signing_key, ec.EllipticCurvePrivateKey)
    builder = _builder(_subject(name, group), issuer.subject, key.public_key())
    builder = builder.add_extension(_usage(signs=False), critical=True)
    uses = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if server_names else [])]
    builder = builder.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
    if server_names:
        names = x509.SubjectAlternativeName([_general(each) for each in server_names])
        builder = builder.add_extension(names, critical=False)
    return _pair(builder.sign(signing_key, hashes.SHA256()), key)


def write(folder: Path, name: str, pair: Pair) -> None:
    for suffix, data in ((".crt", pair.certificate), (".key", pair.key)):
        path = folder / f"{name}{suffix}"
        path.touch(0o600)
        path.write_bytes(data)


def read(folder: Path, name: str) -> Pair:
    return Pair((folder / f"{name}.crt").read_bytes(), (folder / f"{name}.key").read_bytes())


def kubeconfig(server: str, ca: bytes, pair: Pair, namespace: str = "default") -> str:
    def inline(data: bytes) -> str:
        return base64.b64encode(data).decode()

    user = {"client-certificate-data": inline(pair.certificate), "client-key-data": inline(pair.key)}
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "lab", "cluster": {"server": server, "certificate-authority-data": inline(ca)}}],
            "users": [{"name": "lab", "user": user}],
            "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": "lab", "namespace": namespace}}],
            "current-context": "lab",
        },
        indent=1,
    )


def write_kubeconfig(path: Path, text: str) -> Path:
    path.touch(0o600)
    path.write_text(text)
    return path


def write_all(folder: Path, nodes: int, outside: str) -> None:
    """Writes all certificates and kubeconfigs of a cluster; `outside` is the URL of the API server for the admin."""
    folder.mkdir(mode=0o700)
    ca, front = authority("lab"), authority("lab-front-proxy")
    write(folder, "ca", ca)
    write(folder, "front", front)
    write(folder, "front-client", issue(front, "front-proxy-client"))
    kubernetes = [f"kubernetes{suffix}" for suffix in ("", ".default", ".default.svc", ".default.svc.cluster.local")]
    api_names = [*kubernetes, "localhost", "127.0.0.1", network.API, network.API_SERVICE]
    write(folder, "apiserver", issue(ca, "kube-apiserver", server_names=api_names))
    write(folder, "kubelet-client", issue(ca, "apiserver-kubelet-client", "system:masters"))
    inside = f"https://{network.API}:{network.API_PORT}"
    for name, user, group in (
        ("inside", "admin", "system:masters"),
        ("kube-controller-manager", "system:kube-controller-manager", ""),
        ("kube-scheduler", "system:kube-scheduler", ""),
        ("kube-proxy", "system:kube-proxy", ""),
    ):
        write_kubeconfig(folder / f"{name}.kubeconfig", kubeconfig(inside, ca.certificate, issue(ca, user, group)))
    for number in range(1, nodes + 1):
        node = f"n{number}"
        pair = issue(ca, f"system:node:{node}", "system:nodes", [node, network.address(number)])
        write(folder, node, pair)
        write_kubeconfig(folder / f"{node}.kubeconfig", kubeconfig(inside, ca.certificate, pair))
    admin = issue(ca, "admin", "system:masters")
    write_kubeconfig(folder / "admin.kubeconfig", kubeconfig(outside, ca.certificate, admin))
    _write_service_account_key(folder)


def _write_service_account_key(folder: Path) -> None:
    key = rsa.generate_private_key(65537, 2048)
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    write(folder, "service-accounts", Pair(public, _pem(key)))


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(now - datetime.timedelta(hours=1)).not_valid_after(now + LIFE)


def _subject(name: str, group: str) -> x509.Name:
    attributes = [x509.NameAttribute(NameOID.COMMON_NAME, name)]
    if group:
        attributes.append(x509.NameAttribute(NameOID.ORGANIZATION_NAME, group))
    return x509.Name(attributes)


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _usage(signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True, key_encipherment=not signs, key_cert_sign=signs, crl_sign=signs, key_agreement=False,
        content_commitment=False, data_encipherment=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _pair(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Pair:
    return Pair(certificate.public_bytes(serialization.Encoding.PEM), _pem(key))


def _pem(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> bytes:
    format = serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, format, serialization.NoEncryption())
