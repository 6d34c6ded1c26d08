"""Lets every process of a JAX program keep what it compiles in the folder that Paceline has chosen.

JAX assumes a folder that all hosts share: only process 0 writes to it. But each host has a folder of its own; and on
CPUs, each process looks for entries of its own. JAX also writes in place, and never replaces an entry: one that was
incomplete when its process was killed would stay.
"""

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def register(compiler: "Any") -> None:
    """Called with jax._src.compiler after it is imported. An incompatible JAX is not changed, and compiles more."""
    folder = os.environ.get("PACELINE_COMPILE_CACHE", "")
    try:
        _write_whole_entries(compiler.compilation_cache.LRUCache, folder)
        _let_every_process_write(compiler, folder)
    except Exception:
        return


def _write_whole_entries(cache_type: "Any", folder: str) -> None:
    original = cache_type.put

    def put(self: "Any", key: str, value: bytes) -> None:
        if str(self.path) != folder or self.eviction_enabled:
            original(self, key, value)
            return
        partial = f"{folder}/.{os.urandom(8).hex()}.partial"
        try:
            with open(partial, "wb") as file:
                file.write(value)
            os.replace(partial, f"{folder}/{key}-cache")
        except BaseException:
            try:
                os.unlink(partial)
            except OSError:
                pass
            raise

    cache_type.put = put


class _FirstProcess:
    class global_state:
        process_id = 0


def _let_every_process_write(compiler: "Any", folder: str) -> None:
    original = compiler._cache_write
    # The same function, except that it finds itself in process 0.
    everywhere = type(original)(
        original.__code__, {**vars(compiler), "distributed": _FirstProcess}, original.__name__, original.__defaults__
    )

    def cache_write(*args: "Any", **options: "Any") -> None:
        is_own = compiler.config.compilation_cache_dir.value == folder
        (everywhere if is_own else original)(*args, **options)

    if original.__closure__ is None:
        compiler._cache_write = cache_write
