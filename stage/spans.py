"""Half-open byte ranges `(start, stop)` of one blob, sorted and disjoint: which bytes are there, which are not."""

from __future__ import annotations

from collections.abc import Iterable

Span = tuple[int, int]
Spans = tuple[Span, ...]


def join(spans: Iterable[Span]) -> Spans:
    """The same bytes as the fewest sorted spans; empty spans vanish."""
    joined: list[Span] = []
    for start, stop in sorted(span for span in spans if span[0] < span[1]):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], stop))
        else:
            joined.append((start, stop))
    return tuple(joined)


def clip(spans: Spans, size: int) -> Spans:
    """What of the spans lies in [0, size)."""
    return tuple((max(start, 0), min(stop, size)) for start, stop in spans if start < size and stop > 0)


def missing(spans: Spans, size: int) -> Spans:
    """The bytes of [0, size) that no span covers. `spans` as `join` returns them."""
    gaps, at = [], 0
    for start, stop in clip(spans, size):
        if at < start:
            gaps.append((at, start))
        at = stop
    if at < size:
        gaps.append((at, size))
    return tuple(gaps)


def total(spans: Iterable[Span]) -> int:
    """Bytes covered by disjoint spans."""
    return sum(stop - start for start, stop in spans)


def split(spans: Iterable[Span], part_bytes: int) -> Spans:
    """The spans cut at multiples of `part_bytes` from each span's start: the ranges of the requests."""
    return tuple(
        (at, min(at + part_bytes, stop)) for start, stop in spans for at in range(start, stop, part_bytes)
    )  # fmt: skip


def part_size(size: int, smallest: int, largest: int) -> int:
    """Bytes of one request for a blob of `size`: a sixteenth of it, in whole `smallest`, at most `largest`."""
    wanted = -(-size // 16 // smallest) * smallest
    return max(smallest, min(wanted, largest))
