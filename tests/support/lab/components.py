"""Fetches and builds the components of a cluster, each once per machine, pinned by version and checksum."""

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
PROMETHEUS = LAB / "prometheus.txt"
GO_FLAGS = "-buildvcs=false -mod=readonly -trimpath"


class BuildFailed(Exception):
    """A component could not be fetched or built; the message names it and ends with the output of the tool."""


@dataclass(frozen=True)
class Component:
    """A Go module in build/<name>/ whose go.mod and go.sum pin one upstream project and its dependencies."""

    name: str
    packages: tuple[str, ...]
    link: str = "-s -w"
    renamed: Mapping[str, str] = field(default_factory=dict)


def _kubernetes() -> Component:
    major, minor, _ = VERSION.removeprefix("v").split(".")
    link = ["-s", "-w"]
    for package in ("k8s.io/client-go/pkg/version", "k8s.io/component-base/version"):
        variables = {"gitVersion": VERSION, "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
        link += [f"-X {package}.{name}={value}" for name, value in variables.items()]
    programs = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "kubectl")
    return Component("kubernetes", tuple(f"k8s.io/kubernetes/cmd/{program}" for program in programs), " ".join(link))


_CONTAINERD = "github.com/containerd/containerd/v2/cmd"
COREDNS = Component("coredns", (".",))
PAUSE = Component("pause", (".",))
KWOK = Component("kwok", ("sigs.k8s.io/kwok/cmd/kwok",))  # only for simulated nodes
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
    """The built parts: folders of programs, and the root into which the Debian packages were unpacked."""

    programs: tuple[Path, ...]
    debian: Path

    @property
    def path(self) -> str:
        """The value of PATH: our programs first, then those of the machine."""
        folders = [self.debian / "wrapped", *self.programs, self.debian / "usr/sbin", self.debian / "usr/bin"]
        return ":".join([*map(str, folders), "/usr/sbin", "/usr/bin", "/sbin", "/bin"])

    def program(self, name: str) -> Path:
        return next(path for folder in self.programs if (path := folder / name).exists())

    @property
    def cni(self) -> Path:
        return self.debian / "usr/lib/cni"

    @property
    def runc(self) -> Path:
        return self.debian / "usr/sbin/runc"


def build() -> Parts:
    """All parts; missing ones are fetched and built."""
    debian = made_once(cache() / "debian" / key(DEBIAN.read_bytes(), _WRAPPED), _unpack_debian)
    return Parts(tuple(_built(component) for component in COMPONENTS), debian)


def simulator() -> Path:
    """The program that simulates nodes; built if it is missing."""
    return _built(KWOK) / KWOK.name


def versioned(component: Component) -> str:
    """The name of the component with a hash of everything that it is built from."""
    pins = [path.read_bytes() for path in sorted((BUILD / component.name).iterdir())]
    return f"{component.name}-{key(*pins, *component.packages, component.link, GO_FLAGS)}"


def _built(component: Component) -> Path:
    return made_once(cache() / "components" / versioned(component), lambda folder: _go(component, folder))


def _go(component: Component, folder: Path) -> None:
    say(f"building {component.name} ...")
    started = time.monotonic()
    env = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": GO_FLAGS, "GOWORK": "off"}
    command = ["nice", "go", "build", "-ldflags", component.link, "-o", f"{folder}/", *component.packages]
    # Go caches every finished package: an interrupted build resumes where it stopped.
    _run(command, cwd=BUILD / component.name, env=env, action=f"build {component.name}")
    for old, new in component.renamed.items():
        (folder / old).rename(folder / new)
    say(f"built {component.name} in {time.monotonic() - started:.0f} s")


# ---- Debian packages: unpacked into our own folder, never installed

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
    return [Package(*fields) for fields in lines]


def unpack(pins: Path, folder: Path) -> None:
    """Unpacks the packages of a pin file into a folder; apt fetches them, and their checksums are verified."""
    archives = folder / "archives"
    archives.mkdir()
    pinned = packages(pins)
    fetch = ["apt-get", "-qq", "download", *(f"{package.name}={package.version}" for package in pinned)]
    if subprocess.run(fetch, cwd=archives, capture_output=True).returncode:
        _run(["apt-get", "-qq", "update"], action="update the lists of Debian packages")
        _run(fetch, cwd=archives, action=f"fetch the Debian packages that {pins.name} names (lab lock renews it)")
    digests = {hashlib.sha256(path.read_bytes()).hexdigest(): path for path in archives.iterdir()}
    for package in pinned:
        if package.sha256 not in digests:
            raise BuildFailed(f"{package.name} {package.version} does not have the checksum of {pins.name}")
        _run(["dpkg", "-x", str(digests[package.sha256]), str(folder)], action=f"unpack {package.name}")


def wrk() -> Path:
    """The program that puts load on a server; does not need root."""
    folder = made_once(cache() / "debian" / key(LOAD.read_bytes()), lambda partial: unpack(LOAD, partial))
    return folder / "usr/bin/wrk"


def prometheus() -> Path:
    """The folder with the programs prometheus and promtool; does not need root."""
    pins = key(PROMETHEUS.read_bytes())
    return made_once(cache() / "debian" / pins, lambda partial: unpack(PROMETHEUS, partial)) / "usr/bin"


def _unpack_debian(folder: Path) -> None:
    unpack(DEBIAN, folder)
    wrapped = folder / "wrapped" / "nft"
    wrapped.parent.mkdir()
    wrapped.write_text(_WRAPPED)
    wrapped.chmod(0o755)


def lock_debian() -> None:
    """Updates the pin files to the versions that apt offers now."""
    _run(["apt-get", "-qq", "update"], action="update the lists of Debian packages")
    for pins in (DEBIAN, LOAD, PROMETHEUS):
        comments = [line for line in pins.read_text().splitlines() if line.startswith("#")]
        rows = []
        for package in packages(pins):
            output = _run(["apt-cache", "show", "--no-all-versions", package.name], action=f"look up {package.name}")
            fields = dict(line.split(": ", 1) for line in output.splitlines() if ": " in line)
            rows.append(f"{package.name} {fields['Version']} {fields['SHA256']}")
        pins.write_text("\n".join([*comments, *rows]) + "\n")


def _run(command: list[str], action: str, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    result = subprocess.run(command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if result.returncode:
        raise BuildFailed(f"could not {action}: {command[0]} ended with {result.returncode}\n{result.stderr[-3000:]}")
    return result.stdout
