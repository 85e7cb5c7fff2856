"""`Trainer`: synchronous rounds of distributed SGD through a private mean (the paper's section 1).

In a round the server sends the model to a cohort of clients; each answers with its clipped update through the protocol;
the server takes a step along the mean. All parties live on this machine.

**A seed makes a simulation.** With a seed, noise and cohorts follow from it: two runs are equal bit for bit on the same
software, and a run that was killed continues as if nothing had happened. Noise that can be repeated protects nobody, so
such a run shows what training with this privacy costs and is not itself private. Without a seed, noise comes from the
operating system; on a GPU it comes from a counter either way (`cpsgd.simulation.device`), and the run is a simulation.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom

from cpsgd import _validate
from cpsgd._torch import torch
from cpsgd.errors import CheckpointError, DivergedError, InfeasibleError, ParameterError
from cpsgd.learning import devices, mechanisms, optimizers
from cpsgd.learning.charging import RunCharges
from cpsgd.learning.cohorts import Cohorts
from cpsgd.learning.datasets.base import Dataset
from cpsgd.learning.examples import ExampleSums, check_participation
from cpsgd.learning.gradients import DEFAULT_MEMORY, DEVICE_MEMORY, ClientUpdates, Loss, trainable
from cpsgd.learning.mechanisms import Mechanism
from cpsgd.learning.metrics import RoundMetrics
from cpsgd.learning.places import Accelerator, Processors
from cpsgd.learning.repeatable import fixed_draws, one_thread
from cpsgd.learning.run_folder import Progress, RunFolder
from cpsgd.learning.server import Server
from cpsgd.learning.spending import OVERFLOW_SHARE, Spending
from cpsgd.ledger import Ledger
from cpsgd.planner.result import Plan
from cpsgd.privacy.adjacency import Adjacency
from cpsgd.privacy.participation import Scheme
from cpsgd.privacy.rounds import RoundsGuarantee

_CHARGED = "The round was charged; a run with a folder can be resumed."
UNLUCKY = 1e-3
"""Chance that any round sees fewer messages than the budget was checked for, and may have to be abandoned."""


class Trainer:
    """Trains a model from a population of simulated clients.

    Attributes:
        model: The model, trained in place.
        round: Number of the next round.
        rounds: Number of rounds in all.
        history: What is known of each round so far.

    Example:
        >>> from cpsgd.learning.datasets import load_digits
        >>> from cpsgd.learning.models import mlp
        >>> from cpsgd.planner import plan
        >>> data = load_digits()
        >>> model = mlp(data.feature_dim, data.classes, hidden=(), seed=0)
        >>> private = plan(clients=700, dim=650, epsilon=8.0, delta=1e-5, bits=8, clip_norm=2.0)
        >>> trainer = Trainer(
        ...     model, torch.nn.functional.cross_entropy, data, private, cohort=700, rounds=2, learning_rate=0.5, seed=1
        ... )
        >>> for metrics in trainer.run():
        ...     print(metrics.round, metrics.epsilon <= 8.0, metrics.bytes_total)
        0 True 499800
        1 True 999600
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss: Loss,
        dataset: Dataset,
        mechanism: Mechanism,
        *,
        cohort: int,
        rounds: int,
        participation: Scheme = "once",
        epsilon: float | None = None,
        delta: float | None = None,
        adjacency: Adjacency | None = None,
        colluding: int | None = None,
        optimizer: str | optimizers.Factory = "sgd",
        learning_rate: float = 0.1,
        weight_decay: float = 0.0,
        schedule: optimizers.Schedule = "constant",
        seed: int | None = None,
        dropout: float = 0.0,
        local_steps: int = 1,
        local_learning_rate: float | None = None,
        examples: int | None = None,
        evaluate_every: int = 1,
        device: str | torch.device = "cpu",
        memory_limit: int | None = None,
        run_dir: Path | str | None = None,
        resume: bool = False,
        checkpoint_every: int = 1,
        ledger: Ledger | None = None,
        population: str | None = None,
    ) -> None:
        """Checks everything there is to check before a round is charged.

        Args:
            model: Any module of float32 parameters, except batch normalisation. It is moved to the device.
            loss: From outputs and labels to their mean loss.
            dataset: The clients and the test set.
            mechanism: A `Plan`, a `Protocol`, or `NoPrivacy`.
            cohort: Clients in a round; with Poisson sampling, on average.
            rounds: Number of rounds in all.
            participation: "once" (disjoint cohorts), "every" (all clients in every round), "poisson" or "fixed-size".
            epsilon: The most that may be spent; a plan's own by default, otherwise no limit.
            delta: δ of the guarantee; a plan's own by default.
            adjacency: "replace-one" or "zero-out"; a plan's own, or the one the participation is accounted for.
            colluding: Clients of a round whose noise does not count because they may tell it; a plan's own, or none.
            optimizer: The server's: "sgd", "momentum", "adagrad", "adam", or a function from parameters to any
                optimizer of torch.optim.
            learning_rate: Of the named optimizers.
            weight_decay: Of the named optimizers (see `optimizers.make`).
            schedule: How the learning rate changes: "constant"; "linear" towards 0 after the last round, which
                quietens the noise of the last steps; or "late", the same in the last three tenths only.
            seed: None for noise from the operating system, except on a GPU. A number makes the run repeatable, and a
                simulation that protects nobody.
            dropout: Probability with which a message does not arrive.
            local_steps: τ local SGD steps a client; 1 means one gradient.
            local_learning_rate: Step size of the local steps.
            examples: None for the privacy of clients: the whole update is clipped. A number E for the privacy of
                examples: a client sends the sum of at most E gradients, each clipped to a share of the clip norm (see
                `cpsgd.learning.examples`), and the step is along the mean of the sums divided by E.
            evaluate_every: The test set is looked at after every so many rounds, and after the last.
            device: Where everything is computed: "cpu", "cuda" (an NVIDIA GPU; see `cpsgd.simulation.device` for what
                differs) or "auto".
            memory_limit: Bytes that the clients computed together may take; 1 GiB by default, 4 GiB on a GPU. It
                changes how a run is computed and not what, but for the rounding of floats: a run may be resumed with
                another.
            run_dir: Where checkpoint, charges and metrics go; None keeps nothing. Other processes are kept out of it
                while this object lives. It holds the cohorts' key, which must stay private for sampling to count.
            resume: Continue the run in `run_dir` from its last complete round, if there is one.
            checkpoint_every: A checkpoint is written after every so many rounds, and after the last.
            ledger: Where every round is charged before its mean is computed; None for no ledger.
            population: With a ledger: whose budget pays.

        Raises:
            BudgetExceededError: The ledger's budget is too small for so many rounds.
            ParameterError: Something cannot be trained or run as described.
            InfeasibleError: There are too few clients, or the budget is too small for so many rounds.
            CheckpointError: The run directory is damaged, in use by another process, of another run, or not empty.
        """
        self.model = model
        self.rounds = _validate.integer("rounds", rounds, low=1)
        self.round = 0
        self.history: list[RoundMetrics] = []
        self._unfinished = False
        self._mechanism = mechanism
        self._seed = None if seed is None else _validate.integer("seed", seed, low=0, high=2**63 - 1)
        self._dropout = _validate.positive("dropout", dropout, low=-1e-300, high=1.0)
        self._evaluate_every = _validate.integer("evaluate_every", evaluate_every, low=1)
        self._checkpoint_every = _validate.integer("checkpoint_every", checkpoint_every, low=1)
        self._device = devices.resolve(device)
        on_gpu = devices.has_engine(self._device)
        if memory_limit is None:
            memory_limit = DEVICE_MEMORY if on_gpu else DEFAULT_MEMORY
        if ledger is not None and on_gpu:
            raise ParameterError(
                "A ledger pays for noise that protects people; on a GPU it comes from a counter and protects nobody. "
                "Use device cpu, or no ledger."
            )
        with devices.enough_memory("the model", "use a smaller one."):
            model.to(self._device)
            self._updates = ClientUpdates(
                model,
                loss,
                local_steps=local_steps,
                local_learning_rate=local_learning_rate,
                memory_limit=memory_limit,
            )
        rows: ClientUpdates | ExampleSums = self._updates
        self._divisor = 1
        if examples is not None:
            if local_steps > 1:
                raise ParameterError("Example-level privacy is for gradients: give examples or local_steps, not both.")
            if on_gpu:
                raise ParameterError("Example-level privacy is simulated on the CPU only: use device cpu.")
            check_participation(participation)
            whole = mechanism.protocol if isinstance(mechanism, Plan) else mechanism
            rows = ExampleSums(self._updates, whole.clip_norm, examples)
            self._divisor = examples
        self._place: Processors | Accelerator = (
            Accelerator(dataset, self._updates, memory_limit, self._device)
            if on_gpu
            else Processors(dataset, rows, memory_limit)
        )
        protocol = mechanisms.protocol_of(mechanism)
        if protocol is not None and protocol.dim != self._updates.dim:
            raise ParameterError(
                f"The model has {self._updates.dim:,} trainable parameters, the protocol is for {protocol.dim:,} "
                "coordinates; plan with dim equal to the former."
            )
        self._server = Server(
            model,
            loss,
            optimizer,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            schedule=schedule,
            rounds=self.rounds,
        )
        if isinstance(mechanism, Plan):
            epsilon = mechanism.wished_epsilon if epsilon is None else epsilon
            delta = mechanism.guarantee.delta if delta is None else delta
            adjacency = mechanism.guarantee.adjacency if adjacency is None else adjacency
            colluding = mechanism.colluding if colluding is None else colluding
        private = mechanisms.is_private(mechanism)
        if private and delta is None:
            raise ParameterError("A private protocol is accounted at some delta: give delta, or a plan, which has one.")
        self._cohorts = Cohorts.plan(
            population=dataset.size,
            cohort=cohort,
            rounds=self.rounds,
            scheme=participation,
            key=secrets.randbits(63) if self._seed is None else self._seed,
            overflow=OVERFLOW_SHARE * (delta or 1e-6) / self.rounds,
        )
        self._spending: Spending | None = None
        if private and protocol is not None and delta is not None:
            self._spending = Spending(
                protocol,
                delta=delta,
                epsilon=epsilon,
                cohorts=self._cohorts,
                adjacency=adjacency,
                colluding=colluding or 0,
                examples=examples,
            )
        self._ledger: RunCharges | None = None
        if ledger is not None or population is not None:
            if ledger is None or population is None or self._spending is None or protocol is None:
                raise ParameterError("A run is charged to a ledger *and* a population, if it is private at all.")
            self._ledger = RunCharges(
                ledger, population, protocol, self._spending, examples=examples, repeatable=self._seed is not None
            )
        self.config: dict[str, Any] = {
            "mechanism": mechanisms.as_data(mechanism),
            "delta": delta if private else None,
            "adjacency": self._spending.adjacency if self._spending is not None else None,
            "colluding": self._spending.colluding if self._spending is not None else None,
            "dataset": dataset.name,
            "population": dataset.size,
            "budget": population,
            "cohort": cohort,
            "messages": self._cohorts.messages,
            "participation": participation,
            "dropout": self._dropout,
            "optimizer": optimizer if isinstance(optimizer, str) else type(self._server.optimizer).__name__,
            "learning_rate": learning_rate,
            "weight_decay": weight_decay,
            "schedule": schedule if schedule == "constant" else f"{schedule} over {self.rounds} rounds",
            "local_steps": local_steps,
            "local_learning_rate": local_learning_rate,
            "examples": examples,
            "seed": self._seed,
            "device": self._device.type,
            "parameters": {name: list(p.shape) for name, p in trainable(model).items()},
        }
        self._folder: RunFolder | None = None
        if run_dir is not None:
            self._folder = RunFolder(Path(run_dir), self.config, dataset, resume=resume)
            self._take_up(self._folder)
        elif resume:
            raise ParameterError("There is nothing to resume from: give the run_dir of the run to continue.")
        if self._spending is not None:
            self._spending.check(self.rounds, self._fewest_survivors())
        if self._ledger is not None:
            charged = () if self._folder is None else self._folder.charged.keys()
            left = range(self.round, self.rounds)
            self._ledger.check(self._cohorts, charged=charged, rounds=left, survivors=self._fewest_survivors())
        if self.round == 0:
            self._save()

    @property
    def dim(self) -> int:
        """d, the number of trainable parameters."""
        return self._updates.dim

    def guarantee(self) -> RoundsGuarantee | None:
        """What is proved about the rounds so far; None without privacy or before the first round."""
        return None if self._spending is None else self._spending.guarantee()

    def run(self) -> Iterator[RoundMetrics]:
        """Runs the rounds that are left, yielding each one's metrics.

        By then the round is safely on disk, if a checkpoint was due; it is charged in any case.
        """
        while self.round < self.rounds:
            yield self.step()

    def step(self) -> RoundMetrics:
        """Runs one round.

        A client whose update holds NaN or infinity counts as one who sends the zero vector, and is not reported: that
        it did is its own affair. Only a model that is itself no longer finite ends the run, which everybody who has the
        model can see.

        Raises:
            InfeasibleError: All rounds were run; the budget was checked for no more than these.
            ParameterError: The GPU has too little memory; the message says for what, and whether the round was charged.
            DivergedError: The model's parameters are not finite; the round was not begun and costs nothing. On a GPU
                this is looked at once in `evaluate_every` rounds, since to look is to wait for it.
            CheckpointError: The round before was interrupted after its charge, so that this object's state is unknown.
        """
        if self._unfinished:
            raise CheckpointError(
                f"Round {self.round} was interrupted after its charge: make a new Trainer with resume=True."
            )
        if self.round >= self.rounds:
            raise InfeasibleError(
                f"All {self.rounds:,} rounds were run, and the budget was checked for no more: make a new Trainer."
            )
        if not self._place.waits_to_look or self.round % self._evaluate_every == 0:
            self._check_finite()
        begun = time.perf_counter()
        number = self.round
        clients = self._place.clients(self._cohorts, number, self.rounds)
        messages = max(self._cohorts.messages, len(clients))
        arrived = self._cohorts.generator("dropout", number).random(messages) >= self._dropout
        survivors = int(arrived.sum())
        signal_ratio = None
        last = number + 1 == self.rounds
        evaluated = last or (number + 1) % self._evaluate_every == 0
        released = self._may_release(survivors)
        if released:
            with devices.enough_memory("the model's step", f"use a smaller model. {_CHARGED}"):
                mean, noise_norm = self._mean(number, clients[arrived[: len(clients)]], survivors)
                if evaluated or not self._place.waits_to_look:
                    norm = float(torch.linalg.vector_norm(mean, dtype=torch.float64))
                    signal_ratio = noise_norm / norm if norm > 0.0 else math.inf
                self._server.step(mean, number)
        self.round = number + 1
        loss, accuracy = None, None
        if evaluated and self._server.is_finite():
            loss, accuracy = self.evaluate()
        metrics = self._metrics(
            number, released, survivors, loss, accuracy, signal_ratio, seconds=time.perf_counter() - begun
        )
        self.history.append(metrics)
        if last or self.round % self._checkpoint_every == 0:
            self._save()
        self._unfinished = False
        if last:
            self._check_finite()
        return metrics

    def evaluate(self) -> tuple[float, float]:
        """Mean loss and accuracy on the test set."""
        remedy = f"use a smaller model. {_CHARGED if self._unfinished else ''}".rstrip()
        with devices.enough_memory("the test examples", remedy):
            return self._server.evaluate(*self._place.test_examples())

    def save(self) -> None:
        """Writes a checkpoint after the last complete round, due or not; without a `run_dir` nothing is kept."""
        if not self._unfinished:
            self._save()

    # ------------------------------------------------------------------ a round's parts

    def _fewest_survivors(self) -> int:
        """So many messages arrive in all rounds, but for a small chance."""
        messages = self._cohorts.messages
        if self._dropout <= 0.0:
            return messages
        return max(1, int(binom.ppf(UNLUCKY / self.rounds, messages, 1.0 - self._dropout)))

    def _may_release(self, survivors: int) -> bool:
        if self._spending is None:
            return survivors > 0
        return self._spending.affords(survivors, self.rounds - self.round - 1)

    def _mean(self, number: int, clients: NDArray[np.int64], survivors: int) -> tuple[torch.Tensor, float]:
        """The round's mean, charged before it is known, and the norm of its noise."""
        self.model.train()
        draws = fixed_draws(int(self._cohorts.generator("torch", number).integers(2**63)), self._device)
        with draws, one_thread():
            engine = self._place.summed(self._mechanism, number, self._seed, clients, survivors - len(clients))
        if self._ledger is not None:
            self._ledger.reserve(self._cohorts, number, survivors)
        self._unfinished = True
        if self._spending is not None:
            self._charge(number, survivors)
        # A Poisson mean is over the clients drawn on average, which does not depend on the draw.
        factor = self._cohorts.messages / self._cohorts.cohort / self._divisor
        return torch.as_tensor(engine.mean()) * factor, engine.noise_norm() * factor

    def _check_finite(self) -> None:
        if not self._server.is_finite():
            raise DivergedError(
                f"After {self.round:,} rounds the model's parameters are NaN or infinite: training has diverged. Start "
                "again with a lower learning rate."
            )

    def _charge(self, number: int, survivors: int) -> None:
        assert self._spending is not None
        if self._folder is not None:
            self._folder.charge(number, survivors)
        if self._ledger is not None:
            self._ledger.release(survivors)
        self._spending.charge(survivors)

    def _metrics(
        self,
        number: int,
        released: bool,
        survivors: int,
        loss: float | None,
        accuracy: float | None,
        noise_to_signal: float | None,
        seconds: float,
    ) -> RoundMetrics:
        epsilon, method = None, None
        if self._spending is not None and (loss is not None or not self._spending.participation.sampled):
            found = self._spending.guarantee()
            epsilon, method = (0.0, None) if found is None else (found.epsilon, found.method)
        size = mechanisms.message_bytes(self._mechanism, self.dim)
        before = self.history[-1].bytes_total if self.history else 0
        return RoundMetrics(
            round=number,
            released=released,
            survivors=survivors,
            loss=loss,
            accuracy=accuracy,
            epsilon=epsilon,
            delta=None if self._spending is None else self._spending.delta,
            method=method,
            bytes_per_client=size,
            bytes_total=before + survivors * size,
            noise_to_signal=noise_to_signal,
            seconds=seconds,
        )

    # ------------------------------------------------------------------ the run directory

    def _take_up(self, folder: RunFolder) -> None:
        """Continues the run in a folder, if there is one."""
        saved = folder.restore(self.model, self._server.optimizer)
        if saved is None:
            return
        self.round, self.history, self._cohorts = saved.round, saved.history, saved.cohorts
        if self._ledger is not None and saved.run is not None:
            self._ledger.run = saved.run
        if self._spending is None:
            return
        for number, survivors in sorted(folder.charged.items()):
            completed = number < saved.round
            # With a seed, a round that was charged but not completed is run again, to the same result. Otherwise it may
            # have been seen by someone: it stays spent, and is not run again with other noise.
            if not completed and self._seed is not None:
                break
            self._spending.charge(survivors)
            if not completed:
                self.history.append(self._metrics(number, False, survivors, None, None, None, 0.0))
                self.round = number + 1

    def _save(self) -> None:
        if self._folder is not None:
            run = None if self._ledger is None else self._ledger.run
            progress = Progress(self.round, self.history, self._cohorts, run)
            self._folder.save(progress, self.model, self._server.optimizer)
