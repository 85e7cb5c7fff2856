"""When a round begins and a stage ends: neither waits for everybody, and neither waits for ever.

* **A round begins** when as many nodes are connected as the plan has clients, or when enough of them (`plan.surviving`)
  have been there for the grace period.
* **A stage ends** when all have answered; or when enough have (`plan.surviving`; after the uploads, a quorum), the
  round can go on with them, and the others have had the grace period or as long again as the first ones took, whichever
  is longer; or at the deadline.

To invite more than are needed, plan for more: `plan(clients=13, dropout=0.3)` invites 13 and needs 9, and as soon as
nine have answered the others are waited for no longer than the grace period.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic

from cpsgd import _validate
from cpsgd.federation.server import Node, ServerSession


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How long to wait for what, in seconds.

    Attributes:
        nodes: For enough nodes to connect; then the round is withheld, and nothing is charged.
        stage: For a stage's answers.
        grace: For the others when enough are there.
    """

    nodes: float = 300.0
    stage: float = 600.0
    grace: float = 10.0

    def __post_init__(self) -> None:
        for name in ("nodes", "stage"):
            _validate.positive(name, getattr(self, name))
        _validate.non_negative("grace", self.grace)


@dataclass
class Gathering:
    """Says when a round may begin; ask it from time to time, with what a monotonic clock says."""

    pace: Pace
    wanted: int
    needed: int
    began: float
    _enough_since: float | None = None

    def over(self, connected: int, now: float) -> bool:
        """Whether to wait no longer: all are there, enough were for a while, or time is up."""
        if connected < self.needed:
            self._enough_since = None
        elif self._enough_since is None:
            self._enough_since = now
        patient = self._enough_since is not None and now - self._enough_since >= self.pace.grace
        return connected >= self.wanted or patient or now - self.began >= self.pace.nodes


@dataclass
class StageClock(Generic[Node]):
    """Ends the open stage of a session in time; ask it from time to time, with what a monotonic clock says."""

    pace: Pace
    session: ServerSession[Node]
    began: float
    _enough_at: float | None = field(default=None)

    def end(self, now: float) -> bool:
        """Closes the stage if it is time to; returns whether it is closed."""
        if not self.session.waiting or now - self.began >= self.pace.stage:
            return self.session.close()
        if self._enough_at is None and self.session.enough:
            self._enough_at = now
        if self._enough_at is None:
            return False
        patience = max(self.pace.grace, self._enough_at - self.began)
        return now - self._enough_at >= patience and self.session.close(early=True)
