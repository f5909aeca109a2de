"""Fetches blobs from several sources at once: threads take ranges, the disk says what is done, digests what is right.

Each source has its own threads, which take the next range there is: a faster source takes more. When no range is left,
a free connection takes over the end of the slowest request. Bytes go from the socket through one buffer to the file;
threads of their own hash what lies before the first gap, from the page cache, so a blob is published as soon as its
last byte has been hashed. Memory does not grow with the size of a file.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
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
)  # fmt: skip
from formulas.units import KIB, MIB, human
from screen.transport import Cost, Exchange
from screen.wire import Cut, RangeIgnored, Throttled

from .blob import Incoming, Run
from .journal import Part, forget_line, part_line
from .sources import Source, Thresholds, judge
from .store import Store, disk_free, write_all

BUFFER_BYTES = 256 * KIB
TICK_SECONDS = 0.2
PROGRESS_BYTES = 64 * KIB  # a request that brought as much was no failure of its source
CHECKPOINT_BYTES = MIB
MISMATCHES = 4  # digests a blob may end in before it is given up
HASHERS = min(4, os.cpu_count() or 1)

Event = dict[str, Any]


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
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._waiting: deque[Incoming] = deque()
        self._open: list[Incoming] = []
        self._to_save: list[tuple[Incoming, Part]] = []
        self._failed: dict[str, ToolkitError] = {}
        self._origins: dict[str, str] = {}
        self._stopping = self._settled = False
        self._broken: BaseException | None = None
        self._threads: list[threading.Thread] = []
        self._staff: dict[Source, int] = dict.fromkeys(self._sources, 0)
        self._cost = Cost()

    def run(self, blobs: Sequence[Incoming]) -> Fetched:
        """Fetches and publishes the blobs. Raises DiskFull; on any error or interrupt what has arrived is kept."""
        self._waiting.extend(blobs)
        self._begin(self._save, "journal")
        for number in range(HASHERS):
            self._begin(self._hash, f"hash {number}")
        try:
            self._watch()
        finally:
            self._stop()
        if self._broken is not None:
            raise self._broken
        received = {source.url: self._received(source) for source in self._sources}
        hosts = {source.url: tuple(sorted(source.hosts)) for source in self._sources}
        return Fetched(self._failed, received, self._origins, hosts)

    # The watch: the thread that called `run`

    def _watch(self) -> None:
        told = checked = 0.0
        while True:
            with self._changed:
                if self._over():
                    return
                now = time.monotonic()
                for source in self._sources:
                    source.sample(now, self._received(source))
                    source.adapt(self._limits.connections)
                self._replace_slow(now)
                self._give_up(now)
                missing = [(s, s.limit - self._staff[s]) for s in self._sources]
                progress = self._progress() if now - told >= 1.0 else None
                self._changed.notify_all()
            for source, count in missing:
                for _ in range(count):
                    self._staff[source] += 1
                    self._begin(self._work, f"{source.url} {self._staff[source]}", source)
            if progress is not None:
                told = now
                self._on_event(progress)
            if now - checked >= 1.0:
                checked = now
                self._check_room()
            with self._changed:
                self._changed.wait_for(self._over, TICK_SECONDS)

    def _over(self) -> bool:
        return self._broken is not None or not (self._waiting or self._open)

    def _replace_slow(self, now: float) -> None:
        for verdict in judge(self._sources, now, self._limits):
            source = verdict.source
            if verdict.drop:
                source.pause(now, self._limits.probe_seconds, "slow")
                source.limit = 1
            for blob in self._open:
                for path in blob.paths:
                    source.hub.renew(self._repo, self._commit, path)
            self._say("source", url=source.url, state="slow", because=verdict.because)

    def _give_up(self, now: float) -> None:
        """Drops blobs that no source is left for: each refused it for good, or is out of retries."""
        for blob in [*self._open, *self._waiting]:
            left = [s for s in self._sources if s.gone is None and s not in blob.excluded]
            if blob.todo and not blob.running and all(source.hopeless(now) for source in left):
                error = self._reason(blob, left)
                self._failed.update(dict.fromkeys(blob.paths, error))
                self._forget(blob)

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
            "event": "progress", "bytes": sum(map(self._received, self._sources)),
            "sources": [
                {"url": s.url, "bytes": self._received(s), "bytes_per_second": round(s.recent_rate()),
                 "connections": s.active} for s in self._sources
            ],
        }  # fmt: skip

    def _received(self, source: Source) -> int:
        return source.settled + sum(run.got for blob in self._open for run in blob.running if run.source is source)

    def _say(self, event: str, **fields: Any) -> None:
        self._on_event({"event": event, **fields})

    # Threads

    def _begin(self, work: Callable[..., None], name: str, *args: Any) -> None:
        def guarded() -> None:
            try:
                work(*args)
            except BaseException as error:  # the thread that called `run` raises it
                with self._changed:
                    self._broken = self._broken or error
                    self._changed.notify_all()

        thread = threading.Thread(target=guarded, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _stop(self) -> None:
        """Ends all threads; what has been written is fsynced and noted, whatever the reason."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        for source in self._sources:
            source.hub.close()
        for thread in self._threads[1:]:
            thread.join(5.0)  # one that is still connecting ends by itself; it holds nothing that counts
        late = any(thread.is_alive() for thread in self._threads[1:])
        with self._changed:
            self._settled = True
            self._changed.notify_all()
        self._threads[0].join()
        if not late:
            for blob in [*self._open, *self._waiting]:
                blob.close()

    def _work(self, source: Source) -> None:
        buffer = memoryview(bytearray(BUFFER_BYTES))
        last: Run | None = None
        while (run := self._take(source, last)) is not None:
            error: ToolkitError | None = None
            try:
                self._transfer(run, buffer)
            except ToolkitError as problem:
                error = problem
            finally:
                self._settle(run)
            self._learn(run, error)
            last = run

    def _take(self, source: Source, last: Run | None) -> Run | None:
        """The next request for a free connection; waits until there is one. None: nothing is left, or stopping."""
        with self._changed:
            while not self._stopping and (self._waiting or self._open):
                now = time.monotonic()
                if source.ready(now) and source.active < source.limit and (run := self._next(source, last, now)):
                    source.active += 1
                    run.blob.running.append(run)
                    return run
                self._changed.wait()
        return None

    def _next(self, source: Source, last: Run | None, now: float) -> Run | None:
        """The range to ask for: where the last one ended, so that bytes arrive in the order they are hashed in; else a
        new blob's first; else one of an open blob; else the end of the request that takes longest."""
        usable = [blob for blob in self._open if source not in blob.excluded]
        if not source.ranged:
            return self._next_whole(source, usable, now)
        if last is not None and last.blob in usable:
            for span in last.blob.todo:
                if span[0] == last.stop:
                    last.blob.todo.remove(span)
                    return Run(last.blob, source, *span, now)
        large = sum(blob.size > self._limits.part_bytes for blob in self._open)
        for blob in self._waiting:
            if blob.size <= self._limits.part_bytes or large < self._limits.open_blobs:
                if source in blob.excluded:
                    continue
                self._waiting.remove(blob)
                self._open.append(blob)
                usable.append(blob)
                break
        ready = [blob for blob in usable if blob.todo]
        if ready:
            blob = min(ready, key=lambda b: len(b.running))
            return Run(blob, source, *blob.todo.pop(0), now)
        running = [run for blob in usable for run in blob.running if run.left]
        for run in sorted(running, key=lambda r: r.left / (r.rate(now) or 1e-9), reverse=True):
            if taken := run.give(source, now):
                return taken
        return None

    def _next_whole(self, source: Source, usable: list[Incoming], now: float) -> Run | None:
        """A source without ranges gets whole blobs that nobody is at, begun ones only when no other can end them."""
        others = any(s.ranged and s.ready(now) and not s.hopeless(now) for s in self._sources)
        for blob in [*usable, *(b for b in self._waiting if source not in b.excluded)]:
            if blob.todo and not blob.running and not (others and blob.here):
                if blob in self._waiting:
                    self._waiting.remove(blob)
                    self._open.append(blob)
                return blob.take_whole(source, now)
        return None

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

    def _settle(self, run: Run) -> None:
        with self._changed:
            run.source.active -= 1
            run.source.settled += run.got
            if (part := run.blob.settle(run)) is not None:
                self._to_save.append((run.blob, part))
            self._changed.notify_all()

    def _learn(self, run: Run, error: ToolkitError | None) -> None:
        """What the outcome of a request says about its source."""
        source, blob = run.source, run.blob
        if isinstance(error, DiskFull):
            raise error
        with self._changed:
            now = time.monotonic()
            if error is None or (run.got >= PROGRESS_BYTES and not run.whole):
                source.progressed()
            if error is None or self._stopping or not run.left:
                return
            match error:
                case Throttled():
                    source.pause(now, error.wait, error.message)
                    source.barred_until = now + error.wait
                    state = "rate limited"
                case RangeIgnored():
                    source.ranged = False
                    state = "answers no ranges; asked for whole files"
                case AccessDenied():
                    source.gone = error
                    state = "refuses us"
                case NotFound() | DigestMismatch():
                    blob.excluded[source] = error
                    state = "does not have it"
                case HubMisbehaved():
                    blob.strikes[source] = blob.strikes.get(source, 0) + 1
                    state = "answered wrongly"
                    if blob.strikes[source] >= 3:
                        blob.excluded[source] = error
                        state = "answered wrongly three times; not asked for this file again"
                    source.pause(now, self._limits.backoff_seconds, error.message)
                case _:
                    state = self._back_off(source, error, now)
                    source.hub.renew(self._repo, self._commit, blob.path)
        self._say("source", url=source.url, state=state, because=error.message, path=blob.path)

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

    # Journal

    def _save(self) -> None:
        """Notes parts once they are on disk: those that are finished at once, those still arriving now and then."""
        last = time.monotonic()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._to_save or self._settled, self._limits.checkpoint_seconds)
                saving, self._to_save = self._to_save, []
                ended = self._settled and not saving
                if (now := time.monotonic()) - last >= self._limits.checkpoint_seconds:
                    last = now
                    for run in (run for blob in self._open for run in blob.running):
                        if run.at - max(run.start, run.saved) >= CHECKPOINT_BYTES:
                            run.saved = run.at
                            saving.append((run.blob, Part(run.start, run.at, run.source.url)))
            if ended:
                return
            for blob in {id(blob): blob for blob, _ in saving}.values():
                with blob.sync:
                    if blob.fd < 0:
                        continue  # published, or given up: nothing to remember
                    os.fdatasync(blob.fd)
                    self._store.append(*(part_line(blob.oid, part) for other, part in saving if other is blob))

    # Digests

    def _hash(self) -> None:
        buffer = memoryview(bytearray(BUFFER_BYTES))
        while (blob := self._take_hashable()) is not None:
            stop = blob.limit
            fd = blob.open(self._store.partial(blob.oid))
            while blob.hashed < stop:
                count = os.preadv(fd, [buffer[: min(len(buffer), stop - blob.hashed)]], blob.hashed)
                if not count:
                    raise ToolkitError(f"{blob.oid}: expected {stop} bytes in its partial file, something cut it")
                blob.digest.update(buffer[:count])
                blob.hashed += count
                if self._stopping:
                    break
            if blob.complete:
                self._finish(blob)
            with self._changed:
                blob.hashing = False

    def _take_hashable(self) -> Incoming | None:
        with self._changed:
            while not self._stopping and (self._waiting or self._open):
                for blob in [*self._open, *(b for b in self._waiting if not b.todo)]:
                    if blob.hashing:
                        continue
                    blob.limit = blob.frontier()
                    if blob.limit - blob.hashed >= MIB or blob.limit == blob.size:
                        blob.hashing = True
                        return blob
                self._changed.wait(0.02)
        return None

    def _finish(self, blob: Incoming) -> None:
        """Publishes a blob whose digest is right; else finds out whose bytes are wrong, and has them fetched again."""
        oid = f"{blob.oid.partition(':')[0]}:{blob.digest.hexdigest()}"
        with self._changed:
            for run in blob.running:
                blob.absorb(run)
            if oid != blob.oid:
                self._distrust(blob, oid)
                return
        with blob.sync:
            fd, blob.fd = blob.fd, -1
            os.close(fd)
            self._store.publish(blob.oid, self._store.partial(blob.oid), blob.size)
        with self._changed:
            self._name_culprits(blob)
            self._origins[blob.oid] = blob.main_source
            self._forget(blob)
        self._say("file", path=blob.path, oid=blob.oid, bytes=blob.size, source=blob.main_source, how="fetched",
                  received=blob.received)  # fmt: skip

    def _forget(self, blob: Incoming) -> None:
        for blobs in (self._open, self._waiting):
            if blob in blobs:
                blobs.remove(blob)
        self._changed.notify_all()

    def _distrust(self, blob: Incoming, got: str) -> None:
        """Drops the least trusted bytes of a blob with a wrong digest: found locally, or a mirror's, or all."""
        blob.mismatches += 1
        self._name_culprits(blob)
        trusted = {source.url for source in self._sources if source.trusted}
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
        if blob.mismatches >= MISMATCHES:
            self._failed.update(dict.fromkeys(blob.paths, error))
            self._forget(blob)
            return
        others = [s for s in self._sources if s.url not in senders and s.gone is None and s not in blob.excluded]
        if others:
            blob.excluded.update({source: error for source in self._sources if source.url in senders})
        blob.drop(gone)
        self._store.append(forget_line(blob.oid), *(part_line(blob.oid, part) for part in blob.done))
        self._say("quarantined", path=blob.path, oid=blob.oid, sources=senders, because=error.message)

    def _name_culprits(self, blob: Incoming) -> None:
        """Counts wrong bytes against those who sent them, and asks the innocent again."""
        checked = {part.source for part in blob.suspects}
        for source in self._sources:
            if source.url in checked - blob.culprits:
                blob.excluded.pop(source, None)
            if source.url in blob.culprits:
                source.corrupt += 1
                self._say("source", url=source.url, state="wrong bytes", path=blob.path,
                          because=f"{source.url} sent wrong bytes of {blob.path}; fetched elsewhere")  # fmt: skip
                if source.corrupt >= 3:
                    source.gone = DigestMismatch(f"{source.url}: sent wrong bytes of {source.corrupt} files; not used")
        blob.suspects, blob.culprits = [], set()
