"""Tokens, the held-out split, and batches drawn evenly over the topics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from corpus import DOCUMENT_SEPARATOR

PREFIX = [1, 2]
"""`[gMASK]<sop>`, at the start of every document."""
END = 0
"""`<|endoftext|>`, at the end of every document."""

HELD_OUT_FRACTION = 50
"""Held-out candidates are the first 1/50 of a topic's base documents, at least eight of them."""
HELD_OUT_BYTES = 18_000
HELD_OUT_LEAST = 10_000
MOST_DROPPED = 12
SHARED_RUN = 24
"""A held-out document shares no run of this many tokens with any training document."""

TEMPERATURE = 0.5
"""A topic is drawn with probability proportional to boost * tokens ** TEMPERATURE."""
BOOSTS = {"casual": 1.6, "math": 1.4, "translation": 1.5}
CONTEXTS = {256: 0.4, 512: 0.3, 1024: 0.2, 2046: 0.1}
"""Share of the batches of each context length. The longest uses every position the model has."""
START_OF_DOCUMENT = 0.3
"""Share of the windows that begin at the beginning of a document."""


@dataclass
class Topic:
    """Training tokens of one topic and the offset of each document in them."""

    tokens: NDArray[np.int16]
    starts: NDArray[np.int64]


@dataclass
class Dataset:
    """All topics, and the held-out documents (text and tokens) of each."""

    topics: dict[str, Topic]
    held_out_text: dict[str, list[str]]
    held_out_tokens: dict[str, NDArray[np.int16]]

    def sizes(self) -> str:
        """One line: training tokens per topic in thousands, held-out tokens in brackets."""
        return " ".join(
            f"{name} {len(topic.tokens) // 1000}k ({len(self.held_out_tokens[name])})"
            for name, topic in self.topics.items()
        )


def read_documents(file: Path) -> list[str]:
    """The documents of a topic file; none if it does not exist."""
    if not file.exists():
        return []
    return file.read_text(encoding="utf-8").split(DOCUMENT_SEPARATOR)


def encode(tokenizer: Tokenizer, documents: list[str]) -> list[NDArray[np.int16]]:
    """Token ids of each document without the prefix and the end."""
    return [np.array(entry.ids, np.int16) for entry in tokenizer.encode_batch(documents)]


def run_hashes(tokens: NDArray[np.int16]) -> NDArray[np.uint64]:
    """A hash of every run of SHARED_RUN tokens; of the whole document if it is shorter."""
    length = min(SHARED_RUN, len(tokens))
    values = tokens.astype(np.uint64) + np.uint64(1)
    hashes = np.zeros(len(tokens) - length + 1, np.uint64)
    for offset in range(length):
        hashes *= np.uint64(0x9E3779B97F4A7C15)
        hashes += values[offset : offset + len(hashes)]
        hashes ^= hashes >> np.uint64(29)
    return hashes


def split(
    base: dict[str, list[NDArray[np.int16]]],
    more: dict[str, list[NDArray[np.int16]]],
    texts: dict[str, list[str]],
) -> tuple[dict[str, list[int]], dict[str, list[NDArray[np.int16]]]]:
    """Choose the held-out documents: (their indices in `base`, training documents) per topic.

    Candidates that share a run of tokens with no training document are taken first. A topic that
    stays below HELD_OUT_LEAST bytes (licences repeat each other) also takes candidates with at
    most MOST_DROPPED sharers, and these are dropped from training. All other candidates stay out
    of both sets.
    """
    counts = {name: max(8, len(documents) // HELD_OUT_FRACTION) for name, documents in base.items()}
    hashes = {
        (name, index): run_hashes(base[name][index])
        for name, count in counts.items()
        for index in range(count)
    }
    training = [
        (name, document)
        for name, documents in base.items()
        for document in [*documents[counts[name] :], *more[name]]
    ]
    trained = [run_hashes(document) for _, document in training]
    owners = np.repeat(np.arange(len(trained)), [len(entry) for entry in trained])
    trained_hashes = np.concatenate(trained)
    hit = np.isin(trained_hashes, np.concatenate(list(hashes.values())))
    order = np.argsort(trained_hashes[hit], kind="stable")
    hit_hashes, hit_owners = trained_hashes[hit][order], owners[hit][order]

    def sharers_of(document_hashes: NDArray[np.uint64]) -> set[int]:
        """Training documents that share a run with a candidate."""
        first = np.searchsorted(hit_hashes, document_hashes, "left")
        last = np.searchsorted(hit_hashes, document_hashes, "right")
        return {int(o) for lo, hi in zip(first, last) for o in hit_owners[lo:hi]}

    held_out: dict[str, list[int]] = {}
    dropped: set[int] = set()
    for name, count in counts.items():
        sharers = [sharers_of(hashes[name, index]) for index in range(count)]
        size, chosen = 0, []
        for most, limit in ((0, HELD_OUT_BYTES), (MOST_DROPPED, HELD_OUT_LEAST)):
            for index in range(count):
                if index in chosen or len(sharers[index]) > most or size >= limit:
                    continue
                chosen.append(index)
                size += len(texts[name][index].encode())
                dropped |= sharers[index]
        held_out[name] = sorted(chosen)
    kept: dict[str, list[NDArray[np.int16]]] = {name: [] for name in base}
    for index, (name, document) in enumerate(training):
        if index not in dropped:
            kept[name].append(document)
    return held_out, kept


def with_marks(tokens: NDArray[np.int16]) -> NDArray[np.int16]:
    """A document with its prefix and end."""
    return np.concatenate((np.array(PREFIX, np.int16), tokens, np.array([END], np.int16)))


def load_dataset(corpus: Path, tokenizer: Tokenizer) -> Dataset:
    """Read and tokenize the corpus and split off the held-out documents."""
    names = sorted(file.stem for file in corpus.glob("*.txt") if not file.stem.endswith(".more"))
    texts = {name: read_documents(corpus / f"{name}.txt") for name in names}
    base = {name: encode(tokenizer, texts[name]) for name in names}
    more = {name: encode(tokenizer, read_documents(corpus / f"{name}.more.txt")) for name in names}
    held_out, training = split(base, more, texts)
    topics, held_out_tokens = {}, {}
    for name in names:
        documents = [with_marks(tokens) for tokens in training[name]]
        lengths = np.array([len(document) for document in documents])
        topics[name] = Topic(np.concatenate(documents), np.cumsum(lengths) - lengths)
        held_out_tokens[name] = np.concatenate(
            [with_marks(base[name][index]) for index in held_out[name]]
        )
    text = {name: [texts[name][index] for index in held_out[name]] for name in names}
    return Dataset(topics, text, held_out_tokens)


def windows(tokens: NDArray[np.int16], context: int) -> Tensor:
    """Consecutive windows of context + 1 tokens, the last token of one being the first of the
    next; the tail that does not fill a window is left out."""
    count = (len(tokens) - 1) // context
    rows = [tokens[row * context : (row + 1) * context + 1] for row in range(count)]
    return torch.from_numpy(np.stack(rows).astype(np.int64))


def batches(dataset: Dataset, rng: np.random.Generator, tokens: int) -> Iterator[Tensor]:
    """Endless batches [rows, context + 2] of about `tokens` tokens."""
    names = list(dataset.topics)
    weights = np.array(
        [BOOSTS.get(name, 1.0) * len(dataset.topics[name].tokens) ** TEMPERATURE for name in names]
    )
    weights /= weights.sum()
    while True:
        context = int(rng.choice(list(CONTEXTS), p=list(CONTEXTS.values())))
        rows = []
        for index in rng.choice(len(names), tokens // context, p=weights):
            topic = dataset.topics[names[index]]
            last = len(topic.tokens) - context - 2
            if rng.random() < START_OF_DOCUMENT:
                start = min(int(rng.choice(topic.starts)), last)
            else:
                start = int(rng.integers(0, last))
            rows.append(topic.tokens[start : start + context + 2])
        yield torch.from_numpy(np.stack(rows).astype(np.int64))
