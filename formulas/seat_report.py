"""A seat plan as text: a line and its commands for each seat, a bar for each card, the memory of each host."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence

from .console import table
from .seats import CardReport, HostReport, NoFit, SeatPlan, SeatReport
from .units import gib, human

BAR = 48
LETTERS = {
    "CUDA context": "c", "weights": "W", "MTP": "M", "activation": "a", "non-torch": "n", "graphs": "g",
    "KV cache": "K",
}  # fmt: skip


def lines(plan: SeatPlan | NoFit) -> list[str]:
    """The whole report."""
    found = [verdict(plan)]
    if isinstance(plan, SeatPlan):
        found += ["", *_seats(plan.seats)]
        for seat in plan.seats:
            found += ["", *_commands(seat)]
    legend = ", ".join(f"{letter} {name}" for name, letter in LETTERS.items())
    found += ["", f"cards: {legend}, x in use by others, . free"]
    for host in plan.hosts:
        found += ["", _memory(host), *_cards(host.cards)]
    if isinstance(plan, SeatPlan) and not plan.is_fewest_hosts:
        found += ["", f"the search stopped after {plan.steps:,} steps: a plan over fewer hosts may exist"]
    return found


def verdict(plan: SeatPlan | NoFit) -> str:
    """The answer in one line."""
    if isinstance(plan, NoFit):
        missing = f", {human(plan.shortfall_bytes)} short" if plan.shortfall_bytes else ""
        if plan.fits is None:
            return f"seat {plan.seat}: {plan.because}"
        change = f"fits with {plan.nearest_fit}" if plan.nearest_fit else "no single change tried makes every seat fit"
        return f"seat {plan.seat} {plan.because}{missing}; {change}"
    cards = {uuid for seat in plan.seats for uuid in seat.cards}
    of = sum(len(host.cards) for host in plan.hosts)
    start = f"{_count(len(plan.seats), 'seat')} on {len(cards)} of {_count(of, 'card')}"
    if plan.fits is None:
        return f"{start}: unknown; " + "; ".join(plan.unmodelled)
    return f"{start} of {_count(len(plan.hosts), 'host')}: fits"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _seats(seats: Iterable[SeatReport]) -> list[str]:
    rows = [["seat", "checkpoint", "cards", "hosts", "weights", "MTP", "KV GiB", "tokens", "context", "at it",
             "pinned"]]  # fmt: skip
    for seat in seats:
        rank, kv = seat.per_rank, seat.kv
        rows.append([
            seat.seat, seat.checkpoint, f"{len(seat.cards)} x {seat.gpu}", ", ".join(seat.hosts),
            gib(rank.weights_bytes), gib(rank.mtp_bytes), gib(rank.available_kv_bytes),
            "unknown" if kv.tokens is None else f"{kv.tokens:,}", f"{seat.deployment.get('max_model_len') or 0:,}",
            "unknown" if kv.max_concurrency is None else f"{kv.max_concurrency:.2f}x", gib(seat.host_pinned_bytes),
        ])  # fmt: skip
    return table(rows, right=lambda column: column >= 4)


def _commands(seat: SeatReport) -> list[str]:
    found = [f"{seat.seat}:"]
    found += [f"  on {host}: {shlex.join(argv)}" for host, argv in zip(seat.serve_on, seat.serve, strict=True)]
    return [*found, *(f"  note: {warning}" for warning in seat.warnings)]


def _memory(host: HostReport) -> str:
    if host.limit_bytes is None:
        return f"host {host.host}: seats pin {human(host.pinned_bytes)}; its memory is not given"
    used = "use by others not given" if host.used_bytes is None else f"{human(host.used_bytes)} in use by others"
    return (
        f"host {host.host}: seats pin {human(host.pinned_bytes)} of {human(host.limit_bytes)} "
        f"({host.kill_at:g} of {human(host.ram_bytes)}; {used})"
    )


def _cards(cards: Sequence[CardReport]) -> list[str]:
    rows = [["card", "kind", "GiB", "", "free", "seats"]]
    for card in cards:
        who = ", ".join(f"{seat} {gib(sum(parts.values()))}" for seat, parts in card.by_seat.items())
        rows.append([card.uuid, card.card, gib(card.total_bytes), f"[{bar(card)}]", gib(card.free_bytes), who or "-"])
    return [f"  {line}" for line in table(rows, right=lambda column: column in (2, 4))]


def bar(card: CardReport, width: int = BAR) -> str:
    """The card from end to end, a letter a part; seats that share it are divided by `|`. Exactly `width` long."""
    parts = [("x", card.used_bytes)]
    for position, held in enumerate(card.by_seat.values()):
        parts += [("|", 0)] if position else []
        parts += [(LETTERS[name], size) for name, size in held.items()]
    drawn = ""
    done = 0
    for letter, size in parts:
        done += size
        upto = round(width * done / card.total_bytes)
        drawn += letter * (upto - len(drawn)) if letter != "|" else ""
        if letter == "|" and drawn:
            drawn = drawn[:-1] + "|"
    return drawn[:width].ljust(width, ".")
