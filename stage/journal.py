"""The journal: what a run found out about bytes on disk, a checked line each, so that the next run need not ask.

A line is `<crc32 of the JSON, 8 hex> <JSON>\\n`. A line that is damaged or cut short is ignored: the journal saves work
and is never needed, so the worst that a lost line costs is a part fetched or a blob hashed once more.

    {"part":oid,"start":a,"stop":b,"source":url}   these bytes of the partial file are on disk, fsynced before this line
    {"forget":oid}                                 no earlier part line of this blob counts
    {"published":oid,"size":n,"mtime_ns":t,"inode":i}   the verified blob looked like this when it was published
    {"bad":oid}                                    `stage verify` found that the blob is not what its name says
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import orjson

from .spans import Spans, join


class Looks(NamedTuple):
    """A file as `stat` sees it; while a published blob looks the same, it is trusted unread."""

    size: int
    mtime_ns: int
    inode: int


class Part(NamedTuple):
    """Bytes [start, stop) of a partial file and the source they came from (empty: found on this disk)."""

    start: int
    stop: int
    source: str


class Journal(NamedTuple):
    """All that the lines say, later lines winning."""

    parts: Mapping[str, tuple[Part, ...]]
    published: Mapping[str, Looks]
    bad: frozenset[str]

    def spans(self, oid: str) -> Spans:
        """The bytes of a partial file that are on disk, whoever sent them."""
        return join((part.start, part.stop) for part in self.parts.get(oid, ()))


def part_line(oid: str, part: Part) -> bytes:
    return _line({"part": oid, "start": part.start, "stop": part.stop, "source": part.source})


def forget_line(oid: str) -> bytes:
    return _line({"forget": oid})


def published_line(oid: str, looks: Looks) -> bytes:
    return _line({"published": oid, "size": looks.size, "mtime_ns": looks.mtime_ns, "inode": looks.inode})


def bad_line(oid: str) -> bytes:
    return _line({"bad": oid})


def parse_journal(data: bytes) -> Journal:
    """The journal in the bytes of its file. Never raises: what is not a whole, undamaged line is not there."""
    parts: dict[str, list[Part]] = {}
    published: dict[str, Looks] = {}
    bad: set[str] = set()
    for record in _records(data):
        match record:
            case {"part": str(oid), "start": int(start), "stop": int(stop), "source": str(source)} if 0 <= start < stop:
                parts.setdefault(oid, []).append(Part(start, stop, source))
            case {"forget": str(oid)}:
                parts.pop(oid, None)
            case {"published": str(oid), "size": int(size), "mtime_ns": int(mtime_ns), "inode": int(inode)}:
                published[oid] = Looks(size, mtime_ns, inode)
                bad.discard(oid)
                parts.pop(oid, None)
            case {"bad": str(oid)}:
                bad.add(oid)
                published.pop(oid, None)
    return Journal({oid: tuple(found) for oid, found in parts.items()}, published, frozenset(bad))


def write_journal(journal: Journal) -> bytes:
    """The fewest lines that say the same: what a grown journal file is replaced by."""
    lines = [published_line(oid, looks) for oid, looks in sorted(journal.published.items())]
    lines += [bad_line(oid) for oid in sorted(journal.bad)]
    lines += [part_line(oid, part) for oid, found in sorted(journal.parts.items()) for part in found]
    return b"".join(lines)


def _line(record: Mapping[str, Any]) -> bytes:
    body = orjson.dumps(record)
    return b"%08x %s\n" % (zlib.crc32(body), body)


def _records(data: bytes) -> Iterator[object]:
    for line in data.split(b"\n")[:-1]:  # what follows the last newline was cut short
        crc, _, body = line.partition(b" ")
        if crc == b"%08x" % zlib.crc32(body):
            try:
                yield orjson.loads(body)
            except orjson.JSONDecodeError:
                continue
