"""Whatever ends a run, and wherever: names that exist are true, nothing verified comes twice, run again continues."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from stage_zygote import Zygote
from stagerun import QUICK, assert_blobs_true, assert_staged, run_stage, safetensors_bytes, small_repo

from screen.demofaults import Fault, Kind
from screen.demorepo import DemoRepo
from stage.inventory import list_snapshots
from stage.plan import make_plan
from stage.spans import total
from stage.store import Store


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
def memory(tmp_path):
    """A folder in memory where there is one: hundreds of runs, each with dozens of fsyncs."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if os.access(shared, os.W_OK) else tmp_path) as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def zygote():
    with Zygote() as running:
        yield running


def environment(hub, store: Path) -> dict[str, str]:
    return {"HF_ENDPOINT": hub.endpoint, "CKPT_STORE": str(store), "HF_HUB_CACHE": str(store.parent / "hf")}


def assert_invariants(root: Path) -> None:
    """What has to hold at every moment, whoever died."""
    assert_blobs_true(root)
    place = Store(root)
    for manifest in place.read_manifests():
        for file in manifest.files:
            blob = place.blob(file.oid)
            assert blob.stat().st_size == file.size
            assert os.path.samefile(place.snapshot(manifest.repo, manifest.commit) / file.path, blob)
    for repo, revision in place.read_refs():
        assert place.read_manifest(repo, revision.commit) is not None, "a ref names a commit with a manifest"


def held_bytes(root: Path, repo: DemoRepo) -> int:
    """Bytes of the repo's blobs that a run need not fetch again."""
    place, journal = Store(root), Store(root).read_journal()
    count = 0
    for content in {c.sha256: c for c in repo.main.files.values()}.values():
        oid = f"sha256:{content.sha256}"
        count += content.size if place.blob(oid).exists() else total(journal.spans(oid))
    return count


def test_a_crash_at_every_change_of_the_disk(hub, memory):
    files = {"config.json": {"a": 1}, "model.safetensors": safetensors_bytes(600_000), "empty": b""}
    repo = DemoRepo("org/crash", files)
    demo = hub(repo)
    args = ["run", *QUICK, "--json", "org/crash", "--lock-wait=0"]
    with contextlib.ExitStack() as running:
        zygotes = [running.enter_context(Zygote()) for _ in range(4)]
        code, calls = zygotes[0].run([*args, "--to", memory / "all/to"], env=environment(demo, memory / "all/store"))
        assert code == 0
        assert calls > 40
        free: queue.SimpleQueue[Zygote] = queue.SimpleQueue()
        for one in zygotes:
            free.put(one)

        def crash(point: int) -> None:
            root, to, one = memory / f"{point}/store", memory / f"{point}/to", free.get()
            codes = [
                one.run([*args, "--to", to], env=environment(demo, root), die_at=die_at)[0] for die_at in (point, None)
                if assert_invariants(root) is None
            ]  # fmt: skip
            free.put(one)
            assert codes in ([-9, 0], [0, 0]), (point, codes)
            assert_invariants(root)
            assert_staged(root, repo)
            assert (to / "model.safetensors").read_bytes() == repo.main.files["model.safetensors"].head
            shutil.rmtree(root.parent)

        with ThreadPoolExecutor(len(zygotes)) as pool:
            list(pool.map(crash, range(1, calls + 1)))


@pytest.mark.slow
def test_killed_fifty_times_in_a_row(hub, memory, zygote):
    store = memory / "store"
    part, connections, kills = 64 << 10, 4, 50
    repo = small_repo(size=8 << 20)
    demo = hub(repo, faults=[Fault(Kind.RATE, "cdn", bytes_per_second=2_000_000)])
    args = ["run", *QUICK, "--json", repo.name, f"--part-size={part}", f"--connections={connections}"]
    size = sum(content.size for content in repo.main.files.values())
    chance, killed, rounds, before = random.Random(7), 0, 1, 0
    while killed < kills:
        code, _ = zygote.run(args, env=environment(demo, store), kill_at=chance.randint(3, 70))
        assert code in (-9, 0)
        assert_invariants(store)
        now = held_bytes(store, repo)
        assert now >= before, "what was noted is kept"
        killed, before = killed + (code == -9), now
        if code == 0:
            assert_staged(store, repo)
            shutil.rmtree(store)
            rounds, before = rounds + 1, 0
    assert before or rounds > 1
    assert zygote.run(args, env=environment(demo, store))[0] == 0
    assert_staged(store, repo)
    # A part in flight is lost, and so is what the sockets' buffers held beyond it.
    sent = sum(line.body_bytes for line in demo.log if line.origin == "cdn")
    assert sent <= rounds * size + kills * connections * 4 * part
    assert not Store(store).lock_path.exists()


def test_an_interrupt_keeps_what_arrived_and_says_130(hub, store):
    repo = small_repo(size=8 << 20)
    demo = hub(repo, faults=[Fault(Kind.RATE, "cdn", bytes_per_second=600_000)])
    command = [sys.executable, "-m", "stage", repo.name, *QUICK, "--json", "--connections=2"]
    env, held = os.environ | environment(demo, store), 0
    for number in (signal.SIGINT, signal.SIGTERM):
        run = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        events = map(json.loads, run.stdout)
        arrived = next(event["bytes"] for event in events if event["event"] == "progress" and event["bytes"] > 450_000)
        run.send_signal(number)
        last = list(events)[-1]
        said = run.communicate(timeout=20)[1]
        assert run.returncode == 130, said
        assert "run again to continue" in said
        assert (last["event"], last["because"]) == ("failed", "interrupted")
        assert last["bytes_fetched"] >= arrived
        kept = sum(path.stat().st_size for path in (store / "blobs").glob("*/*/*"))
        kept += sum(total(Store(store).read_journal().spans(oid)) for oid in Store(store).read_journal().parts)
        assert kept == held + last["bytes_fetched"], "all that arrived is kept, to the byte"
        assert not Store(store).lock_path.exists()
        held = kept


def test_another_source_continues_where_the_first_stopped(hub, stage, store):
    repo = DemoRepo("org/one", {"model.safetensors": safetensors_bytes(4 << 20)})
    demo = hub(repo, mirrors=1, faults=[Fault(Kind.STALL, "cdn", after_bytes=300_000)])
    first = stage(demo, repo.name, "--retries=0", "--connections=2")
    assert first.code == 4
    kept = held_bytes(store, repo)
    assert kept > 0
    demo.set_fault(Fault(Kind.STATUS, "cdn", status=503))
    second = stage(demo, repo.name, "--mirror", demo.mirrors[0])
    assert second.code == 0
    assert second.of("plan")[0]["resume_bytes"] == kept
    assert {source["url"]: source["bytes"] for source in second.last["sources"]}[demo.mirrors[0]] == (
        repo.main.files["model.safetensors"].size - kept
    )
    assert_staged(store, repo)


def blob_of(store: Path, repo: DemoRepo, path: str = "model.safetensors") -> Path:
    return Store(store).blob(f"sha256:{repo.main.files[path].sha256}")


@pytest.fixture
def one():
    return DemoRepo("org/one", {"config.json": {}, "model.safetensors": safetensors_bytes(2 << 20)})


def test_a_truncated_shard_is_topped_up(hub, stage, store, one, tmp_path):
    demo = hub(one)
    assert stage(demo, one.name, "--to", tmp_path / "to").code == 0
    blob, missing = blob_of(store, one), 300_000
    size = blob.stat().st_size
    os.chmod(blob, 0o644)
    os.truncate(blob, size - missing)
    again = stage(demo, one.name)
    assert again.code == 0, again.stderr
    assert missing <= again.last["bytes_fetched"] <= missing + (256 << 10), "to one part"
    assert_staged(store, one)
    assert (tmp_path / "to/model.safetensors").read_bytes() == one.main.files["model.safetensors"].head


def test_an_overlong_shard_is_cut(hub, stage, store, one):
    demo = hub(one)
    assert stage(demo, one.name).code == 0
    blob = blob_of(store, one)
    os.chmod(blob, 0o644)
    with blob.open("ab") as file:
        file.write(b"tail")
    again = stage(demo, one.name)
    assert again.code == 0
    assert again.last["bytes_fetched"] == 0
    assert_staged(store, one)


def test_a_flipped_byte_is_fetched_again(hub, stage, store, one, tmp_path):
    demo = hub(one)
    assert stage(demo, one.name, "--to", tmp_path / "to").code == 0
    flip(blob_of(store, one), 1_000_000)
    again = stage(demo, one.name)
    assert again.code == 0
    assert_staged(store, one)
    assert again.of("quarantined")
    assert (tmp_path / "to/model.safetensors").read_bytes() == one.main.files["model.safetensors"].head
    assert not list((store / "partial").glob("*")), "the damaged blob has gone"


def test_a_flipped_byte_in_a_truncated_shard_is_never_trusted(hub, stage, store, one):
    demo = hub(one)
    assert stage(demo, one.name).code == 0
    blob = blob_of(store, one)
    flip(blob, 10_000)
    os.truncate(blob, 1_500_000)
    again = stage(demo, one.name)
    assert again.code == 0
    assert_staged(store, one)


def flip(path: Path, at: int, *, quietly: bool = False) -> None:
    stat = path.stat()
    os.chmod(path, 0o644)
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))
    if quietly:
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.mark.parametrize("damage", ["truncate", "lengthen", "flip", "delete"])
def test_a_damaged_partial_file_is_never_trusted(hub, stage, store, one, damage):
    demo = hub(one, faults=[Fault(Kind.STALL, "cdn", after_bytes=200_000)])
    assert stage(demo, one.name, "--retries=0", "--connections=2").code == 4
    assert held_bytes(store, one) >= 200_000
    [partial] = (store / "partial").iterdir()
    if damage == "truncate":
        os.truncate(partial, 100_000)
    elif damage == "lengthen":
        os.truncate(partial, 50 << 20)
    elif damage == "flip":
        flip(partial, 1000)
    else:
        partial.unlink()
    demo.set_fault()
    again = stage(demo, one.name)
    assert again.code == 0, again.stderr
    assert_staged(store, one)


@pytest.mark.parametrize("lost", ["journal.jsonl", "partial", "lock"])
def test_what_only_saves_work_may_be_lost(hub, stage, store, one, lost):
    demo = hub(one)
    assert stage(demo, one.name).code == 0
    path = store / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    again = stage(demo, one.name)
    assert again.code == 0
    assert again.last["bytes_fetched"] == 0
    assert_staged(store, one)


def test_a_finished_snapshot_costs_no_reading(hub, stage, store, one):
    demo = hub(one)
    assert stage(demo, one.name).code == 0
    flip(blob_of(store, one), 1_000_000, quietly=True)
    again = stage(demo, one.name)
    assert again.code == 0
    assert again.last["bytes_fetched"] == 0, "size, mtime and inode are as published: trusted unread, until verified"


def test_two_runs_at_once_fetch_once(hub, store, one):
    demo = hub(one, faults=[Fault(Kind.RATE, "cdn", bytes_per_second=300_000)])
    command = [sys.executable, "-m", "stage", one.name, *QUICK, "--connections=2", "--json"]
    env = os.environ | environment(demo, store)
    runs = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [run.communicate(timeout=30)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    last = [json.loads(text.splitlines()[-1]) for text in outputs]
    assert sorted(event["bytes_fetched"] for event in last)[0] == 0
    assert any('"event":"locked"' in text for text in outputs), "the second one says why it waits"
    assert_staged(store, one)


def test_a_store_locked_by_a_living_process_is_exit_5(hub, stage, store, one):
    demo = hub(one)
    assert stage(demo, one.name).code == 0
    sleeper = subprocess.Popen([sys.executable, "-c", LOCK_FOREVER, str(store / "lock")], stdout=subprocess.PIPE)
    try:
        sleeper.stdout.readline()
        ran = stage(demo, one.name, "--lock-wait=0.3")
        assert ran.code == 5
        assert f"process {sleeper.pid}" in ran.stderr
    finally:
        sleeper.kill()
        sleeper.wait()
    ran = stage(demo, one.name, "--lock-wait=0.3")
    assert ran.code == 0, "its owner is dead: taken over"


LOCK_FOREVER = """
import sys, time
from pathlib import Path
from stage.lock import hold
with hold(Path(sys.argv[1]), wait_seconds=0):
    print("held", flush=True)
    time.sleep(60)
"""


FILLED = """
mount -t tmpfs -o size=3m tmpfs "$0" || exit 77
"$@" --json > "$0.first" &
until [ "$(cat "$0"/store/partial/sha256-* 2> /dev/null | wc -c)" -gt 200000 ]; do sleep 0.02; done
head -c 10000000 /dev/zero > "$0/filler" 2> /dev/null
wait $! ; echo "full: $?" >&2
rm "$0/filler"
exec "$@" --json
"""


def test_a_disk_that_fills_up_keeps_what_it_has(hub, tmp_path, one):
    """On a small file system of our own, where the kernel lets us have one, which somebody else fills meanwhile."""
    demo = hub(one, faults=[Fault(Kind.RATE, "cdn", bytes_per_second=250_000)])
    where = tmp_path / "small"
    where.mkdir()
    command = [sys.executable, "-m", "stage", one.name, *QUICK, "--connections=2"]
    env = os.environ | environment(demo, where / "store")
    unshared = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", FILLED, str(where), *command]
    if shutil.which("unshare") is None:
        pytest.skip("no unshare")
    ran = subprocess.run(unshared, env=env, capture_output=True, text=True, timeout=60)
    if ran.returncode == 77 or "unshare failed" in ran.stderr:
        pytest.skip("no mounts in a user namespace here")
    assert ran.returncode == 0, ran.stderr
    assert '"code": "disk_full"' in ran.stderr
    assert "full: 4" in ran.stderr
    events = [json.loads(line) for line in ran.stdout.splitlines()]
    assert events[0]["resume_bytes"] > 0
    assert events[-1]["event"] == "done"


def test_a_disk_too_small_is_known_before_the_first_byte(hub, stage, store, one):
    ran = stage(hub(one), one.name, "--reserve=900TiB")
    assert ran.code == 4
    assert '"code": "disk_full"' in ran.stderr
    assert "nothing was fetched" in ran.stderr
    assert not list((store / "partial").iterdir())


def test_the_plan_is_empty_after_success(hub, stage, store, one):
    demo = hub(one)
    assert stage(demo, one.name).code == 0
    place = Store(store)
    [manifest] = place.read_manifests()
    here = place.inspect(one.name, manifest.revision, manifest.tree)
    assert make_plan(one.name, manifest.revision, manifest.tree, here).steps == ()
    assert [snapshot.refs for snapshot in list_snapshots(place)] == [("main",)]


def test_readers_see_a_snapshot_whole_or_not_at_all(hub, store, one, zygote):
    """While a run is at it, another process that trusts manifests never meets a missing or short file."""
    demo = hub(one, faults=[Fault(Kind.RATE, "cdn", bytes_per_second=4_000_000)])
    done = threading.Event()
    seen = list[int]()

    def watch() -> None:
        while not done.is_set():
            for manifest in Store(store).read_manifests():
                folder = Store(store).snapshot(manifest.repo, manifest.commit)
                seen.append(sum((folder / file.path).stat().st_size for file in manifest.files))

    watcher = threading.Thread(target=watch)
    watcher.start()
    code, _ = zygote.run(["run", *QUICK, one.name], env=environment(demo, store))
    time.sleep(0.05)
    done.set()
    watcher.join()
    assert code == 0
    assert set(seen) == {sum(content.size for content in one.main.files.values())}
