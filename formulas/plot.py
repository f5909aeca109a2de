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
    ("KV cache", "available_kv_bytes", "#009E73"),
)


def plot(answers: Sequence[Estimate], path: Path) -> None:
    """Writes the picture; the form follows the file's ending: .svg, .png or .html.

    Raises BadInput for another ending, or where matplotlib is not installed."""
    form = path.suffix.lower().removeprefix(".")
    if form not in ("svg", "png", "html"):
        raise BadInput(f"--plot {path}: expected a name ending in .svg, .png or .html, got {path.suffix or 'none'}")
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

    figure, axis = pyplot.subplots(figsize=(max(6.0, 1.6 * len(answers) + 3), 5.5), layout="constrained")
    places = range(len(answers))
    bottom = [0.0] * len(answers)
    for label, field, colour in _STACK:
        heights = [max(0, getattr(each.per_rank, field) or 0) / GIB for each in answers]
        axis.bar(places, heights, 0.6, bottom=bottom, label=label, color=colour)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    for place, each in zip(places, answers, strict=True):
        total = each.per_rank.total_memory_bytes / GIB
        axis.hlines(total, place - 0.4, place + 0.4, colors="black", label="_" if place else "card")
        asked = (each.per_rank.requested_bytes or 0) / GIB
        axis.hlines(asked, place - 0.4, place + 0.4, "black", linestyles=":", label="_" if place else "requested")
    axis.set_xticks(list(places), [_label(each) for each in answers], fontsize=8)
    axis.set_ylabel("GiB per rank")
    context = axis.twinx()
    contexts = [each.kv.max_context for each in answers]
    heights = [float("nan") if tokens is None else tokens for tokens in contexts]
    context.plot(places, heights, "D", color="#CC79A7", label="longest context")
    context.set_ylim(bottom=0)
    context.set_ylabel("tokens")
    handles = [h for part in (axis, context) for h in part.get_legend_handles_labels()[0]]
    labels = [name for part in (axis, context) for name in part.get_legend_handles_labels()[1]]
    figure.legend(handles, labels, loc="outside upper center", ncols=5, fontsize=8)
    out = io.BytesIO()
    figure.savefig(out, format=form, dpi=120, metadata={"Date": None} if form == "svg" else None)
    pyplot.close(figure)
    return out.getvalue()


def _label(each: Estimate) -> str:
    name = each.checkpoint.rpartition("/")[2]
    asked = each.deployment
    rest = f"{each.gpu} x {asked['tp']}, KV {each.kv.dtype}, MTP {asked['mtp']}"
    answer = {True: "fits", False: "does not fit", None: "unknown"}[each.fits]
    return "\n".join([name[:34], rest, answer])
