#!/usr/bin/env python3
"""One measurement of llama.cpp in a process of its own; bench.py starts it.

llamacpp_arm.py info
llamacpp_arm.py decode|prefill JSON     with the fields of `Job`

Prints one JSON object as the last line of stdout; llama.cpp's log goes to stderr. The rates are
llama.cpp's own timings: `predicted_per_second` (decode steps over their time; the first token,
which comes from the prompt's logits, does not count) and `prompt_per_second`.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import dataclass
from typing import Any

try:
    import xllamacpp
except ModuleNotFoundError:
    sys.exit("error: xllamacpp is missing: see tools/peers/README.md for how to install it")

DECODE_PROMPT = 8
"""Prompt of a decode run: as many tokens as `coli bench decode` starts from."""


@dataclass(frozen=True)
class Job:
    """What to measure and with which settings."""

    gguf: str
    vocab: int
    threads: int
    count: int
    """Tokens to decode, or tokens of the prompt."""
    flash_attn: str
    repack: bool
    seed: int


def info() -> dict[str, Any]:
    """Version, build and instruction sets of the installed llama.cpp."""
    return {
        "version": xllamacpp.__version__,
        "build": dict(xllamacpp.BUILD_INFO),
        "system_info": xllamacpp.get_system_info().strip(),
    }


def open_server(job: Job) -> xllamacpp.Server:
    """Load the model: everything on the CPU, one slot, nothing kept of earlier prompts."""
    params = xllamacpp.CommonParams()
    params.model.path = job.gguf
    params.load_mode = xllamacpp.llama_load_mode.LLAMA_LOAD_MODE_MMAP
    params.n_gpu_layers = 0
    params.fit_params = False
    params.n_parallel = 1
    params.n_ctx = max(1024, -(-(job.count + 2 * DECODE_PROMPT) // 256) * 256)
    params.n_batch = params.n_ubatch = 512
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = job.threads
    flash = xllamacpp.llama_flash_attn_type
    params.flash_attn_type = {
        "auto": flash.LLAMA_FLASH_ATTN_TYPE_AUTO,
        "on": flash.LLAMA_FLASH_ATTN_TYPE_ENABLED,
        "off": flash.LLAMA_FLASH_ATTN_TYPE_DISABLED,
    }[job.flash_attn]
    params.no_extra_bufts = not job.repack
    params.warmup = True
    params.cache_prompt = False
    params.cache_ram_mib = 0
    params.n_ctx_checkpoints = 0
    params.verbosity = 4
    return xllamacpp.Server(params)


def complete(server: xllamacpp.Server, prompt: list[int], predict: int) -> dict[str, Any]:
    """Run one greedy completion of exactly `predict` tokens and return its timings.

    Exits with an error unless the whole prompt was computed and all tokens were generated.
    """
    answer = server.handle_completions(
        {
            "prompt": prompt,
            "n_predict": predict,
            "temperature": 0,
            "samplers": ["top_k"],
            "top_k": 1,
            "ignore_eos": True,
            "cache_prompt": False,
        }
    )
    timings = answer.get("timings") if isinstance(answer, dict) else None
    if timings is None:
        sys.exit(f"error: llama.cpp did not complete the prompt: {answer}")
    found = (timings["prompt_n"], timings["cache_n"], timings["predicted_n"])
    if found != (len(prompt), 0, predict):
        sys.exit(
            f"error: of {len(prompt)} prompt tokens llama.cpp computed {found[0]} and took "
            f"{found[1]} from its cache; it generated {found[2]} of {predict} tokens"
        )
    return timings


def measure(what: str, job: Job) -> dict[str, Any]:
    """Warm up with a run of another prompt, then measure; `what` is decode or prefill."""
    server = open_server(job)
    rng = random.Random(job.seed)

    def prompt(tokens: int) -> list[int]:
        return [rng.randrange(256, job.vocab - 1) for _ in range(tokens)]

    if what == "decode":
        complete(server, prompt(DECODE_PROMPT), 1 + min(16, job.count))
        timings = complete(server, prompt(DECODE_PROMPT), 1 + job.count)
        rate = timings["predicted_per_second"]
    else:
        complete(server, prompt(job.count), 1)
        timings = complete(server, prompt(job.count), 1)
        rate = timings["prompt_per_second"]
    return {"tok_per_s": rate, "timings": timings}


def main() -> None:
    """Command line."""
    what = sys.argv[1] if len(sys.argv) > 1 else ""
    if what == "info" and len(sys.argv) == 2:
        result = info()
    elif what in ("decode", "prefill") and len(sys.argv) == 3:
        result = measure(what, Job(**json.loads(sys.argv[2])))
    else:
        sys.exit("usage: llamacpp_arm.py info | decode JSON | prefill JSON")
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
