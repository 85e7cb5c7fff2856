"""`RunRules`: what a federation must know about noise that is carried from round to round.

A client checks itself that it takes part as the noise of a run was made for, and counts how often it has paid:

* *Whole clients* that may be in one round, or in rounds at least s apart, refuse the others, and pay for each run.
* *Examples* that are in one round each, and clients that may be in every round, pay for all runs in which no round was
  answered twice as for one. A server that is stopped goes on under another name of the run: lineages break, and the
  rounds before and after together cost no more than the run (docs/proofs/seeds.md). Where a round is
  answered again, another run is paid for.
* Rounds with *independent noise* have no such rules; each is paid for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from cpsgd.correlated.batons import Place
from cpsgd.correlated.draws import SEED_BYTES
from cpsgd.correlated.handover import Handing
from cpsgd.correlated.seeds import SeedFile
from cpsgd.errors import ParameterError, RoundRefusedError
from cpsgd.mechanisms import Mechanism
from cpsgd.mechanisms.memory import NoiseMemory
from cpsgd.neighbours import Participation

Result = TypeVar("Result")

Turn = tuple[str, int]
"""The engine's name of a run, and the number of a round of it that was answered."""


def run_rules(mechanism: Mechanism) -> RunRules:
    """Returns the rules of a run with this mechanism.

    Example:
        >>> from cpsgd.mechanisms import Binomial
        >>> run_rules(Binomial(levels=16, trials=100, coordinate_range=1.0)).number(3)
        3
    """
    return RunRules(mechanism.memory)


@dataclass(frozen=True)
class RunRules:
    """The rules by which the rounds of a run belong together.

    Attributes:
        memory: The memory of the run's noise.
    """

    memory: NoiseMemory

    @property
    def participation(self) -> Literal["every", "once"]:
        """The participation that a run is accounted for."""
        return "every" if self.memory.separation == 1 else "once"

    def separation(self, examples: bool) -> int | None:
        """Returns the smallest distance of two rounds of a node; None if it may be in one only.

        Where single examples are protected, nodes see to it that these are apart, and may be in every round.
        """
        return 1 if examples else self.memory.separation

    def number(self, round: int) -> int:
        """Returns the protocol's number of a round. Federations count from 1, and runs with a memory from 0."""
        return round - 1 if self.memory.one_event else round

    def check_plan(self, rounds: int, participation: Participation, *, examples: bool) -> None:
        """Raises `ParameterError` if a federation cannot run a plan for this number of rounds and participation."""
        if rounds > self.memory.rounds:
            raise ParameterError(
                f"The plan has {rounds} rounds, and its noise is correlated over {self.memory.rounds}; plan again."
            )
        allowed = ("every", "poisson") if examples else ("every",)
        if not self.memory.one_event and participation.scheme not in allowed:
            raise ParameterError(
                f"The plan is for participation '{participation}', and here the same nodes may be in every round; plan "
                'with participation="every", or for single examples with "poisson:RATE".'
            )

    def check_announced(self, rounds: int, *, examples: bool, disjoint: bool) -> None:
        """Raises `RoundRefusedError` if a client cannot take part in a run of this many rounds."""
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
        """Raises `RoundRefusedError` if a client may not take part in a round after those that it has answered."""
        if not self.memory.one_event:
            return
        (run, round), apart = turn, self.memory.separation
        if not 1 <= round <= self.memory.rounds:
            raise RoundRefusedError(f"The server begins round {round} of a run of {self.memory.rounds} rounds.")
        others = [] if examples else [other for name, other in answered if name == run]
        if apart is None:
            if others:
                raise RoundRefusedError(
                    "The noise is correlated for clients in one round of a run, and this one was in it."
                )
        elif any(abs(round - other) < apart for other in others):
            raise RoundRefusedError(
                f"The noise is correlated for clients whose rounds are at least {apart} apart, and this one's would "
                "not be."
            )

    def paid(self, turns: Sequence[Turn], *, protected: bool, examples: bool) -> int:
        """Returns the number of times that the answered rounds are charged.

        Args:
            turns: The rounds, all of one kind.
            protected: Whether single examples were protected in them.
            examples: Whether single examples are protected now.

        Raises:
            RoundRefusedError: Nothing is proved about them: single examples were protected, and now whole clients are.
        """
        if not self.memory.one_event:
            return len(turns)
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

    def init(self, seeds: SeedFile | None, run: str, fingerprint: bytes) -> NoiseState:
        """Returns a client's state of noise in a run.

        Raises:
            RoundRefusedError: The client needs a file to keep it in.
        """
        if self.memory.one_event and seeds is None:
            raise RoundRefusedError(
                "The server's noise is correlated over rounds, for which this client has to keep its seeds: give it a "
                "file for them with cpsgd-memory."
            )
        return NoiseState(self, seeds if self.memory.one_event else None, run, fingerprint)

    def handing(self, run: str, fingerprint: bytes) -> Handing[Any]:
        """Returns the server's record of which node holds which lineage of noise."""
        return Handing(run, fingerprint, self.memory.bands, self.memory.hands_on)


@dataclass(frozen=True)
class NoiseState:
    """The state of a client's noise from round to round of a run; empty without a file of seeds."""

    rules: RunRules
    seeds: SeedFile | None
    run: str
    fingerprint: bytes

    @property
    def memory(self) -> NoiseMemory:
        """The memory of the run's noise."""
        return self.rules.memory

    def _place(self, round: int) -> Place:
        return Place(self.run, self.fingerprint, self.memory.bands, round)

    def check(self, round: int) -> None:
        """Raises `RoundError`, and changes nothing, if the round's noise cannot be drawn."""
        if self.seeds is not None and not self.memory.keeps_rows:
            self.seeds.earlier(self._place(round), handed=self.memory.hands_on)

    def meanwhile(self, round: int, dim: int, train: Callable[[], Result]) -> tuple[Result, Mapping[str, Any]]:
        """Calls `train`; returns its result, and the noise arguments of `Protocol.encode`.

        While `train` runs, another thread expands the seeds. Files change only when `train` has succeeded; the state is
        then the next round's.
        """
        if self.seeds is None:
            return train(), {}
        place, number, handed = self._place(round), self.rules.number(round), self.memory.hands_on
        if self.memory.keeps_rows:
            found = train()
            return found, {"seeds": self.seeds.rows.state(place, number, last=number + 1 >= self.memory.rounds)}
        seeds = os.urandom(SEED_BYTES), *self.seeds.earlier(place, handed=handed)
        with ThreadPoolExecutor(max_workers=1) as pool:
            expanding = pool.submit(self.memory.expanded, seeds, number, dim)
            found = train()
        drawn = self.seeds.draw(place, handed=handed, own=seeds[0])
        expanded = expanding.result()
        # Seeds of earlier rounds may have been handed on while the client trained.
        return found, {"seeds": expanded if expanded == drawn else drawn}
