"""Weights per rank from real headers, held to what running engines reported, byte for byte where they can be."""

import gzip
import json
from functools import lru_cache

import pytest
from test_weights import DATA, MEASURED, needs_data, quantization_of

from formulas import shipped
from formulas.deployment import Deployment
from formulas.geometry import parse_geometry
from formulas.ngram import table_format
from formulas.tensors import fold
from formulas.units import GIB
from formulas.weights import weights, weights_of

# A header cut to fewer layers keeps the config of the whole model.
WHOLE = {
    "deepseek-ai__DeepSeek-V3-l6": "deepseek-ai__DeepSeek-V3",
    "nvidia__MiniMax-M2.5-NVFP4-l24": "nvidia__MiniMax-M2.5-NVFP4",
}
FLASH_NEXT = "RadixArk__Qwen3.8-Flash-Next-NVFP4"


@lru_cache(maxsize=32)
def groups_of(path):
    document = json.loads(gzip.decompress(path.read_bytes()))
    return fold(
        (name, tensor["dtype"], tuple(tensor["shape"]))
        for header in document["headers"].values()
        for name, tensor in header.items()
        if name != "__metadata__"
    )


def measured_rows():
    path = MEASURED / "h200.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def predicted(row, groups):
    folder = DATA / "configs" / WHOLE.get(row["header"], row["header"])
    config = json.loads((folder / "config.json").read_text())
    if row["layers_overridden"]:
        config["num_hidden_layers"] = row["num_hidden_layers"]
    deployment = Deployment(
        version=row["engine"].split()[-1], tp=row["tp"], capability="9.0", kv_cache_dtype=row["kv_cache_dtype"],
        language_model_only=row["language_model_only"], mtp=row["speculative_tokens"],
        max_num_batched_tokens=row["max_num_batched_tokens"], without=frozenset(row["without"]) | {"humming"},
    )  # fmt: skip
    return weights(parse_geometry(config), quantization_of(config), groups, deployment)


@needs_data
@pytest.mark.parametrize("route", ["header", "config"])
@pytest.mark.parametrize("row", measured_rows(), ids=lambda row: row["id"])
def test_model_loading_on_h200(row, route):
    groups = groups_of(MEASURED / "headers" / f"{row['header']}.json.gz") if route == "header" else None
    got = predicted(row, groups)
    assert got.unmodelled == ()
    assert got.evidence == route
    took = got.allocated + (got.mtp_allocated or 0)
    assert took == pytest.approx(row["model_memory"], rel=1e-4), f"off by {took - row['model_memory']} B"
    if row["drafter_own_bytes"]:  # parameters; the drafter's KV scales, 16 B a layer, are buffers
        assert 0 <= sum(got.mtp_by.values()) - row["drafter_own_bytes"] <= 16


@needs_data
def test_most_h200_runs_are_met_to_the_byte():
    rows = [row for row in measured_rows() if not row["speculative_tokens"]]
    exact = sum(predicted(row, None).allocated == row["model_memory"] for row in rows)
    assert exact >= 11


def flash_next(**options):
    folder = DATA / "configs_assembled" / FLASH_NEXT
    config = json.loads((folder / "config.json").read_text())
    groups = groups_of(DATA / "headers" / f"{FLASH_NEXT}.json.gz")
    deployment = Deployment(version="0.33.0", capability="12.0", max_num_batched_tokens=8192, **options)
    return weights(parse_geometry(config), quantization_of(config), groups, deployment)


FP8_TABLE = {"text_config": {"ple_embedding_dtype": "float8_e4m3fn"}}


@needs_data
@pytest.mark.parametrize(("mtp", "reported"), [(0, 62.12), (2, 64.36)])
def test_running_125b_on_two_cards(mtp, reported):
    """Both readings are met more closely than by total / 2, the best of the formulas in use before."""
    got = flash_next(tp=2, ple="gpu", mtp=mtp, hf_overrides=FP8_TABLE)
    ours = (got.allocated + got.mtp_allocated) / GIB
    assert abs(ours - reported) < abs(62.94 - reported)
    assert abs(ours - reported) < 0.6


@needs_data
def test_table_in_pinned_host_memory():
    got = flash_next(tp=1, ple="host", hf_overrides=FP8_TABLE)
    assert got.host_pinned / GIB == pytest.approx(47.684, abs=1e-3)
    assert got.allocated / GIB < 75  # not 78: the drafter is not loaded
    speculating = flash_next(tp=1, ple="host", mtp=1, hf_overrides=FP8_TABLE)
    assert speculating.mtp_allocated / GIB == pytest.approx(5.0, abs=0.1)


@needs_data
def test_an_undeclared_table_is_twice_the_size():
    declared = flash_next(tp=2, ple="gpu", hf_overrides=FP8_TABLE)
    silent = flash_next(tp=2, ple="gpu")
    assert silent.by["ple"] - declared.by["ple"] == pytest.approx(320_001_536 * 160 / 2, rel=1e-6)


@needs_data
def test_a_mixed_precision_table_of_layers_declares_the_table():
    config = json.loads((DATA / "configs" / "nvidia__Qwen3.8-Flash-Next-NVFP4" / "config.json").read_text())
    assert table_format(parse_geometry(config), quantization_of(config), Deployment()) == "fp8"


HEADERS = sorted((DATA / "headers").glob("*.json.gz")) if DATA.is_dir() else []


def config_beside(path):
    name = path.name.removesuffix(".json.gz")
    places = (DATA / place / name / "config.json" for place in ("configs", "configs_assembled"))
    return next((place for place in places if place.is_file()), None)


@needs_data
@pytest.mark.parametrize("path", [p for p in HEADERS if config_beside(p)], ids=lambda p: p.name.split(".json")[0])
def test_header_and_config_agree(path):
    """Every tensor of a real checkpoint has a rule, and its config alone implies the same bytes, part by part."""
    config = json.loads(config_beside(path).read_text())
    geometry, quantization, deployment = parse_geometry(config), quantization_of(config), Deployment(capability="9.0")
    header = weights(geometry, quantization, groups_of(path), deployment)
    alone = weights(geometry, quantization, None, deployment)
    assert header.unmodelled == alone.unmodelled == ()
    for part in header.by.keys() | alone.by.keys():
        assert header.by.get(part, 0) == pytest.approx(alone.by.get(part, 0), rel=1e-4), part


def test_gpt_oss_on_hopper_before_its_swizzle_stopped_padding():
    """A public table of vLLM 0.11 on an H100 gives 13.47 GiB; the H200 runs of 0.25.1 13.02."""
    facts = shipped.checkpoints()["openai/gpt-oss-20b#config"]
    old = weights_of(facts, Deployment(version="0.11.0", capability="9.0"))
    assert old.allocated / GIB == pytest.approx(13.47, abs=0.01)
