#!/usr/bin/env python3
"""Check an export with transformers.

    check.py FOLDER [--heldout FOLDER] [--dataset RUN/dataset.pt]

It must load without missing or unexpected weights (the MTP layer, which transformers does not
have, excepted). Then the perplexity of each held-out text file is printed, with --dataset also
the trainer's own measure beside the one in training.json, and the model writes from some prompts.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from data import PREFIX, windows

EVALUATION_CONTEXT = 256
PIECES = (254, 510, 1022)
"""Tokens of text per piece; the prefix adds two."""
LARGEST_DIFFERENCE = 0.02
PROMPTS = [
    "Once upon a time",
    "def read_file(path):",
    "The LORD is my",
    "Permission is hereby granted",
    "Translate from English to French.\nEnglish: Germany\nFrench:",
    "題詩",
    "<|user|>What is your name?\n<|assistant|>",
    "<|user|>What is 7 plus 5?\n<|assistant|>",
    "12 + 30 =",
]


def load(folder: Path) -> torch.nn.Module:
    """The model in float32; exits if weights are missing or unexpected."""
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    mtp = f"layers.{model.config.num_hidden_layers}."
    missing = sorted(info["missing_keys"])
    unexpected = sorted(name for name in info["unexpected_keys"] if mtp not in name)
    print(f"missing weights: {missing or 'none'}; unexpected: {unexpected or 'none'}")
    if missing or unexpected:
        raise SystemExit(1)
    return model.eval()


@torch.no_grad()
def text_perplexity(model: torch.nn.Module, ids: list[int], length: int) -> float:
    """Perplexity of a text cut into pieces, each after the prefix; the prefix is not scored."""
    total = 0.0
    for start in range(0, len(ids), length):
        piece = torch.tensor([PREFIX + ids[start : start + length]])
        logits = model(piece).logits[0, len(PREFIX) - 1 : -1]
        total += F.cross_entropy(logits, piece[0, len(PREFIX) :], reduction="sum").item()
    return math.exp(total / len(ids))


@torch.no_grad()
def window_perplexity(model: torch.nn.Module, tokens) -> float:
    """The trainer's measure: windows over the held-out documents with their marks."""
    rows = windows(tokens, EVALUATION_CONTEXT)
    losses = [
        F.cross_entropy(model(part[:, :-1]).logits.flatten(0, 1), part[:, 1:].flatten()).item()
        for part in rows.split(1)
    ]
    return math.exp(sum(losses) / len(losses))


def check_trainer(model: torch.nn.Module, folder: Path, dataset: Path) -> bool:
    """Whether transformers reproduces the perplexities in training.json."""
    recorded = json.loads((folder / "training.json").read_text())["heldout_perplexity"]
    agrees = True
    for name, tokens in torch.load(dataset, weights_only=False).held_out_tokens.items():
        ours = window_perplexity(model, tokens)
        close = abs(ours / recorded[name] - 1) <= LARGEST_DIFFERENCE
        agrees &= close
        print(f"{name:12} transformers {ours:8.3f} trainer {recorded[name]:8.3f} {close}")
    return agrees


@torch.no_grad()
def write(model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast, prompt: str) -> str:
    """A greedy continuation of 40 tokens."""
    ids = torch.tensor([PREFIX + tokenizer.encode(prompt, add_special_tokens=False)])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=40,
        do_sample=False,
        eos_token_id=[0, 4, 6],
        pad_token_id=0,
    )
    return tokenizer.decode(output[0, ids.shape[1] :])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="exported checkpoint")
    parser.add_argument("--heldout", type=Path, help="folder of held-out text files")
    parser.add_argument("--dataset", type=Path, help="dataset.pt of the training run")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = load(arguments.folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(arguments.folder)
    if arguments.heldout:
        print("perplexity of the text in pieces of", *PIECES, "tokens")
        for file in sorted(arguments.heldout.glob("*.txt")):
            ids = tokenizer.encode(file.read_text(encoding="utf-8"), add_special_tokens=False)
            columns = [f"{text_perplexity(model, ids, length):9.3f}" for length in PIECES]
            print(f"{file.stem:12} {len(ids):6} tokens", *columns)
    agrees = not arguments.dataset or check_trainer(model, arguments.folder, arguments.dataset)
    for prompt in PROMPTS:
        print(repr(prompt), "->", repr(write(model, tokenizer, prompt)))
    if not agrees:
        raise SystemExit("the export does not reproduce the trainer's perplexities")


if __name__ == "__main__":
    main()
