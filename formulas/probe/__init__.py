"""Asks a vLLM installation its own questions, with or without a GPU. Run by that installation's interpreter, not ours.

Only the standard library, torch and vllm are imported; `formulas.live` packs these files into one zip and pipes a
request into it. One process a capability: the engine caches what it learned of its device. Without a driver the
extensions find a libcuda whose functions all answer "no device"; the platform is vLLM's own CUDA class with a stated
capability; the ranks are torch's `fake` process group; and what would be put on the card is put on the meta device.
Private names of vLLM used here are those of 0.33.0; another release is asked the same way, and fails with its own words
where it differs.
"""
