"""Runs the credential plugin of a kubeconfig (`exec`), as kubectl does."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from typing import IO, Any

from lightkube.config.kubeconfig import SingleConfig
from lightkube.config.models import UserExec
from lightkube.core.exceptions import ConfigError

from paceline.backends.kubernetes.api import plugin_processes
from paceline.storage.json_values import parse_json

LIMIT_S = 180.0  # a plugin may wait for a login in a browser
_MOST_OUTPUT = 4 * 1024 * 1024  # bytes
_LONGEST = 500  # characters of its errors


def run(single: SingleConfig, plugin: UserExec, limit: float = LIMIT_S) -> dict[str, Any]:
    """The `status` of what it prints. `limit`: seconds until it is ended, with what it has started. Raises ConfigError.
    On a terminal, its standard error is shown as it comes: it may tell the user to open a page, or ask for a password.
    """
    limit = min(limit, LIMIT_S)
    is_interactive = _is_terminal(sys.stdin)
    is_shown = is_interactive and _is_terminal(sys.stderr)
    info = {"apiVersion": plugin.apiVersion, "kind": "ExecCredential", "spec": {"interactive": is_interactive}}
    variables = {each.name: each.value for each in plugin.env or []}
    environment = {**os.environ, **variables, "KUBERNETES_EXEC_INFO": json.dumps(info)}
    program = str(single.abs_file(plugin.command)) if os.sep in plugin.command else plugin.command
    stdout = stderr = b""
    try:
        # Files, not pipes: a process that the plugin leaves running would keep these open. No input, unless it is a
        # terminal: what is piped into this process is not for the plugin.
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            try:
                with plugin_processes.marked(environment) as marked_environment:
                    subprocess.run(
                        [program, *(plugin.args or [])], env=marked_environment, timeout=limit, check=True,
                        stdin=None if is_interactive else subprocess.DEVNULL,
                        stdout=output, stderr=sys.stderr if is_shown else errors,
                    )  # fmt: skip
            finally:
                stdout, stderr = _beginning(output), _end(errors)
    except FileNotFoundError:
        hint = f": {_short(plugin.installHint)}" if plugin.installHint else ""
        raise ConfigError(f"the credential plugin {plugin.command} does not exist{hint}") from None
    except OSError as error:
        raise ConfigError(f"the credential plugin {plugin.command} cannot be started: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        what = f"the credential plugin {plugin.command} did not finish within {max(limit, 0):.3g} s"
        raise ConfigError(what + _its_message(stderr)) from None
    except subprocess.CalledProcessError as error:
        what = f"the credential plugin {plugin.command} failed with exit code {error.returncode}"
        raise ConfigError(what + _its_message(stderr)) from None
    try:
        status = parse_json(stdout)["status"]
    except (ValueError, KeyError, TypeError):
        status = None
    if not isinstance(status, dict) or not (status.get("token") or status.get("clientCertificateData")):
        raise ConfigError(f"the credential plugin {plugin.command} printed no credential")
    return status


def expiry(status: dict[str, Any]) -> float:
    """When the credential expires, in seconds since 1970."""
    try:
        at = datetime.fromisoformat(str(status["expirationTimestamp"]))
    except (KeyError, ValueError):
        return math.inf
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


def _beginning(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read(_MOST_OUTPUT)


def _end(file: IO[bytes]) -> bytes:
    file.seek(max(0, file.seek(0, os.SEEK_END) - _MOST_OUTPUT))
    return file.read(_MOST_OUTPUT)


def _its_message(stderr: bytes) -> str:
    """The end of what it wrote to standard error; nothing, if that was shown on the terminal."""
    text = _short(stderr.decode(errors="replace"))
    return f": {text}" if text else ""


def _is_terminal(stream: IO[str] | None) -> bool:
    return stream is not None and not stream.closed and stream.isatty()


def _short(text: str) -> str:
    return " ".join(text.split())[-_LONGEST:]
