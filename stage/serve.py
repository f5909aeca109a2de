"""A store as a read-only mirror for other nodes: `/{repo}/resolve/{revision}/{path}`, with ranges and true ETags.

A request is looked up in the manifests, so no part of a URL ever becomes a path of this machine.
"""

from __future__ import annotations

import os
import re
import socket
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from formulas.errors import BadInput
from screen.repo import parse_repo_line

from .disk import look
from .journal import Looks
from .manifest import File
from .store import Store

_RESOLVE = re.compile(r"/((?:[^/]+/)?[^/]+)/resolve/([^/]+)/(.+)")
_RANGE = re.compile(r"bytes=(\d*)-(\d*)")


class Found(NamedTuple):
    commit: str
    file: File
    blob: Path


class Index:
    """The files of a store by repo, revision and path; each manifest is parsed once until it is replaced."""

    def __init__(self, store: Store):
        self._store = store
        self._parsed: dict[tuple[str, str], tuple[Looks, dict[str, File]]] = {}

    def find(self, target: str) -> Found | None:
        """The file a request's target names, or None when no snapshot has it."""
        match = _RESOLVE.fullmatch(urlsplit(target).path)
        if match is None:
            return None
        name, revision, path = (unquote(part) for part in match.groups())
        try:
            repo, _ = parse_repo_line(name)
            commit = self._store.read_ref(repo, revision)
            file = self._files(repo, commit).get(path) if commit else None
        except (BadInput, OSError, ValueError):  # a name that no file system has
            return None
        return Found(commit, file, self._store.blob(file.oid)) if commit and file else None

    def _files(self, repo: str, commit: str) -> dict[str, File]:
        looks = look(self._store.manifest(repo, commit))
        if looks is None:
            return {}
        known = self._parsed.get((repo, commit))
        if known is None or known[0] != looks:
            manifest = self._store.read_manifest(repo, commit)
            known = looks, {file.path: file for file in manifest.files} if manifest else {}
            self._parsed[repo, commit] = known
        return known[1]


def parse_range(text: str | None, size: int) -> tuple[int, int] | None:
    """The half-open range a `Range` header asks for; None when there is none, or none that can be served as one.

    Raises ValueError for a range beyond the end: 416.
    """
    match = _RANGE.fullmatch(text.strip()) if text else None
    if match is None or not any(match.groups()):
        return None
    first, last = match.groups()
    start = int(first) if first else max(0, size - int(last))
    stop = min(int(last) + 1, size) if first and last else size
    if start >= size or start >= stop:
        raise ValueError(f"bytes {text} of {size}")
    return start, stop


class Mirror(ThreadingHTTPServer):
    """Serves one store until it is shut down. `address`: host and port; port 0 takes a free one."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, store: Store, address: tuple[str, int]):
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Handler)
        self.index = Index(store)

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        shown = f"[{host!s}]" if ":" in str(host) else str(host)
        return f"http://{shown}:{port}"

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is no event."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 120  # a client that says nothing for so long has gone
    server: Mirror

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, *args: object) -> None:
        """No log: `stage serve` is asked tens of thousands of ranges."""

    def _answer(self, *, body: bool) -> None:
        found = self.server.index.find(self.path)
        try:
            fd = os.open(found.blob, os.O_RDONLY) if found else -1
        except FileNotFoundError:
            fd = -1
        if found is None or fd < 0:
            self._head(HTTPStatus.NOT_FOUND, {"X-Error-Code": "EntryNotFound", "Content-Length": "0"})
            return
        try:
            self._send(found, fd, body=body)
        finally:
            os.close(fd)

    def _send(self, found: Found, fd: int, *, body: bool) -> None:
        size, etag = found.file.size, f'"{found.file.oid.partition(":")[2]}"'
        about = {
            "ETag": etag, "X-Linked-ETag": etag, "X-Linked-Size": str(size), "X-Repo-Commit": found.commit,
            "Accept-Ranges": "bytes", "Content-Type": "application/octet-stream",
        }  # fmt: skip
        try:
            asked = parse_range(self.headers.get("Range"), size)
        except ValueError:
            gone = {"Content-Range": f"bytes */{size}", "Content-Length": "0"}
            self._head(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, about | gone)
            return
        start, stop = asked or (0, size)
        if asked:
            about["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        about["Content-Length"] = str(stop - start)
        self._head(HTTPStatus.PARTIAL_CONTENT if asked else HTTPStatus.OK, about)
        while body and start < stop:
            sent = os.sendfile(self.connection.fileno(), fd, start, min(stop - start, 1 << 24))
            if not sent:
                self.close_connection = True  # the file is shorter than its manifest says: the client has to see it
                return
            start += sent

    def _head(self, status: HTTPStatus, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.flush()
