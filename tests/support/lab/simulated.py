"""Nodes that are not there: kwok says for them that they are Ready and that their pods run, so that thousands fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.lab import network
from support.lab.places import LAB, Place

PROGRAM = "kwok"
LABEL = "lab.local/simulated"
PODS = "10.240.0.0/14"  # addresses that nothing answers at
PORT = 10247
LEASE_S = 40  # renewed every quarter of it, well before a silent node counts as lost

# For pods: they go nowhere else, and nobody else's go there.
SELECTOR = {LABEL: "true"}
TOLERATION = {"key": LABEL, "operator": "Exists", "effect": "NoSchedule"}


def command(place: Place, program: Path, start_s: float) -> list[str]:
    """Inside the cluster's namespaces, beside its control plane; a pod runs so long after it was placed."""
    output = place.folder / "simulated.log"
    output.touch()
    config = place.folder / "kwok.yaml"
    template = (LAB / "kwok.yaml").read_text()
    config.write_text(template.replace("@OUTPUT@", str(output)).replace("@START_MS@", str(round(1000 * start_s))))
    return [
        str(program), f"--config={config}", f"--kubeconfig={place.pki}/inside.kubeconfig",
        f"--manage-nodes-with-label-selector={LABEL}=true", f"--node-lease-duration-seconds={LEASE_S}",
        f"--cidr={PODS}", f"--node-ip={network.API}", f"--node-port={PORT}",
        # The API server asks it for the output of pods, as it would ask a kubelet.
        f"--tls-cert-file={place.pki}/apiserver.crt", f"--tls-private-key-file={place.pki}/apiserver.key",
    ]  # fmt: skip


def node(number: int) -> dict[str, Any]:
    name = f"simulated-{number}"
    room = {"cpu": "256", "memory": "1Ti", "pods": "110"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {**SELECTOR, "kubernetes.io/hostname": name}},
        "spec": {"taints": [{"key": LABEL, "value": "true", "effect": "NoSchedule"}]},
        "status": {"allocatable": room, "capacity": room},
    }
