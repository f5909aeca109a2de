"""Estimates and scores as text. Everything returns lines, nothing prints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .console import table
from .estimate import Estimate, PerRank, sentence
from .nearest import Way
from .readings import KvReading
from .scoring import MEASURED_LAST, Score, Summary
from .units import GIB, MIB, gib, human

Rows = list[list[str]]


def _aligned(rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> list[str]:
    """Rows as aligned columns; those in `numbers` end at their right edge."""
    return table(rows, right=lambda column: column in numbers)


def account(answer: Estimate) -> list[str]:
    """One estimate: the verdict, the account of the tightest rank, its parts, the KV cache, the gates."""
    rank = answer.per_rank
    lines = [sentence(answer), ""]
    lines += _aligned(_terms(answer, rank), [1])
    if rank.by or rank.mtp_by:
        lines += ["", *_aligned(_parts(rank), [1, 2])]
    lines += ["", *_cache(answer)]
    if len(answer.ranks) > 1:
        lines += ["", *_aligned(_ranks(answer.ranks), [1, 2, 3])]
    if answer.gates:
        gates = [[gate.name, _met(gate.met), gate.because] for gate in answer.gates]
        lines += ["", *_aligned([["gate", "met", "because"], *gates])]
    if answer.ways:
        lines += ["", *_aligned(_ways(answer.ways), [1, 2])]
    if answer.unmodelled:
        lines += ["", "not modelled:", *(f"  {reason}" for reason in answer.unmodelled)]
    lines += ["", f"rests on: {answer.evidence} for the weights; {answer.gpu_source} for the card"]
    if answer.calibrated:
        lines.append(answer.calibrated)
    if answer.remarks:
        lines += ["", *(f"- {remark}" for remark in answer.remarks)]
    if answer.kv_reading:
        lines += ["", *_reading(answer.kv_reading)]
    return lines


def _ways(ways: Sequence[Way]) -> Rows:
    rows = [["fits with", "KV GiB", "longest", "at the price of"]]
    for way in ways:
        rows.append([way.flags, gib(way.available_kv_bytes), f"{way.max_context or 0:,}", way.cost])
    return rows


def _met(met: bool | None) -> str:
    return "unknown" if met is None else "yes" if met else "NO"


def _terms(answer: Estimate, rank: PerRank) -> Rows:
    because = answer.because
    rows = [["per rank", "GiB", "because"]]
    for name, value, key in (
        ("card", rank.total_memory_bytes, "total"),
        ("requested", rank.requested_bytes, "requested"),
        ("- weights", rank.weights_bytes, "weights"),
        ("- MTP", rank.mtp_bytes, "drafter"),
        ("- activation", rank.activation_bytes, "activation"),
        ("- non-torch", rank.non_torch_bytes, "non_torch"),
        ("- CUDA graphs", rank.cudagraph_bytes, "graphs"),
    ):
        rows.append([name, gib(value), because[key]])
    if abs(rank.unexplained_bytes) >= MIB * 10:
        why = f"what a run of yours shows besides these; {answer.calibrated}"
        rows.append(["- unexplained", gib(rank.unexplained_bytes), why])
    known = rank.available_kv_bytes is not None
    margin = f"give or take {gib(rank.margin_bytes)}" if known else "a part of it is not known"
    rows.append(["= KV cache", gib(rank.available_kv_bytes), margin])
    if rank.host_pinned_bytes:
        rows.append(["host, pinned", gib(rank.host_pinned_bytes), "the n-gram table, in host memory: not on the card"])
    return [[name, value, why] for name, value, why in rows]


def _parts(rank: PerRank) -> Rows:
    """The weights by part, as loaded; the drafter's in a column of its own."""
    sizes = {name: rank.by.get(name, 0) + rank.mtp_by.get(name, 0) for name in {*rank.by, *rank.mtp_by}}
    names = sorted(sizes, key=lambda name: (-sizes[name], name))
    head = ["weights by part", "GiB", *(["MTP GiB"] if rank.mtp_by else [])]
    rows = [head]
    for name in names:
        row = [name, gib(rank.by.get(name, 0), 3)]
        rows.append(row + ([gib(rank.mtp_by.get(name, 0), 3)] if rank.mtp_by else []))
    rounding = (rank.weights_bytes or 0) - sum(rank.by.values())
    if rank.weights_bytes is not None and rounding:
        label = "allocator rounding" if rounding > 0 else "less, by your reading"
        rows.append([label, gib(rounding, 3), *([""] if rank.mtp_by else [])])
    return rows


def _cache(answer: Estimate) -> list[str]:
    kv = answer.kv
    if kv.tokens is None:
        further = f"; {kv.bytes_per_token:,} B a further token" if kv.bytes_per_token else ""
        return [f"KV cache: unknown{further}"]
    length = answer.deployment.get("max_model_len")
    return [
        f"KV cache {kv.dtype}: {kv.tokens:,} tokens in {kv.num_blocks:,} blocks of {kv.block_size} "
        f"({human(kv.bytes_per_block)} each, {kv.bytes_per_token:,} B a further token)",
        f"  at {length:,}: {kv.max_concurrency:.2f}x; one request of it needs {human(kv.needed_bytes)}; "
        f"longest context {kv.max_context:,}",
        f"  groups: {', '.join(kv.groups)}",
    ]


def _ranks(ranks: Iterable[PerRank]) -> Rows:
    rows = [["rank", "weights", "MTP", "KV cache"]]
    for rank in ranks:
        rows.append([str(rank.rank), gib(rank.weights_bytes), gib(rank.mtp_bytes), gib(rank.available_kv_bytes)])
    return rows


def comparison(answers: Sequence[Estimate]) -> list[str]:
    """Several estimates, a line each."""
    rows = [["checkpoint", "card", "tp", "kv", "mtp", "ple", "context", "weights", "MTP", "act.", "graphs", "other",
             "KV GiB", "tokens", "longest", "fits"]]  # fmt: skip
    for each in answers:
        rank, kv, asked = each.per_rank, each.kv, each.deployment
        rows.append([
            each.checkpoint, each.gpu, str(asked["tp"]), str(kv.dtype or asked.get("kv_cache_dtype")),
            str(asked["mtp"]), "host" if rank.host_pinned_bytes else "gpu" if rank.ple_bytes else "-",
            f"{asked.get('max_model_len') or 0:,}", gib(rank.weights_bytes), gib(rank.mtp_bytes),
            gib(rank.activation_bytes), gib(rank.cudagraph_bytes), gib(rank.non_torch_bytes),
            gib(rank.available_kv_bytes), "unknown" if kv.tokens is None else f"{kv.tokens:,}",
            "unknown" if kv.max_context is None else f"{kv.max_context:,}",
            {True: "yes", False: "NO", None: "unknown"}[each.fits],
        ])  # fmt: skip
    lines = table(rows, right=lambda column: column in (2, 4, *range(6, 15)))
    notes = [sentence(each) for each in answers if not each.fits]
    return [*lines, *([""] if notes else []), *notes]


def summary(rows: Sequence[tuple[str, Sequence[Summary]]]) -> list[str]:
    """The accuracy table: a block a set of points, a line a formula."""
    lines: list[str] = []
    for title, summaries in rows:
        cells = [[title, "term", "points", "silent", "mean |%|", "worst %", "mean |err|", "worst err", "worst point"]]
        for each in summaries:
            show = _count if each.term in ("kv_tokens", "block_size") else _bytes
            cells.append([
                each.formula, each.term, str(each.points), str(each.silent), _percent(each.mean_percent),
                _percent(each.worst_percent), show(each.mean_bytes), show(each.worst_bytes), each.worst_point,
            ])  # fmt: skip
        lines += [*table(cells, right=lambda column: 2 <= column <= 7), ""]
    return lines[:-1]


def how_to_read() -> list[str]:
    """What the words of the accuracy table promise, and what they do not."""
    return [
        "seen while fitting: coefficients were fitted on these runs. held out: no coefficient was fitted on it; but",
        "our own runs were looked at while mechanisms were sought, all except the three that were measured afterwards:",
        f"{', '.join(MEASURED_LAST)}. silent: runs a formula says nothing about.",
    ]


def passed_over(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Public runs that are no points, and why."""
    return _aligned([["not predicted", "because"], *map(list, rows)])


def scores(rows: Iterable[Score]) -> list[str]:
    """Formula by formula against each point, as given."""
    cells = [["formula", "point", "predicted", "measured", "error", "%", "held out", ""]]
    for each in rows:
        show = _count if each.term in ("kv_tokens", "block_size") else _bytes
        cells.append([
            each.formula, each.point, show(each.predicted), show(each.measured), show(each.error),
            _percent(each.error_percent), "yes" if each.held_out else "no", each.because[:90],
        ])  # fmt: skip
    return table(cells, right=lambda column: 2 <= column <= 5)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:+.3f}"


def _bytes(value: float | None) -> str:
    return "unknown" if value is None else f"{value / GIB:.3f} GiB"


def _count(value: float | None) -> str:
    return "unknown" if value is None else f"{value:,.0f}"


def _reading(found: KvReading) -> list[str]:
    """What two readings of a running engine say of the longest context, in proportion and block by block."""
    lines = [
        f"in proportion to the readings ({human(found.left_bytes)} left, {found.needed_tokens:,} tokens need "
        f"{human(found.needed_bytes)}): {found.in_proportion_tokens:,} tokens",
    ]
    if found.own_longest_tokens is not None:
        lines += [
            f"by blocks, with the plan above: {found.own_longest_tokens:,} tokens; {found.needed_tokens:,} tokens need "
            f"{human(found.own_needed_bytes)} here, {human(found.needed_bytes)} there",
            "  state blocks are kept at any length and blocks are whole: bytes are not in proportion to tokens",
        ]
    if found.own_needed_bytes is not None and abs(found.own_needed_bytes / found.needed_bytes - 1) > 0.02:
        lines.append("  that engine needs other bytes than this plan for one request: it planned otherwise")
    return lines
