"""The commands that start a seat on its cards: the engine's own flags, cards by UUID, one command a host."""

from __future__ import annotations

import re
from collections.abc import Sequence

from .box import Host, Seat
from .demands import Seating
from .facts import Facts
from .flags import obeyed_otherwise
from .options import serve_arguments
from .units import GIB, MIB, human

UUIDS_SINCE = (0, 24, 0)
"""First release whose platforms/cuda.py looks a UUID in CUDA_VISIBLE_DEVICES up; earlier ones read numbers only."""
NODES_SINCE = (0, 12, 0)
"""First release whose config/parallel.py has nnodes, for several hosts without Ray."""
EXACT_ABOVE = GIB
"""Pinned blocks larger than this keep their size under ALLOCATOR; torch rounds the others up to a power of two
(torch 2.14.1 ATen/core/CachingHostAllocator.h allocate; pytorch/pytorch#150517)."""
ALLOCATOR = f"PYTORCH_ALLOC_CONF=pinned_max_round_threshold_mb:{EXACT_ABOVE // MIB}"
RAY_PORT = 6379
RAY_WORD = "--distributed-executor-backend=ray"


_REPO = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def as_served(seat: Seat, facts: Facts) -> Seat:
    """The seat by the name the engine finds its checkpoint under, at the commit its facts are of: what was planned for
    is what is served. A facts document stands for the repo it describes; a folder has no revision."""
    is_document = seat.checkpoint.endswith((".json", ".jsonl"))
    name = facts.repo if is_document and facts.repo else seat.checkpoint
    found = facts.commit or ""
    commit = (found if _COMMIT.fullmatch(found) else seat.commit) if _REPO.fullmatch(name) else None
    return seat._replace(checkpoint=name, commit=commit)


def commands(
    seat: Seat, seating: Seating, hosts: Sequence[Host], is_table_pinned: bool
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """(host, argv) in the order to start them. The first host is the head: it serves the API.

    Over several hosts the engine's own processes meet at the head (`--nnodes`; vllm 0.33.0 engine/arg_utils.py), or
    Ray's do where the seat asks for it, or where the release knows no other way."""
    names = seating.hosts
    by_name = {host.name: host for host in hosts}
    head = by_name[names[0]].address or names[0]
    serve = ("vllm", "serve", seat.checkpoint, *(("--revision", seat.commit) if seat.commit else ()))
    serve = (*serve, *serve_arguments(seat.deployment), *seat.words)
    envs = {name: _environment(seating, name, is_table_pinned) for name in names}
    if len(names) == 1:
        return ((names[0], (*envs[names[0]], *serve)),)
    if uses_ray(seat):
        joins = [(name, (*envs[name], "ray", "start", f"--address={head}:{RAY_PORT}")) for name in names[1:]]
        backend = () if RAY_WORD in seat.words else (RAY_WORD,)
        start = (names[0], (*envs[names[0]], "ray", "start", "--head", f"--port={RAY_PORT}"))
        return (start, *joins, (names[0], (*serve, *backend)))
    nodes = ("--nnodes", str(len(names)), "--master-addr", head)
    return tuple(
        (name, (*envs[name], *serve, *nodes, "--node-rank", str(i), *(("--headless",) if i else ())))
        for i, name in enumerate(names)
    )


def uses_ray(seat: Seat) -> bool:
    """Whether a seat over several hosts is started through Ray."""
    return RAY_WORD in seat.words or seat.deployment.release < NODES_SINCE


def _environment(seating: Seating, name: str, is_table_pinned: bool) -> tuple[str, ...]:
    visible = ",".join(uuid for host, uuid in seating.cards if host == name)
    return ("env", f"CUDA_VISIBLE_DEVICES={visible}", *((ALLOCATOR,) if is_table_pinned else ()))


def cautions(seat: Seat, seating: Seating, table_bytes: int) -> tuple[str, ...]:
    """What to know before starting the seat there. `table_bytes` is what one rank pins for its table."""
    found = []
    version, names = seat.deployment.version, seating.hosts
    if seat.deployment.release < UUIDS_SINCE:
        found.append(f"vllm {version} reads numbers only in CUDA_VISIBLE_DEVICES; UUIDs are known from 0.24.0 on")
    if len(names) > 1:
        over = " and ".join(names)
        found.append(f"ranks on {over}: NCCL crosses the network in every layer, custom all-reduce is off")
    if len(names) > 1 and uses_ray(seat):
        found.append("Ray's memory monitor counts all of a node's memory, pinned tables and other processes included")
    if table_bytes and rounded(table_bytes) > table_bytes:
        table, pinned = human(table_bytes), human(rounded(table_bytes))
        found.append(
            f"replicas of a host share the table through /dev/shm, which must hold {table} a rank"
            if seat.deployment.dp > 1
            else f"without {ALLOCATOR} torch pins {pinned} a rank for a table of {table}"
        )
    given = (*serve_arguments(seat.deployment), *seat.words)
    return (*found, *obeyed_otherwise(given, version))


def rounded(size: int) -> int:
    """The power of two a pinned block of this size becomes."""
    return 1 << (size - 1).bit_length() if size else 0
