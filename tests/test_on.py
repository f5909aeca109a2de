"""What an engine release says of a candidate on named cards: its registry, kernels, attention backends and ranks."""

import json
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from formulas.asked import format_asked
from formulas.console import run
from formulas.engines import SHIPPED_CAPABILITIES, formats, since
from formulas.errors import BadInput
from formulas.facts import Quantization
from formulas.flags import FLAGS, obeyed_otherwise
from formulas.shipped import checkpoints, coefficients, engine_registries, engine_table
from screen import on
from screen.census import derive
from screen.chain import Criteria, Known
from screen.cli import app
from screen.demofiles import Tensor, safetensors_file
from screen.demorepo import DemoRepo
from screen.findings import Outcome, Source
from screen.policy import Policy
from screen.target import Engine, parse_target

FLASH_NEXT = "RadixArk/Qwen3.8-Flash-Next-NVFP4"
NOW = datetime(2026, 11, 29, tzinfo=UTC)


def engine(text, *more):
    target = parse_target(text, None, coefficients(), flag="--on", more=more)
    shipped = engine_table(target.deployment.version) if target.deployment.version == "0.33.0" else None
    return Engine(target, shipped, engine_registries())


def ask(check, facts, text, *more):
    known = Known("org/name", "main", facts=facts)
    return list(check(known, Criteria(Policy(), NOW, engine=engine(text, *more))))


def said(check, facts, text, *more):
    return [(str(answer.outcome), answer.because) for answer in ask(check, facts, text, *more)]


def of_config(**config):
    base = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 2,
            "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072,
            "vocab_size": 151936, "max_position_embeddings": 40960, "dtype": "bfloat16",
            "tie_word_embeddings": False}  # fmt: skip
    return derive(base | config, None, hf_quant=None, repo="org/name")


def deepseek(name="V3", **more):
    sizes = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
             "v_head_dim": 128, "num_attention_heads": 128, "num_key_value_heads": 128}  # fmt: skip
    sparse = {"index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128} if name == "V32" else {}
    return of_config(architectures=[f"Deepseek{name}ForCausalLM"], model_type=f"deepseek_{name.lower()}",
                     head_dim=None, n_routed_experts=0, **sizes, **sparse, **more)  # fmt: skip


# Architectures and formats


@pytest.mark.parametrize(("name", "version", "outcome", "words"), [
    ("Qwen4ExpForConditionalGeneration", "0.33.0", "pass", "vllm 0.33.0 has Qwen4ExpForConditionalGeneration"),
    ("Qwen4ExpForConditionalGeneration", "0.25.1", "reject", "it came with 0."),
    ("Qwen3ForCausalLM", "0.33.0", "pass", "has Qwen3ForCausalLM"),
    ("HyenaNextForCausalLM", "0.33.0", "unknown", "no release of vllm from 0.10.2 to 0.33.0 has HyenaNextForCausalLM"),
])  # fmt: skip
def test_an_architecture_is_looked_up_in_the_registry(name, version, outcome, words):
    [(seen, because)] = said(on.architecture, of_config(architectures=[name]), f"h200 --engine vllm=={version}")
    assert seen == outcome
    assert words in because


def test_an_architecture_that_was_removed():
    registries = engine_registries()
    name = next(name for name, (_, last) in registries["since"].items() if last is not None)
    last = since(registries, name).last
    assert said(on.architecture, of_config(architectures=[name]), "h200") == [
        ("reject", f"vllm 0.33.0 has {name} no more: the last release with it is {last}")
    ]
    [(outcome, _)] = said(on.architecture, of_config(architectures=[name]), f"h200 --engine vllm=={last}")
    assert outcome == "pass"


@pytest.mark.parametrize("method", ["exl3", "gguf", "mlx", "QEngine", "bitsandbytes"])
def test_formats_that_no_stock_engine_reads(method):
    [(outcome, because)] = said(on.reader, of_config(quantization_config={"quant_method": method}), "h200")
    assert outcome == "reject"
    assert because.startswith(method.lower())


def test_every_format_asked_for_is_one_the_tables_have():
    """What the mapping answers are names of the table, on every card."""
    stored = ["bf16", "nvfp4", "nvfp4a16", "mxfp4", "mxfp8", "fp8_block128", "fp8_tensor", "fp8_channel", "int4_g128",
              "int4_g32", "int3_g128", "int8_channel", "int8_g128"]  # fmt: skip
    inputs = {"num_bits": 8, "type": "float"}
    configs = [{}, {"activation_scheme": "static"}, {"desc_act": True},
               {"config_groups": {"group_0": {"input_activations": inputs}}}]  # fmt: skip
    methods = [None, "fp8", "modelopt", "modelopt_fp4", "compressed-tensors", "awq", "awq_marlin", "gptq", "auto-round",
               "mxfp4", "quark", "fbgemm_fp8"]  # fmt: skip
    names = {format_asked(form, Quantization(method=method, config=config), "gpt_oss")
             for form in stored for method in methods for config in configs} - {None}  # fmt: skip
    assert len(names) > 22
    for capability in SHIPPED_CAPABILITIES:
        assert names <= set(formats(engine_table("0.33.0"), capability))


KERNELS = [  # checkpoint, cards -> outcomes and words
    (FLASH_NEXT, "rtx-pro-5000-72gb:2", "pass", "experts in nvfp4: vllm 0.33.0 runs FLASHINFER_CUTLASS"),
    (FLASH_NEXT, "h100-80gb:2 --without humming", "note", "experts in nvfp4: vllm 0.33.0 runs MARLIN; weight-only"),
    (FLASH_NEXT, "a100-80gb:2", "note", "experts in nvfp4: vllm 0.33.0 runs MARLIN; weight-only"),
    ("openai/gpt-oss-20b", "rtx-pro-5000-72gb", "note", "experts in mxfp4: vllm 0.33.0 runs MARLIN; weight-only"),
    ("openai/gpt-oss-20b", "h100-80gb", "pass", "experts in mxfp4: vllm 0.33.0 runs TRITON"),
    ("openai/gpt-oss-20b", "b200", "pass", "experts in mxfp4: vllm 0.33.0 runs FLASHINFER"),
]


@pytest.mark.parametrize(("name", "cards", "outcome", "words"), KERNELS)
def test_the_kernels_of_a_format_on_a_card(name, cards, outcome, words):
    assert any(seen == outcome and because.startswith(words) for seen, because in said(on.kernels, facts(name), cards))


def facts(name):
    return checkpoints()[name]


def test_a_format_refused_by_name_costs_no_header():
    refused = of_config(quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True})
    [(outcome, because)] = said(on.declared_kernels, refused, "h200")
    assert (outcome, "no longer supported" in because) == ("reject", True)
    plain = of_config(quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 128})
    assert said(on.declared_kernels, plain, "h200") == []


def test_what_no_table_says_is_unknown():
    odd = of_config(quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 64})
    assert [outcome for outcome, _ in said(on.kernels, odd, "h200")] == ["unknown"]
    [(outcome, because)] = said(on.kernels, of_config(quantization_config={"quant_method": "awq", "bits": 4,
                                "group_size": 128}), "h200 --engine vllm==0.25.1")  # fmt: skip
    assert outcome == "unknown"
    assert "no table ships for vllm 0.25.1" in because
    [(outcome, _)] = said(on.attention, of_config(), "h200 --engine vllm==0.25.1")
    assert outcome == "unknown"


# Attention


ATTENTION = [
    (of_config(), "rtx-pro-6000 --kv-cache-dtype fp8_e4m3", "pass", "vllm 0.33.0 runs FLASHINFER; also TRITON_ATTN"),
    (of_config(), "rtx-pro-6000 --kv-cache-dtype fp8_e4m3 --attention-backend FLASH_ATTN", "reject",
     "FP8 KV cache requires FA3 on SM90"),
    (of_config(), "h200", "pass", "vllm 0.33.0 runs FLASH_ATTN"),
    (of_config(), "h200 --attention-backend NO_SUCH", "reject", "it is no backend of this engine"),
    (of_config(head_dim=100), "h200", "unknown", "was not asked about it"),
    (of_config(model_type="gpt_oss", head_dim=64), "a100-80gb", "pass", "runs TRITON_ATTN"),
    (deepseek(), "rtx-pro-6000", "pass", "mla heads of 576, KV cache in bfloat16: vllm 0.33.0 runs TRITON_MLA"),
    (deepseek("V32"), "a100-80gb:8", "reject", "mla_sparse heads of 576"),
    (deepseek("V32"), "h200:8", "pass", "runs FLASH_ATTN_MLA_SPARSE"),
    (deepseek("V32"), "rtx-pro-6000:8", "pass", "runs FLASHINFER_MLA_SPARSE_SM120"),
]  # fmt: skip


@pytest.mark.parametrize(("what", "cards", "outcome", "words"), ATTENTION)
def test_attention_by_card_and_kv_dtype(what, cards, outcome, words):
    answers = said(on.attention, what, cards)
    assert all(seen == outcome for seen, _ in answers)
    assert any(words in because for _, because in answers)


def test_the_drafter_s_attention_is_asked_apart_and_decides_only_where_it_runs():
    flash_next = facts(FLASH_NEXT)
    passes = said(on.attention, flash_next, "rtx-pro-6000:2")
    assert [because.startswith("the drafter's") for _, because in passes] == [False, True]
    idle, running = (said(on.attention, flash_next, f"rtx-pro-6000:2 --kv-cache-dtype fp8_e5m2{mtp}")
                     for mtp in ("", " --mtp 2"))  # fmt: skip
    assert [outcome for outcome, _ in idle] == ["reject", "note"]
    assert [outcome for outcome, _ in running] == ["reject", "reject"]
    assert all("requires a BF16 or FP8-e4m3 main KV cache" in because for _, because in running)


def test_a_checkpoint_that_asks_for_its_kv_dtype_is_told_of():
    quantised = {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}
    answers = ask(on.attention, of_config(quantization_config=quantised), "rtx-pro-6000")
    [told] = [answer for answer in answers if answer.outcome is Outcome.NOTE]
    assert told.source is Source.CONFIG
    assert told.because == "--kv-cache-dtype auto becomes fp8: the checkpoint asks for it"
    assert "KV cache in fp8" in answers[0].because


# Ranks, table, flags


def test_experts_that_cannot_be_divided_are_refused_and_expert_parallelism_helps():
    """As the engine's own build of this model does."""
    [(outcome, because)] = said(on.ranks, facts(FLASH_NEXT), "rtx-pro-5000-72gb:4")
    assert outcome == "reject"
    assert "experts of 160 on a rank" in because
    assert [o for o, _ in said(on.ranks, facts(FLASH_NEXT), "rtx-pro-5000-72gb:4 --enable-expert-parallel")] == ["pass"]
    assert [o for o, _ in said(on.ranks, facts(FLASH_NEXT), "rtx-pro-5000-72gb:2")] == ["pass"]


@given(st.integers(1, 12), st.sampled_from([8, 12, 16, 24]), st.sampled_from([1, 2, 4, 8]))
def test_heads_divide_or_are_refused(tp, heads, kv_heads):
    config = of_config(num_attention_heads=heads, num_key_value_heads=kv_heads, intermediate_size=27720)
    refused = [because for outcome, because in said(on.declared_ranks, config, f"h200:{tp}") if outcome == "reject"]
    divides = heads % tp == 0 and max(kv_heads, tp) % min(kv_heads, tp) == 0
    assert bool(refused) == (not divides)


def test_mlp_and_linear_attention_divide_or_are_refused():
    assert said(on.declared_ranks, of_config(intermediate_size=3000), "h200:16")[-1][1].startswith(
        "vllm 0.33.0: a dense MLP of 3000: not divisible by 16 ranks")  # fmt: skip
    hybrid = facts("Qwen/Qwen3.8-27B-FP8") if "Qwen/Qwen3.8-27B-FP8" in checkpoints() else facts(FLASH_NEXT)
    assert any("linear-attention key heads" in because for _, because in said(on.declared_ranks, hybrid, "h200:3"))


def test_a_table_needs_one_pipeline_stage_and_host_memory():
    [(outcome, because)] = said(on.table_place, facts(FLASH_NEXT), "h200:2 --pipeline-parallel-size 2")
    assert (outcome, "requires pipeline_parallel_size=1" in because) == ("reject", True)
    declared = """--hf-overrides '{"text_config":{"ple_embedding_dtype":"float8_e4m3fn"}}'"""
    [(outcome, because)] = said(on.table_place, facts(FLASH_NEXT), f"h200:2 {declared}")
    assert (outcome, "23.84 GiB a rank, 47.68 GiB on a host" in because) == ("note", True)
    assert said(on.table_place, facts(FLASH_NEXT), "h200:2 --ple gpu") == []
    assert said(on.table_place, of_config(), "h200:2") == []


def test_flags_that_do_not_do_what_they_say():
    told = said(on.flags, of_config(), "h200 --mamba-cache-mode all --engine vllm==0.25.1")
    assert {outcome for outcome, _ in told} == {"note"}
    assert told[0][1].startswith("--mamba-cache-mode all becomes align; when: models without support")
    assert said(on.flags, of_config(), "h200 --max-model-len 4096") == []
    assert obeyed_otherwise([], "0.33.0") == []
    for row in FLAGS:
        words = row.flag.replace(" (none given)", "").split()
        given = row.flag.startswith("--") and "(" not in row.flag
        assert not given or any(text.startswith(row.flag) for text in obeyed_otherwise(words, row.versions[-1]))


# The command

TINY = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 128,
        "vocab_size": 256, "max_position_embeddings": 4096, "tie_word_embeddings": False}  # fmt: skip


def tiny(name, **config):
    shapes = {"model.embed_tokens": (256, 64), "lm_head": (256, 64), "model.norm": (64,)}
    below = {"self_attn.q_proj": (256, 64), "self_attn.k_proj": (128, 64), "self_attn.v_proj": (128, 64),
             "self_attn.o_proj": (64, 256), "mlp.gate_proj": (128, 64), "mlp.up_proj": (128, 64),
             "mlp.down_proj": (64, 128), "input_layernorm": (64,), "post_attention_layernorm": (64,)}  # fmt: skip
    shapes |= {f"model.layers.0.{module}": shape for module, shape in below.items()}
    tensors = [Tensor(f"{module}.weight", "BF16", shape) for module, shape in shapes.items()]
    return DemoRepo(name, {"config.json": TINY | config, "model.safetensors": safetensors_file(tensors)})


def test_on_names_a_deciding_source_for_every_exclusion(hub, tmp_path, capsys):
    exl3 = {"quantization_config": {"quant_method": "exl3", "bits": 4.0}}
    server = hub(tiny("a/sound"), tiny("a/exl3", **exl3), tiny("a/odd", num_attention_heads=6, num_key_value_heads=3),
                 tiny("a/new", architectures=["HyenaNextForCausalLM"]))  # fmt: skip
    words = ["a/sound", "a/exl3", "a/odd", "a/new", "--on", "rtx-pro-5000-72gb:4", "--context", "4096", "--endpoint",
             server.endpoint, "--token", "", "--cache-dir", str(tmp_path)]  # fmt: skip
    code = run(app, [*words, "--json"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert code == 0
    assert [row["outcome"] for row in rows] == ["keep", "drop", "drop", "unknown"]
    assert [row["reached"] for row in rows] == ["headers", "config", "config", "headers"]
    decisive = [next(f for f in row["findings"] if f["outcome"] in ("reject", "unknown")) for row in rows[1:]]
    assert [(f["gate"], f["source"]) for f in decisive] == [
        ("engine-reader", "engine"), ("engine-sizes", "engine"), ("engine-architecture", "engine")
    ]  # fmt: skip
    assert all("vllm 0.33.0" in finding["limit"] for finding in decisive)
    assert {f["gate"]: f["outcome"] for f in rows[0]["findings"]}["fits"] == "pass"
    assert run(app, words) == 0
    text = capsys.readouterr().out
    assert "engine-sizes" in text
    assert "6 attention heads: not divisible by 4 ranks" in text


@pytest.mark.parametrize(("words", "message"), [
    (["--on", "h200:0"], "--on 'h200:0': expected CARD:N"),
    (["--on", "71.2GiB:2"], "expected a card whose compute capability is known"),
    (["--on", "24GiB:1 --capability 6.1"], "expected a capability of"),
    (["--on", "h200 --no-such-option"], "--no-such-option: expected an option of vllm"),
    (["--context", "4096"], "--context: expected --fits or --on CARD:N"),
    (["--kv-cache-dtype", "fp8"], "--kv-cache-dtype: expected --fits or --on CARD:N"),
])  # fmt: skip
def test_a_target_that_is_none_is_usage(words, message, capsys):
    assert run(app, ["a/b", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_target_is_parsed_once():
    with pytest.raises(BadInput, match="options of the engine after the card, got 'second'"):
        parse_target("h200 second", None, coefficients(), flag="--on")
    target = parse_target("h200:2", "128k", coefficients(), more=("--kv-cache-dtype", "fp8"))
    assert (target.deployment.tp, target.deployment.max_model_len) == (2, 128000)
    assert target.deployment.kv_cache_dtype == "fp8"
