"""Signing in with a real browser: a password, a link on another page, and what the browser then sends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from support.page_server import page_server

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("page")]


@pytest.mark.parametrize("options", [(), ("--base-path", "/user/ann"), ("--host", "0.0.0.0")], ids=["", "path", "tls"])
def test_the_form_takes_the_password(browser: Browser, tmp_path: Path, options: tuple[str, ...]) -> None:
    (tmp_path / "password").write_text("correct horse\n")
    password = ("--password-file", str(tmp_path / "password"))
    with page_server(tmp_path, *password, *options) as server, browser.new_context(ignore_https_errors=True) as context:
        page = context.new_page()
        page.goto(f"https://127.0.0.1:{server.port}/" if "--host" in options else server.url)
        page.fill("#password", "wrong")
        page.click("button")
        expect(page.get_by_role("alert")).to_have_text("This password is wrong.")
        page.fill("#password", "correct horse")
        page.click("button")
        expect(page.get_by_role("navigation").first).to_be_visible()


@pytest.fixture
def other_page() -> Iterator[tuple[str, list[str]]]:
    """The address of another server's page, and the addresses that it links to."""
    links: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(f'<a href="{links[-1]}">link</a>'.encode())

        def log_message(self, format: str, *args: object) -> None:
            return

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://localhost:{server.server_port}/", links
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_link_on_another_page_opens_the_page(
    browser: Browser, tmp_path: Path, other_page: tuple[str, list[str]]
) -> None:
    """As in a terminal that is itself in a browser."""
    address, links = other_page
    with page_server(tmp_path) as server, browser.new_context() as context:
        page = context.new_page()
        for link in (server.address, server.url):  # to sign in, and later as a bookmark
            links.append(link)
            page.goto(address)
            page.click("a")
            expect(page.get_by_role("navigation").first).to_be_visible()
            assert page.url.partition("#")[0] == server.url
