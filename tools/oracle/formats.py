"""The weight formats of the containers: encoders, and decoders written independently of the engine.

Every encoder takes a float32 matrix [outputs, inputs] and returns an `Encoded`: the weight bytes,
the scale bytes and their safetensors dtypes. Every decoder takes those bytes and the shape and
returns float32 [outputs, inputs], computed exactly as the format says. Encoders are simple and
make no attempt at the best quality; only the decoders define a reference.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

Matrix = NDArray[np.float32]

GROUP_SIZES = (16, 32, 48, 64, 96, 128, 192, 256)
FP8_BLOCK = 128
MXFP4_GROUP = 32
INT3_GROUP = 64
E8_BLOCK = 256
E8_BLOCK_BYTES = 98
E8_SUB_BLOCK = 32
E8_DEFAULT_TAG = 6.0
E2M1_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
GRID_FILE = Path(__file__).with_name("e8_grid.json")


class FormatError(ValueError):
    """Bytes or scales that the format does not allow."""


@dataclass(frozen=True)
class Encoded:
    """One quantised tensor as it lies in a file."""

    format: str
    weight: bytes
    weight_dtype: str
    weight_shape: tuple[int, ...]
    scales: bytes
    scales_dtype: str
    scales_shape: tuple[int, ...]


def ceil_div(value: int, divisor: int) -> int:
    """Quotient rounded up."""
    return -(-value // divisor)


def pad_columns(matrix: NDArray, multiple: int, fill: float = 0) -> NDArray:
    """The matrix with columns appended up to a multiple."""
    missing = -matrix.shape[1] % multiple
    return np.pad(matrix, ((0, 0), (0, missing)), constant_values=fill)


# ---- plain floats ---------------------------------------------------------------------------


def encode_float(matrix: NDArray[np.float32], dtype: str) -> bytes:
    """Bytes of an array in F32, BF16, F16 or F8_E4M3, rounded to nearest even."""
    kinds = {
        "F32": torch.float32,
        "BF16": torch.bfloat16,
        "F16": torch.float16,
        "F8_E4M3": torch.float8_e4m3fn,
    }
    tensor = torch.from_numpy(np.ascontiguousarray(matrix, np.float32)).to(kinds[dtype])
    return tensor.flatten().view(torch.uint8).numpy().tobytes()


def decode_float(data: bytes, dtype: str) -> NDArray[np.float32]:
    """Exact widening of F32, BF16, F16 or F8_E4M3 bytes to a flat float32 array."""
    if dtype == "F32":
        return np.frombuffer(data, "<f4").copy()
    if dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    if dtype == "F16":
        return np.frombuffer(data, "<f2").astype(np.float32)
    if dtype == "F8_E4M3":
        return e4m3_table()[np.frombuffer(data, np.uint8)]
    raise FormatError(f"no plain float dtype: {dtype}")


def e4m3_table() -> NDArray[np.float32]:
    """All 256 values of e4m3fn: bias 7, no infinity, S.1111.111 is NaN."""
    values = np.zeros(256, np.float32)
    for code in range(256):
        exponent, mantissa = (code >> 3) & 15, code & 7
        if exponent == 15 and mantissa == 7:
            magnitude = np.nan
        elif exponent == 0:
            magnitude = mantissa * 2.0**-9
        else:
            magnitude = (8 + mantissa) * 2.0 ** (exponent - 10)
        values[code] = -magnitude if code >> 7 else magnitude
    return values


# ---- scales ---------------------------------------------------------------------------------


def f32_scales(data: bytes, count: int) -> NDArray[np.float32]:
    """`count` finite float32 scales."""
    scales = np.frombuffer(data, "<f4")
    if len(scales) != count:
        raise FormatError(f"{len(scales)} scales where {count} are expected")
    if not np.isfinite(scales).all():
        raise FormatError("a scale is not finite")
    return scales


def ue8m0_scales(data: bytes, count: int) -> NDArray[np.float32]:
    """`count` scales 2^(byte - 127); 0 is the subnormal 2^-127, 255 is an error."""
    codes = np.frombuffer(data, np.uint8)
    if len(codes) != count:
        raise FormatError(f"{len(codes)} scales where {count} are expected")
    if (codes == 255).any():
        raise FormatError("a UE8M0 scale is 255")
    return np.ldexp(np.float64(1), codes.astype(np.int32) - 127).astype(np.float32)


def power_of_two_codes(scales: NDArray[np.float64]) -> NDArray[np.uint8]:
    """The UE8M0 code of the smallest power of two that is not below each scale."""
    exponents = np.ceil(np.log2(np.maximum(scales, 2.0**-126)))
    return np.clip(exponents + 127, 1, 254).astype(np.uint8)


# ---- integer formats ------------------------------------------------------------------------


def symmetric_codes(
    matrix: Matrix, group: int, divisor: float, lowest: int, highest: int
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """(codes [outputs, inputs], scales [outputs, groups]) with scale = absmax / divisor."""
    outputs, inputs = matrix.shape
    grouped = pad_columns(matrix, group).reshape(outputs, -1, group)
    scales = (np.abs(grouped).max(-1) / np.float32(divisor)).astype(np.float32)
    safe = np.where(scales == 0, np.float32(1), scales)
    codes = np.clip(np.rint(grouped / safe[..., None]), lowest, highest).astype(np.int32)
    return codes.reshape(outputs, -1)[:, :inputs], scales


def pack_codes(codes: NDArray[np.int32], per_byte: int, bits: int, pad: int) -> bytes:
    """Codes per row from the low bits of each byte; each row begins on a byte."""
    padded = pad_columns(codes, per_byte, pad).astype(np.uint8)
    lanes = padded.reshape(codes.shape[0], -1, per_byte)
    packed = np.zeros(lanes.shape[:2], np.uint8)
    for lane in range(per_byte):
        packed |= lanes[..., lane] << np.uint8(bits * lane)
    return packed.tobytes()


def unpack_codes(data: bytes, outputs: int, inputs: int, per_byte: int, bits: int) -> NDArray:
    """The inverse of `pack_codes`: unsigned codes [outputs, inputs]."""
    row_bytes = ceil_div(inputs, per_byte)
    if len(data) != outputs * row_bytes:
        raise FormatError(f"{len(data)} weight bytes where {outputs * row_bytes} are expected")
    packed = np.frombuffer(data, np.uint8).reshape(outputs, row_bytes)
    mask = (1 << bits) - 1
    lanes = [(packed >> (bits * lane)) & mask for lane in range(per_byte)]
    return np.stack(lanes, -1).reshape(outputs, -1)[:, :inputs].astype(np.int32)


def encode_int8(matrix: Matrix) -> Encoded:
    """int8-row."""
    codes, scales = symmetric_codes(matrix, matrix.shape[1], 127, -127, 127)
    return Encoded(
        "int8-row", codes.astype(np.int8).tobytes(), "I8", matrix.shape,
        scales.tobytes(), "F32", (matrix.shape[0],),
    )  # fmt: skip


def decode_int8(weight: bytes, scales: bytes, outputs: int, inputs: int) -> Matrix:
    """int8-row: q * s[o]."""
    if len(weight) != outputs * inputs:
        raise FormatError(f"{len(weight)} weight bytes where {outputs * inputs} are expected")
    codes = np.frombuffer(weight, np.int8).reshape(outputs, inputs)
    return codes.astype(np.float32) * f32_scales(scales, outputs)[:, None]


def encode_int4(matrix: Matrix, group: int | None = None) -> Encoded:
    """int4-row (group None) or int4-grouped."""
    outputs, inputs = matrix.shape
    codes, scales = symmetric_codes(matrix, group or inputs, 7, -8, 7)
    packed = pack_codes(codes + 8, 2, 4, 8)
    return Encoded(
        f"int4-g{group}" if group else "int4-row",
        packed, "U8", (outputs, ceil_div(inputs, 2)),
        scales.tobytes(), "F32", scales.shape if group else (outputs,),
    )  # fmt: skip


def decode_int4(
    weight: bytes, scales: bytes, outputs: int, inputs: int, group: int | None = None
) -> Matrix:
    """int4: (nibble - 8) * scale of the row or of the input's group."""
    values = unpack_codes(weight, outputs, inputs, 2, 4) - 8
    groups = ceil_div(inputs, group) if group else 1
    table = f32_scales(scales, outputs * groups).reshape(outputs, groups)
    expanded = np.repeat(table, group or inputs, axis=1)[:, :inputs]
    return values.astype(np.float32) * expanded


def encode_int2(matrix: Matrix) -> Encoded:
    """int2-row."""
    codes, scales = symmetric_codes(matrix, matrix.shape[1], 2, -2, 1)
    return Encoded(
        "int2-row", pack_codes(codes + 2, 4, 2, 2), "U8",
        (matrix.shape[0], ceil_div(matrix.shape[1], 4)),
        scales.tobytes(), "F32", (matrix.shape[0],),
    )  # fmt: skip


def decode_int2(weight: bytes, scales: bytes, outputs: int, inputs: int) -> Matrix:
    """int2-row: (code - 2) * s[o]."""
    values = unpack_codes(weight, outputs, inputs, 4, 2) - 2
    return values.astype(np.float32) * f32_scales(scales, outputs)[:, None]


def encode_int3(matrix: Matrix) -> Encoded:
    """int3-g64: per group 16 bytes of low bit pairs, then 8 bytes of high bits."""
    outputs, inputs = matrix.shape
    codes, scales = symmetric_codes(matrix, INT3_GROUP, 4, -4, 3)
    groups = ceil_div(inputs, INT3_GROUP)
    unsigned = pad_columns(codes + 4, INT3_GROUP, 4).astype(np.uint8)
    unsigned = unsigned.reshape(outputs * groups, INT3_GROUP)
    low = pack_codes((unsigned & 3).astype(np.int32), 4, 2, 0)
    high = np.packbits(unsigned >> 2, axis=1, bitorder="little")
    low_bytes = np.frombuffer(low, np.uint8).reshape(outputs * groups, 16)
    packed = np.concatenate([low_bytes, high], axis=1)
    return Encoded(
        "int3-g64", packed.tobytes(), "U8", (outputs, groups * 24),
        scales.tobytes(), "F32", (outputs, groups),
    )  # fmt: skip


def decode_int3(weight: bytes, scales: bytes, outputs: int, inputs: int) -> Matrix:
    """int3-g64: (code - 4) * scale of the group."""
    groups = ceil_div(inputs, INT3_GROUP)
    if len(weight) != outputs * groups * 24:
        raise FormatError(f"{len(weight)} weight bytes where {outputs * groups * 24} are expected")
    table = f32_scales(scales, outputs * groups)
    values = np.zeros((outputs, groups * INT3_GROUP), np.float32)
    for row in range(outputs):
        for group in range(groups):
            start = (row * groups + group) * 24
            low, high = weight[start : start + 16], weight[start + 16 : start + 24]
            for k in range(INT3_GROUP):
                code = (low[k // 4] >> (2 * (k % 4))) & 3
                code |= ((high[k // 8] >> (k % 8)) & 1) << 2
                scale = table[row * groups + group]
                values[row, group * INT3_GROUP + k] = np.float32(code - 4) * scale
    return values[:, :inputs]


# ---- e8 -------------------------------------------------------------------------------------


def e8_grid() -> NDArray[np.float32]:
    """The 256 grid points of four magnitudes, as stored (doubled)."""
    return np.array(json.loads(GRID_FILE.read_text()), np.float32)


def encode_e8(rotated: Matrix, tag: float = E8_DEFAULT_TAG) -> Encoded:
    """e8-iq3 of a matrix whose rows are already rotated (see rotation.py)."""
    outputs, inputs = rotated.shape
    grid = e8_grid()
    half = grid / 2
    blocks = pad_columns(rotated, E8_BLOCK).reshape(-1, E8_BLOCK).astype(np.float32)
    packed = np.zeros((len(blocks), E8_BLOCK_BYTES), np.uint8)
    strongest = 15.5 * 0.5 * half.max()
    d = (np.abs(blocks).max(1) / strongest).astype(np.float16)
    packed[:, 96:98] = d.reshape(-1, 1).view(np.uint8)
    eights = blocks.reshape(len(blocks), 32, 8).copy()
    negative = eights < 0
    odd = negative.sum(-1) % 2 == 1
    weakest = np.abs(eights).argmin(-1)
    rows, columns = np.nonzero(odd)
    negative[rows, columns, weakest[rows, columns]] ^= True
    signed = np.where(negative, -eights, eights)
    sub_blocks = signed.reshape(len(blocks), 8, E8_SUB_BLOCK)
    unit = d.astype(np.float32)[:, None] * 0.5
    largest = sub_blocks.max(-1)
    codes = np.rint(largest / np.where(unit == 0, 1, unit * half.max()) - 0.5)
    codes = np.clip(codes, 0, 15).astype(np.uint32)
    steps = unit * (0.5 + codes.astype(np.float32))
    targets = sub_blocks / np.where(steps == 0, 1, steps)[..., None]
    quads = targets.reshape(-1, 4)
    distances = (half**2).sum(1)[None, :] - 2 * quads @ half.T
    packed[:, :64] = distances.argmin(1).reshape(len(blocks), 64)
    words = codes << np.uint32(28)
    bits = negative.reshape(len(blocks), 8, 4, 8)
    for word in range(4):
        for bit in range(7):
            words |= bits[:, :, word, bit].astype(np.uint32) << np.uint32(7 * word + bit)
    packed[:, 64:96] = words.astype("<u4").view(np.uint8).reshape(len(blocks), 32)
    row_bytes = ceil_div(inputs, E8_BLOCK) * E8_BLOCK_BYTES
    return Encoded(
        "e8-iq3", packed.tobytes(), "U8", (outputs, row_bytes),
        np.array([tag], "<f4").tobytes(), "F32", (1,),
    )  # fmt: skip


def decode_e8(weight: bytes, outputs: int, inputs: int) -> Matrix:
    """e8-iq3: the stored, that is rotated, matrix.

    Value = d * (0.5 + code) * 0.5 * grid[index][j] / 2 * sign. All factors but d are small
    multiples of powers of two, so the product has one rounding wherever it has any.
    """
    grid = e8_grid()
    blocks = ceil_div(inputs, E8_BLOCK)
    if len(weight) != outputs * blocks * E8_BLOCK_BYTES:
        raise FormatError(f"{len(weight)} bytes are not {outputs} rows of {blocks} e8 blocks")
    values = np.zeros((outputs * blocks, E8_BLOCK), np.float32)
    for block in range(outputs * blocks):
        data = weight[block * E8_BLOCK_BYTES : (block + 1) * E8_BLOCK_BYTES]
        d = float(np.frombuffer(data[96:98], "<f2")[0])
        if not np.isfinite(d):
            raise FormatError("an e8 block scale is not finite")
        words = np.frombuffer(data[64:96], "<u4")
        for k in range(E8_BLOCK):
            word = int(words[k // 32])
            code = word >> 28
            seven = (word >> (7 * (k % 32 // 8))) & 127
            position = k % 8
            if position < 7:
                negative = (seven >> position) & 1
            else:
                negative = seven.bit_count() % 2
            magnitude = d * (0.5 + code) * 0.5 * float(grid[data[k // 4]][k % 4]) / 2
            values[block, k] = np.float32(-magnitude if negative else magnitude)
    return values.reshape(outputs, -1)[:, :inputs]


# ---- mxfp4 and fp8 --------------------------------------------------------------------------


def encode_mxfp4(matrix: Matrix, scales_dtype: str = "U8") -> Encoded:
    """mxfp4 with its UE8M0 scales stored as U8 or F8_E8M0."""
    outputs, inputs = matrix.shape
    grouped = pad_columns(matrix, MXFP4_GROUP).reshape(outputs, -1, MXFP4_GROUP)
    codes = power_of_two_codes(np.abs(grouped).max(-1).astype(np.float64) / 6)
    steps = ue8m0_scales(codes.tobytes(), codes.size).reshape(codes.shape)
    relative = grouped / steps[..., None]
    nearest = np.abs(np.abs(relative)[..., None] - E2M1_MAGNITUDES).argmin(-1)
    nibbles = (nearest | (np.signbit(relative) << 3)).reshape(outputs, -1)[:, :inputs]
    return Encoded(
        "mxfp4", pack_codes(nibbles.astype(np.int32), 2, 4, 0), "U8",
        (outputs, ceil_div(inputs, 2)), codes.tobytes(), scales_dtype, codes.shape,
    )  # fmt: skip


def decode_mxfp4(weight: bytes, scales: bytes, outputs: int, inputs: int) -> Matrix:
    """mxfp4: e2m1 * 2^(e - 127), even input in the low nibble."""
    nibbles = unpack_codes(weight, outputs, inputs, 2, 4)
    groups = ceil_div(inputs, MXFP4_GROUP)
    table = ue8m0_scales(scales, outputs * groups).reshape(outputs, groups)
    magnitudes = E2M1_MAGNITUDES[nibbles & 7]
    values = np.where(nibbles & 8, -magnitudes, magnitudes)
    return values * np.repeat(table, MXFP4_GROUP, axis=1)[:, :inputs]


def encode_fp8(matrix: Matrix, scales_dtype: str = "F32") -> Encoded:
    """fp8-e4m3-b128 with F32, U8 or F8_E8M0 scales."""
    outputs, inputs = matrix.shape
    shape = (ceil_div(outputs, FP8_BLOCK), ceil_div(inputs, FP8_BLOCK))
    largest = np.zeros(shape, np.float64)
    for row in range(shape[0]):
        for column in range(shape[1]):
            rows = slice(row * FP8_BLOCK, (row + 1) * FP8_BLOCK)
            columns = slice(column * FP8_BLOCK, (column + 1) * FP8_BLOCK)
            largest[row, column] = np.abs(matrix[rows, columns]).max()
    if scales_dtype == "F32":
        table = np.maximum(largest / 448, 1e-12).astype(np.float32)
        data = table.tobytes()
    else:
        codes = power_of_two_codes(largest / 448)
        data = codes.tobytes()
        table = ue8m0_scales(data, codes.size).reshape(shape)
    expanded = np.repeat(np.repeat(table, FP8_BLOCK, 0), FP8_BLOCK, 1)[:outputs, :inputs]
    weight = encode_float(np.clip(matrix / expanded, -448, 448), "F8_E4M3")
    return Encoded("fp8-e4m3-b128", weight, "F8_E4M3", (outputs, inputs), data, scales_dtype, shape)


def decode_fp8(
    weight: bytes, scales: bytes, outputs: int, inputs: int, scales_dtype: str = "F32"
) -> Matrix:
    """fp8-e4m3-b128: e4m3 * s[o / 128][i / 128]."""
    if len(weight) != outputs * inputs:
        raise FormatError(f"{len(weight)} weight bytes where {outputs * inputs} are expected")
    shape = (ceil_div(outputs, FP8_BLOCK), ceil_div(inputs, FP8_BLOCK))
    read = f32_scales if scales_dtype == "F32" else ue8m0_scales
    table = read(scales, shape[0] * shape[1]).reshape(shape)
    expanded = np.repeat(np.repeat(table, FP8_BLOCK, 0), FP8_BLOCK, 1)[:outputs, :inputs]
    return decode_float(weight, "F8_E4M3").reshape(outputs, inputs) * expanded


# ---- by name --------------------------------------------------------------------------------


def group_of(name: str) -> int | None:
    """Group size of an int4 format name; None for int4-row."""
    return int(name.removeprefix("int4-g")) if name.startswith("int4-g") else None


def encode(name: str, matrix: Matrix, scales_dtype: str = "F32") -> Encoded:
    """Encode by format name; `scales_dtype` matters to mxfp4 and fp8 only."""
    if name.startswith("int4"):
        return encode_int4(matrix, group_of(name))
    encoders: dict[str, Callable[[], Encoded]] = {
        "int8-row": lambda: encode_int8(matrix),
        "int2-row": lambda: encode_int2(matrix),
        "int3-g64": lambda: encode_int3(matrix),
        "e8-iq3": lambda: encode_e8(matrix),
        "mxfp4": lambda: encode_mxfp4(matrix, "U8" if scales_dtype == "F32" else scales_dtype),
        "fp8-e4m3-b128": lambda: encode_fp8(matrix, scales_dtype),
    }
    return encoders[name]()


def decode(encoded: Encoded, outputs: int, inputs: int) -> Matrix:
    """Decode by the format's name."""
    name, weight, scales = encoded.format, encoded.weight, encoded.scales
    if name.startswith("int4"):
        return decode_int4(weight, scales, outputs, inputs, group_of(name))
    if name == "e8-iq3":
        return decode_e8(weight, outputs, inputs)
    if name == "fp8-e4m3-b128":
        return decode_fp8(weight, scales, outputs, inputs, encoded.scales_dtype)
    decoders = {
        "int8-row": decode_int8,
        "int2-row": decode_int2,
        "int3-g64": decode_int3,
        "mxfp4": decode_mxfp4,
    }
    return decoders[name](weight, scales, outputs, inputs)


def infer(encoded: Encoded, outputs: int, inputs: int) -> str:
    """The format that byte counts give a tensor without a stamp, in the documented order."""
    bytes_, scale_bytes = len(encoded.weight), len(encoded.scales)
    fp8_blocks = ceil_div(outputs, FP8_BLOCK) * ceil_div(inputs, FP8_BLOCK)
    if encoded.scales_dtype in ("U8", "F8_E8M0"):
        if bytes_ == outputs * ceil_div(inputs, 2):
            return "mxfp4"
        if bytes_ == outputs * inputs and scale_bytes == fp8_blocks:
            return "fp8-e4m3-b128"
        raise FormatError("U8 scales fit neither mxfp4 nor fp8")
    count = scale_bytes // 4
    is_eight_bit = bytes_ == outputs * inputs
    if bytes_ == outputs * ceil_div(inputs, E8_BLOCK) * E8_BLOCK_BYTES and count == 1:
        if is_eight_bit:
            raise FormatError("the bytes fit e8 and an eight-bit format")
        return "e8-iq3"
    if is_eight_bit:
        if count == outputs:
            return "int8-row"
        if count == fp8_blocks:
            return "fp8-e4m3-b128"
    elif bytes_ == outputs * ceil_div(inputs, 2):
        if count == outputs:
            return "int4-row"
        for group in GROUP_SIZES:
            if group <= inputs and count == outputs * ceil_div(inputs, group):
                return f"int4-g{group}"
    elif bytes_ == outputs * ceil_div(inputs, 4) and count == outputs:
        return "int2-row"
    elif bytes_ == outputs * ceil_div(inputs, INT3_GROUP) * 24:
        if count == outputs * ceil_div(inputs, INT3_GROUP):
            return "int3-g64"
    raise FormatError(f"{bytes_} bytes and {count} scales fit no format of {outputs}x{inputs}")
