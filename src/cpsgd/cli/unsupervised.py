"""`cpsgd table kmeans|pca`: clusters and principal components of a table's rows, by rounds on this machine."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from cpsgd.cli import _files, options, output
from cpsgd.cli.columns import NO_BUDGET, TABLE, Budgets, split_names
from cpsgd.cli.frame import WHOLE
from cpsgd.errors import ParameterError


@dataclass(frozen=True, kw_only=True)
class PointOptions:
    """The points that a table holds.

    Attributes:
        radius: Public bound on a point's norm; points beyond are moved to the ball's surface. Choose it without looking
            at the data.
        columns: Named columns that are the coordinates, separated by commas.
        user: The column that says whose a row is: a client's point is the mean of their rows.
        key: Name of the array in an .npz file that holds several.
    """

    radius: float = 1.0
    columns: Annotated[str | None, Parameter(group=TABLE)] = None
    user: Annotated[str | None, Parameter(group=TABLE)] = None
    key: str | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments for `cpsgd.statistics`."""
        named = {} if self.columns is None else {"columns": split_names(self.columns), "user": self.user}
        return {"radius": self.radius, **named}

    def read(self, file: Path) -> tuple[Any, int, int]:
        """Returns an array of points or a table, with the number of rows and of coordinates."""
        if self.columns is None:
            rows = _files.open_rows(file, self.key)
            if self.user is not None or rows.named:
                raise ParameterError(f"{file}: name the columns that are coordinates with --columns; an id is not one.")
            points = _files.read_points(rows)
            return points, *points.shape
        if self.key is not None:
            raise ParameterError("--key is for tables of vectors, not for named columns; leave it out.")
        from cpsgd.tables import open_table

        table = open_table(file)
        return table, table.rows, len(split_names(self.columns))

    def of_clients(self, source: Any) -> Any:
        """Returns one point per client, for measurements without privacy."""
        if self.columns is None:
            return source
        from cpsgd.statistics.points import people_in_ball

        return self.radius * people_in_ball(source, split_names(self.columns), self.user, self.radius)


Points = Annotated[PointOptions, options.FLAT]
_ANY_POINTS = PointOptions()
_HIDDEN = "not shown: it depends on the points, and the budget does not pay for it"


def kmeans(
    file: options.Table,
    /,
    *,
    clusters: Annotated[int, WHOLE, Parameter(help="K, the number of clusters.")],
    cost: Annotated[options.Cost, options.FLAT],
    points: Points = _ANY_POINTS,
    rounds: Annotated[int, WHOLE, Parameter(help="Rounds of Lloyd's algorithm; every client takes part in each.")] = 8,
    seed: Annotated[
        int, WHOLE, Parameter(help="Public seed of the starting centres; the noise has none and cannot be repeated.")
    ] = 0,
    budget: Budgets = NO_BUDGET,
    out: Annotated[Path, options.file_option("Where the centres go, .npy or .csv, one row each.")] = Path(
        "centres.npy"
    ),
    json: options.Json = False,
) -> None:
    """Find the centres of clusters of a table's rows, so that (ε, δ) protects each row.

    Lloyd's algorithm, each round a private mean. This is a simulation: here the inertia can be measured, because one
    machine holds all points. With --ledger it is not shown, for no budget covers it.
    """
    _files.check_vector_output(out, file)
    source, rows, dim = points.read(file)
    from cpsgd.statistics.clusters import inertia
    from cpsgd.statistics.clusters import kmeans as find

    arguments = {**vars(cost), **budget.arguments, **points.arguments, "rounds": rounds, "seed": seed}
    with output.warnings_shown(), output.progress(rounds * rows) as advance:
        found = find(source, clusters, **arguments, advance=advance)
    with _files.paid(budget.ledger is not None):
        _files.write_vector(out, found.centres.astype("float32"))
    measured = None if budget.ledger else inertia(points.of_clients(source), found.centres)
    where = {"file": file, "out": out, "dim": dim, "radius": points.radius}
    data = {
        "clusters": clusters,
        "rounds": rounds,
        "sizes": found.sizes.tolist(),
        "deviations": found.deviations.tolist(),  # infinite, in JSON null, for a centre without points
        "noise_share": found.noise_share,
        "inertia": measured,
        "total_bits_per_client": found.bits_per_client,
    }
    alive = found.sizes > 0
    deviation = f"about {found.deviations[alive].max():.3g} by noise, at most" if alive.any() else "unknown"
    shown = (
        "" if measured is None else f"{measured:.6g} measured, {measured / found.plan.protocol.clients:.4g} per client"
    )
    facts = [
        ("rounds", f"{rounds}, every client in each"),
        ("sent in all", f"{found.bits_per_client // 8:,} bytes per client"),
        ("sizes", ", ".join(f"{size:,.0f}" for size in found.sizes) + " clients, noise included"),
        ("centres off", f"{deviation}; that is {100 * found.noise_share:.2f} % of how far they are apart"),
        ("inertia", shown or _HIDDEN),
        ("centres", str(out)),
    ]
    _answer(json, found, where, data, facts, shown and "inertia")


def pca(
    file: options.Table,
    /,
    *,
    components: Annotated[int, WHOLE, Parameter(help="Number of directions.")],
    cost: Annotated[options.Cost, options.FLAT],
    points: Points = _ANY_POINTS,
    centred: Annotated[
        bool, Parameter(help="The points' mean is known to be zero: nothing is spent on finding it.")
    ] = False,
    budget: Budgets = NO_BUDGET,
    out: Annotated[Path, options.file_option("Where the components go, .npy or .csv, one row each.")] = Path(
        "components.npy"
    ),
    json: options.Json = False,
) -> None:
    """Find the directions of largest variance of a table's rows, so that (ε, δ) protects each row.

    The covariance in one private round. This is a simulation: here the angle to the exact components can be measured,
    because one machine holds all points. With --ledger it is not shown, for no budget covers it.
    """
    _files.check_vector_output(out, file)
    source, rows, dim = points.read(file)
    from cpsgd.statistics.components import exact_components, subspace_angle
    from cpsgd.statistics.components import pca as find

    arguments = {**vars(cost), **budget.arguments, **points.arguments, "mean": [0.0] * dim if centred else None}
    with output.progress(rows) as advance:
        found = find(source, components, **arguments, advance=advance)
    with _files.paid(budget.ledger is not None):
        _files.write_vector(out, found.components.astype("float32"))
    expected, measured = math.degrees(found.expected_angle), None
    if not budget.ledger:
        exact = exact_components(points.of_clients(source), components)
        measured = math.degrees(subspace_angle(exact, found.components))
    total = found.total_variance
    where = {"file": file, "out": out, "dim": dim, "radius": points.radius}
    data = {
        "components": components,
        "mean": found.mean.tolist(),
        "variances": found.variances.tolist(),
        "total_variance": total,
        "angle_degrees": {"measured": measured, "expected": expected},
    }
    # With much noise the total may come out negative.
    explained = f"{100 * found.variances.sum() / total:.1f} % of the variance" if total > 0 else "unknown"
    shown = "" if measured is None else f"{measured:.3g}° measured to the exact components, {expected:.3g}° expected"
    facts = [
        ("variances", ", ".join(f"{value:.4g}" for value in found.variances) + ", noise included"),
        ("explained", explained),
        ("angle", shown or _HIDDEN),
        ("components", str(out)),
    ]
    _answer(json, found, where, data, facts, shown and "angle")


def _answer(
    json: bool,
    found: Any,
    where: dict[str, Any],
    data: dict[str, Any],
    facts: list[tuple[str, str]],
    measured: str,
) -> None:
    """Prints the result as JSON (`where` and `data`) or for people (`facts`, with a note on what was measured)."""
    protocol, error = found.plan.protocol, found.plan.error
    where |= {"clients": protocol.clients}
    privacy, privacy_facts = output.guaranteed(found.guarantee)
    if json:
        name = "squared_error_per_round" if "rounds" in data else "squared_error"
        errors = {name: {"expected": error.total, **asdict(error)}}
        output.show_json({"simulation": True, **where, **data, **output.sent(protocol), **privacy, **errors})
        return
    clients = "{clients:,} with a point of {dim:,} coordinates each, in a ball of radius {radius:g}"
    note = f"a simulation: all points were on this machine, which is how the {measured} could be measured"
    output.show(
        [
            ("clients", clients.format_map(where)),
            *output.sent_facts(protocol),
            *privacy_facts,
            *facts,
            *([("note", note)] if measured else []),
        ]
    )
