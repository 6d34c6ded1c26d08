"""A store in a bucket: s3://, gs:// and az://, accessed with obstore."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any

from paceline.storage.local_files import MODE, NEW, digest, write_all
from paceline.storage.regular_files import open_regular
from paceline.storage.stores.parallel import together
from paceline.storage.stores.protocol import PIECE, ContinueCheck, Sent, StoreError, TransferCanceled

AT_ONCE = 4  # pieces of a file in parallel
SMALL = 8  # files in parallel that take one request each
LARGE = 2  # files in parallel that take more; all pieces in flight are in memory
IN_PARTS = PIECE  # bytes; larger files are sent in parts
MOST_PARTS = 10_000  # parts of one file; the limit of all stores
WHOLE = 256 * 1024 * 1024  # bytes; larger files are fetched in parts
PART = 64 * 1024 * 1024
CHUNK = 128 * 1024  # bytes: small enough to stay in the processor's cache until written and hashed
ANSWER_S = 30.0
CONNECT_S = 5.0
MOST = 64 * 1024 * 1024  # bytes of what is created: manifests and records
RETRY_S = 60.0  # seconds for one request with all retries
CONDITIONAL_WRITES = "use a server that supports conditional writes (If-None-Match)"
_ENDPOINTS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT", "GOOGLE_BASE_URL")
_TRANSIENT = ("GenericError", "JoinError")
_RETRY = ("408", "429")
_LOST_PARTS = ("InvalidBlockList", "NoSuchUpload")  # after a lost reply to a request of a multipart upload
_CLOCK_SKEW = "RequestTimeTooSkewed"  # requests are signed with the time
_STATUS = re.compile(r"status code: ([0-9]{3})")
# Without the user and password that an endpoint may contain.
_NO_REPLY = re.compile(
    r"Error performing [A-Z]+ (https?://)(?:[^/?\s]*@)?([^/?@\s]+).*error sending request", re.DOTALL
)
_CODE = re.compile(r"<Code>([A-Za-z0-9]{1,60})</Code>|\(code: ([A-Za-z0-9]{1,60})\)")


class BucketStore:
    def __init__(
        self, url: str, patience: float = RETRY_S, settings: Mapping[str, str] | None = None, **options: Any
    ) -> None:
        """`settings`: variables that override those of the environment. `options`: obstore's options for this kind of
        URL, which override both."""
        import obstore.store

        self._url = url.rstrip("/")
        self._refuses_existing = False  # whether the server is known to reject the creation of an existing name
        limits = {
            "timeout": timedelta(seconds=min(ANSWER_S, patience)),
            "connect_timeout": timedelta(seconds=min(CONNECT_S, patience / 2)),
        }
        variables = dict(settings or {})
        plain = {"allow_http": True} if _uses_http({**variables, **options}) else {}
        from_url: Any = obstore.store.from_url
        known = {name: value for name, value in variables.items() if _is_known(from_url, url, name, value)}
        config = {**known, **options}
        try:
            self._store = from_url(
                url, config=config or None, client_options={**limits, **plain},
                retry_config={"max_retries": 4, "retry_timeout": timedelta(seconds=patience)},
            )  # fmt: skip
        except Exception as error:  # settings that are missing, or that contradict each other
            raise StoreError(f"cannot open {self._url}: {_first_line(error)}") from None

    def create(self, name: str, data: bytes) -> bool:
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        try:
            obstore.put(self._store, name, data, mode="create", use_multipart=False)
            if self._refuses_existing:
                return True
            # Some servers silently ignore the condition. Writing the same data again does no harm.
            obstore.put(self._store, name, data, mode="create", use_multipart=False)
        except (AlreadyExistsError, PreconditionError):
            # The object is ours if the reply to an earlier attempt was lost.
            self._refuses_existing = True
            return self.read(name, MOST) == data
        except Exception as error:
            raise self._failed("write", name, error) from None
        raise StoreError(
            "its server overwrites objects despite If-None-Match, so a process presumed dead could overwrite the files "
            "of its successor",
            where=self._url,
            remedy=CONDITIONAL_WRITES,
        )

    def read(self, name: str, most: int) -> bytes | None:
        import obstore
        from obstore.exceptions import NotFoundError

        try:
            reply = obstore.get(self._store, name)
            if reply.meta["size"] > most:
                raise StoreError(f"{self._url}/{name} is larger than the limit of {most} bytes for such files")
            return b"".join(self._stream(name, reply))
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
            prefixes = obstore.list_with_delimiter(self._store, prefix)["common_prefixes"]
        except Exception as error:
            raise self._failed("list", prefix, error) from None
        return sorted(each.rstrip("/").rsplit("/", 1)[-1] for each in prefixes)

    def names(self, prefix: str) -> list[str]:
        import obstore

        try:
            return sorted(each["path"] for page in obstore.list(self._store, prefix) for each in page)
        except Exception as error:
            raise self._failed("list", prefix, error) from None

    def listing(self, name: str) -> list[tuple[str, int, str]]:
        """Name, size and tag of the object with this name (as ""), or of all objects below it."""
        import obstore
        from obstore.exceptions import NotFoundError

        try:
            if name and not name.endswith("/"):
                with suppress(NotFoundError, FileNotFoundError):
                    meta: Any = obstore.head(self._store, name)
                    return [("", int(meta["size"]), _tag(meta))]
            below = f"{name.rstrip('/')}/".lstrip("/")
            objects = [each for page in obstore.list(self._store, below) for each in page]
            return [(each["path"][len(below) :], int(each["size"]), _tag(each)) for each in objects]
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

    def send_all(self, files: Sequence[tuple[str, str]], should_continue: ContinueCheck, sent: Sent) -> None:
        """Files that an earlier attempt has sent are not sent again, if they are unchanged and still in the bucket."""
        present = set(self.names(os.path.commonpath(map(os.path.dirname, sent)) + "/")) if sent else set()

        def send(file: tuple[str, str], check: ContinueCheck) -> None:
            path, name = file
            if name not in present or sent.get(name) != digest(path, lambda _: check(0)):
                sent[name] = self._send(path, name, check)

        together(send, files, lambda file: SMALL if os.path.getsize(file[0]) <= PIECE else LARGE, should_continue)

    def _send(self, path: str, name: str, should_continue: ContinueCheck) -> tuple[int, str]:
        sha256, size = hashlib.sha256(), 0

        def pieces() -> Iterator[bytes]:
            nonlocal size
            while data := os.read(reading, PIECE):
                if not should_continue(len(data)):
                    raise TransferCanceled(path)
                sha256.update(data)
                size += len(data)
                yield data

        reading = open_regular(path, follow=True)
        try:
            length = os.fstat(reading).st_size
            if length <= IN_PARTS:
                self._put(name, b"".join(pieces()))
            else:
                self._put_parts(name, pieces(), length)
        except TransferCanceled:
            raise
        except Exception as error:
            if not should_continue(0):
                raise TransferCanceled(path) from None
            raise self._failed("write", name, error) from None
        finally:
            os.close(reading)
        return size, sha256.hexdigest()

    def _put(self, name: str, data: bytes) -> None:
        """One request; a multipart upload takes three."""
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

    def digest(self, name: str, should_continue: ContinueCheck) -> tuple[int, str]:
        return _digest_pieces(name, self._stream(name, self._get(name)), should_continue)

    def fetch(self, name: str, path: str, should_continue: ContinueCheck) -> tuple[int, str]:
        reply = self._get(name)
        size = int(reply.meta["size"])
        writing = os.open(path, NEW, MODE)
        try:
            if size > WHOLE:
                del reply
                return self._fetch_parts(name, path, size, should_continue)
            return _digest_pieces(name, self._stream(name, reply), should_continue, writing)
        finally:
            os.close(writing)

    def _fetch_parts(self, name: str, path: str, size: int, should_continue: ContinueCheck) -> tuple[int, str]:
        """Write several parts in parallel, each at its offset in the file; hash them in order, from the file."""
        sha256, is_canceled = hashlib.sha256(), False

        def continue_check(size: int) -> bool:
            return not is_canceled and should_continue(size)

        def fetch(start: int) -> None:
            writing = os.open(
                path, os.O_WRONLY | os.O_CLOEXEC
            )  # its own descriptor: this thread may outlive a canceled transfer
            try:
                os.lseek(writing, start, os.SEEK_SET)
                end = min(start + PART, size)
                for data in self._stream(name, self._get(name, start, end), start, end):
                    if not continue_check(len(data)):
                        raise TransferCanceled(name)
                    write_all(writing, data)
            finally:
                os.close(writing)

        pool = ThreadPoolExecutor(AT_ONCE)
        try:
            with open(path, "rb", buffering=0) as reading:
                for part in [pool.submit(fetch, start) for start in range(0, size, PART)]:
                    part.result()
                    for _ in range(PART // CHUNK):
                        sha256.update(reading.read(CHUNK))
        finally:
            is_canceled = True
            pool.shutdown(wait=False, cancel_futures=True)
        return size, sha256.hexdigest()

    def _get(self, name: str, start: int = 0, end: int | None = None) -> Any:
        """Does not read the data yet. KeyError: the name does not exist."""
        import obstore
        from obstore.exceptions import NotFoundError

        try:
            return obstore.get(self._store, name, options={} if end is None else {"range": (start, end)})
        except (NotFoundError, FileNotFoundError):
            raise KeyError(name) from None
        except Exception as error:
            raise self._failed("read", name, error) from None

    def _stream(self, name: str, reply: Any, offset: int = 0, end: int | None = None) -> Iterator[memoryview]:
        """An interrupted reply is resumed from its offset, as long as each attempt makes progress."""
        end = int(reply.meta["size"]) if end is None else end
        start = offset
        while True:
            try:
                for data in reply.stream(min_chunk_size=CHUNK):
                    offset += len(data)
                    yield memoryview(data)
                return
            except Exception as error:
                if offset == start:
                    raise self._failed("read", name, error) from None
            start, reply = offset, self._get(name, offset, end)

    def _failed(self, verb: str, name: str, error: Exception) -> StoreError:
        """Known errors get our own text, because the server's text is meant for its developers."""
        text = str(error)
        status = next(iter(_STATUS.findall(text)), "")
        status = status or {"UnauthenticatedError": "401", "PermissionDeniedError": "403"}.get(type(error).__name__, "")
        code = next(("".join(groups) for groups in _CODE.findall(text)), "")
        status = status or ("403" if code == "AccessDenied" else "")  # an error for one name in a request for several
        reason = {
            "401": "the credentials are not accepted",
            "403": f"the credentials are not accepted, or lack the permission to {verb} there",
            "404": "the bucket does not exist",
            "501": "the server does not support the request",
            "503": "the server is overloaded or unavailable: it returned 503",
        }.get(status, _no_answer(text) or _first_line(error))
        reason = "the server has lost the parts of the upload" if code in _LOST_PARTS else reason
        reason = "the clock of this machine is wrong" if code == _CLOCK_SKEW else reason
        reason = f"{reason} ({code})" if code and code not in reason else reason
        remedy = {"403": "grant the permission, or use other credentials", "501": CONDITIONAL_WRITES}.get(status, "")
        may_retry = not status or status in _RETRY or (status[0] == "5" and status != "501")
        is_transient = code in (*_LOST_PARTS, _CLOCK_SKEW) or (may_retry and type(error).__name__ in _TRANSIENT)
        return StoreError(
            f"cannot {verb} {self._url}/{name}: {reason}",
            is_transient,
            reason=reason,
            remedy="" if code == _CLOCK_SKEW else remedy,
        )


def in_parts(size: int) -> tuple[int, int]:
    """The size of a part of such a file, and how many parts are sent in parallel: fewer if they are larger, as all of
    them are in memory."""
    part = max(PIECE, -(-size // MOST_PARTS))
    return part, max(1, AT_ONCE * PIECE // part)


def _digest_pieces(
    name: str, pieces: Iterator[memoryview], should_continue: ContinueCheck, writing: int | None = None
) -> tuple[int, str]:
    sha256, size = hashlib.sha256(), 0
    for data in pieces:
        if not should_continue(len(data)):
            raise TransferCanceled(name)
        sha256.update(data)
        if writing is not None:
            write_all(writing, data)
        size += len(data)
    return size, sha256.hexdigest()


def _tag(meta: Any) -> str:
    """Changes whenever the object is written."""
    return str(meta["e_tag"] or meta["last_modified"])


def _uses_http(options: Mapping[str, Any]) -> bool:
    """An endpoint without TLS is allowed only if the user configured it with http://."""
    endpoints = [os.environ.get(name, "") for name in _ENDPOINTS]
    return any(str(value).startswith("http://") for value in (*endpoints, *options.values()))


def _is_known(from_url: Any, url: str, name: str, value: str) -> bool:
    """obstore ignores unknown variables in the environment; do the same for those of the job."""
    from obstore.exceptions import UnknownConfigurationKeyError

    if name.upper().endswith("_ALLOW_HTTP"):
        return False  # a client option instead
    try:
        from_url(url, config={name: value})
    except UnknownConfigurationKeyError:
        return False
    except Exception:  # one setting alone may not be enough
        return True
    return True


def _no_answer(text: str) -> str:
    """A short text for an unreachable server: the library's own text is long, and names the server last."""
    match = _NO_REPLY.search(text)
    return f"no response from {match[1]}{match[2]}" if match else ""


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__
