"""One blob on its way: which bytes are here, who sent them, which are being asked for, and how far they are hashed."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

from formulas.errors import ToolkitError
from formulas.units import KIB

from .disk import new_digest
from .journal import Part
from .plan import Fetch
from .sources import Source
from .spans import Span, clip, join, missing, split

STUCK_SECONDS = 5.0  # a request that has brought nothing for so long loses its bytes to whoever is free
JUDGED_SECONDS = 1.0  # a request that is younger, or ends sooner, keeps its bytes
STEAL_BYTES = 64 * KIB  # the least worth a request of its own


class Run:
    """One request in progress: bytes [start, stop) of a blob, of which [start, at) are written.

    `stop` moves down when another connection takes over the end. Both it and each write hold `lock`, so nothing is
    written at or beyond `stop`, and so nothing at all once the blob is complete.
    """

    def __init__(self, blob: Incoming, source: Source, start: int, stop: int, now: float, *, whole: bool = False):
        self.blob, self.source, self.start, self.at, self.stop = blob, source, start, start, stop
        self.whole = whole  # the answer starts at byte 0, whatever `start` is: this source knows no ranges
        self.began = self.heard = now
        self.got = 0  # bytes of the body read so far, by this request's own thread
        self.saved = start  # written down in the journal up to here
        self.lock = threading.Lock()

    @property
    def left(self) -> int:
        return max(0, self.stop - self.at)

    def rate(self, now: float) -> float:
        return (self.at - self.start) / max(now - self.began, 1e-3)

    def give(self, source: Source, now: float) -> Run | None:
        """Hands the end of this request to another connection, as much as makes both finish at once; None: too little.

        A request that is stuck, or belongs to a source left alone, hands over everything.
        """
        with self.lock:
            if self.whole:
                return None
            left, mine = self.left, self.rate(now)
            if now - self.heard >= STUCK_SECONDS or not self.source.ready(now):
                keep = 0
            elif now - self.began < JUDGED_SECONDS or left < max(2 * STEAL_BYTES, mine * JUDGED_SECONDS):
                return None  # not known yet, or as good as done
            else:
                theirs = source.recent_rate() / max(source.active, 1) or mine or 1.0
                keep = int(left * mine / (mine + theirs)) // STEAL_BYTES * STEAL_BYTES
            if left - keep < min(STEAL_BYTES, left) or left == 0:
                return None
            taken = Run(self.blob, source, self.at + keep, self.stop, now)
            self.stop = self.at + keep
            return taken


class Incoming:
    """A blob being fetched. Fields change under the download's lock, but for the file, which `sync` guards."""

    def __init__(self, step: Fetch, paths: tuple[str, ...], parts: tuple[Part, ...], part_bytes: int):
        self.oid, self.size, self.path, self.paths = step.oid, step.size, step.path, paths
        self.part_bytes = part_bytes
        self.done: list[Part] = list(parts)
        self.here = join((part.start, part.stop) for part in parts)
        self.todo: list[Span] = list(split(missing(self.here, self.size), part_bytes))
        self.running: list[Run] = []
        self.excluded: dict[Source, ToolkitError] = {}
        self.strikes: dict[Source, int] = {}
        self.suspects: list[Part] = []  # bytes on disk that a digest has proved wrong somewhere, until overwritten
        self.culprits: set[str] = set()  # who sent bytes that turned out different
        self.received: dict[str, int] = {}  # by source, in this run
        self.mismatches = 0
        self.sync = threading.Lock()
        self.fd = -1
        self.hashing = False  # a thread is at it, up to `limit`
        self.limit = 0
        self.rehash()

    def rehash(self) -> None:
        self.digest: Any = new_digest(self.oid, self.size)
        self.hashed = 0

    @property
    def complete(self) -> bool:
        return self.hashed == self.size

    def frontier(self) -> int:
        """Every byte before this one is written."""
        at = self.here[0][1] if self.here and self.here[0][0] == 0 else 0
        moved = True
        while moved:
            moved = False
            for run in self.running:
                if run.start <= at < run.at:
                    at, moved = run.at, True
            for start, stop in self.here:
                if start <= at < stop:
                    at, moved = stop, True
        return at

    def settle(self, run: Run) -> Part | None:
        """Takes a finished or failed request off the list: what it wrote is here, the rest is to do again."""
        self.running.remove(run)
        if run.at < run.stop:
            self.todo = sorted([*self.todo, *split([(run.at, run.stop)], self.part_bytes)])
        return self.absorb(run)

    def absorb(self, run: Run) -> Part | None:
        """What a request has written so far, from now on no longer its own."""
        with run.lock:
            part = Part(run.start, run.at, run.source.url)
            run.start = run.at
        if part.start == part.stop:
            return None
        self.here = join([*self.here, (part.start, part.stop)])
        self.done.append(part)
        self.received[part.source] = self.received.get(part.source, 0) + part.stop - part.start
        return part

    def take_whole(self, source: Source, now: float) -> Run:
        """A request for the whole file: the bytes before the first gap are read and let go, all after it come anew."""
        start = self.frontier()
        self.here = clip(self.here, start)
        self.done = [Part(part.start, min(part.stop, start), part.source) for part in self.done if part.start < start]
        self.todo = []
        return Run(self, source, start, self.size, now, whole=True)

    def drop(self, gone: list[Part]) -> None:
        """Counts these parts as never fetched; their bytes stay on disk for comparison until they are overwritten."""
        self.suspects = gone
        self.done = [part for part in self.done if part not in gone]
        self.here = join((part.start, part.stop) for part in self.done)
        self.todo = list(split(missing(self.here, self.size), self.part_bytes))
        self.rehash()

    def open(self, path: Path) -> int:
        """The file descriptor of the partial file."""
        with self.sync:
            if self.fd < 0:
                if path.exists():
                    path.chmod(0o644)  # read-only if a run died between that and the rename
                self.fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
                if os.fstat(self.fd).st_size > self.size:
                    os.ftruncate(self.fd, self.size)
            return self.fd

    def close(self) -> None:
        with self.sync:
            if self.fd >= 0:
                os.close(self.fd)
                self.fd = -1

    def compare(self, data: memoryview, at: int) -> None:
        """Notes whose suspect bytes differ from those that have come now: that source sent wrong ones."""
        for part in self.suspects:
            start, stop = max(part.start, at), min(part.stop, at + len(data))
            if start < stop and part.source not in self.culprits:
                old = os.pread(self.fd, stop - start, start)
                if old != data[start - at : stop - at]:
                    self.culprits.add(part.source)

    @property
    def main_source(self) -> str:
        """Who sent most of the blob, over all runs."""
        count: dict[str, int] = {}
        for part in self.done:
            count[part.source] = count.get(part.source, 0) + part.stop - part.start
        return max(count, key=lambda source: count[source]) if count else ""
