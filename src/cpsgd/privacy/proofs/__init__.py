"""Proofs in a list: every module of this folder holds some, and the smallest ε wins.

A proof is an object with the questions of `argument.Proof`. To add one, write a module beside this one with a tuple
`PROOFS`; nobody else asks which law a mechanism has.
"""

from __future__ import annotations

import math
import pkgutil
from collections.abc import Iterable
from functools import lru_cache
from importlib import import_module

from cpsgd.errors import ConditionError
from cpsgd.privacy.accountant import Rounds
from cpsgd.privacy.proofs.argument import COMPOSED, Proof, Proved, alone, check, seen_cost
from cpsgd.run import Run

Found = dict[str, Proved | str]
"""Results by the proof's label; a text is the reason why there is none."""


@lru_cache(maxsize=1)
def all_proofs() -> tuple[Proof, ...]:
    """Returns every proof there is, the quickest first."""
    modules = (import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__))
    found = (proof for module in modules for proof in getattr(module, "PROOFS", ()))
    return tuple(sorted(found, key=lambda proof: proof.effort))


def supporting(run: Run) -> list[Proof]:
    """Returns the proofs that may say something about a run, the quickest first; comparisons come last."""
    return [proof for proof in all_proofs() if proof.supports(run)]


def best(run: Run, delta: float) -> tuple[Proof, Proved, Found]:
    """Returns the proof with the smallest ε, what it proves, and the results of the others.

    Args:
        run: About whole clients, checked (`argument.check`).
        delta: δ in total.

    Raises:
        ConditionError: No proof applies; the message says what would help.
    """
    found: Found = {}
    winner: tuple[Proof, Proved] | None = None
    for proof in supporting(run):
        if delta == 0.0 and not proof.pure:
            continue
        below = math.inf if winner is None else winner[1].epsilon
        try:
            proved = proof.epsilon(run, delta, below)
        except ConditionError as reason:
            found[proof.label(run)] = str(reason)
            continue
        found[proof.label(run)] = proved
        if not proof.comparison and proved.epsilon < below:
            winner = proof, proved
    if winner is None:
        comparisons = {proof.label(run) for proof in supporting(run) if proof.comparison}
        reasons = [f"  {label}: {reason}" for label, reason in found.items() if label not in comparisons]
        if alone(run) or not reasons:
            raise ConditionError("\n".join(["No method proves anything about this round.", *reasons]))
        raise ConditionError(str(next(iter(found.values()))))
    return *winner, found


# ------------------------------------------------------------------ rounds as equivalent Gaussians


def round_cost(run: Run, tail: float) -> Rounds:
    """Returns the cost of one of a run's rounds, the one with the fewest messages, with a tail of this mass.

    Raises:
        ConditionError: No proof gives an equivalent Gaussian.
    """
    check(run)
    owner = _owner(run, "cost")
    if owner is None:
        raise ConditionError("These rounds have no equivalent Gaussian.")
    if tail == 0.0 and not owner.pure:
        raise ConditionError("Nothing is proved about these rounds at δ = 0; allow a delta above 0.")
    return seen_cost(run, owner, tail, run.sampling)


def joint_cost(run: Run, tail: float) -> Rounds:
    """Returns the cost of all rounds of a run, smoothed together, with a tail of this mass per round.

    Raises:
        ConditionError: There is no smoothed certificate.
    """
    owner = _owner(run, "joint_cost")
    if owner is None:
        raise ConditionError("These rounds have no smoothed certificate.")
    if tail == 0.0:
        raise ConditionError("Nothing is proved about these rounds at δ = 0; allow a delta above 0.")
    return owner.joint_cost(run, tail)


def joint_suffices(run: Run) -> bool:
    """Returns whether one proof gives both the cost of single rounds and that of all rounds together."""
    return _owner(run, "cost") is _owner(run, "joint_cost")


def _owner(run: Run, name: str) -> Proof | None:
    """Returns the quickest proof of a run that implements the method of this name."""
    default = getattr(Proof, name)
    return next((proof for proof in supporting(run) if getattr(type(proof), name) is not default), None)


def composition_citation(schemes: Iterable[str]) -> str:
    """Returns the theorems behind composing equivalent Gaussians of rounds with these schemes of participation."""
    certificates = [proof.citation for proof in all_proofs() if proof.name in _CERTIFICATES]
    return "; ".join([*certificates, *(COMPOSED[scheme] for scheme in sorted(schemes))])


_CERTIFICATES = ("gaussian-certificate", "smoothed-certificate")
