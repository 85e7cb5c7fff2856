"""What a run has spent of its privacy budget, round by round, and whether it may go on."""

from __future__ import annotations

import math
from collections.abc import Sequence

from cpsgd import _validate
from cpsgd.errors import ConditionError, InfeasibleError
from cpsgd.learning.cohorts import Cohorts
from cpsgd.privacy.adjacency import Adjacency
from cpsgd.privacy.examples import example_protocol
from cpsgd.privacy.rounds import RoundsGuarantee, guarantee_over_rounds
from cpsgd.protocol import Protocol

# Share of δ that pays for Poisson rounds that draw more clients than there is room for.
OVERFLOW_SHARE = 1e-3
SAMPLED_SIZES = 50
"""With sampling, sizes of rounds are told apart in steps of the planned size over this."""


class Spending:
    """The guarantee of the rounds that were released.

    A round counts with the messages that really arrived: the noise of clients who dropped out protects nobody. With
    Poisson sampling, each round's chance of drawing more clients than messages were set aside for is taken off δ.
    Draws of the others are independent of one client's, and given that they leave room, the noise is the same whether
    the client is drawn or not; so that chance is all that has to be added.

    Attributes:
        survivors: How many messages arrived in each round charged so far.
    """

    def __init__(
        self,
        protocol: Protocol,
        *,
        delta: float,
        epsilon: float | None,
        cohorts: Cohorts,
        adjacency: Adjacency | None = None,
        colluding: int = 0,
        examples: int | None = None,
    ) -> None:
        """Starts with nothing spent.

        Args:
            protocol: What the rounds run with.
            delta: δ of the guarantee, in total.
            epsilon: The most that may be spent; None for no limit.
            cohorts: Who takes part.
            adjacency: Which data sets are neighbours; by default zero-out for Poisson and replace-one otherwise.
            colluding: Clients of a round whose noise does not count because they may tell it.
            examples: None for the privacy of whole clients; the most examples of a client for that of one of them.
        """
        self.protocol = protocol if examples is None else example_protocol(protocol, examples)
        self._of_examples = examples is not None
        self.delta = _validate.probability("delta", delta)
        self.epsilon = None if epsilon is None else _validate.positive("epsilon", epsilon)
        self.participation = cohorts.participation
        self.adjacency: Adjacency = adjacency or ("zero-out" if cohorts.scheme == "poisson" else "replace-one")
        self.participation.check(self.adjacency)
        self.colluding = _validate.integer("colluding", colluding, low=0)
        self.survivors: list[int] = []
        self._messages = cohorts.messages
        self._overflow = cohorts.overflow
        self._floor = 0
        # Rounds repeat, and so does the question what they cost.
        self._last: tuple[object, RoundsGuarantee | None] = (None, None)

    def guarantee(self, survivors: Sequence[int] | None = None) -> RoundsGuarantee | None:
        """The guarantee of the rounds so far, or of rounds with these survivors; None before the first.

        Raises:
            ConditionError: Nothing is proved about them.
        """
        sizes = tuple(self.survivors if survivors is None else survivors)
        if not sizes:
            return None
        if self.participation.scheme == "once":
            # Rounds of other clients cost a client nothing, so the smallest one says it all.
            found = self._proved(self.delta, (min(sizes),))
            return RoundsGuarantee(**{**vars(found), "rounds": len(sizes)})
        left = self.delta - len(sizes) * self._overflow
        if left <= 0.0:
            raise ConditionError(f"{len(sizes):,} rounds spend δ={self.delta:g} on draws of too many clients alone.")
        sizes = tuple(sorted(self.rounded_down(size) for size in sizes))
        found = self._proved(left, sizes)
        return RoundsGuarantee(**{**vars(found), "delta": self.delta, "tail": found.tail + self.delta - left})

    def check(self, rounds: int, survivors: int) -> None:
        """Refuses a run before its first round where the budget does not reach to `rounds` in all.

        Args:
            rounds: Rounds wished in all, those already spent included.
            survivors: Messages that are expected to arrive in each.

        Raises:
            InfeasibleError: The budget is too small; the message says how many rounds it buys.
            ConditionError: Nothing is proved about such rounds.
        """
        wished = self._with(rounds, survivors)
        found = self.guarantee(wished)
        if self.epsilon is not None and found is not None and found.epsilon > self.epsilon:
            missing = self._messages - survivors
            dropout = math.ceil(1e4 * missing / self._messages) / 1e4
            remedy = f" Of {self._messages:,} messages {missing:,} may not arrive: plan with dropout={dropout:g}."
            raise InfeasibleError(
                f"{rounds:,} rounds of {survivors:,} messages cost ε={found.epsilon:.4g} at δ={self.delta:g}; "
                f"the budget ε={self.epsilon:g} buys {self._affordable(rounds, survivors):,}. "
                f"Run fewer rounds, plan with more noise, or allow more.{remedy if missing > 0 else ''}"
            )
        self._floor = survivors

    def affords(self, survivors: int, rounds_left: int) -> bool:
        """Whether a round with so few messages may be released, and `rounds_left` more as planned after it.

        A round that nothing is proved about never may.
        """
        if survivors <= self.colluding:
            return False
        if 0 < self._floor <= survivors:
            return True
        try:
            found = self.guarantee([*self.survivors, survivors, *[self._floor] * rounds_left])
        except ConditionError:
            return False
        return found is not None and (self.epsilon is None or found.epsilon <= self.epsilon)

    def charge(self, survivors: int) -> None:
        """Counts a round that is about to be released."""
        self.survivors.append(survivors)

    def _proved(self, delta: float, sizes: tuple[int, ...]) -> RoundsGuarantee:
        key = delta, sizes
        if key != self._last[0]:
            found = guarantee_over_rounds(
                self.protocol,
                delta,
                participation=self.participation,
                adjacency=self.adjacency,
                surviving=list(sizes),
                colluding=self.colluding,
            )
            if self._of_examples:
                # The paper's theorem would be about sums whose norm is one example's.
                kept = tuple(pair for pair in found.alternatives if not pair[0].startswith("paper-theorem"))
                found = RoundsGuarantee(**{**vars(found), "alternatives": kept})
            self._last = key, found
        assert self._last[1] is not None
        return self._last[1]

    def rounded_down(self, survivors: int) -> int:
        """With sampling, one of few sizes: accounting takes seconds for each, and fewer messages never cost less."""
        step = max(1, self._messages // SAMPLED_SIZES) if self.participation.sampled else 1
        missing = self._messages - survivors
        return max(1, self._messages - -(-missing // step) * step)

    def _with(self, rounds: int, survivors: int) -> list[int]:
        return [*self.survivors, *[survivors] * (rounds - len(self.survivors))]

    def _affordable(self, rounds: int, survivors: int) -> int:
        """The most rounds, under `rounds`, that the budget buys."""
        assert self.epsilon is not None
        most, over = 0, rounds
        while over - most > 1:
            middle = (most + over) // 2
            try:
                found = self.guarantee(self._with(middle, survivors))
                enough = found is None or found.epsilon <= self.epsilon
            except ConditionError:
                enough = False
            most, over = (middle, over) if enough else (most, middle)
        return most
