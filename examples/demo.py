"""The main job, on a Hub that runs on this machine: screen a list, fit what is left, stage one. No network."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from screen.demoserve import served

ROOT = Path(__file__).parent.parent
FLASH = "RadixArk/Qwen3.8-Flash-Next-NVFP4"
DECLARED = """--hf-overrides '{"text_config": {"ple_embedding_dtype": "float8_e4m3fn"}}'"""
STEPS = (
    ("Which of these are worth a download?", "screen examples/repos.txt"),
    ("What is in one of them?", f"screen show {FLASH}"),
    ("Does it fit two 72 GB cards, with the context we want, with and without speculation?",
     f"fit {FLASH} --gpu rtx-pro-5000-72gb --tp 2 --ple gpu --max-num-seqs 16 --gpu-memory-utilization 0.98 "
     f"{DECLARED} --compare-mtp 0,2"),
    ("Put a small one on this disk, from what screen kept.",
     'screen --json tiny/qwen3-moe | stage --from - --store "$DEMO/store" --to "$DEMO/qwen3-moe"'),
    ("Again: nothing is fetched twice, not even under another name.",
     'stage tiny-mirror/qwen3-moe --store "$DEMO/store"'),
    ("Is what is there what was asked for?", 'stage verify --store "$DEMO/store"'),
)  # fmt: skip
ANSWERS = (0, 3, 4)  # done: yes, no, or partly; the list holds repos that are gone or gated on purpose


def main() -> int:
    """0, or the exit code of the first step that failed."""
    work = Path(tempfile.mkdtemp(prefix="ckpt-demo-"))
    scripts = Path(sys.executable).parent
    try:
        with served() as hub:
            environment = os.environ | {
                "HF_ENDPOINT": hub.endpoint, "HF_TOKEN": "", "DEMO": str(work), "XDG_CACHE_HOME": str(work / "cache"),
                "XDG_DATA_HOME": str(work / "data"), "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
            }  # fmt: skip
            for question, command in STEPS:
                print(f"\n# {question}\n$ {command}", flush=True)
                code = subprocess.run(["sh", "-c", command], cwd=ROOT, env=environment).returncode
                if code not in ANSWERS:
                    print(f"demo: expected an answer, got exit code {code}", file=sys.stderr)
                    return code
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
