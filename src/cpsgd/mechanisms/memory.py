"""`NoiseMemory`: what a mechanism's noise remembers of earlier rounds. Here: nothing, rounds are independent.

Code that runs, counts or charges rounds asks the mechanism's `memory` and has no branch of its own. Noise that later
rounds take away again has another one (`cpsgd.correlated`).

A client's state is a tuple of seeds, as an optimizer has one:

    state = memory.init()
    for round in range(rounds):
        state = memory.update(state)
        message = protocol.encode(vector, round, seeds=state)

In a federation a client checks itself that it takes part as the noise of a run was made for, and counts how often it
has paid. Rounds with independent noise have no such rules, and each is paid for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from cpsgd.errors import ParameterError
from cpsgd.neighbours import Participation

Seeds = tuple[bytes | None, ...]
"""Seeds of a client's noise, newest first: of this round, of the last, and so on; None where one is missing."""

Turn = tuple[str, int]
"""The engine's name of a run, and the number of a round of it that was answered."""

Result = TypeVar("Result")


class ClientNoise:
    """A client's noise in the rounds of a run; this class keeps nothing, for each round's noise is drawn anew."""

    def check(self, round: int) -> None:
        """Raises `RoundError`, and changes nothing, if the round's noise cannot be drawn."""

    def meanwhile(self, round: int, dim: int, train: Callable[[], Result]) -> tuple[Result, Mapping[str, Any]]:
        """Calls `train`; returns its result, and the noise arguments of `Protocol.encode`."""
        return train(), {}


class Simulated:
    """The state of a run whose sums are simulated; this class keeps nothing between rounds.

    Attributes:
        parts: Objects whose state a checkpoint holds, by name.
    """

    parts: Mapping[str, Any] = MappingProxyType({})

    def on_host(self, clients: int, dim: int) -> Any:
        """Returns the source of noise for rounds of `clients` messages; None for the mechanism's independent noise."""
        return None

    def on_device(self, clients: int, dim: int, device: Any) -> Any:
        """Returns the source of noise on a device for rounds of `clients` messages; None for independent noise."""
        return None


class NoiseMemory:
    """The dependence of a mechanism's noise on other rounds of a run; this class is independent noise.

    Attributes:
        rounds: The largest number of rounds of one run.
        bands: Number of rounds that a draw of noise is in.
        separation: The rounds of one client are at least this far apart; 1 where it may be in all, None where it may be
            in one round at most.
        one_event: Whether one guarantee covers all rounds of a run, so that a run is charged as one round.
        hands_on: Whether a client may be handed the seeds of another one's noise.
        steerable: Whether the guarantee needs a server that chooses the next holders of seeds without looking at
            results.
        keeps_rows: Whether a client must keep vectors of its own from round to round, that depend on its data.
        handed_bytes: Bytes of seeds that a client is handed in a round, and hands on.
        echo: Parts of the sensitivity that a vector has in its own round and in those after it, as results show it that
            were made independent; their squares add up to 1 at most. None where the run is not a Gaussian in this form.
    """

    rounds: float = math.inf
    bands: int = 1
    separation: int | None = 1
    one_event: bool = False
    hands_on: bool = False
    steerable: bool = False
    keeps_rows: bool = False
    handed_bytes: int = 0
    echo: tuple[float, ...] | None = (1.0,)

    # ------------------------------------------------------------------ a client's state

    def init(self) -> Seeds:
        """Returns the state of a client that has taken part in no round."""
        return ()

    def update(self, state: Seeds) -> Seeds:
        """Returns the state for the next round, with a fresh seed where noise needs one."""
        return ()

    def expanded(self, state: Any, round: int, dim: int) -> Any:
        """Returns the state with its noise of a round computed in advance, so that encoding does not wait for it.

        Nothing is drawn and nothing is written: it may be called at any time before the message is made.
        """
        return state

    def inherited(self, seeds: Any, round: int, dim: int) -> NDArray[np.int64] | None:
        """Returns the noise that follows from a client's seeds, which its kernel is to add; None for fresh noise.

        Raises:
            ParameterError: Noise does not follow from seeds, or these are not those of a client.
        """
        if seeds:
            raise ParameterError("The noise of this mechanism does not follow from seeds: leave them out.")
        return None

    def encoded(self, seeds: Any, round: int) -> None:
        """Called after a round's message was made with this state, and before it is sent."""

    def simulated(self, seed: int | None, *, restart_every: int | None = None) -> Simulated:
        """Returns the state of a run whose sums are simulated; with a seed, its noise follows from that.

        With `restart_every` no noise is taken away across rounds whose number is a multiple of it.
        """
        return Simulated()

    # ------------------------------------------------------------------ rounds of a run

    def rotation_round(self, round: int) -> int:
        """Returns the round whose rotation is used in a round.

        Raises:
            ParameterError: The run has no such round.
        """
        return round

    def check_messages(self, count: int, clients: int) -> None:
        """Raises `ParameterError` if the accounting does not cover `count` messages in a round for `clients`."""

    def check_honest(self, honest: int, colluding: int, clients: int) -> None:
        """Raises `ConditionError` if the proofs ask more of a round's clients than that one is honest."""

    def check_run(self, rounds: int, participation: Participation) -> None:
        """Raises `ConditionError` if the proofs do not cover this many rounds with this participation."""

    def check_stateless(self, reason: str) -> None:
        """Raises `ParameterError` with this reason if clients must keep state from round to round."""

    def check_steady(self, rounds: int, dropout: float, participation: Participation) -> None:
        """Raises `ParameterError` if a simulated run may not have this many rounds, dropouts or this participation."""

    # ------------------------------------------------------------------ rounds of a federation

    def number(self, round: int) -> int:
        """Returns the protocol's number of a federation's round. Federations count from 1, runs with a memory from 0.

        Example:
            >>> from cpsgd.mechanisms import Binomial
            >>> Binomial(levels=16, trials=100, coordinate_range=1.0).memory.number(3)
            3
        """
        return round

    def check_plan(self, rounds: int, participation: Participation, *, examples: bool) -> None:
        """Raises `ParameterError` if a federation cannot run a plan for this number of rounds and participation."""
        if participation.scheme not in (("every", "poisson") if examples else ("every",)):
            raise ParameterError(
                f"The plan is for participation '{participation}', and here the same nodes may be in every round; plan "
                'with participation="every", or for single examples with "poisson:RATE".'
            )

    def check_announced(self, rounds: int, *, examples: bool, disjoint: bool) -> None:
        """Raises `RoundRefusedError` if a client cannot take part in a run of this many rounds."""

    def check_turn(self, turn: Turn, answered: Iterable[Turn], *, examples: bool) -> None:
        """Raises `RoundRefusedError` if a client may not take part in a round after those that it has answered."""

    def paid(self, turns: Sequence[Turn], *, protected: bool, examples: bool) -> int:
        """Returns the number of times that the answered rounds are charged.

        Args:
            turns: The rounds, all of one kind.
            protected: Whether single examples were protected in them.
            examples: Whether single examples are protected now.

        Raises:
            RoundRefusedError: Nothing is proved about them: single examples were protected, and now whole clients are.
        """
        return len(turns)

    def of_client(self, seeds: Any, run: str, fingerprint: bytes) -> ClientNoise:
        """Returns a client's noise in a run; `seeds` is its file of seeds, if it has one.

        Raises:
            RoundRefusedError: The client needs a file to keep it in.
        """
        return ClientNoise()

    def handing(self, run: str, fingerprint: bytes) -> Any:
        """Returns the server's record of which node holds which lineage of noise; None where none is handed on."""
        return None

    # ------------------------------------------------------------------ charging

    def charged_rounds(self, rounds: int) -> int:
        """Returns the number of rounds that the ledger is charged for a run of `rounds` rounds."""
        return rounds

    def charging(self, participation: Participation, run: str, round: int) -> tuple[Participation, str]:
        """Returns the participation and the partition under which a round of this run is charged.

        Rounds of one partition are disjoint, or one event: together they cost as much as the costliest of them. Where a
        client's rounds are at least s apart, any s consecutive rounds are disjoint.
        """
        if participation.scheme == "apart":
            return Participation.once(), f"{run} pass {round // participation.separation + 1}"
        return participation, run if participation.scheme == "once" else ""


INDEPENDENT = NoiseMemory()
"""The memory of mechanisms whose rounds are independent."""
