"""Groups of tensors: folding and expanding lose nothing, whatever the names."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from formulas.errors import BadInput
from formulas.tensors import DTYPE_BITS, TensorGroup, expand, fold, tensor_bytes

component = st.one_of(
    st.integers(0, 12).map(str),
    st.sampled_from(["layers", "experts", "weight", "00", "07", "shard_3", "shard_03", "{0-3}", "{}", "{", "}}", "-1"]),
    st.text(max_size=4),
)
name = st.lists(component, min_size=1, max_size=5).map(".".join)
tensor = st.tuples(name, st.sampled_from(["BF16", "F8_E4M3"]), st.sampled_from([(), (2, 3)]))


@given(st.lists(tensor, max_size=30, unique=True))
@settings(deadline=None, max_examples=300)
@example([("a.{0-3}.b", "BF16", ()), ("a.0.b", "BF16", ())])
@example([("a.9" * 3 + ".12345678901234567890", "BF16", ())])
def test_expand_is_the_inverse_of_fold(tensors):
    groups = fold(tensors)
    assert sorted(expand(groups)) == sorted(tensors)
    assert sum(group.copies for group in groups) == len(tensors)
    assert sum(g.bytes_total for g in groups) == sum(tensor_bytes(dtype, shape) for _, dtype, shape in tensors)


def test_siblings_fold_to_one_group():
    names = [f"model.layers.{i}.experts.{j}.w1" for i in (0, 1, 2, 5) for j in range(8)]
    assert fold((n, "U8", (4, 4)) for n in names) == [
        TensorGroup("model.layers.{0-2,5}.experts.{0-7}.w1", "U8", (4, 4))
    ]


def test_a_hole_in_the_product_makes_two_groups():
    names = [f"l.{i}.e.{j}" for i in range(3) for j in range(4) if (i, j) != (1, 2)]
    assert [g.pattern for g in fold((n, "U8", ()) for n in names)] == ["l.{0,2}.e.{0-3}", "l.{1}.e.{0-1,3}"]


def test_the_part_number_of_a_table_folds_and_leading_zeros_stay():
    parts = [(f"ngram.shard_{i}.weight", "F8_E4M3", (5, 2)) for i in range(128)]
    assert fold(parts)[0].pattern == "ngram.shard_{0-127}.weight"
    assert fold([("part.007.weight", "U8", ())])[0].pattern == "part.007.weight"


def test_numbers_of_a_brace():
    group = TensorGroup("a.{0-1,4}.b.{7}", "U8", ())
    assert (group.numbers(0), group.numbers(1), group.copies) == ([0, 1, 4], [7], 3)


@pytest.mark.parametrize("pattern", ["a.{3-1}", "a.{0-}", "a.{,}", "a.{", "a.}", "a.{x}", "{0-99999}.{0-99999}"])
def test_patterns_that_name_no_tensors_are_refused(pattern):
    with pytest.raises(BadInput, match="tensor pattern"):
        TensorGroup(pattern, "U8", ()).copies  # noqa: B018


def test_sub_byte_tensors_round_up():
    assert [tensor_bytes(dtype, (3,)) for dtype in ("F4", "F6_E2M3", "BF16", "C64")] == [2, 3, 6, 24]
    assert len(DTYPE_BITS) == 22
