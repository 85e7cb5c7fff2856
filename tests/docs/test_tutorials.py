"""The tutorials' files, taken from the pages and run as a reader would: the model learns."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from flwr.app import Context, RecordDict

from cpsgd.engines.pair.running import free_port
from tests.docs.follow import follow, take_files
from tests.engines.flower.federation import Federation
from tests.engines.flower.local import RUN, LocalGrid, Node, task

PAGES = Path(__file__).parents[2] / "docs" / "tutorials"
# The noise has no seed. 40 runs of Flower's app in one process read 89.9 to 95.3 % right: mean 92.6 %, standard
# deviation 1.1 points. So this is 7 deviations below the mean. The other two tests train the same model by that plan.
ENOUGH = 0.85


def accuracy_in(printed: str) -> float:
    """Returns the accuracy that an app printed."""
    found = re.search(r"accuracy (0\.\d+), model in (.*)", printed)
    assert found is not None, printed[-2000:]
    assert Path(found[2].strip()).is_file()
    return float(found[1])


@pytest.fixture
def flower_app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the Flower tutorial's app, which can be imported."""
    take_files(PAGES / "flower.md", tmp_path)
    app = tmp_path / "private-digits"
    monkeypatch.syspath_prepend(app)
    yield app
    for name in [name for name in sys.modules if name.partition(".")[0] == "private_digits"]:
        del sys.modules[name]


@pytest.mark.slow
def test_the_flower_tutorial_learns(flower_app: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With all silos in this process."""
    client, server = (import_module(f"private_digits.{name}") for name in ("client_app", "server_app"))
    silos = [Node(number, client.conditions, client.train) for number in range(10)]
    settings = {"rounds": 10, "epsilon": 4.0, "delta": 1e-5, "model": str(tmp_path / "model.pt")}
    with task():
        server.main(LocalGrid(silos), Context(RUN, 0, {}, RecordDict(), settings))
    printed = capsys.readouterr().out
    assert "ε = 3.998 at δ = 1e-05" in printed
    assert accuracy_in(printed) > ENOUGH
    assert [silo.trained for silo in silos] == [10] * 10


@pytest.mark.parametrize("page", ["README.md", "docs/tutorials/flower.md", "examples/flower-digits/README.md"])
def test_flower_is_told_not_to_install_the_app(page: str) -> None:
    """Otherwise Flower asks PyPI for cpsgd before the first round, and ends with code 608."""
    text = (PAGES.parents[1] / page).read_text(encoding="utf-8")
    before, found, _ = text.partition("\n$ flwr run")
    assert found
    assert re.search(r"^\$ export .*FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1", before, re.MULTILINE)


class Silos(Federation):
    """A federation of processes that know their number and nothing else, as in the tutorial."""

    def _node_config(self, node: int) -> str:
        return f"partition-id={node}"


@pytest.mark.thorough
def test_the_flower_tutorial_learns_in_processes(flower_app: Path, tmp_path: Path) -> None:
    import torch

    directory, model = tmp_path / "federation", tmp_path / "model.pt"
    directory.mkdir()
    with Silos(directory, 10) as federation:
        federation.run(flower_app, 900.0, model, {"model": str(model)})
    assert not federation.living()
    reader = import_module("private_digits.task")
    network = reader.network()
    network.load_state_dict(torch.load(model, weights_only=True))
    assert reader.accuracy(network) > ENOUGH


@pytest.mark.thorough
def test_the_nvflare_tutorial_learns(tmp_path: Path) -> None:
    take_files(PAGES / "nvflare.md", tmp_path)
    assert accuracy_in(follow(PAGES / "nvflare.md", tmp_path / "private-digits", seconds=900.0)) > ENOUGH


@pytest.mark.slow
def test_the_phones_tutorial_learns(tmp_path: Path) -> None:
    """40 runs without the network: 0.899 on average, standard deviation 0.011. So 0.8 is 9 deviations below."""
    take_files(PAGES / "phones.md", tmp_path)
    ports = {old: str(free_port()) for old in ("8401", "8402")}
    printed = follow(PAGES / "phones.md", tmp_path / "private-phones", replaced=ports)
    assert accuracy_in(printed) > 0.8
    counts = [int(count) for count in re.findall(r"^round +\d+: (\d+) of 800", printed, re.MULTILINE)]
    assert len(counts) == 10
    assert min(counts) >= 480


@pytest.mark.slow
def test_the_own_loop_tutorial_learns(tmp_path: Path) -> None:
    """Runs read 0.975, 0.928 to 0.953, and 0.928: the noise alone moves the last two by about a point."""
    take_files(PAGES / "own-loop.md", tmp_path)
    printed = follow(PAGES / "own-loop.md", tmp_path / "own-loop")
    plain, private, clients = (float(found) for found in re.findall(r"^accuracy (0\.\d+)", printed, re.MULTILINE))
    assert plain > 0.95
    assert min(private, clients) > 0.8
    assert "ε = 1.999 at δ = 1e-05 for one example, zero-out neighbours: 160 of 160 steps" in printed
    assert "ε = 8 at δ = 1e-05, replace-one adjacency" in printed
    assert (tmp_path / "own-loop" / "model.pt").is_file()


def test_the_table_tutorial_answers_once(tmp_path: Path) -> None:
    """Intervals hold with 95 %, 1.96 deviations of the noise: five times as far is never seen."""
    pandas = pytest.importorskip("pandas")
    take_files(PAGES / "table.md", tmp_path)
    folder = tmp_path / "private-report"
    printed = follow(PAGES / "table.md", folder)
    table = pandas.read_csv(folder / "visits.csv")
    by_patient = table.groupby(["clinic", "patient"]).wait.mean()
    true = [
        *table.groupby("clinic").size(),
        *by_patient.groupby("clinic").mean(),
        table.groupby("patient").age.first().median(),
        *pandas.cut(table.age, [18, 40, 65, 100], right=False).value_counts(sort=False),
    ]
    shown = re.findall(r"(-?[\d.]+) (-?[\d.]+) (-?[\d.]+)$", printed, re.MULTILINE)
    assert len(shown) == len(true) == 10
    for right, (value, low, high) in zip(true, shown, strict=True):
        assert abs(float(value) - right) < 2.5 * (float(high) - float(low))
    page = (PAGES / "table.md").read_text(encoding="utf-8")
    for figure in ("3,025, 1,826 and 1,148 visits", "1,840, 2,115 and 2,044 visits"):
        assert figure in " ".join(page.split())
    assert [f"{count:,}" for count in true[:3]] == ["3,025", "1,826", "1,148"]
    assert [f"{count:,}" for count in true[7:]] == ["1,840", "2,115", "2,044"]
    assert [round(float(wait), 1) for wait in true[3:6]] == [32.0, 20.2, 24.3]
