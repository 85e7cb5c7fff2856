"""A histogram through two servers: planned, sent, and read off the mean, as with any other transport."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from cpsgd.engines.pair.answers import combine
from cpsgd.engines.pair.books import Books
from cpsgd.engines.pair.helper import Helper
from cpsgd.engines.pair.leader import Leader, Prepared
from cpsgd.engines.pair.store import ReportStore
from cpsgd.engines.pair.task import create_task
from cpsgd.secagg.pair.extension import is_prime
from cpsgd.secagg.pair.upload import make_upload
from cpsgd.statistics import Histogram


def test_a_histogram_by_two_servers(tmp_path: Path) -> None:
    asked = Histogram("colour", categories=["red", "green", "blue"]).plan(100, 8.0, 1e-6, pair=True, dropout=0.2)
    assert asked.protocol.modulus is not None
    assert is_prime(asked.protocol.modulus)
    assert asked.protocol.mechanism.values <= 256
    task, secrets = create_task(
        asked.protocol, leader="http://127.0.0.1:1", helper="http://127.0.0.1:2", admission="open"
    )
    stores = {
        role: ReportStore(str(tmp_path / role), task=task.id, role=role, dim=asked.protocol.dim)
        for role in ("leader", "helper")
    }
    leader = Leader(Books(task, "leader", secrets["leader"], stores["leader"]))
    helper = Helper(Books(task, "helper", secrets["helper"], stores["helper"]))
    uploads = [
        make_upload(
            task.shape(0),
            0,
            asked.protocol.encode_integers(asked.vector(colour), 0),
            leader_key=task.key("leader", 0),
            helper_key=task.key("helper", 0),
        ).to_bytes()
        for colour in ["red"] * 60 + ["green"] * 30
    ]
    batch = [each for each in leader.read(uploads) if isinstance(each, Prepared)]
    leader.settle(batch, helper.verify(leader.evaluate(batch)))
    for books in (leader.books, helper.books):
        books.close(0)
    sums, count = combine(task, 0, leader.books.reveal(0), helper.books.reveal(0))
    found = asked.result(asked.protocol.decode_sum(sums, count, 0), count)
    assert found.names == ("red", "green", "blue")
    # Six standard deviations of the noise.
    assert np.abs(np.array(found.values) - [60, 30, 0]).max() < 6 * count * asked.variance(count) ** 0.5
    for store in stores.values():
        store.close()
