"""The figures of the front page are those of the files of results."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from docs._site.home import OUT, RESULTS, draw, points

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_table_beside_others_has_the_files_figures() -> None:
    at_16 = {name: dict(points(RESULTS, name, "published")) for name in ("skellam", "coins", "binomial")}
    assert f"| {dict(points(RESULTS, None, 'ours'))[16.0]:.2f} | {at_16['skellam'][16.0]:.2f} discrete" in README
    assert f"{at_16['coins'][16.0]:.2f} Poisson binomial; cpSGD needs {min(at_16['binomial']):.0f} bits" in README
    with (ROOT / "docs/results/correlated/summary.csv").open(encoding="utf-8") as file:
        rows = {(row["epsilon"], row["bands"]): float(row["accuracy_mean"]) for row in csv.DictReader(file)}
    assert f"({rows['', '1']:.2%} without".replace("%", " %") in README
    assert f"| {rows['2.0', '32']:.2%} | {rows['2.0', '1']:.2%} with independent".replace("%", " %") in README
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
