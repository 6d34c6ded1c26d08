"""Who may use the page: tokens, passwords, sessions, Host, Origin; and the headers of every response."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import PlainTextResponse

from paceline.page.access import tokens_and_sessions as sessions_module
from paceline.page.access.request_check import CSP, AccessCheck, Names, names_for
from paceline.page.access.tokens_and_sessions import SessionCookie, Sessions
from paceline.page.http.errors import TooManyAttempts
from paceline.page.http.responses import json_bytes, sse

HOST = ("host", "127.0.0.1:7740")
COOKIE = "paceline-7740"


class Answer:
    def __init__(self, messages: list[dict[str, Any]]) -> None:
        self.status: int = messages[0]["status"]
        self.headers = {name.decode(): value.decode() for name, value in messages[0]["headers"]}
        self.body = b"".join(message.get("body", b"") for message in messages[1:])

    @property
    def kind(self) -> str:
        return str(json.loads(self.body)["error"]["kind"])


class Server:
    def __init__(self, sessions: Sessions, names: Names | None = None, base: str = "/") -> None:
        cookie = SessionCookie(COOKIE, base, is_tls=False)
        own = names or names_for("127.0.0.1", "127.0.0.1")
        self._app = AccessCheck(PlainTextResponse("inside"), sessions, own, cookie)

    def ask(self, path: str = "/", *headers: tuple[str, str], method: str = "GET") -> Answer:
        path, _, query = path.partition("?")
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http", "method": method, "path": path, "query_string": query.encode(),
            "headers": [(name.encode(), value.encode("latin-1")) for name, value in headers],
        }  # fmt: skip
        asyncio.run(self._app(scope, receive, send))
        return Answer(sent)


@pytest.fixture
def sessions() -> Sessions:
    return Sessions()


@pytest.fixture
def server(sessions: Sessions) -> Server:
    return Server(sessions)


@pytest.fixture
def cookie(sessions: Sessions) -> tuple[str, str]:
    session = sessions.redeem(sessions.new_token())
    assert session
    return "cookie", f"{COOKIE}={session}"


def test_the_token_works_once_and_becomes_a_cookie(server: Server, sessions: Sessions) -> None:
    token = sessions.new_token()
    first = server.ask(f"/?token={token}", HOST)
    assert (first.status, first.headers["location"]) == (303, "./")
    cookie = first.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=strict" in cookie and "Path=/" in cookie and token not in cookie
    assert server.ask("/", HOST, ("cookie", cookie.partition(";")[0])).body == b"inside"
    again = server.ask(f"/?token={token}", HOST)
    assert again.status == 401 and b"used before" in again.body and "set-cookie" not in again.headers
    with_session = server.ask(f"/?token={token}", HOST, ("cookie", cookie.partition(";")[0]))
    assert (with_session.status, with_session.headers["location"]) == (303, "./")


def test_a_preview_does_not_use_up_the_token(server: Server, sessions: Sessions) -> None:
    token = sessions.new_token()
    assert server.ask(f"/?token={token}", HOST, method="HEAD").status == 401
    assert server.ask(f"/?token={token}", HOST, ("sec-purpose", "prefetch")).status == 401
    assert server.ask(f"/?token={token}", HOST).status == 303


def test_a_link_on_another_page_works_too(server: Server, sessions: Sessions) -> None:
    """Browsers send no cookie with a redirect that such a link leads to: the page loads itself again."""
    link = [("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "navigate")]
    answer = server.ask(f"/?token={sessions.new_token()}", HOST, *link)
    assert answer.status == 200 and b'content="0;url=./"' in answer.body and COOKIE in answer.headers["set-cookie"]
    again = server.ask("/", HOST, *link)
    assert again.status == 200 and b'content="0;url=./"' in again.body and "set-cookie" not in again.headers
    assert server.ask("/", HOST, ("sec-fetch-site", "same-origin")).status == 401


@pytest.mark.parametrize("path", ["/", "/app.js", "/api/runs", "/api/runs/stream", "/../x", "/api/sign-in", "//"])
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "X"])
def test_nothing_without_a_session(server: Server, path: str, method: str) -> None:
    for headers in ([], [("cookie", f"{COOKIE}=x")], [("cookie", f"{COOKIE}=")], [("authorization", "Bearer x")]):
        answer = server.ask(path, HOST, ("origin", "http://127.0.0.1:7740"), *headers, method=method)
        assert answer.status == 401 and b"inside" not in answer.body


@pytest.mark.parametrize("token", ["", "x", "\xff", "a" * 100_000])
def test_a_wrong_token(server: Server, sessions: Sessions, token: str) -> None:
    sessions.new_token()
    assert server.ask(f"/?token={token}", HOST).status == 401


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:7740", "127.0.0.1.evil.example", "", "localhost:7740 ", "0.0.0.0", "[::2]"]
)
def test_a_name_that_leads_here_by_dns_rebinding_is_refused(server: Server, cookie: Any, host: str) -> None:
    answer = server.ask("/api/runs", ("host", host), cookie)
    assert (answer.status, answer.kind) == (421, "WrongHost")


@pytest.mark.parametrize("host", ["localhost:1", "LOCALHOST.:7740", "127.0.0.1", "[::1]:99"])
def test_names_of_the_loopback_address_with_any_port(server: Server, cookie: Any, host: str) -> None:
    """A tunnel has another port."""
    assert server.ask("/api/runs", ("host", host), cookie).status == 200


def test_cookies_of_other_ports_with_the_same_name_do_not_hide_the_session(server: Server, cookie: Any) -> None:
    """Browsers send those with a longer path first."""
    others = "; ".join(f"{COOKIE}={number}" for number in range(180))
    assert server.ask("/api/runs", HOST, ("cookie", f"{others}; {cookie[1]}")).status == 200
    assert server.ask("/api/runs", HOST, ("cookie", others)).status == 401


def test_no_host_or_two_hosts(server: Server, cookie: Any) -> None:
    assert server.ask("/api/runs", cookie).status == 421
    assert server.ask("/api/runs", HOST, HOST, cookie).status == 421


FOREIGN = [
    "http://evil.example",
    "null",
    "",
    "http://127.0.0.1:8888",
    "ftp://127.0.0.1:7740",
    "http://127.0.0.1:7740.evil",
]


@pytest.mark.parametrize("origin", FOREIGN)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_requests_of_other_pages_are_refused(server: Server, cookie: Any, origin: str, method: str) -> None:
    """Also those of other ports of this machine, to which browsers send the cookie."""
    answer = server.ask("/api/runs/x/stream", HOST, cookie, ("origin", origin), method=method)
    assert (answer.status, answer.kind) == (403, "ForeignOrigin")


def test_a_change_needs_an_origin(server: Server, cookie: Any) -> None:
    own = ("origin", "http://127.0.0.1:7740")
    assert server.ask("/api/x", HOST, cookie, method="POST").status == 403
    assert server.ask("/api/x", HOST, cookie, own, own, method="POST").status == 403
    assert server.ask("/api/x", HOST, cookie, own, method="POST").status == 200
    assert server.ask("/api/x", HOST, cookie).status == 200  # browsers send none


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_only_links_may_come_from_other_pages(server: Server, cookie: Any, site: str) -> None:
    foreign = ("sec-fetch-site", site)
    assert server.ask("/api/runs", HOST, cookie, foreign, ("sec-fetch-mode", "no-cors")).status == 403
    assert server.ask("/app.js", HOST, cookie, foreign, ("sec-fetch-mode", "no-cors")).status == 403
    assert server.ask("/api/runs", HOST, cookie, foreign, ("sec-fetch-mode", "navigate")).status == 403
    assert server.ask("/", HOST, cookie, foreign, ("sec-fetch-mode", "navigate")).status == 200
    assert server.ask("/", HOST, cookie, foreign, ("sec-fetch-mode", "cors")).status == 403


def test_without_a_session_a_connection_has_one_request(server: Server, sessions: Sessions, cookie: Any) -> None:
    strangers = [server.ask("/", HOST), server.ask("/x", HOST), server.ask(f"/?token={sessions.new_token()}", HOST)]
    assert all(answer.headers["connection"] == "close" for answer in strangers)
    assert "connection" not in server.ask("/x", HOST, cookie).headers


def test_every_response_has_the_headers(server: Server, cookie: Any) -> None:
    answers = [server.ask("/", HOST, cookie), server.ask("/x", HOST), server.ask("/x", ("host", "evil"))]
    for answer in answers:
        assert answer.headers["content-security-policy"] == CSP
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer" and answer.headers["cache-control"] == "no-store"
    assert "unsafe" not in CSP and "frame-ancestors 'none'" in CSP and "default-src 'none'" in CSP
    asks = server.ask("/", HOST)
    assert (
        asks.status == 401
        and "script" not in asks.body.decode()
        and "sha256-" in asks.headers["content-security-policy"]
    )


def test_below_a_path_of_a_proxy(sessions: Sessions, cookie: Any) -> None:
    names = names_for("127.0.0.1", "127.0.0.1", proxies=("hub.example.com", "hub.example.com:8443"))
    server = Server(sessions, names, "/user/ann/")
    assert server.ask("/user/ann/", HOST, cookie).status == 200
    redirect = server.ask("/user/ann?token=a%26b", HOST)
    assert (redirect.status, redirect.headers["location"]) == (308, "ann/?token=a%26b")
    answer = server.ask(f"/user/ann/?token={sessions.new_token()}", HOST)
    assert answer.status == 303 and "Path=/user/ann/" in answer.headers["set-cookie"]
    assert server.ask(f"/?token={sessions.new_token()}", HOST).status == 401
    own = ("origin", "https://hub.example.com:8443")
    for host in ("hub.example.com", "hub.example.com:8443", "127.0.0.1:7740"):  # a proxy may pass on either
        assert server.ask("/user/ann/x", ("host", host), cookie, own, method="POST").status == 200
    other = ("origin", "https://hub.example.com:9999")
    assert server.ask("/user/ann/x", HOST, cookie, other, method="POST").status == 403


def test_names_on_other_addresses() -> None:
    any_address = names_for("0.0.0.0", "0.0.0.0", ("node7", "node7.example"))
    assert any_address.accepts("10.0.0.7:7740") and any_address.accepts("Node7.example:1")
    assert any_address.accepts("[fe80::1]:7740") and not any_address.accepts("evil.example")
    one = names_for("node7", "10.0.0.7", ("node7",))
    assert one.accepts("10.0.0.7") and one.accepts("node7:7740") and not one.accepts("10.0.0.8")


@given(st.text(max_size=40), st.text(max_size=40))
def test_strange_hosts_and_origins(host: str, origin: str) -> None:
    names = names_for("127.0.0.1", "127.0.0.1")
    if names.accepts(host):
        assert host.lower().partition(":")[0].strip("[].") in ("localhost", "127.0.0.1", "")
    assert not names.is_own_origin(origin, "127.0.0.1:7740") or "127.0.0.1:7740" in origin


def test_a_new_token_replaces_the_earlier_one(sessions: Sessions) -> None:
    first, second = sessions.new_token(), sessions.new_token()
    assert sessions.redeem(first) is None and sessions.redeem(second) and sessions.redeem(second) is None


def test_sessions_are_bounded(sessions: Sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "_MOST_SESSIONS", 3)
    started = [sessions.redeem(sessions.new_token()) or "" for _ in range(5)]
    assert [sessions.is_valid(each) for each in started] == [False, False, True, True, True]


def test_wrong_passwords_are_limited_for_each_address_and_in_all() -> None:
    now = 0.0
    sessions = Sessions("correct horse", lambda: now)
    assert sessions.sign_in("correct horse", "a")
    assert [sessions.sign_in("wrong", "a") for _ in range(5)] == [None] * 5
    with pytest.raises(TooManyAttempts):
        sessions.sign_in("correct horse", "a")
    assert sessions.sign_in("correct horse", "b")
    now = 61.0
    assert sessions.sign_in("correct horse", "a")
    for number in range(50):
        assert sessions.sign_in("\ud800", f"address-{number}") is None
    with pytest.raises(TooManyAttempts):
        sessions.sign_in("correct horse", "address-0")


def test_whoever_has_many_addresses_cannot_keep_others_from_signing_in() -> None:
    sessions = Sessions("correct horse", lambda: 0.0)
    for number in range(2000):
        with contextlib.suppress(TooManyAttempts):
            sessions.sign_in("wrong", f"10.1.{number // 250}.{number % 250}")
    assert sessions.sign_in("correct horse", "10.2.0.1")


@pytest.mark.parametrize(
    "addresses",
    [[f"127.0.0.{number}" for number in range(1, 7)], [f"2001:db8::{number}" for number in range(6)],
     ["::1", "::ffff:127.0.0.1", "127.0.0.1"] * 2, ["::ffff:10.0.0.1", "10.0.0.1"] * 3],
)  # fmt: skip
def test_addresses_that_one_user_can_choose_from_count_as_one(addresses: list[str]) -> None:
    sessions = Sessions("correct horse", lambda: 0.0)
    assert [sessions.sign_in("wrong", address) for address in addresses[:5]] == [None] * 5
    with pytest.raises(TooManyAttempts):
        sessions.sign_in("wrong", addresses[5])
    assert sessions.sign_in("correct horse", "::ffff:10.0.0.2") and sessions.sign_in("correct horse", "2001:db8:1::")


def test_without_a_password_none_is_right() -> None:
    assert Sessions().sign_in("", "a") is None


@given(
    st.recursive(st.text() | st.floats() | st.none(), lambda each: st.lists(each) | st.dictionaries(st.text(), each))
)
def test_data_can_never_become_html_or_another_event(data: Any) -> None:
    text = json_bytes({"data": data})
    assert b"<" not in text and b"\n" not in text and b"\r" not in text
    assert json.loads(text) == json.loads(text.decode())
    assert sse("lines", data).count(b"\n") == 3


def test_text_that_is_not_unicode_is_still_json() -> None:
    assert json.loads(json_bytes("a\udc80b")) == "a\udc80b"
