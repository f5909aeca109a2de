"""Weights per rank, held to what the engine's own modules weigh and to what running engines reported."""

import json
from functools import lru_cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from formulas.allocator import Pool
from formulas.choices import Runtime
from formulas.deployment import Deployment, parse_capability, parse_version
from formulas.facts import Quantization
from formulas.geometry import parse_geometry
from formulas.kernels import ExpertShape, expert_tensors, linear_tensors
from formulas.schemes import Kind, Scheme
from formulas.units import MIB
from formulas.weights import weights
from screen.quantization import ignore_list, kv_cache_dtype, method, quantization_config, without_lists

DATA = Path(__file__).parents[1].parent / "shared" / "data"
MEASURED = DATA / "measured"
needs_data = pytest.mark.skipif(not MEASURED.is_dir(), reason="the folder of measured data is not beside the project")

# The measured rows name some parts in their own words.
PARTS = {"experts": "expert", "linear_attn": "linear_attention", "hyper_conn": "hyper_connection", "rest": "other"}


@lru_cache(maxsize=64)
def config_of(path):
    """(geometry, quantization) of a config.json."""
    config = json.loads(Path(path).read_text())
    second = Path(path).with_name("hf_quant_config.json")
    return parse_geometry(config), quantization_of(config, json.loads(second.read_text()) if second.is_file() else None)


def quantization_of(config, hf_quant=None):
    stated = quantization_config(config, hf_quant)
    if not stated:
        return None
    return Quantization(
        method=method(config, stated), ignore=ignore_list(stated, hf_quant), config=without_lists(stated),
        kv_cache_dtype=kv_cache_dtype(stated, hf_quant),
    )  # fmt: skip


def module_rows():
    path = MEASURED / "engine_modules.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def predicted(row, **options):
    geometry, quantization = config_of(MEASURED / "module_configs" / row["model"] / "config.json")
    deployment = Deployment(
        version="0.33.0", tp=row["tp"], capability=row["capability"], expert_parallel=row["ep"],
        max_num_batched_tokens=2048, **options,
    )  # fmt: skip
    return weights(geometry, quantization, None, deployment, row["rank"])


def on_card(parts):
    return {PARTS.get(k, k): v for k, v in parts.items() if not k.startswith("host")}


# The engine refuses this build after loading, so its row repeats the sizes from before.
REFUSED = ("qwen3.8-flash-next-nvfp4", 4, "12.0")


@needs_data
@pytest.mark.parametrize("row", module_rows(), ids=lambda row: row["file"])
def test_engine_modules_by_part(row):
    got = predicted(row)
    refused = (row["model"], row["tp"], row["capability"]) == REFUSED
    assert bool(got.unmodelled) == refused
    for part, want in on_card(row["by"]).items():
        assert got.created_by[part] == pytest.approx(want, rel=3e-4), part
    assert sum(got.created_by.values()) == pytest.approx(row["total"], rel=1e-4)
    assert got.host_pinned == row["by"].get("host:ple", 0)
    if not refused:
        # The listing built sm90's NVFP4 layers but did not run Humming's preparation, which pads them.
        got = predicted(row, without={"humming"}) if row["capability"] == "9.0" else got
        assert sum(got.by.values()) == pytest.approx(row["post"]["total"], rel=1e-3)
        # The listing's allocator splits blocks as torch does by default; engines from 0.21 on load with a limit, which
        # the measured runs hold to the byte.
        assert got.rounded == pytest.approx(row["post"]["allocated"], rel=2e-3)


@needs_data
def test_humming_pads_what_it_prepares():
    """The same model built again on sm90 with Humming's own preparation: 320 columns a rank become 384."""
    row = {"model": "qwen3.8-flash-next-nvfp4", "tp": 2, "capability": "9.0", "ep": False, "rank": 0}
    if not (MEASURED / "module_configs" / row["model"]).is_dir():
        pytest.skip("the config of the build is not beside the project")
    assert predicted(row).created_by["expert"] == 33_974_452_224
    assert predicted(row).by["expert"] == 40_769_034_240


def test_qwen3_8b_loads_what_its_log_says():
    """vLLM logs 15.2683 GiB for Qwen3-8B on one card: parameters, the rotary cache and the allocator's rounding."""
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "dtype": "bfloat16", "vocab_size": 151936,
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960, "tie_word_embeddings": False,
    }  # fmt: skip
    got = weights(parse_geometry(config), None, None, Deployment(capability="12.0"))
    assert got.evidence == "config"
    assert got.by["rope_cache"] == 40960 * 128 * 2
    assert got.allocated / 2**30 == pytest.approx(15.2683, abs=2e-4)


@needs_data
def test_flashinfer_rotates_deepseek_by_f32_tables_unless_compiled():
    geometry, quantization = config_of(MEASURED / "module_configs" / "deepseek-v3-fp8-8l" / "config.json")

    def rope(**options):
        return weights(geometry, quantization, None, Deployment(capability="9.0", **options)).by["rope_cache"]

    assert rope(enforce_eager=True) == 2 * rope() == 2 * rope(enforce_eager=True, without={"flashinfer"})


def test_an_unknown_model_is_unknown():
    got = weights(parse_geometry({"model_type": "no_such_model", "num_hidden_layers": 2}), None, None, Deployment())
    assert got.allocated is None
    assert any("no_such_model" in reason for reason in got.unmodelled)


@given(st.lists(st.integers(0, 64 * MIB), max_size=60), st.sampled_from([None, 20 * MIB]))
def test_allocator_never_counts_less_than_asked(sizes, max_split):
    pool = Pool(max_split)
    blocks = [pool.allocate(size) for size in sizes]
    assert all(block >= size for block, size in zip(blocks, sizes, strict=True))
    assert pool.now == sum(blocks) <= sum(sizes) + len(sizes) * 2 * MIB
    for block in blocks:
        pool.release(block)
    assert pool.now == 0


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind is not Kind.PLAIN])
@pytest.mark.parametrize("sm", [80, 89, 90, 100, 120])
def test_quantised_matrices_are_smaller_than_plain_ones(kind, sm):
    runtime = Runtime(sm=sm)
    scheme = Scheme(kind, group={Kind.NVFP4: 16, Kind.INT: 128}.get(kind, 32))
    plain = linear_tensors(Scheme(), [1024, 256], 2048, False, runtime)
    packed = linear_tensors(scheme, [1024, 256], 2048, False, runtime)
    assert 0 < sum(packed.loaded) < 0.6 * sum(plain.loaded)
    shape = ExpertShape(8, 768, 2048)
    experts = expert_tensors(scheme, shape, runtime)
    assert 0 < sum(experts.loaded) < 0.6 * sum(expert_tensors(Scheme(), shape, runtime).loaded)


def test_versions_and_capabilities():
    assert parse_version("0.33.0rc1") == (0, 33, 0)
    assert parse_capability("12.1") == 121
    with pytest.raises(ValueError, match="expected"):
        parse_capability("twelve")


def small_moe(experts=16, heads=16, kv=4):
    return parse_geometry({
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "dtype": "bfloat16", "vocab_size": 1000,
        "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": heads,
        "num_key_value_heads": kv, "head_dim": 64, "num_experts": experts, "num_experts_per_tok": 2,
        "moe_intermediate_size": 256, "max_position_embeddings": 4096, "tie_word_embeddings": False,
    })  # fmt: skip


FP8 = Quantization(method="fp8", config={"quant_method": "fp8", "weight_block_size": [128, 128]})


@pytest.mark.parametrize(("tp", "kv"), [(1, 4), (2, 4), (4, 4), (8, 4), (16, 2)])
def test_ranks_hold_the_model_once_and_repeat_only_what_they_must(tp, kv):
    whole = weights(small_moe(kv=kv), None, None, Deployment())
    rank = weights(small_moe(kv=kv), None, None, Deployment(tp=tp))
    assert rank.by["expert"] * tp == whole.by["expert"]
    assert rank.by["embed"] == -(-1024 // tp) * 512 * 2  # the vocabulary is padded to 64 first
    for part in ("router", "norm", "rope_cache"):
        assert rank.by[part] == whole.by[part]
    q_and_o, each_kv = 2 * 16 * 64 * 512 * 2, 2 * 64 * 512 * 2  # query and output, one key-value head's pair
    small = 2 * 64 * 2 + 6 * 4  # norms, scales
    assert rank.by["attention"] == 4 * (q_and_o // tp + max(1, kv // tp) * each_kv + small)


@settings(deadline=None)
@given(st.integers(1, 40), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2]))
def test_expert_parallel_ranks_share_all_experts(experts, tp, dp):
    geometry = small_moe(experts=experts)
    whole = weights(geometry, None, None, Deployment()).by["expert"]
    deployment = Deployment(tp=tp, dp=dp, expert_parallel=True)
    held = [weights(geometry, None, None, deployment, rank).by["expert"] for rank in range(tp * dp)]
    assert sum(held) == whole
    assert max(held) - min(held) <= whole // experts


@pytest.mark.parametrize("pp", [1, 2, 3, 4])
def test_pipeline_stages_share_all_layers(pp):
    whole = weights(small_moe(), None, None, Deployment())
    stages = [weights(small_moe(), None, None, Deployment(pp=pp), rank) for rank in range(pp)]
    for part in ("expert", "attention", "router", "embed", "lm_head"):
        assert sum(stage.by.get(part, 0) for stage in stages) == whole.by[part]


def test_what_an_engine_refuses_is_unknown_with_its_reason():
    three = weights(small_moe(heads=16), None, None, Deployment(tp=3))
    assert three.allocated is None
    assert "not divisible by 3 ranks" in three.unmodelled[0]
    uncut = weights(small_moe(), FP8, None, Deployment(tp=16, capability="9.0"))
    assert any("tiles" in reason for reason in uncut.unmodelled)
    silent = weights(small_moe(), FP8, None, Deployment())
    assert any("capability" in reason for reason in silent.unmodelled)
    forced = weights(small_moe(), None, None, Deployment(moe_backend="triton"))
    assert forced.allocated is None


def test_quantisation_asked_for_at_start_up():
    plain = weights(small_moe(), None, None, Deployment(capability="9.0"))
    online = weights(small_moe(), None, None, Deployment(capability="9.0", quantization="fp8"))
    assert 0.49 < online.by["expert"] / plain.by["expert"] < 0.51
    assert online.by["lm_head"] == plain.by["lm_head"]
    other = weights(small_moe(), FP8, None, Deployment(capability="9.0", quantization="awq"))
    assert "--quantization awq" in other.unmodelled[0]


def test_a_drafter_that_is_not_there_is_not_zero():
    got = weights(small_moe(), None, None, Deployment(mtp=2))
    assert got.mtp_allocated is None
    assert any("drafter" in reason for reason in got.unmodelled)
