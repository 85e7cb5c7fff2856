"""`cpsgd kmeans` and `cpsgd pca`: what private means of a table's rows are good for, by rounds on this machine."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from cpsgd.cli import _files, options, output
from cpsgd.cli.frame import WHOLE

Radius = Annotated[
    float,
    Parameter(
        help="Public bound on a point's norm; points beyond are moved to the ball's surface. Choose it without looking "
        "at the data."
    ),
]


def kmeans(
    file: options.Table,
    /,
    *,
    clusters: Annotated[int, WHOLE, Parameter(help="K, how many clusters.")],
    cost: Annotated[options.Cost, options.FLAT],
    radius: Radius = 1.0,
    rounds: Annotated[int, WHOLE, Parameter(help="Rounds of Lloyd's algorithm; every client takes part in each.")] = 8,
    seed: Annotated[
        int, WHOLE, Parameter(help="Public seed of the starting centres; the noise has none and cannot be repeated.")
    ] = 0,
    key: options.Key = None,
    out: Annotated[Path, Parameter(metavar="FILE", help="Where the centres go, .npy or .csv, one row each.")] = Path(
        "centres.npy"
    ),
    json: options.Json = False,
) -> None:
    """Find the centres of clusters of a table's rows, so that (ε, δ) protects each row.

    Lloyd's algorithm, each round a private mean. This is a simulation: here the inertia can be measured, because one
    machine holds all points.
    """
    import numpy as np

    from cpsgd.statistics.clusters import inertia
    from cpsgd.statistics.clusters import kmeans as find

    _files.check_vector_output(out, file)
    points = _files.read_points(_files.open_rows(file, key))
    clients, dim = points.shape
    with output.progress(rounds * clients) as advance:
        found = find(points, clusters, **vars(cost), radius=radius, rounds=rounds, seed=seed, advance=advance)
    _files.write_vector(out, found.centres.astype(np.float32))
    protocol, error = found.plan.protocol, found.plan.error
    measured = inertia(points, found.centres)
    privacy, privacy_facts = output.guaranteed(found.guarantee)
    if json:
        output.show_json(
            {
                "simulation": True,
                "file": file,
                "out": out,
                "clients": clients,
                "dim": dim,
                "clusters": clusters,
                "rounds": rounds,
                "radius": radius,
                "sizes": found.sizes.tolist(),
                "deviations": found.deviations.tolist(),  # infinite, in JSON null, for a centre that nobody is near
                "inertia": measured,
                **output.sent(protocol),
                "total_bits_per_client": found.bits_per_client,
                **privacy,
                "squared_error_per_round": {"expected": error.total, **asdict(error)},
            }
        )
        return
    alive = found.sizes > 0
    deviation = f"about {found.deviations[alive].max():.3g} by noise, at most" if alive.any() else "unknown"
    output.show(
        [
            ("clients", f"{clients:,} with a point of {dim:,} coordinates each, in a ball of radius {radius:g}"),
            ("rounds", f"{rounds}, every client in each"),
            *output.sent_facts(protocol),
            ("sent in all", f"{found.bits_per_client // 8:,} bytes per client"),
            *privacy_facts,
            ("sizes", ", ".join(f"{size:,.0f}" for size in found.sizes) + " clients, noise included"),
            ("centres off", deviation),
            ("inertia", f"{measured:.6g} measured, {measured / clients:.4g} per client"),
            ("centres", str(out)),
            ("note", "a simulation: all points were on this machine, which is how the inertia could be measured"),
        ]
    )


def pca(
    file: options.Table,
    /,
    *,
    components: Annotated[int, WHOLE, Parameter(help="How many directions.")],
    cost: Annotated[options.Cost, options.FLAT],
    radius: Radius = 1.0,
    centred: Annotated[
        bool, Parameter(help="The points' mean is known to be zero: nothing is spent on finding it.")
    ] = False,
    key: options.Key = None,
    out: Annotated[Path, Parameter(metavar="FILE", help="Where the components go, .npy or .csv, one row each.")] = Path(
        "components.npy"
    ),
    json: options.Json = False,
) -> None:
    """Find the directions of largest variance of a table's rows, so that (ε, δ) protects each row.

    The covariance in one private round. This is a simulation: here the angle to the exact components can be measured,
    because one machine holds all points.
    """
    import numpy as np

    from cpsgd.statistics.components import exact_components, subspace_angle
    from cpsgd.statistics.components import pca as find

    _files.check_vector_output(out, file)
    points = _files.read_points(_files.open_rows(file, key))
    clients, dim = points.shape
    with output.progress(clients) as advance:
        mean = np.zeros(dim) if centred else None
        found = find(points, components, **vars(cost), radius=radius, mean=mean, advance=advance)
    _files.write_vector(out, found.components.astype(np.float32))
    protocol, error = found.plan.protocol, found.plan.error
    expected = math.degrees(found.expected_angle)
    measured = math.degrees(subspace_angle(exact_components(points, components), found.components))
    privacy, privacy_facts = output.guaranteed(found.guarantee)
    if json:
        output.show_json(
            {
                "simulation": True,
                "file": file,
                "out": out,
                "clients": clients,
                "dim": dim,
                "components": components,
                "radius": radius,
                "mean": found.mean.tolist(),
                "variances": found.variances.tolist(),
                "total_variance": found.total_variance,
                "angle_degrees": {"measured": measured, "expected": expected},
                **output.sent(protocol),
                **privacy,
                "squared_error": {"expected": error.total, **asdict(error)},
            }
        )
        return
    total = found.total_variance
    # With much noise the total may come out negative.
    explained = f"{100 * found.variances.sum() / total:.1f} % of the variance" if total > 0 else "unknown"
    output.show(
        [
            ("clients", f"{clients:,} with a point of {dim:,} coordinates each, in a ball of radius {radius:g}"),
            *output.sent_facts(protocol),
            *privacy_facts,
            ("variances", ", ".join(f"{value:.4g}" for value in found.variances) + ", noise included"),
            ("explained", explained),
            ("angle", f"{measured:.3g}° measured to the exact components, {expected:.3g}° expected"),
            ("components", str(out)),
            ("note", "a simulation: all points were on this machine, which is how the angle could be measured"),
        ]
    )
