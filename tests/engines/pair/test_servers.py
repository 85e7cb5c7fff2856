"""What two servers do with reports: counted once, in one sum, whatever is sent again, changed or cut off when."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpsgd import Protocol, plan
from cpsgd.correlated.mechanism import CorrelatedGaussian
from cpsgd.engines.pair.answers import Answer, combine, ledger_charge
from cpsgd.engines.pair.books import Books
from cpsgd.engines.pair.helper import Helper
from cpsgd.engines.pair.leader import Leader, Prepared
from cpsgd.engines.pair.parties import Sender
from cpsgd.engines.pair.store import ReportStore, Verdict
from cpsgd.engines.pair.task import Admission, PairTask, create_task
from cpsgd.errors import (
    EmptyError,
    LedgerError,
    MessageError,
    ParameterError,
    RoundRefusedError,
    SignatureError,
    StageError,
    StoreError,
    ThresholdError,
)
from cpsgd.ledger import Budget, Ledger
from cpsgd.neighbours import Adjacency, Participation
from cpsgd.secagg.pair.upload import Upload, check_signature

from .local import CLIENTS, DIM, Pair, protocol

CORRELATED = CorrelatedGaussian(
    noise_deviation=8.0, step=0.25, window=128, coordinate_range=0.5, bands=3, run_length=40
)

GOOD = int(Verdict.ACCEPTED)
SAMPLED = ("fixed-size:0.1", "poisson:0.1")
ADMISSIONS = pytest.mark.parametrize("admission", ["open", "roster", "tokens"])


def result(pair: Pair, round: int = 0) -> tuple[np.ndarray, int]:
    """The sum that the collector gets."""
    for books in (pair.leader.books, pair.helper.books):
        books.close(round)
    return combine(pair.task, round, *(books.reveal(round) for books in (pair.leader.books, pair.helper.books)))


@ADMISSIONS
def test_reports_add_up_over_rounds(tmp_path: Path, admission: Any) -> None:
    pair = Pair(tmp_path, admission)
    generator = np.random.default_rng(1)
    for round in range(2):
        values = generator.integers(0, 2, (9, DIM)).astype(np.uint32)
        first = [pair.upload(i, values[i], round) for i in range(4)]
        rest = [pair.upload(i, values[i], round) for i in range(4, 9)]
        assert pair.send(*first) + pair.send(*rest) == [GOOD] * 9
        sums, count = result(pair, round)
        assert count == 9
        assert np.array_equal(sums, values.sum(axis=0))
    assert pair.send(pair.upload(0, round=1)) == [int(Verdict.ROUND_CLOSED)]


def test_the_mean_is_that_of_the_vectors(tmp_path: Path) -> None:
    """Noise and all: what the protocol decodes is what its aggregator would."""
    pair, one = Pair(tmp_path), protocol()
    values = [one.encode_integers(np.full(DIM, 0.1), 0) for _ in range(CLIENTS)]
    pair.send(*(pair.upload(i, integers) for i, integers in enumerate(values)))
    sums, count = result(pair)
    assert one.modulus is not None
    total = np.sum(values, axis=0, dtype=np.uint64) % one.modulus
    assert np.array_equal(one.decode_sum(sums, count, 0), one.decode_sum(total, CLIENTS, 0))


def test_the_same_bytes_again_hear_the_same_verdict_and_count_once(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    uploads = [pair.upload(i) for i in range(8)]
    assert pair.send(*uploads) == [GOOD] * 8
    for upload in uploads:
        assert pair.read(upload) is Verdict.ACCEPTED
    sums, count = result(pair)
    assert (count, int(sums[0])) == (8, 8)


def test_a_lying_client_is_refused_and_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(tmp_path, "roster")
    honest = [pair.upload(i) for i in range(1, 9)]
    values = np.ones(DIM, dtype=np.uint32)
    values[3] = pair.task.shape(0).levels
    monkeypatch.setattr("cpsgd.secagg.pair.upload.make_report", _forged)
    liar = pair.upload(0, values)
    assert pair.send(liar, *honest) == [int(Verdict.OUT_OF_RANGE), *[GOOD] * 8]
    assert pair.read(liar) is Verdict.OUT_OF_RANGE
    sums, count = result(pair)
    assert (count, int(sums[3])) == (8, 8)


def _forged(shape: Any, values: np.ndarray, *, report: bytes) -> Any:
    from tests.secagg.pair.test_proof import forged

    return forged(shape, values, report=report)


def test_clients_who_share_a_token_cannot_stop_the_leader(tmp_path: Path) -> None:
    """One leader's token with two helper's: the helper sees two senders, and the leader one."""
    pair = Pair(tmp_path, "tokens")
    uploads = [pair.upload(0)]
    pair.tokens[1] = pair.tokens[0][0], pair.tokens[1][1]
    uploads.append(pair.upload(1))
    assert pair.send(*uploads, pair.upload(2)) == [Verdict.ACCEPTED, Verdict.SENT_BEFORE, Verdict.ACCEPTED]
    assert pair.send(uploads[1]) == [Verdict.SENT_BEFORE]
    assert [each.books.store.round(0).accepted for each in (pair.leader, pair.helper)] == [2, 2]


def test_a_helper_that_accepts_a_client_twice_does_not_stop_the_leader(tmp_path: Path) -> None:
    pair = Pair(tmp_path, "roster")
    batch = [pair.prepared(pair.upload(0)) for _ in range(2)]
    pair.leader.evaluate(batch)
    for _ in range(2):  # again, where the database failed and had settled them: what is on record is what clients hear
        assert pair.leader.settle(batch, bytes([1, 1])) == [Verdict.ACCEPTED, Verdict.SENT_BEFORE]
    assert pair.leader.books.store.round(0).accepted == 1


def test_a_report_waits_where_the_helper_has_not_closed_the_round_before(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.leader.books.close(0)  # and the collector is gone before it asks the helper
    upload = pair.upload(0, round=1)
    with pytest.raises(StageError, match="not open yet"):
        pair.send(upload)
    pair.start()
    pair.helper.books.close(0)
    kept = pair.leader.restore()
    assert pair.leader.settle(kept, pair.helper.verify(pair.leader.evaluate(kept))) == [Verdict.ACCEPTED]


def test_a_client_is_counted_once_per_round(tmp_path: Path) -> None:
    for admission in ("roster", "tokens"):
        folder = tmp_path / admission
        folder.mkdir()
        pair = Pair(folder, admission)  # type: ignore[arg-type]
        assert pair.send(pair.upload(0), pair.upload(0)) == [GOOD, int(Verdict.SENT_BEFORE)]
        assert pair.read(pair.upload(0)) is Verdict.SENT_BEFORE
        # A leader that does not look is stopped by the helper.
        prepared = pair.leader.open(replace(again := pair.upload(1)), again.to_bytes())
        pair.send(pair.upload(1))
        assert list(pair.helper.verify(pair.leader.evaluate([prepared]))) == [int(Verdict.SENT_BEFORE)]


@pytest.mark.parametrize("admission", ["roster", "tokens"])
def test_a_client_is_in_one_round_where_the_promise_says_once(tmp_path: Path, admission: Any) -> None:
    """A ledger charges such rounds as disjoint: a leader that asks a client twice is stopped by the helper."""
    pair = Pair(tmp_path, admission, participation="once")
    assert pair.send(*(pair.upload(i) for i in range(8))) == [GOOD] * 8
    result(pair)
    assert pair.send(pair.upload(8, round=1)) == [GOOD]
    again = pair.upload(0, round=1)
    assert pair.read(again) is Verdict.SENT_BEFORE
    prepared = pair.leader.open(again, again.to_bytes())
    assert list(pair.helper.verify(pair.leader.evaluate([prepared]))) == [int(Verdict.SENT_BEFORE)]


def test_a_client_that_may_send_once_does_not_send_for_another_round(tmp_path: Path) -> None:
    """Whatever a leader says is the open round."""
    pair = Pair(tmp_path, participation="once")
    with Sender(pair.task) as sender:
        sender.deliver = lambda upload: "accepted"  # type: ignore[method-assign]
        for _ in range(2):
            assert sender.send(np.zeros(DIM), 0) == "accepted"
        with pytest.raises(RoundRefusedError, match="takes part once"):
            sender.send(np.zeros(DIM), 1)


@pytest.mark.parametrize("admission", ["roster", "tokens"])
def test_a_report_on_its_way_is_settled_although_its_sender_left_the_list(tmp_path: Path, admission: Any) -> None:
    """The helper may have it in its sum already: a leader that could not restore it would stand still for ever."""
    pair = Pair(tmp_path, admission)
    pair.helper.verify(pair.leader.evaluate([pair.prepared(pair.upload(0))]))
    del pair.identities[0], pair.tokens[0]
    pair.start()
    kept = pair.leader.restore()
    assert pair.leader.settle(kept, pair.helper.verify(pair.leader.evaluate(kept))) == [Verdict.ACCEPTED]


def test_what_is_kept_is_what_the_helper_was_asked_about(tmp_path: Path) -> None:
    """A transaction may fail after it happened; the client may then send other bytes under the same id."""
    pair = Pair(tmp_path)
    first, other = pair.upload(0), pair.upload(1)
    pair.leader.books.store.keep(0, [(other.id, first.to_bytes())])
    request = pair.leader.evaluate([pair.prepared(other)])
    assert pair.leader.books.store.kept() == [other.to_bytes()]
    assert list(pair.helper.verify(request)) == [GOOD]
    pair.start()
    assert pair.leader.evaluate(pair.leader.restore()) == request


@pytest.mark.parametrize("rest", ["hunter2%zz@127.0.0.1/db", "hunter2@[::1/db"])
def test_a_password_in_a_malformed_address_is_not_shown(rest: str) -> None:
    pytest.importorskip("psycopg")
    with pytest.raises(StoreError, match="malformed") as refused:
        ReportStore(f"postgresql://me:{rest}", task=b"task", role="leader", dim=DIM)
    assert "hunter2" not in str(refused.value)
    assert refused.value.__suppress_context__


def test_a_task_has_no_more_rounds_than_its_promise() -> None:
    with pytest.raises(ParameterError, match="promise is about 2 rounds, and the task has 3"):
        create_task(protocol(), leader="http://a", helper="http://b", rounds=3)


@pytest.mark.parametrize("participation", [Participation.apart(2), *map(Participation.parse, SAMPLED)], ids=str)
@pytest.mark.parametrize("admission", ["open", "roster", "tokens"])
def test_a_promise_that_servers_cannot_keep_is_refused(participation: Participation, admission: Any) -> None:
    """Servers would take a sender in rounds that are not apart; and they see who sends, so that nothing is sampled.

    With a roster, too: the one who runs a server knows who of it was drawn, and ε of one draw in ten is not his.
    """
    found = protocol()
    assert found.promise is not None
    adjacency = Adjacency.ZERO_OUT if participation.scheme == "poisson" else Adjacency.REPLACE_ONE
    conditions = replace(found.promise.conditions, participation=participation, adjacency=adjacency)
    with pytest.raises(ParameterError, match=f"'{participation}'.*'once'.* or 'every'"):
        create_task(
            replace(found, promise=replace(found.promise, conditions=conditions)),
            leader="http://a",
            helper="http://b",
            rounds=2,
            admission=admission,
        )


@pytest.mark.parametrize("participation", SAMPLED)
def test_no_plan_for_two_servers_rests_on_who_was_drawn(participation: str) -> None:
    """An ε of 2 in five rounds, by one draw in ten, was 4.0 to a server for a client that was drawn once."""
    adjacency = "zero-out" if participation.startswith("poisson") else "replace-one"
    with pytest.raises(ParameterError, match="both of two servers see who sends"):
        plan(1000, 100, 2.0, 1e-6, bits=10, pair=True, rounds=5, participation=participation, adjacency=adjacency)


@pytest.mark.skipif(os.name != "posix", reason="permissions are POSIX's")
def test_other_users_cannot_read_a_store(tmp_path: Path) -> None:
    """Differences of the helper's sums are single shares: with the leader's, single messages."""
    pair = Pair(tmp_path)
    pair.send(pair.upload(0))
    modes = {file.name: file.stat().st_mode & 0o077 for file in tmp_path.iterdir()}
    assert {"leader.db", "helper.db"} <= set(modes)
    assert set(modes.values()) == {0}


@pytest.mark.parametrize("admission", ["roster", "tokens"])
def test_strangers_are_refused_by_both_servers(tmp_path: Path, admission: Any) -> None:
    pair, other = Pair(tmp_path, admission), Pair.__new__(Pair)
    vars(other).update(vars(pair))
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    other.identities, other.tokens = [Ed25519PrivateKey.generate()], [(b"\xff" * 32, b"\xff" * 32)]
    upload = other.upload(0)
    assert pair.read(upload) is Verdict.NOT_ADMITTED
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Books, "admit", lambda self, sender, part, before: (sender, part[32:] if self.tokens else part))
        prepared = pair.leader.open(upload, upload.to_bytes())
        request = pair.leader.evaluate([prepared])
    assert list(pair.helper.verify(request)) == [int(Verdict.NOT_ADMITTED)]


def test_a_signature_covers_both_parts(tmp_path: Path) -> None:
    pair = Pair(tmp_path, "roster")
    one, other = pair.upload(0), pair.upload(1)
    for wrong in (replace(one, signature=other.signature), replace(one, sender=other.sender)):
        assert pair.read(wrong) is Verdict.NOT_ADMITTED
    part, shape = pair.prepared(one).share.part, pair.task.shape(0)
    check_signature(shape, one, part)
    for wrong, other_part in ((replace(one, helper=other.helper), part), (one, bytes(32))):
        with pytest.raises(SignatureError):
            check_signature(shape, wrong, other_part)


@pytest.mark.parametrize("admission", ["open", "roster", "tokens"])
def test_an_upload_with_any_byte_changed_is_not_read_and_burns_nothing(tmp_path: Path, admission: Admission) -> None:
    """Else whoever sees an upload could have its id burnt before its client is heard."""
    pair = Pair(tmp_path, admission)
    sent = pair.upload(0).to_bytes()
    changed = [sent[:i] + bytes([sent[i] ^ 0x80]) + sent[i + 1 :] for i in range(len(sent))]
    assert not any(isinstance(found, Prepared) for found in pair.leader.read(changed))
    assert pair.send(Upload.from_bytes(sent)) == [int(Verdict.ACCEPTED)]


def test_one_clients_part_under_many_ids_is_refused(tmp_path: Path) -> None:
    """A leader that replays a client k times would read it off the sum."""
    pair = Pair(tmp_path)
    upload = pair.upload(0)
    prepared = pair.prepared(upload)
    copies = [replace(prepared, upload=replace(upload, id=bytes([i]) * 16)) for i in range(3)]
    assert list(pair.helper.verify(pair.leader.evaluate(copies))) == [int(Verdict.UNREADABLE)] * 3
    assert pair.helper.books.store.round(0).accepted == 0


def test_an_id_is_evaluated_once(tmp_path: Path) -> None:
    """A second request about an id, with other evaluations, tells the leader nothing more."""
    pair = Pair(tmp_path)
    upload = pair.upload(0)
    prepared = pair.prepared(upload)
    request = pair.leader.evaluate([prepared])
    assert list(pair.helper.verify(request)) == [GOOD]
    assert list(pair.helper.verify(request)) == [GOOD]
    changed = bytearray(request)
    changed[-1] ^= 1
    assert list(pair.helper.verify(bytes(changed))) == [int(Verdict.REUSED_ID)]
    assert pair.helper.books.store.round(0).accepted == 1
    pair.leader.settle([prepared], bytes([GOOD]))
    assert pair.read(replace(pair.upload(1), id=upload.id)) is Verdict.REUSED_ID


# ------------------------------------------------------------------ crashes


def test_a_leader_that_stops_after_asking_goes_on_where_it_was(tmp_path: Path) -> None:
    """Killed between the helper's verdict and its own record: the helper counted, and the leader asks again."""
    pair = Pair(tmp_path)
    pair.send(*(pair.upload(i) for i in range(7)))
    upload = pair.upload(7)
    prepared = pair.prepared(upload)
    pair.helper.verify(pair.leader.evaluate([prepared]))
    pair.start()
    waiting = pair.leader.restore()
    assert [each.upload.id for each in waiting] == [upload.id]
    assert pair.leader.settle(waiting, pair.helper.verify(pair.leader.evaluate(waiting))) == [Verdict.ACCEPTED]
    assert pair.leader.restore() == []
    sums, count = result(pair)
    assert (count, int(sums[0])) == (8, 8)


def test_what_was_never_settled_is_forgotten_with_its_round(tmp_path: Path) -> None:
    """Else a leader that starts again has no key for it, or asks about it with reports of another round, at its t."""
    pair = Pair(tmp_path)
    pair.leader.evaluate([pair.prepared(pair.upload(0))])  # kept, and then the database or the helper failed
    pair.leader.books.close(0)
    later = pair.upload(1, round=1)
    pair.leader.evaluate([pair.prepared(later)])
    pair.start()
    assert [each.id for each in pair.leader.restore()] == [later.id]


@pytest.mark.parametrize("where", ["keep", "settle"])
@pytest.mark.parametrize("role", ["leader", "helper"])
def test_a_store_that_fails_changes_nothing(tmp_path: Path, role: str, where: str) -> None:
    pair = Pair(tmp_path)
    pair.send(*(pair.upload(i) for i in range(7)))
    upload = pair.upload(7)
    books = (pair.leader if role == "leader" else pair.helper).books

    def full(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(books.store, where, full)
        if (role, where) != ("helper", "keep"):
            with pytest.raises(sqlite3.OperationalError):
                pair.send(upload)
    pair.start()
    waiting = pair.leader.restore()
    if waiting:
        pair.leader.settle(waiting, pair.helper.verify(pair.leader.evaluate(waiting)))
    again = pair.read(upload)
    if isinstance(again, Prepared):
        pair.leader.settle([again], pair.helper.verify(pair.leader.evaluate([again])))
    sums, count = result(pair)
    assert (count, int(sums[0])) == (8, 8)


# ------------------------------------------------------------------ rounds


def test_sums_that_another_process_changed_are_not_overwritten(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    assert pair.send(pair.upload(0)) == [Verdict.ACCEPTED]
    store, upload = pair.helper.books.store, pair.upload(1)
    store._connection.execute("UPDATE rounds SET accepted = 5")
    with pytest.raises(StoreError, match="Another process"):
        pair.send(upload)
    assert store.known([upload.id]) == {}
    assert pair.send(upload) == [Verdict.ACCEPTED]  # both are read again
    assert store.round(0).accepted == 6


def test_nothing_is_revealed_too_early(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.send(*(pair.upload(i) for i in range(pair.task.surviving - 1)))
    for books in (pair.leader.books, pair.helper.books):
        with pytest.raises(StageError, match="open"):
            books.reveal(0)
        books.close(0)
        with pytest.raises(ThresholdError, match=f"{pair.task.surviving} are needed"):
            books.reveal(0)
        with pytest.raises(StageError):
            books.close(pair.task.rounds)


def test_a_revealed_round_is_repeated_to_the_byte_and_takes_no_more(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.send(*(pair.upload(i) for i in range(8)))
    late = pair.prepared(pair.upload(8))
    result(pair)
    answer = pair.leader.books.reveal(0)
    assert list(pair.helper.verify(pair.leader.evaluate([late]))) == [int(Verdict.ROUND_CLOSED)]
    assert pair.read(pair.upload(9)) is Verdict.ROUND_CLOSED
    pair.start()
    assert pair.leader.books.reveal(0) == answer
    assert pair.leader.books.current == 1


def test_a_server_killed_after_a_reveal_leaves_no_sums_in_its_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "before").mkdir()
    pair = Pair(tmp_path / "before")
    pair.send(*[pair.upload(i) for i in range(8)])
    books = pair.helper.books
    books.close(0)
    sums, connected = books.store.sums(0).tobytes(), books.store._statements

    def killed() -> tuple[object, object]:
        cursor, run = connected()

        def until(sql: str, *parameters: object, **options: object) -> object:
            if "checkpoint" in sql:
                raise KeyboardInterrupt
            return run(sql, *parameters, **options)

        return cursor, until

    monkeypatch.setattr(books.store, "_statements", killed)
    with pytest.raises(KeyboardInterrupt):
        books.reveal(0)
    shutil.copytree(tmp_path / "before", tmp_path / "after")
    assert sums in (tmp_path / "after" / "helper.db-wal").read_bytes()
    pair.folder = tmp_path / "after"
    pair.start()
    assert not [file for file in pair.folder.iterdir() if sums in file.read_bytes()]
    assert pair.helper.books.reveal(0)


def test_two_who_ask_for_a_sum_at_once_get_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(tmp_path)
    pair.send(*[pair.upload(i) for i in range(8)])
    books = pair.helper.books
    books.close(0)
    digest = books.store.digest_of_ids
    first: list[bytes] = []

    def overtaken(round: int) -> bytes:
        found = digest(round)
        if not first:
            first.append(b"")
            first[0] = books.reveal(round)  # the other's answer is put on record here
        return found

    monkeypatch.setattr(books.store, "digest_of_ids", overtaken)
    assert books.reveal(0) == first[0]


def test_a_round_takes_no_more_than_its_sum_holds(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    assert pair.send(*(pair.upload(i % CLIENTS) for i in range(CLIENTS + 2))) == [
        *[GOOD] * CLIENTS,
        *[int(Verdict.ROUND_CLOSED)] * 2,
    ]
    assert pair.read(pair.upload(0)) is Verdict.ROUND_CLOSED


def test_servers_that_do_not_agree_give_no_mean(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.send(*(pair.upload(i) for i in range(8)))
    prepared = pair.prepared(pair.upload(8))
    pair.helper.verify(pair.leader.evaluate([prepared]))  # and the leader never learns of it
    with pytest.raises(MessageError, match="do not agree"):
        result(pair)
    for wrong in (b"", b"\0" * 40):
        with pytest.raises(MessageError, match="bytes"):
            combine(pair.task, 0, wrong, wrong)


@pytest.mark.slow
def test_the_budget_pays_before_anything_is_revealed_and_once(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "budgets.ledger")
    ledger.create(Budget(population="phones", epsilon=10.0, delta=1e-4))
    ledger.create(Budget(population="poor", epsilon=0.1, delta=1e-4))
    pair = Pair(tmp_path)
    pair.send(*(pair.upload(i) for i in range(8)))
    books = pair.leader.books
    books.close(0)
    books.charge = ledger_charge(pair.task, ledger, "poor", "leader")
    from cpsgd.errors import BudgetExceededError

    with pytest.raises(BudgetExceededError):
        books.reveal(0)
    assert books.store.answer(0) is None
    books.charge = ledger_charge(pair.task, ledger, "phones", "leader")
    answer = books.reveal(0)
    assert books.reveal(0) == answer
    entries = ledger.events("phones")
    assert [entry.released for entry in entries] == [True]
    # A crash between the ledger's record and the store's: the same entry pays.
    ledger_charge(pair.task, ledger, "phones", "leader")(0, 8, books.store.digest_of_ids(0))
    assert len(ledger.events("phones")) == 1


@pytest.mark.slow
def test_a_store_from_a_backup_does_not_reveal_a_paid_round_with_other_reports(tmp_path: Path) -> None:
    """A leader that leaves one report out the second time would read it off the difference."""
    ledger = Ledger(tmp_path / "budgets.ledger")
    ledger.create(Budget(population="phones", epsilon=10.0, delta=1e-4))
    pair = Pair(tmp_path)
    requests = [pair.leader.evaluate([pair.prepared(pair.upload(i))]) for i in range(9)]

    def revealed(some: list[bytes], store: str) -> bytes:
        books = pair.helper.books
        books.store.close()
        kept = ReportStore(str(tmp_path / store), task=pair.task.id, role="helper", dim=DIM)
        charge = ledger_charge(pair.task, ledger, "phones", "helper")
        pair.helper = Helper(Books(pair.task, "helper", pair.secrets["helper"], kept, charge=charge))
        assert b"".join(pair.helper.verify(each) for each in some) == bytes([GOOD] * len(some))
        pair.helper.books.close(0)
        return pair.helper.books.reveal(0)

    first = revealed(requests, "first.db")
    assert revealed(requests, "same.db") == first
    for fewer in (requests[1:], requests[:-1]):
        with pytest.raises(LedgerError, match="paid for with other reports"):
            revealed(fewer, f"{requests.index(fewer[0])}.db")


# ------------------------------------------------------------------ hostile bytes


def test_requests_that_are_cut_off_or_changed_are_refused_and_change_nothing(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    prepared = [pair.prepared(pair.upload(i)) for i in range(2)]
    request = pair.leader.evaluate(prepared)
    for wrong in (b"", request[:7], request[:-1], request + b"\0", b"\xff" * len(request), bytes(len(request))):
        with pytest.raises(MessageError):
            pair.helper.verify(wrong)
    generator = np.random.default_rng(2)
    for _ in range(60):
        changed = bytearray(request)
        changed[int(generator.integers(8, len(request)))] ^= 1 << int(generator.integers(8))
        try:
            verdicts = pair.helper.verify(bytes(changed))
        except MessageError:
            continue
        assert sum(code == GOOD for code in verdicts) <= 1
    for wrong in (b"", b"\x01", b"\x01\x01\x01", b"\x01\xff"):
        with pytest.raises(MessageError, match="verdict"):
            pair.leader.settle(prepared, wrong)
    assert pair.leader.books.store.round(0).accepted == 0


@pytest.mark.parametrize(
    "wrong",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: data + b"\0",
        lambda data: b"x" + data[1:],
        lambda data: data[:132] + b"\xff\xff\xff\xff" + data[136:],
        lambda data: data[:-5] + bytes([data[-5] ^ 1]) + data[-4:],
        lambda data: data[:32] + (7).to_bytes(4, "little") + data[36:],
    ],
)
def test_uploads_that_are_none_are_refused(tmp_path: Path, wrong: Callable[[bytes], bytes]) -> None:
    pair = Pair(tmp_path)
    data = pair.upload(0).to_bytes()
    assert isinstance(pair.read(wrong(data)), MessageError) or pair.read(wrong(data)) is Verdict.ROUND_CLOSED
    assert isinstance(pair.read(data), Prepared)
    assert Upload.from_bytes(data).to_bytes() == data


# ------------------------------------------------------------------ tasks and stores


def test_a_task_is_its_file(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    (tmp_path / "task.json").write_text(json.dumps(pair.task.to_dict()))
    again = PairTask.read(tmp_path / "task.json")
    assert again == pair.task
    assert again.id == pair.task.id
    wrongs: list[object] = [{}, {**pair.task.to_dict(), "version": 2}, {**pair.task.to_dict(), "more": 1}, []]
    for wrong in wrongs:
        with pytest.raises(ParameterError):
            PairTask.from_dict(wrong)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda one: replace(one, modulus=one.modulus + 1), "prime"),
        (lambda one: replace(one, promise=None), "promise"),
        (lambda one: replace(one, mechanism=CORRELATED, modulus=65_537), "keep no noise"),
    ],
)
def test_a_protocol_that_two_servers_cannot_carry_is_refused(change: Callable[[Protocol], Protocol], said: str) -> None:
    with pytest.raises(ParameterError, match=said):
        create_task(change(protocol()), leader="http://a", helper="http://b")


def test_servers_refuse_the_wrong_secrets_and_stores(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    store = pair.leader.books.store
    with pytest.raises(ParameterError, match="not the private keys"):
        Books(pair.task, "leader", pair.secrets["helper"], store)
    with pytest.raises(ParameterError, match="verification"):
        Books(pair.task, "leader", replace(pair.secrets["leader"], verification=bytes(32)), store)
    with pytest.raises(ParameterError, match="who may send"):
        Books(replace(pair.task, admission="roster"), "leader", pair.secrets["leader"], store)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cpsgd.engines.pair.store._PATIENCE", 0.01)
        with pytest.raises(StoreError, match="locked"):
            ReportStore(str(tmp_path / "leader.db"), task=pair.task.id, role="leader", dim=DIM)
    store.close()
    for task, role in ((bytes(16), "leader"), (pair.task.id, "helper")):
        with pytest.raises(StoreError, match="own"):
            ReportStore(str(tmp_path / "leader.db"), task=task, role=role, dim=DIM)
    with pytest.raises(EmptyError):
        combine(pair.task, 0, *[Answer(0, bytes(32), np.zeros(DIM, np.uint32)).to_bytes(pair.task.shape(0))] * 2)
    assert isinstance(Helper(pair.helper.books), Helper)
    assert isinstance(Leader(pair.leader.books), Leader)
