"""What the search for places is given and gives: demands of seats, sites with slots, seatings. Plain numbers.

Kinds of card are opaque here; what a seat needs on one is worked out in needs.py.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple


class Need(NamedTuple):
    """What one rank of a seat needs of a card, and of its host. Bytes."""

    asks: int  # must be free on the card when it starts
    takes: int  # is held from then on; differs where the engine checks for more than it then uses
    host: int = 0  # of host memory, every rank its own
    shared: int = 0  # of host memory, for the first `sharers` ranks on a host; further ones use theirs
    sharers: int = 0


class Slot(NamedTuple):
    """A card: the kind decides what a seat needs there, `free` is what no seat of this plan has taken yet."""

    uuid: str
    kind: Hashable
    free: int


class Site(NamedTuple):
    """A host: its cards, and the host memory seats may take; None where that is not known."""

    name: str
    free: int | None
    slots: tuple[Slot, ...]


class Demand(NamedTuple):
    """A seat to be placed: `spans` are the numbers of hosts its ranks may be divided over, evenly; `needs` says by
    (kind, over several hosts) what a rank needs, and has no entry where it does not fit. Cards of one seat share a
    family (compute capability), so that all ranks run the same kernels."""

    name: str
    ranks: int
    spans: tuple[int, ...]
    sites: frozenset[str]  # hosts it is pinned to; empty: any
    needs: Mapping[tuple[Hashable, bool], Need]
    families: Mapping[Hashable, Hashable]


class Seating(NamedTuple):
    """One seat's cards: (host, card) per rank, in rank order."""

    name: str
    cards: tuple[tuple[str, str], ...]

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(host for host, _ in self.cards))


class Outcome(NamedTuple):
    """What the search found. `partial` is the fullest seating met, `stuck` the seat it could not go on with."""

    seatings: tuple[Seating, ...] | None
    partial: tuple[Seating, ...]
    stuck: str | None
    steps: int
    is_proof: bool  # without seatings: there is none; with seatings: none spans fewer hosts


def start_order(free: int, loads: Sequence[Need]) -> tuple[Need, ...] | None:
    """The order in which seats that share a card can start, each finding what it asks for free; None if none exists.

    An exchange argument gives the order: what a seat asks beyond what it keeps is only ever available early."""
    order = tuple(sorted(loads, key=lambda load: load.takes - load.asks))
    for load in order:
        if load.asks > free:
            return None
        free -= load.takes
    return order if free >= 0 else None


def host_bytes(need: Need, ranks: int) -> int:
    """Host memory that so many ranks of a seat take on one host."""
    return need.host * ranks + need.shared * min(ranks, need.sharers)
