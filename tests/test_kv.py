"""The KV planner against running engines: measured H200 runs, the engine's own modules, public start-up logs."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from formulas.deployment import Deployment
from formulas.facts import Quantization
from formulas.geometry import Geometry, parse_geometry
from formulas.kv import Plan, plan, stage_bounds
from formulas.kv_specs import SpecKind, kv_specs

GIB = 2**30
SHARED = Path(__file__).parents[1].parent / "shared" / "data"
MEASURED = SHARED / "measured"


def rows(name: str) -> list[dict]:
    path = MEASURED / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def geometry(repo: str, layers: int | None = None) -> Geometry:
    path = SHARED / "configs" / repo.replace("/", "__") / "config.json"
    if not path.exists():
        pytest.skip(f"no {path.parent.name}: the shared data folder is not there")
    config = json.loads(path.read_text())
    if layers:
        config.get("text_config", config)["num_hidden_layers"] = layers
    return parse_geometry(config)


def asked(repo: str) -> Quantization | None:
    """What NVIDIA's modelopt checkpoints ask of the KV cache."""
    return Quantization(method="modelopt", kv_cache_dtype="fp8") if repo.startswith("nvidia/MiniMax") else None


@pytest.mark.parametrize("row", rows("h200.jsonl"), ids=lambda r: r["id"])
def test_every_measured_run_is_planned_exactly(row):
    deployment = Deployment(
        version="0.25.1", tp=row["tp"], max_model_len=row["max_model_len"], kv_cache_dtype=row["kv_cache_dtype"],
        max_num_batched_tokens=row["max_num_batched_tokens"], mtp=row["speculative_tokens"], capability="9.0",
        without=frozenset(row["without"]),
    )  # fmt: skip
    found = plan(geometry(row["model"], row["num_hidden_layers"]), deployment, row["available_kv"], asked(row["model"]))
    assert not found.unmodelled
    ours = found.block_size, found.num_blocks, found.tokens
    assert ours == (row["block_size"], row["num_blocks"], row["kv_tokens"])
    assert found.max_concurrency == pytest.approx(row["max_concurrency"], rel=1e-12)
    ours = sorted((len(g.caches), g.specs[0].page_bytes) for g in found.groups)
    assert ours == sorted((g["layers"], g["page"]) for g in row["kv_groups"])


ENGINE_NAMES = {
    SpecKind.FULL: "FullAttentionSpec", SpecKind.MLA: "MLAAttentionSpec", SpecKind.SLIDING: "SlidingWindowSpec",
    SpecKind.STATE: "MambaSpec", SpecKind.RING: "CircularBufferSpec",
}  # fmt: skip


@pytest.mark.parametrize("row", rows("engine_modules.jsonl"), ids=lambda r: r["file"])
def test_specs_are_those_of_the_engines_own_modules(row):
    config = json.loads((MEASURED / "module_configs" / row["model"] / "config.json").read_text())
    # That listing asks each module for its spec, layers that share another's cache included, before any alignment.
    config.get("text_config", config).pop("num_kv_shared_layers", None)
    scheme = config.get("quantization_config", {}).get("kv_cache_scheme")
    asks = Quantization(method="modelopt", kv_cache_dtype="fp8") if scheme else None
    layout = kv_specs(parse_geometry(config), Deployment(tp=row["tp"], capability=row["capability"]), asks)
    ours: dict[tuple[str, int], int] = {}
    for cached in layout.caches:
        spec = cached.spec
        page = spec.content_bytes
        if spec.kind not in (SpecKind.STATE, SpecKind.RING):
            page = page * 16 // spec.block_size
        ours[ENGINE_NAMES[spec.kind], page] = ours.get((ENGINE_NAMES[spec.kind], page), 0) + 1
    theirs = {(name.split()[0], int(name.split("page=")[1])): count for name, count in row["kv_specs"].items()}
    assert ours == theirs


B27, B35 = "nvidia/Qwen3.6-27B-NVFP4", "Qwen/Qwen3.5-35B-A3B"
GLM, FLASH = "nvidia/GLM-5.1-NVFP4", "nvidia/Qwen3.8-Flash-Next-NVFP4"
CACHED = {"enable_prefix_caching": True, "max_num_batched_tokens": 8192}
GLM_RUN = {"version": "0.20.2", "tp": 8, "max_model_len": 202752, "kv_cache_dtype": "fp8_ds_mla", "capability": "12.0"}
LOGS = [
    # repo, deployment, KV GiB as logged, tokens as logged; the last line of each block says where it was logged.
    (B27, {"version": "0.24.0", "tp": 2, "max_model_len": 262144, "kv_cache_dtype": "fp8", "mtp": 3, **CACHED},
     11.05, 623873),  # noonghunna/club-3090#642
    (B27, {"version": "0.24.0", "tp": 2, "max_model_len": 262144, "kv_cache_dtype": "fp8_e5m2", **CACHED},
     9.84, 619202),  # #104
    (B35, {"version": "0.24.0", "max_model_len": 131072, "kv_cache_dtype": "fp8", **CACHED}, 5.98, 567978),  # #612
    (B35, {"version": "0.24.0", "max_model_len": 131072, "kv_cache_dtype": "fp8", **CACHED}, 6.01, 569878),  # #652
    ("Qwen/Qwen3-8B", {"version": "0.24.0", "max_model_len": 16384}, 6.37, 46368),  # LMCache#3430
    ("Qwen/Qwen3-0.6B", {"version": "0.10.2", "max_model_len": 4096}, 69.66, 652144),  # vllm#24577
    (GLM, GLM_RUN, 19.55, 341504),  # local-inference-lab/rtx6kpro glm5.1 benchmarks, as the next five
    (GLM, {**GLM_RUN, "mtp": 3}, 18.51, 319232),
    (GLM, {**GLM_RUN, "mtp": 3, "dcp": 2}, 18.42, 635520),
    (GLM, {**GLM_RUN, "dcp": 4}, 19.47, 1360384),
    (GLM, {**GLM_RUN, "dcp": 8}, 19.47, 2720768),
    (GLM, {**GLM_RUN, "mtp": 3, "dcp": 8}, 14.15, 1952256),
    (GLM, {**GLM_RUN, "max_model_len": 65536, "mtp": 3}, 19.12, 329792),
    ("nvidia/Kimi-K2.5-NVFP4", {"version": "0.11.0", "tp": 8, "max_model_len": 262144, "capability": "9.0"},
     46.8, 715072),  # vllm-project/recipes Kimi-K2-Think.md
]  # fmt: skip


@pytest.mark.parametrize("log", LOGS, ids=lambda log: f"{log[0].split('/')[1]}-{log[3]}")
def test_public_logs_are_within_what_their_rounding_allows(log):
    repo, options, gib, tokens = log
    deployment = Deployment(**{"max_num_batched_tokens": 8192, **options})
    model = geometry(repo)
    low, high = (plan(model, deployment, int((gib + off) * GIB)).tokens for off in (-0.005, 0.005))
    assert low is not None
    assert low <= tokens <= high


def flash_next(length: int, blocks: int, **options) -> Plan:
    deployment = Deployment(max_model_len=length, mtp=2, max_num_batched_tokens=8192, **options)
    model = geometry(FLASH)
    per_block = plan(model, deployment, None).bytes_per_block
    assert per_block is not None
    return plan(model, deployment, blocks * per_block)


def test_flash_next_on_a_gb10_as_its_log_said():
    """vllm#54458: three starts of one machine; the block counts are what their tokens and concurrency imply."""
    long, short = flash_next(262144, 744), flash_next(8192, 730)
    assert (long.block_size, long.tokens, round(long.max_concurrency, 2)) == (1600, 1_077_542, 4.11)
    assert (short.tokens, round(short.max_concurrency, 2)) == (260_006, 31.74)
    eight = flash_next(262144, 707, kv_cache_dtype="fp8")
    assert (eight.block_size, eight.tokens, round(eight.max_concurrency, 2)) == (3184, 1_853_358, 7.07)


def test_flash_next_on_four_cards_caches_73_layers_in_blocks_of_784():
    """LMCache#5042 describes the engine's cache: 73 layers, 784 tokens a block."""
    found = plan(geometry(FLASH), Deployment(tp=4, max_model_len=262144, max_num_batched_tokens=8192), None)
    assert found.block_size == 784
    assert sum(len(group.caches) for group in found.groups) == 73


def test_a_27b_hybrid_on_four_small_cards():
    """Published account, TP 4, MTP 4, 524,288: the fp8 and the bf16 pool, to the token."""
    for dtype, blocks, tokens, concurrency in (("fp8_e4m3", 994, 1_519_365, 2.90), ("auto", 924, 732_892, 1.40)):
        deployment = Deployment(version="0.24.0", tp=4, max_model_len=524288, kv_cache_dtype=dtype, mtp=4, **CACHED)
        model = geometry(B27)
        found = plan(model, deployment, blocks * plan(model, deployment, None).bytes_per_block)
        assert (found.tokens, round(found.max_concurrency, 2)) == (tokens, concurrency)


def test_latents_and_windows_are_what_is_cached():
    deepseek = plan(geometry("deepseek-ai/DeepSeek-V3"), Deployment(max_model_len=131072, capability="9.0"), None)
    assert deepseek.needed_bytes == 61 * 576 * 2 * 131072  # 8.58 GiB, where 128 heads would take 488
    for repo, full in (("openai/gpt-oss-20b", 12), ("google/medgemma-27b-it", 10)):
        model = geometry(repo)
        one = plan(model, Deployment(max_model_len=131072, max_num_batched_tokens=2048), None)
        layer = model.layer(-1)
        every = len(model.layers) * 2 * 2 * layer.kv_heads * layer.head_dim * 131072
        assert one.needed_bytes < every * (full / len(model.layers) + 0.25)


def test_an_unknown_attention_is_unknown():
    found = plan(parse_geometry({"model_type": "brand_new", "num_hidden_layers": 8}), Deployment(), 2**33)
    assert found.unmodelled
    assert (found.num_blocks, found.tokens, found.max_context, found.fits) == (None, None, None, None)
    silent = parse_geometry({"model_type": "qwen3", "num_hidden_layers": 8, "num_attention_heads": 32, "head_dim": 128})
    assert "pass --kv-heads" in plan(silent, Deployment(max_model_len=4096), 2**33).unmodelled[0]


@pytest.mark.parametrize(
    ("repo", "options"),
    [
        ("deepseek-ai/DeepSeek-V3", {"kv_cache_dtype": "nvfp4", "capability": "9.0"}),
        (FLASH, {"kv_cache_dtype": "fp8_e5m2"}),
        ("openai/gpt-oss-20b", {"dcp": 2, "tp": 2}),
        ("Qwen/Qwen3-8B", {"tp": 3}),
        ("Qwen/Qwen3-8B", {"kv_cache_dtype": "turboquant_4bit_nc"}),
        ("Qwen/Qwen3-8B", {"mtp": 2}),
        ("zai-org/GLM-5.1", {}),
        ("Qwen/Qwen3-8B", {"version": "0.9.2"}),
    ],
)
def test_what_the_engine_refuses_or_we_do_not_model_is_said(repo, options):
    found = plan(geometry(repo), Deployment(max_model_len=4096, max_num_batched_tokens=2048, **options), 2**33)
    assert found.unmodelled
    assert found.tokens is None


HYBRID = {
    "model_type": "qwen3_5_text", "num_hidden_layers": 16, "full_attention_interval": 4,
    "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256, "linear_num_key_heads": 16,
    "linear_num_value_heads": 48, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1, "max_position_embeddings": 262144, "dtype": "bfloat16",
}  # fmt: skip
WINDOWED = {
    "model_type": "gemma3_text", "num_hidden_layers": 12, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 128, "sliding_window": 1024, "max_position_embeddings": 131072,
}  # fmt: skip


@settings(deadline=None)
@given(
    config=st.sampled_from([HYBRID, WINDOWED]),
    version=st.sampled_from(["0.10.2", "0.18.0", "0.25.1", "0.33.0"]),
    gib=st.integers(1, 64),
    length=st.integers(1, 131072),
    mtp=st.integers(0, 4),
    pp=st.sampled_from([1, 2]),
)
def test_longest_context_is_the_inverse_of_need(config, version, gib, length, mtp, pp):
    mtp = mtp if config is HYBRID else 0
    deployment = Deployment(version=version, max_model_len=length, mtp=mtp, max_num_batched_tokens=2048, pp=pp)
    model = parse_geometry(config)
    found = plan(model, deployment, gib * GIB)
    assert found.fits == (found.max_context >= length)
    longer = plan(model, deployment.model_copy(update={"max_model_len": length + 1}), gib * GIB)
    assert longer.needed_bytes >= found.needed_bytes
    assert plan(model, deployment, gib * GIB + GIB).num_blocks >= found.num_blocks


@given(st.integers(1, 200), st.integers(1, 8))
def test_stages_hold_every_layer_once(layers, stages):
    bounds = stage_bounds(layers, min(stages, layers))
    assert [n for start, stop in bounds for n in range(start, stop)] == list(range(layers))
