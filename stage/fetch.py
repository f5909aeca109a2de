"""Fetches blobs from several sources at once: threads take ranges, the disk says what is done, digests what is right.

Each source has its own threads, which take the next range there is: a faster source takes more. When no range is left,
a free connection takes over the end of the slowest request. Bytes go from the socket through one buffer to the file,
so memory does not grow with the size of a file; other threads hash what has come, see `digests`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from formulas.errors import (
    AccessDenied,
    DigestMismatch,
    DiskFull,
    HubMisbehaved,
    HubUnavailable,
    NotFound,
    ToolkitError,
)
from formulas.units import KIB, MIB, human
from screen.transport import Cost, Exchange
from screen.wire import Cut, RangeIgnored, Throttled

from .blob import Incoming, Run
from .board import Board, Event
from .digests import BUFFER_BYTES, HASHERS, hash_blobs
from .disk import disk_free, write_all
from .journal import Part, part_line
from .sources import Source, Thresholds, judge
from .store import Store

TICK_SECONDS = 0.1
PROGRESS_BYTES = 64 * KIB  # a request that brought as much was no failure of its source
CHECKPOINT_BYTES = MIB
STRIKES = 3  # wrong answers for a blob, or ranges ignored in a row, that are no accident any more


class Fetched(NamedTuple):
    """What a download did. `failed`: by path, why; `received`: bytes by source, thrown-away ones included; `origins`:
    by oid, the source of most of a published blob; `hosts`: by source, the hosts that sent its bytes."""

    failed: dict[str, ToolkitError]
    received: dict[str, int]
    origins: dict[str, str]
    hosts: dict[str, tuple[str, ...]]


class Download:
    """One run's fetching: `run` returns when every blob is published or has no source left."""

    def __init__(
        self, store: Store, repo: str, commit: str, sources: Sequence[Source], thresholds: Thresholds,
        on_event: Callable[[Event], None],
    ):  # fmt: skip
        self._store, self._repo, self._commit, self._on_event = store, repo, commit, on_event
        self._sources, self._limits = list(sources), thresholds
        self._board = Board((), sources, thresholds)
        self._threads: list[threading.Thread] = []
        self._staff: dict[Source, int] = dict.fromkeys(self._sources, 0)
        self._cost = Cost()

    def run(self, blobs: Sequence[Incoming]) -> Fetched:
        """Fetches and publishes the blobs. Raises DiskFull; on any error or interrupt what has arrived is kept."""
        board = self._board
        board.waiting.extend(blobs)
        self._begin(self._save, "journal")
        for number in range(HASHERS):
            self._begin(hash_blobs, f"hash {number}", board, self._store)
        try:
            self._watch()
        finally:
            self._stop()
            board.events.append(self._progress())
            self._tell()
        if board.broken is not None:
            raise board.broken
        received = {source.url: board.received(source) for source in self._sources}
        hosts = {source.url: tuple(sorted(source.hosts)) for source in self._sources}
        return Fetched(board.failed, received, board.origins, hosts)

    # The watch: the thread that called `run`

    def _watch(self) -> None:
        board, told, checked = self._board, 0.0, 0.0
        while True:
            with board.changed:
                if board.over:
                    return
                now = time.monotonic()
                for source in self._sources:
                    source.sample(now, board.received(source))
                    source.adapt(self._limits.connections)
                self._replace_slow(now)
                self._give_up(now)
                missing = [(source, source.limit - self._staff[source]) for source in self._sources]
                if now - told >= 1.0:
                    told = now
                    board.events.append(self._progress())
                board.changed.notify_all()
            for source, count in missing:
                for _ in range(count):
                    self._staff[source] += 1
                    self._begin(self._work, f"{source.url} {self._staff[source]}", source)
            self._tell()
            if now - checked >= 1.0:
                checked = now
                self._check_room()
            with board.changed:
                board.changed.wait_for(lambda: board.over, TICK_SECONDS)

    def _tell(self) -> None:
        while self._board.events:
            self._on_event(self._board.events.popleft())

    def _replace_slow(self, now: float) -> None:
        for verdict in judge(self._sources, now, self._limits):
            source = verdict.source
            if verdict.drop:
                source.pause(now, self._limits.probe_seconds, "slow")
                source.limit = 1
            for blob in self._board.open:
                for path in blob.paths:
                    source.hub.renew(self._repo, self._commit, path)
            self._board.say("source", url=source.url, state="slow", because=verdict.because)

    def _give_up(self, now: float) -> None:
        """Drops blobs that no source is left for: each refused it for good, or is out of retries."""
        for blob in [*self._board.open, *self._board.waiting]:
            left = [s for s in self._sources if s.gone is None and s not in blob.excluded]
            if blob.todo and not blob.running and all(source.hopeless(now) for source in left):
                self._board.fail(blob, self._reason(blob, left))

    def _reason(self, blob: Incoming, left: list[Source]) -> ToolkitError:
        """The error that tells most: what the trusted endpoint said, else the last source."""
        if left:
            because = "; ".join(source.because for source in left)
            return HubUnavailable(f"{blob.path}: no source answers ({because})", hint="run again to continue")
        errors = [blob.excluded.get(s) or s.gone for s in self._sources]
        return next(error for error in errors if error is not None)

    def _check_room(self) -> None:
        free = disk_free(self._store.root)
        if free < self._limits.reserve_bytes:
            raise DiskFull(
                f"disk of {self._store.root}: expected {human(self._limits.reserve_bytes)} to stay free, got "
                f"{human(free)}; stopped, what was fetched is kept",
                hint="make room or lower --reserve, and run again to continue",
            )

    def _progress(self) -> Event:
        return {
            "event": "progress", "bytes": sum(map(self._board.received, self._sources)),
            "sources": [
                {"url": s.url, "bytes": self._board.received(s), "bytes_per_second": round(s.recent_rate()),
                 "connections": s.active} for s in self._sources
            ],
        }  # fmt: skip

    # Threads

    def _begin(self, work: Callable[..., None], name: str, *args: Any) -> None:
        def guarded() -> None:
            try:
                work(*args)
            except BaseException as error:  # the thread that called `run` raises it
                with self._board.changed:
                    self._board.broken = self._board.broken or error
                    self._board.changed.notify_all()

        thread = threading.Thread(target=guarded, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _stop(self) -> None:
        """Ends all threads; what has been written is fsynced and noted, whatever the reason."""
        with self._board.changed:
            self._board.stopping = True
            self._board.changed.notify_all()
        for source in self._sources:
            source.hub.close()
        for thread in self._threads[1:]:
            thread.join(5.0)  # one that is still connecting ends by itself; it holds nothing that counts
        late = any(thread.is_alive() for thread in self._threads[1:])
        with self._board.changed:
            self._board.settled = True
            self._board.changed.notify_all()
        self._threads[0].join()
        if not late:
            for blob in [*self._board.open, *self._board.waiting]:
                blob.close()

    def _work(self, source: Source) -> None:
        buffer = memoryview(bytearray(BUFFER_BYTES))
        last: Run | None = None
        while (run := self._board.take(source, last)) is not None:
            error: ToolkitError | None = None
            try:
                self._transfer(run, buffer)
            except ToolkitError as problem:
                error = problem
            finally:
                self._board.settle(run)
            self._learn(run, error)
            last = run

    def _transfer(self, run: Run, buffer: memoryview) -> None:
        """Brings the bytes of one request to the file. Raises what went wrong; what was written counts."""
        blob, fd = run.blob, run.blob.open(self._store.partial(run.blob.oid))
        with self._ask(run) as body:
            run.source.hosts.add(body.host)
            skip = run.start if run.whole else 0
            while run.left:
                count = body.readinto(buffer[: min(len(buffer), skip or run.left)])
                if not count:
                    raise Cut(f"{body.subject}: the body ended {run.left} bytes early")
                run.got += count
                run.heard = time.monotonic()
                if skip:
                    skip -= count
                    continue
                with run.lock:
                    data = buffer[: min(count, run.left)]
                    if blob.suspects:
                        blob.compare(data, run.at)
                    write_all(fd, data, run.at)
                    run.at += len(data)

    def _ask(self, run: Run) -> Exchange:
        hub, path, size = run.source.hub, run.blob.path, run.blob.size
        if run.whole:
            return hub.open_file(self._repo, self._commit, path, size=size, cost=self._cost)
        try:
            return hub.open_range(self._repo, self._commit, path, run.start, run.stop, size=size, cost=self._cost)
        except RangeIgnored:
            if (run.start, run.stop) != (0, size):
                raise
            return hub.open_file(self._repo, self._commit, path, size=size, cost=self._cost)

    def _learn(self, run: Run, error: ToolkitError | None) -> None:
        """What the outcome of a request says about its source."""
        source, blob = run.source, run.blob
        if isinstance(error, DiskFull):
            raise error
        with self._board.changed:
            now = time.monotonic()
            progress = error is None or (run.got >= PROGRESS_BYTES and not run.whole)
            if progress:
                source.progressed()
            if error is None or self._board.stopping or not run.left:
                return
            match error:
                case Throttled():
                    source.pause(now, error.wait, error.message)
                    source.barred_until = now + error.wait
                    state = "rate limited"
                case RangeIgnored():
                    source.ignored += 1
                    source.ranged = source.ignored < STRIKES
                    state = "ignored a range" if source.ranged else "answers no ranges; asked for whole files"
                case AccessDenied() if source.trusted:
                    source.gone = error
                    state = "refuses us"
                case NotFound() | AccessDenied() | DigestMismatch():
                    blob.excluded[source] = error
                    state = "does not have it"
                case HubMisbehaved():
                    blob.strikes[source] = blob.strikes.get(source, 0) + 1
                    state = "answered wrongly"
                    if blob.strikes[source] >= STRIKES:
                        blob.excluded[source] = error
                        state = "answered wrongly three times; not asked for this file again"
                    source.pause(now, self._limits.backoff_seconds, error.message)
                case _:
                    state = "goes on where it ended" if progress else self._back_off(source, error, now)
                    source.hub.renew(self._repo, self._commit, blob.path)
        self._board.say("source", url=source.url, state=state, because=error.message, path=blob.path)

    def _back_off(self, source: Source, error: ToolkitError, now: float) -> str:
        """Waits longer after each failure without progress; many connections that fail at once are one failure."""
        if now < source.paused_until:
            return "failed"
        source.failures += 1
        if source.failures > self._limits.retries or not error.retry:
            source.failed = True
            source.limit = 1
            source.pause(now, self._limits.probe_seconds, error.message)
            return f"failed {source.failures} times in a row; tried again in {self._limits.probe_seconds:.0f} s"
        source.pause(now, min(8.0, self._limits.backoff_seconds * 2.0 ** (source.failures - 1)), error.message)
        return "failed"

    def _save(self) -> None:
        """Notes parts once they are on disk: those that are finished at once, those still arriving now and then."""
        board, every, last = self._board, self._limits.checkpoint_seconds, time.monotonic()
        while True:
            with board.changed:
                board.changed.wait_for(lambda: board.to_save or board.settled, every)
                saving, board.to_save = board.to_save, []
                ended = board.settled and not saving
                if (now := time.monotonic()) - last >= every:
                    last = now
                    for run in (run for blob in board.open for run in blob.running):
                        if run.at - max(run.start, run.saved) >= CHECKPOINT_BYTES:
                            run.saved = run.at
                            part = Part(run.start, run.at, run.source.url)
                            saving.append((run.blob, part, run.blob.mismatches))
            if ended:
                return
            for blob in {id(blob): blob for blob, _, _ in saving}.values():
                with blob.sync:
                    # Noted before a digest was wrong: what is still trusted of it was written down then.
                    parts = [part for of, part, at in saving if of is blob and at == blob.mismatches]
                    if blob.fd < 0 or not parts:
                        continue  # published, or given up: nothing to remember
                    os.fdatasync(blob.fd)
                    self._store.append(*(part_line(blob.oid, part) for part in parts))
