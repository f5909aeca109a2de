"""The kernel chosen for a scheme, held to every cell of the engine's own table, and what each kernel keeps."""

import json
from functools import lru_cache
from pathlib import Path

import pytest
from test_weights import quantization_of

from formulas.architectures import expected_weights
from formulas.choices import Runtime, backend_of, expert_backend, linear_backend
from formulas.deployment import Deployment
from formulas.engines import picked_kernel
from formulas.formats import assign
from formulas.geometry import parse_geometry
from formulas.probe.formats import FORMATS, TINY_GPT_OSS, TINY_MOE
from formulas.schemes import Kind, Scheme
from formulas.tables import engine_table, table_for
from formulas.weights import weights

TABLE = engine_table("0.33.0")


@lru_cache(maxsize=64)
def schemes(name):
    """(of linear layers, of experts, whether these have biases) as a config.json of this format states them."""
    config, options = FORMATS[name]
    model = {**(TINY_GPT_OSS if name == "mxfp4_gpt_oss" else TINY_MOE), "quantization_config": config}
    quantization = quantization_of(model)
    known, _ = expected_weights(parse_geometry(model))
    if "quantization" in options:
        known, reasons = assign(known, options["quantization"], {}, ())
    elif quantization:
        known, reasons = assign(known, quantization.method, quantization.config, quantization.ignore)
    else:
        reasons = ()
    if reasons:
        return None
    linear = next(weight for weight in known if weight.name.endswith("o_proj"))
    experts = next(weight for weight in known if weight.experts)
    return linear.scheme, experts.scheme, name == "mxfp4_gpt_oss"


# What a scheme does not tell: that activations stay 16 bit, or go to FP8 beside 4-bit weights.
UNTOLD = {"ct_fp8_w8a16", "ct_w4a8_fp8"}
UNREAD = {
    "fbgemm_fp8", "torchao_int4", "experts_int8", "bitsandbytes_nf4", "gguf", "exl3", "aqlm", "hqq", "online_fp8_block",
    "online_nvfp4", "online_mxfp8", "online_int8",
}  # fmt: skip
CELLS = [
    (name, capability, mode)
    for capability, known in TABLE["capabilities"].items()
    for mode, asked in known["formats"].items()
    for name in asked
    if name not in UNTOLD | UNREAD
]


def test_formats_without_a_reader_are_known():
    assert {name for name in FORMATS if schemes(name) is None} == UNREAD


@pytest.mark.parametrize(("name", "capability", "mode"), CELLS)
def test_every_cell_of_the_table(name, capability, mode):
    """What the engine picked for a format on a card is what is chosen for the scheme its config states."""
    linear, experts, biased = schemes(name)
    runtime = Runtime(
        sm=int(capability.replace(".", "")), expert_parallel=mode == "ep", table=TABLE,
        without=frozenset(mode.split()[1:]) if mode.startswith("without") else frozenset(),
    )  # fmt: skip
    if (kernel := picked_kernel(TABLE, capability, name, "moe", mode)) is not None:
        assert expert_backend(experts, runtime, biased=biased) == backend_of(kernel)
    kernel = picked_kernel(TABLE, capability, name, "linear", mode)
    if kernel not in (None, "INCLinearMethod"):  # AutoRound's own method hands over to a kernel it does not name
        assert linear_backend(linear, runtime) == backend_of(kernel)


def test_every_kernel_picked_is_of_a_known_family():
    picked = {
        picked_kernel(TABLE, capability, name, part, mode)
        for name, capability, mode in CELLS
        for part in ("linear", "moe")
    }
    unknown = {kernel for kernel in picked if kernel and not backend_of(kernel)}
    assert unknown == {"INCLinearMethod"}


def test_a_release_is_read_by_the_newest_table_not_after_it():
    assert table_for((0, 32, 9)) is None
    assert table_for((0, 33, 0)) is table_for((0, 40, 0)) is TABLE


BUILDS = [json.loads(line) for line in Path(__file__).with_name("format_builds.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("build", BUILDS, ids=lambda build: f"{build['format']}-{build['capability']}")
def test_bytes_of_every_format_as_the_engine_built_it(build):
    """Two layers of 16 experts, with sizes that some kernels pad, built and prepared by vLLM 0.33.0's own modules for
    each format and card (formulas/probe, without a card): what is created and what stays, to a few scalars."""
    sizes = {"hidden_size": 2688, "moe_intermediate_size": 896, "num_hidden_layers": 2}
    config, options = FORMATS[build["format"]]
    model = {**TINY_MOE, **sizes} | ({"quantization_config": config} if config else {})
    deployment = Deployment(version="0.33.0", capability=build["capability"], max_num_batched_tokens=2048, **options)
    got = weights(parse_geometry(model), quantization_of(model), None, deployment)
    assert got.unmodelled == ()
    for part in ("expert", "attention"):
        assert got.created_by[part] == pytest.approx(build["created"][part], abs=64), part
        assert got.by[part] == pytest.approx(build["loaded"][part], abs=64), part


@pytest.mark.parametrize(
    ("release", "backend"), [((0, 25, 1), "marlin"), ((0, 31, 0), "marlin"), ((0, 32, 0), "humming")]
)
def test_hopper_runs_nvfp4_on_humming_where_the_engine_prefers_it(release, backend):
    runtime = Runtime(sm=90, release=release, table=table_for(release))
    scheme = Scheme(Kind.NVFP4, inputs=True, method="modelopt")
    assert linear_backend(scheme, runtime) == expert_backend(scheme, runtime) == backend
    bare = runtime._replace(without=frozenset({"humming"}))
    assert linear_backend(scheme, bare) == expert_backend(scheme, bare) == "marlin"


def test_two_libraries_can_be_missing_at_once():
    absent = frozenset({"humming", "flashinfer", "deep_gemm"})
    runtime = Runtime(sm=90, table=TABLE, without=absent, expert_parallel=True)
    assert expert_backend(Scheme(Kind.NVFP4, inputs=True), runtime) == "marlin"
    assert expert_backend(Scheme(Kind.FP8_BLOCK), runtime) == "triton"
    assert linear_backend(Scheme(Kind.FP8_BLOCK), runtime) == "cutlass"
