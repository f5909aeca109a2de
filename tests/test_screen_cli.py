"""`screen` as a user runs it, on a demo Hub: rows, exit codes, duplicates, the cache, every form of output."""

import contextlib
import csv
import functools
import io
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from formulas.console import run
from screen.catalogue import headers_dir
from screen.chain import Evidence, Gate
from screen.cli import app
from screen.demofaults import Fault, Kind
from screen.demofiles import Tensor, safetensors_file, small_repo
from screen.demorepo import DemoRepo
from screen.findings import Source
from screen.gates import GATES

DATA = Path(__file__).parents[1].parent / "shared" / "data"
GIB = 2**30
CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


def tensors(layer, count=3, width=8):
    return [Tensor(f"model.layers.{layer}.mlp.{part}_proj.weight", "BF16", (width, width))
            for part in ("gate", "up", "down")[:count]]  # fmt: skip


def repo(name, layers=2, *, seed=0, **about):
    """A small repo whose weights are its own."""
    shards = {f"model-{n + 1:05}-of-{layers:05}.safetensors": tensors(n) for n in range(layers)}
    return small_repo(name, shards if layers > 1 else {"model.safetensors": tensors(0)}, seed=seed, **about)


class Ran:
    """One run of the command: exit code, stdout, stderr."""

    def __init__(self, code, out, err):
        self.code, self.out, self.err = code, out, err

    @property
    def rows(self):
        return [json.loads(line) for line in self.out.splitlines()]


@pytest.fixture
def screen(tmp_path, capsys):
    """Runs `screen` against a Hub with a cache of this test's own; the Hub's endpoint is the first argument."""

    def ran(hub, *argv):
        where = ["--endpoint", hub.endpoint, "--token", "", "--cache-dir", str(tmp_path / "cache")] if hub else []
        capsys.readouterr()
        code = run(app, [*argv, *where])
        return Ran(code, *capsys.readouterr())

    return ran


def listed(tmp_path, *lines):
    path = tmp_path / "repos.txt"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_twenty_lines_are_twenty_rows_whatever_is_wrong_with_five(hub, screen, tmp_path):
    good = [repo(f"good/model-{n}", seed=n) for n in range(15)]
    truncated = safetensors_file(tensors(0), seed=99)
    truncated.size -= 2
    odd = [
        repo("odd/gated", seed=20, gated="manual"),
        DemoRepo("odd/old-name", renamed_to="odd/new-name"),
        repo("odd/new-name", seed=21),
        repo("odd/limited", seed=22),
        DemoRepo("odd/malformed", {"model.safetensors": truncated, "config.json": CONFIG}),
    ]
    limit = Fault(Kind.STATUS, route="info", path="odd/limited", times=1, status=429, seconds=1,
                  headers=(("RateLimit", '"api";r=0;t=1'),))  # fmt: skip
    server = hub(*good, *odd, faults=[limit])
    names = [f"good/model-{n}" for n in range(15)]
    names[3:3] = ["odd/missing", "odd/gated", "odd/old-name", "odd/limited", "odd/malformed"]
    result = screen(server, listed(tmp_path, "# twenty", "", *names), "--json")
    assert result.code == 4
    assert [row["repo"] for row in result.rows] == names
    assert "Traceback" not in result.err
    rows = {row["repo"]: row for row in result.rows}
    errors = {name: row["error"]["code"] for name, row in rows.items() if row["outcome"] == "error"}
    assert errors == {"odd/missing": "repo_not_found", "odd/gated": "gated", "odd/malformed": "malformed_header"}
    assert rows["odd/old-name"]["canonical"] == "odd/new-name"
    assert rows["odd/limited"]["outcome"] == "keep"
    assert "/odd/gated" in rows["odd/gated"]["error"]["hint"]
    assert rows["odd/gated"]["facts"]["file_bytes"] > 0
    assert rows["odd/gated"]["reached"] == "tree"
    assert "truncated" in rows["odd/malformed"]["error"]["message"]
    assert rows["odd/missing"]["facts"] is None


def test_a_line_that_names_no_repo_is_a_row(hub, screen, tmp_path):
    lines = listed(tmp_path, "good/model", "https://hub/x y z", "good/model@")
    result = screen(hub(repo("good/model")), lines, "--json")
    assert result.code == 4
    assert [row["outcome"] for row in result.rows] == ["keep", "error", "error"]
    assert result.rows[1]["error"]["code"] == "bad_input"
    assert result.rows[1]["revision"] is None


def test_a_bug_met_by_one_repo_costs_no_other_row(hub, screen, monkeypatch):
    def broken(known, criteria):
        if known.repo == "b/odd":
            raise ZeroDivisionError("division by zero")
        return iter(())

    gate = Gate("broken", Evidence.CONFIG, Source.CONFIG, broken, "nothing")
    monkeypatch.setattr("screen.survey.GATES", (*GATES, gate))
    result = screen(hub(*(repo(name, seed=i) for i, name in enumerate(["a/one", "b/odd", "c/two"]))),
                    "a/one", "b/odd", "c/two", "--json")  # fmt: skip
    assert [row["outcome"] for row in result.rows] == ["keep", "error", "keep"]
    assert (result.code, result.rows[1]["error"]["code"]) == (4, "bug")
    assert "ZeroDivisionError" in result.rows[1]["error"]["message"]


def test_every_recorded_config_gives_a_row(hub, screen, tmp_path):
    if not (DATA / "configs").is_dir():
        pytest.skip("needs ../shared/data/configs: recorded configs of real checkpoints")
    folders = sorted(folder for folder in (DATA / "configs").iterdir() if (folder / "config.json").exists())
    repos = [DemoRepo(folder.name.replace("__", "/", 1), functools.partial(with_config, folder, seed))
             for seed, folder in enumerate(folders)]  # fmt: skip
    result = screen(hub(*repos), listed(tmp_path, *(repo.name for repo in repos)), "--json")
    assert [(row["repo"], row["error"]) for row in result.rows] == [(repo.name, None) for repo in repos]


def with_config(folder, seed):
    return {"model.safetensors": safetensors_file(tensors(0), seed=seed)} | {p.name: p for p in folder.glob("*.json")}


def test_identical_repos_are_one_checkpoint_and_cost_one_read(hub, screen):
    files = {f"model-{n:05}-of-00206.safetensors": safetensors_file(tensors(n, 1), seed=n) for n in range(1, 207)}
    files["config.json"] = CONFIG
    server = hub(DemoRepo("first/model", files), DemoRepo("second/model", files), one_request_headers=False)
    result = screen(server, "first/model", "second/model", "--json")
    first, second = result.rows
    assert result.code == 0
    assert (first["outcome"], second["outcome"]) == ("keep", "drop")
    assert second["duplicate_of"] == f"first/model@{first['commit']}"
    assert second["reached"] == "tree"
    asked = [line.target for line in server.log if line.origin == "hub" and ".safetensors" in line.target]
    assert len(asked) == 206
    assert all("/first/model/" in target for target in asked)
    assert second["cost"]["requests"] == 2


def test_the_earlier_row_is_the_original_even_when_it_answers_last(hub, screen):
    files = {"model.safetensors": safetensors_file(tensors(0), seed=1), "config.json": CONFIG}
    slow = Fault(Kind.SLOW, path="a/slow*", seconds=0.3)
    server = hub(DemoRepo("a/slow", files), DemoRepo("b/quick", files), faults=[slow])
    rows = screen(server, "a/slow", "b/quick", "--json").rows
    assert [row["outcome"] for row in rows] == ["keep", "drop"]
    assert rows[1]["duplicate_of"].startswith("a/slow@")


def test_equal_weights_with_another_config_both_go_on(hub, screen):
    weights = {f"model-{n:05}-of-00005.safetensors": safetensors_file(tensors(n), seed=n) for n in range(1, 6)}
    declared = {**CONFIG, "text_config": {"ple_embedding_dtype": "float8_e4m3fn"}}
    server = hub(DemoRepo("a/bare", weights | {"config.json": CONFIG}),
                 DemoRepo("b/declared", weights | {"config.json": declared}), one_request_headers=False)  # fmt: skip
    rows = screen(server, "a/bare", "b/declared", "--json").rows
    assert [row["outcome"] for row in rows] == ["keep", "keep"]
    assert rows[1]["same_weights_as"] == f"a/bare@{rows[0]['commit']}"
    assert rows[1]["duplicate_of"] is None
    note = next(finding for finding in rows[1]["findings"] if finding["gate"] == "twin-config")
    assert list(note["observed"]) == ["config.json.text_config.ple_embedding_dtype"]
    assert rows[1]["cost"]["cached_headers"] == 5
    assert sum(".safetensors" in line.target and line.origin == "hub" for line in server.log) == 5


def test_a_gated_original_does_not_swallow_its_open_copy(hub, screen):
    files = {"model.safetensors": safetensors_file(tensors(0), seed=1), "config.json": CONFIG}
    server = hub(DemoRepo("a/gated", files, gated="auto"), DemoRepo("b/open", files), DemoRepo("c/again", files))
    rows = screen(server, "a/gated", "b/open", "c/again", "--json").rows
    assert [row["outcome"] for row in rows] == ["error", "keep", "drop"]
    assert rows[2]["duplicate_of"].startswith("b/open@")


def test_a_second_run_reads_no_headers(hub, screen):
    server = hub(repo("a/model", 6, seed=1), repo("b/model", 3, seed=5))
    first = screen(server, "a/model", "b/model", "--json")
    server.reset()
    second = screen(server, "a/model", "b/model", "--json")
    assert set(server.counts) == {"info", "tree"}
    assert [row["cost"]["requests"] for row in second.rows] == [2, 2]
    assert [row["cost"]["cached_headers"] for row in second.rows] == [6, 3]
    assert [row["facts"] for row in second.rows] == [row["facts"] for row in first.rows]


def test_every_form_of_output_tells_the_same(hub, screen):
    server = hub(repo("a/model", seed=1), repo("b/large", 9, seed=2))
    argv = ["a/model", "b/large", "c/missing", "--max-size", "3KiB"]
    rows = screen(server, *argv, "--json").rows
    table = list(csv.DictReader(io.StringIO(screen(server, *argv, "--csv").out)))
    assert [(row["repo"], row["outcome"]) for row in table] == [(row["repo"], row["outcome"]) for row in rows]
    assert table[0]["tensor_bytes"] == str(rows[0]["facts"]["tensor_bytes"])
    assert [row["outcome"] for row in rows] == ["keep", "drop", "error"]
    for form in ((), ("--markdown",)):
        result = screen(server, *argv, *form)
        assert result.code == 4
        assert all(name in result.out for name in ("a/model", "b/large", "c/missing"))
        assert "weights take" in result.out
        assert "\x1b" not in result.out
        assert result.err == ""
    assert screen(server, "a/model", "--json", "--csv").code == 2


def test_exit_codes(hub, screen, tmp_path):
    server = hub(repo("a/model"))
    assert screen(server, "a/model").code == 0
    assert screen(server, "a/model", "--max-size", "1KiB").code == 3
    assert screen(server, "a/model", "--mtp", "required", "--experts", "512").code == 3
    assert screen(server, "a/model", "a/none").code == 4
    assert screen(server, "not a repo").code == 2
    assert screen(server, listed(tmp_path, "# nothing")).code == 2
    assert screen(server, "a/model", "--max-size", "big").code == 2
    assert screen(None, "--version").code == 0
    assert screen(None, "gates").code == 0


def test_policy_file_and_the_flag_that_overrides_it(hub, screen, tmp_path):
    server, policy = hub(repo("a/model")), tmp_path / "policy.toml"
    policy.write_text('max_size = "1KiB"\n')
    assert screen(server, "a/model", "--policy", str(policy)).code == 3
    assert screen(server, "a/model", "--policy", str(policy), "--max-size", "1GiB").code == 0
    policy.write_text('max_sise = "1KiB"\n')
    result = screen(server, "a/model", "--policy", str(policy), "--json")
    assert result.code == 2
    error = json.loads(result.err)["error"]
    assert (error["code"], error["hint"]) == ("bad_input", "did you mean max_size?")


def test_errors_under_json_are_one_object(hub, screen):
    result = screen(hub(), "--json", "x/y", "--policy", "/nowhere.toml")
    assert result.code == 2
    assert json.loads(result.err)["error"]["code"] == "bad_input"
    assert result.out == ""


def test_like_names_what_a_loader_would_not_place(hub, screen):
    strange = [*tensors(0), Tensor("model.layers.0.ple.ngram_embedding.shard_0.weight", "BF16", (4, 4))]
    server = hub(repo("ref/model", 1), small_repo("odd/model", {"model.safetensors": strange}, seed=4))
    result = screen(server, "odd/model", "--like", "ref/model", "--json")
    [finding] = [finding for finding in result.rows[0]["findings"] if finding["gate"] == "like"]
    assert result.code == 3
    assert "(model.layers.0.ple.ngram_embedding.shard_0)" in finding["because"]
    assert screen(server, "odd/model", "--like", "gone/model").code == 2


def test_local_folder_and_file_need_no_hub(screen, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    content = safetensors_file(tensors(0), seed=1)
    data = b"".join(content.pieces(0, content.size))
    (folder / "model.safetensors").write_bytes(data)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    [row] = screen(None, str(folder), "--json").rows
    assert row["outcome"] == "keep"
    assert row["facts"]["tensors"] == 3
    assert row["cost"]["requests"] == 0
    assert screen(None, "show", str(folder / "model.safetensors")).code == 3  # no config beside one file: unknown
    (folder / "model.safetensors").write_bytes(data[:-1])
    result = screen(None, str(folder), "--json")
    assert (result.code, result.rows[0]["error"]["code"]) == (4, "malformed_header")


def test_show_and_cache(hub, screen, tmp_path):
    server = hub(repo("a/model", 5, seed=1))
    text = screen(server, "show", "a/model").out
    assert "15 tensors in 5 files" in text
    assert [line.split()[:3] for line in text.splitlines() if line.startswith("main")] == [["main", "mlp", "BF16"]]
    folder = ["--cache-dir", str(tmp_path / "cache")]
    usage = json.loads(screen(None, "cache", "--json", *folder).out)
    assert usage["entries"] >= 6
    assert screen(None, "cache", "--clear", *folder).code == 0
    assert json.loads(screen(None, "cache", "--json", *folder).out)["entries"] == 0
    assert screen(server, "show", "a/gone").code == 4


def test_repo_lines_on_stdin_at_a_revision(hub, screen, monkeypatch):
    model = repo("a/model", seed=1)
    old = model.main.oid
    model.push({"config.json": {"model_type": "newer"}})
    monkeypatch.setattr("sys.stdin", io.StringIO(f"a/model@{old}  # as it was\na/model\na/model@nowhere\n"))
    rows = screen(hub(model), "-", "--json").rows
    assert [row["facts"] and row["facts"]["model_type"] for row in rows] == ["demo", "newer", None]
    assert [row["revision"] for row in rows] == [old, "main", "nowhere"]
    assert rows[0]["commit"] == old != rows[1]["commit"]
    assert rows[1]["same_weights_as"] == f"a/model@{old}"
    assert rows[2]["error"]["code"] == "revision_not_found"


def test_progress_is_on_stderr_and_only_where_that_is_a_terminal(hub, tmp_path):
    server = hub(repo("a/model", seed=1), faults=[Fault(Kind.SLOW, route="tree", seconds=0.5)])
    command = [sys.executable, "-m", "screen", "a/model", "--json", "--endpoint", server.endpoint, "--token", "",
               "--cache-dir"]  # fmt: skip
    ours, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 80))
    seen = subprocess.run([*command, tmp_path / "1"], stdout=subprocess.PIPE, stderr=terminal, check=True)
    drawn = os.read(ours, 4096)
    os.close(terminal)
    os.close(ours)
    assert b"0/1" in drawn
    assert json.loads(seen.stdout)["outcome"] == "keep"
    plain = subprocess.run([*command, tmp_path / "2"], capture_output=True, check=True)
    assert plain.stderr == b""


def test_a_reader_that_leaves_is_no_traceback(hub, tmp_path):
    server = hub(*(repo(f"a/model-{n}", 9, seed=n) for n in range(9)))
    command = [sys.executable, "-m", "screen", *(f"a/model-{n}" for n in range(9)), "--json", "--endpoint",
               server.endpoint, "--token", "", "--cache-dir", str(tmp_path)]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.readline()
        process.stdout.close()
        err = process.stderr.read()
    assert b"Traceback" not in err
    assert process.returncode in (0, 1)


def test_interrupted_it_exits_130_soon_and_the_cache_serves_the_next_run(hub, tmp_path):
    stuck = Fault(Kind.NEVER, route="*", path="b/stuck*")
    server = hub(repo("a/model", 5, seed=1), repo("b/stuck", 5, seed=7), faults=[stuck])
    command = [sys.executable, "-m", "screen", "a/model", "b/stuck", "--json", "--endpoint", server.endpoint,
               "--token", "", "--cache-dir", str(tmp_path / "cache")]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        line = process.stdout.readline()  # the first row is out: the second one hangs
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
    assert json.loads(line)["repo"] == "a/model"
    assert process.returncode == 130
    assert "run again to continue" in err
    assert "Traceback" not in err
    assert time.monotonic() - began < 10
    server.set_fault()
    server.reset()
    again = subprocess.run([*command, "--quiet"], capture_output=True, text=True, timeout=60, check=False)
    first, second = map(json.loads, again.stdout.splitlines())
    assert again.returncode == 0
    assert first["cost"]["cached_headers"] == 5
    assert second["outcome"] == "keep"


@pytest.fixture(scope="module")
def catalogue():
    """Every repo of the shipped catalogue, screened once: row by repo."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.delenv("HF_ENDPOINT", raising=False)
        code = run(app, ["--demo", "--json"])
    rows = [json.loads(line) for line in out.getvalue().splitlines()]
    assert code == 4
    return {row["repo"]: row for row in rows}


def found(row, gate):
    return [(finding["outcome"], finding["because"]) for finding in row["findings"] if finding["gate"] == gate]


once = pytest.mark.xdist_group("catalogue")  # the fixture takes a while: one worker for all that use it

STORY = {
    "RadixArk/Qwen3.8-Flash-Next-NVFP4": ("table", "note", "no ple_embedding_dtype"),
    "ple-fixed/Qwen3.8-Flash-Next-NVFP4": ("twin-config", "note", "ple_embedding_dtype"),
    "quant-mirrors/Qwen3.8-Flash-Next-NVFP4": ("duplicate", "reject", "RadixArk/Qwen3.8-Flash-Next-NVFP4@"),
    "reap-lab/Qwen3.8-Flash-Next-REAP-448-NVFP4": ("experts", "reject", "448"),
    "bryce-hoehn/Qwen3.5-25B-REAP-A3B-Coding": ("mtp", "note", "declares 1 MTP layer, the files have no MTP tensors"),
    "requant/Qwen3.6-35B-A3B-FP8-mtp": ("index", "note", "mtp.safetensors but not in the index"),
    "Qwen/Qwen3-8B-Instruct": ("duplicate", "reject", "Qwen/Qwen3-8B@"),
    "oldtimer/llama-7b-finetune": ("safetensors", "reject", "only pickle weights"),
}


@once
@pytest.mark.parametrize("name", STORY)
def test_the_catalogue_tells_its_story(catalogue, name):
    gate, outcome, words = STORY[name]
    assert any(seen == outcome and words in because for seen, because in found(catalogue[name], gate))


@once
def test_the_catalogue_s_errors_are_told_apart(catalogue):
    codes = {name: row["error"]["code"] for name, row in catalogue.items() if row["error"]}
    assert codes == {
        "unlucky/Qwen3-8B": "malformed_header", "meta-llama/Llama-3.1-8B": "gated",
        "taken-down/Qwen3-8B-uncensored": "disabled", "gone/Qwen3.8-Flash-Next-NVFP4": "repo_not_found",
        "in-house/Qwen3.8-Flash-Next-NVFP4": "repo_not_found",
    }  # fmt: skip


@once
def test_a_table_declared_is_not_called_undeclared(catalogue):
    assert found(catalogue["ple-fixed/Qwen3.8-Flash-Next-NVFP4"], "table") == []


def gib(count):
    return f"{count / GIB:.2f}"


def check_flash_next(row):
    """The published account of RadixArk/Qwen3.8-Flash-Next-NVFP4, to two places of GiB."""
    facts = row["facts"]
    cells = facts["census"]

    def size(**wanted):
        return sum(cell["bytes"] for cell in cells if all(cell[key] in value for key, value in wanted.items()))

    assert (facts["shards"], facts["tensors"]) == (206, 296_475)
    experts = size(stack=["main"], role=["expert", "shared_expert"])
    rest = facts["tensor_bytes"] - facts["mtp"]["bytes"] - facts["ple"]["bytes"] - experts
    parts = facts["tensor_bytes"], facts["mtp"]["bytes"], facts["ple"]["bytes"], experts, rest
    assert list(map(gib, parts)) == ["125.87", "4.86", "47.75", "63.72", "9.55"]
    assert facts["experts"] | {"layers": None} == {"declared": facts["experts"]["declared"], "found": 512,
                                                   "layers": None, "uneven": {}}  # fmt: skip
    assert list(facts["mtp"]["dtypes"]) == ["BF16"]
    assert (facts["ple"]["format"], facts["ple"]["declared_dtype"]) == ("fp8", None)


@once
def test_flash_next_of_the_catalogue_has_the_published_figures(catalogue):
    check_flash_next(catalogue["RadixArk/Qwen3.8-Flash-Next-NVFP4"])


@pytest.mark.slow
def test_recorded_headers_of_25_repos(hub, screen, tmp_path):
    if not (DATA / "headers").is_dir():
        pytest.skip("needs ../shared/data/headers: recorded headers of real checkpoints")
    repos = headers_dir(DATA / "headers", DATA / "configs")
    result = screen(hub(*repos), listed(tmp_path, *(repo.name for repo in repos)), "--json")
    rows = {row["repo"]: row for row in result.rows}
    assert list(rows) == [repo.name for repo in repos]
    assert result.code == 0
    check_flash_next(rows["RadixArk/Qwen3.8-Flash-Next-NVFP4"])
    for name, row in rows.items():
        bare = not (DATA / "configs" / name.replace("/", "__") / "config.json").exists()
        assert row["outcome"] == ("unknown" if bare else "keep"), name
        assert sum(cell["bytes"] for cell in row["facts"]["census"]) == row["facts"]["tensor_bytes"]
    for name in ("bryce-hoehn/Qwen3.5-18B-REAP-A3B-Coding", "bryce-hoehn/Qwen3.5-25B-REAP-A3B-Coding"):
        assert ("note", "config.json declares 1 MTP layer, the files have no MTP tensors; speculative decoding with it "
                "cannot start") in found(rows[name], "mtp")  # fmt: skip
    assert found(rows["MiniMaxAI/MiniMax-M2.7"], "shards")[0][0] == "note"
