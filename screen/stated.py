"""The answer of the Hub's safetensors-metadata route, {"index": {...}, "headers": {shard: header}}, shard by shard.

It is as long as all headers of a repo together. They are cut out of its bytes, so that each is parsed once and kept as
it came; an answer that is spelled otherwise is parsed as a whole first.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import orjson

from formulas.errors import HeaderError

from .header import Header, parse_stated_header

_HEADERS = b'"headers":{'
Headers = dict[str, Header | HeaderError]
"""What each file's header is, or why it is none."""


def cut(body: bytes, shards: Iterable[str]) -> dict[str, bytes] | None:
    """The JSON of each of these shards, whose names are sorted in the answer; None where that shows not to be so.

    A piece may hold more than a header where the answer has more than these shards: its parser refuses it.
    """
    body, found = body.rstrip(), {}
    names, at = sorted(shards), body.find(_HEADERS)
    keys = [b"%b:" % orjson.dumps(name) for name in names]
    starts = [at := body.find(key, max(at, 0)) for key in keys]
    for name, key, (start, stop) in zip(names, keys, pairwise([*starts, len(body) - 1]), strict=True):
        found[name] = body[start + len(key) : stop - 1]
    return found if min(starts, default=-1) >= 0 and body.endswith(b"}}") else None


def whole(body: bytes, shards: Iterable[str]) -> dict[str, bytes] | None:
    """The same of an answer in any spelling; None where it is no such answer, or lacks a shard."""
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    headers = answer.get("headers") if isinstance(answer, dict) else None
    if not isinstance(headers, dict) or not headers.keys() >= set(shards):
        return None
    return {shard: orjson.dumps(headers[shard]) for shard in shards}


def parse_stated(texts: dict[str, bytes], sizes: dict[str, int], names: dict[str, str]) -> Headers:
    """The header of each file, given its size and how messages name it."""
    found: Headers = {}
    for path, text in texts.items():
        try:
            found[path] = parse_stated_header(text, file_size=sizes[path], name=names[path])
        except HeaderError as error:
            found[path] = error
    return found
