"""What a reader of an estimate should know besides its numbers: sentences, each with the figures it rests on."""

from __future__ import annotations

from collections.abc import Iterator

from .budget import SERVER_ROWS, Budget
from .facts import Facts
from .geometry import Geometry
from .kv import Plan
from .ngram import table_format, table_is_pinned
from .units import human
from .weights import RankWeights, weights_of


def remarks(facts: Facts, held: RankWeights, spent: Budget, planned: Plan) -> tuple[str, ...]:
    """Remarks on one account: the table's dtype and place, the drafter that is not loaded, what the margin allows."""
    return (
        *_undeclared_table(facts, held, spent),
        *_drafter_left_out(facts, held, spent),
        *_close_call(spent, planned),
        *_many_rows(spent),
        *_from_config(held),
    )


def _undeclared_table(facts: Facts, held: RankWeights, spent: Budget) -> Iterator[str]:
    """A table stored in FP8 and not declared is built in BF16, at twice the bytes."""
    ple, geometry = facts.ple, facts.geometry or Geometry()
    if ple is None or ple.format != "fp8" or geometry.ngram is None:
        return
    if table_format(geometry, facts.quantization, spent.deployment) != "bf16":
        return
    where = "pinned in host memory" if table_is_pinned(spent.deployment) else "on each card"
    table = held.host_pinned or held.by.get("ple", 0)
    yield (
        f"the n-gram table is stored in FP8, but the config does not say so: the engine builds it in BF16, "
        f"{human(table)} {where}, half of it for nothing; declare it with "
        """--hf-overrides '{"text_config":{"ple_embedding_dtype":"float8_e4m3fn"}}'"""
    )


def _drafter_left_out(facts: Facts, held: RankWeights, spent: Budget) -> Iterator[str]:
    """What MTP would add, and why `total - PLE` says more than is resident without it."""
    if spent.deployment.mtp or not (facts.geometry and facts.geometry.mtp_layers):
        return
    adds = weights_of(facts, spent.deployment.model_copy(update={"mtp": 1}), held.rank).mtp_allocated
    if not adds:
        return
    yield f"the drafter is not loaded: --mtp would add {human(adds)} to {human(held.allocated)}"
    stored = facts.mtp.bytes if facts.mtp else None
    if facts.ple is None or facts.ple.kind != "ngram" or not facts.ple.bytes or not facts.tensor_bytes or not stored:
        return
    rest = facts.tensor_bytes - facts.ple.bytes
    yield (
        f"total - PLE is {human(rest)} over all ranks with the {human(stored)} of MTP tensors counted, though this "
        f"deployment loads none of them"
    )


def _close_call(spent: Budget, planned: Plan) -> Iterator[str]:
    left, need = spent.available.bytes, planned.needed_bytes
    if left is None or need is None or abs(left - need) > spent.margin_bytes:
        return
    side = "more" if left >= need else "less"
    yield (
        f"close: {human(abs(left - need))} {side} than one request of {spent.deployment.max_model_len:,} tokens needs, "
        f"within the margin of {human(spent.margin_bytes)}; calibrate with a start-up log of this engine and card"
    )


def _many_rows(spent: Budget) -> Iterator[str]:
    """vllm-project/recipes#831: RTX PRO 6000 runs at the default of 1,024 sequences held 12 to 14 GiB besides weights
    and KV cache, where the terms here come to about 5."""
    deployment = spent.deployment
    if (deployment.max_num_seqs or 0) >= SERVER_ROWS and (deployment.sm or 90) // 10 != 9:
        yield (
            f"max_num_seqs is {deployment.max_num_seqs:,}: runs with so many on cards other than Hopper were seen to "
            "hold 7 to 9 GiB more than these terms explain (vllm-project/recipes#831); it is in the margin"
        )


def _from_config(held: RankWeights) -> Iterator[str]:
    if held.evidence == "config":
        yield "weights are implied by config.json alone: no header says what is stored"
