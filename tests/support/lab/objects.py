"""Kubernetes objects that tests need, as data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

Object = dict[str, Any]

# By API group: the resources on which a user has all permissions in their namespace.
RIGHTS = {
    "": (
        "pods", "pods/log", "pods/exec", "pods/portforward", "pods/status",
        "services", "configmaps", "secrets", "events", "persistentvolumeclaims",
    ),
    "batch": ("jobs", "jobs/status"),
    "apps": ("deployments", "deployments/scale"),
    "events.k8s.io": ("events",),
    "networking.k8s.io": ("networkpolicies", "ingresses"),
}  # fmt: skip


def namespace(name: str, restricted: bool) -> Object:
    labels = {"pod-security.kubernetes.io/enforce": "restricted"} if restricted else {}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}


def rights(user: str, namespace: str) -> list[Object]:
    """A role with all permissions on the resources of a job, in this namespace only, and its binding to the user."""
    metadata = {"name": f"person-{user}", "namespace": namespace}
    group = "rbac.authorization.k8s.io"
    rules = [{"apiGroups": [api], "resources": list(resources), "verbs": ["*"]} for api, resources in RIGHTS.items()]
    return [
        {"apiVersion": f"{group}/v1", "kind": "Role", "metadata": metadata, "rules": rules},
        {
            "apiVersion": f"{group}/v1",
            "kind": "RoleBinding",
            "metadata": metadata,
            "roleRef": {"apiGroup": group, "kind": "Role", "name": metadata["name"]},
            "subjects": [{"apiGroup": group, "kind": "User", "name": user}],
        },
    ]


def quota(namespace: str, hard: Mapping[str, str]) -> Object:
    metadata = {"name": "quota", "namespace": namespace}
    return {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": metadata, "spec": {"hard": dict(hard)}}


def volume(namespace: str, claim: str, folder: Path, size: str, node: str = "") -> list[Object]:
    """A volume backed by this folder, and its claim: usable on every node, or only on `node`."""
    name = f"{namespace}-{claim}"
    modes = ["ReadWriteOnce"] if node else ["ReadWriteMany"]
    spec: Object = {
        "capacity": {"storage": size},
        "accessModes": modes,
        "persistentVolumeReclaimPolicy": "Retain",
        "storageClassName": "",
        "claimRef": {"namespace": namespace, "name": claim},
    }
    if node:
        term = {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}]}
        spec |= {"local": {"path": str(folder)}, "nodeAffinity": {"required": {"nodeSelectorTerms": [term]}}}
    else:
        spec |= {"hostPath": {"path": str(folder), "type": "Directory"}}
    request = {"resources": {"requests": {"storage": size}}, "accessModes": modes, "storageClassName": ""}
    return [
        {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": spec},
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": claim, "namespace": namespace},
            "spec": {**request, "volumeName": name},
        },
    ]
