"""Where bytes come from: an endpoint and mirrors, how fast each one is, and when to turn to another.

Sizes and digests never come from here. Rules: a source is slow when for `slow_seconds` all its connections together
bring less than max(`floor_bytes_per_second`, `slow_share` of the best source's rate). It then gets fewer connections
and a fresh address; if that does not help and another source works, it is left alone and probed again later.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from formulas.errors import ToolkitError
from formulas.units import KIB, MIB, human
from screen.hub import Hub

FIRST_CONNECTIONS = 4
FAST_CONNECTION = 96 * MIB  # bytes/s: a connection this fast is limited by this machine, a second one does not help


@dataclass(frozen=True, slots=True)
class Thresholds:
    """What counts as slow, stuck or hopeless, and the bounds of a download. All of them are options of `stage`."""

    stall_seconds: float = 30.0  # without a new byte: the connection is given up
    slow_seconds: float = 30.0  # a source is judged by its rate over so long
    floor_bytes_per_second: int = 256 * KIB
    slow_share: float = 0.1  # of the best source's rate
    probe_seconds: float = 60.0  # until a source that failed or was slow is tried again
    retries: int = 5  # failures of a source in a row, without progress, until it counts as failed
    backoff_seconds: float = 0.5  # after the first of them; doubles up to 8 s
    connections: int = 16  # per source, at most
    part_bytes: int = 16 * MIB  # smallest range of one request
    largest_part_bytes: int = 64 * MIB
    open_blobs: int = 4  # large blobs in progress at once
    reserve_bytes: int = 1024 * MIB  # of the file system, left free
    checkpoint_seconds: float = 5.0  # between journal lines of a part still arriving


class Sample(NamedTuple):
    seconds: float
    received: int


class Source:
    """One place bytes come from, and how it has been doing. Its fields change under the download's lock."""

    def __init__(self, hub: Hub, *, trusted: bool, connections: int):
        self.hub, self.url, self.trusted = hub, hub.endpoint, trusted
        self.limit, self.active = min(connections, FIRST_CONNECTIONS), 0
        self.ignored = 0  # ranges in a row that it answered with the whole file
        self.ranged = True  # answers ranges; a mirror that does not is asked for whole files
        self.failures = 0  # in a row, without progress
        self.failed = False  # out of retries; until its next probe succeeds
        self.gone: ToolkitError | None = None  # refuses us for good
        self.paused_until, self.because = 0.0, ""
        self.barred_until = 0.0  # its rate limit lasts longer than this run waits
        self.corrupt = 0  # blobs it delivered wrong bytes for
        self.hosts: set[str] = set()  # that its redirects ended at
        self.settled = 0  # bytes of requests that are over
        self.strikes = 0  # times in a row it was found slow
        self._samples: deque[Sample] = deque(maxlen=4096)
        self._grown_from = 0.0

    def ready(self, now: float) -> bool:
        return self.gone is None and now >= self.paused_until

    def hopeless(self, now: float) -> bool:
        """Whether nothing can be expected of it: only its next probe can change that."""
        return self.gone is not None or self.failed or now < self.barred_until

    def pause(self, now: float, seconds: float, because: str) -> None:
        self.paused_until, self.because = max(self.paused_until, now + seconds), because

    def progressed(self) -> None:
        self.failures, self.failed, self.ignored = 0, False, 0

    def sample(self, now: float, received: int) -> None:
        """Notes how much has come in all; a source that nobody asks is not slow, so idle time starts anew."""
        if not self.active:
            self._samples.clear()
        self._samples.append(Sample(now, received))

    def rate(self, seconds: float) -> float | None:
        """Bytes/s over the last `seconds`, all connections together; None while it was not asked for so long."""
        if not self._samples or self._samples[-1].seconds - self._samples[0].seconds < seconds:
            return None
        last = self._samples[-1]
        first = next(s for s in reversed(self._samples) if last.seconds - s.seconds >= seconds)
        return (last.received - first.received) / (last.seconds - first.seconds)

    def recent_rate(self) -> float:
        """Bytes/s over the last second or what there is of it; 0 when unknown, for display and for dividing work."""
        if len(self._samples) < 2:
            return 0.0
        last = self._samples[-1]
        first = next((s for s in reversed(self._samples) if last.seconds - s.seconds >= 1.0), self._samples[0])
        return (last.received - first.received) / (last.seconds - first.seconds)

    def restart(self) -> None:
        """Judges from now on only."""
        self._samples.clear()

    def adapt(self, most: int) -> None:
        """Allows more connections while that has brought more bytes; called once a tick while there is work left.

        Some hosts slow everybody down above a few connections (huggingface_hub#4893): growth has to pay, or it ends.
        """
        if self.active < self.limit or self.limit >= most or len(self._samples) < 2 or self.strikes:
            return
        before, last = self._samples[-2], self._samples[-1]
        rate = (last.received - before.received) / (last.seconds - before.seconds)
        if rate and rate / self.limit < FAST_CONNECTION and rate > 1.2 * self._grown_from:
            self._grown_from = rate
            self.limit = min(most, self.limit * 2)


class Verdict(NamedTuple):
    """A slow source, what is done about it, and the sentence that says so."""

    source: Source
    drop: bool
    because: str


def judge(sources: list[Source], now: float, thresholds: Thresholds) -> list[Verdict]:
    """The sources found slow at this moment: first one gets fewer connections, then it is dropped if others work."""
    rates = [source.rate(thresholds.slow_seconds) for source in sources]
    best = max((source.recent_rate() for source in sources), default=0.0)
    verdicts = []
    for source, rate in zip(sources, rates, strict=True):
        floor = max(thresholds.floor_bytes_per_second, thresholds.slow_share * best)
        if rate is None:
            continue
        if rate >= floor:
            source.strikes = 0
            continue
        source.strikes += 1
        source.restart()
        source.limit = max(1, source.limit // 2)
        others = any(other is not source and other.ready(now) and not other.hopeless(now) for other in sources)
        because = (
            f"{source.url}: expected {human(floor)}/s, got {human(rate)}/s for {thresholds.slow_seconds:.0f} s; "
        )
        if source.strikes > 1 and others:
            verdicts.append(Verdict(source, True, because + f"left alone for {thresholds.probe_seconds:.0f} s"))
        else:
            verdicts.append(Verdict(source, False, because + f"now {source.limit} connections and a fresh address"))
    return verdicts
