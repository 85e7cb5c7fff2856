"""Which exchanges a round has, how many answers each waits for, and when a round prepares the next one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest

from cpsgd import Plan
from cpsgd.errors import ParameterError, WireError
from cpsgd.federation.choreography import Both, MaskedSum, PlainSum, begin_round
from cpsgd.federation.client_files import session_identifier
from cpsgd.federation.messages import Pair
from cpsgd.federation.sessions import RoundSession
from cpsgd.federation.terms import Settlement, Terms
from cpsgd.secagg import SecureServer, Stage

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


def test_as_many_nodes_as_must_survive_are_enough_to_begin(small_plan: Plan) -> None:
    begun, withheld = (begin_round(Terms(plan=small_plan), 1, NODES[:count], run=RUN) for count in (3, 2))
    assert (begun.stage, begun.fewest) == (Stage.ADVERTISE, 3)
    assert withheld.stage is None
    assert "2 nodes are connected, and the plan needs 3" in withheld.report.reason
    with pytest.raises(ParameterError, match="at most 4 different nodes"):
        begin_round(Terms(plan=small_plan), 1, [*NODES, "e"], run=RUN)


def test_a_node_whose_neighbours_fell_silent_is_noted(small_plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a sparse graph too few of them may be left for one that has answered."""
    session, clients = begin_round(Terms(plan=small_plan), 1, NODES, run=RUN), {node: Client() for node in NODES}
    for node, request in session.requests().items():
        session.receive(node, clients[node].ask(request))
    advance = SecureServer.advance
    with monkeypatch.context() as patch:
        patch.setattr(SecureServer, "advance", lambda self: {i: each for i, each in advance(self).items() if i != 3})
        session.close()
    assert session.waiting == {"a", "b", "c"}
    assert session.report.dropped == {"d": "too few of its neighbours are left"}


def test_the_sum_is_said_to_be_revealed_before_it_is(small_plan: Plan) -> None:
    said: list[int] = []
    settlement = Settlement(Terms(plan=small_plan), 1, RUN)
    settlement.reveal()
    settlement.charge(revealing=lambda: said.append(1))
    assert said == []
    settlement.reveal()
    assert said == [1]


def test_the_session_of_a_signed_round_is_not_the_servers_choice(small_plan: Plan) -> None:
    signed = Terms(plan=small_plan, roster=[bytes([number]) * 32 for number in range(4)])
    for ahead in (False, True):
        total: MaskedSum[str] = MaskedSum(signed, 2, NODES[:3], RUN, ahead=ahead)
        assert total.server._session.identifier == session_identifier(RUN, 2, ahead=ahead)
        assert total.server.parameters.clients == 4  # all on the roster, whoever is there
    one, other = (MaskedSum(Terms(plan=small_plan), 2, NODES, RUN) for _ in range(2))
    assert one.server._session.identifier != other.server._session.identifier


def test_a_pair_is_no_answer_where_nothing_is_prepared() -> None:
    now, session = mock.Mock(), SimpleNamespace(following=None)
    both: Both[str] = Both(now, Stage.ADVERTISE, cast(RoundSession[str], session), mock.Mock())
    answer = Pair(b"one", b"two").to_bytes()
    both.receive("a", answer)
    now.receive.assert_called_once_with("a", answer)
