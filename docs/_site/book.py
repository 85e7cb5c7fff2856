"""Draws the picture book, docs/explanation/picture-book.md: `python docs/_site/book.py`.

Pictures are 440 units wide, so that a phone shows their text at its size. All numbers in them are computed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parents[1] / "explanation" / "book"
WIDTH = 440
INK, BLUE, ORANGE, PALE = "#222222", "#00695c", "#d84315", "#e8eeee"


def text(x: float, y: float, said: str, *, colour: str = INK, anchor: str = "middle", size: int = 15) -> str:
    """Returns a line of text."""
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}" font-size="{size}">{said}</text>'


def line(x: float, y: float, to_x: float, to_y: float, *, colour: str = INK, arrow: bool = False) -> str:
    """Returns a line, with an arrow's head if asked for."""
    head = ' marker-end="url(#head)"' if arrow else ""
    return f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" stroke="{colour}" stroke-width="2"{head}/>'


def box(x: float, y: float, width: float, height: float, *said: str, fill: str = PALE) -> str:
    """Returns a box with lines of text in its middle."""
    middle = y + height / 2 + 5 - 10 * (len(said) - 1)
    lines = "".join(text(x + width / 2, middle + 20 * index, each) for index, each in enumerate(said))
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width}" height="{height}" rx="8" fill="{fill}"/>{lines}'


def dot(x: float, y: float, radius: float, *, fill: str = BLUE) -> str:
    """Returns a filled circle."""
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{fill}" stroke="{BLUE}" stroke-width="2"/>'


def page(height: int, *parts: str) -> str:
    """Returns a picture on white paper."""
    head = (
        '<marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0,0 L10,5 L0,10 z" fill="{INK}"/></marker>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="system-ui, sans-serif"><defs>{head}</defs>'
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>' + "".join(parts) + "</svg>\n"
    )


def coins() -> str:
    """One coordinate becomes one coin; many coins give the mean back."""
    value, bias, clients = 0.5, 0.25, 24
    odds = 0.5 + bias * value
    heads = round(clients * odds)
    flips = np.random.default_rng(1).permutation(clients) < heads
    x = 220 + 180 * value
    parts = [line(40, 40, 400, 40), *(line(each, 34, each, 46) for each in (40, 220, 400))]
    parts += [text(40, 68, "−1"), text(220, 68, "0"), text(400, 68, "1"), dot(x, 40, 7, fill=ORANGE)]
    parts += [text(x, 24, f"my number: {value}", colour=ORANGE), line(220, 76, 220, 104, arrow=True)]
    split = 40 + 360 * odds
    parts += [f'<rect x="40" y="110" width="{split - 40:.1f}" height="32" fill="{BLUE}"/>']
    parts += [f'<rect x="{split:.1f}" y="110" width="{400 - split:.1f}" height="32" fill="{PALE}"/>']
    parts += [text(130, 131, f"heads {odds:.1%}", colour="#ffffff"), text(332, 131, f"tails {1 - odds:.1%}")]
    parts += [text(220, 172, f"{clients} people with that number flip:")]
    for index, head in enumerate(flips):
        parts.append(dot(63 + 28.5 * (index % 12), 198 + 30 * (index // 12), 10, fill=BLUE if head else "#ffffff"))
    mean = (heads / clients - 0.5) / bias
    parts += [text(220, 272, f"{heads} of {clients} heads: ({heads}/{clients} − 1/2) / {bias} = {mean:.1f}")]
    return page(290, *parts)


def rounding() -> str:
    """A number between two levels goes up or down, right on average."""
    value = 2.3
    low, up = int(value), value - int(value)
    places = [50 + 85 * level for level in range(5)]
    x = 50 + 85 * value
    parts = [line(40, 130, 400, 130), *(dot(place, 130, 6, fill="#ffffff") for place in places)]
    parts += [text(place, 160, str(level)) for level, place in enumerate(places)]
    parts += [dot(x, 50, 7, fill=ORANGE), text(x, 32, f"{value}", colour=ORANGE)]
    parts += [line(x, 60, places[low], 118, arrow=True), line(x, 60, places[low + 1], 118, arrow=True)]
    parts += [text(places[low] - 14, 92, f"{1 - up:.0%}", anchor="end"), text(places[low + 1] - 4, 92, f"{up:.0%}")]
    parts += [text(220, 195, f"{1 - up:.1f} × {low} + {up:.1f} × {low + 1} = {value}: right on average")]
    return page(215, *parts)


def cancelling() -> str:
    """The standard deviation of noise in a model: independent noise, and noise that is taken away again."""
    rounds, share = np.arange(1, 201), 0.9
    alone = np.sqrt(rounds)
    # Independent draws z, of which round t shows z_t - share z_(t-1): z_t + (1 - share) (z_1 + ... + z_(t-1)) is left.
    # Scaled so that somebody who takes part once is protected equally well.
    cancelled = np.sqrt((1 + (1 - share) ** 2 * (rounds - 1)) / (1 - share**2))
    parts = [line(40, 190, 400, 190), line(40, 190, 40, 30)]
    parts += [text(220, 214, f"rounds 1 to {len(rounds)}"), text(40, 20, "noise in the model", anchor="start")]
    for deviations, colour in ((alone, ORANGE), (cancelled, BLUE)):
        path = " ".join(f"{40 + 1.8 * r:.1f},{190 - 10.5 * d:.1f}" for r, d in zip(rounds, deviations, strict=True))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        parts.append(text(404, 190 - 10.5 * deviations[-1] + 5, f"{deviations[-1]:.0f}", colour=colour, anchor="start"))
    parts += [line(40, 240, 70, 240, colour=ORANGE), text(78, 245, "each round's noise stays", anchor="start")]
    parts += [line(40, 265, 70, 265, colour=BLUE)]
    parts += [text(78, 270, f"{share:.0%} of it is taken away a round later", anchor="start")]
    return page(287, *parts)


def secure_sum() -> str:
    """Three clients whose masks cancel in the sum, modulo 16."""
    modulus, values = 16, (3, 5, 1)
    masks = {(0, 1): 7, (0, 2): 2, (1, 2): 4}  # the first of a pair adds it, the second takes it away
    parts, sent = [], []
    for client, (value, name) in enumerate(zip(values, "ABC", strict=True)):
        y, total, terms = 20 + 76 * client, value, str(value)
        for (first, second), mask in masks.items():
            sign = (client == first) - (client == second)
            total += sign * mask
            terms += f" {'+' if sign > 0 else '−'} {mask}" if sign else ""
        sent.append(total % modulus)
        parts += [box(16, y, 176, 56, f"{name} has {value}", f"{terms} → {sent[-1]}")]
        parts += [line(196, y + 28, 268, 124, arrow=True)]
    whole = sum(sent)
    assert whole % modulus == sum(values)
    parts += [box(272, 76, 152, 96, "the server sees", ", ".join(map(str, sent)), f"sum {whole} → {whole % modulus}")]
    parts += [text(220, 270, f"All numbers modulo {modulus}: {' + '.join(map(str, values))} = {whole % modulus}")]
    return page(290, *parts)


def two_servers() -> str:
    """Two phones split their numbers between two servers, modulo 11."""
    prime, values, shares = 11, (3, 4), (9, 6)
    rest = [(value - share) % prime for value, share in zip(values, shares, strict=True)]
    sums = sum(shares) % prime, sum(rest) % prime
    assert sum(sums) % prime == sum(values)
    parts = []
    for phone, (value, share, other) in enumerate(zip(values, shares, rest, strict=True)):
        x = 60 + 200 * phone
        parts += [box(x, 14, 120, 56, f"phone has {value}", f"{share} + {other}")]
    parts += [line(100, 74, 100, 128, arrow=True), line(300, 74, 140, 128, arrow=True)]
    parts += [line(140, 74, 300, 128, arrow=True), line(340, 74, 340, 128, arrow=True)]
    for name, x, got, total in (("leader", 40, shares, sums[0]), ("helper", 240, rest, sums[1])):
        parts += [box(x, 132, 160, 56, name, f"{' + '.join(map(str, got))} → {total}")]
        parts += [line(x + 80, 192, 220 + (x - 140) / 5, 224, arrow=True)]
    parts += [box(110, 228, 220, 36, f"{sums[0]} + {sums[1]} → {sum(sums) % prime}")]
    parts += [text(220, 288, f"All numbers modulo {prime}: {values[0]} + {values[1]} = {sum(values)}")]
    return page(304, *parts)


PICTURES = {
    "coins": coins,
    "rounding": rounding,
    "cancelling": cancelling,
    "secure-sum": secure_sum,
    "two-servers": two_servers,
}


def draw(folder: Path = FOLDER) -> None:
    """Draws all pictures."""
    for name, picture in PICTURES.items():
        (folder / f"{name}.svg").write_text(picture(), encoding="utf-8")


if __name__ == "__main__":
    draw(*map(Path, sys.argv[1:]))
