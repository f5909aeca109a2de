"""Cards: the memory an engine sees, which is never what the box says, and where that number was read.

`total_bytes` is torch's total_memory. Where no reading was found it is estimated by a rule fitted on cards that have
one, and says so with a margin: `--gpu 71.2GiB --capability 12.0` or a calibration overrides it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from .errors import BadInput
from .units import GIB, MIB, parse_size

TORCH_OF_NVML = 0.9935
"""torch's total over NVML's, RTX PRO 6000: 94.97 GiB of 97,887 MiB; H100, H200, GH200 and 5090 lie within 0.8 %."""
NVML_OF_LABEL = 0.9957
"""NVML's total over the label read as GiB, RTX PRO 6000 and 4500: GDDR7 cards without ECC reserve."""


class Card(NamedTuple):
    """A card as an engine meets it."""

    name: str
    capability: str | None
    total_bytes: int
    source: str
    margin_bytes: int = 16 * MIB  # how far the next driver or sample may be off
    estimated: bool = False
    linked: bool = False  # NVLink between cards of a host
    unified: bool = False  # memory shared with the host: the engine asks the host how much is free


def _read(name: str, capability: str, gib: float, source: str, linked: bool = False, unified: bool = False) -> Card:
    return Card(name, capability, round(gib * GIB), source, linked=linked, unified=unified)


def _guess(name: str, capability: str, label_gib: float, linked: bool = False, nvml_mib: int | None = None) -> Card:
    """From NVML's total where that is known, else from the label."""
    nvml = nvml_mib * MIB if nvml_mib else label_gib * GIB * NVML_OF_LABEL
    basis = f"nvml {nvml_mib} MiB x {TORCH_OF_NVML}" if nvml_mib else f"label x {NVML_OF_LABEL} x {TORCH_OF_NVML}"
    margin = GIB // 4 if nvml_mib else GIB
    return Card(name, capability, round(nvml * TORCH_OF_NVML), f"estimated: {basis}", margin, True, linked)


CARDS: tuple[Card, ...] = (
    Card("h200", "9.0", 150_109_880_320, "measured, NVIDIA H200 under vLLM 0.25.1", linked=True),
    _read("h100-80gb", "9.0", 79.22, "vllm-project/vllm PR 12126", linked=True),
    _read("h20-96gb", "9.0", 95.0, "vllm-project/vllm issues, about"),
    _read("gh200-96gb", "9.0", 94.88, "Lightning-AI/litgpt#1892"),
    _read("a100-80gb", "8.0", 79.33, "vllm-project/vllm#50722", linked=True),
    _read("a100-40gb", "8.0", 39.49, "torch's out-of-memory messages (39.39 to 39.56)", linked=True),
    _read("b200", "10.0", 178.35, "torch's out-of-memory messages (178.35, 178.36)", linked=True),
    _read("b300", "10.3", 267.69, "torch's out-of-memory messages", linked=True),
    _read("gb10", "12.1", 121.69, "vLLM logs of a GB10; memory shared with the host", unified=True),
    _read("rtx-pro-6000", "12.0", 94.97, "guoqingbao/xinfer#195"),
    _guess("rtx-pro-5000-72gb", "12.0", 72),
    _guess("rtx-pro-5000-48gb", "12.0", 48),
    _guess("rtx-pro-4500", "12.0", 32, nvml_mib=32_623),
    _guess("rtx-pro-4000", "12.0", 24),
    _read("rtx-5090", "12.0", 31.40, "noonghunna/club-3090#1087"),
    _read("rtx-5080", "12.0", 15.48, "vllm-project/vllm#14452"),
    _read("rtx-4090", "8.9", 23.64, "3DTopia/Phidias-Diffusion#8"),
    _read("rtx-3090", "8.6", 23.58, "vllm-project/vllm#10517, PR 14447"),
    _read("rtx-6000-ada", "8.9", 44.43, "DINGYANB/MTVCrafter#21, ECC on"),
    _read("rtx-a6000", "8.6", 47.54, "torch's out-of-memory messages (47.40 to 47.54)"),
    _read("rtx-a4000", "8.6", 15.61, "DengKaiCQ/VGGT-Long#6"),
    _read("l40s", "8.9", 44.42, "stepfun-ai/Step-Video-T2V#8"),
    _read("l40", "8.9", 44.40, "QwenLM/Qwen3-VL#2097"),
    _read("l20", "8.9", 44.52, "vllm-project/vllm#14011"),
    _read("l4", "8.9", 22.05, "pytorch/pytorch#175666"),
    _read("a10", "8.6", 22.18, "OpenBMB/MiniCPM-V#640"),
)  # fmt: skip

ALIASES = {
    "h100": "h100-80gb", "h20": "h20-96gb", "gh200": "gh200-96gb", "a100": "a100-80gb", "dgx-spark": "gb10",
    "rtx-pro-5000": "rtx-pro-5000-48gb", "rtx-pro-6000-96gb": "rtx-pro-6000", "rtx-pro-4500-32gb": "rtx-pro-4500",
    "rtx-pro-4000-24gb": "rtx-pro-4000", "a6000": "rtx-a6000", "a4000": "rtx-a4000",
}  # fmt: skip

_WORDS = re.compile(r"nvidia|geforce|blackwell|workstation|server|edition|max-q|tensor|core|gpu|sxm\d?|pcie|hbm\d?e?")


def find_card(text: str, capability: str | None = None) -> Card:
    """The card of a name as people or NVML write it, or of a size such as `71.2GiB` with its capability.

    Raises BadInput for a name that is not in the table and is no size."""
    wanted = _spelled(text)
    for card in CARDS:
        if wanted in (card.name, card.name.removeprefix("rtx-")) or ALIASES.get(wanted) == card.name:
            return card if capability is None else card._replace(capability=capability)
    try:
        total = parse_size(text)
    except BadInput:
        known = ", ".join(card.name for card in CARDS)
        raise BadInput(
            f"gpu {text!r}: expected one of the cards or a size, got neither; pass --gpu 71.2GiB --capability 12.0",
            hint=f"cards: {known}",
        ) from None
    if total < GIB:
        raise BadInput(f"gpu {text!r}: expected a card's memory such as 71.2GiB, got {total} bytes")
    return Card(text, capability, total, "as given", 0)


def _spelled(text: str) -> str:
    apart = re.sub(r"\brtx(?=\w)", "rtx ", text.lower()).replace("generation", " ")
    words = _WORDS.sub(" ", apart).replace("_", "-").split()
    return "-".join(part for word in words for part in word.split("-") if part)
