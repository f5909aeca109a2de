"""A folder or a file as a source, as good as a Hub."""

import json
import os
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from formulas.errors import BadInput, HeaderError, HubMisbehaved, NotFound
from screen.cache import Cache
from screen.counting import Tally
from screen.header import Header
from screen.headers import read_headers
from screen.local import UNKNOWN, Local
from screen.repo import Blob, Entry
from screen.source import digest
from screen.transport import Cost

COMMIT = "3" * 40
EDGES = Path(__file__).parents[1].parent / "shared" / "data" / "safetensors" / "edge_cases"


def shard(count=3):
    header = {f"w{n}": {"dtype": "F32", "shape": [2], "data_offsets": [8 * n, 8 * n + 8]} for n in range(count)}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(8 * count)


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "model"
    (root / "sub").mkdir(parents=True)
    (root / ".cache").mkdir()
    (root / "config.json").write_text("{}")
    (root / "model.safetensors").write_bytes(shard())
    (root / "sub" / "mtp.safetensors").write_bytes(shard(1))
    (root / ".cache" / "junk").write_text("x")
    (root / "broken").symlink_to("nowhere")
    return root


def headers(source, cache_dir, cost=None):
    found = source.resolve("", "", Cost())
    entries = [e for e in source.tree("", "", Cost()).entries if e.path.endswith(".safetensors")]
    with ThreadPoolExecutor(2) as pool:
        tally = Tally()
        at = found.canonical, found.revision.commit
        read_headers(source, Cache(cache_dir), *at, entries, cost or Cost(), pool, tally)
    return tally.headers


def test_a_folder_is_read_without_network(folder, tmp_path):
    source, cost = Local(folder), Cost()
    found = source.resolve("x/y", "main", cost)
    assert (found.canonical, found.revision.commit, found.info.id) == ("model", UNKNOWN, "model")
    tree = source.tree("x/y", UNKNOWN, cost)
    assert [entry.path for entry in tree.entries] == ["config.json", "model.safetensors", "sub/mtp.safetensors"]
    assert not any(entry.blob.known for entry in tree.entries)
    assert source.read_file("x/y", UNKNOWN, tree.find("config.json"), cost, 10) == b"{}"
    read = headers(source, tmp_path / "cache", cost)
    assert [(path, len(read[path].tensors)) for path in read] == [("model.safetensors", 3), ("sub/mtp.safetensors", 1)]
    assert (cost.requests, cost.cdn_requests) == (0, 0)
    assert cost.bytes_read == 2 + sum(8 + header.length for header in read.values())
    assert not (tmp_path / "cache").exists()


def test_one_file_is_a_checkpoint_too(folder, tmp_path):
    source = Local(folder / "model.safetensors")
    assert source.repo == "model.safetensors"
    assert len(headers(source, tmp_path)["model.safetensors"].tensors) == 3


def test_truncated_and_padded_files_are_found(folder, tmp_path):
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for wrong in (whole[:-1], whole + b"x", whole[:20], b""):
        path.write_bytes(wrong)
        error = headers(Local(folder), tmp_path)["model.safetensors"]
        assert isinstance(error, HeaderError)
        assert error.message.startswith("model model.safetensors: ")


def test_a_file_that_shrinks_or_goes_is_an_error_of_ours(folder):
    source = Local(folder)
    entry = source.tree("", "", Cost()).find("config.json")
    with pytest.raises(HubMisbehaved):
        source.read_file("", "", entry, Cost(), 1)
    (folder / "config.json").write_text("")
    with pytest.raises(HubMisbehaved):
        source.read_file("", "", entry, Cost(), 10)
    (folder / "config.json").unlink()
    with pytest.raises(NotFound):
        source.read_file("", "", entry, Cost(), 10)
    with pytest.raises(HubMisbehaved):
        source.read_file("", "", Entry("../outside", Blob("unknown", 1)), Cost(), 10)


def test_nothing_there_is_bad_input(tmp_path):
    with pytest.raises(BadInput):
        Local(tmp_path / "missing")


def test_names_that_are_no_text_are_refused(folder):
    with open(os.fsencode(folder) + b"/\xff.safetensors", "wb"):
        pass
    with pytest.raises(BadInput):
        Local(folder).tree("", "", Cost())


@pytest.mark.parametrize("given", ["models--org--name", "models--org--name/snapshots/" + COMMIT])
def test_a_hugging_face_cache_repo_knows_its_name_commit_and_digests(tmp_path, given):
    repo = tmp_path / "models--org--name"
    for part in ("blobs", "refs", f"snapshots/{COMMIT}"):
        (repo / part).mkdir(parents=True)
    data = {"model.safetensors": (shard(), "sha256:"), "config.json": (b"{}", "git-sha1:")}
    for path, (content, kind) in data.items():
        etag = digest(content, kind).partition(":")[2]
        (repo / "blobs" / etag).write_bytes(content)
        (repo / "snapshots" / COMMIT / path).symlink_to(f"../../blobs/{etag}")
    (repo / "refs" / "main").write_text(COMMIT)
    source = Local(tmp_path / given)
    assert (source.repo, source.commit) == ("org/name", COMMIT)
    tree = source.tree("", "", Cost())
    assert {e.path: e.blob.oid for e in tree.entries} == {path: digest(*each) for path, each in data.items()}
    cache = tmp_path / "cache"
    assert isinstance(headers(source, cache)["model.safetensors"], Header)
    # A digest in a link is a claim: what the file holds now is what counts.
    blob = repo / "blobs" / digest(shard(), "sha256:").partition(":")[2]
    blob.write_bytes(b"\0" * len(shard()))
    assert isinstance(headers(source, cache)["model.safetensors"], HeaderError)


@pytest.mark.skipif(not EDGES.is_dir(), reason="needs the edge-case files beside the clone")
def test_strange_files_raise_nothing(tmp_path):
    found = headers(Local(EDGES), tmp_path)
    assert len(found) > 30
    assert all(isinstance(header, Header | HeaderError) for header in found.values())
