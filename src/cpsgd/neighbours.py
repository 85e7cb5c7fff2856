"""Neighbouring data sets (`Adjacency`), and the rounds that a client takes part in (`Participation`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, Self, get_args

from cpsgd import _plain, _validate
from cpsgd.errors import ParameterError

Scheme = Literal["once", "every", "apart", "poisson", "fixed-size"]

# Whoever is drawn still more rarely costs next to nothing. Accounting for a larger rate than the real one is safe.
_SMALLEST_RATE = 1e-7


class Adjacency(StrEnum):
    """Neighbouring data sets.

    A client that vanished altogether would take its noise along, so plain add/remove is not what a sum of noisy
    messages offers.
    """

    REPLACE_ONE = "replace-one"
    """One client's vector is replaced by any other (the paper's notion)."""

    ZERO_OUT = "zero-out"
    """One client's vector is replaced by the zero vector; the client still answers and still adds its noise."""

    @classmethod
    def parse(cls, name: str) -> Adjacency:
        """Returns the adjacency of this name.

        Raises:
            ParameterError: There is none; the message lists the known names.
        """
        try:
            return cls(name)
        except ValueError:
            raise ParameterError(
                f"Expected adjacency to be one of {[str(known) for known in cls]}, got {name!r}."
            ) from None

    @property
    def reach(self) -> float:
        """The largest distance of neighbours' vectors, in radii of the set that vectors are clipped to.

        Two points of a symmetric convex set are at most its diameter apart, a point and zero its radius.
        """
        return {Adjacency.REPLACE_ONE: 2.0, Adjacency.ZERO_OUT: 1.0}[self]

    def distance(self, clip_norm: float, replace_one_distance: float | None = None) -> float:
        """Returns the largest Euclidean distance of two neighbours' vectors: 2D for replace-one, D for zero-out.

        Args:
            clip_norm: D.
            replace_one_distance: A smaller distance that no two clients' vectors exceed, or None. It says nothing of a
                vector and zero.

        Example:
            >>> Adjacency.REPLACE_ONE.distance(1.5), Adjacency.parse("zero-out").distance(1.5)
            (3.0, 1.5)
            >>> Adjacency.REPLACE_ONE.distance(1.5, 2.0), Adjacency.ZERO_OUT.distance(1.5, 2.0)
            (2.0, 1.5)
        """
        largest = self.reach * clip_norm
        if replace_one_distance is None or self is not Adjacency.REPLACE_ONE:
            return largest
        return min(largest, replace_one_distance)


@dataclass(frozen=True)
class Participation:
    """The choice of clients for rounds. Use the constructors `once`, `every`, `apart`, `poisson` and `fixed_size`.

    Attributes:
        scheme: "once": every client takes part in at most one round (disjoint cohorts, the paper's experiment).
            "every": the same clients in every round. "apart": any two rounds of one client are at least `separation`
            rounds apart (several passes over the clients). "poisson": each client's vector enters a round independently
            with probability `rate`. "fixed-size": a round's cohort is a uniformly random subset, a fraction `rate` of
            all.
        rate: The probability that a given client's vector enters a given round, where chance decides.
        separation: For "apart", the least distance of two rounds of one client; 1 for all other schemes.

    Sampling protects only while nobody learns who was drawn. In addition:

    * Poisson is accounted for zero-out neighbours, and the *noise must not depend on the draw*: a client who is
      not drawn counts as one who sends the zero vector with its noise. When only the drawn clients send, a round with
      the client carries more noise than one without, and the amplification theorem does not cover that. So fill the
      cohort with noise-only messages (an encoded zero vector) to a fixed number, and account for that number.
    * Fixed-size sampling is accounted for replace-one neighbours. Every cohort has the same number of messages, hence
      the same noise, and nothing needs filling up.

    Clients may drop out of a sampled round if that has nothing to do with who they are and what they hold; the round is
    accounted with those who remain. Colluding clients know whether they were drawn, or sent noise only. That says
    something about the others, so that the rate that is accounted for is larger (`known_to`).

    Example:
        >>> Participation.parse("poisson:0.01")
        Participation(scheme='poisson', rate=0.01, separation=1)
        >>> Participation.fixed_size(cohort=100, population=10_000).rate
        0.01
        >>> Participation.apart(250).counted_rounds(2500)
        10
    """

    scheme: Scheme
    rate: float = 1.0
    separation: int = 1

    def __post_init__(self) -> None:
        if self.scheme not in get_args(Scheme):
            raise ParameterError(f"Expected scheme to be one of {list(get_args(Scheme))}, got {self.scheme!r}.")
        _validate.integer("separation", self.separation, low=1)
        if self.separation > 1 and self.scheme != "apart":
            raise ParameterError(f"Expected separation=1 for scheme {self.scheme!r}, got {self.separation}.")
        rate = _validate.positive("rate", self.rate, low=_SMALLEST_RATE, high=1.0 + 1e-12)
        if rate > 1.0 or (rate != 1.0 and not self.sampled):
            raise ParameterError(f"Expected rate=1 for scheme {self.scheme!r} and rate <= 1 always, got rate={rate!r}.")

    @classmethod
    def once(cls) -> Self:
        """Lets each client take part in at most one round."""
        return cls("once")

    @classmethod
    def every(cls) -> Self:
        """Lets all clients take part in every round."""
        return cls("every")

    @classmethod
    def apart(cls, separation: int) -> Self:
        """Lets a client take part again after `separation` rounds at the earliest."""
        return cls("apart", separation=separation)

    @classmethod
    def poisson(cls, rate: float) -> Self:
        """Takes each client independently with probability `rate` in each round."""
        return cls("poisson", rate)

    @classmethod
    def fixed_size(cls, *, cohort: int, population: int) -> Self:
        """Takes a uniformly random cohort of `cohort` out of `population` clients in each round."""
        _validate.integer("cohort", cohort, low=1)
        _validate.integer("population", population, low=cohort)
        return cls("fixed-size", cohort / population)

    @classmethod
    def parse(cls, text: str | Participation) -> Participation:
        """Reads "once", "every", "apart:ROUNDS", "poisson:RATE" or "fixed-size:RATE"."""
        if isinstance(text, Participation):
            return text
        name, colon, value = text.partition(":") if isinstance(text, str) else ("", "", "")
        if name not in get_args(Scheme) or (bool(colon) != (name in ("apart", "poisson", "fixed-size"))):
            raise ParameterError(
                'Expected participation "once", "every", "apart:ROUNDS", "poisson:RATE" or "fixed-size:RATE", got '
                f"{text!r}."
            )
        try:
            if name == "apart":
                return cls.apart(int(value))
            rate = float(value) if colon else 1.0
        except ValueError as error:
            if isinstance(error, ParameterError):
                raise
            raise ParameterError(f"Expected a number after the colon, got participation={text!r}.") from None
        return cls(name, rate)  # type: ignore[arg-type]  # the name was checked above

    @property
    def sampled(self) -> bool:
        """Whether chance decides who takes part."""
        return self.scheme in ("poisson", "fixed-size")

    @property
    def secrecy(self) -> str | None:
        """A phrase that names the secret behind sampling; None if the participants may be known."""
        if not self.sampled or self.rate == 1.0:
            return None
        return "who was drawn for a round must stay secret, from everybody who sees a result: ε rests on it"

    def check(self, adjacency: Adjacency | str) -> None:
        """Raises `ParameterError` if the amplification theorem does not cover these neighbours."""
        neighbours = Adjacency.parse(adjacency)
        if self.scheme == "poisson" and neighbours is not Adjacency.ZERO_OUT:
            raise ParameterError(
                "Poisson sampling is accounted for zero-out neighbours; use adjacency='zero-out', or fixed-size "
                "sampling for replace-one."
            )
        if self.scheme == "fixed-size" and neighbours is not Adjacency.REPLACE_ONE:
            raise ParameterError(
                "Fixed-size sampling is accounted for replace-one neighbours (the client drawn instead has a vector of "
                "its own); use adjacency='replace-one', or Poisson sampling for zero-out."
            )

    def known_to(self, colluding: int, messages: int, most: int | None = None) -> Participation:
        """Returns the scheme with the largest rate that colluding clients may know, rounded up.

        Colluders know of themselves who was drawn and who sends noise only. Given that, another client was drawn with
        a probability of at most q s/(s - k). docs/proofs/fixed-size.md has the proof.

        Args:
            colluding: k, colluding clients among the messages of a round. They may be the same share of the population:
                k/s of all clients or, with Poisson sampling, of all but as many as a round has messages.
            messages: s, the fewest messages in a round's sum.
            most: The most messages in a round's sum; s by default.

        Example:
            >>> Participation.parse("fixed-size:0.01").known_to(colluding=10, messages=1000).rate
            0.0101010101...
        """
        if not self.sampled or self.rate == 1.0 or not colluding:
            return self
        if messages <= colluding:
            return Participation(self.scheme)
        rate = self.rate * messages / (messages - colluding) * (1.0 + 1e-15)
        if self.scheme == "poisson":
            return Participation(self.scheme, min(1.0, rate))
        return SeenSampling(self.scheme, min(1.0, rate), 1, rate, colluding, messages if most is None else most)

    def counted_rounds(self, rounds: int) -> int:
        """Returns the largest number of `rounds` rounds that one client's data can influence directly."""
        return min(rounds, 1) if self.scheme == "once" else -(-rounds // self.separation)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain JSON values; omits the separation if unused, as in files of older releases."""
        apart = {"separation": self.separation} if self.scheme == "apart" else {}
        return {"scheme": self.scheme, "rate": self.rate, **apart}

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """Returns the participation that `to_dict` wrote; raises `ParameterError` for anything else."""
        if isinstance(data, Mapping) and data.get("scheme") != "apart":
            data = {**data, "separation": 1} if "separation" not in data else {}
        return _plain.build(cls, data)

    def __str__(self) -> str:
        if self.scheme == "apart":
            return f"apart:{self.separation}"
        return f"{self.scheme}:{self.rate:g}" if self.sampled else self.scheme


def check_cohort(participation: Participation, messages: int, colluding: int, most: int) -> None:
    """Raises `ParameterError` if clients collude and a fixed-size cohort has more messages than were accounted for."""
    if participation.scheme == "fixed-size" and colluding and messages > most:
        raise ParameterError(
            f"A cohort of fixed size has {messages:,} messages, and its sampling is accounted for at most {most:,} "
            "where clients collude. Draw the planned number of clients."
        )


@dataclass(frozen=True)
class SeenSampling(Participation):
    """Fixed-size cohorts as colluding clients see them. Made by `Participation.known_to`.

    `rate` covers every number of colluders in a sum. The fewer of them a sum has, the more noise of others is in it;
    the more, the less likely is it that a given client is.

    Attributes:
        largest: The rate if no colluder is in the sum; a value above 1 means 1.
        colluding: k, the most colluders in a sum.
        most: The most messages in a sum.
    """

    largest: float = 1.0
    colluding: int = 0
    most: int = 1

    def rate_beside(self, colluders: int) -> float:
        """Returns the largest rate where this many colluders are in the sum, rounded up."""
        return min(1.0, self.largest * ((self.most - colluders) / self.most) * (1.0 + 1e-15))

    def to_dict(self) -> dict[str, Any]:
        """Returns plain JSON values."""
        return _plain.to_dict(self)

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """Returns the sampling that `to_dict` wrote; raises `ParameterError` for anything else."""
        return _plain.build(cls, data)
