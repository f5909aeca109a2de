"""The documents of `fit gates`, and their text: what one engine version accepts on one card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .asked import attention_asked, format_asked, qsa_refusal, stored_formats
from .console import table as aligned
from .deployment import Deployment
from .engines import AttentionGate, KernelGate, Table, attention_gates, formats, linear_gates, meaning, moe_gates
from .errors import BadInput
from .facts import Facts
from .flags import ignored_flags
from .geometry import Geometry

Layer = tuple[str, int, str]
"""An attention layer as the gates see it: kind, head size, KV dtype."""

HEAD_SIZES_OF: dict[str, tuple[int, ...]] = {
    "gqa": (128, 256), "gqa_sliding": (128,), "gqa_mm_prefix": (128,), "sinks": (64,), "mla": (576,),
    "mla_sparse": (576,),
}  # fmt: skip
"""The kinds of attention layer the tables hold, each with the head sizes most models have."""
USUAL_LAYERS: tuple[Layer, ...] = tuple(
    (kind, size, kv)
    for kind, size in (("gqa", 128), ("gqa", 256), ("sinks", 64), ("mla", 576), ("mla_sparse", 576))
    for kv in ("bfloat16", "fp8_e4m3")
)


def usual_layers(kind: str | None, head_size: int | None, kv_dtype: str | None) -> tuple[Layer, ...]:
    """The layers a question is about: the usual ones, but for what it names. Raises BadInput for an unknown kind."""
    if kind is None and head_size is None and kv_dtype is None:
        return USUAL_LAYERS
    if kind is not None and kind not in HEAD_SIZES_OF:
        raise BadInput(f"--attention {kind!r}: expected one of {', '.join(HEAD_SIZES_OF)}, got something else")
    kinds = [kind] if kind else list(dict.fromkeys(name for name, *_ in USUAL_LAYERS))
    dtypes = [kv_dtype] if kv_dtype else ["bfloat16", "fp8_e4m3"]
    return tuple((name, size, kv) for name in kinds for size in ([head_size] if head_size else HEAD_SIZES_OF[name])
                 for kv in dtypes)  # fmt: skip


class Needed(NamedTuple):
    """What a checkpoint needs of an engine: attention layers and formats to look up, rows of attention it brings."""

    layers: Sequence[Layer]
    linear: Sequence[str] | None = None  # formats of linear layers, and of experts; None: all
    experts: Sequence[str] | None = None
    bound: Sequence[dict[str, Any]] = ()


def needed(facts: Facts, deployment: Deployment) -> Needed:
    """What this checkpoint needs, target and drafter together. A format the tables have no word for is left to the
    document's `unknown`."""
    geometry, quantization = facts.geometry or Geometry(), facts.quantization
    asked = attention_asked((*geometry.layer_kinds, *geometry.mtp_kinds), geometry, deployment, quantization)
    layers = tuple((each.kind, each.head_size, each.kv_dtype) for each in asked if not each.bound and not each.reason)
    refused = qsa_refusal(geometry, deployment, quantization)
    bound = tuple(
        {"kind": each.kind, "kv_dtype": each.kv_dtype, "head_size": each.head_size, "backend": each.bound,
         "accepted": refused is None, "reasons": [refused] if refused else [], "rank": None if refused else 0}
        for each in asked if each.bound
    )  # fmt: skip
    names: dict[bool, list[str]] = {False: [], True: []}
    for each in stored_formats(facts):
        method = quantization.method if quantization is not None else None
        name = format_asked(each.format, quantization, geometry.text_model_type)
        names[each.experts].append(name or f"{each.format} by {method}")
    return Needed(layers, tuple(dict.fromkeys(names[False])), tuple(dict.fromkeys(names[True])), bound)


def is_accepted(document: Mapping[str, Any]) -> bool:
    """Whether every attention layer of the document has a backend and every format its kernels, as far as known."""
    attention = all(any(row["rank"] == 0 for row in rows) for rows in _by_layer(document["attention"]).values())
    refused = [row for row in (*document["linear"], *document["moe"]) if row["picked"] is None]
    return attention and not refused and not document["unknown"]


def gates_document(
    table: Table, capability: str, wanted: Needed = Needed(USUAL_LAYERS), *, source: str, parallel: str = "tp"
) -> dict[str, Any]:
    """`fit gates --json` for a card: attention rows for the layers wanted, linear and expert kernels for the formats.

    `source` is "live" or "shipped". A layer or format the table was not asked about has no rows, and is named in
    `unknown`. Raises BadInput for a capability the table does not hold."""
    linear, experts = (formats(table, capability) if names is None else names for names in wanted[1:3])
    attention, unknown = list(wanted.bound), []
    for kind, size, kv in wanted.layers:
        gates = attention_gates(table, capability, kind, size, kv)
        if gates is None:
            unknown.append(f"attention {kind} {size} {kv}")
            continue
        attention += [_attention_row(kind, size, kv, gate) for gate in gates]
    lines = {name: linear_gates(table, capability, name) for name in linear}
    moe = {
        name: moe_gates(table, capability, name, parallel=parallel) or moe_gates(table, capability, name)
        for name in experts
    }
    unknown += [f"format {name}" for name in dict.fromkeys((*lines, *moe)) if not (lines.get(name) or moe.get(name))]
    return {
        "engine": f"vllm {table['version']}", "capability": capability, "source": source, "date": table["date"],
        "notes": table["notes"], "attention": attention,
        "moe": [_kernel_row(gate) for gate in moe.values() if gate],
        "linear": [_kernel_row(gate) for gate in lines.values() if gate],
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
    notes = f"; {document['notes']}" if document["notes"] else ""
    where = f"{document['source']}, {document['date']}{notes}"
    lines = [f"{document['engine']} on capability {document['capability']} ({where})"]
    for (kind, size, kv), rows in _by_layer(document["attention"]).items():
        lines += ["", f"attention {kind}, head size {size}, KV {kv}"]
        body = [["", "backend", "because"]]
        body += [[_verdict(row), row["backend"], "; ".join(row["reasons"])] for row in rows]
        lines += [f"  {line}" for line in aligned(body)]
    lines += _formats(document)
    if document["ignored_flags"]:
        lines += ["", "flags accepted and not obeyed"]
        body = [["flag", "becomes", "the log says"]]
        body += [[flag["flag"], flag["becomes"], flag["log"] or "nothing"] for flag in document["ignored_flags"]]
        lines += [f"  {line}" for line in aligned(body)]
    lines += [f"unknown: {name}" for name in document["unknown"]]
    return lines


def _formats(document: Mapping[str, Any]) -> list[str]:
    """A row a format: what linear layers and experts run on; what the latter, or else the former, means."""
    linear, experts = ({row["format"]: row for row in document[part]} for part in ("linear", "moe"))
    body = [["format", "linear", "experts", "which means"]]
    for name in dict.fromkeys((*linear, *experts)):
        rows = [row for row in (experts.get(name), linear.get(name)) if row]
        refusal = next((row["refusal"] for row in rows if "refusal" in row), None)
        words = f"refused: {refusal.splitlines()[0]}" if refusal else rows[0]["meaning"]
        picked = [part[name]["picked"] or "none" if name in part else "-" for part in (linear, experts)]
        body.append([name, *picked, words])
    return ["", *aligned(body)] if body[1:] else []


def _by_layer(rows: Sequence[Mapping[str, Any]]) -> dict[Layer, list[Mapping[str, Any]]]:
    layers: dict[Layer, list[Mapping[str, Any]]] = {}
    for row in rows:
        layers.setdefault((row["kind"], row["head_size"], row["kv_dtype"]), []).append(row)
    return layers


def _verdict(row: Mapping[str, Any]) -> str:
    if not row["accepted"]:
        return "REFUSED"
    return "CHOSEN" if row["rank"] == 0 else "ACCEPTED"
