"""The engine's refusals in its own words."""

from __future__ import annotations

import re
import traceback


def refusal(error: BaseException) -> dict:
    """The engine's own words, and where it said them."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "/vllm/" in frame.filename] or frames
    last = own[-1]
    return {
        "type": type(error).__name__, "message": plain(str(error)),
        "where": f"{last.filename.rsplit('/vllm/', 1)[-1]}:{last.lineno}",
        "trace": [f"{f.filename.rsplit('/site-packages/', 1)[-1]}:{f.lineno} {f.name}" for f in frames[-12:]],
    }  # fmt: skip


def plain(message: str) -> str:
    """A refusal without what pydantic wraps around it."""
    said = re.search(r"Value error, (.*?)(?: \[type=|$)", message, re.DOTALL)
    return (said.group(1) if said else message).strip()[:600]


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]
