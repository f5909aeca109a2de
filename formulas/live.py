"""Asks the user's own engine: runs the probe by that engine's interpreter and reads its one answer.

    python -m formulas.live PYTHON [CAPABILITY...]     writes the shipped tables (`make engine-tables`)
"""

from __future__ import annotations

import datetime
import io
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from .engines import (
    HIDDEN,
    KV_DTYPES,
    SHIPPED_CAPABILITIES,
    Table,
    attention_question,
    fold_answers,
    format_questions,
)
from .errors import BadInput, ToolkitError

Answer = Mapping[str, Any]
TIMEOUT_SECONDS = 900.0


class EngineFailed(ToolkitError):
    code = "engine_failed"


def bundle() -> bytes:
    """The probe as one file an interpreter runs: a zip of formulas/probe with an entry point."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("__main__.py", "from fit_probe.run import main\n\nraise SystemExit(main())\n")
        archive.writestr("fit_probe/__init__.py", "")
        for source in sorted(files("formulas").joinpath("probe").iterdir(), key=lambda path: path.name):
            if source.name.endswith(".py") and source.name != "__init__.py":
                archive.writestr(f"fit_probe/{source.name}", source.read_bytes())
    return packed.getvalue()


def ask(command: Sequence[str], request: Answer, *, timeout_seconds: float = TIMEOUT_SECONDS) -> Answer:
    """The answer of the engine whose interpreter `command` starts (a path, or `docker run ... python`) to `request`.

    Raises BadInput where the command cannot be started or has no vllm, EngineFailed where it died, hung or said
    something else than an answer; the message ends with the engine's last words.
    """
    with tempfile.TemporaryDirectory(prefix="fit-probe-") as folder:
        probe = Path(folder) / "probe.pyz"
        probe.write_bytes(bundle())
        try:
            done = subprocess.run(
                [*command, str(probe)], input=json.dumps(request), capture_output=True, text=True,
                timeout=timeout_seconds, cwd=folder, check=False,
            )  # fmt: skip
        except OSError as error:
            raise BadInput(
                f"{command[0]}: expected a Python interpreter, got {error.strerror or error}; nothing was asked",
                hint="pass the python of the environment that has vllm: --engine-python PATH",
            ) from error
        except subprocess.TimeoutExpired as error:
            raise EngineFailed(
                f"{command[0]}: expected an answer within {timeout_seconds:.0f} s, got none; the engine was stopped"
            ) from error
    return _read(command[0], done)


def _read(name: str, done: subprocess.CompletedProcess[str]) -> Answer:
    said = done.stderr.strip().splitlines()
    last = said[-1][:300] if said else "nothing on stderr"
    missing = next((line for line in reversed(said) if "No module named 'vllm'" in line), None)
    if missing:
        raise BadInput(f"{name}: expected an interpreter that has vllm, got {missing}; nothing was asked")
    try:
        answer = json.loads(done.stdout)
    except ValueError as error:
        raise EngineFailed(f"{name}: expected one JSON answer, got exit {done.returncode}: {last}") from error
    if not isinstance(answer, dict) or "vllm" not in answer:
        raise EngineFailed(f"{name}: expected an answer that names its vllm version, got {str(answer)[:200]}")
    return answer


def live_table(
    command: Sequence[str], capabilities: Sequence[str | None], *, date: str, env: Mapping[str, str], notes: str = ""
) -> Table:
    """The table of the engine behind `command` for these capabilities (None: the card it has), one process each."""
    answers = []
    for capability in capabilities:
        dtype = "float16" if capability is not None and float(capability) < 8 else "bfloat16"
        request = {"capability": capability, "env": dict(env), "registry": True, "formats": format_questions(dtype)}
        answers.append(ask(command, {**request, "attention": attention_question(dtype)}))
        for library in HIDDEN.get(capability or "", ()):
            answers.append({**ask(command, {**request, "without": [library]}), "without": [library]})
    return fold_answers(answers, date=date, notes=notes)


def narrow_table(
    command: Sequence[str], capability: str | None, layers: Iterable[tuple[str, int]], names: Sequence[str] | None, *,
    date: str,
) -> Table:  # fmt: skip
    """The table of the engine behind `command`, asked only about these attention layers (kind, head size) and formats
    (None: all). The capability None is that of the card it has."""
    dtype = "float16" if capability is not None and float(capability) < 8 else "bfloat16"
    rows = [[kind, size, kv] for kind, size in dict.fromkeys(layers) for kv in KV_DTYPES]
    asked = format_questions(dtype)
    if names is not None:
        names = names or ["bf16"]
        asked = [{**one, "names": [name for name in names if name in one.get("names", names)]} for one in asked]
    request = {"capability": capability, "registry": True, "formats": [one for one in asked if one.get("names", True)],
               **({"attention": {"dtype": dtype, "rows": rows}} if rows else {})}  # fmt: skip
    return fold_answers([ask(command, request)], date=date, notes="with the libraries that environment has")


def main(argv: Sequence[str]) -> int:
    """Writes formulas/data/engine_vllm_VERSION.json from the engine behind an interpreter."""
    if not argv:
        raise BadInput("engine-tables: expected the path of an interpreter that has vllm (ENGINE_PYTHON=...), got none")
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    # Stock containers bring FlashInfer's compiled kernels; without them the engine looks for NVIDIA's server.
    table = live_table(
        argv[:1], argv[1:] or SHIPPED_CAPABILITIES, date=today, env={"VLLM_HAS_FLASHINFER_CUBIN": "1"},
        notes="flashinfer with its cubins, deep_gemm and humming present",
    )  # fmt: skip
    path = Path(str(files("formulas").joinpath("data", f"engine_vllm_{table['version']}.json")))
    path.write_text(json.dumps(table, separators=(",", ":")) + "\n", encoding="utf-8")
    print(f"{path}: {path.stat().st_size} bytes", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
