"""A comparison as text: the verdict first, then what differs, each part in one table."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from formulas.units import human

from .compare import Change, Comparison, ConfigDifference, IgnoreDifference, Part, Structure, Verdict
from .pairs import FilePair, Kind
from .report import Layout

_MEANS = {
    Verdict.SAME_BYTES: "an engine reads the same from both",
    Verdict.SAME_WEIGHTS: "what says how to load or to prompt differs",
    Verdict.SAME_STRUCTURE: "a patch, a layout or a memory plan for one holds for the other",
    Verdict.DIFFERENT: "tensors, dtypes or shapes differ",
    Verdict.UNKNOWN: "the headers could not be read whole",
}
_SHOWN = 20  # rows of a table; --json has all


def differences(found: Comparison, layout: Layout) -> list[str]:
    """The whole comparison."""
    share = f"{found.identical_files} of {found.files} files identical, {human(found.identical_bytes)}"
    lines = layout([["a", found.a], ["b", found.b], ["verdict", f"{found.verdict}: {_MEANS[found.verdict]}"],
                    ["files", share]], "")  # fmt: skip
    lines += _files(found.differing_files, layout)
    if found.parts is not None:
        lines += _parts(found.parts, found.formats or {}, layout)
    if found.structure is not None and not found.structure.same:
        lines += _structure(found.structure, layout)
    if found.config is not None:
        lines += _config(found.config, layout)
    if found.ignore is not None:
        lines += _ignore(found.ignore, layout)
    return lines


def _files(files: Iterable[FilePair], layout: Layout) -> list[str]:
    """Files that differ, by what they are for; weights are counted, the rest are named."""
    rows: list[list[str]] = []
    files = list(files)
    for kind in Kind:
        mine = [file for file in files if file.kind is kind]
        if not mine:
            continue
        sides = ([file.a_bytes for file in mine], [file.b_bytes for file in mine])
        present = [[size for size in sizes if size is not None] for sizes in sides]
        names = ", ".join(file.path for file in mine[:3]) + (f" and {len(mine) - 3} more" if len(mine) > 3 else "")
        rows.append([kind, *(f"{len(sizes)}, {human(sum(sizes))}" if sizes else "-" for sizes in present), names])
    return ["", *layout([["differing files", "a", "b", "names"], *rows], "")] if rows else []


def _parts(parts: Iterable[Part], formats: Mapping[str, Mapping[str, str]], layout: Layout) -> list[str]:
    rows = [[part.stack, part.role, "same" if part.same else "differs", _bytes(part.a), _bytes(part.b),
             *(formats.get(side, {}).get(f"{part.stack}/{part.role}", "-") for side in ("a", "b"))]
            for part in parts]  # fmt: skip
    return ["", *layout([["stack", "role", "", "a", "b", "format a", "format b"], *rows], "")]


def _bytes(by_dtype: Mapping[str, int]) -> str:
    if not by_dtype:
        return "-"
    return f"{human(sum(by_dtype.values()))} {'+'.join(sorted(by_dtype, key=lambda dtype: -by_dtype[dtype])[:3])}"


def _structure(structure: Structure, layout: Layout) -> list[str]:
    forms = {change.tensor: change for change in structure.changed}
    rows = [[_SIDES[p.side], p.stack, p.role, f"{p.count:,}", _form(p.pattern, forms if p.side == "both" else {}),
             p.example] for p in structure.patterns]  # fmt: skip
    return ["", *_cut(rows, ["tensors", "stack", "role", "count", "pattern", "example"], "count", layout)]


_SIDES = {"a": "only in a", "b": "only in b", "both": "changed"}


def _form(pattern: str, forms: Mapping[str, Change]) -> str:
    if (change := forms.get(pattern)) is None:
        return pattern
    return f"{pattern}: " + " -> ".join(f"{dtype} {list(shape)}" for dtype, shape in (change.a, change.b))


def _config(config: ConfigDifference, layout: Layout) -> list[str]:
    rows = [*([key, _value(value["a"]), _value(value["b"])] for key, value in config.changed.items()),
            *([key, _value(value), "-"] for key, value in config.only_a.items()),
            *([key, "-", _value(value)] for key, value in config.only_b.items())]  # fmt: skip
    return ["", *_cut(rows, ["config key", "a", "b"], "", layout)] if rows else []


def _value(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _ignore(ignore: IgnoreDifference, layout: Layout) -> list[str]:
    head = f"ignore lists, {ignore.of}"
    rows = [["both", str(ignore.common), ""], ["only a", str(ignore.only_a_count), _names(ignore.only_a)],
            ["only b", str(ignore.only_b_count), _names(ignore.only_b)],
            ["as written", f"{ignore.entries_a} | {ignore.entries_b}", "entries of a | b"]]  # fmt: skip
    return ["", *layout([[head, "count", "which"], *rows], "count")]


def _names(patterns: tuple[str, ...]) -> str:
    return ", ".join(patterns[:8]) + (f" and {len(patterns) - 8} more" if len(patterns) > 8 else "")


def _cut(rows: list[list[str]], head: list[str], right: str, layout: Layout) -> list[str]:
    more = len(rows) - _SHOWN
    return [*layout([head, *rows[:_SHOWN]], right), *([f"and {more} more (--json has all)"] if more > 0 else [])]
