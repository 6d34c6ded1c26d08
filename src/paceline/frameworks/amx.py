"""Whether the AMX instructions of this CPU can be used: some hypervisors announce them and do not allow them.

TensorFlow and torch use them for bfloat16 where they are announced, through oneDNN, and die of SIGILL where they are
not allowed. A limit for oneDNN avoids that.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
from collections.abc import Mapping

ABSENT, WORKS, TRAPS = "absent", "works", "traps"
OVERRIDE = "PACELINE_AMX"  # one of these, instead of the probe's answer
VARIABLE, LIMIT = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16"  # the best that oneDNN has without AMX
OLD_VARIABLE = "DNNL_MAX_CPU_ISA"  # which oneDNN still reads
FINDING = "this CPU announces AMX instructions but does not allow them: bfloat16 in TensorFlow and torch crashes"
NOTE = f"{FINDING}; set {VARIABLE}={LIMIT} to avoid them"

_FLAGS = {"amx_tile", "amx_bf16"}
_HEAD = 16 * 1024  # bytes of /proc/cpuinfo: the first core's flags are among them, and the rest takes long to read
_PROBE_S = 5
_PROBED, _REFUSED = 0, 3  # exit codes of the child
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18  # oneDNN asks for it, too, and uses AMX if it is given
_BFLOAT16 = bytes.fromhex(
    "c4e2784907"  # ldtilecfg (%rdi)
    "c4e27b49c0 c4e27b49c8 c4e27b49d0"  # tilezero tmm0, tmm1, tmm2
    "c4e26a5cc1"  # tdpbf16ps tmm0 += tmm1 * tmm2
    "c4e27849c0"  # tilerelease
    "c3"  # ret
)
_TILES = (
    bytes([1, *[0] * 15]) + (b"\x40\0" * 3).ljust(32, b"\0") + (b"\x10" * 3).ljust(16, b"\0")
)  # 16 rows of 64 bytes


def state() -> str:
    """The probe runs once after each start of the machine, where there is a folder to remember its answer."""
    override = os.environ.get(OVERRIDE)
    if override in (ABSENT, WORKS, TRAPS):
        return override
    if not _announced():
        return ABSENT
    boot, path = _boot(), _memory_path()
    answer = _remembered(path, boot)
    if answer is None:
        answer = probe()
        if answer is not None:
            _remember(path, boot, answer)
    return answer or ABSENT


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """What a program needs besides what it is given, on this CPU; a limit that is given stays."""
    return {VARIABLE: LIMIT} if not {VARIABLE, OLD_VARIABLE} & given.keys() and state() == TRAPS else {}


def likely_reason(given: Mapping[str, str]) -> str:
    """Why a program with this environment may have died of SIGILL."""
    if state() == TRAPS:
        limit = given.get(VARIABLE, given.get(OLD_VARIABLE, ""))
        if not limit or "AMX" in limit.upper() or limit.upper() in ("ALL", "DEFAULT"):
            return NOTE
        return f"{FINDING}; oneDNN was limited to {limit}, but another library may use them"
    return "it used an instruction that this CPU does not have: it, or a library, may be built for another CPU"


def probe(code: bytes = _BFLOAT16) -> str | None:
    """Multiplies two tiles in a child process, which may not survive it. None: that could not be tried."""
    try:
        pid = os.fork()
        if pid == 0:
            _probe_and_exit(code)
        status = os.waitpid(pid, 0)[1]
    except OSError:  # no more processes are allowed, or somebody else has waited for it
        return None
    if os.WIFSIGNALED(status):
        return TRAPS if os.WTERMSIG(status) == signal.SIGILL else None
    return WORKS if os.WEXITSTATUS(status) == _PROBED else None


def _probe_and_exit(code: bytes) -> None:
    try:
        for number in (signal.SIGILL, signal.SIGALRM, signal.SIGSEGV, signal.SIGBUS):
            signal.signal(number, signal.SIG_DFL)
        signal.alarm(_PROBE_S)
        libc = ctypes.CDLL(None)
        libc.prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: no core dump
        if code == _BFLOAT16 and libc.syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) != 0:
            os._exit(_REFUSED)
        page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        page.write(code)
        address = ctypes.addressof(ctypes.c_char.from_buffer(page))
        ctypes.CFUNCTYPE(None, ctypes.c_char_p)(address)(_TILES)
        os._exit(_PROBED)
    except BaseException:  # the system allows no code of this kind: nothing can be told, and no limit is set
        os._exit(_REFUSED)


def _announced() -> bool:
    if os.uname().machine != "x86_64":
        return False
    try:
        with open("/proc/cpuinfo") as file:
            lines = file.read(_HEAD).split("\n")
    except OSError:
        return False
    flags = next((line for line in lines if line.startswith("flags")), "")
    return set(flags.split()) >= _FLAGS


def _boot() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def _memory_path() -> str:
    """Empty: nowhere."""
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return f"{folder}/paceline/amx.json" if os.path.isabs(folder) else ""


def _remembered(path: str, boot: str) -> str | None:
    """None where it was not written by this user after this start of the machine."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
            if os.fstat(file.fileno()).st_uid != os.geteuid():
                return None
            found = json.load(file)
        same = bool(boot) and found["boot"] == boot and found["amx"] in (ABSENT, WORKS, TRAPS)
        return str(found["amx"]) if same else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _remember(path: str, boot: str, found: str) -> None:
    if not path or not boot:
        return
    partial = f"{path}.{os.urandom(8).hex()}"
    try:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump({"boot": boot, "amx": found}, file)
        os.replace(partial, path)
    except OSError:
        pass  # it is probed again
