"""Which nodes are invited, by what they did in earlier rounds of the run.

The rule:

* **Faults.** A node that was at fault (`RoundReport.faults`) in `FAULTS` rounds is not invited again in this run. A
  fault is proved: a message that no honest client sends, or what more others than may collude say they got from it.
* **Accusations** that prove nothing in one round (`RoundReport.accused`) are kept until more nodes than may collude
  have made one: that is a fault in the last of these rounds.
* **Absence.** A node that dropped out of `ABSENCES` rounds in a row without a fault (silence, an error, a refusal) sits
  out the next `REST` rounds, unless the round has too few nodes without it.

So one bad message costs a node nothing, for transports fail, and one that keeps sending them costs the others two
rounds.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from typing import Generic

from cpsgd.federation.server import Node, RoundReport

FAULTS = 2
ABSENCES = 3
REST = 5


class Conduct(Generic[Node]):
    """What is known about the nodes of a run."""

    def __init__(self, colluding: int = 1) -> None:
        """Knows nothing against anybody; so many nodes may lie together."""
        self._colluding = colluding
        self._faults: Counter[Node] = Counter()
        self._absences: Counter[Node] = Counter()
        self._rests_until: dict[Node, int] = {}
        self._accusers: dict[Node, set[Node]] = {}  # by the accused, since its last fault

    def learn(self, report: RoundReport[Node], invited: Iterable[Node]) -> None:
        """Takes what became of a round that these nodes were invited to."""
        for node, accusers in report.accused.items():
            self._accusers.setdefault(node, set()).update(accusers)
        proved = {node for node, accusers in self._accusers.items() if len(accusers) > self._colluding}
        for node in proved | report.faults.keys():
            self._faults[node] += 1
            self._accusers.pop(node, None)
        for node in invited:
            if node not in report.dropped:
                self._absences[node] = 0
            elif node not in report.faults:
                self._absences[node] += 1
                if self._absences[node] >= ABSENCES:
                    self._absences[node] = 0
                    self._rests_until[node] = report.round + REST

    @property
    def excluded(self) -> frozenset[Node]:
        """Nodes that are not invited again."""
        return frozenset(node for node, count in self._faults.items() if count >= FAULTS)

    def resting(self, round: int) -> frozenset[Node]:
        """Nodes that sit this round out if there are enough others."""
        return frozenset(node for node, until in self._rests_until.items() if round <= until)

    def choose(self, connected: Iterable[Node], round: int, *, wanted: int, needed: int) -> list[Node]:
        """Whom to invite: `wanted` nodes drawn at random, those that rest only if there are fewer than `needed`."""
        allowed = [node for node in connected if node not in self.excluded]
        resting = self.resting(round)
        awake = [node for node in allowed if node not in resting]
        if len(awake) < needed:
            missing = min(needed - len(awake), len(allowed) - len(awake))
            awake += random.SystemRandom().sample([node for node in allowed if node in resting], missing)
        return random.SystemRandom().sample(awake, min(wanted, len(awake)))
