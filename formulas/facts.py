"""What is known of a checkpoint: a census of its bytes, its geometry, and what its quantisation is. All frozen."""

from __future__ import annotations

import enum
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer

from .geometry import Geometry
from .tensors import TensorGroup


class Document(BaseModel):
    """A value that crosses a process boundary: immutable, and unknown fields are an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


@enum.unique
class Stack(enum.StrEnum):
    """Whether bytes load, and where."""

    MAIN = "main"
    MTP = "mtp"
    VISION = "vision"
    AUDIO = "audio"


@enum.unique
class Role(enum.StrEnum):
    """How bytes divide over ranks. A scale or zero point takes the role of the weight it belongs to."""

    EMBED = "embed"
    LM_HEAD = "lm_head"
    ATTENTION = "attention"
    LINEAR_ATTENTION = "linear_attention"
    MLP = "mlp"
    EXPERT = "expert"
    SHARED_EXPERT = "shared_expert"
    ROUTER = "router"
    NORM = "norm"
    PLE = "ple"
    OTHER = "other"


class Cell(Document):
    """One cell of the census: tensors of one stack, role and dtype. Elements are storage units, not parameters."""

    stack: Stack
    role: Role
    dtype: str
    tensors: int
    elements: int
    bytes: int


class Quantization(Document):
    """How weights are stored, decided by companion scale tensors where headers are known, else by the config."""

    method: str | None = None  # config's quant_method in lower case: fp8, modelopt, compressed-tensors, awq...
    format: str | None = None  # nvfp4, nvfp4a16, fp8_block128, fp8_tensor, mxfp4, int4_g128, mixed...
    by_role: dict[str, str] = {}  # "stack/role" -> format, from the headers
    ignore: tuple[str, ...] = ()
    kv_cache_dtype: str | None = None  # what the checkpoint asks for: fp8, or None
    config: dict[str, Any] = {}  # quantization_config (or hf_quant_config.json's) as found, ignore list left out
    source: str = "config"  # config | header: which of them decided `format`


class Experts(Document):
    declared: int | None = None
    found: int | None = None  # what every MoE layer has; the mode when uneven
    layers: int | None = None
    uneven: dict[int, int] = {}  # layer -> experts, where it differs from `found`


class Mtp(Document):
    declared: int | None = None  # layers the config declares; 0 = it declares none
    tensors: int | None = None
    bytes: int | None = None
    dtypes: dict[str, int] = {}


class Ple(Document):
    """Per-layer embeddings: `bytes` is the whole PLE layer, `table_bytes` the lookup table in it. None: not read."""

    kind: str = "none"  # none | ngram | engram | per_layer
    tensors: int | None = None
    bytes: int | None = None
    table_bytes: int | None = None
    format: str | None = None  # bf16 | fp8 | nvfp4 | int4 ... of the table
    declared_dtype: str | None = None  # config's ple_embedding_dtype


def _group_in(value: Any) -> Any:
    return value if isinstance(value, TensorGroup) else TensorGroup(value[0], value[1], tuple(value[2]))


def _group_out(group: TensorGroup) -> list[Any]:
    return [group.pattern, group.dtype, list(group.shape)]


Group = Annotated[TensorGroup, BeforeValidator(_group_in), PlainSerializer(_group_out)]


class Facts(Document):
    """What was learned of one checkpoint at one commit. Parts not reached are None, never empty or zero."""

    format: int = 1
    repo: str | None = None
    commit: str | None = None
    tensor_bytes: int | None = None
    file_bytes: int | None = None
    shards: int | None = None
    tensors: int | None = None
    architecture: str | None = None
    model_type: str | None = None
    quantization: Quantization | None = None
    census: tuple[Cell, ...] | None = None
    experts: Experts | None = None
    mtp: Mtp | None = None
    ple: Ple | None = None
    geometry: Geometry | None = None
    tensor_groups: tuple[Group, ...] | None = None
