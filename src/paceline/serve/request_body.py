"""Reads the body of a request, up to a limit."""

from __future__ import annotations

from starlette.requests import Request

from paceline.serve.memory import Reservation


class Refused(Exception):
    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


async def read_body(request: Request, limit: int, reservation: Reservation) -> bytes:
    """Refused: it has more than `limit` bytes. `reservation`: memory for it."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise Refused(413, f"the body has {declared} bytes; the limit is {limit}")
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise Refused(413, f"the body has more than {limit} bytes, which is the limit")
        reservation.add(len(part))
        parts.append(part)
    return b"".join(parts)
