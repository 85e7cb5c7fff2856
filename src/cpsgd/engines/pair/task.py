"""`PairTask`: all that is public of a collection by two servers, as one file; and the secrets of each party."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray

from cpsgd import _validate
from cpsgd._durable import create_file, write_file
from cpsgd._plain import build, canonical, parse, to_dict
from cpsgd.errors import ParameterError
from cpsgd.promise import Conditions
from cpsgd.protocol import Protocol
from cpsgd.secagg.pair.extension import Elements, is_prime
from cpsgd.secagg.pair.proof import prepared
from cpsgd.secagg.pair.sealing import Role
from cpsgd.secagg.pair.shape import RoundShape
from cpsgd.secagg.pair.upload import make_upload

LOOPBACK = ("127.0.0.1", "localhost", "::1")
Admission = Literal["open", "roster", "tokens"]
VERSION = 1
MOST_ROUNDS = 2**20
MOST_KEYS = 64


@dataclass(frozen=True)
class Endpoint:
    """A server's address and its public keys for sealed parts, each for as many rounds in turn."""

    url: str
    keys: tuple[bytes, ...]


def check_address(url: str, *, insecure: bool = False) -> str:
    """Returns a server's address.

    Args:
        url: The address.
        insecure: Lets addresses through whose traffic everybody on the way can read and change.

    Raises:
        ParameterError: It is no http or https address, or it is http to another machine.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ParameterError(f"Expected an address that begins with https://, got {url!r:.80}.")
    if parts.scheme == "http" and parts.hostname not in LOOPBACK and not insecure:
        raise ParameterError(
            f"{url} is not encrypted: secrets of the servers would be open to everybody on the way. Use https, or say "
            "insecure where another program encrypts."
        )
    return url


@dataclass(frozen=True, kw_only=True)
class PairTask:
    """A protocol, the rounds that are collected with it, and the two servers.

    Attributes:
        protocol: Planned with `plan(..., pair=True)`: its modulus is a prime, and its promise says how few reports a
            round may be revealed with.
        rounds: Number of rounds.
        leader: The server that clients send to.
        helper: The other one.
        verification: SHA-256 of the servers' verification key, which is fixed before the first report.
        admission: Who may send: "open" (anybody, any number of times: the guarantee then needs `colluding` to cover
            everybody who does), "roster" (signed by a key on the list that both servers have) or "tokens".
        server_messages: Messages of zero that each server adds to its sum before it reveals it, as planned.
    """

    protocol: Protocol
    rounds: int
    leader: Endpoint
    helper: Endpoint
    verification: bytes
    admission: Admission = "roster"
    server_messages: int = 0

    def __post_init__(self) -> None:
        modulus, promise = self.protocol.modulus, self.protocol.promise
        self.protocol.check_integers()
        if modulus is None or not is_prime(modulus):
            raise ParameterError("Expected a protocol whose modulus is a prime; plan(..., pair=True) chooses one.")
        if self.protocol.mechanism.wraps:
            raise ParameterError("Messages that wrap around the modulus have no range that servers could check.")
        self.protocol.mechanism.memory.check_stateless(
            f"{self.protocol.mechanism.name}: clients send once and keep no noise for later rounds, and none would be "
            "taken away again. Plan with pair=True, without correlated."
        )
        if promise is None:
            raise ParameterError("Expected a protocol with a promise; plan(..., pair=True) makes one.")
        _validate.integer("rounds", self.rounds, low=1, high=MOST_ROUNDS)
        if self.rounds > promise.conditions.rounds:
            raise ParameterError(
                f"The protocol's promise is about {promise.conditions.rounds} rounds, and the task has {self.rounds}: "
                "plan for that many."
            )
        if (who := promise.conditions.participation).secrecy is not None:
            raise ParameterError(
                f"The promise is for participation {str(who)!r}: ε rests on a secret, who was drawn, and both servers "
                "see who sends. Plan with 'once' (a client is in one round of the task) or 'every'."
            )
        if who.scheme == "apart":
            raise ParameterError(
                f"The promise is for participation {str(who)!r}, and servers do not see to it that a sender's rounds "
                "are that far apart: plan with 'once' or 'every'."
            )
        _validate.choice("admission", self.admission, ("open", "roster", "tokens"))
        keys = (*self.leader.keys, *self.helper.keys)
        if any(len(each) != 32 for each in (self.verification, *keys)):
            raise ParameterError("Expected keys and the hash of the verification key to have 32 bytes.")
        if len(set(keys)) < len(keys):
            raise ParameterError("Expected two servers with keys of their own, got one key twice.")
        most = min(self.rounds, MOST_KEYS)
        if any(not 1 <= len(server.keys) <= most for server in (self.leader, self.helper)):
            raise ParameterError(
                f"Expected a number of keys from 1 to {most} per server, since the task has {self.rounds} rounds: "
                f"`cpsgd pair keys --rounds {self.rounds}` makes them."
            )
        own = _validate.integer("server_messages", self.server_messages, low=0)
        if own and not (self.surviving >= 1 and promise.conditions.honest <= own + 1):
            raise ParameterError(
                f"The protocol was not planned for server_messages={own}: its promise needs the noise of "
                f"{promise.conditions.honest:,} messages, and one server and one client make {own + 1:,}. "
                "Plan with as many."
            )

    @property
    def clients(self) -> int:
        """The most reports of a round."""
        return self.protocol.clients - 2 * self.server_messages

    @property
    def surviving(self) -> int:
        """The fewest reports that a round is revealed with."""
        return self.conditions.surviving - 2 * self.server_messages

    def endpoint(self, role: Role) -> Endpoint:
        """Returns one of the servers."""
        return self.leader if role == "leader" else self.helper

    def key_number(self, role: Role, round: int) -> int:
        """Returns the number of the server's key for a round."""
        return round * len(self.endpoint(role).keys) // self.rounds

    def key(self, role: Role, round: int) -> bytes:
        """Returns the public key that parts of a round are sealed with."""
        return self.endpoint(role).keys[self.key_number(role, round)]

    def upload(
        self,
        values: NDArray[np.uint32],
        round: int,
        *,
        identity: Ed25519PrivateKey | None = None,
        tokens: tuple[bytes, bytes] | None = None,
    ) -> bytes:
        """Returns one client's upload for its integers, signed or with its tokens as the task admits.

        Raises:
            ParameterError: The task admits by a roster and there is no identity, or by tokens and there are none.
        """
        if (self.admission == "roster" and identity is None) or (self.admission == "tokens" and tokens is None):
            raise ParameterError(f"The task admits by {self.admission}: give an identity or tokens accordingly.")
        return make_upload(
            self.shape(round),
            round,
            values,
            leader_key=self.key("leader", round),
            helper_key=self.key("helper", round),
            identity=identity if self.admission == "roster" else None,
            tokens=tokens if self.admission == "tokens" else None,
        ).to_bytes()

    def decode(self, sums: Elements, count: int, round: int) -> NDArray[np.float32]:
        """Returns the mean of the vectors of `count` reports, from the sum that both servers' answers make."""
        messages = count + 2 * self.server_messages
        return self.protocol.decode_sum(sums, messages, round) * np.float32(messages / count)

    @property
    def conditions(self) -> Conditions:
        """The conditions that the protocol's promise is made on."""
        assert self.protocol.promise is not None  # checked above
        return self.protocol.promise.conditions

    @property
    def once(self) -> bool:
        """Whether the promise allows a client in one round only."""
        return self.conditions.participation.scheme == "once"

    @cached_property
    def fingerprint(self) -> bytes:
        """32 bytes that identify everything above; proofs are bound to all of them."""
        return hashlib.sha256(b"cpsgd pair task" + canonical(self.to_dict()).encode()).digest()

    @property
    def id(self) -> bytes:
        """16 bytes that name the task in files and to people."""
        return self.fingerprint[:16]

    def shape(self, round: int) -> RoundShape:
        """Returns the public numbers of a round."""
        _validate.integer("round", round, low=0, high=self.rounds - 1)
        modulus = self.protocol.modulus
        assert modulus is not None  # checked above
        task = self.fingerprint + round.to_bytes(4, "little")
        return prepared(modulus, self.protocol.dim, task, self.protocol.mechanism.values)

    # ------------------------------------------------------------------ as a file

    def to_dict(self) -> dict[str, Any]:
        """Returns plain JSON values."""
        return {"version": VERSION, **to_dict(self)}

    @classmethod
    def from_dict(cls, data: object) -> PairTask:
        """Reads what `to_dict` gave.

        Raises:
            ParameterError: It is something else, or of a version that this release does not know.
        """
        version = data.get("version") if isinstance(data, dict) else None
        if not isinstance(data, dict) or version != VERSION:
            raise ParameterError(f"Expected a task of version {VERSION}, got version {version!r:.40}.")
        return build(cls, {name: value for name, value in data.items() if name != "version"})

    @classmethod
    def read(cls, path: Path) -> PairTask:
        """Reads a task's file.

        Raises:
            ParameterError: It is no task.
        """
        return cls.from_dict(parse(path.read_bytes(), str(path)))


@dataclass(frozen=True, repr=False)
class Secrets:
    """The secrets of one party.

    Attributes:
        private: The server's private keys for sealed parts, empty where deleted; none for the collector.
        verification: The key that evaluation points follow from; both servers have it, clients must never.
        peer: The leader's token for requests to the helper.
        collector: The collector's secret. Each server has only the token that `collector_token` derives for it: no
            server can end or reveal a round at the other.
    """

    collector: bytes = b""
    private: tuple[bytes, ...] = ()
    verification: bytes = b""
    peer: bytes = b""

    def collector_token(self, role: Role) -> bytes:
        """Returns the token that the collector shows to a server; from the collector's own secrets."""
        return hmac.digest(self.collector, b"cpsgd pair collector " + role.encode(), "sha256")

    def write(self, path: Path, *, new: bool = True) -> None:
        """Writes a new file that only its owner may read, or replaces one."""
        (create_file if new else write_file)(path, json.dumps(to_dict(self), indent=1).encode() + b"\n", mode=0o600)

    @classmethod
    def read(cls, path: Path) -> Secrets:
        """Reads what `write` wrote.

        Raises:
            ParameterError: The file holds something else, or others than its owner may read it.
        """
        if os.name == "posix" and path.stat().st_mode & 0o077:
            raise ParameterError(f"Others may read {path}, which holds secrets: chmod 600 {path}.")
        return build(cls, parse(path.read_bytes(), str(path)))


def make_keys(rounds: int) -> tuple[bytes, ...]:
    """Returns private keys for a server of a task: one per round, up to 64."""
    return tuple(secrets.token_bytes(32) for _ in range(min(rounds, MOST_KEYS)))


def public_keys(private: Sequence[bytes]) -> tuple[bytes, ...]:
    """Returns the public keys of private ones; empty for deleted ones."""
    return tuple(
        X25519PrivateKey.from_private_bytes(each).public_key().public_bytes_raw() if each else b"" for each in private
    )


def create_task(
    protocol: Protocol,
    *,
    leader: str,
    helper: str,
    rounds: int = 1,
    admission: Admission = "roster",
    server_messages: int = 0,
    leader_keys: tuple[bytes, ...] | None = None,
    helper_keys: tuple[bytes, ...] | None = None,
) -> tuple[PairTask, dict[str, Secrets]]:
    """Returns a new task, and the secrets of "leader", "helper" and "collector".

    Args:
        protocol: Planned with `plan(..., pair=True)`.
        leader: Address of the leader.
        helper: Address of the helper.
        rounds: Number of rounds.
        admission: Who may send.
        server_messages: Messages of zero that each server adds, as the protocol was planned.
        leader_keys: The leader's public keys, where it made the private ones itself; else both are made here.
        helper_keys: The helper's.

    Example:
        >>> from cpsgd import plan
        >>> best = plan(clients=100, dim=50, epsilon=4.0, delta=1e-6, pair=True, rounds=10)
        >>> task, secrets = create_task(best.protocol, leader="https://a", helper="https://b", rounds=10)
        >>> task.rounds, task.leader.url, sorted(secrets)
        (10, 'https://a', ['collector', 'helper', 'leader'])
    """
    verification, peer, collector = (secrets.token_bytes(32) for _ in range(3))
    roles: tuple[Role, ...] = ("leader", "helper")
    known = {"leader": leader_keys, "helper": helper_keys}
    private = {role: make_keys(rounds) if known[role] is None else () for role in roles}
    task = PairTask(
        protocol=protocol,
        rounds=rounds,
        leader=Endpoint(leader, leader_keys or public_keys(private["leader"])),
        helper=Endpoint(helper, helper_keys or public_keys(private["helper"])),
        verification=hashlib.sha256(verification).digest(),
        admission=admission,
        server_messages=server_messages,
    )
    own = Secrets(collector)
    servers: dict[str, Secrets] = {
        role: Secrets(own.collector_token(role), private[role], verification, peer) for role in roles
    }
    return task, {**servers, "collector": own}
