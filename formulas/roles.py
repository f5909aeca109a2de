"""What a tensor is, from its name: which stack it belongs to and which role it has there.

Two ordered tables, read from the top, the first match wins, so more specific rows come first. A row is a pattern for
whole components of the dotted name (`mlp`, `self_attn`), or a regular expression where it starts with `^`. Digits
never decide: `w1` and `w3`, layer 0 and layer 60 are one family. The exception is an MTP layer that is only numbered
on after the last decoder layer (DeepSeek, GLM), which the config's layer count tells apart.

Inside attention and experts everything has the role of its module, norms and scales included, as the engine counts
them (vllm 0.33.0, bytes per module of 14 models). The names are those of the families' published checkpoints.
"""

from __future__ import annotations

import re
from functools import lru_cache

from .facts import Role, Stack
from .tensors import family

STACKS: tuple[tuple[str, Stack], ...] = (
    (r"audio\w*|embed_audio|\w+_audio|speech\w*|sound\w*|conformer|code\w*wav|whisper\w*", Stack.AUDIO),
    (r"visual|vision|vision_\w+|\w+_vision|embed_image|image_\w+|img_\w+|vit|vit_\w+|vpm|resampler", Stack.VISION),
    (r"multi_modal_projector|mm_projector|\w+_mm_projector_norm|patch_merger|projector|aligner", Stack.VISION),
    (r"sam_model|qwen\d*_model|view_sepe?a?rator|mlp_AR|siglip\w*|visual_\w+|navit\w*", Stack.VISION),
    (r"mtp|mtp_\w+|nextn\w*", Stack.MTP),
)
"""Stacks; what no row names is the main stack. DeepSeek-OCR reads images with a `sam_model` and a `qwen2_model`."""

ROLES: tuple[tuple[str, Role], ...] = (
    # A table or projection of per-layer embeddings, whatever module it sits in.
    (r"ple|engram\w*|ngram_\w+|embed_tokens_per_layer|per_layer_\w+", Role.PLE),
    # No role of its own: each rank holds it whole, or the engine computes it and does not load it.
    (r"rotary_emb|inv_freq", Role.OTHER),
    (r"\w*hyper_connection\w*|hc_\w+", Role.OTHER),
    (r"layer_scalar|altup\w*|laurel", Role.OTHER),
    # Routed and shared experts, before the MLP and the gates they sit beside.
    (r"shared?_experts?|shared_expert_gate|shared_mlp", Role.SHARED_EXPERT),
    (r"experts|local_experts", Role.EXPERT),
    (r"router|router_bias|\w*e_score_correction_bias|expert_bias|gate_wg", Role.ROUTER),
    (r"^(?:.*\.)?(?:mlp|moe|block_sparse_moe|mixer|feed_forward|ffn)\.gate(?:\.|$)", Role.ROUTER),
    (r"^(?:.*\.)?moe\.(?:gate|up|down)_proj(?:\.|$)", Role.EXPERT),  # Step: packed beside `moe.gate`
    (r"^(?:.*\.)?block_sparse_moe\.(?:in|out)put_linear(?:\.|$)", Role.EXPERT),  # Granite: packed
    # Recurrent layers; a Nemotron-H `mixer` is whatever its children are.
    (r"linear_attn|mamba|short_conv", Role.LINEAR_ATTENTION),
    (r"^(?:.*\.)?mixer\.(?:A_log|D|dt_bias|conv\d*d|in_proj|out_proj|x_proj|dt_proj|norm|[bc]_layernorm)(?:\.|$)",
     Role.LINEAR_ATTENTION),
    (r"^(?:.*\.)?layers\.\d*\.conv\.(?:conv|in_proj|out_proj)(?:\.|$)", Role.LINEAR_ATTENTION),  # LFM2
    (r"^(?:.*\.)?self_attn\.(?:A_log|dt_bias|[qkv]_conv\d*d?|[fg]_[ab]_proj|b_proj|o_norm)(?:\.|$)",
     Role.LINEAR_ATTENTION),  # Kimi Linear; its q, k and v are named as attention's
    # Attention, with its norms, sinks, indexer and KV scales.
    (r"(?:self_|cross_|encoder_)?(?:attn|attention)|indexer|att_proj|attn_out|attn_pool|wqkv|wo|image_pooling_\d*d",
     Role.ATTENTION),
    (r"^(?:.*\.)?mixer\.(?:[qkvo]_proj|Wqkv|qkv_proj)(?:\.|$)", Role.ATTENTION),
    # Norms of the trunk, before the modules whose names they carry.
    (r"\w*norm\d*|\w*norm_\w+|ln_\w*|\w+_ln|ln\d*|\w*layernorm\w*", Role.NORM),
    # The output layer, under all its names.
    (r"lm_head|embed_out|shared_head", Role.LM_HEAD),
    (r"^(?:output|head|mtp\.\d*\.head|model\.transformer\.ff_out)(?:\.|$)", Role.LM_HEAD),
    # Embeddings.
    (r"embed_tokens|embed_in|embed_positions|embed|wte|wpe|emb|\w+_embeddings|embeddings?|new_embedding", Role.EMBED),
    (r"\w*patch_embed\w*|\w*pos_embed\w*|\w*position\w*_embedding\w*|\w*class_embedding|pad_embed", Role.EMBED),
    # What joins a drafter to the model it drafts for: held whole or gathered at once.
    (r"eh_proj|mtp_linear_proj", Role.OTHER),
    (r"^(?:.*\.)?mtp\w*\.(?:.*\.)?(?:fc|fc_\w+|input_proj|[eh]_proj)(?:\.|$)", Role.OTHER),
    # Dense MLPs, and the projections that are one or two linear layers.
    (r"mlp|feed_forward\w*|ffn|ff_proj|ff_out|fc\d*|fc\d*_latent_proj", Role.MLP),
    (r"^(?:.*\.)?mixer\.(?:up|down|gate)_proj(?:\.|$)", Role.MLP),
    (r"merger|merger_list|\w+_merger_list|\w*projector\w*|patch_merger|aligner|embed_vision|embed_audio", Role.MLP),
)  # fmt: skip
"""Roles; what no row names is `other`: convolutions and loose parameters of vision towers, and what is not known."""

_LAYER = re.compile(r"(?:^|\.)layers\.([0-9]{1,9})\.")


def _compile(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern if pattern.startswith("^") else rf"(?:^|\.)(?:{pattern})(?:\.|$)")


_STACKS = [(_compile(pattern), stack) for pattern, stack in STACKS]
_ROLES = [(_compile(pattern), role) for pattern, role in ROLES]


def is_numbered_mtp(name: str, mtp_from: int | None) -> bool:
    """Whether the name is of a layer numbered `mtp_from` or more."""
    layer = _LAYER.search(name) if mtp_from is not None else None
    return layer is not None and mtp_from is not None and int(layer[1]) >= mtp_from


def classify(name: str, mtp_from: int | None = None) -> tuple[Stack, Role]:
    """(stack, role) of one tensor; layers from number `mtp_from` on are MTP where the config declares such."""
    stack, role = classify_family(family(name))
    if stack is Stack.MAIN and is_numbered_mtp(name, mtp_from):
        stack = Stack.MTP
    return stack, role


@lru_cache(maxsize=4096)
def classify_family(name: str) -> tuple[Stack, Role]:
    """(stack, role) of a family, a name without digits."""
    stack = next((stack for pattern, stack in _STACKS if pattern.search(name)), Stack.MAIN)
    role = next((role for pattern, role in _ROLES if pattern.search(name)), Role.OTHER)
    return stack, role
