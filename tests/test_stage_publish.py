"""What a staged snapshot is good for: folders, the Hugging Face cache, other nodes, less disk, and being checked."""

from __future__ import annotations

import errno
import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from stagerun import assert_staged, run_stage, safetensors_bytes, small_repo

from formulas import console
from screen.demofaults import Fault, Kind
from screen.demorepo import DemoRepo
from stage import execute
from stage.cli import app
from stage.disk import folds_case
from stage.layout import reflink
from stage.serve import Mirror
from stage.store import Store

OLAH = Path(__file__).parent.parent / ".venv-olah" / "bin" / "olah-cli"


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("CKPT_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hf"))
    return tmp_path / "store"


@pytest.fixture
def stage(store, monkeypatch, capsys):
    def run(hub, *args):
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        return run_stage(capsys, *args)

    return run


@pytest.fixture
def command(store, capsys):
    """Runs another command of `stage`: (exit code, its JSON lines)."""

    def run(*args):
        capsys.readouterr()
        code = console.run(app, list(map(str, args)))
        return code, [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]

    return run


def weights(repo: DemoRepo, path: str = "model-00001-of-00002.safetensors") -> bytes:
    return repo.main.files[path].head


# Folders


def test_to_lays_out_hard_links(hub, stage, store, tmp_path):
    repo = small_repo()
    ran = stage(hub(repo), repo.name, "--to", tmp_path / "to")
    assert ran.code == 0
    assert [event["how"] for event in ran.of("laid out")] == ["hard link"]
    for path, content in repo.main.files.items():
        placed = tmp_path / "to" / path
        assert placed.read_bytes() == content.head
        assert placed.stat().st_nlink >= 3, "blob, snapshot and folder are one file"


def test_a_writable_copy_can_be_edited_without_harm(hub, stage, store, command, tmp_path):
    repo, to = small_repo(), tmp_path / "to"
    demo = hub(repo)
    ran = stage(demo, repo.name, "--to", to, "--copy")
    assert ran.code == 0
    assert ran.of("laid out")[0]["how"] in ("copy", "reflink")
    (to / "config.json").write_text("mine")
    assert_staged(store, repo)
    code, [found] = command("verify", "--json")
    assert code == 3, "the manifest promised this folder too"
    assert found["differences"] == [{"path": str(to / "config.json"), "because": "expected 27 bytes, got 4"}]
    assert stage(demo, repo.name, "--to", to, "--copy").code == 0
    assert command("verify", "--json")[0] == 0


def test_another_file_system_gets_copies(hub, stage, store, tmp_path):
    repo, to = small_repo(), Path("/dev/shm") / f"stage-{os.getpid()}"
    if not os.access(to.parent, os.W_OK) or to.parent.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("one file system only")
    try:
        ran = stage(hub(repo), repo.name, "--to", to)
        assert ran.code == 0
        assert ran.of("laid out")[0]["how"] == "copy"
        assert (to / "model-00001-of-00002.safetensors").read_bytes() == weights(repo)
    finally:
        subprocess.run(["rm", "-rf", str(to)], check=True)


def test_a_reflink_where_the_disk_has_them(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 8192)
    try:
        reflink(tmp_path / "a", tmp_path / "b")
    except OSError as error:
        pytest.skip(f"no reflinks on this file system: {error.strerror}")
    assert (tmp_path / "b").read_bytes() == b"x" * 8192


def test_case_is_told_apart_here(tmp_path):
    (tmp_path / "A").touch()
    assert folds_case(tmp_path) == (tmp_path / "a").exists()


# The Hugging Face cache

OFFLINE = """
import sys
from huggingface_hub import hf_hub_download, snapshot_download, scan_cache_dir
from safetensors import safe_open
by_branch = snapshot_download(sys.argv[1], local_files_only=True)
by_commit = snapshot_download(sys.argv[1], revision=sys.argv[2])
assert by_branch == by_commit, (by_branch, by_commit)
with safe_open(hf_hub_download(sys.argv[1], "model-00001-of-00002.safetensors"), "np") as file:
    assert file.get_tensor("layer.3.weight").nbytes == file.get_slice("layer.0.weight").get_shape()[0]
assert not scan_cache_dir().warnings
"""


def test_huggingface_hub_reads_the_published_cache_offline(hub, stage, store, tmp_path):
    repo = small_repo()
    assert stage(hub(repo), repo.name, "--hf-cache").code == 0
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:1"}
    argv = [sys.executable, "-c", OFFLINE, repo.name, repo.main.oid]
    ran = subprocess.run(argv, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    blob = tmp_path / "hf/models--org--small/blobs" / repo.main.files["model-00001-of-00002.safetensors"].sha256
    assert blob.stat().st_nlink >= 3, "the cache takes no space of its own"


def test_a_wrong_blob_in_the_cache_is_replaced(hub, stage, store, tmp_path):
    repo = small_repo()
    content = repo.main.files["model-00001-of-00002.safetensors"]
    blob = tmp_path / "hf/models--org--small/blobs" / content.sha256
    blob.parent.mkdir(parents=True)
    blob.write_bytes(bytes(content.size))
    ran = stage(hub(repo), repo.name, "--hf-cache")
    assert ran.code == 0
    assert ran.last["bytes_fetched"] == sum(c.size for c in repo.main.files.values())
    assert blob.read_bytes() == content.head


# Bytes that are here already


def test_blobs_of_the_cache_are_linked_after_their_digest_was_taken(hub, stage, store, tmp_path):
    repo = small_repo()
    for content in repo.main.files.values():
        blob = tmp_path / "hf/models--org--other/blobs" / content.sha256
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content.head)
    ran = stage(hub(repo), repo.name)
    assert ran.code == 0
    assert ran.last["bytes_fetched"] == sum(c.size for p, c in repo.main.files.items() if not p.endswith("safetensors"))
    assert_staged(store, repo)
    assert all(event["how"].startswith("hard link of") for event in ran.of("file") if "safetensors" in event["path"])


@pytest.mark.parametrize("wrong", [False, True], ids=["true bytes", "same size, other bytes"])
def test_a_folder_named_by_the_user(hub, stage, store, tmp_path, wrong):
    repo = small_repo()
    folder = tmp_path / "old" / "checkpoint"
    folder.mkdir(parents=True)
    for path, content in repo.main.files.items():
        (folder / path.replace("/", "_")).write_bytes(bytes(content.size) if wrong else content.head)
    ran = stage(hub(repo), repo.name, "--reuse", tmp_path / "old")
    assert ran.code == 0
    total = sum(c.size for c in repo.main.files.values())
    assert ran.last["bytes_fetched"] == (total if wrong else 0)
    assert_staged(store, repo)
    (folder / "config.json").write_bytes(b"edited in place later")
    assert_staged(store, repo)


def test_two_repos_with_the_same_files_take_the_space_once(hub, stage, store, command):
    files = {f"model-{n:05}-of-00206.safetensors": safetensors_bytes(400, n) for n in range(206)}
    first = DemoRepo("org/first", files | {"config.json": {}})
    second = DemoRepo("other/second", files | {"config.json": {}})
    demo = hub(first, second)
    ran = stage(demo, first.name)
    assert (ran.code, ran.last["files"]) == (0, 207)
    again = stage(demo, second.name)
    assert (again.code, again.last["bytes_fetched"], again.last["files"]) == (0, 0, 207)
    assert_staged(store, first)
    assert_staged(store, second)
    assert len(list((store / "blobs").glob("*/*/*"))) == 207
    _, rows = command("ls", "--json")
    assert [(row["repo"], row["own_bytes"], row["refs"]) for row in rows] == [
        ("org/first", 0, ["main"]), ("other/second", 0, ["main"])]  # fmt: skip
    assert rows[0]["shared_bytes"] == rows[0]["bytes"] == sum(c.size for c in first.main.files.values())


def test_a_blob_that_was_lost_comes_back_from_another_snapshot(hub, stage, store):
    repo, twin = small_repo(), small_repo("other/twin")
    demo = hub(repo, twin)
    assert stage(demo, repo.name).code == 0
    for blob in (store / "blobs").glob("*/*/*"):
        blob.unlink()
    ran = stage(demo, twin.name)
    assert (ran.code, ran.last["bytes_fetched"]) == (0, 0)
    assert_staged(store, twin)
    assert stage(demo, repo.name).code == 0
    assert_staged(store, repo)


@pytest.fixture
def without_links(monkeypatch):
    """A file system that has no hard links, as FAT and some network ones."""

    def link(*args, **kwargs):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)


def test_without_hard_links_a_snapshot_has_relative_symlinks(hub, stage, store, command, tmp_path, without_links):
    repo = small_repo()
    demo = hub(repo)
    ran = stage(demo, repo.name, "--to", tmp_path / "to", "--hf-cache")
    assert ran.code == 0, ran.stderr
    assert_staged(store, repo)
    [manifest] = Store(store).read_manifests()
    assert {file.layout for file in manifest.files} == {"symlink"}
    assert [event["how"] for event in ran.of("laid out")] in (["copy", "copy"], ["reflink", "reflink"])
    store.rename(store.with_name("moved"))
    assert command("verify", "--json", "--store", store.with_name("moved"))[0] == 0, "a moved store is whole"
    assert stage(demo, repo.name, "--store", store.with_name("moved")).last["bytes_fetched"] == 0


def test_a_target_that_folds_case_gets_no_two_files_of_one_name(hub, stage, store, monkeypatch):
    repo = DemoRepo("org/cases", {"README.md": "one", "readme.md": "two"})
    monkeypatch.setattr(execute, "folds_case", lambda folder: True)
    ran = stage(hub(repo), repo.name)
    assert ran.code == 2
    assert "README.md and readme.md" in ran.stderr
    assert stage(hub(repo), repo.name, "--exclude", "readme.md").code == 0


# What to stage


def test_weights_in_other_formats_stay_on_the_hub_and_that_is_said(hub, stage, store):
    files = {"model.safetensors": safetensors_bytes(400), "pytorch_model.bin": b"p" * 500, "a.md": "a"}
    repo = DemoRepo("org/both", files)
    demo = hub(repo)
    ran = stage(demo, repo.name)
    assert ran.code == 0
    assert [event["path"] for event in ran.of("skipped")] == ["pytorch_model.bin"]
    assert demo.counts["cdn"].body_bytes == repo.main.files["model.safetensors"].size
    assert stage(demo, repo.name, "--include", "*.bin").of("plan")[0]["files"] == 1
    assert stage(demo, repo.name, "--exclude", "*.md").of("plan")[0]["files"] == 1


def test_a_lock_file_needs_no_api(hub, stage, store, tmp_path):
    repo = small_repo()
    demo = hub(repo, mirrors=1)
    assert stage(demo, repo.name).code == 0
    lock = tmp_path / "lock.json"
    lock.write_bytes(Store(store).manifest(repo.name, repo.main.oid).read_bytes())
    demo.reset()
    demo.set_fault(Fault(Kind.STATUS, "info", status=500), Fault(Kind.STATUS, "tree", status=500))
    ran = stage(demo, "--lock", lock, "--store", tmp_path / "second", "--mirror", demo.mirrors[0])
    assert ran.code == 0, ran.stderr
    assert_staged(tmp_path / "second", repo)
    assert not {"info", "tree"} & demo.counts.keys()
    lock.write_text("{}")
    assert stage(demo, "--lock", lock).code == 2


def test_rows_kept_by_screen_are_staged_at_the_commit_that_was_judged(hub, stage, store, tmp_path):
    kept, dropped = small_repo("org/kept", 64 << 10), small_repo("org/dropped", 64 << 10)
    demo = hub(kept, dropped)
    judged = kept.main.oid
    kept.push({"config.json": {"model_type": "newer"}})
    rows = [
        {"repo": "org/kept", "canonical": "org/kept", "commit": judged, "outcome": "keep"},
        {"repo": "org/dropped", "canonical": "org/dropped", "commit": dropped.main.oid, "outcome": "drop"},
    ]
    (tmp_path / "verdicts.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    ran = stage(demo, "--from", tmp_path / "verdicts.jsonl")
    assert ran.code == 0
    assert "skipped org/dropped: drop" in ran.stderr
    assert [event["commit"] for event in ran.of("done")] == [judged]
    assert_staged(store, kept, judged)


def test_the_plan_is_printed_and_writes_nothing(hub, store, command, monkeypatch):
    repo = small_repo()
    monkeypatch.setenv("HF_ENDPOINT", hub(repo).endpoint)
    code, [plan] = command("plan", repo.name, "--json")
    assert code == 0
    assert plan["fetch_bytes"] == plan["free_bytes_needed"] == sum(c.size for c in repo.main.files.values())
    assert plan.keys() == {"repo", "commit", "files", "fetch_bytes", "resume_bytes", "reuse_bytes", "free_bytes",
                           "free_bytes_needed", "skipped"}  # fmt: skip
    assert not store.exists()


@pytest.mark.parametrize("args", [
    ["run"], ["run", "not a repo"], ["run", "a/b", "--copy"], ["run", "a/b", "--part-size=x"],
    ["run", "--from", "missing.jsonl"], ["nonsense", "--flag"],
])  # fmt: skip
def test_bad_input_is_exit_2(store, command, args):
    assert command(*args)[0] == 2


def test_a_missing_repo_is_exit_4_and_the_others_are_staged(hub, stage, store):
    repo = small_repo(size=64 << 10)
    ran = stage(hub(repo), "org/missing", repo.name)
    assert ran.code == 4
    assert "org/missing" in ran.stderr
    assert_staged(store, repo)


# Checking


def test_verify_finds_every_difference_and_repairs_none(hub, stage, store, command):
    repo = small_repo()
    demo = hub(repo)
    assert stage(demo, repo.name).code == 0
    code, [found] = command("verify", "--json")
    assert (code, found["differences"], found["shards"], found["tensors"], found["broken_headers"]) == (0, [], 2, 8, 0)
    blob = Store(store).blob("sha256:" + repo.main.files["model-00001-of-00002.safetensors"].sha256)
    stat = blob.stat()
    os.chmod(blob, 0o644)
    with blob.open("r+b") as file:
        file.seek(2_000_000)
        file.write(b"\0\1")
    os.utime(blob, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    Store(store).snapshot(repo.name, repo.main.oid).joinpath("config.json").unlink()
    before = sorted(path for path in store.rglob("*") if path.is_file())
    code, [found] = command("verify", "--json")
    assert code == 3
    assert {difference["path"] for difference in found["differences"]} == {
        "config.json", "model-00001-of-00002.safetensors"}  # fmt: skip
    assert sorted(path for path in store.rglob("*") if path.is_file()) == before
    again = stage(demo, repo.name)
    assert again.code == 0
    assert again.of("quarantined"), "verify wrote down what the next run has to fetch"
    assert_staged(store, repo)
    assert command("verify", "--json")[0] == 0


def test_headers_and_index_are_held_against_each_other(hub, stage, store, command):
    first, ninth = "model-00001-of-00002.safetensors", "model-00009-of-00002.safetensors"
    index = {"weight_map": {"layer.0.weight": first, "gone": first, "other": ninth}}
    repo = DemoRepo("org/broken", {
        "model-00001-of-00002.safetensors": safetensors_bytes(400), "model-00002-of-00002.safetensors": b"\xff" * 900,
        "model.safetensors.index.json": index,
    })  # fmt: skip
    ran = stage(hub(repo), repo.name)
    assert (ran.code, ran.last["broken_headers"], ran.last["shards"]) == (0, 1, 2), "the bytes are those of the Hub"
    code, [found] = command("verify", "--json")
    assert code == 3
    said = "\n".join(difference["because"] for difference in found["differences"])
    assert "gone" in said
    assert "model-00009-of-00002.safetensors, which is not in the snapshot" in said
    assert "header" in said


# Making room


def test_gc_plans_first_and_removes_what_no_manifest_names(hub, stage, store, command):
    shared = safetensors_bytes(4000, 1)
    first = DemoRepo("org/first", {"model.safetensors": shared, "own.safetensors": safetensors_bytes(8000, 2)})
    second = DemoRepo("org/second", {"model.safetensors": shared})
    demo = hub(first, second)
    assert stage(demo, first.name, second.name).code == 0
    assert command("gc", "--json") == (0, [{"remove": [], "blobs": 0, "bytes": 0}])
    code, [plan] = command("gc", "--drop", first.name, "--json")
    assert (code, plan["blobs"]) == (0, 1)
    assert_staged(store, first)
    code, [done] = command("gc", "--drop", first.name, "--apply", "--json")
    assert (code, done) == (0, plan)
    assert_staged(store, second)
    assert not Store(store).snapshot(first.name, first.main.oid).exists()
    assert len(list((store / "blobs").glob("*/*/*"))) == 1
    assert command("gc", "--drop", first.name)[0] == 4
    assert stage(demo, first.name).last["bytes_fetched"] == first.main.files["own.safetensors"].size


# Other nodes


@pytest.fixture
def serving(store):
    with Mirror(Store(store), ("127.0.0.1", 0)) as mirror:
        thread = threading.Thread(target=mirror.serve_forever, args=(0.05,))
        thread.start()
        yield mirror.url
        mirror.shutdown()
        thread.join()


def test_another_node_stages_from_a_store(hub, stage, store, serving, tmp_path):
    repo = small_repo()
    demo = hub(repo)
    assert stage(demo, repo.name).code == 0
    demo.set_fault(Fault(Kind.STATUS, "resolve", status=503))
    ran = stage(demo, repo.name, "--store", tmp_path / "second", "--mirror", serving)
    assert ran.code == 0, ran.stderr
    assert_staged(tmp_path / "second", repo)


def ask(url: str, target: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=5)
    connection.putrequest(method, target, skip_accept_encoding=True)
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    response = connection.getresponse()
    answer = response.status, dict(response.getheaders()), response.read()
    connection.close()
    return answer


def test_the_mirror_answers_ranges_and_states_digests(hub, stage, store, serving):
    repo = small_repo()
    assert stage(hub(repo), repo.name).code == 0
    path, data = "model-00001-of-00002.safetensors", weights(repo)
    target = f"/{repo.name}/resolve/{repo.main.oid}/{path}"
    status, headers, body = ask(serving, target)
    assert (status, body) == (200, data)
    assert headers["ETag"] == f'"{repo.main.files[path].sha256}"'
    assert headers["X-Repo-Commit"] == repo.main.oid
    status, headers, body = ask(serving, f"/{repo.name}/resolve/main/{path}", "HEAD")
    assert (status, headers["Content-Length"], body) == (200, str(len(data)), b"")
    size = len(data)
    for asked, start, stop in (("10-19", 10, 20), (f"100-{2**40}", 100, size), ("-7", size - 7, size)):
        status, headers, body = ask(serving, target, Range=f"bytes={asked}")
        assert (status, body) == (206, data[start:stop])
        assert headers["Content-Range"] == f"bytes {start}-{stop - 1}/{len(data)}"
    assert ask(serving, target, Range=f"bytes={len(data)}-")[0] == 416
    assert ask(serving, f"/{repo.name}/resolve/main/empty.txt")[::2] == (200, b"")
    assert ask(serving, f"/{repo.name}/resolve/main/sub%2Fnotes.md")[2] == b"notes"


@pytest.mark.parametrize("target", [
    "/org/small/resolve/main/../../../../format", "/org/small/resolve/main/%2e%2e/%2e%2e/format", "/../format",
    "/..%2F..%2Fetc/x/resolve/main/passwd", "/org/small/resolve/..%2F..%2F..%2Fformat/config.json",
    "/org/small/resolve/../config.json", "/org/small/resolve/%00/config.json", "/org%00/small/resolve/main/config.json",
    "//etc/passwd", "/blobs/sha256", "/journal.jsonl", f"/org/small/resolve/{'a' * 5000}/x", "/org/small/resolve/main/",
])  # fmt: skip
def test_the_mirror_serves_nothing_else(hub, stage, store, serving, target):
    repo = small_repo(size=4096)
    assert stage(hub(repo), repo.name).code == 0
    assert ask(serving, target)[0] == 404
    assert ask(serving, f"/{repo.name}/resolve/main/config.json")[0] == 200, "and goes on serving"


def test_olah_as_a_mirror(hub, stage, store, tmp_path):
    if not OLAH.exists():
        pytest.skip("olah is not installed in .venv-olah (see .ci/run)")
    repo = small_repo()
    demo = hub(repo)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    upstream, cdn = urlsplit(demo.endpoint).netloc, urlsplit(demo.cdn).netloc
    argv = [
        str(OLAH), "--host", "127.0.0.1", "--port", str(port), "--hf-scheme", "http", "--hf-netloc", upstream,
        "--hf-lfs-netloc", cdn, "--mirror-netloc", f"127.0.0.1:{port}", "--log-path", str(tmp_path / "logs"),
    ]  # fmt: skip
    env = os.environ | {"NO_PROXY": "127.0.0.1", "HF_TOKEN": ""}
    with (tmp_path / "olah.txt").open("wb") as log:
        olah = subprocess.Popen(argv, cwd=tmp_path, env=env, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 30
        while socket.socket().connect_ex(("127.0.0.1", port)) and time.monotonic() < deadline:
            assert olah.poll() is None, (tmp_path / "olah.txt").read_text()
            time.sleep(0.1)
        mirror = f"http://127.0.0.1:{port}"
        ran = stage(demo, repo.name, "--mirror", mirror, "--stall-seconds=5", "--first-byte-seconds=10")
        assert ran.code == 0, ran.stderr
        assert_staged(store, repo)
        lock, nowhere = Store(store).manifest(repo.name, repo.main.oid), "http://127.0.0.1:1"
        alone = ("--lock", lock, "--endpoint", nowhere, "--mirror", mirror, "--first-byte-seconds=10")
        again = stage(demo, *alone, "--store", tmp_path / "second")
        assert again.code == 0, again.stderr
        assert_staged(tmp_path / "second", repo)
    finally:
        olah.terminate()
        olah.wait(10)
