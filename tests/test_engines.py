"""What one engine release accepts on each card: the shipped table against listings and figures, and its questions."""

import ctypes
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from formulas.deployment import Deployment
from formulas.engines import (
    KV_DTYPES,
    SHIPPED_CAPABILITIES,
    attention_gates,
    build_question,
    chosen_attention,
    fold_answers,
    formats,
    linear_gates,
    meaning,
    moe_gates,
    since,
    spoken,
    unreadable,
)
from formulas.errors import BadInput
from formulas.flags import FLAGS, ignored_flags
from formulas.gates import Needed, gates_document, show_gates
from formulas.live import EngineFailed, ask, bundle
from formulas.probe import driver
from formulas.probe.weigh import allocated, part_of
from formulas.shipped import engine_registries, engine_table

GOLDEN = Path(__file__).parent / "golden" / "gates"
SHARED = Path(__file__).parents[1].parent / "shared"
MiB = 1 << 20


@pytest.fixture(scope="module")
def table():
    return engine_table("0.33.0")


def accepted(table, capability, kind, size, kv):
    """Backends of this platform the engine accepts by itself, in its own order."""
    gates = attention_gates(table, capability, kind, size, kv)
    return [gate.backend for gate in gates if gate.accepted and gate.rank is not None]


@pytest.mark.parametrize("capability", ["9.0", "12.0"])
def test_attention_equals_the_listing(table, capability):
    listing = json.loads((GOLDEN / f"gqa128_fp8_e4m3_{capability}.json").read_text())
    gates = {gate.backend: gate for gate in attention_gates(table, capability, "gqa", 128, "fp8_e4m3")}
    assert len(listing["attention"]) == 50
    for backend, verdict, reasons in listing["attention"]:
        if verdict == "N/A":  # a tag without a class
            assert backend not in gates
        elif verdict == "ACCEPTED" and not gates[backend].accepted:
            assert gates[backend].reasons == ("not a backend of the CUDA platform",)
        else:
            assert (gates[backend].accepted, list(gates[backend].reasons)) == (verdict == "ACCEPTED", reasons)


@pytest.mark.parametrize("capability", ["9.0", "12.0"])
def test_gpt_oss_experts_equal_the_listing(table, capability):
    listing = json.loads((GOLDEN / f"gptoss_{capability}.json").read_text())["moe"]["mxfp4"]
    gate = moe_gates(table, capability, "mxfp4_gpt_oss")
    assert gate.picked == listing["pick"].partition(" / ")[0]
    for backend, cls, verdict, reason in listing["rows"]:
        name = f"{backend}/{cls}"
        assert (name in gate.accepted) == (verdict == "ACCEPTED")
        # The listing was asked without gpt-oss's expert biases, which B12x refuses first.
        if verdict == "REFUSED" and cls != "B12xExperts":
            assert gate.refused[name] == reason


def test_acceptance_lines(table):
    assert {"FLASHINFER", "TRITON_ATTN"} <= set(accepted(table, "12.0", "gqa", 128, "fp8_e4m3"))
    flash = next(g for g in attention_gates(table, "12.0", "gqa", 128, "fp8_e4m3") if g.backend == "FLASH_ATTN")
    assert any("FP8 KV cache requires FA3 on SM90" in reason for reason in flash.reasons)
    assert [moe_gates(table, c, "mxfp4_gpt_oss").picked.split("_")[0] for c in ("12.0", "9.0", "10.0")] == [
        "MARLIN", "TRITON", "FLASHINFER",
    ]  # fmt: skip
    assert moe_gates(table, "12.0", "nvfp4").picked == "FLASHINFER_CUTLASS"
    assert moe_gates(table, "9.0", "nvfp4", parallel="without humming").picked == "MARLIN"
    for capability in ("8.0", "8.6", "8.9"):
        assert accepted(table, capability, "mla_sparse", 576, "bfloat16") == []
        assert accepted(table, capability, "mla_sparse", 576, "fp8_e4m3") == []


SM8, SM9, SM10, SM12 = ("8.0", "8.6", "8.9"), ("9.0",), ("10.0", "10.3"), ("12.0", "12.1")
FIGURES = [  # capabilities, kind, head size, KV dtype -> backends in the engine's order
    (SM8, "gqa", 128, "bfloat16", ["FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION"]),
    (SM10, "gqa", 128, "bfloat16", ["FLASHINFER", "FLASH_ATTN", "TRITON_ATTN", "FLEX_ATTENTION"]),
    (SM12, "gqa", 256, "bfloat16", ["FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION"]),
    (SM8, "gqa", 128, "fp8", ["FLASHINFER", "TRITON_ATTN"]),
    (SM9, "gqa", 128, "fp8", ["FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"]),
    (SM12, "gqa", 128, "fp8", ["FLASHINFER", "TRITON_ATTN"]),
    (SM8, "sinks", 64, "bfloat16", ["TRITON_ATTN"]),
    (SM9, "sinks", 64, "bfloat16", ["FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"]),
    (SM12, "sinks", 64, "bfloat16", ["FLASHINFER", "TRITON_ATTN"]),
    (SM8, "mla", 576, "bfloat16", ["TRITON_MLA"]),
    (SM12, "mla", 576, "bfloat16", ["TRITON_MLA"]),
    (SM9, "mla", 576, "fp8", ["FLASHMLA", "TRITON_MLA"]),
    (SM12, "mla_sparse", 576, "fp8", ["FLASHINFER_MLA_SPARSE_SM120"]),
]


@pytest.mark.parametrize(("capabilities", "kind", "size", "kv", "backends"), FIGURES)
def test_attention_figures(table, capabilities, kind, size, kv, backends):
    for capability in capabilities:
        assert accepted(table, capability, kind, size, kv) == backends
        assert chosen_attention(table, capability, kind, size, kv) == backends[0]


EXPERTS = [  # format, capability -> the expert kernel picked
    ("nvfp4", "8.0", "MARLIN"), ("nvfp4", "10.0", "FLASHINFER_TRTLLM"), ("fp8_block128", "8.6", "MARLIN"),
    ("fp8_block128", "8.9", "TRITON"), ("fp8_block128", "9.0", "TRITON"), ("fp8_block128", "12.0", "DEEPGEMM"),
    ("fp8_tensor_static", "9.0", "FLASHINFER_CUTLASS"), ("ct_fp8_channel", "9.0", "VLLM_CUTLASS"),
    ("bf16", "8.0", "TRITON"), ("bf16", "10.0", "FLASHINFER_TRTLLM"), ("mxfp4_gpt_oss", "8.0", "MARLIN"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "capability", "kernel"), EXPERTS)
def test_expert_figures(table, name, capability, kernel):
    gate = moe_gates(table, capability, name)
    assert gate.picked == kernel
    assert any(cls.startswith(f"{kernel}/") for cls in gate.accepted)


def test_expert_parallelism_changes_the_kernel(table):
    assert moe_gates(table, "9.0", "fp8_block128").picked == "TRITON"
    assert moe_gates(table, "9.0", "fp8_block128", parallel="ep").picked == "FLASHINFER_CUTLASS"


def test_the_table_is_whole(table):
    assert (table["version"], tuple(table["capabilities"])) == ("0.33.0", SHIPPED_CAPABILITIES)
    for capability in SHIPPED_CAPABILITIES:
        assert len(formats(table, capability)) >= 40
        for kv in KV_DTYPES:
            assert attention_gates(table, capability, "gqa", 128, kv)
        for name in formats(table, capability):
            gate = linear_gates(table, capability, name)
            assert gate.picked or gate.refusal, f"{capability} {name}: neither a kernel nor a refusal"
            assert meaning(gate.picked)


@pytest.mark.parametrize("name", ["exl3", "gguf", "bitsandbytes_nf4", "aqlm", "hqq"])
def test_formats_without_a_reader_are_refused_by_name(table, name):
    assert "Unknown quantization method" in linear_gates(table, "12.0", name).refusal
    assert unreadable(name.partition("_")[0])


def test_what_the_table_was_not_asked_is_unknown(table):
    assert attention_gates(table, "12.0", "gqa", 127, "bfloat16") is None
    assert chosen_attention(table, "12.0", "nonsense", 128, "bfloat16") is None
    assert moe_gates(table, "12.0", "fp5") is None
    with pytest.raises(BadInput, match=r"expected a capability of 7.5, .*, got 6.1"):
        attention_gates(table, "6.1", "gqa", 128, "bfloat16")


NAMES = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN")
REASONS = st.lists(st.sampled_from(["head_size not supported", "attention sinks not supported", "x"]), unique=True)


@given(st.lists(st.fixed_dictionaries(dict.fromkeys(NAMES, REASONS)), min_size=len(KV_DTYPES), max_size=len(KV_DTYPES)))
@settings(deadline=None, max_examples=50)
def test_folding_loses_nothing(verdicts):
    rows = [
        {"kind": "gqa", "head_size": 64, "kv_dtype": kv, "verdicts": said,
         "auto": [name for name, why in said.items() if not why]}
        for kv, said in zip(KV_DTYPES, verdicts, strict=True)
    ]  # fmt: skip
    answer = {"vllm": "1", "torch": "1", "capability": "9.0", "registry": {}, "formats": [], "attention": rows}
    folded = json.loads(json.dumps(fold_answers([answer], date="2026-01-01")))
    for kv, said in zip(KV_DTYPES, verdicts, strict=True):
        gates = {gate.backend: gate for gate in attention_gates(folded, "9.0", "gqa", 64, kv)}
        assert {name: list(gate.reasons) for name, gate in gates.items()} == said
        order = sorted((g for g in gates.values() if g.accepted), key=lambda g: g.rank)
        assert [g.backend for g in order] == [name for name, why in said.items() if not why]


def test_documents_and_text(table):
    document = gates_document(table, "12.0", Needed([("gqa", 128, "fp8_e4m3"), ("gqa", 99, "fp8")]), source="shipped")
    assert document["unknown"] == ["attention gqa 99 fp8"]
    assert {"kind", "kv_dtype", "head_size", "backend", "accepted", "reasons", "rank"} == set(document["attention"][0])
    assert {row["format"] for row in document["moe"]} == set(formats(table, "12.0"))
    text = "\n".join(show_gates(document))
    assert "CHOSEN" in text
    assert "FP8 KV cache requires FA3 on SM90" in text
    assert "unknown: attention gqa 99 fp8" in text
    json.dumps(document)


def test_ignored_flags_name_their_source():
    assert {row.flag for row in ignored_flags("0.33.0")} > {"--mamba-cache-mode", "--kv-cache-dtype auto"}
    assert ignored_flags("0.2.0") == ()
    assert all(".py:" in row.source and row.becomes for row in FLAGS)


def test_registries():
    registries = engine_registries()
    assert since(registries, "Qwen4ExpForConditionalGeneration").first > "0.25"
    assert since(registries, "GptOssForCausalLM").oldest_read
    assert since(registries, "NoSuchForCausalLM") is None


def test_a_build_is_asked_in_the_engines_own_words():
    asked = build_question({"config.json": {}}, Deployment(tp=4, expert_parallel=True, mtp=2, capability="12.0"))
    assert asked["models"][0] | {"files": {}, "options": {}} == {
        "files": {}, "tp": 4, "ep": True, "rank": 0, "mtp": 2, "kv_cache_dtype": "auto", "options": {},
    }  # fmt: skip
    with pytest.raises(BadInput, match="got pp 2"):
        build_question({}, Deployment(pp=2))


@pytest.mark.parametrize(("message", "words"), [
    ("('no %s for %d', 'kernel', 4)", "no kernel for 4"), ("('cut off at the %s', 'e", "('cut off at the %s', 'e"),
    ("('a %s',)", "('a %s',)"), ("plain words, 100 %", "plain words, 100 %"),
])  # fmt: skip
def test_templates_are_put_together_with_their_values(message, words):
    assert spoken(message) == words


# ------------------------------------------------------------------------------------------ the probe


def test_an_interpreter_that_is_none():
    with pytest.raises(BadInput, match="expected a Python interpreter"):
        ask(["./no-such-python"], {})


def test_an_interpreter_without_the_engine():
    with pytest.raises(BadInput, match="expected an interpreter that has vllm"):
        ask([sys.executable], {"capability": "12.0"}, timeout_seconds=60)


def test_an_engine_that_hangs_is_stopped():
    with pytest.raises(EngineFailed, match="within 1 s"):
        ask([sys.executable, "-c", "import time; time.sleep(60)"], {}, timeout_seconds=1)


def test_an_engine_that_babbles():
    with pytest.raises(EngineFailed, match="expected one JSON answer, got exit 1: out of words"):
        ask([sys.executable, "-c", "import sys; print('hello'); sys.exit('out of words')"], {})


@pytest.mark.skipif(platform.machine() not in driver.CODE or sys.platform != "linux", reason="ELF of two machines")
def test_the_driver_that_answers_no_device(tmp_path):
    (tmp_path / "libcuda.so.1").write_bytes(driver.driver_stub())
    library = ctypes.CDLL(str(tmp_path / "libcuda.so.1"))
    assert {getattr(library, name)() for name in driver.DRIVER_FUNCTIONS} == {100}
    assert not hasattr(library, "cuNoSuchFunction")


@given(st.lists(st.integers(1, 64 * MiB), max_size=40))
def test_allocator_bounds(sizes):
    for max_split in (20 * MiB, 1 << 60):
        total = allocated(sizes, max_split)
        assert total % 512 == 0
        assert sum(sizes) <= total <= sum(sizes) + len(sizes) * 2 * MiB


def test_allocator_rules():
    assert allocated([1], 1 << 60) == 512
    assert allocated([11 * MiB + 1], 1 << 60) == 12 * MiB  # the rest of a segment, 1 MiB or less, stays with it
    assert allocated([12 * MiB + 1, MiB + 1], 20 * MiB) == 14 * MiB  # a larger rest serves the next
    assert allocated([21 * MiB + 1], 20 * MiB) == 22 * MiB  # blocks of 20 MiB and more are never split


@pytest.mark.parametrize(("name", "part"), [
    ("model.layers.0.self_attn.q_norm.weight", "attention"), ("model.layers.0.input_layernorm.weight", "norm"),
    ("model.layers.0.mlp.gate.weight", "router"), ("model.layers.0.mlp.experts.w13_weight", "expert"),
    ("model.layers.0.mlp.shared_expert.up_proj.weight", "shared_expert"), ("visual.blocks.0.attn.qkv.weight", "vision"),
    ("model.layers.0.linear_attn.norm.weight", "linear_attention"), ("model.rotary_emb.cos_sin_cache", "rope_cache"),
    ("something.else", "other"), ("model.embedding.weight", "embed"),
])  # fmt: skip
def test_parts_by_module_name(name, part):
    assert part_of(name) == part


def test_the_bundle_is_a_program():
    done = subprocess.run([sys.executable, "-c", "import zipfile, io, sys; "
                           "names = zipfile.ZipFile(io.BytesIO(sys.stdin.buffer.read())).namelist(); print(*names)"],
                          input=bundle(), capture_output=True, check=True)  # fmt: skip
    assert {"__main__.py", "fit_probe/run.py", "fit_probe/__init__.py"} <= set(done.stdout.decode().split())


ENGINE = os.environ.get("FIT_ENGINE_PYTHON")


@pytest.mark.skipif(ENGINE is None, reason="FIT_ENGINE_PYTHON names no python with vllm")
def test_live_and_shipped_agree(table):
    names = ["fp8_block128", "nvfp4", "mxfp4_gpt_oss"]
    said = ask([ENGINE], {"capability": "12.0", "env": {"VLLM_HAS_FLASHINFER_CUBIN": "1"}, "registry": True,
                          "formats": [{"names": names}],
                          "attention": {"rows": [["gqa", 128, kv] for kv in KV_DTYPES]}})  # fmt: skip
    live = fold_answers([said], date="2026-01-01")
    assert live["version"] == table["version"]
    for name in names:
        assert moe_gates(live, "12.0", name) == moe_gates(table, "12.0", name)
        assert linear_gates(live, "12.0", name) == linear_gates(table, "12.0", name)
    for kv in KV_DTYPES:
        assert attention_gates(live, "12.0", "gqa", 128, kv) == attention_gates(table, "12.0", "gqa", 128, kv)


@pytest.mark.skipif(ENGINE is None, reason="FIT_ENGINE_PYTHON names no python with vllm")
@pytest.mark.parametrize(("expert_parallel", "outcome"), [(False, "refused"), (True, "post")])
def test_flash_next_on_four_cards(expert_parallel, outcome):
    folder = SHARED / "data" / "measured" / "module_configs" / "qwen3.8-flash-next-nvfp4"
    if not folder.is_dir():
        pytest.skip("../shared/data is absent")
    files = {path.name: json.loads(path.read_text()) for path in folder.glob("*.json")}
    asked = build_question(files, Deployment(tp=4, expert_parallel=expert_parallel, capability="12.0"))
    said = ask([ENGINE], asked | {"env": {"VLLM_HAS_FLASHINFER_CUBIN": "1"}})["models"][0]
    assert said["total"] > 0
    assert outcome in said
    assert expert_parallel or "Intermediate size padding" in said["refused"]["message"]
