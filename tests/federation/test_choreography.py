"""Which exchanges a round has, how many answers each waits for, and when a round prepares the next one."""

from __future__ import annotations

from typing import Any

import pytest

from cpsgd import Plan
from cpsgd.errors import WireError
from cpsgd.federation.choreography import MaskedSum, PlainSum, begin_round
from cpsgd.federation.sessions import RoundSession
from cpsgd.federation.terms import Terms
from cpsgd.secagg import Stage

from .local import RUN, Client

NODES = list("abcd")


def test_how_many_answers_an_exchange_waits_for(small_plan: Plan) -> None:
    total: MaskedSum[str] = MaskedSum(Terms(plan=small_plan), 1, NODES, RUN)
    assert total.server.parameters.quorum == 3
    assert [(each.stage, each.needed) for each in total.exchanges] == [
        *((stage, 3) for stage in (Stage.ADVERTISE, Stage.SHARE, Stage.MASK)),
        *((stage, 3) for stage in (Stage.CONFIRM, Stage.UNMASK)),
    ]
    # Where more must survive than must sign, fewer suffice once the sum is fixed.
    for quorum, confirm, unmask in ((1, 2, 1), (2, 3, 2), (3, 3, 3), (4, 3, 3)):
        object.__setattr__(total.server.parameters, "quorum", quorum)
        assert [each.needed for each in total.exchanges][3:] == [confirm, unmask]


def test_an_answer_longer_than_an_honest_ones_is_refused(small_plan: Plan) -> None:
    masked: MaskedSum[str] = MaskedSum(Terms(plan=small_plan), 1, NODES, RUN)
    assert masked.longest == masked.server.parameters.upload_bytes + 32_768 + 1_024 * 4
    plain: PlainSum[str] = PlainSum(Terms(plan=small_plan, secure=False), 1, NODES)
    with pytest.raises(WireError):
        plain.receive("a", bytes(small_plan.protocol.longest_message_bytes + 1))
    for size in (masked.longest + 1, masked.longest + 1_000):
        with pytest.raises(WireError, match="no honest"):
            masked.exchanges[0].receive("a", bytes(size))


def advertised(plan: Plan, round: int, **options: Any) -> RoundSession[str]:
    """A round of which two stages are over, and the third one's uploads are asked for."""
    session = begin_round(Terms(plan=plan), round, NODES, run=RUN, **options)
    clients = {node: Client() for node in NODES}
    while session.stage is not Stage.CONFIRM:
        for node, request in session.requests().items():
            session.receive(node, clients[node].ask(request))
        session.close()
    return session


@pytest.mark.parametrize(
    ("round", "options", "prepares"), [(2, {"prepares": True}, True), (3, {"prepares": True}, False), (2, {}, False)]
)
def test_a_round_prepares_the_next_one_if_there_is_one(
    small_plan: Plan, round: int, options: dict[str, Any], prepares: bool
) -> None:
    session = advertised(small_plan, round, **options)
    session.requests()
    assert (session.following is not None) == prepares
    if session.following is not None:
        assert session.following.report.round == round + 1
        assert set(session.following.nodes) == set(NODES)
