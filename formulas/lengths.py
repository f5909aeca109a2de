"""How long a context the engine takes of a model, whatever the memory: its positions, scaled as its ropes say."""

from __future__ import annotations

from typing import Any

from .deployment import Deployment
from .fields import Fields
from .geometry import Geometry
from .refusals import Refusal

_WHOLE = ("su", "longrope", "llama3")  # ropes whose config states the scaled length
_SHORT_BY_DEFAULT = (0, 11, 1)  # from here on a longrope model starts at its unscaled length (vllm PR 27431)


def longest(geometry: Geometry) -> int | None:
    """Tokens up to which the engine lets a context grow: the config's positions, times its ropes' factor, which yarn
    takes of the positions before scaling. None where the config states no positions.

    Source: vllm 0.33.0 config/model.py _get_and_verify_max_len; Gemma 3's positions are scaled already."""
    length, factor = geometry.max_position_embeddings, 1.0
    if length is None or (geometry.text_model_type or "").startswith("gemma3"):
        return length
    for rope in geometry.ropes:
        kind, scaling = _kind(rope.scaling), Fields(rope.scaling)
        if kind not in _WHOLE:
            factor = scaling.number("factor") or factor
        if kind == "yarn":
            length = scaling.integer("original_max_position_embeddings") or length
    return int(length * factor)


def served(geometry: Geometry, deployment: Deployment) -> int | None:
    """The context length the engine serves: what is asked for, else the model's own. None where neither is known."""
    if deployment.max_model_len:
        return deployment.max_model_len
    if deployment.release >= _SHORT_BY_DEFAULT:
        for rope in geometry.ropes:
            short = Fields(rope.scaling).integer("original_max_position_embeddings")
            if _kind(rope.scaling) == "longrope" and short:
                return short
    return longest(geometry)


def too_long(geometry: Geometry, deployment: Deployment) -> Refusal | None:
    """Why the engine does not take the context length asked for, or None."""
    asked, most = deployment.max_model_len, longest(geometry)
    if asked is None or most is None or asked <= most:
        return None
    return Refusal(f"max_model_len {asked}: the model's positions end at {most}; the engine refuses "
                   "(unless VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 is set)")  # fmt: skip


def _kind(scaling: dict[str, Any]) -> str | None:
    return Fields(scaling).text("rope_type", "type")
