"""What is left for the KV cache on one rank, term by term, each with its margin; and what stops a start before that.

    requested = ceil(total_memory x gpu_memory_utilization)
    KV        = requested - weights - drafter - activation peak - non-torch - CUDA-graph estimate

Source: vllm 0.25.1 and 0.33.0 v1/worker/gpu_worker.py determine_available_memory, v1/worker/utils.py request_memory,
engine/arg_utils.py get_batch_defaults, config/compilation.py (the state gate). From 0.27 the engine reads what is
consumed off the card instead of summing parts; the sum is the same but for fragments.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import NamedTuple

from .activation import Activation, activation
from .cards import Card
from .deployment import Deployment
from .facts import Quantization
from .geometry import Geometry, State
from .kv import Plan
from .lengths import served
from .releases import rules
from .units import GIB, MIB, human
from .workspaces import runs_second

SERVER_ROWS, SMALL_ROWS = 1024, 256  # max_num_seqs by default, on large and small cards
WEIGHTS_MARGIN = 0.005
ONE_REQUEST = "one request of max_model_len"  # the gate a shorter context can open
# Runs at 1,024 sequences on RTX PRO 6000 held 12 to 14 GiB besides weights and KV cache, against 5 of these terms; not
# explained (vllm-project/recipes#831). Hopper runs of that many are met.
MANY_ROWS_MARGIN = 9 * GIB


class Term(NamedTuple):
    """Bytes with the margin around them and what they rest on; None where they are not known."""

    bytes: int | None
    margin_bytes: int
    because: str


class Budget(NamedTuple):
    """The account of one rank."""

    deployment: Deployment  # with every default of that engine on that card filled in
    total: Term
    requested: Term
    weights: Term
    drafter: Term
    activation: Term
    non_torch: Term
    graphs: Term
    available: Term  # for the KV cache; below zero where nothing is left
    peak: Activation
    unmodelled: tuple[str, ...]

    @property
    def margin_bytes(self) -> int:
        """The margin around the bytes left."""
        return self.available.margin_bytes


class Gate(NamedTuple):
    """A condition for the engine to start: met, not met, or not known."""

    name: str
    met: bool | None
    because: str


def filled(deployment: Deployment, card: Card, geometry: Geometry) -> Deployment:
    """The deployment with the engine's defaults for a server on this card where nothing was asked.

    Source: engine/arg_utils.py get_batch_defaults (0.33.0:2940; 0.25.1:2397), config/cache.py."""
    rule = rules(deployment.release)
    gib = card.total_bytes / GIB
    small = gib < 70 or "a100" in card.name or (card.name == "gb10" and rule.gb10_is_small)
    tokens = 2048 if small else 16384 if gib >= 160 and rule.large_card_batch else 8192
    update = {
        "gpu_memory_utilization": deployment.gpu_memory_utilization or rule.utilization,
        "max_num_batched_tokens": deployment.max_num_batched_tokens or tokens,
        "max_model_len": served(geometry, deployment),
        "capability": deployment.capability or card.capability,
    }
    rows = deployment.max_num_seqs or (SMALL_ROWS if small else SERVER_ROWS)
    update["max_num_seqs"] = min(rows, int(update["max_num_batched_tokens"] or rows))
    return deployment.model_copy(update=update)


def budget(
    geometry: Geometry,
    quantization: Quantization | None,
    deployment: Deployment,
    card: Card,
    weights_bytes: int | None,
    drafter_bytes: int | None,
    coefficients: Mapping[str, float],
) -> Budget:
    """The account of the tightest rank; `weights_bytes` is "model loading took", `drafter_bytes` what MTP adds."""
    asked = filled(deployment, card, geometry)
    utilization = asked.gpu_memory_utilization or 0.0
    total = Term(card.total_bytes, card.margin_bytes, card.source)
    requested = Term(
        ceil(card.total_bytes * utilization),
        ceil(card.margin_bytes * utilization),
        f"{utilization:g} of the card",
    )
    weights = Term(weights_bytes, int((weights_bytes or 0) * WEIGHTS_MARGIN), "model loading")
    drafter = Term(drafter_bytes if asked.mtp else 0, 0, "the drafter, embedding and head shared")
    peak = activation(geometry, asked, quantization, coefficients)
    terms = {
        "weights": weights,
        "drafter": drafter,
        "activation": _peak_term(peak, asked),
        "non_torch": _non_torch(asked, card, coefficients),
        "graphs": graphs(geometry, asked, coefficients),
    }
    left = _left(requested, list(terms.values()))
    if asked.kv_cache_memory_bytes is not None:
        left = Term(asked.kv_cache_memory_bytes, 0, "--kv-cache-memory-bytes")
    return Budget(asked, total, requested, **terms, available=left, peak=peak, unmodelled=peak.unmodelled)


def _peak_term(peak: Activation, deployment: Deployment) -> Term:
    margin = int((peak.peak_bytes or 0) * 0.05) + peak.compile_bytes + peak.phases.get("vision", 0) // 2
    if (deployment.max_num_seqs or 0) >= SERVER_ROWS and (deployment.sm or 90) // 10 != 9:
        margin += MANY_ROWS_MARGIN
    return Term(peak.peak_bytes, margin, f"the profile run; widest in {peak.widest or 'an unknown phase'}")


def _left(requested: Term, spent: list[Term]) -> Term:
    parts = [term.bytes for term in spent]
    margin = requested.margin_bytes + sum(term.margin_bytes for term in spent)
    if requested.bytes is None or None in parts:
        return Term(None, margin, "a part of it is not known")
    return Term(requested.bytes - sum(part or 0 for part in parts), margin, "requested less the parts")


def _non_torch(deployment: Deployment, card: Card, coefficients: Mapping[str, float]) -> Term:
    """Memory outside torch that grows from the engine's first snapshot to the end of the profile run.

    Measured: 230 MiB on one H200, 552 MiB on each of two over NCCL alone; about 2.07 GiB on each of two and 2.14 of
    four H100 with custom all-reduce (vLLM 0.19, 26 public runs); 0.13 to 0.2 GiB on cards without NVLink."""
    base = int(coefficients["non_torch_mib"] * MIB)
    if deployment.tp * deployment.pp == 1:
        return Term(base, 64 * MIB, "CUDA modules on one card, measured on an H200")
    if not card.linked:
        return Term(base, 256 * MIB, "CUDA modules and NCCL over PCIe, from public logs")
    if "custom_all_reduce" in deployment.without:
        return Term(base + int(coefficients["nccl_mib"] * MIB), 128 * MIB, "CUDA modules and NCCL, measured on H200s")
    return Term(base + int(coefficients["all_reduce_mib"] * MIB), 256 * MIB, "with custom all-reduce, from public runs")


def graphs(geometry: Geometry, deployment: Deployment, coefficients: Mapping[str, float]) -> Term:
    """The engine's own estimate of its CUDA graphs, which it takes off before it sizes the KV cache.

    The first capture pays for the pool and grows with its batch; every further one pays for its nodes, which grow with
    the layers. Source: vllm 0.25.1 v1/worker/gpu_model_runner.py:6498 with the log lines of two H200 runs. Another log
    (Qwen3-8B on 24 GB) lies a third above it, and custom kernels over eight cards took ten times as much.
    """
    rule = rules(deployment.release)
    mode = str(deployment.compilation_config.get("cudagraph_mode", "")).upper()
    if deployment.enforce_eager or mode == "NONE":
        return Term(0, 0, "no CUDA graphs")
    if not rule.graphs_estimated:
        return Term(0, 0, "this release does not take graphs off")
    if rule.second_runner != "all" and runs_second(geometry, deployment):
        return Term(0, 0, "this release's second runner estimates none")
    rows, layers = deployment.max_num_seqs or SMALL_ROWS, len(geometry.layers)
    if geometry.text_model_type == "gpt_oss":
        sizes = capture_sizes(1024, 0, 1024)  # asked for by its own config class, whatever the batch
    else:
        sizes = capture_sizes(rows, deployment.mtp, 1024 if (deployment.sm or 0) // 10 == 10 else 512)
    decode = sum(1 for size in sizes if size <= rows * (1 + deployment.mtp))
    node = layers * coefficients["graph_layer_mib"]
    first = coefficients["graph_pool_mib"] + coefficients["graph_token_mib"] * sizes[-1]
    further = (len(sizes) - 1) * (2 + node) + (decode - 1) * max(1.0, node / 2)
    estimate = int((first + further) * MIB)
    return Term(estimate, max(estimate // 2, GIB // 8), f"{len(sizes)} mixed and {decode} decode captures")


def capture_sizes(rows: int, drafts: int, cap: int = 512) -> tuple[int, ...]:
    """Batch sizes the engine captures: 1, 2, 4, then steps of 8 up to 256 and of 16 up to twice the largest batch.

    The cap is 512, but 1,024 on sm100 and for gpt-oss. Source: vllm 0.33.0 config/vllm.py:2398, models/config.py."""
    largest = min(2 * rows * (1 + drafts), cap)
    return tuple(n for n in (1, 2, 4, *range(8, 257, 8), *range(272, cap + 1, 16)) if n <= largest)


def gates(account: Budget, card: Card, geometry: Geometry, plan: Plan) -> tuple[Gate, ...]:
    """What the engine checks at start-up, in its order."""
    deployment, requested = account.deployment, account.requested.bytes or 0
    free = card.total_bytes - context_bytes(deployment, card)
    found = [
        Gate(
            "free memory at start",
            None if card.unified else free >= requested,
            f"asks for {human(requested)}; about {human(free)} of {human(card.total_bytes)} are free once CUDA"
            + (" and NCCL are up" if deployment.tp > 1 else " is up"),
        )
    ]
    left = account.available.bytes
    found.append(
        Gate("memory left for the KV cache", None if left is None else left > 0, f"{human(left)} left after the parts")
    )
    found.append(Gate(ONE_REQUEST, plan.fits, f"needs {human(plan.needed_bytes)}"))
    states = any(layer.state is not State.NONE for layer in geometry.layer_kinds)
    if states and rules(deployment.release).state_gate and not deployment.enforce_eager:
        rows, blocks = deployment.max_num_seqs or 0, plan.num_blocks
        found.append(
            Gate(
                "a state block for every sequence",
                None if blocks is None else rows <= blocks,
                f"max_num_seqs {rows} against {blocks if blocks is not None else 'unknown'} blocks",
            )
        )
    return tuple(found)


def context_bytes(deployment: Deployment, card: Card) -> int:
    """What CUDA and NCCL hold before the engine's first snapshot: 527 MiB on one H200, 1.43 to 1.9 GiB on two."""
    if deployment.tp * deployment.pp > 1 and card.linked:
        return 1900 * MIB
    return 1200 * MIB if card.name == "rtx-5090" else 640 * MIB
