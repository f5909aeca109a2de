"""Headers of a repo's safetensors files: each by one range of about the right length, many at once, none twice.

A header's length stands in its first eight bytes, too late to ask for it in one request. But it is its tensors' names,
which the index lists, and some 70 bytes a tensor more; how many exactly, the first header of the repo tells. A range
that proves short is followed by a second one to where the Hub redirected the first, which costs the Hub nothing.
Over the 25 repos this was fitted on (1,170 shards): 1.2 % more bytes than the headers have, 55 second ranges.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future

from formulas.errors import HeaderError
from formulas.units import KIB

from .cache import Cache, Kind
from .counting import Count
from .header import HEADER_CAP, header_length
from .repo import Entry, Revision
from .shards import Names
from .source import Source, name
from .stated import cut, whole
from .transport import Cost

_FIRST_RANGE = 64 * KIB  # with nothing known: longer than 9 of 10 headers of whole models in one file
_PER_TENSOR = 72.0  # bytes a tensor takes beside its name, before any was seen
_OVER = 1.0  # bytes a tensor asked for beyond the mean, so that few ranges prove short
_QUOTED = 4  # a name's two quotes, a colon and a comma
_AROUND = 8 + 2 + 16  # the length, the braces, padding to 8 bytes and a little metadata


class Lengths:
    """Guesses how many bytes each header of a repo takes, better with each one seen. Threads share it."""

    def __init__(self, names: Mapping[str, Names] | None):
        self._names = names or {}
        self._lock = threading.Lock()
        self._named_bytes, self._named_tensors = 0, 0
        self._least: int | None = None

    def guess(self, path: str) -> int:
        """Bytes to ask for at the start of this file."""
        names = self._names.get(path)
        with self._lock:
            if names:
                seen = self._named_bytes / self._named_tensors + _OVER if self._named_tensors else _PER_TENSOR
                return int(_AROUND + names.bytes + names.tensors * (_QUOTED + seen))
            return self._least or _FIRST_RANGE

    def learn(self, path: str, length: int) -> None:
        """Takes in the length of a whole header, its first eight bytes included."""
        names = self._names.get(path)
        with self._lock:
            self._least = min(length, self._least or length)
            if names:
                self._named_bytes += length - 10 - names.bytes - names.tensors * _QUOTED
                self._named_tensors += names.tensors


def read_headers(
    source: Source, cache: Cache, repo: str, commit: str, entries: Sequence[Entry], cost: Cost, pool: Executor,
    count: Count, *, names: Mapping[str, Names] | None = None,
) -> None:  # fmt: skip
    """Has the header of each entry counted. `names` tells of those the index places in each file, if there is one.

    A malformed header is for `count` to tell of; what keeps the headers from being read at all is raised: NotFound,
    AccessDenied, HubUnavailable, HubMisbehaved. The pool must not be the one this call itself runs in.
    """
    lengths = Lengths(names)

    def read(entry: Entry) -> None:
        _read(source, cache, repo, commit, entry, cost, lengths, count)

    waiting: list[Future[None]] = []
    try:
        # One alone first: the others then know about how long theirs are.
        for entry in entries[:1]:
            pool.submit(read, entry).result()
        waiting = [pool.submit(read, entry) for entry in entries[1:]]
        for future in waiting:
            future.result()
    finally:
        for future in waiting:
            future.cancel()


def read_headers_in_one(
    source: Source, cache: Cache, repo: str, revision: Revision, entries: Sequence[Entry], index: str, cost: Cost,
    count: Count,
) -> bool:  # fmt: skip
    """The same from the Hub's one-request route, whose answer cannot be checked as well; False where `read_headers` is
    the way: the route is not served, or the headers themselves are all in the cache.

    Kept apart in the cache from headers that were read: their findings have source `api`.
    """
    if all(entry.blob.known and cache.holds(Kind.HEADER, entry.blob.oid) for entry in entries):
        return False
    sizes = {entry.path: entry.blob.size for entry in entries}
    names = {entry.path: name(repo, revision.commit, entry.path) for entry in entries}
    kept: dict[str, bytes] = {}
    for entry in entries:
        if (text := cache.load(Kind.API, entry.blob.oid) if entry.blob.known else None) is None:
            break
        kept[entry.path] = text
    else:
        cost.add(cached_headers=len(entries))
        count.stated(kept, sizes, names)
        return True
    body = source.metadata_in_one(repo, revision, index, cost)
    folder = index.rpartition("/")[0] + "/" if "/" in index else ""
    for way in (cut, whole):
        texts = way(body, [path.removeprefix(folder) for path in sizes]) if body else None
        if texts is None:
            continue
        texts = {folder + path: text for path, text in texts.items()}
        if count.stated(texts, sizes, names) or way is whole:
            for entry in entries:
                if entry.blob.known:
                    cache.keep(Kind.API, entry.blob.oid, texts[entry.path])
            return True
    return False


def _read(
    source: Source, cache: Cache, repo: str, commit: str, entry: Entry, cost: Cost, lengths: Lengths, count: Count
) -> None:
    subject, size = name(repo, commit, entry.path), entry.blob.size
    cached = entry.blob.known and not source.free
    with cache.alone(Kind.HEADER, entry.blob.oid if cached else f"{subject} of {commit}"):
        data = cache.load(Kind.HEADER, entry.blob.oid) if cached else None
        try:
            if data is not None:
                cost.add(cached_headers=1)
            else:
                data = _fetch(source, repo, commit, entry, cost, lengths, subject)
                if cached:
                    cache.keep(Kind.HEADER, entry.blob.oid, data)
            lengths.learn(entry.path, len(data))
            count.header(entry.path, data, size, subject)
        except HeaderError as error:
            count.refuse(entry.path, error)


def _fetch(
    source: Source, repo: str, commit: str, entry: Entry, cost: Cost, lengths: Lengths, subject: str
) -> bytes:
    """Exactly the first 8 + N bytes of a file. Raises HeaderError where N cannot be."""
    size = entry.blob.size
    first = 8 if source.free else min(8 + HEADER_CAP, max(8, lengths.guess(entry.path)))
    data = source.read_range(repo, commit, entry, 0, min(size, first), cost)
    whole = 8 + header_length(data[:8], file_size=size, name=subject)
    if whole > len(data):
        data += source.read_range(repo, commit, entry, len(data), whole, cost)
    return data[:whole]
