"""The pure side of `stage`: spans, journal, plan, manifest."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from formulas.errors import BadInput, HubMisbehaved
from screen.repo import Blob, Entry, Revision, Tree
from stage import journal as j
from stage.journal import Looks, Part, parse_journal, write_journal
from stage.manifest import File, Manifest, parse_manifest, write_manifest
from stage.plan import (
    Candidate,
    Fetch,
    Link,
    Presence,
    Reuse,
    WriteManifest,
    WriteRef,
    case_clash,
    make_plan,
    missing_spans,
    select,
)  # fmt: skip
from stage.spans import clip, join, missing, part_size, split, total

COMMIT = "3f2a91c0" * 5
MAIN = Revision("main", COMMIT)


def sha(n: int) -> str:
    return f"sha256:{n:064x}"


spans = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=8)


@given(spans, st.integers(0, 70))
def test_spans_are_sets_of_bytes(pairs, size):
    bytes_of = {n for start, stop in pairs for n in range(start, stop)}
    joined = join(pairs)
    assert {n for start, stop in joined for n in range(start, stop)} == bytes_of
    assert all(a[1] < b[0] for a, b in pairwise(joined)), "sorted, disjoint, not even touching"
    inside = {n for n in bytes_of if n < size}
    assert total(clip(joined, size)) == len(inside)
    assert {n for start, stop in missing(joined, size) for n in range(start, stop)} == set(range(size)) - inside


@given(spans, st.integers(1, 20))
def test_split_cuts_without_loss(pairs, part):
    joined = join(pairs)
    parts = split(joined, part)
    assert join(parts) == joined
    assert all(0 < stop - start <= part for start, stop in parts)


@given(st.integers(0, 2**45))
def test_parts_are_within_their_bounds(size):
    assert 16 <= part_size(size, 16, 64) <= 64


oids = st.integers(0, 3).map(sha)
looks = st.builds(Looks, st.integers(0, 2**50), st.integers(0, 2**62), st.integers(0, 2**40))
parts = st.tuples(st.integers(0, 100), st.integers(1, 100), st.sampled_from(["", "http://a", "http://b"]))
lines = st.one_of(
    st.builds(lambda o, p: j.part_line(o, Part(p[0], p[0] + p[1], p[2])), oids, parts),
    st.builds(j.forget_line, oids), st.builds(j.published_line, oids, looks), st.builds(j.bad_line, oids),
)  # fmt: skip


@given(st.lists(lines, max_size=12))
def test_a_journal_rewritten_says_the_same(entries):
    found = parse_journal(b"".join(entries))
    assert parse_journal(write_journal(found)) == found
    assert not found.bad & found.published.keys()


@given(st.lists(lines, max_size=8), st.integers(0, 2000))
def test_a_journal_cut_anywhere_is_a_prefix_of_its_lines(entries, cut):
    data = b"".join(entries)[:cut]
    whole = 0
    while whole < len(entries) and len(b"".join(entries[: whole + 1])) <= cut:
        whole += 1
    assert parse_journal(data) == parse_journal(b"".join(entries[:whole]))


@given(st.lists(lines, min_size=1, max_size=8), st.data())
def test_a_damaged_line_is_ignored_and_no_other(entries, data):
    hit = data.draw(st.integers(0, len(entries) - 1))
    at = data.draw(st.integers(0, len(entries[hit]) - 2))
    wrong = bytearray(entries[hit])
    wrong[at] ^= 1 << data.draw(st.integers(0, 7))
    if b"\n" not in wrong[:-1]:
        damaged = [*entries[:hit], bytes(wrong), *entries[hit + 1 :]]
        assert parse_journal(b"".join(damaged)) == parse_journal(b"".join(entries[:hit] + entries[hit + 1 :]))


@given(st.binary(max_size=200))
def test_any_bytes_are_a_journal(data):
    parse_journal(data)


@st.composite
def trees(draw):
    count = draw(st.integers(1, 8))
    blobs = [Blob(sha(n) if n % 3 else f"git-sha1:{n:040x}", n * 10) for n in range(5)]
    return Tree(tuple(Entry(f"dir{n % 2}/f{n}", draw(st.sampled_from(blobs))) for n in range(count)))


@st.composite
def presences(draw, tree):
    all_oids = sorted({e.blob.oid for e in tree.entries})
    some = st.lists(st.sampled_from(all_oids), unique=True)
    sizes = {e.blob.oid: e.blob.size for e in tree.entries}
    pieces = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=3).map(join)
    proven = frozenset(draw(some))
    return Presence(
        proven,
        {o: draw(st.sampled_from([sizes[o], sizes[o] // 2, sizes[o] + 3])) for o in draw(some) if o not in proven},
        {o: draw(pieces) for o in draw(some)},
        {o: (Candidate("/x", draw(st.sampled_from([sizes[o], 7])), draw(st.booleans())),) for o in draw(some)},
        frozenset((e.path, e.blob.oid) for e in tree.entries if draw(st.booleans())),
        draw(st.sampled_from([None, frozenset((e.path, e.blob.oid) for e in tree.entries)])),
        draw(st.sampled_from([None, COMMIT])),
    )  # fmt: skip


@given(st.data())
def test_a_plan_has_each_blob_once_and_accounts_for_every_byte(data):
    tree = data.draw(trees())
    here = data.draw(presences(tree))
    plan = make_plan("org/name", MAIN, tree, here)
    assert plan == make_plan("org/name", MAIN, tree, here)
    handled = [step.oid for step in plan.steps if isinstance(step, Fetch | Reuse)]
    assert len(handled) == len(set(handled))
    assert set(handled) == {e.blob.oid for e in tree.entries} - here.proven
    assert plan.fetch_bytes + plan.resume_bytes + plan.reuse_bytes == plan.total_bytes
    for step in plan.fetches:
        assert step.missing_bytes == total(missing_spans(step)) - step.salvage
    order = [(Fetch, Reuse), (Link,), (WriteManifest,), (WriteRef,)]
    ranks = [next(i for i, kinds in enumerate(order) if isinstance(step, kinds)) for step in plan.steps]
    assert ranks == sorted(ranks), "blob, link, manifest, ref"


@given(trees())
def test_nothing_is_left_to_do_after_success(tree):
    named = frozenset((e.path, e.blob.oid) for e in tree.entries)
    done = Presence(frozenset(e.blob.oid for e in tree.entries), links=named, manifest=named, ref=COMMIT)
    assert make_plan("org/name", MAIN, tree, done).steps == ()


def test_a_file_without_a_digest_is_refused():
    tree = Tree((Entry("a", Blob("unknown", 3)),))
    with pytest.raises(HubMisbehaved, match="a: expected a sha256 or git-sha1"):
        make_plan("org/name", MAIN, tree, Presence())


def tree_of(*paths: str) -> Tree:
    return Tree(tuple(Entry(path, Blob(sha(n), 1)) for n, path in enumerate(paths)))


def left_out(*paths: str, include=(), exclude=()) -> set[str]:
    return {skipped.path for skipped in select(tree_of(*paths), include, exclude)[1]}


def test_weights_in_other_formats_are_left_out_unless_named():
    files = (
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json",
        "config.json", "tokenizer.model", "pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json",
        "consolidated.safetensors", "original/consolidated.00.pth", "original/params.json", "tf_model.h5",
        "flax_model.msgpack", "onnx/model.onnx", "onnx/model.onnx_data", "Q4/model.gguf", "training_args.bin",
    )  # fmt: skip
    assert left_out(*files) == set(files[5:15])
    assert "onnx/model.onnx" not in left_out(*files, include=("onnx/", "*.json"))
    assert left_out(*files, exclude=("*.json",)) >= {"config.json", "model.safetensors.index.json"}


def test_pickle_weights_are_kept_where_there_are_no_others():
    assert left_out("pytorch_model.bin", "config.json") == set()
    assert left_out("original/model.safetensors", "pytorch_model.bin") == set(), "nothing but a copy is no original"


def test_a_selection_of_nothing_is_an_error():
    with pytest.raises(BadInput, match="expected at least one of 1 files"):
        select(tree_of("a"), ("*.json",))


def test_case_clashes_are_found_in_folders_too():
    assert case_clash(["a/b", "a/c"]) is None
    assert case_clash(["README.md", "readme.md"]) == ("README.md", "readme.md")
    assert case_clash(["Sub/x", "sub/y"]) == ("Sub", "sub")
    assert case_clash(["straße", "STRASSE"]) is not None


def test_a_manifest_round_trips_and_is_checked():
    file = File(path="a/b", size=3, oid=sha(1), source="http://x")
    manifest = Manifest(repo="o/n", requested="main", commit=COMMIT, time="t", tool="stage", files=(file,))
    assert parse_manifest(write_manifest(manifest), "m") == manifest
    for field, value in (("path", "../x"), ("oid", "sha256:zz"), ("oid", "md5:" + "0" * 32), ("size", -1)):
        wrong = manifest.model_copy(update={"files": (file.model_copy(update={field: value}),)})
        with pytest.raises((BadInput, HubMisbehaved)):
            parse_manifest(write_manifest(wrong), "m")
    with pytest.raises(BadInput, match="m: expected a manifest of format 1"):
        parse_manifest(b"{}", "m")
