"""Detects whether the AMX instructions of this CPU can be used: some hypervisors report them but do not allow them, or
do not report the sizes of their registers.

If the CPU reports AMX, TensorFlow and torch use it for bfloat16 through oneDNN, which takes the sizes of the registers
from the CPU, and are killed by SIGILL if either is missing. Limiting the instruction set of oneDNN avoids that.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
from collections.abc import Mapping

from paceline.storage import boots

ABSENT, WORKS, TRAPS = "absent", "works", "traps"
OVERRIDE = "PACELINE_AMX"  # overrides the result of the probe
VARIABLE, LIMIT = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16"  # the best that oneDNN has without AMX
OLD_VARIABLE = "DNNL_MAX_CPU_ISA"  # still read by oneDNN
FINDING = "this CPU reports AMX instructions that cannot be used: bfloat16 in TensorFlow and torch crashes"
NOTE = f"{FINDING}; set {VARIABLE}={LIMIT} to avoid them"

_FLAGS = {"amx_tile", "amx_bf16"}
_HEAD = 16 * 1024  # bytes of /proc/cpuinfo: enough for the flags of the first core; reading all of it is slow
_PROBE_S = 5
_PROBED, _REFUSED, _NO_SIZES = 0, 3, 4  # exit codes of the child
_PROBE_VERSION = 2  # results of earlier versions of the probe are not used
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18  # oneDNN requests the same permission
_BFLOAT16 = bytes.fromhex(
    "c4e2784907"  # ldtilecfg (%rdi)
    "c4e27b49c0 c4e27b49c8 c4e27b49d0"  # tilezero tmm0, tmm1, tmm2
    "c4e26a5cc1"  # tdpbf16ps tmm0 += tmm1 * tmm2
    "c4e27849c0"  # tilerelease
    "c3"  # ret
)
_SIZES = bytes.fromhex(
    "53 31c0 31c9 0fa2"  # push %rbx; cpuid, leaf 0: the highest leaf
    "83f81d b800000000 720e"  # below 0x1d: return 0
    "b81d000000 b901000000 0fa2"  # cpuid, leaf 0x1d.1: the sizes of the tile registers
    "89d8"  # return %ebx: their number, and the bytes of a row
    "5bc3"  # pop %rbx; ret
)
_CODE_AT = 128  # in the page, after _SIZES
_TILES = (
    bytes([1, *[0] * 15]) + (b"\x40\0" * 3).ljust(32, b"\0") + (b"\x10" * 3).ljust(16, b"\0")
)  # 16 rows of 64 bytes


def state() -> str:
    """ABSENT, WORKS or TRAPS: what this CPU does, or what the user says."""
    override = os.environ.get(OVERRIDE)
    return override if override in (ABSENT, WORKS, TRAPS) else detected()


def detected() -> str:
    """ABSENT, WORKS or TRAPS. The probe runs once after each boot if there is a folder to cache its result."""
    if not _is_reported():
        return ABSENT
    boot_id, path = boots.boot_id(), _cache_path()
    result = _read_cache(path, boot_id)
    if result is None:
        result = probe()
        if result is not None:
            _write_cache(path, boot_id, result)
    return result or ABSENT


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables to add for a program on this CPU. A limit that is already set is kept."""
    return {VARIABLE: LIMIT} if not {VARIABLE, OLD_VARIABLE} & variables.keys() and state() == TRAPS else {}


def likely_reason(variables: Mapping[str, str]) -> str:
    """Why a program with this environment was probably killed by SIGILL."""
    if state() == TRAPS:
        limit = variables.get(VARIABLE, variables.get(OLD_VARIABLE, ""))
        if not limit or "AMX" in limit.upper() or limit.upper() in ("ALL", "DEFAULT"):
            return NOTE
        return f"{FINDING}; oneDNN was limited to {limit}, but another library may use them"
    return "it used an instruction that this CPU does not have: the program or a library may be built for another CPU"


def probe(code: bytes = _BFLOAT16, sizes: bytes = _SIZES) -> str | None:
    """Read the sizes of the tiles, then multiply two of them, in a child process, which may be killed by it. None if
    the probe could not run."""
    try:
        pid = os.fork()
        if pid == 0:
            _probe_and_exit(code, sizes)
        status = os.waitpid(pid, 0)[1]
    except OSError:  # the process limit is reached, or another thread has waited for the child
        return None
    if os.WIFSIGNALED(status):
        return TRAPS if os.WTERMSIG(status) == signal.SIGILL else None
    return {_PROBED: WORKS, _NO_SIZES: TRAPS}.get(os.WEXITSTATUS(status))


def _probe_and_exit(code: bytes, sizes: bytes) -> None:
    try:
        for number in (signal.SIGILL, signal.SIGALRM, signal.SIGSEGV, signal.SIGBUS):
            signal.signal(number, signal.SIG_DFL)
        signal.alarm(_PROBE_S)
        libc = ctypes.CDLL(None)
        libc.prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: no core dump
        if code == _BFLOAT16 and libc.syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) != 0:
            os._exit(_REFUSED)
        page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        page.write(sizes.ljust(_CODE_AT, b"\0") + code)
        address = ctypes.addressof(ctypes.c_char.from_buffer(page))
        if not ctypes.CFUNCTYPE(ctypes.c_uint32)(address)():
            os._exit(_NO_SIZES)
        ctypes.CFUNCTYPE(None, ctypes.c_char_p)(address + _CODE_AT)(_TILES)
        os._exit(_PROBED)
    except BaseException:  # executable memory is not allowed: the result is unknown, and no limit is set
        os._exit(_REFUSED)


def _is_reported() -> bool:
    if os.uname().machine != "x86_64":
        return False
    try:
        with open("/proc/cpuinfo") as file:
            lines = file.read(_HEAD).split("\n")
    except OSError:
        return False
    flags = next((line for line in lines if line.startswith("flags")), "")
    return set(flags.split()) >= _FLAGS


def _cache_path() -> str:
    """The file for the result of the probe, or an empty string if there is no folder for it."""
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return f"{folder}/paceline/amx.json" if os.path.isabs(folder) else ""


def _read_cache(path: str, boot_id: str) -> str | None:
    """The cached result, or None unless this user has written it since the last boot."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
            if os.fstat(file.fileno()).st_uid != os.geteuid():
                return None
            cached = json.load(file)
        is_valid = bool(boot_id) and cached["boot"] == boot_id and cached["probe"] == _PROBE_VERSION
        is_valid = is_valid and cached["amx"] in (ABSENT, WORKS, TRAPS)
        return str(cached["amx"]) if is_valid else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _write_cache(path: str, boot_id: str, result: str) -> None:
    if not path or not boot_id:
        return
    partial = f"{path}.{os.urandom(8).hex()}"
    try:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump({"boot": boot_id, "probe": _PROBE_VERSION, "amx": result}, file)
        os.replace(partial, path)
    except OSError:
        pass  # the probe runs again next time
