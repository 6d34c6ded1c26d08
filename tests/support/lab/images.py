"""The container images of the lab: folders that are built once per machine, and small archives that refer to them."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import stat
import struct
import subprocess
import tarfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from support.lab.components import COREDNS, DEBIAN, PAUSE, BuildFailed, Component, Parts, versioned
from support.lab.pins import needed
from support.lab.places import PROJECT, cache, key, made_once, say

MARK = ".lab-layer"  # the only file in a layer's archive: it names the folder to mount instead
PACKAGES = "usr/local/lib/python3.11/dist-packages"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Layer:
    """A folder of files and how to build it; its content depends only on `recipe`."""

    name: str
    recipe: tuple[str, ...]
    make: Callable[[Parts, Path], None]

    @property
    def key(self) -> str:
        return f"{self.name}-{key(*self.recipe)}"


@dataclass(frozen=True)
class Image:
    reference: str
    layers: tuple[Layer, ...]
    entrypoint: tuple[str, ...] = ()
    user: str = ""


# ---- layers


def _program(component: Component) -> Layer:
    def make(parts: Parts, folder: Path) -> None:
        shutil.copy2(parts.program(component.name), folder)

    return Layer(component.name, (versioned(component),), make)


def _busybox(parts: Parts, folder: Path) -> None:
    for name in ("bin", "etc", "tmp", "proc", "sys", "dev", "root"):
        (folder / name).mkdir()
    (folder / "tmp").chmod(0o1777)
    busybox = shutil.copy2(parts.debian / "bin/busybox", folder / "bin")
    for applet in subprocess.check_output([busybox, "--list"], text=True).split():
        if applet != "busybox":
            (folder / "bin" / applet).symlink_to("busybox")
    (folder / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (folder / "etc/group").write_text("root:x:0:\n")


def _debian_python(parts: Parts, folder: Path) -> None:
    archives = cache() / "archives"
    archives.mkdir(exist_ok=True)
    command = [
        # Its mounts and processes disappear when it ends, however it ends.
        "unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc",
        str(parts.debian / "usr/sbin/debootstrap"), "--variant=minbase", "--include=python3",
        f"--keyring={parts.debian}/usr/share/keyrings/debian-archive-keyring.gpg", f"--cache-dir={archives}",
        "bookworm", str(folder), _mirror(),
    ]  # fmt: skip
    env = {**os.environ, "DEBOOTSTRAP_DIR": str(parts.debian / "usr/share/debootstrap")}
    _run(command, env)
    for name in ("var/cache/apt/archives", "var/lib/apt/lists", "usr/share/doc", "usr/share/man"):
        shutil.rmtree(folder / name, ignore_errors=True)


def _mirror() -> str:
    """The mirror from which apt on this machine fetches Debian 12."""
    command = ["apt-get", "indextargets", "--format", "$(SITE)", "Created-By: Packages", "Release: bookworm"]
    sites = subprocess.check_output(command, text=True).split()
    if not sites:
        raise BuildFailed("apt on this machine has no source for Debian 12 (bookworm)")
    return sites[0]


def _python_by_one_name(parts: Parts, folder: Path) -> None:
    """A layer over Debian's Python in which the interpreter is only called `python`."""
    programs = folder / "usr/bin"
    programs.mkdir(parents=True)
    shutil.copy2(layer_folder(PYTHON, parts) / "usr/bin/python3.11", programs / "python")
    for removed in ("python3", "python3.11"):
        os.mknod(programs / removed, stat.S_IFCHR, 0)  # a whiteout: overlayfs treats the file as deleted


def _packages(name: str, *packages: str) -> Layer:
    """Python packages in the versions that the project is tested with."""
    locked = needed(*packages)

    def make(parts: Parts, folder: Path) -> None:
        command = [
            str(PROJECT / ".tools/bin/uv"), "pip", "install", "--quiet", "--no-config", "--no-deps", "--require-hashes",
            "--compile-bytecode", "--link-mode=hardlink", f"--python={PROJECT}/.venv", f"--target={folder / PACKAGES}",
            "--requirements=-",
        ]  # fmt: skip
        _run(command, dict(os.environ), locked)

    return Layer(name, (locked,), make)


def _own_package() -> Layer:
    """Paceline itself, from this checkout."""
    source = PROJECT / "src/paceline"
    files = sorted(source.rglob("*.py"))

    def make(parts: Parts, folder: Path) -> None:
        for path in files:
            target = folder / PACKAGES / "paceline" / path.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)

    return Layer("paceline", (key(*(path.read_bytes() for path in files)),), make)


def _shell_of_another_processor(parts: Parts, folder: Path) -> None:
    """The ELF header of a program for IBM mainframes; no test machine can execute it."""
    (folder / "bin").mkdir()
    identity = b"\x7fELF" + bytes((2, 2, 1)) + bytes(9)  # 64 bits, big-endian
    head = struct.pack(">HHIQQQIHHHHHH", 2, 22, 1, 0, 0, 0, 0, 64, 56, 0, 64, 0, 0)
    (folder / "bin/sh").write_bytes(identity + head)
    (folder / "bin/sh").chmod(0o755)


PYTHON = Layer("python", ("bookworm", "1"), _debian_python)
TORCH_JAX = _packages("torch-jax", "torch", "jax", "flatbuffers")
SERVE = _packages("serve", "httptools", "orjson", "starlette", "uvicorn", "uvloop")
IMAGES = {
    "pause": Image("lab.local/pause:1", (_program(PAUSE),), ("/pause",)),
    "coredns": Image("lab.local/coredns:1", (_program(COREDNS),), ("/coredns",)),
    "busybox": Image("lab.local/busybox:1", (Layer("busybox", (DEBIAN.read_text(), "1"), _busybox),)),
    "foreign": Image("lab.local/foreign:1", (Layer("foreign", ("1",), _shell_of_another_processor),)),
    "plain": Image("lab.local/python:1", (PYTHON,)),
    "numbered": Image("lab.local/numbered:1", (PYTHON,), (), "65534"),
    "python-only": Image(
        "lab.local/python-only:1", (PYTHON, Layer("python-only", ("1",), _python_by_one_name)), (), "root"
    ),
    "tensorflow": Image(
        "lab.local/tensorflow:1", (PYTHON, _packages("tensorflow", "tensorflow-cpu", "keras", "tensorboard", "mlxtend"))
    ),
    "torch-jax": Image("lab.local/torch-jax:1", (PYTHON, TORCH_JAX)),
    "serve": Image("lab.local/serve:1", (PYTHON, TORCH_JAX, SERVE, _own_package())),
}
BOOT = ("pause", "coredns")


def layer_folder(layer: Layer, parts: Parts) -> Path:
    def make(folder: Path) -> None:
        say(f"building image layer {layer.name} ...")
        started = time.monotonic()
        (folder / MARK).write_text(layer.key)
        layer.make(parts, folder)
        folder.chmod(0o755)
        say(f"built image layer {layer.name} in {time.monotonic() - started:.0f} s")

    return made_once(layers() / layer.key, make)


def layers() -> Path:
    return cache() / "layers"


def build(parts: Parts, names: Sequence[str]) -> None:
    """Builds the missing layers of these images."""
    for name in names:
        for layer in IMAGES[name].layers:
            layer_folder(layer, parts)


# ---- the archive that containerd imports


def archive(names: Sequence[str]) -> bytes:
    """A Docker archive of these images; each layer contains only its mark."""
    blobs: dict[str, bytes] = {}
    manifest = []
    for image in (IMAGES[name] for name in names):
        contents = {f"{layer.key}.tar": _tar({MARK: layer.key.encode()}) for layer in image.layers}
        config = {
            "architecture": "amd64",
            "os": "linux",
            "created": "1970-01-01T00:00:00Z",
            "config": {
                "Env": [f"PATH={PATH}"],
                "Entrypoint": list(image.entrypoint),
                "Cmd": [] if image.entrypoint else ["/bin/sh"],
                "User": image.user,
            },
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{_digest(data)}" for data in contents.values()]},
        }
        encoded = json.dumps(config).encode()
        name = f"{_digest(encoded)}.json"
        blobs |= {**contents, name: encoded}
        manifest.append({"Config": name, "RepoTags": [image.reference], "Layers": list(contents)})
    return _tar({**blobs, "manifest.json": json.dumps(manifest).encode()})


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _tar(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def _run(command: list[str], env: dict[str, str], input: str = "") -> None:
    result = subprocess.run(command, env=env, input=input, capture_output=True, text=True)
    if result.returncode:
        output = (result.stdout + result.stderr)[-3000:]
        raise BuildFailed(f"could not build an image: {command[0]} ended with {result.returncode}\n{output}")
