"""The rooms of the package and the doors between them: imports point downwards, and nobody uses another's back door."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import cpsgd

ROOT = Path(cpsgd.__file__).parent

# From the ground up. A room imports only rooms of lower floors.
FLOORS = [
    {"_display", "_lazy", "_numbers", "_searches"},
    {"errors"},
    {"_durable"},
    {"_table_values"},
    {"_table_memory"},
    {"_table_files"},
    {"_record_log", "_plain", "tables", "_validate", "_torch", "randomness"},
    {"_exact", "neighbours"},
    {"promise"},
    {"codec"},
    {"paper"},
    {"mechanisms"},
    {"correlated"},
    {"registry"},
    {"expectation"},
    {"protocol"},
    {"aggregator", "run"},
    {"privacy"},
    {"secagg"},
    {"audit", "ledger", "planner", "simulation"},
    {"federation"},
    {"learning", "statistics"},
    {"engines", "reports"},
    {"dashboard"},
    {"cli"},
    {"__main__"},
]
# A protocol's release is held to its promise by the accountant, which is imported only where there is a promise.
ON_DEMAND = {
    ("protocol.py", "privacy.release.check_release"),
    # What it returns, for types alone.
    ("protocol.py", "privacy.guarantees.Guarantee"),
    ("aggregator.py", "privacy.guarantees.Guarantee"),
    # Its kernel, where there is a GPU.
    ("correlated/client_sums.py", "simulation.device_kernels.compiles"),
    ("correlated/client_sums.py", "simulation.device.carried"),
    ("correlated/client_sums.py", "simulation.device_cuda.PlayedLineages"),
}
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
FILES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").parts[0]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path) -> Iterator[list[str]]:
    """Names that a file imports of the package, also for types alone, without the package's own name."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and node.level:
            pytest.fail(f"{path.relative_to(ROOT)} has a relative import.")
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "cpsgd":
            for alias in node.names:
                yield [*node.module.split(".")[1:], alias.name]
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("cpsgd."):
                    yield alias.name.split(".")[1:]


def is_room(name: str) -> bool:
    return (ROOT / name).is_dir() or (ROOT / f"{name}.py").exists()


def edges() -> Iterator[tuple[Path, list[str]]]:
    for path in FILES:
        for parts in imports(path):
            if is_room(parts[0]) and parts[0] != room_of(path):
                yield path, parts


def test_every_room_has_its_floor() -> None:
    assert {room_of(path) for path in FILES} == set(FLOOR)


def test_imports_point_downwards() -> None:
    upwards = [
        f"{path.relative_to(ROOT)} imports {'.'.join(parts)}"
        for path, parts in edges()
        if FLOOR[parts[0]] >= FLOOR[room_of(path)] and (str(path.relative_to(ROOT)), ".".join(parts)) not in ON_DEMAND
    ]
    assert upwards == []


def test_nobody_imports_another_rooms_private_modules() -> None:
    private = [
        f"{path.relative_to(ROOT)} imports {'.'.join(parts)}"
        for path, parts in edges()
        if any(part.startswith("_") and not part.startswith("__") for part in parts[1:])
    ]
    assert private == []


def test_the_graph_is_seen_at_all() -> None:
    # The checks above would pass on an empty graph, too.
    seen = {(room_of(path), parts[0]) for path, parts in edges()}
    assert {("cli", "learning"), ("protocol", "mechanisms"), ("mechanisms", "codec")} <= seen


def test_only_a_mechanism_knows_its_own_parameters() -> None:
    """No other room reads the parameters of one mechanism off a protocol, or asks which one it has."""
    own = {"trials", "p", "sigma", "coordinate_range", "coins", "theta", "rate", "noise_deviation"}
    allowed = {"mechanisms", "correlated", "paper", "__main__"}
    found = []
    for path in FILES:
        # Their authors' theorems are about one mechanism each.
        if room_of(path) in allowed or path.name == "published_accounting.py":
            continue
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Attribute) and node.attr in own and "mechanism" in ast.unparse(node.value):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}")
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
                kinds = ast.unparse(node.args[1])
                if kinds == "Coins" or any(
                    kind in kinds for kind in ("Binomial", "Gaussian", "Skellam", "Lattice", "Tilted", "SampledCoins")
                ):
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}")
    assert found == []


def test_no_two_types_share_a_name() -> None:
    homes: dict[str, list[str]] = {}
    for path in FILES:
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    # The NumPy twin has the names of the kernels, and torch's and the auditor's own views of things have theirs.
    shared = {name: where for name, where in homes.items() if len(where) > 1}
    # `cpsgd.audit.Claim`, public since 0.2.0, is a claim beside what the attack refutes of it.
    assert shared.pop("Claim", None) in (None, ["audit/auditing.py", "promise.py"])
    assert shared == {}


def test_no_module_shares_its_name_with_a_function_in_it() -> None:
    shared = [
        str(path.relative_to(ROOT))
        for path in FILES
        for node in tree_of(path).body
        if isinstance(node, ast.FunctionDef) and node.name == path.stem
    ]
    assert shared == []


def test_only_mechanisms_and_proofs_ask_which_law_it_is() -> None:
    asking = [
        f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}"
        for path in FILES
        if room_of(path) not in {"mechanisms", "correlated"} and "privacy/proofs" not in str(path)
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance"
        if re.search(r"\blaw\b", ast.unparse(node.args[0]))
    ]
    assert asking == []


def test_only_its_own_room_asks_whether_noise_is_correlated() -> None:
    asking = [
        f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}"
        for path in FILES
        if room_of(path) not in {"mechanisms", "correlated"}
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute) and node.attr in ("correlation", "hands_on")
    ]
    assert asking == []


def test_no_two_rooms_have_modules_of_the_same_name() -> None:
    homes: dict[str, set[str]] = {}
    for path in FILES:
        if path.stem not in ("__init__", "__main__"):
            homes.setdefault(path.stem, set()).add(str(path.relative_to(ROOT)))
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}


def test_the_map_names_every_room() -> None:
    text = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rooms = {room for room in FLOOR if room != "__main__"}
    missing = {room for room in rooms if f"`{room}/`" not in text and f"`{room}.py`" not in text}
    assert missing == set()
