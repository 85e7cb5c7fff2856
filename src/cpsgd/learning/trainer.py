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
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpsgd._display import html_table
from cpsgd._numbers import rounded_up
from cpsgd._torch import torch
from cpsgd.errors import CheckpointError, DivergedError, InfeasibleError
from cpsgd.learning import backends, devices, export, mechanisms, parallel
from cpsgd.learning.accounting import open_accounts
from cpsgd.learning.architecture import Loss, trainable
from cpsgd.learning.callbacks import Callback
from cpsgd.learning.checkpoints import Progress, RunFolder
from cpsgd.learning.cohorts import Cohorts
from cpsgd.learning.datasets.base import Dataset
from cpsgd.learning.devices import enough_memory, fixed_draws, one_thread, own_code
from cpsgd.learning.history import RoundMetrics
from cpsgd.learning.mechanisms import Mechanism
from cpsgd.learning.options import (
    AccountOptions,
    ClientOptions,
    CohortOptions,
    FolderOptions,
    RunOptions,
    ServerOptions,
)
from cpsgd.learning.precheck import check_start
from cpsgd.learning.server import Server
from cpsgd.planner.examples import check_participation
from cpsgd.privacy.guarantees import Guarantee

_CHARGED = "The round was charged; a run with a folder can be resumed."
# Where nothing is private, Poisson rounds have room for as many clients as with this δ.
_NO_DELTA = 1e-6


class Trainer:
    """Trains a model from a population of simulated clients.

    Attributes:
        model: The model, trained in place; with averaging, the average after the last round.
        round: Number of the next round.
        rounds: Number of rounds in all.
        history: What is known of each round so far.
        config: What tells this run from another, as it must be when the run is resumed.

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
        cohorts: CohortOptions,
        clients: ClientOptions = ClientOptions(),
        server: ServerOptions = ServerOptions(),
        account: AccountOptions = AccountOptions(),
        run: RunOptions = RunOptions(),
        folder: FolderOptions = FolderOptions(),
        callbacks: Sequence[Callback] = (),
    ) -> None:
        """Checks everything there is to check before a round is charged.

        The model may be any module of float32 parameters, except batch normalisation; it is moved to the device. The
        loss goes from outputs and labels to their mean loss, and the mechanism is a `Plan`, a `Protocol` or
        `NoPrivacy`. Of a plan, or a protocol with a promise, come ε, δ, neighbours, rounds, participation and examples
        where the options leave them open; options that contradict it are refused. What the options are is said in
        their groups, in `cpsgd.learning.options`. The `callbacks` are called with the trainer and a round's metrics
        after each round.

        Raises:
            BudgetExceededError: The ledger's budget is too small for so many rounds.
            ParameterError: Something cannot be trained or run as described.
            InfeasibleError: There are too few clients, or the budget is too small for so many rounds.
            CheckpointError: The run directory is damaged, in use by another process, of another run, or not empty.
        """
        cohorts, clients = mechanisms.agreed(cohorts, clients, mechanism, dataset.size)
        if clients.examples is not None:
            check_participation(cohorts.participation or "once")
        self.model = model
        self.round = 0
        self.history: list[RoundMetrics] = []
        # The round that was charged and is not complete, if any.
        self._unfinished: int | None = None
        self._charged: list[int] = []
        self._callbacks = tuple(callbacks)
        self._dataset = dataset
        self._mechanism = mechanism
        self._options = run
        self._dropout = cohorts.dropout
        # The mean of sums of examples is divided by their number.
        self._divisor = clients.examples or 1
        account = mechanisms.completed(account, mechanism)
        self._processes = parallel.joined()
        key = secrets.randbits(63) if run.seed is None else run.seed
        if self._processes is not None:
            key = self._processes.same(key)
            if not self._processes.is_first:
                account, folder = replace(account, ledger=None, population=None), FolderOptions()
        self._cohorts = Cohorts.plan(
            cohorts,
            population=dataset.size,
            key=key,
            delta=account.delta or _NO_DELTA,
        )
        assert cohorts.rounds is not None
        self.rounds = cohorts.rounds
        mechanisms.check_run(mechanism, self.rounds, cohorts.dropout)
        self._backend = backends.start(model, loss, dataset, mechanism, clients, run, self._processes)
        self._server = Server(model, loss, server, self.rounds)
        self._score = "accuracy" if dataset.classes is not None else "r_squared"
        self._spending, self._ledger = open_accounts(
            mechanism,
            self._cohorts,
            account,
            examples=clients.examples,
            repeatable=run.seed is not None,
            on_gpu=devices.is_gpu(self._backend.device),
        )
        self.config = self._settings(cohorts, clients, account.population)
        check_start(self._backend.updates, self._server, loss, self._backend.test_examples(), dataset.classes)
        self._folder: RunFolder | None = None
        self._checkpoint_every = folder.checkpoint_every
        if folder.run_dir is not None:
            self._folder = RunFolder(Path(folder.run_dir), self.config, dataset, resume=folder.resume)
            self._take_up(self._folder)
        self._follow()
        self._check_budget()
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
        """What was spent when it was last asked for: to look at a trainer must not start an accountant."""
        if self._spending is None:
            return "no privacy"
        known = [metrics.epsilon for metrics in self.history if metrics.epsilon is not None]
        return f"ε = {rounded_up(known[-1] if known else 0.0)} spent at δ = {self._spending.delta:g}"

    @property
    def dim(self) -> int:
        """d, the number of trainable parameters."""
        return self._backend.updates.dim

    def guarantee(self) -> Guarantee | None:
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
            CheckpointError: The round before was interrupted after its charge, so that this object's state is unknown;
                or the disk took no charge or no checkpoint, and the message says what has become of the round.
            UserFunctionError: The model, the loss or a callback failed; the message says whether the round was charged.
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
        messages = max(self._cohorts.messages, len(clients))
        arrived = np.ones(messages, dtype=bool)
        if self._dropout > 0.0:
            arrived = self._cohorts.generator("dropout", number).random(messages) >= self._dropout
        survivors = int(arrived.sum())
        signal_ratio, clip_norm = None, self._backend.clipping.norm
        last = number + 1 == self.rounds
        evaluated = last or (number + 1) % self._options.evaluate_every == 0
        if self._spending is None:
            released = survivors > 0
        else:
            released = self._spending.affords(survivors, self.rounds - number - 1)
        if released:
            with enough_memory("the model's step", f"use a smaller model. {_CHARGED}"):
                mean, noise_norm = self._mean(number, clients[arrived[: len(clients)]], survivors)
                if evaluated or not self._backend.asynchronous:
                    norm = float(torch.linalg.vector_norm(mean, dtype=torch.float64))
                    signal_ratio = noise_norm / norm if norm > 0.0 else math.inf
                with own_code("The optimizer or the schedule", _CHARGED):
                    self._server.step(mean, number)
        self.round = number + 1
        loss, score = self.evaluate() if evaluated and self._server.is_finite() else (None, None)
        if loss is not None:
            with own_code("The schedule", _CHARGED):
                self._server.heard(loss)
        figures = {"released": released, "loss": loss, self._score: score, "noise_to_signal": signal_ratio}
        figures["clip_norm"] = clip_norm
        metrics = self._metrics(number, survivors, **figures, seconds=time.perf_counter() - begun)
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
        """Mean loss on the test set, and its accuracy, or R² where labels are numbers to predict."""
        charged = "" if self._unfinished is None else _CHARGED
        with (
            enough_memory("the test examples", f"use a smaller model. {charged}".rstrip()),
            own_code("The model or the loss, given the test examples,", charged or "Nothing was charged."),
        ):
            return self._server.evaluate(*self._backend.test_examples())

    def export(self, folder: Path | str) -> tuple[Path, Path]:
        """Writes the model as `model.safetensors` and what is proved of it as `model-card.json`; returns the paths.

        Raises:
            CheckpointError: A round was interrupted after its charge, so that the model is not what the card would say;
                or the disk did not take the files.
            ParameterError: safetensors is not installed.
        """
        if self._unfinished is not None:
            raise CheckpointError(
                f"Round {self._unfinished} was interrupted after its charge: there is no model to export."
            )
        privacy = export.privacy_facts(self.guarantee(), self.config)
        with self._server.measured():
            return export.write(Path(folder), self.model, self._dataset, privacy, self.config, self.history)

    def save(self) -> None:
        """Writes a checkpoint after the last complete round, due or not; without a `run_dir` nothing is kept.

        Raises:
            CheckpointError: The disk did not take it; the last one is as it was.
        """
        if self._unfinished is None:
            self._save()

    # ------------------------------------------------------------------ before the first round

    def _settings(self, cohorts: CohortOptions, clients: ClientOptions, budget: str | None) -> dict[str, Any]:
        """What a run that is resumed must have in common with the one that was started. Names are those of files."""
        spending = self._spending
        return {
            "mechanism": mechanisms.as_data(self._mechanism),
            "delta": None if spending is None else spending.delta,
            "adjacency": None if spending is None else str(spending.adjacency),
            "colluding": None if spending is None else spending.colluding,
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
        }

    def _check_budget(self) -> None:
        """Refuses a run whose budget does not reach to the last round."""
        survivors = self._cohorts.fewest_survivors(self._dropout, self.rounds)
        if self._spending is not None:
            self._spending.check(self.rounds, survivors)
        if self._ledger is not None:
            charged = () if self._folder is None else self._folder.charged.keys()
            left = range(self.round, self.rounds)
            self._ledger.check(self._cohorts, charged=charged, rounds=left, survivors=survivors)

    # ------------------------------------------------------------------ a round's parts

    def _mean(self, number: int, clients: NDArray[np.int64], survivors: int) -> tuple[torch.Tensor, float]:
        """The round's mean, charged before it is known, and the norm of its noise."""
        self.model.train()
        draws: AbstractContextManager[None] = nullcontext()
        if not self._backend.updates.is_dense:
            rank = 0 if self._processes is None else self._processes.rank
            drawn = int(self._cohorts.generator("torch", number).integers(2**63, size=rank + 1)[rank])
            draws = fixed_draws(drawn, self._backend.device)
        with draws, one_thread():
            summed = self._backend.summed(number, clients, survivors - len(clients))
        if self._ledger is not None:
            self._ledger.reserve(self._cohorts, number, survivors)
        self._unfinished = number
        if self._spending is not None:
            if self._folder is not None:
                self._folder.charge(number, survivors)
            if self._ledger is not None:
                self._ledger.release(survivors)
            self._spending.charge(survivors)
        # A Poisson mean is over the clients drawn on average, which does not depend on the draw.
        factor = self._cohorts.messages / self._cohorts.cohort / self._divisor
        clipping = self._backend.clipping
        noise_norm = summed.noise_norm() * factor * clipping.scale
        return clipping.read(torch.as_tensor(summed.mean()) * factor), noise_norm

    def _check_finite(self) -> None:
        if not self._server.is_finite():
            raise DivergedError(
                f"After {self.round:,} rounds the model's parameters are NaN or infinite: training has diverged. Start "
                "again with a lower learning rate."
            )

    def _metrics(self, number: int, survivors: int, **figures: Any) -> RoundMetrics:
        """A round's figures with what it costs."""
        epsilon, method = None, None
        if self._spending is not None and (figures["loss"] is not None or not self._spending.participation.sampled):
            found = self._spending.guarantee()
            epsilon, method = (0.0, None) if found is None else (found.epsilon, found.method)
        size = mechanisms.message_bytes(self._mechanism, self._backend.dim)
        before = self.history[-1].bytes_total if self.history else 0
        return RoundMetrics(
            round=number,
            survivors=survivors,
            epsilon=epsilon,
            delta=None if self._spending is None else self._spending.delta,
            method=method,
            bytes_per_client=size,
            bytes_total=before + survivors * size,
            **{"accuracy": None, **figures},
        )

    # ------------------------------------------------------------------ the run directory

    def _take_up(self, folder: RunFolder) -> None:
        """Continues the run in a folder, if there is one."""
        saved = folder.restore(self.model, self._parts)
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
            if not completed and self._options.seed is not None:
                break
            self._spending.charge(survivors)
            self._charged.append(survivors)
            if not completed:
                nothing = {"released": False, "loss": None, "noise_to_signal": None, "seconds": 0.0}
                self.history.append(self._metrics(number, survivors, **nothing))
                self.round = number + 1

    def _follow(self) -> None:
        """Where there are several processes: goes on where the first one does, which has the folder."""
        if self._processes is None:
            return
        parts = {name: part.state_dict() for name, part in self._parts.items()}
        begun = self.round, self.history, self._cohorts, self._charged
        found, weights, states = self._processes.same((begun, self.model.state_dict(), parts))
        if self._processes.is_first:
            return
        self.round, self.history, self._cohorts, charged = found
        self.model.load_state_dict(weights)
        for name, part in self._parts.items():
            part.load_state_dict(states[name])
        for survivors in charged:
            if self._spending is not None:
                self._spending.charge(survivors)

    @property
    def _parts(self) -> dict[str, Any]:
        """What a checkpoint holds beside the model."""
        clipping = self._backend.clipping
        slots = self._backend.slots
        found = self._server.parts | ({} if clipping.norm is None else {"clip": clipping})
        return found | ({} if slots is None else {"lineages": slots})

    def _save(self) -> None:
        if self._folder is not None:
            run = None if self._ledger is None else self._ledger.run
            progress = Progress(self.round, self.history, self._cohorts, run)
            self._folder.save(progress, self.model, self._parts)
