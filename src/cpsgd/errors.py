"""Every error cpsgd raises on purpose, in one place.

All are `ValueError`s, so that a caller who only wants "bad input" needs one except clause. No message
ever quotes a private value: a coordinate's position may be named, what stands there may not.
"""

from __future__ import annotations

import base64
from pathlib import Path

from cpsgd._numbers import rounded_down, rounded_up


class CpsgdError(ValueError):
    """Base class of all errors cpsgd raises on purpose."""


class ParameterError(CpsgdError):
    """A parameter is outside the range its formula or format is defined for."""


class ConditionError(CpsgdError):
    """A theorem's condition does not hold, so the number it would give is not a guarantee."""


class GuaranteeError(CpsgdError):
    """A release would not keep what was promised with the protocol, so nothing was released.

    Attributes:
        epsilon: The ε that would be true, at the promise's δ; None where nothing is proved.
        promised: The ε that was promised.
        messages: Messages in the sum.
        surviving: The fewest that the promise allows.
    """

    def __init__(self, text: str, *, epsilon: float | None, promised: float, messages: int, surviving: int) -> None:
        super().__init__(text)
        self.epsilon = epsilon
        self.promised = promised
        self.messages = messages
        self.surviving = surviving


class InfeasibleError(CpsgdError):
    """No protocol meets the requirements; the message names the nearest ones that can be met."""


class VectorError(CpsgdError):
    """A client's vector cannot be encoded (wrong shape, or not finite)."""


class NonFiniteError(VectorError):
    """A vector holds NaN or infinity; `coordinate` is the position of the first such entry."""

    def __init__(self, coordinate: int) -> None:
        super().__init__(
            f"vector is NaN or infinite at coordinate {coordinate}; "
            "clipping would turn it into a number, so it is refused. Repair or drop the update."
        )
        self.coordinate = coordinate


class WireError(CpsgdError):
    """A message (or saved state) from outside is refused. Nothing was changed by it."""


class TruncatedError(WireError):
    """The bytes end before the format says they should."""


class TrailingBytesError(WireError):
    """There are bytes after the end of the message."""


class MagicError(WireError):
    """The bytes do not begin with the magic number of the format."""


class VersionError(WireError):
    """The format version is not one this release reads."""


class DimensionError(WireError):
    """The announced dimension is over the configured limit or not the protocol's."""


class FingerprintError(WireError):
    """The message was made for a protocol with other parameters."""


class RoundError(WireError):
    """The message was made for another round."""


class ChecksumError(WireError):
    """The checksum does not match: the bytes were damaged on the way."""


class ValueRangeError(WireError):
    """A packed value is one that no client following the protocol can send."""


class DuplicateError(WireError):
    """A message with this id was accepted before."""


class BatonError(WireError):
    """A baton of seeds, or a request about one, is refused. A client without one begins its own lineage."""


class EmptyError(CpsgdError):
    """A mean was asked for before any message had been accepted."""


class DataError(CpsgdError):
    """A data set is missing, damaged or not what it should be."""


class TableError(DataError):
    """A table cannot be used: unreadable, empty, or about too few people. Nothing was charged or written."""


class ColumnError(TableError):
    """A column is missing, or holds forbidden values: NaN, infinity, text, several types, nothing within bounds."""


class DamagedFileError(CpsgdError):
    """A file is not as it was written: some of its content was changed, or is gone."""


class StoreError(CpsgdError):
    """A server's store cannot be opened, is of another task or role, or was asked for what it must refuse."""


class CheckpointError(CpsgdError):
    """A run's saved state is damaged, in use, cannot be written, or belongs to a run with other settings."""


class DivergedError(CpsgdError):
    """The model has become NaN or infinite, so that no client can compute an update."""


class SecureAggregationError(CpsgdError):
    """A round of secure aggregation, or one message in it, is refused. Nothing was changed and nothing revealed."""


class StageError(SecureAggregationError):
    """A message or call out of order, repeated, or after the end of the round."""


class MessageError(SecureAggregationError, WireError):
    """A message (or saved state) of secure aggregation is malformed or damaged."""


class SecureVersionError(MessageError, VersionError):
    """The message is of a version of the protocol that this release does not speak."""


class SecureFingerprintError(MessageError, FingerprintError):
    """The message was made for a protocol with other parameters."""


class SecureRoundError(MessageError, RoundError):
    """The message was made for another round, or for another attempt at this one."""


class SenderError(SecureAggregationError):
    """A message from or about a client who has no part in this stage, or addressed to another one."""


class InvitationError(SecureAggregationError):
    """An invitation asks for other parameters than the client agreed to."""


class ShareError(SecureAggregationError):
    """A share of a secret is not what its owner dealt out, or shares do not give the secret.

    Attributes:
        dealer: The client that dealt them, where it is proved that it did so wrongly.
        proof: Of a client that cannot open what another one sealed for it (`cpsgd.secagg.keys`); also in the text.
    """

    def __init__(self, message: str, *, dealer: int | None = None, proof: bytes = b"") -> None:
        super().__init__(f"{message} Proof: {base64.b64encode(proof).decode()}" if proof else message)
        self.dealer, self.proof = dealer, proof


class SignatureError(SecureAggregationError):
    """A signature is missing, wrong, or by somebody who is not on the roster."""


class ThresholdError(SecureAggregationError):
    """Too few clients are left to finish the round, or to let its sum be seen."""


class ImplausibleMeanError(CpsgdError):
    """A mean is larger than any that honest clients' vectors could have."""


class LedgerError(CpsgdError):
    """The privacy ledger refuses something. Nothing was recorded, unless the message says so."""


class BudgetExceededError(LedgerError):
    """A round would cost more than is left of the budget, so it must not run.

    Attributes:
        population: The population whose budget it is.
        limit: ε that may be spent in all.
        spent: ε spent so far.
        total: ε that would be spent with the round.
    """

    def __init__(
        self, population: str, *, limit: float, spent: float, total: float, delta: float, hint: str = ""
    ) -> None:
        left = max(0.0, limit - spent)
        super().__init__(
            f"The budget of {population!r} is ε={rounded_up(limit)} at δ={delta:g}. ε={rounded_up(spent)} is spent, "
            f"{rounded_down(left)} is left; this would bring it to ε={rounded_up(total)}. Nothing was reserved: ask "
            f"for fewer rounds or a smaller ε.{hint and ' '}{hint}"
        )
        self.population = population
        self.limit = limit
        self.spent = spent
        self.total = total


class BudgetExpiredError(LedgerError):
    """The budget's time is over, whatever is left of it."""


class PopulationError(LedgerError):
    """The ledger has no budget for a population, or has one already."""


class EntryError(LedgerError):
    """An entry of the ledger does not allow what was asked: unknown, released before, made twice, too few survivors."""


class LedgerAccessError(LedgerError):
    """The ledger's file is missing, or may not be read or written."""


class LedgerBusyError(LedgerError):
    """Another process kept the ledger locked for longer than the timeout."""


class LedgerStorageError(LedgerError):
    """The disk is full or failed. Nothing may be released on the strength of what was asked for."""


class LedgerFormatError(LedgerError):
    """The file is not a ledger, is damaged, or was written by a newer release."""


class LedgerChainError(LedgerFormatError):
    """The chain of hashes is broken: a record was changed, removed or inserted."""


class WitnessError(LedgerChainError):
    """A ledger does not contain what a witness has seen of it, or the witness is not one."""


class ReportError(CpsgdError):
    """A report about budgets has the wrong signer, or states an ε that does not follow from its rounds."""


class WorkerError(CpsgdError):
    """Workers of one round do not agree, or one of them has no vector to give. Nothing was added up."""


class TransportError(CpsgdError):
    """The transport of the integers failed on the way: a worker is gone, or took too long."""


class RoundRefusedError(CpsgdError):
    """A client refuses a round: it would not get the guarantee it asks for."""


class IdentityFileError(CpsgdError):
    """A file of an identity or a roster cannot be used. The message never quotes what stands in it."""


class UserFunctionError(CpsgdError):
    """Code of the caller's own failed: a model, a loss, a data set, a callback. Its own error is the cause."""

    def __init__(
        self, what: str, error: Exception, consequence: str = "Nothing was charged.", *, quoted: bool = False
    ) -> None:
        """Composes the message, with the first line of the error's text if `quoted`, else with the error's place."""
        place = error.__traceback__
        while place is not None and place.tb_next is not None:
            place = place.tb_next
        said = "" if place is None else f" (in {Path(place.tb_frame.f_code.co_filename).name}, line {place.tb_lineno})"
        if quoted:
            said = f" ({(str(error).splitlines() or [''])[0][:200]})"
        super().__init__(f"{what} failed with {type(error).__name__}{said}. {consequence}")


class TrainFunctionError(CpsgdError):
    """A client's own train function failed. What it said stays on the client: it might quote data."""

    def __init__(self, kind: str) -> None:
        super().__init__(f"The client's function failed ({kind}); its log says why.")
