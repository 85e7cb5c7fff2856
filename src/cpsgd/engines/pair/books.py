"""`Books`: what both servers keep of a task: the store, the open round, who may send, and what pays.

Rounds are closed, charged and revealed by each server for itself, once.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np

from cpsgd.engines.pair.answers import Answer
from cpsgd.engines.pair.key_ring import KeyRing
from cpsgd.engines.pair.store import ReportStore, RoundState, Verdict
from cpsgd.engines.pair.task import PairTask, Secrets
from cpsgd.errors import CpsgdError, ParameterError, StageError, ThresholdError
from cpsgd.secagg.pair.extension import Elements, modular_sum
from cpsgd.secagg.pair.proof import Basis
from cpsgd.secagg.pair.sealing import Role
from cpsgd.secagg.pair.shape import RoundShape
from cpsgd.secagg.pair.upload import TOKEN_BYTES


@dataclass(frozen=True)
class Admitted:
    """The permitted senders, as one server knows them: public keys on a roster, or SHA-256 hashes of tokens."""

    keys: frozenset[bytes] = frozenset()
    tokens: frozenset[bytes] = frozenset()


class RefusedReportError(CpsgdError):
    """A report is refused; the verdict says why."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(f"The report is refused: {verdict.name.lower().replace('_', ' ')}.")
        self.verdict = verdict


class Books:
    """State of one server: the task, the store, the open round's sums, and the list of senders."""

    def __init__(
        self,
        task: PairTask,
        role: Role,
        secrets: Secrets,
        store: ReportStore,
        *,
        admitted: Admitted | None = None,
        charge: Callable[[int, int, bytes], None] | None = None,
        keys: KeyRing | None = None,
    ) -> None:
        """Opens the books; `keys` hold the private keys where `secrets` do not, or where they are to be deleted."""
        if hashlib.sha256(secrets.verification).digest() != task.verification:
            raise ParameterError("The verification key is not the one that the task was made with.")
        if task.admission != "open" and admitted is None:
            raise ParameterError(f"The task admits by {task.admission}: say who may send.")
        self.task, self.role, self.secrets, self.store = task, role, secrets, store
        self.admitted, self.charge = admitted or Admitted(), charge
        self.keys = KeyRing(task, role, secrets) if keys is None else keys
        self.lock = threading.RLock()
        self.current = store.current()
        self.keys.delete_before(self.current)

    @property
    def tokens(self) -> bool:
        """Whether parts begin with a token."""
        return self.task.admission == "tokens"

    def basis(self, shape: RoundShape, report: bytes) -> Basis:
        """Returns the basis for evaluating a report, always at the same secret point."""
        return Basis.of(shape, report, self.secrets.verification)

    def admit(self, sender: bytes, part: bytes, *, before: bool = False) -> tuple[bytes | None, bytes]:
        """Returns the sender by this server's own list, and the part without its token.

        Args:
            sender: The key that a signature is of.
            part: The unsealed part.
            before: Whether the report was admitted before, since the list may have changed.

        Raises:
            RefusedReportError: The sender is not on the list.
        """
        if self.tokens:
            token = hashlib.sha256(part[:TOKEN_BYTES]).digest()
            if not before and token not in self.admitted.tokens:
                raise RefusedReportError(Verdict.NOT_ADMITTED)
            return token, part[TOKEN_BYTES:]
        if self.task.admission == "roster":
            if not before and sender not in self.admitted.keys:
                raise RefusedReportError(Verdict.NOT_ADMITTED)
            return sender, part
        return None, part

    def sent_before(self, round: int, senders: Collection[bytes]) -> set[bytes]:
        """Returns the senders who may not send again: accepted in this round, or in any if each takes part once."""
        return self.store.senders(None if self.task.once else round, senders)

    def check_open(self, round: int) -> RoundState:
        """Returns the state of a round that takes reports.

        Raises:
            RefusedReportError: It takes none: it is closed, full, not yet begun, or no round of the task.
        """
        state = self.store.round(round) if 0 <= round < self.task.rounds else None
        if state is None or round != self.current or state.state != "open":
            raise RefusedReportError(Verdict.ROUND_CLOSED)
        return state

    def close(self, round: int) -> RoundState:
        """Lets no further reports into a round, and begins the next.

        Raises:
            StageError: An earlier round is still open, or it is no round of the task.
        """
        with self.lock:
            if round > self.current or not 0 <= round < self.task.rounds:
                raise StageError(f"Round {round} is not open yet: round {self.current} is.")
            self.store.close_round(round)
            self.current = self.store.current()
            self.keys.delete_before(self.current)
            return self.store.round(round)

    def reveal(self, round: int) -> bytes:
        """Returns this server's sum of a round, with the number of reports and the hash of their ids.

        The budget is charged first, and the server's own messages are drawn and added. Asked again, it returns the
        same bytes, with the same noise: the store keeps the first answer, and no answer is given that it does not keep.

        Raises:
            StageError: The round is still open, or it is no round of the task.
            ThresholdError: Fewer reports were accepted than the protocol's promise needs.
            LedgerError: The budget does not pay.
        """
        with self.lock:
            known = 0 <= round < self.task.rounds
            if known and (before := self.store.answer(round)) is not None:
                return before
            if not known or self.store.round(round).state == "open":
                raise StageError(f"Round {round} is open: close it first.")
            accepted, reports = self.store.round(round).accepted, self.store.digest_of_ids(round)
            if accepted < self.task.surviving:
                raise ThresholdError(f"{accepted} reports were accepted, and {self.task.surviving} are needed.")
            if self.charge is not None:
                self.charge(round, accepted, reports)
            shape, sums = self.task.shape(round), self.store.sums(round)
            if (before := self.store.answer(round)) is not None:
                return before  # another request was faster, and the sums are deleted
        # This may take seconds, and the next round goes on meanwhile; of two answers the store keeps the first.
        sums = modular_sum(sums, own_messages(self.task, round), shape.field.prime)
        return self.store.reveal(round, Answer(accepted, reports, sums).to_bytes(shape))


def own_messages(task: PairTask, round: int) -> Elements:
    """Draws the messages of zero that a server adds, and returns their sum modulo p; zeros where there are none."""
    zero, prime = np.zeros(task.protocol.dim, np.float32), task.shape(round).field.prime
    sums = np.zeros(task.protocol.dim, np.uint64)
    for _ in range(task.server_messages):
        sums += task.protocol.encode_integers(zero, round)
    return (sums % np.uint64(prime)).astype(np.uint32)
