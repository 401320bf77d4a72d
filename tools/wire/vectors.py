"""Writes the test vectors of docs/wire.md, with nothing but the standard library.

    python3 tools/wire/vectors.py fixtures/wire

They are made from the description of the protocol alone, apart from the program that they test.
"""

import struct
import sys
from pathlib import Path

HIDDEN, INTERMEDIATE = 4, 6


def request(layer, items):
    out = b"COLIEX01" + struct.pack(">IIIII", 1, layer, HIDDEN, INTERMEDIATE, len(items))
    return out + b"".join(item(*each) for each in items)


def reply(status, items):
    out = b"COLIEX01" + struct.pack(">III", 1, status, len(items))
    return out + b"".join(item(*each) for each in items)


def item(expert, rows):
    out = struct.pack(">II", expert, len(rows))
    return out + b"".join(struct.pack(f"<{HIDDEN}f", *row) for row in rows)


ONE = [[1.0, -2.5, 0.0, 3.0e-5]]
TWO = [[0.5, 0.25, -0.125, 1024.0], [float.fromhex("0x1.fffffep127"), -0.0, 1.5, 2.0]]

VECTORS = {
    "v1-request-one": request(3, [(7, ONE)]),
    "v1-request-two": request(78, [(200, TWO), (5, ONE)]),
    "v1-reply-two": reply(0, [(200, TWO), (5, ONE)]),
    "v1-reply-failed": reply(1, []),
}

if __name__ == "__main__":
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    for name, data in VECTORS.items():
        lines = [data[at : at + 32].hex() for at in range(0, len(data), 32)]
        (out / f"{name}.hex").write_text("\n".join(lines) + "\n")
