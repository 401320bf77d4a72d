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

SECURITY_PLAIN, SECURITY_NOISE = 0, 1
HELLO, COMPUTE, ANSWER, CANCEL, PING, PONG, DRAIN, REFUSE = range(1, 9)


def preface(security, length, status=0):
    out = b"COLIEX01" + struct.pack(">IBB", 2, security, status)
    return out + bytes(length - len(out))


def frame(kind, number, body=b""):
    return struct.pack("<IBBHQ", len(body), kind, 0, 0, number) + body


def padded(data):
    return data + bytes(-len(data) % 4)


def floats(rows):
    return b"".join(struct.pack(f"<{len(row)}f", *row) for row in rows)


def compute(layer, deadline_ms, items, rows, weights=None):
    out = struct.pack("<5I", layer, deadline_ms, int(weights is not None), len(rows), len(items))
    out += b"".join(struct.pack("<II", expert, len(of)) for expert, of in items)
    out += padded(b"".join(struct.pack(f"<{len(of)}H", *of) for _, of in items))
    return out + floats(weights or []) + floats(rows)


def answer(waited_us, computed_us, statuses, outputs=b"", sums=False):
    out = struct.pack("<4I", int(sums), waited_us, computed_us, len(statuses))
    return padded(out + bytes(statuses)) + outputs


FACTS = (
    b'{"numerics":1,"activations":"int8","model":"00112233445566778899aabbccddeeff","hidden":4,'
    b'"intermediate":6,"layers":79,"experts":256,"engine":"0.1.0","isa":"avx2","threads":8,'
    b'"ram_bytes":64000000000,"cache_bytes":60000000000,"request_bytes":67108864}'
)
HOLDINGS = struct.pack("<4I", 3, 200, 2, 1) + bytes(range(32)) + struct.pack("<4I", 4, 0, 3, 0)

VECTORS = {
    "v2-preface-coordinator": preface(SECURITY_NOISE, 28),
    "v2-preface-worker": preface(SECURITY_PLAIN, 16),
    "v2-hello": frame(HELLO, 0, struct.pack("<I", len(FACTS)) + FACTS + HOLDINGS),
    # Three rows: expert 5 gets the first and last, expert 200 the second.
    "v2-compute-rows": frame(COMPUTE, 9, compute(78, 2500, [(5, [0, 2]), (200, [1])], TWO + ONE)),
    "v2-compute-sums": frame(
        COMPUTE, 10, compute(3, 0, [(5, [0, 1]), (6, [0])], TWO, [[0.25, 0.5], [1.5]])
    ),
    # The second expert is not held.
    "v2-answer-rows": frame(ANSWER, 9, answer(70, 1234, [0, 1], floats(TWO))),
    "v2-answer-sums": frame(
        ANSWER, 10, answer(0, 5, [0, 0], struct.pack("<8q", *range(-4, 3), 1 << 60), sums=True)
    ),
    "v2-cancel": frame(CANCEL, 10),
    "v2-pong": frame(PONG, 77, struct.pack("<IIQQ", 2, 0, 123456, 60000000000)),
    "v2-drain": frame(DRAIN, 0),
    "v2-refuse": frame(REFUSE, 0, b"another model"),

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
