"""Prints gain and cost of correlated noise in few bits: `python -m benchmarks.few_bits` (ten seconds of one core)."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from time import process_time
from typing import Any

import numpy as np

from cpsgd import Protocol, plan
from cpsgd.correlated.fine_draws import BLOCK, block_bytes
from cpsgd.correlated.saturating import RoundedCorrelated
from cpsgd.randomness import Keystream


def seconds(calls: Mapping[str, Callable[[], object]], turns: int = 15) -> dict[str, float]:
    """Returns the least processor time of each call; they take turns, so that all meet the same machine."""
    found = dict.fromkeys(calls, float("inf"))
    for _ in range(turns):
        for name, call in calls.items():
            begun = process_time()
            call()
            found[name] = min(found[name], process_time() - begun)
    return found


def compared(independent: Protocol, protocol: Protocol, dim: int) -> str:
    """Returns what encoding costs with all seeds of a lineage, over what it costs with independent noise."""
    memory, vector = protocol.mechanism.memory, np.random.default_rng(1).normal(size=dim)
    independent, protocol = (replace(each, dim=dim, promise=None) for each in (independent, protocol))
    seeds = tuple(os.urandom(16) for _ in range(memory.bands))
    buffer = Keystream.buffer(block_bytes(BLOCK))

    def ciphered() -> None:
        """Makes the bytes of a draw per coordinate, in blocks."""
        stream = Keystream.in_gcm(seeds[0])
        for _ in range(0, dim, BLOCK):
            stream.fill(buffer, block_bytes(BLOCK))

    expanded, total = memory.expanded(seeds, memory.bands, dim), np.zeros(dim, dtype=np.int64)
    taken = seconds(
        {
            "independent": lambda: independent.encode(vector, 0),
            "cold": lambda: protocol.encode(vector, memory.bands, seeds=seeds),
            "ahead": lambda: protocol.encode(vector, memory.bands, seeds=expanded),
            "draw": lambda: protocol.mechanism.lineages.add(seeds[0], 0, 1, total),  # type: ignore[attr-defined]
            "bytes": ciphered,
        }
    )
    unit = taken["independent"]
    return (
        f"d = {dim:,}: encode {1e3 * taken['cold']:.2f} ms, {taken['cold'] / unit:.1f} × independent "
        f"({1e3 * unit:.2f} ms); {1e3 * taken['ahead']:.2f} ms, {taken['ahead'] / unit:.2f} ×, once its seeds are "
        f"expanded; one draw of z {1e9 * taken['draw'] / dim:.2f} ns, {taken['draw'] / unit:.2f} ×; "
        f"the library's AES of its bytes {1e9 * taken['bytes'] / dim:.2f} ns"
    )


def main() -> None:
    """Plans the paper's experiment with 3 to 6 bits, and encodes vectors with each plan."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--bits", type=float, nargs="+", default=[3.0, 4.0, 5.0, 6.0])
    arguments.add_argument("--bands", type=int, default=129)
    arguments.add_argument("--clients", type=int, default=10_000)
    arguments.add_argument("--dim", type=int, default=51_370)
    arguments.add_argument("--encode", type=int, nargs="+", default=[51_370, 1 << 20], help="lengths to encode")
    arguments.add_argument("--rounds", type=int, default=2500)
    arguments.add_argument("--epsilon", type=float, default=2.0)
    options = arguments.parse_args()
    run: dict[str, Any] = {
        "clients": options.clients,
        "dim": options.dim,
        "epsilon": options.epsilon,
        "delta": 1e-9,
        "rounds": options.rounds,
        "participation": "once",
    }
    independent = plan(**run, bits=5.0, mechanism="rounded-gaussian").protocol
    for bits in options.bits:
        found = plan(**run, bits=bits, correlated=options.bands, mechanism=RoundedCorrelated.name)
        assert found.prefix is not None
        print(
            f"{bits:g} bits: gain {found.prefix.gain:.1f}, ε = {found.guarantee.epsilon:.3f}, "
            f"{found.protocol.mechanism}",
            flush=True,
        )
        for dim in options.encode:
            print(f"  {compared(independent, found.protocol, dim)}", flush=True)


if __name__ == "__main__":
    main()
