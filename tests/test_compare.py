"""Comparison: equal bytes by digests alone, structure by headers, configs and ignore lists as sets; on Hub and disk."""

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from formulas.console import run
from formulas.facts import Facts, Quantization
from formulas.tensors import expand, fold
from screen import catalogue
from screen.catalogue import descriptions
from screen.cli import app
from screen.compare import config_difference, ignore_difference, structure
from screen.demofiles import Tensor, safetensors_file
from screen.demorepo import DemoRepo
from screen.pairs import Kind, kind, pair, same_bytes, same_weights
from screen.quantization import ignore_list
from screen.repo import Blob, Entry, Tree

RADIXARK, NVIDIA = "RadixArk/Qwen3.8-Flash-Next-NVFP4", "nvidia/Qwen3.8-Flash-Next-NVFP4"
CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8}


def tensors(layer, dtype="BF16", width=8):
    return [Tensor(f"model.layers.{layer}.mlp.{part}_proj.weight", dtype, (width, width)) for part in ("up", "down")]


def files(seed=0, config=CONFIG, **more):
    shards = {f"model-{n + 1:05}-of-00002.safetensors": safetensors_file(tensors(n), seed=seed + n) for n in range(2)}
    return {**shards, "config.json": config, **{name.replace("__", "."): value for name, value in more.items()}}


@pytest.fixture
def compare(tmp_path, capsys):
    """Runs `screen compare --json`; returns (exit code, document)."""

    def ran(hub, a, b, *options):
        where = ["--endpoint", hub.endpoint, "--token", ""] if hub else []
        capsys.readouterr()
        code = run(app, ["compare", str(a), str(b), "--json", "--cache-dir", str(tmp_path / "cache"), *where, *options])
        out, err = capsys.readouterr()
        return code, json.loads(out) if out else json.loads(err)

    return ran


# Files


def tree(**blobs):
    return Tree(tuple(Entry(path.replace("__", "."), Blob(oid, size)) for path, (oid, size) in sorted(blobs.items())))


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("model-00001-of-00002.safetensors", Kind.WEIGHTS),
        ("model.safetensors.index.json", Kind.INDEX),
        ("hf_quant_config.json", Kind.CONFIG),
        ("tokenizer_config.json", Kind.TOKENIZER),
        ("merges.txt", Kind.TOKENIZER),
        ("tokenizer.model", Kind.TOKENIZER),
        ("chat_template.jinja", Kind.TEMPLATE),
        ("modeling_x.py", Kind.CODE),
        ("README.md", Kind.DOCUMENT),
        (".gitattributes", Kind.DOCUMENT),
        ("LICENSE", Kind.DOCUMENT),
        ("assets/plot.png", Kind.DOCUMENT),
        ("data.bin.zst", Kind.OTHER),
    ],
)
def test_what_a_file_is_for(path, expected):
    assert kind(path) is expected


OIDS = st.sampled_from([f"sha256:{n}" for n in range(4)] + ["unknown", "git-sha1:1"])
TREES = st.dictionaries(st.sampled_from([f"m{n}.safetensors" for n in range(6)]), st.tuples(OIDS, st.integers(0, 1)))


@given(TREES, TREES)
def test_every_file_is_paired_once_and_a_tree_with_itself_wholly(a, b):
    a, b = (Tree(tuple(Entry(path, Blob(*blob)) for path, blob in sorted(each.items()))) for each in (a, b))
    pairs = pair(a, b)
    assert sum(p.a_bytes is not None for p in pairs) == len(a.entries)
    assert sum(p.b_bytes is not None for p in pairs) == len(b.entries)
    assert {p.same for p in pair(b, a)} == {p.same for p in pairs}
    assert all(p.same is not False for p in pair(a, a))


def test_shards_under_other_names_are_the_same_bytes():
    one = tree(a__safetensors=("sha256:1", 1), b__safetensors=("sha256:2", 1), README__md=("git-sha1:1", 5))
    two = tree(x__safetensors=("sha256:2", 1), y__safetensors=("sha256:1", 1), README__md=("git-sha1:2", 6))
    assert same_weights(pair(one, two))
    assert same_bytes(pair(one, two))  # the card may differ
    assert not same_bytes(pair(one, tree(a__safetensors=("sha256:1", 1))))
    assert not same_weights(pair(tree(README__md=("git-sha1:1", 5)), tree(README__md=("git-sha1:1", 5))))


# Tensors


NAMES = st.builds("model.layers.{}.{}.weight".format, st.integers(0, 5), st.sampled_from(["up", "down"]))
FORMS = st.tuples(st.sampled_from(["BF16", "U8"]), st.sampled_from([(2,), (2, 3)]))


@given(st.dictionaries(NAMES, FORMS), st.dictionaries(NAMES, FORMS))
def test_structure_names_every_difference(a, b):
    found = structure(*(fold((name, *form) for name, form in each.items()) for each in (a, b)))
    named = {side: {name for p in found.patterns if p.side == side
                    for name, _, _ in expand(fold([(p.example, "", ())]))} for side in ("a", "b", "both")}  # fmt: skip
    changed = {name for name in a.keys() & b.keys() if a[name] != b[name]}
    assert found.same == (a == b)
    count = {side: sum(p.count for p in found.patterns if p.side == side) for side in ("a", "b", "both")}
    assert count == {"a": len(a.keys() - b.keys()), "b": len(b.keys() - a.keys()), "both": len(changed)}
    assert named["a"] <= a.keys() - b.keys()
    assert named["both"] <= changed


def test_config_keys_are_dotted_and_lists_of_layers_are_left_out():
    quantized = {"quant_method": "modelopt", "ignore": ["lm_head"], "group_size": 16}
    ours = {"config.json": {"a": {"b": 1, "c": 2}, "quantization_config": quantized}}
    theirs = {"config.json": {"a": {"b": 3}, "d": None, "quantization_config": {**quantized, "ignore": []}},
              "generation_config.json": {"top_k": 20}}  # fmt: skip
    found = config_difference(ours, theirs)
    assert found.changed == {"a.b": {"a": 1, "b": 3}}
    assert found.only_a == {"a.c": 2}
    assert found.only_b == {"d": None, "generation_config.json:top_k": 20}


def layered(ignore, prefix="model."):
    parts = ("self_attn.q", "self_attn.k", "mlp.up")
    names = [f"{prefix}layers.{n}.{part}_proj.weight" for n in range(4) for part in parts]
    return Facts(tensor_groups=fold((name, "BF16", (8, 8)) for name in names),
                 quantization=Quantization(method="modelopt", ignore=ignore))  # fmt: skip


def test_a_wildcard_and_a_list_of_names_are_one_set():
    written = tuple(f"model.language_model.layers.{n}.self_attn.{part}_proj" for n in range(4) for part in "qk")
    found = ignore_difference(layered(("*.self_attn.*",)), layered(written, "model.language_model."))
    assert (found.of, found.common, found.only_a, found.only_b) == ("modules", 8, (), ())
    found = ignore_difference(layered(("*.self_attn.*", "*.mlp.*")), layered(written[:-1]))
    assert (found.common, found.only_a_count, found.only_b_count) == (7, 5, 0)
    assert found.only_a == ("layers.{0-3}.mlp.up_proj", "layers.{3}.self_attn.k_proj")


def test_without_headers_ignore_lists_are_compared_as_written():
    a, b = (Facts(quantization=Quantization(ignore=ignore)) for ignore in (("x", "y"), ("y",)))
    found = ignore_difference(a, b)
    assert (found.of, found.only_a, found.common) == ("entries", ("x",), 1)
    assert ignore_difference(Facts(), None) is None


def test_nvidia_against_radixark():
    """The same experts; MTP experts packed in BF16 on one side and one by one in FP8 on the other."""
    ours, theirs = (descriptions()[name].groups for name in (RADIXARK, NVIDIA))
    found = structure(ours, theirs)
    assert found.only_a == ("mtp.layers.{0}.mlp.experts.down_proj", "mtp.layers.{0}.mlp.experts.gate_up_proj")
    assert len(found.only_b) == 6
    assert not found.changed
    assert {(p.stack, p.role) for p in found.patterns} == {("mtp", "expert")}
    assert sum(p.count for p in found.patterns if p.side == "b") == 6 * 512
    configs = [catalogue._config(descriptions()[name]) for name in (RADIXARK, NVIDIA)]
    lists = [ignore_list(config["quantization_config"], None) for config in configs]
    ignore = ignore_difference(*(Facts(tensor_groups=groups, quantization=Quantization(ignore=entries))
                                 for groups, entries in zip((ours, theirs), lists, strict=True)))  # fmt: skip
    assert (ignore.entries_a, ignore.entries_b) == (11, 292)
    assert (ignore.of, ignore.common, ignore.only_a_count, ignore.only_b_count) == ("modules", 300, 11, 0)
    assert all(pattern.startswith("mtp.") for pattern in ignore.only_a)
    changed = config_difference(*({"config.json": config} for config in configs)).changed
    assert changed["quantization_config.quant_algo"] == {"a": "NVFP4", "b": "MIXED_PRECISION"}


# The command


def test_identical_repos_cost_no_header_and_no_config(hub, compare):
    server = hub(DemoRepo("a/model", files()), DemoRepo("b/model", files(README__md="# a copy\n")))
    code, found = compare(server, "a/model", "b/model")
    assert code == 0
    assert (found["verdict"], found["same_bytes"], found["structure"]) == ("same bytes", True, {
        "same": True, "only_a": [], "only_b": [], "changed": [], "patterns": []})  # fmt: skip
    assert (found["files"], found["identical_files"]) == (4, 3)
    assert found["identical_bytes"] == sum(e.size for e in DemoRepo("a/model", files()).main.files.values())
    assert found["cost"]["requests"] == 4
    assert not [line for line in server.log if line.route in ("resolve", "headers")]


def test_other_config_over_the_same_weights_reads_no_header(hub, compare):
    other = {**CONFIG, "rope_theta": 10000}
    server = hub(DemoRepo("a/model", files()), DemoRepo("b/model", files(config=other)))
    code, found = compare(server, "a/model", "b/model")
    assert (code, found["verdict"]) == (3, "same weights, other files")
    assert found["config"]["only_b"] == {"rope_theta": 10000}
    assert found["structure"]["same"]
    assert not [line for line in server.log if ".safetensors" in line.target]


def test_the_same_structure_with_other_weights(hub, compare):
    ours, theirs = ({"tokenizer_config.json": {"chat_template": text}} for text in ("{{ x }}", "{{ y }}"))
    server = hub(DemoRepo("a/model", files() | ours), DemoRepo("b/model", files(seed=7) | theirs))
    code, found = compare(server, "a/model", "b/model")
    assert (code, found["verdict"]) == (3, "same structure, other weights")
    assert found["config"]["changed"]["tokenizer_config.json:chat_template"] == {"a": "{{ x }}", "b": "{{ y }}"}
    assert all(part["same"] for part in found["parts"])
    assert {file["kind"] for file in found["differing_files"]} == {"weights", "tokenizer"}


def test_another_dtype_is_another_structure(hub, compare):
    half = files() | {"model-00002-of-00002.safetensors": safetensors_file(tensors(1, "F16"), seed=1)}
    code, found = compare(hub(DemoRepo("a/model", files()), DemoRepo("b/model", half)), "a/model", "b/model")
    assert (code, found["verdict"]) == (3, "different structure")
    assert found["structure"]["changed"] == [
        {"tensor": f"model.layers.{{1}}.mlp.{part}_proj.weight", "a": ["BF16", [8, 8]], "b": ["F16", [8, 8]]}
        for part in ("down", "up")]  # fmt: skip
    assert [part["same"] for part in found["parts"]] == [False]
    assert list(found) == ["a", "b", "verdict", "same_bytes", "files", "identical_files", "identical_bytes",
                           "differing_files", "structure", "parts", "census", "formats", "config", "ignore",
                           "cost"]  # fmt: skip


def test_a_config_that_is_no_json_hides_no_key_of_the_other(hub, compare):
    server = hub(DemoRepo("a/model", files()), DemoRepo("b/model", files() | {"config.json": "{"}))
    code, found = compare(server, "a/model", "b/model")
    assert (code, found["verdict"]) == (3, "same weights, other files")
    assert found["config"] == {"only_a": {}, "only_b": {}, "changed": {}}
    assert [file["path"] for file in found["differing_files"]] == ["config.json"]


def test_numbers_beyond_json_are_words(hub, compare):
    infinite = '{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8, "cap": Infinity}'
    server = hub(DemoRepo("a/model", files()), DemoRepo("b/model", files() | {"config.json": infinite}))
    assert compare(server, "a/model", "b/model")[1]["config"]["only_b"] == {"cap": "inf"}


def test_a_missing_shard_leaves_the_structure_unknown(hub, compare):
    index = {"metadata": {}, "weight_map": {"model.layers.0.mlp.up_proj.weight": "model-00003-of-00003.safetensors"}}
    server = hub(DemoRepo("a/model", files()), DemoRepo("b/model", files(seed=5) | {
        "model.safetensors.index.json": index}))  # fmt: skip
    code, found = compare(server, "a/model", "b/model")
    assert (code, found["verdict"], found["structure"]) == (3, "other weights, structure not known", None)


def test_numbered_mtp_layers_are_of_the_mtp_stack():
    ours = fold((f"model.layers.{n}.mlp.up_proj.weight", "BF16", (2,)) for n in range(3))
    found = structure(ours, ours[:0], 2)
    assert {(p.stack, p.count) for p in found.patterns} == {("main", 3)}
    assert structure(fold([("model.layers.2.mlp.up_proj.weight", "BF16", (2,))]), [], 2).patterns[0].stack == "mtp"


@pytest.mark.parametrize("option", ["--markdown", None])
def test_the_text_says_the_verdict_first(hub, capsys, tmp_path, option):
    half = files(config={**CONFIG, "rope_theta": 1}) | {
        "model-00002-of-00002.safetensors": safetensors_file(tensors(1, "F16"), seed=1)}  # fmt: skip
    server = hub(DemoRepo("a/model", files()), DemoRepo("b/model", half))
    argv = ["compare", "a/model", "b/model", "--endpoint", server.endpoint, "--token", "", "--cache-dir", str(tmp_path)]
    assert run(app, [*argv, *([option] if option else [])]) == 3
    out = capsys.readouterr().out
    assert out.index("different structure") < out.index("1 of 3 files identical") < out.index("rope_theta")
    assert "model.layers.{1}.mlp.up_proj.weight: BF16 [8, 8] -> F16 [8, 8]" in out
    assert ("| changed |" in out) == (option is not None)


def written(folder, repo):
    for path, content in repo.main.files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(b"".join(content.pieces(0, content.size)))
    return folder


def test_a_folder_is_held_against_a_repo_by_its_bytes(hub, compare, tmp_path):
    repo = DemoRepo("a/model", files())
    folder = written(tmp_path / "model", repo)
    server = hub(repo)
    assert compare(server, "a/model", folder)[0] == 0
    assert compare(server, folder, "a/model")[0] == 0
    shard = folder / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\xff")  # one bit pattern at the very end
    code, found = compare(server, "a/model", folder)
    assert (code, found["verdict"], found["identical_files"]) == (3, "same structure, other weights", 2)
    assert [file["path"] for file in found["differing_files"]] == [shard.name]


def test_two_folders_and_renamed_shards(compare, tmp_path):
    one = written(tmp_path / "one", DemoRepo("a/model", files()))
    two = Path(shutil.copytree(one, tmp_path / "two"))
    assert compare(None, one, two)[0] == 0
    (two / "model-00001-of-00002.safetensors").rename(two / "first.safetensors")
    code, found = compare(None, one, two)
    assert (code, found["identical_files"], found["files"]) == (0, 3, 3)


def test_what_cannot_be_read_is_an_error_and_not_a_difference(hub, compare):
    server = hub(DemoRepo("a/model", files()), DemoRepo("b/gated", files(), gated="manual"))
    code, found = compare(server, "a/model", "c/none")
    assert (code, found["error"]["code"]) == (4, "repo_not_found")
    assert compare(server, "a/model", "b/gated")[0] == 0  # equal digests need no access
    assert compare(server, "no name", "a/model")[0] == 2
