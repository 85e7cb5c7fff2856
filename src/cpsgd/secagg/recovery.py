"""`Recovery`: puts secrets together from what clients revealed, also if some of it is wrong, and says whose it was.

A wrong share was either dealt or revealed wrongly, and nobody can see which. But of each such pair of clients at least
one does not follow the protocol; so somebody who is in many pairs is to blame, if not many are (`offenders`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress

from cpsgd import _validate
from cpsgd.errors import ShareError
from cpsgd.secagg import shamir

# Many liars among many clients must not keep the server busy: who is in so many disputes needs no more of them.
_ENOUGH_PAIRS = 256
_RUNS = 32


class Recovery:
    """The secrets of one round.

    Attributes:
        disputed: Owner and holder of each share that was found to be wrong; at most 256 of one holder.
    """

    def __init__(self, threshold: int, colluding: int = 1) -> None:
        """Nothing is recovered yet.

        Args:
            threshold: Shares that give a secret.
            colluding: How many may lie together. What so many could make look like another's lie is nobody's.
        """
        self.disputed: set[tuple[int, int]] = set()
        self._threshold, self._colluding = threshold, colluding
        self._pairs: Counter[int] = Counter()  # of each holder

    def secret(self, owner: int, shares: Mapping[int, bytes], fits: Callable[[bytes], bool]) -> bytes:
        """The secret of `owner` of which these are shares, by holder; `fits` says whether it is the one.

        Raises:
            ShareError: Too many shares are wrong; more than so many holders can have made wrong, if it has a `dealer`.
        """
        for right in self._guesses(shares):
            found = _combined(right)
            if found is not None and fits(found):
                self._note(owner, shares, right, found)
                return found
        spare, lies = len(shares) - self._threshold, self._colluding
        # So many lies are always found: half as many as are to spare, and also one where all but each are tried.
        dealt_wrongly = spare >= 2 * lies or (spare == lies == 1 and len(shares) < _RUNS)
        raise ShareError(
            f"The shares of a secret of client {owner} do not give it: too many of them are wrong.",
            dealer=owner if dealt_wrongly else None,
        )

    def _note(self, owner: int, shares: Mapping[int, bytes], right: Mapping[int, bytes], secret: bytes) -> None:
        """Notes which of the other shares are wrong: those that do not give the secret together with right ones.

        Liars among the latter can make their errors cancel, so that the secret comes out and the others look wrong. Not
        if all are of one polynomial, which has t values in common with the true one: the secret, and those of so many
        shares that t - 1 of them are right whoever lies.
        """
        if shares.keys() == right.keys() or len(right) < self._threshold + self._colluding - 1:
            return
        if not shamir.consistent(right, self._threshold):
            return
        others = {holder: right[holder] for holder in sorted(right)[: self._threshold - 1]}
        for holder in shares.keys() - right.keys():
            if self._pairs[holder] < _ENOUGH_PAIRS and _combined({**others, holder: shares[holder]}) != secret:
                self.disputed.add((owner, holder))
                self._pairs[holder] += 1

    def _guesses(self, shares: Mapping[int, bytes]) -> Iterator[dict[int, bytes]]:
        """Shares that may all be right."""
        trusted = {holder: share for holder, share in shares.items() if holder not in self._pairs}
        if len(trusted) >= self._threshold:
            yield trusted
        with suppress(ShareError):
            _, wrong = shamir.decode(shares, self._threshold)
            yield {holder: share for holder, share in shares.items() if holder not in wrong}
        # More may be wrong than a decoder can find, but the commitment tells whether some of the others are right.
        holders = sorted(shares)
        for start in range(0, len(holders) if len(holders) > self._threshold else 0, 1 + len(holders) // _RUNS):
            yield {holder: shares[holder] for holder in (holders[start:] + holders[:start])[: self._threshold]}


def offenders(disputed: Iterable[tuple[int, int]], most: int) -> frozenset[int]:
    """The clients that have not followed the protocol for certain, if at most `most` clients have not.

    Who is honest is in dispute with such clients only, with as many others as these are; and never with itself.

    Example:
        >>> sorted(offenders([(0, 5), (1, 5), (2, 5), (2, 3), (3, 2)], most=2))
        [5]
    """
    most = _validate.integer("most", most, low=1)
    # Two clients may be in two disputes, each as the owner of one secret: that is one other client for either.
    pairs = {frozenset(pair) for pair in disputed}
    counts = Counter(client for pair in pairs for client in pair)
    return frozenset(client for client, count in counts.items() if count > most or {client} in pairs)


def _combined(shares: Mapping[int, bytes]) -> bytes | None:
    try:
        return shamir.combine(shares)
    except ShareError:
        return None
