"""One checkpoint on one card under one deployment: does it fit, with how much KV cache, and what would make it fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from .budget import Budget, Gate, budget, filled, gates
from .cards import Card
from .deployment import Deployment
from .facts import Document, Facts
from .geometry import Geometry
from .kv import Plan, plan
from .ngram import table_is_pinned
from .units import GIB, human
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
    nearest_fit: str | None
    margin_bytes: int
    evidence: str
    because: dict[str, str]  # what each term rests on
    calibrated: str | None = None  # which readings of the user's corrected it
    unmodelled: tuple[str, ...]


class Correction(NamedTuple):
    """What readings of the same engine on the same card taught: bytes to add to each term, and where they are from."""

    activation: int = 0
    non_torch: int = 0
    graphs: int = 0
    weights: int = 0
    total_memory: int | None = None
    source: str | None = None


class Account(NamedTuple):
    """One evaluation: what the engine would hold and plan."""

    weights: RankWeights
    budget: Budget
    plan: Plan
    gates: tuple[Gate, ...]
    unmodelled: tuple[str, ...]

    @property
    def fits(self) -> bool | None:
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


def account(
    facts: Facts,
    card: Card,
    deployment: Deployment,
    coefficients: Mapping[str, float],
    rank: int = 0,
    correction: Correction = Correction(),
) -> Account:
    """The account of one rank of this deployment, engine defaults filled in."""
    geometry = facts.geometry or Geometry()
    if correction.total_memory is not None:
        card = card._replace(total_bytes=correction.total_memory, source=correction.source or card.source)
    asked = filled(deployment, card, geometry)
    held = weights_of(facts, asked, rank)
    took, drafter = held.allocated, held.mtp_allocated
    spent = budget(geometry, facts.quantization, asked, card, took, drafter, coefficients)
    spent = _corrected(spent, correction)
    planned = plan(geometry, asked, spent.available.bytes, facts.quantization)
    reasons = (*held.unmodelled, *spent.unmodelled, *planned.unmodelled)
    checks = gates(spent, card, geometry, planned) if not planned.unmodelled else ()
    return Account(held, spent, planned, checks, tuple(dict.fromkeys(reasons)))


def _corrected(spent: Budget, correction: Correction) -> Budget:
    """The budget with each term moved by what a run of the same engine on the same card showed."""
    if correction.source is None:
        return spent
    moved = {
        name: term._replace(bytes=term.bytes + delta, because=f"{term.because}; {correction.source}")
        for name, delta in (
            ("weights", correction.weights),
            ("activation", correction.activation),
            ("non_torch", correction.non_torch),
            ("graphs", correction.graphs),
        )
        if (term := getattr(spent, name)).bytes is not None and delta
    }
    shift = sum(term.bytes - (getattr(spent, name).bytes or 0) for name, term in moved.items())
    left = spent.available
    if left.bytes is not None and spent.deployment.kv_cache_memory_bytes is None:
        left = left._replace(bytes=left.bytes - shift)
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
    fits = None if reasons else tightest.fits
    nearest = None
    if fits is False:
        nearest = nearest_fit(
            facts, tightest, lambda d: account(facts, card, d, coefficients, tightest.weights.rank, correction)
        )
    per_rank = [_per_rank(a) for a in accounts]
    differ = len({p.model_copy(update={"rank": 0}).model_dump_json() for p in per_rank}) > 1
    spent, planned = tightest.budget, tightest.plan
    terms = ("total", "requested", "weights", "drafter", "activation", "non_torch", "graphs")
    return Estimate(
        checkpoint=facts.repo or "unknown",
        commit=facts.commit,
        gpu=card.name,
        gpu_source=spent.total.because,
        deployment=shown(spent.deployment),
        per_rank=_per_rank(tightest),
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
        nearest_fit=nearest,
        margin_bytes=spent.margin_bytes,
        evidence=tightest.weights.evidence,
        because={name: getattr(spent, name).because for name in terms},
        calibrated=correction.source,
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


def _per_rank(a: Account) -> PerRank:
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
        total_memory_bytes=spent.total.bytes or 0,
        requested_bytes=spent.requested.bytes,
        available_kv_bytes=spent.available.bytes,
        margin_bytes=spent.margin_bytes,
    )


class Change(NamedTuple):
    """One change to a deployment, in the engine's own words."""

    flag: str
    deployment: Deployment


def changes(facts: Facts, deployment: Deployment) -> Iterator[Change]:
    """Changes that make room, the mildest first."""
    if deployment.mtp:
        for depth in range(deployment.mtp - 1, 0, -1):
            yield Change(f"--mtp {depth}", deployment.model_copy(update={"mtp": depth}))
    if deployment.max_num_seqs and deployment.max_num_seqs > 8:
        rows = deployment.max_num_seqs
        while rows > 8:
            rows //= 2
            yield Change(f"--max-num-seqs {rows}", deployment.model_copy(update={"max_num_seqs": rows}))
    if facts.ple and facts.ple.kind in ("ngram", "engram") and not table_is_pinned(deployment):
        yield Change("--ple host", deployment.model_copy(update={"ple": "host"}))
    if deployment.kv_cache_dtype in ("auto", "bfloat16", "float16"):
        yield Change("--kv-cache-dtype fp8", deployment.model_copy(update={"kv_cache_dtype": "fp8"}))
    if deployment.mtp:
        yield Change("--mtp 0", deployment.model_copy(update={"mtp": 0}))
    batch = deployment.max_num_batched_tokens or 0
    if batch > 2048:
        yield Change("--max-num-batched-tokens 2048", deployment.model_copy(update={"max_num_batched_tokens": 2048}))
    for size in (2, 4, 8, 16):
        if size > deployment.tp:
            yield Change(f"--tensor-parallel-size {size}", deployment.model_copy(update={"tp": size}))


def nearest_fit(facts: Facts, failed: Account, judge: Callable[[Deployment], Account]) -> str | None:
    """The smallest change that fits, in the engine's flags: a shorter context if one is left, and one other option.

    None where nothing tried is enough."""
    found = []
    deployment = failed.budget.deployment
    context = failed.plan.max_context or 0
    others = [g for g in failed.gates if g.met is False and g.name != "one request of max_model_len"]
    if context >= 1024 and not others:
        found.append(f"--max-model-len {context}")
    for change in changes(facts, deployment):
        tried = judge(change.deployment)
        if tried.fits:
            found.append(change.flag)
            break
    return " or ".join(found) or None


def sentence(answer: Estimate) -> str:
    """The verdict as one line: subject: needs X of Y; what would fit."""
    rank = answer.per_rank
    held = (rank.weights_bytes or 0) + (rank.mtp_bytes or 0)
    name = f"{answer.checkpoint} on {answer.gpu} x {answer.deployment['tp'] * answer.deployment['pp']}"
    if answer.fits is None:
        return f"{name}: unknown; " + "; ".join(answer.unmodelled)
    if answer.fits:
        return (
            f"{name}: fits; {human(held)} of weights, {human(rank.available_kv_bytes)} for the KV cache, "
            f"{answer.kv.tokens:,} tokens, longest context {answer.kv.max_context:,}"
        )
    failed = next((g for g in answer.gates if g.met is False), None)
    tail = f"; fits with {answer.nearest_fit}" if answer.nearest_fit else "; no single change tried makes it fit"
    missing = f", {answer.shortfall_bytes / GIB:.2f} GiB short" if answer.shortfall_bytes else ""
    return f"{name}: does not fit{missing}; {failed.name + ': ' + failed.because if failed else ''}{tail}"
