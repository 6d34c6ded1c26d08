"""A bucket as a place for snapshots: s3://, gs:// and az://, spoken to with obstore."""

from __future__ import annotations

import hashlib
import os
import re
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from itertools import islice
from typing import Any, Callable

from paceline.storage.files import digest, write_all
from paceline.storage.store import PIECE, Sent, StoreError, Unwanted, Wanted
from paceline.storage.together import together

AT_ONCE = 4  # pieces of a file
SMALL = 8  # files at once, each in one request
LARGE = 2  # files at once that have more pieces; the memory is that of all their pieces
ANSWER_S = 30.0
CONNECT_S = 5.0
MOST = 64 * 1024 * 1024  # bytes of what is created: manifests
RETRY_S = 60.0  # for one request, with all its tries
_PASSING = ("GenericError", "JoinError")
_TRY_AGAIN = ("408", "429")
_STATUS = re.compile(r"status code: ([0-9]{3})")
_ASKED = re.compile(r"Error performing [A-Z]+ (https?://[^/?\s]+).*error sending request", re.DOTALL)
_CODE = re.compile(r"<Code>([A-Za-z0-9]{1,60})</Code>")


class Objects:
    def __init__(self, url: str, patience: float = RETRY_S, **options: Any) -> None:
        """`options`: as obstore has them for the kind of the URL, over those of the environment."""
        import obstore.store

        self._url = url.rstrip("/")
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
            return True
        except (AlreadyExistsError, PreconditionError):
            # Ours, if the answer to an earlier try was lost.
            return self.read(name, MOST) == data
        except Exception as error:
            raise self._failed("write", name, error) from None

    def read(self, name: str, most: int) -> bytes | None:
        import obstore
        from obstore.exceptions import NotFoundError

        try:
            found = obstore.get(self._store, name)
            if found.meta["size"] > most:
                raise StoreError(f"{self._url}/{name} has more than the {most} bytes that such a file may have")
            return bytes(found.bytes())
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

        together(one, files, lambda each: self.at_once(os.path.getsize(each[0])), wanted)

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
            if os.fstat(reading).st_size <= PIECE:
                self._put(name, b"".join(pieces()))
            else:
                self._put_parts(name, pieces())
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

    def _put_parts(self, name: str, pieces: Iterator[bytes]) -> None:
        import obstore

        obstore.put(
            self._store, name, pieces, mode="overwrite", use_multipart=True, chunk_size=PIECE, max_concurrency=AT_ONCE
        )

    def at_once(self, size: int) -> int:
        return SMALL if size <= PIECE else LARGE

    def digest(self, name: str, wanted: Wanted) -> tuple[int, str]:
        return self._pass_on(name, self._get(name), wanted, lambda data: None)

    def fetch(self, name: str, path: str, wanted: Wanted) -> tuple[int, str]:
        found = self._get(name)
        writing = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            return self._pass_on(name, found, wanted, lambda data: write_all(writing, data))
        finally:
            os.close(writing)

    def _get(self, name: str) -> tuple[int, memoryview | None]:
        """Its size; and all of it where that is one piece."""
        import obstore
        from obstore.exceptions import NotFoundError

        try:
            found = obstore.get(self._store, name)
            size = int(found.meta["size"])
            return size, memoryview(found.bytes()) if size <= PIECE else None
        except (NotFoundError, FileNotFoundError):
            raise KeyError(name) from None
        except Exception as error:
            raise self._failed("read", name, error) from None

    def _pass_on(
        self, name: str, found: tuple[int, memoryview | None], wanted: Wanted, to: Callable[[memoryview], None]
    ) -> tuple[int, str]:
        made = hashlib.sha256()
        size, whole = found
        for data in self._ranges(name, size) if whole is None else (whole,):
            if not wanted(len(data)):
                raise Unwanted(name)
            made.update(data)
            to(data)
        return size, made.hexdigest()

    def _ranges(self, name: str, size: int) -> Iterator[memoryview]:
        """In their order, some of them ahead."""
        import obstore

        def get(start: int) -> memoryview:
            return memoryview(obstore.get_range(self._store, name, start=start, length=min(PIECE, size - start)))

        ahead: deque[Future[memoryview]] = deque()
        starts = iter(range(0, size, PIECE))
        pool = ThreadPoolExecutor(AT_ONCE)
        try:
            while True:
                ahead.extend(pool.submit(get, start) for start in islice(starts, AT_ONCE + 1 - len(ahead)))
                if not ahead:
                    return
                try:
                    data = ahead.popleft().result()
                except Exception as error:
                    raise self._failed("read", name, error) from None
                yield data
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # whoever gives up does not wait for pieces nobody wants

    def _failed(self, verb: str, name: str, error: Exception) -> StoreError:
        """Where a server has refused it says so in a text of its own; what it says else is for who made the server."""
        text = str(error)
        status = next(iter(_STATUS.findall(text)), "")
        status = status or {"UnauthenticatedError": "401", "PermissionDeniedError": "403"}.get(type(error).__name__, "")
        code = next(iter(_CODE.findall(text)), "")
        why = {
            "401": "the credentials are not accepted",
            "403": "the credentials are not accepted, or do not allow it",
            "404": "there is no such bucket",
        }.get(status, _no_answer(text) or _first_line(error))
        why = f"{why} ({code})" if code and code not in why else why
        passing = type(error).__name__ in _PASSING and (not status or status in _TRY_AGAIN or status[0] == "5")
        return StoreError(f"cannot {verb} {self._url}/{name}: {why}", passing)


def _plain(options: dict[str, Any]) -> bool:
    """An endpoint without TLS is used where somebody has named it so."""
    named = [os.environ.get(name, "") for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT")]
    return any(str(value).startswith("http://") for value in (*named, *options.values()))


def _no_answer(text: str) -> str:
    """What the library says of a server that is away is long, and does not begin with the server."""
    asked = _ASKED.search(text)
    return f"no answer from {asked[1]}" if asked else ""


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__
