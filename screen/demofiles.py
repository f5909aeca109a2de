"""Files of checkpoints, made: safetensors with real headers, indexes, a tokenizer, small repos of random weights."""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import orjson

from formulas.tensors import DTYPE_BITS, tensor_bytes

from .demorepo import Content, DemoRepo

INDEX = "model.safetensors.index.json"
_DTYPE_ORDER = {dtype: -place for place, dtype in enumerate(DTYPE_BITS)}  # widest first, as the format's writers do


class Tensor(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]


def small_repo(name: str, shards: Mapping[str, Sequence[Tensor]], *, seed: int = 0, **about: Any) -> DemoRepo:
    """A repo of real random weights with index, config and tokenizer: small enough to fetch, verify and load."""
    files: dict[str, Any] = {file: safetensors_file(tensors, seed=seed + i)
                             for i, (file, tensors) in enumerate(shards.items())}  # fmt: skip
    if len(shards) > 1:
        total = sum(tensor_bytes(t.dtype, t.shape) for tensors in shards.values() for t in tensors)
        files[INDEX] = index_file({t.name: file for file, ts in shards.items() for t in ts}, {"total_size": total})
    return DemoRepo(name, files | {"config.json": {"model_type": "demo"}, "tokenizer.json": byte_tokenizer()}, **about)


def safetensors_file(
    tensors: Iterable[Tensor], *, metadata: Mapping[str, str] | None = None, seed: int | None = None
) -> Content:
    """A safetensors file of these tensors, laid out as the format's writers do: wide dtypes first, then by name.

    Its data is zeros, or with a `seed` random: BF16, F16 and F32 values are then finite and small, as weights are.
    """
    tensors = sorted(tensors, key=lambda t: (_DTYPE_ORDER[t.dtype], t.name))
    entries = [b'"__metadata__":' + orjson.dumps(dict(metadata))] if metadata else []
    at = 0
    for name, dtype, shape in tensors:  # by hand: half the time of a dictionary each
        stop = at + _tensor_bytes(dtype, shape)
        entries.append(b'%b:{"dtype":"%b","shape":%b,"data_offsets":[%d,%d]}' % (
            orjson.dumps(name), dtype.encode(), _shape_json(shape), at, stop))  # fmt: skip
        at = stop
    head = _padded(b"{" + b",".join(entries) + b"}")
    size = len(head) + at
    if seed is not None:
        source = random.Random(seed)
        head += b"".join(_weights(source, t.dtype, tensor_bytes(t.dtype, t.shape)) for t in tensors)
    return Content(head, size, elements=elements(tensors))


def byte_tokenizer() -> dict[str, Any]:
    """A tokenizer.json that knows single bytes only: valid, and small."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    letters = [*map(chr, printable), *(chr(256 + i) for i in range(len(rest)))]
    model = {"type": "BPE", "vocab": {letter: i for i, letter in enumerate(letters)}, "merges": []}
    return {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False},
            "decoder": {"type": "ByteLevel"}, "model": model}  # fmt: skip


def header_bytes(header: Mapping[str, Any]) -> bytes:
    """Length, JSON and padding to a multiple of 8: a safetensors file up to its data."""
    return _padded(orjson.dumps(header))


def _padded(text: bytes) -> bytes:
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


_tensor_bytes = functools.cache(tensor_bytes)


@functools.cache
def _shape_json(shape: tuple[int, ...]) -> bytes:
    return orjson.dumps(shape)


def head_bytes(content: Content) -> int:
    """Where the data of a safetensors file starts."""
    return 8 + int.from_bytes(content.head[:8], "little")


def tensor_names(content: Content) -> list[str]:
    """The tensors a safetensors file's header names, in its order."""
    return [name for name in orjson.loads(content.head[8 : head_bytes(content)]) if name != "__metadata__"]


def index_file(owners: Mapping[str, str], metadata: Mapping[str, Any]) -> Content:
    """model.safetensors.index.json from tensor -> file, written as transformers writes it."""
    document = {"metadata": metadata, "weight_map": dict(sorted(owners.items()))}
    return Content(orjson.dumps(document, option=orjson.OPT_INDENT_2))


def elements(tensors: Iterable[Tensor]) -> dict[str, int]:
    """Elements by dtype."""
    counted: Counter[str] = Counter()
    for tensor in tensors:
        counted[tensor.dtype] += prod(tensor.shape)
    return dict(counted)


# Sign kept, exponent held between 2^-9 and 2^-6: the top byte of a BF16 or F32 value that looks like a weight.
_SMALL = bytes((byte & 0x80) | 0x3B + (byte & 1) for byte in range(256))


def _weights(source: random.Random, dtype: str, count: int) -> bytes:
    data = bytearray(source.randbytes(count))
    if dtype in ("BF16", "F16"):
        data[1::2] = data[1::2].translate(_SMALL if dtype == "BF16" else bytes(b & 0x9F for b in range(256)))
    elif dtype == "F32":
        data[3::4] = data[3::4].translate(_SMALL)
    return bytes(data)
