"""`Experiment`: a private run and its baselines from the same settings and seeds, in one run directory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast, get_args

from scipy.stats import binom

from cpsgd.errors import ConditionError, ParameterError
from cpsgd.learning import mechanisms, models, optimizers
from cpsgd.learning._torch import torch
from cpsgd.learning.cohorts import Cohorts
from cpsgd.learning.datasets import load
from cpsgd.learning.mechanisms import Mechanism
from cpsgd.learning.metrics import RoundMetrics
from cpsgd.learning.settings import Settings
from cpsgd.learning.sgd import UNLUCKY, Trainer
from cpsgd.learning.spending import OVERFLOW_SHARE, SAMPLED_SIZES
from cpsgd.planner import Plan, plan
from cpsgd.privacy.adjacency import Adjacency
from cpsgd.privacy.participation import Scheme
from cpsgd.privacy.rounds import RoundsGuarantee, paper_epsilon
from cpsgd.privacy.theorem import theorem_epsilon
from cpsgd.protocol import Protocol, paper_coordinate_range

PRIVATE = "private"
"""Name of the run that the others are compared with."""

NO_PRIVACY = "no privacy"
"""Name of the baseline in floats."""


@dataclass(frozen=True)
class Result:
    """How one run ended.

    Attributes:
        name: "private" or a baseline's name.
        private: Whether it has a guarantee.
        history: Every round's figures.
        bits_per_coordinate: Bits a client sends for each parameter, without header; 32 in floats.
        bytes_per_client: Bytes of one message.
        guarantee: What is proved about it; None without privacy.
    """

    name: str
    private: bool
    history: tuple[RoundMetrics, ...]
    bits_per_coordinate: float
    bytes_per_client: int
    guarantee: RoundsGuarantee | None

    @property
    def accuracy(self) -> float:
        """Accuracy on the test set after the last round."""
        return self.history[-1].accuracy or 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, the rounds left out."""
        last = self.history[-1]
        return {
            "name": self.name,
            "private": self.private,
            "rounds": len(self.history),
            "accuracy": last.accuracy,
            "loss": last.loss,
            "epsilon": None if self.guarantee is None else self.guarantee.epsilon,
            "delta": None if self.guarantee is None else self.guarantee.delta,
            "bits_per_coordinate": self.bits_per_coordinate,
            "bytes_per_client": self.bytes_per_client,
            "bytes_total": last.bytes_total,
            "seconds": sum(metrics.seconds for metrics in self.history),
        }


class Experiment:
    """Everything that follows from settings, checked before a round is charged.

    Attributes:
        settings: The settings.
        dim: d, the number of the model's parameters.
        mechanisms: The private mechanism and the baselines, by name.
    """

    def __init__(self, settings: Settings) -> None:
        """Loads the data, builds the model once to count its parameters, and plans the protocol."""
        if settings.participation not in get_args(Scheme):
            known = ", ".join(get_args(Scheme))
            raise ParameterError(f"Unknown participation {settings.participation!r}. Known are {known}.")
        self.settings = settings
        self.dataset = load(settings.dataset, clients=settings.clients)
        self.dim = sum(p.numel() for p in self._model().parameters())
        self._scheme = cast(Scheme, settings.participation)
        self._adjacency: Adjacency = "zero-out" if self._scheme == "poisson" else "replace-one"
        self.mechanisms = self._mechanisms()

    @property
    def protocol(self) -> Protocol:
        """The private run's protocol."""
        found = mechanisms.protocol_of(self.mechanisms[PRIVATE])
        assert found is not None
        return found

    def trainer(self, name: str, folder: Path | None, *, resume: bool) -> Trainer:
        """The trainer of one of the runs, which lives in a folder of its own."""
        settings = self.settings
        mechanism = self.mechanisms[name]
        private = mechanisms.is_private(mechanism)
        return Trainer(
            self._model(),
            torch.nn.functional.cross_entropy,
            self.dataset,
            mechanism,
            cohort=settings.cohort,
            rounds=settings.rounds,
            participation=self._scheme,
            epsilon=settings.epsilon if private else None,
            delta=settings.delta if private else None,
            adjacency=self._adjacency if private else None,
            optimizer=settings.optimizer,
            learning_rate=settings.lr,
            schedule=optimizers.check_schedule(settings.schedule),
            seed=settings.seed,
            dropout=settings.dropout,
            local_steps=settings.local_steps,
            local_learning_rate=settings.local_lr,
            device=settings.device,
            evaluate_every=settings.evaluate_every,
            checkpoint_every=settings.evaluate_every,
            run_dir=folder,
            resume=resume,
        )

    def result(self, name: str, trainer: Trainer) -> Result:
        """What came of a run."""
        mechanism = self.mechanisms[name]
        protocol = mechanisms.protocol_of(mechanism)
        return Result(
            name=name,
            private=mechanisms.is_private(mechanism),
            history=tuple(trainer.history),
            bits_per_coordinate=32.0 if protocol is None else protocol.bits_per_coordinate,
            bytes_per_client=mechanisms.message_bytes(mechanism, self.dim),
            guarantee=trainer.guarantee(),
        )

    def paper_bound(self, noise_clients: int) -> dict[str, Any]:
        """ε by the paper's own theorem: of the protocol itself, and with the paper's X at the same k and m.

        Args:
            noise_clients: Messages of the smallest round, whose noise counts.

        Returns:
            `epsilon` and `epsilon_at_paper_range`, each a number or None, with the `reason` where there is none.
        """
        if self._cohorts().participation.sampled:
            return {"epsilon": None, "reason": "The paper has no bound for sampled cohorts."}
        protocol = self.protocol
        found: dict[str, Any] = {"epsilon": None, "reason": None}
        try:
            found["epsilon"] = self._paper_epsilon(protocol, noise_clients)
        except ConditionError as error:
            found["reason"] = str(error)
        wide = paper_coordinate_range(
            clients=protocol.clients, dim=protocol.dim, clip_norm=protocol.clip_norm, delta=self.settings.delta
        )
        found["paper_range"] = max(wide, protocol.coordinate_range)
        try:
            widened = replace(protocol, coordinate_range=found["paper_range"], modulus=None)
            found["epsilon_at_paper_range"] = self._paper_epsilon(widened, noise_clients)
        except ConditionError:
            found["epsilon_at_paper_range"] = None
        return found

    def _paper_epsilon(self, protocol: Protocol, noise_clients: int) -> float:
        counted = self._cohorts().participation.counted_rounds(self.settings.rounds)
        rule: dict[str, Any] = {"adjacency": self._adjacency, "noise_clients": noise_clients}
        if counted == 1:
            return theorem_epsilon(protocol, self.settings.delta, **rule)
        return paper_epsilon(protocol, self.settings.delta, rounds=counted, **rule)

    def _model(self) -> torch.nn.Module:
        return models.by_name(
            self.settings.model, self.dataset.feature_dim, self.dataset.classes, seed=self.settings.seed
        )

    def _cohorts(self) -> Cohorts:
        settings = self.settings
        return Cohorts.plan(
            population=self.dataset.size,
            cohort=settings.cohort,
            rounds=settings.rounds,
            scheme=self._scheme,
            key=settings.seed,
            overflow=OVERFLOW_SHARE * settings.delta / settings.rounds,
        )

    def _mechanisms(self) -> dict[str, Mechanism]:
        settings = self.settings
        planned = self._plan()
        chosen: Mechanism = planned
        if settings.levels is not None and settings.trials is not None:
            chosen = Protocol.rotated_binomial(
                clients=planned.protocol.clients,
                dim=self.dim,
                clip_norm=settings.clip_norm,
                levels=settings.levels,
                trials=settings.trials,
                coordinate_range=settings.range,
            )
        found: dict[str, Mechanism] = {PRIVATE: chosen}
        if settings.baselines:
            found.update(mechanisms.baselines(planned))
            protocol = mechanisms.protocol_of(chosen)
            assert protocol is not None
            found["quantized"] = replace(protocol, trials=0, modulus=None)
        return found

    def _plan(self) -> Plan:
        """The planner's protocol, with room for what the trainer will hold against it."""
        settings = self.settings
        cohorts = self._cohorts()
        messages = cohorts.messages
        dropout = 0.0
        if settings.dropout > 0.0:
            fewest = float(binom.ppf(UNLUCKY / settings.rounds, messages, 1.0 - settings.dropout))
            # With sampling, the accounting rounds the number of messages down by as much as this.
            slack = messages // SAMPLED_SIZES + 1 if cohorts.participation.sampled else 1
            dropout = min(1.0 - (fewest - slack) / messages, 1.0 - 1.0 / messages)
        return plan(
            clients=messages,
            dim=self.dim,
            epsilon=settings.epsilon,
            delta=settings.delta - settings.rounds * cohorts.overflow,
            clip_norm=settings.clip_norm,
            bits=settings.bits,
            rounds=settings.rounds,
            participation=cohorts.participation,
            adjacency=self._adjacency,
            dropout=dropout,
        )


def folder_of(run: Path, name: str) -> Path:
    """Where in a run directory one of the runs keeps its files: the private one in the directory itself."""
    return run if name == PRIVATE else run / "baselines" / name.replace(" ", "-")
