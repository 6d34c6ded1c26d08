"""Limits the bytes per second that all transfers of a host together send: `snapshots.rate`."""

from __future__ import annotations

import threading
import time

from paceline.storage.stores.protocol import ContinueCheck


class UploadRate:
    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._next_piece_at = 0.0
        self._lock = threading.Lock()

    def paced(self, is_wanted: ContinueCheck) -> ContinueCheck:
        """A function that is called before each piece, and returns when the piece may be sent."""

        def wait(size: int) -> bool:
            with self._lock:
                begin = max(self._next_piece_at, time.monotonic())
                self._next_piece_at = begin + size / self._bytes_per_s
            while is_wanted(size) and (delay := begin - time.monotonic()) > 0:
                time.sleep(min(delay, 0.1))
            return is_wanted(size)

        return wait
