"""`cpsgd kmeans`: centres of clusters of people's points, by private rounds on this machine."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from cpsgd.cli import _files, _options, _output


def run(
    file: _options.PointsFile,
    clusters: Annotated[int, typer.Option(help="K, how many clusters.")],
    epsilon: _options.RequiredEpsilon,
    delta: _options.RequiredDelta,
    radius: _options.Radius = 1.0,
    rounds: Annotated[int, typer.Option(help="Rounds of Lloyd's algorithm; every client takes part in each.")] = 8,
    bits: _options.CoordinateBits = None,
    seed: Annotated[
        int, typer.Option(help="Public seed of the starting centres; the noise has none and cannot be repeated.")
    ] = 0,
    key: _options.Key = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the centres go, .npy or .csv, one row each.")] = Path(
        "centres.npy"
    ),
    json: _options.Json = False,
) -> None:
    """Find the centres of clusters of a table's rows, so that (ε, δ) protects each row.

    Lloyd's algorithm, each round a private mean. This is a simulation: here the inertia can be measured, because one
    machine holds all points.
    """
    import numpy as np

    from cpsgd.cli import _data
    from cpsgd.statistics.kmeans import inertia, kmeans

    _files.check_vector_output(out, file)
    points = _data.read_points(_data.open_rows(file, key))
    clients, dim = points.shape
    with _output.progress(rounds * clients) as advance:
        found = kmeans(
            points, clusters, epsilon, delta, radius=radius, rounds=rounds, bits=bits, seed=seed, advance=advance
        )
    _files.write_vector(out, found.centres.astype(np.float32))
    protocol, error = found.plan.protocol, found.plan.error
    measured = inertia(points, found.centres)
    privacy, privacy_facts = _output.guaranteed(found.guarantee)
    if json:
        _output.show_json(
            {
                "simulation": True,
                "file": str(file),
                "out": str(out),
                "clients": clients,
                "dim": dim,
                "clusters": clusters,
                "rounds": rounds,
                "radius": radius,
                "sizes": found.sizes.tolist(),
                # JSON has no infinity, which stands for a centre that nobody is near.
                "deviations": [value if np.isfinite(value) else None for value in found.deviations.tolist()],
                "inertia": measured,
                **_output.sent(protocol),
                "total_bits_per_client": found.bits_per_client,
                **privacy,
                "squared_error_per_round": {"expected": error.total, **asdict(error)},
            }
        )
        return
    alive = found.sizes > 0
    deviation = f"about {found.deviations[alive].max():.3g} by noise, at most" if alive.any() else "unknown"
    _output.show(
        [
            ("clients", f"{clients:,} with a point of {dim:,} coordinates each, in a ball of radius {radius:g}"),
            ("rounds", f"{rounds}, every client in each"),
            *_output.sent_facts(protocol),
            ("sent in all", f"{found.bits_per_client // 8:,} bytes a client"),
            *privacy_facts,
            ("sizes", ", ".join(f"{size:,.0f}" for size in found.sizes) + " clients, noise included"),
            ("centres off", deviation),
            ("inertia", f"{measured:.6g} measured, {measured / clients:.4g} a client"),
            ("centres", str(out)),
            ("note", "a simulation: all points were on this machine, which is how the inertia could be measured"),
        ]
    )
