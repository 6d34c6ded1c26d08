"""Which variables of a run's plan configure access to its bucket, and which endpoint is used.

Requests carry the credentials of the user who reads. A run that this user submitted may use its own variables. The plan
of another user's run is data: an endpoint, a file with a token or a proxy in it would receive these credentials.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from paceline.errors import Argument, UsageError
from paceline.storage.stores.locations import SETTINGS
from paceline.storage.stores.protocol import StoreError
from paceline.view.files import run_folders

TRUSTED = "PACELINE_ENDPOINTS"  # environment variable: endpoints that other users' runs may name
# By scheme of the location, the variables that name an endpoint; the first one sets it.
_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
_REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")
# Both become part of a host name or a path: a dot, a slash or an @ would lead to another server.
_REGION = re.compile(r"[a-z0-9-]{1,40}")
_BUCKET = re.compile(r"(?:s3|gs|az)://[A-Za-z0-9][A-Za-z0-9._-]{0,254}(?:/[^\s?#]*)?")


def check_endpoint(url: str) -> None:
    """Raises UsageError if it is not the URL of a server."""
    if url and _normalized(url) is None:
        raise UsageError("invalid endpoint", where=Argument("endpoint", url), remedy="use http(s)://HOST[:PORT][/PATH]")


def chosen(location: str, endpoint: str) -> dict[str, str]:
    """The settings for a location that the user has named, with the endpoint that the user has chosen, if any."""
    names = _ENDPOINTS.get(location.partition("://")[0], ())
    return {names[0]: endpoint} if endpoint and names else {}


def settings_of(folder: Path, location: str, endpoint: str = "") -> dict[str, str]:
    """The variables for access to the bucket of the run in this folder. They override those of the environment.
    `endpoint`: as chosen by the user, whatever the plan says. StoreError: the plan of another user names an endpoint
    that this user has not trusted."""
    variables = _variables(folder)
    if run_folders.is_own(folder):
        names = _ENDPOINTS.get(location.partition("://")[0], ()) if endpoint else ()
        own = {name: value for name, value in variables.items() if name not in names}
        return {**own, **chosen(location, endpoint)}
    return _of_another_user(folder.name, location, variables, endpoint)


def check_bucket(run: str, location: str) -> None:
    """StoreError if the location in the plan of another user is more than the name of a bucket and a path."""
    if not _BUCKET.fullmatch(location):
        raise StoreError(f"{run} was submitted by another user, and {location!r} in its plan is not a bucket")


def _of_another_user(run: str, location: str, variables: Mapping[str, str], endpoint: str) -> dict[str, str]:
    check_bucket(run, location)
    settings = {name: variables[name] for name in _REGIONS if _REGION.fullmatch(variables.get(name, ""))}
    if endpoint:
        return {**settings, **chosen(location, endpoint)}
    names = _ENDPOINTS[location.partition("://")[0]]
    planned = next((variables[name] for name in names if variables.get(name)), "")
    if not planned or any(os.environ.get(name) for name in names):
        return settings
    if _normalized(planned) not in _trusted():
        raise StoreError(
            f"{run} was submitted by another user, and its plan names the endpoint {planned}: your credentials are not "
            "sent there",
            where=location,
            remedy=("if you trust that server, use ", Argument("endpoint", planned), f", or add it to {TRUSTED}"),
        )
    return {**settings, names[0]: planned}


def _variables(folder: Path) -> dict[str, str]:
    """The job's own variables for access to its bucket, which agents use, too."""
    roles = (run_folders.read_object(folder / "plan.json") or {}).get("roles")
    listed = roles if isinstance(roles, list) else []
    env: Any = next((role.get("env") for role in listed if isinstance(role, dict) and role.get("decides")), {})
    variables = env.items() if isinstance(env, dict) else ()
    return {str(name): str(value) for name, value in variables if str(name).startswith(SETTINGS)}


def _trusted() -> set[str]:
    urls = os.environ.get(TRUSTED, "").replace(",", " ").split()
    return {url for url in map(_normalized, urls) if url is not None}


def _normalized(url: str) -> str | None:
    """The same text for the same server and path; None: not the URL of a server.

    >>> _normalized("https://Store.example:9000/"), _normalized("https://me:secret@store.example"), _normalized("store")
    ('https://store.example:9000', None, None)
    """
    try:
        parts = urlsplit(url)
        _ = parts.port  # ValueError if it is not a number
    except ValueError:
        return None
    has_more = parts.query or parts.fragment or "@" in parts.netloc or "\\" in url
    if parts.scheme not in ("http", "https") or not parts.hostname or has_more or not url.isprintable() or " " in url:
        return None
    return f"{parts.scheme}://{parts.netloc.lower()}{parts.path.rstrip('/')}"
