"""HTTP under the demo Hub: requests as read, answers before anything is sent, and a server that leaves bytes to it.

The standard library's own handler cannot send what a Hub must not: no length, half a body, another range.
"""

from __future__ import annotations

import contextlib
import socket
import socketserver
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import parse_qs

import orjson

from .demorepo import Content


class Request(NamedTuple):
    """A request as received. Header names are in lower case."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    @property
    def query(self) -> dict[str, list[str]]:
        return parse_qs(self.target.partition("?")[2], keep_blank_values=True)

    def first(self, name: str, default: str = "") -> str:
        return self.query.get(name, [default])[0]

    def flag(self, name: str) -> bool:
        return self.first(name).lower() in ("true", "1")

    @property
    def token(self) -> str | None:
        scheme, _, token = self.headers.get("authorization", "").partition(" ")
        return token if scheme.lower() == "bearer" else None


@dataclass
class Response:
    """An answer before faults: a file answers ranges, anything else is sent whole."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    file: Content | None = None
    route: str = "other"
    subject: str = ""
    omit: frozenset[str] = frozenset()  # names, in lower case, of headers not to send


def error(status: int, message: str, code: str | None = None, **about: Any) -> Response:
    """An error as the Hub sends it: in X-Error-Message, and for some in X-Error-Code."""
    headers = {"Content-Type": "application/json; charset=utf-8", "X-Error-Message": message}
    if code:
        headers["X-Error-Code"] = code
    return Response(status, headers, orjson.dumps({"error": message}), **about)


def document(value: object, headers: dict[str, str] | None = None, **about: Any) -> Response:
    return Response(200, {"Content-Type": "application/json; charset=utf-8"} | (headers or {}), orjson.dumps(value),
                    **about)  # fmt: skip


class _Connection(socketserver.StreamRequestHandler):
    """One client connection: requests one after the other until either side closes."""

    server: Server
    disable_nagle_algorithm = True

    def handle(self) -> None:
        with contextlib.suppress(OSError):  # a client that went away
            while (request := self._read()) is not None:
                if not self.server.serve(self.connection, request):
                    break

    def _read(self) -> Request | None:
        words = self.rfile.readline(65536).decode("latin-1").split()
        if len(words) != 3:  # the client closed, or does not speak HTTP
            return None
        method, target, _ = words
        headers = {}
        while (line := self.rfile.readline(65536).decode("latin-1")).strip():
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
        body = self.rfile.read(int(headers.get("content-length", 0)))
        return Request(method, target, headers, body)


class Server(socketserver.ThreadingTCPServer):
    """One origin: a thread a connection; closing it ends them all.

    `serve` answers a request on its socket, and says whether the connection can carry another.
    """

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 256

    def __init__(self, port: int, serve: Callable[[socket.socket, Request], bool]):
        super().__init__(("127.0.0.1", port), _Connection)
        self.serve = serve
        self._open: set[socket.socket] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        super().server_close()
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
