"""`cpsgd pca`: principal components of people's points, by a private round on this machine."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from cpsgd.cli import _files, _options, _output


def run(
    file: _options.PointsFile,
    components: Annotated[int, typer.Option(help="How many directions.")],
    epsilon: _options.RequiredEpsilon,
    delta: _options.RequiredDelta,
    radius: _options.Radius = 1.0,
    bits: _options.CoordinateBits = None,
    centred: Annotated[
        bool, typer.Option("--centred", help="The points' mean is known to be zero: nothing is spent on finding it.")
    ] = False,
    key: _options.Key = None,
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="Where the components go, .npy or .csv, one row each.")
    ] = Path("components.npy"),
    json: _options.Json = False,
) -> None:
    """Find the directions of largest variance of a table's rows, so that (ε, δ) protects each row.

    The covariance in one private round. This is a simulation: here the angle to the exact components can be measured,
    because one machine holds all points.
    """
    import numpy as np

    from cpsgd.cli import _data
    from cpsgd.statistics.pca import exact_components, pca, subspace_angle

    _files.check_vector_output(out, file)
    points = _data.read_points(_data.open_rows(file, key))
    clients, dim = points.shape
    with _output.progress(clients) as advance:
        found = pca(
            points,
            components,
            epsilon,
            delta,
            radius=radius,
            bits=bits,
            mean=np.zeros(dim) if centred else None,
            advance=advance,
        )
    _files.write_vector(out, found.components.astype(np.float32))
    protocol, error = found.plan.protocol, found.plan.error
    expected = math.degrees(found.expected_angle)
    measured = math.degrees(subspace_angle(exact_components(points, components), found.components))
    privacy, privacy_facts = _output.guaranteed(found.guarantee)
    if json:
        _output.show_json(
            {
                "simulation": True,
                "file": str(file),
                "out": str(out),
                "clients": clients,
                "dim": dim,
                "components": components,
                "radius": radius,
                "mean": found.mean.tolist(),
                "variances": found.variances.tolist(),
                "total_variance": found.total_variance,
                "angle_degrees": {"measured": measured, "expected": expected},
                **_output.sent(protocol),
                **privacy,
                "squared_error": {"expected": error.total, **asdict(error)},
            }
        )
        return
    total = found.total_variance
    # With much noise the total may come out negative.
    explained = f"{100 * found.variances.sum() / total:.1f} % of the variance" if total > 0 else "unknown"
    _output.show(
        [
            ("clients", f"{clients:,} with a point of {dim:,} coordinates each, in a ball of radius {radius:g}"),
            *_output.sent_facts(protocol),
            *privacy_facts,
            ("variances", ", ".join(f"{value:.4g}" for value in found.variances) + ", noise included"),
            ("explained", explained),
            ("angle", f"{measured:.3g}° measured to the exact components, {expected:.3g}° expected"),
            ("components", str(out)),
            ("note", "a simulation: all points were on this machine, which is how the angle could be measured"),
        ]
    )
