"""Whether a sum of so many messages keeps what was promised, and what is true of it.

Nothing is taken from the promise but the question: for which δ, neighbours, rounds, participation and unit. The ε comes
from the accountant, for the protocol's own parameters and the messages that are really there. Over several rounds it is
the ε of all of them if each ends with so few messages, so that one release never has to know of the others.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from cpsgd import _validate
from cpsgd._numbers import rounded_up
from cpsgd.errors import CpsgdError, GuaranteeError, ParameterError
from cpsgd.privacy.examples import example_protocol
from cpsgd.privacy.rounds import RoundsGuarantee, guarantee_over_rounds

if TYPE_CHECKING:
    from cpsgd.promise import Promise
    from cpsgd.protocol import Protocol

# Rounds of one run mostly end with the same few numbers of messages.
_REMEMBERED = 256


def check_release(protocol: Protocol, messages: int, *, accept_epsilon: float | None = None) -> RoundsGuarantee | None:
    """What is proved of a release with so many messages; None where the protocol promises nothing.

    Args:
        protocol: The round's parameters, with what was promised for them.
        messages: How many messages are in the sum. Those beyond the promise's `surviving` are not counted: the promise
            is about rounds with so many.
        accept_epsilon: Instead of the promised ε, the largest that is accepted for this release.

    Raises:
        GuaranteeError: The ε that is true is larger, or none is proved. Nothing may be released.
        ParameterError: `accept_epsilon` is no positive number, or nothing was promised that it could replace.
    """
    if accept_epsilon is not None:
        accept_epsilon = _validate.positive("accept_epsilon", accept_epsilon)
    promise = protocol.promise
    if promise is None:
        if accept_epsilon is not None:
            raise ParameterError(
                f"accept_epsilon={rounded_up(accept_epsilon)} has nothing to compare with: the protocol promises no ε "
                "at any δ. Leave it out, or use a protocol made by `plan`."
            )
        return None
    messages = _validate.integer("messages", messages, low=1)
    limit = promise.epsilon if accept_epsilon is None else accept_epsilon
    found = proved(protocol, promise, min(messages, promise.surviving))
    if isinstance(found, str):
        raise GuaranteeError(promise, messages, epsilon=None, accepted=accept_epsilon, reason=found)
    if found.epsilon > limit:
        raise GuaranteeError(promise, messages, epsilon=found.epsilon, accepted=accept_epsilon)
    return found


@lru_cache(_REMEMBERED)
def proved(protocol: Protocol, promise: Promise, messages: int) -> RoundsGuarantee | str:
    """The guarantee of the promised rounds if each ends with so many messages, or why there is none."""
    try:
        found = guarantee_over_rounds(
            protocol if promise.examples is None else example_protocol(protocol, promise.examples),
            promise.delta,
            rounds=promise.rounds,
            participation=promise.participation,
            adjacency=promise.adjacency,
            surviving=messages,
            colluding=promise.colluding,
        )
    except CpsgdError as error:
        # Beyond the first line it is about each method by itself.
        return str(error).splitlines()[0]
    if promise.examples is None:
        return found
    # The paper's theorem would be about sums whose norm is one example's.
    kept = tuple(pair for pair in found.alternatives if not pair[0].startswith("paper-theorem"))
    return replace(found, alternatives=kept)
