"""The documents of `fit gates`, and their text: what one engine version accepts on one card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .console import table as aligned
from .engines import AttentionGate, KernelGate, Table, attention_gates, formats, linear_gates, meaning, moe_gates
from .flags import ignored_flags

Layer = tuple[str, int, str]
"""An attention layer as the gates see it: kind, head size, KV dtype."""

USUAL_LAYERS: tuple[Layer, ...] = tuple(
    (kind, size, kv)
    for kind, size in (("gqa", 128), ("gqa", 256), ("sinks", 64), ("mla", 576), ("mla_sparse", 576))
    for kv in ("bfloat16", "fp8_e4m3")
)


def gates_document(
    table: Table, capability: str, *, source: str, layers: Sequence[Layer] = USUAL_LAYERS,
    only: Sequence[str] | None = None, parallel: str = "tp",
) -> dict[str, Any]:  # fmt: skip
    """`fit gates --json` for a card: attention rows for these layers, linear and expert kernels for these formats.

    `source` is "live" or "shipped". A layer or format the table was not asked about has no rows, and is named in
    `unknown`. Raises BadInput for a capability the table does not hold."""
    wanted = formats(table, capability) if only is None else tuple(only)
    attention, unknown = [], []
    for kind, size, kv in layers:
        gates = attention_gates(table, capability, kind, size, kv)
        if gates is None:
            unknown.append(f"attention {kind} {size} {kv}")
            continue
        attention += [_attention_row(kind, size, kv, gate) for gate in gates]
    linear = [(name, linear_gates(table, capability, name)) for name in wanted]
    moe = [(name, moe_gates(table, capability, name, parallel=parallel)) for name in wanted]
    unknown += [f"format {name}" for name, gate in linear if gate is None]
    return {
        "engine": f"vllm {table['version']}", "capability": capability, "source": source, "date": table["date"],
        "notes": table["notes"], "attention": attention,
        "moe": [_kernel_row(gate) for _, gate in moe if gate],
        "linear": [_kernel_row(gate) for _, gate in linear if gate],
        "ignored_flags": [flag.document() for flag in ignored_flags(table["version"])], "unknown": unknown,
    }  # fmt: skip


def _attention_row(kind: str, size: int, kv: str, gate: AttentionGate) -> dict[str, Any]:
    return {"kind": kind, "kv_dtype": kv, "head_size": size, "backend": gate.backend, "accepted": gate.accepted,
            "reasons": list(gate.reasons), "rank": gate.rank}  # fmt: skip


def _kernel_row(gate: KernelGate) -> dict[str, Any]:
    row: dict[str, Any] = {"format": gate.format, "picked": gate.picked, "accepted": list(gate.accepted),
                           "refused": dict(gate.refused), "meaning": meaning(gate.picked)}  # fmt: skip
    return row | ({"refusal": gate.refusal} if gate.refusal else {})


def show_gates(document: Mapping[str, Any]) -> list[str]:
    """The document as text: per attention layer what is chosen, accepted and refused; per format the kernels picked."""
    lines = [f"{document['engine']} on capability {document['capability']} ({document['source']}, {document['date']};"
             f" {document['notes']})"]  # fmt: skip
    for (kind, size, kv), rows in _by_layer(document["attention"]).items():
        lines += ["", f"attention {kind}, head size {size}, KV {kv}"]
        body = [["", "backend", "because"]]
        body += [[_verdict(row), row["backend"], "; ".join(row["reasons"])] for row in rows]
        lines += [f"  {line}" for line in aligned(body)]
    experts = {row["format"]: row for row in document["moe"]}
    body = [["format", "linear", "experts", "which means"]]
    for row in document["linear"]:
        moe = experts.get(row["format"], {})
        words = f"refused: {row['refusal'].splitlines()[0]}" if "refusal" in row else moe.get("meaning", row["meaning"])
        body.append([row["format"], row["picked"] or "-", moe.get("picked") or "-", words])
    lines += ["", *aligned(body)]
    if document["ignored_flags"]:
        lines += ["", "flags accepted and not obeyed"]
        body = [["flag", "becomes", "the log says"]]
        body += [[flag["flag"], flag["becomes"], flag["log"] or "nothing"] for flag in document["ignored_flags"]]
        lines += [f"  {line}" for line in aligned(body)]
    lines += [f"unknown: {name}" for name in document["unknown"]]
    return lines


def _by_layer(rows: Sequence[Mapping[str, Any]]) -> dict[Layer, list[Mapping[str, Any]]]:
    layers: dict[Layer, list[Mapping[str, Any]]] = {}
    for row in rows:
        layers.setdefault((row["kind"], row["head_size"], row["kv_dtype"]), []).append(row)
    return layers


def _verdict(row: Mapping[str, Any]) -> str:
    if not row["accepted"]:
        return "REFUSED"
    return "CHOSEN" if row["rank"] == 0 else "ACCEPTED"
