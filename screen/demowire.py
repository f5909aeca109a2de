"""What goes over the wire of the demo Hub: ranges, bytes, and what the faults make of them."""

from __future__ import annotations

import gzip
import os
import re
import socket
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from .demoapi import bucket
from .demofaults import Fault, Kind
from .demohttp import Request, Response
from .demorepo import PIECE_BYTES, Content

_RANGE = re.compile(r"bytes=(?=.*\d)(?P<first>\d*)-(?P<last>\d*)")  # one range; the Hub answers others whole


@dataclass
class Served:
    """One line of the log: what was asked, by whom, and what it was given. It is there before the answer is."""

    origin: str  # hub | cdn | mirror0...
    route: str
    subject: str  # the repo or file
    method: str
    target: str
    range: str | None
    authorization: str | None
    accept_encoding: str | None
    status: int
    body_bytes: int = 0  # exact for an answer that was sent whole; else what the socket has taken


def misanswered(fault: Fault, request: Request, response: Response) -> Response:
    """The answer with what the fault does to its status, headers and body."""
    extra = {name: value.replace("{target}", request.target) for name, value in fault.headers}
    if fault.kind is Kind.STATUS:
        kept = {name: value for name, value in response.headers.items() if name.startswith("RateLimit")}
        if fault.status == 429 and fault.seconds:
            kept["RateLimit"] = f'"{bucket(request.path)}";r=0;t={int(fault.seconds)}'
        return replace(response, status=fault.status, headers=kept | extra, file=None, body=b"fault")
    if fault.kind is Kind.REDIRECT:
        location = fault.location.replace("{target}", request.target)
        return replace(response, status=fault.status, headers={"Location": location}, file=None, body=b"moved")
    if fault.kind is Kind.SET_HEADERS:
        return replace(response, headers=response.headers | extra)
    if fault.kind is Kind.DROP_HEADERS:
        return replace(response, omit=response.omit | {name.lower() for name, _ in fault.headers})
    if fault.kind is Kind.GZIP:
        body = response.body if response.file is None else b"".join(response.file.pieces(0, response.file.size))
        return replace(response, headers=response.headers | {"Content-Encoding": "gzip"}, file=None,
                       body=gzip.compress(body, 1))  # fmt: skip
    return response


def ranged(request: Request, response: Response, kinds: set[Kind]) -> tuple[Response, int, int]:
    """The answer with its length and range headers, and the half-open range of the file it carries."""
    file, headers = response.file, dict(response.headers)
    status, start, stop = response.status, 0, file.size if file else len(response.body)
    asked = _RANGE.fullmatch(request.headers.get("range", ""))
    if file is not None and status == 200 and asked and Kind.IGNORE_RANGE not in kinds:
        first, last = asked["first"], asked["last"]
        start = int(first) if first else max(0, file.size - int(last))
        stop = min(int(last) + 1, file.size) if first and last else file.size
        if start >= stop:
            headers |= {"Content-Range": f"bytes */{file.size}", "Content-Length": "0"}
            return replace(response, status=416, headers=headers, file=None, body=b""), 0, 0
        if Kind.WRONG_RANGE in kinds:
            start += 1
        status = 206
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{file.size}"
    if file is not None:
        headers.setdefault("Accept-Ranges", "bytes")
    headers.setdefault("Content-Length", str(stop - start))
    headers = {name: value for name, value in headers.items() if name.lower() not in response.omit}
    if "Content-Length" not in headers:
        headers["Connection"] = "close"
    return replace(response, status=status, headers=headers), start, stop


def send_file(
    connection: socket.socket,
    line: Served,
    file: Content,
    span: tuple[int, int],
    faults: Iterable[Fault],
    closing: threading.Event,
) -> None:
    """Sends a half-open span of the file, as far as the faults let it, and keeps count in `line`."""
    start, stop = span
    kinds = {fault.kind for fault in faults}
    end = min([stop, *(start + f.after_bytes for f in faults if f.kind in (Kind.STALL, Kind.CUT))])
    late = 1 if Kind.SHIFTED in kinds else 0
    rate = min((f.bytes_per_second for f in faults if f.kind is Kind.RATE), default=None)
    wrong = [f.after_bytes for f in faults if f.kind is Kind.FLIP]
    if file.path is not None and not kinds & {Kind.SHIFTED, Kind.RATE, Kind.FLIP}:
        _send_from_disk(connection, line, file.path, start, end)
    else:
        for piece in _flipped(file.pieces(start + late, end + late), start + late, wrong):
            for part in _paced(piece, rate, closing):
                last = line.body_bytes + len(part) == end - start
                line.body_bytes += len(part) if last else 0  # before the client can have it
                connection.sendall(part)
                line.body_bytes += 0 if last else len(part)
    if Kind.STALL in kinds:
        closing.wait()


def _send_from_disk(connection: socket.socket, line: Served, path: Path, start: int, stop: int) -> None:
    with path.open("rb") as source:
        at = start
        while at < stop:
            if stop - at <= PIECE_BYTES:
                line.body_bytes = stop - start  # before the client can have it
            sent = os.sendfile(connection.fileno(), source.fileno(), at, min(stop - at, PIECE_BYTES))
            at += sent
            line.body_bytes = at - start
            if sent == 0:  # the file has become shorter
                break


def _flipped(pieces: Iterator[memoryview | bytes], start: int, wrong: list[int]) -> Iterator[memoryview | bytes]:
    """The pieces of a file from `start` on, with the lowest bit of these bytes of the file the other way round."""
    for piece in pieces:
        stop = start + len(piece)
        if here := [at - start for at in wrong if start <= at < stop]:
            changed = bytearray(piece)
            for at in here:
                changed[at] ^= 1
            piece = bytes(changed)
        yield piece
        start = stop


def _paced(piece: memoryview | bytes, rate: float | None, closing: threading.Event) -> Iterator[memoryview | bytes]:
    """The piece in parts a twentieth of a second apart, or one a byte where that is slower."""
    if rate is None:
        yield piece
        return
    step = max(1, int(rate / 20))
    for at in range(0, len(piece), step):
        yield piece[at : at + step]
        if closing.wait(step / rate):
            return
