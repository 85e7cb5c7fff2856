"""`ClientSession`: the client's side of a round: a request from the server goes in, an answer comes out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from logging import getLogger
from typing import Any, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from cpsgd import _plain
from cpsgd.correlated import handover
from cpsgd.correlated.seeds import SeedFile
from cpsgd.errors import (
    CpsgdError,
    ParameterError,
    RoundError,
    RoundRefusedError,
    StageError,
    TrainFunctionError,
    WireError,
)
from cpsgd.federation.client_files import TASK_KEY, Answered, Memory, Signing, check_signed
from cpsgd.federation.limits import History, Limits, RoundKind, check_affordable
from cpsgd.federation.messages import AHEAD, Pair, Request, read_protocol
from cpsgd.federation.one_message import ClientTask, asks_for, asks_for_one
from cpsgd.mechanisms.memory import ClientNoise, Turn
from cpsgd.protocol import Protocol
from cpsgd.secagg import Invitation, SecureClient, Stage

Train = Callable[[Protocol], NDArray[np.float32]]
"""Computes the client's vector for the protocol that was accepted. Called at most once in a round."""

_UNKNOWN = (
    "This client's memory holds rounds of release 0.1.0 with another plan, and does not say what they cost. Begin a "
    "new memory, with a limit that is smaller by what those rounds were allowed to cost."
)
_UNSIGNED = Signing()
_log = getLogger("cpsgd")
_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass(frozen=True)
class SessionState:
    """A client's state between requests.

    Attributes:
        run: The run that `round` belongs to.
        round: The last round of the run that was begun, -1 before the first.
        rounds: Rounds that the server announced with the protocol.
        answered: Rounds in which something was sent, over all runs that the engine keeps one state for, or over all
            that are in the client's memory.
        accepted: Digest of the last protocol and number of rounds that were found acceptable, in hexadecimal.
        kind: The kind of the rounds that were found acceptable, as text.
        spent: Without a memory, how many rounds of each kind were answered.
        checked: Digest of the history that the current round was found affordable after.
        protocol: The current round's protocol as JSON.
        secrets: The state of the secure aggregation client, empty when no round is under way.
        prepared: The state in which the next round begins, as `to_bytes` writes it, if that round is being prepared.
            Its counts are empty: those of this state hold.
    """

    run: str
    round: int = -1
    rounds: int = 0
    answered: int = 0
    accepted: str = ""
    kind: str = ""
    spent: dict[str, int] = field(default_factory=dict)
    checked: str = ""
    protocol: str = ""
    secrets: bytes = field(default=b"", repr=False)
    prepared: str = field(default="", repr=False)

    def to_bytes(self) -> bytes:
        """Returns the whole state as bytes, secrets included."""
        return json.dumps(_plain.to_dict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> SessionState:
        """Returns the state that `to_bytes` wrote.

        Raises:
            WireError: It is something else.
        """
        try:
            return _plain.build(cls, _plain.parse(data, "A client's saved state"))
        except ParameterError:
            raise WireError("The client's saved state is damaged. It takes part again in the next run.") from None


class ClientSession:
    """Answers the server's requests one by one, if they keep the client's limits.

    It does not take the server's word for its privacy: it computes the guarantee itself and refuses, with a typed
    error that is fit for the server to read, before it computes anything from its data.

    Attributes:
        state: Bytes for the next session of this client, secrets included; also after a refusal. Keep them on the
            client's machine and store them before the answer is sent. Empty while there is nothing to remember.
    """

    def __init__(
        self,
        limits: Limits,
        run: str,
        state: bytes = b"",
        *,
        memory: Memory | None = None,
        signing: Signing = _UNSIGNED,
        secure: bool = True,
        task: ClientTask | None = None,
    ) -> None:
        """Continues from the state of an earlier session.

        Args:
            limits: The client's own conditions.
            run: The engine's name of the run, the same on the server; one word.
            state: `state` of the session before, of whatever run.
            memory: Where answers are written down, so that limits hold over all runs and nothing is answered twice.
            signing: The client's identity and roster; with these it takes part in signed rounds only.
            secure: False also accepts rounds without secure aggregation, in which the server sees this client's own
                noisy message. The guarantee then holds only for those who see no more than the mean.
            task: The task of two servers that this client sends sealed messages to, from its operator; None for none.
        """
        if not run.isascii() or run.split() != [run] or run.startswith("#"):
            raise ParameterError("Expected run to be one word in ASCII that does not begin with #.")
        self.state = state
        self._limits, self._memory, self._signing, self._secure = limits, memory, signing, secure
        self._task = task
        found = SessionState.from_bytes(state) if state else SessionState(run)
        self._progress = (
            found
            if found.run == run
            else SessionState(run, answered=found.answered, accepted=found.accepted, kind=found.kind, spent=found.spent)
        )

    @property
    def round(self) -> int:
        """The round under way, -1 before the first. While the client trains, it is the one that was accepted."""
        return self._progress.round

    def answer(self, request: bytes, train: Train) -> bytes:
        """Returns the answer to one request, or to one of the round that runs together with one that prepares the next.

        A failure after a stage was begun leaves the client out of the round: no secret is used twice. If the second of
        two requests is wrong, the round that runs goes on, and the answer says why the second is refused.

        Raises:
            CpsgdError: The request is refused; the subclass and the message say why.
        """
        if isinstance(request, bytes) and request.startswith(handover.MAGIC):
            signed = self._signing.roster is not None
            return handover.answer(request, self._progress.run, self._seeds, signed=signed)
        if not Pair.begins(request):
            return self._answer(Request.from_bytes(request), train)
        pair = Pair.from_bytes(request)
        asked, ahead = Request.from_bytes(pair.first), Request.from_bytes(pair.second)
        if AHEAD.get(asked.stage) is not ahead.stage or ahead.round != asked.round + 1:
            raise StageError(
                f"The server asks for {asked.stage.value!r} of round {asked.round} and {ahead.stage.value!r} of round "
                f"{ahead.round}, which do not go together."
            )
        reply = self._answer(asked, train)
        try:
            prepared = self._answer(ahead, train, ahead=True)
        except CpsgdError as error:
            return Pair.without(reply, f"{type(error).__name__}: {error}").to_bytes()
        return Pair(reply, prepared).to_bytes()

    def _answer(self, asked: Request, train: Train, *, ahead: bool = False) -> bytes:
        if self._task is not None and not (asked.stage is Stage.UPLOAD and asks_for_one(asked.payload)):
            raise RoundRefusedError(
                f"This client's operator has set {TASK_KEY}: it sends to the two servers of that task and nobody else."
            )
        if asked.stage is Stage.UPLOAD:
            return self._upload(asked, train)
        if asked.stage is Stage.ADVERTISE:
            return self._advertise(asked, ahead=ahead)
        return self._go_on(asked, train, ahead=ahead)

    # ------------------------------------------------------------------ stages

    def _upload(self, asked: Request, train: Train) -> bytes:
        """Answers a round without secure aggregation, which is one request, and counts it."""
        task = self._task_asked_for(asked) if asks_for_one(asked.payload) else None
        if task is None and self._secure:
            raise RoundRefusedError(
                "The server asks for messages without secure aggregation. If it may see this client's own noisy "
                "message, say so with secure=False."
            )
        if task is None and self._signing.roster is not None:
            raise RoundRefusedError(
                "This client has a roster, and takes part in signed rounds of secure aggregation only."
            )
        protocol, begun = self._accept(asked)
        self._save(begun)
        vector, number, noise = self._train(protocol, asked.round, train)
        if task is None:
            return protocol.encode(vector, number, **noise)
        values = protocol.encode_integers(vector, number, **noise)
        return task.upload(values, asked.round - 1, identity=self._signing.identity)

    def _task_asked_for(self, asked: Request) -> ClientTask:
        """Returns the client's task of two servers.

        Raises:
            RoundRefusedError: The request or its protocol is for another task, or the client has none.
        """
        task = self._task
        if task is None or asked.payload != asks_for(task.fingerprint):
            raise RoundRefusedError(
                "The server asks for a message to two servers, and this client has no such task: its operator sets "
                f"{TASK_KEY} to the file of the task."
            )
        if read_protocol(asked.protocol).fingerprint != task.protocol.fingerprint:
            raise RoundRefusedError("The server's protocol is not the one of this client's task.")
        return task

    def _advertise(self, asked: Request, *, ahead: bool = False) -> bytes:
        """Begins a round of secure aggregation, or prepares the next one."""
        signing, invitation = self._signing, Invitation.read(asked.payload)
        if signing.roster is not None:
            check_signed(signing.roster, invitation, self._progress.run, asked.round, ahead=ahead)
        protocol, begun = self._accept(asked)
        expected = self._limits.check_secure(
            protocol, invitation.session.parameters, round=asked.round, surviving=asked.surviving
        )
        client = SecureClient(expected=expected, identity=signing.identity, roster=signing.roster)
        reply = client.advertise(asked.payload, counter=lambda: self._answer_once(asked, ahead=ahead))
        self._keep(replace(begun, secrets=client.export_state()), ahead)
        return reply

    def _go_on(self, asked: Request, train: Train, *, ahead: bool) -> bytes:
        """Answers a stage after the first, of the running round or, with `ahead`, of the next one."""
        state, signing = self._state_of(asked, ahead), self._signing
        if not state.secrets:
            raise StageError("This client takes no part in the round, or has left it.")
        client = SecureClient.restore(state.secrets, identity=signing.identity, roster=signing.roster)
        if client.stage is not asked.stage:
            raise StageError(f"This client is to {client.stage.value} next, not to {asked.stage.value}.")
        # Whatever goes wrong below, no secret is used twice.
        self._keep(replace(state, secrets=b""), ahead)
        if asked.stage is Stage.MASK:
            protocol = read_protocol(state.protocol)
            # Another client that spoils the round does not make this one pay for it.
            client.check_delivery(asked.payload)
            vector, number, noise = self._train(protocol, asked.round, train)
            reply = client.mask(asked.payload, protocol.encode_integers(vector, number, **noise))
        else:
            self._answer_once(asked, ahead=ahead)
            methods = {Stage.SHARE: client.share, Stage.CONFIRM: client.confirm, Stage.UNMASK: client.unmask}
            reply = methods[asked.stage](asked.payload)
            if asked.stage is Stage.SHARE and signing.roster is not None and self._memory is not None:
                self._memory.meet(client.counters)
        if client.stage is not Stage.DONE:
            self._keep(replace(state if ahead else self._progress, secrets=client.export_state()), ahead)
        return reply

    def _state_of(self, asked: Request, ahead: bool) -> SessionState:
        """Returns the state of the round that a request is about."""
        progress = self._progress
        begins = asked.stage is Stage.MASK and asked.round == progress.round + 1 and progress.prepared
        if not ahead and not begins:
            if asked.round != progress.round:
                raise RoundError(
                    f"The server's message is for round {asked.round}, and this client is in {progress.round}."
                )
            return progress
        # Where the prepared round begins, whatever is left of the one before is forgotten.
        found = SessionState.from_bytes(progress.prepared.encode()) if progress.prepared else None
        if found is None or found.round != asked.round:
            raise RoundError(f"The server's message is for round {asked.round}, which this client has not prepared.")
        return replace(found, run=progress.run, answered=progress.answered, spent=progress.spent)

    def _keep(self, state: SessionState, ahead: bool) -> None:
        """Saves the state of the running round, or with `ahead` that of the next one beside it."""
        if ahead:
            text = replace(state, answered=0, spent={}, prepared="").to_bytes().decode() if state.secrets else ""
            state = replace(self._progress, prepared=text)
        self._save(state)

    def _train(
        self, protocol: Protocol, round: int, train: Train
    ) -> tuple[NDArray[np.float32], int, Mapping[str, Any]]:
        """Counts the round, trains, and returns the arguments of `Protocol.encode`."""
        noise = self._noise(protocol)
        noise.check(round)
        self._count()
        vector, arguments = noise.meanwhile(round, protocol.dim, lambda: _vector(train, protocol))
        return vector, protocol.mechanism.memory.number(round), arguments

    @property
    def _seeds(self) -> SeedFile | None:
        return None if self._memory is None else self._memory.seeds

    def _noise(self, protocol: Protocol) -> ClientNoise:
        """Returns the client's noise in this run. Raises `RoundRefusedError` if a file of seeds is missing."""
        return protocol.mechanism.memory.of_client(self._seeds, self._progress.run, protocol.fingerprint)

    # ------------------------------------------------------------------ what is agreed to

    def _accept(self, asked: Request) -> tuple[Protocol, SessionState]:
        """Checks a new round against the client's limits; returns its protocol and the facts to remember."""
        limits, progress = self._limits, self._progress
        if asked.round <= progress.round:
            raise RoundError(f"The server begins round {asked.round} of this run again or too late.")
        if asked.examples != (limits.examples or 0):
            raise RoundRefusedError(
                f"The server plans for sums of {asked.examples} examples (0: whole clients are protected), and this "
                f"client is set up for {limits.examples or 0}: one of them would be wrong about what is protected."
            )
        protocol = read_protocol(asked.protocol)
        digest = limits.digest(protocol, rounds=asked.rounds, surviving=asked.surviving).hex()
        if digest == progress.accepted and progress.kind:
            kind = RoundKind.from_text(progress.kind)
        else:
            limits.check(protocol, rounds=asked.rounds, surviving=asked.surviving)
            kind = RoundKind.of(limits, protocol, asked.surviving)
        begun = replace(
            progress,
            round=asked.round,
            rounds=asked.rounds,
            accepted=digest,
            kind=kind.to_text(),
            protocol=asked.protocol,
            secrets=b"",
            prepared="",
        )
        self._noise(protocol)  # refuses noise that this client has nowhere to keep
        if self._memory is None:
            before = _history(progress.spent)
        else:
            answered, kinds = self._memory.history()
            _check_turn(protocol, begun, answered, limits)
            before = _remembered(answered, kinds, begun, limits)
        check_affordable(limits, before, kind, protocol.mechanism.memory.charged_rounds(asked.rounds))
        return protocol, replace(begun, checked=_digest(before))

    def _answer_once(self, asked: Request, *, ahead: bool = False) -> int:
        """Records in the client's memory, if it has one, that this stage is answered.

        Returns the number of rounds that the client has entered, 0 without a memory.

        Raises:
            StageError: It was answered before, even if the engine hands over an older state.
        """
        if self._memory is None:
            return 0
        return self._memory.once(self._progress.run, asked.round, asked.stage, ahead=ahead)

    def _count(self) -> None:
        """Checks the limits once more, and saves the round as answered, before anything about the data is computed.

        Raises:
            RoundRefusedError: A limit does not allow the round, or has changed since the round began.
            RoundError: The client has answered this round of the run already.
        """
        limits, progress = self._limits, self._progress
        kind, protocol = RoundKind.from_text(progress.kind), read_protocol(progress.protocol)
        this = Answered(progress.run, progress.round, kind.digest)
        if limits.digest(protocol, rounds=progress.rounds, surviving=kind.surviving).hex() != progress.accepted:
            # What is protected would be another thing than what was accounted for: a sum of other examples, say.
            raise RoundRefusedError("This client's own conditions have changed since the round began.")

        def check(answered: int, before: History) -> None:
            if limits.rounds is not None and answered >= limits.rounds:
                raise RoundRefusedError(f"This client has answered {answered} rounds, and answers no more.")
            if _digest(before) != progress.checked:  # other runs have gone on since the round began
                check_affordable(limits, before, kind, protocol.mechanism.memory.charged_rounds(progress.rounds))

        def permit(answered: list[Answered], kinds: Mapping[str, str]) -> None:
            if any((other.run, other.round) == (this.run, this.round) for other in answered):
                raise RoundError(f"This client has answered round {this.round} of this run already.")
            _check_turn(protocol, progress, answered, limits)
            check(len(answered), _remembered(answered, kinds, progress, limits))

        if self._memory is None:
            check(progress.answered, _history(progress.spent))
            spent = {**progress.spent, progress.kind: progress.spent.get(progress.kind, 0) + 1}
            self._save(replace(progress, answered=progress.answered + 1, spent=spent))
        else:
            self._save(replace(progress, answered=self._memory.add(this, permit, progress.kind)))

    def _save(self, progress: SessionState) -> None:
        self._progress, self.state = progress, progress.to_bytes()


def _history(spent: Mapping[str, int]) -> History:
    return {RoundKind.from_text(text): count for text, count in spent.items()}


def _remembered(answered: list[Answered], kinds: Mapping[str, str], progress: SessionState, limits: Limits) -> History:
    """Returns how often each kind in a memory is paid for, without the present round.

    Release 0.1.0 wrote the digest of a whole plan down, and no kind: rounds of the present plan are known by it.
    """
    if limits.epsilon is None:
        return {}  # Nothing depends on what they cost.
    found: dict[RoundKind, list[Turn]] = {}
    for each in answered:
        text = progress.kind if each.digest == progress.accepted else kinds.get(each.digest)
        if text is None:
            raise RoundRefusedError(_UNKNOWN)
        found.setdefault(RoundKind.from_text(text), []).append((each.run, each.round))
    present, examples = RoundKind.from_text(progress.kind), limits.examples is not None
    turns = {**found, present: [*found.get(present, []), (progress.run, progress.round)]}
    counts = {
        kind: kind.memory.paid(rounds, protected=bool(kind.examples), examples=examples) - (kind == present)
        for kind, rounds in turns.items()
    }
    return {kind: count for kind, count in counts.items() if count}


def _check_turn(protocol: Protocol, progress: SessionState, answered: list[Answered], limits: Limits) -> None:
    turn, turns = (progress.run, progress.round), ((each.run, each.round) for each in answered)
    protocol.mechanism.memory.check_turn(turn, turns, examples=limits.examples is not None)


def _digest(history: History) -> str:
    text = sorted((kind.digest, count) for kind, count in history.items())
    return hashlib.sha256(repr(text).encode()).hexdigest()


def call_privately(function: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
    """Calls a user's function; an error's text might quote data, so it stays in this machine's log.

    Raises:
        TrainFunctionError: It failed; the message names only the error's type.
    """
    try:
        return function(*args, **kwargs)
    except Exception as error:
        _log.error("The client's function failed.", exc_info=error)
        raise TrainFunctionError(type(error).__name__) from None


def _vector(train: Train, protocol: Protocol) -> NDArray[np.float32]:
    vector = train(protocol)
    if not np.isfinite(vector).all():
        # Dropping out of the round would tell the server something about the data that no guarantee covers.
        _log.error("The update is NaN or infinite somewhere. It counts as zero, and nobody is told.")
        return np.zeros_like(vector)
    return vector
