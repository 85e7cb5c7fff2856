"""Points of the curve edwards25519, for proofs about X25519 secrets.

Needed in disputes only, some milliseconds each; `cryptography` has X25519 and Ed25519 and no arithmetic of points. The
formulas are those of RFC 8032, section 5.1.4. They do not run in constant time.
"""

from __future__ import annotations

from cpsgd.errors import MessageError

PRIME = 2**255 - 19
ORDER = 2**252 + 27742317777372353535851937790883648493
"""Order of the base point."""

_D = -121665 * pow(121666, -1, PRIME) % PRIME
_ROOT = pow(2, (PRIME - 1) // 4, PRIME)

Point = tuple[int, int, int, int]
"""Extended coordinates (X, Y, Z, T): x = X/Z, y = Y/Z, xy = T/Z."""

IDENTITY: Point = (0, 1, 1, 0)


def decode(data: bytes) -> Point:
    """Returns the point that 32 bytes encode.

    Raises:
        MessageError: They do not encode a point.
    """
    number = int.from_bytes(data, "little")
    odd, y = number >> 255, number & ((1 << 255) - 1)
    square = (y * y - 1) * pow(_D * y * y + 1, -1, PRIME) % PRIME
    x = pow(square, (PRIME + 3) // 8, PRIME)
    if (x * x - square) % PRIME:
        x = x * _ROOT % PRIME
    if len(data) != 32 or y >= PRIME or (x * x - square) % PRIME or (not x and odd):
        raise MessageError("A public key is not one that an honest client can have.")
    if x & 1 != odd:
        x = PRIME - x
    return x, y, 1, x * y % PRIME


def encode(point: Point) -> bytes:
    """Returns a point as 32 bytes: y, and the lowest bit of x."""
    x, y = affine(point)
    return (y | (x & 1) << 255).to_bytes(32, "little")


def affine(point: Point) -> tuple[int, int]:
    """Returns the coordinates x and y."""
    inverse = pow(point[2], -1, PRIME)
    return point[0] * inverse % PRIME, point[1] * inverse % PRIME


def add(one: Point, other: Point) -> Point:
    """Returns the sum of two points."""
    a = (one[1] - one[0]) * (other[1] - other[0]) % PRIME
    b = (one[1] + one[0]) * (other[1] + other[0]) % PRIME
    c = 2 * one[3] * other[3] * _D % PRIME
    d = 2 * one[2] * other[2] % PRIME
    e, f, g, h = b - a, d - c, d + c, b + a
    return e * f % PRIME, g * h % PRIME, f * g % PRIME, e * h % PRIME


def negative(point: Point) -> Point:
    """Returns the point with the other sign."""
    return -point[0] % PRIME, point[1], point[2], -point[3] % PRIME


def multiply(scalar: int, point: Point) -> Point:
    """Returns a multiple of a point."""
    found = IDENTITY
    while scalar:
        if scalar & 1:
            found = add(found, point)
        point = add(point, point)
        scalar >>= 1
    return found


def is_identity(point: Point) -> bool:
    """Returns whether a point is the neutral element: the only one of the curve with y = 1."""
    return (point[1] - point[2]) % PRIME == 0


BASE = decode(bytes([0x58] + [0x66] * 31))
