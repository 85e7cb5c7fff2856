"""Checks that a sum of messages keeps what was promised with the protocol, before it is released.

Nothing is taken from the promise but the question: for which δ, neighbours, rounds, participation and unit. The ε comes
from the accountant, for the protocol's own parameters and the messages that are really there. Over several rounds it is
the ε of all of them if each ends with as few messages, so that one release never has to know of the others.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from cpsgd._numbers import rounded_up
from cpsgd.errors import CpsgdError, GuaranteeError, ParameterError
from cpsgd.neighbours import check_cohort
from cpsgd.privacy.guarantees import Guarantee, guarantee
from cpsgd.promise import Promise
from cpsgd.protocol import Protocol
from cpsgd.run import Run

# Rounds of one run mostly end with the same few numbers of messages.
_REMEMBERED = 256


@lru_cache(_REMEMBERED)
def check_release(protocol: Protocol, messages: int, *, accept_epsilon: float | None = None) -> Guarantee | None:
    """Returns the guarantee of a release with this many messages; None where the protocol promises nothing.

    Args:
        protocol: The round's parameters, with what was promised for them.
        messages: Number of messages in the sum. Those beyond the promise's `surviving` are not counted: the promise
            is about rounds with that many.
        accept_epsilon: Instead of the promised ε, the largest that is accepted for this release.

    Raises:
        GuaranteeError: The ε that is true is larger, or none is proved. Nothing may be released.
        ParameterError: Nothing was promised that `accept_epsilon` could replace, or a cohort of fixed size is larger
            than planned.
    """
    promise = protocol.promise
    if promise is None:
        if accept_epsilon is not None:
            raise ParameterError(
                f"accept_epsilon={rounded_up(accept_epsilon)} has nothing to compare with: the protocol promises no ε "
                "at any δ. Leave it out, or use a protocol made by `plan`."
            )
        return None
    claim, conditions = promise.claim, promise.conditions
    limit = claim.epsilon if accept_epsilon is None else accept_epsilon
    check_cohort(conditions.participation, messages, conditions.colluding, max(protocol.clients, conditions.surviving))
    fewest = min(messages, conditions.surviving)
    run = Run(protocol, replace(conditions, sizes=((fewest, conditions.rounds),)))
    found = proved(run, claim.delta)
    if isinstance(found, str) or found.epsilon > limit:
        raise _refusal(promise, messages, found, accept_epsilon)
    return found


def _refusal(promise: Promise, messages: int, found: Guarantee | str, accepted: float | None) -> GuaranteeError:
    """Returns the error with the promised ε, the true ε and a remedy."""
    claim, conditions = promise.claim, promise.conditions
    few = messages < conditions.surviving
    text = f"{messages:,} message{'s are' if messages > 1 else ' is'} in the sum, and {claim} was promised"
    text += f" for at least {conditions.surviving:,}." if few else "."
    number = "so few" if few else "so many"
    rounds = f" over {conditions.rounds:,} rounds of {number}" if conditions.rounds > 1 else f" with {number}"
    if isinstance(found, str):
        epsilon = None
        text += f" Nothing is proved{rounds}: {found} Nothing was released; wait for more messages."
    else:
        epsilon, true = found.epsilon, rounded_up(found.epsilon)
        text += f" The ε that is true{rounds} is {true}"
        text += "" if accepted is None else f", and {rounded_up(accepted)} was accepted"
        wait = "wait for more messages, " if few else "plan again, "
        text += f". Nothing was released: {wait}or accept it with accept_epsilon={true} (--accept-epsilon {true})."
    return GuaranteeError(
        text, epsilon=epsilon, promised=claim.epsilon, messages=messages, surviving=conditions.surviving
    )


@lru_cache(_REMEMBERED)
def proved(run: Run, delta: float) -> Guarantee | str:
    """Returns the guarantee of a run, or the error that says why there is none."""
    try:
        return guarantee(run, delta)
    except CpsgdError as error:
        # Beyond the first line it is about each method by itself.
        return str(error).splitlines()[0]
