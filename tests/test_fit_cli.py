"""`fit` as a user runs it: words in, an answer and an exit code out."""

import io
import json
import sys
from pathlib import Path

import pytest

from formulas.cli import app
from formulas.console import run
from formulas.scoring import MEASURED_LAST
from formulas.shipped import checkpoints
from formulas.shipped import points as shipped_points
from screen.cli import app as screen_app

LOGS = Path(__file__).parent / "golden" / "logs"
FLASH_NEXT = "RadixArk/Qwen3.8-Flash-Next-NVFP4"
FP8_TABLE = '{"text_config":{"ple_embedding_dtype":"float8_e4m3fn"}}'
UNKNOWN = {"model_type": "hyena_next", "architectures": ["HyenaNextForCausalLM"], "num_hidden_layers": 4}


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    """No test reads or writes the points of the person who runs it."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def fit(capsys):
    def call(*words):
        code = run(app, [str(word) for word in words])
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    """A facts document by name, as a file."""
    folder = tmp_path_factory.mktemp("facts")

    def write(name):
        path = folder / f"{name.replace('/', '__')}.json"
        path.write_text(checkpoints()[name].model_dump_json(exclude_none=True) + "\n")
        return path

    return write


def rows(out):
    return [json.loads(line) for line in out.splitlines()]


def test_an_answer_states_its_account_its_source_and_its_cache(fit, facts):
    code, out, err = fit(facts("Qwen/Qwen3-8B"), "--gpu", "h200")
    assert (code, err) == (0, "")
    first, *lines = out.splitlines()
    assert first.startswith("Qwen/Qwen3-8B on h200 x 1: fits; 15.27 GiB of weights")
    for start in ("- weights", "- activation", "- non-torch", "- CUDA graphs", "= KV cache", "KV cache bfloat16: ",
                  "rests on: header for the weights"):  # fmt: skip
        assert any(line.startswith(start) for line in lines), start
    assert "\x1b" not in out


def test_json_has_every_documented_field(fit, facts):
    code, out, _ = fit(facts("Qwen/Qwen3-8B"), "--gpu", "l4", "--json")
    assert code == 3
    [row] = rows(out)
    assert {"checkpoint", "commit", "gpu", "deployment", "per_rank", "kv", "fits", "shortfall_bytes", "nearest_fit",
            "margin_bytes", "evidence", "unmodelled"} <= row.keys()  # fmt: skip
    assert {"rank", "by", "weights_bytes", "mtp_bytes", "ple_bytes", "host_pinned_bytes", "buffers_bytes",
            "activation_bytes", "non_torch_bytes", "cudagraph_bytes", "total_memory_bytes", "requested_bytes",
            "available_kv_bytes"} <= row["per_rank"].keys()  # fmt: skip
    kv = {"bytes_per_token", "block_size", "num_blocks", "tokens", "max_concurrency", "max_context"}
    assert kv <= row["kv"].keys()
    assert row["fits"] is False
    assert row["shortfall_bytes"] > 0
    assert row["nearest_fit"] == f"--max-model-len {row['kv']['max_context']}"
    assert [way["flags"] for way in row["ways"]][1:] == ["--kv-cache-dtype fp8"]


def test_kv_dtypes_and_mtp_depths_in_one_command(fit):
    """A 27B hybrid at TP 4 on 24 GB cards."""
    code, out, _ = fit("--demo", "Qwen/Qwen3.8-27B-FP8", "--gpu", "rtx-4090", "--tp", 4, "--max-model-len", 131072,
                       "--compare-kv", "bf16,fp8", "--compare-mtp", "0,2,4", "--json")  # fmt: skip
    assert code == 0
    tokens = {(row["kv"]["dtype"], row["deployment"]["mtp"]): row["kv"]["tokens"] for row in rows(out)}
    assert len(tokens) == 6
    for depth in (0, 2, 4):
        assert 1.7 < tokens["fp8", depth] / tokens["bfloat16", depth] < 2.1
    for dtype in ("fp8", "bfloat16"):
        assert tokens[dtype, 0] > tokens[dtype, 2] > tokens[dtype, 4] > 0


def test_the_running_checkpoint_and_its_two_readings(fit, facts):
    words = (facts(FLASH_NEXT), "--gpu", "rtx-pro-5000-72gb", "--tp", 2, "--ple", "gpu", "--hf-overrides", FP8_TABLE,
             "--gpu-memory-utilization", 0.98, "--max-num-seqs", 16, "--max-num-batched-tokens", 8192, "--mtp", 2,
             "--kv-reading", "2.07GiB,5.68GiB@262144")  # fmt: skip
    code, out, _ = fit(*words)
    assert code == 3
    assert "in proportion to the readings (2.07 GiB left, 262,144 tokens need 5.68 GiB): 95,535 tokens" in out
    assert "by blocks, with the plan above: 128,000 tokens" in out
    assert "--ple host" in out
    _, out, _ = fit(*words, "--json")
    reading = rows(out)[0]["kv_reading"]
    assert (reading["in_proportion_tokens"], reading["own_longest_tokens"]) == (95_535, 128_000)
    assert fit(*words, "--gpu", "h200")[0] == 2
    assert fit(*words[:-1], "2.07GiB")[0] == 2


def test_one_pool_gives_both_token_counts_of_a_log(fit, facts):
    """A GB10's log: 1,077,542 tokens at 262,144 and, of another start, 260,006 at 8,192; blocks of 1600, fp8 3184."""
    base = (facts(FLASH_NEXT), "--gpu", "gb10", "--mtp", 2, "--max-num-batched-tokens", 8192, "--json")
    _, out, _ = fit(*base)
    per_block = rows(out)[0]["kv"]["bytes_per_block"]
    for blocks, length, tokens in ((744, 262144, 1_077_542), (730, 8192, 260_006)):
        _, out, _ = fit(*base, "--kv-cache-memory-bytes", blocks * per_block, "--max-model-len", length)
        kv = rows(out)[0]["kv"]
        assert (kv["num_blocks"], kv["tokens"], kv["block_size"]) == (blocks, tokens, 1600)
    _, out, _ = fit(*base, "--kv-cache-dtype", "fp8")
    assert rows(out)[0]["kv"]["block_size"] == 3184


def test_an_unknown_architecture_is_unknown_and_exits_3(fit, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(UNKNOWN))
    for word in (tmp_path, tmp_path / "config.json"):
        code, out, _ = fit(word, "--gpu", "h200", "--json")
        [row] = rows(out)
        assert (code, row["fits"], row["kv"]["tokens"], row["per_rank"]["available_kv_bytes"]) == (3, None, None, None)
        assert any("hyena_next" in reason for reason in row["unmodelled"])


def test_a_folder_with_a_config_alone_is_answered_as_that(fit, tmp_path):
    config = {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "dtype": "bfloat16", "vocab_size": 151936,
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960, "tie_word_embeddings": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, out, _ = fit(tmp_path, "--gpu", "h200", "--json")
    [row] = rows(out)
    assert (code, row["evidence"]) == (0, "config")
    assert any("config.json alone" in remark for remark in row["remarks"])
    _, out, _ = fit(tmp_path, "--gpu", "h200", "--json", "--hf-overrides", '{"max_position_embeddings": 8192}')
    assert rows(out)[0]["kv"]["max_context"] == 8192
    del config["num_key_value_heads"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    _, out, _ = fit(tmp_path, "--gpu", "h200", "--json", "--kv-heads", 8)
    assert rows(out)[0]["kv"]["bytes_per_token"] == row["kv"]["bytes_per_token"]


def test_rows_of_screen_are_read_from_stdin(fit, capsys, monkeypatch):
    names = ("Qwen/Qwen3-8B", "oldtimer/llama-7b-finetune", "openai/gpt-oss-20b")
    run(screen_app, ["--demo", "--json", *names])
    printed, _ = capsys.readouterr()
    monkeypatch.setattr(sys, "stdin", io.StringIO(printed))
    code, out, err = fit("-", "--gpu", "h200", "--json")
    assert code == 0
    answers = rows(out)
    assert [row["checkpoint"] for row in answers] == ["Qwen/Qwen3-8B", "openai/gpt-oss-20b"]
    assert all(len(row["commit"]) == 40 and row["evidence"] == "header" for row in answers)
    assert "oldtimer/llama-7b-finetune: not planned for, screen did not keep it: only pickle weights" in err


def test_an_override_facts_cannot_take_makes_the_answer_unknown(fit, facts):
    path = facts(FLASH_NEXT)
    code, out, _ = fit(path, "--gpu", "h200", "--json", "--hf-overrides", '{"max_position_embeddings": 8192}')
    assert code == 3
    assert rows(out)[0]["fits"] is None
    assert "max_position_embeddings cannot be overridden" in rows(out)[0]["unmodelled"][0]
    code, out, _ = fit(path, "--gpu", "h200", "--json", "--hf-overrides", FP8_TABLE)
    assert (code, rows(out)[0]["fits"]) == (0, True)


def test_several_checkpoints_and_cards_are_a_table(fit, facts):
    code, out, _ = fit(facts("Qwen/Qwen3-8B"), facts("openai/gpt-oss-20b"), "--gpu", "l4", "--gpu", "h200")
    assert code == 3  # one of them does not fit
    head, *lines = out.splitlines()
    assert head.split()[:3] == ["checkpoint", "card", "tp"]
    found = [tuple(line.split()[:2]) for line in lines[:4]]
    assert found == [(name, card) for name in ("Qwen/Qwen3-8B", "openai/gpt-oss-20b") for card in ("l4", "h200")]
    assert lines[0].endswith("NO")
    assert "fits with --max-model-len" in out


def test_one_of_several_that_cannot_be_read_does_not_take_the_others(fit, facts):
    gone, other = "gone/Qwen3.8-Flash-Next-NVFP4", facts("Qwen/Qwen3-8B")
    code, out, err = fit("--demo", gone, other, "--gpu", "h200", "--json")
    assert code == 4
    assert [row["checkpoint"] for row in rows(out)] == ["Qwen/Qwen3-8B"]
    assert gone in err
    assert fit("--demo", gone, "--gpu", "h200")[0] == 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--foo", "3"], "--foo"),
        (["--max-modle-len", "3"], "--max-model-len"),
        (["--max-num-seqs", "0"], "max_num_seqs"),
        (["--gpu", "rtx-9999"], "rtx-9999"),
        (["--compare-mtp", "0,x"], "--mtp 'x'"),
        (["--tp", "x"], "--tensor-parallel-size"),
        (["--hf-overrides", "{"], "--hf-overrides"),
        (["--points", "/no/such/file"], "--points"),
        (["--plot", "a.pdf"], "--plot"),
    ],
)
def test_bad_words_exit_2_and_name_what_was_wrong(fit, facts, words, message):
    code, out, err = fit(facts("Qwen/Qwen3-8B"), *words)
    assert code == 2
    assert message in err
    assert "Traceback" not in err
    assert not out or "--plot" in words


def test_an_option_that_is_not_modelled_makes_the_answer_unknown(fit, facts):
    code, out, _ = fit(facts("Qwen/Qwen3-8B"), "--gpu", "h200", "--enable-lora", "--max-loras", 3, "--json")
    assert code == 3
    [row] = rows(out)
    assert (row["fits"], row["unmodelled"]) == (None, ["--enable-lora is not modelled", "--max-loras is not modelled"])
    code, out, _ = fit(facts("Qwen/Qwen3-8B"), "--gpu", "h200", "--served-model-name", "mine", "--port", 1, "--json")
    assert (code, rows(out)[0]["unmodelled"]) == (0, [])


def test_no_card_named_is_said(fit, facts):
    code, _, err = fit(facts("Qwen/Qwen3-8B"))
    assert code == 0
    assert "no --gpu given: answered for an h100-80gb" in err


@pytest.mark.parametrize(
    "bad", ["not json\n", "3\n", '{"facts": null, "repo": "a/b"}\n', '{"facts": {"geometry": 3}}\n', ""]
)
def test_what_is_no_facts_document_exits_2(fit, tmp_path, bad):
    path = tmp_path / "x.jsonl"
    path.write_text(bad)
    code, _, err = fit(path, "--gpu", "h200")
    assert code == 2
    assert "expected facts JSON" in err


def test_calibrate_keeps_a_point_that_later_answers_use(fit, facts, tmp_path):
    checkpoint = facts("Qwen/Qwen3-30B-A3B#config")
    log = LOGS / "qwen3-30b-a3b_h200_0.25.1.log"
    options = ("--gpu", "h200", "--without", "flashinfer,deep_gemm")
    code, out, err = fit("calibrate", log, checkpoint, *options)
    assert code == 0
    assert "56.88 GiB reported, 56.88 predicted" in out
    assert "readings kept in" in err
    served = (*options, "--engine", "vllm==0.25.1", "--max-model-len", 8192, "--max-num-seqs", 64,
              "--gpu-memory-utilization", 0.9, "--json")  # fmt: skip
    _, out, _ = fit(checkpoint, *served)
    [row] = rows(out)
    assert "calibrated by qwen3-30b-a3b_h200_0.25.1" in row["calibrated"]
    assert row["remarks"][0].startswith("checked against your running checkpoint")
    assert row["per_rank"]["available_kv_bytes"] / 2**30 == pytest.approx(67.64, abs=0.01)
    _, out, _ = fit(checkpoint, *options, "--engine", "0.33.0", "--json")
    assert rows(out)[0]["calibrated"] is None
    bad = tmp_path / "empty.log"
    bad.write_text("hello\n")
    assert fit("calibrate", bad, checkpoint, *options)[0] == 2


def test_score_prints_the_accuracy_and_what_was_passed_over(fit):
    code, out, _ = fit("score", "--formula", "weights: t")
    assert code == 0
    assert "weights: tensor by tensor" in out
    assert "held out: no coefficient was fitted on it" in out
    ours = {point.point for point in shipped_points() if point.held_out and not point.rounding}
    assert set(MEASURED_LAST) < ours
    assert all(name in out for name in MEASURED_LAST)
    code, out, _ = fit("score", "--formula", "block size", "--json")
    found = rows(out)
    assert len(found) > 30
    keys = {"formula", "term", "point", "predicted_bytes", "measured_bytes", "error_percent", "held_out"}
    assert found[0].keys() == keys
    assert all(row["error_percent"] == 0 for row in found)
    code, _, err = fit("score", "--formula", "nothing like it")
    assert code == 2
    assert "weights: total / TP" in err


def test_cards_say_where_they_were_read(fit):
    code, out, _ = fit("gpus", "--json")
    assert code == 0
    cards = {row["name"]: row for row in rows(out)}
    assert {"h200", "rtx-pro-5000-72gb", "rtx-4090", "b200", "gb10", "l4"} <= cards.keys()
    assert all(row["source"] for row in cards.values())
    assert all(row["margin_bytes"] >= 2**28 for row in cards.values() if row["estimated"])


def test_screen_fits_is_the_same_arithmetic(fit, capsys):
    code = run(screen_app, ["--demo", "Qwen/Qwen3-8B", "openai/gpt-oss-20b", "--json", "--fits", "l4:1"])
    printed, _ = capsys.readouterr()
    assert code == 0  # gpt-oss is kept
    verdicts = {row["repo"]: row for row in rows(printed)}
    [finding] = [f for f in verdicts["Qwen/Qwen3-8B"]["findings"] if f["gate"] == "fits"]
    assert (verdicts["Qwen/Qwen3-8B"]["outcome"], finding["outcome"], finding["limit"]) == ("drop", "reject", "l4 x 1")
    _, out, _ = fit("--demo", "Qwen/Qwen3-8B", "--gpu", "l4", "--json")
    [row] = rows(out)
    assert finding["observed"]["available_kv_bytes"] == row["per_rank"]["available_kv_bytes"]
    assert finding["observed"]["max_context"] == row["kv"]["max_context"]
    roomier = ["--fits", "l4:1 --kv-cache-dtype fp8", "--context", "20k"]
    code = run(screen_app, ["--demo", "Qwen/Qwen3-8B", "--json", *roomier])
    printed, _ = capsys.readouterr()
    assert (code, rows(printed)[0]["outcome"]) == (0, "keep")
    code = run(screen_app, ["--demo", "Qwen/Qwen3-8B", "--json", "--fits", "h200:1 --enable-lora"])
    printed, _ = capsys.readouterr()
    assert (code, rows(printed)[0]["outcome"]) == (3, "unknown")
    for words in (["--fits", "l4:x"], ["--fits", "l4:1 other"], ["--context", "8k"]):
        assert run(screen_app, ["--demo", "Qwen/Qwen3-8B", *words]) == 2


@pytest.mark.parametrize(
    ("body", "got"),
    [({"a": 1}, "other fields"), ({"model_type": "llama", "num_hidden_layers": 2}, "by the name config.json only"),
     ([], "'list' object")],
)  # fmt: skip
def test_json_that_is_no_facts_document_is_a_wrong_word_and_no_unknown_model(fit, tmp_path, body, got):
    path = tmp_path / "other.json"
    path.write_text(json.dumps(body))
    code, out, err = fit(path, "--gpu", "h100")
    assert (code, out) == (2, "")
    assert got in err


def test_a_dtype_the_engine_does_not_have_is_a_wrong_word(fit, facts):
    code, _, err = fit(facts("Qwen/Qwen3-8B"), "--gpu", "h100", "--dtype", "float8")
    assert code == 2
    assert "--dtype 'float8'" in err


WHOLE, MAYBE = (int,), (int, type(None))
TYPES = {
    "": {"checkpoint": (str,), "commit": (str, type(None)), "gpu": (str,), "deployment": (dict,), "per_rank": (dict,),
         "kv": (dict,), "fits": (bool, type(None)), "shortfall_bytes": MAYBE, "nearest_fit": (str, type(None)),
         "margin_bytes": WHOLE, "evidence": (str,), "unmodelled": (list,)},
    "per_rank": {"rank": WHOLE, "by": (dict,), "weights_bytes": MAYBE, "mtp_bytes": MAYBE, "ple_bytes": WHOLE,
                 "host_pinned_bytes": WHOLE, "buffers_bytes": WHOLE, "activation_bytes": MAYBE,
                 "non_torch_bytes": MAYBE, "cudagraph_bytes": MAYBE, "total_memory_bytes": WHOLE,
                 "requested_bytes": MAYBE, "available_kv_bytes": MAYBE},
    "kv": {"bytes_per_token": MAYBE, "block_size": MAYBE, "num_blocks": MAYBE, "tokens": MAYBE,
           "max_concurrency": (float, type(None)), "max_context": MAYBE},
}  # fmt: skip
PARTS = {"expert", "shared_expert", "attention", "linear_attention", "mlp", "router", "norm", "embed", "lm_head",
         "vision", "audio", "ple", "hyper_connection", "rope_cache", "other"}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "options", "code"),
    [
        ("Qwen/Qwen3-8B", ("--gpu", "h200"), 0),
        ("Qwen/Qwen3-8B", ("--gpu", "l4"), 3),
        ("Qwen/Qwen3-8B", ("--gpu", "h200", "--tp", "3"), 3),
        (FLASH_NEXT, ("--gpu", "rtx-pro-5000-72gb", "--tp", "2", "--ple", "gpu", "--hf-overrides", FP8_TABLE), 3),
        (FLASH_NEXT, ("--gpu", "h200", "--mtp", "2", "--hf-overrides", FP8_TABLE), 0),
        (None, ("--gpu", "h200"), 3),
    ],
)
def test_json_values_have_their_documented_types_whatever_the_answer(fit, facts, tmp_path, name, options, code):
    if name is None:
        (tmp_path / "config.json").write_text(json.dumps(UNKNOWN))
    got, out, _ = fit(facts(name) if name else tmp_path, *options, "--json")
    [row] = rows(out)
    for part, types in TYPES.items():
        body = row[part] if part else row
        wrong = {key: body[key] for key, kinds in types.items() if type(body[key]) not in kinds}
        assert not wrong
    assert row["per_rank"]["by"].keys() <= PARTS
    assert row["evidence"] in ("header", "config")
    assert (row["fits"] is None) == bool(row["unmodelled"])
    assert (row["fits"] is True) == (got == 0)
    assert got == code


def test_a_picture_that_cannot_be_drawn_is_refused_before_anything_is_read(fit, tmp_path):
    code, out, err = fit(tmp_path / "nothing-here", "--gpu", "h100", "--plot", tmp_path / "x.txt")
    assert (code, out) == (2, "")
    assert "--plot" in err


def test_what_a_token_takes_is_told_even_where_the_weights_are_not_known(fit, tmp_path):
    config = {"model_type": "qwen3", "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 8,
              "head_dim": 128, "hidden_size": 1024, "intermediate_size": 2048, "vocab_size": 1024,
              "max_position_embeddings": 4096, "quantization_config": {"quant_method": "bitsandbytes"}}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, out, _ = fit(tmp_path, "--gpu", "h100")
    assert code == 3
    assert "KV cache: unknown; 8,192 B a further token" in out
