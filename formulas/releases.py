"""What the memory arithmetic of vLLM depends on and when it changed: one line a rule, the release that brought it.

Source: the wheels 0.10.0 to 0.33.0 themselves (config/cache.py, engine/arg_utils.py, envs.py, config/vllm.py,
v1/core/kv_cache_utils.py and kv_cache_planning.py, v1/kv_cache_interface.py, v1/worker/gpu_worker.py), compared release
by release; the date of that reading is READ_ON.
"""

from __future__ import annotations

from typing import NamedTuple

from .deployment import Deployment, Version

READ_ON = "2026-11-29"
FIRST: Version = (0, 10, 0)
LAST: Version = (0, 33, 0)


class Rules(NamedTuple):
    """How one release plans memory."""

    utilization: float  # --gpu-memory-utilization where it is not given
    graphs_estimated: bool  # CUDA graphs are estimated and taken off before the KV cache is sized
    tokens_by_concurrency: bool  # "GPU KV cache size" is concurrency x max_model_len, not blocks x block size
    in_flight_by_batches: bool  # windows also hold what every concurrent batch may have in flight
    hybrid_prefix_caching: bool  # prefix caching is on by default for models with state layers
    mamba_all_mode: bool  # with it, some families keep a state per block (mode "all")
    group_ratio: float | None  # layer counts closer than this ratio form groups of the larger; None: of the smaller
    null_block: bool  # the start-up check leaves out the block the pool never hands out
    block_outermost: bool  # backends may ask for blocks that hold all layers' pages side by side
    flashmla_default: bool  # MLA on Hopper runs FlashMLA, whose block is 64 tokens
    latent_alignment: int  # tokens a block of MLA beside state layers is a multiple of
    large_card_batch: bool  # cards of 160 GiB and more batch 16,384 tokens
    gb10_is_small: bool  # GB10 counts as a small card for batch defaults
    second_runner: str  # models on the second model runner: none | dense | all but experts | all
    state_gate: bool  # with full graphs, more sequences than blocks of state layers refuse to start
    consumed: bool  # what the profile run leaves on the card is read from the card, not summed from parts
    load_split_limit: bool  # loading keeps blocks of 20 MiB and more whole (vllm PR 41268)
    profile_split_limit: bool  # the profile run, too, keeps blocks of 20 MiB and more whole
    glm_dsa_fp8: bool  # GLM's sparse attention caches fp8 by itself on sm100


def rules(release: Version) -> Rules:
    """The rules of one engine release; one newer than 0.33.0 is taken to plan as 0.33.0 does."""
    return Rules(
        utilization=0.92 if release >= (0, 20, 0) else 0.9,
        graphs_estimated=release >= (0, 20, 0),
        tokens_by_concurrency=release >= (0, 21, 0),
        in_flight_by_batches=release >= (0, 26, 0),
        hybrid_prefix_caching=release >= (0, 26, 0),
        mamba_all_mode=(0, 16, 0) <= release < (0, 28, 0),
        group_ratio=1.5 if release >= (0, 18, 0) else 1.25 if release >= (0, 12, 0) else None,
        null_block=release >= (0, 29, 0),
        block_outermost=release >= (0, 29, 0),
        flashmla_default=release < (0, 18, 0),
        latent_alignment=128 if release >= (0, 27, 0) else 16 if release >= (0, 19, 0) else 64,
        large_card_batch=release >= (0, 28, 0),
        gb10_is_small=release >= (0, 33, 0),
        second_runner=_second_runner(release),
        state_gate=release >= (0, 20, 0),
        consumed=release >= (0, 27, 0),
        load_split_limit=release >= (0, 21, 0),
        profile_split_limit=release >= (0, 31, 0),
        glm_dsa_fp8=release >= (0, 32, 0),
    )


def _second_runner(release: Version) -> str:
    if release >= (0, 29, 0):
        return "all"
    if release >= (0, 27, 0):
        return "all but experts"
    return "dense" if release >= (0, 25, 0) else "none"


def outside(deployment: Deployment) -> tuple[str, ...]:
    """A reason when the engine is one these rules do not describe, else nothing."""
    if deployment.engine != "vllm":
        return (f"engine {deployment.engine}: only vllm is modelled",)
    if deployment.release >= FIRST:
        return ()
    return (f"vllm {deployment.version}: releases before {'.'.join(map(str, FIRST))} are not modelled",)
