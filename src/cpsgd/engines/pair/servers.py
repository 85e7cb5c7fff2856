"""`Leader` and `Helper`: what each server does with reports, bytes in and bytes out; `service.py` carries the bytes.

A report's way: `Leader.read` opens and checks the uploads of a batch; `Leader.evaluate` keeps them on disk and makes
one request of them; `Helper.verify` decides on each and adds its shares; `Leader.settle` adds the leader's. After a
crash the leader asks again for all that it kept; the helper repeats its verdicts. Rounds are closed, charged, and
revealed by each server for itself, once.
"""

from __future__ import annotations

import hashlib
import logging
import struct
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from cpsgd.codec import pack
from cpsgd.engines.pair.key_ring import KeyRing
from cpsgd.engines.pair.store import Decided, ReportStore, RoundState, Verdict
from cpsgd.engines.pair.task import PairTask, Secrets
from cpsgd.errors import (
    BudgetExceededError,
    BudgetExpiredError,
    CpsgdError,
    EmptyError,
    LedgerError,
    MessageError,
    ParameterError,
    SignatureError,
    StageError,
    StoreError,
    ThresholdError,
)
from cpsgd.ledger import Ledger, RoundEvent
from cpsgd.secagg.pair.extension import Elements, modular_sum
from cpsgd.secagg.pair.proof import Basis, LeaderShare, evaluation_message, open_helper, open_leader, verify
from cpsgd.secagg.pair.sealing import Role, unseal
from cpsgd.secagg.pair.shape import RoundShape
from cpsgd.secagg.pair.upload import TOKEN_BYTES, Upload, check_signature, upload_bytes

logger = logging.getLogger("cpsgd.pair")

MOST_IN_REQUEST = 1024
"""Reports in one request to the helper."""

# Where an upload has the report's id.
_ID = slice(16, 32)
_REQUEST = struct.Struct("<II")
_ENTRY = struct.Struct("<16s32s64sI")
_ANSWER = struct.Struct("<I32s")


@dataclass(frozen=True)
class Admitted:
    """Who may send, as one server knows it: public keys on a roster, or SHA-256 hashes of tokens."""

    keys: frozenset[bytes] = frozenset()
    tokens: frozenset[bytes] = frozenset()


@dataclass(frozen=True, repr=False)
class Prepared:
    """An upload that the leader has read and found in order."""

    upload: Upload
    data: bytes
    sender: bytes | None
    share: LeaderShare

    @property
    def id(self) -> bytes:
        """The report's id."""
        return self.upload.id

    @property
    def digest(self) -> bytes:
        """Digest of the bytes that were sent."""
        return hashlib.sha256(self.data).digest()


class RefusedReportError(CpsgdError):
    """A report is refused; the verdict says why."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(f"The report is refused: {verdict.name.lower().replace('_', ' ')}.")
        self.verdict = verdict


class Books:
    """State that both servers keep: the task, the store, the open round's sums, and who may send."""

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
        """Returns the one point at which a report is ever evaluated."""
        return Basis.of(shape, report, self.secrets.verification)

    def admit(self, sender: bytes, part: bytes, *, before: bool = False) -> tuple[bytes | None, bytes]:
        """Returns who is the sender by this server's own list, and the part without its token.

        Args:
            sender: The key that a signature is of.
            part: The unsealed part.
            before: It was admitted before: the list may be another one now.

        Raises:
            RefusedReportError: Nobody that may send.
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
        """Returns those who may send no more: accepted in this round, or in any where the promise lets them in once."""
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
            StageError: The round is still open.
            ThresholdError: Fewer reports were accepted than the protocol's promise needs.
            LedgerError: The budget does not pay.
        """
        with self.lock:
            if (before := self.store.answer(round)) is not None:
                return before
            if self.store.round(round).state == "open":
                raise StageError(f"Round {round} is open: close it first.")
            accepted, reports = self.store.round(round).accepted, self.store.digest_of_ids(round)
            if accepted < self.task.surviving:
                raise ThresholdError(f"{accepted} reports were accepted, and {self.task.surviving} are needed.")
            if self.charge is not None:
                self.charge(round, accepted, reports)
            prime, sums = self.task.shape(round).field.prime, np.ascontiguousarray(self.store.sums(round))
        # This may take seconds, and the next round goes on meanwhile; of two answers the store keeps the first.
        sums = modular_sum(sums, own_messages(self.task, round), prime)
        return self.store.reveal(round, _ANSWER.pack(accepted, reports) + pack.forward(sums, prime))


def own_messages(task: PairTask, round: int) -> Elements:
    """Draws the messages of zero that a server adds, and returns their sum modulo p; zeros where there are none."""
    zero, prime = np.zeros(task.protocol.dim, np.float32), task.shape(round).field.prime
    sums = np.zeros(task.protocol.dim, np.uint64)
    for _ in range(task.server_messages):
        sums += task.protocol.encode_integers(zero, round)
    return (sums % np.uint64(prime)).astype(np.uint32)


class Leader:
    """The server that clients send to."""

    def __init__(self, books: Books) -> None:
        self.books = books

    def read(self, batch: Sequence[bytes]) -> list[Prepared | Verdict | MessageError]:
        """Reads uploads. Each becomes a report to ask the helper about, a verdict, or the error that it is none.

        The verdict is the one on record where it was decided on before, and one of those that are not put on record
        where it is not for now or not from somebody who may send.
        """
        store = self.books.store
        found: list[Prepared | Verdict | MessageError] = []
        known = store.known({data[_ID] for data in batch})
        for data in batch:
            try:
                upload = Upload.from_bytes(data)
                before = known.get(upload.id)
                if before is not None:
                    same = before[0] == hashlib.sha256(data).digest()
                    found.append(before[1] if same else Verdict.REUSED_ID)
                    continue
                state = self.books.check_open(upload.round)
                if state.accepted >= self.books.task.clients:
                    raise RefusedReportError(Verdict.ROUND_CLOSED)
                found.append(self.open(upload, data))
            except RefusedReportError as refusal:
                found.append(refusal.verdict)
            except MessageError as error:
                found.append(error)
            except StoreError:
                raise
            except Exception:
                # One upload must not hold up those that came with it.
                logger.exception("An upload cannot be read.")
                found.append(MessageError("The upload cannot be read."))
        prepared = [each for each in found if isinstance(each, Prepared)]
        senders = {each.sender for each in prepared if each.sender is not None}
        if not senders:
            return found
        # All that were prepared are of the one round that is open.
        again = self.books.sent_before(prepared[0].upload.round, senders)
        return [Verdict.SENT_BEFORE if isinstance(each, Prepared) and each.sender in again else each for each in found]

    def open(self, upload: Upload, data: bytes, *, before: bool = False) -> Prepared:
        """Opens the leader's part and checks who sent it; `before`: it was admitted before.

        Raises:
            MessageError: It does not open, or holds no shares.
            RefusedReportError: Nobody vouches for it.
        """
        books = self.books
        shape = books.task.shape(upload.round)
        if len(data) != upload_bytes(shape, tokens=books.tokens):
            raise MessageError("The upload has another length than those of the task.")
        part = unseal(books.keys.key(upload.round), upload.leader, shape, upload.id, "leader")
        sender, message = books.admit(upload.sender, part, before=before)
        share = open_leader(shape, upload.id, message)
        if books.task.admission == "roster":
            try:
                check_signature(shape, upload, share.part)
            except SignatureError:
                raise RefusedReportError(Verdict.NOT_ADMITTED) from None
        return Prepared(upload, data, sender, share)

    def restore(self) -> list[Prepared]:
        """Returns the uploads that were on their way when the leader stopped, also of those who may send no more."""
        return [self.open(Upload.from_bytes(data), data, before=True) for data in self.books.store.kept()]

    def evaluate(self, batch: Sequence[Prepared]) -> bytes:
        """Keeps a batch, all of one round, on disk, and returns the request for the helper."""
        books, round = self.books, batch[0].upload.round
        shape = books.task.shape(round)
        books.store.keep(round, [(each.upload.id, each.data) for each in batch])
        parts = [_REQUEST.pack(round, len(batch))]
        for each in batch:
            upload = each.upload
            parts += [
                _ENTRY.pack(upload.id, upload.sender, upload.signature, len(upload.helper)),
                upload.helper,
                evaluation_message(shape, each.share, books.basis(shape, upload.id)),
            ]
        return b"".join(parts)

    def settle(self, batch: Sequence[Prepared], answer: bytes) -> list[Verdict]:
        """Adds what the helper accepted, and returns all verdicts. What is on record already is not added again.

        Raises:
            MessageError: The helper's answer is none to this batch.
        """
        books, round = self.books, batch[0].upload.round
        if len(answer) != len(batch) or any(code not in set(Verdict) for code in answer):
            raise MessageError("The helper's answer does not have one verdict for each report.")
        verdicts = [Verdict(code) for code in answer]
        with books.lock:
            known = set(books.store.known([each.id for each in batch]))
            sums, prime = books.store.sums(round), books.task.shape(round).field.prime
            decided = []
            for each, verdict in zip(batch, verdicts, strict=True):
                if each.id in known:
                    continue
                known.add(each.id)
                if verdict is Verdict.ACCEPTED:
                    sums = modular_sum(np.ascontiguousarray(sums), each.share.values, prime)
                taken = each.sender if verdict is Verdict.ACCEPTED else None
                decided.append(Decided(each.upload.id, taken, each.digest, verdict))
            if decided:
                books.store.settle(round, decided, sums)
        return verdicts


class Helper:
    """The other server: it derives its shares from seeds, decides, and adds."""

    def __init__(self, books: Books) -> None:
        self.books = books

    def verify(self, request: bytes) -> bytes:
        """Decides on a leader's request and returns a verdict for each report, in a byte each.

        Raises:
            MessageError: It is no request.
        """
        books = self.books
        round, entries = self._entries(request)
        shape = books.task.shape(round)
        with books.lock:
            known = books.store.known({entry[0].id for entry in entries})
            state = books.store.round(round)
            is_open = round == books.current and state.state == "open"
            room = books.task.clients - state.accepted
            sums = np.ascontiguousarray(books.store.sums(round))
            verdicts, decided = bytearray(), dict[bytes, Decided]()
            senders: set[bytes] = set()
            for upload, evaluation, digest in entries:
                before = known.get(upload.id) or (
                    (decided[upload.id].digest, decided[upload.id].verdict) if upload.id in decided else None
                )
                if before is not None:
                    verdicts.append(before[1] if before[0] == digest else Verdict.REUSED_ID)
                    continue
                if not is_open or room == 0:
                    verdicts.append(Verdict.ROUND_CLOSED)
                    continue
                sender, values, verdict = self._decide(shape, upload, evaluation, senders)
                if values is not None and verdict is Verdict.ACCEPTED:
                    sums = modular_sum(sums, values, shape.field.prime)
                    room -= 1
                    if sender is not None:
                        senders.add(sender)
                decided[upload.id] = Decided(
                    upload.id, sender if verdict is Verdict.ACCEPTED else None, digest, verdict
                )
                verdicts.append(verdict)
            if decided:
                books.store.settle(round, list(decided.values()), sums)
        return bytes(verdicts)

    def _decide(
        self, shape: RoundShape, upload: Upload, evaluation: bytes, senders: set[bytes]
    ) -> tuple[bytes | None, Elements | None, Verdict]:
        """Opens and verifies the helper's part of a report; returns its sender, its values and the verdict."""
        books = self.books
        try:
            part = unseal(books.keys.key(upload.round), upload.helper, shape, upload.id, "helper")
            sender, seed = books.admit(upload.sender, part)
            if books.task.admission == "roster":
                check_signature(shape, upload, evaluation[:32])
            if sender is not None and (sender in senders or books.sent_before(upload.round, [sender])):
                return sender, None, Verdict.SENT_BEFORE
            share = open_helper(shape, upload.id, seed)
            good = verify(shape, upload.id, share, books.basis(shape, upload.id), evaluation)
        except RefusedReportError as refusal:
            return None, None, refusal.verdict
        except SignatureError:
            return None, None, Verdict.NOT_ADMITTED
        except MessageError:
            return None, None, Verdict.UNREADABLE
        except StoreError:
            raise
        except Exception:
            logger.exception("A report cannot be read.")
            return None, None, Verdict.UNREADABLE
        return sender, share.values, Verdict.ACCEPTED if good else Verdict.OUT_OF_RANGE

    def _entries(self, request: bytes) -> tuple[int, list[tuple[Upload, bytes, bytes]]]:
        """Reads a request: the round, and of each report its upload, evaluations, and the digest of both."""
        if len(request) < _REQUEST.size:
            raise MessageError("The request is cut off.")
        round, count = _REQUEST.unpack_from(request)
        if not (1 <= count <= MOST_IN_REQUEST and round < self.books.task.rounds):
            raise MessageError("The request names an impossible round or number of reports.")
        size, position, found = self.books.task.shape(round).evaluation_bytes, _REQUEST.size, []
        for _ in range(count):
            if position + _ENTRY.size > len(request):
                raise MessageError("The request is cut off.")
            report, sender, signature, length = _ENTRY.unpack_from(request, position)
            middle = position + _ENTRY.size + length
            end = middle + size
            if length > 256 or end > len(request):
                raise MessageError("The request is cut off.")
            upload = Upload(report, round, sender, signature, request[middle - length : middle], b"")
            digest = hashlib.sha256(request[position:end]).digest()
            found.append((upload, request[middle:end], digest))
            position = end
        if position != len(request):
            raise MessageError("The request has bytes after its last report.")
        return round, found


def combine(task: PairTask, round: int, leader: bytes, helper: bytes) -> tuple[Elements, int]:
    """Returns the sum of all clients' integers modulo p, and their number, from both servers' answers.

    Raises:
        MessageError: An answer is malformed, or the servers do not agree on the reports that are in the sum.
    """
    shape = task.shape(round)
    size, found = _ANSWER.size + shape.packed_bytes(shape.dim), []
    for answer in (leader, helper):
        if len(answer) != size:
            raise MessageError(f"Expected an answer of {size} bytes, got {len(answer)}.")
        found.append(
            (*_ANSWER.unpack_from(answer), pack.backward(answer[_ANSWER.size :], shape.dim, shape.field.prime))
        )
    if found[0][:2] != found[1][:2]:
        raise MessageError(
            f"The servers do not agree: the leader has {found[0][0]} reports and the helper {found[1][0]}, or others."
        )
    if found[0][0] < task.surviving:
        raise EmptyError(f"{found[0][0]} reports are in the sum, and {task.surviving} are needed.")
    return modular_sum(found[0][2], found[1][2], shape.field.prime), int(found[0][0])


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
