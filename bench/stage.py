"""`stage` beside its peers, on loopback, digests on: wall and CPU seconds of the client, peak memory. JSON lines.

    python -m bench.stage                      one file, eight files, and one file over connections capped at 8 MiB/s
    python -m bench.stage --size 2GiB --files 8 --cap 8MiB [--only NAME] [--repeat N]

Every client gets the same files from the same server process, one after the other, into an empty folder. A figure is
only comparable within one run: other work on the machine is in all of them. Nothing here asserts a time.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from formulas.units import GIB, MIB, parse_size

REPO = "bench/model"
CASES = ((2 * GIB, 1, 0), (2 * GIB, 8, 0), (256 * MIB, 1, 8 * MIB))  # bytes, files, bytes/s of a connection
SERVER = """
import sys, time
from pathlib import Path
from screen.demofaults import Fault, Kind
from screen.demohub import DemoHub
from screen.demorepo import folder_repo
cap = float(sys.argv[2])
faults = [Fault(Kind.RATE, "cdn", bytes_per_second=cap)] if cap else []
repo = folder_repo("bench/model", Path(sys.argv[1]))
repo.main
with DemoHub([repo], faults=faults) as hub:
    print(hub.endpoint, flush=True)
    sys.stdin.read()
"""
SNAPSHOT = (
    "import sys\nfrom huggingface_hub import snapshot_download\nsnapshot_download(sys.argv[1], cache_dir=sys.argv[2])"
)
VERIFY_FLOOR = (
    "import hashlib, sys\nfor name in sys.argv[1:]:\n with open(name, 'rb') as f: hashlib.file_digest(f, 'sha256')"
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.stage")
    parser.add_argument("--size", type=parse_size, help="of all files together")
    parser.add_argument("--files", type=int, default=1)
    parser.add_argument("--cap", type=parse_size, default=0, help="bytes a second of each connection; 0: none")
    parser.add_argument("--only", action="append", help="a client; repeatable")
    parser.add_argument("--repeat", type=int, default=1)
    chosen = parser.parse_args()
    cases = CASES if chosen.size is None else ((chosen.size, chosen.files, chosen.cap),)
    for case in cases:
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            measure(Path(folder), *case, chosen.only, chosen.repeat)


def measure(work: Path, size: int, files: int, cap: int, only: list[str] | None, repeat: int) -> None:
    """Prints one line a client and repetition."""
    source = work / "source"
    digests = make_files(source, size // files, files)
    with serving(source, cap) as endpoint:
        for name, argv, environment in clients(work / "out", endpoint, digests):
            if only and name not in only:
                continue
            if shutil.which(argv[0][0]) is None:
                report(client=name, skipped=f"{argv[0][0]} is not installed")
                continue
            for _ in range(repeat):
                shutil.rmtree(work / "out", ignore_errors=True)
                (work / "out").mkdir()
                about = {"client": name, "bytes": size, "files": files, "connection_cap": cap}
                report(**about, **timed(argv, environment))
    store = work / "out" / "store"
    if store.is_dir():
        argv = [[tool("stage"), "verify", "--store", str(store)]]
        blobs = sorted(str(path) for path in store.glob("blobs/sha256/*/*"))
        report(client="stage verify", bytes=size, files=files, **timed(argv, {}))
        floor = timed([[sys.executable, "-c", VERIFY_FLOOR, *blobs]], {})
        report(client="one core of sha256", bytes=size, files=files, **floor)


def clients(out: Path, endpoint: str, digests: dict[str, str]) -> Iterator[tuple[str, list[list[str]], dict[str, str]]]:
    """Name, commands and environment of each client; `stage` last, since its store is verified afterwards."""
    urls = {name: f"{endpoint}/{REPO}/resolve/main/{name}" for name in digests}
    yield "curl, then sha256sum", [
        ["curl", "-sLf", "--output-dir", str(out), *(word for name, url in urls.items() for word in ("-o", name, url))],
        ["sha256sum", *(str(out / name) for name in urls)],
    ], {}  # fmt: skip
    yield "aria2c -x16 -s16 -k1M", [
        ["aria2c", "-q", "-x16", "-s16", "-k1M", "-d", str(out), "-o", name, f"--checksum=sha-256={digests[name]}", url]
        for name, url in urls.items()
    ], {}  # fmt: skip
    yield "huggingface_hub", [[sys.executable, "-c", SNAPSHOT, REPO, str(out)]], {
        "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}  # fmt: skip
    yield "stage", [[tool("stage"), REPO, "--store", str(out / "store"), "--quiet"]], {
        "HF_ENDPOINT": endpoint, "HF_HOME": str(out / "hf")}  # fmt: skip


def timed(argv: list[list[str]], environment: dict[str, str]) -> dict[str, Any]:
    """Wall and CPU seconds of these commands one after the other, and the highest peak memory of one of them."""
    before, began, peak = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic(), 0
    for command in argv:
        child = subprocess.Popen(command, env=os.environ | environment, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        peak = max(peak, usage.ru_maxrss * 1024)
        if child.returncode:
            return {"failed": child.returncode, "command": command[0]}
    wall, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall_seconds": round(wall, 2), "cpu_seconds": round(cpu, 2), "peak_bytes": peak}


def make_files(folder: Path, size: int, count: int) -> dict[str, str]:
    """Files of random bytes, their sha256 by name; every file differs from the others."""
    folder.mkdir()
    block = os.urandom(MIB)
    digests = {}
    for number in range(count):
        name, digest, left = f"model-{number:05}.bin", hashlib.sha256(), size
        with (folder / name).open("wb") as file:
            while left:
                data = (b"%016d" % (left + number) + block)[: min(left, len(block))]
                digest.update(data)
                file.write(data)
                left -= len(data)
        digests[name] = digest.hexdigest()
    return digests


@contextlib.contextmanager
def serving(folder: Path, cap: int) -> Iterator[str]:
    """The endpoint of a demo Hub in a process of its own, which serves the folder as one repo."""
    argv = [sys.executable, "-c", SERVER, str(folder), str(cap)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().strip()
        server.terminate()


def tool(name: str) -> str:
    """The command of this environment, whatever PATH says."""
    return str(Path(sys.executable).with_name(name))


def report(**fields: Any) -> None:
    machine = {"machine": platform.machine(), "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}
    print(json.dumps(fields | machine), flush=True)


if __name__ == "__main__":
    main()
