"""The README's console blocks are run, command by command, against the demo Hub; what they print must be what it says.

`python tests/test_readme.py` writes what the commands print into the README: look at the difference before you commit.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from screen.demoserve import served

README = Path(__file__).parent.parent / "README.md"
BLOCK = re.compile(r"(?<=```console\n)(.*?)(?=```)", re.DOTALL)
CHANGES = (  # what no two runs print alike
    (re.compile(r"127\.0\.0\.1:\d+"), "127.0.0.1:PORT"),
    (re.compile(r"[\d.]+ [KMG]iB/s"), "N MiB/s"),
    (re.compile(r"[\d.]+ [KMGT]iB free"), "N GiB free"),
    (re.compile(r'"seconds":[\d.]+'), '"seconds":N'),
)

# What a run spends depends on which answer came first: the funnel's last columns are shown, not compared.
SPENT = re.compile(
    r"^((?:info|tree|config|headers|kept) +\d+(?: +\d+ +\d+)?) +\d+ +\d+ +[\d.]+ [KMG]?i?B", re.MULTILINE
)


def commands(block: str) -> list[str]:
    """The commands of a block; one that ends in a backslash goes on in the next line."""
    joined = block.replace("\\\n", "\\\0")
    return [line[2:].replace("\\\0", "\\\n") for line in joined.split("\n") if line.startswith("$ ")]


def transcript(block: str, work: str, environment: dict[str, str]) -> str:
    """A block as it would be printed now."""
    lines = []
    for command in commands(block):
        ran = subprocess.run(["sh", "-c", command], cwd=README.parent, env=environment, capture_output=True, text=True)
        assert "Traceback" not in ran.stderr, ran.stderr
        said = ran.stdout.replace(work, "DEMO")
        for pattern, stands in CHANGES:
            said = pattern.sub(stands, said)
        lines.append(f"$ {command}\n{said}")
    return "".join(lines)


@pytest.fixture(scope="module")
def surroundings():
    yield from surrounded()


def surrounded():
    with tempfile.TemporaryDirectory() as work, served() as hub:
        scripts = Path(sys.executable).parent
        yield work, os.environ | {
            "HF_ENDPOINT": hub.endpoint, "HF_TOKEN": "", "DEMO": work, "XDG_CACHE_HOME": f"{work}/cache",
            "XDG_DATA_HOME": f"{work}/data", "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "120",
        }  # fmt: skip


@pytest.mark.xdist_group("readme")
@pytest.mark.parametrize("number", range(len(BLOCK.findall(README.read_text()))))
def test_readme_says_what_the_commands_print(number, surroundings):
    block = BLOCK.findall(README.read_text())[number]
    assert SPENT.sub(r"\1", transcript(block, *surroundings)) == SPENT.sub(r"\1", block)


def rewrite() -> None:
    text = README.read_text()
    for where in surrounded():
        for block in BLOCK.findall(text):
            text = text.replace(block, transcript(block, *where))
    README.write_text(text)


if __name__ == "__main__":
    rewrite()
