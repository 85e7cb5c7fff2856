"""`cpsgd table kmeans|pca`: clusters and principal components of a table's rows, by rounds on this machine."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from cpsgd._durable import write_file
from cpsgd.cli import _files, options, output
from cpsgd.cli.columns import NO_BUDGET, TABLE, Budgets, facts_of, split_bounds, split_missing, split_names, written
from cpsgd.cli.frame import WHOLE
from cpsgd.errors import ParameterError


@dataclass(frozen=True, kw_only=True)
class BallOptions:
    """The points that a table holds.

    Attributes:
        bounds: Public bounds, as age=0:100,income=0:1e5, chosen without looking at the data; values beyond are moved
            to them, and each column has equal weight.
        radius: Instead of --bounds: public bound on a point's norm, 1 by default. Longer points are scaled down to it.
        columns: Named columns that are the coordinates, separated by commas; those with bounds if not given.
        user: The column with the user of each row: a client's point is the mean of their rows.
        missing: A missing value counts as: bounds (their middle), or a value.
        key: Name of the array in an .npz file that holds several.
    """

    bounds: Annotated[str | None, Parameter(group=TABLE, allow_repeating=False)] = None
    radius: float | None = None
    columns: Annotated[str | None, Parameter(group=TABLE)] = None
    user: Annotated[str | None, Parameter(group=TABLE)] = None
    missing: Annotated[str | None, Parameter(group=TABLE)] = None
    key: str | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments for `cpsgd.statistics`."""
        bounds = split_bounds(self.bounds)
        radius = 1.0 if self.radius is None and bounds is None else self.radius
        names = None if self.columns is None else split_names(self.columns)
        about = {"columns": names, "user": self.user, "missing": split_missing(self.missing)}
        return {"bounds": bounds, "radius": radius, **about}

    def read(self, file: Path) -> tuple[Any, int, int]:
        """Returns an array of points or a table, with the number of rows and of coordinates."""
        named = self.arguments["columns"] or self.arguments["bounds"]
        if named is None:
            rows = _files.open_rows(file, self.key)
            if self.user is not None or rows.named:
                raise ParameterError(
                    f"{file}: name the columns that are coordinates with --bounds or --columns; an id is not one."
                )
            points = _files.read_points(rows)
            return points, *points.shape
        if self.key is not None:
            raise ParameterError("--key is for tables of vectors, not for named columns; leave it out.")
        from cpsgd.tables import open_table

        table = open_table(file)
        return table, table.rows, len(named)


Points = Annotated[BallOptions, options.FLAT]
_ANY_POINTS = BallOptions()


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
    out: Annotated[Path, options.file_option("Where the centres go: .npy, one row each, or .csv.")] = Path(
        "centres.npy"
    ),
    json: options.Json = False,
) -> None:
    """Find the centres of clusters of a table's rows, so that (ε, δ) protects each row.

    Lloyd's algorithm, each round a private mean. Messages of all clients are simulated.
    """
    _files.check_vector_output(out, file)
    source, rows, dim = points.read(file)
    from cpsgd.statistics import kmeans as find

    arguments = {**vars(cost), **budget.arguments, **points.arguments, "rounds": rounds, "seed": seed}
    with output.warnings_shown(), output.progress(rounds * rows) as advance:
        found = find(source, clusters, **arguments, advance=advance)
    with _files.paid(budget.ledger is not None):
        _write(out, found, points)
    alive = found.sizes > 0
    deviation = f"about {found.deviations[alive].max():.3g} by noise, at most" if alive.any() else "unknown"
    facts = [
        ("rounds", f"{rounds}, every client in each"),
        ("sizes", ", ".join(f"{size:,.0f}" for size in found.sizes) + " clients, noise included"),
        ("centres off", f"{deviation}; that is {100 * found.noise_share:.2f} % of how far they are apart"),
        ("centres", str(out)),
    ]
    where = {"file": file, "out": out, "coordinates": dim, "radius": points.arguments["radius"], "clusters": clusters}
    _answer(json, found, where, facts)


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
    out: Annotated[Path, options.file_option("Where the components go: .npy, one row each, or .csv.")] = Path(
        "components.npy"
    ),
    json: options.Json = False,
) -> None:
    """Find the directions of largest variance of a table's rows, so that (ε, δ) protects each row.

    The covariance in one private round. Messages of all clients are simulated.
    """
    _files.check_vector_output(out, file)
    source, rows, dim = points.read(file)
    from cpsgd.statistics import pca as find

    arguments = {**vars(cost), **budget.arguments, **points.arguments, "mean": [0.0] * dim if centred else None}
    with output.progress(rows) as advance:
        found = find(source, components, **arguments, advance=advance)
    with _files.paid(budget.ledger is not None):
        _write(out, found, points)
    total = found.total_variance
    # With much noise the total may come out negative.
    explained = f"{100 * found.variances.sum() / total:.1f} % of the variance" if total > 0 else "unknown"
    angle = math.degrees(found.expected_angle)
    facts = [
        ("variances", ", ".join(f"{value:.4g}" for value in found.variances) + ", noise included"),
        ("explained", explained),
        ("angle", f"{angle:.3g}° expected to the exact components"),
        ("components", str(out)),
    ]
    where = {"file": file, "out": out, "coordinates": dim, "radius": points.arguments["radius"]}
    _answer(json, found, {**where, "components": components, "angle_degrees": {"expected": angle}}, facts)


def _write(out: Path, found: Any, points: BallOptions) -> None:
    """Writes rows of numbers; for named columns the CSV has the layout of other statistics."""
    if out.suffix.lower() == ".csv" and (points.bounds or points.columns):
        write_file(out, written(found, out))
    else:
        _files.write_vector(out, found.values.astype("float32"))


def _answer(json: bool, found: Any, where: dict[str, Any], facts: list[tuple[str, str]]) -> None:
    """Prints the result as JSON with the fields of `where`, or as text with the rows of `facts`."""
    protocol, error = found.plan.protocol, found.plan.error
    if json:
        sent = {"rounds": found.plan.rounds, "total_bits_per_client": found.bits_per_client, **output.sent(protocol)}
        name = "squared_error_per_round" if "clusters" in where else "squared_error"
        planned = {"clients": protocol.clients, name: {"expected": error.total, **asdict(error)}}
        privacy, _ = output.guaranteed(found.plan.guarantee)
        output.show_json({"simulation": True, **where, **planned, **sent, **privacy, **found.to_dict()})
        return
    in_all = [("sent in all", f"{found.bits_per_client // 8:,} bytes per client")]
    output.show([*facts_of(found), *output.sent_facts(protocol), *in_all, *facts])
