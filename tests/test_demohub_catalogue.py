"""The shipped catalogue, against published figures and, where the recorded data is beside the clone, real headers."""

import functools
import gzip
import json
from pathlib import Path

import orjson
import pytest
from huggingface_hub import HfApi
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load

from formulas.errors import BadInput
from formulas.tensors import DTYPE_BITS, expand, tensor_bytes
from formulas.units import gib
from screen.catalogue import Rule, demo_repos, descriptions, headers_dir, lay_out
from screen.demofiles import INDEX, Tensor, head_bytes, safetensors_file, tensor_names
from screen.demoserve import served

SHARED = Path(__file__).parents[1].parent / "shared" / "data"
FLASH = "Qwen3.8-Flash-Next-NVFP4"
RADIXARK = f"RadixArk/{FLASH}"
pytestmark = pytest.mark.xdist_group("catalogue")  # generated once
needs_data = pytest.mark.skipif(not (SHARED / "headers").is_dir(), reason="no ../shared/data/headers beside the clone")


@pytest.fixture(scope="module")
def repos():
    return {repo.name: repo for repo in demo_repos()}


def shards(repo):
    return {path: content for path, content in repo.main.files.items() if path.endswith(".safetensors")}


def recording(name):
    return SHARED / "headers" / f"{name.replace('/', '__')}.json.gz"


@functools.lru_cache(maxsize=1)
def recorded(name):
    return orjson.loads(gzip.decompress(recording(name).read_bytes()))


def header(content):
    return orjson.loads(content.head[8 : head_bytes(content)])


def config(repo):
    return json.loads(repo.main.files["config.json"].head)


def differing(one, other):
    """Paths of one repo's main whose bytes the other's do not have."""
    theirs = other.main.files
    return {path for path, content in one.main.files.items() if theirs[path].sha256 != content.sha256}


# Figures.


def test_radixark_is_its_published_self(repos):
    groups = descriptions()[RADIXARK].groups

    def total(*marks, besides=()):
        chosen = [g for g in groups if any(m in g.pattern for m in marks) and not any(b in g.pattern for b in besides)]
        return sum(group.bytes_total for group in chosen)

    everything = total("")
    mtp = sum(group.bytes_total for group in groups if group.pattern.startswith("mtp."))
    ple = total(".ple.")
    experts = total(".mlp.experts.", ".mlp.shared_expert.", besides=("mtp.",))
    assert [gib(n) for n in (everything, mtp, ple, experts, everything - mtp - ple - experts)] == [
        "125.87", "4.86", "47.75", "63.72", "9.55"]  # fmt: skip
    assert sum(group.copies for group in groups) == 296_475
    files = shards(repos[RADIXARK])
    assert len(files) == 206
    assert sum(content.size - head_bytes(content) for content in files.values()) == everything
    assert "ple_embedding_dtype" not in config(repos[RADIXARK])["text_config"]


@pytest.mark.parametrize(("name", "data_bytes"), [
    ("openai/gpt-oss-20b", 13_761_264_768), ("Qwen/Qwen3-8B", 16_381_470_720), ("Qwen/Qwen3-0.6B", 1_503_264_768),
    ("meta-llama/Llama-3.1-8B", 16_060_522_496), ("bryce-hoehn/Qwen3.5-25B-REAP-A3B-Coding", 50_182_743_296),
    ("nvidia/Qwen3.8-Flash-Next-NVFP4", 132_639_846_394), ("deepseek-ai/DeepSeek-R1", 688_574_839_360),
])  # fmt: skip
def test_totals(name, data_bytes):
    assert sum(group.bytes_total for group in descriptions()[name].groups) == data_bytes


def test_file_sizes_of_qwen36_35b(repos):
    files = repos["Qwen/Qwen3.6-35B-A3B-FP8"].main.files
    assert files["outside.safetensors"].size == 2_927_422_112
    assert files["layers-0.safetensors"].size == 843_713_608
    assert files["mtp.safetensors"].size == 853_860_608
    assert files[INDEX].size == 6_329_223


# The story the catalogue tells.


def test_twins_share_every_weight_and_config(repos):
    one, twin, declared = repos[RADIXARK], repos[f"quant-mirrors/{FLASH}"], repos[f"ple-fixed/{FLASH}"]
    assert len(one.main.files) == 210
    assert differing(one, twin) == {"README.md"}
    assert differing(one, declared) == {"README.md", "config.json"}
    assert config(declared)["text_config"].pop("ple_embedding_dtype") == "float8_e4m3fn"
    assert one.main.oid != twin.main.oid


def test_pruned_experts():
    pruned = descriptions()["reap-lab/Qwen3.8-Flash-Next-REAP-448-NVFP4"]
    assert {len(g.numbers(1)) for g in pruned.groups if ".mlp.experts.{" in g.pattern} == {448}
    assert pruned.config["text_config"]["num_experts"] == 512


def test_mtp_declared_but_absent(repos):
    name = "bryce-hoehn/Qwen3.5-25B-REAP-A3B-Coding"
    assert config(repos[name])["mtp_num_hidden_layers"] == 1
    assert not any("mtp" in group.pattern for group in descriptions()[name].groups)


def test_mtp_beside_the_index(repos):
    files = repos["requant/Qwen3.6-35B-A3B-FP8-mtp"].main.files
    named = set(orjson.loads(files[INDEX].head)["weight_map"].values())
    assert set(shards(repos["requant/Qwen3.6-35B-A3B-FP8-mtp"])) - named == {"mtp.safetensors"}


def test_truncated_upload(repos):
    whole, broken = repos["Qwen/Qwen3-8B"].main.files, repos["unlucky/Qwen3-8B"].main.files
    short = {path: whole[path].size - broken[path].size for path in shards(repos["Qwen/Qwen3-8B"])}
    assert {n for n in short.values() if n} == {4_194_304}


def test_indexes_agree_with_headers(repos):
    for name in ("Qwen/Qwen3-8B", "openai/gpt-oss-20b", "tiny/qwen3-moe", "Qwen/Qwen3-8B-AWQ"):
        files = repos[name].main.files
        index = orjson.loads(files[INDEX].head)
        assert index["weight_map"] == {t: path for path, c in shards(repos[name]).items() for t in tensor_names(c)}
        assert index["metadata"]["total_size"] == sum(g.bytes_total for g in descriptions()[name].groups)


@pytest.mark.parametrize("name", ["tiny/qwen3-dense", "tiny/qwen3-moe"])
def test_small_repos_hold_real_weights(repos, name):
    groups = descriptions()[name].groups
    found = {}
    for content in shards(repos[name]).values():
        assert len(content.head) == content.size
        for tensor, about in header(content).items():
            if tensor != "__metadata__":
                found[tensor] = (about["dtype"], tuple(about["shape"]))
    assert found == {n: (g.dtype, g.shape) for g in groups for n in g.names()}
    assert len({content.sha256 for content in shards(repos[name]).values()}) == len(shards(repos[name]))


def test_listing_generates_no_headers(hub):
    fresh = demo_repos()
    running = hub(*fresh)
    api = HfApi(endpoint=running.endpoint, token=False)
    quants = {model.id for model in api.list_models(filter="base_model:quantized:Qwen/Qwen3.8-Flash-Next")}
    owners = ("RadixArk", "quant-mirrors", "ple-fixed", "nvidia", "gone")
    assert quants == {f"{owner}/{FLASH}" for owner in owners} | {"reap-lab/Qwen3.8-Flash-Next-REAP-448-NVFP4"}
    assert not any("history" in vars(repo) for repo in fresh)


def test_served_by_a_process_of_its_own():
    with served("--ranges-only", "--mirrors", "1") as address:
        api = HfApi(endpoint=address.endpoint, token=False)
        found = api.get_safetensors_metadata("openai/gpt-oss-20b")
        assert len(found.weight_map) == 459
        assert sum(found.parameter_count.values()) == sum(
            g.copies * tensor_bytes("U8", g.shape) for g in descriptions()["openai/gpt-oss-20b"].groups)  # fmt: skip
        assert api.model_info("openai/gpt-oss-20b").safetensors.parameters == found.parameter_count
        assert address.counts()["cdn"].requests >= 3
        assert len(address.mirrors) == 1


# Real headers.


@needs_data
@pytest.mark.parametrize("name", [name for name, d in descriptions().items() if d.groups and recording(name).exists()])
def test_described_tensors_are_the_real_ones(name):
    described = {(n, dtype, *shape) for n, dtype, shape in expand(descriptions()[name].groups)}
    real = recorded(name)["headers"].values()
    assert described == {(n, t["dtype"], *t["shape"]) for h in real for n, t in h.items() if n != "__metadata__"}


@needs_data
@pytest.mark.parametrize(("name", "claimed"), [
    (RADIXARK, "model-nvfp4-*"), (RADIXARK, "model-plefp8-*"), ("Qwen/Qwen3.6-35B-A3B-FP8", "*"),
    ("Qwen/Qwen3.8-27B-FP8", "*"), ("Qwen/Qwen3-0.6B", "*"),
])  # fmt: skip
def test_generated_files_are_the_real_ones(repos, name, claimed):
    real = recorded(name)
    files = {path: content for path, content in shards(repos[name]).items() if Path(path).match(claimed)}
    assert files.keys() == {path for path in real["headers"] if Path(path).match(claimed)}
    assert {path: content.size for path, content in files.items()} == {p: real["file_sizes"][p] for p in files}
    assert all(header(content) == real["headers"][path] for path, content in files.items())


@needs_data
def test_recorded_headers_are_served_as_they_are(hub):
    repos = {repo.name: repo for repo in headers_dir(SHARED / "headers", SHARED / "configs")}
    assert len(repos) == len(list((SHARED / "headers").glob("*.json.gz")))
    assert not any("history" in vars(repo) for repo in repos.values())
    running = hub(*repos.values())
    for name in ("Qwen/Qwen3-8B", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-FP8", "lizpreciatior/lzlv_70b_fp16_hf"):
        real = recorded(name)
        assert {path: content.size for path, content in shards(repos[name]).items()} == real["file_sizes"]
        found = HfApi(endpoint=running.endpoint, token=False).get_sharded_safetensors_metadata(name)
        assert len(found.weight_map) == real["n_tensors"]
    assert "config.json" in repos["Qwen/Qwen3-8B"].main.files
    assert "config.json" not in repos["nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-FP8"].main.files


def test_a_folder_without_headers_is_refused(tmp_path):
    with pytest.raises(BadInput, match="expected recorded headers"):
        headers_dir(tmp_path)


# The writers.

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12)
TENSORS = st.lists(
    st.builds(Tensor, NAMES.filter(lambda n: n != "__metadata__"), st.sampled_from(["BF16", "F32", "F16", "U8", "I64"]),
              st.lists(st.integers(0, 5), max_size=3).map(tuple)), max_size=8, unique_by=lambda t: t.name)  # fmt: skip


@given(TENSORS, st.integers(0, 9))
def test_safetensors_reads_what_is_written(members, seed):
    content = safetensors_file(members, metadata={"format": "pt"}, seed=seed)
    assert content.size == len(content.head)
    numeric = [t for t in members if t.dtype != "BF16"]
    loaded = load(safetensors_file(numeric, seed=seed).head)
    assert {name: array.shape for name, array in loaded.items()} == {t.name: t.shape for t in numeric}
    assert header(content).keys() - {"__metadata__"} == {t.name for t in members}


@given(st.integers(1, 400), st.lists(st.integers(1, 100), min_size=1, max_size=40))
def test_sized_files_are_filled_in_order(max_bytes, sizes):
    members = [Tensor(f"layers.{i}.w", "U8", (size,)) for i, size in enumerate(sizes)]
    parts = list(lay_out(members, [Rule(file="{i:02}-of-{n:02}", max_bytes=max_bytes)]))
    assert [t for part in parts for t in part.tensors] == members
    assert all(len(part.tensors) == 1 or sum(t.shape[0] for t in part.tensors) <= max_bytes for part in parts)
    assert [part.file for part in parts] == [f"{i:02}-of-{len(parts):02}" for i in range(1, len(parts) + 1)]


def test_a_tensor_without_a_rule_is_refused():
    with pytest.raises(BadInput, match="layout rule"):
        list(lay_out([Tensor("a", "U8", (1,))], [Rule(match="b", file="b")]))


def test_every_dtype_has_a_place_in_the_order():
    members = [Tensor(dtype, dtype, (8,)) for dtype in DTYPE_BITS]
    found = [about["dtype"] for about in header(safetensors_file(members)).values()]
    assert found == list(reversed(DTYPE_BITS))
