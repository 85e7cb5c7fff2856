"""Compiles all Triton kernels to a GPU's machine code, which needs no GPU: `python compile_kernels.py CAPABILITY`.

Prints a line for each: its name and the bytes of shared memory that a program takes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from cpsgd.learning import fused as learning
from cpsgd.simulation import device_fused as fused

Kernel = tuple[Any, dict[str, str], dict[str, Any], int]

ROWS = {"rows": "*fp32", "stride": "i64"}


def kernels() -> Iterator[Kernel]:
    """Kernels with the types of their arguments, their constants and warps, as the functions around them call them."""
    back = {"vector": "*fp32", "signs": "*u8", "normalise": "fp32", "rest": "i32"}
    there = {**ROWS, "spare": "*fp32", "spare_stride": "i64", "signs": "*u8", "limits": "*fp64"}
    there |= {"normalise": "fp32", "rest": "i32"}
    for stages, twice in [(6, True), (15, True), (15, False)]:
        size = {"SIZE": 1 << stages, "STAGES": stages, "TWICE": twice}
        yield fused._rotate_rows, there, {"LONGEST": 1e30, **size}, fused._warps(stages)
        yield fused._rotate_back, back, size, fused._warps(stages)
    yield fused._pass, ROWS, {"FIRST": 0, "STAGES": 13, "COLUMNS": 0}, fused._warps(13)
    yield fused._pass, ROWS, {"FIRST": 13, "STAGES": 10, "COLUMNS": 5}, fused._warps(15)
    numbers = {"dim": "i32", "count": "i32", "key": "i64", "first": "i64", "begin": "i32", "steps": "i32"}
    summed = {**ROWS, "sums": "*i64", **numbers}
    size = {"SIZE": fused._WORDS, "CLIENTS": fused._CLIENTS}
    for levels in ({"LIMIT": 1 << 16, "FRACTION": 16}, {"LIMIT": 1 << 30, "FRACTION": 8}):
        yield fused._round_and_sum, summed, {**levels, "OFFSET": levels["LIMIT"], "RATE": 0, **size}, 4
    coins = {"LIMIT": 7000, "OFFSET": 1 << 15, **size}
    yield fused._round_and_sum, summed, {**coins, "FRACTION": 16, "RATE": 3277}, 4
    for count in (1, 15):
        yield fused._toss_and_sum, summed, {**coins, "COINS": count}, 4
    yield fused._toss_many_and_sum, summed, {**coins, "COINS": 255}, 4
    noise = {"SIZE": fused._COIN_COORDINATES, "COUNTERS": fused._COUNTERS}
    yield fused._add_coins, {"sums": "*i64", "dim": "i32", "key": "i64", "trials": "i32"}, noise, 4
    layer = {"back": "*fp32", "incoming": "*fp32", "out": "*fp32", "stride": "i64"}
    yield learning._outer, layer, {"WIDTH": 60, "DEPTH": 784, "BLOCK": learning._BLOCK}, 4
    data = {"images": "*u8", "classes": "*i64", "fields": "*fp32", "moves": "*i64", "numbers": "*i64"}
    data |= {"test": "i64", "train": "i64", "features": "*fp32", "labels": "*i64"}
    yield learning._samples, data, {"SIDE": 28, "SIZE": 1024}, 4


def main() -> None:
    target = GPUTarget("cuda", int(sys.argv[1]), 32)
    for kernel, types, constants, warps in kernels():
        names = kernel.arg_names
        signature = {name: types.get(name, "constexpr") for name in names}
        values = {(names.index(name),): value for name, value in constants.items()}
        source = ASTSource(fn=kernel, signature=signature, constexprs=values)
        made = triton.compile(source, target=target, options={"num_warps": warps, "enable_fp_fusion": False})
        assert made.asm["cubin"]
        print(kernel.__name__, made.metadata.shared)


if __name__ == "__main__":
    main()
