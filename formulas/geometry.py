"""What config.json says of a model's shape. Fields a config is silent about are None, never a guess."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Geometry(BaseModel):
    """A model's shape, read from its config."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    architecture: str | None = None
    model_type: str | None = None
