"""`screen` against a Hub, a CDN, a cache or a user that fails on purpose: rows and codes right, time bounded."""

import dataclasses
import json
import time

import pytest

from formulas.console import run
from screen.cli import app
from screen.demofaults import Fault, Kind
from screen.demofiles import Tensor, safetensors_file
from screen.demorepo import DemoRepo
from screen.hub import connect
from screen.wire import Limits

CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
QUICK = Limits(
    connect_seconds=2, first_byte_seconds=0.5, stall_seconds=0.5, floor_bytes_per_second=1000, floor_window_seconds=0.5,
    call_seconds=2, throttle_seconds=3, retries=2, backoff_seconds=0.02,
)  # fmt: skip


def weights(seed, layer=0):
    parts = ("gate", "up", "down")
    return safetensors_file(
        [Tensor(f"model.layers.{layer}.mlp.{part}_proj.weight", "BF16", (64, 64)) for part in parts], seed=seed)


def shards(seed, count=4):
    return {f"model-{n + 1:05}-of-{count:05}.safetensors": weights(seed + n, n) for n in range(count)}


@pytest.fixture
def screen(tmp_path, capsys, monkeypatch):
    """Runs `screen` with short deadlines: (exit code, rows, stderr, seconds)."""
    monkeypatch.setattr("screen.desk.connect", lambda *args, **options: connect(*args, limits=QUICK, **options))

    def ran(server, *argv):
        capsys.readouterr()
        began = time.monotonic()
        code = run(app, [*argv, "--json", "--endpoint", server.endpoint, "--token", "", "--cache-dir", str(tmp_path)])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return code, [json.loads(line) for line in out.splitlines()], err, time.monotonic() - began

    return ran


STATUS, SOME = Kind.STATUS, 40
PASSING = [  # what passes, or is gone round: the row is as if nothing had been
    Fault(Kind.STALL, after_bytes=SOME, times=2), Fault(Kind.CUT, after_bytes=SOME, times=2),
    Fault(Kind.RATE, bytes_per_second=20, times=1), Fault(Kind.NEVER, times=1),
    Fault(STATUS, status=403, times=1), Fault(STATUS, status=401, times=1), Fault(STATUS, status=500, times=2),
    Fault(STATUS, status=503, times=2), Fault(STATUS, status=429, times=1, headers=(("Retry-After", "1"),)),
    Fault(Kind.DROP_HEADERS, headers=(("Content-Length", ""),)), Fault(Kind.SLOW, seconds=0.2),
]  # fmt: skip
LASTING = [  # what stays: an error of its own code, and whether another run can help
    (Fault(Kind.STALL), "stalled", True), (Fault(Kind.CUT), "cut", True),
    (Fault(Kind.RATE, bytes_per_second=20), "slow", True), (Fault(Kind.NEVER), "stalled", True),
    (Fault(STATUS, status=500), "server_error", True), (Fault(STATUS, status=403), "expired", True),
    (Fault(Kind.WRONG_RANGE), "wrong_range", False), (Fault(Kind.GZIP), "range_ignored", False),
    (Fault(Kind.IGNORE_RANGE), "range_ignored", False), (Fault(Kind.SHIFTED), "malformed_header", False),
    (Fault(Kind.FLIP, after_bytes=2), "malformed_header", False),
    (Fault(Kind.DROP_HEADERS, headers=(("Content-Range", ""),)), "wrong_range", False),
    (Fault(STATUS, status=416), "range_refused", False), (Fault(STATUS, status=404), "not_found", False),
]  # fmt: skip


def named(fault):
    return f"{fault.kind}-{fault.status}" if fault.kind is STATUS else str(fault.kind)


def served(hub, fault):
    """Two repos, of which the CDN serves one well."""
    struck = dataclasses.replace(fault, route="cdn", path="a/struck/*")
    return hub(
        DemoRepo("a/struck", {**shards(1), "config.json": CONFIG}),
        DemoRepo("a/well", {"model.safetensors": weights(9), "config.json": CONFIG}),
        faults=[struck], one_request_headers=False,
    )  # fmt: skip


@pytest.mark.parametrize("fault", PASSING, ids=named)
def test_what_passes_leaves_no_mark(hub, screen, fault):
    code, rows, _, seconds = screen(served(hub, fault), "a/struck", "a/well")
    assert (code, [row["outcome"] for row in rows]) == (0, ["keep", "keep"])
    assert rows[0]["facts"]["tensors"] == 12
    assert seconds < 8


@pytest.mark.parametrize(("fault", "expected", "again"), LASTING, ids=lambda value: named(value)
                         if isinstance(value, Fault) else str(value))  # fmt: skip
def test_what_stays_is_that_row_s_error(hub, screen, fault, expected, again):
    code, rows, _, seconds = screen(served(hub, fault), "a/struck", "a/well")
    assert (code, [row["outcome"] for row in rows]) == (4, ["error", "keep"])
    assert (rows[0]["error"]["code"], rows[0]["error"]["retry"]) == (expected, again), rows[0]["error"]
    assert rows[0]["facts"]["file_bytes"] > 0  # what the tree said is not lost
    assert seconds < 12


def test_a_trickle_of_progress_does_not_go_on_forever(hub, screen):
    fault = Fault(Kind.STALL, after_bytes=SOME)  # each try brings a little, and then nothing
    code, rows, _, seconds = screen(served(hub, fault), "a/struck")
    assert (code, rows[0]["error"]["code"]) == (4, "stalled")
    assert seconds < 15


def test_a_refusal_longer_than_the_run_waits_is_all_that_origin_s(hub, screen):
    limited = Fault(Kind.STATUS, status=429, headers=(("Retry-After", "60"),))
    code, rows, _, seconds = screen(served(hub, limited), "a/struck")
    assert (code, rows[0]["error"]["code"], rows[0]["error"]["retry"]) == (4, "rate_limited", True)
    assert seconds < 5
