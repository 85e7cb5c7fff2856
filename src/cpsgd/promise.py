"""Statements about the rounds of a protocol: a `Claim`, the `Conditions` it holds on, and both as a `Promise`.

A promise travels in the protocol's file, so that the server that releases a result can be held to it. It is a statement
to compare with, never a source of figures: the true ε of a release is computed from the protocol and the number of
messages (`cpsgd.privacy.release`), so that editing a promise proves nothing. It is part of the protocol's fingerprint:
messages made under one promise are refused by a server that holds another, or none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, get_args

import numpy as np

from cpsgd import _validate
from cpsgd._numbers import rounded_up
from cpsgd.errors import ParameterError
from cpsgd.neighbours import Adjacency, Participation

VERSION = 1
"""Version of the block in a protocol file."""

Sense = Literal["fixed in advance", "filter", "ex post"]

Surviving = int | Sequence[int] | Mapping[int, int]
"""Messages in the sums: one number for all rounds, one per round, or a mapping from numbers to numbers of rounds."""

# Rounds and examples beyond that are a slip, or a number that no float holds.
_MOST = 2**32 - 1
_MOST_MESSAGES = 2**53
_EVERY = Participation.every()
_FIELDS = ("epsilon", "delta", "adjacency", "surviving", "colluding", "rounds", "participation", "unit")


@dataclass(frozen=True)
class Claim:
    """An (ε, δ) and the sense in which it is meant.

    Attributes:
        epsilon: ε, at least 0.
        delta: δ in [0, 1); 0 for pure differential privacy.
        sense: "fixed in advance": the rounds did not depend on results. "filter": they may have been chosen by looking
            at results, within limits that were fixed in advance. "ex post": ε itself was read off after the fact.

    Example:
        >>> print(Claim(1.0, 1e-6))
        ε = 1 at δ = 1e-06
    """

    epsilon: float
    delta: float
    sense: Sense = "fixed in advance"

    def __post_init__(self) -> None:
        object.__setattr__(self, "epsilon", _validate.non_negative("epsilon", self.epsilon))
        object.__setattr__(self, "delta", _validate.fraction("delta", self.delta))
        _validate.choice("sense", self.sense, get_args(Sense))

    def __str__(self) -> str:
        sense = "" if self.sense == "fixed in advance" else f" ({self.sense})"
        return f"ε = {rounded_up(self.epsilon)} at δ = {self.delta:g}{sense}"


@dataclass(frozen=True)
class Conditions:
    """The rounds that a guarantee is about, whatever the protocol. Use the constructor `of`.

    Attributes:
        sizes: Pairs of a number of messages in the sum and the number of rounds with that many, rising.
        participation: The rounds that a client takes part in.
        adjacency: Which data sets are neighbours.
        colluding: Clients per round whose noise does not count, because they may tell it.
        examples: The most examples of a client where one of them is protected; None where the whole client is. The
            participation is then that of an example: with "poisson:RATE" each client draws among its own, in secret.

    Example:
        >>> rounds = Conditions.of([900, 1000, 1000], colluding=100)
        >>> rounds.sizes, rounds.rounds, rounds.surviving, rounds.honest
        (((900, 1), (1000, 2)), 3, 900, 800)
    """

    sizes: tuple[tuple[int, int], ...]
    participation: Participation = _EVERY
    adjacency: Adjacency = Adjacency.REPLACE_ONE
    colluding: int = 0
    examples: int | None = None

    @classmethod
    def of(
        cls,
        surviving: Surviving,
        *,
        rounds: int | None = None,
        participation: str | Participation = _EVERY,
        adjacency: str | Adjacency = Adjacency.REPLACE_ONE,
        colluding: int = 0,
        examples: int | None = None,
    ) -> Self:
        """Parses and checks conditions given as words and numbers.

        Args:
            surviving: Messages in the sums; see `Surviving`.
            rounds: Number of rounds; by default 1, or as many as `surviving` has entries.
            participation: "once", "every", "apart:ROUNDS", "poisson:RATE", "fixed-size:RATE" or a `Participation`.
            adjacency: "replace-one" or "zero-out". Poisson sampling needs the latter, fixed-size sampling the former.
            colluding: Clients per round who may tell their noise.
            examples: The most examples of a client, where one of them is protected.

        Raises:
            ParameterError: One of them is outside its range, or they contradict each other.
        """
        return cls(
            _sizes(rounds, surviving),
            Participation.parse(participation),
            Adjacency.parse(adjacency),
            colluding,
            examples,
        )

    def __post_init__(self) -> None:
        if not isinstance(self.participation, Participation):
            raise ParameterError("Expected participation to be a Participation.")
        # Proofs take the first of the sizes for the fewest messages.
        object.__setattr__(self, "sizes", _rising(self.sizes))
        object.__setattr__(self, "adjacency", Adjacency.parse(self.adjacency))
        object.__setattr__(self, "colluding", _validate.integer("colluding", self.colluding, low=0))
        _validate.integer("rounds", self.rounds, low=1, high=_MOST)
        self.participation.check(self.adjacency)
        if self.examples is not None:
            object.__setattr__(self, "examples", _validate.integer("examples", self.examples, low=1, high=_MOST))
            if self.participation.scheme not in ("once", "every", "poisson"):
                raise ParameterError(
                    "A guarantee for single examples needs participation 'once', 'every' or 'poisson:RATE', got "
                    f"{self.participation}."
                )

    @property
    def rounds(self) -> int:
        """Number of rounds."""
        return sum(count for _, count in self.sizes)

    @property
    def surviving(self) -> int:
        """The fewest messages of a round."""
        return self.sizes[0][0]

    @property
    def honest(self) -> int:
        """The smallest number of clients in a round whose noise counts; not positive if nobody is protected."""
        return self.surviving - self.colluding

    @property
    def of_one_client(self) -> Conditions:
        """The rounds that count for one client where rounds are independent.

        A client whose rounds are at least s apart is in ⌈T/s⌉ of T rounds at most. It pays no more than one that is in
        as many rounds with the fewest messages, and in all of them.
        """
        if self.participation.scheme != "apart":
            return self
        left, sizes = self.participation.counted_rounds(self.rounds), []
        for size, count in self.sizes:
            sizes += [(size, min(count, left))] if left else []
            left -= min(count, left)
        return replace(self, sizes=tuple(sizes), participation=_EVERY)

    @property
    def of_one_example(self) -> Conditions:
        """These rounds as seen by the proof for one example, which takes the place of a whole client.

        Clients that collude know nothing of what another one draws. So they are left out together with their noise, and
        the rate stays as it is (docs/proofs/sampled-examples.md).
        """
        if self.examples is None or not self.participation.sampled or self.honest < 1:
            return replace(self, examples=None)
        honest = tuple((size - self.colluding, count) for size, count in self.sizes)
        return replace(self, sizes=honest, colluding=0, examples=None)

    @property
    def unit(self) -> Literal["client", "example"]:
        """The protected unit: the whole client, or one of its examples."""
        return "client" if self.examples is None else "example"


def _sizes(rounds: int | None, surviving: Surviving) -> tuple[tuple[int, int], ...]:
    """Returns (messages, rounds with that many), sorted, from any form of `surviving`."""
    if isinstance(surviving, Mapping):
        sizes = _rising(surviving.items())
    elif isinstance(surviving, bytes | bytearray):
        raise ParameterError("Expected surviving to be a number of messages, or one per round, got bytes.")
    elif isinstance(surviving, Sequence | np.ndarray):
        sizes = _rising((size, 1) for size in surviving)
    else:
        return _rising([(surviving, 1 if rounds is None else rounds)])
    entries = sum(count for _, count in sizes)
    if not sizes or rounds not in (None, entries):
        raise ParameterError(
            f"Expected one entry of surviving per round, got {entries} entries for rounds={rounds}; leave rounds out."
        )
    return sizes


def _rising(sizes: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Checks pairs of messages and rounds, merges equal numbers of messages, and sorts them."""
    counted: Counter[int] = Counter()
    for messages, rounds in sizes:
        size = _validate.integer("surviving", messages, low=1, high=_MOST_MESSAGES)
        counted[size] += _validate.integer("rounds", rounds, low=1, high=_MOST)
    return tuple(sorted(counted.items()))


@dataclass(frozen=True)
class Promise:
    """A claim about all rounds with a protocol, and the conditions on which it was made.

    Attributes:
        claim: The (ε, δ) that all rounds together cost at most.
        conditions: The rounds, who takes part in them, and the fewest messages that each may be released with.

    Example:
        >>> promise = Promise(Claim(1, 1e-6), Conditions.of(5000))
        >>> print(promise)
        ε ≤ 1 at δ = 1e-06 for one client, replace-one neighbours, 1 round of at least 5,000 messages
        >>> Promise.from_dict(promise.to_dict()) == promise
        True
    """

    claim: Claim
    conditions: Conditions

    def __post_init__(self) -> None:
        _validate.positive("epsilon", self.claim.epsilon)
        if self.claim.sense != "fixed in advance":
            # Files have no other sense: the claim would be read as a stronger one.
            raise ParameterError(
                f"A promise is made before the rounds: expected a claim fixed in advance, got {self.claim}."
            )
        conditions = self.conditions
        if conditions.honest < 1:
            raise ParameterError(
                f"Expected colluding to be less than surviving={conditions.surviving}, got colluding="
                f"{conditions.colluding}: nobody would be left whose noise protects."
            )
        # A promise is about the fewest messages alone.
        if len(conditions.sizes) > 1:
            raise ParameterError("A promise names one number of messages for all its rounds: the fewest.")

    def to_dict(self) -> dict[str, Any]:
        """Returns plain JSON values, with the version of the block."""
        terms = self.conditions
        scheme, rate = terms.participation.scheme, terms.participation.rate
        return {
            "version": VERSION,
            "epsilon": self.claim.epsilon,
            "delta": self.claim.delta,
            "adjacency": str(terms.adjacency),
            "surviving": terms.surviving,
            "colluding": terms.colluding,
            "rounds": terms.rounds,
            # In full: a rate with fewer digits would be another one.
            "participation": f"{scheme}:{rate!r}" if terms.participation.sampled else str(terms.participation),
            "unit": terms.unit,
            **({} if terms.examples is None else {"examples": terms.examples}),
        }

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """Returns the promise that `to_dict` wrote.

        Raises:
            ParameterError: It is something else, or of a version that this release does not know.
        """
        if not isinstance(data, dict):
            raise ParameterError(f"Expected a protocol's promise to be a JSON object, got {type(data).__name__}.")
        version = data.get("version")
        if isinstance(version, bool) or version != VERSION:
            raise ParameterError(
                f"Expected a promise of version {VERSION}, got version {version!r:.40}; a newer release may read it."
            )
        known = {"version", *_FIELDS} | ({"examples"} if data.get("unit") == "example" else set())
        if set(data) != known:
            wrong = sorted(known.symmetric_difference(data))
            raise ParameterError(f"A promise has the fields {sorted(known)}; missing or unknown: {wrong!r:.200}.")
        _validate.choice("unit", data["unit"], ("client", "example"))
        if not isinstance(data["participation"], str) or not isinstance(data["adjacency"], str):
            raise ParameterError("Expected adjacency and participation of a promise to be text.")
        if data["unit"] == "example" and data["examples"] is None:
            raise ParameterError("A promise about one example says of how many at most: examples is missing.")
        rest = {name: value for name, value in data.items() if name not in ("version", "unit", "epsilon", "delta")}
        _validate.integer("surviving", rest["surviving"], low=1)
        _validate.positive("epsilon", data["epsilon"])
        return cls(Claim(data["epsilon"], data["delta"]), Conditions.of(**rest))

    def __str__(self) -> str:
        terms = self.conditions
        rounds = "1 round" if terms.rounds == 1 else f"{terms.rounds:,} rounds (participation {terms.participation})"
        colluding = f", {terms.colluding:,} of them colluding" if terms.colluding else ""
        return (
            f"ε ≤ {rounded_up(self.claim.epsilon)} at δ = {self.claim.delta:g} for one {terms.unit}, "
            f"{terms.adjacency} neighbours, {rounds} of at least {terms.surviving:,} messages{colluding}"
        )
