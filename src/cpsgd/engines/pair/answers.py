"""`Answer`: a server's sum of a round, as bytes; the sum of both; and the ledger that is charged before."""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from cpsgd.codec import pack
from cpsgd.engines.pair.task import PairTask
from cpsgd.errors import BudgetExceededError, BudgetExpiredError, EmptyError, LedgerError, MessageError, ValueRangeError
from cpsgd.ledger import Ledger, RoundEvent
from cpsgd.secagg.pair.extension import Elements, modular_sum
from cpsgd.secagg.pair.sealing import Role
from cpsgd.secagg.pair.shape import RoundShape

_HEAD = struct.Struct("<I32s")


@dataclass(frozen=True, repr=False)
class Answer:
    """A server's sum of a round, with the number of reports in it and the hash of their ids."""

    accepted: int
    reports: bytes
    sums: Elements

    def to_bytes(self, shape: RoundShape) -> bytes:
        """Returns the answer as it is sent."""
        return _HEAD.pack(self.accepted, self.reports) + pack.forward(self.sums, shape.field.prime)

    @classmethod
    def from_bytes(cls, data: bytes, shape: RoundShape) -> Answer:
        """Reads an answer.

        Raises:
            MessageError: It has another length, or holds no sums.
        """
        if len(data) != (size := answer_bytes(shape)):
            raise MessageError(f"Expected an answer of {size} bytes, got {len(data)}.")
        try:
            sums = pack.backward(data[_HEAD.size :], shape.dim, shape.field.prime)
        except ValueRangeError as error:
            raise MessageError(f"The answer holds no sums: {error}") from None
        accepted, reports = _HEAD.unpack_from(data)
        return cls(accepted, reports, sums)


def answer_bytes(shape: RoundShape) -> int:
    """Returns the exact length of every answer of a round."""
    return _HEAD.size + shape.packed_bytes(shape.dim)


def combine(task: PairTask, round: int, leader: bytes, helper: bytes) -> tuple[Elements, int]:
    """Returns the sum of all clients' integers modulo p, and their number, from both servers' answers.

    Raises:
        MessageError: An answer is malformed, or the servers do not agree on the reports that are in the sum.
        EmptyError: Fewer reports are in the sum than the promise needs.
    """
    shape = task.shape(round)
    one, other = (Answer.from_bytes(answer, shape) for answer in (leader, helper))
    if (one.accepted, one.reports) != (other.accepted, other.reports):
        raise MessageError(
            f"The servers do not agree: the leader has {one.accepted} reports, the helper {other.accepted}, or others."
        )
    if one.accepted < task.surviving:
        raise EmptyError(f"{one.accepted} reports are in the sum, and {task.surviving} are needed.")
    return modular_sum(one.sums, other.sums, shape.field.prime), one.accepted


def ledger_charge(task: PairTask, ledger: Ledger, population: str, role: Role) -> Callable[[int, int, bytes], None]:
    """Returns the function that charges a round to a ledger, once, before its sum is revealed.

    Raises:
        ParameterError: The budget is for another unit or adjacency than the task. No round could ever be charged.
        LedgerError: The population has no budget, or the ledger cannot be read.
    """
    conditions = task.conditions
    run = f"pair-{role}-{task.id.hex()}"

    def event(round: int, label: str = "") -> RoundEvent:
        return RoundEvent(
            task.protocol,
            survivors=conditions.surviving,
            participation=conditions.participation,
            partition=run if conditions.participation.scheme == "once" else "",
            colluding=conditions.colluding,
            round=round,
            run=run,
            examples=conditions.examples,
            label=label,
        )

    with suppress(BudgetExceededError, BudgetExpiredError):
        ledger.quote(population, [event(0)])

    def charge(round: int, accepted: int, reports: bytes) -> None:
        entry = ledger.find(population, run=run, round=round)
        if entry is None:
            entry = ledger.reserve(population, event(round, reports.hex()))
        if entry.event.label != reports.hex():
            # The difference of two sums of one round is a single message.
            raise LedgerError(f"Round {round} was paid for with other reports: the store is not the one of that time.")
        if not entry.released:
            # With messages of the servers' own any number of clients may collude: no more honest ones than planned.
            ledger.release(entry, survivors=conditions.surviving if task.server_messages else accepted)

    return charge
