"""The fit gate: whether a checkpoint fits named cards at a context length, by the arithmetic of `fit`."""

from __future__ import annotations

from collections.abc import Iterator

from formulas.estimate import Estimate, estimate
from formulas.units import human

from .chain import Criteria, Evidence, Gate, Known
from .findings import Answer, Source, passed, reject, unknown


def fits(known: Known, criteria: Criteria) -> Iterator[Answer]:
    target = criteria.target
    if target is None or known.facts is None:
        return
    found = estimate(known.facts, target.card, target.deployment, target.coefficients, unmodelled=target.unmodelled)
    limit = target.name
    left = found.per_rank.available_kv_bytes
    observed = {"available_kv_bytes": left, "max_context": found.kv.max_context, "margin_bytes": found.margin_bytes}
    if found.fits is None:
        yield unknown(f"whether it fits is not known: {'; '.join(found.unmodelled)}", observed, limit)
    elif found.fits:
        yield passed(f"{human(left)} for the KV cache, longest context {found.kv.max_context:,}{_margin(found)}",
                     observed, limit)  # fmt: skip
    else:
        ways = f"; fits with {found.nearest_fit}" if found.nearest_fit else ""
        yield reject(f"{human(found.shortfall_bytes)} short on {limit}{_margin(found)}{ways}", observed, limit)


def _margin(found: Estimate) -> str:
    """The margin, where the answer lies within it."""
    left, need = found.per_rank.available_kv_bytes, found.kv.needed_bytes
    if left is None or need is None or abs(left - need) > found.margin_bytes:
        return ""
    return f" (close: within the margin of {human(found.margin_bytes)})"


GATES: tuple[Gate, ...] = (
    Gate("fits", Evidence.HEADERS, Source.HEADER, fits, "headers and config through the arithmetic of `fit`, where "
         "--fits names cards (or --on does, with --context)"),
)  # fmt: skip
