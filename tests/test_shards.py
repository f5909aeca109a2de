"""Which files are the weights, and whether index and headers agree."""

import json
from pathlib import Path

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from formulas.errors import HubMisbehaved
from screen.header import parse_header
from screen.repo import Blob, Entry, Tree
from screen.shards import INDEX, Index, parse_index, reconcile, shard_set

SHARED = Path(__file__).parents[1].parent / "shared" / "data"
NUMBERED = [f"model-{n:05}-of-00003.safetensors" for n in (1, 2, 3)]


def tree(*paths):
    return Tree(tuple(Entry(path, Blob("unknown", 1)) for path in sorted(paths)))


def index(*shards, total=None):
    return Index({f"t{i}": shard for i, shard in enumerate(shards)}, total)


def header(*names):
    document = {name: {"dtype": "U8", "shape": [4], "data_offsets": [4 * i, 4 * i + 4]} for i, name in enumerate(names)}
    raw = orjson.dumps(document)
    return parse_header(len(raw).to_bytes(8, "little") + raw, file_size=8 + len(raw) + 4 * len(names), name="a")


def paths(entries):
    return [entry.path for entry in entries]


def kinds(problems):
    return {problem.kind: problem.number for problem in problems}


# Which files --------------------------------------------------------------------------------------------------------


def test_the_indexs_shards_and_strays_beside_them():
    found = shard_set(tree(*NUMBERED, "mtp.safetensors", "config.json", INDEX), index(*NUMBERED))
    assert paths(found.shards) == [*NUMBERED, "mtp.safetensors"]
    assert paths(found.strays) == ["mtp.safetensors"]
    assert (found.missing, found.copies, found.adapters, found.components) == ((), (), (), {})


def test_missing_shards_are_found_by_index_and_by_number():
    assert shard_set(tree(*NUMBERED[:2]), index(*NUMBERED)).missing == (NUMBERED[2],)
    assert shard_set(tree(*NUMBERED[1:]), None).missing == (NUMBERED[0],)
    assert shard_set(tree("m-00000-of-00002.safetensors"), None).missing == ("m-00001-of-00002.safetensors",)
    assert shard_set(tree("model-00001-of-000001.safetensors"), None).missing == ()


def test_consolidated_files_are_copies_beside_the_shards_and_the_weights_alone():
    beside = shard_set(tree(*NUMBERED, "consolidated.safetensors"), index(*NUMBERED))
    assert (paths(beside.copies), paths(beside.shards)) == (["consolidated.safetensors"], NUMBERED)
    alone = shard_set(tree("consolidated.safetensors", "params.json"), None)
    assert (paths(alone.shards), alone.copies) == (["consolidated.safetensors"], ())


def test_one_file_of_the_sharded_name_is_a_copy():
    found = shard_set(tree(*NUMBERED, "model.safetensors", "model.fp16.safetensors"), index(*NUMBERED))
    assert paths(found.copies) == ["model.fp16.safetensors", "model.safetensors"]
    assert paths(found.shards) == NUMBERED


def test_adapters_and_components_are_no_shards():
    found = shard_set(tree("adapter_model.safetensors", "unet/a.safetensors", "vae/b.safetensors"), None)
    assert (found.shards, paths(found.adapters)) == ((), ["adapter_model.safetensors"])
    assert {folder: paths(files) for folder, files in found.components.items()} == {
        "unet": ["unet/a.safetensors"],
        "vae": ["vae/b.safetensors"],
    }


def test_an_index_may_name_files_in_folders():
    found = shard_set(tree("layers/0.safetensors", "other/0.safetensors"), index("layers/0.safetensors"))
    assert (paths(found.shards), list(found.components)) == (["layers/0.safetensors"], ["other"])


file_name = st.sampled_from(
    [*NUMBERED, "model.safetensors", "mtp.safetensors", "consolidated.safetensors", "adapter_model.safetensors",
     "model.fp16.safetensors", "unet/model.safetensors", "config.json"]
)  # fmt: skip


@given(st.sets(file_name), st.one_of(st.none(), st.lists(file_name.filter(lambda n: n != "config.json"), min_size=1)))
@settings(deadline=None)
def test_each_file_is_in_one_group(names, named):
    found = shard_set(tree(*names), index(*named) if named else None)
    groups = [*paths(found.shards), *paths(found.copies), *paths(found.adapters)]
    groups += [path for files in found.components.values() for path in paths(files)]
    assert sorted(groups) == sorted(name for name in names if name.endswith(".safetensors"))
    assert set(paths(found.strays)) <= set(paths(found.shards))
    assert not set(found.missing) & names


# The index ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metadata", "total"),
    [({}, None), (None, None), ({"total_size": 0}, None), ({"total_size": 8}, 8), ({"total_size": 8.0}, 8),
     ({"total_size": "8"}, None), ({"total_size": True}, None)],
)  # fmt: skip
def test_the_total_an_index_states(metadata, total):
    data = json.dumps({"metadata": metadata, "weight_map": {"a": "x.safetensors"}}).encode()
    assert parse_index(data) == Index({"a": "x.safetensors"}, total)


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{}", b'{"weight_map": []}', b'{"weight_map": {"a": 1}}', b'{"weight_map": {"a": "../x"}}',
             b'{"weight_map": {"a": "/x"}}', b"[" * 100_000],
)  # fmt: skip
def test_an_index_that_is_none_is_refused(data):
    with pytest.raises(HubMisbehaved):
        parse_index(data)


def test_every_real_index_is_read():
    files = sorted(SHARED.glob("index_json/**/*.index.json"))
    if not files:
        pytest.skip("no ../shared/data/index_json")
    for file in files:
        found = parse_index(file.read_bytes())
        assert found.shard_of
        assert shard_set(tree(*found.shards), found).missing == ()


# Index against headers ----------------------------------------------------------------------------------------------


def test_they_agree():
    headers = {"a": header("x", "y"), "b": header("z")}
    assert reconcile(Index({"x": "a", "y": "a", "z": "b"}, 12), headers) == ()
    assert reconcile(None, headers) == ()


def test_each_disagreement_is_named():
    headers = {"a": header("x", "y"), "mtp": header("m")}
    problems = reconcile(Index({"x": "a", "gone": "a", "z": "lost", "m": "a"}, 99), headers)
    assert kinds(problems) == {"shard_missing": 1, "not_in_header": 1, "not_in_index": 1, "wrong_shard": 1}
    texts = {problem.kind: problem.text for problem in problems}
    assert texts["not_in_index"] == "in a but not in the index: 1 (y)"
    assert "gone" in texts["not_in_header"]
    assert "lost" in texts["shard_missing"]


def test_strays_are_tensors_outside_the_index():
    headers = {"a": header("x"), "mtp.safetensors": header("mtp.fc", "mtp.norm")}
    [problem] = reconcile(Index({"x": "a"}, 4), headers)
    assert (problem.kind, problem.number) == ("not_in_index", 2)
    assert problem.text == "in mtp.safetensors but not in the index: 2 (mtp.fc, mtp.norm)"


def test_a_total_that_is_wrong_and_one_that_counts_the_files():
    held = {"a": header("x")}
    [wrong] = reconcile(Index({"x": "a"}, 5), held)
    assert wrong.text == "the index states a total_size of 5, its shards hold 4 bytes"
    size = 8 + held["a"].length + 4
    [files] = reconcile(Index({"x": "a"}, size), held)
    assert files.text.endswith("it counts the files, headers included")


def test_a_tensor_stored_twice():
    headers = {"a": header("x", "y"), "b": header("y", "z")}
    assert kinds(reconcile(None, headers)) == {"twice": 1}
    assert kinds(reconcile(Index({"x": "a", "y": "a", "z": "b"}, None), headers)) == {"twice": 1}
