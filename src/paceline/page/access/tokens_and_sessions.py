"""Who may use the page: a token that works once, or a password, becomes a session."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import quote

from starlette.responses import Response

from paceline.page.http.errors import TooManyAttempts

_MOST_SESSIONS = 100  # the oldest is then ended
_ATTEMPTS = 5  # wrong passwords from one network within _WINDOW_S
_ALL_ATTEMPTS = 50  # from all networks: only the first attempt of each is then possible
_WINDOW_S = 60.0
_MOST_NETWORKS = 10_000


@dataclass(frozen=True)
class SessionCookie:
    """It has no age: a user stays signed in until the browser or the server is closed."""

    name: str
    path: str  # of the page, such as / or /paceline/
    is_tls: bool

    def add_to(self, response: Response, session: str) -> Response:
        path = quote(self.path)
        response.set_cookie(self.name, session, path=path, httponly=True, samesite="strict", secure=self.is_tls)
        return response


class Sessions:
    """Only hashes are kept: comparing them takes the same time whatever was sent."""

    def __init__(self, password: str | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._password = None if password is None else _digest(password)
        self._token: bytes | None = None
        self._sessions: OrderedDict[bytes, None] = OrderedDict()
        self._clock, self._lock = clock, threading.Lock()
        self._failures: dict[str, deque[float]] = {}

    @property
    def has_password(self) -> bool:
        return self._password is not None

    def new_token(self) -> str:
        """A token that works once; an earlier one is no longer valid."""
        token = secrets.token_urlsafe(32)
        with self._lock:
            self._token = _digest(token)
        return token

    def redeem(self, token: str) -> str | None:
        """A new session for a token; None: it is wrong, or was used before."""
        with self._lock:
            is_valid = self._token is not None and hmac.compare_digest(self._token, _digest(token))
            if not is_valid:
                return None
            self._token = None
        return self._begin()

    def sign_in(self, password: str, address: str) -> str | None:
        """A new session for the password; None: it is wrong. TooManyAttempts: try again later."""
        network = _network(address)
        with self._lock:
            self._check_attempts(network)
            is_right = self._password is not None and hmac.compare_digest(self._password, _digest(password))
            if not is_right:
                self._failures.setdefault(network, deque()).append(self._clock())
                return None
        return self._begin()

    def is_valid(self, session: str) -> bool:
        digest = _digest(session)
        with self._lock:
            if digest not in self._sessions:
                return False
            self._sessions.move_to_end(digest)
            return True

    def _begin(self) -> str:
        session = secrets.token_urlsafe(32)
        with self._lock:
            self._sessions[_digest(session)] = None
            while len(self._sessions) > _MOST_SESSIONS:
                self._sessions.popitem(last=False)
        return session

    def _check_attempts(self, network: str) -> None:
        """Whoever has many addresses must not keep others from signing in."""
        since = self._clock() - _WINDOW_S
        for each, times in list(self._failures.items()):
            while times and times[0] < since:
                times.popleft()
            if not times:
                del self._failures[each]
        while len(self._failures) > _MOST_NETWORKS:
            del self._failures[next(iter(self._failures))]
        total = sum(map(len, self._failures.values()))
        own = len(self._failures.get(network, ()))
        if own >= _ATTEMPTS or (own and total >= _ALL_ATTEMPTS):
            raise TooManyAttempts("too many wrong passwords", remedy=f"try again in {_WINDOW_S:g} s")


def _network(address: str) -> str:
    """What one user can choose an address from: this machine, or a subnet of IPv6."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    ip = getattr(ip, "ipv4_mapped", None) or ip
    if ip.is_loopback:
        return "loopback"
    return str(ip) if ip.version == 4 else str(ipaddress.ip_network((ip, 64), strict=False))


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
