"""The control plane: etcd, the API server, the controller manager and the scheduler, as commands."""

from __future__ import annotations

import ssl
import urllib.error
import urllib.request
from pathlib import Path

from support.lab import network
from support.lab.places import LAB

ETCD = "http://127.0.0.1:2379"
ETCD_PEERS = "http://127.0.0.1:2380"
API = f"https://{network.API}:{network.API_PORT}"
GRACE_S = 20  # a node that is silent for this long is lost (default of Kubernetes: 50)
AUDIT = "audit.log"
TOLERATION_S = 15  # by default, pods stay this long on a lost node (default of Kubernetes: 300)


def commands(pki: Path, data: Path, logs: Path) -> dict[str, list[str]]:
    """The commands by name, in start order."""
    return {
        "etcd": [
            "etcd", "--name=lab", f"--data-dir={data}", "--unsafe-no-fsync",
            f"--listen-client-urls={ETCD}", f"--advertise-client-urls={ETCD}",
            f"--listen-peer-urls={ETCD_PEERS}", f"--initial-advertise-peer-urls={ETCD_PEERS}",
            f"--initial-cluster=lab={ETCD_PEERS}",
        ],
        "kube-apiserver": [
            "kube-apiserver", f"--etcd-servers={ETCD}",
            f"--bind-address={network.API}", f"--advertise-address={network.API}", f"--secure-port={network.API_PORT}",
            f"--service-cluster-ip-range={network.SERVICES}", "--allow-privileged=true",
            "--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction",
            f"--tls-cert-file={pki}/apiserver.crt", f"--tls-private-key-file={pki}/apiserver.key",
            f"--client-ca-file={pki}/ca.crt", f"--kubelet-certificate-authority={pki}/ca.crt",
            f"--kubelet-client-certificate={pki}/kubelet-client.crt", f"--kubelet-client-key={pki}/kubelet-client.key",
            "--kubelet-preferred-address-types=InternalIP",
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
            f"--service-account-key-file={pki}/service-accounts.crt",
            f"--service-account-signing-key-file={pki}/service-accounts.key",
            f"--requestheader-client-ca-file={pki}/front.crt", "--requestheader-allowed-names=front-proxy-client",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-", "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-username-headers=X-Remote-User",
            f"--proxy-client-cert-file={pki}/front-client.crt", f"--proxy-client-key-file={pki}/front-client.key",
            f"--default-not-ready-toleration-seconds={TOLERATION_S}",
            f"--default-unreachable-toleration-seconds={TOLERATION_S}",
            f"--audit-policy-file={LAB}/audit.yaml", f"--audit-log-path={logs}/{AUDIT}",
        ],
        "kube-controller-manager": [
            "kube-controller-manager", *_as(pki, "kube-controller-manager"),
            f"--cluster-signing-cert-file={pki}/ca.crt", f"--cluster-signing-key-file={pki}/ca.key",
            f"--root-ca-file={pki}/ca.crt", f"--service-account-private-key-file={pki}/service-accounts.key",
            "--use-service-account-credentials=true", "--allocate-node-cidrs=false",
            f"--node-monitor-grace-period={GRACE_S}s", "--node-monitor-period=2s",
            # Its default limits would delay the start by 5 s.
            "--kube-api-qps=200", "--kube-api-burst=400",
        ],
        "kube-scheduler": ["kube-scheduler", *_as(pki, "kube-scheduler")],
    }  # fmt: skip


def _as(pki: Path, name: str) -> list[str]:
    config = f"{pki}/{name}.kubeconfig"
    uses = [f"--{use}kubeconfig={config}" for use in ("", "authentication-", "authorization-")]
    return [*uses, "--bind-address=127.0.0.1", "--leader-elect=false"]


def etcd_ready() -> bool:
    return _answers(f"{ETCD}/health", None)


def api_ready(pki: Path) -> bool:
    """Whether the API server is ready; needs no credentials."""
    return _answers(f"{API}/readyz", ssl.create_default_context(cafile=str(pki / "ca.crt")))


def _answers(url: str, context: ssl.SSLContext | None) -> bool:
    handlers = [urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)]
    try:
        with urllib.request.build_opener(*handlers).open(url, timeout=2) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False
