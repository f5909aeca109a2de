"""Formulas held against running engines. One table of competing formulas, the naive ones among them; one score.

A point is a checkpoint's facts, a deployment, and what an engine measured. Terms are scored apart: weights, drafter,
activation, non-torch, tokens. Their sum, the KV pool, is an identity and validates nothing by itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from .budget import filled
from .cards import Card, find_card
from .deployment import Deployment
from .estimate import Account, Correction, account
from .facts import Document, Facts, Role, Stack
from .geometry import Geometry
from .kv import plan
from .logs import StartLog
from .tensors import DTYPE_BITS
from .units import GIB
from .weights import weights_of


class Point(Document):
    """One measured run. `measured` holds bytes by the engine's own words, and counts; what was not read is absent."""

    format: int = 1
    point: str
    checkpoint: str
    card: str
    total_memory: int | None = None  # what the engine saw, where that is known better than the card table
    deployment: Deployment
    measured: Mapping[str, float]
    rounding: Mapping[str, float] = {}  # half of the last digit, for numbers read off a log
    held_out: bool = False  # never used to fit a coefficient
    source: str = ""


class Case(NamedTuple):
    """A point with what it is about."""

    point: Point
    facts: Facts
    card: Card
    coefficients: Mapping[str, float]

    @property
    def geometry(self) -> Geometry:
        return self.facts.geometry or Geometry()

    @property
    def deployment(self) -> Deployment:
        return filled(self.point.deployment, self.card, self.geometry)


class Formula(NamedTuple):
    """One way to predict one term of a case, in the term's unit; None where it does not apply."""

    name: str
    term: str  # a key of Point.measured
    predict: Callable[[Case], float | None]
    rests_on: str


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


def case_of(point: Point, facts: Facts, coefficients: Mapping[str, float]) -> Case:
    """A point made ready to be predicted."""
    card = find_card(point.card, point.deployment.capability)
    total = point.total_memory or point.measured.get("total_memory")
    return Case(point, facts, card._replace(total_bytes=int(total)) if total else card, coefficients)


def _weights(case: Case) -> float | None:
    return weights_of(case.facts, case.deployment).allocated


def _weights_and_drafter(case: Case) -> float | None:
    held = weights_of(case.facts, case.deployment)
    return None if held.allocated is None else held.allocated + (held.mtp_allocated or 0)


def _from_config(case: Case) -> float | None:
    bare = case.facts.model_copy(update={"tensor_groups": None, "census": None})
    return _weights_and_drafter(case._replace(facts=bare))


def _drafter(case: Case) -> float | None:
    return weights_of(case.facts, case.deployment).mtp_allocated if case.deployment.mtp else None


def _account(case: Case) -> Account:
    return account(case.facts, case.card, case.point.deployment, case.coefficients)


def _activation(case: Case) -> float | None:
    return _account(case).budget.activation.bytes


def _non_torch(case: Case) -> float | None:
    return _account(case).budget.non_torch.bytes


def _graphs(case: Case) -> float | None:
    return _account(case).budget.graphs.bytes


def _available(case: Case) -> float | None:
    return _account(case).budget.available.bytes


def _tokens(case: Case) -> float | None:
    """The engine's token count from the bytes it reported left, so that no other term's error enters."""
    left = case.point.measured.get("available_kv")
    return None if left is None else plan(case.geometry, case.deployment, int(left), case.facts.quantization).tokens


def _tokens_alone(case: Case) -> float | None:
    return _account(case).plan.tokens


def _block_size(case: Case) -> float | None:
    return plan(case.geometry, case.deployment, None, case.facts.quantization).block_size


def _census(case: Case, *, without: Iterable[tuple[Stack | None, Role | None]] = ()) -> float | None:
    if case.facts.census is None:
        return None
    left_out = list(without)
    return sum(
        cell.bytes
        for cell in case.facts.census
        if not any((stack in (None, cell.stack)) and (role in (None, cell.role)) for stack, role in left_out)
    )


def _ple(case: Case) -> int:
    return (case.facts.ple.bytes or 0) if case.facts.ple else 0


def _total_over_ranks(case: Case) -> float | None:
    total = _census(case)
    return None if total is None else total / case.point.deployment.tp


def _total_without_table(case: Case) -> float | None:
    total = _census(case)
    return total - _ple(case) if total is not None and _ple(case) else None


def _total_without_table_over_ranks(case: Case) -> float | None:
    rest = _total_without_table(case)
    return None if rest is None else rest / case.point.deployment.tp


def _without_drafter_over_ranks(case: Case) -> float | None:
    rest = _census(case, without=[(Stack.MTP, None)])
    return rest / case.point.deployment.tp if rest is not None and _ple(case) else None


def _elements_as_bf16(case: Case) -> float | None:
    """Storage elements times two bytes: what "parameters x 2" gives for a packed checkpoint."""
    if case.facts.census is None:
        return None
    return sum(c.elements for c in case.facts.census if c.dtype in DTYPE_BITS) * 2 / case.point.deployment.tp


def _plain_tokens(case: Case) -> float | None:
    """Reported KV bytes over 2 x layers x KV heads x head size x 2 bytes, every layer a full-attention layer."""
    left = case.point.measured.get("available_kv")
    layer = next((each for each in case.geometry.layer_kinds if each.heads and each.head_dim), None)
    if left is None or layer is None:
        return None
    heads = max(1, (layer.kv_heads or layer.heads or 1) // case.point.deployment.tp)
    return left / (2 * len(case.geometry.layers) * heads * (layer.head_dim or 1) * 2)


def _constant(gib: float) -> Callable[[Case], float]:
    return lambda case: gib * GIB


def _activation_by_kind(case: Case) -> float:
    """llm-d planner's constants: 8.0 GiB with experts, 2.5 with other modalities or dense."""
    return (8.0 if case.geometry.experts else 2.5) * GIB


FORMULAS: tuple[Formula, ...] = (
    Formula("weights: tensor by tensor", "model_memory", _weights_and_drafter, "header, else config"),
    Formula("weights: from the config alone", "model_memory", _from_config, "config"),
    Formula("weights: total / TP", "model_memory", _total_over_ranks, "census"),
    Formula("weights: (MoE + rest) / TP + PLE / TP", "model_memory", _without_drafter_over_ranks, "census"),
    Formula("weights: total - PLE", "model_memory", _total_without_table, "census"),
    Formula("weights: (total - PLE) / TP", "model_memory", _total_without_table_over_ranks, "census"),
    Formula("weights: elements x 2 bytes / TP", "model_memory", _elements_as_bf16, "census"),
    Formula("drafter: tensor by tensor", "drafter_own_bytes", _drafter, "header, else config"),
    Formula("activation: by phases", "peak_activation", _activation, "config"),
    Formula("activation: constant by kind", "peak_activation", _activation_by_kind, "8.0 GiB MoE, 2.5 GiB else"),
    Formula("non-torch: by ranks", "non_torch", _non_torch, "card, TP"),
    Formula("non-torch: 0.6 GiB", "non_torch", _constant(0.6), "a constant"),
    Formula("graphs: by captured sizes", "cudagraph_estimate", _graphs, "config, max_num_seqs"),
    Formula("tokens: planned from the bytes left", "kv_tokens", _tokens, "config"),
    Formula("tokens: bytes left / full attention", "kv_tokens", _plain_tokens, "config"),
    Formula("tokens: nothing measured", "kv_tokens", _tokens_alone, "header or config"),
    Formula("block size", "block_size", _block_size, "config"),
    Formula("KV pool: what is left", "available_kv", _available, "header or config"),
)
"""Every formula, ours and the ones people use. Order is the order of the report."""


def score(cases: Iterable[Case], formulas: Iterable[Formula] = FORMULAS) -> list[Score]:
    """Every formula against every point that measured its term; what a formula cannot say is a score without one."""
    found = []
    for case in cases:
        for formula in formulas:
            measured = case.point.measured.get(formula.term)
            if measured is None:
                continue
            predicted = formula.predict(case)
            because = "" if predicted is not None else _why(case)
            found.append(
                Score(formula.name, formula.term, case.point.point, predicted, measured, case.point.held_out, because)
            )
    return found


def _why(case: Case) -> str:
    reasons = weights_of(case.facts, case.deployment).unmodelled
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


def point_of(
    log: StartLog, facts: Facts, deployment: Deployment, card: Card, name: str, counts: Mapping[str, int]
) -> Point:
    """A point from a start-up log: what it measured, of this checkpoint, with the options it states."""
    readings = {
        "total_memory": log.total_memory, "free_memory": log.free_memory, "model_memory": log.model_memory,
        "peak_activation": log.peak_activation, "non_torch": log.non_torch,
        "cudagraph_estimate": log.cudagraph_estimate, "available_kv": log.available_kv,
        "kv_tokens": log.kv_tokens, "max_concurrency": log.max_concurrency,
    }  # fmt: skip
    measured: dict[str, float] = {key: reading.value for key, reading in readings.items() if reading is not None}
    rounding = {key: reading.rounding for key, reading in readings.items() if reading is not None and reading.rounding}
    for key in ("block_size", "num_blocks"):
        value = counts.get(key) or getattr(log, key)
        if value is not None:
            measured[key] = value
    return Point(
        point=name,
        checkpoint=facts.repo or "unknown",
        card=card.name,
        deployment=deployment,
        measured=measured,
        rounding=rounding,
        source=f"start-up log, vllm {log.version or deployment.version}",
    )


def deployment_of(log: StartLog, base: Deployment) -> Deployment:
    """The options a log states, over those given; what neither says is left to the engine's defaults."""
    names = {
        "tensor_parallel_size": "tp", "pipeline_parallel_size": "pp", "data_parallel_size": "dp",
        "enable_expert_parallel": "expert_parallel", "max_model_len": "max_model_len", "max_num_seqs": "max_num_seqs",
        "max_num_batched_tokens": "max_num_batched_tokens", "gpu_memory_utilization": "gpu_memory_utilization",
        "kv_cache_dtype": "kv_cache_dtype", "enforce_eager": "enforce_eager",
        "enable_prefix_caching": "enable_prefix_caching", "language_model_only": "language_model_only",
    }  # fmt: skip
    update: dict[str, Any] = {ours: log.arguments[theirs] for theirs, ours in names.items() if theirs in log.arguments}
    speculative = log.arguments.get("speculative", {})
    if tokens := speculative.get("num_speculative_tokens"):
        update["mtp"] = tokens
    if log.version:
        update["version"] = log.version
    return Deployment.model_validate(base.model_dump() | update)


def correction(points: Iterable[Case], engine: str, card: str, tp: int) -> Correction:
    """What runs of the same engine release on the same card at the same TP teach about the terms that no header
    decides: the mean of measured minus predicted. Empty where there is no such run."""
    near = [
        c for c in points
        if c.point.card == card and c.point.deployment.tp == tp and c.deployment.release[:2] == _release(engine)
    ]  # fmt: skip
    if not near:
        return Correction()
    deltas: dict[str, list[float]] = defaultdict(list)
    for case in near:
        spent = _account(case).budget
        for key, term in (("peak_activation", spent.activation), ("non_torch", spent.non_torch),
                          ("cudagraph_estimate", spent.graphs), ("model_memory", spent.weights)):  # fmt: skip
            measured = case.point.measured.get(key)
            if measured is not None and term.bytes is not None:
                drafter = spent.drafter.bytes or 0 if key == "model_memory" else 0
                deltas[key].append(measured - term.bytes - drafter)

    def mean(key: str) -> int:
        return round(sum(deltas[key]) / len(deltas[key])) if deltas[key] else 0

    totals = [int(c.point.measured["total_memory"]) for c in near if "total_memory" in c.point.measured]
    names = ", ".join(c.point.point for c in near)
    return Correction(
        activation=mean("peak_activation"), non_torch=mean("non_torch"), graphs=mean("cudagraph_estimate"),
        weights=mean("model_memory"), total_memory=totals[-1] if totals else None, source=f"calibrated by {names}",
    )  # fmt: skip


def _release(engine: str) -> tuple[int, int]:
    release = Deployment(version=engine).release
    return release[0], release[1]


def in_proportion(left_bytes: float, needed_bytes: float, needed_tokens: int) -> int:
    """The context a pool holds if bytes were proportional to tokens: what people compute by hand from two readings.

    The engine's own answer differs: it hands out whole blocks, keeps state blocks per request whatever the length, and
    the last block of each group is half empty on average."""
    return round(left_bytes / needed_bytes * needed_tokens)


__all__ = [
    "FORMULAS", "Case", "Formula", "Point", "Score", "Summary", "case_of", "correction", "deployment_of",
    "in_proportion", "point_of", "score", "summaries", "worst_first",
]  # fmt: skip
