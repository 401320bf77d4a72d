#!/usr/bin/env python3
"""Train the bundled model `hummingbird` on CPU.

    train.py CORPUS RUN --minutes 90 --init FOLDER   continues from an exported checkpoint
    train.py CORPUS RUN --minutes 90                 trains a tokenizer and starts from nothing
    train.py CORPUS RUN                              resumes RUN/state.pt, whatever it began with
    train.py CORPUS RUN --export-only                writes RUN/hf from RUN/state.pt

The learning rate follows the time spent in steps as a fraction of the budget: warm-up, a constant
phase, a linear decay. A step counts at most STEP_CAP seconds, so a stopped process or a busy
machine does not use up the budget. A file RUN/finish with a number in it makes the decay begin at
once and last that many minutes.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from data import Dataset, batches, load_dataset, read_documents, windows
from export import SPECIAL_TOKENS, export, load_hf
from model import Model, ModelConfig
from optim import build_optimizers

SEED = 417
EVALUATION_CONTEXT = 256
STEP_CAP = 10.0
WARM_UP_STEPS = 100
CONSTANT_SHARE = 0.35
FINAL_RATE = 0.02
MTP_WEIGHT = 0.3
BALANCE_RATE = 2e-3
EVALUATE_EVERY = 100
SAVE_EVERY = 50


@dataclass
class Progress:
    """What a run has done so far; saved with the weights."""

    step: int = 0
    seconds: float = 0.0
    budget: float = 0.0
    tokens: int = 0
    decay_from: float | None = None
    initial: str = "random"
    history: list[tuple[int, float, dict[str, float]]] = field(default_factory=list)

    def rate(self) -> float:
        """Learning rate of the next step as a fraction of the peak."""
        warm_up = min(1.0, (self.step + 1) / WARM_UP_STEPS)
        start = self.budget * CONSTANT_SHARE if self.decay_from is None else self.decay_from
        if self.seconds < start:
            return warm_up
        left = (self.budget - self.seconds) / max(self.budget - start, 1.0)
        return warm_up * max(FINAL_RATE, left)


def train_tokenizer(corpus: Path, file: Path) -> None:
    """A byte-level BPE over the base text of all topics."""
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=ModelConfig().vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    files = sorted(file for file in corpus.glob("*.txt") if not file.stem.endswith(".more"))
    tokenizer.train_from_iterator((d for f in files for d in read_documents(f)), trainer)
    tokenizer.save(str(file))


@torch.no_grad()
def evaluate(model: Model, dataset: Dataset) -> dict[str, float]:
    """Held-out cross entropy per topic, in nats per token."""
    model.eval()
    losses = {}
    for name, tokens in dataset.held_out_tokens.items():
        total, count = 0.0, 0
        for rows in windows(tokens, EVALUATION_CONTEXT).split(8):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(rows[:, :-1])
            loss = F.cross_entropy(
                logits.float().flatten(0, 1), rows[:, 1:].flatten(), reduction="sum"
            )
            total, count = total + loss.item(), count + rows[:, 1:].numel()
        losses[name] = total / count
    model.train()
    return losses


def perplexities(losses: dict[str, float]) -> dict[str, float]:
    """Rounded perplexity per topic."""
    return {name: round(math.exp(loss), 3) for name, loss in losses.items()}


def save_atomically(value: object, file: Path) -> None:
    """torch.save to a temporary name, then rename."""
    temporary = file.with_suffix(".tmp")
    torch.save(value, temporary)
    os.replace(temporary, file)


class Trainer:
    """One training run in a folder."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.run: Path = arguments.run
        self.run.mkdir(parents=True, exist_ok=True)
        self.tokenizer_file = self.run / "tokenizer.json"
        if not self.tokenizer_file.exists():
            if arguments.init:
                self.tokenizer_file.write_bytes((arguments.init / "tokenizer.json").read_bytes())
            else:
                train_tokenizer(arguments.corpus, self.tokenizer_file)
        tokenizer = Tokenizer.from_file(str(self.tokenizer_file))
        dataset_file = self.run / "dataset.pt"
        if dataset_file.exists():
            self.dataset = torch.load(dataset_file, weights_only=False)
        else:
            self.dataset = load_dataset(arguments.corpus, tokenizer)
            save_atomically(self.dataset, dataset_file)
        self.model = Model(ModelConfig())
        self.optimizers = build_optimizers(self.model)
        self.progress = Progress(budget=arguments.minutes * 60)
        state_file = self.run / "state.pt"
        if state_file.exists():
            state = torch.load(state_file, weights_only=False)
            self.model.load_state_dict(state["model"])
            for optimizer, saved in zip(self.optimizers, state["optimizers"]):
                optimizer.load_state_dict(saved)
            self.progress = state["progress"]
            if self.progress.decay_from is None:
                self.progress.budget = arguments.minutes * 60
        elif arguments.init:
            load_hf(self.model, arguments.init)
            self.progress.initial = "an earlier checkpoint"
        self.rng = np.random.default_rng(SEED + self.progress.step)

    def save(self) -> None:
        """Write RUN/state.pt."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "progress": self.progress,
        }
        save_atomically(state, self.run / "state.pt")

    def measure(self) -> dict[str, float]:
        """Evaluate, print and record the held-out perplexities."""
        losses = evaluate(self.model, self.dataset)
        self.progress.history.append((self.progress.step, self.progress.seconds, losses))
        mean = sum(losses.values()) / len(losses)
        shown = " ".join(f"{name} {math.exp(loss):.2f}" for name, loss in losses.items())
        print(f"  held-out perplexity: mean {math.exp(mean):.3f} | {shown}", flush=True)
        return losses

    def step(self, rows: torch.Tensor) -> tuple[float, float]:
        """One optimizer step; (loss of the next token, loss of the MTP layer)."""
        rate = self.progress.rate() * self.arguments.lr
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        mtp_rows = rows.shape[0] // 2
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits, ahead = self.model.forward_with_mtp(rows[:, :-2], mtp_rows)
        loss = F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:-1].flatten())
        ahead_loss = F.cross_entropy(ahead.float().flatten(0, 1), rows[:mtp_rows, 2:-1].flatten())
        (loss + MTP_WEIGHT * ahead_loss).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        for mixture in self.model.mixtures:
            mixture.balance(BALANCE_RATE * min(1.0, self.progress.rate() * 2))
        return loss.item(), ahead_loss.item()

    def check_finish(self) -> None:
        """Obey RUN/finish: begin the decay now."""
        file = self.run / "finish"
        if file.exists():
            minutes = float(file.read_text())
            file.unlink()
            self.progress.decay_from = self.progress.seconds
            self.progress.budget = self.progress.seconds + minutes * 60
            print(f"decay begins now and lasts {minutes} minutes", flush=True)

    def train(self) -> None:
        """Train until the time budget is used up, then save and export."""
        progress, mean_loss = self.progress, 0.0
        print(self.dataset.sizes(), flush=True)
        millions = sum(parameter.numel() for parameter in self.model.parameters()) / 1e6
        print(f"{millions:.2f} M parameters, step {progress.step}", flush=True)
        if not progress.history:
            self.measure()
        self.model.train()
        mark = time.monotonic()
        for rows in batches(self.dataset, self.rng, self.arguments.batch_tokens):
            if progress.seconds >= progress.budget:
                break
            loss, ahead_loss = self.step(rows)
            now = time.monotonic()
            progress.seconds += min(now - mark, STEP_CAP)
            mark = now
            progress.step += 1
            progress.tokens += rows[:, 1:-1].numel()
            mean_loss += (loss - mean_loss) * (0.05 if mean_loss else 1.0)
            if progress.step % 10 == 0:
                load = self.model.layers[-1].mlp.load.float()
                print(
                    f"step {progress.step} minute {progress.seconds / 60:.1f} loss {mean_loss:.3f}"
                    f" mtp {ahead_loss:.3f} rate {progress.rate():.3f}"
                    f" load max/mean {load.max() / load.mean():.2f}"
                    f" {progress.tokens / progress.seconds:.0f} tokens/s",
                    flush=True,
                )
                self.check_finish()
            if progress.step % EVALUATE_EVERY == 0:
                self.measure()
            if progress.step % SAVE_EVERY == 0:
                self.save()
        self.measure()
        self.save()
        self.export()

    def export(self) -> None:
        """Write RUN/hf and the held-out text."""
        progress = self.progress
        before, after = progress.history[0][2], progress.history[-1][2]
        training = {
            "initial_weights": progress.initial,
            "steps": progress.step,
            "tokens_seen": progress.tokens,
            "minutes": round(progress.seconds / 60, 1),
            "heldout_tokens": {
                name: len(tokens) for name, tokens in self.dataset.held_out_tokens.items()
            },
            "heldout_perplexity_before": perplexities(before),
            "heldout_perplexity": perplexities(after),
            "history": [
                {"step": step, "minutes": round(seconds / 60, 1), **perplexities(losses)}
                for step, seconds, losses in progress.history
            ],
        }
        export(self.model, self.tokenizer_file, training, self.run / "hf")
        folder = self.run / "heldout"
        folder.mkdir(exist_ok=True)
        for name, documents in self.dataset.held_out_text.items():
            (folder / f"{name}.txt").write_text("\n\n".join(documents) + "\n", encoding="utf-8")
        print("exported", self.run / "hf", perplexities(after), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("corpus", type=Path, help="folder that corpus.py wrote")
    parser.add_argument("run", type=Path, help="folder of this run")
    parser.add_argument("--minutes", type=float, default=90.0, help="budget of the whole run")
    parser.add_argument("--init", type=Path, help="exported checkpoint to start from")
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--export-only", action="store_true", help="export RUN/state.pt and the held-out text"
    )
    arguments = parser.parse_args()
    torch.manual_seed(SEED)
    torch.set_num_threads(arguments.threads)
    trainer = Trainer(arguments)
    if arguments.export_only:
        trainer.export()
    else:
        trainer.train()


if __name__ == "__main__":
    main()
