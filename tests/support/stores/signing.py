"""Request signatures: those of S3, and the one for creating an Azure container."""

from __future__ import annotations

import base64
import hashlib
import hmac
import time
from collections.abc import Mapping
from email.utils import formatdate
from urllib.parse import quote

REGION = "us-east-1"


def s3(
    access: str, secret: str, method: str, path: str, query: Mapping[str, str], headers: Mapping[str, str], body: bytes
) -> tuple[str, dict[str, str]]:
    """The path with its query, and all headers, signed with Signature Version 4."""
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    digest = hashlib.sha256(body).hexdigest()
    signed = {**headers, "x-amz-date": stamp, "x-amz-content-sha256": digest}
    lowered = sorted((name.lower(), " ".join(value.split())) for name, value in signed.items())
    names = ";".join(name for name, _ in lowered)
    encoded_path = quote(path, safe="/-_.~")
    encoded_query = "&".join(f"{quote(name, safe='-_.~')}={quote(query[name], safe='-_.~')}" for name in sorted(query))
    lines = [method, encoded_path, encoded_query, *(f"{name}:{value}" for name, value in lowered), "", names, digest]
    scope = f"{stamp[:8]}/{REGION}/s3/aws4_request"
    text = "\n".join(["AWS4-HMAC-SHA256", stamp, scope, hashlib.sha256("\n".join(lines).encode()).hexdigest()])
    key = f"AWS4{secret}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, text.encode(), "sha256").hex()
    signed["Authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={access}/{scope}, SignedHeaders={names}, Signature={signature}"
    )
    return f"{encoded_path}?{encoded_query}" if encoded_query else encoded_path, signed


def azure_container(account: str, key: str, path: str) -> dict[str, str]:
    """The headers of the request that creates the container at this path, signed with Shared Key."""
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-12-02"}
    header_lines = "".join(f"{name}:{value}\n" for name, value in sorted(headers.items()))
    text = "PUT" + 12 * "\n" + f"{header_lines}/{account}{path}\nrestype:container"
    signature = base64.b64encode(hmac.digest(base64.b64decode(key), text.encode(), "sha256")).decode()
    return {**headers, "Authorization": f"SharedKey {account}:{signature}"}
