"""The figures of the front page are those of the files of results."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from docs._site.home import OUT, RESULTS, draw, points

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def accuracies(path: Path) -> dict[tuple[str, str, str], str]:
    """Returns the mean accuracy for each ε, number of bands and number of passes, as pages write it."""
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return {
        (row["epsilon"], row["bands"], row.get("passes", "")): f"{float(row['accuracy_mean']):.2%}".replace("%", " %")
        for row in rows
    }


def test_the_table_beside_others_has_the_files_figures() -> None:
    at_16 = {name: dict(points(RESULTS, name, "published")) for name in ("skellam", "coins", "binomial")}
    assert f"| {dict(points(RESULTS, None, 'ours'))[16.0]:.2f} | {at_16['skellam'][16.0]:.2f} discrete" in README
    assert f"{at_16['coins'][16.0]:.2f} Poisson binomial; cpSGD needs {min(at_16['binomial']):.0f} bits" in README
    once, again = (accuracies(ROOT / "docs/results" / folder / "summary.csv") for folder in ("correlated", "passes"))
    assert f"({once['', '1', '']} without" in README
    for epsilon, passes, said in (("2.0", "10", "ten"), ("0.5", "25", "25")):
        ours = f"{again[epsilon, '32', passes]} in {said} passes, {once[epsilon, '32', '']} in one"
        assert f"| {ours} | {once[epsilon, '1', '']} with independent noise, in one |" in README
    peers = json.loads((ROOT / "docs/results/peers/peers.json").read_text(encoding="utf-8"))
    flower = "Flower: LocalDpMod's clip and noise"
    noise = {name: found["ns"] for name, found in peers["noise"].items()}
    assert f"| {noise['cpsgd: message of 1 bit']:.2f} ns | {noise['Opacus: the same in secure mode']:.1f} ns" in README
    assert f"{noise[flower]:.1f} ns Flower" in README
    masking = {name: 1000 * seconds for name, seconds in peers["masking"]["seconds"].items()}
    assert f"| {masking['cpsgd']:.1f} ms | {masking['Flower']:.0f} ms Flower" in README


def test_the_picture_is_drawn_from_the_file(tmp_path: Path) -> None:
    draw(RESULTS, tmp_path / "home.svg")
    assert (tmp_path / "home.svg").read_bytes() == OUT.read_bytes()
