"""The modules an engine builds on a rank from a checkpoint's weights: loaded or not, merged, divided, in its order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod

from .architectures import Unexpected, ngram_rows
from .buffers import attention_buffers, model_buffers, sees, tower_buffers
from .families import FAMILIES
from .geometry import Attention
from .kernels import ExpertShape, Tensors, cdiv, expert_refusal, expert_tensors, linear_tensors, up
from .ngram import table_format, table_is_pinned
from .place import Built, Place
from .refusals import Cut, Refusal, block_refusal, refusals
from .schemes import PLAIN, Kind, Scheme, Weight
from .sharding import Hold, Part, Rule, rule_for
from .tensors import DTYPE_BITS


def build(known: Iterable[Weight], place: Place, unmodelled: list[str]) -> Iterator[Built]:
    """The modules the engine builds on the rank, in its order; reasons for weights it has no rule for are appended."""
    layers: dict[tuple[str, int | None], list[Weight]] = {}
    for weight in known:
        layers.setdefault((weight.stack, weight.layer), []).append(weight)
    first_attention = True
    order = {"vision": 0, "audio": 1, "main": 2, "mtp": 3}
    tail = {"norm", "norm_f", "final_layernorm", "ln_f", "lm_head", "output", "hyper_connection_mixer"}

    def position(key: tuple[str, int | None]) -> tuple[int, int]:
        return order[key[0]], -1 if key[1] is None else key[1]

    unmodelled += refusals(place)
    if place.deployment.mtp and not any(stack == "mtp" for stack, _ in layers):
        unmodelled.append("the checkpoint has no drafter (MTP) to speculate with; its weights are unknown")
    late: list[Weight] = []
    for key in sorted(layers, key=position):
        members = layers[key]
        if key[1] is None and key[0] == "main":
            late = [w for w in members if w.name.split(".")[0] in tail and place.stage == place.deployment.pp - 1]
            members = [w for w in members if w.name.split(".")[0] not in tail]
        if key[0] == "mtp" and late:
            yield from _layer("main", late, place, unmodelled)
            late = []
        if not _is_loaded(key[0], place) or not _is_own_stage(key, place):
            continue
        if key == ("main", None) and place.stage:
            # Later stages have no embedding, unless the last one needs it as its head.
            is_head = place.geometry.tie_word_embeddings and place.stage == place.deployment.pp - 1
            members = members if is_head else []
        modules = list(_layer(key[0], members, place, unmodelled))
        if key[1] is not None and key[0] in ("main", "mtp"):
            after = sum(module.part in (Part.ATTENTION, Part.LINEAR_ATTENTION) for module in modules)
            modules[after:after] = _buffers(key[0], key[1], place, first=first_attention)
            first_attention = False
        yield from modules
        if key == ("vision", None):
            yield from tower_buffers(place)
        if key == ("main", None):
            yield from model_buffers(place)
    yield from _layer("main", late, place, unmodelled)


def _buffers(stack: str, index: int, place: Place, *, first: bool) -> list[Built]:
    g = place.geometry
    kinds = g.mtp_kinds if stack == "mtp" else g.each_layer()
    if not kinds or (stack == "main" and index >= len(kinds)):
        return []
    return list(attention_buffers(place, stack, kinds[index % len(kinds)], index, first=first))


def _is_loaded(stack: str, place: Place) -> bool:
    d = place.deployment
    if stack == "mtp":
        return d.mtp > 0
    if stack == "vision":
        return sees(place)
    return stack != "audio" or not (d.language_model_only or d.limit_mm_per_prompt.get("audio") == 0)


def _is_own_stage(key: tuple[str, int | None], place: Place) -> bool:
    """Whether this rank's pipeline stage holds a layer. The first stages get fewer where they do not divide.
    Source: vllm 0.33.0 distributed/utils.py get_pp_indices."""
    stages, count = place.deployment.pp, len(place.geometry.layers)
    if key[0] == "mtp":
        return place.stage == stages - 1
    if stages == 1 or key[0] != "main" or key[1] is None:
        return True
    each, rest = divmod(count, stages)
    sizes = [each] * stages
    for i in range(2, rest + 2):  # the last stage carries the head: remaining layers go before it, from the back
        sizes[-i] += 1
    start = sum(sizes[: place.stage])
    return start <= key[1] < start + sizes[place.stage]


def _layer(stack: str, members: list[Weight], place: Place, unmodelled: list[str]) -> Iterator[Built]:
    merged: dict[str, list[tuple[Weight, Rule]]] = {}
    experts: list[Weight] = []
    for weight in members:
        rule = rule_for(weight)
        if rule is None:
            unmodelled.append(f"tensor {weight.name} {list(weight.shape)}: no rule says how a rank holds it")
        elif rule.hold is Hold.EXPERTS:
            experts.append(weight)
        elif rule.hold is not Hold.SKIP:
            merged.setdefault(rule.into or weight.name, []).append((weight, rule))
    tied = stack == "main" and bool(place.geometry.tie_word_embeddings)
    for name, parts in sorted(merged.items(), key=_build_order):
        if (tied and parts[0][1].part is Part.LM_HEAD) or (stack == "mtp" and parts[0][1].hold is Hold.VOCAB):
            continue  # one tensor with the embedding; the drafter shares the target's
        yield _module(stack, name, parts, place, unmodelled)
    if experts:
        yield _experts(stack, experts, place, unmodelled)


_FIRST = (Part.VISION, Part.AUDIO, Part.EMBED, Part.ATTENTION, Part.LINEAR_ATTENTION, Part.ROUTER, Part.SHARED_EXPERT)
_WITHIN = ("qkv", "fused_qkv_a", "q_b_", "kv_b_", "o_proj", "in_proj", "out_proj", "gate_up", "down", "fc1", "fc2")


def _build_order(item: tuple[str, list[tuple[Weight, Rule]]]) -> tuple[int, int]:
    """Attention before feed-forward before norms, inputs before outputs: as the engine's classes build their layers."""
    name, parts = item
    part = parts[0][1].part
    return (
        _FIRST.index(part) if part in _FIRST else len(_FIRST) + (part is Part.NORM),
        next((i for i, word in enumerate(_WITHIN) if word in name), len(_WITHIN)),
    )


def _module(stack: str, name: str, parts: list[tuple[Weight, Rule]], place: Place, unmodelled: list[str]) -> Built:
    first, rule = parts[0]
    if rule.hold is Hold.TABLE:
        return _table(parts, place)
    scheme = first.scheme
    if rule.plain or any(w.scheme != scheme for w, _ in parts):
        scheme = PLAIN
    if len(first.shape) != 2 or (rule.hold in (Hold.CHANNELS, Hold.VOCAB) and scheme.kind is Kind.PLAIN):
        return Built(stack, rule.part, _raw(parts, place))
    outs: list[int] = []
    inner = first.shape[1]
    for weight, own in parts:
        rows, inner = _slice(weight, own, stack, place)
        outs += rows
    tiled = scheme.kind is Kind.FP8_BLOCK
    if tiled and (reason := block_refusal(name, scheme.block, outs, inner, _cut(rule, place))):
        unmodelled.append(reason)
    if name.endswith("_hc.down"):
        outs.append(-sum(outs) % 16)
    biased = any(w.bias for w, _ in parts) and not _is_empty_bias(first, place)
    runtime = place.runtime
    if rule.part is Part.ROUTER and _routes_in_f32(place):
        runtime = runtime._replace(float_bytes=4)
    tensors = linear_tensors(scheme, outs, inner, biased, runtime)
    if name == "kv_b_proj" or first.name.endswith(".kv_b_proj"):
        tensors = _with_absorbed(tensors, scheme, sum(outs) * inner, place)
    return Built(stack, rule.part, tensors)


def _cut(rule: Rule, place: Place) -> Cut:
    if place.tp == 1 or rule.hold is Hold.WHOLE:
        return Cut.NEITHER
    return Cut.COLUMNS if rule.hold is Hold.COLUMNS else Cut.ROWS


def _is_empty_bias(weight: Weight, place: Place) -> bool:
    """GPTQ exporters store a bias of zeros for every matrix; the engine builds none where the model has none."""
    family = FAMILIES.get(place.geometry.text_model_type or "")
    has_one = place.geometry.attention_bias or (family is not None and (family.bias or family.mlp_bias))
    return weight.scheme.method == "gptq" and not has_one


def _with_absorbed(tensors: Tensors, scheme: Scheme, values: int, place: Place) -> Tensors:
    """Latent attention keeps W_UV and W_UK_T beside a quantised kv_b_proj; of a plain one they are views.
    Source: vllm 0.33.0 layers/attention/mla_attention.py process_weights_after_loading."""
    if scheme.kind is Kind.PLAIN or place.geometry.latent is None:
        return tensors
    m = place.geometry.latent
    share = m.nope_dim + m.value_dim
    copies = tuple(values // share * part * place.runtime.float_bytes for part in (m.value_dim, m.nope_dim))
    return Tensors(tensors.created, tensors.loaded + copies)


def _slice(weight: Weight, rule: Rule, stack: str, place: Place) -> tuple[list[int], int]:
    """(rows of each merged part, columns) of a matrix on this rank."""
    rows, columns = weight.shape
    tp = 1 if stack == "vision" and place.deployment.mm_encoder_tp_mode == "data" else place.tp
    match rule.hold:
        case Hold.ROWS:
            return [*_stored_together(weight, rows, tp)], columns
        case Hold.COLUMNS:
            return [rows], cdiv(columns, tp)
        case Hold.KV:
            return [_kv_rows(weight, rows, place)], columns
        case Hold.QKV:
            return _fused_rows(weight, rows, place), columns
        case Hold.GROUPS:
            return [_grouped_rows(rows, place)], columns
        case Hold.VOCAB:
            return [cdiv(up(rows, 64), tp)], columns
        case _:
            return [rows], columns


def _stored_together(weight: Weight, rows: int, tp: int) -> Iterator[int]:
    """A matrix that stores several merged parts keeps a scale for each of them."""
    parts = 2 if weight.name.endswith(("gate_up_proj", "input_linear")) else 1
    for _ in range(parts):
        yield cdiv(rows // parts, tp)


def _kv_heads(weight: Weight, place: Place) -> int:
    """Key-value heads of the layer a weight belongs to."""
    g = place.geometry
    if weight.stack == "main" and weight.layer is not None and weight.layer < len(g.layers):
        return g.layer(weight.layer).kv_heads or 1
    kinds = [k for k in (*g.mtp_kinds, *g.layer_kinds) if k.kv_heads]
    return (kinds[0].kv_heads if kinds else None) or 1


def _kv_rows(weight: Weight, rows: int, place: Place) -> int:
    heads = _kv_heads(weight, place)
    copies = 2 if place.geometry.k_is_v and _is_global(weight, place) and weight.name.endswith("k_proj") else 1
    return rows // heads * max(1, heads // place.tp) * copies


def _is_global(weight: Weight, place: Place) -> bool:
    g = place.geometry
    return weight.layer is not None and g.layer(weight.layer).attention is Attention.FULL


def _fused_rows(weight: Weight, rows: int, place: Place) -> list[int]:
    kv = _kv_heads(weight, place)
    g = place.geometry
    layer = g.layer(weight.layer) if weight.layer is not None and weight.layer < len(g.layers) else g.layer_kinds[0]
    heads = layer.heads or rows
    each = rows // (heads + 2 * kv)
    local = max(1, kv // place.tp) * each
    return [heads // place.tp * each, local, local]


def _grouped_rows(rows: int, place: Place) -> int:
    """Mamba-2 projections divide by head; groups fewer than ranks are repeated on every rank."""
    r = place.geometry.recurrent
    if r is None or not r.groups or r.groups % place.tp == 0:
        return cdiv(rows, place.tp)
    shared = 2 * r.groups * (r.state_size or 0)
    return (rows - shared) // place.tp + 2 * (r.state_size or 0)


def _raw(parts: list[tuple[Weight, Rule]], place: Place) -> Tensors:
    """Tensors that are no linear layers: norms, vectors, convolutions, embeddings."""
    sizes: list[int] = []
    for weight, rule in parts:
        shape = list(weight.shape) or [1]
        tp = place.tp
        if rule.hold is Hold.VOCAB:
            shape[0] = cdiv(up(shape[0], 64), tp)
        elif rule.hold is Hold.CHANNELS:
            shape[0] = cdiv(shape[0], tp)
        elif rule.hold is Hold.GROUPS:
            shape[0] = _grouped_rows(shape[0], place)
        elif rule.part is Part.ATTENTION and place.geometry.text_model_type == "minimax_m2":
            shape[0] = _norm_rows(weight, shape[0], place)
        each = _engine_bytes(weight, rule, place)
        sizes.append(prod(shape) * each)
        if weight.bias:
            sizes.append(shape[0] * each)
    return Tensors(tuple(sizes), tuple(sizes))


def _norm_rows(weight: Weight, rows: int, place: Place) -> int:
    """MiniMax M2 divides its query and key norms as it divides the heads."""
    return _kv_rows(weight, rows, place) if weight.name.endswith("k_norm") else cdiv(rows, place.tp)


_ROUTER_F32 = frozenset({"minimax_m2", "glm4_moe", "glm4_moe_text", "step3p5", "ernie4_5_moe", "mimo_v2_flash"})
"""Model types whose router weight the engine keeps in F32 (vllm 0.33.0 model files, GateLinear params_dtype)."""


def _routes_in_f32(place: Place) -> bool:
    """Nemotron's are too where the card has no kernel that accumulates in F32 (fused_moe/router/gate_linear.py)."""
    kind = place.geometry.text_model_type
    return kind in _ROUTER_F32 or (kind == "nemotron_h" and place.runtime.sm // 10 not in (9, 10, 11))


def _engine_bytes(weight: Weight, rule: Rule, place: Place) -> int:
    """Bytes of a value as the engine keeps it: the model dtype, unless the rule or the file's integers differ."""
    if rule.dtype:
        return DTYPE_BITS[rule.dtype] // 8
    if weight.dtype.startswith(("I", "U")) and weight.dtype not in ("U8", "I8"):
        return DTYPE_BITS[weight.dtype] // 8
    return place.runtime.float_bytes


def _experts(stack: str, members: list[Weight], place: Place, unmodelled: list[str]) -> Built:
    d, total = place.deployment, max(w.experts or w.shape[0] for w in members)
    by_leaf = {w.name.rsplit(".", 1)[-1]: w for w in members}
    down = next((by_leaf[n] for n in ("down_proj", "w2", "output_linear", "linear_1") if n in by_leaf), None)
    ups = [by_leaf[n] for n in ("gate_proj", "up_proj", "gate_up_proj", "w1", "w3", "input_linear") if n in by_leaf]
    if down is None or not ups or len({w.scheme for w in (down, *ups)}) > 1:
        unmodelled.append(f"experts {sorted(by_leaf)}: no known set of projections in one format")
        return Built(stack, Part.EXPERT, Tensors((), ()))
    hidden, inter = down.shape[-2:]
    if (g := place.geometry.hidden_size) and inter == g and hidden != g:  # stored transposed (Llama 4, gpt-oss in BF16)
        hidden, inter = inter, hidden
    gated = len(ups) > 1 or ups[0].name.endswith(("gate_up_proj", "input_linear"))
    ranks = d.tp * d.dp
    count = total + d.redundant_experts
    if d.expert_parallel:
        base, rest = divmod(count, ranks)
        count = base + (place.rank % ranks < rest)
    else:
        inter = cdiv(inter, ranks)
    biased = any(w.bias for w in members) or any(n.endswith("_bias") for n in by_leaf)
    shape = ExpertShape(count, inter, hidden, gated, biased)
    if reason := expert_refusal(down.scheme, shape, place.runtime):
        unmodelled.append(Refusal(reason))
    return Built(stack, Part.EXPERT, expert_tensors(down.scheme, shape, place.runtime))


def _table(parts: list[tuple[Weight, Rule]], place: Place) -> Built:
    """The n-gram table of one layer: what the engine builds is decided by the config, not by what the file stores."""
    width = parts[0][0].shape[-1]
    stored = sum(w.shape[0] for w, _ in parts)
    try:
        rows = ngram_rows(place.geometry) if place.geometry.ngram else stored
    except Unexpected:
        rows = stored
    form = table_format(place.geometry, place.quantization, place.deployment)
    each = cdiv(rows, place.tp)
    if form == "fp8":
        sizes: tuple[int, ...] = (each * width, 4)
    elif form == "nvfp4":
        sizes = (each * width // 2, each * width // 16, 4)
    else:
        sizes = (each * width * 2,)
    host = table_is_pinned(place.deployment)
    return Built("main", Part.PLE, Tensors(sizes, sizes), host=host)
