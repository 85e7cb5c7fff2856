import numpy as np
from numpy.typing import NDArray

def simd_level() -> str: ...
def supported_levels() -> list[str]: ...
def norm_squared(x: NDArray[np.float32] | NDArray[np.float64]) -> float: ...
def grid_norm_squared(y: NDArray[np.float32], limit: float) -> float: ...
def scale(x: NDArray[np.float32] | NDArray[np.float64], factor: float, out: NDArray[np.float32]) -> None: ...
def sign_bytes(n: int) -> int: ...
def rotate_forward(
    x: NDArray[np.float32] | NDArray[np.float64], factor: float, signs: NDArray[np.uint8], out: NDArray[np.float32]
) -> None: ...
def rotate_to_grid(
    x: NDArray[np.float32] | NDArray[np.float64],
    factor: float,
    signs: NDArray[np.uint8],
    limit: float,
    out: NDArray[np.float32],
) -> float: ...
def rotate_backward(data: NDArray[np.float32], signs: NDArray[np.uint8]) -> None: ...

class Rounder:
    def __init__(
        self,
        levels: int,
        fraction_bits: int,
        trials: int,
        high: NDArray[np.uint64],
        low: NDArray[np.uint64],
        base: int,
    ) -> None: ...
    def values(self, grid: NDArray[np.float32], keystream: NDArray[np.uint8], values: NDArray[np.uint32]) -> None: ...
    def packed(
        self,
        grid: NDArray[np.float32],
        keystream: NDArray[np.uint8],
        radix: int,
        digits: int,
        bits: int,
        last_bits: int,
        out: NDArray[np.uint8],
    ) -> None: ...

class Flipper:
    def __init__(self, limit: int, coins: int) -> None: ...
    def values(self, grid: NDArray[np.float32], keystream: NDArray[np.uint8], values: NDArray[np.uint32]) -> None: ...
    def packed(
        self,
        grid: NDArray[np.float32],
        keystream: NDArray[np.uint8],
        radix: int,
        digits: int,
        bits: int,
        last_bits: int,
        out: NDArray[np.uint8],
    ) -> None: ...

class GaussianRounder:
    def __init__(
        self, limit: int, window: int, fraction_bits: int, high: NDArray[np.uint64], low: NDArray[np.uint64]
    ) -> None: ...
    def values(self, grid: NDArray[np.float32], keystream: NDArray[np.uint8], values: NDArray[np.uint32]) -> None: ...
    def packed(
        self,
        grid: NDArray[np.float32],
        keystream: NDArray[np.uint8],
        radix: int,
        digits: int,
        bits: int,
        last_bits: int,
        out: NDArray[np.uint8],
    ) -> None: ...

class FineGaussian:
    def __init__(self, high: NDArray[np.uint64], low: NDArray[np.uint64]) -> None: ...
    @staticmethod
    def ciphers() -> bool: ...
    def add(self, keystream: NDArray[np.uint8], weight: int, total: NDArray[np.int64]) -> None: ...
    def expand(self, keys: NDArray[np.uint8], weights: NDArray[np.int64], total: NDArray[np.int64]) -> None: ...

class FinerGaussian:
    def __init__(self, high: NDArray[np.uint64], low: NDArray[np.uint64]) -> None: ...
    def draw(self, keystream: NDArray[np.uint8], out: NDArray[np.int32]) -> None: ...

def saturate(
    grid: NDArray[np.float32],
    keystream: NDArray[np.uint8],
    noise: NDArray[np.int64],
    limit: int,
    window: int,
    grid_bits: int,
    fraction_bits: int,
    values: NDArray[np.uint32],
) -> None: ...
def pack(
    values: NDArray[np.uint32], radix: int, digits: int, bits: int, last_bits: int, out: NDArray[np.uint8]
) -> None: ...
def unpack(
    payload: NDArray[np.uint8], radix: int, digits: int, bits: int, last_bits: int, values: NDArray[np.uint32]
) -> None: ...
def find_out_of_range(
    payload: NDArray[np.uint8], radix: int, digits: int, bits: int, last_bits: int, limit: int, n: int
) -> int: ...
def add_packed(
    payload: NDArray[np.uint8],
    radix: int,
    digits: int,
    bits: int,
    last_bits: int,
    sums: NDArray[np.uint32] | NDArray[np.uint64],
) -> None: ...
def find_below(words: NDArray[np.uint8], bound: int, first: int, positions: NDArray[np.uint32]) -> int: ...
def add_signs(
    bits: NDArray[np.uint8], positions: NDArray[np.uint32], sums: NDArray[np.uint32] | NDArray[np.uint64]
) -> None: ...
def noisy_mean(
    sums: NDArray[np.float64],
    noise: NDArray[np.int32],
    step: float,
    divisor: float,
    most: float,
    out: NDArray[np.float32],
) -> None: ...
def centre(
    sums: NDArray[np.uint32] | NDArray[np.uint64], middle: float, factor: float, out: NDArray[np.float32]
) -> None: ...
def centre_and_rotate(
    sums: NDArray[np.uint32] | NDArray[np.uint64],
    middle: float,
    factor: float,
    signs: NDArray[np.uint8],
    out: NDArray[np.float32],
) -> None: ...
def cell_masses(
    x: NDArray[np.float64], e: NDArray[np.float64], w: float, bent: float, mass: NDArray[np.float64]
) -> float: ...
def tilted_sums(mass: NDArray[np.float64], x: NDArray[np.float64], step: float, sums: NDArray[np.float64]) -> None: ...
def log_averages(
    w: float,
    widths: NDArray[np.float64],
    y0: NDArray[np.float64],
    y1: NDArray[np.float64],
    parts: int,
    value: NDArray[np.float64],
    bend: NDArray[np.float64],
) -> None: ...
def chords(
    t: NDArray[np.float64],
    values: NDArray[np.float64],
    c: NDArray[np.float64],
    moments: NDArray[np.float64],
    largest: NDArray[np.float64],
) -> None: ...
def gaps(
    w: float,
    rate: float,
    narrow: float,
    t: NDArray[np.float64],
    average: NDArray[np.float64],
    bend: NDArray[np.float64],
    smallest: NDArray[np.float64],
    largest: NDArray[np.float64],
    moments: NDArray[np.float64],
    c0: NDArray[np.float64],
    c1: NDArray[np.float64],
    found: NDArray[np.float64],
) -> None: ...
def bessel_ratios(
    variance: float, start: int, ratio: float, error: float, ratios: NDArray[np.float64], errors: NDArray[np.float64]
) -> None: ...

class MessageBuffer:
    def __init__(self, size: int) -> None: ...
    def array(self) -> NDArray[np.uint8]: ...
    def finished(self) -> bytes: ...

def permute(
    numbers: NDArray[np.int64], size: int, half: int, keys: NDArray[np.uint64], found: NDArray[np.int64]
) -> None: ...
def crc32c(data: NDArray[np.uint8], prior: int = 0) -> int: ...

Elements = NDArray[np.uint32]

def modular_product(a: Elements, b: Elements, prime: int, out: Elements) -> None: ...
def modular_gram(a: Elements, b: Elements, prime: int, sums: Elements) -> None: ...
def extension_product(a: Elements, b: Elements, powers: Elements, prime: int, out: Elements) -> None: ...
def extension_powers(t: Elements, powers: Elements, prime: int, out: Elements) -> None: ...
def modular_polynomial(x: Elements, coefficients: Elements, prime: int, out: Elements) -> None: ...
def modular_sum(a: Elements, b: Elements, minus: bool, prime: int, out: Elements) -> None: ...
def uniform_elements(words: Elements, prime: int, out: Elements) -> int: ...
