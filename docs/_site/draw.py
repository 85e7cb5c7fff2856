"""Draws the pictures of docs/explanation/pictures.md: `python docs/_site/draw.py`. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from scipy import stats

from cpsgd import Protocol, RoundSimulator, plan
from cpsgd.codec import rotate
from cpsgd.mechanisms import Coins
from cpsgd.reports import plotting

FOLDER = Path(__file__).parents[1] / "explanation"
SEED = 0
BLUE, ORANGE = plotting.SEQUENCE[1], plotting.ACCENT


def walk() -> None:
    """One vector on its way: as it is, rotated, as bits; and what comes back from many."""
    dim, clients = 64, 4000
    vector = np.zeros(dim, np.float32)
    vector[[5, 20, 21, 22, 40]] = [0.9, 0.25, 0.3, 0.15, -0.2]
    best = plan(clients=clients, dim=dim, epsilon=4.0, delta=1e-6, bits=1)
    coin = best.protocol.mechanism
    assert isinstance(coin, Coins)
    rotated = rotate.forward(vector, rotate.signs(dim, best.protocol.rotation_seed, 0))
    one = RoundSimulator(Protocol.from_json(best.protocol.to_json()), 0, seed=SEED)
    one.add(np.tile(vector, (clients, 1)))
    odds = 0.5 + coin.theta * np.clip(rotated / coin.coordinate_range, -1, 1)
    bits = np.random.default_rng(SEED).random(dim) < odds
    figure = plotting.new_figure(9.0, 4.6)
    panels = figure.subplots(2, 2, sharex=True)
    shown = (
        (vector, "1. clipped to norm 1", BLUE),
        (rotated, "2. rotated: no coordinate sticks out", BLUE),
        (2.0 * bits - 1.0, "3. sent: one biased coin per coordinate", ORANGE),
        (one.mean(), f"4. mean of {clients:,} such messages, rotated back", BLUE),
    )
    for axes, (values, title, colour) in zip(panels.flat, shown, strict=True):
        axes.bar(np.arange(dim), values, color=colour, width=0.8)
        plotting.tidy(axes, title=title, xlabel="", ylabel=None)
    for axes in panels[1]:
        axes.set_xlabel("coordinate", fontsize=10)
    panels[1, 1].plot(np.arange(dim), vector, ".", color=plotting.INK, markersize=3, label="truth")
    panels[1, 1].legend(frameon=False, fontsize=9)
    save(figure, "walk")


def one_number() -> None:
    """What a client may send for a coordinate at +0.4 X, and for one at −0.4 X, by three mechanisms."""
    figure = plotting.new_figure(9.0, 3.0)
    panels = figure.subplots(1, 3)
    share = 0.4
    levels, trials = 3, 13
    theta, coins = 0.2, 1
    sigma, window = 2.0, 16

    def binomial(x: float) -> np.ndarray:
        place = (x + 1) * (levels - 1) / 2
        low, rest = int(place), place - int(place)
        noise = stats.binom.pmf(np.arange(trials + 1), trials, 0.5)
        law = np.zeros(levels + trials)
        law[low : low + trials + 1] += (1 - rest) * noise
        law[low + 1 : low + trials + 2] += rest * noise
        return law

    def gaussian(x: float) -> np.ndarray:
        edges = np.arange(window + 1) - window / 2
        edges[[0, -1]] = -np.inf, np.inf
        return np.diff(stats.norm.cdf(edges, loc=x, scale=sigma))

    laws: tuple[tuple[str, Callable[[float], np.ndarray]], ...] = (
        ("levels and Binomial noise", binomial),
        ("one biased coin", lambda x: stats.binom.pmf(np.arange(coins + 1), coins, 0.5 + theta * x)),
        ("noise before rounding", gaussian),
    )
    for axes, (title, law) in zip(panels, laws, strict=True):
        for x, colour, shift in ((-share, ORANGE, -0.2), (share, BLUE, 0.2)):
            masses = law(x)
            axes.bar(np.arange(len(masses)) + shift, masses, width=0.4, color=colour, label=f"x = {x:+} X")
        plotting.tidy(axes, title=title, xlabel="integer sent", ylabel="probability")
    panels[1].set_xticks([0, 1])
    panels[0].legend(frameon=False, fontsize=8, loc="upper right")
    save(figure, "one-number")


def sums() -> None:
    """The sum of n coins, when one client's coordinate is at +X and when it is at −X."""
    figure = plotting.new_figure(9.0, 3.0)
    theta = 0.2
    for axes, clients in zip(figure.subplots(1, 3), (1, 20, 1000), strict=True):
        values = np.arange(clients + 1)
        others = stats.binom.pmf(values, clients - 1, 0.5)
        for colour, odds, name in ((ORANGE, 0.5 - theta, "x = −X"), (BLUE, 0.5 + theta, "x = +X")):
            law = (1 - odds) * others + odds * np.concatenate([[0.0], others[:-1]])
            if clients == 1:
                axes.bar(values + (0.2 if odds > 0.5 else -0.2), law, width=0.4, color=colour, label=name)
            else:
                axes.step(values, law, where="mid", color=colour, linewidth=1.5)
        middle, spread = clients / 2, max(1.0, 4 * np.sqrt(clients) / 2)
        axes.set_xlim(middle - spread, middle + spread)
        axes.set_ylim(bottom=0)
        plotting.tidy(axes, title=f"{clients:,} client{'s' if clients > 1 else ''}", xlabel="sum", ylabel="probability")
        if clients == 1:
            axes.set_ylim(0, 1)
            axes.legend(frameon=False, fontsize=9)
    save(figure, "sums")


def save(figure: Figure, name: str) -> None:
    """As SVG, the same bytes each time."""
    with mpl.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        figure.savefig(FOLDER / f"{name}.svg", metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    walk()
    one_number()
    sums()
