"""What frameworks compile is kept between starts: the folder for it, which only its owner can write, and the variables
that name it.

TensorFlow is not included: an incomplete file in its persistent XLA cache ends the program with an error.
"""

from __future__ import annotations

import grp
import hashlib
import os
import pwd
import stat
from collections.abc import Mapping

FRAMEWORKS = ("jax", "torch")
JAX, INDUCTOR, TRITON = "JAX_COMPILATION_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
FOLDER = "PACELINE_COMPILE_CACHE"  # set if Paceline has chosen JAX's folder; see jax_compile_cache.py
NAMES = ("jax", "inductor", "triton")  # of the folders that are passed to frameworks
_MIN_SECONDS = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
_HEAD = 16 * 1024  # bytes of /proc/cpuinfo: the first CPU


class UnsafeFolder(Exception):
    """The folder cannot be used; the text says why."""


def is_used(framework: str, environ: Mapping[str, str]) -> bool:
    """Whether there is a variable to set: those that the user has set, even to an empty value, are kept."""
    return bool(variables(framework, "", environ))


def variables(framework: str, folder: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables to add to `environ`.

    >>> variables("torch", "/here", {"TRITON_CACHE_DIR": "/mine"})
    {'TORCHINDUCTOR_CACHE_DIR': '/here/inductor'}
    """
    if framework == "jax" and JAX not in environ:
        # JAX does not store programs that compile within a second by default, but many starts have hundreds of those.
        seconds = {} if _MIN_SECONDS in environ else {_MIN_SECONDS: "0"}
        return {JAX: f"{folder}/jax", FOLDER: f"{folder}/jax", **seconds}
    if framework == "torch" and INDUCTOR not in environ:
        # Inductor has Triton write below its own folder, unless Triton has one.
        return {INDUCTOR: f"{folder}/inductor", **({} if TRITON in environ else {TRITON: f"{folder}/triton"})}
    return {}


def machine_key() -> str:
    """Differs between machines that cannot run each other's code: home folders may be shared by several. The path of
    the folder is otherwise constant, as it is a part of JAX's keys on GPUs."""
    try:
        with open("/proc/cpuinfo") as file:
            lines = file.read(_HEAD).split("\n")
    except OSError:
        lines = []
    features = [line for line in lines if line.lower().startswith(("model name", "flags", "features", "cpu part"))]
    identity = "\n".join([os.uname().machine, *dict.fromkeys(features)])
    return f"{os.uname().machine}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"


def make_private(root: str, *names: str) -> str:
    """Create `root/names...`, if it does not exist, and return it. Only its owner, this user, may be able to write to
    it or to replace it: entries are code."""
    for path in dict.fromkeys((root, os.path.realpath(root))):
        parent = os.path.dirname(path)
        while parent not in ("", "/"):
            _check_parent(parent)
            parent = os.path.dirname(parent)
    return make_own(root, *names)


def make_own(root: str, *names: str) -> str:
    """The same, if nobody else can reach the folder that contains `root`, as in a pod."""
    path = root
    for name in ("", *names):
        path = f"{path}/{name}" if name else path
        try:
            os.makedirs(path, 0o700, exist_ok=True)
            status = os.lstat(path)
        except OSError as error:
            raise UnsafeFolder(f"cannot create {path}: {error.strerror}") from None
        if not stat.S_ISDIR(status.st_mode):
            raise UnsafeFolder(f"{path} is not a folder")
        if status.st_uid != os.geteuid():
            raise UnsafeFolder(f"{path} belongs to another user")
        if status.st_mode & 0o077:
            raise UnsafeFolder(f"others have access to {path}; remove it")
    return path


def _check_parent(path: str) -> None:
    """Whoever can rename a folder can replace what is in it."""
    try:
        status, is_foreign_link = os.stat(path), os.lstat(path).st_uid not in (0, os.geteuid())
    except FileNotFoundError:
        return  # it is created below a folder that is checked, too
    except OSError as error:
        raise UnsafeFolder(f"cannot read {path}: {error.strerror}") from None
    if status.st_uid not in (0, os.geteuid()) or is_foreign_link:
        raise UnsafeFolder(f"{path} belongs to another user")
    is_sticky = bool(status.st_mode & stat.S_ISVTX)
    is_group_writable = bool(status.st_mode & stat.S_IWGRP) and not _is_own_group(status.st_gid)
    if not is_sticky and (status.st_mode & stat.S_IWOTH or is_group_writable):
        raise UnsafeFolder(f"others can write to {path}")


def _is_own_group(gid: int) -> bool:
    """Whether this user alone is in the group: many systems create such a group for each user."""
    if gid == 0:
        return True  # root can do everything anyway
    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
