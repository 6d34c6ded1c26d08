"""The only page without a session: it asks for the password, or explains how to get in. It needs no other file."""

from __future__ import annotations

import base64
import hashlib
import html as escaping

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:34rem;margin:15vh auto;padding:0 1rem;color-scheme:light dark}"
    "input,button{font:inherit;padding:.3rem .6rem}"
)
_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
CSP = f"default-src 'none'; style-src 'sha256-{_HASH}'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
_FORM = (
    '<form method="post" action="{}"><p><label for="password">Password</label> '
    '<input id="password" name="password" type="password" autocomplete="current-password" required autofocus> '
    "<button>Sign in</button></p></form>"
)
_HINT = (
    "<p>Open the address that <code>paceline page</code> has printed. It works once: in the terminal of that command, "
    "press Enter to get another one.</p>"
)


REFRESH = (
    '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Paceline</title>'
    '<meta http-equiv="refresh" content="0;url=./"></head><body></body></html>'
)


def page(form: str | None, problem: str) -> str:
    """`form`: where to send the password, relative to the address of this page; None: there is no password."""
    shown = f'<p role="alert">{escaping.escape(problem)}</p>' if problem else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Paceline</title>'
        '<meta name="viewport" content="width=device-width"><link rel="icon" href="data:,">'
        f"<style>{_STYLE}</style></head><body><main><h1>Paceline</h1>{shown}"
        f"{_HINT if form is None else _FORM.format(form)}</main></body></html>"
    )
