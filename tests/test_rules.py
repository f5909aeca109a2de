"""The architecture, held by an `ast` walk: what may import what, and which modules are pure."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ORDER = {"formulas": 0, "screen": 1, "stage": 2}
# Where files, clocks and processes are met. (formulas/probe is run by the interpreter of an engine, not by ours.)
SHELL = {
    "formulas": {"cli", "console", "shipped", "tables", "own", "plot", "live"},
    "screen": {"cli", "hub", "cache", "local", "demohub", "report"},
    "stage": {"cli", "store", "sources", "fetch", "execute", "serve"},
}
PURE_SCREEN = {"repo", "header", "stated", "census", "formats", "quantization", "shards", "chain", "findings", "gates",
               "contents", "loadable", "policy", "fits", "on", "target", "compare", "flat", "pairs", "card",
               "readme", "counting"}  # fmt: skip
PURE_STAGE = {"plan", "journal", "spans", "manifest"}
IMPURE = {"requests", "os", "pathlib", "tempfile", "shutil", "socket", "subprocess", "threading", "concurrent", "time",
          "random", "logging", "typer"}  # fmt: skip
MODULES = sorted(p for package in ORDER for p in (ROOT / package).glob("*.py"))
VAGUE = {"utils", "helpers", "common", "manager"}


def imports(path: Path) -> list[str]:
    """Absolute dotted names of everything a module imports, at any depth of nesting."""
    package = path.parent.name
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = f"{package}.{node.module}" if node.level and node.module else package if node.level else node.module
            found += [f"{base}.{alias.name}" for alias in node.names]
    return found


def is_pure(path: Path) -> bool:
    package, name = path.parent.name, path.stem
    if package == "formulas":
        return name not in SHELL["formulas"]
    return name in (PURE_SCREEN if package == "screen" else PURE_STAGE)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_imports_go_one_way(path):
    for name in imports(path):
        top, *rest = name.split(".")
        if top in ORDER and path.stem != "cli":
            assert ORDER[top] <= ORDER[path.parent.name], f"{path.parent.name} may not import {name}"
        if top in ORDER and rest and path.stem != "__main__":
            assert rest[0] != "cli", f"{name}: nothing imports a cli"


@pytest.mark.parametrize("path", [p for p in MODULES if is_pure(p)], ids=lambda p: f"{p.parent.name}/{p.name}")
def test_pure_modules_do_no_io(path):
    assert not {name.split(".")[0] for name in imports(path)} & IMPURE


@pytest.mark.parametrize("path", MODULES, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_names_and_excepts(path):
    assert path.stem not in VAGUE
    for node in ast.walk(ast.parse(path.read_text())):
        assert not (isinstance(node, ast.ExceptHandler) and node.type is None), "no bare except"


def test_repository_names_no_machine():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split("\n")
    machine_path = re.compile(r"/(?:root|home/[a-z]+)/|/wor" r"k/")
    for name in tracked:
        path = ROOT / name
        if not name or not path.is_file() or path.suffix in {".gz", ".safetensors", ".png"}:
            continue
        assert not machine_path.search(path.read_text(errors="replace")), f"{name} names a path of one machine"
