#!/usr/bin/env python3
"""Fill the marked places of the model card from training.json.

card.py TRAINING_JSON CARD
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

FIRST_STEPS, FIRST_TOKENS, FIRST_MINUTES = "2,105", "8.6", "83"
"""What the first checkpoint took; later runs are recorded in training.json."""


def training_text(training: dict[str, Any]) -> str:
    """How long the further training was."""
    return (
        f"From scratch on two CPU cores: {FIRST_MINUTES} minutes ({FIRST_STEPS} steps, "
        f"{FIRST_TOKENS} million tokens), then\nfurther training for {training['minutes']:.0f} "
        f"minutes ({training['steps']:,} steps, {training['tokens_seen'] / 1e6:.1f} million "
        "tokens) with better\nbalanced topics, more conversation, arithmetic and translation, "
        "contexts of 256 to 2,046 tokens,\nand Muon in place of AdamW for the matrices. Text: "
        "permissively licensed sources in eleven topics,\nlisted with their licences in "
        "`tools/train/SOURCES.md`.\n"
    )


def held_out_table(training: dict[str, Any]) -> str:
    """Perplexity per topic before and after."""
    before, after = training["heldout_perplexity_before"], training["heldout_perplexity"]
    rows = [f"| {topic} | {before[topic]:.2f} | {after[topic]:.2f} |" for topic in sorted(after)]
    return "\n".join(["| topic | first checkpoint | this model |", "|---|---|---|", *rows]) + "\n"


def replace_block(card: str, mark: str, text: str) -> str:
    """Replace the paragraph or table that follows a mark."""
    pattern = rf"(<!-- {mark}[^>]*-->\n\n).*?(?=\n\n|\Z)"
    filled, count = re.subn(pattern, lambda match: match[1] + text.rstrip(), card, flags=re.S)
    if count != 1:
        raise SystemExit(f"the card has {count} places marked {mark}")
    return filled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("training", type=Path)
    parser.add_argument("card", type=Path)
    arguments = parser.parse_args()
    training = json.loads(arguments.training.read_text())
    card = arguments.card.read_text()
    card = replace_block(card, "TRAINING", training_text(training))
    card = replace_block(card, "HELDOUT", held_out_table(training))
    arguments.card.write_text(card)


if __name__ == "__main__":
    main()
