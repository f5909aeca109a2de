"""What a seat needs on a kind of card: the estimate's account as bytes asked, kept and pinned, for the search.

A card takes seats while what they ask for fits what is free: each keeps requested = total x utilisation, and beside it
what CUDA and NCCL hold before the engine's first look; the engine refuses to start where less is free than it asks
(vllm 0.33.0 v1/worker/utils.py request_memory). Host memory counts the tables and token ids pinned by the ranks there.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import NamedTuple

from .box import ONE_A_HOST, Box, Host, Seat
from .budget import context_bytes
from .cards import Card
from .demands import Demand, Need, Site, Slot
from .deployment import Deployment
from .estimate import Account, Correction, account, distinct_ranks
from .facts import Facts
from .geometry import Geometry
from .launch import EXACT_ABOVE, rounded
from .workspaces import runs_second

Correct = Callable[[Card, Deployment], Correction]


class Judged(NamedTuple):
    """A seat on one kind of card, over one host or several."""

    seat: Seat
    card: Card
    crosses: bool  # its ranks are on several hosts
    deployment: Deployment
    accounts: tuple[Account, ...]  # of the ranks that can differ
    need: Need  # of the rank that needs the most

    @property
    def tightest(self) -> Account:
        return min(self.accounts, key=lambda a: (a.budget.available.bytes is not None, a.budget.available.bytes or 0))

    @property
    def unmodelled(self) -> tuple[str, ...]:
        reasons = (reason for each in self.accounts for reason in each.unmodelled)
        return tuple(dict.fromkeys((*self.seat.unmodelled, *reasons)))

    @property
    def fits(self) -> bool | None:
        answers = [each.fits for each in self.accounts]
        return None if self.unmodelled or None in answers else all(answers)


Judge = Callable[[Seat, Card, bool], Judged]


def judge_by(facts: Mapping[str, Facts], coefficients: Mapping[str, float], correct: Correct | None = None) -> Judge:
    """A judge of seats with these facts (by seat name, or by the name seats of one `count` share). Answers are kept."""
    kept: dict[tuple[str, str, Card, bool], Judged] = {}

    def judge(seat: Seat, card: Card, crosses: bool) -> Judged:
        key = (seat.group, seat.deployment.model_dump_json(), card, crosses)
        if key not in kept:
            kept[key] = _judge(seat, facts_of(facts, seat), card, crosses, coefficients, correct)
        return kept[key]

    return judge


def facts_of(facts: Mapping[str, Facts], seat: Seat) -> Facts:
    return facts[seat.name] if seat.name in facts else facts[seat.group]


def _judge(
    seat: Seat, facts: Facts, card: Card, crosses: bool, coefficients: Mapping[str, float], correct: Correct | None
) -> Judged:
    asked = seat.deployment
    if crosses:
        asked = asked.model_copy(update={"without": asked.without | {"custom_all_reduce"}})
    learnt = correct(card, asked) if correct else Correction()
    accounts = tuple(account(facts, card, asked, coefficients, r, learnt) for r in distinct_ranks(facts, asked))
    needs = [_need(each, card, facts.geometry or Geometry()) for each in accounts]
    return Judged(seat, card, crosses, asked, accounts, Need(*(max(column) for column in zip(*needs, strict=True))))


def _need(of: Account, card: Card, geometry: Geometry) -> Need:
    """What one rank asks of its card at start, keeps of it, and pins on its host."""
    spent, asked = of.budget, of.budget.deployment
    context = context_bytes(asked, card)
    requested = spent.requested.bytes or 0
    keeps = sum(parts_of(of).values()) if asked.kv_cache_memory_bytes is not None else requested
    table = of.weights.host_pinned
    if table <= EXACT_ABOVE:
        table = rounded(table)
    host = rounded(_token_ids(asked, geometry)) + (keeps + context if card.unified else 0)
    if asked.dp > 1:  # replicas on one host share their tables (vllm 0.33.0 config/engram.py dp_shared_memory)
        return Need(requested + context, keeps + context, host, of.weights.host_pinned, asked.tp)
    return Need(requested + context, keeps + context, host + table)


def _token_ids(deployment: Deployment, geometry: Geometry) -> int:
    """Pinned by a rank for the tokens of its requests. Source: vllm 0.33.0 v1/worker/gpu/states.py all_token_ids."""
    if not runs_second(geometry, deployment):
        return 0
    return 4 * (deployment.max_num_seqs or 0) * (deployment.max_model_len or 0)


def parts_of(of: Account) -> dict[str, int]:
    """What one rank holds on its card, by part; the KV cache is what is left of what it asked for."""
    spent = of.budget
    terms = {
        "weights": spent.weights, "MTP": spent.drafter, "activation": spent.activation, "non-torch": spent.non_torch,
        "graphs": spent.graphs, "KV cache": spent.available,
    }  # fmt: skip
    return {name: term.bytes for name, term in terms.items() if term.bytes}


def sites_of(box: Box) -> list[Site]:
    """The hosts as the search sees them."""
    return [
        Site(
            host.name,
            host.limit_bytes,
            tuple(Slot(each.uuid, each.card, each.card.total_bytes - each.used_bytes) for each in host.cards),
        )
        for host in box.hosts
    ]


def demand_of(seat: Seat, box: Box, judge: Judge) -> Demand:
    """The seat as the search sees it: where its ranks may go, and what each needs there."""
    hosts = [host for host in box.hosts if not seat.hosts or host.name in seat.hosts]
    spans = _spans(seat, hosts)
    kinds = dict.fromkeys(each.card for host in hosts for each in host.cards)
    ways = dict.fromkeys(span > 1 for span in spans)
    judged = [judge(seat, card, crosses) for card in kinds for crosses in ways]
    needs: dict[tuple[Hashable, bool], Need] = {
        (each.card, crosses): each.need
        for each, crosses in zip(judged, [crosses for _ in kinds for crosses in ways], strict=True)
        if each.fits
    }
    families: dict[Hashable, Hashable] = {card: seat.deployment.capability or card.capability for card in kinds}
    return Demand(seat.name, seat.ranks, spans, frozenset(seat.hosts), needs, families)


def _spans(seat: Seat, hosts: list[Host]) -> tuple[int, ...]:
    """Numbers of hosts the seat's ranks may be divided over: the engine divides them evenly. One, where any host has
    the cards; more where none has or the seat asks."""
    if seat.spread == ONE_A_HOST:
        return (seat.ranks,)
    over = tuple(n for n in range(2, len(hosts) + 1) if seat.ranks % n == 0)
    if max((_most_alike(host) for host in hosts), default=0) < seat.ranks:
        return over or (1,)
    return (1, *over) if seat.spread else (1,)


def _most_alike(host: Host) -> int:
    capabilities = [each.card.capability for each in host.cards]
    return max((capabilities.count(each) for each in capabilities), default=0)


def account_of(judged: Judged, rank: int) -> Account:
    """The account of one rank, among those of ranks that can differ."""
    asked = judged.deployment
    stage = rank // asked.tp % asked.pp
    wanted = stage * asked.tp if asked.pp > 1 else rank
    return next((each for each in judged.accounts if each.weights.rank == wanted), judged.accounts[0])
