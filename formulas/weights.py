"""Bytes of weights on one rank, tensor by tensor, as the engine holds them once a model is loaded.

    header or config -> Weight (schemes) -> rule (sharding) -> tensors (kernels) -> allocator -> RankWeights
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from .allocator import Pool
from .architectures import expected_weights
from .choices import Runtime
from .deployment import Deployment
from .facts import Facts, Quantization
from .formats import assign
from .geometry import Geometry
from .modules import build
from .place import Built, Place
from .releases import rules
from .schemes import PLAIN, Weight, read_weights
from .tables import table_for
from .tensors import TensorGroup
from .units import MIB


class RankWeights(NamedTuple):
    """What one rank holds. Bytes; None where they are not known, with the reasons in `unmodelled`."""

    rank: int
    by: dict[str, int]  # after loading, the target model alone
    created_by: dict[str, int]  # as built, before kernels rearrange
    mtp_by: dict[str, int]  # what the drafter adds; empty without speculation
    host_pinned: int
    buffers: int  # of `by`, what the engine made itself: rotary caches, scales, index buffers
    allocated: int | None  # "model loading took", target model alone
    mtp_allocated: int | None
    rounded: int  # the final tensors alone under torch's default rules, as if nothing had been freed on the way
    largest: int  # bytes of the largest single tensor
    evidence: str  # header | config
    unmodelled: tuple[str, ...]


def weights_of(facts: Facts, deployment: Deployment, rank: int = 0) -> RankWeights:
    """`weights` for a facts document: from its headers where it has them, else from its config."""
    return weights(facts.geometry or Geometry(), facts.quantization, facts.tensor_groups, deployment, rank)


def weights(
    geometry: Geometry,
    quantization: Quantization | None,
    groups: Iterable[TensorGroup] | None,
    deployment: Deployment,
    rank: int = 0,
) -> RankWeights:
    """The bytes rank `rank` holds of this checkpoint under this deployment. Without tensor groups the config decides
    what the checkpoint must contain, and the evidence is `config`.

    Domain: vLLM on CUDA cards, 0.25 to 0.33. Held to the engine's own modules and to measured runs by tests."""
    place = Place(geometry, quantization, deployment, runtime_of(geometry, deployment), rank)
    if groups is not None:
        known, reasons = read_weights(groups, len(geometry.layers) or None), geometry.unmodelled
    else:
        known, reasons = expected_weights(geometry)
        if quantization is not None:
            known, more = assign(known, quantization.method, quantization.config, quantization.ignore)
            reasons = (*reasons, *more)
    unmodelled = list(reasons)
    known = _requantised(known, place, unmodelled)
    if deployment.sm is None and any(weight.scheme != PLAIN for weight in known):
        unmodelled.append("the kernels that quantised weights are prepared for depend on the card: pass its capability")
    built = list(build(known, place, unmodelled))
    return _summary(built, place, "config" if groups is None else "header", tuple(dict.fromkeys(unmodelled)))


def _requantised(known: list[Weight], place: Place, unmodelled: list[str]) -> list[Weight]:
    """The weights after `--quantization`: what the checkpoint is stored in already, or FP8 made while loading."""
    asked, stored = place.deployment.quantization, place.quantization.method if place.quantization else None
    if asked is None or (stored is not None and asked.split("_")[0] == stored.split("_")[0]):
        return known
    if asked == "fp8" and stored is None:
        return assign(known, "fp8", {}, ())[0]
    unmodelled.append(f"--quantization {asked} on a checkpoint stored as {stored or 'plain'}: not modelled")
    return known


def runtime_of(geometry: Geometry, deployment: Deployment) -> Runtime:
    """What decides kernels for this model under this deployment, with the release's own table where one ships."""
    return Runtime(
        sm=deployment.sm or 90,
        release=deployment.release,
        without=deployment.without,
        expert_parallel=deployment.expert_parallel,
        tensor_parallel=deployment.tp,
        model_type=geometry.text_model_type or "",
        float_bytes=4 if (deployment.dtype if deployment.dtype != "auto" else geometry.dtype) == "float32" else 2,
        table=table_for(deployment.release),
    )


def _summary(built: list[Built], place: Place, evidence: str, unmodelled: tuple[str, ...]) -> RankWeights:
    created, loaded, drafter = Counter[str](), Counter[str](), Counter[str]()
    host = 0
    for module in built:
        if module.host:
            host += sum(module.tensors.loaded)
        elif module.stack == "mtp":
            drafter[module.part.value] += sum(module.tensors.loaded)
        else:
            created[module.part.value] += sum(module.tensors.created)
            loaded[module.part.value] += sum(module.tensors.loaded)
    on_card = [m for m in built if not m.host]
    target = _allocated([m for m in on_card if m.stack != "mtp"], place)
    both = _allocated(on_card, place) if drafter else target
    return RankWeights(
        rank=place.rank,
        by=dict(loaded),
        created_by=dict(created),
        mtp_by=dict(drafter),
        host_pinned=host,
        buffers=sum(sum(m.tensors.loaded) for m in on_card if m.buffer and m.stack != "mtp"),
        allocated=None if unmodelled else target,
        mtp_allocated=None if unmodelled else both - target,
        rounded=_rounded([m for m in on_card if m.stack != "mtp"]),
        largest=max((max(m.tensors.loaded, default=0) for m in on_card), default=0),
        evidence=evidence,
        unmodelled=unmodelled,
    )


def _rounded(built: list[Built]) -> int:
    pool = Pool()
    return sum(pool.allocate(size) for module in built for size in module.tensors.loaded)


def _allocated(built: list[Built], place: Place) -> int:
    """Bytes torch counts once the modules are built and their kernels have replaced what they replace. While an engine
    loads, blocks of 20 MiB and more do not split: freed scratch and replaced tensors shape what later ones get.
    Source: vllm 0.25.1 and 0.33.0 v1/worker/gpu_worker.py load_model."""
    pool = Pool(20 * MIB if rules(place.deployment.release).load_split_limit else None)
    held = []
    for module in built:
        early, late = ([pool.allocate(size) for size in sizes] for sizes in module.scratch)
        for block in early:
            pool.release(block)
        held.append([pool.allocate(size) for size in module.tensors.created])
        for block in late:
            pool.release(block)
    for module, blocks in zip(built, held, strict=True):
        before, after = Counter(module.tensors.created), Counter(module.tensors.loaded)
        for size in (after - before).elements():
            pool.allocate(size)
        for size in (before - after).elements():
            pool.release(blocks[module.tensors.created.index(size)])
    return pool.now
