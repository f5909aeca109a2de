"""Which part of every weight a rank holds, and what the engine builds from it: one ordered table of rules.

A weight is matched by its name below the layer. `hold` says how the tensor-parallel ranks divide it; weights of a layer
with the same `into` become one matrix, as the engine merges them. Source: vllm 0.33.0 model_executor/layers/linear.py,
vocab_parallel_embedding.py, mamba/, and the model files named beside the rules.
"""

from __future__ import annotations

import enum
import re
from typing import NamedTuple

from .schemes import Weight


@enum.unique
class Part(enum.StrEnum):
    """What the bytes of a rank belong to; the keys of `by`."""

    EXPERT = "expert"
    SHARED_EXPERT = "shared_expert"
    ATTENTION = "attention"
    LINEAR_ATTENTION = "linear_attention"
    MLP = "mlp"
    ROUTER = "router"
    NORM = "norm"
    EMBED = "embed"
    LM_HEAD = "lm_head"
    VISION = "vision"
    AUDIO = "audio"
    PLE = "ple"
    HYPER_CONNECTION = "hyper_connection"
    ROPE_CACHE = "rope_cache"
    OTHER = "other"


@enum.unique
class Hold(enum.StrEnum):
    """How the ranks of a tensor-parallel group hold a weight."""

    WHOLE = "whole"
    ROWS = "rows"  # output side divided; a bias with it
    COLUMNS = "columns"  # input side divided; a bias kept whole
    KV = "kv"  # by key-value heads, which are repeated where there are more ranks than heads
    QKV = "qkv"  # query, key and value stored as one matrix
    VOCAB = "vocab"  # rows padded to 64, then divided
    CHANNELS = "channels"  # a vector, divided
    EXPERTS = "experts"  # by expert (EP) or by intermediate size (TP)
    TABLE = "table"  # the n-gram table: rows divided, on the card or in pinned host memory
    GROUPS = "groups"  # Mamba-2 projections, whose B and C groups are repeated where they do not divide
    SKIP = "skip"  # stored, but not loaded


class Rule(NamedTuple):
    pattern: re.Pattern[str]
    part: Part
    hold: Hold
    into: str = ""
    plain: bool = False  # kept in the model dtype, whatever the file's
    dtype: str = ""  # of the engine, where it is not the model's


def _rules(*rows: tuple[object, ...]) -> tuple[Rule, ...]:
    return tuple(Rule(re.compile(str(pattern)), *rest) for pattern, *rest in rows)  # type: ignore[arg-type]


_DOWN = r"hyper_connection\.(input_mix_weight_down|block_inject_weight)"
_UPS = r"(gate_proj|up_proj|gate_up_proj|w1|w3)"
_ATTN = r"(?:self_attn|self_attention|attention|attn|mixer)\."

TEXT_RULES = _rules(
    # Never loaded, or rebuilt by the engine.
    (r"rotary_emb\.inv_freq$|\.rotary_emb\.|masked_bias$|hashstats_|token_lookup", Part.OTHER, Hold.SKIP),
    (r"\.(k_scale|v_scale|q_scale|prob_scale)$", Part.OTHER, Hold.SKIP),
    # Embeddings and heads.
    (r"^(embed_tokens|embeddings|word_embeddings|wte|tok_embeddings)$", Part.EMBED, Hold.VOCAB),
    (r"^(lm_head|output|embed_out|shared_head\.head)$", Part.LM_HEAD, Hold.VOCAB),
    # Per-layer embeddings. Gemma 3n and 4: models/gemma4.py; Qwen4Exp: models/qwen4_exp/nvidia/ple_layer.py.
    (r"^embed_tokens_per_layer$", Part.PLE, Hold.VOCAB),
    (r"^per_layer_model_projection$", Part.PLE, Hold.ROWS),
    (r"^(per_layer_|post_per_layer_input_norm)", Part.PLE, Hold.WHOLE),
    (r"^ple\.ple_embedding\.ngram_embedding\.(shards?[._]\d+)$", Part.PLE, Hold.TABLE, "ngram table"),
    (r"^ple\.ple_embedding\.ngram_embedding$", Part.PLE, Hold.TABLE),
    (r"^ple\.ple_embedding\.ngram_embedding\.", Part.PLE, Hold.SKIP),
    (r"^ple\.ple_embedding\.", Part.PLE, Hold.WHOLE, "", False, "I64"),
    (r"^ple\.(key_proj|value_proj)$", Part.PLE, Hold.WHOLE, "ple.kv_proj"),
    (r"^ple\.", Part.PLE, Hold.WHOLE),
    # Hyper-connections: models/qwen4_exp/nvidia/hyperconnection.py pads the merged rows to 16.
    (rf"^attn_{_DOWN}$", Part.HYPER_CONNECTION, Hold.WHOLE, "attn_hc.down"),
    (rf"^mlp_{_DOWN}$", Part.HYPER_CONNECTION, Hold.WHOLE, "mlp_hc.down"),
    (r"hyper_connection", Part.HYPER_CONNECTION, Hold.WHOLE),
    # Sparse-attention indexers: replicated. DeepSeek V3.2 and GLM 5 keep the key side in BF16 (deepseek_v2.py).
    (rf"^{_ATTN}indexer\.index_qk_proj$", Part.ATTENTION, Hold.WHOLE, "qkv_proj"),
    (rf"^{_ATTN}indexer\.(wk|weights_proj|wk_weights_proj)$", Part.ATTENTION, Hold.WHOLE, "wk_weights_proj", True),
    (rf"^{_ATTN}indexer\.k_norm$", Part.ATTENTION, Hold.WHOLE, "", False, "F32"),
    (rf"^{_ATTN}indexer\.", Part.ATTENTION, Hold.WHOLE),
    # Latent attention: the down projections are replicated.
    (rf"^{_ATTN}(q_a_proj|kv_a_proj_with_mqa)$", Part.ATTENTION, Hold.WHOLE, "fused_qkv_a_proj"),
    (rf"^{_ATTN}(q_b_proj|kv_b_proj)$", Part.ATTENTION, Hold.ROWS),
    # Gated delta nets.
    (r"^linear_attn\.(in_proj_qkv|in_proj_z|in_proj_qkvz)$", Part.LINEAR_ATTENTION, Hold.ROWS, "in_proj_qkvz"),
    (r"^linear_attn\.(in_proj_b|in_proj_a|in_proj_ba)$", Part.LINEAR_ATTENTION, Hold.ROWS, "in_proj_ba"),
    (r"^linear_attn\.(conv1d|dt_bias)$", Part.LINEAR_ATTENTION, Hold.CHANNELS),
    (r"^linear_attn\.A_log$", Part.LINEAR_ATTENTION, Hold.CHANNELS, "", False, "F32"),
    (r"^linear_attn\.out_proj$", Part.LINEAR_ATTENTION, Hold.COLUMNS),
    (r"^linear_attn\.norm$", Part.LINEAR_ATTENTION, Hold.WHOLE),
    # Mamba 2: mamba/mamba_mixer2.py.
    (r"^(mixer|mamba)\.(in_proj|conv1d)$", Part.LINEAR_ATTENTION, Hold.GROUPS),
    (r"^(mixer|mamba)\.A_log$", Part.LINEAR_ATTENTION, Hold.CHANNELS, "", False, "F32"),
    (r"^(mixer|mamba)\.(D|dt_bias|norm)$", Part.LINEAR_ATTENTION, Hold.CHANNELS),
    (r"^(mixer|mamba)\.out_proj$", Part.LINEAR_ATTENTION, Hold.COLUMNS),
    (r"^conv\.in_proj$", Part.LINEAR_ATTENTION, Hold.ROWS),
    (r"^conv\.out_proj$", Part.LINEAR_ATTENTION, Hold.COLUMNS),
    (r"^conv\.conv$", Part.LINEAR_ATTENTION, Hold.CHANNELS),
    # Grouped-query attention.
    (rf"^{_ATTN}(q_proj|wq)$", Part.ATTENTION, Hold.ROWS, "qkv_proj"),
    (rf"^{_ATTN}(k_proj|v_proj|wk|wv)$", Part.ATTENTION, Hold.KV, "qkv_proj"),
    (rf"^{_ATTN}(qkv_proj|query_key_value|c_attn|Wqkv|W_pack)$", Part.ATTENTION, Hold.QKV),
    (rf"^{_ATTN}(o_proj|dense|out_proj|c_proj|wo)$", Part.ATTENTION, Hold.COLUMNS),
    (rf"^{_ATTN}(sinks|attention_sink_bias)$", Part.ATTENTION, Hold.CHANNELS),
    (rf"^{_ATTN}[\w.]*norm(alization)?$", Part.ATTENTION, Hold.WHOLE),
    # Experts, routers, shared experts.
    (r"(^|\.)experts\.", Part.EXPERT, Hold.EXPERTS),
    (r"^block_sparse_moe\.(input_linear|output_linear)$", Part.EXPERT, Hold.EXPERTS),
    (r"(e_score_correction_bias|expert_bias|gate\.bias|router_bias)$", Part.ROUTER, Hold.WHOLE, "", False, "F32"),
    (r"^(mlp|block_sparse_moe|mixer|feed_forward|moe)\.(gate|router)(\.layer)?$", Part.ROUTER, Hold.WHOLE),
    (r"^router\.", Part.ROUTER, Hold.WHOLE),
    (rf"(^|\.)shared_experts?\.{_UPS}$", Part.SHARED_EXPERT, Hold.ROWS, "shared.gate_up_proj"),
    (r"^shared_mlp\.input_linear$", Part.SHARED_EXPERT, Hold.ROWS),
    (r"(^|\.)shared_experts?\.(down_proj|w2)$|^shared_mlp\.output_linear$", Part.SHARED_EXPERT, Hold.COLUMNS),
    (r"shared_expert_gate$", Part.SHARED_EXPERT, Hold.WHOLE),
    (r"^mixer\.fc[12]_latent_proj$", Part.EXPERT, Hold.WHOLE),
    # Dense feed-forward.
    (rf"^(mlp|feed_forward|mixer)\.{_UPS}$", Part.MLP, Hold.ROWS, "gate_up_proj"),
    (r"^(mlp|feed_forward)\.(fc1|dense_h_to_4h|c_fc)$", Part.MLP, Hold.ROWS),
    (r"^(mlp|feed_forward|mixer)\.(down_proj|w2|fc2|dense_4h_to_h|c_proj)$", Part.MLP, Hold.COLUMNS),
    # Drafters: vllm model_executor/models/*_mtp.py, deepseek_mtp.py.
    (r"^(fc|fc_embedding|fc_hidden)$", Part.OTHER, Hold.ROWS),
    (r"^eh_proj$", Part.OTHER, Hold.WHOLE),
    # What is left of a layer: norms and scalars.
    (r"(^|[._])(norm|norm\d|norm_f|layernorm|layernorm_\d|ln_\w+|[eh]norm|pre_fc_norm_\w+)$", Part.NORM, Hold.WHOLE),
    (r"^layer_scalar$", Part.OTHER, Hold.WHOLE),
)  # fmt: skip
"""Weights of the text model and its drafter. The first matching rule decides."""

TOWER_RULES = _rules(
    (r"(^|\.)patch_embedding\.linear$", Part.VISION, Hold.ROWS),  # Llama 4
    # Gemma 4 and 3n build their towers by transformers' own classes: replicated.
    (r"\.linear$|^patch_embedder\.|relative_k_proj$|embedding_projection$", Part.VISION, Hold.WHOLE),
    (r"(attn\.qkv|attn\.qkv_proj|wqkv)$", Part.VISION, Hold.ROWS),
    (r"(attn|attention)\.(q_proj|k_proj|v_proj|q|k|v)$", Part.VISION, Hold.ROWS, "qkv"),
    (r"(attn|attention)\.(proj|out_proj|o_proj)$|^wo$", Part.VISION, Hold.COLUMNS),
    (r"(mlp|feed_forward)\.(gate_proj|up_proj)$", Part.VISION, Hold.ROWS, "gate_up"),
    (r"(mlp|feed_forward)\.(linear_fc1|fc1|fc0)$", Part.VISION, Hold.ROWS),
    (r"(mlp|feed_forward)\.(linear_fc2|fc2|down_proj)$", Part.VISION, Hold.COLUMNS),
    (r"merger[\w.]*\.linear_fc1$|multi_modal_projector\.linear_1$", Part.VISION, Hold.ROWS),
    (r"merger[\w.]*\.linear_fc2$|multi_modal_projector\.linear_2$", Part.VISION, Hold.COLUMNS),
    (r"", Part.VISION, Hold.WHOLE),
)  # fmt: skip
"""Weights of vision and audio towers."""


def rule_for(weight: Weight) -> Rule | None:
    """The first rule that names the weight; None where no rule does."""
    if weight.stack == "audio":
        return Rule(re.compile(""), Part.AUDIO, Hold.WHOLE)
    rules = TOWER_RULES if weight.stack == "vision" else TEXT_RULES
    return next((rule for rule in rules if rule.pattern.search(weight.name)), None)
