"""The demo Hub: huggingface_hub works against it unmodified, and each fault is the fault it says it is."""

import contextlib
import hashlib
import http.client
import json
import os
import socket
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import requests
from huggingface_hub import HfApi, hf_hub_download, hf_hub_url, snapshot_download
from huggingface_hub.errors import (
    DisabledRepoError,
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors import safe_open

from screen.demofaults import Fault, Kind
from screen.demofiles import Tensor, small_repo
from screen.demohub import DemoHub
from screen.demorepo import Content, DemoRepo, folder_repo

SHARDS = {
    "model-00001-of-00002.safetensors": [Tensor("a.weight", "BF16", (64, 32)), Tensor("a.bias", "F32", (64,))],
    "model-00002-of-00002.safetensors": [Tensor("b.weight", "BF16", (32, 64))],
}


@pytest.fixture
def small():
    return small_repo("org/small", SHARDS, card={"license": "mit", "base_model": "org/base",
                                                 "base_model_relation": "quantized"})  # fmt: skip


def api(hub, token=False):
    return HfApi(endpoint=hub.endpoint, token=token)


def get(url, **headers):
    return requests.get(url, headers={"Accept-Encoding": "identity"} | headers, timeout=5, allow_redirects=False)


def cdn_url(hub, repo, path, revision="main"):
    return get(f"{hub.endpoint}/{repo}/resolve/{revision}/{path}").headers["Location"]


# What huggingface_hub makes of it.


def test_model_info(hub, small):
    info = api(hub(small)).model_info("org/small", files_metadata=True, securityStatus=True)
    assert info.sha == small.main.oid
    assert info.card_data.license == "mit"
    assert "base_model:quantized:org/base" in info.tags
    assert info.safetensors.parameters == {"BF16": 4096, "F32": 64}
    assert info.security_repo_status == {"scansDone": True, "filesWithIssues": []}
    shard = next(s for s in info.siblings if s.rfilename == "model-00001-of-00002.safetensors")
    content = small.main.files[shard.rfilename]
    assert shard.lfs.sha256 == hashlib.sha256(content.head).hexdigest()
    assert shard.size == content.size == len(content.head)


def test_expand_gives_what_was_asked_for_and_refuses_the_rest(hub, small):
    running = hub(small)
    info = api(running).model_info("org/small", expand=["sha", "gated", "safetensors"])
    assert (info.sha, info.gated, info.tags) == (small.main.oid, False, None)
    assert get(f"{running.endpoint}/api/models/org/small?expand[]=nonsense").status_code == 400


@pytest.mark.parametrize("page_size", [1, 2, 1000])
def test_tree_over_pages(hub, page_size):
    files = {f"{folder}file{i}.txt": f"{i}" for folder in ("", "sub/", "sub/deep/") for i in range(3)}
    running = hub(DemoRepo("org/a", files), page_size=page_size)
    entries = list(api(running).list_repo_tree("org/a", recursive=True))
    assert {e.path for e in entries if hasattr(e, "blob_id")} == set(files)
    assert {e.path for e in entries if hasattr(e, "tree_id")} == {"sub", "sub/deep"}
    assert running.counts["tree"].requests == -(-11 // page_size)
    assert {e.path for e in api(running).list_repo_tree("org/a")} == {"file0.txt", "file1.txt", "file2.txt", "sub"}
    deep = api(running).list_repo_tree("org/a", "sub/deep")
    assert {e.path for e in deep} == {f"sub/deep/file{i}.txt" for i in range(3)}


def test_expanded_tree_and_paths_info(hub):
    repo = DemoRepo("org/a", {"a.txt": "a", "model.bin": b"b" * 100, "d/c.txt": ""}, unsafe={"model.bin": "unsafe"})
    running = hub(repo)
    tree = {e.path: e for e in api(running).list_repo_tree("org/a", expand=True, recursive=True)}
    assert tree["model.bin"].security.safe is False
    assert tree["a.txt"].security.safe is True
    assert tree["a.txt"].last_commit.oid == repo.main.oid
    found = api(running).get_paths_info("org/a", ["a.txt", "gone", "d", "model.bin"], expand=False)
    assert [e.path for e in found] == ["a.txt", "d", "model.bin"]
    assert found[2].lfs.sha256 == hashlib.sha256(b"b" * 100).hexdigest()
    # b45ef6fe...: `git hash-object` of "Hello, World!" without a newline.
    assert Content(b"Hello, World!").git_sha1 == "b45ef6fec89518d314f546fd6c3025367b721684"
    assert tree["d/c.txt"].blob_id == "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"  # git's empty blob


def test_listing(hub, small):
    others = [DemoRepo(f"team/m{i}", {"config.json": {"model_type": "qwen3"}}, downloads=i) for i in range(5)]
    running = hub(small, *others, DemoRepo("team/secret", {}, private=True), page_size=2)
    ask = api(running).list_models
    assert [m.id for m in ask(author="team", sort="downloads")] == [f"team/m{i}" for i in (4, 3, 2, 1, 0)]
    assert [m.id for m in ask(search="SMALL")] == ["org/small"]
    assert [m.id for m in ask(filter="base_model:quantized:org/base")] == ["org/small"]
    assert len(list(ask(filter="qwen3", limit=3))) == 3
    assert next(iter(ask(search="small", full=True))).sha == small.main.oid
    assert running.counts["list"].requests == 3 + 1 + 1 + 2 + 1


def test_refs_and_commits(hub, small):
    first = small.main.oid
    small.branches["v1"] = first
    second = small.push({"config.json": {"model_type": "other"}}, "change config")
    running = hub(small)
    refs = api(running).list_repo_refs("org/small")
    assert {b.name: b.target_commit for b in refs.branches} == {"main": second, "v1": first}
    assert [c.commit_id for c in api(running).list_repo_commits("org/small")] == [second, first]
    assert api(running).model_info("org/small", revision="v1").sha == first


def test_snapshot_download_gives_files_that_load(hub, small, tmp_path):
    folder = snapshot_download("org/small", cache_dir=tmp_path, endpoint=hub(small, page_size=2).endpoint, token=False)
    for path, content in small.main.files.items():
        with open(os.path.join(folder, path), "rb") as file:
            assert hashlib.sha256(file.read()).hexdigest() == content.sha256
    with safe_open(os.path.join(folder, "model-00001-of-00002.safetensors"), "np") as file:
        assert set(file.keys()) == {"a.weight", "a.bias"}
        assert file.get_tensor("a.bias").shape == (64,)
        assert abs(file.get_tensor("a.bias")).max() < 0.1


@pytest.mark.parametrize("one_request", [True, False])
def test_safetensors_metadata(hub, small, one_request):
    running = hub(small, one_request_headers=one_request)
    one, two = SHARDS
    found = api(running).get_safetensors_metadata("org/small")
    assert found.weight_map == {"a.weight": one, "a.bias": one, "b.weight": two}
    assert found.parameter_count == {"BF16": 4096, "F32": 64}
    if one_request:
        whole = api(running).get_sharded_safetensors_metadata("org/small")
        assert (whole.files_metadata, whole.metadata) == (found.files_metadata, {"total_size": 8448})
        assert running.counts["headers"].requests == 1


def test_big_files_are_served_by_range_without_existing(hub):
    size = 40 * 2**30
    repo = DemoRepo("org/big", {"model.safetensors": Content(b"head", size), "config.json": {}})
    url = cdn_url(hub(repo), "org/big", "model.safetensors")
    answer = get(url, Range=f"bytes={size - 4}-{size + 10}")
    assert (answer.status_code, answer.content) == (206, bytes(4))
    assert answer.headers["Content-Range"] == f"bytes {size - 4}-{size - 1}/{size}"
    assert get(url, Range="bytes=2-5").content == b"ad\0\0"
    assert get(url, Range="bytes=-3").content == bytes(3)
    assert get(url, Range=f"bytes={size}-").status_code == 416
    assert requests.head(url, timeout=5).headers["Content-Length"] == str(size)


def test_folder_repo_is_served_from_disk(hub, tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "weights.bin").write_bytes(os.urandom(3_000_000))
    repo = folder_repo("org/disk", tmp_path)
    running = hub(repo)
    url = cdn_url(running, "org/disk", "sub/weights.bin")
    data = get(url).content
    assert hashlib.sha256(data).hexdigest() == repo.main.files["sub/weights.bin"].sha256
    assert get(url, Range="bytes=1048570-1048589").content == data[1048570:1048590]
    running.set_fault(Fault(Kind.FLIP, "cdn", after_bytes=2_000_000))
    wrong = get(url).content
    assert [i for i, (a, b) in enumerate(zip(data, wrong, strict=True)) if a != b] == [2_000_000]
    running.set_fault(Fault(Kind.SHIFTED, "cdn"))
    assert get(url).content == data[1:] + b"\0"
    running.set_fault(Fault(Kind.CUT, "cdn", after_bytes=10_000))
    assert body_until_trouble(url) == (data[:10_000], "closed")


# Resolve: the headers a client takes identity from.


def test_lfs_files_redirect_to_the_cdn(hub, small):
    running = hub(small)
    content = small.main.files["model-00001-of-00002.safetensors"]
    answer = get(f"{running.endpoint}/org/small/resolve/main/model-00001-of-00002.safetensors")
    assert answer.status_code == 302
    assert answer.headers["X-Repo-Commit"] == small.main.oid
    assert answer.headers["X-Linked-ETag"] == f'"{content.sha256}"'
    assert answer.headers["X-Linked-Size"] == str(content.size)
    assert urlsplit(answer.headers["Location"]).netloc == urlsplit(running.cdn).netloc
    served = get(answer.headers["Location"])
    assert served.content == content.head
    assert "X-Linked-Size" not in served.headers
    assert content.sha256 not in served.headers["ETag"]  # the CDN's ETag is the hash of something else
    assert get(answer.headers["Location"], Authorization="Bearer x").status_code == 400


def test_xet_is_advertised_on_request_only(hub, small):
    path = "model-00001-of-00002.safetensors"
    plain, xet = hub(small), hub(small, xet=True)
    seen = [get(f"{running.endpoint}/org/small/resolve/main/{path}").headers for running in (plain, xet)]
    assert [("X-Xet-Hash" in headers, "Link" in headers) for headers in seen] == [(False, False), (True, True)]
    [entry] = api(xet).get_paths_info("org/small", [path])
    assert entry.xet_hash == seen[1]["X-Xet-Hash"] != entry.lfs.sha256
    assert api(plain).get_paths_info("org/small", [path])[0].xet_hash is None


def test_small_files_redirect_within_the_hub(hub, small):
    running = hub(small)
    answer = get(f"{running.endpoint}/org/small/resolve/main/config.json")
    location = answer.headers["Location"]
    assert (answer.status_code, location[0]) == (307, "/")
    served = get(running.endpoint + location)
    assert served.json() == {"model_type": "demo"}
    assert served.headers["ETag"] == f'"{small.main.files["config.json"].git_sha1}"'
    assert get(running.endpoint + location, Range="bytes=0-3").status_code == 206
    assert get(running.endpoint + location.replace(small.main.oid, "main")).status_code == 400
    packed = requests.get(running.endpoint + location, headers={"Range": "bytes=0-3"}, timeout=5)
    assert (packed.status_code, packed.headers.get("Content-Length")) == (200, None)
    assert packed.headers["Content-Encoding"] == "gzip"
    assert packed.json() == {"model_type": "demo"}
    raw = get(f"{running.endpoint}/org/small/raw/main/model-00001-of-00002.safetensors").text
    assert small.main.files["model-00001-of-00002.safetensors"].sha256 in raw


def test_signed_urls_expire(hub, small):
    running = hub(small)
    url = cdn_url(running, "org/small", "model-00001-of-00002.safetensors")
    running.expire_urls()
    assert get(url).status_code == 403
    assert b"expired" in get(url).content
    assert get(cdn_url(running, "org/small", "model-00001-of-00002.safetensors")).status_code == 200
    brief = hub(small, cdn_ttl=0.05)
    url = cdn_url(brief, "org/small", "model-00001-of-00002.safetensors")
    time.sleep(0.06)
    assert get(url).status_code == 403


# Access.


def test_who_gets_what(hub, small):
    gated = DemoRepo("org/gated", {"config.json": {}, "model.safetensors": b"x"}, gated="manual")
    private = DemoRepo("org/private", {"config.json": {}}, private=True)
    disabled = DemoRepo("org/off", {"config.json": {}}, disabled=True)
    running = hub(small, gated, private, disabled, DemoRepo("org/gone", missing=True),
                  tokens={"hf_in": ["org/gated", "org/private"], "hf_out": []})  # fmt: skip
    stranger, member, outsider = api(running), api(running, "hf_in"), api(running, "hf_out")
    assert stranger.model_info("org/gated").gated == "manual"
    assert len(list(stranger.list_repo_tree("org/gated"))) == 2

    def download(repo, token, path="config.json", revision="main"):
        return requests.head(hf_hub_url(repo, path, revision=revision, endpoint=running.endpoint), timeout=5,
                             headers={"Authorization": f"Bearer {token}"} if token else {})  # fmt: skip

    for token, status in ((None, 401), ("hf_wrong", 401), ("hf_out", 403)):
        answer = download("org/gated", token)
        assert (answer.status_code, answer.headers["X-Error-Code"]) == (status, "GatedRepo")
    assert download("org/gated", "hf_in").status_code == 307
    assert member.model_info("org/private").id == "org/private"
    for name in ("org/private", "org/gone", "org/never"):
        with pytest.raises(RepositoryNotFoundError):
            outsider.model_info(name)
        with pytest.raises(HfHubHTTPError, match="401"):
            stranger.model_info(name)
    assert stranger.model_info("org/off").disabled
    with pytest.raises(DisabledRepoError):
        stranger.list_repo_commits("org/off")
    with pytest.raises(RevisionNotFoundError):
        stranger.model_info("org/small", revision="nope")
    assert download("org/small", None, path="nope").headers["X-Error-Code"] == "EntryNotFound"


def test_typed_errors_of_huggingface_hub(hub, small, tmp_path):
    gated = DemoRepo("org/gated", {"config.json": {}}, gated="auto")
    where = {"endpoint": hub(small, gated).endpoint, "cache_dir": tmp_path, "token": False}
    with pytest.raises(GatedRepoError):
        hf_hub_download("org/gated", "config.json", **where)
    with pytest.raises(EntryNotFoundError):
        hf_hub_download("org/small", "nope.json", **where)
    with pytest.raises(RevisionNotFoundError):
        hf_hub_download("org/small", "config.json", revision="nope", **where)


def test_renamed_repos_and_other_casings_redirect(hub, small, tmp_path):
    running = hub(small, DemoRepo("org/old", renamed_to="org/small"), DemoRepo("plain", renamed_to="org/small"))
    for name in ("org/old", "ORG/Small", "plain"):
        assert api(running).model_info(name).id == "org/small"
        answer = get(f"{running.endpoint}/{name}/resolve/main/config.json")
        assert (answer.status_code, answer.headers["Location"]) == (307, "/org/small/resolve/main/config.json")
    path = hf_hub_download("org/old", "config.json", endpoint=running.endpoint, cache_dir=tmp_path, token=False)
    assert json.loads(Path(path).read_bytes()) == {"model_type": "demo"}


# Rate limits, latency, counts.


def test_budgets_are_announced_and_kept(hub, small):
    running = hub(small, budgets={"api": 2, "resolvers": 9, "pages": 9}, window=60)
    url = f"{running.endpoint}/api/models/org/small"
    assert get(url).headers["RateLimit"] == '"api";r=1;t=60'
    assert get(url).headers["RateLimit-Policy"] == '"fixed window";"api";q=2;w=60'
    refused = get(url)
    assert refused.status_code == 429
    assert refused.headers["RateLimit"].startswith('"api";r=0;t=')
    assert get(f"{running.endpoint}/org/small/resolve/main/config.json").headers["RateLimit"] == '"resolvers";r=8;t=60'
    running.reset()
    assert get(url).status_code == 200


def test_counts_and_log(hub, small):
    running = hub(small)
    url = cdn_url(running, "org/small", "model-00001-of-00002.safetensors")
    get(url, Range="bytes=0-99")
    get(url, Range="bytes=100-149")
    assert running.counts["cdn"] == (2, 150)
    assert (running.requests_to("hub"), running.requests_to("cdn")) == (1, 2)
    assert [line.range for line in running.log if line.route == "cdn"] == ["bytes=0-99", "bytes=100-149"]


def test_latency(hub, small):
    running = hub(small, latency=0.1)
    began = time.monotonic()
    get(f"{running.endpoint}/api/models/org/small")
    assert time.monotonic() - began >= 0.1


def test_it_ends_with_its_connections(small):
    with DemoHub([small], faults=[Fault(Kind.NEVER, "info")]) as running:
        host = urlsplit(running.endpoint)
        waiting = socket.create_connection((host.hostname, host.port))
        waiting.sendall(b"GET /api/models/org/small HTTP/1.1\r\n\r\n")
    waiting.settimeout(5)
    with contextlib.suppress(ConnectionResetError):
        assert waiting.recv(1) == b""


# Faults.

BODY = bytes(range(256)) * 40


@pytest.fixture
def faulty(hub):
    """The CDN URL of a 10,240-byte file on a Hub with these faults, and the Hub."""

    def start(*faults, **options):
        running = hub(DemoRepo("org/a", {"m.safetensors": BODY, "config.json": {"a": 1}}), **options)
        url = cdn_url(running, "org/a", "m.safetensors")
        running.set_fault(*faults)
        return url, running

    return start


def body_until_trouble(url, seconds=0.3):
    """(bytes received, what ended it) of a plain GET."""
    got = b""
    try:
        with requests.get(url, stream=True, timeout=seconds) as answer:
            for piece in answer.iter_content(4):
                got += piece
    except requests.RequestException as error:
        return got, "timeout" if "timed out" in str(error) else "closed"
    return got, "end"


def test_stall_and_cut(faulty):
    url, running = faulty(Fault(Kind.STALL, "cdn", after_bytes=1000, times=1), Fault(Kind.CUT, "cdn", after_bytes=500))
    got, ended = body_until_trouble(url)
    assert (len(got), ended) == (500, "timeout")  # both strike: the shorter prefix, the open socket
    got, ended = body_until_trouble(url)
    assert (len(got), ended) == (500, "closed")
    running.set_fault()
    assert body_until_trouble(url) == (BODY, "end")


def test_rate(faulty):
    url, _ = faulty(Fault(Kind.RATE, "cdn", bytes_per_second=40_000))
    began = time.monotonic()
    assert get(url).content == BODY
    assert time.monotonic() - began > 0.2


def test_trickle(faulty):
    url, _ = faulty(Fault(Kind.RATE, "cdn", bytes_per_second=1))
    got, _ = body_until_trouble(url, 0.4)
    assert len(got) < 3


def test_never(faulty):
    _, running = faulty(Fault(Kind.NEVER, "info"))
    with pytest.raises(requests.Timeout):
        requests.get(f"{running.endpoint}/api/models/org/a", timeout=0.2)


def test_ranges_gone_wrong(faulty):
    asked = {"Range": "bytes=10-19"}
    url, running = faulty(Fault(Kind.IGNORE_RANGE))
    assert (get(url, **asked).status_code, get(url, **asked).content) == (200, BODY)
    running.set_fault(Fault(Kind.WRONG_RANGE))
    assert get(url, **asked).headers["Content-Range"] == "bytes 11-19/10240"
    running.set_fault(Fault(Kind.SHIFTED))
    answer = get(url, **asked)
    assert (answer.headers["Content-Range"], answer.content) == ("bytes 10-19/10240", BODY[11:21])
    running.set_fault(Fault(Kind.GZIP, "cdn"))
    answer = get(url, **asked)
    assert (answer.status_code, answer.headers["Content-Encoding"], answer.content) == (200, "gzip", BODY)


def test_status_and_redirect(faulty):
    url, running = faulty(Fault(Kind.STATUS, "cdn", status=503, times=2),
                          Fault(Kind.STATUS, "info", status=429, seconds=7))  # fmt: skip
    assert [get(url).status_code for _ in range(3)] == [503, 503, 200]
    limited = get(f"{running.endpoint}/api/models/org/a")
    assert (limited.status_code, limited.headers["RateLimit"]) == (429, '"api";r=0;t=7')
    running.set_fault(Fault(Kind.REDIRECT, "resolve", status=308, location="http://127.0.0.1:9{target}"))
    moved = get(f"{running.endpoint}/org/a/resolve/main/config.json")
    assert (moved.status_code, moved.headers["Location"]) == (308, "http://127.0.0.1:9/org/a/resolve/main/config.json")


def test_flipped_bit_and_headers(faulty, hub):
    url, running = faulty(Fault(Kind.FLIP, "cdn", after_bytes=100, times=1))
    assert get(url, Range="bytes=90-109").content == BODY[90:100] + bytes([BODY[100] ^ 1]) + BODY[101:110]
    assert get(url).content == BODY
    running.set_fault(Fault(Kind.DROP_HEADERS, "cdn", headers=(("Content-Length", ""),)),
                      Fault(Kind.DROP_HEADERS, "resolve", headers=(("X-Repo-Commit", ""),)),
                      Fault(Kind.SET_HEADERS, "tree", headers=(("Link", '<http://127.0.0.1:9{target}>; rel="next"'),)),
                      Fault(Kind.SET_HEADERS, "cache", headers=(("Content-Length", "5"),)))  # fmt: skip
    unsized = get(url)
    assert ("Content-Length" in unsized.headers, unsized.content) == (False, BODY)
    assert "X-Repo-Commit" not in get(f"{running.endpoint}/org/a/resolve/main/config.json").headers
    assert "127.0.0.1:9/api" in get(f"{running.endpoint}/api/models/org/a/tree/main").headers["Link"]


def test_faults_strike_only_where_they_say(faulty):
    url, running = faulty(Fault(Kind.STATUS, "cdn", path="org/b/*"),
                          Fault(Kind.STATUS, "resolve", path="*/config.json"))  # fmt: skip
    assert get(url).status_code == 200
    assert get(f"{running.endpoint}/org/a/resolve/main/config.json").status_code == 503
    assert get(f"{running.endpoint}/org/a/resolve/main/m.safetensors").status_code == 302


def test_connections_are_kept(hub, small):
    running = hub(small)
    where = urlsplit(running.endpoint)
    connection = http.client.HTTPConnection(where.hostname, where.port, timeout=5)
    for _ in range(3):
        connection.request("GET", "/api/models/org/small")
        assert connection.getresponse().read()
        opened = connection.sock
    assert opened is connection.sock


# Mirrors and odd repos.


def test_mirrors_know_resolve_only(hub, small):
    running = hub(small, mirrors=2)
    running.set_fault(Fault(Kind.FLIP, "mirror1", after_bytes=7), Fault(Kind.IGNORE_RANGE, "mirror1"))
    path = "model-00001-of-00002.safetensors"
    good, bad = (f"{url}/org/small/resolve/{small.main.oid}/{path}" for url in running.mirrors)
    content = small.main.files[path].head
    assert get(good).content == content
    assert get(good, Range="bytes=5-9").content == content[5:10]
    assert "X-Repo-Commit" not in get(good).headers
    broken = get(bad, Range="bytes=0-9")
    assert (broken.status_code, len(broken.content), broken.content == content) == (200, len(content), False)
    assert get(f"{running.mirrors[0]}/api/models/org/small").status_code == 404


def test_main_moves_and_old_commits_stay(hub, small):
    running = hub(small)
    before = small.main.oid
    after = small.push({"config.json": {"model_type": "new"}, "tokenizer.json": None})
    assert before != after
    assert api(running).model_info("org/small").sha == after
    old = get(f"{running.endpoint}/org/small/resolve/{before}/config.json")
    assert get(running.endpoint + old.headers["Location"]).json() == {"model_type": "demo"}
    assert get(f"{running.endpoint}/org/small/resolve/main/tokenizer.json").status_code == 404


def test_a_tree_may_be_hostile(hub):
    files = {"../x": "escapes", "a.txt": "a", "A.txt": "A", "empty": "", "one.bin": b"same", "two.bin": b"same"}
    running = hub(DemoRepo("org/odd", files))
    tree = get(f"{running.endpoint}/api/models/org/odd/tree/main?recursive=true").json()
    assert {e["path"] for e in tree if e["type"] == "file"} == set(files)
    assert len({e["lfs"]["oid"] for e in tree if "lfs" in e}) == 1
