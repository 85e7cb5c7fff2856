"""`PairLeader`: the leader inside a federation's server (Flower, NVFlare). The helper is run by `cpsgd pair helper`.

Clients send through the engine to the server, which is the leader and the collector. It sees no more of a message than
a leader sees. The helper checks for itself who sent, how many were accepted, and its own budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cpsgd.engines.pair.answers import combine
from cpsgd.engines.pair.books import RefusedReportError
from cpsgd.engines.pair.leader import Leader, Prepared
from cpsgd.engines.pair.parties import as_json, ask, connect
from cpsgd.engines.pair.running import PairServerOptions, open_books
from cpsgd.engines.pair.store import Verdict
from cpsgd.engines.pair.task import PairTask, Secrets
from cpsgd.errors import ParameterError, StageError
from cpsgd.secagg.pair.extension import Elements
from cpsgd.secagg.pair.upload import upload_bytes


class PairLeader:
    """Both servers, for rounds of a federation (`cpsgd.federation.one_message.PairServers`).

    Example:
        >>> pair = PairLeader("task.json", "leader.json", "collector.json", store="leader.db")  # doctest: +SKIP
        >>> strategy = CpsgdStrategy(plan, pair=pair)  # doctest: +SKIP
    """

    def __init__(
        self, task: str | Path, secrets: str | Path, collector: str | Path, *, store: str, **options: Any
    ) -> None:
        """Opens the store, and settles with the helper what was on its way when the leader stopped.

        Args:
            task: The task's file.
            secrets: The leader's secrets.
            collector: The collector's secrets.
            store: Where reports are counted: a file of SQLite, or an address that begins with postgresql://.
            options: Further fields of `PairServerOptions`: keys, roster, ca, insecure.

        Raises:
            ParameterError: The files contradict each other, or the task has messages of the servers' own.
            TransportError: The helper does not answer.
        """
        files: dict[str, Any] = {
            name: Path(value) if isinstance(value, str) else value for name, value in options.items()
        }
        chosen = PairServerOptions(task=Path(task), secrets=Path(secrets), store=store, **files)
        books = open_books("leader", chosen)
        self.task: PairTask = books.task
        if self.task.server_messages:
            raise ParameterError("A federation counts nodes: make a task without messages of the servers' own.")
        if self.task.admission == "tokens":
            raise ParameterError("Nodes of a federation have no tokens: make a task with a roster, or an open one.")
        self.rounds = self.task.rounds
        self.upload_bytes = upload_bytes(self.task.shape(0))
        token = Secrets.read(Path(collector)).collector_token("helper")
        self._leader, self._books = Leader(books), books
        self._verifying, self._collecting = (
            connect(
                self.task.helper.url,
                chosen.ca,
                insecure=chosen.insecure,
                headers={"Authorization": f"Bearer {secret.hex()}"},
            )
            for secret in (books.secrets.peer, token)
        )
        self._settle_kept()

    def _settle_kept(self) -> None:
        """Settles kept reports that the helper may have counted already, so that both sums have the same reports."""
        for kept in self._leader.restore():
            self.settle([kept])

    def begin(self, round: int) -> None:
        """Ends all earlier rounds at both servers.

        Raises:
            StageError: This round is ended already.
            RoundRefusedError: The helper refuses.
            TransportError: The helper does not answer.
        """
        self._settle_kept()
        for number in range(self._books.current, round):
            self._books.close(number)
        found = as_json(ask(self._collecting, "GET", "/round")).get("round")
        current = found if isinstance(found, int) else self.rounds
        if max(current, self._books.current) > round:
            raise StageError(f"Round {round} of the task is ended already.")
        for number in range(current, round):
            ask(self._collecting, "POST", f"/rounds/{number}/close")

    def read(self, upload: bytes) -> Prepared:
        """Checks an upload, and returns the report in it.

        Raises:
            CpsgdError: It is refused; nothing was changed.
        """
        [found] = self._leader.read([upload])
        if isinstance(found, Verdict):
            raise RefusedReportError(Verdict.SENT_BEFORE if found is Verdict.ACCEPTED else found)
        if isinstance(found, Exception):
            raise found
        return found

    def settle(self, reports: Sequence[Prepared]) -> list[str]:
        """Asks the helper about reports of one round; returns the reason of each refusal, empty if accepted."""
        answer = ask(self._verifying, "POST", "/verify", content=self._leader.evaluate(reports)).content
        verdicts = self._leader.settle(reports, answer)
        return ["" if each is Verdict.ACCEPTED else str(RefusedReportError(each)) for each in verdicts]

    def accepted(self, round: int) -> int:
        """Returns the number of reports in the leader's sum."""
        return self._books.store.round(round).accepted

    def finish(self, round: int) -> tuple[Elements, int]:
        """Ends a round at both servers, and returns the sum of all accepted reports and their number.

        Raises:
            RoundRefusedError: The helper refuses, for example since its budget does not pay.
            TransportError: The helper does not answer.
        """
        self._settle_kept()
        self._books.close(round)
        ask(self._collecting, "POST", f"/rounds/{round}/close")
        own = self._books.reveal(round)
        other = ask(self._collecting, "POST", f"/rounds/{round}/reveal", most=max(len(own), 1 << 16)).content
        return combine(self.task, round, own, other)

    def close(self) -> None:
        """Closes the connections and the store."""
        for connection in (self._verifying, self._collecting):
            connection.close()
        self._books.store.close()
