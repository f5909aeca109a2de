"""Why seats find no place on a box, what is missing, and the nearest change that gives every seat one."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from math import ceil
from typing import Any, NamedTuple

from .box import SPREADS, Box, BoxCard, Seat
from .budget import context_bytes
from .demands import Demand, Outcome
from .deployment import Deployment
from .facts import Facts
from .nearest import Tried, ways
from .needs import Judge, Judged, demand_of, facts_of, parts_of, sites_of
from .options import parse_arguments
from .placement import lack, place
from .units import human

TRIAL_STEPS = 2_000  # of the search for each change tried
SPARE_UUID = "GPU-00000000-0000-0000-0000-000000000000"


class Shortage(NamedTuple):
    """The seat that found no place, why, the bytes missing at its best place (None: not a matter of bytes, or not
    known), and what would do. `fits` is None where it is not proven that there is no place."""

    seat: str
    fits: bool | None
    because: str
    shortfall_bytes: int | None = None
    nearest_fit: str | None = None
    unmodelled: tuple[str, ...] = ()


def explain(
    box: Box, facts: Mapping[str, Facts], judge: Judge, demands: Sequence[Demand], outcome: Outcome
) -> Shortage:
    """Why `outcome` has no seatings."""
    for seat, demand in zip(box.seats, demands, strict=True):
        judged = _on_every_kind(seat, box, judge, demand)
        reasons = tuple(dict.fromkeys(reason for each in judged for reason in each.unmodelled))
        if not demand.needs and any(each.fits is None for each in judged):
            return Shortage(seat.name, None, "unknown; " + "; ".join(reasons), unmodelled=reasons)
    if not outcome.is_proof:
        because = f"no place found in {outcome.steps:,} steps of the search; whether there is one is unknown"
        return Shortage(outcome.stuck or box.seats[0].name, None, because)
    sites = sites_of(box)
    for seat, demand in zip(box.seats, demands, strict=True):
        judged = _on_every_kind(seat, box, judge, demand)
        if not demand.needs and judged:
            best = min(judged, key=_short_of)
            because, missing = _account_text(best)
            return Shortage(seat.name, False, because, missing, _nearest(box, facts, judge, seat, best))
        if not judged or place(sites, [demand], TRIAL_STEPS).seatings is None:
            return _placed(box, facts, judge, demands, seat, outcome._replace(partial=()))
    stuck = next(seat for seat in box.seats if seat.name == outcome.stuck)
    return _placed(box, facts, judge, demands, stuck, outcome)


def _on_every_kind(seat: Seat, box: Box, judge: Judge, demand: Demand) -> list[Judged]:
    cards = dict.fromkeys(c.card for host in box.hosts if not seat.hosts or host.name in seat.hosts for c in host.cards)
    crossings = dict.fromkeys(span > 1 for span in demand.spans)
    return [judge(seat, card, crosses) for card in cards for crosses in crossings]


def _short_of(judged: Judged) -> tuple[bool, int]:
    missing = _account_text(judged)[1]
    return missing is None, missing or 0


def _account_text(judged: Judged) -> tuple[str, int | None]:
    """What a card of this kind lacks for the seat, and the bytes."""
    tightest = judged.tightest
    spent = tightest.budget
    where = f"on {judged.card.name} x {judged.seat.ranks}"
    failed = next((gate for each in judged.accounts for gate in each.gates if gate.met is False), None)
    asked = spent.requested.bytes or 0
    missing = max((each.shortfall or 0 for each in judged.accounts), default=0)
    if missing:
        share, length = spent.deployment.gpu_memory_utilization or 0.0, spent.deployment.max_model_len
        needed = f"needs {human(asked + missing)} of {human(asked)} ({share:g} of the card)"
        return f"{where}: {needed} for one request of {length} tokens", missing
    if failed is None:
        return f"{where}: does not fit", None
    free = judged.card.total_bytes - context_bytes(spent.deployment, judged.card)
    return f"{where}: {failed.name}: {failed.because}", (asked - free) if asked > free else None


def _placed(
    box: Box, facts: Mapping[str, Facts], judge: Judge, demands: Sequence[Demand], seat: Seat, outcome: Outcome
) -> Shortage:
    """A seat that fits a card by itself, but finds none, or no host, with enough left."""
    short = lack(sites_of(box), demands, outcome.partial, seat.name)
    judged = [each for each in _on_every_kind(seat, box, judge, _by_name(demands, seat.name)) if each.fits]
    nearest = _nearest(box, facts, judge, seat, judged[0] if judged else None)
    others = ", ".join(seating.name for seating in outcome.partial)
    beside = f" beside {others}" if others else ""
    if short is None or short.cards:
        missing = "" if short is None else f", {short.cards} short on the best host"
        kind = "one to a host" if seat.spread else "of one compute capability on a host"
        return Shortage(seat.name, False, f"expected {seat.ranks} cards {kind}, got fewer{missing}", None, nearest)
    if short.host_bytes > short.card_bytes:
        because = f"pins more host memory than the best host may give{beside}"
        return Shortage(seat.name, False, because, short.host_bytes, nearest)
    asks = min(need.asks for need in _by_name(demands, seat.name).needs.values())
    because = f"asks for {human(asks)} of a card, more than any has left{beside}"
    return Shortage(seat.name, False, because, short.card_bytes, nearest)


def _by_name(demands: Sequence[Demand], name: str) -> Demand:
    return next(demand for demand in demands if demand.name == name)


class _Trial(NamedTuple):
    """One change to the box, in words."""

    text: str
    box: Box


def _nearest(box: Box, facts: Mapping[str, Facts], judge: Judge, seat: Seat, judged: Judged | None) -> str | None:
    """The smallest change that gives every seat a place, and one other where the first is a shorter context."""
    if judged is not None and not judged.fits:
        found = _ways(box, facts_of(facts, seat), judge, seat, judged)
        if found:
            return " or ".join(found[:2])
    return next((trial.text for trial in _trials(box, judge, seat, judged) if _holds(trial.box, judge)), None)


def _ways(box: Box, facts: Facts, judge: Judge, seat: Seat, judged: Judged) -> list[str]:
    """Changes to a seat that fits no card, each tried on the whole box."""
    filled = judged.tightest.budget.deployment

    def holds(changed: Deployment) -> bool:
        return _holds(_changed(box, seat, "", _difference(filled, changed)).box, judge)

    def tried(changed: Deployment) -> Tried:
        other = seat._replace(deployment=seat.deployment.model_copy(update=_difference(filled, changed)))
        found = judge(other, judged.card, judged.crosses).tightest.tried
        return found._replace(fits=holds(changed)) if found.fits else found

    found = ways(facts, judged.card, filled, judged.tightest.tried, tried)
    words = [(way.flags, parse_arguments(shlex.split(way.flags)).fields) for way in found]
    return [flags for flags, fields in words if holds(filled.model_copy(update=fields))]


def _difference(one: Deployment, other: Deployment) -> dict[str, Any]:
    """The fields in which the other differs, with its values."""
    fields = type(one).model_fields
    return {name: getattr(other, name) for name in fields if getattr(other, name) != getattr(one, name)}


def _holds(box: Box, judge: Judge) -> bool:
    demands = [demand_of(seat, box, judge) for seat in box.seats]
    return all(demand.needs for demand in demands) and place(sites_of(box), demands, TRIAL_STEPS).seatings is not None


def _changed(box: Box, seat: Seat, text: str, update: dict[str, Any]) -> _Trial:
    """The box with all seats of this one's table changed."""
    seats = tuple(
        each._replace(deployment=each.deployment.model_copy(update=update)) if each.group == seat.group else each
        for each in box.seats
    )
    return _Trial(text, box._replace(seats=seats))


def _trials(box: Box, judge: Judge, seat: Seat, judged: Judged | None) -> Iterator[_Trial]:
    """Changes that make room where seats fit, but not beside each other: to one seat, to all, to the box."""
    if judged is not None and judged.fits:
        share = _least(judge, judged)
        if share is not None:
            yield _changed(box, seat, f"--gpu-memory-utilization {share:g}", {"gpu_memory_utilization": share})
        if judged.tightest.weights.host_pinned:
            yield _changed(box, seat, "--ple gpu", {"ple": "gpu"})
    if len(box.hosts) > 1 and not seat.spread and seat.ranks > 1:
        seats = tuple(s._replace(spread=SPREADS[1]) if s.group == seat.group else s for s in box.seats)
        yield _Trial(f'spread = "{SPREADS[1]}"', box._replace(seats=seats))
    yield from _together(box, judge)
    for host in box.hosts:
        for card in dict.fromkeys(each.card for each in host.cards):
            more = host._replace(cards=(*host.cards, BoxCard(SPARE_UUID, card)))
            hosts = tuple(more if each.name == host.name else each for each in box.hosts)
            yield _Trial(f"one more {card.name} on {host.name}", box._replace(hosts=hosts))


def _least(judge: Judge, judged: Judged) -> float | None:
    """The smallest utilisation, in hundredths, at which the seat still serves one request; None if that is no less."""
    tightest = judged.tightest
    parts = sum(size for name, size in parts_of(tightest).items() if name != "KV cache")
    needs = parts + (tightest.plan.needed_bytes or 0) + (tightest.plan.bytes_per_block or 0)
    least = ceil(100 * needs / judged.card.total_bytes)
    for hundredth in range(least, least + 3):
        share = hundredth / 100
        if share >= (tightest.budget.deployment.gpu_memory_utilization or 0.0):
            return None
        asked = judged.seat.deployment.model_copy(update={"gpu_memory_utilization": share})
        if judge(judged.seat._replace(deployment=asked), judged.card, judged.crosses).fits:
            return share
    return None


def _together(box: Box, judge: Judge) -> Iterator[_Trial]:
    """Seats at the least utilisation that serves them, so that they may share cards: as few kinds of seat as do."""
    shares: dict[str, float] = {}
    for seat in box.seats:
        judged = [each for each in _on_every_kind(seat, box, judge, demand_of(seat, box, judge)) if each.fits]
        largest = max(judged, key=lambda each: each.card.total_bytes, default=None)
        if largest is not None and seat.group not in shares and (share := _least(judge, largest)) is not None:
            shares[seat.group] = share
    if not _holds(_shared_out(box, shares), judge):
        return
    for group in list(shares):
        rest = {name: share for name, share in shares.items() if name != group}
        if _holds(_shared_out(box, rest), judge):
            shares = rest
    said = " and ".join(f"--gpu-memory-utilization {share:g} for {group}" for group, share in shares.items())
    yield _Trial(said, _shared_out(box, shares))


def _shared_out(box: Box, shares: Mapping[str, float]) -> Box:
    for seat in box.seats:
        if seat.group in shares:
            box = _changed(box, seat, "", {"gpu_memory_utilization": shares[seat.group]}).box
    return box
