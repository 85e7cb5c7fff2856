"""The planner's page: the form's question, and its answer in parts, the quick ones first.

First comes a sketch of the mechanisms' estimated errors, as far as a moment allows. The plan itself follows with its
guarantee, then the rest of the sketch. Last come the proved errors, one point of the frontier after the other.
"""

from __future__ import annotations

import json
import math
import shlex
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

from cpsgd._numbers import power, rounded_up, size
from cpsgd.errors import CpsgdError, ParameterError
from cpsgd.mechanisms import Mechanism
from cpsgd.neighbours import Adjacency, Participation
from cpsgd.planner import Plan, Requirements
from cpsgd.planner.planning import plan_for
from cpsgd.planner.problem import Problem
from cpsgd.planner.search import Contest
from cpsgd.planner.utility import utility_warning

# Bits that are looked at; with secure aggregation, those of a modulus that holds a sum.
_BITS = (0.1, 0.25, 0.5, 1.0, math.log2(3.0), 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 16.0)
_SECURE_BITS = (3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 12.0, 14.0, 16.0, 20.0)
# Seconds for the sketch, before the plan is made; the rest of it comes later.
_SKETCHING = 0.15
# Names of schemes that need a rate.
_SAMPLED = ("poisson", "fixed-size")
_REMEMBERED = 2_000
# More than anybody means, and little enough for a computation to end.
_MOST = {"clients": 10**8, "dim": 10**10, "rounds": 10**6}


@dataclass(frozen=True)
class PlanQuestion:
    """The fields of the form; see `Requirements`."""

    clients: int = 10_000
    dim: int = 65_536
    epsilon: float = 2.0
    delta: float = 1e-6
    bits: float | None = None
    rounds: int = 1
    scheme: str = "every"
    rate: float = 0.01
    secure: bool = False

    @classmethod
    def parse(cls, fields: Mapping[str, str]) -> PlanQuestion:
        """Reads the fields of the form; those that are not given keep their defaults.

        Raises:
            ParameterError: A field is not a number, or far out of range.
        """
        scheme = fields.get("scheme", cls.scheme)
        if scheme not in ("every", "once", *_SAMPLED):
            raise ParameterError("Expected who takes part to be every, once, poisson or fixed-size.")
        # A field that is empty is as at first, and a rate that does not count is not looked at.
        names = ("clients", "dim", "epsilon", "delta", "bits", "rounds", *(("rate",) if scheme in _SAMPLED else ()))
        numbers: dict[str, Any] = {
            name: _number(name, text) for name in names if (text := fields.get(name, "").strip())
        }
        return cls(**numbers, scheme=scheme, secure=fields.get("secure") in ("on", "true", "1"))

    @property
    def participation(self) -> str:
        """The participation as the planner takes it, such as "once" or "poisson:0.01"."""
        return f"{self.scheme}:{self.rate:g}" if self.scheme in _SAMPLED else self.scheme

    @property
    def adjacency(self) -> str:
        """Poisson sampling is accounted for zero-out neighbours, all else for replace-one."""
        return str(Adjacency.ZERO_OUT if self.scheme == "poisson" else Adjacency.REPLACE_ONE)

    @property
    def _asked(self) -> dict[str, Any]:
        """Arguments of the planner that differ from its defaults."""
        names = ("clients", "dim", "epsilon", "delta", "bits", "rounds", "participation", "adjacency", "secure")
        usual = Requirements(clients=0, dim=0, epsilon=0.0, delta=0.0)
        asked = {name: getattr(self, name) for name in names}
        return {name: value for name, value in asked.items() if value != getattr(usual, name)}

    @property
    def requirements(self) -> Requirements:
        """The question as the planner takes it."""
        return Requirements(**self._asked | {"participation": Participation.parse(self.participation)})

    @property
    def python(self) -> str:
        """The question as Python code."""
        said = ", ".join(f"{name}={_literal(value)}" for name, value in self._asked.items())
        return f"from cpsgd import plan\n\nbest = plan({said})\nprotocol = best.protocol\n"

    @property
    def command(self) -> str:
        """The question as a command."""
        words = ["cpsgd", "plan"]
        for name, value in self._asked.items():
            text = f"{value:g}" if isinstance(value, float) else str(value)
            words += [f"--{name}"] if value is True else [f"--{name}", text]
        return shlex.join([*words, "--out", "protocol.json"]) + "\n"


def _literal(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:_}"
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _number(name: str, text: str) -> float:
    """Reads a field: a whole number up to its limit for names in `_MOST`, and a finite number otherwise."""
    try:
        value = float(text)
    except ValueError:
        raise ParameterError(f"Expected {name} to be a number.") from None
    if not math.isfinite(value):
        raise ParameterError(f"Expected {name} to be a finite number.")
    if name not in _MOST:
        return value
    if value != math.floor(value) or not 1 <= value <= _MOST[name]:
        raise ParameterError(f"Expected {name} to be a whole number from 1 to {_MOST[name]:,}.")
    return int(value)


# ------------------------------------------------------------------ the answer


@dataclass(frozen=True)
class Estimate:
    """A mechanism's error at a number of bits, over the Gaussian's: estimated or proved."""

    mechanism: str
    bits: float
    ratio: float
    proved: bool = False


@dataclass(frozen=True)
class Sketch:
    """One mechanism's estimated errors, over the numbers of bits."""

    estimates: tuple[Estimate, ...]


@dataclass(frozen=True)
class Found:
    """Proved errors at a number of bits, and the mechanisms without a design there."""

    bits: float
    proved: tuple[Estimate, ...]
    without: tuple[str, ...]


@dataclass(frozen=True)
class Chosen:
    """The plan that was chosen, in words.

    Attributes:
        estimate: Its place on the frontier.
        figures: The key figures, each with its label.
        privacy: What is promised, in a sentence.
        facts: All else, by name.
        warnings: Warnings for users.
        protocol: Its JSON.
    """

    estimate: Estimate
    figures: tuple[tuple[str, str], ...]
    privacy: str
    facts: tuple[tuple[str, str], ...]
    warnings: tuple[str, ...]
    protocol: str


@dataclass(frozen=True)
class Refused:
    """The reason why there is no plan."""

    reason: str


Part = Sketch | Chosen | Found | Refused


def answer(question: PlanQuestion) -> Iterator[Part]:
    """Yields quick sketches of errors, then the plan or its refusal, the other sketches, and the proved errors."""
    bits = _SECURE_BITS if question.secure else _BITS
    any_bits = replace(question, bits=None)  # the frontier is the same whichever bits are chosen
    try:
        # Those that were added last are the quickest to sketch, and mostly the best.
        kinds = list(Problem.of(question.requirements).setting.mechanisms)
        deadline = time.monotonic() + _SKETCHING
        while kinds and time.monotonic() < deadline:
            yield _sketch(any_bits, kinds.pop(), bits)
    except CpsgdError as error:
        yield Refused(str(error))
        return
    try:
        yield chosen(plan_for(question.requirements))
    except CpsgdError as error:
        yield Refused(str(error))
    for kind in reversed(kinds):
        yield _sketch(any_bits, kind, bits)
    for each in bits:
        yield _found(any_bits, each)


@lru_cache(maxsize=_REMEMBERED)
def _sketch(question: PlanQuestion, kind: type[Mechanism], bits: tuple[float, ...]) -> Sketch:
    """Returns estimates of a mechanism's errors; nothing is certified."""
    problem = Problem.of(question.requirements)
    gaussian = problem.gaussian_squared_error
    setting = replace(problem.setting, mechanisms=(kind,))
    # From one bit on the planner prefers integers that anyone may add up.
    promises = {
        each: Contest(setting, problem.target, each).promise for each in bits if each < 1.0 or kind.not_summed is None
    }
    found = (Estimate(kind.name, each, error / gaussian) for each, error in promises.items() if math.isfinite(error))
    return Sketch(tuple(found))


@lru_cache(maxsize=_REMEMBERED)
def _found(question: PlanQuestion, bits: float) -> Found:
    """Returns the errors that the planner proves at this number of bits."""
    problem = Problem.of(question.requirements)
    try:
        design = problem.designs(math.inf, (bits,)).get(bits)
    except CpsgdError:
        design = None
    if design is None:
        return Found(bits, (), tuple(kind.name for kind in problem.setting.mechanisms))
    gaussian = problem.gaussian_squared_error
    proved = [
        Estimate(each.mechanism, bits, each.squared_error / gaussian, proved=True)
        for each in design.considered
        if each.proved and each.squared_error is not None
    ]
    without = [each.mechanism for each in design.considered if each.squared_error is None]
    return Found(bits, tuple(proved), tuple(without))


def chosen(plan: Plan) -> Chosen:
    """Describes a plan in words, for the page."""
    protocol, error, guarantee = plan.protocol, plan.error, plan.guarantee
    mechanism = protocol.mechanism
    share = {name: f"{name} {100.0 * part / error.total:.1f} %" for name, part in asdict(error).items()}
    rounds = f"{plan.rounds:,} rounds" if plan.rounds > 1 else "one round"
    facts = [
        ("Protocol", f"{mechanism.name}: {mechanism.describe()}; scale s = {protocol.scale:.4g}"),
        ("Error", f"{error.total:.4g} expected squared error of a round's mean: {', '.join(share.values())}"),
        ("Gaussian's error", f"{plan.gaussian_squared_error:.4g}, exactly calibrated and sent in real numbers"),
        ("Promise", str(protocol.promise)),
        ("Theorem", guarantee.citation),
        ("Noise of", f"{guarantee.noise_clients:,} clients per round; {guarantee.tail:.2g} of δ pays for the tails"),
        *([] if guarantee.assumption is None else [("Assuming", guarantee.assumption)]),
        *(
            (f"By {method}", result if isinstance(result, str) else f"ε = {rounded_up(result)}")
            for method, result in guarantee.alternatives
        ),
    ]
    if protocol.modulus is not None:
        facts.append(("Modulus", f"{protocol.modulus:,}; overflow in a round: ≤ {plan.overflow_probability:.2g}"))
    secrecy = plan.participation.secrecy
    once = plan.participation.scheme == "once" and plan.rounds > 1
    spoken = (
        utility_warning(plan),
        mechanism.caution,
        "No client may take part in more than one round." if once else None,
        secrecy and secrecy[0].upper() + secrecy[1:] + ".",
    )
    return Chosen(
        estimate=Estimate(mechanism.name, plan.bits, plan.ratio, proved=True),
        figures=(
            (mechanism.name, "mechanism"),
            (f"{protocol.bits_per_coordinate:.4g}", "bits per coordinate"),
            (size(protocol.message_bytes), f"per message; in float32 {size(4 * protocol.dim)}"),
            (f"{plan.ratio:.3f} ×", "the Gaussian mechanism's squared error"),
            (rounded_up(guarantee.epsilon), f"ε proved at δ = {power(guarantee.delta)}, {rounds}"),
        ),
        privacy=_promise_in_words(plan),
        facts=tuple(facts),
        warnings=tuple(warning for warning in spoken if warning),
        protocol=protocol.to_json() + "\n",
    )


def _promise_in_words(plan: Plan) -> str:
    epsilon = plan.guarantee.epsilon
    change = "any other vector" if plan.guarantee.adjacency is Adjacency.REPLACE_ONE else "zero"
    seen = "the result" if plan.rounds == 1 else f"all {plan.rounds:,} results"
    odds = rounded_up(math.exp(min(epsilon, 700.0)), 3)
    return (
        f"Whoever sees {seen} and wonders whether a client sent its own vector or {change} can raise the odds of being "
        f"right by a factor of at most e^ε = {odds}, but for events of probability δ = {power(plan.guarantee.delta)}."
    )
