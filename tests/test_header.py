"""The header parser: against the format's text, its official reader, and bytes from nowhere."""

import csv
import json
from pathlib import Path

import orjson
import pytest
import safetensors
from hypothesis import example, given, settings
from hypothesis import strategies as st

from formulas.errors import HeaderError
from formulas.tensors import DTYPE_BITS
from screen import header as module
from screen.header import HEADER_CAP, header_length, parse_header, parse_stated_header

EDGE_CASES = Path(__file__).parents[1].parent / "shared" / "data" / "safetensors" / "edge_cases"
QUICK = settings(deadline=None, max_examples=200)


def file_of(document, data=0, *, pad=0):
    """A safetensors file with this header and so many zero bytes of data."""
    raw = document if isinstance(document, bytes) else json.dumps(document, ensure_ascii=False).encode()
    raw += b" " * pad
    return len(raw).to_bytes(8, "little") + raw + bytes(data)


def parse(file, *, size=None):
    return parse_header(file, file_size=len(file) if size is None else size, name="a.safetensors")


def refusal(read):
    """The text of the HeaderError a read raises, or that it raises none; any other exception is the test's failure."""
    try:
        read()
    except HeaderError as error:
        return str(error)
    return "a.safetensors is read"


def entry(dtype, shape, start, stop):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


@st.composite
def documents(draw):
    """A valid header as a JSON object, in any order of keys, and its data bytes."""
    names = draw(st.lists(st.text(max_size=8).filter(lambda n: n != "__metadata__"), unique=True, max_size=8))
    entries, end = {}, 0
    for name in names:
        dtype = draw(st.sampled_from(sorted(DTYPE_BITS)))
        shape = draw(st.lists(st.integers(0, 5), max_size=3))
        if DTYPE_BITS[dtype] % 8:
            shape = [*shape, 4]  # whole bytes
        bits = DTYPE_BITS[dtype]
        for size in shape:
            bits *= size
        entries[name] = entry(dtype, shape, end, end + bits // 8)
        end += bits // 8
    keys = draw(st.permutations(list(entries)))
    document = {key: entries[key] for key in keys}
    metadata = draw(st.one_of(st.none(), st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=2)))
    if metadata is not None:
        document["__metadata__"] = metadata
    return document, end


@given(documents(), st.integers(0, 9))
@QUICK
def test_a_valid_header_is_read_whole(made, pad):
    document, data = made
    file = file_of(document, data, pad=pad)
    header = parse(file)
    assert {t.name: entry(t.dtype, list(t.shape), t.start, t.stop) for t in header.tensors} == {
        key: value for key, value in document.items() if key != "__metadata__"
    }
    assert header.metadata == document.get("__metadata__")
    assert (header.length, header.data_bytes) == (len(file) - 8 - data, data)
    assert [t.start for t in header.tensors] == sorted(t.start for t in header.tensors)
    again = parse_stated_header(orjson.dumps(document), file_size=len(file), name="a")
    assert again.tensors == header.tensors


@given(documents(), st.integers(-40, 40).filter(bool))
@QUICK
def test_a_file_of_another_size_is_refused_from_its_header(made, more):
    document, data = made
    file = file_of(document, data)
    with pytest.raises(HeaderError):
        parse(file[: len(file) - data], size=max(0, len(file) + more))


@given(st.binary(max_size=200), st.integers(0, 300))
@QUICK
@example(b"\0" * 8, 8)
def test_any_bytes_give_a_header_or_a_header_error(data, size):
    assert "a.safetensors" in refusal(lambda: parse_header(data, file_size=size, name="a.safetensors"))


json_value = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**65), 2**65) | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
number = st.one_of(st.integers(-1, 9), st.sampled_from([2**40, 2**63, 2**64, 1.0, True, None]))
odd_entry = st.fixed_dictionaries(
    {
        "dtype": st.one_of(st.sampled_from(["U8", "F32", "F4", "F4_E2M1", "f32"]), json_value),
        "shape": st.one_of(st.lists(number, max_size=3), json_value),
        "data_offsets": st.one_of(st.lists(number, max_size=3), st.just([0, 4]), st.just([4, 8]), json_value),
    },
    optional={"extra": json_value},
)
odd_document = st.dictionaries(
    st.sampled_from(["a", "b", "c", "__metadata__"]), st.one_of(odd_entry, json_value), max_size=3
)


@given(st.one_of(odd_document, json_value))
@QUICK
def test_any_json_gives_a_header_or_a_header_error(document):
    raw = json.dumps(document).encode()
    assert "a.safetensors" in refusal(lambda: parse(file_of(raw, 8)))
    size = len(raw) + 16
    assert "a.safetensors" in refusal(lambda: parse_stated_header(raw, file_size=size, name="a.safetensors"))


@given(odd_document)
@QUICK
@example({"a": entry("U8", [True], 0, 1)})
@example({"a": entry("U8", [1.0], 0, 1), "b": entry("U8", [1], 1, 2)})
@example({"a": {"dtype": "U8", "shape": {}, "data_offsets": [0, 1]}})
def test_the_fast_way_and_the_slow_way_agree(document):
    try:
        slow = module._one_by_one(document, "a")
    except HeaderError:
        slow = None
    fast = module._at_once(document)
    if fast is not None and (not fast.starts or min(fast.starts) >= 0):  # a negative start is refused by the tiling
        assert fast == slow


def as_writers_spell(document):
    """The text of a header without spaces, its metadata first."""
    first = sorted(document.items(), key=lambda item: item[0] != "__metadata__") if isinstance(document, dict) else None
    return json.dumps(dict(first) if first else document, ensure_ascii=False, separators=(",", ":")).encode()


CHANGES = [b"", b",", b'"', b"\\", b"{", b"}", b"[", b"]", b":", b"0", b"-", b"1.5", b" ", b"\n", b"\xff", b"\0", b"a"]


@given(st.one_of(documents().map(lambda made: made[0]), odd_document), st.data())
@settings(deadline=None, max_examples=600)
def test_the_writers_spelling_is_read_as_any_json_is(document, data):
    text = as_writers_spell(document)
    if data.draw(st.booleans()):
        start = data.draw(st.integers(0, len(text)))
        text = text[:start] + data.draw(st.sampled_from(CHANGES)) + text[start + data.draw(st.integers(0, 2)) :]
    if (quick := module._as_written(text)) is not None:
        assert quick == module._as_json(text, "a")


def test_the_writers_spelling_is_read_the_quick_way():
    document = {"__metadata__": {"format": "pt"}, "ä.0": entry("F4", [2, 4], 0, 4), "b": entry("I64", [], 4, 12)}
    metadata, columns = module._as_written(as_writers_spell(document) + b"  ")
    assert metadata == {"format": "pt"}
    assert columns == (["ä.0", "b"], [("F4", (2, 4)), ("I64", ())], [0, 4], [4, 12])


@given(odd_document, st.integers(0, 12))
@settings(deadline=None, max_examples=400)
@example({"a": entry("F32", [2], 4, 12), "b": entry("F32", [1], 0, 4)}, 12)
@example({"a": entry("U8", [0], 0, 0), "__metadata__": None}, 0)
def test_it_accepts_what_the_official_reader_accepts(document, data):
    """On headers without duplicate keys the two agree, yes or no."""
    file = file_of(document, data)
    try:
        official = {name for name, _ in safetensors.deserialize(file)}
    except safetensors.SafetensorError:
        official = None
    try:
        ours = {tensor.name for tensor in parse(file).tensors}
    except HeaderError:
        ours = None
    assert ours == official


def test_every_dtype_of_the_format():
    document, end = {}, 0
    for dtype, bits in DTYPE_BITS.items():
        document[dtype] = entry(dtype, [4], end, end + bits // 2)
        end += bits // 2
    assert [t.dtype for t in parse(file_of(document, end)).tensors] == list(DTYPE_BITS)


def cases():
    if not EDGE_CASES.is_dir():
        return [pytest.param("", "", marks=pytest.mark.skip(reason="no ../shared/data/safetensors/edge_cases"))]
    with (EDGE_CASES / "EDGE_CASES.tsv").open() as rows:
        return [(row["file"], row["expected"]) for row in csv.DictReader(rows, delimiter="\t")]


STRICTER = {
    # The format's text forbids duplicate keys. A reader that keeps the last one shows other tensors than a reader
    # that keeps the first, so a checkpoint that has them is not one checkpoint.
    "duplicate_keys.safetensors",
}
ACCEPTED = {"fnuz_dtypes.safetensors"}  # dtypes of 0.8; the table's expectation names both answers


@pytest.mark.parametrize(("file", "expected"), cases())
def test_edge_cases(file, expected):
    data = (EDGE_CASES / file).read_bytes()
    if file in STRICTER or (expected.startswith("reject") and file not in ACCEPTED):
        with pytest.raises(HeaderError, match=r"a\.safetensors"):
            parse(data)
    else:
        assert expected.startswith("accept") or file in ACCEPTED
        header = parse(data)
        assert header.data_bytes == sum(t.stop - t.start for t in header.tensors) == len(data) - 8 - header.length


@pytest.mark.parametrize(
    ("file", "text"),
    [
        (b"", "8 bytes of header length, got 0"),
        (b"\0\0\0", "8 bytes of header length, got 3"),
        (b"\x05" + bytes(7) + b"{}", "the header ends at byte 13, file has 10; the upload is truncated"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n", "a Git LFS pointer"),
        (b"<!DOCTYPE html><html>not found</html>", "an HTML or XML page"),
        (b"PK\x03\x04\x14\0\0\0" + b"x" * 30, "a zip archive"),
        (b"GGUF\x03\x00\x00\x00\x01", "a GGUF file"),
        (file_of(b"\xff{}"), "expected a header in JSON"),
        (file_of([]), "expected a JSON object as header, got a list"),
        (file_of({"__metadata__": {"a": 1}}), "__metadata__ 'a': expected a string, got a number 1"),
        (file_of({"__metadata__": [1]}), "__metadata__: expected an object of strings, got a list"),
        (file_of({"a": None}), "tensor 'a': expected an object with dtype, shape and data_offsets, got null"),
        (file_of({"a": {"dtype": "U8", "shape": []}}), "tensor 'a': .* got no data_offsets"),
        (file_of({"a": entry("F5", [1], 0, 1)}), "tensor 'a': expected a dtype of the format, got 'F5'"),
        (file_of({"a": entry("U8", [-1], 0, 1)}), r"tensor 'a': expected a shape of whole numbers, got \[-1\]"),
        (file_of({"a": entry("U8", [1], 1, 0)}), r"to end after they start, got \[1, 0\]"),
        (file_of({"a": entry("U8", [2**40, 2**40], 0, 1)}), "overflows"),
        (file_of({"a": entry("F4", [3], 0, 1)}), "expected whole bytes, got 12 bits for F4"),
        (file_of({"a": entry("F32", [2], 0, 4)}), r"F32 \[2\] takes 8 bytes, its offsets \[0, 4\] span 4"),
        (file_of({"a": entry("U8", [1], 0, 1), "b": entry("U8", [1], 3, 4)}, 4), "'b' starts .* a hole of 2 bytes"),
        (file_of({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 1, 3)}, 3), "'b' starts .* 1 bytes overlap"),
        (file_of(b'{"a":{"dtype":"U8","shape":[],"data_offsets":[0,1]},"a":{}}', 1), "'a' twice"),
        (file_of(b'{"a":{"dtype":"U8","dtype":"I8","shape":[],"data_offsets":[0,1]}}', 1), "'dtype' twice"),
        (file_of(b'{"\\u0061":{"dtype":"U8","shape":[],"data_offsets":[0,1]},"a":1}', 1), "'a' twice"),
        (file_of({"a": entry("U8", [1], 0, 1)}, 9), "there are bytes after the last tensor"),
    ],
)
def test_each_way_to_be_wrong_is_named(file, text):
    with pytest.raises(HeaderError, match=text):
        parse(file)


def test_a_header_over_the_cap_is_refused_before_it_is_read():
    with pytest.raises(HeaderError, match=f"at most {HEADER_CAP} bytes, got {HEADER_CAP + 1}"):
        header_length((HEADER_CAP + 1).to_bytes(8, "little"), file_size=10**12, name="a")
    assert header_length(HEADER_CAP.to_bytes(8, "little"), file_size=10**12, name="a") == HEADER_CAP


def test_a_read_that_was_cut_short_is_not_blamed_on_the_file():
    file = file_of({"a": entry("U8", [1], 0, 1)}, 1)
    with pytest.raises(HeaderError, match="the read was cut short"):
        parse(file[:20], size=len(file))


def test_truncation_is_seen_without_the_data():
    file = file_of({"a": entry("BF16", [4096, 4096], 0, 2 * 4096**2)})
    with pytest.raises(HeaderError, match=r"tensors end at byte \d+, file has \d+; the upload is truncated"):
        parse(file, size=len(file) + 2 * 4096**2 - 1)


def test_null_metadata_is_absent_metadata():
    assert parse(file_of({"__metadata__": None})).metadata is None


def test_deep_nesting_is_refused_without_a_traceback():
    deep = b"[" * 900 + b"]" * 900
    raw = b'{"a":{"dtype":"U8","shape":[],"data_offsets":[0,1],"x":' + deep + b"}}"
    assert len(parse(file_of(raw, 1)).names) == 1
    with pytest.raises(HeaderError):
        parse(file_of(b"[" * 100_000))


def test_names_keep_every_character():
    names = ["", " ", "a\0b", 'quo"te', "back\\slash", "日本", "😀", "a/b"]
    document = {name: entry("U8", [1], i, i + 1) for i, name in enumerate(names)}
    assert list(parse(file_of(document, len(names))).names) == names


def test_the_hubs_route_is_checked_against_the_file_size():
    document = {"a": entry("F32", [2], 0, 8), "__metadata__": {"format": "pt"}}
    shortest = len(orjson.dumps(document))
    header = parse_stated_header(orjson.dumps(document), file_size=8 + shortest + 8, name="a")
    assert (header.length, header.data_bytes, header.metadata) == (shortest, 8, {"format": "pt"})
    with pytest.raises(HeaderError, match="the upload is truncated"):
        parse_stated_header(orjson.dumps(document), file_size=8 + shortest + 7, name="a")
    with pytest.raises(HeaderError, match="bytes after the last tensor"):
        parse_stated_header(orjson.dumps(document), file_size=10**9, name="a")


def test_equal_forms_are_one_object():
    document = {str(i): entry("BF16", [2, 3], 12 * i, 12 * i + 12) for i in range(50)}
    assert len({id(form) for form in parse(file_of(document, 600)).forms}) == 1
