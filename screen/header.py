"""The header of a safetensors file: eight bytes of length, then JSON that says where every tensor lies.

A header is valid only if its tensors tile the data region and end where the file does, so a truncated or padded
upload shows from the header and the size the tree states, without its data. Format: safetensors 0.8 (README,
safetensors/src/tensor.rs `read_metadata`, `validate`). Where that reader is silent about duplicate keys (it keeps
the last), this one follows the format's text and refuses them.
"""

from __future__ import annotations

import json
import re
from itertools import accumulate, chain
from operator import itemgetter, sub
from typing import Any, NamedTuple

import orjson

from formulas.errors import HeaderError
from formulas.tensors import DTYPE_BITS, Form, TensorInfo, tensor_bytes

HEADER_CAP = 100_000_000
"""Longest header the format allows, in bytes (safetensors/src/tensor.rs `MAX_HEADER_SIZE`)."""

_MAX = 2**64 - 1  # the format's numbers are u64
_METADATA = "__metadata__"
Buffer = bytes | memoryview
_MAGIC = {
    b"version ": "a Git LFS pointer; the file itself was never uploaded or downloaded",
    b"<": "an HTML or XML page",
    b"{": "JSON text",
    b"PK\x03\x04": "a zip archive, as PyTorch writes",
    b"\x80\x02": "a pickle",
    b"GGUF": "a GGUF file",
}


class Header(NamedTuple):
    """What one file's header says, in the order of the bytes. `length` is the JSON's own, `data_bytes` all after it.

    Tensors tile the data, so offsets follow from the order. Equal forms are one object: a repo of 300,000 tensors
    is little more than its names.
    """

    names: tuple[str, ...]
    forms: tuple[Form, ...]
    metadata: dict[str, str] | None
    length: int
    data_bytes: int

    @property
    def tensors(self) -> list[TensorInfo]:
        """Every tensor with its byte range in the data region."""
        stops = list(accumulate(tensor_bytes(*form) for form in self.forms))
        starts = [0, *stops[:-1]]
        return [
            TensorInfo(name, dtype, shape, start, stop)
            for name, (dtype, shape), start, stop in zip(self.names, self.forms, starts, stops, strict=False)
        ]


def header_length(first8: bytes, *, file_size: int, name: str) -> int:
    """Bytes of JSON that follow the first eight bytes of a file of this size. Raises HeaderError."""
    if file_size < 8 or len(first8) < 8:
        got = min(file_size, len(first8))
        raise HeaderError(f"{name}: expected 8 bytes of header length, got {got}; not a safetensors file")
    length = int.from_bytes(first8[:8], "little")
    if length > HEADER_CAP:
        what = next((f"this looks like {text}" for magic, text in _MAGIC.items() if first8.startswith(magic)), None)
        raise HeaderError(
            f"{name}: expected a header of at most {HEADER_CAP} bytes, got {length}; "
            + (what or "not a safetensors file")
        )
    if 8 + length > file_size:
        raise HeaderError(
            f"{name}: the header ends at byte {8 + length}, file has {file_size}; the upload is truncated"
        )
    return length


def parse_header(data: bytes, *, file_size: int, name: str) -> Header:
    """The header in `data`, the first 8 + N bytes or more of a file of `file_size` bytes.

    Raises HeaderError, which names the file, the tensor and the numbers, for everything the format forbids.
    """
    length = header_length(data[:8], file_size=file_size, name=name)
    if len(data) < 8 + length:
        raise HeaderError(f"{name}: expected {length} bytes of header, got {len(data) - 8}; the read was cut short")
    text = memoryview(data)[8 : 8 + length]  # a view: no second copy of 40 MB
    metadata, columns = _as_written(text) or _as_json(text, name)
    return _whole(columns, metadata, length, file_size - 8 - length, name)


def parse_stated_header(text: bytes, *, file_size: int, name: str) -> Header:
    """The header in JSON that was read and written again elsewhere, as the Hub's safetensors-metadata route sends it.

    The check of size is weaker: the header's own length is not known, so it is taken to be what the file has beside
    its data, and only refused where that is shorter than the JSON or longer than the format allows. Raises HeaderError.
    """
    metadata, columns = _as_written(text) or _as_json(text, name)
    data_bytes = max(columns.stops, default=0)
    length, shortest = file_size - 8 - data_bytes, len(text)
    if not shortest <= length <= HEADER_CAP:
        raise HeaderError(
            f"{name}: tensors take {data_bytes} bytes and the header {shortest} or more, file has {file_size}; "
            + ("the upload is truncated" if length < shortest else "there are bytes after the last tensor")
        )
    return _whole(columns, metadata, length, data_bytes, name)


# A tensor as the format's own writers spell it; all between two names that is not the offsets is a few dozen texts.
_ENTRY = re.compile(
    r'"([^"\\\x00-\x1f]*)":\{"dtype":"(\w+","shape":\[[0-9,]*\]),"data_offsets":\[(0|[1-9][0-9]*),(0|[1-9][0-9]*)\]\}'
)


def _as_written(text: Buffer) -> tuple[dict[str, str] | None, _Columns] | None:
    """What `_as_json` gives of a header that is spelled as the format's writers do, in half the time; None of others.

    The entries and what stands between them are all of the text, so nothing in it goes unseen.
    """
    try:
        parts = _ENTRY.split(str(text, "utf-8"))
        between, names, kinds, starts, stops = (parts[i::5] for i in range(5))
        metadata = _metadata_before(between[0])
        shared = {kind: _form(kind) for kind in set(kinds)}
    except (ValueError, KeyError):
        return None
    if not names or set(between[1:-1]) - {","} or between[-1].rstrip(" ") != "}":
        return None
    if len(set(names)) < len(names) or _METADATA in names:
        return None
    ends = [0, *map(int, stops)]
    in_order = starts[0] == "0" and starts[1:] == stops[:-1]  # as nearly all writers leave them
    begins = ends[:-1] if in_order else list(map(int, starts))
    columns = _Columns(names, list(map(shared.__getitem__, kinds)), begins, ends[1:])
    sizes = {kind: _size(*form) for kind, form in shared.items()}
    if list(map(sub, columns.stops, columns.starts)) != list(map(sizes.__getitem__, kinds)):
        return None
    return metadata, columns


def _metadata_before(text: str) -> dict[str, str] | None:
    """The metadata before the first tensor; None where there is none. Raises ValueError where it is spelled oddly."""
    if text == "{":
        return None
    document: dict[str, Any] = orjson.loads(text.removesuffix(",") + "}")
    found: dict[str, str] | None = document.get(_METADATA)
    plain = len(document) == 1 and isinstance(found, dict) and set(map(type, found.values())) <= {str}
    if found is None or not plain or not text.endswith(",") or "\\" in text or text.count('"') != 2 + 4 * len(found):
        raise ValueError(text)
    return found


def _form(kind: str) -> Form:
    """Dtype and shape of `BF16","shape":[640,1280]`. Raises ValueError, KeyError for what the format does not know."""
    dtype, _, shape = kind.partition('","shape":')
    if dtype not in DTYPE_BITS:
        raise KeyError(dtype)
    return dtype, tuple(orjson.loads(shape))


def _as_json(text: Buffer, name: str) -> tuple[dict[str, str] | None, _Columns]:
    """Metadata and tensors of a header, each tensor right by itself. Raises HeaderError."""
    try:
        document = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise HeaderError(f"{name}: expected a header in JSON, got {bytes(text[:40])!r}: {error}") from None
    metadata, entries = _contents(document, name)
    _refuse_duplicates(bytes(text), document, name)
    return metadata, _columns(entries, name)


def _contents(document: object, name: str) -> tuple[dict[str, str] | None, dict[str, Any]]:
    """(metadata, tensors) of a header's top level, the tensors unchecked."""
    if not isinstance(document, dict):
        raise HeaderError(f"{name}: expected a JSON object as header, got {_kind(document)}")
    if _METADATA not in document:
        return None, document
    tensors = dict(document)
    metadata = tensors.pop(_METADATA)
    if metadata is None:  # some writers leave it null; the official reader takes that for absent
        return None, tensors
    if not isinstance(metadata, dict):
        raise HeaderError(f"{name}: {_METADATA}: expected an object of strings, got {_kind(metadata)}")
    for key, value in metadata.items():
        if not isinstance(value, str):
            raise HeaderError(f"{name}: {_METADATA} {key!r}: expected a string, got {_kind(value)}")
    return metadata, tensors


def _refuse_duplicates(text: bytes, document: dict[str, Any], name: str) -> None:
    """Raises HeaderError if a key occurs twice in one object; parsers keep one of them silently.

    Without backslashes every string has two quotes, so counting quotes counts strings. Only a header with more
    strings than its plain form has (or with escapes) is read again, slowly.
    """
    metadata = document.get(_METADATA)
    tensors = len(document) - (_METADATA in document)
    strings = 5 * tensors + (_METADATA in document) + 2 * len(metadata or ())
    if text.count(b'"') == 2 * strings and b"\\" not in text:
        return

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise HeaderError(f"{name}: expected each key once, got {twice!r} twice; which one counts is undefined")
        return found

    try:
        json.loads(text, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:  # what orjson reads and the standard library does not
        raise HeaderError(f"{name}: expected a plain header in JSON, got {error}") from None


class _Columns(NamedTuple):
    """Tensors that are each right by themselves."""

    names: list[str]
    forms: list[Form]
    starts: list[int]
    stops: list[int]


def _whole(columns: _Columns, metadata: dict[str, str] | None, length: int, data_bytes: int, name: str) -> Header:
    """The header, once its tensors tile all the data bytes. Raises HeaderError."""
    ends = [0, *columns.stops]
    if columns.starts != ends[:-1]:  # not in the order of their bytes, as nearly all writers leave them
        columns = _in_order(columns)
        ends = [0, *columns.stops]
    if columns.starts != ends[:-1]:
        rows = zip(columns.names, columns.starts, ends, strict=False)
        key, start, end = next(row for row in rows if row[1] != row[2])
        how = f"a hole of {start - end} bytes" if start > end else f"{end - start} bytes overlap"
        raise HeaderError(f"{name}: tensor {key!r} starts at data byte {start}, the one before it ends at {end}; {how}")
    if ends[-1] != data_bytes:
        raise HeaderError(
            f"{name}: tensors end at byte {8 + length + ends[-1]}, file has {8 + length + data_bytes}; "
            + ("the upload is truncated" if ends[-1] > data_bytes else "there are bytes after the last tensor")
        )
    return Header(tuple(columns.names), tuple(columns.forms), metadata, length, data_bytes)


def _in_order(columns: _Columns) -> _Columns:
    """The same tensors by the place of their bytes; empty ones first where they share a place."""
    rows = sorted(zip(columns.starts, columns.stops, columns.names, columns.forms, strict=True))
    starts, stops, names, forms = map(list, zip(*rows, strict=True))
    return _Columns(names, forms, starts, stops)


def _columns(entries: dict[str, Any], name: str) -> _Columns:
    """All tensors, each checked by itself. Raises HeaderError."""
    return _at_once(entries) or _one_by_one(entries, name)


def _one_by_one(entries: dict[str, Any], name: str) -> _Columns:
    """The entries as columns. Raises HeaderError for the first that is wrong."""
    tensors = [_tensor(key, value, name) for key, value in entries.items()]
    forms = [(info.dtype, info.shape) for info in tensors]
    return _Columns(list(entries), forms, [info.start for info in tensors], [info.stop for info in tensors])


def _at_once(entries: dict[str, Any]) -> _Columns | None:
    """What `_one_by_one` gives, column by column and several times faster; None where any entry may be wrong."""
    infos = entries.values()
    try:
        shapes = list(map(itemgetter("shape"), infos))
        offsets = list(map(itemgetter("data_offsets"), infos))
        dtypes: list[str] = list(map(itemgetter("dtype"), infos))
        ends: list[int] = list(chain.from_iterable(offsets))
        known = set(dtypes) <= DTYPE_BITS.keys() and set(map(type, shapes)) <= {list} and set(map(len, offsets)) <= {2}
    except (KeyError, TypeError):
        return None
    if not known or not set(map(type, chain.from_iterable(shapes))) | set(map(type, ends)) <= {int}:
        return None
    starts, stops = ends[::2], ends[1::2]
    shared: dict[Form, Form] = {}
    forms = list(zip(dtypes, map(tuple, shapes), strict=True))
    forms = list(map(shared.setdefault, forms, forms))
    sizes = {form: _size(*form) for form in shared}
    if list(map(sub, stops, starts)) != list(map(sizes.__getitem__, forms)):
        return None
    return _Columns(list(entries), forms, starts, stops)


def _size(dtype: str, shape: tuple[int, ...]) -> int | None:
    """Whole bytes of a tensor; None if they are no whole number, negative, or beyond the format's 64 bits."""
    bits = 1
    for size in (*shape, DTYPE_BITS[dtype]):
        bits *= size
        if size < 0 or bits > _MAX:
            return None
    return bits // 8 if bits % 8 == 0 else None


def _tensor(key: str, value: object, name: str) -> TensorInfo:
    """One entry of the header as a tensor. Raises HeaderError."""
    who = f"{name}: tensor {key!r}"
    if not isinstance(value, dict):
        raise HeaderError(f"{who}: expected an object with dtype, shape and data_offsets, got {_kind(value)}")
    if missing := [field for field in ("dtype", "shape", "data_offsets") if field not in value]:
        raise HeaderError(f"{who}: expected dtype, shape and data_offsets, got no {' and no '.join(missing)}")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise HeaderError(f"{who}: expected a dtype of the format, got {dtype!r:.80}")
    if not isinstance(shape, list) or not all(map(_counts, shape)):
        raise HeaderError(f"{who}: expected a shape of whole numbers, got {shape!r:.80}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_counts, offsets)):
        raise HeaderError(f"{who}: expected two byte offsets, got {offsets!r:.80}")
    start, stop = offsets
    if stop < start:
        raise HeaderError(f"{who}: expected its bytes to end after they start, got [{start}, {stop}]")
    bits = 1
    for size in (*shape, DTYPE_BITS[dtype]):
        bits *= size
        if bits > _MAX:
            raise HeaderError(f"{who}: {dtype} {shape!r:.80} overflows the format's 64-bit sizes")
    if bits % 8:
        raise HeaderError(f"{who}: expected whole bytes, got {bits} bits for {dtype} {shape!r:.80}")
    if bits != 8 * (stop - start):
        raise HeaderError(
            f"{who}: {dtype} {shape!r:.80} takes {bits // 8} bytes, its offsets [{start}, {stop}] span {stop - start}"
        )
    return TensorInfo(key, dtype, tuple(shape), start, stop)


def _counts(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MAX  # bool is an int to Python, not to the format


def _kind(value: object) -> str:
    """A value as an error names it: what it is in JSON, and a little of it."""
    kinds = {dict: "an object", list: "a list", str: "text", bool: "a truth value", type(None): "null"}
    return f"{kinds.get(type(value), 'a number')} {value!r:.60}" if value is not None else "null"
