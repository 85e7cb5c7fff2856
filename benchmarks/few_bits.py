"""Prints the gain of correlated noise in few bits: `python -m benchmarks.few_bits` (a minute of one core)."""

from __future__ import annotations

import argparse

from cpsgd import plan


def main() -> None:
    """Plans the paper's experiment with 3 to 6 bits."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--bits", type=float, nargs="+", default=[3.0, 4.0, 5.0, 6.0])
    arguments.add_argument("--bands", type=int, default=129)
    arguments.add_argument("--clients", type=int, default=10_000)
    arguments.add_argument("--dim", type=int, default=51_370)
    arguments.add_argument("--rounds", type=int, default=2500)
    arguments.add_argument("--epsilon", type=float, default=2.0)
    options = arguments.parse_args()
    for bits in options.bits:
        found = plan(
            clients=options.clients,
            dim=options.dim,
            epsilon=options.epsilon,
            delta=1e-9,
            bits=bits,
            rounds=options.rounds,
            participation="once",
            correlated=options.bands,
            mechanism="rounded-correlated",
        )
        assert found.prefix is not None
        noise = found.protocol.mechanism
        print(f"{bits:g} bits: gain {found.prefix.gain:.1f}, ε = {found.guarantee.epsilon:.3f}, {noise}", flush=True)


if __name__ == "__main__":
    main()
