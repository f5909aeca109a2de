"""The place of a weight: everything that decides how it becomes bytes on one rank, and what it becomes there."""

from __future__ import annotations

from typing import NamedTuple

from .choices import Runtime
from .deployment import Deployment
from .facts import Quantization
from .geometry import Geometry
from .kernels import Sizes, Tensors
from .sharding import Part


class Built(NamedTuple):
    """One module on the rank: what it belongs to and its tensors."""

    stack: str
    part: Part
    tensors: Tensors
    host: bool = False
    buffer: bool = False  # made by the engine, not in the checkpoint
    scratch: tuple[Sizes, Sizes] = ((), ())  # freed before the tensors are allocated, and after


class Place(NamedTuple):
    """All that decides how a weight becomes bytes on this rank."""

    geometry: Geometry
    quantization: Quantization | None
    deployment: Deployment
    runtime: Runtime
    rank: int

    @property
    def tp(self) -> int:
        return self.deployment.tp

    @property
    def stage(self) -> int:
        """The pipeline stage of this rank."""
        return self.rank // self.deployment.tp % self.deployment.pp
