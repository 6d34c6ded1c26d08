"""What must hold between the fields for clusters: volumes, tolerations, and what each of them needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from paceline.job.cluster import SOURCES, WORK, Credentials, Kubernetes, Toleration, Volume, name_of
from paceline.job.cluster_values import OWN
from paceline.job.errors import Finding, listed, visible
from paceline.job.fields import Strict

USED = (OWN, "/tmp", "/dev/shm")  # folders of every container that Paceline mounts something at

Path = tuple[str | int, ...]
Reported = dict[Path, set[str | int]]  # a place to the steps from it that lead to something reported
Item = TypeVar("Item")


def credentials(given: Credentials, broken: Sequence[Path]) -> Iterator[Finding]:
    reported = _reported(broken)
    for field in ("secret", "file"):
        if getattr(given, field) is None and not _touched(reported, ("credentials",), given, field):
            example = Credentials.model_fields[field].examples or [""]
            message = "is missing: credentials are a Secret and the file in it"
            yield Finding(("credentials", field), message, f"write {field}: {example[0]}")


def kubernetes(section: Kubernetes, code_in_image: bool, broken: Sequence[Path]) -> Iterator[Finding]:
    reported = _reported(broken)
    for place, toleration in _items(section.tolerations, ("kubernetes", "tolerations"), broken):
        yield from _toleration(toleration, place, reported)
    for place, source in _items(section.env_from, ("kubernetes", "env_from"), broken):
        yield from _one_of(source, ("secret", "config_map"), "a source of variables", place, reported)
    volumes = list(_items(section.volumes, ("kubernetes", "volumes"), broken))
    for place, volume in volumes:
        yield from _volume(volume, place, reported)
    work = section.work
    if any(_holds(work, folder) for folder in USED) or (_holds(OWN, work) and not _holds(WORK, work)):
        message = f'"{visible(work, 60)}" is in the way of what Paceline itself uses'
        yield Finding(("kubernetes", "work"), message, f'write "{WORK}", or a path of the image')
    # Code that is in the image, or on a volume, is nothing that Paceline would put there.
    yield from _mounts(volumes, work, USED if code_in_image else (work, *USED))


def _items(items: Sequence[Item], steps: Path, broken: Sequence[Path]) -> Iterator[tuple[Path, Item]]:
    """The items with their places in the file: those that were no mappings are not among them any more."""
    gone = {path[-1] for path in broken if path[:-1] == steps}
    places = (index for index in range(len(items) + len(gone)) if index not in gone)
    return (((*steps, index), item) for index, item in zip(places, items, strict=False))


def _reported(broken: Sequence[Path]) -> Reported:
    reported: Reported = {}
    for path in broken:
        for end in range(len(path)):
            reported.setdefault(path[:end], set()).add(path[end])
    return reported


def _touched(reported: Reported, place: Path, item: Strict, *fields: str) -> bool:
    """Whether something that is reported already may have been meant for one of these fields."""
    return any(step in fields or step not in type(item).model_fields for step in reported.get(place, ()))


def _one_of(item: Strict, fields: Sequence[str], what: str, place: Path, reported: Reported) -> Iterator[Finding]:
    given = [field for field in fields if getattr(item, field) is not None]
    if len(given) > 1:
        message = f"{what} has exactly one of {listed(fields)}, got {listed(given)}"
        yield Finding((*place, given[1]), message, f"remove {given[0]} or {given[1]}", at_key=True)
    elif not given and not _touched(reported, place, item, *fields):
        yield Finding(place, f"{what} needs one of {listed(fields)}", at_key=True)


def _volume(volume: Volume, place: Path, reported: Reported) -> Iterator[Finding]:
    yield from _one_of(volume, SOURCES, "a volume", place, reported)
    if volume.mount is None and not _touched(reported, place, volume, "mount"):
        yield Finding((*place, "mount"), "is missing: where tasks find the volume", "write mount: /data")
    kept = next((field for field in ("secret", "config_map") if getattr(volume, field) is not None), None)
    if kept is not None and volume.read_only is False:
        yield Finding((*place, "read_only"), f"has no effect: a {kept} can never be written to", "remove it")


def _mounts(volumes: Sequence[tuple[Path, Volume]], work: str, used: Sequence[str]) -> Iterator[Finding]:
    names: dict[str, Path] = {}
    mounts: dict[str, Path] = {}
    for place, volume in volumes:
        name = name_of(volume, int(place[-1]))
        if names.setdefault(name, place) is not place:
            yield Finding((*place, "name"), f'"{name}" is the name of another volume too', "give each its own")
        mount = volume.mount
        if mount is None:
            continue
        shown = f'"{visible(mount, 60)}"'
        hidden = next((folder for folder in used if _holds(mount, folder)), None)
        if hidden is None and _holds(OWN, mount) and not _holds(work, mount):
            hidden = OWN
        if mounts.setdefault(mount, place) is not place:
            yield Finding((*place, "mount"), f"another volume is mounted at {shown} already")
        elif hidden is not None:
            message = f"{shown} is in the way of {visible(hidden, 60)}, which Paceline itself uses"
            yield Finding((*place, "mount"), message, "choose another path, or one below kubernetes.work")


def _holds(folder: str, path: str) -> bool:
    return f"{path}/".startswith(f"{folder}/")


def _toleration(item: Toleration, place: Path, reported: Reported) -> Iterator[Finding]:
    if item.key is None and item.operator != "Exists" and not _touched(reported, place, item, "key", "operator"):
        hint = "write its key, or operator: Exists for every taint"
        yield Finding(place, "names no taint", hint, at_key=True)
    if item.operator == "Exists" and item.value is not None:
        yield Finding((*place, "value"), "has no effect under operator Exists", "remove it, or write operator: Equal")
    if item.seconds is not None and item.effect != "NoExecute" and not _touched(reported, place, item, "effect"):
        hint = "write effect: NoExecute" if item.effect is None else "remove it"
        yield Finding((*place, "seconds"), "has no effect: only NoExecute waits", hint)
