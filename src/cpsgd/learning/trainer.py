"""`Trainer`: synchronous rounds of distributed SGD through a private mean (the paper's section 1), on one machine.

In a round the server sends the model to a cohort of clients; each sends its clipped update through the protocol; the
server takes a step along the mean.

**With a seed, a run is a simulation.** Noise and cohorts follow from the seed: two runs are equal bit for bit on the
same software, and a run that was killed continues as if nothing had happened. Repeatable noise protects nobody; such a
run shows how accurate training with this privacy is. Without a seed, noise comes from the operating system. On a GPU it
comes from a counter (`cpsgd.simulation.device`), and the run is a simulation with or without a seed.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpsgd import _validate
from cpsgd._display import html_table
from cpsgd._numbers import rounded_up
from cpsgd._torch import torch
from cpsgd.audit.one_run import OneRunReport
from cpsgd.errors import CheckpointError, DivergedError, InfeasibleError, ParameterError
from cpsgd.learning import backends, devices, estimators, export, parallel
from cpsgd.learning.canaries import Canaries, CanaryClients, export_audited
from cpsgd.learning.checkpoints import Progress, RunFolder
from cpsgd.learning.cohorts import Cohorts
from cpsgd.learning.datasets.populations import Dataset
from cpsgd.learning.devices import enough_memory, fixed_draws, one_thread, own_code
from cpsgd.learning.estimators import Estimator
from cpsgd.learning.metrics import Callback, RoundMetrics
from cpsgd.learning.models import Loss, trainable
from cpsgd.learning.optimization import Server, check_start
from cpsgd.learning.option_groups import (
    AccountOptions,
    ClientOptions,
    CohortOptions,
    FolderOptions,
    RunOptions,
    ServerOptions,
)
from cpsgd.learning.run_account import RunAccount
from cpsgd.planner.examples import check_participation
from cpsgd.privacy.guarantees import Guarantee

_CHARGED = "The round was charged; a run with a folder can be resumed."
# δ that sets the size of Poisson rounds in a run without privacy.
_NO_DELTA = 1e-6


class Trainer:
    """Trains a model from a population of simulated clients.

    Attributes:
        model: The model, trained in place; with averaging, the average after the last round.
        round: Number of the next round.
        rounds: Number of rounds in all.
        history: Metrics of each round so far.
        config: Settings that must be the same when the run is resumed.

    Example:
        >>> from cpsgd.learning.datasets import load_digits
        >>> from cpsgd.learning.models import mlp
        >>> from cpsgd.planner import plan
        >>> data = load_digits()
        >>> model = mlp(data.feature_dim, data.classes, hidden=(), seed=0)
        >>> private = plan(clients=700, dim=650, epsilon=8.0, delta=1e-5, bits=8, clip_norm=2.0)
        >>> loss, cohorts = torch.nn.functional.cross_entropy, CohortOptions(cohort=700, rounds=2)
        >>> server, run = ServerOptions(lr=0.5), RunOptions(seed=1)
        >>> trainer = Trainer(model, loss, data, private, cohorts=cohorts, server=server, run=run)
        >>> for metrics in trainer.run():
        ...     print(f"round {metrics.round}: ε = {metrics.epsilon:.3f}, {metrics.bytes_total:,} bytes")
        round 0: ε = 8.000, 499,800 bytes
        round 1: ε = 8.000, 999,600 bytes
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss: Loss,
        dataset: Dataset,
        mechanism: Estimator,
        *,
        cohorts: CohortOptions,
        clients: ClientOptions = ClientOptions(),
        server: ServerOptions = ServerOptions(),
        account: AccountOptions = AccountOptions(),
        run: RunOptions = RunOptions(),
        folder: FolderOptions = FolderOptions(),
        callbacks: Sequence[Callback] = (),
    ) -> None:
        """Checks everything before a round is charged.

        Args:
            model: Any module of float32 parameters without batch normalisation; it is moved to the device.
            loss: From outputs and labels to their mean loss.
            dataset: The clients' examples and the test examples.
            mechanism: A `Plan`, a `Protocol` or `NoPrivacy`. Options that are None take their values from a plan, or
                from a protocol's promise; options that contradict it are refused.
            cohorts: The clients of the rounds. The option groups describe their fields.
            clients: The clients' computation.
            server: The server's step.
            account: The privacy budget.
            run: Seed, device, memory and evaluation.
            folder: The folder of the run.
            callbacks: Called with the trainer and a round's metrics after each round.

        Raises:
            BudgetExceededError: The ledger's budget is too small for the rounds.
            ParameterError: The model cannot be trained, or the options contradict each other.
            InfeasibleError: There are too few clients, or the budget is too small for the rounds.
            CheckpointError: The run's folder is damaged, in use by another process, of another run, or not empty.
        """
        if not hasattr(dataset, "size"):
            raise ParameterError("Expected a data set; cpsgd.learning.datasets.from_arrays makes one.")
        _validate.instance("cohorts", cohorts, CohortOptions)
        cohorts, clients = estimators.agreed(cohorts, clients, mechanism, dataset.size)
        if clients.examples is not None:
            check_participation(cohorts.participation or "once")
        self.model = model
        self.round = 0
        self.history: list[RoundMetrics] = []
        # The round that was charged and is not complete, if any.
        self._unfinished: int | None = None
        self._callbacks = tuple(callbacks)
        self._dataset = dataset
        self._estimator = mechanism
        self._options = run
        self._dropout = cohorts.dropout
        # A mean of sums over examples is divided by their number.
        self._divisor = clients.examples or 1
        account = estimators.completed(account, mechanism)
        self._processes = parallel.joined()
        key = secrets.randbits(63) if run.seed is None else run.seed
        if self._processes is not None:
            key = self._processes.same(key)
            if not self._processes.is_first:
                account, folder = replace(account, ledger=None, population=None), FolderOptions()
        population = cohorts.with_canaries(dataset.size, clients.examples)
        self._cohorts = Cohorts.plan(cohorts, population=population, key=key, delta=account.delta or _NO_DELTA)
        assert cohorts.rounds is not None
        self.rounds = cohorts.rounds
        estimators.check_run(mechanism, self.rounds, cohorts.dropout, self._cohorts.participation)
        self._backend = backends.start(model, loss, dataset, mechanism, clients, run, self._processes)
        self._server = Server(model, loss, server, self.rounds)
        self._score = "accuracy" if dataset.classes is not None else "r_squared"
        kind = {"repeatable": run.seed is not None, "on_gpu": devices.is_gpu(self._backend.device)}
        self._account = RunAccount.open(mechanism, self._cohorts, account, examples=clients.examples, **kind)
        self._canaries: CanaryClients | None = None
        if cohorts.canaries is not None:
            canaries, adjacency = (
                Canaries.draw(cohorts.canaries, self.dim, seed=run.seed),
                self._account.config["adjacency"],
            )
            self._canaries = CanaryClients(
                canaries, mechanism, dataset.size, self._backend.dim, examples=clients.examples, adjacency=adjacency
            )
            self._backend.canaries = self._canaries
        self.config = self._settings(cohorts, clients, account.population)
        check_start(self._backend.updates, self._server, loss, self._backend.test_examples(), dataset.classes)
        self._folder: RunFolder | None = None
        self._checkpoint_every = folder.checkpoint_every
        if folder.run_dir is not None:
            self._folder = RunFolder(Path(folder.run_dir), self.config, dataset, resume=folder.resume)
            self._resume(self._folder)
        self._synchronize()
        survivors = self._cohorts.fewest_survivors(cohorts.dropout, self.rounds)
        self._account.check(self._cohorts, self._folder, range(self.round, self.rounds), survivors)
        if self.round == 0:
            self._save()

    def __repr__(self) -> str:
        return f"Trainer(round {self.round:,} of {self.rounds:,}, {self.dim:,} parameters, {self._spent_text()})"

    def _repr_html_(self) -> str:
        cohorts = self._cohorts
        rows = [
            ("rounds", f"{self.round:,} of {self.rounds:,}, participation {cohorts.participation}"),
            ("clients", f"{cohorts.cohort:,} of {cohorts.population:,} per round, data set {self.config['dataset']}"),
            ("model", f"{type(self.model).__name__}, {self.dim:,} parameters"),
            ("privacy", self._spent_text()),
        ]
        return html_table("Trainer", rows)

    def _spent_text(self) -> str:
        """Returns the last ε of the history as text; displaying a trainer must not start an accountant."""
        if self._account.spending is None:
            return "no privacy"
        known = [metrics.epsilon for metrics in self.history if metrics.epsilon is not None]
        return f"ε = {rounded_up(known[-1] if known else 0.0)} spent at δ = {self._account.spending.delta:g}"

    @property
    def dim(self) -> int:
        """Number of trainable parameters, d."""
        return self._backend.updates.dim

    def guarantee(self) -> Guarantee | None:
        """Returns the guarantee of the rounds so far; None without privacy or before the first round."""
        return self._account.guarantee()

    def run(self) -> Iterator[RoundMetrics]:
        """Runs the remaining rounds and yields each one's metrics, after its checkpoint if one was due."""
        while self.round < self.rounds:
            yield self.step()

    def step(self) -> RoundMetrics:
        """Runs one round. It is charged before its mean is computed, and stays charged whatever fails after that.

        Where too few messages arrive for the run's (ε, δ) to pay for this round and the rest as planned, the round is
        withheld: it costs nothing, leaves the model as it is, and its metrics have `released=False`.

        A client whose update holds NaN or infinity counts as one who sends the zero vector, and is not reported,
        because that would reveal something about its data. Only a model that is itself not finite ends the run.

        Raises:
            InfeasibleError: All rounds were run; the budget was checked for these only.
            BudgetExceededError: The ledger's budget has too little left for the round, which then costs nothing.
            DivergedError: The model's parameters are not finite; the round was not started and costs nothing. On a GPU
                this is checked once in `evaluate_every` rounds, because the CPU must wait for the answer.
            CheckpointError: The last round was interrupted, or a charge or checkpoint could not be written.
            ParameterError: The GPU has too little memory. This and the next say whether the round was charged.
            UserFunctionError: The model, the loss or a callback failed.
        """
        if self._unfinished is not None:
            raise CheckpointError(
                f"Round {self._unfinished} was interrupted after its charge: make a new Trainer with resume=True."
            )
        if self.round >= self.rounds:
            raise InfeasibleError(
                f"All {self.rounds:,} rounds were run, and the budget was checked for no more: make a new Trainer."
            )
        if not self._backend.asynchronous or self.round % self._options.evaluate_every == 0:
            self._check_finite()
        begun = time.perf_counter()
        number = self.round
        clients = self._backend.clients(self._cohorts, number, self.rounds)
        arrived = self._cohorts.arrived(number, max(self._cohorts.messages, len(clients)), self._dropout)
        survivors = int(arrived.sum())
        signal_ratio, clip_norm = None, self._backend.clipping.norm
        last = number + 1 == self.rounds
        evaluated = last or (number + 1) % self._options.evaluate_every == 0
        released = self._account.affords(survivors, self.rounds - number - 1)
        if released:
            with enough_memory("the model's step", f"use a smaller model. {_CHARGED}"):
                mean, noise_norm = self._charge_and_mean(number, clients[arrived[: len(clients)]], survivors)
                if evaluated or not self._backend.asynchronous:
                    norm = float(torch.linalg.vector_norm(mean, dtype=torch.float64))
                    signal_ratio = float(noise_norm) / norm if norm > 0.0 else math.inf
                with own_code("The optimizer or the schedule", _CHARGED):
                    self._server.step(mean, number)
        self.round = number + 1
        loss, score = self.evaluate() if evaluated and self._server.is_finite() else (None, None)
        if loss is not None:
            with own_code("The schedule", _CHARGED):
                self._server.report_loss(loss)
        measured = {"released": released, "loss": loss, self._score: score, "noise_to_signal": signal_ratio}
        seconds = time.perf_counter() - begun
        metrics = self._metrics(number, survivors, **measured, clip_norm=clip_norm, seconds=seconds)
        self.history.append(metrics)
        self._unfinished = None
        if last or self.round % self._checkpoint_every == 0:
            self._save()
        if last:
            self._check_finite()
        for callback in self._callbacks:
            with own_code("A callback", f"Round {number} is complete, and was charged."):
                callback(self, metrics)
        return metrics

    def evaluate(self) -> tuple[float, float]:
        """Returns the mean loss on the test set, and the accuracy, or R² for labels that are numbers."""
        charged = "" if self._unfinished is None else _CHARGED
        with (
            enough_memory("the test examples", f"use a smaller model. {charged}".rstrip()),
            own_code("The model or the loss, given the test examples,", charged or "Nothing was charged."),
        ):
            return self._server.evaluate(*self._backend.test_examples())

    def audit(self, *, confidence: float = 0.95) -> OneRunReport:
        """Returns a lower bound on ε from the canaries, beside the ε of the rounds so far.

        Raises:
            ParameterError: There are no canaries, or nothing was released that a guarantee covers.
        """
        found = self.guarantee()
        if self._canaries is None or found is None:
            raise ParameterError("An audit needs CohortOptions(canaries=1000), privacy, and a round.")
        return self._canaries.canaries.audit(
            epsilon=found.epsilon, delta=found.delta, unit=found.run.conditions.unit, confidence=confidence
        )

    def export(self, folder: Path | str) -> tuple[Path, ...]:
        """Writes the model as `model.safetensors` and its guarantee as `model-card.json`; returns the paths.

        With canaries the card has an audit, and `canaries.json` is written, too.

        Raises:
            CheckpointError: A round was interrupted after its charge, or the files could not be written.
            ParameterError: safetensors is not installed.
        """
        if self._unfinished is not None:
            raise CheckpointError(
                f"Round {self._unfinished} was interrupted after its charge: there is no model to export."
            )
        privacy = export.privacy_facts(self.guarantee(), self.config)
        with self._server.measured():
            sections = export.run_sections(self._dataset, self.config, self.history)
            canaries = None if self._canaries is None else self._canaries.canaries
            return export_audited(Path(folder), self.model, privacy, canaries, **sections)

    def save(self) -> None:
        """Writes a checkpoint of the last complete round, if there is a `run_dir`."""
        if self._unfinished is None:
            self._save()

    # ------------------------------------------------------------------ before the first round

    def _settings(self, cohorts: CohortOptions, clients: ClientOptions, budget: str | None) -> dict[str, Any]:
        """Returns the settings that a resumed run must share with the one that was started."""
        return {
            "mechanism": estimators.as_data(self._estimator),
            **self._account.config,
            "dataset": self._dataset.name,
            "population": self._dataset.size,
            "budget": budget,
            "cohort": cohorts.cohort,
            "messages": self._cohorts.messages,
            "participation": self._cohorts.scheme,
            "dropout": cohorts.dropout,
            **self._server.config,
            "local_steps": clients.local_steps,
            "local_learning_rate": clients.local_lr,
            "examples": clients.examples,
            "seed": self._options.seed,
            "device": self._backend.device.type,
            "parameters": {name: list(p.shape) for name, p in trainable(self.model).items()},
            # Runs of earlier releases do not have it.
            **({} if clients.clip_quantile is None else {"clip_quantile": clients.clip_quantile}),
            **({} if clients.rescale_every is None else {"rescale_every": clients.rescale_every}),
            **({} if cohorts.canaries is None else {"canaries": cohorts.canaries}),
        }

    # ------------------------------------------------------------------ a round's parts

    def _charge_and_mean(
        self, number: int, clients: NDArray[np.int64], survivors: int
    ) -> tuple[torch.Tensor, torch.Tensor | float]:
        """Adds up a round's updates, charges it, and only then computes its mean and the norm of its noise."""
        self.model.train()
        seed = None
        if not self._backend.updates.is_dense:
            rank = 0 if self._processes is None else self._processes.rank
            seed = int(self._cohorts.generator("torch", number).integers(2**63, size=rank + 1)[rank])
        with nullcontext() if seed is None else fixed_draws(seed, self._backend.device), one_thread():
            summed = self._backend.summed(number, clients, survivors - len(clients))
        self._account.reserve(self._cohorts, number, survivors)
        self._unfinished = number
        self._account.charge(self._folder, number, survivors)
        # A Poisson mean is divided by the expected number of clients, which does not depend on the draw.
        factor = self._cohorts.messages / self._cohorts.cohort / self._divisor
        clipping = self._backend.clipping
        noise_norm = summed.noise_norm() * factor * clipping.scale
        released = torch.as_tensor(summed.mean())
        if self._canaries is not None:
            self._canaries.observe(released, clients, self._cohorts.scheme)
        mean, scales = clipping.read(released * factor), self._backend.updates.scales
        return (mean, noise_norm) if scales is None else scales.read(mean, noise_norm, number)

    def _check_finite(self) -> None:
        if not self._server.is_finite():
            raise DivergedError(
                f"After {self.round:,} rounds the model's parameters are NaN or infinite: training has diverged. Start "
                "again with a lower learning rate."
            )

    def _metrics(self, number: int, survivors: int, **figures: Any) -> RoundMetrics:
        """Returns a round's metrics with ε so far."""
        size, before = self._backend.message_bytes, self.history[-1].bytes_total if self.history else 0
        return RoundMetrics(
            round=number,
            survivors=survivors,
            bytes_per_client=size,
            bytes_total=before + survivors * size,
            **self._account.figures(evaluated=figures["loss"] is not None),
            **{"accuracy": None, **figures},
        )

    # ------------------------------------------------------------------ the run directory

    def _resume(self, folder: RunFolder) -> None:
        """Continues the run in a folder, if there is one, and counts the rounds that it has charged.

        One that was charged and not completed is run again with a seed, and stays spent and withheld without one.
        """
        saved = folder.restore(self.model, self._parts)
        if saved is None:
            return
        self.round, self.history, self._cohorts = saved.round, saved.history, saved.cohorts
        if self._account.charges is not None and saved.run is not None:
            self._account.charges.run = saved.run
        if self._account.spending is None:
            return
        for number, survivors in sorted(folder.charged.items()):
            completed = number < saved.round
            # With a seed, a round that was charged but not completed is run again, with the same result. Without one,
            # its mean may have been seen: it stays spent, and is not run again with other noise.
            if not completed and self._options.seed is not None:
                break
            self._account.spending.charge(survivors)
            if not completed:
                nothing = {"released": False, "loss": None, "noise_to_signal": None, "seconds": 0.0}
                self.history.append(self._metrics(number, survivors, **nothing))
                self.round = number + 1

    def _synchronize(self) -> None:
        """Copies the state of the first process, which has the folder, to the others, if there are any."""
        if self._processes is None:
            return
        parts, spending = {name: part.state_dict() for name, part in self._parts.items()}, self._account.spending
        sizes = None if spending is None else spending.sizes
        state = (self.round, self.history, self._cohorts, sizes, self.model.state_dict(), parts)
        self.round, self.history, self._cohorts, sizes, weights, states = self._processes.same(state)
        if self._processes.is_first:
            return
        self.model.load_state_dict(weights)
        for name, part in self._parts.items():
            part.load_state_dict(states[name])
        if spending is not None:
            spending.sizes = sizes

    @property
    def _parts(self) -> dict[str, Any]:
        """Objects whose state a checkpoint holds beside the model, by name."""
        return self._server.parts | self._backend.parts

    def _save(self) -> None:
        if self._folder is not None:
            progress = Progress(self.round, self.history, self._cohorts, self._account.run)
            self._folder.save(progress, self.model, self._parts)
