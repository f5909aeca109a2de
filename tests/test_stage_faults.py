"""Every fault of a Hub, a CDN or a mirror that was publicly reported ends well, or in the documented exit code."""

from __future__ import annotations

import threading

import pytest
from stagerun import assert_blobs_true, assert_staged, run_stage, safetensors_bytes, small_repo

from screen.demofaults import Fault, Kind
from screen.demorepo import DemoRepo

SIZE = 3 << 20
BIG = "*00001-of*"  # the file faults strike


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("CKPT_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    return tmp_path / "store"


@pytest.fixture
def stage(store, monkeypatch, capsys):
    """Runs stage against a Hub: `stage(hub, *arguments)`."""

    def run(hub, *args):
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        return run_stage(capsys, *args)

    return run


def total(repo: DemoRepo) -> int:
    return sum(content.size for content in repo.main.files.values())


ALONE = {
    "stall once": [Fault(Kind.STALL, "cdn", BIG, times=2, after_bytes=100_000)],
    "stall often": [Fault(Kind.STALL, "cdn", BIG, times=8, after_bytes=120_000)],
    "cut every 200 kB": [Fault(Kind.CUT, "cdn", BIG, after_bytes=200_000)],
    "503 in bursts": [Fault(Kind.STATUS, "*", "*", times=3, status=503)],
    "500 from the CDN": [Fault(Kind.STATUS, "cdn", "*", times=3, status=500)],
    "429 without a word": [Fault(Kind.STATUS, "resolve", "*", times=1, status=429)],
    "429 with t": [Fault(Kind.STATUS, "resolve", "*", times=2, status=429, seconds=1)],
    "range ignored once": [Fault(Kind.IGNORE_RANGE, "cdn", BIG, times=1)],
    "range ignored always": [Fault(Kind.IGNORE_RANGE, "cdn", "*")],
    "wrong range once": [Fault(Kind.WRONG_RANGE, "cdn", BIG, times=2)],
    "shifted bytes once": [Fault(Kind.SHIFTED, "cdn", BIG, times=1)],
    "flipped bit once": [Fault(Kind.FLIP, "cdn", BIG, times=1, after_bytes=100)],
    "gzip twice": [Fault(Kind.GZIP, "cdn", BIG, times=2)],
    "no Content-Length": [Fault(Kind.DROP_HEADERS, "cdn", "*", headers=(("Content-Length", ""),))],
    "no X-Repo-Commit": [Fault(Kind.DROP_HEADERS, "resolve", "*", headers=(("X-Repo-Commit", ""), ("ETag", "")))],
    "slow first answers": [Fault(Kind.SLOW, "*", "*", times=4, seconds=0.3)],
    "403 from the CDN once": [Fault(Kind.STATUS, "cdn", BIG, times=1, status=403)],
    "one connection trickles": [Fault(Kind.RATE, "cdn", BIG, times=1, bytes_per_second=20)],
}  # fmt: skip


@pytest.mark.parametrize("faults", ALONE.values(), ids=ALONE.keys())
def test_a_faulty_hub_alone_is_enough(hub, stage, store, faults):
    repo = small_repo(size=SIZE)
    ran = stage(hub(repo, faults=faults), repo.name)
    assert ran.code == 0, ran.stderr
    assert_staged(store, repo)
    assert ran.seconds < 40


def test_what_arrived_before_a_cut_is_kept(hub, stage, store):
    repo = small_repo(size=SIZE)
    demo = hub(repo, faults=[Fault(Kind.CUT, "cdn", BIG, after_bytes=150_000)])
    ran = stage(demo, repo.name)
    assert ran.code == 0
    assert ran.last["bytes_fetched"] <= total(repo) * 1.05


HOPELESS = {
    "API never answers": ([Fault(Kind.NEVER, "info")], 4, "stalled"),
    "tree never answers": ([Fault(Kind.NEVER, "tree")], 4, "stalled"),
    "403 everywhere": ([Fault(Kind.STATUS, "resolve", "*", status=403)], 4, "forbidden"),
    "gzip always": ([Fault(Kind.GZIP, "cdn", BIG)], 4, "wrong_range"),
    "wrong range always": ([Fault(Kind.WRONG_RANGE, "cdn", BIG)], 4, "wrong_range"),
    "1 byte a second": ([Fault(Kind.RATE, "cdn", BIG, bytes_per_second=1)], 4, "unavailable"),
    "503 always": ([Fault(Kind.STATUS, "cdn", BIG, status=503)], 4, "unavailable"),
    "wrong bytes always": ([Fault(Kind.FLIP, "cdn", BIG, after_bytes=100)], 4, "digest_mismatch"),
    "429 for an hour": ([Fault(Kind.STATUS, "resolve", BIG, status=429, seconds=3600)], 4, "unavailable"),
}


@pytest.mark.parametrize(("faults", "code", "word"), HOPELESS.values(), ids=HOPELESS.keys())
def test_a_hopeless_hub_ends_with_the_documented_code_and_the_rest_kept(hub, stage, store, faults, code, word):
    repo = small_repo(size=SIZE)
    demo = hub(repo, faults=faults)
    ran = stage(demo, repo.name)
    assert ran.code == code
    assert f'"code": "{word}"' in ran.stderr
    assert ran.seconds < 60
    assert store.is_dir()
    assert_blobs_true(store)
    assert not list((store / "manifests").rglob("*.json")), "no manifest for what is not complete"
    demo.set_fault()
    again = stage(demo, repo.name)
    assert again.code == 0
    assert_staged(store, repo)


MIRRORED = {
    "stalls": [Fault(Kind.STALL, "cdn", BIG, after_bytes=50_000)],
    "1 byte a second": [Fault(Kind.RATE, "cdn", BIG, bytes_per_second=1)],
    "403 everywhere": [Fault(Kind.STATUS, "resolve", "*", status=403)],
    "gzip": [Fault(Kind.GZIP, "cdn", BIG)],
    "wrong range": [Fault(Kind.WRONG_RANGE, "cdn", BIG)],
    "503": [Fault(Kind.STATUS, "cdn", BIG, status=503)],
    "corrupt": [Fault(Kind.FLIP, "cdn", BIG, after_bytes=100)],
    "mirror corrupt": [Fault(Kind.FLIP, "mirror0", BIG, after_bytes=2_000_000)],
    "mirror lacks the file": [Fault(Kind.STATUS, "mirror0", BIG, status=404)],
    "mirror states another size": [Fault(Kind.SET_HEADERS, "mirror0", headers=(("Content-Range", "bytes 0-9/10"),))],
    "mirror states another length": [Fault(Kind.SET_HEADERS, "mirror0", headers=(("Content-Length", "7"),))],
    "mirror without ranges": [Fault(Kind.IGNORE_RANGE, "mirror0", "*")],
    "only the mirror works, without ranges": [Fault(Kind.IGNORE_RANGE, "mirror0", "*"),
                                              Fault(Kind.STATUS, "cdn", "*", status=503)],
    "mirror never answers": [Fault(Kind.NEVER, "mirror0", "*")],
}  # fmt: skip


@pytest.mark.parametrize("faults", MIRRORED.values(), ids=MIRRORED.keys())
def test_one_good_source_of_two_is_enough(hub, stage, store, faults):
    repo = small_repo(size=SIZE)
    demo = hub(repo, faults=faults, mirrors=1)
    ran = stage(demo, repo.name, "--mirror", demo.mirrors[0])
    assert ran.code == 0, ran.stderr
    assert_staged(store, repo)
    assert ran.seconds < 40
    assert {line.authorization for line in demo.log if line.origin != "hub"} == {None}, "the token stays at the Hub"
    assert {line.route for line in demo.log if line.origin == "mirror0"} <= {"mirror0"}, "no metadata from a mirror"


def test_a_mirror_that_sends_everyone_back_to_the_hub(hub, stage, store):
    repo = small_repo(size=SIZE)
    demo = hub(repo, mirrors=1)
    demo.set_fault(Fault(Kind.REDIRECT, "mirror0", "*", status=308, location=demo.endpoint + "{target}"))
    ran = stage(demo, repo.name, "--mirror", demo.mirrors[0])
    assert ran.code == 0, ran.stderr
    assert_staged(store, repo)
    assert {line.authorization for line in demo.log if line.origin != "hub"} == {None}


def test_the_mirror_with_wrong_bytes_is_named(hub, stage, store):
    repo = DemoRepo("org/one", {"model.safetensors": safetensors_bytes(SIZE)})
    demo = hub(repo, mirrors=2)
    demo.set_fault(Fault(Kind.FLIP, "mirror1", after_bytes=SIZE // 2), Fault(Kind.RATE, "cdn", bytes_per_second=2e5))
    ran = stage(demo, repo.name, "--mirror", demo.mirrors[1])
    assert ran.code == 0, ran.stderr
    assert_staged(store, repo)
    assert any(demo.mirrors[1] in event["sources"] for event in ran.of("quarantined"))
    wrong = [event["url"] for event in ran.of("source") if event["state"] == "wrong bytes"]
    assert wrong == [demo.mirrors[1]]


def test_a_throttled_origin_is_left_for_a_fast_mirror(hub, stage, store):
    repo = small_repo(size=32 << 20)
    demo = hub(repo, mirrors=1, faults=[Fault(Kind.RATE, "cdn", "*", bytes_per_second=100_000)])
    ran = stage(demo, repo.name, "--mirror", demo.mirrors[0])
    assert ran.code == 0
    assert_staged(store, repo)
    assert ran.seconds < 40, "32 MiB at 100 kB/s a connection would take longer"
    assert ran.last["bytes_fetched"] <= 1.05 * total(repo)


def test_a_signed_address_that_expires_is_asked_for_again(hub, stage, store):
    repo = small_repo(size=SIZE)
    demo = hub(repo, cdn_ttl=0.5, faults=[Fault(Kind.RATE, "cdn", BIG, bytes_per_second=700_000)])
    ran = stage(demo, repo.name, "--connections=2")
    assert ran.code == 0
    assert_staged(store, repo)
    assert any(line.status == 403 for line in demo.log if line.origin == "cdn")


def test_a_branch_that_moves_while_it_is_downloaded(hub, stage, store):
    repo = small_repo(size=SIZE)
    demo = hub(repo, faults=[Fault(Kind.RATE, "cdn", BIG, bytes_per_second=1_500_000)])
    first = repo.main.oid
    mover = threading.Timer(0.4, lambda: repo.push({"config.json": {"model_type": "other"}}))
    mover.start()
    ran = stage(demo, repo.name, "--connections=1")
    mover.join()
    assert ran.code == 0
    assert ran.last["commit"] == first != repo.main.oid
    assert_staged(store, repo, first)


def test_names_that_escape_are_refused_before_anything_is_written(hub, stage, store, tmp_path):
    repo = DemoRepo("org/evil", {"../x": b"evil", "config.json": {}})
    ran = stage(hub(repo), repo.name)
    assert ran.code == 4
    assert "escape" in ran.stderr
    assert not list((store / "blobs").rglob("*.*"))
    assert not (tmp_path / "x").exists()


def test_names_that_differ_by_case_are_two_files_where_the_disk_can(hub, stage, store):
    repo = DemoRepo("org/cases", {"README.md": "one", "readme.md": "two", "Sub/a": "3", "sub/A": "4"})
    ran = stage(hub(repo), repo.name)
    assert ran.code == 0
    assert_staged(store, repo)


def test_a_blob_twice_in_one_repo_is_fetched_once(hub, stage, store):
    data = safetensors_bytes(SIZE)
    repo = DemoRepo("org/twice", {"a.safetensors": data, "b/c.safetensors": data})
    ran = stage(hub(repo), repo.name)
    assert ran.code == 0
    assert ran.last["bytes_fetched"] == len(data)
    assert_staged(store, repo)


def test_a_gated_repo_says_where_to_ask(hub, stage, store):
    repo = small_repo(gated="auto")
    ran = stage(hub(repo), repo.name)
    assert ran.code == 4
    assert '"code": "gated"' in ran.stderr
    assert repo.name in ran.stderr


def test_a_gated_repo_comes_from_a_mirror_that_has_it(hub, stage, store):
    repo = small_repo(gated="auto")
    demo = hub(repo, mirrors=1)
    ran = stage(demo, repo.name, "--mirror", demo.mirrors[0])
    assert ran.code == 0
    assert_staged(store, repo)
