"""What all threads of a download share: the blobs that wait, those that are open, and who asks for what next."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from formulas.errors import ToolkitError

from .blob import Incoming, Run
from .journal import Part
from .sources import Source, Thresholds

Event = dict[str, Any]


class Board:
    """The state of one download. `changed` guards every field and is notified when one of them changes."""

    def __init__(self, blobs: Iterable[Incoming], sources: Sequence[Source], limits: Thresholds):
        self.changed = threading.Condition()
        self.sources, self.limits = list(sources), limits
        self.waiting: deque[Incoming] = deque(blobs)
        self.open: list[Incoming] = []
        self.to_save: list[tuple[Incoming, Part, int]] = []  # and the blob's `mismatches` when it was noted
        self.failed: dict[str, ToolkitError] = {}
        self.origins: dict[str, str] = {}
        self.events: deque[Event] = deque()  # told by the thread that watches, which holds no lock then
        self.stopping = False  # nobody begins anything new
        self.settled = False  # every thread that fetches or hashes has ended
        self.broken: BaseException | None = None  # what a thread died of

    @property
    def over(self) -> bool:
        return self.broken is not None or not (self.waiting or self.open)

    def say(self, event: str, **fields: Any) -> None:
        self.events.append({"event": event, **fields})

    def forget(self, blob: Incoming) -> None:
        """Takes a blob that is published or given up off the board."""
        for blobs in (self.open, self.waiting):
            if blob in blobs:
                blobs.remove(blob)
        self.changed.notify_all()

    def fail(self, blob: Incoming, error: ToolkitError) -> None:
        self.failed.update(dict.fromkeys(blob.paths, error))
        self.forget(blob)

    def received(self, source: Source) -> int:
        """Bytes of bodies that a source has sent so far, those of no use included."""
        return source.settled + sum(run.got for blob in self.open for run in blob.running if run.source is source)

    def take(self, source: Source, last: Run | None) -> Run | None:
        """The next request for a free connection; waits until there is one. None: nothing is left, or stopping."""
        with self.changed:
            while not self.stopping and (self.waiting or self.open):
                now = time.monotonic()
                if source.ready(now) and source.active < source.limit and (run := self._next(source, last, now)):
                    source.active += 1
                    run.blob.running.append(run)
                    return run
                self.changed.wait()
        return None

    def settle(self, run: Run) -> None:
        """Takes a request that has ended, however, off its source and its blob."""
        with self.changed:
            run.source.active -= 1
            run.source.settled += run.got
            if (part := run.blob.settle(run)) is not None:
                self.to_save.append((run.blob, part, run.blob.mismatches))
            self.changed.notify_all()

    def _next(self, source: Source, last: Run | None, now: float) -> Run | None:
        """The range to ask for: where the last one ended, so that bytes arrive in the order they are hashed in; else a
        new blob's first; else one of an open blob; else the end of the request that takes longest."""
        usable = [blob for blob in self.open if source not in blob.excluded]
        if not source.ranged:
            return self._next_whole(source, usable, now)
        if last is not None and last.blob in usable:
            for span in last.blob.todo:
                if span[0] == last.stop:
                    last.blob.todo.remove(span)
                    return Run(last.blob, source, *span, now)
        if (blob := self._next_waiting(source)) is not None:
            self._begin(blob)
            usable.append(blob)
        if ready := [blob for blob in usable if blob.todo]:
            blob = min(ready, key=lambda b: len(b.running))
            return Run(blob, source, *blob.todo.pop(0), now)
        running = [run for blob in usable for run in blob.running if run.left]
        for run in sorted(running, key=lambda r: r.left / (r.rate(now) or 1e-9), reverse=True):
            if taken := run.give(source, now):
                return taken
        return None

    def _next_waiting(self, source: Source) -> Incoming | None:
        """The next blob to open: any small one, a large one while few are open."""
        small = self.limits.part_bytes
        crowded = sum(blob.size > small for blob in self.open) >= self.limits.open_blobs
        usable = (blob for blob in self.waiting if source not in blob.excluded)
        return next((blob for blob in usable if blob.size <= small or not crowded), None)

    def _next_whole(self, source: Source, usable: list[Incoming], now: float) -> Run | None:
        """A source without ranges gets whole blobs that nobody is at, begun ones only when no other can end them."""
        others = any(s.ranged and s.ready(now) and not s.hopeless(now) for s in self.sources)
        for blob in [*usable, *(b for b in self.waiting if source not in b.excluded)]:
            if blob.todo and not blob.running and not (others and blob.here):
                self._begin(blob)
                return blob.take_whole(source, now)
        return None

    def _begin(self, blob: Incoming) -> None:
        if blob in self.waiting:
            self.waiting.remove(blob)
            self.open.append(blob)
