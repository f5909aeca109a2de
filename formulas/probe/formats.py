"""Quantisation formats as a config.json spells them, and models of one layer to try them on."""

from __future__ import annotations


def compressed(weights: dict, inputs: dict | None, layout: str) -> dict:
    """A compressed-tensors configuration of one group of linears."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group},
            "ignore": ["lm_head", "re:.*mlp.gate$"], "quantization_status": "compressed"}  # fmt: skip


def modelopt(algorithm: str, **more) -> dict:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head", "*.mlp.gate"], **more}


def values(bits: int, type: str, strategy: str, dynamic: bool | str = False, **more) -> dict:
    """How compressed-tensors states one side of a matrix product."""
    return {"num_bits": bits, "type": type, "strategy": strategy, "symmetric": True, "dynamic": dynamic, **more}


def gptq(bits: int, **more) -> dict:
    return {"quant_method": "gptq", "bits": bits, "group_size": 128, "desc_act": False, "sym": True, **more}


TOKEN8 = values(8, "float", "token", dynamic=True)
NVFP4 = values(4, "float", "tensor_group", group_size=16)
MXFP4 = values(4, "float", "group", group_size=32, scale_dtype="torch.uint8")
FP8_TENSOR = values(8, "float", "tensor")
QUARK_FP8 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}
BF16_IN_GPT_OSS = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]

# format -> (quantization_config of the checkpoint, options given to the engine)
FORMATS: dict[str, tuple[dict | None, dict]] = {
    "bf16": (None, {}),
    "fp8_block128": ({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}, {}),
    "fp8_tensor": ({"quant_method": "fp8", "activation_scheme": "dynamic"}, {}),
    "fp8_tensor_static": ({"quant_method": "fp8", "activation_scheme": "static"}, {}),
    "modelopt_fp8": (modelopt("FP8"), {}),
    "ct_fp8_channel": (compressed(values(8, "float", "channel"), TOKEN8, "float-quantized"), {}),
    "ct_fp8_tensor": (compressed(FP8_TENSOR, FP8_TENSOR, "float-quantized"), {}),
    "ct_fp8_block128": (compressed(
        values(8, "float", "block", block_structure=[128, 128]),
        values(8, "float", "group", dynamic=True, group_size=128), "float-quantized"), {}),
    "ct_fp8_w8a16": (compressed(values(8, "float", "channel"), None, "naive-quantized"), {}),
    "nvfp4": (modelopt("NVFP4", group_size=16), {}),
    "ct_nvfp4": (compressed(NVFP4, {**NVFP4, "dynamic": "local"}, "nvfp4-pack-quantized"), {}),
    "ct_nvfp4a16": (compressed(NVFP4, None, "nvfp4-pack-quantized"), {}),
    "mxfp4_gpt_oss": ({"quant_method": "mxfp4", "modules_to_not_convert": BF16_IN_GPT_OSS}, {}),
    "ct_mxfp4a16": (compressed(MXFP4, None, "mxfp4-pack-quantized"), {}),
    "ct_mxfp4": (compressed(MXFP4, {**MXFP4, "dynamic": True}, "mxfp4-pack-quantized"), {}),
    "modelopt_mxfp8": (modelopt("MXFP8", group_size=32), {}),
    "awq_int4_g128": ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}, {}),
    "gptq_int4_g128": (gptq(4), {}),
    "gptq_int4_act_order": (gptq(4, desc_act=True), {}),
    "gptq_int8_g128": (gptq(8), {}),
    "gptq_int3": (gptq(3), {}),
    "auto_round_int4_g128": ({"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True,
                              "packing_format": "auto_round:auto_gptq"}, {}),
    "ct_int4_g128": (compressed(values(4, "int", "group", group_size=128), None, "pack-quantized"), {}),
    "ct_int4_g32": (compressed(values(4, "int", "group", group_size=32), None, "pack-quantized"), {}),
    "ct_int8_channel": (compressed(values(8, "int", "channel"), None, "pack-quantized"), {}),
    "ct_int8_w8a8": (compressed(
        values(8, "int", "channel"), values(8, "int", "token", dynamic=True), "int-quantized"), {}),
    "ct_w4a8_fp8": (compressed(values(4, "int", "group", group_size=128), TOKEN8, "pack-quantized"), {}),
    "fbgemm_fp8": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, {}),
    "quark_fp8": ({"quant_method": "quark", "export": {"kv_cache_group": [], "pack_method": "reorder"},
                   "layer_type_quant_config": {}, "layer_quant_config": {}, "exclude": ["lm_head", "re:.*mlp.gate$"],
                   "global_quant_config": {"weight": QUARK_FP8, "input_tensors": QUARK_FP8, "output_tensors": None,
                                           "bias": None}}, {}),
    "torchao_int4": ({"quant_method": "torchao", "quant_type": {"default": {
        "_type": "Int4WeightOnlyConfig", "_version": 2, "_data": {"group_size": 128}}}}, {}),
    "experts_int8": ({"quant_method": "experts_int8"}, {}),
    "bitsandbytes_nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, {}),
    "gguf": ({"quant_method": "gguf"}, {}),
    "exl3": ({"quant_method": "exl3", "bits": 4.0}, {}),
    "aqlm": ({"quant_method": "aqlm"}, {}),
    "hqq": ({"quant_method": "hqq"}, {}),
    "online_fp8": (None, {"quantization": "fp8"}),
    "online_fp8_block": (None, {"quantization": "fp8_per_block"}),
    "online_nvfp4": (None, {"quantization": "nvfp4_per_token"}),
    "online_mxfp8": (None, {"quantization": "mxfp8"}),
    "online_int8": (None, {"quantization": "int8_per_channel_weight_only"}),
}  # fmt: skip

TINY_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "torch_dtype": "bfloat16", "hidden_size": 2048,
    "num_hidden_layers": 1, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 16,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "intermediate_size": 6144, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "vocab_size": 1024, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
    "hidden_act": "silu", "norm_topk_prob": True, "tie_word_embeddings": False, "rope_theta": 1000000.0,
}  # fmt: skip
TINY_DENSE = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}  # instead of experts
TINY_GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "torch_dtype": "bfloat16", "hidden_size": 2880,
    "num_hidden_layers": 1, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "num_local_experts": 32, "num_experts_per_tok": 4, "intermediate_size": 2880, "vocab_size": 1024,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "silu", "swiglu_limit": 7.0,
    "sliding_window": 128, "rope_theta": 150000.0, "layer_types": ["full_attention"], "tie_word_embeddings": False,
}  # fmt: skip
