"""`RunMemory`: the memory of noise that is correlated over the rounds of a run.

Everything that is proved is about the whole run: one guarantee pays for all rounds
(docs/proofs/correlated-gaussian.md). In a federation:

* *Whole clients* that may be in one round, or in rounds at least s apart, refuse the others, and pay for each run.
* *Examples* that are in one round each, and clients that may be in every round, pay for all runs in which no round was
  answered twice as for one. A server that is stopped goes on under another name of the run: lineages break, and the
  rounds before and after together cost no more than the run (docs/proofs/seeds.md). Where a round is
  answered again, another run is paid for.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from cpsgd.correlated.batons import baton_bytes
from cpsgd.correlated.draws import SEED_BYTES, Lineages, Points
from cpsgd.correlated.run_sums import SimulatedLineages
from cpsgd.errors import ConditionError, ParameterError, RoundRefusedError
from cpsgd.mechanisms.memory import NoiseMemory, Seeds, Turn
from cpsgd.neighbours import Participation

if TYPE_CHECKING:
    from cpsgd.correlated.handover import Handing
    from cpsgd.correlated.mechanism import CorrelatedGaussian
    from cpsgd.correlated.seeds import CarriedNoise, SeedFile

MORE = 2
"""Rounds hold up to this many times the fewest messages of a round, which the accountant knows.

Other rounds, of which a client is not told, have at least one over this many of its own round's (`check_honest`)."""


class ExpandedSeeds(tuple[bytes | None, ...]):
    """Seeds of a lineage, with the noise of one round that follows from them.

    Attributes:
        place: The lineages, round and number of coordinates that the noise is for.
        noise: The noise, in points.
    """

    place: tuple[Lineages, int, int]
    noise: Points

    @classmethod
    def of(cls, lineages: Lineages, seeds: Seeds, round: int, dim: int) -> Self:
        """Expands the seeds into the noise of one round."""
        found = cls(seeds)
        found.place, found.noise = (lineages, round, dim), lineages.noise(seeds, round, dim)
        return found


@dataclass(frozen=True)
class RunMemory(NoiseMemory):
    """The memory of a run.

    Attributes:
        of: The mechanism.
    """

    of: CorrelatedGaussian
    one_event = True

    @property
    def rounds(self) -> int:  # type: ignore[override]
        """Rounds of the run; no others may be run with the protocol."""
        return self.of.run_length

    @property
    def bands(self) -> int:  # type: ignore[override]
        """Number of bands b: noise of a round is taken away over the next b - 1 rounds."""
        return self.of.bands

    @property
    def separation(self) -> int | None:  # type: ignore[override]
        """The least distance of a client's rounds."""
        return self.of.separation

    @property
    def hands_on(self) -> bool:  # type: ignore[override]
        """Whether clients may hand seeds on: the mechanism allows for untrusted holders."""
        return self.of.untrusted_holders is not None

    @property
    def handed_bytes(self) -> int:  # type: ignore[override]
        """The length of a baton, where batons are handed on."""
        return baton_bytes(self.bands) if self.hands_on else 0

    @property
    def echo(self) -> tuple[float, ...] | None:  # type: ignore[override]
        """c_k/‖C‖, by docs/proofs/correlated-gaussian.md, each within a relative error of 10^-7."""
        return tuple((self.of.correlation.coefficients / self.of.correlation.sensitivity).tolist())

    # ------------------------------------------------------------------ a client's state

    def update(self, state: Seeds) -> Seeds:
        """Returns the state with a fresh random seed in front, and of the older seeds the newest b - 1."""
        return (os.urandom(SEED_BYTES), *state)[: self.bands]

    def expanded(self, state: Seeds, round: int, dim: int) -> Seeds:
        """Returns the seeds together with their noise of one round, computed in advance."""
        self.rotation_round(round)
        return ExpandedSeeds.of(self.of.lineages, state, round, dim)

    def inherited(self, seeds: Any, round: int, dim: int) -> Points | None:
        """Returns the noise of a client's lineage in a round (`Lineages.noise`); None to begin a lineage."""
        if seeds is None:
            return None
        self.rotation_round(round)
        lineages = self.of.lineages
        if isinstance(seeds, ExpandedSeeds) and seeds.place == (lineages, round, dim):
            return seeds.noise
        return lineages.noise(seeds, round, dim)

    def simulated(self, seed: int | None, *, restart_every: int | None = None) -> SimulatedLineages:
        """Returns the state of a run whose sums are simulated."""
        return SimulatedLineages(self.of, seed, restart_every)

    # ------------------------------------------------------------------ rounds of the run

    def rotation_round(self, round: int) -> int:
        """Returns 0: there is one rotation for the run, since noise can be taken away only where it was added.

        Raises:
            ParameterError: The run has no such round.
        """
        if round >= self.rounds:
            raise ParameterError(
                f"Expected a round below run_length={self.rounds}, got round={round}: the guarantee is that of a "
                "run of that many rounds. Plan a longer run, or begin a new one with a protocol of its own."
            )
        return 0

    def check_messages(self, count: int, clients: int) -> None:
        """Raises `ParameterError` for more messages than were planned for."""
        if count > clients:
            raise ParameterError(
                f"Expected at most clients={clients} messages in a round of a run with correlated noise, got {count}; "
                "plan for more clients."
            )

    def check_honest(self, honest: int, colluding: int, clients: int) -> None:
        """Raises `ConditionError` if fewer than half of the clients are there, or more collude than may hold seeds."""
        if MORE * honest < clients:
            raise ConditionError(
                f"Of {clients} planned clients {honest} are honest and arrived: with correlated noise at least half "
                "must. Plan for fewer clients."
            )
        holders = self.of.untrusted_holders
        if holders is not None and colluding > holders:
            raise ConditionError(
                f"{colluding} clients per round may collude, and untrusted_holders={holders} of those "
                "who are handed seeds: each colluding client may be one. Plan with as many untrusted_holders."
            )

    def check_run(self, rounds: int, participation: Participation) -> None:
        """Raises `ConditionError` for rounds or participation that the correlation does not cover."""
        if rounds > self.rounds:
            raise ConditionError(
                f"The noise is correlated over a run of {self.rounds:,} rounds, and {rounds:,} are asked about; "
                "plan a longer run, or begin a new one with a protocol of its own."
            )
        if participation.sampled:
            raise ConditionError(
                "Amplification by sampling is not proved for noise that is correlated over rounds; use participation "
                "'once', or independent noise."
            )
        # The sensitivity is that of clients whose rounds are `separation` apart, or further.
        nearest = {"every": 1, "apart": participation.separation}.get(participation.scheme, rounds)
        if nearest < min(rounds, rounds if self.separation is None else self.separation):
            made = "in one of them at most" if self.separation is None else f"at least {self.separation} rounds apart"
            asked = "in every round" if nearest == 1 else f"{nearest} rounds apart"
            raise ConditionError(
                f"The run's noise is for clients that take part {made}, not {asked}: plan for this participation, or "
                "use independent noise."
            )

    def check_stateless(self, reason: str) -> None:
        """Raises `ParameterError`: clients keep seeds."""
        raise ParameterError(reason)

    def check_steady(self, rounds: int, dropout: float, participation: Participation) -> None:
        """Raises `ParameterError` for more rounds than the run has, and for dropouts, which break lineages."""
        if rounds > self.rounds:
            raise ParameterError(
                f"The protocol's noise is correlated over a run of {self.rounds:,} rounds, and rounds={rounds:,} "
                "are to be run: plan with so many rounds."
            )
        if dropout > 0.0:
            raise ParameterError(
                f"dropout={dropout:g}: where noise is correlated over rounds, lineages break when clients drop out, "
                "and that is not simulated. Use dropout=0, or independent noise."
            )

    # ------------------------------------------------------------------ rounds of a federation

    def number(self, round: int) -> int:
        """Returns the number of a federation's round in the run."""
        return round - 1

    def check_plan(self, rounds: int, participation: Participation, *, examples: bool) -> None:
        """Raises `ParameterError` for a plan of more rounds than the run has."""
        if rounds > self.rounds:
            raise ParameterError(
                f"The plan has {rounds} rounds, and its noise is correlated over {self.rounds}; plan again."
            )

    def check_announced(self, rounds: int, *, examples: bool, disjoint: bool) -> None:
        """Raises `RoundRefusedError` for more rounds than the run has, and for examples that are in too many."""
        if examples and self.separation != 1 and not disjoint:
            raise RoundRefusedError(
                "The server's noise is correlated for examples that are in few rounds, and this client's are in all. "
                "Let the train function take a share of them for each round, and say so with disjoint=True."
            )
        if rounds > self.rounds:
            raise RoundRefusedError(
                f"The server announces {rounds} rounds, and its noise is correlated over {self.rounds}."
            )

    def check_turn(self, turn: Turn, answered: Iterable[Turn], *, examples: bool) -> None:
        """Raises `RoundRefusedError` if a round is not of the run, or too near to one that the client was in."""
        (run, round), apart = turn, self.separation
        if not 1 <= round <= self.rounds:
            raise RoundRefusedError(f"The server begins round {round} of a run of {self.rounds} rounds.")
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
        """Returns the number of runs that the answered rounds are charged as; see the module's description."""
        rounds: dict[str, set[int]] = {}
        for run, round in turns:
            rounds.setdefault(run, set()).add(round)
        if self.separation != 1 and not protected:
            return len(rounds)
        if self.separation != 1 and not examples:
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

    def of_client(self, seeds: SeedFile | None, run: str, fingerprint: bytes) -> CarriedNoise:
        """Returns a client's noise in a run, carried in its file of seeds."""
        if seeds is None:
            raise RoundRefusedError(
                "The server's noise is correlated over rounds, for which this client has to keep its seeds: give it a "
                "file for them with cpsgd-memory."
            )
        # Files of seeds know the memories of silos.
        from cpsgd.correlated.seeds import CarriedNoise

        return CarriedNoise(self, seeds, run, fingerprint)

    def handing(self, run: str, fingerprint: bytes) -> Handing[Any] | None:
        """Returns the server's record of lineages, where nodes that leave hand them on."""
        from cpsgd.correlated.handover import Handing

        return Handing(run, fingerprint, self.bands) if self.hands_on else None

    # ------------------------------------------------------------------ charging

    def charged_rounds(self, rounds: int) -> int:
        """Returns 1: the run is one event."""
        return min(rounds, 1)

    def charging(self, participation: Participation, run: str, round: int) -> tuple[Participation, str]:
        """Returns one partition for the run: each round costs as much as the run, and all together cost that once."""
        return Participation.once(), run
