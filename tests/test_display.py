"""Reprs are short, tables of notebooks are escaped, and neither says anything private."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

from cpsgd import Aggregator, Protocol, guarantee, plan
from cpsgd._display import html_table
from cpsgd.privacy.guarantees import guarantee_over_rounds
from cpsgd.promise import Claim, Conditions, Promise

EVIL = "<script>alert('x')</script> & \"more\""
PROTOCOL = replace(
    Protocol.rotated_binomial(clients=1000, dim=100, clip_norm=1.0, levels=2, trials=14),
    replace_one_distance=1.5,
    distance_reason=EVIL,
    promise=Promise(Claim(0.123456, 1e-6), Conditions.of(900)),
)


class Text(HTMLParser):
    """What a reader sees, and which tags there are."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.open: list[str] = []
        self.seen = ""
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.seen += data


@pytest.fixture(scope="module")
def things() -> dict[str, Any]:
    planned = plan(
        1000,
        20,
        2.0,
        1e-6,
        bits=4,
        mechanism="binomial",
        replace_one_distance=1.5,
        distance_reason=EVIL,
    )
    aggregator = Aggregator(PROTOCOL, 3)
    aggregator.add(PROTOCOL.encode(np.full(100, 0.0625), 3))
    return {
        "protocol": PROTOCOL,
        "guarantee": guarantee(PROTOCOL, 1e-6),
        "rounds": guarantee_over_rounds(PROTOCOL, 1e-6, rounds=3),
        "aggregator": aggregator,
        "plan": planned,
    }


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        (
            "protocol",
            r"Protocol\(rotated-binomial, clients=1000, dim=100, clip_norm=1, 4 bits .*, promises ε ≤ 0\.1235\)",
        ),
        ("guarantee", r"Guarantee\(ε = [\d.]+ at δ = 1e-06, replace-one adjacency, [\w-]+\)"),
        ("rounds", r"Guarantee\(ε = [\d.]+ at δ = 1e-06, replace-one adjacency, [\w-]+\)"),
        ("aggregator", r"Aggregator\(round 3, 1 messages of 1,000 planned, rotated-binomial\)"),
        ("plan", r"Plan\(rotated-binomial at 4 bits, ε = [\d.]+ at δ = 1e-06, squared error .*, .* × the Gaussian's\)"),
    ],
)
def test_reprs_are_short(things: dict[str, Any], name: str, pattern: str) -> None:
    found = repr(things[name])
    assert re.fullmatch(pattern, found), found
    assert len(found) < 160


@pytest.mark.parametrize("name", ["protocol", "guarantee", "rounds", "aggregator", "plan"])
def test_tables_are_escaped(things: dict[str, Any], name: str) -> None:
    source = things[name]._repr_html_()
    page = Text(source)
    assert page.tags == {"table", "caption", "b", "tbody", "tr", "th", "td"}
    assert page.open == []
    if name != "aggregator":
        assert EVIL in page.seen
    # Nothing of what clients sent.
    assert "0.0625" not in source


def test_the_figures_are_on_the_safe_side(things: dict[str, Any]) -> None:
    shown = re.search(r"ε = ([\d.]+)", repr(things["guarantee"]))
    assert shown is not None
    assert float(shown[1]) >= things["guarantee"].epsilon


def test_a_table() -> None:
    assert Text(html_table("a < b", [("x", "1"), ("y", "<i>")])).seen == "a < bx1y<i>"
    assert "<tr>" not in html_table("empty", [])
