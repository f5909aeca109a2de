"""What running engines measured, and what that teaches: points, and corrections for the same engine and card."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from .budget import filled
from .cards import Card, find_card
from .deployment import Deployment
from .estimate import Account, Correction, account
from .facts import Document, Facts
from .geometry import Geometry
from .logs import StartLog
from .units import gib
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
    rank: int = 0
    stands_in: bool = False  # its facts are the same model's in another format: weights are not compared
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


def case_of(point: Point, facts: Facts, coefficients: Mapping[str, float]) -> Case:
    """A point made ready to be predicted."""
    card = find_card(point.card, point.deployment.capability)
    total = point.total_memory or point.measured.get("total_memory")
    return Case(point, facts, card._replace(total_bytes=int(total)) if total else card, coefficients)


def account_of(case: Case) -> Account:
    """The account of the rank that was measured, before any reading corrects it."""
    return account(case.facts, case.card, case.point.deployment, case.coefficients, case.point.rank)


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
        held_out=True,  # the shipped coefficients know nothing of it
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
    if log.arguments.get("disable_custom_all_reduce"):
        update["without"] = base.without | {"custom_all_reduce"}
    if log.version:
        update["version"] = log.version
    return Deployment.model_validate(base.model_dump() | update)


_TERMS = {"peak_activation": "activation", "non_torch": "non_torch", "cudagraph_estimate": "graphs"}


def correction(points: Iterable[Case], asked: Deployment, card: str, checkpoint: str | None = None) -> Correction:
    """What runs of the same engine release on the same card at the same TP teach: the mean of measured less predicted,
    term by term, of this very checkpoint where it was run, else of the others. Empty where there is no such run.

    What loading took is carried over within a checkpoint only. Where a log states what was left and not every part
    of what was spent, the difference is `unexplained`."""
    near = [
        c for c in points
        if c.point.card == card and c.point.deployment.tp == asked.tp
        and c.deployment.release[:2] == asked.release[:2]
    ]  # fmt: skip
    mine = [c for c in near if c.point.checkpoint == checkpoint and bool(c.point.deployment.mtp) == bool(asked.mtp)]
    mine = [c for c in mine if _same_start(c.point.deployment, asked)] or mine
    used = mine or near
    if not used:
        return Correction()
    found: dict[str, list[float]] = defaultdict(list)
    for case in used:
        for term, delta in _deltas(case).items():
            found[term].append(delta)
    means = {term: round(sum(deltas) / len(deltas)) for term, deltas in found.items()}
    if not mine:
        means.pop("weights", None)
    totals = [int(c.point.measured["total_memory"]) for c in used if "total_memory" in c.point.measured]
    names = ", ".join(c.point.point for c in used)
    source = f"calibrated by {names}" + ("" if mine else ", of other checkpoints")
    same = bool(mine) and _same_start(mine[0].point.deployment, asked) and "unexplained" in means
    return Correction(
        **means, total_memory=totals[-1] if totals else None, source=source, is_own=bool(mine), is_same_start=same
    )


def _same_start(one: Deployment, other: Deployment) -> bool:
    """Whether two deployments leave the same bytes: they differ in nothing but how the pool is then used."""
    names = ("max_model_len", "capability", "version", "kv_cache_dtype", "block_size")
    free = {name: Deployment.model_fields[name].default for name in names}
    return one.model_copy(update=free) == other.model_copy(update=free)


def _deltas(case: Case) -> dict[str, float]:
    """Measured less predicted of every term a run states, and of what it leaves unexplained."""
    spent, measured = account_of(case).budget, case.point.measured
    found = {
        term: measured[key] - predicted
        for key, term in _TERMS.items()
        if key in measured and (predicted := getattr(spent, term).bytes) is not None
    }
    if "model_memory" in measured and spent.weights.bytes is not None and spent.drafter.bytes is not None:
        found["weights"] = measured["model_memory"] - spent.weights.bytes - spent.drafter.bytes
    stated = "available_kv" in measured and spent.deployment.kv_cache_memory_bytes is None
    if stated and spent.available.bytes is not None:
        found["unexplained"] = spent.available.bytes - sum(found.values()) - measured["available_kv"]
    return found


def _held(case: Case) -> int | None:
    held = weights_of(case.facts, case.deployment, case.point.rank)
    return None if held.allocated is None else held.allocated + (held.mtp_allocated or 0)


def checked(points: Iterable[Case], facts: Facts, card: str, asked: Deployment) -> tuple[str, ...]:
    """What runs of this very checkpoint on this card said against what is predicted of them, a sentence a run."""
    return tuple(
        f"checked against your running checkpoint ({case.point.point}): {gib(measured)} GiB reported, "
        f"{gib(_held(case))} predicted"
        for case in points
        if case.point.checkpoint == facts.repo and case.point.card == card
        and case.point.deployment.tp == asked.tp and (measured := case.point.measured.get("model_memory"))
    )  # fmt: skip
