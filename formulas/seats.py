"""Seats on a box: which served model goes on which cards of which hosts, or what is missing and what would do.

    box + facts -> needs on each kind of card -> search (placement) -> SeatPlan, or NoFit with the nearest change
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from .box import Box, Host, Seat
from .budget import context_bytes
from .cards import Card
from .demands import Need, Seating, host_bytes
from .estimate import Correction, KvReport, PerRank, estimate
from .facts import Document, Facts
from .launch import as_served, cautions, commands
from .needs import Correct, Judge, account_of, demand_of, facts_of, judge_by, parts_of, sites_of
from .placement import MOST_STEPS, place
from .shortage import explain
from .units import human

Warn = Callable[[Seat, Card], Iterable[str]]


class SeatReport(Document):
    """One seat of a plan. `serve` are the commands to run, in order, `serve_on` the host of each."""

    seat: str
    checkpoint: str
    commit: str | None
    hosts: tuple[str, ...]
    cards: tuple[str, ...]
    gpu: str
    deployment: dict[str, Any]
    per_rank: PerRank
    kv: KvReport
    host_pinned_bytes: int  # on all its hosts
    serve: tuple[tuple[str, ...], ...]
    serve_on: tuple[str, ...]
    warnings: tuple[str, ...]


class CardReport(Document):
    """Who takes what of one card. Bytes; `by_seat` in the order in which the seats are to be started."""

    uuid: str
    card: str
    total_bytes: int
    used_bytes: int
    by_seat: dict[str, dict[str, int]]
    free_bytes: int


class HostReport(Document):
    """Host memory: what seats pin against what they may take before the monitor acts; None where it is not known."""

    host: str
    ram_bytes: int | None
    used_bytes: int | None
    kill_at: float
    pinned_bytes: int
    limit_bytes: int | None
    cards: tuple[CardReport, ...]


class SeatPlan(Document):
    """A place for every seat. `fits` is None where host memory that a seat needs is not known."""

    fits: bool | None
    seats: tuple[SeatReport, ...]
    hosts: tuple[HostReport, ...]
    shortfall_bytes: int | None = None
    nearest_fit: str | None = None
    unmodelled: tuple[str, ...] = ()
    steps: int
    is_fewest_hosts: bool  # False: the bound on the search was met before fewer hosts could be ruled out


class NoFit(Document):
    """No place for every seat; `fits` is None where that is not proven. `seat` is the one that found no place."""

    fits: bool | None
    seats: tuple[SeatReport, ...] = ()
    hosts: tuple[HostReport, ...]
    seat: str
    because: str
    shortfall_bytes: int | None
    nearest_fit: str | None
    unmodelled: tuple[str, ...] = ()
    steps: int


def plan_seats(
    box: Box,
    facts: Mapping[str, Facts],
    coefficients: Mapping[str, float],
    *,
    correct: Correct | None = None,
    warn: Warn | None = None,
    most_steps: int = MOST_STEPS,
) -> SeatPlan | NoFit:
    """A place for every seat of the box, spanning the fewest hosts, or why there is none and what would change that.

    `warn` says what the engine is known to make of a seat's flags on a card. Deterministic. Cards of a seat share one
    compute capability; on cards of several sizes a seat must fit the smallest with any of its ranks."""
    judge = judge_by(facts, coefficients, correct)
    demands = [demand_of(seat, box, judge) for seat in box.seats]
    outcome = place(sites_of(box), demands, most_steps)
    hosts = _host_reports(box, outcome.seatings or (), judge)
    if outcome.seatings is None:
        short = explain(box, facts, judge, demands, outcome)
        return NoFit(hosts=hosts, steps=outcome.steps, **short._asdict())
    seatings = {seating.name: seating for seating in outcome.seatings}
    report = _Reporter(box, facts, coefficients, judge, correct, warn, hosts)
    blind = tuple(
        f"{host.host}: no ram given; whether it holds {human(host.pinned_bytes)} of pinned memory is unknown"
        for host in hosts
        if host.pinned_bytes and host.limit_bytes is None
    )
    return SeatPlan(
        fits=None if blind else True,
        seats=tuple(report.seat(seat, seatings[seat.name]) for seat in box.seats),
        hosts=hosts,
        unmodelled=blind,
        steps=outcome.steps,
        is_fewest_hosts=outcome.is_proof,
    )


class _Reporter(NamedTuple):
    """What the report of a seat draws on."""

    box: Box
    facts: Mapping[str, Facts]
    coefficients: Mapping[str, float]
    judge: Judge
    correct: Correct | None
    warn: Warn | None
    hosts: tuple[HostReport, ...]

    def seat(self, seat: Seat, seating: Seating) -> SeatReport:
        cards = _cards(self.box)
        crosses = len(seating.hosts) > 1
        kinds = dict.fromkeys(cards[uuid] for _, uuid in seating.cards)
        judged = min(
            (self.judge(seat, kind, crosses) for kind in kinds),
            key=lambda each: each.tightest.budget.available.bytes or 0,
        )
        asked, facts = judged.deployment, facts_of(self.facts, seat)
        learnt = self.correct(judged.card, asked) if self.correct else Correction()
        answer = estimate(facts, judged.card, asked, self.coefficients, correction=learnt)
        table = judged.tightest.weights.host_pinned
        named = as_served(seat, facts)
        started = commands(named, seating, self.box.hosts, bool(table))
        return SeatReport(
            seat=seat.name,
            checkpoint=named.checkpoint,
            commit=named.commit or facts.commit,
            hosts=seating.hosts,
            cards=tuple(uuid for _, uuid in seating.cards),
            gpu=" + ".join(kind.name for kind in kinds),
            deployment=answer.deployment,
            per_rank=answer.per_rank,
            kv=answer.kv,
            host_pinned_bytes=sum(_pinned(seating, host, judged.need) for host in seating.hosts),
            serve=tuple(argv for _, argv in started),
            serve_on=tuple(host for host, _ in started),
            warnings=(
                *cautions(seat, seating, table),
                *self._neighbours(seat, seating),
                *(_guessed(kind) for kind in kinds if kind.estimated),
                *answer.remarks,
                *(self.warn(seat, judged.card) if self.warn else ()),
            ),
        )

    def _neighbours(self, seat: Seat, seating: Seating) -> list[str]:
        """Whom the seat must wait for. Engines that start on one card at once count each other's loading as their own
        (vllm-project/vllm#55827)."""
        found = []
        on = {uuid for _, uuid in seating.cards}
        for card in (card for host in self.hosts for card in host.cards if card.uuid in on):
            before = list(card.by_seat)[: list(card.by_seat).index(seat.name)]
            found += [f"start it when {other} is up: they share {card.uuid}" for other in before]
        return list(dict.fromkeys(found))


def _guessed(card: Card) -> str:
    size, margin = human(card.total_bytes), human(card.margin_bytes)
    return f"{card.name}: {size} is an estimate, give or take {margin}; `memory` in the box overrides it"


def _cards(box: Box) -> dict[str, Card]:
    return {each.uuid: each.card for host in box.hosts for each in host.cards}


def _pinned(seating: Seating, host: str, need: Need) -> int:
    return host_bytes(need, sum(1 for name, _ in seating.cards if name == host))


class _Held(NamedTuple):
    """One rank on its card."""

    seat: str
    uuid: str
    need: Need
    parts: dict[str, int]


def _held(box: Box, seating: Seating, judge: Judge) -> list[_Held]:
    cards = _cards(box)
    seat = next(seat for seat in box.seats if seat.name == seating.name)
    found = []
    for rank, (_, uuid) in enumerate(seating.cards):
        judged = judge(seat, cards[uuid], len(seating.hosts) > 1)
        context = context_bytes(judged.deployment, cards[uuid])
        parts = {"CUDA context": context} | parts_of(account_of(judged, rank))
        found.append(_Held(seat.name, uuid, judged.need, parts))
    return found


def _host_reports(box: Box, seatings: Sequence[Seating], judge: Judge) -> tuple[HostReport, ...]:
    held = {seating.name: _held(box, seating, judge) for seating in seatings}
    return tuple(_host_report(host, seatings, held) for host in box.hosts)


def _host_report(host: Host, seatings: Sequence[Seating], held: Mapping[str, list[_Held]]) -> HostReport:
    here = [seating for seating in seatings if host.name in seating.hosts]
    cards = []
    for each in host.cards:
        on = [rank for seating in here for rank in held[seating.name] if rank.uuid == each.uuid]
        on.sort(key=lambda rank: rank.need.takes - rank.need.asks)
        total = each.card.total_bytes
        cards.append(
            CardReport(
                uuid=each.uuid,
                card=each.card.name,
                total_bytes=total,
                used_bytes=each.used_bytes,
                by_seat={rank.seat: rank.parts for rank in on},
                free_bytes=total - each.used_bytes - sum(rank.need.takes for rank in on),
            )
        )
    return HostReport(
        host=host.name,
        ram_bytes=host.ram_bytes,
        used_bytes=host.used_bytes,
        kill_at=host.kill_at,
        pinned_bytes=sum(
            max(_pinned(seating, host.name, rank.need) for rank in held[seating.name]) for seating in here
        ),
        limit_bytes=host.limit_bytes,
        cards=tuple(cards),
    )
