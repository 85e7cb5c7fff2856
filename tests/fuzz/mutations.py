"""Changes to valid inputs, from a seed: quick, repeatable and blind to what the parser does with them."""

from __future__ import annotations

import random
from collections.abc import Sequence

LONGEST = 1 << 14
_EDGES = (0, 1, 0x7F, 0x80, 0xFE, 0xFF, 0x20, 0x22, 0x2C, 0x5B, 0x7B)


def mutate(data: bytes, others: Sequence[bytes], tokens: Sequence[bytes], rng: random.Random) -> bytes:
    """A changed copy of `data`, at most `LONGEST` long: one to six small changes at random places."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        place = rng.randrange(len(changed) + 1)
        kind = rng.randrange(9)
        if kind == 0 and place < len(changed):
            changed[place] ^= 1 << rng.randrange(8)
        elif kind == 1 and place < len(changed):
            changed[place] = rng.choice(_EDGES)
        elif kind == 2:
            changed[place:place] = rng.randbytes(rng.choice((1, 1, 2, 4, 8, 64)))
        elif kind == 3:
            del changed[place : place + rng.choice((1, 1, 2, 4, 16, 256))]
        elif kind == 4:
            end = place + rng.choice((1, 4, 16, 256))
            changed[place:place] = changed[place:end] * rng.choice((1, 2, 20))
        elif kind == 5:
            del changed[place:]
        elif kind == 6:
            other = rng.choice(others)
            changed[place:] = other[min(place, len(other)) :]
        elif kind == 7 and tokens:
            token = rng.choice(tokens)
            changed[place : place + rng.choice((0, 1, len(token)))] = token
        else:
            number = rng.choice((0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)).to_bytes(8, "little")
            width = rng.choice((2, 4, 8))
            changed[place : place + width] = number[:width]
    return bytes(changed[:LONGEST])
