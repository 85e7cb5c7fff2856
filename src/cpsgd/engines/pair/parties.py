"""`Sender` and `Collector`: the client and the one who gets the mean, over HTTP."""

from __future__ import annotations

import math
import ssl
import time
from pathlib import Path
from typing import Any, Self

import httpx
import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from numpy.typing import ArrayLike, NDArray

from cpsgd.engines.pair.answers import answer_bytes, combine
from cpsgd.engines.pair.task import PairTask, Secrets, check_address
from cpsgd.errors import ParameterError, RoundRefusedError, TransportError

_TRIES, _PAUSE = 6, 0.5
# Seconds for an answer, and its bytes if it is no sum.
_LONGEST, _MOST_BYTES = 300.0, 1 << 16


class Sender:
    """A client: sends one vector per round.

    Example:
        >>> with Sender(task) as sender:  # doctest: +SKIP
        ...     sender.send(vector)
        'accepted'
    """

    def __init__(
        self,
        task: PairTask | Path,
        *,
        identity: Ed25519PrivateKey | None = None,
        tokens: tuple[bytes, bytes] | None = None,
        trust: Path | None = None,
        insecure: bool = False,
    ) -> None:
        """Prepares to send.

        Args:
            task: The task, or its file: take it from somebody who is trusted, for it names both servers' keys.
            identity: The client's key, where the task has a roster.
            tokens: The client's tokens, where it has those.
            trust: File of the certificates that the leader's must be signed by; the system's if not given.
            insecure: Sends also to an http address of another machine.
        """
        self.task = task if isinstance(task, PairTask) else PairTask.read(task)
        if (self.task.admission == "roster") != (identity is not None) or (self.task.admission == "tokens") != (
            tokens is not None
        ):
            raise ParameterError(f"The task admits by {self.task.admission}: give an identity or tokens accordingly.")
        self._identity, self._tokens = identity, tokens
        self._client = connect(self.task.leader.url, trust, insecure=insecure)
        self._sent: dict[int, bytes] = {}

    def open_round(self) -> int:
        """Returns the number of the round that now takes reports.

        Raises:
            RoundRefusedError: The last round is closed.
        """
        number = as_json(ask(self._client, "GET", "/round")).get("round")
        if type(number) is not int:
            raise RoundRefusedError("The task's last round is closed.")
        return number

    def send(self, vector: ArrayLike, round: int | None = None) -> str:
        """Encodes a vector for a round and sends it; asks again with the same bytes if no answer comes.

        Args:
            vector: The client's vector.
            round: Number of the round; the open one if not given.

        Returns:
            "accepted".

        Raises:
            RoundRefusedError: The report is refused; the message says why.
            TransportError: The leader does not answer.
        """
        number = self.open_round() if round is None else round
        if number not in self._sent:
            if self.task.once and self._sent:
                raise RoundRefusedError("The promise is that a client takes part once, and this one has sent already.")
            # Another report of the same vector would double what can be learned about it.
            self._sent[number] = self.prepare(vector, number)
        return self.deliver(self._sent[number])

    def prepare(self, vector: ArrayLike, round: int) -> bytes:
        """Returns the upload for a vector. Keep it until it is answered; never make a second one for this vector."""
        values = self.task.protocol.encode_integers(vector, round)
        return self.task.upload(values, round, identity=self._identity, tokens=self._tokens)

    def deliver(self, upload: bytes) -> str:
        """Sends an upload that `prepare` made, and returns "accepted". Sent several times, it counts once.

        Raises:
            RoundRefusedError: The report is refused; the message says why.
            TransportError: The leader does not answer.
        """
        verdict = as_json(ask(self._client, "POST", "/reports", content=upload)).get("verdict")
        if verdict != "accepted":
            raise TransportError("The leader answers with something else than a verdict.")
        return "accepted"

    def close(self) -> None:
        """Closes the connection."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Collector:
    """Ends rounds and gets their means."""

    def __init__(self, task: PairTask, secrets: Secrets, *, trust: Path | None = None, insecure: bool = False) -> None:
        """Prepares to ask both servers.

        Args:
            task: The task.
            secrets: Those of the collector.
            trust: File of the certificates that the servers' must be signed by; the system's if not given.
            insecure: Asks also at http addresses of other machines.
        """
        self.task = task
        self._servers = [
            connect(url, trust, insecure=insecure, headers={"Authorization": f"Bearer {token.hex()}"})
            for url, token in (
                (task.leader.url, secrets.collector_token("leader")),
                (task.helper.url, secrets.collector_token("helper")),
            )
        ]

    def progress(self) -> dict[str, Any]:
        """Returns the leader's open round, with its counts."""
        return as_json(ask(self._servers[0], "GET", "/round"))

    def wait(self, round: int, *, count: int | None = None, seconds: float | None = None, pause: float = 0.5) -> None:
        """Waits until a round has enough reports, the time is over, or the round is no longer open.

        Args:
            round: Its number.
            count: Number of reports that is enough; by default the task's number of clients.
            seconds: Longest time to wait; by default there is no limit.
            pause: Seconds between two requests for the counts.

        Raises:
            TransportError: The leader does not answer.
        """
        enough = self.task.clients if count is None else count
        deadline = math.inf if seconds is None else time.monotonic() + seconds
        while time.monotonic() < deadline:
            found = self.progress()
            if found.get("round") != round:
                return
            if not isinstance(accepted := found.get("accepted"), int):
                raise TransportError("The leader answers with something else than counts.")
            if accepted >= enough:
                return
            time.sleep(max(0.0, min(pause, deadline - time.monotonic())))

    def collect(self, round: int) -> tuple[NDArray[np.float32], int]:
        """Ends a round and returns the mean of its vectors, with their number.

        It may be asked for again: the servers repeat their answers.

        Raises:
            RoundRefusedError: A server refuses, for example since too few reports were accepted.
            TransportError: A server does not answer.
        """
        for server in self._servers:
            ask(server, "POST", f"/rounds/{round}/close")
        most = _MOST_BYTES + answer_bytes(self.task.shape(round))
        leader, helper = (ask(server, "POST", f"/rounds/{round}/reveal", most=most).content for server in self._servers)
        sums, count = combine(self.task, round, leader, helper)
        return self.task.decode(sums, count, round), count

    def close(self) -> None:
        """Closes the connections."""
        for server in self._servers:
            server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def connect(url: str, trust: Path | None, *, insecure: bool, headers: dict[str, str] | None = None) -> httpx.Client:
    """Returns a connection to a server."""
    check_address(url, insecure=insecure)
    verify = trusted(trust) if url.startswith("https") else False
    headers = {"Accept-Encoding": "identity", **(headers or {})}
    return httpx.Client(base_url=url, headers=headers, timeout=60.0, verify=verify, trust_env=False)


def trusted(certificates: Path | None) -> ssl.SSLContext:
    """Returns TLS settings, version 1.3 alone, that trust the certificates in a file, or those of the system."""
    found = ssl.create_default_context(cafile=certificates)
    found.minimum_version = ssl.TLSVersion.TLSv1_3
    return found


def ask(
    client: httpx.Client, method: str, path: str, *, content: bytes | None = None, most: int = _MOST_BYTES
) -> httpx.Response:
    """Returns the answer to a request, which is sent again with the same bytes where a server is silent or busy.

    Raises:
        RoundRefusedError: The server refuses; the message says why.
        TransportError: It does not answer, or with something else than it should, or with more than `most` bytes.
    """
    pause = _PAUSE
    for remaining in reversed(range(_TRIES)):
        try:
            response = _whole(client, method, path, content, most)
        except httpx.HTTPError as error:
            if not remaining:
                raise TransportError(f"{client.base_url} does not answer: {type(error).__name__}.") from None
        else:
            if response.status_code == 200:
                return response
            if response.status_code not in (408, 503):
                raise RoundRefusedError(str(as_json(response).get("title", "The server refuses.")))
            if not remaining:
                raise TransportError(f"{client.base_url} is busy; ask again later, with the same bytes.")
        time.sleep(pause)
        pause *= 2
    raise AssertionError("unreachable")


def _whole(client: httpx.Client, method: str, path: str, content: bytes | None, most: int) -> httpx.Response:
    """Returns an answer of bounded length, without unpacking it: unpacked data may have any length."""
    found, deadline = bytearray(), time.monotonic() + _LONGEST
    with client.stream(method, path, content=content) as response:
        for chunk in response.iter_raw():
            found += chunk
            if len(found) > most or time.monotonic() > deadline:
                raise TransportError(f"{client.base_url} answers with more than {most} bytes, or takes too long.")
    return httpx.Response(response.status_code, content=bytes(found), request=response.request)


def as_json(response: httpx.Response) -> dict[str, Any]:
    """Returns the JSON object in an answer.

    Raises:
        TransportError: There is none.
    """
    try:
        found = response.json()
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise TransportError(f"{response.url} answered {response.status_code} with something else than JSON.")
    return found
