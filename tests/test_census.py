"""From headers and configs to facts: sums that must hold, formats by their scales, and configs from nowhere."""

import gzip
import json
from pathlib import Path

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from formulas.errors import HubMisbehaved
from formulas.facts import Facts, Ple, Role, Stack
from formulas.tensors import TensorGroup, expand, tensor_bytes
from formulas.units import GIB
from screen.census import census, derive, parse_config
from screen.header import parse_header
from screen.quantization import quantization_config

SHARED = Path(__file__).parents[1].parent / "shared" / "data"
QUICK = settings(deadline=None, max_examples=100)


def header(*tensors, name="model.safetensors"):
    """A parsed header of (name or pattern, dtype, shape) in this order."""
    document, end = {}, 0
    for key, dtype, shape in expand(TensorGroup(*tensor) for tensor in tensors):
        stop = end + tensor_bytes(dtype, tuple(shape))
        document[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, stop]}
        end = stop
    raw = orjson.dumps(document)
    return parse_header(len(raw).to_bytes(8, "little") + raw, file_size=8 + len(raw) + end, name=name)


def facts(*tensors, config=None, **more):
    return derive(config, {"model.safetensors": header(*tensors)}, **more)


def read(repo, folder="headers"):
    """(config, headers) of a repo in the data folder; the test is skipped where there is none."""
    path = SHARED / folder / f"{repo}.json.gz"
    if not path.is_file():
        pytest.skip(f"no ../shared/data/{folder}/{path.name}")
    stored = orjson.loads(gzip.decompress(path.read_bytes()))
    headers = {}
    for shard, document in stored["headers"].items():
        size = stored["file_sizes"][shard]
        data = max((info["data_offsets"][1] for key, info in document.items() if key != "__metadata__"), default=0)
        raw = orjson.dumps(document).ljust(size - 8 - data)
        headers[shard] = parse_header(len(raw).to_bytes(8, "little") + raw, file_size=size, name=shard)
    configs = [SHARED / place / repo / "config.json" for place in ("configs", "configs_assembled")]
    found = next((path for path in configs if path.is_file()), None)
    return (parse_config(found.read_bytes(), name="config.json") if found else None), headers


def gib(cells, *, stack=None, roles=None):
    wanted = [c.bytes for c in cells if (stack is None or c.stack is stack) and (roles is None or c.role in roles)]
    return round(sum(wanted) / GIB, 2)


# The census ---------------------------------------------------------------------------------------------------------

word = st.sampled_from(["model", "layers", "mtp", "visual", "mlp", "experts", "self_attn", "ple", "weight", "é", ""])
some_name = st.lists(st.one_of(word, st.integers(0, 70).map(str)), min_size=1, max_size=6).map(".".join)
some_tensor = st.tuples(some_name, st.sampled_from(["BF16", "U8", "F4"]), st.sampled_from([(), (2,), (4, 2), (0, 3)]))


@given(st.lists(some_tensor, max_size=12, unique_by=lambda t: t[0]), st.sampled_from([None, 0, 7, 61]))
@QUICK
def test_cells_sum_to_the_data_whatever_the_names(tensors, layers):
    tensors = [t for t in tensors if t[1] != "F4" or t[2]]
    config = {} if layers is None else {"num_nextn_predict_layers": 1, "num_hidden_layers": layers}
    held = {"a": header(*tensors[:5]), "b": header(*tensors[5:])}
    cells = census(held, config)
    assert sum(c.bytes for c in cells) == sum(h.data_bytes for h in held.values())
    assert sum(c.tensors for c in cells) == len(tensors)
    assert len({(c.stack, c.role, c.dtype) for c in cells}) == len(cells)
    whole = derive(config, held)
    assert whole.census == cells
    assert sorted(expand(whole.tensor_groups)) == sorted(tensors)
    assert Facts.model_validate_json(whole.model_dump_json()) == whole


def test_flash_next_nvfp4_as_published():
    """RadixArk/Qwen3.8-Flash-Next-NVFP4: the figures of a published account of this structure."""
    config, headers = read("RadixArk__Qwen3.8-Flash-Next-NVFP4")
    known = derive(config, headers)
    experts = gib(known.census, stack=Stack.MAIN, roles={Role.EXPERT, Role.SHARED_EXPERT})
    mtp, ple = gib(known.census, stack=Stack.MTP), gib(known.census, roles={Role.PLE})
    total = gib(known.census)
    assert (known.shards, known.tensors) == (206, 296_475)
    assert (total, mtp, ple, experts) == (125.87, 4.86, 47.75, 63.72)
    rest = known.tensor_bytes - known.mtp.bytes - known.ple.bytes
    rest -= sum(c.bytes for c in known.census if c.stack is Stack.MAIN and c.role in (Role.EXPERT, Role.SHARED_EXPERT))
    assert round(rest / GIB, 2) == 9.55
    assert (known.experts.declared, known.experts.found, known.experts.layers) == (512, 512, 48)
    assert known.mtp.dtypes == {"BF16": known.mtp.bytes}
    assert (known.ple.kind, known.ple.format, known.ple.declared_dtype) == ("ngram", "fp8", None)
    assert round(known.ple.table_bytes / GIB, 2) == 47.68
    assert (known.quantization.method, known.quantization.format) == ("modelopt", "nvfp4")
    assert known.quantization.by_role["mtp/expert"] == "bf16"
    assert sum(group.copies for group in known.tensor_groups) == known.tensors
    assert len(known.tensor_groups) < 150


@pytest.mark.parametrize(
    ("repo", "folder", "tensors", "experts", "layers", "mtp", "form"),
    [
        ("Qwen__Qwen3.8-Flash-Next", "headers", 1_658, 512, 48, 31, "bf16"),
        ("deepseek-ai__DeepSeek-R1", "headers", 91_991, 256, 58, 1_564, "fp8_block128"),
        ("bryce-hoehn__Qwen3.5-25B-REAP-A3B-Coding", "headers", 22_213, 180, 40, 0, "fp16"),
        ("openai__gpt-oss-20b", "headers", 459, 32, 24, 0, "mxfp4"),
        ("TheBloke__Genz-70b-GPTQ", "headers", 2_963, None, 0, 0, "int3_channel"),
        ("nvidia__NVIDIA-Nemotron-3-Nano-30B-A3B-FP8", "headers", 18_179, 128, 23, 0, "fp8_tensor"),
        ("deepseek-ai__DeepSeek-V3-l6", "measured/headers", 6_301, 256, 3, 1_564, "fp8_block128"),
    ],
)
def test_real_headers(repo, folder, tensors, experts, layers, mtp, form):
    known = derive(*read(repo, folder))
    assert (known.tensors, known.experts.found, known.experts.layers) == (tensors, experts, layers)
    assert (known.mtp.tensors, known.quantization.format) == (mtp, form)
    assert known.experts.uneven == {}
    assert known.quantization.source == "header"


# Experts, MTP, PLE --------------------------------------------------------------------------------------------------


def test_experts_are_counted_a_layer():
    known = facts(
        ("model.layers.{0-3}.mlp.experts.{0-7}.up_proj.weight", "BF16", (4, 4)),
        ("model.layers.{4}.mlp.experts.{0-5}.up_proj.weight", "BF16", (4, 4)),
        ("mtp.layers.{0}.mlp.experts.{0-1}.up_proj.weight", "BF16", (4, 4)),
        config={"num_experts": 8, "num_hidden_layers": 5},
    )
    assert known.experts.model_dump() == {"declared": 8, "found": 8, "layers": 5, "uneven": {4: 6}}


@pytest.mark.parametrize(
    "name",
    ["mlp.experts.gate_up_proj", "moe.gate_proj.weight", "block_sparse_moe.input_linear.weight",
     "mlp.experts.gate_up_proj_blocks"],
)  # fmt: skip
def test_packed_experts_are_their_first_size(name):
    known = facts(
        (f"model.layers.{{0-2}}.{name}", "U8", (16, 4, 4)), ("model.layers.{0-2}.mlp.gate.weight", "F32", (16, 4))
    )
    assert (known.experts.found, known.experts.layers) == (16, 3)


def test_the_drafter_and_the_table_do_not_make_a_checkpoint_mixed():
    """As nvidia/Qwen3.8-Flash-Next-NVFP4: NVFP4 experts, an FP8 table, FP8 experts in the drafter."""
    known = facts(
        ("model.layers.{0-3}.mlp.experts.{0-7}.up_proj.weight", "U8", (128, 64)),
        ("model.layers.{0-3}.mlp.experts.{0-7}.up_proj.weight_scale", "F8_E4M3", (128, 8)),
        ("model.layers.{0-3}.mlp.experts.{0-7}.up_proj.input_scale", "F32", ()),
        (f"{TABLE}.shard_{{0-3}}.weight", "F8_E4M3", (512, 160)),
        ("mtp.layers.{0}.mlp.experts.{0-7}.up_proj.weight", "F8_E4M3", (256, 256)),
        ("mtp.layers.{0}.mlp.experts.{0-7}.up_proj.weight_scale_inv", "BF16", (2, 2)),
        config={"quantization_config": {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}},
    )
    assert known.quantization.format == "nvfp4"
    assert known.quantization.by_role == {"main/expert": "nvfp4", "main/ple": "fp8", "mtp/expert": "fp8_block128"}


def test_a_dense_model_has_no_expert_count():
    known = facts(("model.layers.{0}.mlp.up_proj.weight", "BF16", (4, 4)))
    assert known.experts.model_dump() == {"declared": None, "found": None, "layers": 0, "uneven": {}}


def test_mtp_declared_and_absent():
    known = facts(
        ("model.layers.{0-1}.mlp.up_proj.weight", "BF16", (4, 4)),
        config={"num_hidden_layers": 2, "num_nextn_predict_layers": 1, "model_type": "deepseek_v3"},
    )
    assert (known.mtp.declared, known.mtp.tensors, known.mtp.bytes) == (1, 0, 0)


def test_numbered_mtp_layers_are_folded_apart():
    known = facts(
        ("model.layers.{0-2}.mlp.up_proj.weight", "BF16", (4, 4)),
        config={"num_hidden_layers": 2, "num_nextn_predict_layers": 1},
    )
    assert [g.pattern for g in known.tensor_groups] == [
        "model.layers.{0-1}.mlp.up_proj.weight",
        "model.layers.{2}.mlp.up_proj.weight",
    ]
    assert known.mtp.bytes == 32


TABLE = "model.layers.1.ple.ple_embedding.ngram_embedding"


@pytest.mark.parametrize(
    ("tensors", "kind", "form"),
    [
        ([], "none", None),
        ([(f"{TABLE}.shard_{{0-3}}.weight", "BF16", (8, 16))], "ngram", "bf16"),
        ([(f"{TABLE}.shard_{{0-3}}.weight", "F8_E4M3", (8, 16)), (f"{TABLE}.weight_scale", "BF16", (1,))],
         "ngram", "fp8"),
        ([(f"{TABLE}.shard_{{0-3}}.weight", "F8_E4M3", (8, 16))], "ngram", "fp8"),
        (
            [
                (f"{TABLE}.shard_{{0-3}}.weight", "U8", (8, 8)),
                (f"{TABLE}.shard_{{0-3}}.weight_scale", "F8_E4M3", (8, 1)),
                (f"{TABLE}.shard_{{0-3}}.weight_scale_2", "F32", ()),
            ],
            "ngram",
            "nvfp4a16",
        ),
        ([(f"{TABLE}.shards.{{0-3}}.weight", "I8", (8, 16)), (f"{TABLE}.shards.{{0-3}}.weight_scale", "BF16", (8, 1))],
         "ngram", "int8"),
        ([("model.language_model.embed_tokens_per_layer.weight", "BF16", (8, 16))], "per_layer", "bf16"),
        ([("model.layers.1.engram.embedding.weight", "BF16", (8, 16))], "engram", "bf16"),
    ],
)  # fmt: skip
def test_ple_by_its_tensors(tensors, kind, form):
    known = facts(*tensors, ("model.norm.weight", "BF16", (4,)))
    assert (known.ple.kind, known.ple.format) == (kind, form)
    assert known.ple.table_bytes == known.ple.bytes == sum(TensorGroup(*t).bytes_total for t in tensors)


def test_the_ple_layer_is_more_than_its_table():
    known = facts(
        (f"{TABLE}.shard_0.weight", "F8_E4M3", (8, 16)), ("model.layers.1.ple.key_proj.weight", "BF16", (4, 4))
    )
    assert (known.ple.bytes, known.ple.table_bytes, known.ple.tensors) == (160, 128, 2)


@pytest.mark.parametrize(
    "config", [{"text_config": {"ple_embedding_dtype": "nvfp4"}}, {"ple_embedding_dtype": "nvfp4"}]
)
def test_the_declared_table_dtype(config):
    assert derive(config, None).ple.declared_dtype == "nvfp4"


def test_what_was_not_read_is_none():
    known = derive({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2}, None)
    assert (known.architecture, known.census, known.tensors, known.tensor_groups) == (
        "LlamaForCausalLM",
        None,
        None,
        None,
    )
    assert known.experts.found is None
    assert (known.mtp.tensors, known.mtp.bytes) == (None, None)
    assert known.ple == Ple(kind="none")
    nothing = derive(None, None)
    assert (nothing.quantization, nothing.experts, nothing.mtp, nothing.ple) == (None, None, None, None)


def test_a_role_of_two_packed_formats_is_mixed():
    known = facts(
        ("model.layers.{0-1}.mlp.up_proj.weight", "F8_E4M3", (64, 64)),
        ("model.layers.{0-1}.mlp.up_proj.weight_scale", "F32", ()),
        ("model.layers.{0-1}.mlp.down_proj.weight", "U8", (64, 32)),
        ("model.layers.{0-1}.mlp.down_proj.weight_scale", "F8_E4M3", (64, 4)),
        ("model.layers.{0-1}.input_layernorm.weight", "BF16", (64,)),
    )
    assert known.quantization.by_role == {"main/mlp": "mixed", "main/norm": "bf16"}
    assert known.quantization.format == "mixed"


# Configs from nowhere -----------------------------------------------------------------------------------------------


def test_infinity_is_read():
    config = parse_config(b'{"time_step_limit": [0.0, Infinity], "x": NaN, "y": "\\ud800"}', name="config.json")
    assert config["time_step_limit"] == [0.0, float("inf")]
    assert config["y"] == "?"


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"\xff\xfe\x00", b"[" * 100_000, b"<html>", b'{"a": 1'])
def test_a_config_that_is_none_is_an_error_with_its_name(data):
    with pytest.raises(HubMisbehaved, match=r"config\.json") as raised:
        parse_config(data, name="config.json")
    assert raised.value.code == "malformed_config"


odd = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=5,
)
KEYS = ["architectures", "model_type", "num_hidden_layers", "num_nextn_predict_layers", "num_experts", "layer_types",
        "ple_embedding_dtype", "hidden_size", "rope_scaling", "vision_config", "mtp", "ple_layer_ids"]  # fmt: skip
QUANT = ["quant_method", "quant_algo", "config_groups", "ignore", "modules_to_not_convert", "bits", "group_size",
         "weight_block_size", "kv_cache_scheme", "kv_cache_quant_algo", "num_bits", "weights"]  # fmt: skip
odd_quant = st.dictionaries(st.sampled_from(QUANT), odd | st.dictionaries(st.text(max_size=2), odd, max_size=2))
odd_config = st.dictionaries(st.sampled_from(KEYS), odd, max_size=5)


@given(odd_config, odd_config, st.one_of(odd, odd_quant), st.one_of(st.none(), odd_config, odd_quant))
@QUICK
def test_a_config_of_odd_types_gives_facts(config, text, quant, hf_quant):
    whole = {**config, "text_config": text, "quantization_config": quant}
    hf = None if hf_quant is None else {"quantization": hf_quant}
    held = {"a": header(("model.layers.{0-3}.mlp.experts.{0-1}.up_proj.weight_packed", "I32", (4, 4)),
                        ("model.layers.{0-3}.mlp.experts.{0-1}.up_proj.weight_scale", "F16", (4, 1)))}  # fmt: skip
    for known in (
        derive(whole, held, hf_quant=hf),
        derive(config, None, hf_quant=hf),
        derive({"text_config": 1}, None),
    ):
        assert Facts.model_validate_json(known.model_dump_json()) == known


def test_every_real_config_gives_facts():
    paths = sorted(SHARED.glob("configs*/**/*config*.json"))
    if not paths:
        pytest.skip("no ../shared/data/configs")
    for path in paths:
        config = parse_config(path.read_bytes(), name=path.name)
        known = derive(config, None, hf_quant=config if "hf_quant" in path.name else None)
        assert Facts.model_validate_json(known.model_dump_json()) == known
        declared = quantization_config(config, config if "hf_quant" in path.name else None)
        assert not declared or known.quantization.method or known.quantization.format, path.parent.name
    nested = SHARED / "configs" / "moonshotai__Kimi-K2.5" / "config.json"
    kimi = derive(json.loads(nested.read_text()), None).quantization
    assert (kimi.method, kimi.format) == ("compressed-tensors", "int4_g32")
