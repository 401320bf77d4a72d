"""The Hadamard rotation of e8 weights and their activations, in float64."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MASK = (1 << 64) - 1
MULTIPLIER = 2685821657736338717
SEED = 417
LARGEST_BLOCK = 32768


def sign_vector(size: int) -> NDArray[np.float64]:
    """Signs of a block of `size` elements: xorshift64* with state 417 + size, one byte per eight
    elements (the top byte of the product), low bit first, a set bit is -1."""
    state = SEED + size
    signs = np.empty(size)
    for start in range(0, size, 8):
        state ^= state >> 12
        state = (state ^ (state << 25)) & MASK
        state ^= state >> 27
        byte = (state * MULTIPLIER & MASK) >> 56
        for bit in range(min(8, size - start)):
            signs[start + bit] = -1.0 if (byte >> bit) & 1 else 1.0
    return signs


def tiles(size: int) -> list[int]:
    """Block sizes from the left: the lowest set bit of what remains, at most LARGEST_BLOCK."""
    blocks = []
    while size:
        block = min(size & -size, LARGEST_BLOCK)
        blocks.append(block)
        size -= block
    return blocks


def walsh_hadamard(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The unnormalised transform of the last dimension, stages 1, 2, 4 ..."""
    size = values.shape[-1]
    values = values.copy()
    length = 1
    while length < size:
        pairs = values.reshape(*values.shape[:-1], size // (2 * length), 2, length)
        upper, lower = pairs[..., 0, :], pairs[..., 1, :]
        values = np.stack((upper + lower, upper - lower), -2).reshape(values.shape)
        length *= 2
    return values


def rotate(values: NDArray) -> NDArray[np.float64]:
    """Per block of the last dimension: signs, transform, 1/sqrt(n)."""
    values = np.asarray(values, np.float64)
    parts, start = [], 0
    for size in tiles(values.shape[-1]):
        block = values[..., start : start + size] * sign_vector(size)
        parts.append(walsh_hadamard(block) / np.sqrt(size))
        start += size
    return np.concatenate(parts, -1)


def unrotate(values: NDArray) -> NDArray[np.float64]:
    """The inverse of `rotate`: transform, 1/sqrt(n), signs."""
    values = np.asarray(values, np.float64)
    parts, start = [], 0
    for size in tiles(values.shape[-1]):
        block = walsh_hadamard(values[..., start : start + size]) / np.sqrt(size)
        parts.append(block * sign_vector(size))
        start += size
    return np.concatenate(parts, -1)
