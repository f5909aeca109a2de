"""What the client makes of a Hub's answers: names, trees, files, listings, and every way of saying no."""

import hashlib
import json
import shutil
import ssl
import subprocess

import pytest
from loopback import Loopback, ranged, reply

from formulas.errors import AccessDenied, DigestMismatch, HubMisbehaved, HubUnavailable, NotFound
from screen.hub import Hub, connect
from screen.repo import Blob, Entry, Revision
from screen.source import digest
from screen.transport import Cost
from screen.wire import Expired, Limits

QUICK = Limits(first_byte_seconds=1, stall_seconds=1, call_seconds=2, retries=1, backoff_seconds=0.01)
COMMIT, OTHER = "a" * 40, "b" * 40


def send(value, headers=None):
    return reply(200, json.dumps(value).encode(), headers)


def hub(server, **options):
    return Hub(server.url, limits=QUICK, **options)


# Names


def test_resolve_reads_the_page_in_one_request():
    page = {
        "_id": "64", "id": "org/name", "sha": COMMIT, "gated": "manual", "private": None, "disabled": False,
        "lastModified": "2026-09-01T10:00:00.000Z", "createdAt": "2026-08-01T10:00:00.000Z", "tags": ["license:mit"],
        "cardData": {"license": "mit"}, "library_name": "transformers", "pipeline_tag": "text-generation",
        "downloads": 5, "likes": 2, "securityRepoStatus": {"scansDone": True, "filesWithIssues": []}, "siblings": [{}],
    }  # fmt: skip
    with Loopback(lambda r: send(page)) as server:
        cost = Cost()
        found = hub(server).resolve("org/name", "refs/pr/1", cost)
        assert server.requests[0].target == "/api/models/org/name/revision/refs%2Fpr%2F1?securityStatus=true"
    assert (found.revision, found.canonical, cost.requests) == (Revision("refs/pr/1", COMMIT), "org/name", 1)
    info = found.info
    assert (info.identity, info.gated, info.private, info.downloads) == ("64", "manual", False, 5)
    assert info.card == {"license": "mit"}
    assert info.last_modified.isoformat() == "2026-09-01T10:00:00+00:00"
    assert info.security == {"scansDone": True, "filesWithIssues": []}


def test_a_bare_page_leaves_the_rest_unknown():
    with Loopback(lambda r: send({"id": "org/name", "sha": COMMIT, "cardData": None, "tags": None})) as server:
        info = hub(server).resolve("org/name", "main", Cost()).info
    assert (info.card, info.tags, info.last_modified, info.security, info.likes) == ({}, (), None, None, None)


def test_renamed_repos_keep_their_new_name():
    def answer(request):
        if request.path.startswith("/api/models/old/name"):
            return reply(307, b"", {"Location": request.target.replace("old/name", "new/name")})
        return send({"id": "new/name", "sha": COMMIT})

    with Loopback(answer) as server:
        cost = Cost()
        found = hub(server, token="hf_x").resolve("old/name", "main", cost)
        assert found.canonical == "new/name"
        assert cost.requests == 2
        assert all("authorization" in r.headers for r in server.requests)


@pytest.mark.parametrize(
    "body",
    [b"<html>", b"[]", b"{}", b'{"id":"x"}', b'{"id":"x","sha":"main"}', b'{"id":7,"sha":"%s"}' % COMMIT.encode(), b"",
     b'{"id":"x","sha":"%s","downloads":"many"}' % COMMIT.encode(), b'{"id":"x","sha":null}', b"\xff{"],
)  # fmt: skip
def test_answers_that_are_no_page_are_misbehaviour(body):
    with Loopback(lambda r: reply(200, body)) as server, pytest.raises(HubMisbehaved):
        hub(server).resolve("org/name", "main", Cost())


def test_a_commit_must_resolve_to_itself():
    with Loopback(lambda r: send({"id": "org/name", "sha": OTHER})) as server, pytest.raises(HubMisbehaved):
        hub(server).resolve("org/name", COMMIT, Cost())


@pytest.mark.parametrize(
    ("status", "headers", "body", "error", "code", "hint"),
    [
        (401, {}, b'{"error":"Invalid username or password."}', NotFound, "repo_not_found", "HF_TOKEN"),
        (404, {"X-Error-Code": "RepoNotFound"}, b"", NotFound, "repo_not_found", "HF_TOKEN"),
        (401, {"X-Error-Message": "Invalid credentials in header"}, b"", AccessDenied, "bad_token", "log in"),
        (404, {"X-Error-Code": "RevisionNotFound"}, b"", NotFound, "revision_not_found", "org/name"),
        (404, {"X-Error-Code": "EntryNotFound"}, b"", NotFound, "entry_not_found", "org/name"),
        (401, {"X-Error-Code": "GatedRepo"}, b"", AccessDenied, "gated", "org/name"),
        (403, {"X-Error-Code": "GatedRepo"}, b"", AccessDenied, "gated", "HF_TOKEN"),
        (403, {"X-Error-Message": "Access to this resource is disabled."}, b"", AccessDenied, "disabled", "org/name"),
        (403, {}, b"no", AccessDenied, "forbidden", "org/name"),
        (404, {}, b"<html>", NotFound, "not_found", None),
        (400, {}, b'{"error":["x"]}', HubMisbehaved, "refused", None),
        (204, {}, b"", HubMisbehaved, "refused", None),
        (500, {}, b"", HubUnavailable, "server_error", None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("call", ["resolve", "tree", "file", "range"])
def test_every_refusal_has_its_error(call, status, headers, body, error, code, hint):
    with Loopback(lambda r: reply(status, body, headers)) as server:
        client, entry = hub(server), Entry("config.json", Blob("unknown", 2))
        calls = {
            "resolve": lambda: client.resolve("org/name", "main", Cost()),
            "tree": lambda: client.tree("org/name", COMMIT, Cost()),
            "file": lambda: client.read_file("org/name", COMMIT, entry, Cost(), 10),
            "range": lambda: client.read_range("org/name", COMMIT, entry, 0, 2, Cost()),
        }
        with pytest.raises(error) as caught:
            calls[call]()
        assert caught.value.code == code
        assert caught.value.exit_code == 4
        assert hint is None or hint in caught.value.hint
        assert "org/name" in caught.value.message
        assert len(server.requests) == (2 if status == 500 else 1)


def test_a_403_from_elsewhere_is_an_expired_address_not_a_closed_door():
    with Loopback(lambda r: reply(403, b"<Error/>")) as cdn:
        moved = reply(302, b"", {"Location": f"{cdn.url}/x?sig=SECRET"})
        with Loopback(lambda r: moved) as server, pytest.raises(Expired) as caught:
            hub(server).read_file("org/name", COMMIT, Entry("a", Blob("unknown", 2)), Cost(), 10)
    assert "SECRET" not in caught.value.message


# Trees


def file(path, size=1, **more):
    return {"type": "file", "path": path, "size": size, "oid": "c" * 40} | more


def test_tree_follows_pages_at_its_own_endpoint():
    """The next page's link names another host and scheme; nothing may go there."""

    def answer(request):
        if "cursor" not in request.query:
            following = f'<https://elsewhere.invalid{request.target}&cursor=Zg%3D%3D>; rel="next"'
            return send([file("a"), {"type": "directory", "path": "d", "size": 0, "oid": OTHER}], {"Link": following})
        assert request.query["cursor"] == ["Zg=="]
        return send([file("d/b", 130, lfs={"oid": "d" * 64, "size": 9, "pointerSize": 130})])

    with Loopback(answer) as server:
        cost = Cost()
        tree = hub(server).tree("org/name", COMMIT, cost)
        assert cost.requests == len(server.requests) == 2
        assert server.requests[1].query["recursive"] == ["true"]
    assert tree.entries == (Entry("a", Blob("git-sha1:" + "c" * 40, 1)), Entry("d/b", Blob("sha256:" + "d" * 64, 9)))


def test_endpoints_below_a_path_keep_it():
    def answer(request):
        assert request.path.startswith("/hf/api/models/org/name/tree/")
        link = {"Link": f'<https://huggingface.co/api/models/org/name/tree/{COMMIT}?cursor=x>; rel="next"'}
        return send([file("b")]) if "cursor" in request.query else send([file("a")], link)

    with Loopback(answer) as server:
        assert len(Hub(server.url + "/hf/", limits=QUICK).tree("org/name", COMMIT, Cost()).entries) == 2
        assert len(server.requests) == 2


def test_a_page_that_comes_again_is_noticed():
    with Loopback(lambda r: send([file("a")], {"Link": f'<{r.target}&cursor=x>; rel="next"'})) as server:
        with pytest.raises(HubMisbehaved, match="cursor"):
            hub(server).tree("org/name", COMMIT, Cost())
        assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("body", "link"),
    [(b'{"error":1}', None), (b"[1]", None), (b"nope", None), (b'[{"type":"file","path":"../x","size":1}]', None),
     (b'[{"type":"file","path":"x","size":-1}]', None), (b"[]", "</elsewhere>; rel=next")],
)  # fmt: skip
def test_odd_trees_are_misbehaviour(body, link):
    with Loopback(lambda r: reply(200, body, {"Link": link} if link else {})) as server, pytest.raises(HubMisbehaved):
        hub(server).tree("org/name", COMMIT, Cost())


def test_listing_pages_until_enough():
    def answer(request):
        at = int(request.query.get("cursor", ["0"])[0])
        items = [{"id": f"org/m{n}", "tags": []} for n in range(at, at + 3)]
        return send(items, {"Link": f'<https://huggingface.co/api/models?search=q&cursor={at + 3}>; rel="next"'})

    with Loopback(answer) as server:
        found = hub(server).models(
            search="q w", author="org", filters=("base_model:quantized:a/b", "x"), sort="downloads", limit=5,
            cost=Cost(),
        )  # fmt: skip
        assert [info.id for info in found] == [f"org/m{n}" for n in range(5)]
        assert len(server.requests) == 2
        assert server.requests[0].query == {
            "search": ["q w"], "author": ["org"], "filter": ["base_model:quantized:a/b", "x"], "sort": ["downloads"],
            "limit": ["5"],
        }  # fmt: skip


# Files

SMALL = b'{"model_type": "qwen3"}'


@pytest.mark.parametrize("oid", [digest(SMALL, "git-sha1:"), digest(SMALL, "sha256:"), "unknown"])
def test_small_files_are_checked_against_the_tree(oid):
    entry = Entry("sub dir/config #1.json", Blob(oid, len(SMALL)))
    bodies = [SMALL]
    with Loopback(lambda r: reply(200, bodies[0])) as server:
        client = hub(server)
        assert client.read_file("org/name", COMMIT, entry, Cost(), 100) == SMALL
        assert server.requests[0].target == f"/org/name/resolve/{COMMIT}/sub%20dir/config%20%231.json"
        wrong = {SMALL[:-1]: DigestMismatch, SMALL + b" ": HubMisbehaved}
        if oid != "unknown":
            wrong[b"x" * len(SMALL)] = DigestMismatch
        for body, error in wrong.items():
            bodies[0] = body
            with pytest.raises(error):
                client.read_file("org/name", COMMIT, entry, Cost(), 100)


def test_a_file_over_the_limit_is_not_asked_for():
    with Loopback(lambda r: reply(200, SMALL)) as server:
        with pytest.raises(HubMisbehaved):
            hub(server).read_file("org/name", COMMIT, Entry("a", Blob("unknown", 11)), Cost(), 10)
        assert not server.requests


def test_empty_files_and_empty_ranges():
    empty = Entry("empty", Blob(digest(b"", "git-sha1:"), 0))
    assert empty.blob.oid == "git-sha1:e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"
    with Loopback(lambda r: reply(200)) as server:
        assert hub(server).read_file("org/name", COMMIT, empty, Cost(), 10) == b""
        assert hub(server).read_range("org/name", COMMIT, empty, 0, 0, Cost()) == b""
        assert len(server.requests) == 1


def test_digests_are_gits_and_sha256s():
    assert digest(b"Hello, World!", "git-sha1:x") == "git-sha1:b45ef6fec89518d314f546fd6c3025367b721684"
    assert digest(b"x", "sha256:") == "sha256:" + hashlib.sha256(b"x").hexdigest()


# The one-request header route


@pytest.mark.parametrize(
    ("requested", "heads", "served", "requests"),
    [
        ("main", [COMMIT], True, 2),
        (COMMIT, [COMMIT, COMMIT], True, 3),
        ("main", [OTHER], None, 2),
        (COMMIT, [OTHER], None, 1),
        (COMMIT, [COMMIT, OTHER], None, 3),
    ],
    ids=["main", "commit-of-main", "main-moved", "other-commit", "moved-meanwhile"],
)
def test_one_request_route_is_used_only_for_what_main_is(requested, heads, served, requests):
    answers = list(heads)
    body = {"index": {"metadata": {}}, "headers": {"a.safetensors": {}}}

    def answer(request):
        if "safetensors-metadata" in request.path:
            return send(body)
        assert request.query["expand[]"] == ["sha"]
        return send({"_id": "1", "id": "org/name", "sha": answers.pop(0)})

    with Loopback(answer) as server:
        found = hub(server).metadata_in_one("org/name", Revision(requested, COMMIT), "index.json", Cost())
        assert (json.loads(found) if found else None) == (body if served else None)
        assert len(server.requests) == requests


@pytest.mark.parametrize(
    "script", [reply(404), reply(400, b"{}")]
)
def test_where_the_route_is_not_served_the_answer_is_none(script):
    def answer(request):
        return script if "safetensors-metadata" in request.path else send({"id": "org/name", "sha": COMMIT})

    with Loopback(answer) as server:
        assert hub(server).metadata_in_one("org/name", Revision("main", COMMIT), "i.json", Cost()) is None


# The environment


def test_endpoint_and_token_come_from_the_usual_places(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1/")
    monkeypatch.setenv("HF_TOKEN", "hf_env")
    with Loopback(lambda r: send({"id": "o/n", "sha": COMMIT})) as server:
        assert connect(None, None).endpoint == "http://127.0.0.1:1"
        connect(server.url, None).resolve("o/n", "main", Cost())
        connect(server.url, "hf_given").resolve("o/n", "main", Cost())
        connect(server.url, "").resolve("o/n", "main", Cost())
        assert [r.headers.get("authorization") for r in server.requests] == ["Bearer hf_env", "Bearer hf_given", None]
    monkeypatch.delenv("HF_ENDPOINT")
    assert connect(None, "").endpoint == "https://huggingface.co"


def test_proxies_and_their_exceptions_are_honoured(monkeypatch):
    with Loopback(lambda r: send({"id": "o/n", "sha": COMMIT})) as proxy:
        for variable in ("http_proxy", "HTTP_PROXY"):
            monkeypatch.setenv(variable, proxy.url.replace("//", "//me:pw@"))
        for variable in ("no_proxy", "NO_PROXY"):
            monkeypatch.setenv(variable, "")
        Hub("http://hub.invalid", limits=QUICK).resolve("o/n", "main", Cost())
        assert proxy.requests[0].target.startswith("http://hub.invalid/api/models/o/n/")
        assert proxy.requests[0].headers["proxy-authorization"] == "Basic bWU6cHc="
        with Loopback(lambda r: send({"id": "o/n", "sha": COMMIT})) as server:
            for variable in ("no_proxy", "NO_PROXY"):
                monkeypatch.setenv(variable, "127.0.0.1")
            hub(server).resolve("o/n", "main", Cost())
            assert len(server.requests) == 1
        assert len(proxy.requests) == 1


def test_proxies_are_given_up_in_time(monkeypatch):
    """Deadlines hold through a proxy too."""
    with Loopback(lambda r: [60.0]) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        monkeypatch.setenv("no_proxy", "")
        with pytest.raises(HubUnavailable) as caught:
            Hub("http://hub.invalid", limits=QUICK).resolve("o/n", "main", Cost())
        assert caught.value.code == "stalled"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl program to make a certificate")
def test_certificates_are_checked_against_the_users_bundle(tmp_path, monkeypatch):
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    data = bytes(300_000)

    def answer(request):
        return ranged(data, request) if request.span else [60.0]

    with Loopback(answer, lambda connection: context.wrap_socket(connection, server_side=True)) as server:
        url = server.url.replace("http:", "https:")
        entry = Entry("a", Blob("unknown", len(data)))
        with pytest.raises(HubUnavailable) as caught:
            Hub(url, limits=QUICK).read_range("o/n", COMMIT, entry, 0, 10, Cost())
        assert caught.value.code == "tls"
        assert "REQUESTS_CA_BUNDLE" in caught.value.hint
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(cert))
        assert Hub(url, limits=QUICK).read_range("o/n", COMMIT, entry, 5, len(data), Cost()) == data[5:]
        with pytest.raises(HubUnavailable):
            Hub(url, limits=QUICK).resolve("o/n", "main", Cost())
