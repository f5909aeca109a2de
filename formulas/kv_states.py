"""Bytes of the states that layers without attention keep: a window of the convolution and the recurrent memory.

Source: vllm 0.33.0 model_executor/layers/mamba/mamba_utils.py MambaStateShapeCalculator and
MambaStateDtypeCalculator, models/qwen4_exp/nvidia/ple_layer.py; model_executor/models/config.py for the dtypes a silent
config means. A drafter of s tokens widens every convolution window by s rows.
"""

from __future__ import annotations

from .deployment import Deployment
from .geometry import Geometry, Recurrent, State
from .kv_dtypes import model_dtype_bytes


class Unstated(Exception):
    """A size the config does not state; becomes a reason under `unmodelled`."""


def ngram_state_bytes(geometry: Geometry, deployment: Deployment) -> tuple[int, tuple[int, ...]]:
    """The n-gram layer's dilated convolution keeps (kernel - 1) x dilation rows of all streams, on every rank."""
    ngram, hidden = geometry.ngram, geometry.hidden_size
    if not ngram or not hidden or not ngram.conv_kernel or not ngram.size:
        raise Unstated("no ple_conv_kernel_size, ngram_size or hidden_size: the n-gram layer's state is unknown")
    rows = (ngram.conv_kernel - 1) * ngram.size + deployment.mtp
    width = hidden * (geometry.hyper_connections or 1)
    return rows * width * model_dtype_bytes(geometry, deployment), (rows, width)


def state_bytes(geometry: Geometry, state: State, deployment: Deployment) -> tuple[int, tuple[int, ...]]:
    """(bytes, shape) of one layer's convolution and recurrent state on a rank."""
    sizes = geometry.recurrent or Recurrent()
    model = model_dtype_bytes(geometry, deployment)
    recurrent = _recurrent_dtype_bytes(geometry, state, model)
    tp, drafts = deployment.tp, deployment.mtp

    def need(*names: str) -> list[int]:
        found = [getattr(sizes, name) for name in names]
        if None in found:
            raise Unstated(f"no {names[found.index(None)]} of the {state} layers: their state is unknown")
        return found

    if state in (State.GDN, State.KDA):
        kh, vh, kd, vd, kernel = need("key_heads", "value_heads", "key_dim", "value_dim", "conv_kernel")
        conv = (2 * kh * kd + vh * vd) // tp, kernel - 1 + drafts
        memory = vh // tp, vd, kd
    elif state is State.MAMBA2:
        inner, groups, heads, dim, width, kernel = need(
            "inner", "groups", "value_heads", "value_dim", "state_size", "conv_kernel"
        )
        groups += 0 if groups % tp == 0 else tp - groups  # each rank needs the groups of its heads
        conv = (inner + 2 * groups * width) // tp, kernel - 1 + drafts
        memory = heads // tp, dim, width
    elif state is State.MAMBA1:
        inner, width, kernel = need("inner", "state_size", "conv_kernel")
        conv = inner // tp, kernel - 1
        memory = inner // tp, width, 1
    elif state is State.SHORT_CONV:
        (kernel,) = need("conv_kernel")
        hidden = geometry.hidden_size
        if not hidden:
            raise Unstated("no hidden_size: the convolution's state is unknown")
        conv, memory = (hidden // tp, kernel - 1 + drafts), (0, 0, 0)
    else:
        raise Unstated(f"the state of {state} layers is not modelled")
    size = conv[0] * conv[1] * model + memory[0] * memory[1] * memory[2] * recurrent
    return size, (*conv, *memory)


def _recurrent_dtype_bytes(geometry: Geometry, state: State, model: int) -> int:
    """Bytes of a recurrent value: the config's dtype; silence means fp32 for KDA and Nemotron-H, else the model's."""
    stated = geometry.recurrent.state_dtype if geometry.recurrent else None
    if stated is None:
        return 4 if state is State.KDA or geometry.text_model_type == "nemotron_h" else model
    known = {"float32": 4, "bfloat16": 2, "float16": 2}
    if stated not in known:
        raise Unstated(f"state dtype {stated!r} is not modelled")
    return known[stated]
