"""`Ledger`: reserve before a round runs, release before its result is handed out, and know what is spent."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from cpsgd import _validate
from cpsgd.errors import (
    BudgetExceededError,
    BudgetExpiredError,
    EntryError,
    LedgerError,
    PopulationError,
)
from cpsgd.ledger import chain, charging, verification
from cpsgd.ledger.chain import Head
from cpsgd.ledger.charging import Total
from cpsgd.ledger.entries import Budget, Entry, RoundEvent, name
from cpsgd.ledger.kinds import Account, Room, octave_of
from cpsgd.ledger.lookup import written
from cpsgd.ledger.replica import Draft, Replica, ahead, clock, now
from cpsgd.ledger.signed_reports import signed_report
from cpsgd.ledger.state import State, check_event, check_group
from cpsgd.ledger.verification import Verification
from cpsgd.ledger.witness import Line, Witness
from cpsgd.neighbours import check_cohort
from cpsgd.protocol import MAX_CLIENTS

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

FORGET_FUTURE = (
    "If that clock was wrong and this one is right, set the time back: `cpsgd budget repair --forget-future`."
)
"""The remedy for a record that is dated in the future."""


class Ledger:
    """Privacy budgets in one file that several processes may use at once.

    An entry is on the disk when the call that makes it returns. A reserved entry counts as spent for ever, released or
    not: a process that dies between the two may have shown something to somebody.

    A call that raised `LedgerStorageError` can be repeated. If its record was written, and only the witness lacks it,
    the same call of the same object returns the same entry and charges nothing more.

    The file is a log to which records are added, each with a hash of itself and all before it. Opening a long ledger
    reads the records since its last snapshot; `verify` reads all. A ledger object remembers the end of the log, and
    notices if it is gone. So does the index beside the file, which may be removed: it is made anew.

    Attributes:
        path: The file.

    Example:
        >>> import tempfile
        >>> from cpsgd.protocol import Protocol
        >>> protocol = Protocol.rotated_binomial(clients=1000, dim=100, clip_norm=1.0, levels=2, trials=200)
        >>> folder = tempfile.TemporaryDirectory()
        >>> with Ledger(f"{folder.name}/budgets.ledger") as ledger:
        ...     _ = ledger.create(Budget(population="patients-2026", epsilon=2.0, delta=1e-6))
        ...     entry = ledger.reserve("patients-2026", RoundEvent(protocol, survivors=950))
        ...     # ... the round runs ...
        ...     entry = ledger.release(entry, survivors=970)  # and now its result may be handed out
        ...     total = ledger.total("patients-2026")
        >>> print(total.rounds, "round:", total.claim)
        1 round: ε = 0.01255 at δ = 1e-06
        >>> folder.cleanup()
    """

    def __init__(self, path: str | Path, *, timeout: float = 30.0, witness: str | Path | None = None) -> None:
        """Reads the ledger in a file; where there is none, `create` makes it.

        Args:
            path: The file.
            timeout: Seconds to wait for other processes that have it locked.
            witness: A file elsewhere that gets the head after every record, before a call returns. The ledger must
                contain the newest head there; a new ledger begins a new file.

        Raises:
            LedgerFormatError: The file is not a ledger, is damaged, or is one of a newer release.
            LedgerChainError: Its records were tampered with.
            WitnessError: It does not contain what the witness has seen.
            LedgerAccessError: It, or its witness, may not be read.
        """
        self.path = Path(path)
        self._replica = Replica(self.path, timeout, None if witness is None else Witness(Path(witness)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Does nothing: no file stays open between calls."""

    # ------------------------------------------------------------------ spending

    def create(self, budget: Budget) -> Budget:
        """Opens a budget, and the ledger's file if it is the first.

        Raises:
            PopulationError: The population has a budget; budgets are never changed.
        """
        _validate.instance("budget", budget, Budget)
        if budget.group_of and not self.path.exists():
            check_group(budget, {})  # before there is a file
        if self._replica.repeated("create", budget)[0]:
            return budget
        with self._replica.appending("create", budget, create=True) as draft:
            # Another process may have failed to tell the witness.
            if any(record.get("budget") == budget.to_dict() for record in draft.unseen):
                return budget
            if budget.population in self._replica.state.budgets:
                raise PopulationError(
                    f"{budget.population!r} has a budget already, and budgets are never changed: what was promised "
                    "stays promised. Use it, or name another population."
                )
            check_group(budget, self._replica.state.budgets)
            if self._replica.state.head.number < 0:
                draft.records.append({"kind": "ledger", "format": chain.VERSION, "id": secrets.token_hex(16)})
            draft.records.append({"kind": "budget", "budget": budget.to_dict()})
        return budget

    def reserve(self, population: str, event: RoundEvent) -> Entry:
        """Charges a round before it runs. On the disk when this returns, and from then on spent.

        Args:
            population: The population whose budget pays.
            event: The round, with the fewest survivors it may be released with.

        Raises:
            BudgetExceededError: It would cost too much; it says how much is left. Nothing was recorded.
            EntryError: The run's round was reserved before (see `find`).
            ConditionError: Nothing is proved about such a round.
            ParameterError: The round is accounted for another unit or adjacency than the budget's.
        """
        _validate.instance("event", event, RoundEvent)
        _, entry = self._replica.repeated("reserve", population, event)
        if entry is not None:
            return entry
        # Priced before the lock is taken, so that others wait for the disk only; and again under the lock, which takes
        # time only if somebody else has spent meanwhile.
        with self._replica.latest() as state:
            self._price(population, event, now(state))
        with self._replica.appending("reserve", population, event) as draft:
            price = self._price(population, event, draft.time)
            if event.run and (known := draft.entries.find(population, event.run, event.round)) is not None:
                raise EntryError(
                    f"Round {event.round} of run {event.run!r} was reserved before, as entry {known.number}. A "
                    "second release would need a second charge: use another run or round."
                )
            record: dict[str, Any] = {"kind": "reserve", "population": population, "event": event.to_dict()}
            record |= {"spent": price.epsilon, "method": price.method}
            if price.rounds:
                record["covers"] = price.rounds
            if self._budget(population).filter is not None:
                record["octave"] = octave_of(self._replica.state.reserved(population, draft.time))
            draft.records.append(record)
        return draft.changed[-1]

    def release(self, entry: Entry | int, survivors: int) -> Entry:
        """Records that a round's result is about to be handed out. Hand it out only when this has returned.

        Args:
            entry: What `reserve` returned, or its number.
            survivors: Messages in the sum, with which the entry is accounted from now on.

        Raises:
            EntryError: There is no such entry, it was released before, or there are fewer survivors than reserved for.
                The result must not be handed out.
            ParameterError: There are more survivors than the accounting of correlated noise covers. The result must not
                be handed out.
        """
        survivors = _validate.integer("survivors", survivors, low=1, high=MAX_CLIENTS)
        call = ("release", entry.number if isinstance(entry, Entry) else entry, survivors)
        _, known = self._replica.repeated(*call)
        if known is not None:
            return known
        with self._replica.appending(*call) as draft:
            known = self._known(draft, entry)
            if known.closed_as is not None:
                done = "given up" if known.abandoned else "released"
                raise EntryError(f"Entry {known.number} was {done} before. A second result needs an entry of its own.")
            if survivors < known.event.survivors:
                raise EntryError(
                    f"Entry {known.number} was reserved for at least {known.event.survivors} survivors and has "
                    f"{survivors}: there is less noise than was paid for. Do not release the result; the entry "
                    "stays spent."
                )
            protocol = known.event.protocol
            protocol.mechanism.memory.check_messages(survivors, protocol.clients)
            check_cohort(known.event.taking_part, survivors, known.event.colluding, known.event.most_messages)
            draft.records.append({"kind": "release", "entry": known.number, "survivors": survivors})
        return draft.changed[-1]

    def abandon(self, entry: Entry | int, reason: str) -> Entry:
        """Gives up a reserved round of which nothing was shown to anybody, and nothing ever will be.

        It no longer costs anything, and its run may reserve the round again. The ledger takes the caller's word, which
        is on record. A message sent without secure aggregation, a sum, or anything computed from it has been shown.

        Call it where a round ends before any client was asked for its data, as `RoundSession` does when a round is
        withheld while keys are exchanged. Do not call it where a run may be resumed: `Trainer` draws a round's noise
        before it reserves, and a run that stopped between that and the release goes on with its entry.

        Args:
            entry: What `reserve` returned, or its number.
            reason: The reason why nothing was shown, for people.

        Raises:
            EntryError: There is no such entry, or it was released or given up before.
        """
        name("reason", reason, empty=False)
        call = ("abandon", entry.number if isinstance(entry, Entry) else entry, reason)
        _, known = self._replica.repeated(*call)
        if known is not None:
            return known
        with self._replica.appending(*call) as draft:
            known = self._known(draft, entry)
            # Another process may have failed to tell the witness.
            if known.abandoned and any(
                record["number"] == known.abandoned_as and record["reason"] == reason for record in draft.unseen
            ):
                draft.changed.append(known)  # for a call that fails again
                return known
            if known.closed_as is not None:
                done = "given up" if known.abandoned else "released, and its result may have been seen,"
                raise EntryError(f"Entry {known.number} was {done} before: it cannot be given up.")
            draft.records.append({"kind": "abandon", "entry": known.number, "reason": reason})
        return draft.changed[-1]

    # ------------------------------------------------------------------ asking

    def quote(self, population: str, events: Sequence[RoundEvent]) -> Total:
        """Returns the total that would be spent after these rounds, if the budget allows them. Nothing is recorded.

        Raises:
            BudgetExceededError: The budget does not allow them.
            ConditionError: Nothing is proved about such rounds.
        """
        with self._replica.latest() as state:
            self._budget(population)
            found = []
            time = now(state)
            for budget, accounts in state.purses(population, time):
                _check(budget, accounts, events, time, ahead(state))
                found.append(charging.priced(budget, accounts, events, state.reserved(population, time)))
                if found[-1].epsilon > budget.epsilon:
                    raise _exceeded(budget, accounts, found[-1], ahead(state))
            return found[0]

    def total(self, population: str) -> Total:
        """Returns the cost of all rounds so far, including entries that were reserved and not released.

        For a group these are its own rounds and those of the whole population, for a budget that renews the rounds of
        the current period.
        """
        with self._replica.latest() as state:
            self._budget(population)
            return charging.spent(*state.purses(population, now(state))[0])

    def lifetime(self, population: str) -> Total:
        """Returns the cost of the rounds of all periods, for somebody whose data was in all of them.

        For adaptive budgets, where that is more than the budget, ε and δ of the periods are added up.
        """
        with self._replica.latest() as state:
            return charging.over_periods(self._budget(population), state.accounts_of(population))

    def budget(self, population: str) -> Budget:
        """Returns a population's budget."""
        with self._replica.latest():
            return self._budget(population)

    def budgets(self) -> tuple[Budget, ...]:
        """Returns all budgets, oldest first."""
        with self._replica.latest() as state:
            return tuple(state.budgets.values())

    def events(self, population: str, last: int | None = None) -> tuple[Entry, ...]:
        """Returns the population's entries, oldest first; with `last`, this many from the end."""
        with self._replica.looking() as (_, entries):
            self._budget(population)
            return tuple(entries.all(population) if last is None else entries.last(population, last))

    def find(self, population: str, *, run: str, round: int) -> Entry | None:
        """Returns the entry of a run's round, for a run that goes on after a crash; None if it was never reserved.

        The entry pays for one result. Go on with it only if no result was shown before, or if the round will have the
        very same result again (because its noise follows from a seed).
        """
        with self._replica.looking() as (_, entries):
            self._budget(population)
            return entries.find(population, run, round)

    def rounds(self, population: str, run: str) -> frozenset[int]:
        """Returns the rounds of a run that were reserved."""
        with self._replica.looking() as (_, entries):
            self._budget(population)
            return entries.rounds(population, run)

    @property
    def head(self) -> Head:
        """The last record's number and hash. Keep it elsewhere; see `verify`."""
        with self._replica.latest() as state:
            return state.head

    def verify(
        self,
        head: str | Head | None = None,
        *,
        witness: str | Path | None = None,
        signers: Iterable[bytes] | None = None,
    ) -> Verification:
        """Reads all records from the file again and checks every hash, every snapshot and the index.

        Args:
            head: A head printed earlier, as "number:hash" or the hash alone. The chain must contain it.
            witness: A file of heads, all of which the chain must contain; by default that of this object, if any.
            signers: Raw public keys, one of which must have signed each of these.

        Raises:
            WitnessError: A line of the witness is not in the chain, or not signed.
            LedgerChainError: A record was changed, removed or inserted, or the chain does not contain `head`: it was
                cut off, replaced by an older copy, or rewritten.
            LedgerFormatError: It is not a ledger, or what is kept beside its records does not follow from them.
        """
        seen = self._replica.witness if witness is None else Witness(Path(witness))
        return verification.verify(self._replica, head, seen, signers)

    def seen(self, identity: Ed25519PrivateKey | None = None) -> Line:
        """Returns the ledger's head as a line for a witness, signed if an identity is given."""
        with self._replica.latest() as state:
            line = Line(state.head, now(state))
        return line if identity is None else line.signed(identity)

    def report(self, identity: Ed25519PrivateKey) -> dict[str, Any]:
        """Returns a signed report of the spending of every budget, for readers without the ledger or the data.

        `cpsgd.ledger.check_report` verifies it.
        """
        with self._replica.latest() as state:
            return signed_report(state, now(state), identity)

    def repair(self) -> Head:
        """Reads all records, checks every hash, and makes the index beside them anew.

        Returns:
            The last record.

        Raises:
            LedgerChainError: The records themselves were changed, or the last of them are missing.
        """
        with self._replica.lock:
            if self._replica.state.head.number >= 0:
                _ = self.head  # refuses a file that went back in time
            self._replica.forget()
            with self._replica.appending(whole=True):
                pass
            return self._replica.state.head

    def forget_future(self, reason: str) -> Head:
        """Sets the ledger's time back to this machine's clock, where a record is dated in the future.

        The time of a ledger never goes back by itself, so one record by a clock that was ahead ends budgets that expire
        and stops those that renew. All records stay, and one more says what was done. Rounds of periods that are to
        come count in the present period as well: nobody gains a round by this, whichever clock is wrong.

        Args:
            reason: The reason why the later time is wrong, for people.

        Returns:
            The new record.

        Raises:
            LedgerError: The last record is not dated in the future.
        """
        name("reason", reason, empty=False)
        with self._replica.appending() as draft:
            state, time = self._replica.state, clock()
            if not ahead(state):
                raise LedgerError(f"The last record of {self.path} is not dated in the future: there is no need.")
            # A record that cannot be applied must not be written.
            State.from_text(state.to_text(), state.head).set_back(time)
            draft.records.append({"kind": "clock", "reason": reason, "time": time})
        return self._replica.state.head

    def export(self) -> dict[str, Any]:
        """Returns everything as plain JSON values: the records with their hashes, and the totals."""
        with self._replica.looking() as (log, entries):
            state = self._replica.state
            records = [{"number": end.records - 1, "body": text, "hash": end.hash} for text, end in written(log)]
            populations = [
                {
                    **budget.to_dict(),
                    "total": charging.spent(*state.purses(name, now(state))[0]).to_dict(),
                    "entries": [entry.to_dict() for entry in entries.all(name)],
                }
                for name, budget in state.budgets.items()
            ]
            return {
                "format": "cpsgd ledger 1",
                "head": str(state.head),
                "populations": populations,
                "records": records,
            }

    # ------------------------------------------------------------------ inside

    def _budget(self, population: str) -> Budget:
        """Returns the population's budget, or raises `PopulationError`."""
        try:
            return self._replica.state.budgets[population]
        except (KeyError, TypeError):
            known = ", ".join(map(repr, self._replica.state.budgets)) or "none"
            raise PopulationError(
                f"The ledger {self.path} has no budget for {population!r}; it has {known}. Create one first."
            ) from None

    def _known(self, draft: Draft, entry: Entry | int) -> Entry:
        """Returns the recorded entry, after checking that the given one agrees with it."""
        number = entry.number if isinstance(entry, Entry) else _validate.integer("entry", entry, low=0)
        known = draft.entries.get(number)
        if known is None or (isinstance(entry, Entry) and known.event != entry.event):
            raise EntryError(f"The ledger {self.path} has no such entry {number}; was it reserved in another?")
        return known

    def _price(self, population: str, event: RoundEvent, time: str) -> Room:
        """Returns the price of a round; raises if one of the budgets that pay for it does not cover it."""
        self._budget(population)
        prices = []
        reserved = self._replica.state.reserved(population, time)
        for budget, accounts in self._replica.state.purses(population, time):
            _check(budget, accounts, [event], time, ahead(self._replica.state))
            price = charging.affordable(budget, accounts, event, reserved)
            if price is None:
                asked = charging.priced(budget, accounts, [event], reserved)
                raise _exceeded(budget, accounts, asked, ahead(self._replica.state))
            prices.append(price)
        return prices[0] if len(prices) == 1 else replace(prices[0], rounds=0)


def _check(budget: Budget, accounts: Sequence[Account], events: Sequence[RoundEvent], time: str, future: str) -> None:
    """Refuses rounds that the budget is not for."""
    if budget.expired(time):
        if future:
            raise BudgetExpiredError(
                f"The budget of {budget.population!r} expired on {budget.expires}, and the ledger's last record is "
                f"dated {future}, which is in the future. {FORGET_FUTURE}"
            )
        raise BudgetExpiredError(
            f"The budget of {budget.population!r} expired on {budget.expires}: nothing more is charged to it. Create "
            "another one, for data that is not in this one's rounds."
        )
    for event in events:
        check_event(budget, accounts, event)


def _exceeded(budget: Budget, accounts: Sequence[Account], asked: Total, future: str) -> BudgetExceededError:
    hint = f"The budget renews, but the ledger's last record is dated {future}, in the future. {FORGET_FUTURE}"
    return BudgetExceededError(
        budget.population,
        limit=budget.epsilon,
        spent=charging.spent(budget, accounts).epsilon,
        total=asked.epsilon,
        delta=budget.delta,
        hint=hint if future and budget.renews else "",
    )
