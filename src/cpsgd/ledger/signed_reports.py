"""A signed report of a ledger's budgets, which others can verify with neither the ledger nor the data.

It holds the head, the budgets, and the number of rounds of each kind that were charged to them: all that ε depends on.
The reader computes ε anew by the same accountant and compares. The signature says who answers for the numbers of
rounds; by the head they can be compared with the ledger later on. The report names populations and partitions, but no
runs and no labels.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cpsgd._plain import canonical
from cpsgd.errors import CpsgdError, ParameterError, ReportError
from cpsgd.ledger import charging
from cpsgd.ledger.chain import Head
from cpsgd.ledger.charging import Total
from cpsgd.ledger.state import State

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

FORMAT = "cpsgd budget report 1"
_FIELDS = {"format", "time", "head", "state", "totals", "key", "signature"}
# Two machines' arithmetic may differ in the last digits.
_CLOSE = 1.0 + 1e-9


@dataclass(frozen=True)
class Report:
    """A report that was verified.

    Attributes:
        head: The ledger's last record when the report was made.
        time: The time, by the author's clock.
        key: Raw public key of the signer.
        totals: What is spent, by population and period, computed anew.
    """

    head: Head
    time: str
    key: bytes
    totals: tuple[Total, ...]


def signed_report(state: State, time: str, identity: Ed25519PrivateKey) -> dict[str, Any]:
    """Returns the report of a ledger's state, as plain JSON values."""
    from cpsgd.secagg.keys import public_bytes

    body = {
        "format": FORMAT,
        "time": time,
        "head": str(state.head),
        "state": json.loads(state.to_text()),
        "totals": [total.to_dict() for total in _totals(state)],
        "key": base64.b64encode(public_bytes(identity)).decode(),
    }
    # As it will be read: tuples as lists.
    body = json.loads(canonical(body))
    return {**body, "signature": base64.b64encode(identity.sign(_signed(body))).decode()}


def check_report(data: object, signers: Iterable[bytes] | None = None) -> Report:
    """Verifies a report's signature, and computes all totals anew.

    Args:
        data: The report, as plain JSON values.
        signers: Raw public keys, one of which must have signed it; None accepts any key.

    Raises:
        ReportError: It is not signed by one of them, was changed, or claims less than its rounds cost.

    Example:
        >>> import tempfile
        >>> from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        >>> from cpsgd.ledger import Budget, Ledger
        >>> with tempfile.TemporaryDirectory() as folder, Ledger(f"{folder}/budgets.ledger") as ledger:
        ...     _ = ledger.create(Budget(population="patients", epsilon=4.0, delta=1e-6))
        ...     sent = ledger.report(Ed25519PrivateKey.generate())
        >>> for total in check_report(sent).totals:
        ...     print(total.population, total.claim, "of", total.limit)
        patients ε = 0 at δ = 1e-06 of 4.0
    """
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    if not isinstance(data, Mapping) or set(data) != _FIELDS or data["format"] != FORMAT:
        raise ReportError(f"It is not a report of this kind ({FORMAT}), or has other fields.")
    body = {name: value for name, value in data.items() if name != "signature"}
    try:
        key, signature = (base64.b64decode(data[name], validate=True) for name in ("key", "signature"))
        Ed25519PublicKey.from_public_bytes(key).verify(signature, _signed(body))
    except (InvalidSignature, ValueError, TypeError, binascii.Error, RecursionError):
        raise ReportError("The report's signature is wrong: it was changed after it was signed.") from None
    if signers is not None and key not in set(signers):
        raise ReportError("The report is signed, but not by a key that was given.")
    try:
        number, _, digest = str(data["head"]).partition(":")
        head = Head(int(number), digest)
        if str(head) != data["head"] or len(bytes.fromhex(digest)) != 32:
            raise ParameterError("it has no head of a ledger")
        state = State.from_text(canonical(body["state"]), head)
        found = _totals(state)
    except (ParameterError, ValueError) as error:
        raise ReportError(f"The report's state is not one that this release reads: {str(error)[:200]}") from None
    except CpsgdError as error:
        raise ReportError(f"Nothing is proved about the report's rounds: {str(error)[:500]}") from None
    claims = data["totals"]
    if not isinstance(claims, list) or len(claims) != len(found):
        raise ReportError("The report's totals are not those of its budgets.")
    for claim, total in zip(claims, found, strict=True):
        expected = json.loads(canonical(total.to_dict()))
        if body["state"]["version"] == 1:
            expected["delta"] = total.limit_delta  # 0.2.0 stated readings of adaptive budgets at a third of their δ
        if not isinstance(claim, Mapping) or any(claim.get(name) != expected[name] for name in _EXACTLY):
            raise ReportError(f"What the report says of {total.population!r} does not follow from its rounds.")
        said = claim.get("epsilon")
        if not isinstance(said, int | float) or not said * _CLOSE >= total.epsilon:
            raise ReportError(
                f"The report claims ε={said!r} for {total.population!r}, and its rounds cost {total.epsilon!r}."
            )
    return Report(head, str(data["time"]), key, tuple(found))


_EXACTLY = ("population", "delta", "adjacency", "unit", "limit", "rounds", "unreleased", "assumptions")


def _totals(state: State) -> list[Total]:
    return [charging.spent(*purse) for purse in state.purses_over_time()]


def _signed(body: Mapping[str, Any]) -> bytes:
    return (f"{FORMAT}\n" + canonical(body)).encode("ascii")
