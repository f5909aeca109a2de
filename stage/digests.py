"""Hashing blobs while they arrive, publishing the right ones, and finding out whose bytes were wrong."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from formulas.errors import DigestMismatch, ToolkitError
from formulas.units import KIB, MIB, human

from .blob import Incoming
from .board import Board
from .journal import forget_line, part_line
from .store import Store

HASHERS = min(4, os.cpu_count() or 1)
BUFFER_BYTES = 256 * KIB
MISMATCHES = 4  # digests a blob may end in before it is given up
CORRUPT_BLOBS = 3  # of one source, after which it is not asked any more


@contextlib.contextmanager
def workers(count: int) -> Iterator[ThreadPoolExecutor]:
    """Threads to digest files with; an interrupt does not wait until a file of 50 GB has been read to its end."""
    pool = ThreadPoolExecutor(count)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


def hash_blobs(board: Board, store: Store) -> None:
    """Hashes what lies before each blob's first gap until the board is over: the body of a thread.

    From the page cache, so what is hashed is what was written; and a blob is published seconds after its last byte.
    """
    buffer = memoryview(bytearray(BUFFER_BYTES))
    while (blob := _take(board)) is not None:
        fd = blob.open(store.partial(blob.oid))
        while blob.hashed < blob.limit and not board.stopping:
            try:
                count = os.preadv(fd, [buffer[: min(len(buffer), blob.limit - blob.hashed)]], blob.hashed)
            except OSError as error:
                where = store.partial(blob.oid)
                raise ToolkitError(
                    f"{where}: expected to read what was written, got {error.strerror}",
                    hint="the disk may be failing; remove that file to fetch it again",
                ) from error
            if not count:
                raise ToolkitError(f"{blob.oid}: expected {blob.limit} bytes in its partial file, something cut it")
            blob.digest.update(buffer[:count])
            blob.hashed += count
        if blob.complete:
            _finish(board, store, blob)
        with board.changed:
            blob.hashing = False


def _take(board: Board) -> Incoming | None:
    with board.changed:
        while not board.stopping and (board.waiting or board.open):
            for blob in [*board.open, *(b for b in board.waiting if not b.todo)]:
                if blob.hashing:
                    continue
                blob.limit = blob.frontier()
                if blob.limit - blob.hashed >= MIB or blob.limit == blob.size:
                    blob.hashing = True
                    return blob
            board.changed.wait(0.02)  # bytes come without a word
    return None


def _finish(board: Board, store: Store, blob: Incoming) -> None:
    """Publishes a blob whose digest is right; else throws bytes away and has them fetched again."""
    got = f"{blob.oid.partition(':')[0]}:{blob.digest.hexdigest()}"
    with board.changed:
        for run in blob.running:
            blob.absorb(run)
        if got != blob.oid:
            _distrust(board, store, blob, got)
            return
    with blob.sync:
        fd, blob.fd = blob.fd, -1
        os.close(fd)
        store.publish(blob.oid, store.partial(blob.oid), blob.size)
    with board.changed:
        _name_culprits(board, blob)
        board.origins[blob.oid] = blob.main_source
        board.say("file", path=blob.path, oid=blob.oid, bytes=blob.size, source=blob.main_source, how="fetched",
                  received=blob.received)  # fmt: skip
        board.forget(blob)


def _distrust(board: Board, store: Store, blob: Incoming, got: str) -> None:
    """Drops the least trusted bytes of a blob with a wrong digest: found locally, or a mirror's, or all.

    Who sent them is not asked for this blob again where another source is left; the bytes stay on disk until others
    have come in their place, and show by the difference who was wrong.
    """
    _name_culprits(board, blob)
    trusted = {source.url for source in board.sources if source.trusted}
    groups = (
        [part for part in blob.done if part.source == ""],
        [part for part in blob.done if part.source not in trusted],
        blob.done,
    )
    gone = next((group for group in groups if group), [])
    senders = sorted({part.source for part in gone})
    origin = ", ".join(filter(None, senders)) or "this disk"
    error = DigestMismatch(
        f"{blob.path}: expected {blob.oid} ({human(blob.size)}), got {got} from {origin}",
        hint="the bytes are fetched again from the next source, if there is one",
    )
    with blob.sync:  # a part noted before this moment, but not written down yet, is not written down any more
        blob.mismatches += 1
        os.fdatasync(blob.fd)
        kept = [] if blob.mismatches >= MISMATCHES else [part for part in blob.done if part not in gone]
        store.append(forget_line(blob.oid), *(part_line(blob.oid, part) for part in kept))
    if blob.mismatches >= MISMATCHES:
        board.fail(blob, error)
        return
    if any(s.url not in senders and s.gone is None and s not in blob.excluded for s in board.sources):
        blob.excluded.update({source: error for source in board.sources if source.url in senders})
    blob.drop(gone)
    board.say("quarantined", path=blob.path, oid=blob.oid, sources=senders, because=error.message)


def _name_culprits(board: Board, blob: Incoming) -> None:
    """Counts wrong bytes against those who sent them, and lets the others be asked again."""
    checked = {part.source for part in blob.suspects}
    for source in board.sources:
        if source.url in checked - blob.culprits and isinstance(blob.excluded.get(source), DigestMismatch):
            del blob.excluded[source]
        if source.url in blob.culprits:
            source.corrupt += 1
            because = f"{source.url} sent wrong bytes of {blob.path}; fetched elsewhere"
            board.say("source", url=source.url, state="wrong bytes", path=blob.path, because=because)
            if source.corrupt >= CORRUPT_BLOBS:
                source.gone = DigestMismatch(f"{source.url}: sent wrong bytes of {source.corrupt} files; not used")
    blob.suspects, blob.culprits = [], set()
