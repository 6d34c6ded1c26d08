"""Puts images into a node's containerd without copying them: it imports marks, and mounts the layers over them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.lab.images import MARK, archive, layers

SNAPSHOTS = Path("/var/lib/containerd/io.containerd.snapshotter.v1.overlayfs/snapshots")


def import_images(names: list[str]) -> None:
    """Imports images on this node, whose containerd must be running."""
    command = ["ctr", "--namespace", "k8s.io", "images", "import", "--local", "-"]
    subprocess.run(command, input=archive(names), check=True, stdout=subprocess.DEVNULL)
    mount_layers()


def mount_layers() -> None:
    """Mounts the folder of every layer that has only a mark here, read-only; needed after each boot, too."""
    mounted = {line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()}
    for mark in SNAPSHOTS.glob(f"*/fs/{MARK}"):
        if str(mark.parent) in mounted:
            continue
        folder = layers() / mark.read_text()
        # Private: a layer is mounted several times, and a mount below one of them must not appear in the others.
        subprocess.run(["mount", "--bind", "--make-private", folder, mark.parent], check=True)
        subprocess.run(["mount", "-o", "remount,ro,bind", mark.parent], check=True)


if __name__ == "__main__":
    import_images(sys.argv[1:])
