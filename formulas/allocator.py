"""torch's caching CUDA allocator, as far as the bytes it counts as allocated: rounding and what cannot be split off.

A request is rounded to 512 B and served from a free block of its pool, best fit, or from a new segment: 2 MiB for
requests up to 1 MiB, 20 MiB below 10 MiB, else the size itself rounded to 2 MiB. The rest of the block is split off
and stays free if the pool's rule lets it; otherwise the whole block counts as allocated.
Source: torch 2.11 and 2.14 c10/cuda/CUDACachingAllocator.cpp (get_allocation_size, should_split).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import NamedTuple

from .units import MIB

_SMALL, _LARGE, _MIN_LARGE, _ROUND_LARGE = 1 * MIB, 20 * MIB, 10 * MIB, 2 * MIB


class Usage(NamedTuple):
    """Bytes counted as allocated: at the end, and at the highest."""

    now: int
    peak: int


class Pool:
    """The free blocks of one allocator, and what it counts as allocated. Blocks are sizes: addresses do not matter."""

    def __init__(self, max_split: int | None = None):
        self._max_split = max_split
        self._small: list[int] = []
        self._large: list[int] = []
        self.now = 0
        self.peak = 0

    def allocate(self, size: int) -> int:
        """The bytes this request is counted as; 0 for an empty tensor."""
        if size <= 0:
            return 0
        size = -(-size // 512) * 512
        small = size <= _SMALL
        free = self._small if small else self._large
        block = self._take(free, size, small)
        rest = block - size
        if rest >= 512 if small else rest > _SMALL and (self._max_split is None or size < self._max_split):
            insort(free, rest)
            block = size
        self.now += block
        self.peak = max(self.peak, self.now)
        return block

    def release(self, block: int) -> None:
        """Gives back what `allocate` returned; neighbours are not joined, as another tensor may lie between them."""
        if block:
            self.now -= block
            insort(self._small if block <= _SMALL else self._large, block)

    def _take(self, free: list[int], size: int, small: bool) -> int:
        at = bisect_left(free, size)
        if at < len(free) and self._may_use(free[at], size):
            return free.pop(at)
        if small:
            return _ROUND_LARGE
        return _LARGE if size < _MIN_LARGE else -(-size // _ROUND_LARGE) * _ROUND_LARGE

    def _may_use(self, block: int, size: int) -> bool:
        """Blocks above max_split_size serve only requests above it, and then only if little is wasted."""
        if self._max_split is None:
            return True
        if size < self._max_split <= block:
            return False
        return not (size >= self._max_split and block >= size + _LARGE)


def usage(created: Iterable[int], *, max_split: int | None = None) -> Usage:
    """What torch counts for tensors of these sizes, allocated in this order and kept."""
    pool = Pool(max_split)
    for size in created:
        pool.allocate(size)
    return Usage(pool.now, pool.peak)
