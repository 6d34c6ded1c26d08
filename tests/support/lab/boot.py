"""PID 1 of a node: sets up mounts and network, starts containerd, kubelet and kube-proxy, and keeps them running."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from support.lab import control, network, store
from support.lab.node import Machine
from support.lab.places import LAB

LIMIT_S = 180.0
PAUSE_S = 1.0  # before a service that ended is restarted


def main(machine: Machine) -> None:
    os.environ["PATH"] = machine.path
    socket.sethostname(machine.name)
    _mounts(machine)
    _network_settings()
    _configuration(machine)
    store.mount_layers()
    services = [Service("containerd", ["containerd", "--config", "/run/containerd.toml"])]
    _until("containerd answers", lambda: Path("/run/containerd/containerd.sock").exists() and _quiet("ctr", "version"))
    # Before the kubelet, which would start pods whose images are still missing.
    store.import_images(list(machine.images))
    _until("the API server answers", lambda: control.api_ready(machine.pki))
    services.append(Service("kube-proxy", ["kube-proxy", "--config=/run/kube-proxy.yaml", "--v=2"]))
    services.append(Service("kubelet", _kubelet(machine), before=lambda: _kubelet_configuration(machine)))
    _keep(services)


class Service:
    """A program that is restarted whenever it ends."""

    def __init__(self, name: str, command: list[str], before: Callable[[], None] = lambda: None) -> None:
        self.name = name
        self.command = command
        self.before = before
        self.pid = 0
        self.start()

    def start(self) -> None:
        self.before()
        with Path(f"/var/log/{self.name}.log").open("ab") as log:
            process = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.pid = process.pid
        process.returncode = 0  # never waited for here: _keep() reaps all processes
        Path(f"/run/{self.name}.pid").write_text(f"{self.pid}\n")


def _keep(services: list[Service]) -> None:
    while True:
        ended, _ = os.waitpid(-1, 0)
        for service in services:
            if service.pid == ended:
                time.sleep(PAUSE_S)
                service.start()


def _mounts(machine: Machine) -> None:
    for path, mount_point in ((machine.disk, "/var/lib"), (machine.logs, "/var/log")):
        path.mkdir(parents=True, exist_ok=True)
        _do("mount", "--bind", str(path), mount_point)
    _do("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run")
    # Volumes of pods are mounted after their containers have started, and must appear in them.
    _do("mount", "--make-rshared", "/")
    for folder in ("/run/netns", "/run/cni", "/run/lock", "/var/lib/kubelet"):
        Path(folder).mkdir(exist_ok=True)


def _network_settings() -> None:
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    Path("/proc/sys/net/ipv4/conf/all/route_localnet").write_text("1")


def _configuration(machine: Machine) -> None:
    template = (LAB / "containerd.toml").read_text()
    text = template.replace("@CNI@", str(machine.cni)).replace("@RUNC@", str(machine.runc))
    Path("/run/containerd.toml").write_text(text)
    # Names outside the cluster do not resolve.
    Path("/run/resolv.conf").write_text("")
    subnet = network.pods(machine.number)
    ranges = {"type": "host-local", "dataDir": "/run/cni-addresses", "ranges": [[{"subnet": subnet}]]}
    bridge = {
        "type": "bridge",
        "bridge": "cni0",
        "isGateway": True,
        "hairpinMode": True,
        "ipMasq": False,
        "ipam": {**ranges, "routes": [{"dst": "0.0.0.0/0"}]},
    }
    _json("/run/cni/10-lab.conflist", {"cniVersion": "1.0.0", "name": "lab", "plugins": [bridge]})
    _json(
        "/run/kube-proxy.yaml",
        {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": "nftables",
            "clusterCIDR": network.PODS,
            "detectLocalMode": "ClusterCIDR",
            "hostnameOverride": machine.name,
            "clientConnection": {"kubeconfig": str(machine.pki / "kube-proxy.kubeconfig")},
            # A node must not change the limits of the machine.
            "conntrack": {"maxPerCore": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
        },
    )


def _kubelet(machine: Machine) -> list[str]:
    return [
        "kubelet", "--config=/run/kubelet.yaml", f"--kubeconfig={machine.pki / machine.name}.kubeconfig",
        f"--hostname-override={machine.name}", f"--node-ip={network.address(machine.number)}", "--v=2",
    ]  # fmt: skip


def _kubelet_configuration(machine: Machine) -> None:
    """Written at each start: the reserved resources may have changed."""
    _json(
        "/run/kubelet.yaml",
        {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "failCgroupV1": False,
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": machine.cgroup,
            "failSwapOn": False,
            "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
            "address": network.address(machine.number),
            "healthzBindAddress": "127.0.0.1",
            "clusterDNS": [network.DNS_SERVICE],
            "clusterDomain": "cluster.local",
            "resolvConf": "/run/resolv.conf",
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(machine.pki / "ca.crt")},
            },
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": str(machine.pki / f"{machine.name}.crt"),
            "tlsPrivateKeyFile": str(machine.pki / f"{machine.name}.key"),
            "evictionHard": {"memory.available": "100Mi", "nodefs.available": "2Gi", "imagefs.available": "2Gi"},
            "imageGCHighThresholdPercent": 100,
            "imageGCLowThresholdPercent": 99,
            "nodeStatusUpdateFrequency": "5s",
            "systemReserved": machine.reserved(),
        },
    )


def _json(path: str, value: object) -> None:
    Path(path).write_text(json.dumps(value))


def _until(description: str, check: Callable[[], bool]) -> None:
    until = time.monotonic() + LIMIT_S
    while not check():
        if time.monotonic() > until:
            sys.exit(f"not within {LIMIT_S:g} s: {description}")
        time.sleep(0.05)


def _do(*command: str) -> None:
    subprocess.run(command, check=True)


def _quiet(*command: str) -> bool:
    return subprocess.run(command, capture_output=True).returncode == 0


if __name__ == "__main__":
    main(Machine.from_json(sys.argv[1]))
