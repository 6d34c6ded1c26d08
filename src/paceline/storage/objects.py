"""A bucket as a place for snapshots: s3://, gs:// and az://, spoken to with obstore."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any

from paceline.storage.files import MADE, NEW, digest, write_all
from paceline.storage.store import PIECE, Sent, StoreError, Unwanted, Wanted
from paceline.storage.together import together

AT_ONCE = 4  # pieces of a file
SMALL = 8  # files at once, each in one request
LARGE = 2  # files at once that need more; the memory is that of all pieces that are sent
IN_PARTS = PIECE  # bytes; larger files are sent in parts,
MOST_PARTS = 10_000  # of which no store takes more for one file
WHOLE = 256 * 1024 * 1024  # bytes that come in one request; more come in parts
PART = 64 * 1024 * 1024
CHUNK = 128 * 1024  # bytes that are written and digested while they are in the processor's cache
ANSWER_S = 30.0
CONNECT_S = 5.0
MOST = 64 * 1024 * 1024  # bytes of what is created: manifests
RETRY_S = 60.0  # for one request, with all its tries
UNCONDITIONAL = (
    "its server lets a name be created that is taken, so a process that was presumed dead could write over its "
    "successor; it takes one that knows conditional writes (If-None-Match)"
)
_ENDPOINTS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT", "GOOGLE_BASE_URL")
_PASSING = ("GenericError", "JoinError")
_TRY_AGAIN = ("408", "429")
_FORGOTTEN = ("InvalidBlockList", "NoSuchUpload")  # said of parts: where the answer to an earlier try was lost
_UNTIMELY = "RequestTimeTooSkewed"  # requests are signed with the time
_STATUS = re.compile(r"status code: ([0-9]{3})")
_ASKED = re.compile(r"Error performing [A-Z]+ (https?://[^/?\s]+).*error sending request", re.DOTALL)
_CODE = re.compile(r"<Code>([A-Za-z0-9]{1,60})</Code>|\(code: ([A-Za-z0-9]{1,60})\)")


class Objects:
    def __init__(self, url: str, patience: float = RETRY_S, **options: Any) -> None:
        """`options`: as obstore has them for the kind of the URL, over those of the environment."""
        import obstore.store

        self._url = url.rstrip("/")
        self._refuses = False  # whether it was seen to refuse a name that is taken
        limits = {
            "timeout": timedelta(seconds=min(ANSWER_S, patience)),
            "connect_timeout": timedelta(seconds=min(CONNECT_S, patience / 2)),
        }
        plain = {"allow_http": True} if _plain(options) else {}
        from_url: Any = obstore.store.from_url
        try:
            self._store = from_url(
                url, config=options or None, client_options={**limits, **plain},
                retry_config={"max_retries": 4, "retry_timeout": timedelta(seconds=patience)},
            )  # fmt: skip
        except Exception as error:  # settings that are missing, or that contradict each other
            raise StoreError(f"{self._url} cannot be used: {_first_line(error)}") from None

    def create(self, name: str, data: bytes) -> bool:
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        try:
            obstore.put(self._store, name, data, mode="create", use_multipart=False)
            if self._refuses:
                return True
            # Some stores take any name, without a word. The same once more does no harm to what is there.
            obstore.put(self._store, name, data, mode="create", use_multipart=False)
        except (AlreadyExistsError, PreconditionError):
            # Ours, if the answer to an earlier try was lost.
            self._refuses = True
            return self.read(name, MOST) == data
        except Exception as error:
            raise self._failed("write", name, error) from None
        raise StoreError(f"{self._url} cannot be used: {UNCONDITIONAL}")

    def read(self, name: str, most: int) -> bytes | None:
        import obstore
        from obstore.exceptions import NotFoundError

        try:
            found = obstore.get(self._store, name)
            if found.meta["size"] > most:
                raise StoreError(f"{self._url}/{name} has more than the {most} bytes that such a file may have")
            return b"".join(self._stream(name, found))
        except (NotFoundError, FileNotFoundError):
            return None
        except StoreError:
            raise
        except Exception as error:
            raise self._failed("read", name, error) from None

    def has(self, name: str) -> bool:
        import obstore
        from obstore.exceptions import NotFoundError

        try:
            obstore.head(self._store, name)
            return True
        except (NotFoundError, FileNotFoundError):
            return False
        except Exception as error:
            raise self._failed("read", name, error) from None

    def folders(self, prefix: str) -> list[str]:
        import obstore

        try:
            found = obstore.list_with_delimiter(self._store, prefix)["common_prefixes"]
        except Exception as error:
            raise self._failed("list", prefix, error) from None
        return sorted(each.rstrip("/").rsplit("/", 1)[-1] for each in found)

    def names(self, prefix: str) -> list[str]:
        import obstore

        try:
            return sorted(each["path"] for page in obstore.list(self._store, prefix) for each in page)
        except Exception as error:
            raise self._failed("list", prefix, error) from None

    def listing(self, name: str) -> list[tuple[str, int, str]]:
        """Names, sizes and tags: of the object of that name, called "", or of all below."""
        import obstore
        from obstore.exceptions import NotFoundError

        try:
            if name and not name.endswith("/"):
                with suppress(NotFoundError, FileNotFoundError):
                    found: Any = obstore.head(self._store, name)
                    return [("", int(found["size"]), _tag(found))]
            below = f"{name.rstrip('/')}/".lstrip("/")
            every = [each for page in obstore.list(self._store, below) for each in page]
            return [(each["path"][len(below) :], int(each["size"]), _tag(each)) for each in every]
        except Exception as error:
            raise self._failed("list", name, error) from None

    def delete(self, name: str) -> None:
        import obstore
        from obstore.exceptions import NotFoundError

        try:
            obstore.delete(self._store, name)
        except (NotFoundError, FileNotFoundError):
            pass
        except Exception as error:
            raise self._failed("delete", name, error) from None

    def clear(self, prefix: str) -> None:
        for name in self.names(prefix):
            self.delete(name)

    def send_all(self, files: Sequence[tuple[str, str]], wanted: Wanted, sent: Sent) -> None:
        """What an earlier try has sent is not sent again, if it is still as it was, here and there."""
        there = set(self.names(os.path.commonpath(map(os.path.dirname, sent)) + "/")) if sent else set()

        def one(each: tuple[str, str], still: Wanted) -> None:
            path, name = each
            if name not in there or sent.get(name) != digest(path, lambda _: still(0)):
                sent[name] = self._send(path, name, still)

        together(one, files, lambda each: SMALL if os.path.getsize(each[0]) <= PIECE else LARGE, wanted)

    def _send(self, path: str, name: str, wanted: Wanted) -> tuple[int, str]:
        made, size = hashlib.sha256(), 0

        def pieces() -> Iterator[bytes]:
            nonlocal size
            while data := os.read(reading, PIECE):
                if not wanted(len(data)):
                    raise Unwanted(path)
                made.update(data)
                size += len(data)
                yield data

        reading = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            length = os.fstat(reading).st_size
            if length <= IN_PARTS:
                self._put(name, b"".join(pieces()))
            else:
                self._put_parts(name, pieces(), length)
        except Unwanted:
            raise
        except Exception as error:
            if not wanted(0):
                raise Unwanted(path) from None
            raise self._failed("write", name, error) from None
        finally:
            os.close(reading)
        return size, made.hexdigest()

    def _put(self, name: str, data: bytes) -> None:
        """One request instead of three."""
        import obstore

        obstore.put(self._store, name, data, mode="overwrite", use_multipart=False)

    def _put_parts(self, name: str, pieces: Iterator[bytes], size: int) -> None:
        import obstore

        part, at_once = in_parts(size)
        obstore.put(
            self._store, name, pieces, mode="overwrite", use_multipart=True, chunk_size=part, max_concurrency=at_once
        )

    def at_once(self, size: int) -> int:
        return SMALL if size <= WHOLE else LARGE

    def digest(self, name: str, wanted: Wanted) -> tuple[int, str]:
        return _passed_on(name, self._stream(name, self._get(name)), wanted)

    def fetch(self, name: str, path: str, wanted: Wanted) -> tuple[int, str]:
        found = self._get(name)
        size = int(found.meta["size"])
        writing = os.open(path, NEW, MADE)
        try:
            if size > WHOLE:
                del found
                return self._fetch_parts(name, path, size, wanted)
            return _passed_on(name, self._stream(name, found), wanted, writing)
        finally:
            os.close(writing)

    def _fetch_parts(self, name: str, path: str, size: int, wanted: Wanted) -> tuple[int, str]:
        """Each part goes to its place in the file, several at once; they are digested in their order, from there."""
        made, given_up = hashlib.sha256(), False

        def still(size: int) -> bool:
            return not given_up and wanted(size)

        def fetch(start: int) -> None:
            writing = os.open(path, os.O_WRONLY | os.O_CLOEXEC)  # its own: it may still be there after who gave up
            try:
                os.lseek(writing, start, os.SEEK_SET)
                end = min(start + PART, size)
                for data in self._stream(name, self._get(name, start, end), start, end):
                    if not still(len(data)):
                        raise Unwanted(name)
                    write_all(writing, data)
            finally:
                os.close(writing)

        pool = ThreadPoolExecutor(AT_ONCE)
        try:
            with open(path, "rb", buffering=0) as reading:
                for part in [pool.submit(fetch, start) for start in range(0, size, PART)]:
                    part.result()
                    for _ in range(PART // CHUNK):
                        made.update(reading.read(CHUNK))
        finally:
            given_up = True
            pool.shutdown(wait=False, cancel_futures=True)
        return size, made.hexdigest()

    def _get(self, name: str, start: int = 0, end: int | None = None) -> Any:
        """Nothing of it is read yet. KeyError: there is none."""
        import obstore
        from obstore.exceptions import NotFoundError

        try:
            return obstore.get(self._store, name, options={} if end is None else {"range": (start, end)})
        except (NotFoundError, FileNotFoundError):
            raise KeyError(name) from None
        except Exception as error:
            raise self._failed("read", name, error) from None

    def _stream(self, name: str, found: Any, at: int = 0, end: int | None = None) -> Iterator[memoryview]:
        """Where it breaks off it is asked for from there on, as long as each try brings something."""
        end = int(found.meta["size"]) if end is None else end
        before = at
        while True:
            try:
                for data in found.stream(min_chunk_size=CHUNK):
                    at += len(data)
                    yield memoryview(data)
                return
            except Exception as error:
                if at == before:
                    raise self._failed("read", name, error) from None
            before, found = at, self._get(name, at, end)

    def _failed(self, verb: str, name: str, error: Exception) -> StoreError:
        """Where a server has refused it says so in a text of its own; what it says else is for who made the server."""
        text = str(error)
        status = next(iter(_STATUS.findall(text)), "")
        status = status or {"UnauthenticatedError": "401", "PermissionDeniedError": "403"}.get(type(error).__name__, "")
        code = next(("".join(found) for found in _CODE.findall(text)), "")
        status = status or ("403" if code == "AccessDenied" else "")  # of a name in a request for several
        why = {
            "401": "the credentials are not accepted",
            "403": f"the credentials are not accepted, or lack the right to {verb} there: grant it, or use others",
            "404": "there is no such bucket",
            "501": "the server does not know how; it takes one that knows conditional writes (If-None-Match)",
            "503": "the server is too busy, or away: it answers 503",
        }.get(status, _no_answer(text) or _first_line(error))
        why = "the parts that were sent are gone" if code in _FORGOTTEN else why
        why = "the clock of this machine is wrong" if code == _UNTIMELY else why
        why = f"{why} ({code})" if code and code not in why else why
        again = not status or status in _TRY_AGAIN or (status[0] == "5" and status != "501")
        passing = code in (*_FORGOTTEN, _UNTIMELY) or (again and type(error).__name__ in _PASSING)
        return StoreError(f"cannot {verb} {self._url}/{name}: {why}", passing)


def in_parts(size: int) -> tuple[int, int]:
    """How large a part of such a file is, and how many are sent at once: fewer where they are larger, as all of them
    are in memory."""
    part = max(PIECE, -(-size // MOST_PARTS))
    return part, max(1, AT_ONCE * PIECE // part)


def _passed_on(name: str, pieces: Iterator[memoryview], wanted: Wanted, writing: int | None = None) -> tuple[int, str]:
    made, size = hashlib.sha256(), 0
    for data in pieces:
        if not wanted(len(data)):
            raise Unwanted(name)
        made.update(data)
        if writing is not None:
            write_all(writing, data)
        size += len(data)
    return size, made.hexdigest()


def _tag(found: Any) -> str:
    """Another, once it was written anew."""
    return str(found["e_tag"] or found["last_modified"])


def _plain(options: dict[str, Any]) -> bool:
    """An endpoint without TLS is used where somebody has named it so."""
    named = [os.environ.get(name, "") for name in _ENDPOINTS]
    return any(str(value).startswith("http://") for value in (*named, *options.values()))


def _no_answer(text: str) -> str:
    """What the library says of a server that is away is long, and does not begin with the server."""
    asked = _ASKED.search(text)
    return f"no answer from {asked[1]}" if asked else ""


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__
