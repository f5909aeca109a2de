"""The KV cache an engine plans: blocks, tokens, concurrency, and the longest context, from bytes left on a card.

    bytes_per_block = the widest group's pages
    num_blocks      = available bytes // bytes_per_block, of the rank that has fewest
    concurrency     = num_blocks / sum over groups of the blocks one request of max_model_len takes

Source: vllm 0.33.0 v1/core/kv_cache_planning.py get_kv_cache_configs, v1/core/kv_cache_utils.py
get_max_concurrency_for_kv_cache_config and get_kv_cache_capacity, the specs' max_memory_usage_bytes; releases.py says
what older releases did. Held against 19 measured H200 runs (vLLM 0.25.1) and the public logs that state enough: equal.
"""

from __future__ import annotations

from typing import NamedTuple

from .deployment import Deployment
from .errors import BadInput
from .facts import Quantization
from .geometry import Geometry
from .kv_groups import Group, Unplannable, groups
from .kv_specs import Layout, Spec, SpecKind, kv_specs
from .lengths import longest, served
from .releases import Rules, outside, rules


class Plan(NamedTuple):
    """What the engine would report. Numbers are None where something is not modelled."""

    block_size: int | None
    num_blocks: int | None
    tokens: int | None  # "GPU KV cache size"
    max_concurrency: float | None
    max_context: int | None  # longest single request that passes the start-up check, up to the model's positions
    bytes_per_token: int | None  # of the pool, for each further token of one long request, padding included
    bytes_per_block: int | None
    needed_bytes: int | None  # for one request of max_model_len
    fits: bool | None  # whether the start-up check passes
    dtype: str | None
    groups: tuple[Group, ...]
    unmodelled: tuple[str, ...]


def plan(
    geometry: Geometry, deployment: Deployment, available_bytes: int | None, quantization: Quantization | None = None
) -> Plan:
    """The plan of one deployment with `available_bytes` left for the KV cache on the tightest rank (None: unknown)."""
    layout = kv_specs(geometry, deployment, quantization)
    rule = rules(deployment.release)
    reasons = (*layout.unmodelled, *outside(deployment))
    length = served(geometry, deployment)
    if length is None:
        reasons += ("no max_position_embeddings: the longest context is unknown (pass --max-model-len)",)
    found: tuple[Group, ...] = ()
    try:
        found = groups(layout, rule)
    except Unplannable as refusal:
        reasons += (str(refusal),)
    if reasons or length is None or not found:
        dtype = layout.dtype.name if layout.dtype else None
        return Plan(None, None, None, None, None, None, None, None, None, dtype, found, reasons)
    sized = Sizing(found, layout, deployment, rule)
    return sized.plan(available_bytes, length, longest(geometry) or length)


class Sizing(NamedTuple):
    """Groups with what their sizes depend on: enough to answer for any number of bytes and any length."""

    groups: tuple[Group, ...]
    layout: Layout
    deployment: Deployment
    rule: Rules

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block of the pool: the widest group's, on the pipeline stage that caches most."""
        return max(max(stage) for stage in self._stages())

    def _stages(self) -> list[list[int]]:
        """Bytes of a block of each group, by pipeline stage; a stage holds the pages of its own layers only."""
        last = self.layout.layers - 1  # drafters live with the last decoder layer
        return [
            [sum(c.spec.page_bytes for c in g.caches if start <= min(c.layer, last) < stop) for g in self.groups]
            for start, stop in stage_bounds(self.layout.layers, self.deployment.pp)
        ]

    def blocks(self, length: int) -> int:
        """Blocks one request of `length` tokens takes from the pool, all groups together."""
        return sum(max(self._blocks_of(spec, length) for spec in set(group.specs)) for group in self.groups)

    def _blocks_of(self, spec: Spec, length: int) -> int:
        if spec.kind in (SpecKind.FULL, SpecKind.MLA):
            own = -(-length // self.deployment.dcp)
            return -(-own // spec.block_size)
        if spec.kind is SpecKind.RING:
            return 1
        if spec.kind is SpecKind.STATE:
            if self.layout.mode == "all":
                return -(-length // spec.block_size) + spec.speculative
            return (2 if self.layout.mode == "align" else 1) + spec.speculative
        if spec.kind is SpecKind.CHUNKED:
            return -(-min(spec.window + self.in_flight, length) // spec.block_size)
        return -(-min(spec.window - 1 + self.in_flight, length) // spec.block_size) + 1

    @property
    def in_flight(self) -> int:
        """Tokens scheduled and not yet settled, which a window keeps besides its own."""
        batch = self.deployment.max_num_batched_tokens
        if batch is None:
            raise BadInput("max_num_batched_tokens: expected a number, got none; windows hold tokens in flight")
        if not self.rule.in_flight_by_batches:
            return batch
        overlapped = self.deployment.async_scheduling is not False
        return batch * (self.deployment.pp + 1 if overlapped else self.deployment.pp)

    def needed_bytes(self, length: int) -> int:
        return self.blocks(length) * self.bytes_per_block

    def longest(self, available: int, limit: int) -> int:
        """The longest request, up to `limit` tokens, whose blocks fit; 0 if none does."""
        usable = available - self.bytes_per_block if self.rule.null_block else available
        if self.needed_bytes(1) > usable:
            return 0
        low, high = 1, limit
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.needed_bytes(middle) <= usable else (low, middle - 1)
        return low

    def plan(self, available: int | None, length: int, limit: int) -> Plan:
        per_block, need = self.bytes_per_block, self.needed_bytes(length)
        per_token = self._bytes_per_token()
        reported = min(spec.block_size for group in self.groups for spec in group.specs)
        block = self.layout.block_size
        dtype = self.layout.dtype.name if self.layout.dtype else None
        if available is None:
            empty = None, None, None, None
            return Plan(block, *empty, per_token, per_block, need, None, dtype, self.groups, ())
        count = max(available, 0) // per_block
        concurrency = count / self.blocks(length)
        if self.rule.tokens_by_concurrency:
            tokens = int(concurrency * length)
        else:
            tokens = count // len(self.groups) * reported * self.deployment.dcp
        context = self.longest(available, limit)
        fits = self.longest(available, length) >= length
        answer = count, tokens, concurrency, context
        return Plan(block, *answer, per_token, per_block, need, fits, dtype, self.groups, ())

    def _bytes_per_token(self) -> int:
        growing = [g for g in self.groups if any(s.kind in (SpecKind.FULL, SpecKind.MLA) for s in g.specs)]
        blocks = [min(spec.block_size for spec in group.specs) for group in growing]
        return sum(-(-self.bytes_per_block // (block * self.deployment.dcp)) for block in blocks)


def stage_bounds(layers: int, stages: int) -> list[tuple[int, int]]:
    """Half-open layer ranges of the pipeline stages, as the engine cuts them (distributed/utils.py get_pp_indices).

    What does not divide goes to the stages before the last, one layer each, from the back.
    """
    sizes = [layers // stages] * stages
    for i in range(layers % stages):
        sizes[-2 - i] += 1
    starts = [sum(sizes[:i]) for i in range(stages)]
    return [(start, start + size) for start, size in zip(starts, sizes, strict=True)]
