"""Large repos are counted in processes of their own: the same answers, whatever becomes of the process."""

import json
import os
import signal
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import pytest

from formulas.errors import HeaderError, HubMisbehaved
from screen import apart, evidence
from screen.apart import Apart, Lost
from screen.cache import Cache
from screen.chain import Criteria
from screen.counting import Origin, Tally
from screen.demofiles import Tensor, small_repo
from screen.hub import Hub
from screen.policy import Policy
from screen.survey import Line, survey

LAYERS, SHARDS = 24, 6
ORIGIN = Origin({"num_hidden_layers": LAYERS}, None, "o/n", "c" * 40, 1)


def shard(number):
    """A file of a few tensors."""
    names = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in range(number, LAYERS, SHARDS)]
    tensor = {"dtype": "BF16", "shape": [4]}
    text = json.dumps({key: tensor | {"data_offsets": [8 * n, 8 * n + 8]} for n, key in enumerate(names)}).encode()
    return names, struct.pack("<Q", len(text)) + text + bytes(8 * len(names))


FILES = {f"model-{number}.safetensors": shard(number) for number in range(SHARDS)}
INDEX = json.dumps({"weight_map": {name: path for path, (names, _) in FILES.items() for name in names}}).encode()


def fed(count, files=FILES):
    """What a count says of these files."""
    placed = count.index(INDEX)
    for path, (_, data) in files.items():
        count.header(path, data, len(data), f"o/n {path}")
    return placed, count.counted(ORIGIN)


@pytest.fixture
def workers():
    made = Apart(2)
    yield made
    made.close()
    assert all(worker._process.returncode is not None for worker in made._workers), "every process was waited for"


def test_a_worker_says_what_this_process_does(workers):
    here = fed(Tally())
    assert here[1].facts.tensors == LAYERS
    assert here[1].problems == ()
    with workers.tally() as one, workers.tally() as two, ThreadPoolExecutor(2) as both:
        assert list(both.map(fed, [one, two])) == [here, here]
    assert len(workers._workers) == 2
    with workers.tally() as again:
        assert fed(again) == here
    assert len(workers._workers) == 2, "free workers serve again"


def test_errors_are_those_of_this_process(workers):
    cut = {**FILES, "model-3.safetensors": (None, FILES["model-3.safetensors"][1][:-1])}
    with workers.tally() as count:
        with pytest.raises(HubMisbehaved, match="weight_map"):
            count.index(b"{}")
        with pytest.raises(HeaderError, match=r"o/n model-3\.safetensors: .* the upload is truncated"):
            fed(count, cut)
        count.refuse("a.safetensors", HeaderError("a: expected 8 bytes", hint="h"))
        with pytest.raises(HeaderError) as caught:
            count.counted(ORIGIN)
        assert (caught.value.message, caught.value.hint) == ("a: expected 8 bytes", "h")


def test_a_fault_in_a_call_without_an_answer_is_not_lost(workers):
    with workers.tally() as count:
        count.header("a.safetensors", None, 0, "a")  # no bytes at all: no caller does that
        with pytest.raises(TypeError):
            count.counted(ORIGIN)


def test_whoever_waits_for_a_killed_worker_is_told(workers):
    count = workers.tally()
    count.index(INDEX)
    [worker] = workers._workers
    os.kill(worker._process.pid, signal.SIGKILL)
    with pytest.raises(Lost):
        count.counted(ORIGIN)
    with pytest.raises(Lost):
        count.header("a", b"", 0, "a")


def test_no_worker_where_none_can_be_started(monkeypatch):
    assert Apart(1).tally() is None
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert Apart(2).tally() is None


# A survey ------------------------------------------------------------------------------------------------------------


NAMES = [Tensor(f"model.layers.{layer}.mlp.up_proj.weight", "BF16", (4,)) for layer in range(LAYERS)]
REPO = small_repo("o/n", {f"model-{n}.safetensors": NAMES[n::SHARDS] for n in range(SHARDS)})


def surveyed(running, folder):
    """The one verdict, but for what it cost."""
    with Hub(running.endpoint) as source:
        criteria = Criteria(Policy(scan="ignore"), datetime.now(UTC))
        [item] = survey([Line("o/n", "main", source)], criteria, Cache(folder))
    return item.verdict.model_copy(update={"cost": None})


@pytest.fixture
def started(monkeypatch):
    """The processes a survey starts; on one core, too."""
    monkeypatch.setattr(apart, "cores", lambda: 2)
    found = []

    class Started(subprocess.Popen):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            found.append(self)

    monkeypatch.setattr(subprocess, "Popen", Started)
    return found


def test_a_small_repo_starts_no_process(hub, tmp_path, started):
    assert surveyed(hub(REPO), tmp_path).outcome == "keep"
    assert not started


def test_a_large_repo_is_judged_the_same(hub, tmp_path, started, monkeypatch):
    running = hub(REPO)
    here = surveyed(running, tmp_path / "here")
    monkeypatch.setattr(evidence, "LARGE_INDEX", 0)
    assert surveyed(running, tmp_path / "there") == here
    assert here.facts.tensors == LAYERS
    assert [process.returncode for process in started] == [-signal.SIGKILL], "one, ended and waited for"


def test_a_lost_worker_costs_no_row(hub, tmp_path, started, monkeypatch):
    running = hub(REPO, one_request_headers=False)
    here = surveyed(running, tmp_path / "here")
    monkeypatch.setattr(evidence, "LARGE_INDEX", 0)
    header = apart.Remote.header

    def dies(self, *given):
        os.kill(started[0].pid, signal.SIGKILL)
        header(self, *given)

    monkeypatch.setattr(apart.Remote, "header", dies)
    assert surveyed(running, tmp_path / "there") == here
    assert len(started) == 1


def test_a_survey_left_early_leaves_no_process(hub, tmp_path, started, monkeypatch):
    monkeypatch.setattr(evidence, "LARGE_INDEX", 0)
    with Hub(hub(REPO).endpoint) as source:
        lines = [Line("o/n", revision, source) for revision in ("main", "nowhere")]
        items = survey(lines, Criteria(Policy(), datetime.now(UTC)), Cache(tmp_path))
        next(items)
        items.close()
    assert all(process.returncode is not None for process in started)
    assert started
