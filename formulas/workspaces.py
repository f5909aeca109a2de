"""What a step needs beside its layers: the experts' shared buffers, the sampler, the vision tower.

Source: vllm 0.25.1 and 0.33.0 model_executor/layers/fused_moe/experts/*.workspace_shapes, v1/sample/sampler.py,
v1/sample/rejection_sampler.py, v1/worker/gpu/sample/sampler.py, config/vllm.py use_v2_model_runner.
"""

from __future__ import annotations

from .choices import Backend, expert_backend
from .deployment import Deployment
from .geometry import Geometry, State
from .releases import rules
from .schemes import Kind, Scheme
from .step import Shapes, need
from .weights import runtime_of

STREAMING_PROCESSORS = 132  # of an H100 or H200; rows the top-k kernel works on at once
LARGEST_PICTURE_TOKENS = 16_384  # merged tokens of the largest picture a Qwen processor makes
FREE_WIDTHS = 20.6  # hidden widths a patch of a picture of any size
FIXED_PICTURE_TOKENS = 256  # tokens of a picture of fixed size (Gemma 3)
FIXED_WIDTHS = 4  # hidden widths a patch of a picture of fixed size, beside two of the MLP's

# Models of experts that ran on the second runner before all did (vllm 0.25.1 config/vllm.py:68).
_EARLY_ON_SECOND = frozenset({"DeepseekV2ForCausalLM", "Qwen2MoeForCausalLM", "GraniteMoeForCausalLM"})


def expert_workspace(shapes: Shapes) -> int:
    """Elements a token of the buffers the expert kernels share; they are allocated once and stay."""
    experts, deployment = shapes.geometry.experts, shapes.deployment
    if experts is None or shapes.geometry.text_model_type == "gpt_oss":
        return 0
    scheme = Scheme(shapes.expert, group=32, inputs=True)
    backend = expert_backend(scheme, runtime_of(shapes.geometry, deployment))
    split = 1 if deployment.expert_parallel else shapes.tp * deployment.dp
    size = need(experts.intermediate_size, "moe_intermediate_size") // split
    hidden = experts.latent_size or shapes.hidden
    up = size if shapes.geometry.text_model_type == "nemotron_h" else 2 * size
    top = need(experts.per_token, "num_experts_per_tok")
    if backend is Backend.FLASHINFER_TRTLLM:
        return 0
    if backend is Backend.FLASHINFER_CUTLASS:
        return hidden
    if backend is Backend.CUTLASS and shapes.expert is Kind.NVFP4:
        return top * (max(up, hidden) + size)
    return top * (max(size, hidden) + max(up, hidden))


def sampler_bytes(shapes: Shapes, rows: int) -> int:
    """Logits and what sampling makes of them.

    First runner: logits in the model's dtype, in fp32, probabilities and noise (14 bytes a logit), and a scratch row of
    fp32 to each processor for top-k; a drafter adds the rejection sampler's copies (30 in all). Second runner: logits
    and one fp32 copy.
    """
    vocab = shapes.geometry.vocab_size or 0
    if runs_second(shapes.geometry, shapes.deployment):
        return rows * vocab * 6
    each = 30 if shapes.deployment.mtp else 14
    return rows * vocab * each + min(rows, STREAMING_PROCESSORS) * vocab * 4


def counted_bytes(shapes: Shapes, rows: int) -> int:
    """The second runner's token counts for penalties, by sequence and vocabulary: from 0.27 they are read off the card.

    Source: vllm 0.33.0 v1/worker/gpu/sample/penalties.py:43. Earlier releases sum parts, and these are in none."""
    if not (rules(shapes.deployment.release).consumed and runs_second(shapes.geometry, shapes.deployment)):
        return 0
    vocab = shapes.geometry.vocab_size or 0
    return 4 * rows * (vocab + -(-vocab // 32))


def runs_second(geometry: Geometry, deployment: Deployment) -> bool:
    """Whether the engine's second model runner serves this model; it samples in less memory."""
    which = rules(deployment.release).second_runner
    if which in ("none", "all"):
        return which == "all"
    if which == "dense" and any(layer.state is not State.NONE for layer in geometry.layer_kinds):
        return False
    return geometry.experts is None or geometry.architecture in _EARLY_ON_SECOND


def vision_bytes(shapes: Shapes) -> int:
    """The vision tower on the most patches one step may encode, with its outputs; 0 without a tower or if it is off.

    A heuristic. Towers that take pictures of any size interpolate their position table for every patch, which outweighs
    their blocks: 20.6 hidden widths a patch, from a 27B's activation peak of 2.9 GiB that no token budget changed.
    Fixed pictures: the token budget's pictures through one block."""
    tower, deployment = shapes.geometry.vision, shapes.deployment
    refused = deployment.limit_mm_per_prompt and not any(deployment.limit_mm_per_prompt.values())
    if tower is None or deployment.language_model_only or refused or not tower.hidden_size:
        return 0
    if tower.temporal_patch_size:
        merged = max(shapes.tokens, LARGEST_PICTURE_TOKENS)
        patches = merged * (tower.spatial_merge_size or 2) ** 2
        return int(patches * FREE_WIDTHS * tower.hidden_size + merged * shapes.hidden) * 2
    if not tower.image_size or not tower.patch_size:
        return 0
    side = tower.image_size // tower.patch_size
    each = (side // 2) ** 2 if tower.model_type == "pixtral" else FIXED_PICTURE_TOKENS
    patches = max(1, shapes.tokens // max(each, 1)) * side**2
    inner = tower.intermediate_size or 4 * tower.hidden_size
    return (patches * (FIXED_WIDTHS * tower.hidden_size + 2 * inner) + shapes.tokens * shapes.hidden) * 2
