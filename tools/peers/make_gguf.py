#!/usr/bin/env python3
"""Write a GGUF file of OLMoE-1B-7B's shape with seeded random weights in Q4_0 or Q4_K.

make_gguf.py OUT.gguf [--format q4_k] [--layers N ...]

Matrices (embedding, attention, experts, head) have 4.5 bits a weight: Q4_0 stores 32 weights in 18
bytes, Q4_K 256 in 144. Norms and the router are f32. The same options give the same bytes. The
tensors are written piece by piece, so that memory stays below a few hundred MB whatever the shape.

The vocabulary is a list of placeholder tokens: enough for an engine to load the file and to be fed
token ids, not to read or write text.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

try:
    import gguf
    import numpy as np
except ModuleNotFoundError as error:
    sys.exit(f"error: {error.name} is missing: pip install -r tools/peers/requirements.txt")

PIECE_BYTES = 1 << 24
SPREAD = 0.02
"""Standard deviation of all weights."""


def q4_0_blocks(count: int, rng: np.random.Generator) -> np.ndarray:
    """Random Q4_0 blocks as (count, 18) bytes: an f16 scale, then 32 nibbles.

    A nibble n stands for (n - 8) * scale, of root mean square 4.64 and mean -0.5; half of the
    scales have a minus sign, so that the weights have no mean.
    """
    scale = rng.uniform(0.8, 1.2, count) * rng.choice((-1.0, 1.0), count) * (SPREAD / 4.64)
    blocks = np.frombuffer(bytearray(rng.bytes(count * 18)), np.uint8).reshape(count, 18)
    blocks[:, :2] = scale.astype("<f2").view(np.uint8).reshape(count, 2)
    return blocks


def q4_k_blocks(count: int, rng: np.random.Generator) -> np.ndarray:
    """Random Q4_K blocks as (count, 144) bytes: d and dmin in f16, 16 numbers of 6 bits in 12
    bytes, then 256 nibbles.

    A nibble n of a group with the numbers s and m stands for d * s * n - dmin * m. With
    dmin = 7.5 d the mean is zero and the standard deviation 258 d.
    """
    d = rng.uniform(0.8, 1.2, count) * (SPREAD / 258)
    blocks = np.frombuffer(bytearray(rng.bytes(count * 144)), np.uint8).reshape(count, 144)
    blocks[:, :4] = np.stack((d, 7.5 * d), 1).astype("<f2").view(np.uint8)
    return blocks


@dataclass(frozen=True)
class Format:
    """A format of 4.5 bits a weight."""

    kind: gguf.GGMLQuantizationType
    file_type: gguf.LlamaFileType
    block: int
    """Weights of a block; a row is a whole number of blocks."""
    block_bytes: int
    blocks: Callable[[int, np.random.Generator], np.ndarray]


FORMATS = {
    "q4_0": Format(
        gguf.GGMLQuantizationType.Q4_0, gguf.LlamaFileType.MOSTLY_Q4_0, 32, 18, q4_0_blocks
    ),
    "q4_k": Format(
        gguf.GGMLQuantizationType.Q4_K, gguf.LlamaFileType.MOSTLY_Q4_K_S, 256, 144, q4_k_blocks
    ),
}


@dataclass(frozen=True)
class Shape:
    """Dimensions of an OLMoE model; the defaults are OLMoE-1B-7B."""

    layers: int = 16
    experts: int = 64
    top_k: int = 8
    hidden: int = 2048
    expert_intermediate: int = 1024
    heads: int = 16
    vocab: int = 50304
    context: int = 4096

    def problem(self, form: Format) -> str | None:
        """What makes this shape impossible in a format, or None."""
        if min(vars(self).values()) < 1:
            return "every dimension must be at least 1"
        if self.top_k > self.experts:
            return f"--top-k {self.top_k}, but there are {self.experts} experts"
        if self.hidden % self.heads or self.hidden // self.heads % 2:
            return f"--hidden {self.hidden} does not divide into {self.heads} heads of even width"
        for name in ("hidden", "expert_intermediate"):
            if getattr(self, name) % form.block:
                option = name.replace("_", "-")
                return f"--{option} must be a multiple of {form.block} ({form.kind.name} blocks)"
        if self.vocab < 512:
            return "--vocab must be at least 512"
        return None


@dataclass(frozen=True)
class Tensor:
    """One tensor: `dims` with the fastest dimension last, as numpy counts them."""

    name: str
    dims: tuple[int, ...]
    quantised: bool
    """4.5 bits a weight if true, f32 otherwise."""

    def numbers(self) -> int:
        """How many weights it has."""
        count = 1
        for dim in self.dims:
            count *= dim
        return count

    def nbytes(self) -> int:
        """Bytes of its data in the file."""
        return self.numbers() // 16 * 9 if self.quantised else self.numbers() * 4


def tensors(shape: Shape) -> Iterator[Tensor]:
    """All tensors, in file order."""
    hidden, inner, experts = shape.hidden, shape.expert_intermediate, shape.experts
    yield Tensor("token_embd.weight", (shape.vocab, hidden), True)
    for layer in range(shape.layers):
        at = f"blk.{layer}."
        yield Tensor(at + "attn_norm.weight", (hidden,), False)
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            yield Tensor(f"{at}{part}.weight", (hidden, hidden), True)
        for part in ("attn_q_norm", "attn_k_norm", "ffn_norm"):
            yield Tensor(f"{at}{part}.weight", (hidden,), False)
        yield Tensor(at + "ffn_gate_inp.weight", (experts, hidden), False)
        yield Tensor(at + "ffn_gate_exps.weight", (experts, inner, hidden), True)
        yield Tensor(at + "ffn_up_exps.weight", (experts, inner, hidden), True)
        yield Tensor(at + "ffn_down_exps.weight", (experts, hidden, inner), True)
    yield Tensor("output_norm.weight", (hidden,), False)
    yield Tensor("output.weight", (shape.vocab, hidden), True)


def bytes_per_token(shape: Shape) -> int:
    """Bytes of weights that one decoded token reads: of the experts the chosen ones, of all else
    everything, the embedding (a single row) left out."""
    total = 0
    for tensor in tensors(shape):
        if "_exps." in tensor.name:
            total += tensor.nbytes() // shape.experts * shape.top_k
        elif tensor.name != "token_embd.weight":
            total += tensor.nbytes()
    return total


def write_data(out: BinaryIO, tensor: Tensor, form: Format, rng: np.random.Generator) -> None:
    """Write the data of one tensor: norms are ones, all else has the standard deviation
    `SPREAD`."""
    if tensor.quantised:
        left = tensor.nbytes() // form.block_bytes
        while left:
            count = min(left, PIECE_BYTES // form.block_bytes)
            form.blocks(count, rng).tofile(out)
            left -= count
    elif len(tensor.dims) == 1:
        np.ones(tensor.dims, "<f4").tofile(out)
    else:
        values = rng.standard_normal(tensor.dims, np.float32) * np.float32(SPREAD)
        values.astype("<f4").tofile(out)


def vocabulary(size: int) -> list[str]:
    """`size` distinct tokens: the 256 bytes in GPT-2's alphabet first, then placeholders."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    alphabet = {byte: chr(byte) for byte in plain}
    alphabet |= {byte: chr(256 + place) for place, byte in enumerate(others)}
    return [alphabet[b] for b in range(256)] + [f"<token{i}>" for i in range(256, size)]


def write(path: Path, shape: Shape, form: Format, seed: int) -> None:
    """Write the file; raises OSError. A file at `path` is replaced only when all is written."""
    partial = path.with_name(path.name + ".tmp")
    writer = gguf.GGUFWriter(partial, "olmoe")
    writer.add_name("random OLMoE shape")
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.expert_intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.heads)
    writer.add_expert_count(shape.experts)
    writer.add_expert_used_count(shape.top_k)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(shape.vocab)
    writer.add_file_type(form.file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)

    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    tokens = vocabulary(shape.vocab)
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens))
    # A byte-pair tokenizer must have a merge; this one joins two of the bytes.
    writer.add_token_merges([f"{tokens[ord('a')]} {tokens[ord('b')]}"])
    writer.add_eos_token_id(shape.vocab - 1)
    writer.add_add_bos_token(False)

    listed = list(tensors(shape))
    for tensor in listed:
        dims: tuple[int, ...] = tensor.dims
        dtype: np.dtype[Any] = np.dtype(np.float32)
        kind = gguf.GGMLQuantizationType.F32
        if tensor.quantised:
            kind, dtype = form.kind, np.dtype(np.uint8)
            dims = (*dims[:-1], dims[-1] // form.block * form.block_bytes)
        writer.add_tensor_info(tensor.name, dims, dtype, tensor.nbytes(), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()

    alignment = writer.data_alignment
    with partial.open("ab") as out:
        for number, tensor in enumerate(listed):
            out.write(bytes(-out.tell() % alignment))
            write_data(out, tensor, form, np.random.default_rng((seed, number)))
        out.write(bytes(-out.tell() % alignment))
    partial.replace(path)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, metavar="OUT.gguf")
    parser.add_argument("--format", choices=FORMATS, default="q4_0", help="[q4_0]")
    for name, default in vars(Shape()).items():
        option = "--" + name.replace("_", "-")
        parser.add_argument(option, type=int, default=default, metavar="N", help=f"[{default}]")
    parser.add_argument("--seed", type=int, default=417, metavar="S", help="[417]")
    options = vars(parser.parse_args())
    out, seed, form = options.pop("out"), options.pop("seed"), FORMATS[options.pop("format")]
    shape = Shape(**options)
    if problem := shape.problem(form):
        parser.error(problem)
    if seed < 0:
        parser.error("--seed must not be negative")
    if not out.parent.is_dir():
        parser.error(f"{out.parent} is not a directory")
    try:
        write(out, shape, form, seed)
    except OSError as error:
        sys.exit(f"error: {out}: {error.strerror or error}")
    print(f"{out}: {out.stat().st_size / 1e9:.3f} GB, ", end="")
    print(f"{bytes_per_token(shape) / 1e6:.1f} MB of weights read per decoded token")


if __name__ == "__main__":
    main()
