"""Replaces secrets in texts for the user: values of variables whose names look like secrets, and passwords in URLs.

Error messages and tracebacks often quote a key or an address. They become events and reports, which are shown to more
people, and kept longer, than the environment of a task.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import quote

REDACTED = "***"
SHORTEST = 8  # characters: shorter values occur in other texts by chance
_LONG_LINE = 16  # of a value with several lines, such as a key; shorter lines occur in other texts
_NAME = re.compile(
    r"TOKEN(?!IZ|S$|S_)|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|(?:API|ACCESS|PRIVATE|SECRET|ACCOUNT)_?KEY"
    r"|_(?:KEY|PASS|PWD|AUTH)$",
    re.IGNORECASE,
)
# They name the place of a secret.
_PLACE = re.compile(r"_(?:FILE|PATH|DIR|URI|URL|NAME|ARN|ENDPOINT)$|^GOOGLE_APPLICATION_CREDENTIALS$", re.IGNORECASE)
_PASSWORD_IN_URL = re.compile(r"(?<=://)[^\s/:@'\"]*:[^\s/@'\"]+(?=@)")
_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)
# The fields of events and reports that contain texts; the others contain names and numbers.
_TEXTS = ("detail", "reason", "text", "stacks", "skipped")


def looks_secret(name: str, value: str) -> bool:
    """
    >>> looks_secret("WANDB_API_KEY", "0123456789"), looks_secret("HF_TOKEN_PATH", "/run/token")
    (True, False)
    """
    return len(value.strip()) >= SHORTEST and bool(_NAME.search(name)) and not _PLACE.search(name)


class Redactor:
    def __init__(self, *environments: Mapping[str, str], secrets: Iterable[str] = ()) -> None:
        """`secrets`: values to replace besides those in the environments."""
        forms = {
            form
            for environment in environments
            for name, value in environment.items()
            if looks_secret(name, value)
            for form in _forms(value.strip())
        }
        forms.update(form for value in secrets for form in _forms(value))
        self._secrets = sorted(forms, key=len, reverse=True)  # one may contain another

    @property
    def count(self) -> int:
        """How many texts are searched for."""
        return len(self._secrets)

    def __call__(self, text: str) -> str:
        """The text to show. Call it before a text is shortened: a part of a secret is not recognized."""
        for secret in self._secrets:
            if secret in text:
                text = text.replace(secret, REDACTED)
        text = _PASSWORD_IN_URL.sub(REDACTED, text) if "@" in text else text
        return _PRIVATE_KEY.sub(REDACTED, text) if "PRIVATE KEY" in text else text

    def texts(self, data: Any, is_text: bool = False) -> Any:
        """The fields of an event or a report, with their texts redacted."""
        if isinstance(data, str):
            return self(data) if is_text else data
        if isinstance(data, Mapping):
            return {name: self.texts(value, is_text or name in _TEXTS) for name, value in data.items()}
        if isinstance(data, (list, tuple)):
            return [self.texts(value, is_text) for value in data]
        return data


def _forms(value: str) -> Iterator[str]:
    """As it is, and as it appears in the representation of a string, in JSON and in a URL."""
    yield from (value, repr(value)[1:-1], json.dumps(value)[1:-1], quote(value, safe=""))
    lines = value.splitlines()
    if len(lines) > 1:
        yield from (line.strip() for line in lines if len(line.strip()) >= _LONG_LINE)
