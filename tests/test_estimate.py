"""Estimates as wholes: what must hold whatever the checkpoint, the card and the options."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from formulas.cards import CARDS, Card, find_card
from formulas.deployment import Deployment
from formulas.estimate import Correction, estimate, sentence
from formulas.facts import Facts
from formulas.geometry import Geometry, parse_geometry
from formulas.options import deployment_from, parse_arguments
from formulas.shipped import checkpoints, coefficients

GIB = 2**30
FLASH_NEXT = "RadixArk/Qwen3.8-Flash-Next-NVFP4"
FP8_TABLE = {"text_config": {"ple_embedding_dtype": "float8_e4m3fn"}}
SMALL = ["Qwen/Qwen3-8B", "openai/gpt-oss-20b", "LiquidAI/LFM2-1.2B#config", "Qwen/Qwen3.5-27B#config",
         "deepseek-ai/DeepSeek-V3-l4#config", "Qwen/Qwen3-0.6B#config"]  # fmt: skip


def told(name, card, **options):
    return estimate(checkpoints()[name], card, Deployment(**options), coefficients())


names = st.sampled_from(SMALL)
quick = settings(deadline=None, max_examples=20)


@quick
@given(names, st.integers(16, 190), st.integers(1, 40), st.sampled_from([1, 2, 4]), st.sampled_from(["auto", "fp8"]))
def test_more_memory_never_holds_less(name, gib, more, tp, dtype):
    small, large = (
        told(name, Card("given", "9.0", size * GIB, "as given", 0), tp=tp, max_num_seqs=64, kv_cache_dtype=dtype,
             max_num_batched_tokens=2048, gpu_memory_utilization=0.9)
        for size in (gib, gib + more)
    )  # fmt: skip
    assert small.per_rank.weights_bytes == large.per_rank.weights_bytes
    assert small.per_rank.available_kv_bytes <= large.per_rank.available_kv_bytes
    assert 0 <= small.kv.tokens <= large.kv.tokens
    assert 0 <= small.kv.max_context <= large.kv.max_context
    assert small.shortfall_bytes >= large.shortfall_bytes >= 0
    assert not small.fits or large.fits


@quick
@given(names, st.integers(1, 32_000), st.integers(1, 32_000))
def test_a_longer_request_never_needs_less(name, one, other):
    short, long = sorted((one, other))
    few, many = (told(name, find_card("rtx-4090"), max_model_len=length, max_num_seqs=64) for length in (short, long))
    assert few.kv.needed_bytes <= many.kv.needed_bytes
    assert few.fits or not many.fits


@quick
@given(names, st.sampled_from(CARDS), st.sampled_from([1, 2]), st.integers(1, 512))
def test_the_account_adds_up_and_changes_nothing(name, card, tp, rows):
    facts = checkpoints()[name]
    asked = Deployment(tp=tp, max_num_seqs=rows)
    before = facts.model_dump_json(), asked.model_dump_json()
    answer = estimate(facts, card, asked, coefficients())
    assert (facts.model_dump_json(), asked.model_dump_json()) == before
    rank = answer.per_rank
    assert all(count >= 0 for count in (*rank.by.values(), *rank.mtp_by.values()))
    assert 0 <= rank.weights_bytes - sum(rank.by.values()) < 0.03 * rank.weights_bytes + 32 * 2**20
    spent = (rank.weights_bytes, rank.mtp_bytes, rank.activation_bytes, rank.non_torch_bytes, rank.cudagraph_bytes)
    assert rank.requested_bytes - sum(spent) == rank.available_kv_bytes
    assert answer.margin_bytes > 0
    assert rank.total_memory_bytes == card.total_bytes


@pytest.mark.parametrize(
    "config",
    [{}, {"model_type": "hyena_next", "num_hidden_layers": 4, "hidden_size": 512}, {"model_type": "deepseek_v4"}],
)
def test_an_unknown_architecture_is_unknown_and_never_a_number(config):
    answer = estimate(Facts(geometry=parse_geometry(config)), find_card("h200"), Deployment(), coefficients())
    assert answer.fits is None
    assert answer.unmodelled
    assert answer.per_rank.weights_bytes is answer.per_rank.available_kv_bytes is None
    assert answer.kv.tokens is answer.kv.max_context is answer.kv.max_concurrency is None
    assert answer.shortfall_bytes is answer.nearest_fit is None
    assert "unknown" in sentence(answer)


def test_a_reason_from_elsewhere_makes_the_answer_unknown():
    answer = estimate(
        checkpoints()["Qwen/Qwen3-8B"], find_card("h200"), Deployment(), coefficients(),
        unmodelled=("--enable-lora is not modelled",),
    )  # fmt: skip
    assert answer.fits is None
    assert answer.unmodelled == ("--enable-lora is not modelled",)


def test_facts_without_a_geometry_are_unknown():
    answer = estimate(Facts(repo="a/b"), find_card("h200"), Deployment(), coefficients())
    assert answer.fits is None
    assert estimate(Facts(geometry=Geometry()), find_card("h200"), Deployment(), coefficients()).fits is None


def test_auto_is_the_longest_context_that_fits():
    card = find_card("l4")
    auto = told("Qwen/Qwen3-8B", card, max_model_len=-1)
    assert auto.fits
    assert auto.deployment["max_model_len"] == auto.kv.max_context == told("Qwen/Qwen3-8B", card).kv.max_context
    one_more = told("Qwen/Qwen3-8B", card, max_model_len=auto.kv.max_context + 1)
    assert not one_more.fits
    assert told("Qwen/Qwen3-8B", find_card("h200"), max_model_len=-1).deployment["max_model_len"] == 40960
    assert told("Qwen/Qwen3.5-27B#config", card, max_model_len=-1).fits is False


def test_what_the_engine_refuses_is_no_and_says_why():
    whole = told(FLASH_NEXT, find_card("rtx-pro-5000-72gb"), tp=4, max_num_seqs=16)
    assert whole.fits is False
    assert whole.unmodelled == ()
    assert "cannot pad them" in whole.gates[0].because
    assert whole.nearest_fit == "--enable-expert-parallel"
    three = told("Qwen/Qwen3-8B", find_card("h100-80gb"), tp=3)
    assert three.fits is False
    assert "the engine would not start" in sentence(three)
    assert three.nearest_fit == "--tensor-parallel-size 2"


WAYS = [
    (FLASH_NEXT, "rtx-pro-5000-72gb", {"tp": 4, "max_num_seqs": 16}),
    ("Qwen/Qwen3-8B", "l4", {}),
    ("Qwen/Qwen3.5-27B#config", "rtx-5090", {"tp": 2, "mtp": 2}),
    ("Qwen/Qwen3.5-27B#config", "rtx-4090", {}),
    (FLASH_NEXT, "rtx-pro-6000", {"mtp": 3}),
    (FLASH_NEXT, "rtx-pro-5000-72gb", {"tp": 2, "ple": "gpu", "hf_overrides": FP8_TABLE, "max_num_seqs": 16}),
    (FLASH_NEXT, "h100-80gb", {"mtp": 2}),
]


@pytest.mark.parametrize(("name", "card", "options"), WAYS)
def test_every_way_offered_fits(name, card, options):
    answer = told(name, find_card(card), **options)
    assert answer.fits is False
    assert answer.ways
    assert answer.nearest_fit == answer.ways[0].flags
    base = Deployment(**options)
    for way in answer.ways:
        fields = parse_arguments(way.flags.split()).fields
        changed = deployment_from({**base.model_dump(), **fields})
        tried = estimate(checkpoints()[name], find_card(card), changed, coefficients())
        assert tried.fits, way.flags
        assert tried.per_rank.available_kv_bytes == way.available_kv_bytes
        assert way.cost


def test_no_change_of_a_set_can_be_left_out():
    answer = told(FLASH_NEXT, find_card("rtx-pro-6000"), mtp=3)
    sets = [way.flags for way in answer.ways if way.flags.count("--") > 1]
    assert sets
    words = sets[0].split()
    pairs = list(zip(words[::2], words[1::2], strict=True))
    for left_out in pairs:
        rest = [word for pair in pairs if pair != left_out for word in pair]
        changed = deployment_from({"mtp": 3, **parse_arguments(rest).fields})
        assert not estimate(checkpoints()[FLASH_NEXT], find_card("rtx-pro-6000"), changed, coefficients()).fits


def test_the_table_in_host_memory_is_counted_there():
    card = find_card("95.6GiB", "12.0")
    here = told(FLASH_NEXT, card, ple="host", hf_overrides=FP8_TABLE, max_num_seqs=16)
    assert here.per_rank.host_pinned_bytes / GIB == pytest.approx(47.68, abs=0.01)
    assert here.per_rank.ple_bytes < GIB
    assert here.per_rank.weights_bytes / GIB == pytest.approx(74.3, abs=0.6)
    remarks = "\n".join(here.remarks)
    assert "--mtp would add" in remarks
    assert "total - PLE is 78.13 GiB" in remarks
    as_bf16 = {"text_config": {"ple_embedding_dtype": "bfloat16"}}
    undeclared = told(FLASH_NEXT, card, ple="host", max_num_seqs=16, hf_overrides=as_bf16)
    assert undeclared.per_rank.host_pinned_bytes == pytest.approx(2 * here.per_rank.host_pinned_bytes, rel=1e-6)
    assert any("builds it in BF16" in remark for remark in undeclared.remarks)
    speculating = told(FLASH_NEXT, card, ple="host", hf_overrides=FP8_TABLE, max_num_seqs=16, mtp=1)
    assert speculating.per_rank.mtp_bytes / GIB == pytest.approx(5.0, abs=0.2)
    assert not any("total - PLE" in remark for remark in speculating.remarks)


def test_many_sequences_off_hopper_widen_the_margin():
    few, many = (told("Qwen/Qwen3-8B", find_card("rtx-pro-6000"), max_num_seqs=rows) for rows in (512, 1024))
    assert many.margin_bytes - few.margin_bytes > 8 * GIB
    assert any("recipes#831" in remark for remark in many.remarks)
    assert not any("recipes#831" in remark for remark in few.remarks)
    hopper = told("Qwen/Qwen3-8B", find_card("h200"), max_num_seqs=1024)
    assert not any("recipes#831" in remark for remark in hopper.remarks)


def test_a_correction_moves_every_term_it_read():
    facts, card, asked = checkpoints()["Qwen/Qwen3-8B"], find_card("h200"), Deployment(max_num_seqs=64)
    plain = estimate(facts, card, asked, coefficients())
    taught = Correction(activation=GIB, non_torch=-(2**20), graphs=0, weights=2**20, unexplained=2**25,
                        source="calibrated by a run", is_own=True)  # fmt: skip
    moved = estimate(facts, card, asked, coefficients(), correction=taught)
    assert moved.per_rank.activation_bytes - plain.per_rank.activation_bytes == GIB
    assert plain.per_rank.available_kv_bytes - moved.per_rank.available_kv_bytes == GIB + 2**25
    assert moved.margin_bytes < plain.margin_bytes
    assert moved.calibrated == "calibrated by a run"
    assert "calibrated by a run" in moved.because["activation"]


QWEN = {
    "model_type": "qwen3", "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128,
    "hidden_size": 1024, "intermediate_size": 2048, "vocab_size": 1024, "max_position_embeddings": 32768,
}  # fmt: skip


def scaled(**rope):
    return {"rope_parameters": rope}


@pytest.mark.parametrize(
    ("change", "most", "by_default"),
    [
        ({}, 32768, 32768),
        (scaled(rope_type="yarn", factor=4.0, original_max_position_embeddings=32768), 131072, 131072),
        (scaled(rope_type="yarn", factor=4.0, original_max_position_embeddings=16384), 65536, 65536),
        (scaled(type="linear", factor=2), 65536, 65536),
        (scaled(rope_type="llama3", factor=8.0, original_max_position_embeddings=8192), 32768, 32768),
        (scaled(rope_type="longrope") | {"original_max_position_embeddings": 4096}, 32768, 4096),
        ({"model_type": "gemma3_text", "sliding_window": 1024, **scaled(rope_type="linear", factor=8.0)}, 32768, 32768),
        ({"model_max_length": 200_000}, 200_000, 200_000),
    ],
)
def test_a_context_past_the_models_positions_is_refused_however_much_memory_there_is(change, most, by_default):
    facts, card = Facts(repo="a/b", geometry=parse_geometry(QWEN | change)), find_card("h200")

    def asked(length):
        return estimate(facts, card, Deployment(max_model_len=length), coefficients())

    assert asked(None).deployment["max_model_len"] == by_default
    assert asked(most).fits is True
    assert asked(most).kv.max_context == most
    refused = asked(most + 1)
    assert refused.fits is False
    assert f"positions end at {most};" in sentence(refused)
    assert refused.nearest_fit == f"--max-model-len {most}"


def test_falcons_config_class_fills_in_what_its_file_leaves_out():
    config = {"model_type": "falcon", "hidden_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 16,
              "multi_query": True, "vocab_size": 1024}  # fmt: skip
    found = parse_geometry(config)
    assert (found.max_position_embeddings, found.layer_kinds[0].intermediate_size) == (2048, 4096)
    assert parse_geometry(config | {"ffn_hidden_size": 512}).layer_kinds[0].intermediate_size == 512


def test_where_no_number_of_cards_holds_the_context_more_of_them_hold_a_shorter_one():
    latent = {"model_type": "deepseek_v3", "num_hidden_layers": 61, "num_attention_heads": 128, "hidden_size": 7168,
              "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
              "v_head_dim": 128, "intermediate_size": 18432, "vocab_size": 129280, "moe_intermediate_size": 2048,
              "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
              "max_position_embeddings": 4_000_000, "torch_dtype": "bfloat16"}  # fmt: skip
    facts = Facts(repo="a/b", geometry=parse_geometry(latent))
    card = find_card("h100")
    found = estimate(facts, card, Deployment(tp=8, max_num_seqs=64), coefficients())
    assert found.fits is False
    assert "--tensor-parallel-size" in found.nearest_fit
    given = parse_arguments(found.nearest_fit.split())
    again = estimate(facts, card, deployment_from({"tp": 8, "max_num_seqs": 64} | given.fields), coefficients())
    assert again.fits is True
    assert again.kv.max_context < 4_000_000


@pytest.mark.parametrize(
    ("options", "verdict", "said"),
    [
        ({"dcp": 2}, False, "1 tensor-parallel ranks: not divisible by the 2 of decode context parallelism"),
        ({"tp": 8, "dcp": 2}, False, "8 key-value heads need 16 ranks or more, got 8"),
        ({"tp": 16, "dcp": 2}, True, ""),
        ({"tp": 32, "dcp": 3}, False, "32 tensor-parallel ranks: not divisible by the 3"),
        ({"pp": 37}, None, "36 layers in 37 pipeline stages"),
        ({"capability": "99.0"}, None, "compute capability 99.0"),
        ({"version": "1.2.3"}, None, "newer than what is modelled, 0.33.0"),
        ({"version": "0.33.4"}, True, ""),
        ({"block_size": 7}, None, "block_size 7"),
        ({"block_size": 64}, True, ""),
    ],
)
def test_what_the_engine_refuses_is_a_no_and_what_is_not_modelled_is_unknown(options, verdict, said):
    facts = checkpoints()["Qwen/Qwen3-8B"]
    found = estimate(facts, find_card("h100"), deployment_from({"capability": "9.0"} | options), coefficients())
    assert found.fits is verdict
    assert said in sentence(found)


def test_every_rank_counts_as_a_card():
    assert " on h200 x 8: " in sentence(told("Qwen/Qwen3-8B", find_card("h200"), tp=2, pp=2, dp=2))


@pytest.mark.parametrize(
    ("name", "card", "options", "verdict"),
    [
        ("Qwen/Qwen3-8B", "rtx-3090", {"kv_cache_dtype": "fp8"}, True),
        ("Qwen/Qwen3-8B", "rtx-3090", {"kv_cache_dtype": "fp8_ds_mla"}, False),
        ("Qwen/Qwen3-8B", "h100", {"attention_backend": "FLASHINFER"}, True),
        ("Qwen/Qwen3-8B", "h100", {"attention_backend": "FLASHMLA"}, False),
        ("Qwen/Qwen3-8B", "h100", {"attention_backend": "NOPE"}, None),
        ("deepseek-ai/DeepSeek-V3-l4#config", "h200", {"kv_cache_dtype": "fp8"}, True),
        ("deepseek-ai/DeepSeek-V3-l4#config", "h200", {"kv_cache_dtype": "fp8_e5m2"}, False),
    ],
)
def test_a_cache_or_backend_the_releases_own_gates_refuse_is_a_no(name, card, options, verdict):
    found = told(name, find_card(card), capability=find_card(card).capability, max_model_len=2048, **options)
    assert found.fits is verdict, sentence(found)
    assert verdict is not False or "backend" in sentence(found) or "refuses it" in sentence(found)


@pytest.mark.parametrize("text", ["rtx4090", "RTX 4090", "NVIDIA GeForce RTX 4090", "4090", "rtx_4090"])
def test_a_card_is_known_however_it_is_spelled(text):
    assert find_card(text).name == "rtx-4090"
