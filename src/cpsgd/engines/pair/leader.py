"""`Leader`: what the server that clients send to does with uploads, bytes in and bytes out.

A report's way: `Leader.read` opens and checks the uploads of a batch; `Leader.evaluate` keeps them on disk and makes
one request of them; `Helper.verify` decides on each and adds its shares; `Leader.settle` adds the leader's. After a
crash the leader asks again for all that it kept; the helper repeats its verdicts.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from cpsgd.engines.pair.books import Books, RefusedReportError
from cpsgd.engines.pair.helper import AskedReport, write_request
from cpsgd.engines.pair.store import Decided, Verdict
from cpsgd.errors import MessageError, SignatureError, StoreError
from cpsgd.secagg.pair.extension import modular_sum
from cpsgd.secagg.pair.proof import Share, evaluation_message, open_leader
from cpsgd.secagg.pair.sealing import unseal
from cpsgd.secagg.pair.upload import ID, Upload, check_signature, upload_bytes

logger = logging.getLogger("cpsgd.pair")

_CODES = frozenset(int(verdict) for verdict in Verdict)


@dataclass(frozen=True, repr=False)
class Prepared:
    """An upload that the leader has read and found in order."""

    upload: Upload
    data: bytes
    sender: bytes | None
    share: Share

    @property
    def id(self) -> bytes:
        """The report's id."""
        return self.upload.id

    @property
    def digest(self) -> bytes:
        """Digest of the bytes that were sent."""
        return hashlib.sha256(self.data).digest()


class Leader:
    """The server that clients send to."""

    def __init__(self, books: Books) -> None:
        self.books = books

    def read(self, batch: Sequence[bytes]) -> list[Prepared | Verdict | MessageError]:
        """Reads uploads. Each becomes a report to ask the helper about, a verdict, or the error that it is none.

        The verdict is the one on record where it was decided on before, and one of those that are not put on record
        where it is not for now or not from somebody who may send. Of two from one sender the first is asked about: the
        helper may take them for two, as each server has tokens of its own.
        """
        store = self.books.store
        found: list[Prepared | Verdict | MessageError] = []
        known = store.known({data[ID] for data in batch})
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
        if not prepared:
            return found
        # All that were prepared are of the one round that is open.
        taken = self._taken(prepared)
        for position, each in enumerate(found):
            if isinstance(each, Prepared) and each.sender is not None:
                if each.sender in taken:
                    found[position] = Verdict.SENT_BEFORE
                taken.add(each.sender)
        return found

    def _taken(self, batch: Sequence[Prepared]) -> set[bytes]:
        """Returns the senders of a batch, all of one round, that may not send again."""
        senders = {each.sender for each in batch if each.sender is not None}
        return self.books.sent_before(batch[0].upload.round, senders)

    def open(self, upload: Upload, data: bytes, *, before: bool = False) -> Prepared:
        """Opens the leader's part and checks who sent it; `before` says that it was admitted earlier.

        Raises:
            MessageError: It does not open, or holds no shares.
            RefusedReportError: The sender is not permitted.
        """
        books = self.books
        shape = books.task.shape(upload.round)
        if len(data) != upload_bytes(shape, tokens=books.tokens):
            raise MessageError("The upload has another length than those of the task.")
        if books.task.admission != "roster" and any(upload.sender + upload.signature):
            raise MessageError("Nobody signs in this task: there is one upload for a report, and this is another.")
        part = unseal(books.keys.key(upload.round), upload.leader, shape, upload.id, "leader", upload.helper)
        sender, message = books.admit(upload.sender, part, before=before)
        share = open_leader(shape, upload.id, message)
        if books.task.admission == "roster":
            try:
                check_signature(shape, upload, share.part)
            except SignatureError:
                raise RefusedReportError(Verdict.NOT_ADMITTED) from None
        return Prepared(upload, data, sender, share)

    def restore(self) -> list[Prepared]:
        """Returns the uploads that were pending when the leader stopped, also from senders no longer permitted."""
        return [self.open(Upload.from_bytes(data), data, before=True) for data in self.books.store.kept()]

    def evaluate(self, batch: Sequence[Prepared], *, restored: bool = False) -> bytes:
        """Keeps a batch, all of one round, on disk unless it is restored, and returns the request for the helper.

        With tokens, only one batch is under way at a time, since the helper may take one sender for two.
        """
        books, round = self.books, batch[0].upload.round
        shape = books.task.shape(round)
        if not restored:
            books.store.keep(round, [(each.upload.id, each.data) for each in batch], alone=books.tokens)
        return write_request(
            round,
            [
                AskedReport(each.upload, evaluation_message(shape, each.share, books.basis(shape, each.id)))
                for each in batch
            ],
        )

    def settle(self, batch: Sequence[Prepared], answer: bytes) -> list[Verdict]:
        """Adds the reports that the helper accepted, and returns all verdicts. Recorded reports are not added again.

        Raises:
            MessageError: The helper's answer is none to this batch.
        """
        books, round = self.books, batch[0].upload.round
        if len(answer) != len(batch) or not set(answer) <= _CODES:
            raise MessageError("The helper's answer does not have one verdict for each report.")
        verdicts = []
        with books.lock:
            known = {name: found for name, (_, found) in books.store.known([each.id for each in batch]).items()}
            sums, prime = books.store.sums(round), books.task.shape(round).field.prime
            decided, taken = [], self._taken(batch)
            for each, verdict in zip(batch, map(Verdict, answer), strict=True):
                if each.id in known:
                    verdicts.append(known[each.id])
                    continue
                if verdict is Verdict.ACCEPTED and each.sender in taken:
                    verdict = Verdict.SENT_BEFORE  # a helper that breaks the rules can spoil a round, and not stop us
                sender = each.sender if verdict is Verdict.ACCEPTED else None
                if verdict is Verdict.ACCEPTED:
                    sums = modular_sum(sums, each.share.values, prime)
                if sender is not None:
                    taken.add(sender)
                known[each.id] = verdict
                verdicts.append(verdict)
                decided.append(Decided(each.upload.id, sender, each.digest, verdict))
            if decided:
                books.store.settle(round, decided, sums)
        return verdicts
