"""Checkpoints on disk: which tensor is stored how, and safetensors files with any dtype."""

from __future__ import annotations

import fnmatch
import json
import struct
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import formats
import rotation

STAMP_KEY = "colibri.fmt"
FLOAT_NAMES = {"f32": "F32", "bf16": "BF16", "f16": "F16"}


@dataclass(frozen=True)
class Stored:
    """One tensor as it lies in a file."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass
class Storage:
    """How a checkpoint stores its tensors.

    `rules` are (pattern, format) pairs, first match wins; a format is f32, bf16, f16, a name of
    formats.md, or fp8-checkpoint for the original FP8 layout with `weight_scale_inv`. Tensors
    that no rule matches are stored as `default`.
    """

    default: str = "bf16"
    rules: list[tuple[str, str]] = field(default_factory=list)
    fused: bool = False
    stamped: bool = False
    flat: bool = False
    scales_dtype: str = "F32"
    shards: int = 1

    def format_of(self, name: str) -> str:
        """The format of a tensor."""
        for pattern, format_name in self.rules:
            if fnmatch.fnmatch(name, pattern):
                return format_name
        return self.default


@dataclass
class Checkpoint:
    """Stored tensors, and the exact float32 values that they stand for."""

    tensors: dict[str, Stored] = field(default_factory=dict)
    values: dict[str, np.ndarray] = field(default_factory=dict)
    stamps: dict[str, str] = field(default_factory=dict)


def store(weights: dict[str, np.ndarray], storage: Storage) -> Checkpoint:
    """Encode all weights and decode them again."""
    checkpoint = Checkpoint()
    for name, weight in weights.items():
        format_name = storage.format_of(name)
        if format_name in FLOAT_NAMES:
            store_float(checkpoint, name, weight, FLOAT_NAMES[format_name])
        elif format_name == "fp8-checkpoint":
            store_original_fp8(checkpoint, name, weight)
        else:
            store_quantised(checkpoint, name, weight, format_name, storage)
    if storage.fused:
        fuse_stored_experts(checkpoint)
    return checkpoint


def store_float(checkpoint: Checkpoint, name: str, weight: np.ndarray, dtype: str) -> None:
    """A plain float tensor."""
    data = formats.encode_float(weight, dtype)
    checkpoint.tensors[name] = Stored(dtype, weight.shape, data)
    checkpoint.values[name] = formats.decode_float(data, dtype).reshape(weight.shape)


def store_original_fp8(checkpoint: Checkpoint, name: str, weight: np.ndarray) -> None:
    """The layout of original FP8 checkpoints: `weight` and `weight_scale_inv`."""
    encoded = formats.encode_fp8(weight)
    checkpoint.tensors[name] = Stored("F8_E4M3", weight.shape, encoded.weight)
    checkpoint.tensors[f"{name}_scale_inv"] = Stored("F32", encoded.scales_shape, encoded.scales)
    checkpoint.values[name] = formats.decode(encoded, *weight.shape)


def store_quantised(
    checkpoint: Checkpoint, name: str, weight: np.ndarray, format_name: str, storage: Storage
) -> None:
    """A tensor X and its scales X.qs."""
    rotated = format_name == "e8-iq3"
    source = rotation.rotate(weight).astype(np.float32) if rotated else weight
    encoded = formats.encode(format_name, source, storage.scales_dtype)
    outputs, inputs = weight.shape
    if not storage.stamped:
        inferred = formats.infer(encoded, outputs, inputs)
        if inferred != format_name and not equal_scales(inferred, format_name, inputs):
            raise ValueError(f"{name}: stored as {format_name} but read as {inferred}")
    shape = (len(encoded.weight),) if storage.flat else encoded.weight_shape
    scale_bytes = {"F32": 4}.get(encoded.scales_dtype, 1)
    scales_shape = encoded.scales_shape
    if storage.flat:
        scales_shape = (len(encoded.scales) // scale_bytes,)
    checkpoint.tensors[name] = Stored(encoded.weight_dtype, shape, encoded.weight)
    checkpoint.tensors[f"{name}.qs"] = Stored(encoded.scales_dtype, scales_shape, encoded.scales)
    if storage.stamped:
        checkpoint.stamps[name] = format_name
    values = formats.decode(encoded, outputs, inputs)
    checkpoint.values[name] = rotation.unrotate(values).astype(np.float32) if rotated else values


def equal_scales(inferred: str, intended: str, inputs: int) -> bool:
    """Whether two int4 readings give every input the same scale."""
    if not (inferred.startswith("int4") and intended.startswith("int4")):
        return False
    first = formats.group_of(inferred) or inputs
    second = formats.group_of(intended) or inputs
    return all(index // first == index // second for index in range(inputs))


def fuse_stored_experts(checkpoint: Checkpoint) -> None:
    """Replace the stored per-expert tensors by the fused 3-D ones (plain floats only)."""
    groups: dict[str, dict[int, dict[str, Stored]]] = {}
    for name in list(checkpoint.tensors):
        if ".mlp.experts." not in name:
            continue
        prefix, rest = name.split(".experts.")
        expert, projection = rest.removesuffix(".weight").split(".")
        stored = checkpoint.tensors.pop(name)
        groups.setdefault(prefix, {}).setdefault(int(expert), {})[projection] = stored
    for prefix, experts in groups.items():
        ordered = [experts[index] for index in range(len(experts))]
        gate, down = ordered[0]["gate_proj"], ordered[0]["down_proj"]
        inner, hidden = gate.shape
        checkpoint.tensors[f"{prefix}.experts.gate_up_proj"] = Stored(
            gate.dtype,
            (len(ordered), 2 * inner, hidden),
            b"".join(entry["gate_proj"].data + entry["up_proj"].data for entry in ordered),
        )
        checkpoint.tensors[f"{prefix}.experts.down_proj"] = Stored(
            down.dtype,
            (len(ordered), hidden, inner),
            b"".join(entry["down_proj"].data for entry in ordered),
        )


def write_safetensors(file: Path, tensors: dict[str, Stored], metadata: dict[str, str]) -> None:
    """Write one safetensors file, tensors sorted by name, header padded to eight bytes."""
    header: dict[str, object] = {"__metadata__": metadata}
    offset = 0
    for name in sorted(tensors):
        stored = tensors[name]
        end = offset + len(stored.data)
        header[name] = {
            "dtype": stored.dtype,
            "shape": list(stored.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    body = b"".join(tensors[name].data for name in sorted(tensors))
    file.write_bytes(struct.pack("<Q", len(text)) + text + body)


def write_checkpoint(folder: Path, checkpoint: Checkpoint, shards: int) -> None:
    """Write model.safetensors, or shards with their index."""
    metadata = {"format": "pt"}
    if checkpoint.stamps:
        metadata[STAMP_KEY] = json.dumps(checkpoint.stamps, separators=(",", ":"), sort_keys=True)
    if shards == 1:
        write_safetensors(folder / "model.safetensors", checkpoint.tensors, metadata)
        return
    names = sorted(checkpoint.tensors)
    per_shard = formats.ceil_div(len(names), shards)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = names[shard * per_shard : (shard + 1) * per_shard]
        write_safetensors(
            folder / file, {name: checkpoint.tensors[name] for name in part}, metadata
        )
        weight_map.update(dict.fromkeys(part, file))
    total = sum(len(stored.data) for stored in checkpoint.tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
