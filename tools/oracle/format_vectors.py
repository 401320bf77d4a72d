#!/usr/bin/env python3
"""Write small files of encoded bytes and the exact values that they decode to.

    format_vectors.py FIXTURES      writes FIXTURES/formats/*.json and FIXTURES/hadamard.json

A case has `outputs`, `inputs`, `weight` and `scales` (hex), their safetensors dtypes, and either
`values` (the bits of each float32 as eight hex digits, row by row, separated by spaces) or
`error`, a short reason why these bytes must be refused.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

import formats
import rotation
from formats import Encoded, FormatError

Case = dict[str, Any]


def bits(values: np.ndarray) -> str:
    """Float32 values as hex words."""
    return " ".join(f"{word:08x}" for word in values.astype(np.float32).view(np.uint32).flatten())


def case(name: str, encoded: Encoded, outputs: int, inputs: int) -> Case:
    """A case whose values the decoder gives; an error case if it refuses."""
    entry: Case = {
        "name": name,
        "format": encoded.format,
        "outputs": outputs,
        "inputs": inputs,
        "weight": encoded.weight.hex(),
        "weight_dtype": encoded.weight_dtype,
        "scales": encoded.scales.hex(),
        "scales_dtype": encoded.scales_dtype,
    }
    try:
        entry["values"] = bits(formats.decode(encoded, outputs, inputs))
    except FormatError as error:
        entry["error"] = str(error)
    return entry


def raw(
    name: str, format_name: str, outputs: int, inputs: int, weight: bytes, scales: bytes,
    weight_dtype: str = "U8", scales_dtype: str = "F32",
) -> Case:  # fmt: skip
    """A case from bytes written by hand."""
    encoded = Encoded(format_name, weight, weight_dtype, (), scales, scales_dtype, ())
    return case(name, encoded, outputs, inputs)


def floats(*values: float) -> bytes:
    """Little-endian float32 bytes."""
    return np.array(values, "<f4").tobytes()


def random_case(name: str, format_name: str, outputs: int, inputs: int, dtype: str = "F32") -> Case:
    """A random matrix, encoded."""
    rng = np.random.default_rng(outputs * 1000 + inputs)
    matrix = rng.standard_normal((outputs, inputs)).astype(np.float32)
    return case(name, formats.encode(format_name, matrix, dtype), outputs, inputs)


def plain_cases() -> list[Case]:
    """bf16, f16 and e4m3 widening: every class of value."""
    edge_words = [
        0x0000,
        0x8000,
        0x0001,
        0x8001,
        0x007F,
        0x0080,
        0x03FF,
        0x0400,
        0x3C00,
        0xBC00,
        0x3F80,
        0xC2F7,
        0x7BFF,
        0xFBFF,
        0x7F7F,
        0xFF7F,
    ]
    cases = []
    for dtype in ("BF16", "F16"):
        words = [word for word in edge_words if dtype == "BF16" or word & 0x7C00 != 0x7C00]
        data = np.array(words, "<u2").tobytes()
        values = formats.decode_float(data, dtype)
        cases.append(
            {
                "name": f"{dtype} edge values",
                "format": dtype.lower(),
                "outputs": 1,
                "inputs": len(words),
                "weight": data.hex(),
                "weight_dtype": dtype,
                "scales": "",
                "scales_dtype": "",
                "values": bits(values),
            }
        )
    return cases


def int8_cases() -> list[Case]:
    """int8-row."""
    every = bytes(range(256))
    return [
        raw("every code, two scales", "int8-row", 2, 128, every, floats(0.0123, -2.0), "I8"),
        raw(
            "zero and subnormal scales",
            "int8-row",
            2,
            3,
            bytes([1, 255, 128] * 2),
            floats(0, 1e-40),
            "I8",
        ),
        random_case("random, odd inputs", "int8-row", 3, 65),
        raw("infinite scale", "int8-row", 1, 2, b"\x01\x02", floats(np.inf), "I8"),
        raw("NaN scale", "int8-row", 1, 2, b"\x01\x02", floats(np.nan), "I8"),
        raw("one byte short", "int8-row", 1, 3, b"\x01\x02", floats(1.0), "I8"),
    ]


def int4_cases() -> list[Case]:
    """int4-row and int4-grouped."""
    nibbles = bytes(low | high << 4 for low, high in zip(range(0, 16, 2), range(1, 16, 2)))
    cases = [
        raw("every code", "int4-row", 1, 16, nibbles, floats(0.1)),
        raw(
            "odd inputs: the last high nibble is padding",
            "int4-row",
            2,
            5,
            bytes([0x10, 0x32, 0xF4, 0x98, 0xBA, 0x0C]),
            floats(0.5, 3.0),
        ),
        random_case("random, odd inputs", "int4-row", 3, 33),
        raw("infinite scale", "int4-row", 1, 2, b"\x19", floats(-np.inf)),
        raw("too many bytes", "int4-row", 1, 2, b"\x19\x00", floats(1.0)),
    ]
    for group in formats.GROUP_SIZES:
        name = f"int4-g{group}"
        cases.append(random_case(f"g{group}, whole groups", name, 2, 2 * group))
        cases.append(random_case(f"g{group}, short last group", name, 2, group + group // 2 + 1))
    cases.append(raw("too few scales", "int4-g16", 1, 33, bytes(17), floats(1, 2)))
    return cases


def int2_cases() -> list[Case]:
    """int2-row."""
    return [
        raw("every byte", "int2-row", 1, 1024, bytes(range(256)), floats(0.75)),
        random_case("random, inputs not a multiple of four", "int2-row", 3, 31),
        raw("too few bytes", "int2-row", 1, 5, b"\x00", floats(1.0)),
    ]


def int3_cases() -> list[Case]:
    """int3-g64."""
    low = bytes([0b11100100] * 16)
    return [
        raw(
            "codes 0 to 3, then 4 to 7",
            "int3-g64",
            1,
            64,
            low + bytes([0] * 4 + [255] * 4),
            floats(0.3),
        ),
        random_case("two whole groups", "int3-g64", 2, 128),
        random_case("inputs not a multiple of 64", "int3-g64", 3, 75),
        random_case("fewer than 64 inputs", "int3-g64", 2, 9),
        raw("too few scales", "int3-g64", 1, 65, bytes(48), floats(1.0)),
    ]


def e8_block(indices: bytes, words: list[int], d_bits: int) -> bytes:
    """One e8 block from its parts."""
    return indices + np.array(words, "<u4").tobytes() + np.array([d_bits], "<u2").tobytes()


def e8_cases() -> list[Case]:
    """e8-iq3: the stored (rotated) values."""
    rng = np.random.default_rng(8)
    tag = floats(formats.E8_DEFAULT_TAG)
    codes = [code << 28 for code in range(8)]
    signs = [
        sum(int(rng.integers(128)) << (7 * word) for word in range(4)) | (15 - i) << 28
        for i in range(8)
    ]
    ladder = bytes(range(64))
    blocks = {
        "all signs positive, codes 0 to 7": e8_block(ladder, codes, 0x3C00),
        "random signs, codes 15 to 8": e8_block(bytes(range(192, 256)), signs, 0x2E66),
        "one negative of eight makes two": e8_block(bytes(64), [1 | 1 << 13] * 8, 0x3800),
        "smallest subnormal d": e8_block(ladder, signs, 0x0001),
        "largest subnormal d": e8_block(ladder, signs, 0x03FF),
        "zero d": e8_block(ladder, signs, 0x0000),
        "negative d": e8_block(ladder, signs, 0xB555),
        "largest d": e8_block(bytes([255] * 64), [15 << 28] * 8, 0x7BFF),
        "infinite d": e8_block(ladder, codes, 0x7C00),
        "NaN d": e8_block(ladder, codes, 0x7E00),
    }
    cases = [raw(name, "e8-iq3", 1, 256, block, tag) for name, block in blocks.items()]
    every_index = [e8_block(bytes(range(64 * i, 64 * i + 64)), codes, 0x3C00) for i in range(4)]
    cases.append(
        raw("every grid index, four blocks in a row", "e8-iq3", 1, 1024, b"".join(every_index), tag)
    )
    cases.append(random_case("two rows, short last block", "e8-iq3", 2, 320))
    cases.append(raw("too few bytes", "e8-iq3", 1, 257, bytes(98), tag))
    return cases


def mxfp4_cases() -> list[Case]:
    """mxfp4."""
    nibbles = bytes(low | high << 4 for low, high in zip(range(0, 16, 2), range(1, 16, 2)))
    row = nibbles * 2
    cases = [
        raw(f"every nibble, scale code {code}", "mxfp4", 1, 32, row, bytes([code]), "U8", "U8")
        for code in (127, 126, 128, 1, 0, 252, 255)
    ]
    cases += [
        raw(
            "odd inputs, two groups",
            "mxfp4",
            1,
            35,
            row + b"\x98\x0f",
            bytes([120, 130]),
            "U8",
            "F8_E8M0",
        ),
        random_case("random, short last group", "mxfp4", 3, 70, "U8"),
        raw("too few scales", "mxfp4", 1, 33, bytes(17), b"\x7f", "U8", "U8"),
    ]
    return cases


def fp8_cases() -> list[Case]:
    """fp8-e4m3-b128. The codes 0x7f and 0xff are NaN and appear in no case."""
    every = bytes(code for code in range(256) if code & 0x7F != 0x7F)
    cases = [
        raw(
            "every finite code, f32 scale",
            "fp8-e4m3-b128",
            1,
            127,
            every[:127],
            floats(0.37),
            "F8_E4M3",
        ),
        raw(
            "every finite negative code",
            "fp8-e4m3-b128",
            1,
            127,
            every[127:],
            floats(1.0),
            "F8_E4M3",
        ),
        raw(
            "UE8M0 scale 0 is 2^-127",
            "fp8-e4m3-b128",
            1,
            8,
            bytes([1, 7, 8, 56, 126, 129, 128, 0]),
            b"\x00",
            "F8_E4M3",
            "U8",
        ),
        raw("UE8M0 scale 255", "fp8-e4m3-b128", 1, 2, b"\x38\x39", b"\xff", "F8_E4M3", "F8_E8M0"),
        raw("infinite f32 scale", "fp8-e4m3-b128", 1, 2, b"\x38\x39", floats(np.inf), "F8_E4M3"),
        raw("too few scales", "fp8-e4m3-b128", 1, 129, bytes(129), floats(1.0), "F8_E4M3"),
    ]
    rng = np.random.default_rng(88)
    codes = rng.integers(0, 126, (129, 130)).astype(np.uint8)
    scales = floats(0.5, -3.0, 1e-3, 7.0)
    cases.append(
        raw(
            "four blocks, three of them partial",
            "fp8-e4m3-b128",
            129,
            130,
            codes.tobytes(),
            scales,
            "F8_E4M3",
        )
    )
    return cases


CASES = {
    "plain": plain_cases,
    "int8-row": int8_cases,
    "int4": int4_cases,
    "int2-row": int2_cases,
    "int3-g64": int3_cases,
    "e8-iq3": e8_cases,
    "mxfp4": mxfp4_cases,
    "fp8-e4m3-b128": fp8_cases,
}


def hadamard() -> dict[str, Any]:
    """Sign vectors (as bits, element 0 first, 1 is -1), tilings and rotated vectors."""
    sizes = [1, 2, 8, 64, 256, 512, 2048, 4096, 32768]
    signs = {}
    for size in sizes:
        negative = rotation.sign_vector(size) < 0
        signs[str(size)] = np.packbits(negative, bitorder="little").tobytes().hex()
    rng = np.random.default_rng(10)
    vectors = []
    for size in (1, 12, 72, 256, 320, 768):
        values = rng.standard_normal(size).astype(np.float32)
        rotated = rotation.rotate(values)
        vectors.append(
            {
                "input": [float(value) for value in values],
                "rotated": [float(f"{value:.9g}") for value in rotated],
            }
        )
    tilings = {str(size): rotation.tiles(size) for size in (12, 320, 768, 2048, 6144, 7168, 98304)}
    long = np.sin(np.arange(6144) * 0.1)
    rotated = rotation.rotate(long)
    return {
        "signs_packed_low_bit_first": signs,
        "tilings": tilings,
        "vectors": vectors,
        "sine_6144": {
            "input": "sin(0.1 * i) in float64, i = 0 .. 6143",
            "every_64th_rotated": [float(f"{value:.12g}") for value in rotated[::64]],
        },
    }


def write_cases(file: Path, cases: list[Case]) -> None:
    """One case per line."""
    lines = ",\n".join(f" {json.dumps(entry)}" for entry in cases)
    file.write_text(f'{{"cases": [\n{lines}\n]}}\n')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("fixtures", type=Path)
    arguments = parser.parse_args()
    folder = arguments.fixtures / "formats"
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in CASES.items():
        cases = make()
        write_cases(folder / f"{name}.json", cases)
        errors = sum("error" in entry for entry in cases)
        print(f"{name:14} {len(cases):3} cases, {errors} of them errors")
    (arguments.fixtures / "hadamard.json").write_text(json.dumps(hadamard()) + "\n")


if __name__ == "__main__":
    main()
