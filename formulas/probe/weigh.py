"""What a rank holds: bytes of every distinct storage a built model keeps, by part, and as the allocator counts."""

from __future__ import annotations

import bisect
import re

# Module name (of vLLM's modules, not the checkpoint's) -> part; first match wins.
PARTS = [(part, re.compile(pattern)) for part, pattern in [
    ("vision", r"(^|\.)(visual|vision\w*|vit|image_\w+|mm_\w+|multi_modal_projector|embed_vision|patch_\w+|merger)\."),
    ("audio", r"(^|\.)(audio\w*|embed_audio|speech\w*)\."),
    ("rope_cache", r"cos_sin_cache|rotary_emb|inv_freq"),
    ("ple", r"(^|\.)ple\.|\.ple_|embed_tokens_per_layer|per_layer_|engram|ngram"),
    ("hyper_connection", r"(^|\.|_)hc_|hyper_conn|\.mhc"),
    ("embed", r"embed_tokens|word_embeddings|(^|\.)(wte|embed|embeddings?|tok_embeddings|wpe)\."),
    ("lm_head", r"(^|\.)(lm_head|shared_head\.head|output)\."),
    ("shared_expert", r"shared_expert|shared_mlp"),
    ("router", r"(^|\.)(mlp|feed_forward|block_sparse_moe|moe|mixer|router)\.(gate|router|e_score\w*)\b"
               r"|\.router\.|e_score_correction_bias|\.gate\.(weight|bias|wg)"),
    ("expert", r"\.experts?\."),
    ("linear_attention", r"(^|\.)(linear_attn|mixer|mamba|conv|short_conv|linear_attention|kda|gdn)\."),
    ("attention", r"(^|\.)(self_attn|attn|attention|self_attention|indexer|mla_attn)\."),
    ("norm", r"norm\w*\.(weight|bias)$|(^|\.)ln_\w+\.|layernorm"),
    ("mlp", r"(^|\.)(mlp|feed_forward|ffn|dense_\w+|fc\d|up_proj|down_proj|gate_up_proj|block_sparse_moe)\b"),
]]  # fmt: skip


def part_of(name: str) -> str:
    return next((part for part, pattern in PARTS if pattern.search(name)), "other")


def inventory(model) -> dict[int, tuple[str, int, object]]:
    """Storage -> (first name, bytes, tensor) of every parameter, buffer and plain tensor attribute, in module order."""
    import torch

    found: dict[int, tuple[str, int, object]] = {}
    seen: set[int] = set()

    def is_holder(value):
        return HOLDERS.match(type(value).__module__) and not isinstance(value, torch.nn.Module)

    def walk(name, value, depth):
        if isinstance(value, torch.Tensor):
            if value.is_meta:
                storage = value.untyped_storage()
                found.setdefault(storage._cdata, (name, storage.nbytes(), value))
        elif isinstance(value, (list, tuple)):
            for item in value:
                walk(name, item, depth)
        elif isinstance(value, dict):
            for item in value.values():
                walk(name, item, depth)
        elif depth and is_holder(value) and id(value) not in seen:
            seen.add(id(value))
            for item in getattr(value, "__dict__", {}).values():
                walk(name, item, depth - 1)

    for prefix, module in model.named_modules():
        own = {**module._parameters, **module._buffers, **vars(module)}
        for name, value in own.items():
            if not name.startswith("_") or isinstance(value, torch.Tensor):
                walk(f"{prefix}.{name}".lstrip("."), value, 12)
    return found


# Objects a layer keeps tensors in that are no modules: kernels, their quantisation records, swizzled tensors.
HOLDERS = re.compile(
    r"vllm\.(model_executor\.(layers|kernels)|v1\.attention|third_party\.triton_kernels)|triton_kernels|flashinfer|humming"
)


def allocated(sizes: list[int], max_split: int) -> int:
    """Bytes torch's caching allocator hands out for these requests in this order (c10/cuda/CUDACachingAllocator.cpp).

    Requests round to 512; up to 1 MiB they come from 2 MiB segments, up to 10 MiB from 20 MiB segments, above from
    segments of whole 2 MiB. A block keeps its remainder where that is 1 MiB or less (small pool: under 512 B), or
    where the block is at least `max_split`, which is never split.
    """
    MiB = 1 << 20
    total = 0
    free: dict[bool, list[int]] = {True: [], False: []}
    for size in sizes:
        size = -(-size // 512) * 512
        if not size:
            continue
        small = size <= MiB
        pool = free[small]
        at = bisect.bisect_left(pool, size)
        fits = at < len(pool) and (size >= max_split or pool[at] < max_split)
        if fits and size >= max_split and pool[at] >= size + 20 * MiB:
            fits = False
        block = (
            pool.pop(at)
            if fits
            else 2 * MiB
            if small
            else 20 * MiB
            if size < 10 * MiB
            else -(-size // (2 * MiB)) * 2 * MiB
        )
        rest = block - size
        if rest >= 512 if small else size < max_split and rest > MiB:
            bisect.insort(pool, rest)
            block = size
        total += block
    return total


def weigh(model, host: dict[int, object]) -> dict:
    """Bytes of a rank by part (`host:` for pinned memory), in total, and as the allocator hands them out."""
    by: dict[str, int] = {}
    sizes, unclassified = [], []
    for storage, (name, size, _tensor) in inventory(model).items():
        part = part_of(name)
        if part == "other" and len(unclassified) < 8:
            unclassified.append(name)
        if storage in host:
            part = f"host:{part}"
        else:
            sizes.append(size)
        by[part] = by.get(part, 0) + size
    return {
        "total": sum(sizes),
        "by": by,
        "allocated": allocated(sizes, 1 << 60),
        "allocated_split20": allocated(sizes, 20 << 20),
        "unclassified": unclassified,
    }
