"""How the tests of `stage` run it: in this process, with thresholds short enough to wait for, its events parsed."""

from __future__ import annotations

import hashlib
import json
import random
import struct
import time
from pathlib import Path
from typing import NamedTuple

from formulas import console
from screen.demorepo import DemoRepo
from stage.cli import app
from stage.disk import digest_file
from stage.store import Store

QUICK = (
    "--part-size=256KiB", "--stall-seconds=1.5", "--first-byte-seconds=4", "--call-seconds=5", "--slow-seconds=1",
    "--slow-floor=64KiB", "--probe-seconds=1", "--retries=3", "--backoff-seconds=0.05", "--reserve=0",
)  # fmt: skip


class Ran(NamedTuple):
    code: int
    events: list[dict]
    stderr: str
    seconds: float

    @property
    def last(self) -> dict:
        return self.events[-1]

    def of(self, kind: str) -> list[dict]:
        return [event for event in self.events if event["event"] == kind]


def run_stage(capsys, *args: str) -> Ran:
    """Runs `stage --json` with these arguments and short thresholds."""
    capsys.readouterr()
    began = time.monotonic()
    code = console.run(app, ["run", *QUICK, "--json", *map(str, args)])
    seconds = time.monotonic() - began
    out = capsys.readouterr()
    return Ran(code, [json.loads(line) for line in out.out.splitlines()], out.err, seconds)


def safetensors_bytes(size: int, seed: int = 0) -> bytes:
    """A valid safetensors file with `size` random bytes of data in four tensors (size divisible by 4)."""
    step = size // 4
    header = {f"layer.{i}.weight": {"dtype": "U8", "shape": [step], "data_offsets": [i * step, (i + 1) * step]}
              for i in range(4)}  # fmt: skip
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + random.Random(seed).randbytes(size)


def small_repo(name: str = "org/small", size: int = 3 << 20, **about) -> DemoRepo:
    """A repo with one weight file of three parts or more, a small second one, an empty file and a config."""
    files = {
        "config.json": {"model_type": "demo"}, "empty.txt": b"", "sub/notes.md": "notes",
        "model-00001-of-00002.safetensors": safetensors_bytes(size, 1),
        "model-00002-of-00002.safetensors": safetensors_bytes(size // 8, 2),
    }  # fmt: skip
    return DemoRepo(name, files, **about)


def assert_staged(store: Path, repo: DemoRepo, commit: str | None = None) -> None:
    """The snapshot is there with the very bytes of the repo, and everything under blobs/ is what its name says."""
    state = repo.find(commit or "main")
    folder = Store(store).snapshot(repo.name, state.oid)
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if not path.is_dir()}
    assert found.keys() == state.files.keys()
    for path, content in state.files.items():
        assert hashlib.sha256(found[path].read_bytes()).hexdigest() == content.sha256, path
    assert Store(store).read_manifest(repo.name, state.oid) is not None
    assert_blobs_true(store)


def assert_blobs_true(store: Path) -> None:
    for path in (store / "blobs").glob("*/*/*"):
        oid = f"{path.parent.parent.name}:{path.name}"
        assert digest_file(path, oid) == oid
        assert path.stat().st_mode & 0o222 == 0, "blobs are read-only"
