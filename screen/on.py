"""Gates that ask the engine: whether a release has what a checkpoint needs on named cards, by its own tables.

The registry of architectures, the kernels picked for a quantisation format, the attention backends for a layer and a
KV dtype, what divides over the ranks, and flags that do not do what they say. What a config decides is asked before any
header is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from formulas.asked import Asked, Stored, attention_asked, format_asked, qsa_refusal, stored_formats
from formulas.engines import (
    FOREIGN,
    AttentionGate,
    KernelGate,
    attention_gates,
    linear_gates,
    meaning,
    moe_gates,
    since,
    unreadable,
)
from formulas.facts import Facts, Stack
from formulas.flags import obeyed_otherwise
from formulas.ngram import table_is_pinned
from formulas.refusals import Refusal
from formulas.units import human
from formulas.weights import RankWeights, weights_of

from .chain import Criteria, Evidence, Gate, Known
from .findings import Answer, Outcome, Source, note, passed, reject, some, unknown
from .target import Engine


def _vllm(engine: Engine) -> str:
    return f"vllm {engine.target.deployment.version}"


def _limit(engine: Engine) -> str:
    return f"{_vllm(engine)}, {engine.target.name}, capability {engine.target.deployment.capability}"


# Architectures and formats


def architecture(known: Known, criteria: Criteria) -> Iterator[Answer]:
    """Whether the release has the architecture, by its own registry."""
    engine, name = criteria.engine, known.facts.architecture if known.facts else None
    if engine is None or name is None:
        return
    stands, release = since(engine.registries, name), engine.target.deployment.release
    limit, read = _vllm(engine), engine.registries["releases"]
    if engine.table is not None and name in engine.table["architectures"]:
        first = f", as every release since {stands.first}" if stands and not stands.oldest_read else ""
        yield passed(f"{limit} has {name}{first}", name, limit)
    elif stands is None:
        code = ", with code from the repo (--trust-remote-code)" if _has_code(known) else ""
        yield unknown(f"no release of vllm from {read[0]} to {read[-1]} has {name}: whether its Transformers backend "
                      f"runs it{code} is not known", name, limit)  # fmt: skip
    elif release < _release(stands.first):
        yield reject(f"{limit} has no {name}: it came with {stands.first}", name, limit)
    elif stands.last is not None and release > _release(stands.last):
        yield reject(f"{limit} has {name} no more: the last release with it is {stands.last}", name, limit)
    else:
        yield passed(f"{limit} has {name}, which came with {stands.first} or earlier", name, limit)


def _release(version: str) -> tuple[int, ...]:
    """The minor release: of each one version was read."""
    major, minor, *_ = version.split(".")
    return (int(major), int(minor), 0)


def _has_code(known: Known) -> bool:
    config = known.bundle.files.get("config.json") if known.bundle else None
    return bool(config and config.get("auto_map"))


def reader(known: Known, criteria: Criteria) -> Iterator[Answer]:
    """Formats that no stock engine reads."""
    quantization = known.facts.quantization if known.facts else None
    if criteria.engine is not None and quantization is not None and (why := unreadable(quantization.method)):
        yield reject(f"{quantization.method}: {why}", quantization.method, _vllm(criteria.engine))


def declared_kernels(known: Known, criteria: Criteria) -> Iterator[Answer]:
    """A format the config declares and the engine refuses on this card costs no header."""
    if known.facts and known.facts.quantization and not known.facts.quantization.by_role:
        yield from (answer for answer in kernels(known, criteria) if answer.outcome is Outcome.REJECT)


def kernels(known: Known, criteria: Criteria) -> Iterator[Answer]:
    """The kernels the engine picks for each format, what it falls back to, or its refusal."""
    engine, facts = criteria.engine, known.facts
    if engine is None or facts is None:
        return
    geometry = facts.geometry
    for stored in stored_formats(facts):
        name = format_asked(stored.format, facts.quantization, geometry.text_model_type if geometry else None)
        gate = None if name is None else _kernel_gate(engine, name, stored.experts)
        drafts = stored.stack is Stack.MTP and not engine.target.deployment.mtp
        if gate is None:
            told = note if stored.stack is Stack.MTP else unknown
            yield told(f"{stored.what} in {stored.format}: {_no_table(engine)}", stored.format, _limit(engine))
        else:
            yield _kernel_answer(engine, stored, gate, drafts)


def _no_table(engine: Engine) -> str:
    if engine.table is None:
        return f"no table ships for {_vllm(engine)}; which kernel it picks is not known (`fit gates --live` asks it)"
    return f"{_vllm(engine)} was not asked about it; which kernel it picks is not known (`fit X --live` asks it)"


def _kernel_gate(engine: Engine, name: str, experts: bool) -> KernelGate | None:
    """The table's answer for the libraries and the parallelism of this deployment."""
    asked = engine.target.deployment
    if engine.table is None or asked.capability is None:
        return None
    modes: Mapping[str, Mapping[str, object]] = engine.table["capabilities"][asked.capability]["formats"]
    hidden = [mode for library in sorted(asked.without) if (mode := f"without {library}") in modes]
    if len(hidden) > 1:
        return None
    mode = hidden[0] if hidden else "ep" if asked.expert_parallel and name in modes.get("ep", {}) else "tp"
    if experts:
        return moe_gates(engine.table, asked.capability, name, parallel=mode)
    return linear_gates(engine.table, asked.capability, name, parallel="tp" if mode == "ep" else mode)


def _kernel_answer(engine: Engine, stored: Stored, gate: KernelGate, idle: bool) -> Answer:
    """`idle`: they are not loaded here, so that what refuses them decides nothing."""
    limit, what = _limit(engine), f"{stored.what} in {stored.format}"
    observed = {"format": gate.format, "picked": gate.picked}
    if gate.picked is None:
        words = gate.refusal or "; ".join(f"{name}: {why}" for name, why in list(gate.refused.items())[:3])
        words = words.strip().splitlines()[0] if words else "no kernel takes it"
        answer = note if idle or words.startswith("Please install") else reject
        return answer(f"{what}: {_vllm(engine)} refuses, {words}", observed, limit)
    does = meaning(gate.picked)
    narrow = stored.format.startswith(("fp8", "nvfp4", "mxfp")) and not stored.format.endswith("a16")
    falls_back = narrow and does.startswith(("weight-only", "emulated"))
    return (note if falls_back else passed)(f"{what}: {_vllm(engine)} runs {gate.picked}; {does}", observed, limit)


# Attention


def attention(known: Known, criteria: Criteria) -> Iterator[Answer]:
    """An attention backend for every kind of layer and the KV dtype, of the target and of the drafter."""
    engine, facts = criteria.engine, known.facts
    if engine is None or facts is None or facts.geometry is None:
        return
    geometry, asked_for = facts.geometry, engine.target.deployment
    stated = facts.quantization.kv_cache_dtype if facts.quantization else None
    for who, kinds in (("", geometry.layer_kinds), ("the drafter's ", geometry.mtp_kinds)):
        for asked in attention_asked(kinds, geometry, asked_for, facts.quantization):
            refused = None
            if asked.bound is not None:
                refused = qsa_refusal(geometry, asked_for, facts.quantization)
            answer = _attention_answer(engine, asked, who, refused)
            idle = who and not asked_for.mtp and answer.outcome is not Outcome.PASS
            yield answer._replace(outcome=Outcome.NOTE) if idle else answer
    if stated and asked_for.kv_cache_dtype == "auto":
        yield note(f"--kv-cache-dtype auto becomes {stated}: the checkpoint asks for it", stated, source=Source.CONFIG)


def _attention_answer(engine: Engine, asked: Asked, who: str, refused: str | None) -> Answer:
    limit, deployment = _limit(engine), engine.target.deployment
    if asked.reason is not None:
        return unknown(f"{who}attention: {asked.reason}; which backend runs it is not known", None, limit)
    observed = {"kind": asked.kind, "head_size": asked.head_size, "kv_dtype": asked.kv_dtype}
    what = f"{who}{asked}"
    if refused is not None:
        return reject(f"{what}: {_vllm(engine)} refuses, {refused}", observed, limit)
    if asked.bound is not None:
        return passed(f"{what}: {asked.bound}, which comes with the model", observed | {"backend": asked.bound}, limit)
    gates = None
    if engine.table is not None and deployment.capability is not None:
        gates = attention_gates(engine.table, deployment.capability, asked.kind, asked.head_size, asked.kv_dtype)
    if gates is None:
        return unknown(f"{what}: {_no_table(engine).replace('kernel', 'backend')}", observed, limit)
    forced = deployment.attention_backend
    if forced is not None:
        gates = tuple(gate._replace(rank=0) for gate in gates if gate.backend == forced.upper())
    chosen = next((gate for gate in gates if gate.accepted and gate.rank == 0), None)
    why = _refusals([gate for gate in gates if not gate.accepted])
    if chosen is None:
        none = f"--attention-backend {forced} is refused" if forced else "no attention backend takes it"
        return reject(f"{what}: {none} in {_vllm(engine)} on capability {deployment.capability} ({why})",
                      observed, limit)  # fmt: skip
    others = [gate.backend for gate in gates if gate.accepted and gate.rank]
    beside = f"; also {', '.join(others)}" if others else ""
    observed |= {"backend": chosen.backend}
    return passed(f"{what}: {_vllm(engine)} runs {chosen.backend}{beside}", observed, limit)


def _refusals(gates: Sequence[AttentionGate]) -> str:
    """The refusals that come nearest to acceptance, in the engine's words."""
    own = sorted((gate for gate in gates if not FOREIGN.match(gate.backend)), key=lambda gate: len(gate.reasons))
    return some([f"{gate.backend}: {', '.join(gate.reasons)}" for gate in own], 3) or "it is no backend of this engine"


# Ranks and the n-gram table


def _held(engine: Engine, facts: Facts) -> RankWeights:
    return weights_of(facts, engine.target.deployment)


def declared_ranks(known: Known, criteria: Criteria) -> Iterator[Answer]:
    """What the config's own sizes refuse costs no header."""
    if criteria.engine is not None and known.facts is not None and known.facts.geometry is not None:
        yield from _refused(criteria.engine, _held(criteria.engine, known.facts))


def ranks(known: Known, criteria: Criteria) -> Iterator[Answer]:
    """Whether heads, MLPs, experts and FP8 tiles divide over the ranks as the engine divides them."""
    engine, facts = criteria.engine, known.facts
    if engine is None or facts is None or facts.tensor_groups is None:
        return
    held = _held(engine, facts)
    refused = list(_refused(engine, held))
    yield from refused
    if not refused and not held.unmodelled:
        yield passed(f"everything divides over {engine.target.name} by {_vllm(engine)}'s rules", None, _limit(engine))


def _refused(engine: Engine, held: RankWeights) -> Iterator[Answer]:
    for reason in held.unmodelled:
        if isinstance(reason, Refusal):
            yield reject(f"{_vllm(engine)}: {reason}", None, _limit(engine))


def table_place(known: Known, criteria: Criteria) -> Iterator[Answer]:
    """What an n-gram table asks of the deployment. Source: vllm 0.33.0 models/qwen4_exp/nvidia/model_state.py,
    config/engram.py."""
    engine, facts = criteria.engine, known.facts
    if engine is None or facts is None or facts.geometry is None or facts.geometry.ngram is None:
        return
    asked = engine.target.deployment
    if asked.pp > 1:
        yield reject(f"{_vllm(engine)}: N-gram PLE embedding currently requires pipeline_parallel_size=1; "
                     f"got {asked.pp}", asked.pp, 1)  # fmt: skip
    elif table_is_pinned(asked) and (pinned := _held(engine, facts).host_pinned):
        default = " by default (--ple gpu keeps it on the card)" if asked.ple == "default" else ""
        because = (f"{_vllm(engine)} pins the n-gram table in host memory{default}: {human(pinned)} a rank, "
                   f"{human(pinned * asked.tp)} on a host with all {asked.tp} of them")  # fmt: skip
        yield note(because, pinned, _limit(engine))


# Flags


def flags(known: Known, criteria: Criteria) -> Iterator[Answer]:
    """Flags given with the cards that this release ignores or rewrites."""
    if criteria.engine is not None:
        target = criteria.engine.target
        for text in obeyed_otherwise(target.words, target.deployment.version):
            yield note(text, None, _vllm(criteria.engine))


CONFIG, HEADERS, ENGINE = Evidence.CONFIG, Evidence.HEADERS, Source.ENGINE

DECLARED: tuple[Gate, ...] = (
    Gate("engine-architecture", CONFIG, ENGINE, architecture, "the engine's registry, release by release; --on"),
    Gate("engine-reader", CONFIG, ENGINE, reader, "formats no stock engine reads; --on"),
    Gate("engine-format", CONFIG, ENGINE, declared_kernels, "the declared format among the engine's kernels; --on"),
    Gate("engine-attention", CONFIG, ENGINE, attention, "attention backends by kind, head size and KV dtype; --on"),
    Gate("engine-sizes", CONFIG, ENGINE, declared_ranks, "heads, MLPs and experts over the ranks, by config; --on"),
    Gate("engine-flags", CONFIG, ENGINE, flags, "engine options of --on that do not do what they say"),
)  # fmt: skip
STORED: tuple[Gate, ...] = (
    Gate("engine-kernels", HEADERS, ENGINE, kernels, "the stored formats among the engine's kernels; --on"),
    Gate("engine-ranks", HEADERS, ENGINE, ranks, "tensors as the engine divides them over the ranks; --on"),
    Gate("engine-table", HEADERS, ENGINE, table_place, "where the engine puts an n-gram table; --on"),
)  # fmt: skip
