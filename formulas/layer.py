"""A kind of layer, as records: how it mixes tokens, what it keeps of the past, what feeds it forward."""

from __future__ import annotations

import enum

from pydantic import BaseModel, ConfigDict


@enum.unique
class Attention(enum.StrEnum):
    """What a layer attends with; decides what it caches for each token."""

    NONE = "none"
    UNKNOWN = "unknown"  # the rules do not know it; the geometry says why under `unmodelled`
    FULL = "full"
    SLIDING = "sliding"
    CHUNKED = "chunked"
    MLA = "mla"  # one latent for all heads
    DSA = "dsa"  # MLA over tokens picked by an indexer
    QSA = "qsa"  # grouped-query attention over tokens picked from compressed keys


@enum.unique
class State(enum.StrEnum):
    """What a layer keeps of the past in a state of fixed size."""

    NONE = "none"
    GDN = "gdn"
    KDA = "kda"
    MAMBA1 = "mamba1"
    MAMBA2 = "mamba2"
    LIGHTNING = "lightning"
    SHORT_CONV = "short_conv"


@enum.unique
class Ffn(enum.StrEnum):
    """What follows the token mixer."""

    NONE = "none"
    DENSE = "dense"
    MOE = "moe"
    BOTH = "both"  # a dense MLP beside the experts (Gemma 4)


class Part(BaseModel):
    """A frozen part of a geometry."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Layer(Part):
    """A kind of layer. Sizes are of the whole model, not of a rank; None where the config is silent."""

    attention: Attention = Attention.NONE
    state: State = State.NONE
    ffn: Ffn = Ffn.DENSE
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    value_head_dim: int | None = None
    window: int | None = None  # tokens a sliding or chunked layer looks back over
    intermediate_size: int | None = None  # of the dense MLP
    shares_kv: bool = False  # reads an earlier layer's cache and owns none
    owns_indexer: bool = False  # a DSA layer that scores tokens itself rather than reuse another layer's choice
    rope: bool = True


class Unmodelled(Exception):
    """A layer the rules do not know; caught where the geometry is put together and kept as its reason."""
