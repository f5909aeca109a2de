"""What an engine could not load, told from headers and config; and real checkpoints, of which none is accused."""

import gzip
import json
from datetime import UTC, datetime
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from formulas.console import run
from formulas.facts import Facts, Ple, Quantization
from formulas.tensors import fold
from screen import loadable
from screen.census import derive, parse_config
from screen.chain import Criteria, Known
from screen.cli import app
from screen.demofiles import Tensor, safetensors_file
from screen.demorepo import DemoRepo
from screen.findings import Outcome, grouped
from screen.header import parse_stated_header
from screen.policy import Policy

DATA = Path(__file__).parents[1].parent / "shared" / "data"
NVFP4 = {"weight": ("U8", (64, 32)), "weight_scale": ("F8_E4M3", (64, 4)), "weight_scale_2": ("F32", ()),
         "input_scale": ("F32", ())}  # fmt: skip
PLAIN = {"weight": ("BF16", (64, 64))}
ATTENTION = [f"model.layers.{n}.self_attn.{part}_proj" for n in range(4) for part in "qkvo"]
EXPERTS = [f"model.layers.{n}.mlp.experts.{e}.{part}_proj" for n in range(4) for e in range(8)
           for part in ("gate", "up", "down")]  # fmt: skip
MTP = [f"mtp.layers.0.{part}_proj" for part in (*(f"self_attn.{p}" for p in "qkvo"), "mlp.gate", "mlp.up", "mlp.down")]


def stored(**forms):
    """(name, dtype, shape) of tensors: modules by the form they are stored in."""
    kinds = {"nvfp4": NVFP4, "plain": PLAIN}
    return [(f"{module}.{leaf}", *form) for kind, modules in forms.items() for module in modules
            for leaf, form in kinds[kind].items()]  # fmt: skip


def candidate(tensors, ignore=("lm_head", "*.self_attn.*"), *, method="modelopt", ple=None, config=None):
    quantization = Quantization(method=method, ignore=ignore, config=config or {"quant_algo": "NVFP4"})
    facts = Facts(tensor_groups=tuple(fold(tensors)), quantization=quantization, ple=ple)
    return Known("org/name", "main", facts=facts)


def ask(check, known, **policy):
    found = check(known, Criteria(Policy(**policy), datetime(2026, 11, 29, tzinfo=UTC)))
    return [(answer.outcome, answer.because) for answer in found]


def outcomes(check, known, **policy):
    return [str(outcome) for outcome, _ in ask(check, known, **policy)]


GOOD = stored(nvfp4=EXPERTS, plain=[*ATTENTION, "lm_head"])


@pytest.mark.parametrize("check", [loadable.scales, loadable.fused, loadable.unlisted])
def test_a_sound_checkpoint_passes(check):
    assert outcomes(check, candidate(GOOD)) == ["pass"]


@given(st.sampled_from(sorted(set(NVFP4) - {"weight"})), st.sets(st.sampled_from(EXPERTS), min_size=1))
def test_every_missing_scale_is_counted(leaf, modules):
    kept = [tensor for tensor in GOOD if tensor[0] not in {f"{module}.{leaf}" for module in modules}]
    if leaf == "input_scale" and len(modules) == len(EXPERTS):
        return  # weight-only: no input scale anywhere is a format, not a fault
    lacking = [because for outcome, because in ask(loadable.scales, candidate(kept)) if outcome is Outcome.REJECT]
    assert sum(int(because.split()[0]) for because in lacking if f"have no {leaf} " in because) == len(modules)


def test_scales_that_are_all_missing():
    bare = [tensor for tensor in GOOD if not tensor[0].endswith("weight_scale")]
    [(outcome, because)] = ask(loadable.scales, candidate(bare))
    assert outcome is Outcome.REJECT
    assert f"{len(EXPERTS)} packed weights have no weight_scale (" in because
    assert "one is model.layers.0.mlp.experts.0.up_proj" in because
    assert outcomes(loadable.scales, candidate(bare), unloadable="allow") == ["note"]


@pytest.mark.parametrize(
    ("tensors", "lacking"),
    [
        ([("a.q.qweight", "I32", (8, 64)), ("a.q.scales", "F16", (1, 64))], None),
        ([("a.q.qweight", "I32", (8, 64)), ("a.q.qzeros", "I32", (1, 8))], "scales"),
        ([("a.q.weight_packed", "U8", (64, 32)), ("a.q.weight_scale", "F8_E4M3", (64, 4))], "weight_global_scale"),
        ([("a.q.weight_packed", "I32", (64, 8)), ("a.q.weight_scale", "BF16", (64, 1))], None),
        ([("a.q.weight", "F8_E4M3", (64, 64))], "weight_scale"),
        ([("a.q.weight", "F8_E4M3", (64, 64)), ("a.q.weight_scale_inv", "BF16", (1, 1))], None),
        ([("a.experts.gate_up_proj_blocks", "U8", (8, 64, 2, 16))], "scales"),
        ([("a.experts.gate_up_proj", "F8_E4M3", (8, 64, 64))], "weight_scale"),
        ([("a.q.weight", "U8", (2048, 1)), ("a.q.weight.absmax", "F32", (64,)),
          ("a.q.weight.quant_state.bitsandbytes__nf4", "U8", (80,)), ("h.0.attn.bias", "U8", (1, 1, 64, 64))], None),
        ([("t.ngram_embedding.shard_0.weight", "F8_E4M3", (9, 9)), ("t.ngram_embedding.weight_scale", "BF16", (1,))],
         None),
    ],
)  # fmt: skip
def test_what_each_packing_needs(tensors, lacking):
    found = ask(loadable.scales, candidate(tensors))
    assert [outcome for outcome, _ in found] == ([Outcome.REJECT] if lacking else [Outcome.PASS])
    if lacking:
        assert f"have no {lacking} (" in found[0][1]


def test_mtp_modules_that_must_be_on_the_ignore_list():
    tensors = [*GOOD, *stored(plain=MTP)]
    [(outcome, because)] = ask(loadable.unlisted, candidate(tensors, ("lm_head", "*.self_attn.*")))
    assert outcome is Outcome.NOTE  # the model itself loads; its drafter does not
    assert because.startswith("3 MTP modules are stored unquantised and are not on the ignore list")
    assert "mtp.layers.0.mlp.up_proj" in because
    assert outcomes(loadable.unlisted, candidate(tensors, ("*.self_attn.*",)), mtp="required") == ["reject"]
    assert outcomes(loadable.unlisted, candidate(tensors, ("*.self_attn.*", "mtp.*")), mtp="required") == ["pass"]


def test_unquantised_weights_of_the_model_reject():
    [(outcome, because)] = ask(loadable.unlisted, candidate(GOOD, ("lm_head",)))
    assert outcome is Outcome.REJECT
    assert because.startswith("16 modules are stored unquantised")
    assert "layers.{0-3}.self_attn.k_proj" in because


def test_quantised_weights_that_the_list_names_reject():
    [(outcome, because)] = ask(loadable.unlisted, candidate(GOOD, ("lm_head", "*.self_attn.*", "model.layers.2.mlp*")))
    assert outcome is Outcome.REJECT
    assert because.startswith("3 modules are on the ignore list and stored quantised")


def test_formats_whose_engine_reads_the_headers_need_no_list():
    tensors = [("model.layers.0.mlp.up_proj.qweight", "I32", (8, 64)),
               ("model.layers.0.mlp.up_proj.scales", "F16", (1, 64)), *stored(plain=ATTENTION)]  # fmt: skip
    assert outcomes(loadable.unlisted, candidate(tensors, (), method="awq", config={"bits": 4})) == []


@pytest.mark.parametrize(
    ("quantised", "parts", "words"),
    [
        ("q_proj", ("q_proj", "k_proj", "v_proj"), "q_proj nvfp4 with input scale, k_proj plain, v_proj plain"),
        ("up_proj", ("gate_proj", "up_proj"), "gate_proj plain, up_proj nvfp4 with"),
        ("in_proj_z", ("in_proj_qkv", "in_proj_z"), "in_proj_qkv plain, in_proj_z nvfp4 with"),
    ],
)
def test_a_fused_layer_that_is_half_quantised(quantised, parts, words):
    modules = [f"model.layers.{n}.block.{part}" for n in range(3) for part in parts]
    mine = [module for module in modules if module.endswith(f".{quantised}")]
    tensors = stored(nvfp4=mine, plain=[module for module in modules if module not in mine])
    [(outcome, because)] = ask(loadable.fused, candidate(tensors, ()))
    assert (outcome, words in because) == (Outcome.REJECT, True)
    assert because.startswith("3 fused layers")


def test_a_fused_layer_of_which_half_is_on_the_list():
    listed = ("lm_head", "*.q_proj", "*.v_proj", "*.o_proj")
    [(outcome, because)] = ask(loadable.fused, candidate(GOOD, listed))
    assert outcome is Outcome.REJECT
    assert "q_proj and v_proj on the ignore list, k_proj not" in because
    apart = stored(nvfp4=["model.layers.0.mlp.down_proj"], plain=["model.layers.0.mlp.gate_proj"])
    assert outcomes(loadable.fused, candidate(apart, ())) == []  # these are not fused


def test_experts_have_one_format():
    down = [module for module in EXPERTS if module.endswith("down_proj")]
    tensors = stored(nvfp4=[module for module in EXPERTS if module not in down], plain=down)
    [(outcome, because)] = ask(loadable.fused, candidate(tensors))
    assert (outcome, "down_proj plain" in because) == (Outcome.REJECT, True)


def test_weight_only_experts_beside_others():
    bare = [tensor for tensor in GOOD if not tensor[0].endswith("down_proj.input_scale")]
    [(outcome, because)] = ask(loadable.fused, candidate(bare))
    assert (outcome, "up_proj nvfp4 with input scale, down_proj nvfp4 (" in because) == (Outcome.REJECT, True)


TABLE = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding"


def table(form, declared=None, spelled="shard_", config=None):
    tensors = [(f"{TABLE}.{spelled}{n}.weight", "U8", (10, 80)) for n in range(128)]
    ple = Ple(kind="ngram", format=form, table_bytes=128 * 800, declared_dtype=declared)
    return candidate(tensors, ("*.ple.*",), ple=ple, config=config)


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        (table("nvfp4", "nvfp4"), []),
        (table("nvfp4"), "declare nvfp4 in text_config"),
        (table("int4"), "needs an engine that is patched"),
        (table("int4", "int4"), "the engine knows float8_e4m3fn and nvfp4 and stops"),
        (table("fp8", "nvfp4"), "the engine builds it in nvfp4"),
        (table("bf16", "float8_e4m3fn"), "the engine builds it in fp8"),
        (table("bf16"), []),
        (table("fp8", "float8_e4m3fn"), []),
        (table("fp8"), []),  # a note of its own, with its own policy key
        (table("nvfp4", "nvfp4", "shards."), "128 tensors are named"),
    ],
)
def test_a_packed_table_needs_an_engine_that_builds_it(known, expected):
    found = ask(loadable.packed_table, known)
    if not expected:
        assert found == []
        return
    [(outcome, because)] = found
    assert (outcome, expected in because) == (Outcome.REJECT, True)
    assert outcomes(loadable.packed_table, known, unloadable="allow") == ["note"]


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 300)), min_size=1))
def test_grouped_names_are_all_there(numbers):
    names = {f"model.layers.{layer}.mlp.experts.{expert}.up_proj" for layer, expert in numbers}
    found = grouped(names)
    assert found.number == len(names)
    assert found.example in names


QUANTISED = ("nvidia__Qwen3.8-Flash-Next-NVFP4", "Qwen__Qwen3.6-35B-A3B-FP8", "openai__gpt-oss-20b",
             "TheBloke__Genz-70b-GPTQ", "nvidia__NVIDIA-Nemotron-3-Nano-30B-A3B-FP8", "MiniMaxAI__MiniMax-M2.7")


@pytest.mark.parametrize("name", QUANTISED)
def test_no_published_checkpoint_is_accused(name):
    """Engines load these: whatever else they are, their scales, fused layers and ignore lists are sound."""
    path = DATA / "headers" / f"{name}.json.gz"
    if not path.is_file():
        pytest.skip("no recorded headers beside the project")
    document = orjson.loads(gzip.decompress(path.read_bytes()))
    headers = {shard: parse_stated_header(orjson.dumps(header), file_size=document["file_sizes"][shard], name=shard)
               for shard, header in document["headers"].items()}  # fmt: skip
    places = [DATA / folder / name / file for folder in ("configs_assembled", "configs")
              for file in ("config.json", "hf_quant_config.json")]  # fmt: skip
    read = {place.name: parse_config(place.read_bytes(), name=place.name) for place in places if place.is_file()}
    facts = derive(read.get("config.json"), headers, hf_quant=read.get("hf_quant_config.json"))
    for gate in loadable.GATES:
        wrong = [because for outcome, because in ask(gate.check, Known(name, "main", facts=facts), mtp="required")
                 if outcome is not Outcome.PASS]  # fmt: skip
        assert wrong == []


# Before the download, by the command


CONFIG = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 64,
          "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16,
          "vocab_size": 64, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
          "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4",
                                  "ignore": ["lm_head", "*.self_attn.*"]}}  # fmt: skip
MALFORMED = {
    "no-scales": ([t for t in GOOD if not t[0].endswith("weight_scale_2")], "scales", "drop"),
    "half-fused": ([*(t for t in GOOD if "3.self_attn.q" not in t[0]),
                    *stored(nvfp4=["model.layers.3.self_attn.q_proj"])], "fused", "drop"),
    "unlisted": ([*GOOD, *stored(plain=["model.layers.0.mlp.shared_expert.up_proj"])], "unlisted", "drop"),
    "renamed-experts": ([(n.replace(".mlp.experts.", ".feed.parts."), *f) for n, *f in GOOD], "experts", "unknown"),
    "packed-table": ([*GOOD, *((f"{TABLE}.shard_{n}.weight", "U8", (10, 80)) for n in range(4)),
                      (f"{TABLE}.weight_scale", "F8_E4M3", (10,)), (f"{TABLE}.weight_scale_2", "F32", ())],
                     "packed-table", "drop"),
    "table-parts": ([*GOOD, *((f"{TABLE}.shards.{n}.weight", "BF16", (10, 160)) for n in range(4))],
                    "packed-table", "drop"),
}  # fmt: skip


def test_malformed_candidates_are_caught_before_a_download(hub, tmp_path, capsys):
    files = {name: safetensors_file([Tensor(*t) for t in tensors], seed=i)
             for i, (name, (tensors, _, _)) in enumerate(MALFORMED.items())}  # fmt: skip
    server = hub(DemoRepo("org/sound", {"model.safetensors": safetensors_file([Tensor(*t) for t in GOOD], seed=99),
                                        "config.json": CONFIG}),
                 *(DemoRepo(f"org/{name}", {"model.safetensors": file, "config.json": CONFIG})
                   for name, file in files.items()))  # fmt: skip
    names = ["org/sound", *(f"org/{name}" for name in MALFORMED)]
    code = run(app, [*names, "--json", "--endpoint", server.endpoint, "--token", "", "--cache-dir", str(tmp_path)])
    rows = {row["repo"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert code == 0
    assert rows["org/sound"]["outcome"] == "keep", rows["org/sound"]["findings"]
    for name, (_, gate, outcome) in MALFORMED.items():
        row = rows[f"org/{name}"]
        assert row["outcome"] == outcome
        wrong = [found["gate"] for found in row["findings"] if found["outcome"] in ("reject", "unknown")]
        assert gate in wrong, (name, wrong)
        assert row["cost"]["bytes_read"] < files[name].size
