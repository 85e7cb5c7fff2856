"""The commands of `cpsgd`: where each is, its line in the overview, an example and the options of its short help."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """A command of the overview.

    Attributes:
        place: Its place in this package, `module:function`, or `module:app` for a group of commands.
        line: Its line in the overview, the first of its docstring (a test compares them), so that the overview imports
            no command.
        example: The command that its help begins with.
        everyday: The options that its short help shows; all of them if empty.
    """

    place: str
    line: str
    example: str
    everyday: tuple[str, ...] = ()


_PRIVACY = ("--epsilon", "--delta", "--bits")
_BUDGET = ("--ledger", "--population")
_RESULT = ("--out", "--plot", "--json")
_TABLE = (
    *("--epsilon", "--delta", "--columns", "--bounds", "--user", "--group-by", "--missing", "--rows-per-user"),
    *("--edges", "--categories", "--quantiles", "--bins", *_BUDGET, *_RESULT),
)
_POINTS = (
    *("--clusters", "--components", "--epsilon", "--delta", "--bounds", "--radius", "--user", "--missing", "--rounds"),
    *(*_BUDGET, *_RESULT),
)

TABLE = {
    "mean": Command(
        "columns:mean",
        "Average a table's columns, so that (ε, δ) protects each user.",
        "cpsgd table mean people.csv --columns age --bounds age=0:99 --epsilon 1",
        _TABLE,
    ),
    "sum": Command(
        "columns:sum",
        "Sum a table's columns, so that (ε, δ) protects each user.",
        "cpsgd table sum sales.csv --columns paid --bounds paid=0:500 --user customer --rows-per-user 5 --epsilon 1",
        _TABLE,
    ),
    "count": Command(
        "columns:count",
        "Count a table's rows, or the ones in columns of 0 and 1, so that (ε, δ) protects each user.",
        "cpsgd table count people.csv --group-by city=Bern,Basel --epsilon 1",
        _TABLE,
    ),
    "histogram": Command(
        "columns:histogram",
        "Count rows by bins or categories, so that (ε, δ) protects each user.",
        "cpsgd table histogram kids.csv --columns age --edges 0,6,12 --epsilon 1",
        _TABLE,
    ),
    "quantiles": Command(
        "columns:quantiles",
        "Find quantiles of a table's columns, so that (ε, δ) protects each user.",
        "cpsgd table quantiles people.csv --columns age --bounds age=0:99 --epsilon 1",
        _TABLE,
    ),
    "report": Command(
        "report:run",
        "Answer several questions about a table in one pass, so that (ε, δ) of all together protects each user.",
        'cpsgd table report people.csv "mean age=0:100" "count smokes by sex=f,m" --epsilon 1',
        ("--epsilon", "--delta", "--user", "--rows-per-user", "--missing", *_BUDGET, "--json"),
    ),
    "kmeans": Command(
        "unsupervised:kmeans",
        "Find the centres of clusters of a table's rows, so that (ε, δ) protects each row.",
        "cpsgd table kmeans people.csv --clusters 3 --bounds age=0:100,pay=0:1e5 --epsilon 2 --delta 1e-6",
        _POINTS,
    ),
    "pca": Command(
        "unsupervised:pca",
        "Find the directions of largest variance of a table's rows, so that (ε, δ) protects each row.",
        "cpsgd table pca people.csv --components 1 --bounds age=0:100,pay=0:1e5 --epsilon 2 --delta 1e-6",
        _POINTS,
    ),
}

ROUND = {
    "mean": Command(
        "mean:run",
        "Estimate the mean of a table's rows by a whole round on this machine.",
        "cpsgd round mean vectors.npy --epsilon 2 --delta 1e-6 --bits 1",
        (*_PRIVACY, "--clip-norm", "--mechanism", "--protocol", "--accept-epsilon", *_BUDGET, "--out", "--json"),
    ),
    "protocol": Command(
        "exchange:protocol",
        "Write a protocol file, and say what a round with it sends and how wrong it can be.",
        "cpsgd round protocol --clients 1000 --dim 10000 --epsilon 2 --delta 1e-6 --bits 1 --out protocol.json",
        (
            *("--clients", "--dim", *_PRIVACY, "--rounds", "--participation", "--dropout", "--secure"),
            *("--mechanism", "--out", "--json"),
        ),
    ),
    "encode": Command(
        "exchange:encode",
        "Turn a vector into a private message, as a client does.",
        "cpsgd round encode vector.npy --protocol protocol.json --round 0 --out vector.message",
    ),
    "aggregate": Command(
        "exchange:aggregate",
        "Add up messages and write their mean, as the server does.",
        "cpsgd round aggregate *.message --protocol protocol.json --round 0",
    ),
    "identity": Command(
        "identities:app",
        "Make keys by which clients of secure aggregation know each other, whatever the server says.",
        "cpsgd round identity create silo-1.key --name silo-1",
    ),
}

GROUPS = {
    "table": (TABLE, "Ask private statistics of a table: means, sums, counts, histograms, quantiles, clusters."),
    "round": (ROUND, "Run a round by hand: protocol, client's message, server's sum; or all of it on this machine."),
}
"""Commands that are groups of others, with their line in the overview."""

COMMANDS = {
    "train": Command(
        "train:run",
        "Train a model from many simulated clients through a private mean, beside its baselines.",
        "cpsgd train --preset digits --epsilon 2",
        (
            *("--preset", "--data", "--model", "--cohort", "--rounds", *_PRIVACY, "--run", "--resume"),
            "--json",
        ),
    ),
    "plan": Command(
        "plan:run",
        "Find the best protocol for your requirements: its mechanism, parameters, proved ε and expected error.",
        "cpsgd plan --clients 1000 --dim 1000 --epsilon 2 --delta 1e-6 --bits 1",
        (
            *("--clients", "--dim", *_PRIVACY, "--rounds", "--participation", "--dropout", "--colluding", "--secure"),
            *("--mechanism", "--out"),
        ),
    ),
    "privacy": Command(
        "privacy:app",
        "Compute the ε of given parameters, and name its theorem.",
        "cpsgd privacy epsilon --protocol protocol.json --delta 1e-6",
    ),
    "table": Command(
        "",
        GROUPS["table"][1],
        "cpsgd table mean people.csv --columns age --bounds age=0:99 --epsilon 1",
    ),
    "round": Command("", GROUPS["round"][1], "cpsgd round mean vectors.npy --epsilon 2 --delta 1e-6 --bits 1"),
    "pair": Command(
        "pair:app",
        "Sum vectors of clients that send one message each, by two servers that do not collude.",
        "cpsgd pair demo",
    ),
    "audit": Command(
        "audit:run",
        "Attack real rounds, and compare what can be learned with the ε that is claimed.",
        "cpsgd audit --epsilon 2 --mechanism binomial",
        (
            *("--protocol", "--clients", "--dim", "--epsilon", "--delta", "--bits", "--mechanism", "--surviving"),
            *("--rounds", "--task", "--plot", "--json"),
        ),
    ),
    "budget": Command(
        "budget:app",
        "Keep privacy budgets on a durable ledger.",
        "cpsgd budget create budget.ledger --population patients --epsilon 4 --delta 1e-6",
    ),
    "dashboard": Command(
        "dashboard:run",
        "Plan, watch runs and two servers, and read budgets and audits in the browser.",
        "cpsgd dashboard runs",
    ),
    "data": Command("data:app", "Bring data sets to this machine.", "cpsgd data mnist"),
}
"""The commands of the overview, in its order."""

RENAMED = {name: group for group, (members, _) in GROUPS.items() for name in members}
"""The group of each command that had none before 0.3.0; `mean` may belong to either."""
