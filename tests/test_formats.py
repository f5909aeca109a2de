"""How weights are stored: by their scales where there are headers, by the config where there are none."""

import pytest

from formulas.facts import Role
from formulas.tensors import family, tensor_bytes
from screen.census import derive
from screen.formats import modules
from screen.quantization import declared_format, kv_cache_dtype, method, quantization_config


@pytest.mark.parametrize(
    ("form", "parts"),
    [
        ("bf16", {"weight": ("BF16", (256, 512)), "bias": ("BF16", (256,))}),
        ("fp32", {"weight": ("F32", (256, 512))}),
        ("fp8", {"weight": ("F8_E4M3", (256, 512))}),
        ("fp8_tensor", {"weight": ("F8_E4M3", (256, 512)), "weight_scale": ("F32", ()), "input_scale": ("F32", ())}),
        ("fp8_tensor", {"weight": ("F8_E4M3", (256, 512)), "weight_scale": ("BF16", (1,))}),
        ("fp8_channel", {"weight": ("F8_E4M3", (256, 512)), "weight_scale": ("BF16", (256, 1))}),
        ("fp8_block128", {"weight": ("F8_E4M3", (256, 512)), "weight_scale_inv": ("F32", (2, 4))}),
        ("fp8_block128", {"weight": ("F8_E4M3", (576, 7168)), "weight_scale_inv": ("F32", (5, 56))}),
        ("fp8_block128", {"weight": ("F8_E4M3", (256, 160)), "weight_scale_inv": ("F32", (2, 2))}),
        ("fp8_block128", {"weight": ("F8_E4M3", (256, 512)), "scale": ("F8_E8M0", (2, 4))}),
        ("mxfp8", {"weight": ("F8_E4M3", (256, 512)), "weight_scale": ("U8", (256, 16))}),
        ("nvfp4", {"weight": ("U8", (256, 256)), "weight_scale": ("F8_E4M3", (256, 32)),
                   "weight_scale_2": ("F32", ()), "input_scale": ("F32", ())}),
        ("nvfp4a16", {"weight": ("U8", (256, 256)), "weight_scale": ("F8_E4M3", (256, 32)),
                      "weight_scale_2": ("F32", ())}),
        ("nvfp4", {"weight_packed": ("U8", (256, 256)), "weight_scale": ("F8_E4M3", (256, 32)),
                   "weight_global_scale": ("F32", (1,)), "input_global_scale": ("F32", (1,))}),
        ("mxfp4", {"weight_packed": ("U8", (256, 256)), "weight_scale": ("U8", (256, 16))}),
        ("mxfp4", {"weight": ("I8", (256, 256)), "scale": ("F8_E8M0", (256, 16))}),
        ("mxfp4", {"weight": ("F4", (256, 512)), "weight_scale": ("F8_E8M0", (256, 16))}),
        ("int8_channel", {"weight": ("I8", (256, 512)), "weight_scale": ("F32", (256, 1))}),
        ("int8_g128", {"weight": ("I8", (256, 512)), "weight_scale": ("F32", (256, 4))}),
        ("int8_bnb", {"weight": ("I8", (256, 512)), "SCB": ("F32", (256,))}),
        ("nf4", {"weight": ("U8", (65536, 1)), "weight.absmax": ("F32", (2048,)),
                 "weight.quant_state.bitsandbytes__nf4": ("U8", (90,))}),
        ("int4_g128", {"qweight": ("I32", (64, 256)), "qzeros": ("I32", (4, 32)), "scales": ("F16", (4, 256)),
                       "g_idx": ("I32", (512,))}),
        ("int3_channel", {"qweight": ("I32", (48, 256)), "qzeros": ("I32", (1, 24)), "scales": ("F16", (1, 256))}),
        ("int4_g128", {"qweight": ("I32", (512, 32)), "qzeros": ("I32", (4, 32)), "scales": ("F16", (4, 256))}),
        ("int", {"weight_packed": ("I32", (256, 64)), "weight_scale": ("BF16", (256, 4)),
                 "weight_shape": ("I64", (2,))}),
    ],
)  # fmt: skip
def test_a_format_is_decided_by_the_scales(form, parts):
    counts = {(family(f"model.layers.0.mlp.up_proj.{part}"), stored): 3 for part, stored in parts.items()}
    [module] = modules(counts, {})
    assert (module.format, module.role) == (form, Role.MLP)
    assert module.bytes == 3 * sum(tensor_bytes(*stored) for stored in parts.values())


def test_the_config_is_asked_for_bits_no_tensor_shows():
    counts = {
        ("m.mlp.up_proj.weight_packed", ("I32", (256, 64))): 1,
        ("m.mlp.up_proj.weight_scale", ("F16", (256, 4))): 1,
    }
    for bits, form in ((4, "int4_g128"), (8, "int8_g64")):
        groups = {"group_0": {"weights": {"num_bits": bits, "type": "int"}}}
        assert [m.format for m in modules(counts, {"config_groups": groups})] == [form]
        assert [m.format for m in modules(counts, {"bits": bits})] == [form]


def test_expert_weights_that_are_not_modules():
    counts = {
        ("model.layers..mlp.experts.gate_up_proj", ("F8_E4M3", (8, 256, 512))): 2,
        ("model.layers..mlp.experts.gate_up_proj_scale_inv", ("F32", (8, 2, 4))): 2,
        ("model.layers..mlp.experts.down_proj_blocks", ("U8", (8, 512, 8, 16))): 2,
        ("model.layers..mlp.experts.down_proj_scales", ("U8", (8, 512, 8))): 2,
    }
    assert sorted(m.format for m in modules(counts, {})) == ["fp8_block128", "mxfp4"]


@pytest.mark.parametrize(
    ("quant", "how", "form", "kv"),
    [
        ({}, None, None, None),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8", "fp8_block128", None),
        ({"quant_method": "FP8"}, "fp8", "fp8_tensor", None),
        ({"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, "modelopt", "fp8_tensor", "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "modelopt", "mixed", None),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
         "modelopt", "nvfp4", "fp8"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "gptq", "int4_g128", None),
        ({"quant_method": "gptq", "bits": 3, "group_size": -1}, "gptq", "int3_channel", None),
        ({"quant_method": "mxfp4"}, "mxfp4", "mxfp4", None),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
         "bitsandbytes", "nf4", None),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": None, "config_groups": {"group_0": {"weights": {
            "num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}}}},
         "compressed-tensors", "int4_g32", None),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"input_activations": None, "weights": {
            "num_bits": 4, "type": "float", "group_size": 16}}}}, "compressed-tensors", "nvfp4a16", None),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {
            "num_bits": 8, "type": "float", "strategy": "channel"}}}}, "compressed-tensors", "fp8_channel", None),
    ],
)  # fmt: skip
def test_what_a_config_declares(quant, how, form, kv):
    assert method({}, quant) == how
    assert (declared_format(how, quant) if quant else None) == form
    assert kv_cache_dtype(quant, None) == kv


def test_where_a_quantisation_config_may_stand():
    quant = {"quant_method": "compressed-tensors"}
    assert quantization_config({"quantization_config": quant}, None) == quant
    assert quantization_config({"text_config": {"quantization_config": quant}}, None) == quant  # Kimi K2.5
    assert quantization_config({"compression_config": quant}, None) == quant
    assert quantization_config({}, {"quantization": {"quant_algo": "FP8"}}) == {"quant_algo": "FP8"}
    mlx = {"quantization": {"bits": 4, "group_size": 64}}
    assert (method(mlx, quantization_config(mlx, None)), derive(mlx, None).quantization.format) == ("mlx", "int4_g64")


def test_the_ignore_list_is_kept_apart_from_the_config():
    quant = {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "ignore": ["lm_head", "*.self_attn*", 3],
        "limit": [1e999],
    }
    known = derive({"quantization_config": quant}, None).quantization
    assert known.ignore == ("*.self_attn*", "lm_head")
    assert known.config == {"quant_method": "modelopt", "quant_algo": "NVFP4", "limit": [None]}
