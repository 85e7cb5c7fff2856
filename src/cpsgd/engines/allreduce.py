"""The paper's server-less mode: workers add their integers by an all-reduce, and each decodes the same mean.

Who may see what
----------------
There is no server. Every worker adds its own share of noise, m coin flips per coordinate, before anything leaves it.

* **A curious worker** knows its own noise and can subtract it from the sum. What protects the others from it is the
  noise of the n - 1 others, so rounds are planned and accounted with `colluding=1` or more; c workers who
  collude are `colluding=c`. Outsiders, who see the trained model only, are covered as well.
* **What travels.** An all-reduce is not secure aggregation: on the way, workers receive *partial* sums, with as little
  as one worker's noise in them. Workers are trusted to look at the result of the collective alone, and the links
  between them must be private. Where that is too much to ask, plan with `colluding=n - 1`: then each worker's own noise
  suffices, every message is (ε, δ)-private by itself, and it does not matter who sees what. Mechanisms whose integers
  wrap around need that: their proofs are about sums modulo M, and an all-reduce does not reduce.
* **Workers follow the protocol.** One that adds no noise, or wrong integers, is not detected.
* **A refusal is seen.** That a worker had no finite vector is told to all workers, as is any error that ends a run.

What a run costs is proved for `rounds` rounds when it begins; the first of them cost no more than all.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cpsgd import _validate
from cpsgd._numbers import rounded_up
from cpsgd._torch import torch
from cpsgd.codec import wire
from cpsgd.errors import InfeasibleError, ParameterError, TransportError, WorkerError
from cpsgd.ledger import Entry, Ledger, RoundEvent
from cpsgd.neighbours import Adjacency, Participation
from cpsgd.planner.examples import check_participation
from cpsgd.privacy.guarantees import Guarantee, guarantee
from cpsgd.protocol import Protocol
from cpsgd.run import Run

Group = torch.distributed.ProcessGroup

# What each worker tells the others before a round: a digest of all it was set up with, the round, and how it is.
_DIGEST_BYTES = 16
_RECORD_BYTES = _DIGEST_BYTES + 8 + 1
_READY, _REFUSED, _UNPAID = range(3)

# Longest wait for the transport's threads to let go of a buffer, should anything else hold it for good.
_RELEASE_SECONDS = 5.0


class PrivateMean:
    """The private mean of one vector per worker, by an all-reduce of integers, within a budget.

    Before integers are mixed, workers compare their settings and rounds, whether each has a finite vector, and whether
    the ledger pays, if there is one. If anything is wrong, all of them raise, and nothing was sent.

    Attributes:
        protocol: The parameters of every round.
        workers: n.
        round: Number of the next round; all before it count as spent.
        rounds: The rounds that the budget was checked for.

    Example:
        In each of two processes, as `torchrun --standalone --nproc-per-node 2 FILE` starts them. Each has the sum of
        1,000 examples' vectors, and one example is protected:

        >>> import torch  # doctest: +SKIP
        >>> import cpsgd  # doctest: +SKIP
        >>> from cpsgd.planner import plan_examples  # doctest: +SKIP
        >>> torch.distributed.init_process_group("gloo")  # doctest: +SKIP
        >>> budget = {"epsilon": 2.0, "delta": 1e-6, "rounds": 1}  # doctest: +SKIP
        >>> best = plan_examples(2, 2, **budget, examples=1000, colluding=1)  # doctest: +SKIP
        >>> private = cpsgd.PrivateMean(best.protocol, **budget, examples=1000)  # doctest: +SKIP
        >>> found = private.mean(lambda: [500.0, -200.0])  # doctest: +SKIP
        >>> print((found / 1000).round(1))  # doctest: +SKIP
        [ 0.5 -0.2]
    """

    def __init__(
        self,
        protocol: Protocol,
        *,
        epsilon: float,
        delta: float,
        rounds: int,
        colluding: int = 1,
        examples: int | None = None,
        participation: Literal["once", "every"] = "every",
        adjacency: Adjacency | str = Adjacency.REPLACE_ONE,
        first_round: int = 0,
        ledger: Ledger | None = None,
        population: str | None = None,
        run: str | None = None,
        group: Group | None = None,
    ) -> None:
        """Checks that the budget reaches to all rounds. Sends nothing.

        Args:
            protocol: The parameters of every round, with one client per worker.
            epsilon: ε that all rounds together may cost.
            delta: δ of the guarantee, in total.
            rounds: Rounds that may be run, those before `first_round` included.
            colluding: Workers whose noise does not count, because somebody who sees the sum knows it: at least one.
            examples: The most examples of a worker's vector, to protect one example; None protects a worker's data.
            participation: "every" if data may be used in all rounds, "once" if an example is used in one round only.
            adjacency: Which data sets are neighbours.
            first_round: Round to begin with, for a run that goes on; rounds before it count as spent.
            ledger: The first worker charges every round to it before integers are mixed; those of others are not used.
            population: With a ledger: the population whose budget pays.
            run: With a ledger: the run's name there, for a run that goes on; a new one by default. With
                participation="once" rounds of one name cost an example one round.
            group: The workers, by default all processes; it must carry tensors of the CPU (gloo).

        Raises:
            InfeasibleError: The budget is too small for the rounds.
            ConditionError: Nothing is proved about them.
            ParameterError: The group does not fit the protocol, or there is none.
        """
        if not isinstance(protocol, Protocol):
            raise ParameterError(f"Expected a protocol (of a plan, its `protocol`), got {type(protocol).__name__}.")
        protocol.mechanism.memory.check_stateless(
            f"{protocol.mechanism.name}: workers keep no noise from round to round, and none would be taken away "
            "again. Plan without `correlated`, or use Flower."
        )
        if not torch.distributed.is_initialized():
            raise ParameterError(
                "There are no workers yet: call torch.distributed.init_process_group first, in every process. Where "
                "one machine plays all clients, use RoundSimulator."
            )
        self.protocol = protocol
        self.workers = torch.distributed.get_world_size(group)
        self.rounds = _validate.integer("rounds", rounds, low=1, high=wire.MAX_ROUND)
        self.round = _validate.integer("first_round", first_round, low=0, high=self.rounds)
        self.epsilon_limit = _validate.positive("epsilon", epsilon)
        self.delta = _validate.fraction("delta", delta)
        self.colluding = _validate.integer("colluding", colluding, low=1)
        self._adjacency = Adjacency.parse(adjacency)
        self._participation = participation
        self._group = group
        self._check_group()
        if protocol.mechanism.wraps and self.colluding < self.workers - 1:
            raise ParameterError(
                f"{protocol.mechanism.name}: an all-reduce shows workers the sum itself, and its ε is that of the sum "
                f"modulo {protocol.modulus:,}. Plan with colluding={self.workers - 1}, where each message protects "
                "itself, or use secure aggregation."
            )
        check_participation(participation)
        self.examples = None if examples is None else _validate.integer("examples", examples, low=1)
        if self.examples is None and participation == "once":
            raise ParameterError(
                "participation='once' speaks of examples that are used once; a worker takes part in every round. "
                "Give `examples`, or use participation='every'."
            )
        if (ledger is None) != (population is None):
            raise ParameterError("Give ledger and population together.")
        self._ledger = ledger
        self._population = population
        self._run = secrets.token_hex(8) if run is None else run
        self._entry: Entry | None = None
        self._lanes = Lanes(protocol.dim, self.workers * (protocol.mechanism.values - 1) + 1)
        self._digest = self._settings_digest()
        planned = self._proved(self.rounds)
        if planned.epsilon > self.epsilon_limit:
            raise InfeasibleError(
                f"{self.rounds:,} rounds of {self.workers} workers, {self.colluding} of them curious, cost "
                f"ε={rounded_up(planned.epsilon)} at δ={self.delta:g}; the budget is "
                f"ε={rounded_up(self.epsilon_limit)}. Run fewer rounds, or plan with more noise and the same "
                "`colluding`."
            )

    @property
    def payload_bytes(self) -> int:
        """Bytes of integers that a worker hands to the all-reduce in a round.

        From each worker a ring all-reduce sends 2 (n - 1)/n times that, plus a record of 25 bytes to every other.
        """
        return self._lanes.size_bytes

    @property
    def bits_per_coordinate(self) -> float:
        """Bits of payload per coordinate."""
        return 8 * self.payload_bytes / self.protocol.dim

    @property
    def epsilon(self) -> float:
        """ε spent so far."""
        found = self.guarantee()
        return 0.0 if found is None else found.epsilon

    def guarantee(self) -> Guarantee | None:
        """Returns the guarantee of the rounds so far; None before the first."""
        return self._proved(self.round) if self.round else None

    def mean(self, vector: Callable[[], ArrayLike]) -> NDArray[np.float32]:
        """Runs one round: returns the mean of all workers' vectors, the same bits on every worker.

        All workers must call it together.

        Args:
            vector: Computes this worker's vector. A failure in it is told to the others, so that nobody waits.

        Raises:
            NonFiniteError: This worker's vector is NaN or infinite somewhere.
            InfeasibleError: All rounds of the budget are used.
            LedgerError: This is the first worker, and the ledger does not pay for the round.
            WorkerError: Another worker refused, or is set up differently or in another round.
            TransportError: The collective failed. If integers may have left this machine, the round counts as spent.
        """
        failure: Exception | None = None
        status = _REFUSED
        integers = np.empty(0, dtype=np.uint32)
        if self.round >= self.rounds:
            failure = InfeasibleError(
                f"All {self.rounds:,} rounds of the budget ε={rounded_up(self.epsilon_limit)} are used; nothing was "
                "sent."
            )
        else:
            try:
                integers = self.protocol.encode_integers(vector(), self.round)
                status = _UNPAID
                self._pay()
                status = _READY
            except Exception as error:  # whatever it is, the other workers are waiting to hear of it
                failure = error
        problem = self._compare(status)
        if failure is not None:
            raise failure
        if problem is not None:
            raise WorkerError(f"{problem} Nothing was added up or released.")
        number = self.round
        # From here on integers may be seen, so the round is spent whatever happens.
        self.round += 1
        lanes = self._lanes.forward(integers)
        self._carry(
            lambda: torch.distributed.all_reduce(torch.from_numpy(lanes), group=self._group),
            lanes,
            f"Round {number} counts as spent.",
        )
        # Held to `epsilon` for the workers who are really there, before the first round.
        unpromised = replace(self.protocol, promise=None)
        return unpromised.decode_sum(self._lanes.backward(lanes), self.workers, number)

    # ------------------------------------------------------------------ before a round

    def _pay(self) -> None:
        """Charges the round to the ledger, once; only the first worker does so."""
        if self._ledger is None or self._population is None or torch.distributed.get_rank(self._group) != 0:
            return
        if self._entry is None:
            budget = self._ledger.budget(self._population)
            if budget.adjacency != self._adjacency:
                raise ParameterError(
                    f"The budget of {self._population!r} is for {budget.adjacency} neighbours and the rounds for "
                    f"{self._adjacency} ones; choose the same adjacency, or another budget."
                )
            # A run that cannot be paid to its end is not begun.
            self._ledger.quote(self._population, [self._event(number) for number in range(self.round, self.rounds)])
        # An entry of this round was made before some worker refused it: nothing was sent, and it still pays.
        if self._entry is None or self._entry.event.round != self.round:
            self._entry = self._ledger.reserve(self._population, self._event(self.round))
        if not self._entry.released:
            self._entry = self._ledger.release(self._entry, self.workers)

    def _event(self, number: int) -> RoundEvent:
        """Returns a round as the ledger records it."""
        scheme = Participation.parse(self._participation)
        participation, partition = self.protocol.mechanism.memory.charging(scheme, self._run, number)
        return RoundEvent(
            self.protocol,
            survivors=self.workers,
            participation=participation,
            colluding=self.colluding,
            round=number,
            run=self._run,
            partition=partition,
            examples=self.examples,
            label="cpsgd all-reduce",
        )

    def _compare(self, status: int) -> str | None:
        """Exchanges records with all workers; returns what is wrong with another worker's, or None."""
        record = self._digest + self.round.to_bytes(8, "little") + bytes([status])
        records = np.zeros((self.workers + 1, _RECORD_BYTES), dtype=np.uint8)  # theirs by rank, then our own
        records[-1] = list(record)

        def gather() -> None:
            *theirs, own = torch.from_numpy(records).unbind()
            torch.distributed.all_gather(theirs, own, group=self._group)

        self._carry(gather, records, "Nothing was sent.")
        for worker, theirs in enumerate(map(bytes, records[:-1])):
            if theirs[:_DIGEST_BYTES] != self._digest:
                return f"Worker {worker} has another protocol, budget or unit of privacy than this one."
            if theirs[_DIGEST_BYTES:-1] != record[_DIGEST_BYTES:-1]:
                other = int.from_bytes(theirs[_DIGEST_BYTES:-1], "little")
                return f"Worker {worker} is in round {other}, this one in round {self.round}."
            if theirs[-1] == _UNPAID:
                return f"Worker {worker} refused: the privacy ledger does not pay for the round."
            if theirs[-1] != _READY:
                return f"Worker {worker} refused: it could not compute its vector, or the vector is not finite."
        return None

    def _settings_digest(self) -> bytes:
        """Returns a digest of all settings on which the workers must agree."""
        settings = {
            "version": 1,
            "protocol": self.protocol.fingerprint.hex(),
            "workers": self.workers,
            "epsilon": self.epsilon_limit.hex(),
            "delta": self.delta.hex(),
            "rounds": self.rounds,
            "colluding": self.colluding,
            "examples": self.examples,
            "participation": self._participation,
            "adjacency": self._adjacency,
            "population": self._population,
        }
        text = "cpsgd all-reduce" + json.dumps(settings, sort_keys=True)
        return hashlib.sha256(text.encode()).digest()[:_DIGEST_BYTES]

    def _check_group(self) -> None:
        """Refuses a protocol or a group of processes that does not fit the workers."""
        self.protocol.check_integers()
        if self.protocol.clients != self.workers:
            raise ParameterError(
                f"The protocol is for {self.protocol.clients} clients, but there are {self.workers} workers; plan "
                f"with clients={self.workers}."
            )
        if "cpu:" not in torch.distributed.get_backend_config(self._group):
            raise ParameterError(
                "Integers are added on the CPU, which this group's backend does not do: pass "
                'group=torch.distributed.new_group(backend="gloo").'
            )

    def _proved(self, rounds: int) -> Guarantee:
        """Returns the guarantee of this many rounds together."""
        run = Run.of(
            self.protocol,
            rounds=rounds,
            participation=self._participation,
            adjacency=self._adjacency,
            surviving=self.workers,
            colluding=self.colluding,
            examples=self.examples,
        )
        return guarantee(run, self.delta)

    @staticmethod
    def _carry(collective: Callable[[], object], buffer: NDArray[np.generic], consequence: str) -> None:
        """Runs a collective on `buffer`, and returns when the transport no longer uses the buffer."""
        held = sys.getrefcount(buffer)
        try:
            collective()
        except RuntimeError as error:  # what torch.distributed raises for lost peers and timeouts
            raise TransportError(
                f"The collective failed: a worker ended, or did not come in time. {consequence} ({error})"
            ) from None
        # Gloo's thread drops its tensor a moment after it has woken us, and takes the interpreter's lock to do so. A
        # program that ends in between is aborted, and `destroy_process_group` does not wait, since DDP keeps the group.
        deadline = time.monotonic() + _RELEASE_SECONDS
        while sys.getrefcount(buffer) > held and time.monotonic() < deadline:
            time.sleep(1e-4)


@dataclass(frozen=True)
class Lanes:
    """Several small sums in one 64-bit integer: how `dim` digits below `radix` are laid out.

    A collective adds integers of 8, 32 or 64 bits and knows nothing between. Where a coordinate's sum stays below R, c
    coordinates share a lane as the digits Σ v_j R^j of a number below R^c <= 2^63: adding lanes adds the digits, and no
    digit ever carries into the next. That takes 64/c bits per coordinate.

    Attributes:
        dim: d, the number of digits.
        radix: R; sums of digits must stay below it.

    Example:
        >>> lanes = Lanes(dim=5, radix=1000)
        >>> lanes.digits, lanes.count, lanes.size_bytes
        (6, 1, 8)
        >>> one, two = (lanes.forward(np.array(v, np.uint32)) for v in ([1, 2, 3, 4, 5], [600, 0, 7, 0, 994]))
        >>> lanes.backward(one + two).tolist()
        [601, 2, 10, 4, 999]
    """

    dim: int
    radix: int

    def __post_init__(self) -> None:
        _validate.integer("dim", self.dim, low=1)
        _validate.integer("radix", self.radix, low=2, high=2**62)

    @property
    def digits(self) -> int:
        """c, digits per lane."""
        digits, power = 1, self.radix * self.radix
        while power <= 2**63:
            digits, power = digits + 1, power * self.radix
        return digits

    @property
    def count(self) -> int:
        """Lanes that hold all digits."""
        return -(-self.dim // self.digits)

    @property
    def size_bytes(self) -> int:
        """Bytes of all lanes."""
        return 8 * self.count

    def forward(self, values: NDArray[np.uint32]) -> NDArray[np.int64]:
        """Returns the lanes; digit j of lane i is value j · `count` + i."""
        lanes = np.zeros(self.count, dtype=np.int64)
        for start in reversed(range(0, self.dim, self.count)):
            part = values[start : start + self.count]
            lanes *= self.radix
            lanes[: part.size] += part
        return lanes

    def backward(self, lanes: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Returns the digits of lanes, or of a sum of lanes."""
        rest = lanes.astype(np.uint64)
        values = np.empty(self.dim, dtype=np.uint64)
        for start in range(0, self.dim, self.count):
            part = values[start : start + self.count]
            rest, digits = np.divmod(rest, np.uint64(self.radix))
            part[:] = digits[: part.size]
        return values
