"""Who hands a lineage to whom: of those that are there, those that leave and hold one, to those that come."""

from __future__ import annotations

from dataclasses import replace

from cpsgd.correlated.handover import Handing, Handover, HandoverStep
from cpsgd.correlated.mechanism import CorrelatedGaussian


def asked(exchange: object) -> dict[str, HandoverStep]:
    return {node: Handover.from_bytes(data, "run").step for node, data in exchange.requests().items()}  # type: ignore[attr-defined]


def test_whoever_leaves_with_a_lineage_hands_it_to_whoever_comes() -> None:
    handing: Handing[str] = Handing("run", bytes(16), bands=3)
    assert handing.before(1, "abcd", "ab") == []
    handing.trained("ab", 1)
    # c has no lineage to give, b stays, and a is not to be found.
    assert handing.before(2, "bcd", "bd") == []
    assert handing.before(2, "abc", "ab") == []
    key, give, take = handing.before(2, "cabd", "bd")
    assert asked(key) == {"d": HandoverStep.KEY}
    key.receive("d", b"cpsh\x01\x00" + bytes(range(32)))
    key.close()
    assert asked(give) == {"a": HandoverStep.GIVE}
    # After three rounds a lineage has nothing left that a later round takes away; a may have handed its own on.
    assert handing.before(3, "abcd", "cd") != []
    assert handing.before(4, "abcd", "cd") == []
    # Nobody has answered this step: there is no baton to be taken.
    give.close()
    assert asked(take) == {}


def test_where_nothing_is_handed_on_nobody_is_asked() -> None:
    mechanism = CorrelatedGaussian(
        noise_deviation=8.0, step=0.25, window=512, coordinate_range=0.5, bands=3, run_length=10, untrusted_holders=None
    )
    assert mechanism.memory.handing("run", bytes(16)) is None
    assert isinstance(replace(mechanism, untrusted_holders=0).memory.handing("run", bytes(16)), Handing)
