"""Plans for single examples with noise that later rounds take away: silos stay, and their examples are in one round."""

from __future__ import annotations

import pytest

from cpsgd.correlated.mechanism import CorrelatedGaussian
from cpsgd.errors import InfeasibleError, ParameterError
from cpsgd.planner.examples import plan_examples
from cpsgd.privacy.guarantees import guarantee
from cpsgd.privacy.one_example import example_protocol

WISHES = {"examples": 20, "rounds": 30, "dropout": 0.1, "colluding": 1, "secure": True, "bits": 16}


def test_silos_keep_their_seeds_and_one_of_their_examples_is_protected() -> None:
    kind = {"mechanism": "correlated-gaussian"}
    found = plan_examples(10, 100, 4.0, 1e-6, participation="once", correlated=8, **WISHES, **kind)
    mechanism = found.protocol.mechanism
    assert isinstance(mechanism, CorrelatedGaussian)
    assert (mechanism.bands, mechanism.run_length, mechanism.separation) == (8, 30, None)
    assert mechanism.untrusted_holders is None  # so that no seed may be handed on
    assert found.examples == 20
    assert found.prefix is not None
    assert found.prefix.gain > 4.0
    assert 3.9 < found.guarantee.epsilon <= 4.0
    single = example_protocol(found.protocol, 20)
    assert guarantee(single, 1e-6, surviving=9, colluding=1).epsilon == found.guarantee.epsilon


def test_examples_in_every_round_are_planned_as_such() -> None:
    found = plan_examples(10, 100, 4.0, 1e-6, participation="every", correlated=2, **WISHES)
    assert found.protocol.mechanism.memory.one_event
    assert found.protocol.mechanism.memory.separation == 1
    assert found.guarantee.epsilon <= 4.0


def test_bad_bands_are_refused() -> None:
    for bands in (1, 31):
        with pytest.raises((InfeasibleError, ParameterError), match="correlated"):
            plan_examples(10, 100, 4.0, 1e-6, participation="once", correlated=bands, **WISHES)
