"""`cpsgd kmeans` and `cpsgd pca`: what private means of a table's rows are good for, by rounds on this machine."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from cpsgd.cli import _files, options, output, tables
from cpsgd.cli.frame import WHOLE
from cpsgd.cli.tables import NO_BUDGET
from cpsgd.errors import ParameterError

Radius = Annotated[
    float,
    Parameter(
        help="Public bound on a point's norm; points beyond are moved to the ball's surface. Choose it without looking "
        "at the data."
    ),
]

Coordinates = Annotated[
    str | None,
    Parameter(
        name="--columns", group=tables.TABLE, help="Named columns that are the coordinates, separated by commas."
    ),
]
User = Annotated[
    str | None,
    Parameter(
        group=tables.TABLE,
        help="The column that says whose a row is: a client's point is the mean of their rows.",
    ),
]

_HIDDEN = "not shown: it depends on the points, and the budget does not pay for it"


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
    columns: Coordinates = None,
    user: User = None,
    budget: tables.Budgets = NO_BUDGET,
    key: options.Key = None,
    out: Annotated[Path, Parameter(metavar="FILE", help="Where the centres go, .npy or .csv, one row each.")] = Path(
        "centres.npy"
    ),
    json: options.Json = False,
) -> None:
    """Find the centres of clusters of a table's rows, so that (ε, δ) protects each row.

    Lloyd's algorithm, each round a private mean. This is a simulation: here the inertia can be measured, because one
    machine holds all points. With --ledger it is not shown, for no budget covers it.
    """
    import numpy as np

    from cpsgd.statistics.clusters import inertia
    from cpsgd.statistics.clusters import kmeans as find

    _files.check_vector_output(out, file)
    table, named = _read(file, key, columns, user)
    with output.warnings_told(), output.progress(rounds * table.rows) as advance:
        wishes = {**vars(cost), **budget.wishes, **named, "radius": radius}
        found = find(table.source, clusters, **wishes, rounds=rounds, seed=seed, advance=advance)
    with _files.paid(budget.ledger is not None):
        _files.write_vector(out, found.centres.astype(np.float32))
    protocol, error = found.plan.protocol, found.plan.error
    clients, dim = protocol.clients, found.centres.shape[1]
    measured = None if budget.ledger else inertia(table.of_clients(radius, **named), found.centres)
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
                "noise_share": found.noise_share,
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
            ("centres off", f"{deviation}; that is {100 * found.noise_share:.2f} % of how far they are apart"),
            (
                "inertia",
                _HIDDEN if measured is None else f"{measured:.6g} measured, {measured / clients:.4g} per client",
            ),
            ("centres", str(out)),
            *([] if measured is None else [_note("inertia")]),
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
    columns: Coordinates = None,
    user: User = None,
    budget: tables.Budgets = NO_BUDGET,
    key: options.Key = None,
    out: Annotated[Path, Parameter(metavar="FILE", help="Where the components go, .npy or .csv, one row each.")] = Path(
        "components.npy"
    ),
    json: options.Json = False,
) -> None:
    """Find the directions of largest variance of a table's rows, so that (ε, δ) protects each row.

    The covariance in one private round. This is a simulation: here the angle to the exact components can be measured,
    because one machine holds all points. With --ledger it is not shown, for no budget covers it.
    """
    import numpy as np

    from cpsgd.statistics.components import exact_components, subspace_angle
    from cpsgd.statistics.components import pca as find

    _files.check_vector_output(out, file)
    table, named = _read(file, key, columns, user)
    with output.progress(table.rows) as advance:
        mean = np.zeros(table.dim) if centred else None
        wishes = {**vars(cost), **budget.wishes, **named, "radius": radius}
        found = find(table.source, components, **wishes, mean=mean, advance=advance)
    with _files.paid(budget.ledger is not None):
        _files.write_vector(out, found.components.astype(np.float32))
    protocol, error = found.plan.protocol, found.plan.error
    clients, dim = protocol.clients, table.dim
    expected, measured = math.degrees(found.expected_angle), None
    if not budget.ledger:
        exact = exact_components(table.of_clients(radius, **named), components)
        measured = math.degrees(subspace_angle(exact, found.components))
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
    total, away = found.total_variance, f"{expected:.3g}° expected"
    # With much noise the total may come out negative.
    explained = f"{100 * found.variances.sum() / total:.1f} % of the variance" if total > 0 else "unknown"
    output.show(
        [
            ("clients", f"{clients:,} with a point of {dim:,} coordinates each, in a ball of radius {radius:g}"),
            *output.sent_facts(protocol),
            *privacy_facts,
            ("variances", ", ".join(f"{value:.4g}" for value in found.variances) + ", noise included"),
            ("explained", explained),
            ("angle", _HIDDEN if measured is None else f"{measured:.3g}° measured to the exact components, {away}"),
            ("components", str(out)),
            *([] if measured is None else [_note("angle")]),
        ]
    )


@dataclass(frozen=True)
class _Points:
    """Where the points are: an array, or a table with columns that are coordinates."""

    source: Any
    rows: int
    dim: int

    def of_clients(self, radius: float, columns: list[str] | None = None, user: str | None = None) -> Any:
        """One point per client, for whoever may measure."""
        if columns is None:
            return self.source
        from cpsgd.statistics.points import people_in_ball

        return radius * people_in_ball(self.source, columns, user, radius)


def _read(file: Path, key: str | None, columns: str | None, user: str | None) -> tuple[_Points, dict[str, Any]]:
    """The points, and what else to say of their columns."""
    if columns is None:
        rows = _files.open_rows(file, key)
        if user is not None or rows.named:
            raise ParameterError(f"{file}: name the columns that are coordinates with --columns; an id is none.")
        points = _files.read_points(rows)
        return _Points(points, *points.shape), {}
    if key is not None:
        raise ParameterError("--key is for tables of vectors, not for named columns; leave it out.")
    from cpsgd.tables import open_table

    names, source = tables.split_names(columns), open_table(file)
    return _Points(source, source.rows, len(names)), {"columns": names, "user": user}


def _note(name: str) -> tuple[str, str]:
    return ("note", f"a simulation: all points were on this machine, which is how the {name} could be measured")
