"""`Promise`: what was planned with a protocol, in the same file, so that whoever releases a result can be held to it.

A promise is a statement to compare with, never a source of figures: what is true of a release is computed from the
protocol and the number of messages (`cpsgd.privacy.release`), so that editing a promise proves nothing. It is part of
the protocol's fingerprint: messages made under one promise are refused by a server that holds another, or none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Self

from cpsgd import _validate
from cpsgd._numbers import rounded_up
from cpsgd.adjacency import Adjacency
from cpsgd.errors import ParameterError
from cpsgd.participation import Participation

VERSION = 1
"""Version of the block in a protocol file."""

# Rounds and examples beyond that are a slip, or a number that no float holds.
_MOST = 2**32 - 1
_EVERY = Participation.every()
_FIELDS = ("epsilon", "delta", "adjacency", "surviving", "colluding", "rounds", "participation", "unit")


@dataclass(frozen=True, kw_only=True)
class Promise:
    """What all rounds with a protocol are planned to cost, and on which conditions.

    Attributes:
        epsilon: ε that all rounds together cost at most.
        delta: δ of that guarantee.
        surviving: The fewest messages that a round may be released with.
        adjacency: Which data sets are neighbours.
        colluding: Clients per round whose noise does not count.
        rounds: Rounds that the guarantee covers.
        participation: Who takes part in which of them.
        examples: The most examples of a client where one of them is protected; None where the whole client is.

    Example:
        >>> promise = Promise(epsilon=1, delta=1e-6, surviving=5000)
        >>> print(promise)
        ε ≤ 1 at δ = 1e-06 for one client, replace-one neighbours, 1 round of at least 5,000 messages
        >>> Promise.from_dict(promise.to_dict()) == promise
        True
    """

    epsilon: float
    delta: float
    surviving: int
    adjacency: Adjacency = Adjacency.REPLACE_ONE
    colluding: int = 0
    rounds: int = 1
    participation: Participation = _EVERY
    examples: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.participation, Participation):
            raise ParameterError("Expected participation to be a Participation.")
        normal: dict[str, object] = {
            "epsilon": _validate.positive("epsilon", self.epsilon),
            "delta": _validate.probability("delta", self.delta),
            "surviving": _validate.integer("surviving", self.surviving, low=1),
            "adjacency": Adjacency.parse(self.adjacency),
            "colluding": _validate.integer("colluding", self.colluding, low=0),
            "rounds": _validate.integer("rounds", self.rounds, low=1, high=_MOST),
        }
        if self.examples is not None:
            normal["examples"] = _validate.integer("examples", self.examples, low=1, high=_MOST)
        for name, value in normal.items():
            object.__setattr__(self, name, value)
        self.participation.check(self.adjacency)
        if self.colluding >= self.surviving:
            raise ParameterError(
                f"Expected colluding to be less than surviving={self.surviving}, got colluding={self.colluding}: "
                "nobody would be left whose noise protects."
            )
        if self.examples is not None and self.participation.sampled:
            raise ParameterError(
                f"A promise about single examples is for participation 'once' or 'every', not {self.participation}."
            )

    @property
    def unit(self) -> Literal["client", "example"]:
        """What is protected: the whole client, or one of its examples."""
        return "client" if self.examples is None else "example"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, with the version of the block."""
        scheme, rate = self.participation.scheme, self.participation.rate
        examples = {} if self.examples is None else {"examples": self.examples}
        return {
            "version": VERSION,
            **{name: getattr(self, name) for name in _FIELDS},
            "adjacency": str(self.adjacency),
            # In full: a rate with fewer digits would be another one.
            "participation": f"{scheme}:{rate!r}" if self.participation.sampled else scheme,
            **examples,
        }

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """What `to_dict` gave.

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
        wanted = {"version", *_FIELDS} | ({"examples"} if data.get("unit") == "example" else set())
        if set(data) != wanted:
            wrong = sorted(wanted.symmetric_difference(data))
            raise ParameterError(f"A promise has the fields {sorted(wanted)}; missing or unknown: {wrong!r:.200}.")
        _validate.choice("unit", data["unit"], ("client", "example"))
        if not isinstance(data["participation"], str) or not isinstance(data["adjacency"], str):
            raise ParameterError("Expected adjacency and participation of a promise to be text.")
        if data["unit"] == "example" and data["examples"] is None:
            raise ParameterError("A promise about one example says of how many at most: examples is missing.")
        known = {name: value for name, value in data.items() if name not in ("version", "unit")}
        return cls(**{**known, "participation": Participation.parse(data["participation"])})

    def __str__(self) -> str:
        rounds = "1 round" if self.rounds == 1 else f"{self.rounds:,} rounds (participation {self.participation})"
        colluding = f", {self.colluding:,} of them colluding" if self.colluding else ""
        return (
            f"ε ≤ {rounded_up(self.epsilon)} at δ = {self.delta:g} for one {self.unit}, {self.adjacency} neighbours, "
            f"{rounds} of at least {self.surviving:,} messages{colluding}"
        )
