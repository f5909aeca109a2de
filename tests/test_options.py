"""Engine options: read, refused, told apart from what the engine does not have, and written again."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from formulas.deployment import Deployment
from formulas.engine_options import ENGINE_FLAGS, HARMLESS, is_engine_switch
from formulas.errors import BadInput
from formulas.options import OPTIONS, deployment_from, parse_arguments, serve_arguments

FLAGS = [flag for option in OPTIONS for flag in option.flags]


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        (["--tp", "2", "-pp", "3", "--data-parallel-size=4"], {"tp": 2, "pp": 3, "dp": 4}),
        (["--max-model-len", "256k"], {"max_model_len": 256_000}),
        (["--max-model-len", "256K"], {"max_model_len": 262_144}),
        (["--max-model-len", "auto"], {"max_model_len": -1}),
        (["--max-model-len", "-1"], {"max_model_len": -1}),
        (["--kv-cache-memory-bytes", "10GiB"], {"kv_cache_memory_bytes": 10 * 2**30}),
        (["--enforce-eager", "--no-enable-prefix-caching"], {"enforce_eager": True, "enable_prefix_caching": False}),
        (["--enable_prefix_caching"], {"enable_prefix_caching": True}),
        (["--limit-mm-per-prompt", "image=2,video=0"], {"limit_mm_per_prompt": {"image": 2, "video": 0}}),
        (["--limit-mm-per-prompt", '{"image": 2}'], {"limit_mm_per_prompt": {"image": 2}}),
        (["--engine", "vllm==0.19.0"], {"version": "0.19.0"}),
        (["--engine", "0.19.0"], {"version": "0.19.0"}),
        (["--speculative-config", '{"method": "mtp", "num_speculative_tokens": 3}'], {"mtp": 3}),
        (["--disable-custom-all-reduce"], {"without": frozenset({"custom_all_reduce"})}),
        (["--host", "0.0.0.0", "--no-enable-log-requests", "--trust-remote-code"], {}),
        (["--tokenizer", "other/name", "--seed", "3"], {}),
    ],
)
def test_options_are_read(words, fields):
    found = parse_arguments(words)
    assert found == (fields, (), ())
    deployment_from(found.fields)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--enable-lora"], "--enable-lora is not modelled"),
        (["--max-loras", "3"], "--max-loras is not modelled"),
        (["--cpu-offload-gb=10"], "--cpu-offload-gb is not modelled"),
        (["--kernel-config.enable_x", "1"], "--kernel-config.enable-x is not modelled"),
        (["--speculative-config", '{"method": "eagle3", "model": "a/b", "num_speculative_tokens": 3}'], "eagle3"),
    ],
)
def test_what_is_not_modelled_is_a_reason_and_takes_its_value(words, reason):
    found = parse_arguments(["org/name", *words, "other/name"])
    assert found.words == ("org/name", "other/name")
    [said] = found.reasons
    assert reason in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--foo", "3"], "--foo: expected an option of vllm"),
        (["--max-modle-len", "3"], "is --max-model-len meant"),
        (["--enfroce-eager"], "is --enforce-eager meant"),
        (["--tp", "two"], "--tensor-parallel-size 'two'"),
        (["--tp"], "--tp: expected a value"),
        (["--tp", "--pp", "2"], "--tp: expected a value"),
        (["--max-model-len", "0"], "--max-model-len '0'"),
        (["--hf-overrides", "[1]"], "--hf-overrides"),
        (["--ple", "disk"], "--ple 'disk'"),
        (["--engine", "sglang==0.5"], "only vllm is modelled"),
        (["--engine", "latest"], "--engine 'latest'"),
        (["--capability", "12"], "--capability '12'"),
        (["--speculative-config", "3"], "--speculative-config"),
    ],
)
def test_bad_words_name_the_option(words, message):
    with pytest.raises(BadInput) as caught:
        parse_arguments(words)
    assert message in caught.value.message


@pytest.mark.parametrize(
    "fields",
    [{"tp": 0}, {"max_num_seqs": 0}, {"gpu_memory_utilization": 1.5}, {"gpu_memory_utilization": 0.0}, {"mtp": -1},
     {"max_num_batched_tokens": -5}, {"mm_encoder_tp_mode": "both"}, {"version": "x"}],
)  # fmt: skip
def test_a_value_out_of_range_names_its_field(fields):
    with pytest.raises(BadInput) as caught:
        deployment_from(fields)
    assert next(iter(fields)) in caught.value.message or "version" in caught.value.message


def test_the_engines_options_are_told_from_ours():
    assert not set(FLAGS) & ENGINE_FLAGS
    assert all(is_engine_switch(flag) is not None for flag in ENGINE_FLAGS)
    assert is_engine_switch("--enable-lora") is True
    assert is_engine_switch("--no-enable-lora") is True
    assert is_engine_switch("--max-loras") is False
    assert is_engine_switch("--never-heard-of") is None


@given(st.lists(st.sampled_from(sorted(ENGINE_FLAGS - HARMLESS)), max_size=6))
def test_no_option_of_the_engine_is_ignored(flags):
    words = [word for flag in flags for word in ([flag] if is_engine_switch(flag) else [flag, "1"])]
    speculative = {"--speculative-config", "-sc"}
    if speculative & set(flags):
        return
    assert len(parse_arguments(words).reasons) == len(flags)


deployments = st.builds(
    Deployment,
    tp=st.integers(1, 16), max_model_len=st.integers(1, 10**6), max_num_seqs=st.integers(1, 2048),
    gpu_memory_utilization=st.floats(0.1, 1.0), kv_cache_dtype=st.sampled_from(["auto", "fp8", "bfloat16"]),
    enforce_eager=st.booleans(), expert_parallel=st.booleans(), mtp=st.integers(0, 5),
    enable_prefix_caching=st.sampled_from([None, False]), hf_overrides=st.just({"text_config": {"a": 1}}),
    limit_mm_per_prompt=st.dictionaries(st.sampled_from(["image", "video"]), st.integers(0, 9)),
)  # fmt: skip


@given(deployments)
def test_a_serve_command_reads_back_as_the_deployment(deployment):
    words = serve_arguments(deployment)
    found = parse_arguments(words)
    assert found.reasons == ()
    assert deployment_from(found.fields) == deployment


def test_a_serve_command_is_json_where_the_engine_takes_json():
    words = serve_arguments(Deployment(mtp=2, ple="host"))
    assert json.loads(words[words.index("--speculative-config") + 1]) == {"method": "mtp", "num_speculative_tokens": 2}
    assert json.loads(words[words.index("--engram-config") + 1]) == {"cpu_offload": True}
