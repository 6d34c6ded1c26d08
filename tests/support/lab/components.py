"""Fetches and builds what a cluster is made of, each component once a machine, pinned by version and checksum."""

from __future__ import annotations

import hashlib
import os
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from support.lab.places import LAB, cache, key, made_once, say

VERSION = "v1.36.4"
BUILD = LAB / "build"
DEBIAN = LAB / "debian.txt"
LOAD = LAB / "load.txt"
GO_FLAGS = "-buildvcs=false -mod=readonly -trimpath"


class BuildFailed(Exception):
    """A component could not be fetched or built; the message says which, and ends with what the tool said."""


@dataclass(frozen=True)
class Component:
    """A Go module of our own in build/<name>/ whose go.mod and go.sum pin one upstream and all it needs."""

    name: str
    packages: tuple[str, ...]
    link: str = "-s -w"
    renamed: Mapping[str, str] = field(default_factory=dict)


def _kubernetes() -> Component:
    major, minor, _ = VERSION.removeprefix("v").split(".")
    link = ["-s", "-w"]
    for package in ("k8s.io/client-go/pkg/version", "k8s.io/component-base/version"):
        stamped = {"gitVersion": VERSION, "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
        link += [f"-X {package}.{name}={value}" for name, value in stamped.items()]
    programs = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "kubectl")
    return Component("kubernetes", tuple(f"k8s.io/kubernetes/cmd/{program}" for program in programs), " ".join(link))


_CONTAINERD = "github.com/containerd/containerd/v2/cmd"
COREDNS = Component("coredns", (".",))
PAUSE = Component("pause", (".",))
KWOK = Component("kwok", ("sigs.k8s.io/kwok/cmd/kwok",))  # only for those who ask for simulated nodes
COMPONENTS = (
    _kubernetes(),
    Component("etcd", ("go.etcd.io/etcd/server/v3",), renamed={"server": "etcd"}),
    Component(
        "containerd", tuple(f"{_CONTAINERD}/{name}" for name in ("containerd", "containerd-shim-runc-v2", "ctr"))
    ),
    COREDNS,
    PAUSE,
)


@dataclass(frozen=True)
class Parts:
    """Where the built parts are: folders of programs, and the root that the Debian packages were unpacked into."""

    programs: tuple[Path, ...]
    debian: Path

    @property
    def path(self) -> str:
        """For PATH: ours first, then the machine's."""
        ours = [self.debian / "wrapped", *self.programs, self.debian / "usr/sbin", self.debian / "usr/bin"]
        return ":".join([*map(str, ours), "/usr/sbin", "/usr/bin", "/sbin", "/bin"])

    def program(self, name: str) -> Path:
        return next(path for folder in self.programs if (path := folder / name).exists())

    @property
    def cni(self) -> Path:
        return self.debian / "usr/lib/cni"

    @property
    def runc(self) -> Path:
        return self.debian / "usr/sbin/runc"


def build() -> Parts:
    """All parts, those that are missing fetched and built."""
    debian = made_once(cache() / "debian" / key(DEBIAN.read_bytes(), _WRAPPED), _unpack_debian)
    return Parts(tuple(_built(component) for component in COMPONENTS), debian)


def simulator() -> Path:
    """The program that plays simulated nodes, built if it is missing."""
    return _built(KWOK) / KWOK.name


def versioned(component: Component) -> str:
    """Its name with the key of everything that it is built from."""
    pins = [path.read_bytes() for path in sorted((BUILD / component.name).iterdir())]
    return f"{component.name}-{key(*pins, *component.packages, component.link, GO_FLAGS)}"


def _built(component: Component) -> Path:
    return made_once(cache() / "components" / versioned(component), lambda folder: _go(component, folder))


def _go(component: Component, folder: Path) -> None:
    say(f"building {component.name} ...")
    began = time.monotonic()
    env = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": GO_FLAGS, "GOWORK": "off"}
    command = ["nice", "go", "build", "-ldflags", component.link, "-o", f"{folder}/", *component.packages]
    # Go's own cache keeps every package that is done: a build that was interrupted goes on where it was.
    _run(command, cwd=BUILD / component.name, env=env, what=f"build {component.name}")
    for old, new in component.renamed.items():
        (folder / old).rename(folder / new)
    say(f"built {component.name} in {time.monotonic() - began:.0f} s")


# ---- Debian packages: unpacked into a folder of ours, never installed

_WRAPPED = """#!/bin/sh
root=$(dirname "$(dirname "$(readlink -f "$0")")")
LD_LIBRARY_PATH=$root/usr/lib/x86_64-linux-gnu:$root/lib/x86_64-linux-gnu exec "$root/usr/sbin/${0##*/}" "$@"
"""


@dataclass(frozen=True)
class Package:
    name: str
    version: str
    sha256: str


def packages(pins: Path = DEBIAN) -> list[Package]:
    lines = (line.split() for line in pins.read_text().splitlines() if not line.startswith("#"))
    return [Package(*words) for words in lines]


def unpack(pins: Path, folder: Path) -> None:
    """The packages that a file of pins names, fetched by apt and checked, into a folder."""
    archives = folder / "archives"
    archives.mkdir()
    pinned = packages(pins)
    fetch = ["apt-get", "-qq", "download", *(f"{package.name}={package.version}" for package in pinned)]
    if subprocess.run(fetch, cwd=archives, capture_output=True).returncode:
        _run(["apt-get", "-qq", "update"], what="update the lists of Debian packages")
        _run(fetch, cwd=archives, what=f"fetch the Debian packages that {pins.name} names (lab lock renews it)")
    digests = {hashlib.sha256(path.read_bytes()).hexdigest(): path for path in archives.iterdir()}
    for package in pinned:
        if package.sha256 not in digests:
            raise BuildFailed(f"{package.name} {package.version} does not have the checksum of {pins.name}")
        _run(["dpkg", "-x", str(digests[package.sha256]), str(folder)], what=f"unpack {package.name}")


def wrk() -> Path:
    """The program that puts a server under load; needs no root."""
    folder = made_once(cache() / "debian" / key(LOAD.read_bytes()), lambda partial: unpack(LOAD, partial))
    return folder / "usr/bin/wrk"


def _unpack_debian(folder: Path) -> None:
    unpack(DEBIAN, folder)
    wrapped = folder / "wrapped" / "nft"
    wrapped.parent.mkdir()
    wrapped.write_text(_WRAPPED)
    wrapped.chmod(0o755)


def lock_debian() -> None:
    """Rewrite the files of pins with what apt offers now for the same packages."""
    _run(["apt-get", "-qq", "update"], what="update the lists of Debian packages")
    for pins in (DEBIAN, LOAD):
        comments = [line for line in pins.read_text().splitlines() if line.startswith("#")]
        rows = []
        for package in packages(pins):
            shown = _run(["apt-cache", "show", "--no-all-versions", package.name], what=f"look up {package.name}")
            fields = dict(line.split(": ", 1) for line in shown.splitlines() if ": " in line)
            rows.append(f"{package.name} {fields['Version']} {fields['SHA256']}")
        pins.write_text("\n".join([*comments, *rows]) + "\n")


def _run(command: list[str], what: str, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise BuildFailed(f"could not {what}: {command[0]} ended with {done.returncode}\n{done.stderr[-3000:]}")
    return done.stdout
