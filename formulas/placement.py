"""Which seats go on which cards: an exact search that prunes what is the same, with a bound on its work.

The plan found spans the fewest hosts in all; among those, seats go on the fullest cards that still take them, so that
whole cards stay free.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

from .demands import Demand, Need, Outcome, Seating, Site, Slot, host_bytes, start_order

MOST_STEPS = 20_000


class _Bay(NamedTuple):
    """A card in the search, with the seats on it."""

    slot: Slot
    loads: tuple[Need, ...] = ()

    @property
    def left(self) -> int:
        return self.slot.free - sum(load.takes for load in self.loads)

    @property
    def key(self) -> tuple[Hashable, ...]:
        return (self.slot.kind, self.slot.free, self.loads)


class _Room(NamedTuple):
    """A host in the search."""

    site: Site
    taken: int
    bays: tuple[_Bay, ...]


class _Found(Exception):
    """Unwinds the search once every seat has its cards."""


class _OutOfSteps(Exception):
    """Unwinds the search once it has done the work it may do."""


def place(sites: Sequence[Site], demands: Sequence[Demand], most_steps: int = MOST_STEPS) -> Outcome:
    """A place for every demand, spanning the fewest hosts in all, or the fullest seating met.

    Depth first, hardest seat first, with a budget of hosts that grows until a plan is found. Cards of one kind and
    load, and hosts of one make and load, are tried once; states that led nowhere are remembered up to such swaps. A
    search that runs out of steps spends as many again on any plan at all."""
    search = _Search(sites, demands, most_steps)
    budgets = search.budgets()
    for budget in budgets:
        found = search.run(budget)
        if found is None:
            break
        if found or not search.was_cut:
            return search.outcome(found, is_proof=True)
    search.most_steps += most_steps
    found = search.run(budgets[-1])
    return search.outcome(bool(found), is_proof=found is False)


class _Search:
    """The state of one search: its bound, what led nowhere, and the fullest seating met."""

    def __init__(self, sites: Sequence[Site], demands: Sequence[Demand], most_steps: int):
        self.demands = sorted(demands, key=_hardest_first)
        self.rooms = tuple(_Room(site, 0, tuple(_Bay(slot) for slot in site.slots)) for site in sites)
        self.named = frozenset().union(*(demand.sites for demand in demands))
        fewest = [min(demand.spans, default=1) for demand in self.demands]
        self.fewest_after = [sum(fewest[i:]) for i in range(len(fewest) + 1)]
        self.most_steps = most_steps
        self.steps = 0
        self.best: tuple[Seating, ...] = ()
        self.stuck: str | None = self.demands[0].name if self.demands else None
        self.was_cut = False
        self.has_dived = False  # a first seating was followed to its end, so there is one to tell of
        self.dead: set[Hashable] = set()
        sizes = [min((need.takes for need in demand.needs.values()), default=0) for demand in self.demands]
        ranks = [demand.ranks for demand in self.demands]
        self.waiting = [list(zip(sizes[i:], ranks[i:], strict=True)) for i in range(len(sizes) + 1)]

    def budgets(self) -> range:
        most = sum(max(demand.spans, default=1) for demand in self.demands)
        return range(self.fewest_after[0], most + 1)

    def run(self, budget: int) -> bool | None:
        """Whether there is a plan over so many hosts; None where the steps ran out."""
        self.dead.clear()
        self.was_cut = False
        try:
            self._descend(self.rooms, 0, budget, ())
        except _Found:
            return True
        except _OutOfSteps:
            return None
        return False

    def outcome(self, found: bool, is_proof: bool) -> Outcome:
        return Outcome(self.best if found else None, self.best, None if found else self.stuck, self.steps, is_proof)

    def _descend(self, rooms: tuple[_Room, ...], index: int, budget: int, seated: tuple[Seating, ...]) -> None:
        if index == len(self.demands):
            self.best = seated
            raise _Found
        state = (index, budget, tuple(sorted(map(repr, (_room_key(room, self.named) for room in rooms)))))
        if state in self.dead:
            return
        if len(seated) > len(self.best) or not self.best:
            self.best, self.stuck = seated, self.demands[index].name
        demand = self.demands[index]
        for span in demand.spans:
            if span + self.fewest_after[index + 1] > budget:
                self.was_cut = True
                continue
            for choice in _choices(rooms, demand, span, self.named):
                if self.has_dived and _is_hopeless(rooms, self.waiting[index]):
                    break
                self.steps += 1
                if self.steps > self.most_steps:
                    raise _OutOfSteps
                after, seating = _settle(rooms, demand, choice)
                self._descend(after, index + 1, budget - span, (*seated, seating))
        self.has_dived = True
        self.dead.add(state)


def _is_hopeless(rooms: Sequence[_Room], waiting: Sequence[tuple[int, int]]) -> bool:
    """Whether ranks of these (bytes, number) cannot all have a card, whatever the hosts: they take more than is left,
    or those of some size and above are more than fit the cards one by one."""
    left = [bay.left for room in rooms for bay in room.bays]
    if sum(size * ranks for size, ranks in waiting) > sum(left):
        return True
    for least in {size for size, _ in waiting if size}:
        if sum(ranks for size, ranks in waiting if size >= least) > sum(each // least for each in left):
            return True
    return False


def _hardest_first(demand: Demand) -> tuple[int, int, int, str]:
    takes = max((need.takes for need in demand.needs.values()), default=0)
    return (len(demand.needs), -demand.ranks, -takes, demand.name)


def _room_key(room: _Room, named: frozenset[str]) -> tuple[Hashable, ...]:
    """Equal for hosts that a swap of names turns into each other."""
    name = room.site.name if room.site.name in named else None
    return (name, room.site.free, room.taken, tuple(sorted(repr(bay.key) for bay in room.bays)))


Choice = tuple[tuple[int, tuple[int, ...]], ...]  # (host, its cards) as positions


def _choices(rooms: tuple[_Room, ...], demand: Demand, span: int, named: frozenset[str]) -> Iterator[Choice]:
    """Ways to seat a demand on `span` hosts, the tightest first; of ways that are swaps of each other, one."""
    share = demand.ranks // span
    for family in dict.fromkeys(demand.families.values()):
        offers: list[tuple[int, list[tuple[int, ...]]]] = []
        for position, room in enumerate(rooms):
            if not demand.sites or room.site.name in demand.sites:
                ways = list(_ways(room, demand, share, span > 1, family))
                if ways:
                    offers.append((position, ways))
        offers.sort(key=lambda offer: (_spare(rooms[offer[0]]), offer[0]))
        yield from _combine(rooms, offers, span, named, ())


def _spare(room: _Room) -> int:
    return sum(bay.left for bay in room.bays)


def _combine(
    rooms: tuple[_Room, ...],
    offers: list[tuple[int, list[tuple[int, ...]]]],
    span: int,
    named: frozenset[str],
    chosen: Choice,
) -> Iterator[Choice]:
    if span == 0:
        yield tuple(sorted(chosen))  # ranks go by the order of hosts in the box
        return
    met: set[Hashable] = set()
    for i, (position, ways) in enumerate(offers):
        if len(offers) - i < span:
            return
        key = repr(_room_key(rooms[position], named))
        if key in met:
            continue
        met.add(key)
        for way in ways:
            yield from _combine(rooms, offers[i + 1 :], span - 1, named, (*chosen, (position, way)))


def _ways(room: _Room, demand: Demand, share: int, crosses: bool, family: Hashable) -> Iterator[tuple[int, ...]]:
    """Choices of `share` cards of one host; of cards that are the same, the first ones. Fullest cards first."""
    groups: dict[Hashable, list[int]] = {}
    for position, bay in enumerate(room.bays):
        need = demand.needs.get((bay.slot.kind, crosses))
        if need is None or demand.families.get(bay.slot.kind) != family:
            continue
        if start_order(bay.slot.free, (*bay.loads, need)) is not None:
            groups.setdefault(bay.key, []).append(position)
    ordered = sorted(groups.values(), key=lambda positions: (room.bays[positions[0]].left, positions[0]))
    for counts in _compositions(share, [len(positions) for positions in ordered]):
        way = sorted(p for positions, count in zip(ordered, counts, strict=True) for p in positions[:count])
        if room.site.free is None or room.taken + _host_need(room, demand, way, crosses) <= room.site.free:
            yield tuple(way)


def _compositions(total: int, limits: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Counts up to the limits that add up to the total, as many as possible from the first on."""
    if not limits:
        if total == 0:
            yield ()
        return
    for count in range(min(total, limits[0]), -1, -1):
        for rest in _compositions(total - count, limits[1:]):
            yield (count, *rest)


def _host_need(room: _Room, demand: Demand, way: Sequence[int], crosses: bool) -> int:
    needs = [demand.needs[room.bays[position].slot.kind, crosses] for position in way]
    return max(host_bytes(need, len(way)) for need in needs)


def _settle(rooms: tuple[_Room, ...], demand: Demand, choice: Choice) -> tuple[tuple[_Room, ...], Seating]:
    """The hosts with the seat on its cards."""
    after = list(rooms)
    cards = []
    crosses = len(choice) > 1
    for position, way in choice:
        room = rooms[position]
        bays = list(room.bays)
        for card in way:
            bay = bays[card]
            loads = tuple(sorted((*bay.loads, demand.needs[bay.slot.kind, crosses])))
            bays[card] = bay._replace(loads=loads)
            cards.append((room.site.name, bay.slot.uuid))
        after[position] = room._replace(taken=room.taken + _host_need(room, demand, way, crosses), bays=tuple(bays))
    return tuple(after), Seating(demand.name, tuple(cards))


class Lack(NamedTuple):
    """What the best places for one more seat lack: cards, and bytes on the worst card and on the worst host."""

    cards: int
    card_bytes: int
    host_bytes: int


def lack(sites: Sequence[Site], demands: Sequence[Demand], seated: Sequence[Seating], name: str) -> Lack | None:
    """What the seat called `name` lacks beside the seats already seated; None where it fits no kind of card."""
    by_name = {demand.name: demand for demand in demands}
    rooms = tuple(_Room(site, 0, tuple(_Bay(slot) for slot in site.slots)) for site in sites)
    for seating in seated:
        rooms, _ = _settle(rooms, by_name[seating.name], _positions(rooms, seating))
    demand = by_name[name]
    found = [
        Lack(sum(each.cards for each in best), max(e.card_bytes for e in best), max(e.host_bytes for e in best))
        for span in demand.spans
        for family in dict.fromkeys(demand.families.values())
        if len(best := sorted(_lacks(rooms, demand, demand.ranks // span, span > 1, family))[:span]) == span
    ]
    return min(found, default=None)


def _lacks(
    rooms: Sequence[_Room], demand: Demand, share: int, crosses: bool, family: Hashable
) -> Iterator[Lack]:
    for room in rooms:
        if demand.sites and room.site.name not in demand.sites:
            continue
        alike = [bay for bay in room.bays if demand.families.get(bay.slot.kind) == family]
        needs = [(bay, demand.needs.get((bay.slot.kind, crosses))) for bay in alike]
        missing = sorted(max(0, need.asks - bay.left) for bay, need in needs if need is not None)
        if not missing:
            continue
        free = room.site.free
        host = max(host_bytes(need, share) for _, need in needs if need is not None)
        short = 0 if free is None else max(0, room.taken + host - free)
        yield Lack(max(0, share - len(missing)), missing[min(share, len(missing)) - 1], short)


def _positions(rooms: Sequence[_Room], seating: Seating) -> Choice:
    names = [room.site.name for room in rooms]
    found: dict[int, list[int]] = {}
    for host, uuid in seating.cards:
        at = names.index(host)
        found.setdefault(at, []).append([slot.uuid for slot in rooms[at].site.slots].index(uuid))
    return tuple((at, tuple(cards)) for at, cards in found.items())
