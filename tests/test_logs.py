"""Start-up logs: real ones of vLLM 0.25.1, and the wording of other releases around the same figures."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from formulas.errors import BadInput
from formulas.logs import parse_log, parse_metrics

GIB = 2**30
LOGS = Path(__file__).parent / "golden" / "logs"


def gib(reading):
    return None if reading is None else round(reading.value / GIB, 4)


def test_a_log_of_one_card_with_graphs():
    found = parse_log((LOGS / "qwen3-30b-a3b_h200_0.25.1.log").read_text())
    assert (found.version, found.model) == ("0.25.1", "Qwen/Qwen3-30B-A3B")
    assert gib(found.total_memory) == 139.8
    assert gib(found.free_memory) == 139.29
    assert gib(found.model_memory) == 56.88
    assert (gib(found.peak_activation), gib(found.non_torch)) == (0.87, 0.24)
    assert (gib(found.cudagraph_estimate), gib(found.cudagraph_actual)) == (0.19, 0.24)
    assert gib(found.available_kv) == 67.64
    assert (found.kv_tokens.value, found.kv_tokens.rounding) == (738_832, 0)
    assert found.max_concurrency.value == 90.19
    wanted = {"max_model_len": 8192, "max_num_seqs": 64, "max_num_batched_tokens": 8192, "gpu_memory_utilization": 0.9,
              "tensor_parallel_size": 1, "enforce_eager": False}  # fmt: skip
    assert wanted.items() <= found.arguments.items()


def test_a_log_of_two_cards_without_debug_lines_says_less():
    found = parse_log((LOGS / "gpt-oss-20b_h200-tp2_0.25.1.log").read_text())
    assert gib(found.model_memory) == 6.64
    assert found.peak_activation is found.non_torch is found.total_memory is None
    assert found.arguments["tensor_parallel_size"] == 2
    assert found.arguments["enforce_eager"] is True
    assert found.arguments["disable_custom_all_reduce"] is True


# The wording of each release, from its v1/worker/gpu_worker.py, gpu_model_runner.py and core/kv_cache_utils.py.
WORDING = {
    "0.10.0": """\
INFO [core.py:69] Initializing a V1 LLM engine (v0.10.0) with config: model='org/name', speculative_config=None, \
tokenizer='org/name', dtype=torch.bfloat16, max_seq_len=40960, tensor_parallel_size=2, pipeline_parallel_size=1, \
quantization=None, enforce_eager=False, kv_cache_dtype=auto,  seed=0, enable_prefix_caching=True
INFO [gpu_model_runner.py:1892] Model loading took 14.9889 GiB and 3.503226 seconds
DEBUG [gpu_worker.py:250] Initial free memory: 78.69 GiB, free memory: 60.20 GiB, requested GPU memory: 71.30 GiB
DEBUG [gpu_worker.py:254] Memory profiling takes 5.28 seconds. Total non KV cache memory: 16.25GiB; torch peak memory \
increase: 1.18GiB; non-torch forward increase memory: 0.08GiB; weights memory: 14.99GiB.
INFO [gpu_worker.py:255] Available KV cache memory: 55.05 GiB
INFO [kv_cache_utils.py:833] GPU KV cache size: 450,912 tokens
INFO [kv_cache_utils.py:837] Maximum concurrency for 40,960 tokens per request: 11.01x
INFO [gpu_model_runner.py:2485] Graph capturing finished in 21 secs, took 0.59 GiB
""",
    "0.11.0": """\
(EngineCore_DP0 pid=7) INFO [core.py:77] Initializing a V1 LLM engine (v0.11.0) with config: model='org/name', \
max_seq_len=40960, tensor_parallel_size=2, kv_cache_dtype=auto, enforce_eager=False
(Worker_TP0 pid=9) INFO [gpu_model_runner.py:2653] Model loading took 14.9889 GiB and 2.1 seconds
DEBUG [gpu_worker.py:284] Initial free memory: 78.69 GiB; Requested memory: 0.90 (util), 71.30 GiB
DEBUG [gpu_worker.py:296] Memory profiling takes 5.28 seconds. Total non KV cache memory: 16.25GiB; torch peak memory \
increase: 1.18GiB; non-torch forward increase memory: 0.08GiB; weights memory: 14.99GiB.
INFO [gpu_worker.py:298] Available KV cache memory: 55.05 GiB
INFO [kv_cache_utils.py:1087] GPU KV cache size: 450,912 tokens
INFO [kv_cache_utils.py:1091] Maximum concurrency for 40,960 tokens per request: 11.01x
INFO [gpu_model_runner.py:3480] Graph capturing finished in 21 secs, took 0.59 GiB
DEBUG [gpu_worker.py:400] Free memory on device (78.69/79.22 GiB) on startup. Desired GPU memory utilization is (0.9, \
71.30 GiB). Actual usage is 14.99 GiB for weight, 1.18 GiB for peak activation, 0.08 GiB for non-torch memory, and \
0.59 GiB for CUDAGraph memory.
""",
    "0.19.0": """\
(EngineCore pid=7) INFO [core.py:101] Initializing a V1 LLM engine (v0.19.0) with config: model='org/name', \
speculative_config=SpeculativeConfig(method='mtp', model=None, num_spec_tokens=2), max_seq_len=40960, \
tensor_parallel_size=2, kv_cache_dtype=fp8, enforce_eager=False
INFO [gpu_model_runner.py:4821] Model loading took 14.99 GiB memory and 2.100000 seconds
INFO [gpu_worker.py:437] Available KV cache memory: 55.05 GiB
INFO [kv_cache_utils.py:1319] GPU KV cache size: 450,912 tokens
INFO [kv_cache_utils.py:1324] Maximum concurrency for 40,960 tokens per request: 11.01x
INFO [gpu_model_runner.py:6047] Graph capturing finished in 21 secs, took 0.59 GiB
INFO [gpu_worker.py:598] CUDA graph pool memory: 0.59 GiB (actual), 0.5 GiB (estimated), difference: 0.09 GiB (15.3%).
""",
    "0.33.0": """\
INFO [core.py:120] Initializing a V1 LLM engine (v0.33.0) with config: model='org/name', speculative_config=None, \
max_seq_len=40960, tensor_parallel_size=2, kv_cache_dtype=auto, enforce_eager=False
INFO [gpu_model_runner.py:5089] Model loading took 14.99 GiB memory and 2.100000 seconds
INFO [gpu_model_runner.py:6410] Estimated CUDA graph memory: 0.50 GiB total
INFO [gpu_worker.py:773] Available KV cache memory: 55.05 GiB
INFO [kv_cache_utils.py:1148] GPU KV cache size: 450,912 tokens, Maximum concurrency for 40,960 tokens per request: \
11.01x
INFO [gpu_worker.py:1004] CUDA graph pool memory: 0.59 GiB (actual), 0.5 GiB (estimated), difference: 0.09 GiB (15.3%).
DEBUG [gpu_worker.py:1040] Free memory on device (78.69/79.22 GiB) on startup. Desired GPU memory utilization is \
(0.92, 72.88 GiB). Actual usage is 15.07 GiB for consumed memory (weights + non-torch), 1.18 GiB for peak activation, \
and 0.59 GiB for CUDAGraph memory.
""",
}


@pytest.mark.parametrize("version", WORDING)
def test_every_wording_gives_the_same_readings(version):
    found = parse_log(WORDING[version])
    assert (found.version, found.model) == (version, "org/name")
    assert gib(found.model_memory) == pytest.approx(14.99, abs=0.0012)
    assert found.model_memory.rounding == pytest.approx((5e-5 if version < "0.19" else 5e-3) * GIB)
    assert gib(found.available_kv) == 55.05
    assert (found.kv_tokens.value, found.max_concurrency.value) == (450_912, 11.01)
    assert gib(found.cudagraph_actual) == 0.59
    assert found.arguments["tensor_parallel_size"] == 2
    assert found.arguments["max_model_len"] == 40960
    if version != "0.19.0":
        assert gib(found.peak_activation) == 1.18
        assert "speculative" not in found.arguments
        assert "kv_cache_dtype" not in found.arguments  # auto says nothing
    else:
        assert found.peak_activation is None  # this log states no parts
        assert found.arguments["speculative"] == {"method": "mtp", "num_speculative_tokens": 2}
        assert found.arguments["kv_cache_dtype"] == "fp8"
    if version in ("0.11.0", "0.33.0"):
        assert (gib(found.free_memory), gib(found.total_memory)) == (78.69, 79.22)
    assert gib(found.cudagraph_estimate) == (0.5 if version == "0.33.0" else None)


def test_the_last_start_of_a_restarted_engine_counts_and_colour_does_not():
    text = "Model loading took 3.00 GiB memory\n\x1b[32mModel loading took 62.12\x1b[0m GiB memory and 3 seconds"
    assert gib(parse_log(text).model_memory) == 62.12


def test_attention_block_size_and_metrics():
    text = "Setting attention block size to 1600 tokens to ensure that attention page size is >= mamba page size."
    assert parse_log(text).block_size == 1600
    page = 'vllm:cache_config_info{block_size="1600",cache_dtype="auto",num_gpu_blocks="744"} 1.0'
    assert parse_metrics(page) == {"block_size": 1600, "num_blocks": 744}
    assert parse_metrics('vllm:cache_config_info{block_size="16",num_gpu_blocks="None"}') == {"block_size": 16}


@given(st.sampled_from(sorted(WORDING)), st.integers(0, 2000), st.text(max_size=9))
def test_a_cut_or_damaged_log_says_less_and_never_fails_otherwise(version, cut, noise):
    whole = parse_log(WORDING[version]).model_dump()
    try:
        found = parse_log(WORDING[version][:cut] + noise).model_dump()
    except BadInput:
        return
    for name in ("available_kv", "kv_tokens", "max_concurrency", "non_torch"):
        assert found[name] is None or whole[name] is not None


def test_text_that_is_no_log_is_refused():
    with pytest.raises(BadInput, match="expected a vLLM start-up log"):
        parse_log("hello\nworld")
