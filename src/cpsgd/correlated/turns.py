"""`run_rules`: what a federation must know about noise that is carried from round to round.

Independent rounds carry nothing. A run of correlated noise has rules, which a client checks itself:

* *Whole clients* that may be in one round, or in rounds at least s apart, refuse the others, and pay for each run.
* *Examples* that are in one round each, and clients that may be in every round, pay for all runs in which no round was
  answered twice as for one. A server that is stopped goes on under another name of the run: lineages break, and the
  rounds before and after together cost no more than the run (docs/accounting.md, section 15). Where a round is
  answered again, another run is paid for.

Both kinds of rules answer the same questions, so that nobody else asks whether noise is correlated.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from cpsgd.correlated.batons import Place
from cpsgd.correlated.handover import Handing
from cpsgd.correlated.run_memory import RunMemory
from cpsgd.correlated.seeds import SeedFile
from cpsgd.errors import ParameterError, RoundRefusedError
from cpsgd.mechanisms import Mechanism

Node = TypeVar("Node", bound=Hashable)

Turn = tuple[str, int]
"""The engine's name of a run, and the number of a round of it that was answered."""


class NoiseState(Protocol):
    """What a client keeps of its noise from round to round."""

    def check(self, round: int) -> None:
        """Raises `RoundError`, and changes nothing, if `update` would."""

    def update(self, round: int) -> Mapping[str, Any]:
        """Returns what `Protocol.encode` needs beside the vector and the round; the state is then the next round's."""


class RunRules(Protocol):
    """The rules by which the rounds of a run belong together."""

    @property
    def one_event(self) -> bool:
        """Whether all rounds of a run cost what one does."""

    @property
    def participation(self) -> Literal["every", "once"]:
        """The participation that a run is accounted for."""

    def separation(self, examples: bool) -> int | None:
        """Returns how far apart the rounds of a node are at least; None if it may be in one only.

        Where single examples are protected, nodes see to it that these are apart, and may be in every round.
        """

    def check_plan(self, rounds: int, participation: str) -> None:
        """Raises `ParameterError` if a federation cannot run a plan for this number of rounds and participation."""

    def check_announced(self, rounds: int, *, examples: bool, disjoint: bool) -> None:
        """Raises `RoundRefusedError` if a client cannot take part in a run of this many rounds."""

    def check_turn(self, turn: Turn, answered: Iterable[Turn], *, examples: bool) -> None:
        """Raises `RoundRefusedError` if a client may not take part in a round after those that it has answered."""

    def paid(self, turns: Sequence[Turn], *, protected: bool, examples: bool) -> int:
        """Returns how often the rounds that were answered are paid for.

        Args:
            turns: The rounds, all of one kind.
            protected: Whether single examples were protected in them.
            examples: Whether single examples are protected now.
        """

    def covered(self, rounds: int) -> int:
        """Returns how often a payment of this kind was found affordable when `rounds` rounds were announced."""

    def number(self, round: int) -> int:
        """Returns the protocol's number of a federation's round, whose first is 1."""

    def init(self, seeds: SeedFile | None, run: str, fingerprint: bytes) -> NoiseState:
        """Returns a client's state of noise in a run. Raises `RoundRefusedError` if it has nowhere to keep it."""

    def handing(self, run: str, fingerprint: bytes) -> Handing[Any] | NoHanding:
        """Returns the server's record of who holds whose noise."""


def run_rules(mechanism: Mechanism) -> RunRules:
    """Returns the rules of a run with this mechanism.

    Example:
        >>> from cpsgd.mechanisms import Binomial
        >>> run_rules(Binomial(levels=16, trials=100)).number(3)
        3
    """
    memory = mechanism.memory
    return CorrelatedRun(memory) if isinstance(memory, RunMemory) else IndependentRounds()


# ---------------------------------------------------------------------- independent rounds


@dataclass(frozen=True)
class IndependentRounds:
    """Rules of rounds whose noise is independent: there are hardly any."""

    one_event = False
    participation: Literal["every", "once"] = "every"

    def separation(self, examples: bool) -> int | None:
        """Returns 1: a node may be in every round."""
        return 1

    def check_plan(self, rounds: int, participation: str) -> None:
        """Refuses other participation than "every"."""
        if participation != "every":
            raise ParameterError(
                f"The plan is for participation {participation!r}, and here the same nodes may be in every round; plan "
                'with participation="every".'
            )

    def check_announced(self, rounds: int, *, examples: bool, disjoint: bool) -> None:
        """Accepts any number of rounds."""

    def check_turn(self, turn: Turn, answered: Iterable[Turn], *, examples: bool) -> None:
        """Accepts any round."""

    def paid(self, turns: Sequence[Turn], *, protected: bool, examples: bool) -> int:
        """Returns the number of rounds."""
        return len(turns)

    def covered(self, rounds: int) -> int:
        """Returns the number of rounds."""
        return rounds

    def number(self, round: int) -> int:
        """Returns the same number."""
        return round

    def init(self, seeds: SeedFile | None, run: str, fingerprint: bytes) -> NoiseState:
        """Returns a state that is always empty."""
        return _NoState()

    def handing(self, run: str, fingerprint: bytes) -> NoHanding:
        """Returns a record of nothing."""
        return NoHanding()


@dataclass(frozen=True)
class NoHanding:
    """A record of nothing: nobody holds another one's noise."""

    def before(self, round: int, present: Iterable[Any], nodes: Sequence[Any]) -> list[Any]:
        """Returns no exchanges."""
        return []

    def trained(self, nodes: Iterable[Any], round: int) -> None:
        """Notes nothing."""


@dataclass(frozen=True)
class _NoState:
    def check(self, round: int) -> None:
        pass

    def update(self, round: int) -> Mapping[str, Any]:
        return {}


# ---------------------------------------------------------------------- runs of correlated noise


@dataclass(frozen=True)
class CorrelatedRun:
    """Rules of a run whose rounds take noise of earlier ones away.

    Attributes:
        memory: The run's length, the distance of a client's rounds, and whether seeds are handed on.
    """

    memory: RunMemory
    one_event = True

    @property
    def participation(self) -> Literal["every", "once"]:
        """Returns "once", unless a client may be in every round."""
        return "every" if self.memory.separation == 1 else "once"

    def separation(self, examples: bool) -> int | None:
        """Returns the separation that the noise was correlated for; 1 where examples are protected."""
        return 1 if examples else self.memory.separation

    def check_plan(self, rounds: int, participation: str) -> None:
        """Refuses more rounds than the run has."""
        if rounds > self.memory.rounds:
            raise ParameterError(
                f"The plan has {rounds} rounds, and its noise is correlated over {self.memory.rounds}; plan again."
            )

    def check_announced(self, rounds: int, *, examples: bool, disjoint: bool) -> None:
        """Refuses more rounds than the run has, and examples that may be in more rounds than it was made for."""
        if examples and self.memory.separation != 1 and not disjoint:
            raise RoundRefusedError(
                "The server's noise is correlated for examples that are in few rounds, and this client's are in all. "
                "Let the train function take a share of them for each round, and say so with disjoint=True."
            )
        if rounds > self.memory.rounds:
            raise RoundRefusedError(
                f"The server announces {rounds} rounds, and its noise is correlated over {self.memory.rounds}."
            )

    def check_turn(self, turn: Turn, answered: Iterable[Turn], *, examples: bool) -> None:
        """Refuses rounds that are not in the run, or too close to one that this client was in."""
        (run, round), apart = turn, self.memory.separation
        if not 1 <= round <= self.memory.rounds:
            raise RoundRefusedError(f"The server begins round {round} of a run of {self.memory.rounds} rounds.")
        others = [] if examples else [other for name, other in answered if name == run]
        if apart is None and others:
            raise RoundRefusedError(
                "The noise is correlated for clients in one round of a run, and this one was in it."
            )
        if any(abs(round - other) < (apart or 1) for other in others):
            raise RoundRefusedError(
                f"The noise is correlated for clients whose rounds are at least {apart} apart, and this one's would "
                "not be."
            )

    def paid(self, turns: Sequence[Turn], *, protected: bool, examples: bool) -> int:
        """Returns the number of runs that pay for these rounds.

        Raises:
            RoundRefusedError: Nothing is proved about them: single examples were protected, and now whole clients are.
        """
        rounds: dict[str, set[int]] = {}
        for run, round in turns:
            rounds.setdefault(run, set()).add(round)
        if self.memory.separation != 1 and not protected:
            return len(rounds)
        if self.memory.separation != 1 and not examples:
            raise RoundRefusedError(
                "This client has answered rounds whose noise was correlated for examples in one of them each, which "
                "says nothing about whole clients. Begin a new memory, with a limit that is smaller by what those "
                "rounds cost."
            )
        paid: list[set[int]] = []
        for answered in rounds.values():
            fitting = next((found for found in paid if not found & answered), None)
            if fitting is None:
                paid.append(set(answered))
            else:
                fitting |= answered
        return len(paid)

    def covered(self, rounds: int) -> int:
        """Returns 1: the run is paid for as a whole."""
        return 1

    def number(self, round: int) -> int:
        """Returns the number that begins with 0."""
        return round - 1

    def init(self, seeds: SeedFile | None, run: str, fingerprint: bytes) -> NoiseState:
        """Returns the client's lineage in the run, which is kept in its file of seeds."""
        if seeds is None:
            raise RoundRefusedError(
                "The server's noise is correlated over rounds, for which this client has to keep its seeds: give it a "
                "file for them with cpsgd-memory."
            )
        return _Lineage(self, seeds, run, fingerprint)

    def handing(self, run: str, fingerprint: bytes) -> Handing[Any]:
        """Returns the server's record of who holds a lineage."""
        return Handing(run, fingerprint, self.memory.bands, self.memory.hands_on)


@dataclass(frozen=True)
class _Lineage:
    rules: CorrelatedRun
    seeds: SeedFile
    run: str
    fingerprint: bytes

    def _place(self, round: int) -> Place:
        return Place(self.run, self.fingerprint, self.rules.memory.bands, round)

    def check(self, round: int) -> None:
        self.seeds.check(self._place(round), handed=self.rules.memory.hands_on)

    def update(self, round: int) -> Mapping[str, Any]:
        return {"seeds": self.seeds.draw(self._place(round), handed=self.rules.memory.hands_on)}
