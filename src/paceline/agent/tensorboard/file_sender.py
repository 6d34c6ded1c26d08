"""Sends the TensorBoard files of a host to the TensorBoard pod, in a separate thread, so nothing waits for it."""

from __future__ import annotations

import binascii
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator

from paceline.agent.net.frames import PROTOCOL, Decoder, Message, WireError, encode
from paceline.agent.net.tls import BOARD_NAME, context
from paceline.agent.options import Options, endpoint
from paceline.agent.tensorboard.generation_notes import GenerationNotes, notes_path
from paceline.storage.snapshots.manifest import INVALID_FIELDS
from paceline.storage.tensorboard_event_files import find

EVERY_S = 3.0
MAX_BUSY = 0.05  # fraction of time for sweeps: if one takes long, the next one comes later
PING_S = 20.0
PART_BYTES = 256 * 1024
FILES_PER_REQUEST = 500
TIMEOUT_S = 10.0
WARN_AFTER_S = 120.0  # without a reply
LAST_S = 5.0  # time limit at the end
MAX_NOTICES = 20


class FileSender:
    def __init__(self, options: Options, warns: bool) -> None:
        """`warns`: whether this host reports that the pod does not respond; a few hosts of a run suffice."""
        self._options = options
        self._folder = f"{options.folder}/tensorboard"
        self._warns = warns
        self._tls = context(options.tls, "member", server=False)
        self._sock: socket.socket | None = None
        self._decoder = Decoder()
        self._received: dict[str, int] = {}  # bytes of each file that the pod has, according to the pod
        self._inodes: dict[str, int] = {}
        self._refused: set[str] = set()
        self._notes = GenerationNotes(notes_path(options.folder))
        self._last_ping = 0.0
        self._last_success = time.monotonic()
        self._notices: deque[str] = deque()
        self._all_notices: set[str] = set()
        self._closing = threading.Event()
        self._is_complete = False
        self._deadline = 0.0
        self._thread = threading.Thread(target=self._run, name="tensorboard", daemon=True)

    def start(self) -> None:
        os.makedirs(self._folder, exist_ok=True)
        self._thread.start()

    def notices(self) -> Iterator[str]:
        """New texts for the user, each once."""
        while self._notices:
            yield self._notices.popleft()

    def close(self, limit: float = LAST_S) -> None:
        """Sends what remains, for at most `limit` seconds, after tasks have ended."""
        self._deadline = time.monotonic() + limit
        self._closing.set()
        self._thread.join(limit)
        if not self._is_complete:
            print("paceline: could not send the last TensorBoard data: the pod does not respond", flush=True)

    # ---- in the thread

    def _run(self) -> None:
        while True:
            is_last = self._closing.is_set()
            began = time.monotonic()
            succeeded = self._try_sweep()
            self._is_complete = is_last and succeeded
            if is_last and (succeeded or time.monotonic() > self._deadline):
                self._disconnect()
                return
            if is_last:
                time.sleep(0.2)
            else:
                self._closing.wait(max(EVERY_S, (time.monotonic() - began) / MAX_BUSY))

    def _try_sweep(self) -> bool:
        try:
            self.sweep()
            self._last_success = time.monotonic()
            return True
        except (OSError, WireError, *INVALID_FIELDS) as error:
            self._disconnect()
            if self._warns and time.monotonic() - self._last_success > WARN_AFTER_S:
                reason = str(error) or type(error).__name__
                address = self._options.tensorboard
                self._add_notice(f"TensorBoard at {address} does not respond ({reason}); training continues")
            return False

    def sweep(self) -> None:
        """Sends everything new once. Starts where the pod says that its files end: either side may have restarted."""
        files = find(self._folder)
        if not files and self._notes.read().generation < 2:
            return
        after = self._notes.read().after
        if self._sock is None:
            self._connect()
        unknown = [path for path in files if path not in self._received]
        for begin in range(0, len(unknown), FILES_PER_REQUEST):
            batch = unknown[begin : begin + FILES_PER_REQUEST]
            sizes = self._request({"type": "hold", "files": batch})["sizes"]
            self._received.update({path: int(sizes.get(path, 0)) for path in batch})
        for path, (inode, size) in files.items():
            is_replaced = self._inodes.setdefault(path, inode) != inode or size < self._received[path]
            if path not in self._refused and (is_replaced or size != self._received[path]):
                self._send(path, size, is_replaced)
                self._inodes[path] = inode
        if time.monotonic() - self._last_ping > PING_S or self._closing.is_set():
            # This also keeps the connection alive.
            self._request({"type": "begun", "after": [[number, *each] for number, each in after.items()]})
            self._last_ping = time.monotonic()

    def _send(self, path: str, size: int, is_replaced: bool) -> None:
        try:
            fd = os.open(f"{self._folder}/{path}", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return  # deleted in the meantime
        try:
            at = 0 if is_replaced else self._received[path]
            while at < size:
                data = os.pread(fd, min(PART_BYTES, size - at), at)
                if not data:
                    return  # truncated while it was read: the next sweep sees that
                text = binascii.b2a_base64(data, newline=False).decode("ascii")
                reply = self._request(
                    {"type": "part", "path": path, "at": at, "anew": is_replaced and at == 0, "data": text}
                )
                if "refused" in reply:
                    self._refused.add(path)
                    self._add_notice(f"the TensorBoard pod rejected {path}: {reply['refused']}")
                    return
                before, at = at, int(reply["sizes"][path])
                self._received[path] = at
                if at <= before:
                    raise WireError(f"{path}: the pod did not store the last part")
        finally:
            os.close(fd)

    # ---- the connection

    def _connect(self) -> None:
        sock = socket.create_connection(endpoint(self._options.tensorboard), TIMEOUT_S)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sock = self._tls.wrap_socket(sock, server_hostname=BOARD_NAME)
        except BaseException:
            sock.close()
            raise
        self._decoder = Decoder()
        self._received, self._refused = {}, set()
        self._request({"type": "hello", "protocol": PROTOCOL, "run": self._options.run, "host": self._options.host})

    def _request(self, message: Message) -> Message:
        assert self._sock is not None
        self._sock.sendall(encode(message))
        replies: list[Message] = []
        while not replies:
            data = self._sock.recv(65536)
            if not data:
                raise OSError("connection closed by the pod")
            replies = self._decoder.feed(data)
        if replies[0].get("trouble"):
            self._add_notice(str(replies[0]["trouble"]))
        return replies[0]

    def _disconnect(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def _add_notice(self, text: str) -> None:
        if text not in self._all_notices and len(self._all_notices) < MAX_NOTICES:
            self._all_notices.add(text)
            self._notices.append(text)
