"""Lines that overwrite themselves by carriage returns, as progress bars do: what a terminal would show of them."""

from __future__ import annotations

import time

STATE_EVERY = 0.5  # seconds between two states that are logged of a line before it ends


class OverwrittenLine:
    """The unterminated line of a task."""

    def __init__(self) -> None:
        self._logged_at = 0.0

    def collapse(self, partial: bytes) -> tuple[bytes, bytes]:
        """Drops all states but the latest one. Returns what to keep of the line, and the state to log now, if any."""
        before, _, after = partial.rpartition(b"\r")
        state = after or before.rpartition(b"\r")[2]
        now = time.monotonic()
        is_due = bool(state) and now - self._logged_at >= STATE_EVERY
        if is_due:
            self._logged_at = now
        return b"\r" + (after or state), valid_utf8(state) if is_due else b""


def visible(line: bytes) -> bytes:
    """What a terminal would show of a complete line."""
    return valid_utf8(line.rstrip(b"\r").rpartition(b"\r")[2])


def valid_utf8(raw: bytes) -> bytes:
    try:
        raw.decode()
        return raw
    except UnicodeDecodeError:
        return raw.decode("utf-8", "replace").encode()
