"""Estimates as a picture: for each candidate a stacked bar of what fills a card, the card's line, and the context."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from pathlib import Path

from .errors import BadInput
from .estimate import Estimate, sentence
from .units import GIB

# Of the Okabe-Ito palette, which colour-blind people can tell apart.
_STACK: tuple[tuple[str, str, str], ...] = (
    ("weights", "weights_bytes", "#0072B2"),
    ("MTP", "mtp_bytes", "#56B4E9"),
    ("activation", "activation_bytes", "#E69F00"),
    ("CUDA graphs", "cudagraph_bytes", "#F0E442"),
    ("non-torch", "non_torch_bytes", "#999999"),
    ("unexplained", "unexplained_bytes", "#D55E00"),
    ("KV cache", "available_kv_bytes", "#009E73"),
)


def picture_form(path: Path) -> str:
    """svg, png or html, by the file's ending. Raises BadInput for another."""
    form = path.suffix.lower().removeprefix(".")
    if form not in ("svg", "png", "html"):
        raise BadInput(f"--plot {path}: expected a name ending in .svg, .png or .html, got {path.suffix or 'none'}")
    return form


def plot(answers: Sequence[Estimate], path: Path) -> None:
    """Writes the picture; the form follows the file's ending: .svg, .png or .html.

    Raises BadInput for another ending, or where matplotlib is not installed."""
    form = picture_form(path)
    picture = _draw(answers, "svg" if form == "html" else form)
    if form == "html":
        rows = "".join(f"<li>{html.escape(sentence(each))}</li>" for each in answers)
        svg = picture.decode()[picture.decode().index("<svg") :]
        page = f"<!doctype html><meta charset=utf-8><title>fit</title>{svg}<ul style='font:14px sans-serif'>{rows}</ul>"
        picture = page.encode()
    try:
        path.write_bytes(picture)
    except OSError as error:
        raise BadInput(f"--plot {path}: expected a file that can be written, got {error.strerror}") from None


def _draw(answers: Sequence[Estimate], form: str) -> bytes:
    try:
        import matplotlib
    except ImportError:
        raise BadInput(
            "--plot: expected matplotlib, got none", hint="pip install 'checkpoint-toolkit[plot]'"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(10, 1.8 + 0.75 * len(answers)), layout="constrained")
    places = [len(answers) - 1 - row for row in range(len(answers))]  # the first candidate on top
    ends = [0.0] * len(answers)
    cards = [each.per_rank.total_memory_bytes / GIB for each in answers]
    for label, field, colour in _STACK:
        widths = [max(0, getattr(each.per_rank, field) or 0) / GIB for each in answers]
        if not any(widths):
            continue
        bars = axis.barh(places, widths, 0.6, left=ends, label=label, color=colour)
        axis.bar_label(bars, [f"{width:.1f}" if width > max(cards) / 18 else "" for width in widths],
                       label_type="center", fontsize=8, color="white")  # fmt: skip
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    lows, highs = [place - 0.42 for place in places], [place + 0.42 for place in places]
    axis.vlines(cards, lows, highs, "black", label="card")
    axis.vlines([(each.per_rank.requested_bytes or 0) / GIB for each in answers], lows, highs, "black",
                linestyles=":", label="requested")  # fmt: skip
    axis.set_yticks(places, [_label(each) for each in answers], fontsize=8)
    axis.set_ylim(-0.6, len(answers) - 0.4)
    axis.set_xlim(0, 1.03 * max(*ends, *cards))
    axis.set_xlabel("GiB per rank")
    context = axis.twiny()
    lengths = [float("nan") if (tokens := each.kv.max_context) is None else tokens for each in answers]
    context.plot(lengths, [place + 0.36 for place in places], "D", color="#CC79A7", markersize=5,
                 label="longest context", clip_on=False)  # fmt: skip
    context.set_xlim(0, 1.03 * max([1024, *(each.kv.max_context or 0 for each in answers)]))
    context.xaxis.set_major_formatter("{x:,.0f}")
    context.set_xlabel("longest context, tokens")
    handles = [h for part in (axis, context) for h in part.get_legend_handles_labels()[0]]
    labels = [name for part in (axis, context) for name in part.get_legend_handles_labels()[1]]
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8, frameon=False)
    out = io.BytesIO()
    figure.savefig(out, format=form, dpi=120, metadata={"Date": None} if form == "svg" else None)
    pyplot.close(figure)
    return out.getvalue()


def _label(each: Estimate) -> str:
    name = each.checkpoint.rpartition("/")[2]
    asked = each.deployment
    table = {True: ", table in host RAM", False: ""}[bool(each.per_rank.host_pinned_bytes)]
    rest = f"{each.gpu} x {asked['tp'] * asked['pp']}, KV {each.kv.dtype}, MTP {asked['mtp']}{table}"
    answer = {True: "fits", False: "does not fit", None: "unknown"}[each.fits]
    return "\n".join([name[:48], rest, answer])
