"""A non-blocking TLS connection that sends and receives messages, driven by an event loop."""

from __future__ import annotations

import selectors
import socket
import ssl
from collections import deque

from paceline.agent.net.frames import LIMIT, Decoder, Message, encode

READ_AT_ONCE = 8 * 1024 * 1024  # bytes of one peer; then others are served
MESSAGES_AT_ONCE = 500  # of one peer, and those received together with them
OUTBOX_LIMIT = 256 * 1024 * 1024
_CHUNK = 65536
SERVER_NAME = "captain.paceline"  # in the captain's certificate
MEMBER_NAME = "member.paceline"  # in the certificate that all members share
BOARD_NAME = "tensorboard.paceline"  # in the certificate of TensorBoard's pod


class LinkClosed(Exception):
    """The connection has ended; the text is the reason."""


def context(folder: str, name: str, server: bool) -> ssl.SSLContext:
    """Mutual TLS with the certificates of one run; nothing else is trusted."""
    tls_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    tls_context.minimum_version = ssl.TLSVersion.TLSv1_2
    tls_context.load_verify_locations(f"{folder}/ca.pem")
    tls_context.load_cert_chain(f"{folder}/{name}.pem", f"{folder}/{name}.key")
    tls_context.verify_mode = ssl.CERT_REQUIRED
    if server:
        tls_context.num_tickets = 0
    return tls_context


class TlsLink:
    def __init__(self, sock: socket.socket, tls: ssl.SSLContext, server: bool, limit: int = LIMIT) -> None:
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = tls.wrap_socket(
            sock, server_side=server, do_handshake_on_connect=False, server_hostname=None if server else SERVER_NAME
        )
        self.open = False  # whether the handshake has completed
        self._decoder = Decoder(limit, accepts_packed=not server)
        self._outbox: deque[memoryview] = deque()
        self._queued = 0
        self._handshake_wants = selectors.EVENT_READ | selectors.EVENT_WRITE

    def fileno(self) -> int:
        return self.sock.fileno()

    def interest(self) -> int:
        """The selector events this connection waits for."""
        if not self.open:
            return self._handshake_wants
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outbox else 0)

    def send(self, message: Message) -> None:
        self.send_bytes(encode(message))

    def send_bytes(self, *frames: bytes) -> None:
        """The outbox refers to frames without copying them: a frame sent to many peers is stored once."""
        for frame in frames:
            self._queued += len(frame)
            self._outbox.append(memoryview(frame))
        if self._queued > OUTBOX_LIMIT:
            raise LinkClosed("the peer does not read its messages")
        if self.open:
            self._flush()

    def ready(self) -> list[Message]:
        """Call when the socket is readable or writable: sends and receives, and returns the messages received."""
        try:
            if not self.open and not self._handshake():
                return []
            messages = self._read()
            try:
                self._flush()
            except LinkClosed:
                if not messages:
                    raise
            return messages  # if the connection has ended, the next call raises again
        except (OSError, EOFError) as error:
            raise LinkClosed(str(error) or type(error).__name__) from None

    def close(self) -> None:
        try:
            self.sock.close()
        except OSError:
            pass

    def _handshake(self) -> bool:
        try:
            self.sock.do_handshake()
        except ssl.SSLWantReadError:
            self._handshake_wants = selectors.EVENT_READ
            return False
        except ssl.SSLWantWriteError:
            self._handshake_wants = selectors.EVENT_WRITE
            return False
        self.open = True
        return True

    def _flush(self) -> None:
        while self._outbox:
            head = self._outbox[0]
            try:
                sent = self.sock.send(head[:_CHUNK])
            except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
                return
            except OSError as error:
                raise LinkClosed(str(error)) from None
            self._queued -= sent
            if sent == len(head):
                self._outbox.popleft()
            else:
                self._outbox[0] = head[sent:]

    def _read(self) -> list[Message]:
        messages: list[Message] = []
        size = 0
        # A selector does not see what TLS has already decrypted.
        while (size < READ_AT_ONCE and len(messages) < MESSAGES_AT_ONCE) or self.sock.pending():
            try:
                data: bytes | None = self.sock.recv(_CHUNK)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return messages
            except OSError:
                if messages:
                    return messages  # received before the reset
                raise
            if not data:
                if messages:
                    return messages
                raise LinkClosed("the peer closed the connection")
            size += len(data)
            messages.extend(self._decoder.feed(data))
        return messages
