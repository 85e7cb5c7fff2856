"""`Helper`: the other server, which derives its shares from seeds, decides, and adds; and the leader's requests."""

from __future__ import annotations

import hashlib
import logging
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from cpsgd.engines.pair.books import Books, RefusedReportError
from cpsgd.engines.pair.store import Decided, Verdict
from cpsgd.engines.pair.task import PairTask
from cpsgd.errors import MessageError, SignatureError, StageError
from cpsgd.secagg.pair.extension import Elements, modular_sum
from cpsgd.secagg.pair.proof import open_helper, verify
from cpsgd.secagg.pair.sealing import unseal
from cpsgd.secagg.pair.shape import RoundShape
from cpsgd.secagg.pair.upload import Upload, check_signature

logger = logging.getLogger("cpsgd.pair")

MOST_IN_REQUEST = 1024
"""Reports in one request to the helper."""

_REQUEST = struct.Struct("<II")
_ENTRY = struct.Struct("<16s32s64sI")


@dataclass(frozen=True, repr=False)
class AskedReport:
    """A leader's question about one report: its upload without the leader's part, and the leader's evaluations."""

    upload: Upload
    evaluation: bytes

    @property
    def digest(self) -> bytes:
        """Digest of all that is asked."""
        return hashlib.sha256(self.to_bytes()).digest()

    def to_bytes(self) -> bytes:
        """Returns the question as it is sent."""
        upload = self.upload
        head = _ENTRY.pack(upload.id, upload.sender, upload.signature, len(upload.helper))
        return b"".join((head, upload.helper, self.evaluation))


def write_request(round: int, questions: Sequence[AskedReport]) -> bytes:
    """Returns a request about reports of one round."""
    return b"".join((_REQUEST.pack(round, len(questions)), *(each.to_bytes() for each in questions)))


def read_request(task: PairTask, request: bytes) -> tuple[int, list[AskedReport]]:
    """Returns the round of a request, and what it asks.

    Raises:
        MessageError: It is no request.
    """
    if len(request) < _REQUEST.size:
        raise MessageError("The request is cut off.")
    round, count = _REQUEST.unpack_from(request)
    if not (1 <= count <= MOST_IN_REQUEST and round < task.rounds):
        raise MessageError("The request names an impossible round or number of reports.")
    size, position, found = task.shape(round).evaluation_bytes, _REQUEST.size, []
    for _ in range(count):
        if position + _ENTRY.size > len(request):
            raise MessageError("The request is cut off.")
        report, sender, signature, length = _ENTRY.unpack_from(request, position)
        middle = position + _ENTRY.size + length
        position = middle + size
        if length > 256 or position > len(request):
            raise MessageError("The request is cut off.")
        upload = Upload(report, round, sender, signature, request[middle - length : middle], b"")
        found.append(AskedReport(upload, request[middle:position]))
    if position != len(request):
        raise MessageError("The request has bytes after its last report.")
    return round, found


@dataclass(frozen=True, repr=False)
class _Opened:
    """A valid part for the helper: its seed and its sender."""

    question: AskedReport
    sender: bytes | None
    seed: bytes


class Helper:
    """The other server: it derives its shares from seeds, decides, and adds."""

    def __init__(self, books: Books) -> None:
        self.books = books

    def verify(self, request: bytes) -> bytes:
        """Decides on a leader's request and returns a verdict for each report, in a byte each.

        Raises:
            MessageError: It is no request.
            StageError: An earlier round is still open here: no verdict yet, for the leader would put it on record.
        """
        books = self.books
        round, questions = read_request(books.task, request)
        shape = books.task.shape(round)
        with books.lock:
            if round > books.current:
                raise StageError(f"Round {round} is not open yet: round {books.current} is.")
            known = books.store.known({each.upload.id for each in questions})
            state = books.store.round(round)
            room = books.task.clients - state.accepted if round == books.current and state.state == "open" else 0
            new = [each for each in questions if room and each.upload.id not in known]
            opened = {each.upload.id: self._open(shape, each) for each in reversed(new)}  # of two the first
            senders = {each.sender for each in opened.values() if isinstance(each, _Opened) and each.sender is not None}
            taken = books.sent_before(round, senders)
            sums, verdicts, decided = books.store.sums(round), bytearray(), []
            for each in questions:
                name, digest = each.upload.id, each.digest
                if name in known:
                    verdicts.append(known[name][1] if known[name][0] == digest else Verdict.REUSED_ID)
                    continue
                if room == 0:
                    verdicts.append(Verdict.ROUND_CLOSED)
                    continue
                sender, verdict, values = self._decide(shape, opened[name], taken)
                if values is not None:
                    sums = modular_sum(sums, values, shape.field.prime)
                    room -= 1
                    if sender is not None:
                        taken.add(sender)
                decided.append(Decided(name, sender, digest, verdict))
                known[name] = digest, verdict
                verdicts.append(verdict)
            if decided:
                books.store.settle(round, decided, sums)
        return bytes(verdicts)

    def _open(self, shape: RoundShape, question: AskedReport) -> _Opened | Verdict:
        """Opens a helper's part and checks who sent it."""
        books, upload = self.books, question.upload
        try:
            part = unseal(books.keys.key(upload.round), upload.helper, shape, upload.id, "helper")
            sender, seed = books.admit(upload.sender, part)
            if books.task.admission == "roster":
                check_signature(shape, upload, question.evaluation[:32])
        except Exception as error:
            return _verdict_on(error)
        return _Opened(question, sender, seed)

    def _decide(
        self, shape: RoundShape, opened: _Opened | Verdict, taken: set[bytes]
    ) -> tuple[bytes | None, Verdict, Elements | None]:
        """Verifies a report; returns the verdict, and the sender and values of one that is accepted."""
        if isinstance(opened, Verdict):
            return None, opened, None
        if opened.sender in taken:
            return None, Verdict.SENT_BEFORE, None
        name = opened.question.upload.id
        try:
            share = open_helper(shape, name, opened.seed)
            good = verify(shape, name, share, self.books.basis(shape, name), opened.question.evaluation)
        except Exception as error:
            return None, _verdict_on(error), None
        return (opened.sender, Verdict.ACCEPTED, share.values) if good else (None, Verdict.OUT_OF_RANGE, None)


def _verdict_on(error: Exception) -> Verdict:
    """Returns the verdict for a report that raised an error, so that other reports are not delayed."""
    if isinstance(error, RefusedReportError):
        return error.verdict
    if isinstance(error, SignatureError):
        return Verdict.NOT_ADMITTED
    if not isinstance(error, MessageError):
        logger.error("A report cannot be read.", exc_info=error)
    return Verdict.UNREADABLE
