"""Two servers in this process, on stores in a folder: every message is bytes, and a restart is a new object."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from cpsgd import Protocol, plan
from cpsgd.engines.pair.books import Admitted, Books
from cpsgd.engines.pair.helper import Helper
from cpsgd.engines.pair.leader import Leader, Prepared
from cpsgd.engines.pair.store import ReportStore, Verdict
from cpsgd.engines.pair.task import Admission, PairTask, Secrets, create_task
from cpsgd.errors import MessageError
from cpsgd.secagg.pair.extension import least_prime
from cpsgd.secagg.pair.upload import Upload, make_upload

DIM = 40
CLIENTS = 12


@lru_cache(maxsize=2)
def protocol(participation: str = "every") -> Protocol:
    """One coin per coordinate for two rounds of twelve clients, of whom eight are enough."""
    found = plan(
        clients=CLIENTS,
        dim=DIM,
        epsilon=16.0,
        delta=1e-5,
        bits=6,
        secure=True,
        mechanism="coins",
        dropout=0.33,
        rounds=2,
        participation=participation,
    ).protocol
    assert found.modulus is not None
    return replace(found, modulus=least_prime(found.modulus))


class Pair:
    """A task with both its servers."""

    def __init__(
        self,
        folder: Path,
        admission: Admission = "open",
        *,
        participation: str = "every",
        planned: Protocol | None = None,
        server_messages: int = 0,
    ) -> None:
        self.task: PairTask
        self.secrets: dict[str, Secrets]
        self.task, self.secrets = create_task(
            protocol(participation) if planned is None else planned,
            leader="http://127.0.0.1:1",
            helper="http://127.0.0.1:2",
            rounds=2,
            admission=admission,
            server_messages=server_messages,
        )
        self.identities = [Ed25519PrivateKey.from_private_bytes(bytes([i]) * 32) for i in range(1, CLIENTS + 1)]
        self.tokens = [(bytes([i]) * 32, bytes([i + 100]) * 32) for i in range(CLIENTS)]
        self.folder = folder
        self.stores: list[ReportStore] = []
        self.start()

    def start(self) -> None:
        """Opens both stores, as new processes do."""
        for store in self.stores:
            store.close()
        self.stores.clear()
        self.leader = Leader(self.books("leader"))
        self.helper = Helper(self.books("helper"))

    def books(self, role: str) -> Books:
        import hashlib

        store = ReportStore(str(self.folder / f"{role}.db"), task=self.task.id, role=role, dim=DIM)
        self.stores.append(store)
        keys = frozenset(each.public_key().public_bytes_raw() for each in self.identities)
        side = 0 if role == "leader" else 1
        tokens = frozenset(hashlib.sha256(each[side]).digest() for each in self.tokens)
        return Books(self.task, role, self.secrets[role], store, admitted=Admitted(keys, tokens))  # type: ignore[arg-type]

    def upload(self, client: int, values: np.ndarray | None = None, round: int = 0) -> Upload:
        """One client's upload of these integers, all ones if not given."""
        integers = np.ones(DIM, dtype=np.uint32) if values is None else values
        admission = self.task.admission
        return make_upload(
            self.task.shape(round),
            round,
            integers,
            leader_key=self.task.key("leader", round),
            helper_key=self.task.key("helper", round),
            identity=self.identities[client] if admission == "roster" else None,
            tokens=self.tokens[client] if admission == "tokens" else None,
        )

    def send(self, *uploads: Upload) -> list[int]:
        """Takes uploads through both servers, as one batch."""
        found = self.leader.read([upload.to_bytes() for upload in uploads])
        prepared = [each for each in found if isinstance(each, Prepared)]
        if not prepared:
            return [int(each) for each in found]  # type: ignore[call-overload]
        verdicts = iter(self.leader.settle(prepared, self.helper.verify(self.leader.evaluate(prepared))))
        return [int(next(verdicts) if isinstance(each, Prepared) else each) for each in found]  # type: ignore[arg-type]

    def read(self, upload: Upload | bytes) -> Prepared | Verdict | MessageError:
        """What the leader makes of one upload."""
        [found] = self.leader.read([upload if isinstance(upload, bytes) else upload.to_bytes()])
        return found

    def prepared(self, upload: Upload) -> Prepared:
        """An upload that the leader will ask about."""
        found = self.read(upload)
        assert isinstance(found, Prepared), found
        return found
