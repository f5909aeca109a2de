"""The engine's own builds, recorded, beside the closed form; and `fit gates` as a user runs it."""

import json
from pathlib import Path

import pytest

from formulas.beside import HOST, beside, beside_lines
from formulas.cli import app
from formulas.console import run
from formulas.deployment import Deployment
from formulas.engines import SHIPPED_CAPABILITIES
from formulas.shipped import checkpoints

RECORDED = json.loads((Path(__file__).parent / "golden" / "gates" / "builds_12.0.json").read_text())
"""What vllm 0.33.0 answered to `build_question` for capability 12.0, on a machine without a card."""


def built(number, **changed):
    build = RECORDED["builds"][number]
    answer = {"vllm": RECORDED["vllm"], "capability": RECORDED["capability"], "models": [build["answer"] | changed]}
    deployment = Deployment(capability="12.0", **build["deployment"])
    return beside(answer, checkpoints()[f"{build['model']}#modules"], deployment)


@pytest.mark.parametrize("number", range(len(RECORDED["builds"])))
def test_the_closed_form_has_the_engine_s_bytes(number):
    found = built(number)
    assert found.agrees
    assert abs(found.closed_bytes - found.live_bytes) <= 0.0015 * found.live_bytes
    named = {part.part: part for part in found.parts if part.because}
    assert set(named) <= {"other"}
    assert sum(part.live_bytes for part in found.parts) == found.live_bytes
    assert not any(part.part.startswith(HOST) for part in found.parts)


def test_both_refuse_experts_that_cannot_be_padded_and_expert_parallelism_helps():
    refused, accepted = built(0), built(1)
    assert refused.refused.startswith("Intermediate size padding for w1 and w3, for FLASHINFER_CUTLASS NvFp4 backend")
    assert ["experts of 160 on a rank" in reason for reason in refused.closed_refused] == [True]
    assert (refused.stage, accepted.stage) == ("created", "loaded")
    assert (accepted.refused, accepted.closed_refused) == (None, ())


def test_a_buffer_counted_elsewhere_is_a_named_cause():
    found = built(2)
    [part] = [part for part in found.parts if part.because]
    assert part.because.startswith("the hidden states handed to the drafter")
    assert found.closed_mtp_bytes - found.live_mtp_bytes == part.live_bytes


def test_a_difference_is_explained_or_said_not_to_be():
    build = RECORDED["builds"][3]["answer"]
    more = {"by": build["post"]["by"] | {"expert": build["post"]["by"]["expert"] + (1 << 30)}}
    [repacked] = [part for part in built(3, post=build["post"] | more).parts if part.because]
    assert repacked.because.startswith("created alike; the kernels of this environment change it while loading (")
    [strange] = [part for part in built(3, post=build["post"] | more, by=more["by"]).parts if part.because]
    assert strange.because == "not explained"
    assert not built(3, post=build["post"] | more).agrees


def test_an_engine_that_refuses_at_once_leaves_nothing_to_compare():
    found = built(1, by=None, post={}, refused={"message": "no such model", "where": "config/model.py:1"})
    assert found.agrees is None
    assert "vllm 0.33.0 refuses: no such model (config/model.py:1)" in beside_lines(found)


def test_as_text_it_is_a_table_of_parts():
    lines = beside_lines(built(1))
    assert lines[0].split() == ["rank", "0,", "loaded", "vllm", "0.33.0", "closed", "form", "difference", "because"]
    assert any(line.startswith("in all") and line.rstrip().endswith(" 0") for line in lines)
    assert lines[-1].startswith("kernels: ")


# fit gates


@pytest.fixture
def gates(capsys):
    def call(*words):
        code = run(app, ["gates", *words])
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.mark.parametrize("capability", SHIPPED_CAPABILITIES)
def test_every_card_has_its_listing(gates, capability):
    code, out, _ = gates("--capability", capability, "--json")
    document = json.loads(out)
    assert code == 0
    assert set(document) >= {"engine", "capability", "source", "date", "attention", "moe", "linear", "ignored_flags"}
    assert (document["engine"], document["capability"], document["source"]) == ("vllm 0.33.0", capability, "shipped")
    assert set(document["attention"][0]) == {"kind", "kv_dtype", "head_size", "backend", "accepted", "reasons", "rank"}
    assert {"format", "picked", "accepted", "refused"} <= set(document["moe"][0])
    assert {"flag", "becomes", "versions", "log"} <= set(document["ignored_flags"][0])


def test_one_layer_on_one_card(gates):
    code, out, _ = gates("--card", "rtx-pro-5000-72gb", "--attention", "gqa", "--head-size", "128",
                         "--kv-dtype", "fp8_e4m3")  # fmt: skip
    lines = out.splitlines()
    assert code == 0
    assert any(line.split()[:2] == ["CHOSEN", "FLASHINFER"] for line in lines)
    assert any(line.split()[:2] == ["ACCEPTED", "TRITON_ATTN"] for line in lines)
    [refused] = [line for line in lines if line.split()[:2] == ["REFUSED", "FLASH_ATTN"]]
    assert "FP8 KV cache requires FA3 on SM90" in refused
    assert gates("--capability", "8.6", "--attention", "mla_sparse")[0] == 3


@pytest.mark.parametrize(("name", "card", "code", "words"), [
    ("gpt-oss-20b#modules", "rtx-pro-6000", 0, ["attention sinks, head size 64", "mxfp4_gpt_oss", "MARLIN"]),
    ("gpt-oss-20b#modules", "b200", 0, ["FLASHINFER_TRTLLM"]),
    ("qwen3.8-flash-next-nvfp4#modules", "rtx-pro-6000", 0, ["attention qsa, head size 256", "FLASHINFER_CUTLASS"]),
    ("nvidia/DeepSeek-V3.2-NVFP4#modules", "a100-80gb", 3, ["attention mla_sparse, head size 576", "REFUSED"]),
])  # fmt: skip
def test_what_a_checkpoint_needs(gates, tmp_path, name, card, code, words):
    path = tmp_path / "facts.json"
    path.write_text(checkpoints()[name].model_dump_json(exclude_none=True) + "\n")
    seen, out, _ = gates("--card", card, "--checkpoint", str(path))
    assert seen == code
    assert all(word in out for word in words)


@pytest.mark.parametrize(("words", "message"), [
    ([], "expected --card CARD or --capability"),
    (["--capability", "6.1"], "expected a capability of"),
    (["--card", "h200", "--attention", "strange"], "--attention 'strange': expected one of gqa"),
    (["--card", "h200", "--engine", "vllm==0.25.1"], "expected a release with a shipped table (0.33.0)"),
    (["--card", "h200", "--engine", "sglang==1.0"], "--engine"),
    (["--card", "h200", "--live"], "--live: expected --engine-python PATH"),
    (["--card", "h200", "--live", "--engine-python", "./no-such-python"], "expected a Python interpreter"),
])  # fmt: skip
def test_questions_that_are_none_are_usage(gates, words, message):
    code, _, err = gates(*words)
    assert code == 2
    assert message in err
