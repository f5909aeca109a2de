"""What an unlucky user types, what a stranger's file says, and what a dying disk answers."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path

import pytest
from stagerun import assert_staged, run_stage, safetensors_bytes, small_repo

from formulas import console
from formulas.errors import BadInput, StoreLocked
from screen.demorepo import DemoRepo
from screen.hub import Hub
from stage import reuse as reuse_module
from stage import verify as verify_module
from stage.blob import Incoming
from stage.board import Board
from stage.cli import app
from stage.digests import _distrust
from stage.disk import temporary_name
from stage.fetch import Download
from stage.journal import Part, bad_line, parse_journal, part_line
from stage.lock import hold
from stage.manifest import parse_manifest
from stage.plan import Fetch
from stage.sources import Source, Thresholds
from stage.store import Store

LAST = {"event", "repo", "commit", "path", "files", "bytes_total", "bytes_fetched", "bytes_reused", "shards", "tensors",
        "broken_headers", "sources", "seconds"}  # fmt: skip


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
    """Runs a command line of `stage`: (exit code, stdout, stderr)."""

    def run(*args):
        capsys.readouterr()
        code = console.run(app, list(map(str, args)))
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def tiny():
    return DemoRepo("org/tiny", {"config.json": {"a": 1}, "model.safetensors": safetensors_bytes(4000)})


# `--to`


def test_a_folder_with_files_of_somebody_else_is_left_as_it_is(hub, stage, store, tiny, tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "config.json").write_text("mine")
    ran = stage(hub(tiny), tiny.name, "--to", mine)
    assert (ran.code, (mine / "config.json").read_text()) == (2, "mine")
    assert not list((store / "blobs").glob("*/*/*")), "known before the first byte"
    (mine / "config.json").write_bytes(tiny.main.files["config.json"].head)
    (mine / "notes.txt").write_text("mine")
    assert stage(hub(tiny), tiny.name, "--to", mine).code == 0, "the very same file is not in the way, nor are others"
    assert (mine / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("where", ["store", "store/blobs/x", "file", "file/below"])
def test_a_place_that_is_none_is_refused_before_the_first_byte(hub, stage, store, tiny, tmp_path, where):
    (tmp_path / "file").touch()
    ran = stage(hub(tiny), tiny.name, "--to", tmp_path / where)
    assert ran.code == 2
    assert ran.last["event"] == "failed"
    assert not list((store / "blobs").glob("*/*/*"))


def test_two_repos_do_not_share_a_folder(hub, stage, store, tiny, tmp_path):
    assert stage(hub(tiny), tiny.name, "org/other", "--to", tmp_path / "to").code == 2
    assert not (tmp_path / "to").exists()


def test_a_newer_commit_takes_the_folder_over(hub, stage, store, command, tiny, tmp_path):
    demo, to = hub(tiny), tmp_path / "to"
    assert stage(demo, tiny.name, "--to", to).code == 0
    first = tiny.main.oid
    tiny.push({"config.json": {"a": 2}, "sub/new.safetensors": safetensors_bytes(400), "model.safetensors": None})
    assert stage(demo, tiny.name, "--to", to).code == 0
    expected = set(tiny.main.files)
    assert "model.safetensors" not in expected
    assert {path.relative_to(to).as_posix() for path in to.rglob("*") if path.is_file()} == expected
    assert command("verify")[0] == 0, "the older snapshot promises this folder no more"
    assert_staged(store, tiny)
    assert Store(store).read_manifest(tiny.name, first).placements == ()


# `--json`


def test_every_way_to_end_has_its_last_event(hub, stage, store, tiny):
    demo = hub(tiny)
    for args in ([tiny.name], ["org/missing"], [tiny.name, "--include=zzz"], [f"{tiny.name}@nope"]):
        assert stage(demo, *args).last.keys() - {"because", "missing"} == LAST
    ran = stage(demo, tiny.name, "--store", store.with_name("small"), "--reserve=900TiB")
    assert (ran.code, ran.last["event"], ran.last["commit"]) == (4, "failed", tiny.main.oid)
    assert ran.last.keys() - {"because"} == LAST
    with hold(Store(store).lock_path, wait_seconds=0):
        ran = stage(demo, tiny.name, "org/b", "--lock-wait=0.1")
    assert ran.code == StoreLocked.exit_code
    assert [event["repo"] for event in ran.of("failed")] == [tiny.name, "org/b"]
    assert ran.last.keys() - {"because"} == LAST


def test_one_place_named_twice_is_one_source(hub, stage, store, tiny):
    demo = hub(tiny)
    ran = stage(demo, tiny.name, "--mirror", demo.endpoint)
    assert [source["url"] for source in ran.last["sources"]] == [demo.endpoint]
    assert ran.last["bytes_fetched"] == sum(content.size for content in tiny.main.files.values())


# What is asked for


def test_verdicts_as_they_come(hub, stage, store, tiny, tmp_path):
    demo, rows = hub(tiny), tmp_path / "rows"
    local = {"repo": "./folder", "canonical": None, "commit": None, "outcome": "keep"}
    good = {"repo": tiny.name, "canonical": None, "commit": tiny.main.oid, "outcome": "keep"}
    rows.write_text(f"{json.dumps(local)}\n\n{json.dumps(good)}\n \n")
    ran = stage(demo, "--from", rows)
    assert (ran.code, ran.last["commit"]) == (0, tiny.main.oid)
    assert "skipped ./folder: no commit" in ran.stderr
    assert "skipped" not in stage(demo, "--from", rows, "--quiet").stderr
    rows.write_text(json.dumps(good | {"outcome": "drop"}))
    assert stage(demo, "--from", rows).code == 3, "nothing was kept"
    for bad in ("garbage", "[]", "null", "{}", json.dumps(good | {"commit": "abc"})):
        rows.write_text(bad)
        assert stage(demo, "--from", rows).code == 2
    assert stage(demo, "--from", tmp_path).code == 2


@pytest.mark.parametrize("args", [
    ["run", "a/b", "--part-size=0"], ["run", "a/b", "--stall-seconds=0"], ["run", "a/b", "--call-seconds=-1"],
    ["serve", "--port=70000"], ["serve", "--host=256.0.0.1"],
])  # fmt: skip
def test_numbers_that_mean_nothing_are_exit_2(command, args):
    assert command(*args)[0] == 2


def test_nothing_staged_is_no_proof(command, store, tmp_path):
    assert command("verify")[0] == 4
    assert command("ls")[0] == 0
    (tmp_path / "file").touch()
    for word in ("ls", "verify", "gc", "serve"):
        assert command(word, "--store", tmp_path / "file")[0] == 2
    store.mkdir()
    (store / "format").write_text("2\n")
    assert command("ls")[0] == 2


def test_without_a_home_the_store_has_to_be_named(command, monkeypatch):
    for name in ("HOME", "CKPT_STORE", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 5)
    code, _, said = command("ls")
    assert code == 2
    assert "--store" in said


# What strangers write


@pytest.mark.parametrize("change", [
    {"repo": "../../x"}, {"requested": "../../../x"}, {"requested": "/etc/x"}, {"path": "../x"}, {"twice": True},
])  # fmt: skip
def test_a_strangers_lock_file_names_nothing_outside(hub, stage, store, tiny, change):
    assert stage(hub(tiny), tiny.name).code == 0
    found = json.loads(Store(store).manifest(tiny.name, tiny.main.oid).read_bytes())
    assert parse_manifest(json.dumps(found).encode(), "lock")
    found |= {key: value for key, value in change.items() if key in found}
    found["files"][0] |= {key: value for key, value in change.items() if key == "path"}
    found["files"] += found["files"][:1] if "twice" in change else []
    with pytest.raises(BadInput):
        parse_manifest(json.dumps(found).encode(), "lock")


def test_a_long_name_in_a_script_of_three_bytes_a_letter(hub, stage, store, tmp_path):
    repo = DemoRepo("org/long", {"模" * 80 + ".json": {"a": 1}})
    assert stage(hub(repo), repo.name, "--to", tmp_path / "to").code == 0
    assert_staged(store, repo)
    assert len(os.fsencode(temporary_name(Path("模" * 85)).name)) <= 255


# Disks


def test_a_bad_sector_is_a_difference_and_is_fetched_again(hub, stage, store, command, monkeypatch):
    repo = small_repo(size=256 << 10)
    demo = hub(repo)
    assert stage(demo, repo.name).code == 0
    blob = Store(store).blob("sha256:" + repo.main.files["model-00001-of-00002.safetensors"].sha256)
    real = verify_module.digest_file

    def failing(path, *args):
        if path.name == blob.name or path.name.startswith("model-00001"):
            raise OSError(errno.EIO, "Input/output error", str(path))
        return real(path, *args)

    monkeypatch.setattr(verify_module, "digest_file", failing)
    monkeypatch.setattr(reuse_module, "digest_file", failing)
    code, out, _ = command("verify", "--json")
    assert code == 3
    assert {d["because"][-26:] for d in json.loads(out)["differences"]} == {"got none (Input/output error)"[-26:]}
    assert stage(demo, repo.name).code == 0
    monkeypatch.undo()
    assert command("verify", "--store", store)[0] == 0


def test_a_candidate_that_cannot_be_read_is_no_candidate(hub, stage, store, tiny, tmp_path, monkeypatch):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "model.safetensors").write_bytes(tiny.main.files["model.safetensors"].head)
    (tmp_path / "old" / "loop").symlink_to("loop")

    def failing(path, *args):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(reuse_module, "digest_file", failing)
    assert stage(hub(tiny), tiny.name, "--reuse", tmp_path / "old").code == 0
    assert_staged(store, tiny)
    assert stage(hub(tiny), tiny.name, "--reuse", tmp_path / "missing", "--store", tmp_path / "b").code == 2


# The journal


def test_a_line_cut_short_does_not_take_the_next_one_with_it(store):
    place = Store(store)
    place.create()
    place.journal_path.write_bytes(part_line("sha256:" + "0" * 64, Part(0, 5, "u"))[:-9])
    place.append(bad_line("sha256:" + "1" * 64))
    assert parse_journal(place.journal_path.read_bytes()).bad == {"sha256:" + "1" * 64}


def test_a_part_noted_before_its_bytes_were_distrusted_is_not_written_down(store):
    place, oid, rules = Store(store), "sha256:" + "0" * 64, Thresholds()
    place.create()
    source = Source(Hub("http://mirror.invalid"), trusted=False, connections=1)
    blob = Incoming(Fetch(oid, 1 << 20, "a", (), 0), ("a",), (), 1 << 20)
    download = Download(place, "org/a", "0" * 40, [source], rules, lambda event: None)
    board: Board = download._board
    board.waiting.append(blob)
    os.pwrite(blob.open(place.partial(oid)), bytes(1 << 20), 0)
    run = board.take(source, None)
    run.at = run.stop
    board.settle(run)
    assert [part[:2] for part in board.to_save] == [(blob, Part(0, 1 << 20, source.url))]
    with board.changed:
        _distrust(board, place, blob, "sha256:" + "1" * 64)
        board.settled = True
    saver = threading.Thread(target=download._save)
    saver.start()
    saver.join(20)
    assert place.read_journal().spans(oid) == ()
    blob.close()
