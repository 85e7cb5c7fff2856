"""`KeyRing`: a server's private keys for sealed parts, each for some rounds, deleted when the last of these is closed.

Whoever records uploads and gets a server's keys later reads nothing of the rounds that were closed before.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from cpsgd.engines.pair.task import PairTask, Secrets, public_keys
from cpsgd.errors import ParameterError, StageError, StoreError
from cpsgd.secagg.pair.sealing import Role


class KeyRing:
    """The private keys of one server, and the file that they are deleted from."""

    def __init__(self, task: PairTask, role: Role, secrets: Secrets, file: Path | None = None) -> None:
        """Checks that the keys are the task's.

        Args:
            task: The task.
            role: "leader" or "helper".
            secrets: Hold the private keys; a deleted one is empty.
            file: The file that holds them; None in memory only.

        Raises:
            ParameterError: A key is missing, or another than the task's.
        """
        if not secrets.private:
            raise ParameterError("There are no private keys in this file: give those of `cpsgd pair keys` with --keys.")
        expected = task.endpoint(role).keys
        found = public_keys(secrets.private)
        if tuple(known if own == b"" else own for own, known in zip_longest(found, expected)) != expected:
            raise ParameterError(f"These are not the private keys of the task's {role}.")
        self._task, self._role, self._secrets, self._file = task, role, secrets, file
        self._keys = [X25519PrivateKey.from_private_bytes(each) if each else None for each in secrets.private]

    def key(self, round: int) -> X25519PrivateKey:
        """Returns the key of a round.

        Raises:
            StageError: It was deleted, as the round is closed.
        """
        found = self._keys[self._task.key_number(self._role, round)]
        if found is None:
            raise StageError(f"The key of round {round} was deleted when the round was closed.")
        return found

    def delete_before(self, current: int) -> None:
        """Deletes the keys that only rounds before the current one have; all after the last round.

        Raises:
            StoreError: The file cannot be written. The keys are still there.
        """
        rounds = self._task.rounds
        keep = self._task.key_number(self._role, current) if current < rounds else len(self._keys)
        if not any(self._keys[:keep]):
            return
        left = replace(self._secrets, private=(b"",) * keep + self._secrets.private[keep:])
        if self._file is not None:
            try:
                left.write(self._file, new=False)
            except OSError as error:
                raise StoreError(f"Used keys cannot be deleted from {self._file}: {error.strerror}.") from None
        self._secrets, self._keys[:keep] = left, [None] * keep
