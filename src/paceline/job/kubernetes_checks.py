"""Checks across the fields for clusters: credentials, tolerations, variables and volumes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from paceline.job.errors import Finding, join_names, visible
from paceline.job.fields import Strict
from paceline.job.kubernetes_section import SOURCES, WORK, Credentials, Kubernetes, Toleration, Volume, name_of
from paceline.job.kubernetes_values import OWN

USED = (OWN, "/tmp", "/dev/shm")  # folders at which Paceline mounts something in every container

Path = tuple[str | int, ...]
Reported = dict[Path, set[str | int]]  # path -> next steps that lead to a problem that is already reported
Item = TypeVar("Item")


def credentials(section: Credentials, broken: Sequence[Path]) -> Iterator[Finding]:
    reported = reported_steps(broken)
    for field in ("secret", "file"):
        if getattr(section, field) is None and not is_reported(reported, ("credentials",), section, field):
            examples = Credentials.model_fields[field].examples or [""]
            message = "is missing: credentials need a Secret and the name of a file in it"
            yield Finding(("credentials", field), message, f"write {field}: {examples[0]}")


def kubernetes(
    section: Kubernetes, roles: Sequence[str], code_in_image: bool, broken: Sequence[Path]
) -> Iterator[Finding]:
    """`roles`: of the job; the container of a pod with tasks has the name of its role."""
    reported = reported_steps(broken)
    for path, toleration in items_with_paths(section.tolerations, ("kubernetes", "tolerations"), broken):
        yield from _toleration(toleration, path, reported)
    for path, source in items_with_paths(section.env_from, ("kubernetes", "env_from"), broken):
        yield from one_of(source, ("secret", "config_map"), "an item of env_from", path, reported)
    volumes = list(items_with_paths(section.volumes, ("kubernetes", "volumes"), broken))
    for path, volume in volumes:
        yield from _volume(volume, path, reported)
    work = section.work
    if any(_contains(work, folder) for folder in USED) or (_contains(OWN, work) and not _contains(WORK, work)):
        message = f'"{visible(work, 60)}" conflicts with a folder that Paceline uses'
        yield Finding(("kubernetes", "work"), message, f'write "{WORK}", or another folder of the image')
    # With `code: image`, Paceline puts no code into `work`: a volume may be mounted there.
    yield from _mounts(volumes, work, USED if code_in_image else (work, *USED))
    for field in ("containers", "initContainers"):
        if field in section.pod:
            yield from _containers(section.pod[field], ("kubernetes", "pod", field), roles)


def _containers(patches: Any, path: Path, roles: Sequence[str]) -> Iterator[Finding]:
    """The cluster rejects a pod with a container that has no image, so a patch must be for a container that exists, or
    add a complete one."""
    if not isinstance(patches, list):
        yield Finding(path, "must be a list of containers", "write - {name: ...} for each")
        return
    own = roles if path[-1] == "containers" else ()
    exist = f"the containers are named after the roles of the job: {join_names(own)}" if own else ""
    for index, patch in enumerate(patches):
        name = patch.get("name") if isinstance(patch, dict) else None
        if not isinstance(name, str):
            yield Finding((*path, index), "a container needs a name", exist or None, at_key=True)
        elif name not in own and not patch.get("image"):
            message = f'no container is named "{visible(name, 60)}", and a new one needs an image'
            yield Finding((*path, index, "name"), message, exist or "write image: ...")


def items_with_paths(items: Sequence[Item], steps: Path, broken: Sequence[Path]) -> Iterator[tuple[Path, Item]]:
    """The items with their paths in the file. Items that are not mappings were removed before."""
    removed = {path[-1] for path in broken if path[:-1] == steps}
    indices = (index for index in range(len(items) + len(removed)) if index not in removed)
    return (((*steps, index), item) for index, item in zip(indices, items, strict=False))


def reported_steps(broken: Sequence[Path]) -> Reported:
    reported: Reported = {}
    for path in broken:
        for end in range(len(path)):
            reported.setdefault(path[:end], set()).add(path[end])
    return reported


def is_reported(reported: Reported, path: Path, item: Strict, *fields: str) -> bool:
    """Whether a problem that is already reported may concern one of these fields."""
    return any(step in fields or step not in type(item).model_fields for step in reported.get(path, ()))


def one_of(item: Strict, fields: Sequence[str], subject: str, path: Path, reported: Reported) -> Iterator[Finding]:
    present = [field for field in fields if getattr(item, field) is not None]
    if len(present) > 1:
        message = f"{subject} must have exactly one of {join_names(fields)}, got {join_names(present)}"
        yield Finding((*path, present[1]), message, f"remove {present[0]} or {present[1]}", at_key=True)
    elif not present and not is_reported(reported, path, item, *fields):
        yield Finding(path, f"{subject} needs one of {join_names(fields)}", at_key=True)


def _volume(volume: Volume, path: Path, reported: Reported) -> Iterator[Finding]:
    yield from one_of(volume, SOURCES, "a volume", path, reported)
    if volume.mount is None and not is_reported(reported, path, volume, "mount"):
        yield Finding((*path, "mount"), "is missing: a volume needs a path to be mounted at", "write mount: /data")
    source = next((field for field in ("secret", "config_map") if getattr(volume, field) is not None), None)
    if source is not None and volume.read_only is False:
        yield Finding((*path, "read_only"), f"has no effect: a {source} is always read-only", "remove it")


def _mounts(volumes: Sequence[tuple[Path, Volume]], work: str, used: Sequence[str]) -> Iterator[Finding]:
    names: dict[str, Path] = {}
    mounts: dict[str, Path] = {}
    for path, volume in volumes:
        name = name_of(volume, int(path[-1]))
        if names.setdefault(name, path) is not path:
            yield Finding((*path, "name"), f'another volume is also named "{name}"', "give each volume its own name")
        mount = volume.mount
        if mount is None:
            continue
        quoted = f'"{visible(mount, 60)}"'
        conflict = next((folder for folder in used if _contains(mount, folder)), None)
        if conflict is None and _contains(OWN, mount) and not _contains(work, mount):
            conflict = OWN
        if mounts.setdefault(mount, path) is not path:
            yield Finding((*path, "mount"), f"another volume is already mounted at {quoted}")
        elif conflict is not None:
            message = f"{quoted} conflicts with {visible(conflict, 60)}, which Paceline uses"
            yield Finding((*path, "mount"), message, "use another path, or one below kubernetes.work")


def _contains(folder: str, path: str) -> bool:
    return f"{path}/".startswith(f"{folder}/")


def _toleration(item: Toleration, path: Path, reported: Reported) -> Iterator[Finding]:
    if item.key is None and item.operator != "Exists" and not is_reported(reported, path, item, "key", "operator"):
        hint = "write a key, or operator: Exists to tolerate every taint"
        yield Finding(path, "does not name a taint", hint, at_key=True)
    if item.operator == "Exists" and item.value is not None:
        yield Finding((*path, "value"), "has no effect with operator: Exists", "remove it, or write operator: Equal")
    if item.seconds is not None and item.effect != "NoExecute" and not is_reported(reported, path, item, "effect"):
        hint = "write effect: NoExecute" if item.effect is None else "remove it"
        yield Finding((*path, "seconds"), "has no effect: it applies only to effect: NoExecute", hint)
