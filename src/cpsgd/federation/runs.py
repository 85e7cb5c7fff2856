"""Runs of correlated noise, as a client counts them: what is proved is about a whole run, and is paid for once.

A client sees to it itself that it takes part as the noise was correlated for, and counts how often it has paid:

* *Whole clients* that may be in one round, or in rounds at least s apart, refuse the others, and pay for each run.
* *Examples* that are in one round each, and clients that may be in every round, pay for all runs in which no round was
  answered twice as for one. A server that is stopped goes on under another name of the run: lineages break, and the
  rounds before and after together cost no more than the run (docs/accounting.md, section 15). Where a round is
  answered again, another run is paid for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cpsgd.errors import RoundRefusedError
from cpsgd.federation.spending import RoundKind
from cpsgd.protocol import Protocol

Turn = tuple[str, int]
"""The engine's name of a run, and the number of a round of it that was answered."""


def check_turn(protocol: Protocol, turn: Turn, answered: Iterable[Turn], *, examples: bool) -> None:
    """Returns if this client may take part in a round, after those that it has answered.

    Raises:
        RoundRefusedError: It is not yet its turn again, or the run has no such round.
    """
    correlation, (run, round) = protocol.mechanism.correlation, turn
    if correlation is None:
        return
    if not 1 <= round <= correlation.rounds:
        raise RoundRefusedError(f"The server begins round {round} of a run of {correlation.rounds} rounds.")
    if examples:
        return
    others = [other for name, other in answered if name == run]
    if correlation.separation is None and others:
        raise RoundRefusedError("The noise is correlated for clients in one round of a run, and this one was in it.")
    if any(abs(round - other) < (correlation.separation or 1) for other in others):
        raise RoundRefusedError(
            f"The noise is correlated for clients whose rounds are at least {correlation.separation} apart, and this "
            "one's would not be."
        )


def paid_runs(kind: RoundKind, turns: Sequence[Turn], *, examples: bool) -> int:
    """How many runs of this kind pay for the rounds that were answered; for independent noise, how many rounds.

    Raises:
        RoundRefusedError: Nothing is proved about them: single examples were protected, and now whole clients are.
    """
    correlation = Protocol.from_json(kind.protocol).mechanism.correlation
    if correlation is None:
        return len(turns)
    rounds: dict[str, set[int]] = {}
    for run, round in turns:
        rounds.setdefault(run, set()).add(round)
    if correlation.separation != 1 and not kind.examples:
        return len(rounds)
    if correlation.separation != 1 and not examples:
        raise RoundRefusedError(
            "This client has answered rounds whose noise was correlated for examples in one of them each, which says "
            "nothing about whole clients. Begin a new memory, with a limit that is smaller by what those rounds cost."
        )
    paid: list[set[int]] = []
    for answered in rounds.values():
        fitting = next((found for found in paid if not found & answered), None)
        if fitting is None:
            paid.append(set(answered))
        else:
            fitting |= answered
    return len(paid)
