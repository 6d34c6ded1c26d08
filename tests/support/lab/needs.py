"""The requirements of a cluster on the machine."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from support.lab import cgroups
from support.lab.places import PROJECT, cache

PROGRAMS = ("go", "apt-get", "dpkg", "wget", "gpgv", "ip", "mount", "nsenter", "unshare", "setpriv")
REPLACED = ("/run", "/var/lib", "/var/log")  # each node has its own


def unmet() -> str:
    """In one line, why no cluster can run here; empty if one can."""
    if os.geteuid() != 0:
        return "it needs root, for namespaces and mounts"
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        return f"this machine has no {', '.join(missing)}"
    if not cgroups.available():
        return f"it needs cgroup v1 in {cgroups.ROOT}, which this machine does not have"
    for path in (cache(), PROJECT, Path(sys.executable)):
        if any(path.resolve().is_relative_to(replaced) for replaced in REPLACED):
            return f"nodes cannot see {path}: they have a {' '.join(REPLACED)} of their own"
    return ""
