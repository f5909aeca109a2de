"""What the three command lines share: streams that are closed or full, texts from strangers, numbers JSON lacks."""

import json
import subprocess
import sys

import pytest

from formulas.console import data, json_line, message, run, table

GATES = f"{sys.executable} -m screen gates"


@pytest.mark.parametrize("form", ["", " --json"])
def test_a_full_disk_behind_stdout_is_a_sentence(form):
    ran = subprocess.run(f"{GATES}{form} >/dev/full", shell=True, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert "stdout: expected room for the answer, got No space left on device; the rest is lost" in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize(("closed", "seen"), [(">&-", False), ("2>&-", True), ("<&-", True), (">&- 2>&- <&-", False)])
def test_a_closed_stream_is_nowhere(closed, seen):
    ran = subprocess.run(f"{GATES} {closed}", shell=True, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ("access" in ran.stdout) is seen


def test_text_from_strangers_cannot_drive_a_terminal(capsys):
    hostile = "\x1b[31mred\x07\x9b2J\u202egnp\r"
    data("a\nb\t" + hostile)
    message(hostile)
    out, err = capsys.readouterr()
    assert out == "a\nb\t\\x1b[31mred\\x07\\x9b2J\\u202egnp\\x0d\n"
    assert err == "\\x1b[31mred\\x07\\x9b2J\\u202egnp\\x0d\n"
    assert table([["head", "x"], ["two\nlines", "y"]]) == ["head          x", "two\\x0alines  y"]


def test_a_json_line_is_one_line_of_json_for_every_reader(capsys):
    value = {"nan": [float("nan"), float("-inf"), 1.5], "lines": "\u2028\x85", "half": "\ud800", "name": "模型"}
    json_line(value)
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 1

    def refuse(constant):
        raise AssertionError(constant)

    assert json.loads(out, parse_constant=refuse) == value | {"nan": [None, None, 1.5]}


def test_a_lone_surrogate_is_written(capsys):
    def app(args, standalone_mode):
        data("\ud800")
        return 0

    assert run(app, []) == 0
    assert capsys.readouterr().out == "\\ud800\n"
