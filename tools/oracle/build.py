#!/usr/bin/env python3
"""Build the oracle fixtures.

build.py OUT [NAME ...]      writes OUT/<name>/ for all fixtures or the named ones
build.py OUT --table         prints what lies in OUT
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from checkpoint import FLOAT_NAMES, Checkpoint, store, write_checkpoint
from families import SPECIAL_IDS, glm_weights, olmoe_weights
from fixtures import FIXTURES, Fixture
from reference import Unsuitable, build_model, reference

LEAST_MARGIN = 2e-3
LEAST_GAP = 2e-4
MOST_SEEDS = 2000


def stop_ids(fixture: Fixture) -> set[int]:
    """All stop ids of a fixture."""
    found: set[int] = set()
    for source in (fixture.config, fixture.generation_config or {}):
        eos = source.get("eos_token_id")
        found |= set(eos if isinstance(eos, list) else [] if eos is None else [eos])
    return found


def values_for_reference(fixture: Fixture, checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    """The exact values of the stored tensors."""
    return {
        name: value
        for name, value in checkpoint.values.items()
        if not (fixture.omit_indexer and ".indexer." in name)
    }


def try_seed(fixture: Fixture, seed: int) -> tuple[Checkpoint, dict[str, Any]]:
    """Weights and reference of one seed; raises `Unsuitable`."""
    config = fixture.config
    make = glm_weights if config["model_type"] == "glm_moe_dsa" else olmoe_weights
    checkpoint = store(make(config, seed), fixture.storage)
    if fixture.omit_indexer:
        for name in [name for name in checkpoint.tensors if ".indexer." in name]:
            del checkpoint.tensors[name]
    torch.manual_seed(seed)
    model = build_model(config, values_for_reference(fixture, checkpoint))
    rng = np.random.default_rng(seed + 1)
    prompt = rng.integers(SPECIAL_IDS, config["vocab_size"], fixture.prompt).tolist()
    result = reference(
        model, config, prompt, fixture.generated, stop_ids(fixture), LEAST_MARGIN, LEAST_GAP
    )
    return checkpoint, result


def check_loading(fixture: Fixture, folder: Path, result: dict[str, Any]) -> None:
    """A plain float checkpoint must load in transformers and give the same argmax."""
    formats = {fixture.storage.default, *(rule[1] for rule in fixture.storage.rules)}
    if not formats <= set(FLOAT_NAMES) or fixture.omit_indexer:
        return
    model, info = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    mtp = f"layers.{fixture.config['num_hidden_layers']}."
    extra = [name for name in info["unexpected_keys"] if mtp not in name]
    if info["missing_keys"] or extra:
        raise RuntimeError(f"missing {info['missing_keys']}, unexpected {extra}")
    with torch.no_grad():
        logits = model.eval()(torch.tensor([result["full_ids"]])).logits[0]
    if logits.argmax(-1).tolist() != result["tf_pred"]:
        raise RuntimeError("the checkpoint on disk gives another argmax")


def build(fixture: Fixture, out: Path) -> None:
    """Search a seed and write the fixture."""
    for seed in range(MOST_SEEDS):
        try:
            checkpoint, result = try_seed(fixture, seed)
            break
        except Unsuitable as reason:
            last = reason
    else:
        raise SystemExit(f"{fixture.name}: no suitable seed, last: {last}")
    folder = out / fixture.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config = {k: v for k, v in fixture.config.items() if k not in fixture.omit_config}
    documents = {"config.json": config, "generation_config.json": fixture.generation_config}
    for name, document in documents.items():
        if document is not None:
            (folder / name).write_text(json.dumps(document, indent=1) + "\n")
    write_checkpoint(folder, checkpoint, fixture.storage.shards)
    result = {"purpose": fixture.purpose, "seed": seed} | result
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in result.items()]
    (folder / "ref.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
    check_loading(fixture, folder, result)
    print(row(folder), flush=True)


def row(folder: Path) -> str:
    """One line of the table."""
    result = json.loads((folder / "ref.json").read_text())
    size = sum(file.stat().st_size for file in folder.iterdir())
    positions, distinct = len(result["tf_pred"]), len(set(result["tf_pred"]))
    border = f"{result['border_gap']:.1e}" if "border_gap" in result else "-"
    router = f"{result['router_gap']:.1e}"
    return (
        f"{folder.name:20} {size / 1024:7.0f} KiB  seed {result['seed']:4}  "
        f"{distinct:3}/{positions:3} distinct  margin {result['margin']:.1e}  "
        f"border {border:8} router {router}  {result['purpose']}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--table", action="store_true", help="only list what is there")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    known = {fixture.name: fixture for fixture in FIXTURES}
    if unknown := set(arguments.names) - set(known):
        raise SystemExit(f"unknown fixtures: {sorted(unknown)}")
    names = arguments.names or list(known)
    if not arguments.table:
        for name in names:
            build(known[name], arguments.out)
        return
    total = 0
    for folder in sorted(arguments.out.iterdir()):
        print(row(folder))
        total += sum(file.stat().st_size for file in folder.iterdir())
    print(f"{total / 2**20:.2f} MiB in all")


if __name__ == "__main__":
    main()
