"""Addresses of servers: which can be used, and what of them may be shown."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

from paceline.plan import Plan, Webhook


def problem_with(url: str) -> str:
    """Why this is not an address for requests; empty: it is one.

    >>> problem_with("https://example.com/hook"), problem_with("ftp://example.com/hook")
    ('', 'must begin with https:// or http://')
    """
    if not url.startswith(("https://", "http://")):
        return "must begin with https:// or http://"
    if any(char <= " " or ord(char) > 126 for char in url):
        return "contains a space, or a character that must be percent-encoded"
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return "is not a valid address"
    if not parts.hostname:
        return "has no host name"
    return "must not contain a user name or a password" if "@" in parts.netloc else ""


def host_of(url: str) -> str:
    """For messages: the part of an address that is not a secret."""
    return urlsplit(url).netloc.rpartition("@")[2]


def address_of(webhook: Webhook, environment: Mapping[str, str]) -> str:
    """Empty: the variable with the address is not set."""
    return (environment.get(webhook.url_from, "") if webhook.url_from else webhook.url).strip()


def addresses_of(plan: Plan, environment: Mapping[str, str]) -> list[str]:
    """All addresses that must not be shown: whoever knows one can send messages to its receiver. What is none is left
    out: a placeholder such as x would be removed from all texts."""
    addresses = [address_of(webhook, environment) for webhook in plan.notify]
    return [each for each in addresses if not problem_with(each)]
