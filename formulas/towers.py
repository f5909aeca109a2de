"""The weights of vision and audio towers, as their configs imply them; shapes as a checkpoint stores them.

Towers of no known kind raise nothing and yield nothing: `unknown_towers` names them, so that an answer can be unknown.
Sources: vllm 0.33.0 model_executor/models (qwen3_vl, siglip, gemma3_mm, gemma4_mm, pixtral, mistral3, kimi_k25_vit)
and transformers 5.17 models/gemma4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from .geometry import Geometry, Vision
from .schemes import Weight

Shape = tuple[int, ...]


def _weight(name: str, shape: Shape, layer: int | None = None, *, bias: bool = False) -> Weight:
    return Weight("vision", layer, name, shape, bias=bias)


def _qwen3(v: Vision, hidden: int) -> Iterator[Weight]:
    """Qwen3-VL, 3.5 and 3.8: merged qkv, a merger after the last block and one at each deepstack layer."""
    size, inter, merge = v.hidden_size or 0, v.intermediate_size or 0, v.spatial_merge_size or 2
    patch, channels, frames = v.patch_size or 16, v.channels or 3, v.temporal_patch_size or 2
    wide, out = size * merge * merge, v.out_hidden_size or hidden
    yield _weight("patch_embed.proj", (size, channels, frames, patch, patch), bias=True)
    yield _weight("pos_embed", (v.positions or 0, size))
    for i in range(v.depth or 0):
        yield _weight("norm1", (size,), i, bias=True)
        yield _weight("norm2", (size,), i, bias=True)
        yield _weight("attn.qkv", (3 * size, size), i, bias=True)
        yield _weight("attn.proj", (size, size), i, bias=True)
        yield _weight("mlp.linear_fc1", (inter, size), i, bias=True)
        yield _weight("mlp.linear_fc2", (size, inter), i, bias=True)
    for at, norm in (("merger", size), *((f"deepstack_merger_list.{i}", wide) for i in range(len(v.deepstack)))):
        yield _weight(f"{at}.norm", (norm,), bias=True)
        yield _weight(f"{at}.linear_fc1", (wide, wide), bias=True)
        yield _weight(f"{at}.linear_fc2", (out, wide), bias=True)


def _siglip(v: Vision, hidden: int) -> Iterator[Weight]:
    """SigLIP with Gemma 3's projector."""
    size, inter, patch = v.hidden_size or 0, v.intermediate_size or 0, v.patch_size or 14
    positions = ((v.image_size or 0) // patch) ** 2
    yield _weight("embeddings.patch_embedding", (size, v.channels or 3, patch, patch), bias=True)
    yield _weight("embeddings.position_embedding", (positions, size))
    yield Weight("vision", None, "embeddings.position_ids", (1, positions), "I64")
    for i in range(v.depth or 0):
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield _weight(f"self_attn.{name}", (size, size), i, bias=True)
        yield _weight("layer_norm1", (size,), i, bias=True)
        yield _weight("mlp.fc1", (inter, size), i, bias=True)
        yield _weight("mlp.fc2", (size, inter), i, bias=True)
        yield _weight("layer_norm2", (size,), i, bias=True)
    yield _weight("post_layernorm", (size,), bias=True)
    yield _weight("mm_input_projection_weight", (size, hidden))
    yield _weight("mm_soft_emb_norm", (size,))


def _gemma4(v: Vision, hidden: int) -> Iterator[Weight]:
    """Gemma 4: separate projections, a learned table of 10,240 positions an axis."""
    size, inter, patch = v.hidden_size or 0, v.intermediate_size or 0, v.patch_size or 16
    yield _weight("patch_embedder.input_proj", (size, 3 * patch * patch))
    yield _weight("patch_embedder.position_embedding_table", (2, v.positions or 10240, size))
    head = size // v.heads if v.heads else 0
    for i in range(v.depth or 0):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield _weight(f"self_attn.{name}.linear", (size, size), i)
        for name in ("q_norm", "k_norm"):
            yield _weight(f"self_attn.{name}", (head,), i)
        yield _weight("mlp.gate_proj.linear", (inter, size), i)
        yield _weight("mlp.up_proj.linear", (inter, size), i)
        yield _weight("mlp.down_proj.linear", (size, inter), i)
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            yield _weight(f"{name}_layernorm", (size,), i)
    yield _weight("embed_vision.embedding_projection", (hidden, size))


def _pixtral(v: Vision, hidden: int) -> Iterator[Weight]:
    """Pixtral with Mistral 3's patch merger and two-layer projector."""
    size, inter = v.hidden_size or 0, v.intermediate_size or 0
    patch, merge = v.patch_size or 14, v.spatial_merge_size or 2
    yield _weight("patch_conv", (size, v.channels or 3, patch, patch))
    yield _weight("ln_pre", (size,))
    for i in range(v.depth or 0):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield _weight(f"attention.{name}", (size, size), i)
        yield _weight("feed_forward.gate_proj", (inter, size), i)
        yield _weight("feed_forward.up_proj", (inter, size), i)
        yield _weight("feed_forward.down_proj", (size, inter), i)
        yield _weight("attention_norm", (size,), i)
        yield _weight("ffn_norm", (size,), i)
    yield _weight("multi_modal_projector.norm", (size,))
    yield _weight("multi_modal_projector.patch_merger.merging_layer", (size, size * merge * merge))
    yield _weight("multi_modal_projector.linear_1", (hidden, size))
    yield _weight("multi_modal_projector.linear_2", (hidden, hidden))


def _moonvit(v: Vision, hidden: int) -> Iterator[Weight]:
    """Kimi's MoonViT 3D with its patch-merging projector."""
    size, inter, patch = v.hidden_size or 0, v.intermediate_size or 0, v.patch_size or 14
    wide = size * 4
    yield _weight("patch_embed.proj", (size, 3, patch, patch), bias=True)
    yield _weight("patch_embed.pos_emb", (64, 64, size))
    for i in range(v.depth or 0):
        yield _weight("norm0", (size,), i, bias=True)
        yield _weight("norm1", (size,), i, bias=True)
        yield _weight("wqkv", (3 * size, size), i, bias=True)
        yield _weight("wo", (size, size), i, bias=True)
        yield _weight("mlp.fc0", (inter, size), i, bias=True)
        yield _weight("mlp.fc1", (size, inter), i, bias=True)
    yield _weight("encoder.final_layernorm", (size,), bias=True)
    yield _weight("mm_projector.pre_norm", (size,), bias=True)
    yield _weight("mm_projector.linear_1", (wide, wide), bias=True)
    yield _weight("mm_projector.linear_2", (hidden, wide), bias=True)


def _llama4(v: Vision, hidden: int) -> Iterator[Weight]:
    """Llama 4: pixels unfolded into a linear layer, a pixel-shuffling adapter of 4096 channels, one projection."""
    size, inter, patch = v.hidden_size or 0, v.intermediate_size or 0, v.patch_size or 14
    yield _weight("patch_embedding.linear", (size, (v.channels or 3) * patch * patch))
    yield _weight("class_embedding", (size,))
    yield _weight("positional_embedding_vlm", (((v.image_size or 0) // patch) ** 2 + 1, size))
    for norm in ("layernorm_pre", "layernorm_post"):
        yield _weight(norm, (size,), bias=True)
    for i in range(v.depth or 0):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield _weight(f"self_attn.{name}", (size, size), i, bias=True)
        yield _weight("mlp.fc1", (inter, size), i, bias=True)
        yield _weight("mlp.fc2", (size, inter), i, bias=True)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield _weight(norm, (size,), i, bias=True)
    yield _weight("vision_adapter.mlp.fc1", (4096, inter))
    yield _weight("vision_adapter.mlp.fc2", (4096, 4096))
    yield _weight("multi_modal_projector.linear_1", (hidden, v.out_hidden_size or 4096))


# A Llama 4 config without a vision part gets the tower of transformers' Llama4VisionConfig.
_LLAMA4_DEFAULT = Vision(
    model_type="llama4_vision_model", depth=34, hidden_size=768, intermediate_size=5632, heads=16, patch_size=14,
    image_size=448, channels=3, out_hidden_size=7680,
)  # fmt: skip

_TOWERS: dict[str, Callable[[Vision, int], Iterator[Weight]]] = {
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "qwen4_exp"), _qwen3),
    "siglip_vision_model": _siglip,
    "gemma4_vision": _gemma4,
    "pixtral": _pixtral,
    "llama4_vision_model": _llama4,
    **dict.fromkeys(("kimi_k25", "moonvit", "kimi_k25_vision"), _moonvit),
}
# Remote-code configs leave the tower's type out; the model's own type says it.
_BY_MODEL = {"kimi_k25": _moonvit, "qwen3_5": _qwen3, "qwen3_5_moe": _qwen3, "qwen4_exp": _qwen3, "qwen3_vl": _qwen3,
             "qwen3_vl_moe": _qwen3, "gemma3": _siglip}  # fmt: skip


def _vision(g: Geometry) -> Vision | None:
    return _LLAMA4_DEFAULT if g.vision is None and g.model_type == "llama4" else g.vision


def _tower(g: Geometry) -> Callable[[Vision, int], Iterator[Weight]] | None:
    vision = _vision(g)
    if vision is None:
        return None
    return _TOWERS.get(vision.model_type or "") or _BY_MODEL.get(g.model_type or "")


def unknown_towers(g: Geometry) -> tuple[str, ...]:
    """Why the weights of a tower this config declares are not known; empty where they are, or where there is none."""
    reasons = []
    if g.vision is not None and g.vision.depth and _tower(g) is None:
        kind = g.vision.model_type or g.model_type
        reasons.append(f"vision tower {kind}: its tensors are not known without a header")
    if g.audio and g.model_type != "gemma4":
        reasons.append(f"audio tower of {g.model_type}: its tensors are not known without a header")
    return tuple(reasons)


def tower_weights(g: Geometry) -> Iterator[Weight]:
    """The weights of the vision tower, then of the audio tower."""
    tower, vision, hidden = _tower(g), _vision(g), g.hidden_size or 0
    if tower is not None and vision is not None:
        yield from tower(vision, hidden)
    if g.audio and g.model_type == "gemma4":
        yield from _gemma4_audio(hidden)


def _gemma4_audio(hidden: int, size: int = 1024, layers: int = 12, out: int = 1536) -> Iterator[Weight]:
    """Gemma 4's audio encoder at its class defaults, which the released checkpoints use."""

    def weight(name: str, shape: Shape, layer: int | None = None, bias: bool = False) -> Weight:
        return Weight("audio", layer, name, shape, bias=bias)

    yield weight("subsample_conv_projection.layer0.conv", (128, 1, 3, 3))
    yield weight("subsample_conv_projection.layer0.norm", (128,))
    yield weight("subsample_conv_projection.layer1.conv", (32, 128, 3, 3))
    yield weight("subsample_conv_projection.layer1.norm", (32,))
    yield weight("subsample_conv_projection.input_proj_linear", (size, 1024))
    for i in range(layers):
        for block in ("feed_forward1", "feed_forward2"):
            yield weight(f"{block}.ffw_layer_1.linear", (4 * size, size), i)
            yield weight(f"{block}.ffw_layer_2.linear", (size, 4 * size), i)
            yield weight(f"{block}.pre_layer_norm", (size,), i)
            yield weight(f"{block}.post_layer_norm", (size,), i)
        for name in ("q_proj", "k_proj", "v_proj", "post"):
            yield weight(f"self_attn.{name}.linear", (size, size), i)
        yield weight("self_attn.relative_k_proj", (size, size), i)
        yield weight("self_attn.per_dim_scale", (size // 8,), i)
        yield weight("lconv1d.linear_start.linear", (2 * size, size), i)
        yield weight("lconv1d.linear_end.linear", (size, size), i)
        yield weight("lconv1d.depthwise_conv1d", (size, 1, 5), i)
        for name in ("lconv1d.pre_layer_norm", "lconv1d.conv_norm", "norm_pre_attn", "norm_post_attn", "norm_out"):
            yield weight(name, (size,), i)
    yield weight("output_proj", (out, size), bias=True)
    yield weight("embed_audio.embedding_projection", (hidden, out))
