"""Simulated nodes: kwok reports them as Ready and their pods as running, so that thousands fit on one machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.lab import network
from support.lab.places import LAB, Place

PROGRAM = "kwok"
LABEL = "lab.local/simulated"
PODS = "10.240.0.0/14"  # nothing answers at these addresses
PORT = 10247
LEASE_S = 40  # renewed every quarter of this time, well before a silent node is considered lost

# For pods of simulated nodes: they run only there, and other pods do not.
SELECTOR = {LABEL: "true"}
TOLERATION = {"key": LABEL, "operator": "Exists", "effect": "NoSchedule"}


def command(place: Place, program: Path, start_s: float) -> list[str]:
    """The kwok command, for the namespaces of the control plane; a pod runs `start_s` seconds after it is scheduled."""
    output = place.folder / "simulated.log"
    output.touch()
    config = place.folder / "kwok.yaml"
    template = (LAB / "kwok.yaml").read_text()
    config.write_text(template.replace("@OUTPUT@", str(output)).replace("@START_MS@", str(round(1000 * start_s))))
    return [
        str(program), f"--config={config}", f"--kubeconfig={place.pki}/inside.kubeconfig",
        f"--manage-nodes-with-label-selector={LABEL}=true", f"--node-lease-duration-seconds={LEASE_S}",
        f"--cidr={PODS}", f"--node-ip={network.API}", f"--node-port={PORT}",
        # The API server requests the logs of pods from it, as from a kubelet.
        f"--tls-cert-file={place.pki}/apiserver.crt", f"--tls-private-key-file={place.pki}/apiserver.key",
    ]  # fmt: skip


def node(number: int) -> dict[str, Any]:
    name = f"simulated-{number}"
    resources = {"cpu": "256", "memory": "1Ti", "ephemeral-storage": "10Ti", "pods": "110"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {**SELECTOR, "kubernetes.io/hostname": name}},
        "spec": {"taints": [{"key": LABEL, "value": "true", "effect": "NoSchedule"}]},
        "status": {"allocatable": resources, "capacity": resources},
    }
