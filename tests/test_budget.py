"""The account of one card against measured runs: activation, the rest, cards, defaults and start-up gates."""

import json
import statistics
from math import ceil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from formulas.activation import activation
from formulas.budget import Budget, budget, capture_sizes, filled, gates, graphs
from formulas.cards import CARDS, Card, find_card
from formulas.deployment import Deployment
from formulas.errors import BadInput
from formulas.facts import Quantization
from formulas.geometry import Geometry, parse_geometry
from formulas.kv import plan
from formulas.shipped import coefficients

GIB = 2**30
SHARED = Path(__file__).parents[1].parent / "shared" / "data"
H200 = SHARED / "measured" / "h200.jsonl"
ROWS = [json.loads(line) for line in H200.read_text().splitlines()] if H200.exists() else []
FORMATS = {
    "Qwen/Qwen3-30B-A3B-FP8": Quantization(method="fp8", format="fp8_block128"),
    "deepseek-ai/DeepSeek-V3": Quantization(method="fp8", format="fp8_block128"),
    "openai/gpt-oss-20b": Quantization(method="mxfp4", format="mxfp4"),
    "nvidia/MiniMax-M2.5-NVFP4": Quantization(
        method="modelopt", format="nvfp4", by_role={"main/expert": "nvfp4"}, kv_cache_dtype="fp8"
    ),
}
# Peak activation of further runs of vLLM 0.25.1 on an H200, T 8192, compiled with a cold cache and eager.
LLAMA_GRAPHS, LLAMA_EAGER = 1_184_936_448, 939_526_144  # Llama-3.1-8B
FIRST_RUNNER_PAIRS = [(670_943_744, 588_106_240), (931_135_488, 897_581_056)]  # gpt-oss-20b, Qwen3-30B-A3B
needs_rows = pytest.mark.skipif(not ROWS, reason="the shared data folder is not there")


def geometry(row: dict) -> Geometry:
    config = json.loads((SHARED / "configs" / row["model"].replace("/", "__") / "config.json").read_text())
    config.get("text_config", config)["num_hidden_layers"] = row["num_hidden_layers"]
    return parse_geometry(config)


def deployment(row: dict) -> Deployment:
    same = ("tp", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_cache_dtype", "enforce_eager",
            "language_model_only", "gpu_memory_utilization")  # fmt: skip
    options = {name: row[name] for name in same}
    return Deployment(version="0.25.1", mtp=row["speculative_tokens"], without=frozenset(row["without"]), **options)


def account(row: dict) -> Budget:
    """The budget of a measured run, its weights as the engine reported them."""
    drafter = row["drafter_own_bytes"] or 0
    return budget(
        geometry(row), FORMATS.get(row["model"]), deployment(row), find_card("h200"), row["model_memory"] - drafter,
        drafter, coefficients(),
    )  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda r: r["id"])
def test_the_terms_are_those_of_the_measured_run(row):
    found = account(row)
    assert found.requested.bytes == row["requested"]
    allowed = 0.001 * row["peak_activation"] if row["enforce_eager"] else 0.1 * row["peak_activation"]
    assert abs(found.activation.bytes - row["peak_activation"]) <= allowed + 4 * 2**20
    assert abs(found.non_torch.bytes - row["non_torch"]) <= 4 * 2**20
    assert found.graphs.bytes == row["cudagraph_estimate"]
    assert abs(found.available.bytes - row["available_kv"]) <= found.margin_bytes


@needs_rows
def test_free_kv_memory_is_within_the_stated_error():
    errors = [abs(account(row).available.bytes - row["available_kv"]) / GIB for row in ROWS]
    assert statistics.mean(errors) < 0.02
    assert max(errors) < 0.15


@needs_rows
def test_fitted_coefficients_are_rederived_from_their_points():
    by_id = {row["id"]: row for row in ROWS}
    fitted = coefficients()
    alone = [row["non_torch"] / 2**20 for row in ROWS if row["tp"] == 1]
    paired = [row["non_torch"] / 2**20 for row in ROWS if row["tp"] == 2]
    assert fitted["non_torch_mib"] == statistics.median(alone)
    assert fitted["nccl_mib"] == statistics.median(paired) - statistics.median(alone)
    pair = by_id["qwen3-8b-graphs"]["peak_activation"] - by_id["qwen3-8b"]["peak_activation"]
    second = statistics.mean([pair, LLAMA_GRAPHS - LLAMA_EAGER]) / 2**20
    first = statistics.mean(with_graphs - eager for with_graphs, eager in FIRST_RUNNER_PAIRS) / 2**20
    assert fitted["compile_second_runner_mib"] == pytest.approx(second, abs=1)
    assert fitted["compile_first_runner_mib"] == pytest.approx(first, abs=1)
    # llm-d planner's public runs on vLLM 0.19, H100, non-torch of each of two cards in GiB.
    pairs = [2.10, 2.07, 2.07, 2.09, 2.07, 2.06]
    more = statistics.median(pairs) * 1024 - fitted["non_torch_mib"]
    assert fitted["all_reduce_mib"] == pytest.approx(more, abs=5)
    # "first-capture + (n-1) x per-graph" MiB as logged, (layers, largest batch): Qwen3-30B-A3B and gpt-oss-20b.
    (few, first_few, each_few), (many, first_many, each_many) = (1024, 160, 4), (128, 66, 6)
    token = (first_few - first_many) / (few - many)
    assert fitted["graph_token_mib"] == pytest.approx(token, abs=1e-4)
    assert fitted["graph_pool_mib"] == pytest.approx(first_many - many * token, abs=0.05)
    assert fitted["graph_layer_mib"] == pytest.approx((each_many - each_few) / (48 - 24), abs=1e-4)


@pytest.mark.parametrize(
    ("repo", "reported"), [("openai/gpt-oss-20b", 522_190_848), ("Qwen/Qwen3-30B-A3B", 203_423_744)]
)
def test_the_graph_estimate_is_the_logged_one(repo, reported):
    path = SHARED / "configs" / repo.replace("/", "__") / "config.json"
    if not path.exists():
        pytest.skip("the shared data folder is not there")
    asked = Deployment(version="0.25.1", max_num_seqs=64, max_num_batched_tokens=8192, capability="9.0")
    found = graphs(parse_geometry(json.loads(path.read_text())), asked, coefficients())
    assert found.bytes == pytest.approx(reported, rel=0.03)


def test_capture_sizes_are_the_engines():
    assert len(capture_sizes(64, 0)) == 19
    assert capture_sizes(64, 0)[-1] == 128
    assert len(capture_sizes(1024, 0)) == 51
    assert len(capture_sizes(1024, 0, 1024)) == 83
    assert capture_sizes(1, 3) == (1, 2, 4, 8)


def test_cards_say_what_the_engine_sees_and_where_it_was_read():
    assert find_card("NVIDIA RTX PRO 6000 Blackwell Workstation Edition").name == "rtx-pro-6000"
    assert find_card("4090").capability == "8.9"
    assert find_card("NVIDIA H100 80GB HBM3").name == "h100-80gb"
    for card in CARDS:
        assert card.source
        assert card.estimated == card.source.startswith("estimated")
        assert find_card(card.name) == card
    given_size = find_card("71.2GiB", "12.0")
    assert (given_size.total_bytes, given_size.capability) == (round(71.2 * GIB), "12.0")
    for bad in ("rtx-9999", "3", "h", ""):
        with pytest.raises(BadInput):
            find_card(bad)


@pytest.mark.parametrize(
    ("version", "card", "tokens", "rows", "utilization"),
    [
        ("0.33.0", "h200", 8192, 1024, 0.92),
        ("0.33.0", "b200", 16384, 1024, 0.92),
        ("0.25.1", "b200", 8192, 1024, 0.92),
        ("0.33.0", "a100-80gb", 2048, 256, 0.92),
        ("0.33.0", "gb10", 2048, 256, 0.92),
        ("0.28.0", "gb10", 8192, 1024, 0.92),
        ("0.19.0", "rtx-4090", 2048, 256, 0.9),
    ],
)
def test_defaults_are_those_of_that_engine_on_that_card(version, card, tokens, rows, utilization):
    found = filled(Deployment(version=version), find_card(card), Geometry(max_position_embeddings=4096))
    assert (found.max_num_batched_tokens, found.max_num_seqs) == (tokens, rows)
    assert (found.gpu_memory_utilization, found.max_model_len) == (utilization, 4096)


HYBRID = parse_geometry({
    "model_type": "qwen3_5_text", "num_hidden_layers": 64, "full_attention_interval": 4, "hidden_size": 5120,
    "intermediate_size": 17408, "vocab_size": 248320, "num_attention_heads": 24, "num_key_value_heads": 4,
    "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144, "dtype": "bfloat16",
})  # fmt: skip


def test_a_hybrid_with_more_sequences_than_blocks_does_not_start():
    """vllm-project/recipes#831: 939 blocks of 51,380,224 bytes on one 96 GB card, max_num_seqs 1024: refused."""
    card = find_card("rtx-pro-6000")
    asked = Deployment(kv_cache_dtype="auto", max_num_seqs=1024, enable_prefix_caching=True)
    account_ = budget(HYBRID, None, asked, card, 28 * GIB, 0, coefficients())
    planned = plan(HYBRID, account_.deployment, 939 * 51_380_224)
    assert (planned.bytes_per_block, planned.num_blocks) == (51_380_224, 939)
    by_name = {gate.name: gate for gate in gates(account_, card, HYBRID, planned)}
    refusal = by_name["a state block for every sequence"]
    assert refusal.met is False
    assert "1024 against 939" in refusal.because
    fewer = account_._replace(deployment=account_.deployment.model_copy(update={"max_num_seqs": 900}))
    assert {g.name: g.met for g in gates(fewer, card, HYBRID, planned)}["a state block for every sequence"]


def test_asking_for_more_than_is_free_is_a_gate():
    card = find_card("rtx-5090")
    greedy = budget(HYBRID, None, Deployment(gpu_memory_utilization=0.98), card, 20 * GIB, 0, coefficients())
    planned = plan(HYBRID, greedy.deployment, greedy.available.bytes)
    assert gates(greedy, card, HYBRID, planned)[0].met is False


def test_a_silent_config_leaves_the_account_open():
    found = budget(Geometry(), None, Deployment(), find_card("h200"), None, None, coefficients())
    assert found.available.bytes is None
    assert found.unmodelled


@settings(deadline=None)
@given(
    tokens=st.sampled_from([2048, 4096, 8192, 32768]),
    rows=st.integers(1, 1024),
    tp=st.sampled_from([1, 2, 4]),
    total=st.integers(24 * GIB, 180 * GIB),
    share=st.floats(0.5, 0.98),
)
def test_the_account_adds_up_and_grows_with_the_step(tokens, rows, tp, total, share):
    card = Card("given", "9.0", total, "as given", 0)
    asked = Deployment(tp=tp, max_num_batched_tokens=tokens, max_num_seqs=rows, gpu_memory_utilization=share)
    found = budget(HYBRID, None, asked, card, 10 * GIB, 0, coefficients())
    spent = (found.weights, found.drafter, found.activation, found.non_torch, found.graphs)
    assert found.requested.bytes == ceil(total * share)
    assert found.available.bytes == found.requested.bytes - sum(term.bytes for term in spent)
    larger = asked.model_copy(update={"max_num_batched_tokens": 2 * tokens})
    assert activation(HYBRID, filled(larger, card, HYBRID), None, coefficients()).peak_bytes > found.activation.bytes
