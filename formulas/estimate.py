"""One checkpoint on one card under one deployment: does it fit, with how much KV cache, and what would make it fit."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

from .asked import attention_refusals
from .beside import Beside
from .budget import ONE_REQUEST, Budget, Gate, budget, filled, gates
from .cards import Card
from .deployment import Deployment
from .facts import Document, Facts
from .geometry import Geometry
from .kv import Plan, plan
from .lengths import too_long
from .nearest import Tried, Way, ways
from .ngram import table_is_pinned
from .readings import KvReading
from .refusals import Refusal
from .releases import LAST
from .remarks import remarks
from .tables import table_for
from .units import GIB, MIB, human
from .weights import RankWeights, weights_of


class PerRank(Document):
    """The account of one rank. Bytes; None where unknown."""

    rank: int
    by: dict[str, int]  # the target's weights by part, as loaded
    mtp_by: dict[str, int]
    weights_bytes: int | None  # "model loading took", target alone
    mtp_bytes: int | None  # what loading the drafter adds
    ple_bytes: int  # of the weights: the table, when it is on the card
    host_pinned_bytes: int  # outside the card
    buffers_bytes: int  # of the weights: what the engine creates that no file holds
    activation_bytes: int | None
    non_torch_bytes: int | None
    cudagraph_bytes: int | None
    unexplained_bytes: int = 0  # gone besides these in a run of yours
    total_memory_bytes: int
    requested_bytes: int | None
    available_kv_bytes: int | None
    margin_bytes: int  # around the bytes left for the KV cache


class KvReport(Document):
    """The KV cache the engine would plan with what is left."""

    dtype: str | None
    bytes_per_token: int | None
    block_size: int | None
    num_blocks: int | None
    bytes_per_block: int | None
    tokens: int | None
    max_concurrency: float | None
    max_context: int | None
    needed_bytes: int | None  # for one request of max_model_len
    groups: tuple[str, ...] = ()


class GateReport(Document):
    name: str
    met: bool | None
    because: str


class Estimate(Document):
    """The answer of `fit` for one checkpoint, card and deployment. `fits` is None where something is not modelled."""

    checkpoint: str
    commit: str | None
    gpu: str
    gpu_source: str
    deployment: dict[str, Any]
    per_rank: PerRank
    ranks: tuple[PerRank, ...] = ()  # all of them, where they differ
    kv: KvReport
    gates: tuple[GateReport, ...]
    fits: bool | None
    shortfall_bytes: int | None
    nearest_fit: str | None  # the smallest change in the engine's flags; `ways` says what it costs, and others
    ways: tuple[Way, ...] = ()
    margin_bytes: int
    evidence: str
    because: dict[str, str]  # what each term rests on
    calibrated: str | None = None  # which readings of the user's corrected it
    remarks: tuple[str, ...] = ()
    kv_reading: KvReading | None = None
    live: Beside | None = None  # the engine's own build, where it was asked
    unmodelled: tuple[str, ...]


STARTS = "the engine takes the layers"


class Correction(NamedTuple):
    """What readings of the same engine on the same card taught: bytes to add to each term (None: it was not read)."""

    activation: int | None = None
    non_torch: int | None = None
    graphs: int | None = None
    weights: int | None = None
    unexplained: int = 0  # bytes that were gone besides the terms above
    total_memory: int | None = None
    source: str | None = None
    is_own: bool = False  # of this very checkpoint: the terms' margins are then those of the readings
    is_same_start: bool = False  # and started just so: what was left is then itself a reading


READ_MARGIN = 64 * MIB  # two printed decimals of a GiB, and what one start differs from the next


class Account(NamedTuple):
    """One evaluation: what the engine would hold and plan."""

    weights: RankWeights
    budget: Budget
    plan: Plan
    gates: tuple[Gate, ...]
    unmodelled: tuple[str, ...]
    refused: tuple[str, ...] = ()  # why the engine would not start; it decides, whatever else is not known

    @property
    def fits(self) -> bool | None:
        if self.refused:
            return False
        if self.unmodelled or self.budget.available.bytes is None:
            return None
        return all(gate.met is not False for gate in self.gates)

    @property
    def shortfall(self) -> int | None:
        """Bytes missing on the tightest rank for one request of max_model_len; 0 where it fits, None where unknown."""
        left, need, block = self.budget.available.bytes, self.plan.needed_bytes, self.plan.bytes_per_block
        if left is None or need is None or block is None:
            return None if left is None or left >= 0 else -left
        return max(0, need + block - left) if self.plan.fits is False or left <= 0 else 0

    @property
    def tried(self) -> Tried:
        """What a search for a way to make it fit looks at."""
        others = any(gate.met is False for gate in self.gates if gate.name != ONE_REQUEST)
        only_context = not self.unmodelled and not self.refused and not others
        left = self.budget.available.bytes
        return Tried(self.fits, only_context, self.plan.max_context, left, bool(self.refused))


def account(
    facts: Facts,
    card: Card,
    deployment: Deployment,
    coefficients: Mapping[str, float],
    rank: int = 0,
    correction: Correction = Correction(),
) -> Account:
    """The account of one rank of this deployment, engine defaults filled in.

    A max_model_len of -1 becomes the longest context that fits, as the engine's `auto` does
    (vllm 0.33.0 v1/core/kv_cache_utils.py, the largest length whose blocks fit on the tightest rank)."""
    if deployment.max_model_len == -1:
        whole = deployment.model_copy(update={"max_model_len": None})
        first = account(facts, card, whole, coefficients, rank, correction)
        if not first.plan.max_context:
            return first
        deployment = deployment.model_copy(update={"max_model_len": first.plan.max_context})
    geometry = facts.geometry or Geometry()
    if correction.total_memory is not None and abs(correction.total_memory - card.total_bytes) > 10 * MIB:
        card = card._replace(total_bytes=correction.total_memory, margin_bytes=READ_MARGIN,
                             source=correction.source or card.source)  # fmt: skip
    asked = filled(deployment, card, geometry)
    held = weights_of(facts, asked, rank)
    took, drafter = held.allocated, held.mtp_allocated
    spent = budget(geometry, facts.quantization, asked, card, took, drafter, coefficients)
    spent = _corrected(spent, correction)
    planned = plan(geometry, asked, spent.available.bytes, facts.quantization)
    reasons = (*held.unmodelled, *spent.unmodelled, *planned.unmodelled, *_unweighed(asked))
    if length := too_long(geometry, asked):
        reasons = (length, *reasons)
    if table := table_for(asked.release):
        reasons = (*reasons, *attention_refusals(geometry, asked, facts.quantization, table))
    refused = tuple(dict.fromkeys(reason for reason in reasons if isinstance(reason, Refusal)))
    if refused:
        return Account(held, spent, planned, tuple(Gate(STARTS, False, why) for why in refused), (), refused)
    checks = gates(spent, card, geometry, planned) if not planned.unmodelled else ()
    return Account(held, spent, planned, checks, tuple(dict.fromkeys(reasons)))


_CAPABILITIES = frozenset({75, 80, 86, 87, 89, 90, 100, 103, 110, 120, 121})
_COMPILATION_KEYS = {"cudagraph_mode", "mode", "level"}


def _unweighed(asked: Deployment) -> tuple[str, ...]:
    """What is asked and cannot be weighed: finer rules of compilation, a card of unknown capability."""
    finer = sorted(asked.compilation_config.keys() - _COMPILATION_KEYS)
    found = [f"--compilation-config {key} is not modelled" for key in finer]
    if asked.sm is None:
        found.append("which kernels run follows from the card: pass its --capability, such as 12.0")
    elif asked.sm not in _CAPABILITIES:
        found.append(f"compute capability {asked.capability}: no card of it is modelled")
    if asked.release[:2] > LAST[:2]:
        found.append(f"vllm {asked.version} is newer than what is modelled, {'.'.join(map(str, LAST))}: taken as that")
    if asked.block_size and asked.block_size % 16:
        found.append(f"block_size {asked.block_size}: attention kernels take multiples of 16; another is not modelled")
    return tuple(found)


def _corrected(spent: Budget, correction: Correction) -> Budget:
    """The budget with each term moved by what a run of the same engine on the same card showed."""
    if correction.source is None:
        return spent
    moved = {
        name: term._replace(
            bytes=term.bytes + delta,
            margin_bytes=min(term.margin_bytes, READ_MARGIN) if correction.is_own else term.margin_bytes,
            because=f"{term.because}; {correction.source}",
        )
        for name in ("weights", "activation", "non_torch", "graphs")
        if (term := getattr(spent, name)).bytes is not None and (delta := getattr(correction, name)) is not None
    }
    shift = sum(term.bytes - (getattr(spent, name).bytes or 0) for name, term in moved.items())
    less = sum(getattr(spent, name).margin_bytes - term.margin_bytes for name, term in moved.items())
    left = spent.available
    if left.bytes is not None and spent.deployment.kv_cache_memory_bytes is None:
        margin = READ_MARGIN if correction.is_same_start else left.margin_bytes - less
        left = left._replace(bytes=left.bytes - shift - correction.unexplained, margin_bytes=margin)
    return spent._replace(**moved, available=left)


def estimate(
    facts: Facts,
    card: Card,
    deployment: Deployment,
    coefficients: Mapping[str, float],
    *,
    correction: Correction = Correction(),
    unmodelled: tuple[str, ...] = (),
) -> Estimate:
    """The report for the tightest rank. `unmodelled` adds reasons known elsewhere, such as an option not modelled."""
    accounts = [
        account(facts, card, deployment, coefficients, rank, correction) for rank in distinct_ranks(facts, deployment)
    ]
    tightest = min(accounts, key=lambda a: (a.budget.available.bytes is not None, a.budget.available.bytes or 0))
    reasons = tuple(dict.fromkeys((*tightest.unmodelled, *unmodelled)))
    fits = False if tightest.refused else None if reasons else tightest.fits
    found: tuple[Way, ...] = ()
    if fits is False:

        def judge(other: Deployment) -> Tried:
            return account(facts, card, other, coefficients, tightest.weights.rank, correction).tried

        found = ways(facts, card, tightest.budget.deployment, tightest.tried, judge)
    per_rank = [_per_rank(a, correction.unexplained) for a in accounts]
    differ = len({p.model_copy(update={"rank": 0}).model_dump_json() for p in per_rank}) > 1
    spent, planned = tightest.budget, tightest.plan
    terms = ("total", "requested", "weights", "drafter", "activation", "non_torch", "graphs")
    return Estimate(
        checkpoint=facts.repo or "unknown",
        commit=facts.commit,
        gpu=card.name,
        gpu_source=spent.total.because,
        deployment=shown(spent.deployment),
        per_rank=_per_rank(tightest, correction.unexplained),
        ranks=tuple(per_rank) if differ else (),
        kv=KvReport(
            dtype=planned.dtype,
            bytes_per_token=planned.bytes_per_token,
            block_size=planned.block_size,
            num_blocks=planned.num_blocks,
            bytes_per_block=planned.bytes_per_block,
            tokens=planned.tokens,
            max_concurrency=planned.max_concurrency,
            max_context=planned.max_context,
            needed_bytes=planned.needed_bytes,
            groups=tuple(str(len(group.caches)) + " x " + group.specs[0].kind.value for group in planned.groups),
        ),
        gates=tuple(GateReport(name=g.name, met=g.met, because=g.because) for g in tightest.gates),
        fits=fits,
        shortfall_bytes=tightest.shortfall if fits is not None else None,
        nearest_fit=found[0].flags if found else None,
        ways=found,
        margin_bytes=spent.margin_bytes,
        evidence=tightest.weights.evidence,
        because={name: getattr(spent, name).because for name in terms},
        calibrated=correction.source,
        remarks=remarks(facts, tightest.weights, spent, planned) if facts.geometry else (),
        unmodelled=reasons,
    )


def shown(deployment: Deployment) -> dict[str, Any]:
    """The options of a deployment that say something: what was asked and the defaults that matter."""
    body = deployment.model_dump(mode="json", exclude_none=True)
    always = {"engine", "version", "tp", "pp", "dp", "max_model_len", "kv_cache_dtype", "mtp", "ple"}
    plain = Deployment().model_dump(mode="json", exclude_none=True)
    return {k: sorted(v) if k == "without" else v for k, v in body.items() if k in always or v != plain.get(k)}


def distinct_ranks(facts: Facts, deployment: Deployment) -> list[int]:
    """Ranks that can differ: all of them, but no more than a node's worth of computation."""
    experts = facts.geometry.experts if facts.geometry else None
    size = deployment.tp * deployment.dp
    uneven = deployment.expert_parallel and experts is not None and (experts.count or 0) % size
    if deployment.pp > 1:
        return [stage * deployment.tp for stage in range(deployment.pp)]
    return [0, size - 1] if uneven else [0]


def _per_rank(a: Account, unexplained: int) -> PerRank:
    held, spent = a.weights, a.budget
    on_host = table_is_pinned(spent.deployment)
    return PerRank(
        rank=held.rank,
        by=held.by,
        mtp_by=held.mtp_by,
        weights_bytes=spent.weights.bytes,
        mtp_bytes=spent.drafter.bytes,
        ple_bytes=0 if on_host and held.host_pinned else held.by.get("ple", 0),
        host_pinned_bytes=held.host_pinned,
        buffers_bytes=held.buffers,
        activation_bytes=spent.activation.bytes,
        non_torch_bytes=spent.non_torch.bytes,
        cudagraph_bytes=spent.graphs.bytes,
        unexplained_bytes=unexplained,
        total_memory_bytes=spent.total.bytes or 0,
        requested_bytes=spent.requested.bytes,
        available_kv_bytes=spent.available.bytes,
        margin_bytes=spent.margin_bytes,
    )


def sentence(answer: Estimate) -> str:
    """The verdict as one line: subject: needs X of Y; what would fit."""
    rank = answer.per_rank
    held = (rank.weights_bytes or 0) + (rank.mtp_bytes or 0)
    name = f"{answer.checkpoint} on {answer.gpu} x {prod(answer.deployment[n] for n in ('tp', 'pp', 'dp'))}"
    if answer.fits is None:
        return f"{name}: unknown; " + "; ".join(answer.unmodelled)
    if answer.fits:
        return (
            f"{name}: fits; {human(held)} of weights, {human(rank.available_kv_bytes)} for the KV cache, "
            f"{answer.kv.tokens:,} tokens, longest context {answer.kv.max_context:,}"
        )
    failed = next((g for g in answer.gates if g.met is False), None)
    flags = " or ".join(way.flags for way in answer.ways)
    tail = f"; fits with {flags}" if flags else "; nothing tried makes it fit"
    if failed and failed.name == STARTS:
        return f"{name}: the engine would not start; {failed.because}{tail}"
    missing = f", {answer.shortfall_bytes / GIB:.2f} GiB short" if answer.shortfall_bytes else ""
    return f"{name}: does not fit{missing}; {failed.name + ': ' + failed.because if failed else ''}{tail}"
