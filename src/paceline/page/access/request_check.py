"""Checks Host, Origin and session of every request before anything else sees it, and adds headers to responses."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from urllib.parse import parse_qs, quote

from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.page.access import sign_in_html
from paceline.page.access.tokens_and_sessions import SessionCookie, Sessions
from paceline.page.http.errors import ForeignOrigin, NotSignedIn, WrongHost
from paceline.page.http.responses import error_response

CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; font-src 'self'; "
    "connect-src 'self'; worker-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9_.-]+)(:[0-9]{1,5})?")
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
_SAFE = ("GET", "HEAD")
_MOST_COOKIES = 256  # more than a browser keeps for a site; servers on other ports may have set some of the same name
SIGN_IN = "api/sign-in"


@dataclass(frozen=True)
class Names:
    """The names by which browsers may call this server. Otherwise a web page could have its own name resolve to this
    machine (DNS rebinding), and the browser would let it read the responses."""

    names: frozenset[str]  # host names and addresses, in lower case; IPv6 in brackets
    any_address: bool = False  # the server listens on all addresses: any IP address, which cannot be resolved otherwise
    proxies: frozenset[str] = frozenset()  # `host` or `host:port` of proxies, whose pages may send requests

    def accepts(self, host: str) -> bool:
        match = _HOST.fullmatch(host.lower())
        if match is None:
            return False
        name = match[1].removesuffix(".")
        return name in self.names or host.lower() in self.proxies or (self.any_address and _is_address(name))

    def is_own_origin(self, origin: str, host: str) -> bool:
        """`host`: the Host header of the request, which was accepted."""
        scheme, separator, rest = origin.lower().partition("://")
        if not separator or scheme not in ("http", "https"):
            return False
        return _without_default(rest, scheme) == _without_default(host.lower(), scheme) or rest in self.proxies


def names_for(host: str, address: str, machine: tuple[str, ...] = (), proxies: tuple[str, ...] = ()) -> Names:
    """`host`: as the user gave it; `address`: that of the listener; `machine`: names of this machine."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    shown = f"[{ip}]" if ip.version == 6 else str(ip)
    allowed = frozenset(each.lower() for each in proxies)
    hosts = {each.rpartition(":")[0] if re.search(r":[0-9]+$", each) else each for each in allowed}
    own = {host.lower(), shown, *hosts} - {""}
    if ip.is_loopback:
        return Names(frozenset({*_LOOPBACK_NAMES, *own}), proxies=allowed)
    own |= {name.lower() for name in machine}
    return Names(frozenset(own), any_address=ip.is_unspecified, proxies=allowed)


class AccessCheck:
    """Middleware."""

    def __init__(self, app: ASGIApp, sessions: Sessions, names: Names, cookie: SessionCookie) -> None:
        self._app, self._sessions, self._names = app, sessions, names
        self._base, self._cookie = cookie.path, cookie

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        # Without a session, a connection has one request: a client could otherwise send thousands at once, not take the
        # responses, and so occupy its connection.
        send = _with_headers(send, is_last=not self._has_session(_Headers(scope)))
        response = self._refused(scope)
        await (self._app if response is None else response)(scope, receive, send)

    def _refused(self, scope: Scope) -> Response | None:
        headers = _Headers(scope)
        host = headers.one("host")
        if host is None or not self._names.accepts(host):
            return error_response(WrongHost("this is not a host name of this server", where=(host or "")[:200]))
        path = scope["path"]
        if path + "/" == self._base and scope["method"] in _SAFE:
            return RedirectResponse(_with_query(path.rpartition("/")[2] + "/", scope), 308)
        is_page = path == self._base and scope["method"] in _SAFE
        if not self._is_own(headers, host, scope["method"], is_page):
            return error_response(ForeignOrigin("another web page has sent this request"))
        tokens = parse_qs(scope["query_string"].decode("latin-1")).get("token") if is_page else None
        # A preview or a prefetch of the link must not use up the token.
        if tokens and scope["method"] == "GET" and headers.one("sec-purpose") is None:
            return self._redeemed(tokens[0], headers)
        if path == self._base + SIGN_IN and scope["method"] == "POST" and self._sessions.has_password:
            return None
        if self._has_session(headers):
            return None
        if is_page:
            return _refresh() if _is_link_elsewhere(headers) else self._ask_to_sign_in("")
        return error_response(NotSignedIn("there is no session", remedy=_HOW))

    def _is_own(self, headers: _Headers, host: str, method: str, is_page: bool) -> bool:
        """Whether the page itself, or its user, has sent the request. Links on other pages may lead to this page."""
        origin, site = headers.one("origin"), headers.one("sec-fetch-site")
        if headers.count("origin") > 1 or (origin is not None and not self._names.is_own_origin(origin, host)):
            return False
        if method not in _SAFE and origin is None:
            return False
        is_link = is_page and headers.one("sec-fetch-mode") in (None, "navigate")
        return site in (None, "same-origin", "none") or is_link

    def _has_session(self, headers: _Headers) -> bool:
        return any(self._sessions.is_valid(value) for value in headers.cookies(self._cookie.name))

    def _redeemed(self, token: str, headers: _Headers) -> Response:
        session = self._sessions.redeem(token)
        if session is not None:
            return self._cookie.add_to(_refresh(), session) if _is_link_elsewhere(headers) else self.signed_in(session)
        if self._has_session(headers):
            return RedirectResponse("./", 303)
        return self._ask_to_sign_in("This address was used before, or is not valid.")

    def signed_in(self, session: str, page: str = "./") -> Response:
        """`page`: its address relative to the request: a proxy may have removed a part of the path."""
        return self._cookie.add_to(RedirectResponse(page, 303), session)

    def _ask_to_sign_in(self, problem: str) -> Response:
        return sign_in_response(SIGN_IN if self._sessions.has_password else None, problem)


def sign_in_response(form: str | None, problem: str, status: int = 401) -> Response:
    """`form`: where to send the password, relative to the address of the request; None: there is no password."""
    # With `no-referrer`, browsers send a form without its origin.
    headers = {"content-security-policy": sign_in_html.CSP, "referrer-policy": "same-origin"}
    return HTMLResponse(sign_in_html.page(form, problem), status, headers)


def _is_link_elsewhere(headers: _Headers) -> bool:
    return headers.one("sec-fetch-site") in ("cross-site", "same-site")


def _refresh() -> Response:
    """For a link on another page, such as a terminal in a browser: a redirect would be part of a request of that page,
    with which browsers send no cookie."""
    return HTMLResponse(sign_in_html.REFRESH)


_HOW = "open the address that `paceline page` prints"


class _Headers:
    def __init__(self, scope: Scope) -> None:
        self._headers: list[tuple[bytes, bytes]] = scope["headers"]

    def _all(self, name: str) -> list[str]:
        return [value.decode("latin-1") for key, value in self._headers if key == name.encode()]

    def count(self, name: str) -> int:
        return len(self._all(name))

    def one(self, name: str) -> str | None:
        """None: the request has none, or several."""
        values = self._all(name)
        return values[0] if len(values) == 1 else None

    def cookies(self, name: str) -> list[str]:
        values = []
        for header in self._all("cookie"):
            for item in header.split(";"):
                key, _, value = item.strip().partition("=")
                if key == name:
                    values.append(value)
        return values[:_MOST_COOKIES]


def _with_headers(send: Send, is_last: bool) -> Send:
    """`is_last`: the connection is closed after the response."""

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = list(message.get("headers", ()))
            present = {name.lower() for name, _ in headers}
            added = {"content-security-policy": CSP, "cache-control": "no-store", **_HEADERS}
            added |= {"connection": "close"} if is_last else {}
            more = [(name.encode(), value.encode()) for name, value in added.items()]
            message = {**message, "headers": headers + [each for each in more if each[0] not in present]}
        await send(message)

    return send_with_headers


def _with_query(path: str, scope: Scope) -> str:
    query = scope["query_string"].decode("latin-1")
    return f"{quote(path)}?{query}" if query else quote(path)


def _without_default(host: str, scheme: str) -> str:
    return host.removesuffix(":443" if scheme == "https" else ":80")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
