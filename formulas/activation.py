"""The torch peak of the engine's profile run above the loaded weights: what a step of T tokens keeps alive at once.

The profile run pushes T = max_num_batched_tokens dummy tokens through every layer without attending, then samples
min(T, R) rows, R = max_num_seqs. Its peak is

    max over the phases of all layers (attention, state, MLP, experts), the sampler and the vision tower of
        tensors alive at the phase's widest line + workspaces allocated by then

The tensors are counted in the model files; workspaces are the experts' (from the first layer with experts on) and
cuBLAS's (from the first matrix that is not quantised on). Measured H200 runs come out to the byte for most families;
the few numbers that are fitted are in data/coefficients.json.

Source: vllm 0.25.1 model_executor/models/{qwen3,qwen3_moe,qwen3_next,gemma3,deepseek_v2,nemotron_h,minimax_m2}.py,
layers/attention/mla_attention.py:643 (the context workspace), fused_moe/experts/*.workspace_shapes,
v1/sample/{sampler,rejection_sampler}.py, v1/worker/gpu/sample/sampler.py; 0.33.0's where newer.
Domain: eager runs; what compiling adds on a cold cache is one fitted number a runner. The vision term is a heuristic.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from .deployment import Deployment
from .facts import Quantization
from .geometry import Attention, Experts, Ffn, Geometry, Latent, Layer, Recurrent, State
from .kv_dtypes import model_dtype_bytes
from .kv_states import Unstated
from .schemes import Kind
from .step import Shapes, kinds, need
from .units import MIB
from .workspaces import counted_bytes, expert_workspace, runs_second, sampler_bytes, vision_bytes

CUBLAS_HOPPER_BYTES = 32 * MIB
CUBLAS_BYTES = 8_519_680
"""torch's cuBLAS workspace: 32 MiB on compute capability 9 and 10, else :4096:2:16:8."""
CONTEXT_TOKENS = 64 * 1024  # cap of the MLA context workspace
CONTEXT_BLOCKS = 4  # and at least this many blocks of 16 tokens for every sequence

# Families with a norm after as well as before each block. All others fuse residual and norm in place, but those whose
# norms return new tensors (step.py).
_SANDWICHED = frozenset({"gemma2", "gemma3_text", "gemma3n_text", "gemma4_text"})
# Families on LlamaMLP, which drops gate and up before the down projection; the others keep them to its end.
_DROPPING = frozenset({
    "llama", "mistral", "ministral3", "phi3", "glm", "glm4", "llama4_text", "nemotron-nas", "falcon_h1", "smollm3",
})  # fmt: skip
_HEAD_NORMS = frozenset({
    "qwen3", "qwen3_moe", "qwen3_vl_text", "qwen3_vl_moe_text", "gemma3_text", "gemma3n_text", "gemma4_text",
    "glm4_moe", "olmo2", "olmo3", "exaone4", "lfm2", "lfm2_moe", "step3p5", "hunyuan_v1_moe",
    "apertus",
})  # fmt: skip
class Activation(NamedTuple):
    """The peak and what makes it. Bytes; None where a size is not known, with the reasons."""

    peak_bytes: int | None
    phases: Mapping[str, int]  # bytes alive at the widest line of each phase, workspaces included
    compile_bytes: int  # what compiling adds on a cold cache, within the peak
    unmodelled: tuple[str, ...] = ()

    @property
    def widest(self) -> str | None:
        """The phase that makes the peak."""
        return max(self.phases, key=lambda name: self.phases[name], default=None)


def activation(
    geometry: Geometry,
    deployment: Deployment,
    quantization: Quantization | None,
    coefficients: Mapping[str, float],
) -> Activation:
    """The profile run's peak for one rank. `max_num_batched_tokens` and `max_num_seqs` must be filled in."""
    tokens, rows = deployment.max_num_batched_tokens, deployment.max_num_seqs
    if tokens is None or rows is None or not geometry.hidden_size or not geometry.vocab_size:
        reason = "no hidden_size, vocab_size or batch sizes: the activation peak is unknown"
        return Activation(None, {}, 0, (reason,))
    linear, expert = kinds(quantization)
    shapes = Shapes(geometry, deployment, linear, expert, geometry.hidden_size, tokens)
    try:
        phases = _phases(shapes, min(tokens, rows))
    except Unstated as unknown:
        return Activation(None, {}, 0, (f"{unknown}: the activation peak is unknown",))
    if vision := vision_bytes(shapes):
        phases["vision"] = vision
    compiled = 0
    if not deployment.enforce_eager:
        runner = "second" if runs_second(geometry, deployment) else "first"
        compiled = int(coefficients[f"compile_{runner}_runner_mib"] * MIB)
    kept = counted_bytes(shapes, rows)
    return Activation(max(phases.values()) + compiled + kept, phases, compiled)


def _phases(shapes: Shapes, rows: int) -> dict[str, int]:
    """Bytes alive in each phase, the widest layer of each, with the workspaces allocated by then."""
    layers, element = shapes.geometry.each_layer(), model_dtype_bytes(shapes.geometry, shapes.deployment)
    routed = next((i for i, layer in enumerate(layers) if layer.ffn in (Ffn.MOE, Ffn.BOTH)), len(layers))
    experts = expert_workspace(shapes) * shapes.tokens * element
    cublas = CUBLAS_HOPPER_BYTES if (shapes.deployment.sm or 90) // 10 in (9, 10) else CUBLAS_BYTES
    plain = shapes.linear is Kind.PLAIN
    streams = 2 * (max(shapes.geometry.hyper_connections or 1, 1) - 1) * shapes.hidden
    widths: dict[Layer, dict[str, int]] = {}
    found: dict[str, int] = {}
    for index, layer in enumerate(layers):
        if layer not in widths:
            widths[layer] = {name: (width + streams * shapes.tokens) * element
                             for name, width in _widths(shapes, layer, rows)}  # fmt: skip
        for name, width in widths[layer].items():
            later = index > routed or (index == routed and name == "experts")
            alive = width + (experts if later else 0) + (cublas if plain or later else 0)
            found[name] = max(found.get(name, 0), alive)
    hidden = shapes.tokens * shapes.hidden * element
    spent = experts if routed < len(layers) else 0
    return {**found, "sampler": sampler_bytes(shapes, rows) + hidden + spent + cublas}


def _widths(shapes: Shapes, layer: Layer, rows: int) -> Iterator[tuple[str, int]]:
    """(phase, elements alive) of one layer over all tokens of the step."""
    if layer.attention in (Attention.MLA, Attention.DSA):
        yield "attention", max(_latent_output(shapes) * shapes.tokens, _latent_context(shapes, layer, rows))
    elif layer.attention is not Attention.NONE:
        yield "attention", _attention(shapes, layer) * shapes.tokens
    if layer.state is not State.NONE:
        yield "state", _state(shapes, layer) * shapes.tokens
    if layer.ffn in (Ffn.DENSE, Ffn.BOTH):
        yield "mlp", _mlp(shapes, layer) * shapes.tokens
    if layer.ffn in (Ffn.MOE, Ffn.BOTH):
        yield "experts", _moe(shapes) * shapes.tokens


def _attention(shapes: Shapes, layer: Layer) -> int:
    """At the output projection: the fused projection, normed heads, the attended values, the output."""
    heads, size = need(layer.heads, "num_attention_heads"), need(layer.head_dim, "head_dim")
    groups = max(1, need(layer.kv_heads, "num_key_value_heads") // shapes.tp)
    q, k = heads * size // shapes.tp, groups * size
    out, v = heads * (layer.value_head_dim or size) // shapes.tp, groups * (layer.value_head_dim or size)
    held = shapes.held(2, 5) + q + k + v
    if shapes.geometry.output_gate or shapes.buffered:
        # Query and gate come together, then apart; normed query and key, attended values, gated values.
        return held + 6 * q + k + shapes.quantised(out) + shapes.reduced
    copies = q + k if shapes.geometry.text_model_type in _HEAD_NORMS else 0
    if shapes.geometry.text_model_type == "mimo_v2_flash":
        copies = v  # attention_value_scale
    projected = held + copies + out + shapes.quantised(out) + shapes.hidden + shapes.reduced
    if shapes.geometry.text_model_type == "minimax_m2":
        # One norm over all heads: fp32 copies of queries and keys, and their normalised copies.
        return max(projected + q + k, held + 6 * q + 2 * k + 4)
    return projected


def _latent(shapes: Shapes) -> int:
    """Multi-head latent attention: compressed query and latent, their norms, queries, attended values."""
    latent, local = _latent_sizes(shapes)
    compressed = (latent.q_rank or 0) + latent.kv_rank + latent.rope_dim
    queries = local * (latent.nope_dim + latent.rope_dim)
    return shapes.held(2, 5) + 2 * compressed + queries + local * latent.value_dim


def _latent_output(shapes: Shapes) -> int:
    """At the output projection."""
    _, local = _latent_sizes(shapes)
    values = local * (shapes.geometry.latent.value_dim if shapes.geometry.latent else 0)
    return _latent(shapes) + shapes.quantised(values) + shapes.hidden + shapes.reduced


def _latent_context(shapes: Shapes, layer: Layer, rows: int) -> int:
    """While the profile run allocates the context workspace: keys and values of up to 64 K earlier tokens."""
    latent, local = _latent_sizes(shapes)
    length = shapes.deployment.max_model_len or shapes.geometry.max_position_embeddings or CONTEXT_TOKENS
    context = min(max(8 * length, CONTEXT_BLOCKS * rows * 16), CONTEXT_TOKENS)
    width, indexer = _latent(shapes), shapes.geometry.indexer
    if layer.attention is Attention.DSA and indexer is not None:
        scorer = need(indexer.heads, "index_n_heads") * need(indexer.head_dim, "index_head_dim")
        # Its queries, two rotated copies and their fp8 form; keys and head weights.
        width += 7 * scorer // 2 + 2 * need(indexer.head_dim, "index_head_dim") + 32
    return width * shapes.tokens + context * local * (latent.nope_dim + latent.value_dim)


def _latent_sizes(shapes: Shapes) -> tuple[Latent, int]:
    """(the latent's sizes, heads of one rank)."""
    if shapes.geometry.latent is None:
        raise Unstated("no kv_lora_rank or head sizes")
    heads = next((layer.heads for layer in shapes.geometry.layer_kinds if layer.heads), None)
    return shapes.geometry.latent, need(heads, "num_attention_heads") // shapes.tp


def _state(shapes: Shapes, layer: Layer) -> int:
    sizes = shapes.geometry.recurrent or Recurrent()
    if layer.state in (State.GDN, State.KDA):
        keys = need(sizes.key_heads, "key heads") * need(sizes.key_dim, "key head size") // shapes.tp
        values = need(sizes.value_heads, "value heads") * need(sizes.value_dim, "value head size") // shapes.tp
        projected, mixed = 2 * keys + 2 * values, 2 * keys + values
        return shapes.held(2, 5) + projected + mixed + 2 * values + shapes.reduced
    if layer.state is State.SHORT_CONV:
        return shapes.held(3, 5) + 5 * shapes.hidden // shapes.tp + shapes.reduced
    inner = need(sizes.inner, "inner width of the state layers") // shapes.tp
    mixed = inner + 2 * (sizes.groups or 1) * (sizes.state_size or 0) // shapes.tp
    projected = inner + mixed + (sizes.value_heads or 0) // shapes.tp
    # The convolution's input is cloned and laid out again; the gated norm works on two fp32 copies.
    return shapes.held(2, 5) + projected + 2 * mixed + 4 * inner + shapes.hidden + shapes.reduced


def _mlp(shapes: Shapes, layer: Layer) -> int:
    """At the down projection: gate and up in one, their product, the output; LlamaMLP peaks a line earlier."""
    size = need(layer.intermediate_size, "intermediate_size") // shapes.tp
    held = 4 if shapes.geometry.text_model_type in _SANDWICHED else 3
    gated = 1 if shapes.geometry.text_model_type == "nemotron_h" else 2
    drafting = shapes.hidden if shapes.deployment.mtp else 0
    product = (gated + 1) * size
    down = product + shapes.quantised(size) + shapes.hidden + shapes.reduced
    if shapes.geometry.text_model_type in _DROPPING:
        down = max(product, size + shapes.quantised(size) + shapes.hidden + shapes.reduced)
    return shapes.held(held, 5) + down + drafting


def _moe(shapes: Shapes) -> int:
    experts = shapes.geometry.experts or Experts()
    shared = (experts.shared_intermediate_size or 0) // shapes.tp
    own = 3 * shared + shapes.hidden if shared else 0
    if shapes.geometry.text_model_type == "gpt_oss":
        # Its Triton kernels allocate per call: the gated product and the unreduced output of every pick, and routing.
        size = need(experts.intermediate_size, "intermediate_size") // shapes.tp
        picked = need(experts.per_token, "num_experts_per_tok") * (size + shapes.hidden)
        return shapes.held(3, 5) + picked + 3 * shapes.hidden // 4
    return shapes.held(3, 5) + 2 * (experts.count or 0) + own + shapes.hidden + shapes.reduced
