"""What a person sees: a bar at a terminal, lines elsewhere, nothing with --quiet; stdout is the answer alone."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios

import pytest
from stagerun import QUICK, small_repo

from screen.demofaults import Fault, Kind
from stage.progress import describe


@pytest.fixture
def run(hub, tmp_path):
    """Runs stage in a process of its own: `run(*arguments, stderr=...)`."""
    repo = small_repo()
    demo = hub(repo, faults=[Fault(Kind.RATE, "cdn", bytes_per_second=400_000)])
    here = {"CKPT_STORE": str(tmp_path / "store"), "HF_HUB_CACHE": str(tmp_path / "hf")}
    env = os.environ | {"HF_ENDPOINT": demo.endpoint} | here
    command = [sys.executable, "-m", "stage", repo.name, *QUICK, "--connections=4"]

    def run(*args: str, stderr: int) -> str:
        ran = subprocess.run([*command, *args], env=env, stdout=subprocess.PIPE, stderr=stderr, text=True, timeout=30)
        assert ran.returncode == 0
        assert ran.stdout == f"{tmp_path}/store/snapshots/{repo.name}/{repo.main.oid}\n"
        return ran.stderr

    return run


def test_a_bar_at_a_terminal(run):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 140, 0, 0))
    try:
        run(stderr=theirs)
        shown = os.read(ours, 1 << 20).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    assert "%|" in shown
    assert "MiB/s x" in shown or "KiB/s x" in shown, "each source with its rate and connections"


def test_a_line_a_file_elsewhere_and_no_escapes(run):
    said = run(stderr=subprocess.PIPE)
    assert "\x1b" not in said
    assert "\r" not in said
    for path in small_repo().main.files:
        assert sum(line.startswith(path) for line in said.splitlines()) == 1


def test_quiet_is_quiet(run):
    assert run("--quiet", stderr=subprocess.PIPE) == ""


def test_every_reason_to_wait_is_a_sentence():
    events = [
        {"event": "wait", "seconds": 12.2, "because": "hub allows no more resolvers requests yet"},
        {"event": "locked", "because": "the store is locked by process 7 on node-3"},
        {"event": "hashing", "because": "3 local files have to be digested", "bytes": 3},
        {"event": "source", "state": "slow", "because": "mirror: expected 256.0 KiB/s, got 90.0 KiB/s for 30 s"},
    ]
    assert [describe(event) for event in events] == [
        "waiting 12 s: hub allows no more resolvers requests yet",
        "waiting: the store is locked by process 7 on node-3",
        "waiting: 3 local files have to be digested",
        "slow: mirror: expected 256.0 KiB/s, got 90.0 KiB/s for 30 s",
    ]
    assert describe({"event": "progress"}) is None
