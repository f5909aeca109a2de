"""One request, one answer."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
from functools import partial

from .card import card
from .driver import provide_driver
from .gates import attention, formats, registry
from .model import model
from .nowhere import nowhere
from .words import refusal

ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",  # no card is touched; left unset, the engine would think Triton missing
    "TORCHDYNAMO_DISABLE": "1",
    "HUMMING_DISABLE_PARALLEL_BUILD": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}


def main() -> int:
    """Reads a request from stdin and writes its answer to stdout, one JSON object each; exits 0 unless it died.

    capability   "12.0", or absent for the first card of the machine       env, without   variables; libraries to hide
    attention    {"rows": [[kind, head_size, kv_dtype]...], "dtype"}       formats   [{"names", "tp", "ep", "dtype"}...]
    models       [{"files": {"config.json": {...}}, "tp", "ep", "rank", "mtp", "options"}...]       registry   true
    """
    request = json.loads(sys.stdin.read())
    answer_to = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the engine prints is not the answer
    path = (
        os.path.dirname(sys.executable) + os.pathsep + os.environ.get("PATH", "")
    )  # as an activated environment has it
    os.environ |= {**ENVIRONMENT, "PATH": path, **request.get("env", {})}
    for library in request.get("without", []):
        sys.modules[library] = None
    answer: dict = {"driver": provide_driver()}
    answer |= card(request.get("capability"), request.get("memory_bytes", 96 << 30))
    import torch
    import vllm
    import vllm.model_executor.models.registry as models

    models._run_in_subprocess = lambda ask: ask()  # a second interpreter would not know the stated card
    answer |= {"vllm": vllm.__version__, "torch": torch.__version__}
    gc.disable()
    gc.collect = lambda generation=2: 0  # the engine collects around every load; there is nothing to give back here
    mode = nowhere()
    if "attention" in request:
        with mode:  # some backends allocate their workspace where they are imported
            answer["attention"] = attention(request["attention"])
    if "formats" in request:
        answer["formats"] = [apart(partial(formats, asked, mode)) for asked in request["formats"]]
    if request.get("registry"):
        answer["registry"] = registry()
    answer["models"] = [apart(partial(model, asked, mode)) for asked in request.get("models", [])]
    json.dump(answer, answer_to)
    answer_to.write("\n")
    answer_to.flush()
    os._exit(0)  # threads and groups of the engine would linger


def apart(ask) -> dict:
    """What `ask` fills in, from a forked child: the engine keeps caches and buffers from one model to the next."""
    back, forth = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(back)
        ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG: not without its parent
        answer: dict = {}
        try:
            ask(answer)
        except BaseException as error:
            answer["refused"] = refusal(error)
        with os.fdopen(forth, "w") as file:
            json.dump(answer, file)
        os._exit(0)
    os.close(forth)
    with os.fdopen(back) as file:
        said = file.read()
    os.waitpid(child, 0)
    return (
        json.loads(said)
        if said
        else {"refused": {"type": "Died", "message": "the engine process ended", "where": None}}
    )
