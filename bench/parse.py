"""What reading the largest headers takes: 299,545 tensors in 40 MB, parsed and counted, beside `json.loads` alone.

Each way is a process that has the bytes in memory before the clock starts; peaks include the interpreter and the bytes.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from screen.catalogue import demo_repos
from screen.census import derive
from screen.demofiles import head_bytes
from screen.header import parse_header

REPO = "nvidia/Qwen3.8-Flash-Next-NVFP4"
ROUNDS = 3  # the fastest counts


def measure() -> Iterator[dict[str, Any]]:
    """A row a way: seconds, peak memory, and times as long as `json.loads`."""
    [repo] = [repo for repo in demo_repos() if repo.name == REPO]
    with tempfile.TemporaryDirectory() as folder:
        for path, content in repo.main.files.items():
            if path.endswith(".safetensors"):
                (Path(folder) / path).write_bytes(content.head[: head_bytes(content)])
                (Path(folder) / f"{path}.size").write_text(str(content.size))
        base = 0.0
        for way in WAYS:
            command = [sys.executable, "-m", "bench.parse", way, folder]
            row = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            base = base or row["seconds"]
            yield {"client": way} | row | {"times_as_long": round(row["seconds"] / base, 2)}


def loads(files: dict[str, tuple[bytes, int]]) -> None:
    for head, _ in files.values():
        json.loads(head[8:])


def counted(files: dict[str, tuple[bytes, int]]) -> None:
    headers = {path: parse_header(head, file_size=size, name=path) for path, (head, size) in files.items()}
    derive({}, headers)


WAYS: dict[str, Callable[[dict[str, tuple[bytes, int]]], None]] = {"json.loads": loads, "parsed and counted": counted}


def main() -> None:
    """One way, over the headers in a folder; a JSON line."""
    way, folder = sys.argv[1], Path(sys.argv[2])
    files = {
        path.name: (path.read_bytes(), int(path.with_name(f"{path.name}.size").read_text()))
        for path in folder.glob("*.safetensors")
    }
    best = float("inf")
    for _ in range(ROUNDS):
        began = time.perf_counter()
        WAYS[way](files)
        best = min(best, time.perf_counter() - began)
    read = sum(len(head) for head, _ in files.values())
    print(json.dumps({"seconds": round(best, 3), "bytes": read, "peak_bytes": peak_bytes()}))


def peak_bytes() -> int:
    """The most memory this process has had; the usage that Linux reports begins with its parent's."""
    status = Path("/proc/self/status")
    if status.exists():
        return int(status.read_text().partition("VmHWM:")[2].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
