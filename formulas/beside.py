"""The engine's own build of one rank beside the closed form: bytes by part, and what explains a difference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .console import table
from .deployment import Deployment
from .engines import spoken
from .facts import Document, Facts
from .refusals import Refusal
from .units import human
from .weights import RankWeights, weights_of

EQUAL = 0.003  # of the rank's bytes
HOST = "host:"  # marks parts in pinned memory


class PartBeside(Document):
    """Bytes of one part of the rank, as the engine built it and as the closed form has it."""

    part: str
    live_bytes: int
    closed_bytes: int
    because: str | None = None  # what explains the difference; None where there is none to speak of


class Beside(Document):
    """One rank, built by the engine itself for a stated card, beside the closed form. Host memory is not in it."""

    engine: str
    capability: str
    rank: int
    refused: str | None  # the engine's words, and where it said them; what was built before is still compared
    closed_refused: tuple[str, ...]
    stage: str  # loaded, or created where the engine refused before its kernels prepared the weights
    parts: tuple[PartBeside, ...]
    live_bytes: int | None
    closed_bytes: int | None
    live_allocated_bytes: int | None  # "model loading took" of the target alone, by the allocator's rules
    closed_allocated_bytes: int | None
    live_mtp_bytes: int | None
    closed_mtp_bytes: int | None
    attention_backends: dict[str, int]  # layers by `Class:BACKEND`
    kernels: dict[str, int]  # layers by `Method/Kernel`
    kv_dtype: str | None

    @property
    def agrees(self) -> bool | None:
        """Whether both have the same bytes, to 0.3 %, or both refuse; None where the engine got to no bytes."""
        if self.refused and self.closed_refused:
            return True
        if self.live_bytes is None or self.closed_bytes is None:
            return None
        return not self.refused and abs(self.live_bytes - self.closed_bytes) <= EQUAL * self.live_bytes


def beside(answer: Mapping[str, Any], facts: Facts, deployment: Deployment) -> Beside:
    """The engine's answer to `build_question` beside the closed form for the same rank."""
    said = answer["models"][0]
    rank = said.get("rank") or 0
    held = weights_of(facts, deployment, rank)
    loaded = "post" in said
    live = said.get("post") or said
    mine = held.by if loaded else held.created_by
    theirs = {part: size for part, size in (live.get("by") or {}).items() if not part.startswith(HOST)}
    as_declared = weights_of(facts.model_copy(update={"tensor_groups": None}), deployment, rank)
    parts = tuple(
        PartBeside(part=part, live_bytes=theirs.get(part, 0), closed_bytes=mine.get(part, 0),
                   because=_because(part, theirs, held, as_declared, said, loaded))
        for part in sorted({*theirs, *mine}, key=lambda part: -theirs.get(part, 0))
        if theirs.get(part) or mine.get(part)
    )  # fmt: skip
    refused = said.get("refused")
    drafter = said.get("drafter")
    return Beside(
        engine=f"vllm {answer['vllm']}",
        capability=str(answer["capability"]),
        rank=rank,
        refused=f"{spoken(refused['message'])} ({refused['where']})" if refused else None,
        closed_refused=tuple(str(reason) for reason in held.unmodelled if isinstance(reason, Refusal)),
        stage="loaded" if loaded else "created",
        parts=parts,
        live_bytes=sum(theirs.values()) if theirs else None,
        closed_bytes=sum(mine.values()) if mine else None,
        live_allocated_bytes=live.get("allocated_split20") if loaded else None,
        closed_allocated_bytes=held.allocated if loaded else None,
        live_mtp_bytes=drafter["own"] if drafter else None,
        closed_mtp_bytes=sum(held.mtp_by.values()) if drafter else None,
        attention_backends=said.get("attn_backends") or {},
        kernels=said.get("kernels") or {},
        kv_dtype=said.get("kv_cache_dtype"),
    )


def _because(
    part: str, theirs: Mapping[str, int], held: RankWeights, declared: RankWeights, said: Mapping[str, Any],
    loaded: bool,
) -> str | None:  # fmt: skip
    """What explains the difference of one part; None where it is less than a thousandth of the rank."""
    live, whole = theirs.get(part, 0), sum(theirs.values())
    mine = (held.by if loaded else held.created_by).get(part, 0)
    if abs(live - mine) <= 0.001 * whole:
        return None
    if abs(live - (declared.by if loaded else declared.created_by).get(part, 0)) <= 0.001 * whole:
        return "the engine was shown config.json alone, and the headers store this otherwise than it declares"
    built = said.get("by") or {}
    if loaded and abs(built.get(part, 0) - held.created_by.get(part, 0)) <= 0.001 * whole:
        kernels = ", ".join(name for name in said.get("kernels") or {} if "Unquantized" not in name)
        return f"created alike; the kernels of this environment change it while loading ({kernels or 'unquantised'})"
    if held.unmodelled:
        return "; ".join(str(reason) for reason in held.unmodelled[:2])
    strange = (said.get("post") or said).get("unclassified") or []
    if part == "other" and any(name.endswith("_mtp_hidden_buffer") for name in strange):
        return "the hidden states handed to the drafter, which the closed form counts with the drafter"
    return f"not explained ({', '.join(strange[:3])})" if part == "other" and strange else "not explained"


def beside_lines(found: Beside) -> list[str]:
    """As text: a row a part, then what the engine said besides bytes: its refusal, its backends, its kernels."""
    rows = [[f"rank {found.rank}, {found.stage}", found.engine, "closed form", "difference", "because"]]
    for part in found.parts:
        rows.append(_row(part.part, part.live_bytes, part.closed_bytes, part.because))
    rows.append(_row("in all", found.live_bytes, found.closed_bytes))
    if found.live_allocated_bytes is not None:
        rows.append(_row("as the allocator counts", found.live_allocated_bytes, found.closed_allocated_bytes))
    if found.live_mtp_bytes is not None:
        rows.append(_row("the drafter adds", found.live_mtp_bytes, found.closed_mtp_bytes))
    lines = table(rows, right=lambda column: column in (1, 2, 3))
    if found.refused:
        lines.append(f"{found.engine} refuses: {found.refused}")
        lines += [f"closed form: {reason}" for reason in found.closed_refused] or ["closed form: no refusal is known"]
    else:
        lines += [f"{found.engine} starts; the closed form expected: {reason}" for reason in found.closed_refused]
    for what, counts in (("attention", found.attention_backends), ("kernels", found.kernels)):
        if counts:
            lines.append(f"{what}: {', '.join(f'{name} x {number}' for name, number in counts.items())}")
    return lines


def _row(name: str, live: int | None, closed: int | None, because: str | None = None) -> list[str]:
    difference = "-"
    if live is not None and closed is not None and live:
        difference = f"{100 * (closed - live) / live:+.3f} %" if closed != live else "0"
    return [name, human(live), human(closed), difference, because or ""]
