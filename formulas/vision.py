"""The vision tower as a config states it, in the names the families use."""

from __future__ import annotations

from .fields import Fields, whole
from .layer import Part


class Vision(Part):
    """The vision tower as its own config states it."""

    model_type: str | None = None
    depth: int | None = None
    hidden_size: int | None = None
    intermediate_size: int | None = None
    heads: int | None = None
    patch_size: int | None = None
    temporal_patch_size: int | None = None
    spatial_merge_size: int | None = None
    out_hidden_size: int | None = None
    positions: int | None = None
    channels: int | None = None
    image_size: int | None = None
    deepstack: tuple[int, ...] = ()


def parse_vision(f: Fields) -> Vision | None:
    stated = f.mapping("vision_config", "visual")
    if not stated:
        return None
    v = Fields(stated)
    return Vision(
        model_type=v.text("model_type"),
        depth=v.integer("depth", "num_hidden_layers", "vt_num_hidden_layers", "layers"),
        hidden_size=v.integer("embed_dim", "hidden_size", "vt_hidden_size", "width"),
        intermediate_size=v.integer("intermediate_size", "vt_intermediate_size"),
        heads=v.integer("num_heads", "num_attention_heads", "vt_num_attention_heads", "heads"),
        patch_size=v.integer("patch_size", "spatial_patch_size"),
        temporal_patch_size=v.integer("temporal_patch_size"),
        spatial_merge_size=v.integer("spatial_merge_size"),
        out_hidden_size=v.integer("out_hidden_size", "output_dim"),
        positions=v.integer("num_position_embeddings", "position_embedding_size"),
        channels=v.integer("in_channels", "in_chans", "num_channels"),
        image_size=v.integer("image_size"),
        deepstack=tuple(n for n in map(whole, v.items("deepstack_visual_indexes")) if n is not None),
    )
