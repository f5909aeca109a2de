"""A loopback HTTP server that sends exactly the bytes a test scripts: the way to answer what no good server would."""

import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

CLOSE = object()
"""In a reply's script: end the connection here."""


class Request(NamedTuple):
    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    target: str

    @property
    def span(self) -> tuple[int, int] | None:
        """The asked range, half-open."""
        if "range" not in self.headers:
            return None
        first, last = self.headers["range"].removeprefix("bytes=").split("-")
        return int(first), int(last) + 1


Script = Iterable[bytes | float | object]  # bytes to send, seconds to wait, or CLOSE


def reply(status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> Script:
    """A well-formed answer."""
    lines = {"Content-Length": str(len(body))} | (headers or {})
    head = f"HTTP/1.1 {status} X\r\n" + "".join(f"{key}: {value}\r\n" for key, value in lines.items()) + "\r\n"
    return [head.encode() + body]


def ranged(data: bytes, request: Request, *, upto: int | None = None, headers: dict[str, str] | None = None) -> Script:
    """206 with the range asked for; `upto` bytes of it, then the connection ends."""
    start, stop = request.span or (0, len(data))
    lines = {"Content-Range": f"bytes {start}-{stop - 1}/{len(data)}", "Content-Length": str(stop - start)}
    script = list(reply(206, data[start:stop][:upto], lines | (headers or {})))
    return script if upto is None or upto >= stop - start else [*script, CLOSE]


class Loopback:
    """Serves `answer(request)` on 127.0.0.1, one thread a connection, until its `with` ends."""

    def __init__(self, answer: Callable[[Request], Script], wrap: Callable = lambda connection: connection):
        self.answer, self.requests, self.busiest = answer, list[Request](), 0
        self._busy, self._lock, self._open = 0, threading.Lock(), set[socket.socket]()
        self._wrap, self._socket = wrap, socket.create_server(("127.0.0.1", 0), backlog=128)
        self.netloc = f"127.0.0.1:{self._socket.getsockname()[1]}"
        self.url = f"http://{self.netloc}"
        self.stopped = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stopped.set()
        for each in (self._socket, *list(self._open)):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self):
        with suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection):
        with suppress(OSError), self._wrap(connection) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._open.add(connection)
            reader = connection.makefile("rb")
            while line := reader.readline():
                target = line.split()[1].decode()
                headers = {}
                while (line := reader.readline().strip()):
                    key, _, value = line.decode().partition(":")
                    headers[key.lower()] = value.strip()
                parts = urlsplit(target)
                request = Request(parts.path, parse_qs(parts.query), headers, target)
                with self._lock:
                    self.requests.append(request)
                    self._busy += 1
                    self.busiest = max(self.busiest, self._busy)
                try:
                    if not self._send(connection, self.answer(request)):
                        return
                finally:
                    with self._lock:
                        self._busy -= 1

    def _send(self, connection, script) -> bool:
        for piece in script:
            if piece is CLOSE:
                connection.shutdown(socket.SHUT_RDWR)
                return False
            if isinstance(piece, bytes):
                connection.sendall(piece)
            elif self.stopped.wait(piece):
                return False
        return True


def elapsed(began: float) -> float:
    return time.monotonic() - began
