"""`screen` beside huggingface_hub on 12 repos with 512 shards and 99 MB of headers at 40 ms a request, in one run.

Every client is a process that starts cold, and asks one Hub after the other: loopback servers, processes of their own
too, that have made all they serve beforehand. huggingface_hub reads headers; `screen` reads them, counts every tensor
and judges the repo. Only figures of one run compare: other work on the machine is in all of them.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from bench.stage import timed, tool
from screen.catalogue import demo_repos
from screen.demofiles import INDEX, head_bytes
from screen.demohub import Traffic
from screen.demoserve import Address, served

LATENCY = 0.04  # seconds a request
REPOS = (  # no two share a shard
    "reap-lab/Qwen3.8-Flash-Next-REAP-448-NVFP4", "nvidia/Qwen3.8-Flash-Next-NVFP4", "deepseek-ai/DeepSeek-R1",
    "Qwen/Qwen3.6-35B-A3B-FP8", "Qwen/Qwen3.8-27B-FP8", "bryce-hoehn/Qwen3.5-25B-REAP-A3B-Coding", "Qwen/Qwen3-8B",
    "openai/gpt-oss-20b", "Qwen/Qwen3-8B-AWQ", "Qwen/Qwen3-0.6B", "tiny/qwen3-moe", "tiny/qwen3-dense",
)  # fmt: skip
# It takes four threads more than the machine has cores.
PEER = "import os, sys\nos.cpu_count = lambda: int(sys.argv[1]) - 4\nfrom huggingface_hub import HfApi\n"
PEER_BY_RANGES = PEER + "for repo in sys.argv[2:]: HfApi().get_safetensors_metadata(repo)"
PEER_IN_ONE = PEER + """from huggingface_hub.errors import EntryNotFoundError
for repo in sys.argv[2:]:
    try:
        HfApi().get_sharded_safetensors_metadata(repo)
    except EntryNotFoundError:  # one file, no index
        HfApi().get_safetensors_metadata(repo)"""


class Client(NamedTuple):
    name: str
    argv: list[str]
    hub: Address
    warm: bool = False  # with what the client before it has cached


def measure() -> Iterator[dict[str, Any]]:
    """What is read, then a row a client: seconds, peak memory, requests, bytes; and times as fast as the first one.

    CPU seconds are of all its processes, the peak is of the largest: beside `screen` run those that count for it."""
    with ProcessPoolExecutor(1) as apart:  # the peak memory of what this process starts begins with its own
        headers = apart.submit(header_lengths).result()
    yield {"repos": len(REPOS), "shards": len(headers), "header_bytes": sum(headers), "latency_seconds": LATENCY}
    options = [word for repo in REPOS for word in ("--only", repo)] + ["--prepare", "--latency", str(LATENCY)]
    with tempfile.TemporaryDirectory() as folder, served(*options, "--ranges-only") as ranges, served(*options) as hub:
        first = None
        for client in clients(Path(folder), ranges, hub):
            row = run(client, Path(folder), sum(headers))
            wall = row.get("wall_seconds")  # none where it failed
            first = first or wall
            yield row | {"times_as_fast": round(first / wall, 1) if first and wall else None}


def header_lengths() -> list[int]:
    """Bytes of every shard's header."""
    repos = [repo for repo in demo_repos() if repo.name in REPOS]
    files = [item for repo in repos for item in repo.main.files.items()]
    return [head_bytes(content) for path, content in files if path.endswith(".safetensors")]


def clients(work: Path, ranges: Address, hub: Address) -> Iterator[Client]:
    """The clients in the order they run."""
    for threads in ("6", "20"):
        peer = [sys.executable, "-c", PEER_BY_RANGES, threads, *REPOS]
        yield Client(f"huggingface_hub, {threads} threads", peer, ranges)
    yield Client("huggingface_hub, one request", [sys.executable, "-c", PEER_IN_ONE, "6", *REPOS], hub)
    (work / "repos.txt").write_text("\n".join(REPOS))
    ours = [tool("screen"), str(work / "repos.txt"), "--json", "--cache-dir", str(work / "cache")]
    yield Client("screen, ranges", ours, ranges)
    yield Client("screen, ranges, again", ours, ranges, warm=True)
    yield Client("screen, one request", ours, hub)
    yield Client("screen, one request, again", ours, hub, warm=True)


def run(client: Client, work: Path, header_bytes: int) -> dict[str, Any]:
    """One client's row."""
    if not client.warm:
        for name in ("cache", "hf"):
            shutil.rmtree(work / name, ignore_errors=True)
    environment = {"HF_ENDPOINT": client.hub.endpoint, "HF_HOME": str(work / "hf"), "HF_HUB_DISABLE_XET": "1",
                   "HF_HUB_DISABLE_PROGRESS_BARS": "1"}  # fmt: skip
    before = [client.hub.counts(suffix) for suffix in ("", ".safetensors", INDEX)]
    row = timed([client.argv], environment)
    after = [client.hub.counts(suffix) for suffix in ("", ".safetensors", INDEX)]
    spent, of_shards, of_indexes = map(difference, before, after)
    read = spent["headers"].body_bytes + of_shards["cdn"].body_bytes
    indexes = sum(traffic.body_bytes for route, traffic in of_indexes.items() if route in ("cdn", "cache"))
    return {"client": client.name} | row | {
        "hub_requests": sum(traffic.requests for route, traffic in spent.items() if route != "cdn"),
        "cdn_requests": spent["cdn"].requests,
        "header_bytes": read,
        "of_the_headers": round(read / header_bytes, 3),
        "index_bytes": indexes,
        "other_bytes": sum(traffic.body_bytes for traffic in spent.values()) - read - indexes,
    }  # fmt: skip


def difference(before: dict[str, Traffic], after: dict[str, Traffic]) -> dict[str, Traffic]:
    """What was asked between two counts."""
    none = Traffic(0, 0)
    return {
        route: Traffic(*(b - a for a, b in zip(before.get(route, none), after.get(route, none), strict=True)))
        for route in {"headers", "cdn", *after}
    }
