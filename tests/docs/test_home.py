"""The figures of the front page are those of the files of results."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from reproduction.accuracy_vs_bytes import HOME, Point, best, draw_home

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def accuracies(path: Path) -> dict[tuple[str, str, str, str], str]:
    """Returns the mean accuracy for each ε, number of bands, of passes and of bits, as pages write it."""
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return {
        (row["epsilon"], row["bands"], row["passes"], row["bits"]): f"{100.0 * float(row['accuracy_mean']):.2f} %"
        for row in rows
    }


def at_16_bits() -> tuple[dict[str, float], dict[str, float], float]:
    """Returns the errors of ours and of published designs at 16 bits, and the fewest bits of the published cpSGD."""
    ours: dict[str, float] = {}
    published: dict[str, float] = {}
    fewest = []
    with (ROOT / "docs/results/frontier/frontier.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if (row["clients"], row["dim"], row["secure"]) == ("10000", "65536", "True"):
                if float(row["bits"]) <= 16.0:
                    of = ours if row["accounting"] == "ours" else published
                    of[row["mechanism"]] = min(float(row["ratio"]), of.get(row["mechanism"], 1e9))
                if (row["mechanism"], row["accounting"]) == ("binomial", "published"):
                    fewest.append(float(row["bits"]))
    return ours, published, min(fewest)


def test_the_table_beside_others_has_the_files_figures() -> None:
    ours, published, fewest = at_16_bits()
    assert f"| {min(ours.values()):.2f} | {published['skellam']:.2f} discrete Gaussian, Skellam" in README
    assert f"{published['coins']:.2f} Poisson binomial; cpSGD needs {fewest:.0f} bits" in README
    once, again = (accuracies(ROOT / "docs/results" / folder / "summary.csv") for folder in ("correlated", "passes"))
    assert f"({once['', '1', '1', '']} without" in README
    for epsilon, passes, said in (("2.0", "10", "ten"), ("0.5", "25", "25")):
        one = once[epsilon, "129", "1", "5.0"]
        here = f"{again[epsilon, '32', passes, '14.0']} in {said} passes, {one} in one with 5 bits"
        assert f"| {here} | {once[epsilon, '1', '1', '4.0']} with independent noise, in one |" in README
    peers = json.loads((ROOT / "docs/results/peers/peers.json").read_text(encoding="utf-8"))
    flower = "Flower: LocalDpMod's clip and noise"
    noise = {name: found["ns"] for name, found in peers["noise"].items()}
    assert f"| {noise['cpsgd: message of 1 bit']:.2f} ns | {noise['Opacus: the same in secure mode']:.1f} ns" in README
    assert f"{noise[flower]:.1f} ns Flower" in README
    masking = {name: 1000 * seconds for name, seconds in peers["masking"]["seconds"].items()}
    assert f"| {masking['cpsgd']:.1f} ms | {masking['Flower']:.0f} ms Flower" in README


def test_the_picture_is_drawn_from_the_files(tmp_path: Path) -> None:
    draw_home(tmp_path / "home.svg")
    assert (tmp_path / "home.svg").read_bytes() == HOME.read_bytes()


def test_a_line_has_the_points_that_no_cheaper_one_beats() -> None:
    given = [
        Point(2.0, "", sent, accuracy) for sent, accuracy in ((3, 97.0), (1, 96.0), (2, 98.0), (1, 95.0), (4, 98.5))
    ]
    assert [(point.bytes_up, point.accuracy) for point in best(given)] == [(1, 96.0), (2, 98.0), (4, 98.5)]
