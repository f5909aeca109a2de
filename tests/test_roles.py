"""Names to stack and role, against a table reviewed as data: tests/golden/roles.tsv, a name a family."""

import gzip
import re
from pathlib import Path

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from formulas.facts import Role, Stack
from formulas.roles import classify
from formulas.tensors import family

SHARED = Path(__file__).parents[1].parent / "shared" / "data"
GOLDEN = {
    name: (stack, role)
    for name, stack, role in (
        line.split("\t") for line in (Path(__file__).parent / "golden" / "roles.tsv").read_text().splitlines()[1:]
    )
}

# Why a family is `other`: each of them is named here, none is there because nobody looked.
WHY_OTHER = {
    "hyper-connections: held whole by every rank": r"hyper_connection|\.hc_\w+$",
    "rotary frequencies: computed, not loaded": r"rotary_emb",
    "joins of a drafter": r"eh_proj|e_proj|mtp\w*\.(\w+\.)*(fc|fc_\w+|input_proj)\.|mtp_linear_proj",
    "small parameters of Gemma 3n and 4": r"altup|laurel|layer_scalar",
    "loose parameters of vision towers": r"sam_model\.(neck|net)|query_|view_sep|visual\.(conv|proj)|adapter\.w_in",
}


def zeroed(name):
    return re.sub(r"[0-9]+", "0", name)


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_table(name):
    assert classify(name) == GOLDEN[name]


def test_the_table_has_every_stack_and_role():
    assert {stack for stack, _ in GOLDEN.values()} == set(Stack)
    assert {role for _, role in GOLDEN.values()} == set(Role)


def test_nothing_is_other_unexplained():
    other = [name for name, (_, role) in GOLDEN.items() if role == Role.OTHER]
    unexplained = [name for name in other if not any(re.search(why, name) for why in WHY_OTHER.values())]
    assert unexplained == []
    for why, pattern in WHY_OTHER.items():
        assert any(re.search(pattern, name) for name in other), f"no longer needed: {why}"


@pytest.mark.parametrize("folder", ["headers", "measured/headers", "index_json"])
def test_every_family_of_real_checkpoints_is_in_the_table(folder):
    if not (SHARED / folder).is_dir():
        pytest.skip(f"no ../shared/data/{folder}")
    one = {}  # of each family, a name
    for path in sorted((SHARED / folder).rglob("*.json*")):
        if path.suffix == ".gz":
            for shard in orjson.loads(gzip.decompress(path.read_bytes()))["headers"].values():
                one.update(zip(map(family, shard), shard, strict=True))
        elif path.name.endswith(".index.json"):
            one.update((family(name), name) for name in orjson.loads(path.read_bytes())["weight_map"])
    names = {zeroed(name) for key, name in one.items() if key != "__metadata__"}
    assert names, "the folder holds no headers"
    lacking = {name: "\t".join(classify(name)) for name in sorted(names - GOLDEN.keys())}
    assert lacking == {}, "add to tests/golden/roles.tsv after review"


@given(st.sampled_from(sorted(GOLDEN)), st.integers(0, 999))
@settings(deadline=None)
def test_digits_decide_nothing(name, number):
    assert classify(re.sub(r"[0-9]+", str(number), name)) == classify(name)


@given(st.sampled_from(sorted(name for name in GOLDEN if name.endswith(".weight"))))
@settings(deadline=None)
def test_scales_take_the_role_of_their_weight(name):
    stem = name.removesuffix("weight")
    endings = ["weight_scale", "weight_scale_inv", "weight_scale_2", "input_scale", "weight_packed", "weight_shape",
               "weight_global_scale", "weight_zero_point", "qweight", "qzeros", "scales", "g_idx", "bias"]  # fmt: skip
    assert {classify(stem + ending) for ending in endings} == {classify(name)}


def test_layers_after_the_last_are_mtp_where_the_config_says_so():
    name = "model.layers.61.mlp.experts.0.up_proj.weight"
    assert classify(name, None) == (Stack.MAIN, Role.EXPERT)
    assert classify(name, 61) == (Stack.MTP, Role.EXPERT)
    assert classify(name, 62) == (Stack.MAIN, Role.EXPERT)
    assert classify("vision_tower.encoder.layers.61.mlp.fc1.weight", 61)[0] is Stack.VISION


@given(st.text(max_size=40))
@settings(deadline=None)
def test_any_name_has_a_role(name):
    stack, role = classify(name.encode("utf-8", "ignore").decode(), 3)
    assert stack in Stack
    assert role in Role
