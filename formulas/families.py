"""How each family of text models spells and shapes the weights of its layers, in the words of its checkpoints.

Sources: vllm 0.33.0 model_executor/models and the checkpoints' own headers.
"""

from __future__ import annotations

from typing import NamedTuple


class Family(NamedTuple):
    """How one text model type spells and shapes its layers."""

    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    final_norm: str | None = "norm"
    embed: str = "embed_tokens"
    attention: str = "self_attn"
    output: str = "o_proj"
    fused_qkv: str = ""  # the one projection of query, key and value
    qk_norm: str = ""  # head: a weight a head dimension; full: a weight a channel
    qk_names: tuple[str, str] = ("q_norm", "k_norm")
    bias: bool = False  # on query, key, value, whatever the config says
    output_bias: bool = False
    sinks: bool = False
    mlp: str = "mlp"
    mlp_names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    mlp_bias: bool = False
    experts: str = "mlp.experts"
    expert_names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    expert_bias: bool = False
    router: str = "mlp.gate"
    router_bias: bool = False
    correction: str = ""  # the score correction bias, F32
    shared: str = "mlp.shared_experts"
    shared_gate: str = ""
    norm_bias: bool = False


_GEMMA_NORMS = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
)  # fmt: skip
_DEEPSEEK = Family(correction="mlp.gate.e_score_correction_bias")
_QWEN_NEXT = Family(qk_norm="head", shared="mlp.shared_expert", shared_gate="mlp.shared_expert_gate")
_MIXTRAL = Family(
    experts="block_sparse_moe.experts", expert_names=("w1", "w3", "w2"), router="block_sparse_moe.gate"
)
_PHI3 = Family(fused_qkv="qkv_proj", mlp_names=("gate_up_proj", "down_proj"))
_GRANITE_MOE = Family(
    experts="block_sparse_moe", expert_names=("input_linear", "output_linear"), router="block_sparse_moe.router.layer",
    shared="shared_mlp",
)  # fmt: skip
_LFM2 = Family(
    norms=("operator_norm", "ffn_norm"), final_norm="embedding_norm", output="out_proj", qk_norm="head",
    qk_names=("q_layernorm", "k_layernorm"), mlp="feed_forward", mlp_names=("w1", "w3", "w2"),
)  # fmt: skip

FAMILIES: dict[str, Family] = {
    **dict.fromkeys(("llama", "mistral", "ministral3", "smollm3", "granite", "seed_oss", "internlm3"), Family()),
    **dict.fromkeys(("qwen2", "qwen2_vl", "qwen2_5_vl", "qwen2_vl_text", "qwen2_5_vl_text", "mimo"), Family(bias=True)),
    **dict.fromkeys(("qwen3", "qwen3_moe", "qwen3_vl_text", "qwen3_vl_moe_text"), Family(qk_norm="head")),
    "qwen2_moe": Family(bias=True, shared="mlp.shared_expert", shared_gate="mlp.shared_expert_gate"),
    "olmo2": Family(norms=("post_attention_layernorm", "post_feedforward_layernorm"), qk_norm="full"),
    "olmo3": Family(norms=("post_attention_layernorm", "post_feedforward_layernorm"), qk_norm="full"),
    "glm4": Family(
        norms=("input_layernorm", "post_attention_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm"),
        mlp_names=("gate_up_proj", "down_proj"),
    ),
    "glm4_moe": Family(correction="mlp.gate.e_score_correction_bias"),
    "glm4_moe_text": Family(correction="mlp.gate.e_score_correction_bias"),
    "gemma": Family(),
    "gemma2": Family(norms=_GEMMA_NORMS),
    "gemma3_text": Family(norms=_GEMMA_NORMS, qk_norm="head"),
    "gemma4_text": Family(norms=_GEMMA_NORMS, qk_norm="head", experts="experts", router="router.proj"),
    "mixtral": _MIXTRAL,
    "minimax_m2": _MIXTRAL._replace(qk_norm="full", correction="block_sparse_moe.e_score_correction_bias"),
    "phi3": _PHI3,
    "phimoe": _MIXTRAL._replace(bias=True, output_bias=True, norm_bias=True),
    "phi": Family(
        norms=("input_layernorm",), final_norm="final_layernorm", output="dense", bias=True, output_bias=True,
        mlp_names=("fc1", "fc2"), mlp_bias=True, norm_bias=True,
    ),
    "granitemoe": _GRANITE_MOE, "granitemoeshared": _GRANITE_MOE, "granitemoehybrid": _GRANITE_MOE,
    "gpt_oss": Family(
        bias=True, output_bias=True, sinks=True, experts="mlp.experts", expert_names=("gate_up_proj", "down_proj"),
        expert_bias=True, router="mlp.router", router_bias=True,
    ),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _QWEN_NEXT),
    "qwen4_exp_text": _QWEN_NEXT._replace(norms=(), final_norm=None),
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "glm_moe_dsa", "glm4_moe_lite", "mistral4"), _DEEPSEEK
    ),
    "llama4_text": Family(
        experts="feed_forward.experts", expert_names=("gate_up_proj", "down_proj"), router="feed_forward.router",
        shared="feed_forward.shared_expert", mlp="feed_forward",
    ),
    "nemotron_h": Family(
        norms=("norm",), final_norm="norm_f", embed="embeddings", attention="mixer", mlp="mixer",
        mlp_names=("up_proj", "down_proj"), experts="mixer.experts", expert_names=("up_proj", "down_proj"),
        router="mixer.gate", correction="mixer.gate.e_score_correction_bias", shared="mixer.shared_experts",
    ),
    "nemotron-nas": Family(),
    "falcon": Family(
        norms=("ln_attn", "ln_mlp"), final_norm="ln_f", embed="word_embeddings", attention="self_attention",
        output="dense", fused_qkv="query_key_value", mlp_names=("dense_h_to_4h", "dense_4h_to_h"), norm_bias=True,
    ),
    "mimo_v2_flash": Family(correction="mlp.gate.e_score_correction_bias"),
    "lfm2": _LFM2, "lfm2_moe": _LFM2._replace(
        expert_names=("w1", "w3", "w2"), experts="feed_forward.experts", router="feed_forward.gate",
        correction="feed_forward.expert_bias",
    ),
}  # fmt: skip
