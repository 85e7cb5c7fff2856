"""Two rounds in flight, and a server that mixes their messages, repeats them, or sets a client's state back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cpsgd import Plan, Protocol
from cpsgd.errors import (
    CpsgdError,
    InvitationError,
    MagicError,
    RoundError,
    RoundRefusedError,
    SecureAggregationError,
    SecureRoundError,
    SignatureError,
    StageError,
    WireError,
)
from cpsgd.federation.answering import SessionState
from cpsgd.federation.choreography import begin_round
from cpsgd.federation.client_files import Memory, Signing
from cpsgd.federation.messages import Pair, Request
from cpsgd.federation.sessions import RoundSession
from cpsgd.federation.terms import Terms
from cpsgd.secagg import SecureClient, Stage
from cpsgd.secagg.keys import SIGNATURE_BYTES
from cpsgd.secagg.packets import Kind

from .local import DIM, RUN, Client, opening, plain, with_mechanism, with_more_noise, with_protocol
from .silos import Silos

NODES = list("abcd")
VICTIM = "a"


class Rounds:
    """Four clients, and a first round that prepares the second; stops before the victim is asked."""

    def __init__(self, plan: Plan, silos: Silos | None = None, folder: Path | None = None) -> None:
        self.plan = plan
        if silos is not None:
            self.clients = {node: silos.client(i) for i, node in enumerate(NODES)}
        else:
            settings = {node: {"cpsgd-memory": str(folder / node)} if folder else {} for node in NODES}
            self.clients = {node: Client(np.full(DIM, 0.01, np.float32), settings=settings[node]) for node in NODES}
        self.terms = Terms(plan=plan, roster=None if silos is None else silos.roster)
        self.session = begin_round(self.terms, 1, NODES, run=RUN, prepares=True)
        self.sent: dict[tuple[int, Stage], Request] = {}  # all that the victim was asked

    @property
    def victim(self) -> Client:
        return self.clients[VICTIM]

    @property
    def state(self) -> SessionState:
        return SessionState.from_bytes(self.victim.state)

    def before(self, stage: Stage, round: int = 1) -> bytes:
        """What the victim is asked at this stage, when all have answered the stages before."""
        while True:
            asked = self.session.requests()[VICTIM]
            pair = Pair.from_bytes(asked) if Pair.begins(asked) else None
            for request in [asked] if pair is None else [pair.first, pair.second]:
                found = Request.from_bytes(request)
                self.sent[found.round, found.stage] = found
            if (self.session.report.round, self.session.stage) == (round, stage):
                return asked
            self.answer(asked)

    def answer(self, request: bytes) -> bytes:
        """Lets the victim answer this, and the others what they are asked, and goes on."""
        reply = self.victim.ask(request)
        self.session.receive(VICTIM, reply)
        for node, asked in self.session.requests().items():
            if node != VICTIM:
                self.session.receive(node, self.clients[node].ask(asked))
        self.session.close()
        if self.session.stage is None and self.session.prepared is not None:
            following = self.session.prepared
            self.session.release()
            following.charge(NODES)
            self.session = following
        return reply


@pytest.fixture
def rounds(small_plan: Plan) -> Rounds:
    return Rounds(small_plan)


@pytest.fixture
def silos(tmp_path: Path) -> Silos:
    return Silos(tmp_path)


def refused(client: Client, request: bytes | Request, error: type[Exception]) -> None:
    """The request is refused and changes nothing."""
    before, trained = client.state, client.trained
    with pytest.raises(error) as caught:
        client.ask(request)
    assert isinstance(caught.value, CpsgdError)
    assert client.state == before
    assert client.trained == trained


# ---------------------------------------------------------------------- messages that do not go together


def test_pairs_of_which_nothing_is_answered(rounds: Rounds) -> None:
    whole = rounds.before(Stage.CONFIRM)
    first, second = (Request.from_bytes(part) for part in (Pair.from_bytes(whole).first, Pair.from_bytes(whole).second))

    def pair(one: Request, other: Request) -> bytes:
        return Pair(one.to_bytes(), other.to_bytes()).to_bytes()

    for stage in (Stage.UPLOAD, Stage.SHARE, Stage.MASK, Stage.CONFIRM, Stage.UNMASK):
        refused(rounds.victim, pair(first, replace(second, stage=stage)), StageError)
    for stage in (Stage.UPLOAD, Stage.ADVERTISE, Stage.SHARE, Stage.MASK, Stage.UNMASK):
        refused(rounds.victim, pair(replace(first, stage=stage), second), StageError)
    for round in (0, 1, 3, 2**63):
        refused(rounds.victim, pair(first, replace(second, round=round)), StageError)
    refused(rounds.victim, pair(second, first), StageError)
    refused(rounds.victim, pair(first, first), StageError)
    refused(rounds.victim, Pair(first.to_bytes(), whole).to_bytes(), MagicError)
    refused(rounds.victim, Pair(whole, second.to_bytes()).to_bytes(), MagicError)
    refused(rounds.victim, Pair(first.to_bytes(), b"").to_bytes(), WireError)
    refused(rounds.victim, Pair(b"", second.to_bytes()).to_bytes(), WireError)
    refused(rounds.victim, whole[:7], WireError)
    refused(rounds.victim, whole[:-1], WireError)
    rounds.answer(whole)
    whole = rounds.before(Stage.UNMASK)
    earlier = rounds.sent[2, Stage.ADVERTISE]
    refused(rounds.victim, pair(Request.from_bytes(Pair.from_bytes(whole).first), earlier), StageError)
    rounds.answer(whole)
    assert rounds.session.report.round == 2
    assert rounds.session.waiting == set(NODES)


def test_stages_of_the_prepared_round_that_come_by_themselves(rounds: Rounds) -> None:
    rounds.answer(rounds.before(Stage.CONFIRM))
    whole = rounds.before(Stage.UNMASK)
    shares = rounds.sent[2, Stage.SHARE]
    for stage in (Stage.SHARE, Stage.CONFIRM, Stage.UNMASK):
        refused(rounds.victim, replace(shares, stage=stage), RoundError)
    # Keys are advertised, and no shares dealt: it is not to upload, and the round does not count.
    refused(rounds.victim, replace(shares, stage=Stage.MASK), StageError)
    assert rounds.state.answered == 1
    rounds.answer(whole)
    for stage in (Stage.SHARE, Stage.CONFIRM, Stage.UNMASK):
        refused(rounds.victim, replace(shares, stage=stage), RoundError)
    refused(rounds.victim, replace(shares, stage=Stage.MASK, round=3), RoundError)
    refused(rounds.victim, whole, StageError)
    assert rounds.answer(rounds.before(Stage.MASK, 2))


@pytest.mark.parametrize("payload", ["of this round", "of another round", "of this attempt"])
def test_an_invitation_that_is_not_for_the_next_round(rounds: Rounds, payload: str) -> None:
    pair = Pair.from_bytes(rounds.before(Stage.CONFIRM))
    invitations = {
        "of this round": rounds.sent[1, Stage.ADVERTISE].payload,
        "of another round": opening(rounds.plan).payload,
        "of this attempt": rounds.sent[1, Stage.SHARE].payload,
    }
    wrong = replace(Request.from_bytes(pair.second), payload=invitations[payload])
    found = Pair.from_bytes(rounds.answer(Pair(pair.first, wrong.to_bytes()).to_bytes()))
    assert found.refused
    assert found.reason.split(":")[0] in (InvitationError.__name__, StageError.__name__)
    assert rounds.state.prepared == ""
    assert rounds.state.secrets  # the round that runs goes on
    assert rounds.session.waiting == set(NODES)


def test_keys_that_are_not_of_the_next_round(rounds: Rounds, small_plan: Plan) -> None:
    rounds.answer(rounds.before(Stage.CONFIRM))
    pair = Pair.from_bytes(rounds.before(Stage.UNMASK))
    other = Rounds(small_plan)
    other.before(Stage.UNMASK)
    for keys in (rounds.sent[1, Stage.SHARE], other.sent[2, Stage.SHARE]):
        client = Client()
        client.state = rounds.victim.state
        wrong = replace(Request.from_bytes(pair.second), payload=keys.payload)
        found = Pair.from_bytes(client.ask(Pair(pair.first, wrong.to_bytes()).to_bytes()))
        assert found.refused
        assert found.reason.startswith(SecureRoundError.__name__)
        assert SessionState.from_bytes(client.state).prepared == ""


def test_a_message_of_the_next_round_for_this_one_leaves_the_next_as_it_is(rounds: Rounds) -> None:
    rounds.answer(rounds.before(Stage.CONFIRM))
    whole = Pair.from_bytes(rounds.before(Stage.UNMASK))
    before = rounds.state.prepared
    wrong = replace(Request.from_bytes(whole.first), payload=rounds.sent[2, Stage.SHARE].payload)
    with pytest.raises(SecureRoundError):
        rounds.victim.ask(Pair(wrong.to_bytes(), whole.second).to_bytes())
    # It has left the round that runs, and dealt no shares for the next.
    assert rounds.state.secrets == b""
    assert rounds.state.prepared == before


def test_who_does_not_confirm_prepares_nothing(rounds: Rounds) -> None:
    whole = Pair.from_bytes(rounds.before(Stage.CONFIRM))
    wrong = replace(Request.from_bytes(whole.first), payload=rounds.sent[2, Stage.ADVERTISE].payload)
    with pytest.raises(SecureAggregationError):
        rounds.victim.ask(Pair(wrong.to_bytes(), whole.second).to_bytes())
    assert rounds.state.secrets == b""
    assert rounds.state.prepared == ""


def test_what_was_agreed_to_when_a_round_was_prepared_holds_when_it_runs(
    rounds: Rounds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server asks for masks with another protocol, for fewer survivors and more rounds: nobody reads that."""
    asked = Request.from_bytes(rounds.before(Stage.MASK, 2))
    other = with_more_noise(rounds.plan).protocol
    wrong = replace(asked, protocol=other.to_json(), surviving=1, rounds=10**6, examples=5)
    used: list[Protocol] = []
    monkeypatch.setattr(rounds.victim, "train", lambda protocol: used.append(protocol) or rounds.victim.vector)
    rounds.victim.ask(wrong)
    assert used == [rounds.plan.protocol]
    inner = SecureClient.restore(rounds.state.secrets)._state
    assert inner is not None
    assert inner.invitation is not None
    assert inner.invitation.session.parameters.surviving == rounds.plan.surviving
    assert rounds.state.rounds == rounds.plan.rounds


def test_a_confirmation_of_one_round_is_none_in_the_next(small_plan: Plan, silos: Silos) -> None:
    """Also with a roster, where both are signed with the same key."""
    rounds = Rounds(small_plan, silos)
    signed = Pair.from_bytes(rounds.answer(rounds.before(Stage.CONFIRM))).first
    rounds.before(Stage.CONFIRM, 2)
    inner = SecureClient.restore(rounds.victim.secrets, **vars(Signing.of(rounds.victim.settings)))._state
    assert inner is not None
    assert inner.invitation is not None
    framed = inner.invitation.session.write(Kind.CONFIRMATION, inner.invitation.client, signed[-SIGNATURE_BYTES:])
    for message, error in ((signed, SecureRoundError), (framed, SignatureError)):
        with pytest.raises(error):
            rounds.session.receive(VICTIM, message)


def test_shares_of_the_round_before_for_a_prepared_one(rounds: Rounds) -> None:
    asked = Request.from_bytes(rounds.before(Stage.MASK, 2))
    wrong = replace(asked, payload=rounds.sent[1, Stage.MASK].payload)
    with pytest.raises(SecureRoundError):
        rounds.victim.ask(wrong)
    assert rounds.state.secrets == b""
    refused(rounds.victim, asked, StageError)


# ---------------------------------------------------------------------- what is kept


def sessions(state: SessionState) -> list[int]:
    """The rounds whose secrets a client keeps."""
    states = [state, SessionState.from_bytes(state.prepared.encode())] if state.prepared else [state]
    return [each.round for each in states if each.secrets]


def test_secrets_of_at_most_two_rounds_are_kept(rounds: Rounds) -> None:
    found = []
    for stage in (Stage.SHARE, Stage.MASK, Stage.CONFIRM, Stage.UNMASK):
        asked = rounds.before(stage)
        found.append(sessions(rounds.state))
        rounds.answer(asked)
    asked = rounds.before(Stage.MASK, 2)
    found.append(sessions(rounds.state))
    rounds.answer(asked)
    found.append(sessions(rounds.state))
    assert found == [[1], [1], [1], [1, 2], [2], [2]]
    # Nothing is counted twice, and what is prepared counts nothing.
    assert rounds.state.answered == 2
    assert '"answered": 1' not in rounds.state.prepared


def test_no_secret_of_either_round_shows(rounds: Rounds) -> None:
    rounds.answer(rounds.before(Stage.CONFIRM))
    state = rounds.state
    assert sessions(state) == [1, 2]
    assert "secrets" not in repr(state)
    assert "prepared" not in repr(state)


def test_a_round_from_the_beginning_forgets_the_prepared_one(rounds: Rounds) -> None:
    asked = Request.from_bytes(rounds.before(Stage.MASK, 2))
    fresh: RoundSession[str] = begin_round(rounds.terms, 2, NODES, run=RUN)
    rounds.victim.ask(fresh.requests()[VICTIM])
    assert rounds.state.prepared == ""
    refused(rounds.victim, asked, StageError)


def test_another_run_forgets_the_prepared_round(rounds: Rounds) -> None:
    asked = rounds.before(Stage.MASK, 2)
    rounds.victim.run = "78"
    with pytest.raises(RoundError):
        rounds.victim.ask(asked)
    fresh: RoundSession[str] = begin_round(rounds.terms, 1, NODES, run="78")
    rounds.victim.ask(fresh.requests()[VICTIM])
    assert rounds.state.prepared == ""


def test_keys_seeds_and_signing_keys_of_two_rounds_are_different(rounds: Rounds) -> None:
    rounds.before(Stage.MASK, 1)
    first = SecureClient.restore(rounds.state.secrets)._state
    rounds.before(Stage.MASK, 2)
    second = SecureClient.restore(SessionState.from_bytes(rounds.state.prepared.encode()).secrets)._state
    assert first is not None
    assert second is not None
    for name in ("channel_private", "mask_private", "signing_private", "seed"):
        assert len(getattr(first, name)) == len(getattr(second, name)) == 32
        assert getattr(first, name) != getattr(second, name)
    one, other = first.invitation, second.invitation
    assert one is not None
    assert other is not None
    assert one.session.context != other.session.context
    assert (one.session.parameters.round, other.session.parameters.round) == (1, 2)


# ---------------------------------------------------------------------- a state that is set back


def test_with_a_memory_nothing_is_answered_twice_whatever_the_state(small_plan: Plan, tmp_path: Path) -> None:
    rounds = Rounds(small_plan, folder=tmp_path)
    states: list[tuple[bytes, bytes]] = []
    for stage, round in ((Stage.CONFIRM, 1), (Stage.UNMASK, 1), (Stage.MASK, 2), (Stage.CONFIRM, 2), (Stage.UNMASK, 2)):
        asked = rounds.before(stage, round)
        states.append((rounds.victim.state, asked))
        rounds.answer(asked)
    trained = rounds.victim.trained
    for state, asked in states:
        rounds.victim.state = state
        with pytest.raises((StageError, RoundError), match="already"):
            rounds.victim.ask(asked)
    assert rounds.victim.trained == trained == 2
    assert len(Memory(tmp_path / VICTIM).rounds()) == 2


@pytest.mark.parametrize("remembers", [True, False])
@pytest.mark.parametrize("stored", [True, False])
def test_a_client_that_dies_while_it_trains_uploads_nothing_under_the_same_masks(
    small_plan: Plan, tmp_path: Path, remembers: bool, stored: bool
) -> None:
    """Whether or not the engine came to store the state; where it did not, the client needs its memory."""
    rounds = Rounds(small_plan, folder=tmp_path if remembers else None)
    asked, before = rounds.before(Stage.MASK, 2), rounds.victim.state

    def dies(protocol: Protocol) -> np.ndarray:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(rounds.victim, "train", dies)
        with pytest.raises(KeyboardInterrupt):
            rounds.victim.ask(asked)
    if not stored:
        rounds.victim.state = before
    if stored or remembers:
        with pytest.raises((StageError, RoundError)):
            rounds.victim.ask(asked)
        assert rounds.victim.trained == 1
    else:
        assert rounds.victim.ask(asked)  # as for any round: what is stored late needs a memory


@pytest.mark.parametrize("prepared_first", [True, False])
def test_with_a_memory_a_round_is_uploaded_in_one_of_its_two_ways(
    small_plan: Plan, tmp_path: Path, prepared_first: bool
) -> None:
    """The server has the client prepare a round, and begin it from the beginning as well, from states it kept."""
    rounds = Rounds(small_plan, folder=tmp_path)
    prepared = rounds.before(Stage.MASK, 2)
    state_prepared = rounds.victim.state
    fresh: RoundSession[str] = begin_round(rounds.terms, 2, NODES, run=RUN)
    while fresh.stage is not Stage.MASK:
        for node, request in fresh.requests().items():
            fresh.receive(node, rounds.clients[node].ask(request))
        fresh.close()
    full, state_full = fresh.requests()[VICTIM], rounds.victim.state
    ways = [(state_prepared, prepared), (state_full, full)]
    for again, (state, asked) in enumerate(ways if prepared_first else reversed(ways)):
        rounds.victim.state = state
        if not again:
            rounds.victim.ask(asked)
            continue
        with pytest.raises(RoundError, match="answered round 2 of this run already"):
            rounds.victim.ask(asked)
    assert rounds.victim.trained == 2


def test_a_round_that_was_prepared_is_not_uploaded_in_the_servers_sight_as_well(
    small_plan: Plan, tmp_path: Path
) -> None:
    """By a client that would allow either."""
    rounds = Rounds(small_plan, folder=tmp_path)
    rounds.victim.secure = False
    prepared = rounds.before(Stage.MASK, 2)
    state = rounds.victim.state
    rounds.victim.ask(plain(small_plan, 2))
    refused(rounds.victim, prepared, StageError)
    rounds.victim.state = state
    with pytest.raises(RoundError, match="answered round 2 of this run already"):
        rounds.victim.ask(prepared)
    assert rounds.victim.trained == 2


def test_a_prepared_round_is_in_the_memory_once_and_before_the_client_trains(
    small_plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = Rounds(small_plan, folder=tmp_path)
    counted: list[list[int]] = []

    def train(protocol: Protocol) -> np.ndarray:
        counted.append([answered.round for answered in Memory(tmp_path / VICTIM).rounds()])
        return rounds.victim.vector

    monkeypatch.setattr(rounds.victim, "train", train)
    rounds.before(Stage.CONFIRM, 2)
    assert counted == [[1], [1, 2]]


def test_what_breaks_the_accountant_in_the_second_request_does_not_touch_the_first(small_plan: Plan) -> None:
    """Numbers so far apart that floating point has none for what comes of them, and more clients than there are."""
    for hostile in (with_mechanism(small_plan, coordinate_range=2.0**63), with_protocol(small_plan, clients=2**32 - 1)):
        rounds = Rounds(small_plan)
        rounds.clients[VICTIM] = Client(epsilon=8.0, delta=1e-5)
        pair = Pair.from_bytes(rounds.before(Stage.CONFIRM))
        wrong = replace(Request.from_bytes(pair.second), protocol=hostile.protocol.to_json())
        found = Pair.from_bytes(rounds.answer(Pair(pair.first, wrong.to_bytes()).to_bytes()))
        assert found.refused
        assert rounds.session.stage is Stage.UNMASK
        assert rounds.session.waiting == set(NODES)


def test_with_a_memory_a_round_is_prepared_once(small_plan: Plan, tmp_path: Path) -> None:
    rounds = Rounds(small_plan, folder=tmp_path)
    pair = Pair.from_bytes(rounds.before(Stage.CONFIRM))
    before = rounds.victim.state
    rounds.answer(pair.to_bytes())
    lines = [line.split(" #")[0] for line in (tmp_path / VICTIM).read_text().splitlines()]
    assert f"{RUN} 2 ahead-advertise" in lines
    # As if the stage of the round that runs had never been written down.
    (tmp_path / VICTIM).write_text("".join(f"{line}\n" for line in lines if line != f"{RUN} 1 confirm"))
    rounds.victim.state = before
    found = Pair.from_bytes(rounds.victim.ask(pair.to_bytes()))
    assert found.refused
    assert found.reason.startswith("StageError: This client has answered stage 'advertise' of round 2 of this run")
    assert rounds.state.prepared == ""
    fresh: RoundSession[str] = begin_round(rounds.terms, 2, NODES, run=RUN)
    rounds.victim.ask(fresh.requests()[VICTIM])  # from the beginning it may be begun


# ---------------------------------------------------------------------- with a roster


@pytest.mark.parametrize("way", ["prepared", "from the beginning"])
def test_the_session_says_whether_a_signed_round_is_prepared(small_plan: Plan, silos: Silos, way: str) -> None:
    rounds = Rounds(small_plan, silos)
    pair = Pair.from_bytes(rounds.before(Stage.CONFIRM))
    ahead = Request.from_bytes(pair.second)
    if way == "prepared":
        full: RoundSession[str] = begin_round(rounds.terms, 2, NODES, run=RUN)
        found = Pair.from_bytes(rounds.victim.ask(Pair(pair.first, full.requests()[VICTIM]).to_bytes()))
        assert found.refused
        assert found.reason.startswith(f"{RoundRefusedError.__name__}: The server's session is not that")
    else:
        refused(rounds.victim, ahead, RoundRefusedError)


def test_signed_rounds_refuse_messages_of_the_other_way(small_plan: Plan, silos: Silos) -> None:
    rounds = Rounds(small_plan, silos)
    rounds.before(Stage.MASK, 2)
    fresh: RoundSession[str] = begin_round(rounds.terms, 2, NODES, run=RUN)
    rounds.victim.ask(fresh.requests()[VICTIM])
    with pytest.raises(SecureRoundError, match="another attempt"):
        rounds.victim.ask(rounds.sent[2, Stage.SHARE])
