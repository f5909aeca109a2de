"""Formulas held against running engines. One table of competing formulas, the naive ones among them; one score.

Terms are scored apart: weights, drafter, activation, non-torch, tokens. Their sum, the KV pool, is an identity and
validates nothing by itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import NamedTuple

from .calibrate import Case, account_of
from .estimate import Account
from .facts import Role, Stack
from .kv import plan
from .tensors import DTYPE_BITS
from .units import GIB
from .weights import RankWeights, weights_of


class Told:
    """A case with what is predicted of it, worked out when it is first asked for."""

    def __init__(self, case: Case):
        self.case = case

    @cached_property
    def account(self) -> Account:
        return account_of(self.case)

    @cached_property
    def held(self) -> RankWeights:
        return weights_of(self.case.facts, self.case.deployment, self.case.point.rank)

    @cached_property
    def implied(self) -> RankWeights:
        """The weights as the config alone implies them."""
        bare = self.case.facts.model_copy(update={"tensor_groups": None, "census": None})
        return weights_of(bare, self.case.deployment, self.case.point.rank)


class Formula(NamedTuple):
    """One way to predict one term of a case, in the term's unit; None where it does not apply."""

    name: str
    term: str  # a key of Point.measured
    predict: Callable[[Told], float | None]
    rests_on: str


MEASURED_LAST = ("qwen3.5-27b-tp2-mtp3", "dsv3-l6-tp2", "qwen3-30b-fp8-tp2")
"""Held-out runs that were measured when the formulas were finished."""


class Score(NamedTuple):
    """One formula against one point."""

    formula: str
    term: str
    point: str
    predicted: float | None
    measured: float
    held_out: bool
    because: str = ""

    @property
    def error(self) -> float | None:
        return None if self.predicted is None else self.predicted - self.measured

    @property
    def error_percent(self) -> float | None:
        if self.error is None:
            return None
        return 100.0 * self.error / self.measured if self.measured else None


def _with_drafter(held: RankWeights) -> float | None:
    return None if held.allocated is None else held.allocated + (held.mtp_allocated or 0)


def _drafter(told: Told) -> float | None:
    return told.held.mtp_allocated if told.case.deployment.mtp else None


_PARTS: dict[str, tuple[str, ...]] = {
    "experts": ("expert",), "attention": ("attention", "linear_attention"), "embed": ("embed", "lm_head"),
    "PLE": ("ple",), "vision": ("vision", "audio"),
}  # fmt: skip


def part_bytes(by: Mapping[str, int], part: str) -> int:
    """Bytes of a part as builds of the engine's modules are compared; `rest` is all others, `total` the sum."""
    if part == "total":
        return sum(by.values())
    if part == "rest":
        return sum(by.values()) - sum(part_bytes(by, other) for other in _PARTS)
    return sum(by.get(name, 0) for name in _PARTS[part])


def _implied_part(part: str) -> Callable[[Told], float | None]:
    """As built, before kernels rearrange: what a build of the engine's modules without a card can weigh."""
    return lambda told: part_bytes(told.implied.created_by, part)


def _tokens(told: Told) -> float | None:
    """The engine's token count from the bytes it reported left, so that no other term's error enters."""
    case, left = told.case, told.case.point.measured.get("available_kv")
    return None if left is None else plan(case.geometry, case.deployment, int(left), case.facts.quantization).tokens


def _tokens_alone(told: Told) -> float | None:
    return None if told.case.point.stands_in else told.account.plan.tokens


def _available(told: Told) -> float | None:
    return None if told.case.point.stands_in else told.account.budget.available.bytes


def _census(told: Told, *, without: Iterable[tuple[Stack | None, Role | None]] = ()) -> float | None:
    if told.case.facts.census is None:
        return None
    left_out = list(without)
    return sum(
        cell.bytes
        for cell in told.case.facts.census
        if not any((stack in (None, cell.stack)) and (role in (None, cell.role)) for stack, role in left_out)
    )


def _ple(told: Told) -> int:
    return (told.case.facts.ple.bytes or 0) if told.case.facts.ple else 0


def _total_over_ranks(told: Told) -> float | None:
    total = _census(told)
    return None if total is None else total / told.case.point.deployment.tp


def _total_without_table(told: Told) -> float | None:
    total = _census(told)
    return total - _ple(told) if total is not None and _ple(told) else None


def _total_without_table_over_ranks(told: Told) -> float | None:
    rest = _total_without_table(told)
    return None if rest is None else rest / told.case.point.deployment.tp


def _without_drafter_over_ranks(told: Told) -> float | None:
    rest = _census(told, without=[(Stack.MTP, None)])
    return rest / told.case.point.deployment.tp if rest is not None and _ple(told) else None


def _elements_as_bf16(told: Told) -> float | None:
    """Storage elements times two bytes: what "parameters x 2" gives for a packed checkpoint."""
    if told.case.facts.census is None:
        return None
    return sum(c.elements for c in told.case.facts.census if c.dtype in DTYPE_BITS) * 2 / told.case.point.deployment.tp


def _plain_tokens(told: Told) -> float | None:
    """Reported KV bytes over 2 x layers x KV heads x head size x 2 bytes, every layer a full-attention layer."""
    left = told.case.point.measured.get("available_kv")
    layer = next((each for each in told.case.geometry.layer_kinds if each.heads and each.head_dim), None)
    if left is None or layer is None:
        return None
    heads = max(1, (layer.kv_heads or layer.heads or 1) // told.case.point.deployment.tp)
    return left / (2 * len(told.case.geometry.layers) * heads * (layer.head_dim or 1) * 2)


def _activation_by_kind(told: Told) -> float:
    """llm-d planner's constants: 8.0 GiB with experts, 2.5 with other modalities or dense."""
    return (8.0 if told.case.geometry.experts else 2.5) * GIB


FORMULAS: tuple[Formula, ...] = (
    Formula("weights: tensor by tensor", "model_memory", lambda told: _with_drafter(told.held), "header, else config"),
    Formula("weights: from the config alone", "model_memory", lambda told: _with_drafter(told.implied), "config"),
    Formula("weights: total / TP", "model_memory", _total_over_ranks, "census"),
    Formula("weights: (MoE + rest) / TP + PLE / TP", "model_memory", _without_drafter_over_ranks, "census"),
    Formula("weights: total - PLE", "model_memory", _total_without_table, "census"),
    Formula("weights: (total - PLE) / TP", "model_memory", _total_without_table_over_ranks, "census"),
    Formula("weights: elements x 2 bytes / TP", "model_memory", _elements_as_bf16, "census"),
    *(Formula(f"weights by part, from the config alone: {part}", f"module {part}", _implied_part(part), "config")
      for part in (*_PARTS, "rest", "total")),
    Formula("drafter: tensor by tensor", "drafter_own_bytes", _drafter, "header, else config"),
    Formula("activation: by phases", "peak_activation", lambda told: told.account.budget.activation.bytes, "config"),
    Formula("activation: constant by kind", "peak_activation", _activation_by_kind, "8.0 GiB MoE, 2.5 GiB else"),
    Formula("non-torch: by ranks", "non_torch", lambda told: told.account.budget.non_torch.bytes, "card, TP"),
    Formula("non-torch: 0.6 GiB", "non_torch", lambda told: 0.6 * GIB, "a constant"),
    Formula("graphs: by captured sizes", "cudagraph_estimate", lambda told: told.account.budget.graphs.bytes,
            "config, max_num_seqs"),
    Formula("tokens: planned from the bytes left", "kv_tokens", _tokens, "config"),
    Formula("tokens: bytes left / full attention", "kv_tokens", _plain_tokens, "config"),
    Formula("tokens: nothing measured", "kv_tokens", _tokens_alone, "header or config"),
    Formula("block size", "block_size", lambda told: told.account.plan.block_size, "config"),
    Formula("KV pool: what is left (an identity of the terms)", "available_kv", _available, "header or config"),
)  # fmt: skip
"""Every formula, ours and the ones people use. Order is the order of the report."""


def score(cases: Iterable[Case], formulas: Iterable[Formula] = FORMULAS) -> list[Score]:
    """Every formula against every point that measured its term; what a formula cannot say is a score without one."""
    found = []
    formulas = tuple(formulas)
    for case in cases:
        told = Told(case)
        for formula in formulas:
            measured = case.point.measured.get(formula.term)
            if measured is None:
                continue
            predicted = formula.predict(told)
            because = "" if predicted is not None else _why(told)
            found.append(
                Score(formula.name, formula.term, case.point.point, predicted, measured, case.point.held_out, because)
            )
    return found


def _why(told: Told) -> str:
    if told.case.point.stands_in:
        return "the facts at hand are of another format of this model: only its cache is compared"
    reasons = told.held.unmodelled
    return "; ".join(reasons[:2]) or "the facts do not hold what this formula needs"


class Summary(NamedTuple):
    """One formula over its points."""

    formula: str
    term: str
    points: int
    silent: int  # points it says nothing about
    mean_percent: float | None  # mean absolute
    worst_percent: float | None  # signed, of the largest absolute
    mean_bytes: float | None  # mean absolute; bytes, or tokens for kv_tokens
    worst_bytes: float | None
    worst_point: str


def summaries(scores: Iterable[Score]) -> list[Summary]:
    """A line a formula, in the order first met."""
    by: dict[str, list[Score]] = defaultdict(list)
    for each in scores:
        by[each.formula].append(each)
    return [_summary(name, rows) for name, rows in by.items()]


def _summary(name: str, rows: list[Score]) -> Summary:
    said = [row for row in rows if row.error is not None]
    if not said:
        return Summary(name, rows[0].term, 0, len(rows), None, None, None, None, "")
    worst = max(said, key=lambda row: abs(row.error or 0.0))
    percents = [row.error_percent for row in said if row.error_percent is not None]
    return Summary(
        formula=name,
        term=rows[0].term,
        points=len(said),
        silent=len(rows) - len(said),
        mean_percent=sum(map(abs, percents)) / len(percents) if percents else None,
        worst_percent=max(percents, key=abs) if percents else None,
        mean_bytes=sum(abs(row.error or 0.0) for row in said) / len(said),
        worst_bytes=worst.error,
        worst_point=worst.point,
    )


def worst_first(scores: Iterable[Score]) -> Iterator[Score]:
    """By absolute error in percent, the largest first; what a formula cannot say comes last."""
    return iter(sorted(scores, key=lambda s: -abs(s.error_percent) if s.error_percent is not None else 1.0))
